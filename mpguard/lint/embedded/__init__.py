"""Python code inside other files: the cells of notebooks, the fenced blocks of Markdown."""
