"""What the names of the libraries stand for: dtypes, and the kind of object that a call creates.

Names are the full dotted names that imports give (`torch.cuda.amp.autocast`), whatever local name a file uses. Only the
general APIs of torch, Accelerate, DeepSpeed, Transformers, Transformer Engine, torchao, apex, peft and Lightning are
here; words of single projects are in `project_words.py`.
"""

from __future__ import annotations

from mpguard.core.lazy_pattern import lazy_pattern
from mpguard.lint.facts.program import project_words
from mpguard.lint.facts.program.dtypes import AnyDtype, OtherDtype
from mpguard.policy.dtype import Dtype

#: Dotted name -> dtype. Tensor types count as their dtype.
DTYPES: dict[str, AnyDtype] = {
    f"torch.{name}": Dtype.parse(name)
    for name in (
        *(dtype.torch_name for dtype in Dtype if dtype.bits >= 8),
        "half",
        "float",
        "double",
        "float8_e4m3",  # torch has no such name, but code uses it
    )
}
DTYPES |= {
    f"torch.{module}{name}Tensor": dtype
    for module in ("", "cuda.")
    for name, dtype in (("Half", Dtype.FP16), ("BFloat16", Dtype.BF16), ("Float", Dtype.FP32))
}
DTYPES |= {f"torch.{dtype.torch_name}": dtype for dtype in OtherDtype}
DTYPES |= {"torch.long": OtherDtype.INT64, "torch.int": OtherDtype.INT32}
#: Strings that libraries accept as a dtype (`dtype="float16"`); "half" alone is too common a word.
DTYPE_STRINGS: dict[str, AnyDtype] = {
    spelling: dtype
    for dtype in (Dtype.FP16, Dtype.BF16, Dtype.FP32)
    for spelling in (dtype.torch_name, dtype.short, f"torch.{dtype.torch_name}")
}
HALF_TENSOR_STRINGS = {"torch.HalfTensor": "", "torch.cuda.HalfTensor": "cuda"}

AUTOCASTS = frozenset({
    "torch.autocast", "torch.amp.autocast", "torch.amp.autocast_mode.autocast", "torch.autocast_mode.autocast",
    "torch.cuda.amp.autocast", "torch.cuda.amp.autocast_mode.autocast",
    "torch.cpu.amp.autocast", "torch.cpu.amp.autocast_mode.autocast",
})  # fmt: skip
SCALER_NAMES = frozenset({"GradScaler", "ShardedGradScaler"})
#: Ends of the class names of loss scalers, of DeepSpeed, apex and others.
_SCALERS = ("GradScaler", "LossScaler", *project_words.SCALERS)
CLIPS = frozenset(
    f"{module}.{name}"
    for module in ("torch.nn.utils", "torch.nn.utils.clip_grad", "apex.contrib.clip_grad")
    for name in ("clip_grad_norm_", "clip_grad_value_", "clip_grad_norm")
)
NO_GRAD = frozenset(
    {"torch.no_grad", "torch.inference_mode", "torch.autograd.no_grad", "torch.autograd.grad_mode.no_grad"}
)
#: Transformer Engine's recipes -> the row of `hardware.NEEDS` with their requirements.
FP8_RECIPES = {
    "DelayedScaling": "delayed", "Float8CurrentScaling": "tensorwise", "Float8BlockScaling": "blockwise",
    "MXFP8BlockScaling": "mxfp8", "NVFP4BlockScaling": "nvfp4",
}  # fmt: skip
#: What accelerate accepts among its `kwargs_handlers` for FP8.
FP8_HANDLERS = frozenset({"AORecipeKwargs", "TERecipeKwargs", "FP8RecipeKwargs"})
CAPITAL = lazy_pattern(r"[A-Z]")

