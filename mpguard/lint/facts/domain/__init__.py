"""What training code does, in terms of mixed precision.

regions.py             contexts around code: autocast, `no_grad`, FP8 regions
autocast_state.py      the autocast that is active at a place, through callers
autocast_ops.py        the dtype that autocast runs each operation in
training_use.py        the values and weights that are trained, and by what
wrapped_loads.py       models that are loaded into an attribute of a module
frozen_params.py       the models that are never trained
master_weights.py      FP32 master weights and loss scaling by other means than torch.amp
unscaled_steps.py      optimizer steps that apply FP16 gradients without loss scaling
scaler_dtype.py        the dtype of the losses that a GradScaler scales
wrappers.py            objects wrapped by Accelerate, DeepSpeed or FSDP
config_dicts.py        DeepSpeed configs that are dicts in Python code
checkpoints.py         the states that are saved and restored
compiled_functions.py  the functions that run inside `torch.compile`
fp8.py                 recipes, configs and layers of FP8
implied_versions.py    the versions of libraries that code can run with, by what it calls
backends.py            the switches of torch's backends
unused.py              code that nothing in its project uses
project_api.py         the interface to the rest of the linted tree
"""
