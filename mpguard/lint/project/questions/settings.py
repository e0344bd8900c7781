"""Questions about what the scripts, configs and code of a project ask for: options, DeepSpeed, scalers, compilation."""

# ruff: noqa: PTH119

from __future__ import annotations

import os
import re

from mpguard.core.lazy_pattern import lazy_pattern
from mpguard.lint.project.questions.asked import Asked, content, question, question_of_project, refers
from mpguard.lint.source.files import MARKDOWN, NOTEBOOK, PYTHON
from mpguard.lint.source.strip_comments import stripped
from mpguard.lint.source.test_paths import is_test

#: Code, commands or requirements of what reads a DeepSpeed config, or may read one.
_READS_DEEPSPEED = lazy_pattern(
    rb"deepspeed\.init|\binitialize\(|DeepSpeed(?:Plugin|Strategy|Engine)|HfArgumentParser|TrainingArguments"
    rb"|Trainer\(|(?i:accelerat|lightning)"
)
_DISTRIBUTED = lazy_pattern(rb"^distributed_type[ \t]*:[ \t]*[\"']?(\w+)", re.M)
#: Code or commands that read a DeepSpeed config with `json`.
_READS_AS_JSON = lazy_pattern(
    rb"HfArgumentParser|TrainingArguments|Trainer\(|[Aa]ccelerator\(|accelerate launch|[Ll]ightning"
    rb"|json\.loads?\([^\n]*(?i:deepspeed|ds_?conf|zero)"
)
#: A command that gives a config to DeepSpeed's own reader.
_GIVES_DEEPSPEED = lazy_pattern(rb"--deepspeed_config(?![\w-])")
#: `deepy.py` is the launcher of GPT-NeoX, and `NeoXArgs` reads its configs, of which DeepSpeed gets a part.
_NAMES_DEEPSPEED = lazy_pattern(
    rb"(?i)deepspeed|HfArgumentParser|TrainingArguments|accelerat|lightning|neox_?arg|deepy\.py"
)
#: `update()` of anything but a progress bar or an average.
_UPDATE = lazy_pattern(
    rb"(?i)(?<![\w.])(?![\w.]*(?:bar|progress|tqdm|ema)\w*\s*\.\s*update\b)(?P<object>[\w.]*[\w\])])"
    rb"\s*\.\s*update\(\s*(?:\)|new_scale)"
)
_IS_SCALER = lazy_pattern(rb"(?i)^class[ \t]+\w+\([^)]*scaler", re.M)
_STEPS_SCALER = lazy_pattern(rb"(?i)scaler\w*\.step\(")
_SCALER, _OWN_SCALER = lazy_pattern(rb"(?i)scaler"), lazy_pattern(rb"(?:Grad|Loss)Scaler\(")
#: What may compile a model: code, options of launchers and of Trainers, and texts that name them.
_COMPILE = lazy_pattern(rb"(?<!\bre)(?<!\bregex)\.compile\b|\bimport compile\b|(?i:torch_?compile|dynamo|inductor)")
#: A line of a YAML or TOML that asks for low precision: indentation, key, value.
_PRECISION_KEY = lazy_pattern(
    rb"^([ \t]*)[\"']?((?:use_|enable_)?(?:mixed_precision|fp16|bf16|fp8|amp|allow_tf32|tf32|float32_matmul_precision"
    rb"|(?:amp|autocast|compute|train|training|mixed|torch|model)_(?:dtype|precision)))[\"']?[ \t]*[:=][ \t]*"
    rb"[\"']?(?:true|fp16|bf16|fp8|float16|bfloat16|half|16|16-mixed|bf16-mixed|high|medium)\b",
    re.M | re.I,
)
#: Code that hands on a config, or a part of it, without naming its keys.
_EXPANDS = lazy_pattern(
    rb"\binstantiate\b|\bLightningCLI\b|HfArgumentParser|TrlParser|\bfrom_dict\(|\bsetattr\(|\bfrom_config\("
    rb"|\*\*\s*[\w.]*(?:arg|opt|conf|cfg|param|flag|setting|hp)\w*\s*[,)}]"
)
#: After the name of a keyword argument: a constant. The call of `Accelerator(mixed_precision="no")` reads no config.
_IS_CONSTANT = rb"[ \t]*=[ \t]*(?:[\"'][^\"'\n]*[\"']|True|False|None)[ \t]*[,)]"
#: What only configs of other programs have: accelerate, axolotl, LLaMA-Factory, Lightning's command line, Hydra.
_OF_OTHERS = lazy_pattern(
    rb"^[ \t]*(?:compute_environment|distributed_type|base_model|finetuning_type|class_path|_target_|zero_optimization)"
    rb"[ \t]*:",
    re.M,
)
#: Code that hands on the options of a program as a whole, other than to a log; what reads them there is unknown.
_LOGGED = lazy_pattern(
    rb"(?:json\.dumps?|yaml\.\w*dump|print|pprint|wandb\.init|init_trackers|info|log_params|add_text|write)"
    rb"\((?:[^()\n]|\([^()\n]*\))*?(?:vars\(\w+\)|\w+\.__dict__)"
)
_HANDED_ON = lazy_pattern(
    rb"\bvars\(|\.__dict__|_get_kwargs|\basdict\(|from_argparse_args|add_argparse_args|save_hyperparameters"
    rb"|\*\*\s*\w*(?:arg|opt|conf|cfg|param|flag)\w*\s*[,)}]|\bgetattr\(\s*[\w.]+\s*,\s*[^\"'\s]"
    rb"|\b(?:OmegaConf|EasyDict|Munch|megatron|fairseq)\b|\blocals\(\)"
)
#: What a config or a command of accelerate has: it reads `mixed_precision` itself.
_ACCELERATE = lazy_pattern(rb"\b(?:compute_environment|distributed_type|accelerate)\b")
_ADDED_OPTION = lazy_pattern(rb"(?:\bchoices|\bdefault|\bhelp)\s*=\s*(?:\[[^\]]*\]|\([^)]*\)|[\"'][^\"'\n]*[\"'])")
#: Code that may scale a loss, itself or through a framework.
_MAY_SCALE = lazy_pattern(
    rb"(?i)scaler|loss_?scal|\.scale\(|\bapex\b|accelerat|deepspeed|lightning|colossal|composer|\w*Trainer\("
)
#: Code that hands on all fields of an object of settings, or reads those whose names are in variables.
_READS_FIELDS = lazy_pattern(
    rb"\bvars\(|\.__dict__|\basdict\(|\bastuple\(|\bfields\(|__dataclass_fields__|__annotations__|\bmodel_fields\b"
    rb"|\binstantiate\(|OmegaConf|HfArgumentParser|TrlParser|save_hyperparameters"
    rb"|(?i:\w*(?:conf|cfg|args|opt|setting|param)\w*\.(?:model_dump|dict|to_dict)\()"
    rb"|\bgetattr\(\s*(?i:self|[\w.]*(?:conf|cfg|arg|opt|setting|param)\w*)\s*,\s*[^\"'\s]"
)
#: Settings that are stored in a checkpoint or a log: `{"config": asdict(config)}`, `wandb.config = vars(args)`.
_STORED = lazy_pattern(
    rb"(?i)(?:[\"']\w*(?:conf|cfg|arg|setting|param)\w*[\"']\]?\s*[:=]|\bwandb\.config\s*=)"
    rb"\s*(?:vars|asdict|dataclasses\.asdict)\(\s*[\w.]+\s*\)"
)
#: Values of an option that ask for no low precision.
_FULL = rb"(?:no|none|fp32|float32|float|32|full|false|0|highest)\b"


