"""The whole run: what changes after the first proof is refused, what may change is not. Each script really trains."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the real library runs here")

from limits import seconds
from processes import command, in_fork, mp_yaml, proof, ranks_in_fork, transcript

#: The beginning of each script: a small model, autocast, a loop.
HEAD = """
import copy, os, sys
import torch
from torch import nn
from mpguard.runtime import progress
progress.FREE_SECONDS = 60.0  # a busy machine must not leave out a check
torch.manual_seed(0)
def net(size=32): return nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.Linear(size, size))
def sgd(m): return torch.optim.SGD(m.parameters(), 1e-3)
def amp(dtype=torch.bfloat16, enabled=True): return torch.autocast("cpu", dtype=dtype, enabled=enabled)
x = torch.randn(16, 32)
def train(m, o, steps=3, **autocast):
    for _ in range(steps):
        with amp(**autocast): loss = m(x).float().pow(2).mean()
        loss.backward(); o.step(); o.zero_grad()
"""


def run(folder: Path, script: str, *words: object, recipe: str = "bf16_mixed", **more: Any):  # type: ignore[no-untyped-def]
    (folder / "t.py").write_text(HEAD + script)
    mode = "fp16" if "fp16" in recipe else "bf16"
    config = mp_yaml(folder, recipe=recipe, mixed_precision=mode, **more.pop("keys", {}))
    return in_fork(["--config", config, "--proof-json", folder / "proof.json", *words, "t.py"], cwd=folder, **more)


def line_of(text: str, script: str) -> str:
    """Return `t.py:12` for the line of a script that begins with a text."""
    number = next(number for number, line in enumerate((HEAD + script).split("\n"), 1) if line.startswith(text))
    return f"t.py:{number}"


# -- casts ---------------------------------------------------------------------------------------

HALF = "m = net(); o = sgd(m); train(m, o, 5)\nm.half()\ntrain(m, o, 5); print('finished')"
EVALUATED = """
m = net(); o = torch.optim.AdamW(m.parameters()); train(m, o, 5)
def validate(m):
    m.eval(); m.to(torch.float16)
    m.train(); {}
validate(m)
train(m, o, 5); print('finished')
"""


@pytest.mark.parametrize(
    ("script", "cast", "method"),
    [
        (HALF, "m.half()", "half"),
        (EVALUATED.format("m.float()"), "    m.eval(); m.to", "to"),
        (EVALUATED.format("pass"), "    m.eval(); m.to", "to"),
    ],
)
def test_training_on_with_weights_that_were_cast_is_refused(
    tmp_path: Path, script: str, cast: str, method: str
) -> None:
    ended = run(tmp_path, script)
    assert ended.returncode == 1 and "finished" not in ended.stdout, transcript(ended)
    made = proof(tmp_path / "proof.json")
    assert made["verdict"] == "not in force" and made["failures"][0].startswith("weights: t.py")
    what = f"{line_of(cast, script)}: {method}() casts the weights of "
    at_once, later = f"mpguard: {what}", f"mpguard: not in force: weights: {what}"
    assert ended.stderr.count(at_once) == 1 and ended.stderr.count(later) == 1, transcript(ended)
    assert "from fp32 to fp16, and training continued with them. Cast a copy" in ended.stderr


def test_a_process_that_is_refused_in_a_step_that_is_looked_at_ends_in_order(tmp_path: Path) -> None:
    """It crashed where the profiler still ran at its end: in a process of its own, not in a fork."""
    script = "m = net(); o = sgd(m); train(m, o, 3)\nm.half(); x = x.half()\ntrain(m, o, 1)"
    (tmp_path / "t.py").write_text(HEAD + script)
    ended = command("python", "-m", "mpguard.run", "--config", mp_yaml(tmp_path), "t.py", cwd=tmp_path)
    assert ended.returncode == 1 and "training continued with them" in ended.stderr, transcript(ended)


BY_HAND = """
m = net()
for number in range(1, 21):
    if number == 11: {}
    with amp(enabled=globals().get("enabled", True)):
        loss = m(x).float().pow(2).mean()
        torch.autograd.grad(m(x).float().sum(), list(m.parameters()))  # is no pass of its own
    loss.backward()
    with torch.no_grad():
        for own in m.parameters(): own -= 0.01 * own.grad; own.grad = None
