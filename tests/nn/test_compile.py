"""`compile` in custom training loops: models are compiled in place, in each engine, and once.

With torchao's layers in software, and a backend of dynamo's that needs no compiler. `compile: true` stands for what
`auto` chooses on a GPU alone: tests/gpu/test_compile_auto.py.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the real library runs here")

import torch
from processes import in_fork, mp_yaml, proof, ranks_in_fork, run_python, transcript
from torch import nn

import mpguard
from mpguard.nn import compile as compilation
from mpguard.policy.policy import Policy

FP8 = "fp8: hybrid, backend: torchao, fp8_emulate: true"

HEAD = """
import json, os, sys, torch
from torch import nn
from mpguard.nn import compile as compilation
compilation.BACKEND = "aot_eager"
torch.manual_seed(0)
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(32, 32)
    def forward(self, x): return x + self.up(x).relu()
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.last = nn.ModuleList(Block() for _ in range(2)), nn.Linear(32, 16)
    def forward(self, x):
        for block in self.blocks: x = block(x)
        return self.last(x)
def adam(m): return torch.optim.AdamW(m.parameters(), lr=1e-3)
def amp(): return torch.autocast("cpu", torch.bfloat16)
def train(m, o, steps=3):
    for step in range(steps):
        with amp(): loss = m(torch.ones(16, 32)).float().pow(2).mean()
        loss.backward(); o.step(); o.zero_grad()
        if step == 0: first = loss.item()
    assert loss.item() < first, (loss, first)
def graphs(): return torch._dynamo.utils.counters["stats"]["unique_graphs"]
m = Net()
"""

SPREAD = """
import torch.distributed as dist
rank = int(os.environ["RANK"]); dist.init_process_group("gloo")
"""
DDP = "from torch.nn.parallel import DistributedDataParallel as DDP\nw = DDP(m); train(w, adam(w))"
DDP_LATER = "from torch.nn.parallel import DistributedDataParallel as DDP\no = adam(m); train(DDP(m), o)"
FSDP1 = """
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
w = FSDP(m, device_id=torch.device("cpu"), use_orig_params=True, auto_wrap_policy=ModuleWrapPolicy({Block}))
train(w, adam(w))
"""
FSDP2 = """
from torch.distributed.fsdp import fully_shard
mesh = dist.init_device_mesh("cpu", (2,))
for block in m.blocks: fully_shard(block, mesh=mesh)
fully_shard(m, mesh=mesh); train(m, adam(m))
"""
ZERO = """
import deepspeed
o = adam(m)
config = {"train_micro_batch_size_per_gpu": 16, "zero_optimization": {"stage": %d}}
engine, *_ = deepspeed.initialize(model=m, optimizer=o, config=config)
for _ in range(3):
    loss = engine(torch.ones(16, 32).bfloat16()).float().pow(2).mean(); engine.backward(loss); engine.step()