@question
def may_read_deepspeed(asked: Asked) -> bool:
    """True if something in a project may read the DeepSpeed config that a file is, or contains."""
    own = asked.file.endswith(PYTHON) and _READS_DEEPSPEED.search(stripped(content(asked.file)))
    return bool(own) or any(_NAMES_DEEPSPEED.search(content(each)) for each in asked.others)


@question
def may_read_deepspeed_as_json(asked: Asked) -> bool:
    """True if something in a project may read a DeepSpeed config with `json`, as Trainer, accelerate and Lightning do.

    DeepSpeed itself reads it with hjson, which accepts more: what commands give to `--deepspeed_config`.
    """
    name = re.escape(os.path.basename(asked.file).encode())
    naming = re.compile(rb"^.*(?<![\w.-])%s\b.*$" % name, re.M)
    commands = [line for each in asked.texts if each != asked.file for line in naming.findall(content(each))]
    if commands and all(map(_GIVES_DEEPSPEED.search, commands)):
        code = (stripped(content(each)) for each in asked.other_python)
        readers = [each for each in code if b"deepspeed_config" in each or naming.search(each)]
        return any(b"json.load" in each or _READS_AS_JSON.search(each) for each in readers)
    return any(_READS_AS_JSON.search(content(each)) for each in asked.files)


