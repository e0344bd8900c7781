from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from mpguard.lint import (
    Bad,
    Call,
    Diagnostic,
    Edit,
    Facts,
    Fix,
    Good,
    Note,
    Object,
    Record,
    Region,
    Rule,
    Scope,
    any_of,
    autocast_ops,
    dotted,
    lazy_pattern,
    python_edits,
    text_of,
)

_FUNCTIONS = frozenset({"torch.autograd.Function", "torch.autograd.function.Function"})
#: Calls that set the dtypes explicitly.
_SETS_DTYPE = frozenset({"to", "float", "half", "bfloat16", "type", "type_as", "autocast", "is_autocast_enabled"})
_AMP = lazy_pattern(r"amp|custom_|autocast|cast|dynamo|once_differentiable")


class CustomFunctionWithoutCustomFwd(Rule):
    """An `autograd.Function` with matrix products runs under autocast without `custom_fwd` and `custom_bwd`.

    ## What it does
    Reports a subclass of `torch.autograd.Function` whose `forward` and `backward` both contain a matrix product, and
    whose `apply` is called inside an autocast region of the file, or in the `forward` of a module that is part of a
    model which is; or anywhere in a file that imports or uses `custom_fwd`, and so is meant for use under autocast.

    ## Why is this bad
    Autocast is active in `forward`, which saves its FP32 inputs and returns a 16-bit result, but not in `backward`: the
    gradient arrives in 16 bits and is multiplied with the saved FP32 tensors. torch 2.13 raises there ("expected m1 and
    m2 to have the same dtype"). `custom_fwd` records the state of autocast, `custom_bwd` restores it.

    ## Fix safety
    Unsafe: the decorators change the dtype in which `backward` computes. The device is that of the autocast region;
    "cuda" if it is unknown.

    ## Known limits
    Not reported if the function is applied in another file and this one has no `custom_fwd`, if another `Function`
    applies it, or if it sets its dtypes itself (a cast, its own region).
    """

    code, name = "MPG312", "custom-function-without-custom-fwd"
    severity = "warning"
    message = "`{function}` computes matrix products under autocast, and its backward pass runs without autocast"
    help = "decorate forward with torch.amp.custom_fwd and backward with torch.amp.custom_bwd"
    triggers = (
        any_of(b"Function)", b"Function,"),
        any_of(b".apply"),
        any_of(b"def backward"),
    )
    triggers_nearby = (any_of(b"autocast", b"custom_fwd"),)
    examples = (
        Bad(
            """\
import torch

class Product(torch.autograd.Function):  # !
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad @ w, grad.t() @ x

for x in loader:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = Product.apply(x, w).sum()
    loss.backward()
""",
            fixed="""\
import torch

class Product(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda")
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad @ w, grad.t() @ x

for x in loader:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = Product.apply(x, w).sum()
    loss.backward()
""",
        ),
        Good(
            """\
import torch
from torch import nn

class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad @ w, grad.t() @ x

class Layer(nn.Module):
    def forward(self, x):
        return Product.apply(x, self.weight)

def main(loader):
    precise = nn.Sequential(Layer())
    other = nn.Sequential(nn.Linear(8, 8))
    for x in loader:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            y = other(x)
        precise(y.float()).sum().backward()
""",
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        for cls in facts.scopes:
            forward, backward = cls.method("forward"), cls.method("backward")
            if cls.kind != "class" or forward is None or backward is None:
                continue
            if not _FUNCTIONS & set(facts.ancestry(cls)):
                continue
            if not all(self._lacks_dtype(scope) for scope in (forward, backward)):
                continue
            call, region = next(self._applied_under_autocast(cls, facts), (None, None))
            supported = next(self._supports_autocast(facts), None) if self._used(cls, facts) else None
            shows = call or supported
            if shows is not None:
                what = "applied under autocast here" if call else "the file is meant for use under autocast"
                notes = (Note(what, shows.span, facts.elsewhere(shows)),)
                fix = self._fix(forward, backward, region, facts)
                binding = next(b for b in (cls.parent or cls).bindings[cls.name] if b.defines is cls)
                start = facts.span(cls.node, binding)[0]
                yield self.at((start, start + len(f"class {cls.name}")), function=cls.name, notes=notes, fix=fix)

    def _lacks_dtype(self, scope: Scope) -> bool:
        """True if a function has matrix products and nothing in it sets their dtype."""
        if any(_AMP.search(text_of(each)) for each in scope.decorators) or scope.withs:
            return False
        if any(call.name in _SETS_DTYPE or "dtype" in call.keywords for call in scope.calls):
            return False
        work = [c for c in scope.calls if c.name in autocast_ops.LOWERED and c.receiver is not None]
        return bool(scope.products or work)

    def _supports_autocast(self, facts: Facts) -> Iterator[Record]:
        """Yield the imports and uses of `custom_fwd`: the file's functions are meant for use under autocast."""
        for scope in facts.scopes:
            yield from (b for bs in scope.bindings.values() for b in bs if b.kind == "from" and b.name == "custom_fwd")
            yield from (use for uses in scope.uses.values() for use in uses if use.path.endswith(".custom_fwd"))

    def _used(self, cls: Scope, facts: Facts) -> bool:
        """True if its `apply` is used in the file, not counting the methods of another `Function`."""
        return any(
            use.path == f"{cls.name}.apply"
            for scope in facts.scopes
            if scope.owner is None or not _FUNCTIONS & set(facts.ancestry(scope.owner))
            for use in scope.uses.get(cls.name, ())
        )

    def _applied_under_autocast(self, cls: Scope, facts: Facts) -> Iterator[tuple[Call, Region]]:
        """Yield the calls of its `apply` under autocast, also through an alias or in a module's `forward`."""
        names = {f"{cls.name}.apply"}
        for scope in facts.scopes:
            for key, bindings in scope.bindings.items():
                if any(dotted(b.value) == f"{cls.name}.apply" for b in bindings):
                    names.add(key)
        calls = [call for calls in facts.calls.values() for call in calls if call.path in names]
        for call in calls:
            yield from ((call, region) for region in _enabled_regions(call, facts))
        modules = [call.scope.owner for call in calls if call.scope.name == "forward" and call.scope.owner is not None]
        for call in self._calls_of_modules(modules, facts) if modules else ():
            yield from ((call, region) for region in _enabled_regions(call, facts))

    def _calls_of_modules(self, modules: list[Scope], facts: Facts) -> Iterator[Call]:
        """Yield the calls of models that contain one of these modules: as an attribute, in a list, in a Sequential."""
        creating: set[Call] = set()
        files = {facts: None}
        for module in modules:  # grows: a module that creates one of them contains it
            users = facts.of(module).users(module.name) or ()
            files |= dict.fromkeys(users)
            for call in (call for each in (facts.of(module), *users) for call in each.calls.get(module.name, ())):
                owner = call.scope.owner
                if owner is not None and facts.of(call).class_kind(owner) == "model":
                    if owner not in modules:
                        modules.append(owner)
                    continue
                node: cst.CSTNode | None = call.node
                while node is not None and not isinstance(node, cst.BaseSmallStatement):
                    outer = facts.of(call).call_of(node)
                    creating |= {outer} if outer is not None else set()
                    node = facts.of(call).parent(node)
        for call in [call for each in files for calls in each.calls.values() for call in calls] if creating else ():
            made = (each.atom for each in facts.of(call).evaluate(call.func, call) if isinstance(each.atom, Object))
            if call not in creating and call.path and any(atom.call in creating for atom in made):
                yield call

    def _fix(self, forward: Scope, backward: Scope, region: Region | None, facts: Facts) -> Fix | None:
        torch = python_edits.name_of_torch(facts)
        if torch is None:
            return None
        device = (region.device if region is not None else None) or "cuda"
        edits = []
        for scope, name in ((forward, "custom_fwd"), (backward, "custom_bwd")):
            node = scope.node
            if not isinstance(node, cst.FunctionDef) or len(node.decorators) != 1:
                return None
            binding = next(b for b in (scope.parent or scope).bindings[scope.name] if b.defines is scope)
            end = facts.outer_span(node.decorators[0], binding)[1]
            text = f'@{torch}.amp.{name}(device_type="{device}")'
            edits.append(Edit(end, end, f"{python_edits.indentation(facts, facts.span(node, binding)[0])}{text}\n"))
        return Fix("Decorate both with torch.amp's", "unsafe", tuple(edits))


def _enabled_regions(call: Call, facts: Facts) -> Iterator[Region]:
    there = facts.of(call)
    if not there.is_inference(call):
        yield from (region for region, _ in there.autocasts(call) if not there.off_by_default(region))
