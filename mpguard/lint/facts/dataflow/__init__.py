"""The flow of values and of control between the functions of a file.

callgraph.py      classes and their base classes, callers, callees, conditions that all callers share
flow.py           the interface to forward and backward data flow, with limits on the work per file
forward_flow.py   the sinks that a value reaches: a backward pass, an optimizer, a trainer, a file
backward_flow.py  the records that an expression is computed from
trace.py          the operations on scaled gradients in order of control flow, with helpers expanded
"""
