"""Names and patterns of single projects that the facts need to know, each with its meaning and its evidence.

`api_names` defines the general APIs of torch, Accelerate, DeepSpeed, Transformers, Transformer Engine, torchao and
apex. Names that only single other projects use are here, and only here. `needed_by` lists the
evidence of a row:

    "peft"                  a package of the evidence (benchmarks/evidence_packages.txt, evidence_unseen.json)
    "MPG101"                an example of a rule, which fails without the row
    "openai/guided-diffusion"  a repository

A test checks that each row names evidence of one of these kinds. Remove a row together with its last evidence.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple


class ProjectWord(NamedTuple):
    """A name, or a regular expression; what it means; the packages, rules and repositories that need it."""

    word: str
    meaning: str
    needed_by: tuple[str, ...]


def _names(rows: Iterable[ProjectWord]) -> frozenset[str]:
    return frozenset(row.word for row in rows)


def _pattern(rows: Iterable[ProjectWord], flags: int = 0, start: str = "", end: str = "") -> re.Pattern[str]:
    return re.compile(f"{start}(?:{'|'.join(row.word for row in rows)}){end}", flags)


_MASTER_WEIGHTS = (
    ProjectWord(
        r"fp16_?(?:\w*optim|module)",
        "an optimizer or module with FP32 masters: FP16_Optimizer, FP16Optimizer, FP16_Module",
        ("MPG101", "deepspeed", "fairseq", "parlai"),
    ),
    ProjectWord(
        r"mixed_?precision_?(?:\w*optim|trainer|plugin)",
        "MixedPrecisionOptimizer, MixedPrecisionTrainer, MixedPrecisionPlugin",
        ("megatron-core", "colossalai", "openai/guided-diffusion", "lightning"),
    ),
    ProjectWord("fusedmixedprecisionlamb", "apex's LAMB with FP32 masters", ("NVIDIA/DeepLearningExamples",)),
    ProjectWord("ampoptim", "AMPOptimizer, AmpOptimWrapper", ("fairseq", "mmengine", "mmdet")),
    ProjectWord("ampmodel", "TorchAMPModel, NaiveAMPModel", ("colossalai",)),
    ProjectWord(
        "master_?(?:param|weight|cop)",
        "master_params, master_weights, master_copy",
        ("colossalai", "deepspeed", "megatron-core", "openai/guided-diffusion"),
    ),
    ProjectWord("float16_?optim", "Float16OptimizerWithFloat16Params", ("megatron-core",)),
    ProjectWord("bf16_?optim", "BF16_Optimizer", ("deepspeed",)),
)
#: What keeps FP32 master weights and scales the loss by itself: searched in names and base classes.
MASTER_WEIGHTS = _pattern(_MASTER_WEIGHTS, re.IGNORECASE)

_FP16_MODULES = (
    ProjectWord(
        r"\bfp16(?:_\w+)?\.",
        "a module for FP16: apex.fp16_utils, fairseq.optim.fp16_optimizer, parlai.utils.fp16",
        ("pt-trainer", "fairseq", "parlai"),
    ),
)
#: A module for FP16 training in a dotted path that ends with a dot.
FP16_MODULES = _pattern(_FP16_MODULES)

_ADAPTERS = (
    ProjectWord(r"get_peft_model(?!_state)", "adds adapters to a model", ("peft", "MPG101", "MPG103")),
    ProjectWord("PeftModel", "a model with adapters", ("peft", "MPG103")),
    ProjectWord("PeftMixedModel", "a model with adapters of several types", ("peft",)),
    ProjectWord(
        r"mark_only_\w*trainable",
        "mark_only_lora_as_trainable: freezes all but the adapters",
        ("MPG515", "litgpt"),
    ),
    ProjectWord(
        r"(?:add|inject|train|init|apply|inject_trainable)_(?:adapters?|q?lora\w*)",
        "add_adapter, inject_adapter_in_model, train_adapter, init_adapters, inject_trainable_lora, add_lora",
        ("MPG103", "peft", "adapters", "cloneofsimo/lora", "cccntu/minLoRA"),
    ),
    ProjectWord(
        r"(?:swap|convert|replace|wrap)(?:_\w+)?_q?lora\w*",
        "swap_for_qlora, convert_linear_layer_to_lora: replaces layers by ones with adapters",
        ("MPG511", "transformer-nuggets", "SwissArmyTransformer", "NiuTrans/Vision-LLM-Alignment"),
    ),
    ProjectWord("set_attn_processor", "diffusers: trains attention processors, which it adds to a model", ("MPG107",)),
    ProjectWord(
        "prepare_model_for_(?:kbit|int8)_training",
        "freezes a quantized model for adapters",
        ("peft", "trl"),
    ),
)
#: Functions and methods that add adapters to a model and freeze its own weights: searched from the start of the name.
ADAPTERS = _pattern(_ADAPTERS, start="^")

_ADAPTER_LOADERS = (
    ProjectWord(
        r"(?:Auto)?Peft\w*\.from_pretrained",
        "PeftModel.from_pretrained(base, ...), AutoPeftModelForCausalLM.from_pretrained(...)",
        ("peft", "MPG103", "MPG107"),
    ),
)
#: Calls that load a model with adapters: searched in the dotted name of the callee.
ADAPTER_LOADERS = _pattern(_ADAPTER_LOADERS, start=r"(?:^|\.)", end="$")

_PARTLY_FROZEN = (
    ProjectWord("lora", "`if 'lora' not in name:`", ("MPG101", "litgpt")),
    ProjectWord("adapter", "`if 'adapter' in name:`", ("adapters", "peft")),
    ProjectWord("frozen", "`if name in frozen:`", ("deepspeed", "mmdet")),
    ProjectWord("freeze", "`if self.freeze:`", ("speechbrain", "fairseq")),
    ProjectWord("trainable", "`if not trainable:`", ("peft", "torchtune")),
)
#: Flags under which a loop over a model's parts casts those that are not trained.
PARTLY_FROZEN = _pattern(_PARTLY_FROZEN, re.IGNORECASE)

_SHARDING = (
    ProjectWord("deepspeed", "DeepSpeed's engine, optimizers and plugins", ("deepspeed", "MPG107")),
    ProjectWord("fsdp", "torch's FSDP and the plugins and helpers named after it", ("torchtitan", "fairscale")),
    ProjectWord(
        r"megatron(?!\.energon)", "Megatron-Core, Megatron-LM and their forks; energon loads data", ("megatron-core",)
    ),
    ProjectWord("colossal", "Colossal-AI's booster and plugins", ("colossalai",)),
    ProjectWord("zero_?(?:stage|optimizer)", "ZeRO: zero_stage, ZeroOptimizer", ("deepspeed", "colossalai")),
)
#: Frameworks that keep FP32 masters of low-precision weights, or upcast them.
SHARDING = _pattern(_SHARDING, re.IGNORECASE)

_FRAMEWORK_PACKAGES = (
    ProjectWord("lightning", "Trainer, LightningModule", ("lightning", "MPG515")),
    ProjectWord("pytorch_lightning", "Trainer, LightningModule", ("lightning-bolts", "bigdl-nano")),
    ProjectWord("lightning_fabric", "Fabric", ("lightning-fabric",)),
    ProjectWord("composer", "Trainer, ComposerModel", ("mosaicml", "MPG515")),
    ProjectWord("fastai", "Learner, Callback", ("fastai",)),
    ProjectWord("ignite", "Engine", ("pytorch-ignite", "monai")),
    ProjectWord("mmcv", "Runner, BaseRunner, OptimizerHook", ("pai-easycv",)),
    ProjectWord("mmengine", "Runner, BaseModel, AmpOptimWrapper", ("mmengine", "mmdet")),
    ProjectWord("catalyst", "Runner", ("catalyst",)),
    ProjectWord("speechbrain", "Brain", ("speechbrain",)),
    ProjectWord("colossalai", "Booster, Engine", ("colossalai",)),
    ProjectWord("megatron", "MegatronModule, MegatronOptimizer", ("megatron-core",)),
    ProjectWord("fairscale", "OSS, ShardedDataParallel", ("fairscale", "allennlp")),
    ProjectWord("ray", "Trainable, TrainingOperator", ("bigdl-nano",)),
    ProjectWord("determined", "PyTorchTrial, whose context runs backward and step", ("determined",)),
    ProjectWord("flair", "Model, ModelTrainer", ("flair",)),
    ProjectWord("allennlp", "Model, GradientDescentTrainer", ("allennlp",)),
    ProjectWord("monai", "Trainer, SupervisedTrainer", ("monai",)),
)
#: Packages whose base classes run the training loop, or the backward pass and the optimizer step.
FRAMEWORK_PACKAGES = _names(_FRAMEWORK_PACKAGES)

_FRAMEWORK_CLASSES = (
    ProjectWord("LightningModule", "Lightning's base class of a model", ("lightning", "MPG515")),
    ProjectWord("LightningDataModule", "Lightning's base class of data", ("lightning", "lightning-bolts")),
)
#: Base classes of such frameworks, wherever they are imported from.
FRAMEWORK_CLASSES = _names(_FRAMEWORK_CLASSES)

_TRAINERS = (
    ProjectWord(r"\w*Trainer$", "Trainer of transformers, Lightning, trl and others", ("lightning", "trl", "MPG103")),
    ProjectWord("Fabric$", "Lightning's Fabric", ("lightning-fabric", "litgpt")),
    ProjectWord("LightningLite$", "Lightning's Fabric before 1.9", ("bigdl-nano",)),
    ProjectWord("Learner$", "fastai's Learner", ("fastai", "torchfit")),
    ProjectWord("Runner$", "the runner of mmengine and catalyst", ("mmengine", "catalyst")),
    ProjectWord("IterBasedRunner$", "mmcv's runner", ("mmengine",)),
    ProjectWord("EpochBasedRunner$", "mmcv's runner", ("pai-easycv",)),
)
#: Classes that run the training loop, or the backward pass and the optimizer step: matched with the last name.
TRAINERS = _pattern(_TRAINERS)

_TRAINER_PACKAGES = (
    ProjectWord("transformers", "Trainer", ("trl", "MPG103")),
    ProjectWord("trl", "SFTTrainer, DPOTrainer and others derived from Trainer", ("trl", "MPG103")),
    ProjectWord("sentence_transformers", "SentenceTransformerTrainer", ("sentence-transformers",)),
    ProjectWord("setfit", "Trainer", ("setfit",)),
)
#: Packages whose Trainers build their own optimizer.
TRAINER_PACKAGES = _names(_TRAINER_PACKAGES)

_ARGUMENTS_PACKAGES = (
    ProjectWord("transformers", "TrainingArguments", ("optimum-habana", "MPG506")),
    ProjectWord("trl", "RewardTrainingArguments and others", ("trl", "MPG506")),
    ProjectWord("sentence_transformers", "SentenceTransformerTrainingArguments", ("sentence-transformers",)),
    ProjectWord("optimum", "GaudiTrainingArguments, ORTTrainingArguments", ("optimum-habana",)),
    ProjectWord("adapters", "TrainingArguments, for AdapterTrainer", ("adapters",)),
)
#: Packages whose `...TrainingArguments` are those of transformers.
ARGUMENTS_PACKAGES = _names(_ARGUMENTS_PACKAGES)

_SCALERS = (
    ProjectWord("NativeScaler", "timm's GradScaler, called as `loss_scaler(loss, optimizer)`", ("timm", "MPG201")),
)
#: Ends of the class names of loss scalers other than torch's.
SCALERS = tuple(row.word for row in _SCALERS)

_OPTIMIZERS = (
    ProjectWord("AdamW8bit", "bitsandbytes and torchao", ("litgpt", "MPG107")),
    ProjectWord("Adam8bit", "bitsandbytes and torchao", ("lightning", "peft")),
    ProjectWord("PagedAdamW8bit", "bitsandbytes", ("peft",)),
    ProjectWord("PagedAdamW", "bitsandbytes", ("litgpt",)),
    ProjectWord("Lion", "bitsandbytes, lion_pytorch, timm", ("timm", "deepspeed")),
    ProjectWord("LAMB", "bitsandbytes", ("timm", "fairseq")),
    ProjectWord("Lamb", "timm", ("timm", "parlai")),
    ProjectWord("LARS", "bitsandbytes, Lightning Bolts", ("lightning-bolts", "pai-easycv")),
    ProjectWord("Muon", "torch 2.9; before that, single projects", ("timm", "torchtitan")),
    ProjectWord("AdaBelief", "adabelief_pytorch", ("timm",)),
    ProjectWord("Ranger", "ranger, pytorch_optimizer", ("pai-easycv",)),
)
#: The last names of optimizers outside torch, transformers, apex and DeepSpeed.
OPTIMIZERS = _names(_OPTIMIZERS)

_MODEL_PACKAGES = (
    ProjectWord("segmentation_models_pytorch.", "Unet, FPN and other models", ("segmentation-models-pytorch",)),
)
#: Prefixes of the full names of model classes.
MODEL_PACKAGES = tuple(row.word for row in _MODEL_PACKAGES)

_MODEL_FACTORIES = (
    ProjectWord("timm.create_model", "creates a model by name", ("segmentation-models-pytorch", "fastai")),
    ProjectWord("timm.models.create_model", "the same, imported from `timm.models`", ("timm",)),
    ProjectWord("open_clip.create_model", "creates a CLIP model by name", ("open_clip_torch",)),
)
#: Full names of functions that create a model.
MODEL_FACTORIES = _names(_MODEL_FACTORIES)

_PARALLEL_WRAPPERS = (ProjectWord("ShardedDataParallel", "fairscale's sharded DDP", ("fairscale", "catalyst")),)
#: Wrappers for data parallelism, by their last name.
PARALLEL_WRAPPERS = _names(_PARALLEL_WRAPPERS)

_MODEL_WRAPPERS = (
    ProjectWord("get_peft_model", "adds adapters, and returns the model", ("peft", "MPG101")),
    ProjectWord("prepare_model_for_kbit_training", "freezes a quantized model, and returns it", ("peft", "trl")),
)
#: Functions that return the model that they take, by their last name.
MODEL_WRAPPERS = _names(_MODEL_WRAPPERS)

_MODEL_UNWRAPPERS = (ProjectWord("de_parallel", "returns the model inside a DDP wrapper", ("yolov5",)),)
#: Functions whose result is the wrapped model, so that its state is that of a model.
MODEL_UNWRAPPERS = _names(_MODEL_UNWRAPPERS)

_COMPILING_FUNCTIONS = (ProjectWord("parallelize", "parallelize_llama(model) compiles the model too", ("torchtitan",)),)
#: Words in the names of functions that may compile a model.
COMPILING_FUNCTIONS = tuple(row.word for row in _COMPILING_FUNCTIONS)

_LOGGERS = (ProjectWord("wandb.", "logs values", ("fastai", "yolov5", "trl")),)
#: Prefixes of the full names of functions that only read a value.
LOGGERS = tuple(row.word for row in _LOGGERS)