#: Optimizers by their last name, wherever they are imported from.
OPTIMIZERS = project_words.OPTIMIZERS | {
    "SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "LBFGS", "SparseAdam", "ASGD",
    "Rprop", "ZeroRedundancyOptimizer",  # torch
    "Adafactor",  # transformers, torch
    "FusedAdam", "FusedLAMB", "FusedSGD", "FusedMixedPrecisionLamb",  # apex
    "DeepSpeedCPUAdam",
}  # fmt: skip
#: Functions of a user's project that create an optimizer, by their name.
MAKES_OPTIMIZER = lazy_pattern(r"(?:create|build|get|make|configure|init)\w*_optim(?:izer)?s?$")
MAKES_MODEL = lazy_pattern(
    r"(?:create|build|get|make|load|init|initialize)\w*_(?:model|network|net|transformer|unet|gpt|llm)$"
)
#: Wrappers whose result is still a model, by their last name.
PARALLEL = project_words.PARALLEL_WRAPPERS | {
    "DistributedDataParallel", "FullyShardedDataParallel", "FSDP", "DDP", "fully_shard",
}  # fmt: skip
#: Names of objects of frameworks whose `backward` takes the loss.
FRAMEWORK_RECEIVERS = frozenset({"optimizer", "engine", "accelerator", "fabric"})
#: Kinds of objects whose methods run a backward pass.
RUNS_BACKWARD = frozenset({"accelerator", "engine", "fabric"})
#: Names of adapters (of peft and similar libraries), which train their own weights.
ADAPTER_NAMES = lazy_pattern(r"(?i)lora|peft|adapter")
#: peft's function that adds adapters to a model and returns the model.
ADDS_ADAPTERS = "get_peft_model"
#: Checkpoints that were pretrained in BF16, and whose activations overflow in FP16: T5 v1.1 and what is derived from
#: it, the larger ones of T5 (transformers issues 9295, 10830, 11461, 23918), and Gemma 3 (36822, 39972). Names in the
#: Hub.
OVERFLOWS_FP16 = lazy_pattern(
    r"(?:google/|google-t5/)?(?:t5-(?:large|3b|11b|v1_1-\w+)|u?mt5-\w+|byt5-\w+|flan-t5-\w+|(?:flan-)?ul2)"
    r"|bigscience/(?:T0(?:_3B|pp|p)?|mt0-[\w-]+)|google/gemma-3-[\w-]+"
)
#: The settings of TRL's trainers whose base is its `_BaseConfig` (trl 1.16), which derives from `TrainingArguments` and
#: sets `bf16` unless `fp16` is given.
TRL_CONFIGS = frozenset({
    "A2POConfig", "AsyncDistillationConfig", "AsyncGRPOConfig", "CPOConfig", "DPOConfig", "DistillationConfig",
    "GKDConfig", "GMPOConfig", "GOLDConfig", "GRPOConfig", "IWOPDConfig", "KTOConfig", "ORPOConfig",
    "OnlineDPOConfig", "RLOOConfig", "RewardConfig", "SDFTConfig", "SDPOConfig", "SFTConfig",
    "ServerDistillationConfig", "TPOConfig",
})  # fmt: skip
#: Optimizers of a Trainer of transformers (`optim=`) that update the weights directly.
TRAINER_PLAIN_OPTIMIZERS = lazy_pattern(
    r"(?:paged_)?(?:adamw|lion|sgd|rmsprop|adagrad)(?:_torch|_hf|_fused|_bnb|_8bit|_32bit)*$"
)
WRAPPERS = PARALLEL | project_words.MODEL_WRAPPERS | {"DataParallel", "convert_sync_batchnorm", "weight_norm"}
#: Modules of libraries whose classes are models or layers.
MODEL_ROOTS = ("torch.nn.", "torchvision.models.", "transformer_engine.pytorch.", *project_words.MODEL_PACKAGES)
MODEL_FACTORIES = project_words.MODEL_FACTORIES | {"torch.hub.load"}
LOADERS = frozenset({"from_pretrained", "from_config", "from_single_file", "load_from_checkpoint", "_from_config"})
#: Model classes of transformers that are built from a config.
TASK_MODELS = lazy_pattern(
    r"(?:For(?:CausalLM|ConditionalGeneration|MaskedLM|PreTraining|QuestionAnswering|\w+Classification)|HeadsModel|HeadModel)$"
)
#: Classes with `from_pretrained` that have no weights.
WEIGHTLESS = lazy_pattern(r"Tokenizer|Processor|Extractor|Scheduler|Config|Collator|Dataset")
#: Libraries whose API the facts define by name; they are never resolved in the linted tree, even if it has a folder of
#: the same name.
LIBRARIES = frozenset({
    "torch", "torchvision", "torchao", "transformer_engine", "accelerate", "deepspeed", "transformers", "peft",
    "apex", "numpy", "jax", "lightning", "pytorch_lightning", "bitsandbytes", "timm", "sklearn", "contextlib",
    "functools", "copy",
})  # fmt: skip
TENSOR_MAKERS = frozenset({
    "tensor", "randn", "rand", "zeros", "ones", "full", "empty", "arange", "linspace", "randint", "from_numpy",
    "as_tensor", "stack",
    "cat", "zeros_like", "ones_like", "randn_like", "rand_like", "full_like", "empty_like", "eye",
})  # fmt: skip
#: The first torch in which `is_bf16_supported()` is True for a GPU that only emulates BF16.
COUNTS_EMULATION = (2, 3)
#: Methods that put a value, their last argument, into a container.
ADDS_TO_CONTAINER = frozenset({"append", "extend", "add", "insert", "setdefault", "appendleft"})
#: Methods that end the effect of a cast to FP16.
UPCASTS = frozenset({"float", "double"})
#: Methods that return their own object.
SAME = frozenset({
    "to", "cuda", "cpu", "half", "float", "double", "bfloat16", "type", "train", "eval", "requires_grad_",
    "share_memory", "apply",
    "to_empty", "contiguous", "xpu", "npu", "hpu",
})  # fmt: skip

