"""Traces: the order in which gradients are scaled, unscaled, clipped and applied, across helpers and branches."""

from __future__ import annotations

import textwrap

import pytest

from mpguard.lint.facts.behaviour.trace_steps import Trace, TraceStep, before, between, iteration, unrelated
from mpguard.lint.facts.file import Facts
from mpguard.lint.facts.syntax.path_condition import PathCondition, compatible
from mpguard.lint.source.source import Source


def traces_of(code: str) -> tuple[Trace, ...]:
    return Facts(Source.parse(textwrap.dedent(code).encode(), "example.py")).traces.all


def kinds(trace: Trace) -> list[str]:
    return [moment.kind for moment in trace]


def only(trace: Trace, kind: str) -> TraceStep:
    (found,) = [moment for moment in trace if moment.kind == kind]
    return found


HELPERS = """
    import torch

    class Run:
        def __init__(self, model):
            self.scaler = torch.amp.GradScaler("cuda")
            self.optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def apply(self):
            self.scaler.step(self.optimizer)
            self.scaler.update()

        def backward(self, loss):
            self.scaler.scale(loss).backward()

        def run(self, losses):
            for loss in losses:
                self.backward(loss)
                self.scaler.unscale_(self.optimizer)
                self.apply()
"""


def test_helpers_are_expanded_at_their_calls_and_have_no_trace_of_their_own() -> None:
    (trace,) = traces_of(HELPERS)
    assert kinds(trace) == ["scale", "backward", "unscale", "scaler_step", "update"]
    assert [[call.name for call in moment.via] for moment in trace] == [
        ["backward"],
        ["backward"],
        [],
        ["apply"],
        ["apply"],
    ]
    assert {len(moment.loops) for moment in trace} == {1}
    assert only(trace, "backward").scale is not None


def test_a_closure_runs_at_the_step_that_takes_it() -> None:
    trace = traces_of("""
        import torch
        def train(model, loader, scaler):
            optimizer = torch.optim.LBFGS(model.parameters())
            for x in loader:
                def closure():
                    loss = model(x)
                    scaler.scale(loss).backward()
                    return loss
                optimizer.zero_grad()
                optimizer.step(closure)
    """)[0]
    assert [kind for kind in kinds(trace) if kind != "exit"] == ["zero_grad", "scale", "backward", "step"]


def test_recursive_helpers_terminate() -> None:
    (trace,) = traces_of("""
        def again(scaler, loss, n):
            scaler.scale(loss).backward()
            if n:
                again(scaler, loss, n - 1)

        def main(scaler, loss):
            again(scaler, loss, 3)
    """)
    assert kinds(trace) == ["scale", "backward"]


def test_two_functions_that_one_call_may_run_are_exclusive() -> None:
    (trace,) = traces_of("""
        def main(args, losses, scaler):
            if args.amp:
                def run(loss):
                    scaler.scale(loss).backward()
            else:
                def run(loss):
                    loss.backward()
            for loss in losses:
                run(loss)
    """)
    scaled, plain = sorted((m for m in trace if m.kind == "backward"), key=lambda moment: moment.scale is None)
    assert scaled.scale is not None and plain.scale is None
    assert compatible(scaled.guard, only(trace, "scale").guard) and not compatible(scaled.guard, plain.guard)


ARMS = """
    def train(args, model, loader, optimizer, scaler):
        for i, x in enumerate(loader):
            loss = model(x)
            if args.amp:
                scaler.scale(loss).backward()
            else:
                loss.backward()
            if i % 4 == 0:
                scaler.step(optimizer)
"""


def test_each_branch_has_its_own_backward_before_a_step() -> None:
    (trace,) = traces_of(ARMS)
    place = kinds(trace).index("scaler_step")
    assert [moment.scale is not None for _, moment in before(trace, place)] == [False, True]


def test_a_step_before_an_exit_is_not_between_two_others() -> None:
    (trace,) = traces_of("""
        def train(args, model, loader, optimizer, scaler):
            for x in loader:
                scaler.scale(model(x)).backward()
                if args.check:
                    if model.bad:
                        optimizer.zero_grad()
                        continue
                scaler.step(optimizer)
    """)
    first, last = kinds(trace).index("backward"), kinds(trace).index("scaler_step")
    assert "zero_grad" in kinds(trace)[first:last]
    assert list(between(trace, first, last, "zero_grad", guard=PathCondition())) == []