"""
END = "\nassert list(m.state_dict())[0].endswith('blocks.0.up.weight')\ndist.destroy_process_group()"


def config(folder: Path, fields: str, **keys: object) -> Path:
    overrides = f"{{mpguard_recipe: bf16_mixed, mpguard_overrides: {{{fields}}}}}"
    return mp_yaml(folder, fp8_config=overrides, **keys)


def run(folder: Path, script: str, fields: str, *words: object) -> subprocess.CompletedProcess[str]:
    (folder / "t.py").write_text(HEAD + script)
    return in_fork(
        ["--config", config(folder, fields), "--proof-json", folder / "proof.json", *words, "t.py"], cwd=folder
    )


BY_BLOCK = "compilation.MOST_BLOCKS = 1\n"


@pytest.mark.parametrize(
    ("script", "kind", "keys"),
    [
        (DDP, "MULTI_CPU", {}),
        (BY_BLOCK + DDP_LATER, "MULTI_CPU", {}),
        (BY_BLOCK + FSDP1, "FSDP", {"fsdp_config": "{fsdp_version: 1}"}),
        (FSDP2, "FSDP", {"fsdp_config": "{fsdp_version: 2}"}),
        (BY_BLOCK + FSDP2, "FSDP", {"fsdp_config": "{fsdp_version: 2}"}),
        (ZERO % 1, "DEEPSPEED", {"deepspeed_config": "{zero_stage: 1}"}),
        (BY_BLOCK + ZERO % 2, "DEEPSPEED", {"deepspeed_config": "{zero_stage: 2}"}),
        (BY_BLOCK + ZERO % 3, "DEEPSPEED", {"deepspeed_config": "{zero_stage: 3}"}),
    ],
    ids=[
        "ddp",
        "ddp later, by block",
        "fsdp1, by block",
        "fsdp2",
        "fsdp2, by block",
        "zero1",
        "zero2, by block",
        "zero3, by block",
    ],
)
def test_engines_train_what_mpguard_compiles(tmp_path: Path, script: str, kind: str, keys: dict[str, str]) -> None:
    (tmp_path / "t.py").write_text(HEAD + SPREAD + script + END)
    path = config(tmp_path, f"{FP8}, compile: true", distributed_type=kind, num_processes=2, **keys)
    ended = ranks_in_fork(["--config", path, "--proof-json", tmp_path / "proof.json", "t.py"], cwd=tmp_path)
    assert [each.returncode for each in ended] == [0, 0], "\n".join(map(transcript, ended))
    made = proof(tmp_path / "proof.json")
    assert made["verdict"] == "in force" and made["rows"]["compile"]["found"] == "compiled", transcript(ended[0])
    assert "3 of 3 Linear" in made["rows"]["fp8"]["found"], transcript(ended[0])
    blocks = ", block by block" if BY_BLOCK in script else "\n"
    assert f"mpguard: the model is compiled in place{blocks}" in ended[0].stderr, transcript(ended[0])


ONCE = "\nassert graphs() == %d, graphs()\nassert list(m.state_dict()) == names"


@pytest.mark.parametrize(
    ("script", "graphs", "ours"),
    [
        ("o = adam(m); train(m, o)", 1, True),
        ("train(m, adam(m)); train(m, adam(m))", 1, True),
        ("o = adam(m); w = torch.compile(m, backend='aot_eager'); train(w, o)", 1, True),
        ("o = adam(m)\n@torch.compile(backend='aot_eager')\ndef f(x): return m(x)\ntrain(f, o)", 1, True),
        ("o = adam(m); m.compile(backend='aot_eager'); train(m, o)", 1, True),
        ("o = adam(m)\nfor block in m.blocks: block.compile(backend='aot_eager')\ntrain(m, o)", 1, True),
        ("w = torch.compile(m, backend='aot_eager'); train(w, adam(w))", 1, False),
        ("m.compile(backend='aot_eager'); train(m, adam(m))", 1, False),
        ("for block in m.blocks: block.compile(backend='aot_eager')\ntrain(m, adam(m))", 2, False),
        # what dynamo begins in no frame of
        ("m = nn.Sequential(*m.blocks, m.last); train(m, adam(m))", 1, True),
        ("d = nn.ModuleDict({'m': m}); train(d['m'], adam(d))", 1, True),
        ("m.blocks.requires_grad_(False); train(m, torch.optim.AdamW(m.last.parameters(), lr=1e-2))", 1, True),
    ],
)
def test_a_loop_of_ones_own_is_compiled_once(tmp_path: Path, script: str, graphs: int, ours: bool) -> None:
    """However the script itself has it compiled, before the optimizer is built or after."""
    names = "names = list(m.state_dict())\n"
    same = "" if "Sequential" in script else ONCE % graphs
    ended = run(tmp_path, names + script + same, f"{FP8}, compile: true")
    assert ended.returncode == 0, transcript(ended)
    assert proof(tmp_path / "proof.json")["rows"]["compile"]["found"] == "compiled", transcript(ended)
    assert ("mpguard: the model is compiled in place" in ended.stderr) == ours, transcript(ended)


def test_bf16_is_compiled_only_if_the_policy_sets_it(tmp_path: Path) -> None:
    for fields, graphs in (("compile: true", 1), ("compile: false", 0), ("", 0), (FP8, 0)):
        ended = run(tmp_path, f"train(m, adam(m)); assert graphs() == {graphs}, graphs()", fields)
        assert ended.returncode == 0 and proof(tmp_path / "proof.json")["verdict"] == "in force", transcript(ended)


def test_a_model_that_is_not_called_itself_is_not_compiled_and_that_is_an_error(tmp_path: Path) -> None:
    """A model that would be compiled when called does not count as compiled."""
    ended = run(tmp_path, "train(m.forward, adam(m))", f"{FP8}, compile: true")
    assert ended.returncode == 1, transcript(ended)
    assert "compile: not compiled; asked: compiled. Call the model itself, or add `step = torch.compile" in ended.stderr


AUTO = "compilation.choice = lambda policy: compilation.Choice(True, compilation.PAYS)\n"


@pytest.mark.parametrize(
    ("script", "output"),
    [
        ("train(m, adam(m))", "mpguard: compile: auto is on here: torchao's casts cost more than its matmuls gain"),
        ("train(m.forward, adam(m))", "  compile        not compiled: torchao's casts cost more"),
        ("compilation.missing_requirement = lambda m: 'Triton is not installed'; train(m, adam(m))",
         "mpguard: compile: auto is off here: Triton is not installed, though torchao's casts cost more"),
    ],
)  # fmt: skip
def test_the_choice_of_auto_and_what_is_lost_are_printed(tmp_path: Path, script: str, output: str) -> None:
    """As on a GPU, where torchao's layers are there."""
    ended = run(tmp_path, AUTO + script, FP8)
    assert ended.returncode == 0 and output in ended.stderr, transcript(ended)
    found = proof(tmp_path / "proof.json")["rows"]["compile"]["found"]
    assert (found == "compiled") == ("is on here" in output), transcript(ended)