"""


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("pass", "in force at steps 2-16 of 20 (4 checks)"),
        ("enabled = False", "not in force: step 16: compute: fp32; asked: bf16"),
        ("m.half()", "from fp32 to fp16, and training continued with them"),
    ],
)
def test_a_script_without_an_optimizer_is_looked_at_again(change: str, expected: str, tmp_path: Path) -> None:
    ended = run(tmp_path, BY_HAND.format(change))
    assert ended.returncode == (change != "pass") and expected in ended.stderr, transcript(ended)
    assert "failed" not in ended.stderr, transcript(ended)


SALIENCY = """
m = net()
for batch in x.split(4):
    inputs = batch.clone().requires_grad_()
    torch.autograd.grad(m(inputs).sum(), inputs)
print("finished")
"""


def test_gradients_of_inputs_are_no_training(tmp_path: Path) -> None:
    ended = run(tmp_path, SALIENCY)
    assert ended.returncode == 0 and "no training was seen in this process" in ended.stderr, transcript(ended)


PROVES = """
import mpguard
m = net(); o = sgd(m); train(m, o, 3)
print(mpguard.prove(m, o, "bf16_mixed").verdict)
try: mpguard.prove(m, o, "fp16_mixed")
except mpguard.NotInForce: print("refused")
"""


def test_prove_between_looks_relies_on_the_last_one(tmp_path: Path) -> None:
    ended = run(tmp_path, PROVES)
    assert ended.returncode == 0 and ended.stdout.split() == ["in", "force", "refused"], transcript(ended)


@pytest.mark.parametrize("cast", ["v.bfloat16()", "v.clone()"])
def test_training_on_with_parameters_that_were_replaced_is_refused(tmp_path: Path, cast: str) -> None:
    """The optimizer would train tensors that the model no longer has."""
    load = "m.load_state_dict({k: CAST for k, v in m.state_dict().items()}, assign=True)\n".replace("CAST", cast)
    script = f"m = net(); o = sgd(m); train(m, o, 5)\n{load}train(m, o, 5); print('finished')"
    ended = run(tmp_path, script)
    what = f"{line_of('m.load', script)}: load_state_dict(assign=True) replaces the parameters of SGD in the model"
    assert ended.returncode == 1 and "finished" not in ended.stdout, transcript(ended)
    assert f"mpguard: {what}. A further step" in ended.stderr and f"weights: {what}, and training" in ended.stderr
    right = script.replace(load, f"{load}o = sgd(m); ").replace("v.bfloat16()", "v.clone()")
    ended = run(tmp_path, right)
    assert ended.returncode == 0 and "finished" in ended.stdout, transcript(ended)


def test_a_cast_is_reported_under_warn_and_the_run_is_not_called_in_force(tmp_path: Path) -> None:
    ended = run(tmp_path, HALF, "--enforce", "warn")
    assert ended.returncode == 0 and "finished" in ended.stdout, transcript(ended)
    assert "not in force (continuing: enforce is warn): weights: t.py" in ended.stderr
    assert "in force at steps" not in ended.stderr


RIGHT = """
import io, torch.optim.swa_utils as swa
m = net(); m.append(nn.BatchNorm1d(32)); o = sgd(m); ema = copy.deepcopy(m).half(); average = swa.AveragedModel(m)
schedule = torch.optim.lr_scheduler.StepLR(o, 1); backup = None
for epoch in range(4):
    m.train(); train(m, o, 5); schedule.step(); average.update_parameters(m)
    for mine, its in zip(m.parameters(), ema.parameters()): its.data.lerp_(mine.data.half(), 0.5)
    m.eval()
    with torch.no_grad(), amp(): m(x)
    m.to("cpu"); m.to(torch.float32); copy.deepcopy(m).half(); torch.save(m.state_dict(), io.BytesIO())
