"""The index of a file: what is written where, in order of evaluation, without name resolution.

index.py           the single pass over LibCST's tree that creates all records
records.py         the records: scopes, bindings, uses, calls, `with` items, returns
nodes.py           helpers for LibCST nodes: dotted names, literals, code
path_condition.py  conditions over flags, their conjunction, and its satisfiability
conditions.py      test expressions as conditions over flags
constant_flags.py  flags that a file sets once, to a literal, and the paths that they exclude
imports.py         imports and their uses; fallbacks for an older torch
partial_parse.py   the statements of a large file that need to be parsed
dtype_triggers.py  triggers for rules that need `facts.precision`
"""
