from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import Bad, Call, Diagnostic, Facts, Good, Note, Rule, With, any_of, compatible, constant


class NoGradInAutocastCache(Rule):
    """A forward pass under `no_grad` leaves casts of the weights without gradient in autocast's cache.

    ## What it does
    Reports a call of a model under `no_grad` inside an autocast region, if the same model is called again in that
    region with gradients.

    ## Why is this bad
    Autocast casts each FP32 weight once per region and caches the cast. Up to torch 2.9, a cast that is made under
    `no_grad` has no autograd history, and the training forward pass reuses it: the weights of linear layers and
    convolutions get no gradient, without a warning (pytorch/pytorch#112583, #158232).

    ## Known limits
    Preview, since only old versions are affected. pytorch/pytorch#165068, merged in December 2025, fixed it: with torch
    2.13 on a CPU (FP16 and BF16) and with 2.11 on an H100 (FP16) the weights do get their gradients, after `no_grad`
    and after `inference_mode`. torch 2.10 was not tried. Not reported if the project requires torch 2.11 or newer, with
    `cache_enabled=False`, after `torch.clear_autocast_cache()`, and for frozen models.
    """

    code, name = "MPG313", "no-grad-in-autocast-cache"
    severity = "warning"
    preview = True
    message = "`{call}` runs under no_grad in the region in which the same weights are trained"
    help = "leave the region in between, or pass `cache_enabled=False`; or require torch 2.11 or newer"
    #: 2.11 is the first one with which the weights were observed to get their gradients.
    versions = {"torch": "<2.11"}
    triggers = (any_of(b"autocast"), any_of(b"no_grad", b"inference_mode"), any_of(b"backward", b"loss"))
    examples = (
        Bad(
            """\
import torch

for x in loader:
    with torch.autocast("cuda"):
        with torch.no_grad():
            first = model(x)  # !
        loss = (model(x) - first).pow(2).mean()
    scaler.scale(loss).backward()
"""
        ),
        Bad(
            """\
import torch

class Run:
    def loss(self, x):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            with torch.inference_mode():
                first = self.model(x)  # !
            return (self.model(x) - first).pow(2).mean()
"""
        ),
        Good(
            """\
import torch

teacher.requires_grad_(False)
for x in loader:
    with torch.autocast("cuda"):
        with torch.no_grad():
            target = teacher(x)
            old = model(x)
            torch.clear_autocast_cache()
        loss = (model(x) - target).pow(2).mean() + teacher(x)
    with torch.autocast("cuda"):
        with torch.no_grad():
            first = net(x)
    with torch.autocast("cuda"):
        loss = net(x)
        with torch.no_grad():
            after = net(x)
    with torch.autocast("cuda", cache_enabled=False):
        with torch.no_grad():
            first = net(x)
        loss = net(x)
    with torch.autocast("cuda"):
        if not training:
            with torch.no_grad():
                score = net(x)
        if training:
            loss = net(x)
    with torch.autocast("cuda", enabled=False):
        with torch.no_grad():
            first = net(x)
            helper(x)
        loss = net(x)
"""
        ),
        Good(
            """\
import torch

with torch.autocast("cuda"):
    with torch.no_grad():
        first = model(x)
    loss = (model(x) - first).pow(2).mean()
""",
            files={"requirements.txt": "torch>=2.11\n"},
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        for scope in facts.scopes:
            calls = [call for call in scope.calls if len(call.withs) > 1 and call.path]
            for call in calls:
                item = self._region(call, facts)
                if item is None or facts.is_inference_scope(scope) or not self._is_trained_model(call, facts):
                    continue
                later = next((c for c in scope.calls if self._trains(c, call, item, facts)), None)
                if later is not None:
                    yield self.at(call, call=facts.short(call.node), notes=(Note("trained here", later.span),))

    def _region(self, call: Call, facts: Facts) -> With | None:
        """Return the enabled autocast around a call that has a `no_grad` inside it."""
        found: With | None = None
        for item in call.withs:
            for region in facts.entered(item):
                if region.kind == "autocast" and region.call is not None:
                    cached = constant(region.call.keywords.get("cache_enabled")) != (False,)
                    found = item if cached and region.guard.joined(call.guard).possible else None
                elif region.kind == "no_grad" and found is not None:
                    return found
        return None

    def _is_trained_model(self, call: Call, facts: Facts) -> bool:
        kinds = facts.kinds(call.func, call)
        named = call.name.endswith(("model", "net", "network", "encoder", "decoder", "unet", "generator", "policy"))
        return ("model" in kinds or (kinds <= {""} and named)) and not facts.frozen_params.is_frozen_name(call.path)

    def _trains(self, later: Call, call: Call, item: With, facts: Facts) -> bool:
        if later.path != call.path or later.order <= call.order or item not in later.withs or facts.is_inference(later):
            return False
        if not compatible(later.guard, call.guard):
            return False
        between = (c.order for c in facts.calls.get("clear_autocast_cache", ()))
        return not any(call.order < order < later.order for order in between)