swa.update_bn([x], average)
backup = copy.deepcopy(m.state_dict()); m.half(); m.float(); m.load_state_dict(backup); train(m, o, 2)
m.half()  # the export, after the last step
print('finished')
"""


WRONG_FIRST = "m = net(); o = sgd(m); train(m, o, 1, enabled=False)\n"


@pytest.mark.parametrize(
    ("script", "line"),
    [
        (
            "n = net(); train(n, sgd(n))",
            "step 1 of SGD: precision as asked too on 1 process, in a run that is not in force",
        ),
        (
            "o.load_state_dict(o.state_dict()); train(m, o)",
            "precision as asked again, in a run that is not in force, after a",
        ),
        ("n = net(); p = sgd(n); train(n, p, 0)", ""),
    ],
)
def test_a_run_with_something_wrong_stays_not_in_force_under_warn(tmp_path: Path, script: str, line: str) -> None:
    ended = run(tmp_path, WRONG_FIRST + script, "--enforce", "warn")
    assert ended.returncode == 0 and line in ended.stderr, transcript(ended)
    assert "proven" not in ended.stderr and "\nin force at" not in ended.stderr, transcript(ended)
    assert ended.stderr.splitlines()[-1].startswith("mpguard: the run was not in force and continued")
    written = proof(tmp_path / "proof.json")
    assert written["verdict"] == "not in force" and "compute: fp32; asked: bf16" in written["failures"][0]


NOT_FINITE = """
def step(*factors):
    for factor in factors:
        with amp(): loss = (m(x) * factor).float().pow(2).mean()
        loss.backward()
    o.step(); o.zero_grad()
m = net(); o = torch.optim.SGD(m.parameters(), 0.0)
nan, inf = float("nan"), float("inf")
"""


@pytest.mark.parametrize(
    ("script", "head", "end"),
    [
        (
            "for _ in range(4): step(nan)",
            "step 1: precision as asked on 1 process, but the loss",
            "(3 checks, 3 with a",
        ),
        (
            "step(nan, 1); step(1)",
            "step 1: precision as asked on 1 process, but the loss is not",
            "(2 checks, 2 with a",
        ),
        (
            "step(1); step(inf); step(1)",
            "step 1 proven in force on 1 process",
            "(2 checks, 1 with a loss that is not fi",
        ),
        ("n, p = m, o; step(1); m = net(); o = sgd(m); step(1); step(nan)", "SGD proven in force too", "1 with a"),
    ],
)
def test_a_loss_that_is_not_finite_is_named_and_ends_no_run(tmp_path: Path, script: str, head: str, end: str) -> None:
    ended = run(tmp_path, NOT_FINITE + script)
    assert ended.returncode == 0 and head in ended.stderr and end in ended.stderr.splitlines()[-1], transcript(ended)
    facts = proof(tmp_path / "proof.json")
    assert facts["verdict"] == "in force" and sum(each["looks_with_loss_not_finite"] for each in facts["run"])
    assert facts["observed"]["loss_not_finite"] == ("not finite" in head or "but the loss" in head)


def test_an_overflow_in_a_step_that_is_skipped_is_not_the_loss_of_the_next_one(tmp_path: Path) -> None:
    script = """
m = net(); o = sgd(m); scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
for factor in (float("inf"), 1.0, 1.0):
    with amp(torch.float16): loss = (m(x) * factor).float().pow(2).mean()
    scaler.scale(loss).backward(); scaler.step(o); scaler.update(); o.zero_grad()
"""
    ended = run(tmp_path, script, recipe="fp16_mixed")
    assert ended.returncode == 0 and "step 2 proven in force on 1 process, after 1 skipped" in ended.stderr, transcript(
        ended
    )
    assert "loss that is not finite" not in ended.stderr, transcript(ended)


def test_a_right_run_ends_with_a_line_about_all_of_it(tmp_path: Path) -> None:
    """Copies in half, validation under autocast, a cast after which weights are loaded again, an export at the end."""
    ended = run(tmp_path, RIGHT)
    assert ended.returncode == 0 and "finished" in ended.stdout, transcript(ended)
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("in force at steps ")]
    (facts,) = proof(tmp_path / "proof.json")["run"]
    after_evaluation = {7, 12, 17, 22}
    assert facts["looks"] == sorted({1, 2, 4, 8, 16} | after_evaluation), transcript(ended)
    assert (facts["steps"], facts["skipped"], facts["optimizer"]) == (22, 0, "SGD")
    assert line == "in force at steps 1-22 (9 checks)", transcript(ended)


ACCELERATED = """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True); m = net(); m, o = accelerator.prepare(m, sgd(m))
def steps(number):
    for _ in range(number):
        loss = m(x).float().pow(2).mean(); accelerator.backward(loss); o.step(); o.zero_grad()
