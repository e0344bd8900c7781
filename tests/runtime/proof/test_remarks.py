"""Remarks about real runs: what loses precision in any policy has a line, and what looks like it has none."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the real library runs here")

from processes import free_port, in_fork, mp_yaml, transcript
from short_programs import HEAD, run

#: The beginning of each line that is a remark about this.
FREQUENCIES, OVERFLOW, ROWS = "the angle of position p is wrong", "`torch.where` writes", "rows (batch x sequence"
FROZEN, SCHEDULE, UPDATES = (
    "are frozen and FP32",
    "goes on after steps that the GradScaler",
    "after the step of each of",
)
NARROW = "BF16 would be faster than the FP8 of"
EVERY = (FREQUENCIES, OVERFLOW, ROWS, FROZEN, SCHEDULE, UPDATES, NARROW)

ROTARY = """
class Rotary(nn.Module):
    def __init__(s):
        super().__init__(); s.fc = nn.Linear(32, 32)
        s.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(0, 32, 2) / 32), persistent=False)
    def forward(s, x):
        angles = torch.outer(torch.arange(len(x)).float(), s.inv_freq.float())
        return s.fc(x) * torch.cat([angles.cos(), angles.sin()], -1).to(x.dtype)
"""

MASKED = """
class Masked(nn.Module):
    def __init__(s): super().__init__(); s.q, s.k = nn.Linear(32, 32), nn.Linear(32, 32)
    def forward(s, x):
        scores = s.q(x) @ s.k(x).T
        return torch.where(torch.ones_like(scores).tril() > KEEP, scores, BIG).softmax(-1)
m = Masked(); o = adam(m)
"""

SCALED_MASK = """
scaler = torch.amp.GradScaler("cpu")
for _ in range(3):
    with amp(torch.float16): loss = m(x).float().square().mean()
    scaler.scale(loss).backward(); scaler.step(o); scaler.update(); o.zero_grad()
"""

SCALED = """
def scaled(steps, after):
    for step in range(steps):
        with amp(torch.float16): loss = m(x).float().pow(2).mean()
        before = scaler.get_scale()
        scaler.scale(loss).backward(); scaler.step(o); scaler.update(); o.zero_grad()
        after(step, before)
m = net(); o = adam(m); scaler = torch.amp.GradScaler("cpu", init_scale=2.0**27)
schedule = torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step))
"""

FP8 = "hopper_bf16_with_fp8_mixed, mpguard_overrides: {fp8_emulate: true}"

CONVERTED = """
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
m = convert_to_float8_training(net(), config=Float8LinearConfig(emulate=True)); o = adam(m)
"""

GAN = """
a, b = net(), net(layers=1); first, second = adam(a), adam(b)
def step(model, optimizer, scaler):
    with amp(torch.float16): loss = model(x).float().pow(2).mean()
    scaler.scale(loss).backward(); scaler.step(optimizer); optimizer.zero_grad()
