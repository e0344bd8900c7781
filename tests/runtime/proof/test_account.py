"""The account of what was computed: programs that compute in another dtype are refused, ordinary ones are proven."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="the real library runs here")

import torch
import torch.distributed as dist
from processes import proof, transcript
from right_programs import RIGHT
from short_programs import needs_bf16_lstm, run
from torch import nn
from wrong_programs import WRONG

from mpguard.runtime.proof import account, compiled_graphs, profiler, trace
from mpguard.runtime.proof.account import StepAccount
from mpguard.runtime.proof.inferred import Inferred
from mpguard.runtime.proof.products import Work


@pytest.fixture(autouse=True)
def own_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no test find the range of a step that another one has left open."""
    monkeypatch.setattr(account, "_steps", account._Steps())


@pytest.mark.parametrize("name", WRONG)
def test_a_program_that_computes_in_another_dtype_is_refused(tmp_path: Path, name: str) -> None:
    recipe, expected, script = WRONG[name]
    ended = run(tmp_path, script, recipe=recipe)
    assert ended.returncode == 1 and "mpguard: not " in ended.stderr, transcript(ended)
    row = proof(tmp_path / "proof.json")["rows"][expected]
    hidden = name.startswith("numpy_in")  # its dtype cannot be known
    assert row["ok"] is (None if hidden else False) and row["found"].startswith("not observed: ") is hidden, row


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs_bf16_lstm()) if name == "lstm" else name for name in RIGHT]
)
def test_an_ordinary_program_is_proven(tmp_path: Path, name: str) -> None:
    recipe, script = RIGHT[name]
    ended = run(tmp_path, script, recipe=recipe)
    made = proof(tmp_path / "proof.json")
    assert ended.returncode == 0 and made["rows"]["compute"]["ok"], transcript(ended)
    scripted = {"fp32"} if "a_head_in_fp32" in name or "by_the_script" in name else set()
    assert made["observed"]["compute"].keys() == {"fp32" if recipe == "fp32" else "bf16"} | scripted
    assert ("fp32 by the script" in made["rows"]) is bool(scripted), made["rows"]
    assert "warn" not in ended.stderr.lower() and "profiler_" not in ended.stderr, transcript(ended)
    if name == "frozen_encoder_in_fp32":
        assert "(frozen parts: fp32, " in ended.stderr and " % of the matmuls) · recipe" in ended.stderr
    if name == "gradient_accumulation":
        assert "(17 of 40 backward passes checked)" in made["rows"]["compute"]["found"]
    if name == "own_profiler":
        assert "their events True" in ended.stdout, transcript(ended)


def test_tables_and_their_products_by_elements_are_proven_and_casts_are_named(tmp_path: Path) -> None:
    """A step without any matmul; the FP16 that the script rounds to is none of the policy's dtypes."""
    script = (
        "e = nn.Embedding(64, 16); o = adam(e); i = torch.randint(0, 64, (32,))\n"
        "for _ in range(2):\n"
        "    with torch.autocast('cpu', torch.bfloat16): loss = (e(i) * e(i + 1 - 64 * (i == 63))).sum(-1)\n"
        "    loss = (loss + (e(i).half().float() - e(i)).detach().sum(-1)).pow(2).mean()\n"
        "    loss.backward(); o.step(); o.zero_grad()"
    )
    ended = run(tmp_path, script)
    rows = proof(tmp_path / "proof.json")["rows"]
    assert ended.returncode == 0 and rows["compute"]["found"] == "none: no matmul leads to the gradients", rows
    assert rows["casts to fp16"]["found"].endswith(
        "512 elements became that were rounded so, in code outside of modules"
    )
    line = "in force at steps 1-2 (2 checks), except for what could not be observed: casts to fp16"
    assert ended.stderr.splitlines()[-1] == line, transcript(ended)


def test_what_a_gpu_needs_changes_nothing_that_is_recorded(tmp_path: Path) -> None:
    """With CUDA, Kineto is asked for other activities: see `_leaves_out_cuda`."""
    rows = []
    for cuda in ("None", "'13.0'"):
        ended = run(tmp_path, f"torch.version.cuda = {cuda}\nm = net(); train(m, adam(m), 5)")
        made = proof(tmp_path / "proof.json")
        assert ended.returncode == 0 and "warn" not in ended.stderr.lower(), transcript(ended)
        rows.append((made["rows"], made["observed"]["compute"]))
    assert rows[0] == rows[1] and rows[0][1].keys() == {"bf16"}