steps(3); accelerator.save_state("state"); steps(2); accelerator.load_state("state"); steps(2)
m.eval(); m(x); m.train(); accelerator.save_model(m, "model"); accelerator.get_state_dict(m)
accelerator.unwrap_model(m); steps(3); accelerator.unwrap_model(m).half()
"""
TRAINER = """
from transformers import Trainer, TrainingArguments
class Model(nn.Module):
    def __init__(self): super().__init__(); self.inner = net()
    def forward(self, x, labels): return {"loss": self.inner(x).float().pow(2).mean(), "logits": labels}
data = [{"x": row, "labels": row[0]} for row in x]
arguments = TrainingArguments(
    output_dir="out", use_cpu=True, max_steps=10, per_device_train_batch_size=4, report_to=[], disable_tqdm=True,
    eval_strategy="steps", eval_steps=4, save_strategy="no", bf16_full_eval=True,
)
trainer = Trainer(model=Model(), args=arguments, train_dataset=data, eval_dataset=data)
trainer.train(); trainer.evaluate(); trainer.save_model("saved")
"""


@pytest.mark.parametrize(
    ("script", "line"),
    [
        (ACCELERATED, "in force at steps 1-9 of 10 (6 checks)"),
        # It casts the model to BF16 when it evaluates after the training, but not while it trains.
        (TRAINER, "in force at steps 1-10 (6 checks)"),
    ],
)
def test_what_frameworks_do_with_the_weights_is_not_refused(tmp_path: Path, script: str, line: str) -> None:
    ended = run(tmp_path, script)
    assert ended.returncode == 0 and line in ended.stderr, transcript(ended)


# -- later steps ---------------------------------------------------------------------------------

WARM_UP = "m = net(); o = sgd(m); train(m, o, 10); train(m, o, 10, enabled=False); print('finished')"
DATA = (
    "m = net(); o = sgd(m); train(m, o, 10)\nfor p in m.parameters(): p.grad = None; p.data = p.data.half()\n"
    "train(m, o, 10); print('finished')"
)
SWITCHED = (
    "m = net(); o = sgd(m); train(m, o, 9); m.eval(); torch.set_autocast_enabled('cpu', False); m.train()\n"
    "train(m, o, 3, enabled=False); print('finished')"
)
GROUP = (
    "m, n = net(), net().half(); o = sgd(m); train(m, o, 5); o.add_param_group({'params': n.parameters()})\n"
    "train(nn.Sequential(m, n), o, 1); print('finished')"
)
UNWRAPPED = """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True); m = net(); m, o = accelerator.prepare(m, sgd(m))
for step in range(20):
    accelerator.backward(m(x).float().pow(2).mean()); o.step(); o.zero_grad()
    if step == 10: accelerator.unwrap_model(m, keep_fp32_wrapper=False)  # it removes autocast from m too
print("finished")
"""
BACK_AND_FORTH = """
m = net(); o = sgd(m)
for epoch in range(4):
    train(m, o, 6)
    for p in m.parameters(): p.data = p.data.bfloat16()
    with torch.no_grad(): m(x.bfloat16())
    for p in m.parameters(): p.data = p.data.float()