#: FSDP's wrappers and policies.
_FSDP = {
    "FullyShardedDataParallel": "fsdp1", "fully_shard": "fsdp2", "MixedPrecision": "fsdp1_policy",
    "MixedPrecisionPolicy": "fsdp2_policy",
}  # fmt: skip


def canonical(path: str) -> str:
    """Return one name for an object that a library exports under several."""
    for old, new in _MOVED:
        if path.startswith(old):
            return new + path[len(old) :]
    return path


_MOVED = (
    ("torch.cuda.amp.autocast_mode.", "torch.cuda.amp."),
    ("torch.cuda.amp.grad_scaler.", "torch.cuda.amp."),
    ("torch.cpu.amp.autocast_mode.", "torch.cpu.amp."),
    ("torch.cpu.amp.grad_scaler.", "torch.cpu.amp."),
    ("torch.amp.autocast_mode.", "torch.amp."),
    ("torch.amp.grad_scaler.", "torch.amp."),
    ("torchao.float8.float8_linear_utils.", "torchao.float8."),
    ("torchao.float8.config.", "torchao.float8."),
    ("accelerate.utils.ao.", "accelerate.utils."),
    ("accelerate.utils.transformer_engine.", "accelerate.utils."),
    ("accelerate.accelerator.", "accelerate."),
    ("accelerate.utils.dataclasses.", "accelerate.utils."),
)


#: Functions whose result has items, and no attributes for them.
PLAIN_DICTS = frozenset({"yaml.safe_load", "yaml.full_load", "json.load", "json.loads", "tomllib.load"})


def kind_of(path: str) -> str:
    """Return the kind of object that a call of this name creates; "" if unknown.

    Kinds are `optimizer`, `scaler`, `autocast`, `model` ...
    """
    last = path.rsplit(".", 1)[-1]
    root = path.split(".", 1)[0]
    if path in AUTOCASTS:
        return "autocast"
    if last in SCALER_NAMES or last.endswith(_SCALERS):
        return "scaler"
    if path in NO_GRAD:
        return "no_grad"
    if path in PLAIN_DICTS:
        return "plain_dict"
    if path in ("contextlib.nullcontext", "contextlib.suppress", "contextlib.ExitStack"):
        return "nullcontext"
    if root == "transformer_engine" and last in ("fp8_autocast", "autocast"):
        return "fp8_autocast"
    if root == "transformer_engine" and last in FP8_RECIPES:
        return "fp8_recipe"
    if root == "torchao" and path.endswith((".Float8LinearConfig", ".Float8LinearConfig.from_recipe_name")):
        return "float8_config"
    if root == "torchao" and last == "CastConfig":
        return "float8_cast_config"
    if root == "accelerate" and last in FP8_HANDLERS:
        return "fp8_handler"
    if path == "accelerate.Accelerator" or last == "Accelerator":
        return "accelerator"
    if path == "deepspeed.initialize":
        return "engine"
    if path.startswith("torch.distributed.") and last in _FSDP:
        return _FSDP[last]
    if "." in path and last in OPTIMIZERS:
        return "optimizer"
    if path.startswith("torch.optim.") and ".lr_scheduler." not in path and CAPITAL.match(last):
        return "optimizer"
    if ".lr_scheduler." in path or "schedule" in last.lower():
        return "scheduler"
    if root == "apex" and last == "initialize":
        return "apex"
    if "." in path and project_words.TRAINERS.match(last):
        return "trainer"
    if last in LOADERS:
        owner = path.rsplit(".", 2)[-2] if path.count(".") > 1 else ""
        return "weightless" if WEIGHTLESS.search(owner) else "pipeline" if "Pipeline" in owner else "model"
    if path.startswith(MODEL_ROOTS) and CAPITAL.match(last) and ".functional." not in path and last != "Parameter":
        return "criterion" if last.endswith("Loss") else "model"
    if path in MODEL_FACTORIES or path.startswith("torchvision.models."):
        return "model"
    if root == "transformers" and TASK_MODELS.search(last):
        return "model"
    if MAKES_OPTIMIZER.match(last):
        return "optimizer"
    if MAKES_MODEL.match(last):
        return "model"
    if root == "torch" and last in TENSOR_MAKERS:
        return "tensor"
    return ""
