"""Real crashes of torch and DeepSpeed: the line after the traceback names parameters or the module, and the page."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the real library runs here")

from processes import command, free_port, in_fork, mp_yaml, transcript

from mpguard.runtime import crashes

HEAD = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(s): super().__init__(); s.first, s.last = nn.Linear(16, 16), nn.Linear(16, 4)
    def forward(s, x): return s.last(s.first(x))
net = Net(); x = torch.randn(8, 16)
def adam(): return torch.optim.AdamW(net.parameters())
amp = torch.autocast("cpu", torch.bfloat16)
scaler = torch.amp.GradScaler("cpu")
"""

#: Script -> what the line must contain.
CRASHES = {
    "net.first.half(); o = adam()\n"
    "scaler.scale(net.last(net.first(x.half()).float()).sum()).backward(); scaler.step(o)": (
        "ValueError: Attempting to unscale FP16 gradients.",
        "mpguard: 2 of the 4 parameters of AdamW are FP16 (first.weight, first.bias), so",
        "`mpguard rule MPG103`",
    ),
    "o = adam(); scaler.scale(net(x).sum()).backward(); scaler.unscale_(o); scaler.unscale_(o)": (
        "RuntimeError: unscale_() has already been called on this optimizer",
        "mpguard: the gradients of AdamW (fp32: first.weight, first.bias, last.weight and 1 more) were unscaled "
        "before, and there was no `scaler.update()` since, at t.py:11. Unscale once",
        "`mpguard rule MPG206`",
    ),
    "o = adam(); net(x).sum().backward(); scaler.step(o)": (
        "AssertionError: Attempted step but _scale is None.",
        "mpguard: this GradScaler has scaled no loss before AdamW is stepped or its gradients are unscaled, at t.py:",
        "`self.manual_backward(loss)` of Lightning",
        "`mpguard rule MPG202`",
    ),
    "o = adam(); net.requires_grad_(False)\n"
    "w = nn.Parameter(torch.ones(1)); scaler.scale((net(x) * w).sum()).backward(); scaler.step(o)": (
        "AssertionError: No inf checks were recorded for this optimizer.",
        "mpguard: none of the 4 parameters of AdamW has a gradient (first.weight, first.bias, last.weight and 1 more; "
        "fp32; all are frozen), at ",
        "refused",
    ),
    "o = adam(); scaler.scale(net(x).sum()).backward(); scaler.update()": (
        "AssertionError: No inf checks were recorded prior to update.",
        "mpguard: `scaler.update()` was called, and no optimizer was stepped",
        "`mpguard rule MPG206`",
    ),
    "net.last.bfloat16(); net(x)": (
        "RuntimeError: mat1 and mat2 must have the same dtype",
        "mpguard: `last` (Linear): weight bf16, bias bf16; inputs input fp32, at ",
        "The parameters were cast to bf16 by hand, and the policy keeps them in fp32",
        "`mpguard rule MPG102`",
    ),
    "with torch.autocast('cpu', torch.float16): scores = net(x) @ net(x).T\n"
    "scores.masked_fill(torch.eye(8) > 0, -1e9)": (
        "without overflow",
        "mpguard: a number is written into a 16-bit tensor that cannot hold it (scores fp16), at t.py:12. ",
        "`mpguard rule MPG601`",
    ),
    "net.first.bfloat16()\nnet(x.bfloat16())": (
        "RuntimeError: mat1 and mat2 must have the same dtype",
        "mpguard: `last` (Linear): weight fp32, bias fp32; inputs input bf16, at ",
        "has cast some of the parameters to another dtype by hand (t.py:11: bfloat16()), and others not",
        "`mpguard rule MPG102`",
    ),
    "encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 16, batch_first=True), 1).eval()\n"
    "with torch.no_grad(), amp: encoder(x[None], src_key_padding_mask=torch.arange(8)[None] > 5)": (
        "expected scalar type Float but found BFloat16",
        "mpguard: `layers.0` (TransformerEncoderLayer): parameters fp32; inputs src fp32, at t.py:12",
        "`mpguard rule MPG307`",
    ),
    "with torch.autograd.graph.saved_tensors_hooks(lambda t: t.half(), lambda t: t): loss = net(x).sum()\n"
    "loss.backward()": (
        "to have the same dtype",
        "mpguard: an operator of the backward pass, at t.py:12 has operands of different dtypes: a gradient and a",
        "`mpguard rule MPG307`",
    ),
    "class Times(torch.autograd.Function):\n"
    "    forward = staticmethod(lambda ctx, a: a * 2)\n"
    "    @staticmethod\n"
    "    def backward(ctx, gradient): return gradient.half() @ torch.ones(4, 4)\n"
    "Times.apply(net(x)).sum().backward()": (
        "to have the same dtype",
        "mpguard: operands (one of them is gradient fp32) differ in dtype, at t.py:14",
        "`mpguard rule MPG307`",
    ),
    "net.first.requires_grad_(False); net(x.half())": (
        "must have the same dtype",
        "mpguard: `first` (Linear): weight fp32, bias fp32; inputs input fp16",
        "The matmul is outside of autocast",
        "`mpguard rule MPG307`",
    ),
    "class Attention(nn.Module):\n"
    "    def forward(self, q, k, v, u):\n"
    "        w = k * torch.ones(1)\n"
    "        return torch.einsum('ni,nj->ij', w, v)\n"
    "Attention()(*[x.bfloat16()] * 4)": (
        "RuntimeError: expected ",
        "mpguard: the model (Attention): no parameters; inputs q bf16, k bf16, v bf16, w fp32, at t.py:14. They differ",
        "`mpguard rule MPG307`",
    ),
    "class Times(torch.autograd.Function):\n"
    "    @staticmethod\n"
    "    @torch.amp.custom_fwd(device_type='cpu')\n"
    "    def forward(ctx, a, b):\n"
    "        with torch.autocast('cpu', enabled=False): return a @ b\n"
    "class Outer(nn.Module):\n"
    "    def forward(self, x, y): return Times.apply(net(x), y)\n"
    "with amp: Outer()(x, torch.ones(4, 4))": (
        "to have the same dtype",
        "mpguard: a bf16, b fp32 differ in dtype, at t.py:15. `custom_fwd` without `cast_inputs` casts no input",
        "`mpguard rule MPG307`",
    ),
    # The check of flash-attn, which needs a GPU.
    "def flash_attn_func(q, k, v):\n"
    "    if q.dtype not in (torch.float16, torch.bfloat16):\n"
    "        raise RuntimeError('FlashAttention only support fp16 and bf16 data type')\n"
    "with amp: flash_attn_func(net.first(x).float(), net.first(x), net.first(x))": (
        "RuntimeError: FlashAttention only support fp16 and bf16 data type",
        "mpguard: flash attention takes FP16 and BF16 only; q fp32 is wider, at t.py:13. Autocast does not cast",
        "/attention",
    ),
    "import os, torch.distributed as dist\n"
    "dist.init_process_group('gloo', init_method='file://' + os.path.abspath('store'), rank=0, world_size=1)\n"
    "from torch.distributed.fsdp import FullyShardedDataParallel\n"
    "net.last.bfloat16(); FullyShardedDataParallel(net, device_id=torch.device('cpu'))": (
        "ValueError: Must flatten tensors with uniform dtype but got",
        "mpguard: FSDP shards the 4 parameters of Net as one, which needs one dtype; they are fp32: first.weight, "
        "first.bias; bf16: last.weight, last.bias. Load",
        "`mpguard rule MPG511`",
    ),
    "import os, torch.distributed as dist\n"
    "dist.init_process_group('gloo', init_method='file://' + os.path.abspath('store'), rank=0, world_size=1)\n"
    "from torch.distributed.fsdp import FullyShardedDataParallel\n"
    "net.first.weight = nn.Parameter(torch.zeros(128, 1, dtype=torch.uint8), requires_grad=False)\n"  # as 4-bit weights
    "FullyShardedDataParallel(net, device_id=torch.device('cpu'))": (
        "ValueError: Cannot flatten integer dtype tensors",
        "mpguard: FSDP shards the 4 parameters of Net as one, which needs one floating-point dtype; they are uint8: "
        "first.weight; fp32: first.bias, last.weight, last.bias. 4-bit weights are stored in uint8 by default",
        "/refused",
    ),
    "import os, torch.distributed as dist\n"
    "dist.init_process_group('gloo', init_method='file://' + os.path.abspath('store'), rank=0, world_size=1)\n"
    "from torch.distributed.fsdp import fully_shard\n"
    "net.last.bfloat16()\n"
    "fully_shard(net, mesh=dist.device_mesh.init_device_mesh('cpu', (1,))); net(x)": (
        "AssertionError: FSDP expects uniform original parameter dtype",
        "mpguard: FSDP shards the 4 parameters as one, which needs one dtype; they are fp32: first.weight, first.bias; "
        "bf16: last.weight, last.bias. Load",
        "`mpguard rule MPG511`",
    ),
    "import os, torch.distributed as dist\n"
    "dist.init_process_group('gloo', init_method='file://' + os.path.abspath('store'), rank=0, world_size=1)\n"
    "from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard\n"
    "mesh, low = dist.device_mesh.init_device_mesh('cpu', (1,)), torch.bfloat16\n"
    "fully_shard(net.first, mesh=mesh, mp_policy=MixedPrecisionPolicy(low, output_dtype=torch.float32))\n"
    "fully_shard(net, mesh=mesh, mp_policy=MixedPrecisionPolicy(low)); net(x)": (
        "must have the same dtype",
        "mpguard: `last` (Linear): weight bf16, bias bf16; inputs input fp32, at ",
        "FSDP casts parameters to bf16 for the forward pass, and inputs only where a unit begins",
        "`mpguard rule MPG307`",
    ),
}  # fmt: skip