scaler, other = torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu")
"""

MADE = [
    (FREQUENCIES, "bf16_full", ROTARY + "m = Rotary().bfloat16(); x = x.bfloat16(); train(m, adam(m), enabled=False)"),
    (
        FREQUENCIES,
        "bf16_full",
        ROTARY + "m = nn.ModuleDict({'vision': Rotary()}).to(dtype=torch.bfloat16); x = x.bfloat16()\n"
        "train(m['vision'], adam(m), enabled=False)",
    ),
    (OVERFLOW, "fp16_mixed", MASKED.replace("KEEP", "0").replace("BIG", "-1e9") + "train(m, o, dtype=torch.float16)"),
    (
        OVERFLOW,
        "bf16_mixed",
        MASKED.replace("KEEP", "0").replace("BIG", "torch.finfo(torch.float32).min") + "train(m, o)",
    ),
    (  # whole rows are masked: each step is skipped
        OVERFLOW,
        "fp16_mixed",
        MASKED.replace("KEEP", "2").replace("BIG", "-2.4e38") + SCALED_MASK,
    ),
    (ROWS, FP8, CONVERTED + "x = x[:2]; train(m, o)"),
    (ROWS, FP8, CONVERTED + "x = torch.randn(3, 7, 32); train(m, o)"),
    (NARROW, FP8, CONVERTED + "x = torch.randn(4, 8, 32); train(m, o)"),
    (
        NARROW,
        FP8,
        CONVERTED.replace("net()", "nn.Sequential(nn.Linear(32, 3072), nn.GELU(), nn.Linear(3072, 16))")
        + "train(m, o)",
    ),
    (
        FROZEN,
        "bf16_mixed",
        "m = nn.Sequential(net(layers=4).requires_grad_(False), nn.Linear(32, 4)); train(m, adam(m[1]))",
    ),
    (SCHEDULE, "fp16_mixed", SCALED + "scaled(8, lambda step, before: schedule.step())"),
    (
        SCHEDULE,
        "fp16_mixed",
        SCALED + "once = torch.optim.lr_scheduler.OneCycleLR(o, 1e-3, 50, cycle_momentum=False)\n"
        "scaled(8, lambda step, before: once.step())",
    ),
    (
        UPDATES,
        "fp16_mixed",
        GAN + "for _ in range(4):\n  step(a, first, scaler); scaler.update(); step(b, second, scaler); scaler.update()",
    ),
]

#: Programs that do the same correctly, or something that looks like it.
NOT_MADE = [
    ("bf16_full", ROTARY + "m = Rotary(); m.fc.bfloat16(); x = x.bfloat16(); train(m, adam(m), enabled=False)"),
    ("fp16_mixed", MASKED.replace("KEEP", "0").replace("BIG", "-1e4") + SCALED_MASK),
    ("fp16_mixed", MASKED.replace("KEEP", "0").replace("BIG", "-float('inf')") + SCALED_MASK),
    ("bf16_mixed", MASKED.replace("KEEP", "0").replace("BIG", "-1e30") + "train(m, o)"),
    (
        "bf16_mixed",
        MASKED.replace("KEEP", "0").replace("BIG", "torch.finfo(scores.dtype).min") + "train(m, o)",
    ),
    (
        FP8,
        CONVERTED.replace("net()", "net(2048, 1)") + "x = torch.randn(4, 8, 2048); train(m, o)",
    ),
    (FP8, "m = net(); o = adam(m); x = x[:3]; train(m, o)"),  # mpguard converts, and pads
    (
        "bf16_mixed",
        "m = nn.Sequential(net(layers=4).requires_grad_(False).bfloat16(), nn.Linear(32, 4)); train(m, adam(m[1]))",
    ),
    (  # the second model is frozen while the first one is trained, and the other way round
        "bf16_mixed",
        "m = nn.Sequential(net(layers=1).requires_grad_(False), net(layers=3)); train(m, adam(m[1]))\n"
        "m = nn.Sequential(net(layers=4), net(layers=1)); first, second = adam(m[0]), adam(m[1])\n"
        "for o, still in ((first, m[1]), (second, m[0])):\n"
        "  m.requires_grad_(True); still.requires_grad_(False); train(m, o)",
    ),
    ("fp16_mixed", SCALED + "scaled(8, lambda step, before: scaler.get_scale() < before or schedule.step())"),
    ("fp16_mixed", SCALED + "scaled(8, lambda step, before: step % 4 == 3 and schedule.step())"),
    ("fp16_mixed", GAN + "for _ in range(4): step(a, first, scaler); step(b, second, scaler); scaler.update()"),
    (
        "fp16_mixed",
        GAN + "for _ in range(4):\n  step(a, first, scaler); scaler.update(); step(b, second, other); other.update()",
    ),
    (  # an Accelerator updates its scaler after the step of each optimizer
        "fp16_mixed",
        "from accelerate import Accelerator\naccelerator = Accelerator(cpu=True)\n"
        "a, b, first, second = accelerator.prepare(a := net(), b := net(layers=1), adam(a), adam(b))\n"
        "for _ in range(4):\n  for m, o in ((a, first), (b, second)):\n"
        "    accelerator.backward(m(x).float().pow(2).mean()); o.step(); o.zero_grad()",
    ),
]


@pytest.mark.parametrize(("remark", "recipe", "script"), MADE)
def test_a_loss_of_precision_has_a_line(tmp_path: Path, remark: str, recipe: str, script: str) -> None:
    ended = run(tmp_path, script, recipe=recipe)
    lines = [line for line in ended.stderr.splitlines() if remark in line]
    assert len(lines) == 1 and lines[0].startswith("mpguard: ") and "See" in lines[0], transcript(ended)


@pytest.mark.parametrize(("recipe", "script"), NOT_MADE)
def test_a_correct_run_has_none(tmp_path: Path, recipe: str, script: str) -> None:
    ended = run(tmp_path, script, recipe=recipe)
    assert ended.returncode == 0, transcript(ended)
    assert not any(remark in ended.stderr for remark in EVERY), transcript(ended)


ENGINE = """
import contextlib, deepspeed
deepspeed.init_distributed("gloo")
m = deepspeed.initialize(model=net(), config={
    "train_micro_batch_size_per_gpu": 16, "zero_optimization": {"stage": 1}, "bf16": {"enabled": True},
    "optimizer": {"type": "Adam", "params": {"torch_adam": True}},
})[0]
x = x.bfloat16()
for _ in range(2):
    with REGION: loss = m(x).float().pow(2).mean()
    m.backward(loss); m.step()
