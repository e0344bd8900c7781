"""What happens when the program runs: events, data flow, regions, dtypes of tensors.

events/                  the operations that rules are about, one finder per kind
flow.py                  the interface to forward and backward data flow, with limits on the work per file
forward_flow.py          the sinks that a value reaches: a backward pass, an optimizer, a trainer, a file
backward_flow.py         the records that an expression is computed from
trace.py                 the operations on scaled gradients in order of control flow, with helpers expanded
trace_steps.py           the steps of a trace, and what is before, between or around them
regions.py               contexts around code: autocast, `no_grad`, FP8 regions
autocast_state.py        the autocast that is active at a place, through callers
autocast_ops.py          the dtype that autocast runs each operation in
accelerate_precision.py  the mixed precision that Accelerate applies
lightning.py             Lightning's `Trainer` and `Fabric`
frozen_params.py         the models that are never trained
measures.py              what only measures: timed steps, gradients that are inspected, Trainers that evaluate
compiled.py              does the code compile a model
precision.py             the dtype of tensors: by casts, constructors, type promotion and autocast
scalars.py               Python numbers that are combined with tensors
layer_dtypes.py          the dtype of parameters that a module creates
options.py               options and constants by which a script selects its precision
"""