@question
def may_read_deepspeed_key(asked: Asked) -> bool:
    """True if code of a project reads a key of a DeepSpeed config itself: `ds_config.get("precision")`.

    In code that names the file, from any object.
    """
    item = asked.pattern(rb"(?:\.get\(|\.pop\(|\[)\s*[\"']", rb"[\"'](?!\s*\]\s*=(?!=))").pattern
    of_any, of_deepspeed = re.compile(item), re.compile(rb"(?i)(?:deepspeed|(?<![a-z])ds_)\w{0,60}" + item)
    config = os.path.basename(asked.file).encode()
    code = (stripped(content(each)) for each in asked.code)
    return any((of_any if config in each and b"load" in each else of_deepspeed).search(each) for each in code)


@question_of_project
def configs_choose_deepspeed(asked: Asked) -> bool:
    """True if a project has accelerate configs, and all of them choose DeepSpeed."""
    configs = b"\n".join(content(each) for each in asked.files if each.endswith((".yaml", ".yml")))
    return {*_DISTRIBUTED.findall(configs)} == {b"DEEPSPEED"}


@question_of_project
def may_ask_for(asked: Asked) -> bool:
    """True if a script, config or text of a project contains a word, in lower or upper case: code does not count."""
    return any(asked.name.encode() in content(each).lower() for each in asked.texts)


@question_of_project
def may_read_option(asked: Asked) -> bool:
    """True if code of a project may read an option, as an attribute or an item, or hands on all options at once."""
    option = re.escape(asked.name.encode())
    return any(_reads_option(each, option) for each in asked.code)


@question_of_project
def may_read_field(asked: Asked) -> bool:
    """True if code of a project may read a field, or hands on all fields of an object, other than to a log."""
    named = asked.pattern(
        rb"(?<!torch)(?<!cuda)(?<!apex)\.\s*", rb"\b|[\"']" + re.escape(asked.name.encode()) + rb"[\"']"
    )
    for each in asked.code:
        code = stripped(content(each))
        if named.search(code) or _READS_FIELDS.search(_STORED.sub(b"", _LOGGED.sub(b"", code))):
            return True
    return False


@question_of_project
def may_scale_loss(asked: Asked) -> bool:
    """True if code of a project may scale a loss, itself or through a framework."""
    return any(_MAY_SCALE.search(stripped(content(each))) for each in asked.code)


@question_of_project
def passes_option(asked: Asked) -> bool:
    """True if a script, config or text of a project passes an option, with a value that asks for low precision."""
    flag = asked.name.encode().replace(b"_", b"[_-]")
    passed = re.compile(rb"(?i)--%s(?![\w-])(?![\s=]*[\"']?%s)" % (flag, _FULL))
    return any(passed.search(content(each)) for each in asked.texts)


@question_of_project
def gives_option(asked: Asked) -> bool:
    """True if a config or script of a project gives an option this value, in a file that is not accelerate's."""
    option, _, value = asked.name.encode().partition(b" ")
    given = re.compile(
        rb"(?:^|[\s\"',{-])%s[\"']?(?:[ \t]*[:=][ \t]*|[ \t]+)[\"']?%s(?![\w-])"
        % (option.replace(b"_", b"[_-]"), re.escape(value)),
        re.M,
    )
    for file in asked.files:
        data = b"" if file.endswith((*PYTHON, NOTEBOOK, *MARKDOWN)) else content(file)
        if given.search(data) and not _ACCELERATE.search(data):
            return True
    return False