m.eval()
with torch.no_grad(), amp(): m(x)
"""


@pytest.mark.parametrize(("region", "remarks"), [("amp()", 1), ("contextlib.nullcontext()", 0)])
def test_autocast_around_a_deepspeed_engine_has_a_line(tmp_path: Path, region: str, remarks: int) -> None:
    pytest.importorskip("deepspeed", reason="the real library runs here")
    (tmp_path / "t.py").write_text(HEAD + ENGINE.replace("REGION", region))
    config = mp_yaml(tmp_path, distributed_type="DEEPSPEED", deepspeed_config="{zero_stage: 1}")
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    ended = in_fork(["--config", config, "t.py"], cwd=tmp_path, MASTER_PORT=str(free_port()), **ranks)
    assert ended.returncode == 0, transcript(ended)
    assert ended.stderr.count("is called inside of `torch.autocast` in bf16") == remarks, transcript(ended)


CLASSIFIER = """
class Classifier(nn.Module):
    def __init__(s):
        super().__init__()
        s.body, s.ANY = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4))), nn.Linear(32, 48)
    def forward(s, x): return s.ANY(s.body(x).relu())
m = Classifier(); o = adam(m)
for _ in range(3):
    with amp(): loss = nn.functional.cross_entropy(m(x), torch.arange(len(x)))
    loss.backward(); o.step(); o.zero_grad()
print(type(m.ANY).__name__)
"""


@pytest.mark.parametrize(
    ("name", "more", "kind", "lines"),
    [
        ("to_classes", "", "Float8Linear", 1),
        ("to_classes", ", fp8_head: true", "Float8Linear", 0),  # wanted
        ("to_classes", ", fp8_exclude: [to_classes]", "Linear", 0),
        ("head", "", "Linear", 0),  # found by its name, when the model was converted
    ],
)
def test_a_head_that_only_the_step_shows_is_named_and_stays_as_it_is(
    tmp_path: Path, name: str, more: str, kind: str, lines: int
) -> None:
    pytest.importorskip("torchao")
    overrides = f"fp8_emulate: true, compile: false, first_last_layers_bf16: false{more}"
    fp8 = f"{{mpguard_recipe: bf16_with_fp8_current_scaling_mixed, mpguard_overrides: {{{overrides}}}}}"
    (tmp_path / "t.py").write_text(HEAD + CLASSIFIER.replace("ANY", name))
    ended = in_fork(["--config", mp_yaml(tmp_path, fp8_config=fp8), "t.py"], cwd=tmp_path)
    assert ended.returncode == 0 and kind in ended.stdout, transcript(ended)
    line = f"`{name}` is in FP8, and an output head: of all layers, its result alone becomes log-probabilities."
    assert ended.stderr.count(line) == lines and "is in FP8, and an" not in ended.stderr.replace(line, ""), transcript(
        ended
    )
