from __future__ import annotations

import os
from collections.abc import Iterator

from mpguard.lint import Bad, ConfigRule, Diagnostic, Document, Entry, Good, Note, accelerate_config, any_of, siblings

_NAMES = "deepspeed_config.deepspeed_config_file"
#: Key that accelerate 1.15 refuses together with the file -> its place in the DeepSpeed file.
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
    """accelerate's config sets what only its DeepSpeed file may set, or contradicts that file.

    ## Why is this bad
    With `deepspeed_config_file`, accelerate 1.15.0 stops every process as soon as the script creates its Accelerator:
    `ValueError: When using deepspeed_config_file, the following accelerate config variables will be ignored`. It does
    so for `mixed_precision`, even for `'no'` and even if both agree, and for `zero_stage`, `gradient_clipping`,
    `gradient_accumulation_steps`, `offload_*` and `zero3_save_16bit_model`.

    If `distributed_type` is not DEEPSPEED, nothing reads the DeepSpeed file: of two precisions the one of the YAML
    applies, whatever the file sets.

    `--mixed_precision bf16` on the launch line is not a key, and is accepted. Against `"bf16": {"enabled": false}` the
    file wins without a warning: accelerate compares only the other dtype, and the run is FP32.

    ## Known limits
    The file is searched for in the current folder and in that of the config. A launch line is reported if it turns on a
    precision that the file turns off, and the code in the same folder builds an `Accelerator`, sets no
    `mixed_precision` itself and has no Trainer.
    """

    code, name = "MPG861", "yaml-against-deepspeed-json"
    severity = "error"
    message = "`{key}` together with `deepspeed_config_file`: {reason}"
    help = "keep it in one place: in the DeepSpeed file, or here and without that file"
    kinds = ("accelerate", "deepspeed")
    triggers = (any_of(b"deepspeed_config_file", b"bf16", b"fp16"),)
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
        Good(
            """\
{
  "zero_optimization": {"stage": 2},
  "bf16": {"enabled": "auto"},
  "fp16": {"enabled": false}
}
""",
            name="ds.json",
            files={
                "run.sh": """\
accelerate launch --use_deepspeed --deepspeed_config_file ds.json --mixed_precision bf16 train.py
""",
                "train.py": """\
from accelerate import Accelerator

accelerator = Accelerator()
""",
            },
        ),
    )

    def check(self, document: Document) -> Iterator[Diagnostic]:
        if document.kind == "deepspeed":
            yield from self._turned_off(document)
            return
        names = document.entry(_NAMES)
        if names is None or not isinstance(names.value, str) or accelerate_config.is_sagemaker(document):
            return
        other = self.project.config_named(document.path, names.value)
        kind = accelerate_config.distributed_type(document)
        if kind == "DEEPSPEED":
            if document.data.get("use_cpu") is not True:
                yield from self._refused(document, other)
        elif kind is not None and other is not None:
            yield from self._unread(document, other, kind)

    def _turned_off(self, document: Document) -> Iterator[Diagnostic]:
        """Report a precision that the file turns off and a launch line turns on."""
        sections = {name: document.entry(f"{name}.enabled") for name in ("bf16", "fp16", "torch_autocast")}
        off = {name: entry for name, entry in sections.items() if entry is not None and entry.value is False}
        if document.format == "python" or not off or any(each and each.value is True for each in sections.values()):
            return
        launched = [
            each
            for each in self.project.launched_with(document.path, "deepspeed_config_file")
            if "use_deepspeed" in each[1].options
        ]
        for config in siblings.naming(document.path):
            if accelerate_config.distributed_type(config) == "DEEPSPEED":
                launched += self.project.launched_with(config.path)
        for name in ("bf16", "fp16"):
            for script, launch in launched if name in off else ():
                word = launch.options.get("mixed_precision")
                if launch.launcher != "accelerate" or word is None or word.text != name:
                    continue
                here = [(script, launch)]
                if siblings.mentions(document.path, r"\bAccelerator\(", here) and not siblings.mentions(
                    document.path, siblings.FILLS_IN, here
                ):
                    message = (
                        f"`{name}.enabled: false` with `--mixed_precision {name}`: this file wins without a warning,"
                        " and the run is FP32"
                    )
                    note = Note("the launch line turns it on here", word.span, os.path.relpath(launch.path))
                    yield self.at(off[name], message=message, help='write `"auto"`, or `true`', notes=(note,))
                    break

    def _refused(self, document: Document, other: Document | None) -> Iterator[Diagnostic]:
        for entry in document.entries():
            key = ".".join(entry.path)
            bare = key.removeprefix("deepspeed_config.")
            legacy = key == "fp16" and entry.value is True
            if not legacy and (bare not in _REFUSED or (len(entry.path) == 1 and key != "mixed_precision")):
                continue
            if entry.value is None:
                continue
            there = None if other is None else _deepspeed_entry(other, "mixed_precision" if legacy else bare)
            notes = () if there is None or other is None else (_note(there, other),)
            yield self.at(entry, key=key, reason="accelerate 1.15 refuses it, and every process stops", notes=notes)

    def _unread(self, document: Document, other: Document, kind: str) -> Iterator[Diagnostic]:
        entry, there = accelerate_config.mixed_precision_entry(document), _deepspeed_entry(other, "mixed_precision")
        mode = accelerate_config.mixed_precision_mode(document)
        if entry is None or there is None or mode is None or there.path[0] == mode:
            return
        why = f"under {kind} nothing reads that file, which sets {there.path[0]}"
        yield self.at(entry, key=".".join(entry.path), reason=why, notes=(_note(there, other),))


def _deepspeed_entry(other: Document, key: str) -> Entry | None:
    """Return the key of the DeepSpeed file that matches a key of the YAML."""
    if key != "mixed_precision":
        return other.entry(_REFUSED[key])
    mode = siblings.deepspeed_precision(other.data)
    return other.entry(f"{mode}.enabled") if mode is not None else None


def _note(entry: Entry, other: Document) -> Note:
    return Note("the DeepSpeed file sets it here", entry.span, other.path)