@question_of_project
def may_handle_value(asked: Asked) -> bool:
    """True if code of a project contains a string, other than among the choices or as the default of an option."""
    named = asked.pattern(rb"[\"']", rb"[\"']")
    return any(named.search(_ADDED_OPTION.sub(b"", content(each))) for each in asked.code)


@question
def unread_keys(asked: Asked) -> list[str]:
    """Return `FILE:KEY` for configs (YAML, TOML) of a project with a key for low precision that its code nowhere names.

    Only for configs that the file names; none if code may read keys without naming them.
    """
    files, names = asked.files, content(asked.file)
    configs = [(each, content(each)) for each in files if each.endswith((".yaml", ".yml", ".toml"))]
    wanted = [(each, data) for each, data in configs if _PRECISION_KEY.search(data) and not _OF_OTHERS.search(data)]
    code = b"\n".join(stripped(content(each)) for each in files if each.endswith(PYTHON)) if wanted else b""
    if not code or _EXPANDS.search(code) or any(each.endswith(NOTEBOOK) for each in files):
        return []
    found = []
    for file, data in wanted:
        if os.path.basename(file).encode() not in names:
            continue
        for place in _PRECISION_KEY.finditer(data):
            section = _section(data[: place.start()], len(place[1]))
            key = re.escape(place[2])
            handed = section and re.search(rb"\*\*[^,)\n]*[\[.][\"']?%s\b" % re.escape(section), code)
            if not handed and not re.search(rb"\b%s\b(?!%s)" % (key, _IS_CONSTANT), code):
                found.append(f"{file}:{place[2].decode()}")
    return found


@question_of_project
def may_compile(asked: Asked) -> bool:
    """True if something in a project may compile a model."""
    return any(_COMPILE.search(content(each)) for each in asked.files)


@question
def may_update_scaler(asked: Asked) -> bool:
    """True if other code of a project may update a GradScaler that a file steps with.

    A program with a scaler of its own, which does not use the file, updates that one; and code that steps a scaler, and
    is connected with the file by no import, the one that it steps.
    """
    updating = [each for each in asked.other_python if _updates(each, asked.file)]
    if not all(_STEPS_SCALER.search(content(each)) for each in updating):
        return True  # a hook, which gets a scaler that something else steps
    users = [each for each in asked.others if refers(each, asked.file, "")] if updating else []
    return any(
        each in users or refers(asked.file, each, "") or any(refers(user, each, "") for user in users)
        for each in updating
    )


def _section(before: bytes, indentation: int) -> bytes:
    """Return the last key before a line that is less indented; empty at the top level."""
    above = re.findall(rb"^([ \t]*)[\"']?([\w-]+)[\"']?[ \t]*:[ \t]*$", before, re.M)
    return next((key for spaces, key in reversed(above) if len(spaces) < indentation), b"")


def _reads_option(file: str, name: bytes) -> bool:
    """True if a file may read an option of this name; `torch.amp` is none."""
    data = content(file)
    code = stripped(data) if file.endswith(PYTHON) else data
    return (
        re.search(rb"(?<!torch)(?<!cuda)(?<!apex)\.\s*%s\b" % name, code) is not None
        or re.search(rb"(?:\bgetattr\([^()]*,|\bhasattr\([^()]*,|\[|\.(?:get|pop)\()\s*\\?[\"']%s\\?[\"']" % name, code)
        is not None
        or _HANDED_ON.search(_LOGGED.sub(b"", code)) is not None
    )


def updates(code: bytes) -> bool:
    """True if code, without comments, may update a GradScaler: no progress bar, and no object with its own `update`."""
    return any(_may_be_scaler(each["object"], code) for each in _UPDATE.finditer(code))


def _may_be_scaler(name: bytes, code: bytes) -> bool:
    if name == b"self":
        return _IS_SCALER.search(code) is not None
    return b"tqdm" not in code or re.search(rb"\bas[ \t]+%s[ \t]*:" % re.escape(name), code) is None


def _updates(user: str, file: str) -> bool:
    """True if a file may update the scaler of another one; a test does not train."""
    data = content(user) if not is_test(os.path.relpath(user, os.path.commonpath((user, file)))) else b""
    if b".update(" not in data or not _SCALER.search(data):
        return False
    code = stripped(data)
    return updates(code) and (not _OWN_SCALER.search(code) or refers(user, file, ""))