FAILS = """
def fails(graph, inputs): raise RuntimeError("the compiler is broken")
torch._dynamo.register_backend(fails)
compilation.BACKEND = "fails"
"""


@pytest.mark.parametrize("by_block", ["", "compilation.MOST_BLOCKS = 1\n"], ids=["whole", "by block"])
def test_a_model_whose_compilation_fails_goes_on_as_it_is(tmp_path: Path, by_block: str) -> None:
    ended = run(tmp_path, AUTO + FAILS + by_block + "train(m, adam(m)); assert m._compiled_call_impl is None", FP8)
    assert ended.returncode == 0, transcript(ended)
    what = "Block" if by_block else "Net"
    line = f"mpguard: compile: auto is off here: {what} cannot be compiled (RuntimeError: the compiler is broken)"
    assert ended.stderr.count(line) == 1, transcript(ended)
    made = proof(tmp_path / "proof.json")
    assert made["verdict"] == "in force" and "3 of 3 Linear" in made["rows"]["fp8"]["found"], transcript(ended)
    assert made["rows"]["compile"]["found"].startswith("not compiled"), transcript(ended)


VOCABULARY_PARALLEL = """
import torch, torch.distributed as dist
from torch import library, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore
from mpguard.nn import compile as compilation
compilation.BACKEND = "aot_eager"
dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
mesh = init_device_mesh("cpu", (2,))
@library.custom_op("test::cannot_be_traced", mutates_args=())
def cannot_be_traced(x: torch.Tensor) -> torch.Tensor: return x.clone()
@cannot_be_traced.register_fake
def _(x): raise RuntimeError("no fake tensors")
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(64, 16)
    def forward(self, ids):
        found = nn.functional.embedding(DTensor.from_local(ids, mesh, [Replicate()]), self.tok.weight)
        cannot_be_traced(ids.float())  # between what fills the mask and what empties it
        return found.redistribute(mesh, [Replicate()]).to_local()
net = parallelize_module(Net(), mesh, {"tok": RowwiseParallel(input_layouts=Replicate())})
failures = []
compilation.compile_in_place(net, failures.append)
for _ in range(2): net(torch.randint(0, 64, (4, 8))).sum().backward()
assert len(failures) == 1, failures
print("trained twice")
"""


def test_a_failed_compilation_leaves_no_mask_of_a_vocabulary_parallel_embedding(tmp_path: Path) -> None:
    ended = in_fork(["-c", VOCABULARY_PARALLEL], cwd=tmp_path, program=run_python)
    assert ended.stdout == "trained twice\n", transcript(ended)


