from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mpguard.lint.configs import accelerate_config
from mpguard.lint.rule import Bad, ConfigRule, Diagnostic, Good, Note, any_of

if TYPE_CHECKING:
    from mpguard.document import Document, Entry

_NAMES = "deepspeed_config.deepspeed_config_file"
#: What accelerate 1.15 refuses beside it -> where the DeepSpeed file says it.
_REFUSED = {
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    "mixed_precision": "",
}


class YamlAgainstDeepspeedJson(ConfigRule):
    """An accelerate config says what only the DeepSpeed file that it names may say, or something else than that file.

    ## Why is this bad
    With `deepspeed_config_file`, accelerate 1.15.0 stops every process as soon as the script makes its
    Accelerator: `ValueError: When using deepspeed_config_file, the following accelerate config variables will be
    ignored`. It does so for `mixed_precision`, even `'no'` and even where both say the same, and for `zero_stage`,
    `gradient_clipping`, `gradient_accumulation_steps`, `offload_*` and `zero3_save_16bit_model`.

    Where `distributed_type` is not DEEPSPEED, nothing reads the DeepSpeed file: of two precisions the one of the
    YAML is in force, whatever the file says.

    ## Known limits
    The file is looked for from the present folder and from that of the config. `--mixed_precision` on the
    launch line is no key, and is accepted.
    """

    code, name = "MPG861", "yaml-against-deepspeed-json"
    severity = "error"
    message = "`{key}` beside `deepspeed_config_file`: {why}"
    help = "say it once: in the DeepSpeed file, or here and without that file"
    kinds = ("accelerate",)
    triggers = (any_of(b"deepspeed_config_file"),)
    yields_to = ("MPG804",)
    examples = (
        Bad(
            """\
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
mixed_precision: bf16  # !
deepspeed_config:
  deepspeed_config_file: ds.json
  zero_stage: 3  # !
  zero3_init_flag: true
""",
            name="mp.yaml",
            files={"ds.json": '{"fp16": {"enabled": true}, "zero_optimization": {"stage": 2}}'},
        ),
        Bad(
            """\
distributed_type: FSDP
mixed_precision: bf16  # !
deepspeed_config:
  deepspeed_config_file: conf/ds.json
""",
            name="mp.yaml",
            files={"conf/ds.json": '{"fp16": {"enabled": true}, "zero_optimization": {"stage": 2}}'},
        ),
        Good(
            """\
distributed_type: DEEPSPEED
deepspeed_config:
  deepspeed_config_file: ds.json
  zero3_init_flag: false
  deepspeed_multinode_launcher: standard
""",
            name="mp.yaml",
            files={"ds.json": '{"bf16": {"enabled": true}, "zero_optimization": {"stage": 2}}'},
        ),
        Good(
            """\
distributed_type: DEEPSPEED
mixed_precision: bf16
deepspeed_config:
  zero_stage: 2
  gradient_clipping: 1.0
""",
            name="mp.yaml",
        ),
        Good(
            """\
distributed_type: MULTI_GPU
mixed_precision: bf16
deepspeed_config:
  deepspeed_config_file: ds.json
""",
            name="mp.yaml",
            files={"ds.json": '{"bf16": {"enabled": true}, "zero_optimization": {"stage": 2}}'},
        ),
    )

    def check(self, document: Document) -> Iterator[Diagnostic]:
        names = document.entry(_NAMES)
        if names is None or not isinstance(names.value, str) or accelerate_config.on_sagemaker(document):
            return
        other = self.project.config_named(document.path, names.value)
        kind = accelerate_config.kind(document)
        if kind == "DEEPSPEED":
            if document.data.get("use_cpu") is not True:
                yield from self._refused(document, other)
        elif kind is not None and other is not None:
            yield from self._unread(document, other, kind)

    def _refused(self, document: Document, other: Document | None) -> Iterator[Diagnostic]:
        for entry in document.entries():
            key = ".".join(entry.path)
            bare = key.removeprefix("deepspeed_config.")
            legacy = key == "fp16" and entry.value is True
            if not legacy and (bare not in _REFUSED or (len(entry.path) == 1 and key != "mixed_precision")):
                continue
            if entry.value is None:
                continue
            there = None if other is None else _said(other, "mixed_precision" if legacy else bare)
            notes = () if there is None or other is None else (_note(there, other),)
            yield self.at(entry, key=key, why="accelerate 1.15 refuses it, and every process stops", notes=notes)

    def _unread(self, document: Document, other: Document, kind: str) -> Iterator[Diagnostic]:
        entry, there = accelerate_config.mixed_precision(document), _said(other, "mixed_precision")
        mode = accelerate_config.mode(document)
        if entry is None or there is None or mode is None or there.path[0] == mode:
            return
        why = f"under {kind} nothing reads that file, which says {there.path[0]}"
        yield self.at(entry, key=".".join(entry.path), why=why, notes=(_note(there, other),))


def _said(other: Document, key: str) -> Entry | None:
    """Where the DeepSpeed file says what a key of the YAML does."""
    if key != "mixed_precision":
        return other.entry(_REFUSED[key])
    enabled = [entry for name in ("bf16", "fp16") if (entry := other.entry(f"{name}.enabled")) and entry.value is True]
    return enabled[0] if len(enabled) == 1 else None


def _note(entry: Entry, other: Document) -> Note:
    return Note("the DeepSpeed file says it here", entry.span, other.path)