def test_gradients_of_a_model_that_is_not_trained_are_no_training(tmp_path: Path) -> None:
    ended = run(tmp_path, "m = net(); x.requires_grad_()\nfor _ in range(3): m(x).sum().backward()")
    assert ended.returncode == 0 and "no training was seen in this process" in ended.stderr, transcript(ended)


@pytest.mark.parametrize(
    ("script", "module"),
    [
        ("m = N(); train(m, adam(m))", "head (Linear of N)"),
        ("m = N(); m.compile(backend='aot_eager'); train(m, adam(m))", "head (Linear of N)"),
        ("m = torch.compile(N(), backend='aot_eager'); train(m, adam(m))", "head (Linear of N)"),
    ],
)
def test_the_module_of_a_deviation_is_named(tmp_path: Path, script: str, module: str) -> None:
    net = (
        "class N(nn.Module):\n  def __init__(s): super().__init__(); s.body = net(); s.head = nn.Linear(32, 256)\n"
        "  def forward(s, x):\n    h = s.body(x)\n    with amp(enabled=False): return s.head(h.float())\n"
    )
    ended = run(tmp_path, net + script)
    assert ended.returncode == 1 and f"fp32: {module}; asked: bf16" in ended.stderr, transcript(ended)


ENDLESS = """
m = net(); o = adam(m)
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
    train(m, o, steps=14)
print("trained")
"""
BROKEN = """
from mpguard.runtime.proof import trace
def read(*_, **__): raise ValueError("an event of another kind")
trace.read = read
m = net(); train(m, adam(m)); print("trained")
"""


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (ENDLESS, "another profiler runs"),
        (BROKEN, "torch's profiler failed: ValueError: an event of another kind"),
    ],
)
def test_what_cannot_be_recorded_is_inferred_and_ends_no_training(tmp_path: Path, script: str, reason: str) -> None:
    ended = run(tmp_path, script)
    assert ended.returncode == 0 and "trained" in ended.stdout, transcript(ended)
    assert f"bf16 (inferred from autograd's graph: {reason})" in ended.stderr, transcript(ended)
    made = proof(tmp_path / "proof.json")
    assert made["verdict"] == "in force" and made["rows"]["compute"]["ok"] is True
    assert made["observed"]["inferred"] == reason and made["observed"]["compute"].keys() == {"bf16"}


def recorded(  # type: ignore[no-untyped-def]
    step, *parameters: torch.Tensor, whole: StepAccount | None = None
) -> account.Products:
    """Return the matmuls of a function that returns a loss, and of its backward pass."""
    whole = whole or StepAccount()
    whole.weights = account.shapes_of(parameters)
    whole.start()
    try:
        loss = step()
        whole.begin_pass(Inferred(leaves={id(each) for each in parameters}), ())
        loss.backward()
        whole.end_pass(True)
        assert not whole.reason
        return whole.products({id(each) for each in parameters})
    finally:
        whole.stop()


def test_the_profiler_is_stopped_at_the_end_if_another_thread_trains() -> None:
    """The process crashes at its end if the profiler still runs, and only the thread that started it can stop it."""
    whole = StepAccount()
    whole.start()
    thread = threading.Thread(target=whole.stop)
    thread.start()
    thread.join()
    assert whole.reason == account.OTHER_THREAD and torch._C._autograd._profiler_enabled()
    profiler.stop_in_this_thread()
    assert not torch._C._autograd._profiler_enabled()