def test_blocks_are_compiled_one_by_one_where_several_ranks_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = (nn.Sequential(*(Named(str(number)) for number in range(blocks))) for blocks in (1, 2))
    assert not compilation.is_deep(two)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert compilation.is_deep(two) and not compilation.is_deep(one)


def test_ranks_share_the_cores_for_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    config = types.SimpleNamespace(compile_threads=32)
    monkeypatch.setitem(sys.modules, "torch._inductor.config", config)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    compilation.share_compile_threads()
    assert config.compile_threads == 32 and "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    compilation.share_compile_threads()
    assert config.compile_threads == 16 and os.environ["TORCHINDUCTOR_COMPILE_THREADS"] == "16"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    compilation.share_compile_threads()
    assert os.environ["TORCHINDUCTOR_COMPILE_THREADS"] == "16", "what is set already is kept"


def test_an_error_of_the_model_is_its_own(tmp_path: Path) -> None:
    """With a shape that does not fit, dynamo fails first."""
    ended = run(
        tmp_path, AUTO + "o = adam(m)\ntry: m(torch.ones(16, 33))\nexcept RuntimeError as e: print(repr(e))", FP8
    )
    assert "shape" in ended.stdout and "cannot be compiled" not in ended.stderr, transcript(ended)


def test_a_failed_compilation_of_a_policy_that_demands_it_is_torchs_error(tmp_path: Path) -> None:
    ended = run(tmp_path, FAILS + "train(m, adam(m))", f"{FP8}, compile: true")
    assert ended.returncode == 1 and "the compiler is broken" in ended.stderr, transcript(ended)


def test_what_cannot_be_compiled_and_must_be_is_refused(tmp_path: Path) -> None:
    script = "compilation.missing_requirement = lambda m: 'Triton is not installed'; train(m, adam(m))"
    ended = run(tmp_path, script, f"{FP8}, compile: true")
    assert ended.returncode == 1 and "compile: Triton is not installed, and the policy has compile=True" in ended.stderr


def test_accelerate_compiles_itself(tmp_path: Path) -> None:
    script = (
        "import accelerate; a = accelerate.Accelerator(); o = adam(m)\n"
        "assert not any(compilation.is_compiled(each) for each in m.modules())"
    )
    ended = run(tmp_path, script, f"{FP8}, compile: true")
    assert ended.returncode == 0 and "in place" not in ended.stderr, transcript(ended)


DEEP = """
compilation.MOST_BLOCKS = 3
m.blocks = nn.ModuleList(Block() for _ in range(4))
names = list(m.state_dict())
def compiled(): return sum(map(compilation.is_compiled, m.modules()))
"""
ACCELERATED = """
import accelerate
a = accelerate.Accelerator(dynamo_plugin=accelerate.utils.TorchDynamoPlugin())  # as the Trainer
o = adam(m); w, o = a.prepare(m, o); train(w, o)
"""


@pytest.mark.parametrize("script", ["train(m, adam(m))\n", ACCELERATED], ids=["own loop", "accelerate"])
def test_a_deep_model_is_compiled_block_by_block(tmp_path: Path, script: str) -> None:
    # The input of the first block needs no gradient, those of the others do; the head is an FP8 layer.
    same = "assert (graphs(), compiled()) == (3, 5), (graphs(), compiled())\nassert list(m.state_dict()) == names"
    ended = run(tmp_path, DEEP + script + same, f"{FP8}, compile: true")
    assert ended.returncode == 0 and "the model is compiled in place, block by block" in ended.stderr, transcript(ended)
    made = proof(tmp_path / "proof.json")
    assert made["verdict"] == "in force" and made["rows"]["compile"]["found"] == "compiled", transcript(ended)
    assert "5 of 5 Linear" in made["rows"]["fp8"]["found"], transcript(ended)


