import modules.shared as shared
from modules.models import load_model
from modules.training import do_train


def main():
    shared.model_name = shared.args.model
    shared.model, shared.tokenizer = load_model(shared.model_name)
    do_train()


if __name__ == "__main__":
    main()