@pytest.mark.parametrize(
    ("layer", "shape", "forward", "backward"),
    [
        (nn.Linear(16, 32), (4, 16), 2 * 4 * 16 * 32, 1),
        (nn.Linear(16, 32, bias=False), (2, 4, 16), 2 * 8 * 16 * 32, 1),
        (nn.Conv2d(3, 8, 3, padding=1), (2, 3, 10, 10), 2 * 2 * 100 * 8 * 27, 2),
        (nn.LSTM(8, 16), (5, 2, 8), 2 * 5 * 2 * 64 * (8 + 16), 2),
        (nn.LayerNorm(16), (4, 16), 0, 0),
    ],
)
def test_work_is_counted_in_floating_point_operations(
    layer: nn.Module, shape: tuple[int, ...], forward: int, backward: int
) -> None:
    """backward: how often the work of the forward pass; 1 if the input needs no gradient."""
    outputs = lambda: layer(torch.randn(shape))  # noqa: E731
    found = recorded(lambda: (out[0] if isinstance(out := outputs(), tuple) else out).sum(), *layer.parameters())
    assert sum(found.trained.values()) == forward * (1 + backward) and not found.frozen
    assert found.called == {id(layer): type(layer).__name__} and {work.module for work in found.trained} <= {id(layer)}


def test_products_without_a_gradient_are_frozen() -> None:
    trained, frozen = nn.Linear(16, 16), nn.Linear(16, 16).requires_grad_(False)

    def step() -> torch.Tensor:
        with torch.no_grad():
            hidden = frozen(torch.randn(4, 16))
        unused = trained(hidden)
        return trained(frozen(hidden)).sum() + 0 * unused.detach().sum()

    found = recorded(step, *trained.parameters())
    size = 2 * 4 * 16 * 16
    assert found.frozen == {Work("fp32", module=id(frozen)): 2 * size, Work("fp32", module=id(trained)): size}
    assert found.trained == {Work("fp32", module=id(trained)): 2 * size}


@pytest.mark.filterwarnings("ignore:.*is deprecated, use torch.distributed._functional_collectives:FutureWarning")
def test_collectives_of_autograd_multiply_nothing() -> None:
    """As many tokens as the model is wide have the shape of its weights, which an unknown kernel would multiply by."""
    import torch.distributed.nn.functional as collectives

    weight, x = nn.Parameter(torch.randn(16, 16)), torch.randn(16, 16, requires_grad=True)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def step() -> torch.Tensor:
        sent = collectives.all_to_all_single(x.new_empty(1, 16, 16), x)  # an expert receives another number
        (gathered,) = collectives.all_gather(sent[0])
        return (collectives.all_reduce(gathered) @ weight).sum()

    try:
        found = recorded(step, weight, x)
    finally:
        dist.destroy_process_group()
    assert {work.dtype for work in found.trained} == {"fp32"} and sum(found.trained.values()) == 3 * 2 * 16**3


class CompiledFunction(torch.autograd.Function):
    """A matmul as compiled code calls it: its operators run, or a CUDA graph launches the kernels that they used."""

    replayed = False
    graphs = ("forward", "backward")

    @staticmethod
    def _multiply(graph: str, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        with torch._C._profiler._RecordFunctionFast(f"## Call CompiledFxGraph {graph} ##"):
            if CompiledFunction.replayed:
                return torch.from_numpy(left.numpy() @ right.numpy())
            return torch.mm(left.bfloat16(), right.bfloat16()).float()

    @staticmethod
    def forward(ctx, x, weight):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x)
        return CompiledFunction._multiply(CompiledFunction.graphs[0], x.detach(), weight.detach().t())

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        (x,) = ctx.saved_tensors
        return None, CompiledFunction._multiply(CompiledFunction.graphs[1], gradient.t().contiguous(), x)