def test_a_deep_model_that_the_script_compiles_is_one_graph(tmp_path: Path) -> None:
    script = (
        DEEP + "o = adam(m); w = torch.compile(m, backend='aot_eager'); train(w, o); assert graphs() == 1, graphs()"
    )
    ended = run(tmp_path, script, f"{FP8}, compile: true")
    assert ended.returncode == 0, transcript(ended)


@pytest.mark.parametrize(
    ("model", "parts"),
    [
        (nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(13))), 13),
        (nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(12))), 1),
        (nn.Sequential(*(nn.Sequential(nn.Linear(8, 8 + n), nn.Linear(8 + n, 8)) for n in range(13))), 1),
        (nn.Sequential(*(nn.Linear(8, 8) for _ in range(20))), 1),
        (nn.Transformer(16, 2, 14, 13, 16), 27),
    ],
    ids=["13 blocks", "12 blocks", "different sizes", "single layers", "encoder and decoder"],
)
def test_what_is_compiled_alone(model: nn.Module, parts: int) -> None:
    next(model.children()).requires_grad_(False)
    with torch._dynamo.config.patch(recompile_limit=8):
        assert compilation.is_deep(model) == (parts > 1) and compilation.compile_in_place(model)
        assert torch._dynamo.config.recompile_limit == (8 if parts == 1 else 8 + parts)
    assert sum(map(compilation.is_compiled, model.modules())) == parts
    compilation.undo(model)
    assert not any(map(compilation.is_compiled, model.modules()))


def test_compiled_code_is_known_after_a_checkpoint_was_loaded(tmp_path: Path) -> None:
    script = "o = adam(m); train(m, o); o.load_state_dict(o.state_dict()); train(m, o)"
    ended = run(tmp_path, script, f"{FP8}, compile: true")
    assert ended.returncode == 0 and "proven in force again" in ended.stderr, transcript(ended)


def test_a_dynamic_shape_stays_dynamic(tmp_path: Path) -> None:
    """What is observed of a graph must not have it made for one shape."""
    script = """
m.compile(backend="aot_eager"); o = adam(m)
for rows in (32, 48, 64, 96):
    inputs = torch.randn(rows, 32); torch._dynamo.mark_dynamic(inputs, 0)
    with amp(): m(inputs).float().pow(2).mean().backward()
o.step(); assert graphs() == 1, graphs()
"""
    ended = run(tmp_path, script, "")
    assert ended.returncode == 0 and "compute        bf16" in ended.stderr, transcript(ended)


# -- mpguard.convert -----------------------------------------------------------------------------

POLICY = Policy(bf16=True, fp8="hybrid", backend="torchao", fp8_emulate=True, compile=True)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], int]]:
    """How many graphs have been compiled."""
    monkeypatch.setattr(compilation, "BACKEND", "aot_eager")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield lambda: torch._dynamo.utils.counters["stats"]["unique_graphs"]
    torch._dynamo.reset()


def test_convert_compiles_in_place_and_reports_it(graphs: Callable[[], int]) -> None:
    net, inputs = Net(), torch.randn(16, 32)
    names = list(net.state_dict())
    done = mpguard.convert(net, POLICY)
    assert str(done).splitlines()[-1] == "  compile: on, in place: the policy has compile=True"
    net(inputs).sum().backward()
    assert graphs() == 1 and list(net.state_dict()) == names and type(net) is Net
    compiled = torch.compile(net, backend="aot_eager")
    assert torch.allclose(compiled(inputs), net(inputs), rtol=1e-2) and graphs() == 1, "on top of it: once"
    net.extra = nn.Linear(32, 32)
    assert mpguard.convert(net, POLICY).converted == ("extra",), "what mpguard has compiled is no obstacle"
    assert not compilation.is_compiled(copy.deepcopy(net)), "as torch has it"
    assert not any(map(compilation.is_compiled, mpguard.revert(net).modules()))