print("finished")
"""
SECOND = "m, n = net(), net(); train(m, sgd(m), 5); n.half(); o = sgd(n); train(n, o, 1); print('finished')"


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (WARM_UP, "step 12: compute: fp32; asked: bf16"),
        (DATA, "step 16: parameters: fp16, 2.11 k; asked: fp32"),
        (SWITCHED, "step 11: compute: fp32; asked: bf16"),
        (GROUP, "step 6: parameters: fp32 50 %, fp16 50 %, 4.22 k; asked: fp32"),
        (UNWRAPPED, "step 13: compute: fp32; asked: bf16"),
        (BACK_AND_FORTH, "step 7: optimizer: SGD, weights fp32 rounded to bf16 since the last step"),
        (SECOND, "parameters: fp16, 2.11 k; asked: fp32"),
    ],
)
def test_a_change_after_the_first_proof_is_refused(tmp_path: Path, script: str, expected: str) -> None:
    ended = run(tmp_path, script)
    assert ended.returncode == 1 and "finished" not in ended.stdout, transcript(ended)
    assert f"mpguard: not in force: {expected}" in ended.stderr, transcript(ended)
    made = proof(tmp_path / "proof.json")
    assert made["verdict"] == "not in force" and made["failures"]


def test_a_parameter_group_that_is_added_is_proven(tmp_path: Path) -> None:
    script = GROUP.replace(".half()", "").replace("n), o, 1", "n), o, 2")
    ended = run(tmp_path, script)
    assert ended.returncode == 0 and "in force at steps 1-6 of 7 (4 checks)" in ended.stderr, transcript(ended)


REPLACED = """
m = net(); o = sgd(m); train(m, o, 3)
for layer in (m[0], m[2]): layer.weight, layer.bias = (nn.Parameter(torch.rand_like(p)) for p in layer.parameters())
train(m, o, 40)
"""

FROZEN_FOR_A_WHILE = """
a, b = net(), net(); oa, ob = sgd(a), sgd(b)
def both(steps):
    for _ in range(steps):
        with amp(): loss = b(a(x)).float().pow(2).mean()
        loss.backward(); oa.step(); ob.step(); oa.zero_grad(); ob.zero_grad()
both(3); a.requires_grad_(False); both(20); a.requires_grad_(True); both(60)
"""


def test_an_optimizer_that_is_moved_has_loaded_no_checkpoint(tmp_path: Path) -> None:
    again = "n = net(); p = sgd(n); p.load_state_dict(p.state_dict()); train(n, p, 3)"
    ended = run(tmp_path, f"m = net(); o = sgd(m); train(m, o, 3); {again}")
    assert ended.returncode == 0 and "checkpoint" not in ended.stderr, transcript(ended)


@pytest.mark.parametrize(("script", "looks"), [(REPLACED, [1, 2]), (FROZEN_FOR_A_WHILE, [1, 2, 36, 70])])
def test_steps_without_gradients_are_reported_and_not_recorded_for_ever(
    tmp_path: Path, script: str, looks: list[int]
) -> None:
    ended = run(tmp_path, script)
    message = "mpguard: none of the parameters of SGD had a gradient at its last 8 steps"
    assert ended.returncode == 0 and ended.stderr.count(message) == 1, transcript(ended)
    assert proof(tmp_path / "proof.json")["run"][0]["looks"] == looks, transcript(ended)


def test_the_code_of_a_look_that_fails_ends_no_training(tmp_path: Path) -> None:
    script = (
        "from mpguard.runtime import run_state\ndef broken(*_, **__): raise ZeroDivisionError('in the proof')\n"
        "m = net(); o = sgd(m); train(m, o, 1); run_state.observe = broken; train(m, o, 3); print('finished')"
    )
    ended = run(tmp_path, script)
    assert ended.returncode == 0 and "finished" in ended.stdout, transcript(ended)
    assert "applied step 2 of SGD could not be checked (ZeroDivisionError: in the proof)" in ended.stderr
    assert "in force at step 1 of 4 (1 check, 2 without a result)" in ended.stderr, transcript(ended)


# -- skipped steps -------------------------------------------------------------------------------

COLLAPSE = """
m = net(); o = sgd(m); scaler = torch.amp.GradScaler("cpu")
{}
for step in range(400):
    with amp(torch.float16): loss = m(x).float().pow(2).mean()
    loss = loss * float("inf") if {} else loss
    {}
    o.zero_grad()
