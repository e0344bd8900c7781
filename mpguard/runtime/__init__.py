"""The policy at run time: injection and proof.

    plan        what a run was asked to be, and how workers are told
    launcher    the launcher half: resolve once, refuse what can be refused, start the workers
    checks      what can be known before training
    hooked      what the hook's .pth line imports
    activation  a plan put in force: patches, hooks, the guard
    imports     patches are made as modules come in
    patches     the few things that are wrapped, and why: a table for each library
    converting  what becomes of the models of an optimizer
    compiling   the same: compiled in place, where accelerate does not
    checkpoints the history of delayed scaling beside checkpoints
    products    the matrix products behind a backward pass, and their dtypes
    recorder    what is only visible while it happens
    fp8         FP8 layers as they are
    observe     what a process really does, as plain data
    proof       that data against the policy: rows, table, JSON
    verdict     one verdict over all ranks
    guard       when to prove, and what follows
    saying      the lines that a run prints
    ending      the status that a process ends with

Importing this package imports nothing else: the hook does it at interpreter start.
"""