@pytest.mark.parametrize("hashes", [("f1", "b1"), ("None", "None")])
def test_a_replay_of_a_cuda_graph_has_the_products_of_the_recorded_call(
    hashes: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, x = nn.Parameter(torch.randn(16, 8)), torch.randn(4, 8)
    monkeypatch.setattr(CompiledFunction, "graphs", hashes)
    monkeypatch.setitem(sys.modules, compiled_graphs.CUDA_GRAPHS, ModuleType(compiled_graphs.CUDA_GRAPHS))
    size = 2 * 4 * 8 * 16
    step = lambda: CompiledFunction.apply(x, weight).sum()  # noqa: E731
    first = StepAccount()
    assert recorded(step, weight, whole=first).trained == {Work("bf16", compiled=True): 2 * size}
    monkeypatch.setattr(CompiledFunction, "replayed", True)
    again = recorded(step, weight, whole=StepAccount(first))
    unknown = recorded(step, weight)
    assert {work.dtype for work in unknown.trained} == {None}, "it was never seen recorded"
    assert again.trained == (unknown.trained if "None" in hashes else {Work("bf16", compiled=True): 2 * size})


def _without_shapes(first: StepAccount, step: Callable[[], torch.Tensor], weight: nn.Parameter) -> account.Products:
    """Return what the account after `first` finds that trusts the graphs which that has seen."""
    again = StepAccount(first)
    again.trusts_graphs(True)
    assert first.is_compiled_only is not again._shapes
    return recorded(step, weight, whole=again)


CHANGED = "other code was compiled since it was recorded"


def test_compiled_graphs_that_are_known_need_no_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = nn.Parameter(torch.randn(16, 8)), torch.randn(4, 8)
    first = StepAccount()
    step = lambda: CompiledFunction.apply(x, weight).sum()  # noqa: E731
    whole = recorded(step, weight, whole=first)
    again = _without_shapes(first, step, weight)
    assert again.trained == whole.trained and not again.reason and again.frozen == whole.frozen
    monkeypatch.setattr(CompiledFunction, "graphs", ("forward", "another"))
    assert CHANGED in _without_shapes(first, step, weight).reason


@pytest.mark.parametrize("eager", [False, True])
def test_the_operators_of_known_graphs_are_not_recorded(eager: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a check finds is the same: the range of a graph names its matmuls. eager: a matmul runs outside of it."""
    weight, x = nn.Parameter(torch.randn(16, 8)), torch.randn(4, 8)
    current, recorded_names, known = StepAccount(), list[str](), list[bool]()
    multiply, read = CompiledFunction._multiply, trace.read

    def step() -> torch.Tensor:
        result = CompiledFunction.apply(x, weight).sum()
        return result * (x @ weight.t()).sum() if eager else result

    def inductor(graph: str, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        around = current.known_graph(f"## Call CompiledFxGraph {graph} ##")
        known.append(around is not None)
        with contextlib.nullcontext() if around is None else around:
            return multiply(graph, left, right)

    def reading(events: list[Any], *args: Any, **options: Any) -> Any:
        recorded_names.extend(event.name() for event in events)
        return read(events, *args, **options)

    monkeypatch.setattr(CompiledFunction, "_multiply", staticmethod(inductor))
    monkeypatch.setattr(trace, "read", reading)
    whole = recorded(step, weight, whole=current)
    multiplied = recorded_names.count("aten::mm")
    recorded_names.clear()
    current = StepAccount(current)
    current.trusts_graphs(True)
    assert current._shapes is eager
    found = recorded(step, weight, whole=current)
    assert known == [False, False, True, True] and recorded_names.count("aten::mm") == multiplied - 2
    assert found.trained == whole.trained and found.frozen == whole.frozen and not found.reason
    assert found.converted == whole.converted
    current = StepAccount(current)
    another = nn.Parameter(torch.randn(64, 64))  # a kernel of another library may multiply by it in the graph
    assert recorded(step, weight, another, whole=current).trained == whole.trained and known[4:] == [False, False]


@pytest.mark.parametrize(
    "change",
    [
        lambda result, x: result + (x @ torch.randn(8, 1)).sum(),  # a product outside of the graphs
        lambda result, _: result.to(torch.bfloat16).float(),  # its gradient is copied
        lambda result, _: Doubled.apply(result),  # a function that may multiply in a kernel of its own
    ],
)
def test_what_runs_outside_of_compiled_graphs_needs_shapes(change: Callable[..., torch.Tensor]) -> None:
    weight, x = nn.Parameter(torch.randn(16, 8)), torch.randn(4, 8)
    first = StepAccount()
    step = lambda: CompiledFunction.apply(x, weight).sum()  # noqa: E731
    recorded(step, weight, whole=first)
    assert CHANGED in _without_shapes(first, lambda: change(step(), x), weight).reason


def test_a_program_with_products_outside_of_compiled_graphs_is_recorded_with_shapes() -> None:
    weight, x = nn.Parameter(torch.randn(16, 8)), torch.randn(4, 8)
    first = StepAccount()
    step = lambda: CompiledFunction.apply(x, weight).sum() + (x @ weight.t()).sum()  # noqa: E731
    whole = recorded(step, weight, whole=first)
    assert not first.is_compiled_only and _without_shapes(first, step, weight).trained == whole.trained


#: A model whose products are those of a "compiled graph"; from the fourth step on it is another one, in FP32.
RECOMPILED = """
from mpguard.runtime import progress
progress.EVERY_STEP = True
class CompiledFunction(torch.autograd.Function):
    dtype = torch.bfloat16
    @classmethod
    def multiply(cls, left, right):
        with torch._C._profiler._RecordFunctionFast(f"## Call CompiledFxGraph {cls.dtype} ##"):
            return torch.mm(left.to(cls.dtype), right.to(cls.dtype)).float()
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        return CompiledFunction.multiply(x, weight.t())
    @staticmethod
    def backward(ctx, gradient):
        return None, CompiledFunction.multiply(gradient.t(), ctx.saved_tensors[0])
class Net(nn.Module):
    def __init__(s): super().__init__(); s.weight = nn.Parameter(torch.randn(32, 32) / 6)
    def forward(s, x): return CompiledFunction.apply(x, s.weight)
m = Net(); o = adam(m)
for number in range(1, 8):
    if number == CHANGED: CompiledFunction.dtype = torch.float32
    train(m, o, 1); print("step", number)
"""


@pytest.mark.parametrize(("changed", "steps"), [(4, 4), (99, 7)])
def test_code_that_was_compiled_again_is_recorded_at_the_next_step(tmp_path: Path, changed: int, steps: int) -> None:
    ended = run(tmp_path, RECOMPILED.replace("CHANGED", str(changed)))
    made = proof(tmp_path / "proof.json")
    assert ended.stdout.splitlines()[-1] == f"step {steps}", transcript(ended)
    assert bool(ended.returncode) is (changed < 8) and ("mpguard: not in force: step 5: compute" in ended.stderr) is (
        changed < 8
    ), transcript(ended)
    assert made["run"][0]["looks"] == list(range(1, changed if changed < 8 else 8)), made["run"]


class Doubled(torch.autograd.Function):
    """A function of a script."""

    @staticmethod
    def forward(_ctx, x):  # type: ignore[no-untyped-def]
        return 2 * x

    @staticmethod
    def backward(_ctx, gradient):  # type: ignore[no-untyped-def]
        return 2 * gradient


def test_the_operators_of_a_step_are_not_recorded_up_to_a_module_that_is_called_in_it() -> None:
    layer, x, events = nn.Linear(8, 8), torch.randn(4, 8), []
    whole = StepAccount()
    whole.start()
    try:
        with account.step_of(None, trains=False):
            x @ x.t()
            layer(x)
        with profiler.muted(), profiler.muted():
            x @ x.t()
        with account.step_of(None, trains=False), profiler.muted(whole=True):
            layer(x)
        x.t() @ x
        whole._recording, recording = None, whole._recording
        assert recording is not None
        whole._ranges.remove()
        events = [event.name() for event in recording.stop()[0]]
    finally:
        whole.stop()
    assert (events.count("aten::addmm"), events.count("aten::matmul")) == (1, 1), events


def test_a_long_evaluation_before_a_step_is_not_recorded_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(account, "LONG_CALLS", 10)
    layer, whole = nn.Linear(16, 16), StepAccount()
    parameters = {id(each) for each in layer.parameters()}
    whole.start()
    try:
        with torch.no_grad():
            for _ in range(40):
                layer(torch.randn(4, 16))
        assert not whole.running
        loss = sum(layer(torch.randn(4, 16)).sum() for _ in range(20))
        whole.begin_pass(Inferred(leaves=parameters), ())
        loss.backward()
        whole.end_pass(True)
        found = whole.products(parameters)
    finally:
        whole.stop()
    size = 2 * 4 * 16 * 16
    assert found.trained == {Work("fp32", module=id(layer)): 20 * 2 * size} and not found.reason
    assert found.frozen == {Work("fp32", module=id(layer), evaluated=True): 10 * size}


def test_ranges_of_the_program_are_closed_before_the_profiler_starts_again() -> None:
    """Else the range writes into the events of the first profiler, which are gone."""
    whole = StepAccount()
    whole.start()
    try:
        with torch.profiler.record_function("epoch"):
            assert whole._cut(resume=True) is not None
            assert not whole.running
            whole.start()
            assert not whole.running
    finally:
        whole.stop()
    assert trace.read([], set(), None).forward == []


def test_a_range_that_is_open_inside_of_a_module_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """DDP's forward has one, in which a meta-learner computes gradients; the range of the module is closed before."""
    running: list[bool] = []

    class Inner(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.profiler.record_function("inside"):
                assert whole._cut(resume=True) is not None
                running.append(whole.running)
            return x

    for _ in range(20):  # the difference of two clocks told it at times
        monkeypatch.setattr(account._steps, "cut", False)
        whole = StepAccount()
        whole.start()
        try:
            nn.Sequential(Inner())(torch.randn(4, 16))
        finally:
            whole.stop()
    assert running == [False] * 20, "a range that is open points into the events of the last profiler"


@pytest.mark.parametrize("around", [False, True])
def test_a_range_around_each_backward_pass_ends_the_record_of_one_step_only(around: bool) -> None:
    """A pipeline's schedule has one for each microbatch; the forward pass of the second one is no frozen part."""
    whole, layer = StepAccount(), nn.Linear(16, 16, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    size, found = 2 * 4 * 16 * 16, []
    whole.weights = account.shapes_of(layer.parameters())
    whole.start()
    try:
        with torch.profiler.record_function("epoch") if around else contextlib.nullcontext():
            for _step in range(2):
                losses = [layer(torch.randn(4, 16)).sum() for _microbatch in range(2)]
                for number, loss in enumerate(losses):
                    with torch.profiler.record_function(f"Backward {number}"):
                        whole.begin_pass(Inferred(leaves={id(layer.weight)}), ())
                        loss.backward()
                        whole.end_pass(True)
                with account.step_of(optimizer, trains=False):
                    found.append(whole.products({id(layer.weight)}))
                    whole.begin_step(layer.parameters())
                whole.resume()
                assert whole.running is not around, "a range that is open points into the events of the last profiler"
    finally:
        whole.stop()
    assert found[0].trained == {Work("fp32", module=id(layer)): 2 * size}
    assert [(each.looked_at, bool(each.frozen)) for each in found] == [(1, False), (not around, False)]


@pytest.mark.parametrize(
    ("kernel", "dtype", "work"),
    [
        ("triton_per_fused_embedding_dense_backward_nll_loss_14", "c10::BFloat16", None),
        ("triton_poi_fused__to_copy_3", "float", None),
        ("triton_tem_fused_mm_7", "c10::BFloat16", Work("bf16")),
        ("triton_tem_fused__scaled_mm_2", "c10::Float8_e4m3fn", Work("fp8")),
        ("my_kernel", "c10::BFloat16", Work(None, name="my_kernel")),
    ],
)
def test_kernels_of_inductor(kernel: str, dtype: str, work: Work | None) -> None:
    """Its matmuls are templates; in the others a trained matrix, or an embedding's gradient, is not multiplied."""
    event = SimpleNamespace(
        name=lambda: kernel, scope=lambda: trace.FUNCTION, sequence_nr=lambda: -1, is_async=lambda: False,
        start_thread_id=lambda: 1, start_ns=lambda: 1, end_ns=lambda: 2,
        shapes=lambda: [[8, 32], [32, 64]], dtypes=lambda: [dtype, dtype],
    )  # fmt: skip
    found = trace.read([event], {(64, 32), (32, 64)}, None).forward
    assert [(each, flops) for each, _, flops in found] == ([] if work is None else [(work, 2 * 8 * 64 * 32)])


def test_what_torch_2_11_has_not_finished_is_only_in_its_tree() -> None:
    """It has no `structured_input_shapes` either."""
    node = lambda name, end, *children: SimpleNamespace(  # noqa: E731
        name=name, start_time_ns=5, end_time_ns=end, children=list(children)
    )
    tree = [node("done", 9), node("epoch", -(2**63), node("step", -(2**63), node("aten::mm", 7)))]
    assert profiler._without_end(tree) == [("epoch", 5), ("step", 5)]
    assert trace._input_shapes(SimpleNamespace(shapes=lambda: [[2, 3]])) == [[2, 3]]


def test_tensors_can_be_exchanged_where_recording_is_interrupted() -> None:
    """The profiler has weak references to the tensors that it has seen; torch refuses to exchange these."""
    whole, layer = StepAccount(), nn.Linear(16, 16)
    whole.start()
    assert whole.running
    try:
        layer(torch.randn(4, 16))
        with pytest.raises(RuntimeError, match="weakref"):
            torch.utils.swap_tensors(layer.weight, nn.Parameter(torch.zeros(16, 16)))
        with whole.interrupted():
            torch.utils.swap_tensors(layer.weight, nn.Parameter(torch.zeros(16, 16)))
        assert whole.running and not layer.weight.any()
    finally:
        whole.stop()


VALIDATION = """
m = net(); o = adam(m)
def validate():
    with torch.no_grad(): m(x)
WHEN
"""

ORDERS = {
    "before_the_first_step": "for _ in range(9): validate()\ntrain(m, o)",
    "of_parts_without_weights": (
        "class S(nn.Module):\n  def forward(s, h): return h @ h.t() @ h\n"
        "m = nn.Sequential(net(), S(), nn.Linear(32, 8)); o = adam(m)\nfor _ in range(9): validate()\ntrain(m, o)"
    ),
    "compiled": 'm = torch.compile(m, backend="eager")\nfor _ in range(9): validate()\ntrain(m, o)',
    "compiled_in_place": 'm.compile(backend="eager")\nfor _ in range(9): validate()\ntrain(m, o)',
    "between_steps": "train(m, o, steps=1); validate(); train(m, o, steps=3)",
}


@pytest.mark.parametrize("name", ORDERS)
def test_a_validation_is_no_frozen_part(tmp_path: Path, name: str) -> None:
    """It may be in another dtype than the training; what is frozen feeds the trained parts."""
    ended = run(tmp_path, VALIDATION.replace("WHEN", ORDERS[name]))
    assert ended.returncode == 0 and "frozen" not in ended.stderr, transcript(ended)
    assert ("evaluation" in ended.stderr) is (name != "between_steps"), transcript(ended)


def test_a_teacher_is_a_frozen_part(tmp_path: Path) -> None:
    script = (
        "m, teacher = net(), net(64, 4).requires_grad_(False)\n"
        "def step(x):\n  with torch.no_grad(): h = teacher(F.pad(x, (0, 32)))\n  return m(x) - h[:, :32]\n"
        "train(step, adam(m))\n"
        # a perceptual loss in FP32, larger than what is trained, through which the gradients pass
        "m = net(); judge = nn.Linear(32, 4096).requires_grad_(False)\n"
        "def step(x):\n  y = m(x)\n  with amp(enabled=False): return judge(y.float())\n"
        "train(step, adam(m))"
    )
    ended = run(tmp_path, script)
    assert ended.returncode == 0 and "frozen parts" in ended.stderr, transcript(ended)
    assert "evaluation" not in ended.stderr
    assert "where the script has left autocast: a Linear whose weights no optimizer has" in ended.stderr


def test_a_base_in_fp16_below_adapters_is_named(tmp_path: Path) -> None:
    script = (
        "class Lora(nn.Module):\n"
        "  def __init__(s): super().__init__(); s.base = nn.Linear(32, 32).half().requires_grad_(False); "
        "s.a = nn.Linear(32, 4, False); s.b = nn.Linear(4, 32, False)\n"
        "  def forward(s, x):\n"
        "    with amp(enabled=False): h = s.base(x.half())\n"
        "    return h + s.b(s.a(x))\n"
        "m = nn.Sequential(Lora(), Lora()); train(m, adam(m))"
    )
    ended = run(tmp_path, script)
    assert ended.returncode == 1 and "The base model, which is not trained, is in fp16" in ended.stderr, transcript(
        ended
    )
    assert "hook of saved tensors" not in ended.stderr


def test_activations_that_are_packed_to_integers_are_a_row(tmp_path: Path) -> None:
    script = (
        "def pack(t):\n"
        "  if isinstance(t, nn.Parameter) or not t.is_floating_point() or t.numel() < 512: return t\n"
        "  scale = t.abs().max().float() / 127; return (t.float() / scale).round().to(torch.int8), scale, t.dtype\n"
        "def unpack(p): return p if isinstance(p, torch.Tensor) else (p[0].float() * p[1]).to(p[2])\n"
        "m = net(); o = adam(m)\n"
        "with torch.autograd.graph.saved_tensors_hooks(pack, unpack): train(m, o)"
    )
    ended = run(tmp_path, script)
    found = proof(tmp_path / "proof.json")["rows"]["saved activations"]["found"]
    assert ended.returncode == 0 and found.startswith("converted from int8, "), transcript(ended)


def test_fp32_is_not_proven_where_most_products_are_not_seen(tmp_path: Path) -> None:
    _, _, script = WRONG["numpy_inside_a_function_whose_batch_is_its_width"]
    script = script.replace(".bfloat16()", ".float()").replace("adam(m))", "adam(m), enabled=False)")
    ended = run(tmp_path, script, recipe="fp32")
    assert ended.returncode == 1 and "not proven: compute could not be observed" in ended.stderr, transcript(ended)


IN_THREADS = {
    "the_whole_training": (
        "import threading\n"
        "def work(): m = net(); train(m, adam(m)); print('trained')\n"
        "thread = threading.Thread(target=work); thread.start(); thread.join()"
    ),
    "one_step": (
        "import threading\n"
        "def work(): m = net(); train(m, adam(m), steps=1); print('trained')\n"
        "thread = threading.Thread(target=work); thread.start(); thread.join()"
    ),
    "an_optimizer_that_never_steps": (
        "import threading\n"
        "thread = threading.Thread(target=lambda: adam(net())); thread.start(); thread.join()\n"
        "m = net(); train(m, adam(m)); print('trained')"
    ),
    "a_pool_runs_the_steps": (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "def work(m): train(m, adam(m)); print('trained')\n"
        "with ThreadPoolExecutor(1) as pool: pool.submit(work, net()).result()"
    ),
    "a_daemon_that_outlives_the_script": (
        "import threading, time\n"
        "done = threading.Event()\n"
        "def work():\n"
        "    m = net(); train(m, adam(m)); print('trained'); adam(m); done.set(); time.sleep(600)\n"
        "threading.Thread(target=work, daemon=True).start(); assert done.wait(100)"
    ),
    "each_step_in_a_thread_of_its_own": (
        "import threading\n"
        "m = net(); o = adam(m)\n"
        "for _ in range(3):\n"
        "    thread = threading.Thread(target=train, args=(m, o), kwargs={'steps': 1}); thread.start(); thread.join()\n"
        "print('trained')"
    ),
}


@pytest.mark.parametrize("name", IN_THREADS)
def test_a_training_in_a_thread_is_proven_and_ends_as_the_script_does(tmp_path: Path, name: str) -> None:
    """A profiler that runs when its thread ends crashes the process."""
    ended = run(tmp_path, IN_THREADS[name])
    assert ended.returncode == 0 and "trained" in ended.stdout, transcript(ended)
    assert "ERROR" not in ended.stderr and "callback" not in ended.stderr, transcript(ended)
    assert proof(tmp_path / "proof.json")["verdict"] == "in force"


def test_a_training_in_a_thread_that_computes_in_fp32_is_refused(tmp_path: Path) -> None:
    ended = run(
        tmp_path, IN_THREADS["the_whole_training"].replace("train(m, adam(m))", "train(m, adam(m), enabled=False)")
    )
    assert ended.returncode == 1 and "compute: fp32; asked: bf16" in ended.stderr, transcript(ended)


def test_the_recording_of_a_thread_stops_at_its_end() -> None:
    whole, layer = StepAccount(), nn.Linear(16, 16)
    thread = threading.Thread(target=whole.start)
    thread.start()
    thread.join()
    assert not whole.running and not whole.reason
    found = recorded(lambda: layer(torch.randn(4, 16)).sum(), *layer.parameters(), whole=whole)
    assert found.trained == {Work("fp32", module=id(layer)): 2 * 2 * 4 * 16 * 16}, "another thread goes on"
