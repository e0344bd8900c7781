"""Watch a run: which steps were skipped, where NaN comes from, what underflows, whether the loss diverges.

It stands above `mpguard.runtime`: it has patches of its own for what it observes, and changes nothing. Modules:

    api          `mpguard.watch`, and how a launched run starts the watch
    session      `Watch`: the steps of this process, from the hooks to the numbers
    rounds       the numbers of one step
    analysis     lines and events of the numbers of each step
    patches      the functions of torch, DeepSpeed and accelerate that show losses, skipped steps and loss scales
    readout      copies of numbers from the device that never wait for it
    gradients    norms of gradients, and the shares that underflow
    detect       decides from the numbers of past steps what is an event; no torch
    replay       the last batch, and its replay that names the first module with NaN or Inf
    drift        compares ranks, through the store of the process group
    fp8          amax saturation and scales of Transformer Engine's delayed scaling
    fp8_shares   samples of what FP8 layers round, with `full`; fp8_report: their lines and events
    suggest      what to do about an event
    output       the JSONL file, the lines on the terminal, accelerate's trackers

The package is not called `watch`, because a package of that name would replace the function `mpguard.watch`.
"""