def test_an_iteration_is_one_pass_of_the_innermost_loop() -> None:
    (trace,) = traces_of("""
        def train(loaders, model, optimizer, scaler):
            for loader in loaders:
                for x in loader:
                    scaler.scale(model(x)).backward()
                scaler.step(optimizer)
                scaler.update()
    """)
    assert [moment.kind for _, moment in iteration(trace, only(trace, "backward"))] == ["scale", "backward"]
    assert len(iteration(trace, only(trace, "update"))) == len(trace)


@pytest.mark.parametrize(
    ("condition", "passed"),
    [("finish(scaler)", True), ("save_checkpoint(model, scaler)", False), ("loss_scaler(loss, optimizer)", True)],
)
def test_a_scaler_passed_out_of_the_file_may_be_used_there(condition: str, passed: bool) -> None:
    (trace,) = traces_of(f"""
        from elsewhere import finish, save_checkpoint
        def train(model, loss, optimizer, scaler, loss_scaler):
            scaler.scale(loss).backward()
            {condition}
    """)
    assert ("passed" in kinds(trace)) == passed


@pytest.mark.parametrize(
    ("condition", "apart"),
    [
        ("args.max_grad_norm > 0", True),
        ("step % args.log_every == 0", True),
        ("args.gradient_accumulation_steps > 1", True),
        ("not args.fp16", False),
        ("use_amp", False),
        ("self.amp_type == 'native'", False),
        ("scaler is None", False),
        ("args.deepspeed", False),
        ("device.type == 'cuda'", False),
    ],
)
def test_flags_about_precision_are_distinguished_from_others(condition: str, apart: bool) -> None:
    (trace,) = traces_of(f"""
        def train(self, args, model, loss, optimizer, scaler, device, step, use_amp):
            scaler.scale(loss).backward()
            if {condition}:
                scaler.step(optimizer)
    """)
    assert unrelated(only(trace, "scaler_step").guard, only(trace, "backward").guard) == apart


def test_only_scalers_of_torch_are_own_scalers() -> None:
    code = """
        import torch
        from timm.utils import NativeScaler
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

        def train(args, losses, optimizer, given):
            a = torch.cuda.amp.GradScaler() if args.amp else None
            b = ShardedGradScaler()
            c = NativeScaler()
            for loss in losses:
                a.update()
                b.update()
                c.update()
                given.scaler.update()
    """
    facts = Facts(Source.parse(textwrap.dedent(code).encode(), "example.py"))
    own = [facts.scalers.own(moment.scaler, moment.record) for moment in facts.traces.all[0] if moment.kind == "update"]
    assert own == [True, True, False, False]


def test_functions_that_call_each_other_have_one_trace_from_the_first_of_them() -> None:
    (trace,) = traces_of(
        """
        import torch

        class Estimator:
            def fit(self, x):
                self._fit(x)

            def _fit(self, x):
                scaler = torch.amp.GradScaler("cuda")
                scaler.scale(self.model(x)).backward()
                scaler.step(self.optimizer)
                self.fit(x)
        """
    )
    assert [(each.kind, [call.name for call in each.via]) for each in trace] == [
        ("scale", ["_fit"]),
        ("backward", ["_fit"]),
        ("scaler_step", ["_fit"]),
    ]


def test_a_backward_pass_under_a_flag_leaves_the_one_before_it_to_the_step() -> None:
    (trace,) = traces_of(
        """
        def train(args, model, optimizer, x):
            model(x).backward()
            if args.adversarial:
                model(-x).backward()
            optimizer.step()
        """
    )
    place = next(place for place, each in enumerate(trace) if each.kind == "step")
    assert [each.call.order for _, each in before(trace, place)] == sorted(
        (each.call.order for each in trace if each.kind == "backward"), reverse=True
    )


def test_a_method_that_derived_classes_replace_runs_for_their_objects() -> None:
    traces = traces_of(
        """
        import torch

        class Base:
            def run(self, loss):
                self.differentiate(loss)
                self.finish()

            def differentiate(self, loss):
                raise NotImplementedError

            def finish(self):
                self.scaler.update()

        class One(Base):
            def differentiate(self, loss):
                self.scaler.scale(loss).backward()

            def finish(self):
                self.scaler.step(self.optimizer)
                super().finish()

        class Other(Base):
            def differentiate(self, loss):
                loss.backward()

            def finish(self):
                self.optimizer.step()
        """
    )
    trace = next(each for each in traces if each[0].via)
    assert [each.kind for each in trace if each.kind != "exit"] == [
        "scale", "backward", "backward", "scaler_step", "update", "step",
    ]  # fmt: skip
    together = [compatible(each.guard, trace[-1].guard) for each in trace]
    assert together == [False, False, True, False, False, True]
