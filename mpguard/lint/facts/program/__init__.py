"""What the program says: the values of expressions, the call graph, and what library names stand for.

dtypes.py            the dtypes of torch, and those that an expression may have
lattice.py           the abstract values, and alternatives under path conditions
evaluate.py          the evaluation of names, attributes and expressions
call_results.py      the results of calls
reaching.py          the bindings that may have set a name
classes.py           classes: their attributes, methods, bases and derived classes
callgraph.py         callers, callees, conditions that all callers share
all_calls.py         all calls of a function in its project
option_values.py     the values and defaults of options and fields
config_values.py     the settings that code reads from YAML and JSON files
keywords.py          the keyword arguments of a call, with those of its `**mapping`
mentions.py          names of a framework in one function
implied_versions.py  the versions of libraries that code can run with, by what it calls
api_names.py         the general APIs of torch and its training libraries: dtypes, kinds of objects
roles.py             words in names that say what something is for: what trains, evaluates, measures, saves
project_words.py     names and patterns of single projects, each with its evidence
"""