print("finished")
"""
PLAIN = "scaler.scale(loss).backward(); scaler.step(o); scaler.update()"
ACCELERATE = """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True); accelerator.scaler = scaler; m, o = accelerator.prepare(m, o)
"""
FUSED = "o = torch.optim.AdamW(m.parameters(), 1e-3, fused=True)"


@pytest.mark.parametrize(
    ("begin", "step"),
    [("", PLAIN), (FUSED, PLAIN), (ACCELERATE, "accelerator.backward(loss); o.step()")],
)
def test_a_loss_scale_that_collapses_is_refused(tmp_path: Path, begin: str, step: str) -> None:
    """At the same number of steps as before the proof, and reported before."""
    ended = run(tmp_path, COLLAPSE.format(begin, "step > 60", step), recipe="fp16_mixed")
    assert ended.returncode == 1 and "finished" not in ended.stdout, transcript(ended)
    assert "in a row were skipped at step 93: the loss scale collapses. The run is refused after 128" in ended.stderr
    assert "mpguard: not in force: step 190: 129 optimizer steps in a row were skipped" in ended.stderr, transcript(
        ended
    )


def test_skipped_steps_are_counted_for_the_whole_run(tmp_path: Path) -> None:
    """Three single overflows after the proof; the flags of a fused optimizer are counted too."""
    for begin in ("", FUSED):
        ended = run(tmp_path, COLLAPSE.format(begin, "step in (60, 61, 100)", PLAIN), recipe="fp16_mixed")
        (facts,) = proof(tmp_path / "proof.json")["run"]
        assert ended.returncode == 0 and facts["steps"] + facts["skipped"] == 400, transcript(ended)
        first = proof(tmp_path / "proof.json")["observed"]["skipped"]
        assert facts["skipped"] == first + 3 and f", {first + 3} steps skipped" in ended.stderr, transcript(ended)


DEEPSPEED = """
import deepspeed
from deepspeed.accelerator import get_accelerator
type(get_accelerator()).is_fp16_supported = lambda _self: True
config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}, "gradient_clipping": 0.0,
          "zero_allow_untested_optimizer": True}
m = net(); m, o, *_ = deepspeed.initialize(model=m, optimizer=sgd(m), config=config)
for step in range(200):
    m.backward(m(x.half() * (1.0 if step < 20 else float("inf"))).float().mean()); m.step()
print("finished")
"""


def test_a_fixed_loss_scale_of_deepspeed_that_is_too_large_is_refused(tmp_path: Path) -> None:
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    recipe = "fp16_mixed, mpguard_overrides: {loss_scale: 64}"
    keys = {"distributed_type": "DEEPSPEED", "deepspeed_config": "{zero_stage: 1}"}
    ended = run(tmp_path, DEEPSPEED, recipe=recipe, keys=keys, timeout=seconds(300), **alone)
    assert ended.returncode == 1 and "finished" not in ended.stdout, transcript(ended)
    assert "mpguard: not in force: step 149: 129 optimizer steps in a row were skipped" in ended.stderr, transcript(
        ended
    )


@pytest.mark.parametrize("power", ["", ', "fp16": {"enabled": True, "initial_scale_power": 32}'])
def test_a_short_run_of_deepspeed_in_fp16_is_proven(tmp_path: Path, power: str) -> None:
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    keys = {"distributed_type": "DEEPSPEED", "deepspeed_config": "{zero_stage: 1}"}
    script = DEEPSPEED.replace("True}", f"True{power}}}").replace("range(200)", "range(8)")
    ended = run(tmp_path, script, recipe="fp16_mixed", keys=keys, timeout=seconds(300), **alone)
    assert ended.returncode == 0 and "in force at steps 1-" in ended.stderr, transcript(ended)


# -- several processes ---------------------------------------------------------------------------

DISTRIBUTED = """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
rank = int(os.environ["RANK"]); dist.init_process_group("gloo"); x = x * (1 + rank)
m = DDP(net()); o = sgd(m)
"""
END = "\nprint('finished', rank); dist.barrier(); dist.destroy_process_group()"

RANK_0_EVALUATES = """
for epoch in range(3):
    train(m, o, 6)
    if rank == 0: m.eval(); copy.deepcopy(m.module).half(); m.train()