class Named(nn.Module):
    """A block whose code depends on its name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.up = name, nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.up(x) * (2.0 if self.name == "3" else 1.0)


def test_blocks_that_differ_are_all_compiled(graphs: Callable[[], int], caplog: pytest.LogCaptureFixture) -> None:
    """Dynamo gives up after 8 forms of a function, and runs it eagerly, which only a warning shows."""
    net = nn.Sequential(*(Named(str(number)) for number in range(14)))
    inputs = torch.randn(16, 32, requires_grad=True)
    eager = copy.deepcopy(net)
    mpguard.convert(eager, POLICY.replace(compile=False))
    with torch._dynamo.config.patch(recompile_limit=8):
        done = mpguard.convert(net, POLICY)
        compiled = net(inputs)
    assert str(done).splitlines()[-1].startswith("  compile: on, in place, block by block: ")
    assert graphs() == 14 and "recompile_limit" not in caplog.text
    assert torch.allclose(compiled, eager(inputs), rtol=1e-3, atol=1e-3)


class Resized(nn.Module):
    """A block of a UNet: each has another width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, width + 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(self.norm(x)).relu()


class Pyramid(nn.Module):
    """Blocks of growing widths, and equal ones after them."""

    def __init__(self, widths: range) -> None:
        super().__init__()
        self.down = nn.ModuleList(map(Resized, widths))
        self.middle = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(13))
        self.into = nn.Linear(widths.stop, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.down:
            x = block(x)
        x = self.into(x)
        for block in self.middle:
            x = block(x)
        return x


@pytest.mark.parametrize(("widths", "compiled"), [(range(16, 64, 16), 3), (range(16, 336, 16), 15)])
def test_blocks_of_several_widths_are_compiled_for_each(
    widths: range, compiled: int, graphs: Callable[[], int]
) -> None:
    """Else dynamo compiles the third for any width. Of 21 kinds only those with the most weights are compiled."""
    net = Pyramid(widths)
    with torch._dynamo.config.patch(recompile_limit=8):
        assert compilation.compile_in_place(net)
        net(torch.randn(4, widths.start)).sum().backward()
    assert [compilation.is_compiled(block) for block in net.down] == [
        number >= len(widths) - compiled for number in range(len(widths))
    ]
    assert all(map(compilation.is_compiled, net.middle)) and graphs() == compiled + 1
    assert ("16 of its 21 kinds of blocks" in compilation.by_block(net)) is (len(widths) == 20)


def test_a_block_of_several_sizes_is_compiled_for_any_in_the_end(graphs: Callable[[], int]) -> None:
    """Images of another size in each batch would compile in each step."""
    net = Pyramid(range(16, 64, 16))
    with torch._dynamo.config.patch(recompile_limit=32):
        assert compilation.compile_in_place(net)
        counts = []
        for rows in range(4, 14):
            net(torch.randn(rows, 16)).sum().backward()
            counts.append(graphs())
        net(torch.randn(4, 16)).sum().backward()
    assert counts[:3] == [4, 8, 12] and counts[-1] == counts[-4] == graphs()


def test_convert_under_auto(graphs: Callable[[], int], monkeypatch: pytest.MonkeyPatch) -> None:
    auto = POLICY.replace(compile="auto")
    net = Net()
    assert mpguard.convert(net, auto).compiled == "" and not compilation.is_compiled(net), (
        "no GPU here: nothing is gained"
    )
    monkeypatch.setattr(compilation, "choice", lambda _policy: compilation.Choice(True, compilation.PAYS))
    assert mpguard.convert(Net(), auto).compiled == f"on, in place: {compilation.PAYS}"
    assert mpguard.convert(Net(), auto.replace(compile=False)).compiled == "off, the policy has compile=False"
    monkeypatch.setattr(compilation, "missing_requirement", lambda _model: "Triton is not installed")
    assert mpguard.convert(net := Net(), auto).compiled == f"off, Triton is not installed, though {compilation.PAYS}"
    assert not compilation.is_compiled(net)
    with pytest.raises(mpguard.NotInForce, match="has compile=True, and Triton is not installed"):
        mpguard.convert(net := Net(), POLICY)
    assert type(net.layers[0]) is nn.Linear


def test_convert_refuses_to_compile_delayed_scaling() -> None:
    policy = Policy(bf16=True, fp8="hybrid", fp8_recipe="delayed", backend="te", compile=True)
    with pytest.raises(mpguard.PolicyError, match=r"convert: .* refuses delayed scaling under torch.compile"):
        mpguard.convert(Net(), policy)
