from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from mpguard.lint import (
    Bad,
    Call,
    Diagnostic,
    Dtype,
    Facts,
    Good,
    Note,
    Object,
    PathCondition,
    Record,
    Rule,
    any_of,
    dotted,
    lazy_pattern,
    library_names,
    text_of,
)

_DEPTH = 6
_PATHS = frozenset({
    "torch.nn.DataParallel", "torch.nn.parallel.DataParallel", "torch.nn.parallel.data_parallel.DataParallel",
})  # fmt: skip
#: Accelerators for which a script is changed, so that little of it is for CUDA, and their packages.
_OTHER_DEVICES = lazy_pattern(
    r"[\"'](?:hpu|npu|mlu)(?::\d+)?[\"']|\b(?:habana_frameworks|torch_npu|torch_mlu|torch_xla)\b"
)


class AutocastWithDataparallel(Rule):
    """An `nn.DataParallel` model is called in a BF16 autocast region that is entered outside its `forward`.

    ## What it does
    Reports calls of a model that is wrapped in `torch.nn.DataParallel` inside a BF16 autocast region. Follows the model
    through arguments of functions of the file.

    ## Why is this bad
    `DataParallel` runs each replica in its own thread. torch (2.13, `parallel_apply`) passes on whether autocast is
    enabled, but not its dtype, and a new thread starts with the default: with two or more GPUs the replicas compute in
    FP16, without a GradScaler. Enter autocast in `forward` (or decorate it), or use DistributedDataParallel.

    ## Why it is a preview rule
    DataParallel is mostly in code that nobody runs on several GPUs any more. Of the 8 repositories with findings that
    were not looked at before, those of 5 were right.

    ## Known limits
    FP16 regions are not reported, since FP16 is the default that the threads use. Neither is `device_ids=[0]`: with one
    device there are no threads; nor a region on a device that the script chooses, if it runs on Gaudi,
    Ascend or TPU as well. A call without gradients whose output nothing uses is not reported: it warms up.
    """

    code, name = "MPG309", "autocast-with-dataparallel"
    severity = "warning"
    preview = True
    message = "`{model}` is a DataParallel: its replicas compute in FP16, not in the BF16 of the surrounding region"
    help = "enter the autocast region in the model's `forward`, or use DistributedDataParallel"
    triggers = (
        any_of(b"DataParallel("),
        any_of(b"autocast"),
        any_of(b"bfloat16", b"bf16"),
        any_of(b"nn.DataParallel", b"import DataParallel", b".parallel.DataParallel", b" DataParallel("),
    )
    examples = (
        Bad(
            """\
import torch

def train(loader):
    model = torch.nn.DataParallel(torch.nn.Linear(8, 8)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for x in loader:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(x).sum()  # !
        loss.backward()
        optimizer.step()
"""
        ),
        Good(
            """\
import torch
from torch import nn

class Net(nn.Module):
    @torch.autocast("cuda", dtype=torch.bfloat16)
    def forward(self, x):
        return x @ x

def main(loader, args, net):
    inside = nn.DataParallel(Net())
    half = nn.DataParallel(net)
    one = nn.DataParallel(net, device_ids=[0])
    other = torch.nn.parallel.DistributedDataParallel(net)
    for x in loader:
        inside(x)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            inside(x)
        with torch.autocast("cuda", dtype=torch.float16):
            half(x)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            one(x)
            other(x)
            half.module(x)
        with torch.autocast("cuda", dtype=args.dtype):
            half(x)
"""
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        if not any(self._wraps(call, facts) for call in facts.calls.get("DataParallel", ())):
            return
        # DataParallel wraps nothing on other accelerators.
        devices = ("cuda",) if _OTHER_DEVICES.search(facts.file_text) else ("cuda", None)
        for calls in list(facts.calls.values()):
            for call in calls:
                if not call.path or (isinstance(facts.parent(call.node), cst.Expr) and facts.is_inference(call)):
                    continue
                regions = [
                    (region, both)
                    for region, guard in facts.autocasts(call)
                    for each in region.may_be(Dtype.BF16)
                    if (both := guard.joined(each)).possible and region.device in devices
                ]
                for region, guard in regions:
                    if region.call is not None and self._is_parallel(call.func, call, guard, facts, _DEPTH):
                        note = Note("the region", region.call.span, facts.elsewhere(region.call))
                        yield self.at(call, model=call.path, notes=(note,))
                        break

    def _wraps(self, call: Call, facts: Facts) -> bool:
        devices = call.argument(1, "device_ids")
        one = isinstance(devices, (cst.List, cst.Tuple)) and len(devices.elements) == 1
        return not one and facts.called_path(call) in _PATHS and not self._enters_autocast(call, facts)

    def _enters_autocast(self, call: Call, facts: Facts) -> bool:
        """True if the wrapped model enters an autocast in its own `forward`."""
        for each in facts.evaluate(call.argument(0, "module"), call):
            forward = each.atom.cls.method("forward") if isinstance(each.atom, Object) and each.atom.cls else None
            if forward is not None:
                entered = (*forward.decorators, *(item.expr for item in forward.withs))
                return any("autocast" in text_of(expression) for expression in entered)
        return False

    def _is_parallel(
        self, node: cst.CSTNode | None, at: Record, guard: PathCondition, facts: Facts, depth: int
    ) -> bool:
        """True if an expression may be a model that is wrapped in DataParallel, under a guard."""
        if node is None or depth < 0:
            return False
        if isinstance(node, cst.Call):
            call = facts.call_of(node)
            if call is None or not guard.joined(call.guard).possible:
                return False
            if call.receiver is not None and call.name in library_names.SAME:
                return self._is_parallel(call.receiver, call, guard, facts, depth - 1)
            return self._wraps(call, facts)
        if isinstance(node, cst.IfExp):
            return any(self._is_parallel(each, at, guard, facts, depth - 1) for each in (node.body, node.orelse))
        for binding in facts.bindings(dotted(node), at, guard) if dotted(node) else []:
            both = guard.joined(binding.guard)
            if not both.possible:
                continue
            if binding.kind == "assign" and self._is_parallel(binding.value, binding, both, facts, depth - 1):
                return True
            if binding.kind == "param":
                for call in facts.callers(binding.scope):
                    given = facts.argument_for(call, binding)
                    if given is not binding.value and self._is_parallel(given, call, both, facts, depth - 1):
                        return True
        return False
