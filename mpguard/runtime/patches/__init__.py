"""Patches: the functions of torch, accelerate, DeepSpeed, transformers and Transformer Engine that are wrapped.

`@patch` (mpguard.core.patches) stands on each wrapper, with the reason, a check and what is lost without it. A module
is named for the library that it patches and for what it does there.

    table           collects all patches of the proof, and applies them
    fit             which patches apply to the installed libraries
    checks          small programs of the libraries, which show that
    required        which policies cannot be put into force without a patch
    import_hooks    callbacks for when a module has been imported
    fp32_modules    computes modules in FP32, which FSDP shards on their own
    fp8_conversion  converts the models of an optimizer to FP8 when the optimizer is created
    compile_models  compiles the models of an optimizer when the optimizer is created
    master_weights  keeps FP32 master weights in an optimizer

Importing this package imports nothing else: the startup hook needs `import_hooks` alone.
"""
