from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import (
    Bad,
    Call,
    Diagnostic,
    Facts,
    Good,
    Note,
    Object,
    Rule,
    accelerate_precision,
    any_of,
    dotted,
    lazy_pattern,
)

_DEVICE = lazy_pattern(r"(?i)device|cuda|rank")


class UnpreparedModelInFloat32(Rule):
    """A diffusers model that the Accelerator has not prepared runs in FP32 in a mixed-precision step.

    ## What it does
    Reports a call of a model that diffusers loads without a dtype, in a function that runs `accelerator.backward`, if
    the model is neither given to `prepare` nor cast, and the call is in no autocast region.

    ## Why is this bad
    Accelerate wraps the forward of prepared models in autocast, and no other code. A frozen UNet next to a trained
    ControlNet computes in FP32, with FP32 weights: it needs twice the memory, and most of the time of a step.

    ## Known limits
    Only models of diffusers, which load in FP32, and calls of the model itself: a VAE's `encode` is often kept in FP32
    on purpose.
    """

    code, name = "MPG529", "unprepared-model-in-float32"
    severity = "warning"
    message = "`{model}` is not prepared: its forward runs in FP32, whatever `mixed_precision` is"
    help = "cast the frozen model (`{model}.to(device, dtype=...)`), or call it under `accelerator.autocast()`"
    triggers = (
        any_of(b"diffusers"),
        any_of(b"mixed_precision"),
        any_of(b".prepare("),
        any_of(b".backward("),
        any_of(b"from_pretrained("),
    )
    examples = (
        Bad(
            """\
import torch
from accelerate import Accelerator
from diffusers import ControlNetModel, UNet2DConditionModel

accelerator = Accelerator(mixed_precision="fp16")
unet = UNet2DConditionModel.from_pretrained("sd", subfolder="unet").to(accelerator.device)
controlnet = ControlNetModel.from_unet(unet)
unet.requires_grad_(False)
optimizer = torch.optim.AdamW(controlnet.parameters(), lr=1e-5)
controlnet, optimizer, loader = accelerator.prepare(controlnet, optimizer, loader)
for x, t, text, hint, noise in loader:
    down, mid = controlnet(x, t, text, hint, return_dict=False)
    predicted = unet(x, t, text, down_block_additional_residuals=down, mid_block_additional_residual=mid).sample  # !
    accelerator.backward(torch.nn.functional.mse_loss(predicted, noise))
    optimizer.step()
"""
        ),
        Good(
            """\
import torch
from accelerate import Accelerator
from diffusers import ControlNetModel, UNet2DConditionModel

accelerator = Accelerator(mixed_precision="fp16")
unet = UNet2DConditionModel.from_pretrained("sd", subfolder="unet")
controlnet = ControlNetModel.from_unet(unet)
unet.requires_grad_(False)
unet.to(accelerator.device, dtype=torch.float16)
optimizer = torch.optim.AdamW(controlnet.parameters(), lr=1e-5)
controlnet, optimizer, loader = accelerator.prepare(controlnet, optimizer, loader)
for x, t, text, hint, noise in loader:
    down, mid = controlnet(x, t, text, hint, return_dict=False)
    predicted = unet(x, t, text, down_block_additional_residuals=down, mid_block_additional_residual=mid).sample
    accelerator.backward(torch.nn.functional.mse_loss(predicted.float(), noise))
    optimizer.step()
"""
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        if facts.declared == "inference" or not accelerate_precision.asks_for_autocast(facts):
            return
        reported: set[Call] = set()
        for backward in facts.events("framework"):
            for call in backward.call.scope.calls:
                load = self._unprepared(call, facts)
                if load is not None and load not in reported:
                    reported.add(load)
                    yield self.at(call, model=call.path, notes=(Note("loaded here", load.span, facts.elsewhere(load)),))

    def _unprepared(self, call: Call, facts: Facts) -> Call | None:
        """Return where the model that is called is loaded in FP32, if nothing casts or prepares it."""
        atoms = [each.atom for each in facts.evaluate(call.func, call)]
        model = atoms[0] if len(atoms) == 1 and isinstance(atoms[0], Object) else None
        if model is None or model.call is None or model.prepared or model.kind == "pipeline":
            return None  # or it samples from a pipeline
        if model.call.name != "from_pretrained":
            return None
        paths = [path for _, path in facts.paths(model.call)]
        if not any(path.startswith("diffusers.") for path in paths) or model.call.starred or facts.is_inference(call):
            return None
        name = call.path.rsplit(".", 1)[-1]
        under_autocast = any(region.kind.endswith("autocast") for region in facts.regions(call))
        if model.call.argument(None, "torch_dtype", "dtype") is not None or under_autocast:
            return None
        changed = [each for method in ("to", "half", "bfloat16", "prepare") for each in facts.calls.get(method, ())]
        return model.call if not any(_changes(name, each, facts) for each in changed) else None


def _changes(name: str, call: Call, facts: Facts) -> bool:
    """True if a call casts or prepares a model of this name: not `unet.to(accelerator.device)`."""
    about = call.positional if call.name == "prepare" else (call.receiver,)
    only_moves = call.name == "to" and len(call.node.args) == 1 and bool(call.positional)
    only_moves = only_moves and _DEVICE.search(facts.short(call.positional[0])) is not None
    return not only_moves and name in {dotted(each).rsplit(".", 1)[-1] for each in about}