"""
UNEVEN = """
from torch.distributed.algorithms.join import Join
for epoch in range(2):
    with Join([m]): train(m, o, 9 if rank else 20)
"""
ONE_RANK = "train(m, o, 10); train(m, o, 10, enabled=rank == 0)"


@pytest.mark.parametrize(
    ("script", "status", "expected"),
    [
        (RANK_0_EVALUATES, 0, "in force at steps 1-16 of 18 (6 checks)"),
        (UNEVEN, 0, "uneven data (`Join`): from applied step 2 of SGD on each rank checks its steps for itself"),
        (ONE_RANK, 1, "rank 1 (NODE) was refused: not in force: step 12: compute: fp32; asked: bf16"),
    ],
)
def test_ranks_look_together_and_none_waits_for_one_that_stops(
    tmp_path: Path, script: str, status: int, expected: str
) -> None:
    (tmp_path / "t.py").write_text(HEAD + DISTRIBUTED + script + END)
    config = mp_yaml(tmp_path, distributed_type="MULTI_CPU", num_processes=2)
    ended = ranks_in_fork(["--config", config, "t.py"], cwd=tmp_path, timeout=seconds(60))
    assert [each.returncode for each in ended] == [status] * 2, "\n".join(map(transcript, ended))
    assert expected.replace("NODE", socket.gethostname()) in ended[0].stderr, transcript(ended[0])


WITH_NAN = "train(m, o, 7)\nif rank: x[0] = float('nan')\ntrain(m, o, 1)"


def test_a_loss_of_another_rank_that_is_not_finite_is_named(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text(HEAD + DISTRIBUTED + WITH_NAN + END)
    config = mp_yaml(tmp_path, distributed_type="MULTI_CPU", num_processes=2)
    ended, _ = ranks_in_fork(["--config", config, "t.py"], cwd=tmp_path, timeout=seconds(60))
    assert "mpguard: the loss of rank 1 was NaN or infinite at applied step 8 of SGD" in ended.stderr, transcript(ended)
    assert "1 with a loss that is not finite" in ended.stderr, transcript(ended)


ROUNDED_ON_RANK_1 = """
train(m, o, 3)
for own in m.parameters() if rank else (): own.data = own.data.bfloat16().float()
train(m, o, 1)
"""


def test_what_another_rank_was_warned_about_is_in_the_proof(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text(HEAD + DISTRIBUTED + ROUNDED_ON_RANK_1 + END)
    config = mp_yaml(tmp_path, distributed_type="MULTI_CPU", num_processes=2)
    words = ["--config", config, "--enforce", "warn", "--proof-json", tmp_path / "proof.json", "t.py"]
    ended, _ = ranks_in_fork(words, cwd=tmp_path, timeout=seconds(60))
    assert "the run was not in force and continued (--enforce): rank 1: step 4: optimizer: SGD" in ended.stderr, (
        transcript(ended)
    )
    made = proof(tmp_path / "proof.json")
    assert made["verdict"] == "not in force" and "step 4: optimizer: SGD" in str(made["failures"]), made


def test_a_rank_that_fails_alone_reports_it(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text(f"{HEAD}{DISTRIBUTED}train(m, o, 3)\nif rank: m.half()\ntrain(m, o, 1){END}")
    config = mp_yaml(tmp_path, distributed_type="MULTI_CPU", num_processes=2)
    words = ["--config", config, "--proof-json", tmp_path / "proof.json", "t.py"]
    ended = ranks_in_fork(words, cwd=tmp_path, timeout=seconds(60))
    assert ended[1].returncode == 1, transcript(ended[1])
    assert "mpguard: rank 1: not in force: weights: t.py" in ended[1].stderr, transcript(ended[1])
    last = ended[0].stderr.splitlines()[-1]
    assert (
        last.startswith("mpguard: rank 0 (") and "rank 1 (" in last and "was refused: not in force: weights: t" in last
    )
    assert "Traceback" not in ended[0].stderr and "in force at" not in ended[0].stderr, transcript(ended[0])
    made = proof(tmp_path / "proof.json")
    assert made["verdict"] == "not in force" and "rank 1: weights: t.py" in str(made["failures"]), made
