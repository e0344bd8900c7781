"""The values of expressions: an abstract evaluation, and what library names stand for.

dtypes.py         the dtypes of torch, and those that an expression may have
lattice.py        the abstract values, and alternatives under path conditions
evaluate.py       the evaluation of names, attributes and calls
precision.py      the dtype of tensors: by casts, constructors, type promotion and autocast
scalars.py        Python numbers that are combined with tensors
keywords.py       the keyword arguments of a call, with those of its `**mapping`
options.py        options and constants by which a script selects its precision
api_names.py      the general APIs of torch and its training libraries: dtypes, kinds of objects
project_words.py  names and patterns of single projects, each with its evidence
"""
