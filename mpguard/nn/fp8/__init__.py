"""FP8 layers in a model of your own: `mpguard.convert` puts them in, `mpguard.revert` takes them out.

    filters       which Linear layers become FP8, and why the others stay
    convert       the conversion itself, and back
    report        what was converted, and what was not
    padding       rows that are not a multiple of what FP8 needs
    amax_history  the amax history of delayed scaling, in checkpoints
    weights       parameters that are kept in FP8, and their master copies
    torchao       torchao's layer
    te            Transformer Engine's layer

A layer is converted in place: the module object, its `Parameter`s, names, hooks, device and training flag stay, so
optimizers that were built before keep working, tied weights stay tied, and the `state_dict` is that of the plain model.

Importing this package imports no torch.
"""
