"""How each kind of file is checked: one module per kind, with a function `check(data, context) -> FileCheck`.

    python    Python code, and DeepSpeed configs that are dicts in it
    notebook  the code cells of a notebook, as one Python program
    markdown  launch lines, and blocks of Python, each one a program
    launch    launch lines of shell scripts, Makefiles, workflows and READMEs
    config    YAML and JSON

PyYAML and config readers are imported when a file needs them.
"""
