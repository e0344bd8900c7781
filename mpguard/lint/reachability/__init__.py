"""Code that cannot run: nothing uses it, no call takes its branch, or an error comes first.

unused.py      functions, classes and methods that nothing in the project uses
untaken.py     branches that no call of the project takes
raising.py     code behind a statement that raises whenever it runs
namespaces.py  the options of an argument parser, where all of the parser is in the code
"""
