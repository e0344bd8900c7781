"""What training code does, in terms of mixed precision.

training_use.py        the values and weights that are trained
casts.py               what a cast changes: a model or a tensor, all of it or a part
training.py            what is known of one of them
optimizers.py          what trains: optimizers, the parameters that they take, Trainers
wrapped_loads.py       models that are loaded into an attribute of a module, and the objects of a module
master_weights.py      FP32 master weights and loss scaling by other means than torch.amp
adapters.py            adapters of peft in the low-precision dtype of their model
unscaled_steps.py      optimizer steps that apply FP16 gradients without loss scaling
scaler_dtype.py        the dtype of the losses that a GradScaler scales
wrappers.py            objects wrapped by Accelerate, DeepSpeed or FSDP
config_dicts.py        DeepSpeed configs that are dicts in Python code
checkpoints.py         the states that are saved and restored
compiled_functions.py  the functions that run inside `torch.compile`
fp8.py                 recipes, configs and layers of FP8
backends.py            the switches of torch's backends
"""
