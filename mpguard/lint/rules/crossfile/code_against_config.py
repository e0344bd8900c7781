from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import (
    Bad,
    Diagnostic,
    Dtype,
    Event,
    Facts,
    Good,
    HasSpan,
    Record,
    Region,
    Rule,
    any_of,
    launch_expectations,
    lazy_pattern,
    library_names,
)

#: What an Accelerator is used for that has no precision, and what applies its precision.
_RANKS = lazy_pattern(r"\.(?:device|process_index|num_processes|is_(?:local_)?main_process|wait_for_everyone)\b")
_APPLIES = lazy_pattern(r"\.(?:prepare|prepare_model|autocast|backward)\(|Trainer\(|\btrain\w*\(")


class CodeAgainstConfig(Rule):
    """The script's own precision differs from that of the config that it is launched with.

    ## What it does
    Compares `Accelerator(mixed_precision=...)`, the dtype of autocast regions around what is trained, a GradScaler, and
    the dtype that a trained model is loaded in, with the launch configs: those of `--config`, of
    `[tool.mpguard] configs`, those that launch lines in the tree name for the script
    (`accelerate launch --config_file fsdp.yaml train.py` in shell scripts, Makefiles, workflows, READMEs; their
    `--mixed_precision` takes precedence over the config), or those in the same folder.

    ## Why is this bad
    The code silently takes precedence: accelerate 1.15 uses `mixed_precision` of the code, `"no"` included, instead of
    that of the config, and an autocast region in the code overrides both. The run computes something else than its
    config states, and the next edit of the config has no effect.

    ## Known limits
    Only settings that are known to apply are compared: not an autocast with `enabled=args.amp`, and nothing under an
    option for precision. If there are several configs, it is unknown which one is used: a setting is reported only if
    it contradicts all of them. Under a config with `no`, autocast in the code is assumed to be intended. The default of
    an option, if it is not None, takes precedence over the config, too, unless something in the project passes the
    option.
    """

    code, name = "MPG862", "code-against-config"
    severity = "error"
    message = "{what} is {found}, the launch config has {wanted}"
    help = "set the precision in one place: leave it to the config, or change the config"
    triggers = (
        any_of(b"mixed_precision", b"autocast", b"GradScaler", *(name.encode() for name in library_names.LOADERS)),
        any_of(b"Accelerator(", b".backward(", b"Trainer(", b"deepspeed"),
        any_of(b"float16", b"fp16", b"bf16", b"fp8", b"half", b"autocast", b"GradScaler", b"mixed_precision"),
    )
    needs_config = True
    examples = (
        Bad(
            """\
from accelerate import Accelerator

accelerator = Accelerator(mixed_precision="fp16")  # !
""",
            files={"mp.yaml": "distributed_type: MULTI_GPU\nmixed_precision: bf16\n"},
        ),
        Good(
            """\
import torch
from accelerate import Accelerator
from transformers import AutoModel

def main(args, loader):
    accelerator = Accelerator(mixed_precision="bf16")
    other = Accelerator(mixed_precision=args.mixed_precision)
    teacher = AutoModel.from_pretrained("gpt2", torch_dtype=torch.float16).eval()
    model = AutoModel.from_pretrained("gpt2", torch_dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    for x in loader:
        with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16):
            target = teacher(x)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = (model(x) - target).sum()
        accelerator.backward(loss)
        optimizer.step()
""",
            files={"mp.yaml": "distributed_type: MULTI_GPU\nmixed_precision: bf16\n"},
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        configs = launch_expectations.configs(facts)
        if not configs:
            return
        for event in facts.events("accelerator") if not self._is_for_ranks(facts) else ():
            given = event.call.argument(2, "mixed_precision")
            found = launch_expectations.given(given, event.call, facts)
            other = found is not None and all(config.mixed_precision != found for config in configs)
            if given is not None and other and launch_expectations.is_unconditional(event.guard, event.call):
                yield self._against(facts.span(given, event.call), "`mixed_precision`", f"`{found}`", configs)
        regions = self._trained_regions(facts)
        for call, dtype in regions:
            if launch_expectations.contradicts(dtype, configs):
                yield self._against(call, "this autocast", dtype.label, configs)
        if not any(dtype is Dtype.FP16 for _, dtype in regions):
            yield from self._scalers(facts, configs)
        for event in facts.events("load"):
            loaded = launch_expectations.low(event.dtypes)
            decided = launch_expectations.is_unconditional(event.guard, event.call)
            if (
                loaded is not None
                and decided
                and launch_expectations.contradicts(loaded, configs)
                and self._trained(event, facts)
            ):
                yield self._against(event, "the dtype of the trained weights", loaded.label, configs)

    def _is_for_ranks(self, facts: Facts) -> bool:
        """True if a file uses an Accelerator for its ranks or its device, and nothing near applies its precision."""
        if not _RANKS.search(facts.file_text):
            return False
        users = facts.users("")
        near = (facts, *facts.imported_modules(), *(users or ()))
        return users is not None and not any(_APPLIES.search(each.file_text) for each in near)

    def _trained_regions(self, facts: Facts) -> list[tuple[Record, Dtype]]:
        """Return the autocast calls around what a backward pass is computed from, with their dtype."""
        found: dict[Record, Dtype] = {}
        for backward in (*facts.events("backward"), *facts.events("framework")):
            loss = backward.subject if backward.kind == "backward" else backward.call.argument(0)
            if loss is None or facts.is_inference(backward.call):
                continue
            for record in (backward.call, *facts.flow.backward(loss, backward.call)):
                around = facts.regions(record)
                if any(region.kind == "no_grad" for region in around):
                    continue
                for region in around:
                    dtype = self._dtype(region, facts)
                    if dtype is not None and region.facts is facts and region.call is not None:
                        found[region.call] = dtype
        return list(found.items())

    def _dtype(self, region: Region, facts: Facts) -> Dtype | None:
        if (
            region.kind != "autocast"
            or region.call is None
            or not launch_expectations.is_unconditional(region.guard, region.call)
        ):
            return None
        if facts.enabled(region.call, region.facts.called_path(region.call)):
            return None  # it may be disabled
        return launch_expectations.low(region.dtypes)

    def _scalers(self, facts: Facts, configs: launch_expectations.Configs) -> Iterator[Diagnostic]:
        """Yield the scalers that are always enabled: they are for FP16, whatever the dtype of the regions."""
        if not launch_expectations.contradicts(Dtype.FP16, configs) or not facts.events("scale"):
            return
        for event in facts.events("scaler"):
            path = facts.called_path(event.call)
            sure = not event.call.guard and launch_expectations.is_unconditional(event.guard, event.call)
            if path.rsplit(".", 1)[-1] == "GradScaler" and sure and not facts.enabled(event.call, path):
                yield self._against(event, "this GradScaler's precision", "FP16", configs)

    def _trained(self, event: Event, facts: Facts) -> bool:
        if facts.is_inference(event.call):
            return False
        reach = facts.flow.forward(event.call.node, event.call)
        return bool(reach.training_sinks) and not reach.meets("peft") and not reach.meets("frozen")

    def _against(
        self, place: HasSpan | tuple[int, int], what: str, found: str, configs: launch_expectations.Configs
    ) -> Diagnostic:
        notes = launch_expectations.places(configs)
        return self.at(place, what=what, found=found, wanted=launch_expectations.wanted(configs), notes=notes)
