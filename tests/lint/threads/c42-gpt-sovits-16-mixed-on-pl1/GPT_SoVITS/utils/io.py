import yaml


def load_yaml_config(path):
    with open(path) as f:
        return yaml.full_load(f)
