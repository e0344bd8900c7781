"""Proof: observe what a process does, and compare it with the policy.

    recorder   collects what is visible only while it happens: backward passes, collectives, loss scaling
    collectives  every collective, where torch dispatches it
    gradients  how gradients are accumulated, and which of the script's collectives have them
    handoffs, master_values  values of gradients, weights and states between passes and steps, in `samples`
    witness    identities that hold only where values were rounded; `recomputed` steps; `rounding`: suspicions
    account    which matmuls ran between two applied steps: torch's profiler, windows, modules
    trace      the matmuls among the profiler's events, and the nodes of autograd that they belong to
    products   which operators multiply, their dtypes and their floating-point operations
    graphs     what autograd's and dynamo's graphs tell: leaves, and the modules of compiled code
    fp8        the FP8 layers of a model, and the recipe in force
    reductions  which gradients are reduced, over which dimension, and which are not
    optimizer_state, tf32  what an optimizer keeps; how torch multiplies FP32
    observe    `observe`: all facts about a process after an optimizer step, as plain data (`Observed`)
    checks     those facts against the plan, as rows: one function per row, with its allowance and advice
    verdict    `Row`, `Failure` and `Refusal`: the types of what is found
    report     the `Proof`, as a table and as JSON
    consensus  makes all ranks agree on the failures

Importing this package imports nothing else.
"""
