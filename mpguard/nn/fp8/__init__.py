"""FP8 layers in your own model: `mpguard.convert` makes them, `mpguard.revert` removes them.

    filters       which Linear layers become FP8, with which recipe, and why the others do not
    module_patterns
                  what is wrong with the patterns of `fp8_modules` for a model
    convert       the conversion and its reversal
    report        what was converted, and what was not
    padding       for rows whose number is not the multiple that FP8 requires
    amax_history  the amax history of delayed scaling, in checkpoints
    weights       parameters that are stored in FP8, and their master copies
    torchao       torchao's layer; torchao_conv1d, torchao_mxfp8, torchao_blockwise: its others
    te            Transformer Engine's layer

A layer is converted in place: the module object, its `Parameter`s, names, hooks, device and training flag do not
change, so existing optimizers keep working, tied weights stay tied, and the `state_dict` is that of the plain model.

Importing this package does not import torch.
"""