DEEPSPEED = """
import deepspeed
deepspeed.init_distributed("gloo")
deepspeed.get_accelerator().is_fp16_supported = lambda: True  # its engine runs on a CPU, and only refuses to start
engine = deepspeed.initialize(model=net, config={
    "train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 1}, "fp16": {"enabled": True},
    "optimizer": {"type": "Adam", "params": {"torch_adam": True}},
})[0]
engine.backward(engine(x.half()).float().sum() * float("inf"))
engine.step()
"""


def test_a_loss_scale_at_its_minimum(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text(HEAD + DEEPSPEED)
    keys = {"deepspeed_config": "{zero_stage: 1}", "mixed_precision": "fp16"}
    own = "{mpguard_recipe: fp16_mixed, mpguard_overrides: {initial_loss_scale: 1.0, hysteresis: 1}}"
    config = mp_yaml(tmp_path, distributed_type="DEEPSPEED", fp8_config=own, **keys)
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    ended = in_fork(["--config", config, "t.py"], cwd=tmp_path, MASTER_PORT=str(free_port()), **ranks)
    assert "Exception: Current loss scale already at minimum" in ended.stderr, transcript(ended)
    assert "mpguard: FP16 gradients overflowed down to the smallest loss scale, 1 (" in ended.stderr, transcript(ended)
    assert "all parameters are finite" in ended.stderr and ended.returncode == 1


FP32_INPUTS = """
import deepspeed
deepspeed.init_distributed("gloo")
engine = deepspeed.initialize(model=net, config={
    "train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 1}, "bf16": {"enabled": True},
    "optimizer": {"type": "Adam", "params": {"torch_adam": True}},
})[0]
engine(x)
"""


def test_deepspeed_casts_the_parameters_and_not_the_inputs(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text(HEAD + FP32_INPUTS)
    keys = {"deepspeed_config": "{zero_stage: 1}", "mixed_precision": "bf16"}
    config = mp_yaml(tmp_path, distributed_type="DEEPSPEED", fp8_config="{mpguard_recipe: bf16_mixed}", **keys)
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    ended = in_fork(["--config", config, "t.py"], cwd=tmp_path, MASTER_PORT=str(free_port()), **ranks)
    assert "mpguard: `first` (Linear): weight bf16, bias bf16; inputs input fp32, at" in ended.stderr, transcript(ended)
    assert "DeepSpeed's engine keeps the parameters in bf16 (fp32 ones are in its optimizer)" in ended.stderr
    assert "Cast the inputs to bf16. See" in ended.stderr and ended.returncode == 1


def test_a_crash_under_activate_keeps_its_traceback_and_its_status(tmp_path: Path) -> None:
    """Through `sys.excepthook`; compiled code wraps the error in its own."""
    script = "import mpguard\nmpguard.activate('bf16_mixed')\n" + HEAD
    script += "net.last.bfloat16(); torch.compile(net, backend='eager')(x)"
    (tmp_path / "t.py").write_text(script)
    ended = command("python", "t.py", cwd=tmp_path)
    assert ended.returncode == 1 and "Traceback (most recent call last)" in ended.stderr, transcript(ended)
    *before, cause = [line for line in ended.stderr.splitlines() if line.strip() and "no training" not in line]
    assert cause.startswith("mpguard: ") and "dtype" in cause and "`mpguard rule MPG" in cause, transcript(ended)
    assert any("same dtype" in line for line in before)


def run(folder: Path, script: str, *words: str):  # type: ignore[no-untyped-def]
    (folder / "t.py").write_text(HEAD + script)
    return in_fork(["--config", mp_yaml(folder), *words, "t.py"], cwd=folder)


@pytest.mark.parametrize("script", CRASHES, ids=[texts[0].split(": ")[-1][:40] for texts in CRASHES.values()])
def test_a_crash_gets_its_cause(tmp_path: Path, script: str) -> None:
    ended = run(tmp_path, script)
    assert ended.returncode == 1, transcript(ended)
    for text in CRASHES[script]:
        assert text in ended.stderr, transcript(ended)
    lines = ended.stderr.splitlines()
    cause = next(number for number, line in enumerate(lines) if line.startswith("mpguard: ") and ". See " in line)
    assert any(line.startswith(CRASHES[script][0][:20]) or CRASHES[script][0] in line for line in lines[:cause])


def test_the_line_is_of_the_script_where_packages_are_in_another_environment(tmp_path: Path) -> None:
    packages = tmp_path / "base" / "site-packages"
    packages.mkdir(parents=True)
    (packages / "clipping.py").write_text("def clip(scaler, optimizer):\n    scaler.unscale_(optimizer)\n")
    script = f"import sys; sys.path.append({str(packages)!r}); from clipping import clip\n"
    script += "o = adam(); scaler.scale(net(x).sum()).backward(); clip(scaler, o)\nclip(scaler, o)"
    ended = run(tmp_path, script)
    assert "no `scaler.update()` since, at t.py:13. Unscale once" in ended.stderr, transcript(ended)


def test_an_error_with_another_cause_and_a_failure_inside_add_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    crashes.print_cause(ValueError("expected a float"))

    def fail(_frames: object) -> crashes.Cause:
        raise KeyError("inside")

    monkeypatch.setattr(crashes, "CRASHES", (("unscale", fail),))
    with caplog.at_level("DEBUG", logger="mpguard"):
        crashes.print_cause(ValueError("unscale"))
    assert capsys.readouterr().err == ""
    assert "the cause of ValueError could not be found" in caplog.text
