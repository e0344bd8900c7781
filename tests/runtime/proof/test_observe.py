"""Observation of runs with a hidden mismatch, and of correct runs that look unusual. Each script really trains."""

from __future__ import annotations

import dataclasses
import inspect
import json
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the real library runs here")

import torch
from limits import seconds
from processes import in_fork, mp_yaml, proof, ranks_in_fork, transcript
from short_programs import HEAD, needs_bf16_lstm, run
from torch import nn

import mpguard
from mpguard.runtime import containment
from mpguard.runtime.progress import Progress
from mpguard.runtime.proof import consensus, models, observe
from mpguard.runtime.proof.products import conversions
from mpguard.runtime.proof.reductions import Fingerprint

OFF = "with amp(enabled=False): "


# -- compute is observed, not guessed ------------------------------------------------------------


@pytest.mark.parametrize(
    "script",
    [
        "m = net(); m.compile(backend='eager'); train(m, adam(m), enabled=False)",
        "m = net(); f = torch.compile(lambda x: m(x), backend='aot_eager'); train(f, adam(m), enabled=False)",
        "w = nn.Parameter(torch.randn(32, 32)); train(lambda x: x @ w, torch.optim.AdamW([w]), enabled=False)",
        # in FP32 inside, BF16 outside
        "m = net(); o = adam(m)\ndef f(x):\n  " + OFF + "return m(x).bfloat16()\ntrain(f, o)",
        "m = net(); o = adam(m)\n@torch.compile(backend='aot_eager')\ndef f(x):\n  " + OFF + "return m(x)\ntrain(f, o)",
        # outside of modules
        "w = nn.Parameter(torch.randn(4096, 32)); h = nn.Linear(32, 32)\n"
        "def f(x):\n  "
        + OFF
        + "y = F.linear(x, w) @ w\n  return h(y)\ntrain(f, torch.optim.AdamW([w, *h.parameters()]))",
        # experts, next to a layer in BF16
        "w = nn.Parameter(torch.randn(2, 64, 32)); h = nn.Linear(32, 32); ends = torch.tensor([8, 16]).int()\n"
        "def f(x): return F.grouped_mm(x, w.transpose(1, 2), offs=ends) + F.pad(h(x), (0, 32))\n"
        "train(f, torch.optim.AdamW([w, *h.parameters()]))",
    ],
)
def test_fp32_computation_is_observed_everywhere(tmp_path: Path, script: str) -> None:
    ended = run(tmp_path, script)
    compute = proof(tmp_path / "proof.json")["rows"]["compute"]
    assert ended.returncode == 1 and compute["ok"] is False and "fp32" in compute["found"], transcript(ended)


@pytest.mark.parametrize(
    "script",
    [
        "m = net(); m.compile(backend='aot_eager')",
        "m = nn.Sequential(nn.EmbeddingBag(500, 32), net()); x = torch.randint(0, 500, (8, 4))",
        "class E(nn.Module):\n  def __init__(s): super().__init__(); s.weight = nn.Parameter(torch.randn(500, 32))\n"
        "  def forward(s, i): return s.weight[i]\nm = nn.Sequential(E(), net()); x = torch.randint(0, 500, (8,))",
        "m = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True); x = torch.randn(2, 64, 32)",
        "m = nn.Sequential(nn.Conv1d(16, 16, 3), nn.Flatten(), nn.Linear(480, 8)); x = torch.randn(2, 16, 32)",
        pytest.param(
            "class N(nn.Module):\n  def __init__(s): super().__init__(); s.a = nn.LSTM(32, 64, 2)\n"
            "  def forward(s, x): return s.a(x[None])[0]\nm = N()",
            marks=needs_bf16_lstm(),
        ),
        "from torch.utils.checkpoint import checkpoint\nn = net(); m = n.train()\n"
        "class C(nn.Module):\n  def __init__(s): super().__init__(); s.n = n\n"
        "  def forward(s, x): return checkpoint(s.n, x.requires_grad_(), use_reentrant=True)\nm = C()",
        "import gc; m = net(); gc.freeze()",
    ],
)
def test_unusual_correct_runs_are_proven(tmp_path: Path, script: str) -> None:
    ended = run(tmp_path, script + "\no = adam(m); train(m, o)")
    made = proof(tmp_path / "proof.json")
    assert ended.returncode == 0 and made["verdict"] == "in force", transcript(ended)
    assert made["observed"]["compute"].keys() == {"bf16"} and made["observed"]["parameters"], transcript(ended)


def test_without_any_product_nothing_is_proven(tmp_path: Path) -> None:
    """A matrix that is multiplied by elements is no table: what it stands for is not known."""
    ended = run(tmp_path, "w = nn.Parameter(torch.ones(16, 32)); train(lambda x: x * w, torch.optim.AdamW([w]))")
    assert ended.returncode == 1 and "mpguard: not proven: compute could not be observed" in ended.stderr, transcript(
        ended
    )
    assert proof(tmp_path / "proof.json")["verdict"] == "not proven"


def test_a_head_that_is_most_of_the_work_is_named(tmp_path: Path) -> None:
    script = (
        "class N(nn.Module):\n  def __init__(s): super().__init__(); s.body = net(); s.head = nn.Linear(32, 1024)\n"
        "  def forward(s, x):\n    h = s.body(x)\n    " + OFF + "return s.head(h.float())\nm = N(); train(m, adam(m))"
    )
    ended = run(tmp_path, script)
    assert ended.returncode == 1 and "fp32: head (Linear of N); asked: bf16" in ended.stderr, transcript(ended)


def test_prove_does_not_prove_what_was_not_observed() -> None:
    containment.PROOF.forget()  # of an earlier test of this process
    model = nn.Linear(16, 16)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 16)).sum().backward()
    optimizer.step()
    with pytest.raises(mpguard.NotInForce, match="not proven: compute could not be observed"):
        mpguard.prove(model, optimizer, "bf16_mixed")


def test_the_outermost_modules_of_an_optimizer_are_found() -> None:
    inner, other = nn.Linear(2, 2), nn.Linear(2, 2)
    outer = nn.Sequential(nn.Sequential(inner))
    assert models.models_of(list(inner.parameters())) == [outer]
    assert models.models_of(list(other.parameters())) == [other]


# -- every optimizer -----------------------------------------------------------------------------

GAN = (
    "g, d = net(), net({}); og, od = adam(g), adam(d); y = x\nfor _ in range(3):\n  train(g, og, 1); train(d, od, 1{})"
)


def test_the_second_optimizer_is_proven_too(tmp_path: Path) -> None:
    ended = run(tmp_path, GAN.format("", ""))
    assert ended.returncode == 0 and "step 1 of AdamW proven in force too" in ended.stderr, transcript(ended)
    entries = proof(tmp_path / "proof.json")["optimizers"]
    assert [(each["optimizer"], each["verdict"]) for each in entries] == [("AdamW", "in force")] * 2
    assert all(each["rows"] and each["observed"]["compute"].keys() == {"bf16"} for each in entries)
    assert ended.stderr.count("  optimizer      AdamW, weights fp32, states fp32") == 2, "each has its table"
    ended = run(tmp_path, GAN.format("", ", enabled=False"))
    assert ended.returncode == 1 and "not in force: compute: fp32" in ended.stderr, transcript(ended)
    assert proof(tmp_path / "proof.json")["verdict"] == "not in force"


def test_an_optimizer_that_is_created_later_is_proven_at_its_next_step(tmp_path: Path) -> None:
    script = "a, b = net(), net(); train(a, adam(a)); o = adam(b); train(b, o, 3, enabled=False)"
    ended = run(tmp_path, script)
    assert ended.returncode == 1 and "not in force: compute: fp32" in ended.stderr, transcript(ended)


def test_an_optimizer_per_parameter_prints_few_lines(tmp_path: Path) -> None:
    script = (
        "m = net(32, 8); os_ = {p: torch.optim.SGD([p], lr=.1) for p in m.parameters()}\n"
        "for p in m.parameters(): p.register_post_accumulate_grad_hook(lambda p: os_[p].step())\n"
        "for _ in range(2):\n  with amp(): loss = m(x).float().pow(2).mean()\n  loss.backward(); m.zero_grad()"
    )
    ended = run(tmp_path, script)
    assert ended.returncode == 0 and ended.stderr.count("proven in force too") == 2, transcript(ended)


@pytest.mark.parametrize(
    ("script", "line"),
    [
        ("m = net()\nm.to(torch.bfloat16)\no = adam(m)", "to()"),
        ("m = net(); o = adam(m)\nm[0].bfloat16(); m[1:].bfloat16()", "bfloat16()"),
        (
            "m = net(); s = {k: v.bfloat16() for k, v in m.state_dict().items()}\n"
            "m.load_state_dict(s, assign=True); o = adam(m)",
            "load_state_dict(assign=True)",
        ),
    ],
)
def test_the_call_that_has_cast_the_weights_is_named(tmp_path: Path, script: str, line: str) -> None:
    ended = run(tmp_path, f"{script}\ntrain(m, o)")
    assert ended.returncode == 1 and "parameters: bf16" in ended.stderr, transcript(ended)
    number = (tmp_path / "t.py").read_text().splitlines().index(script.splitlines()[1]) + 1
    assert f"are the master weights: remove the cast (t.py:{number}: {line})" in ended.stderr, transcript(ended)


def test_weights_that_were_cast_and_replaced_are_not_blamed_on_the_cast(tmp_path: Path) -> None:
    ended = run(tmp_path, "m = net().bfloat16().float()\nwith torch.no_grad(): m = net().float(); "
    "m[0].weight = nn.Parameter(m[0].weight.bfloat16()); m[0].bias = None\ntrain(m, adam(m))")  # fmt: skip
    assert ended.returncode == 1 and "remove the cast" not in ended.stderr, transcript(ended)
    assert "are the master weights: create and load them in fp32" in ended.stderr


@pytest.mark.parametrize(
    ("script", "advice"),
    [
        (
            "for _ in range(3):\n  with torch.autocast('cuda', torch.bfloat16): loss = m(x).pow(2).mean()\n"
            "  loss.backward(); o.step(); o.zero_grad()",
            '`torch.autocast("cuda", dtype=torch.bfloat16)` casts nothing on the device of the model, cpu: write '
            '`torch.autocast("cpu", dtype=torch.bfloat16)`',
        ),
        (
            "from concurrent.futures import ThreadPoolExecutor; p = ThreadPoolExecutor(1)\n"
            "train(lambda x: p.submit(m, x).result(), o)",
            "holds in the thread that has entered it, and modules were called in another one",
        ),
        ("train(m, o, enabled=False)", "is switched off (`enabled=False`): enable it around the forward pass"),
        (
            "y = m(x)\nwith amp(): loss = y.pow(2).mean()\nloss.backward(); o.step()",
            "in force where these matmuls ran",
        ),
        ("m(x).pow(2).mean().backward(); o.step()", "No autocast region was entered around the forward pass"),
        (
            "torch.set_default_dtype(torch.bfloat16); m = net(); train(m, adam(m))",
            "set torch's default dtype, which is bf16, to torch.float32 before the model is created",
        ),
    ],
)
def test_the_advice_is_what_was_read_of_the_cause(tmp_path: Path, script: str, advice: str) -> None:
    ended = run(tmp_path, f"m = net(); o = adam(m)\n{script}")
    assert ended.returncode == 1 and advice in ended.stderr, transcript(ended)


# -- loss scaling --------------------------------------------------------------------------------

FP16 = """
m, d = net(), net(); o, o2 = adam(m), torch.optim.SGD(d.parameters(), 1e-3); scaler = torch.amp.GradScaler("cpu")
for _ in range(40):
    with amp(torch.float16): loss = d(m(x)).float().pow(2).mean()
    {}; {}; scaler.step(o); {}; scaler.update(); o.zero_grad(); o2.zero_grad()
"""


@pytest.mark.parametrize(
    ("scale", "backward", "second", "expected"),
    [
        ("scaled = scaler.scale(loss)", "scaled.backward()", "scaler.step(o2)", None),
        (
            "scaled = scaler.scale(loss)",
            "scaled.backward()",
            "o2.step()",
            "scaler: a GradScaler has scaled the loss, and the step went past it",
        ),
        (
            "scaler.scale(torch.ones(()))",
            "loss.backward()",
            "scaler.step(o2)",
            "backward ran on a loss that it did not scale",
        ),
    ],
)
def test_fp16_scales_every_loss_and_steps_every_optimizer(
    tmp_path: Path, scale: str, backward: str, second: str, expected: str | None
) -> None:
    ended = run(tmp_path, FP16.format(scale, backward, second), recipe="fp16_mixed")
    assert ended.returncode == (1 if expected else 0) and (expected or "proven in force") in ended.stderr, transcript(
        ended
    )


def test_a_scaler_that_the_policy_does_not_need_is_shown(tmp_path: Path) -> None:
    script = "m = net(); o = adam(m); s = torch.amp.GradScaler('cpu', init_scale=8.)\n"
    script += "with amp(): loss = m(x).float().mean()\ns.scale(loss).backward(); s.step(o)"
    ended = run(tmp_path, script)
    assert ended.returncode == 0 and proof(tmp_path / "proof.json")["rows"]["scaler"]["found"] == "GradScaler, scale 8"


# -- how a run ends ------------------------------------------------------------------------------

SWALLOW = """
m = net(); o = adam(m); caught = 0
for _ in range(5):
    m(x).pow(2).mean().backward()
    try: o.step()
    except Exception: caught += 1
print("caught", caught)
"""


def test_the_exception_is_raised_again_at_every_step(tmp_path: Path) -> None:
    ended = run(tmp_path, SWALLOW)
    assert ended.returncode == 1 and ended.stdout == "caught 5\n", transcript(ended)
    assert ended.stderr.count("mpguard: not in force: compute: fp32") == 1


@pytest.mark.parametrize(("leave", "status"), [("os._exit(0)", 1), ("os._exit(5)", 5), ("sys.exit(7)", 7)])
def test_no_exit_function_hides_or_replaces_a_status(tmp_path: Path, leave: str, status: int) -> None:
    assert run(tmp_path, f"{SWALLOW}\n{leave}").returncode == status


def test_the_status_of_a_script_that_calls_activate_is_kept(tmp_path: Path) -> None:
    """It also prints the line of a library that was not tested, once for two calls."""
    from processes import command, newer

    calls = "import mpguard; mpguard.activate('bf16_mixed'); mpguard.activate('bf16_mixed')"
    (tmp_path / "t.py").write_text(f"{calls}\n{HEAD}{SWALLOW}\nsys.exit(7)")
    ended = command("python", "t.py", cwd=tmp_path, PYTHONPATH=newer("torchao", tmp_path))
    assert ended.returncode == 7 and "mpguard: not in force" not in ended.stdout, transcript(ended)
    assert ended.stderr.count("mpguard: torchao 99.0: newer than tested (0.18)") == 1, transcript(ended)


def test_a_forked_child_is_not_proven(tmp_path: Path) -> None:
    script = (
        "m = net(); o = adam(m)\nwith amp(): m(x).sum().backward()\nchild = os.fork()\nif child == 0: sys.exit(0)\n"
        "o.step(); print('child', os.waitpid(child, 0)[1])"
    )
    ended = run(tmp_path, script)
    assert ended.returncode == 0 and ended.stdout == "child 0\n", transcript(ended)


@pytest.mark.parametrize(
    ("script", "expected", "status"),
    [
        ("print('evaluated')", "no training was seen in this process", 0),
        ("m = net(); m(x).sum().backward(); raise ValueError", "ended with status 1", 1),
    ],
)
def test_a_proof_file_is_of_this_run(tmp_path: Path, script: str, expected: str, status: int) -> None:
    (tmp_path / "proof.json").write_text('{"verdict": "in force"}')
    ended = run(tmp_path, script)
    made = proof(tmp_path / "proof.json")
    assert (ended.returncode, made["verdict"]) == (status, "not proven") and expected in made["failures"][0], (
        transcript(ended)
    )


def test_a_checkpoint_that_is_loaded_without_training_leaves_the_proof(tmp_path: Path) -> None:
    """As when the best checkpoint is loaded at the end, to evaluate it."""
    ended = run(tmp_path, "m = net(); o = adam(m); train(m, o); o.load_state_dict(o.state_dict()); print(m(x).shape)")
    assert ended.returncode == 0 and "nothing was proven" not in ended.stderr, transcript(ended)
    assert proof(tmp_path / "proof.json")["verdict"] == "in force"


def test_gradients_that_go_to_another_dtype_and_back_are_rounded() -> None:
    there, back = {("bf16", "fp16"): 8, ("fp32", "bf16"): 5}, {("fp16", "bf16"): 6, ("bf16", "fp32"): 9}
    assert conversions(there) == ({}, {})
    assert conversions(back) == ({"bf16": 9}, {})
    assert conversions({**there, **back}) == ({"bf16": 9}, {"fp16": 6, "bf16": 11})


TORCHAO_8_BIT = "torch.compile = lambda f, **_: f\nfrom torchao.optim import AdamW8bit as Adam8\n"
OWN_8_BIT = """
class Adam8(torch.optim.SGD):
    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            m, scale = self.state[p].values() if self.state[p] else (torch.zeros_like(p), 1.0)
            m = 0.9 * m.float() * scale + p.grad; p -= 0.01 * m; scale = m.abs().max() / 127
            self.state[p] = {"m": (m / scale).char(), "scale": scale}
"""


@pytest.mark.parametrize(
    ("optimizer", "states"), [(TORCHAO_8_BIT, "OptimState8bit"), (OWN_8_BIT, "int8")], ids=["torchao", "own"]
)
def test_quantized_states_are_named_and_not_refused(tmp_path: Path, optimizer: str, states: str) -> None:
    """Not by the `dtype` of a tensor subclass, which is that of the values it represents."""
    pytest.importorskip("torchao")
    ended = run(tmp_path, f"{optimizer}m = nn.Linear(32, 256); train(m, Adam8(m.parameters()))")
    row = proof(tmp_path / "proof.json")["rows"]["optimizer"]
    assert ended.returncode == 0 and row["ok"] is None and f"states {states}" in row["found"], transcript(ended)
    assert f"proven in force on 1 process (optimizer states: {states})" in ended.stderr, transcript(ended)


def test_states_in_low_precision_are_refused_unless_they_are_allowed(tmp_path: Path) -> None:
    script = """
class Momentum(torch.optim.SGD):
    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            m = self.state[p].setdefault("m", torch.zeros_like(p, dtype=torch.bfloat16))
            m.mul_(0.9).add_(p.grad); p.sub_(0.01 * m)
m = nn.Linear(32, 256); train(m, Momentum(m.parameters()))
"""
    ended = run(tmp_path, script)
    row = proof(tmp_path / "proof.json")["rows"]["optimizer"]
    assert ended.returncode == 1 and row["ok"] is False and "states bf16" in row["found"], transcript(ended)
    assert "or accept it: mpguard_allow: [{states: bf16}]" in ended.stderr
    ended = run(tmp_path, script, "--allow", "states:bf16")
    row = proof(tmp_path / "proof.json")["rows"]["optimizer"]
    assert ended.returncode == 0 and row["allowed"] == "states: bf16", transcript(ended)


def test_a_layer_added_after_the_optimizer_is_reported_with_advice(tmp_path: Path) -> None:
    script = (
        "m = net(); o = adam(m); late = nn.Linear(32, 32); m.append(late)\n"
        "o.add_param_group({'params': late.parameters()}); train(m, o)"
    )
    ended = run(
        tmp_path, script, recipe="hopper_bf16_with_fp8_mixed, mpguard_overrides: {fp8_emulate: true, backend: torchao}"
    )
    assert ended.returncode == 1 and "create the optimizer when the model is complete" in ended.stderr, transcript(
        ended
    )


def test_generation_in_fp32_between_steps_is_no_training_in_fp32(tmp_path: Path) -> None:
    """Outside of autocast a model is compiled again, and what is not in FP8 multiplies in FP32 there."""
    script = """
from transformers import LlamaConfig, LlamaForCausalLM
m = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=32, pad_token_id=0, eos_token_id=None))
m.compile(backend="aot_eager"); o = adam(m); ids = torch.randint(3, 64, (4, 16))
for _ in range(2):
    m.train()
    with amp(): loss = m(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward(); o.step(); o.zero_grad()
    m.eval()
    with torch.no_grad(): m.generate(ids[:2, :6], max_new_tokens=2, do_sample=False)
"""
    fields = "{fp8_emulate: true, backend: torchao, first_last_layers_bf16: false}"
    ended = run(tmp_path, script, recipe=f"hopper_bf16_with_fp8_mixed, mpguard_overrides: {fields}")
    assert ended.returncode == 0 and "in force at steps 1-2 (2 checks)" in ended.stderr, transcript(ended)


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("import copy; train(copy.deepcopy(m), o)", "no backward pass of that step has reached them"),
        ("m(x).mean().backward(); o.zero_grad(); o.step()", "and they were None when the step began: call `zero_grad`"),
    ],
)
def test_the_message_says_why_no_parameter_of_an_optimizer_had_a_gradient(
    tmp_path: Path, script: str, why: str
) -> None:
    ended = run(tmp_path, f"m = net(); o = adam(m); {script}")
    begins = "not proven: an optimizer was stepped, but none of its parameters had gradients: "
    assert ended.returncode == 1 and begins in ended.stderr and why in ended.stderr, transcript(ended)


def test_training_in_a_child_process_does_not_count_for_this_process(tmp_path: Path) -> None:
    ended = run(tmp_path, "import subprocess; subprocess.run([sys.executable, '-c', ''])")
    assert ended.returncode == 0 and "no training was seen in this process; nothing was proven" in ended.stderr


def test_not_proven_is_a_warning_even_if_the_script_turns_warnings_into_errors(tmp_path: Path) -> None:
    script = "import warnings; warnings.simplefilter('error'); net()(x).sum().backward()"
    ended = run(tmp_path, script, "--enforce", "warn")
    assert ended.returncode == 0 and "NotProven" in ended.stderr and "Traceback" not in ended.stderr, transcript(ended)


@pytest.mark.parametrize(
    ("words", "variables", "expected"),
    [
        (("--proof-json", "nowhere/proof.json", "t.py"), {}, "nowhere/proof.json: the proof cannot be written"),
        (("-m", "nowhere.at_all"), {}, "-m nowhere.at_all: there is no such module"),
        (("t.py",), {"WORLD_SIZE": "abc"}, "WORLD_SIZE is 'abc'; a number is needed"),
        (("t.py",), {"MPGUARD_POLICY": '{"bf16": true}', "MPGUARD_PLAN": '{"processes": "two"}'}, "MPGUARD_PLAN is"),
    ],
)
def test_a_mistake_of_the_user_has_no_traceback(
    tmp_path: Path, words: tuple[str, ...], variables: dict[str, str], expected: str
) -> None:
    (tmp_path / "t.py").write_text("print('ran')")
    given = () if variables.get("MPGUARD_PLAN") else ("--config", mp_yaml(tmp_path))
    ended = in_fork([*given, *words], cwd=tmp_path, **variables)
    assert (ended.returncode, ended.stdout) == (2, "") and expected in ended.stderr, transcript(ended)
    assert "Traceback" not in ended.stderr


def test_an_inherited_config_that_no_longer_exists_is_ignored(tmp_path: Path) -> None:
    variables = {"MPGUARD_POLICY": '{"bf16": true}', "MPGUARD_CONFIG": "/nowhere/gone.yaml"}
    assert run(tmp_path, "print('ran')", **variables).returncode == 0


def test_a_config_after_the_script_is_refused_if_there_is_no_other_policy(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text("print('ran')")
    ended = in_fork(["t.py", "--config", mp_yaml(tmp_path)], cwd=tmp_path)
    assert ended.returncode == 1 and "comes after t.py" in ended.stderr, transcript(ended)


# -- FP8 and DeepSpeed ---------------------------------------------------------------------------


def test_layers_of_different_recipes_are_not_in_force(tmp_path: Path) -> None:
    script = (
        "from torchao.float8 import Float8LinearConfig as C, convert_to_float8_training as convert\nm = net()\n"
        "for i, c in ((0, C(emulate=True)), (2, C.from_recipe_name('rowwise'))):\n"
        "  convert(m, config=c, module_filter_fn=lambda _, name: name == str(i))\n"
        "from mpguard.runtime.proof import fp8; import mpguard, json\n"
        "found = fp8.find_fp8_layers(list(m.named_modules()), mpguard.recipe('bf16_mixed'), [])\n"
        "print(json.dumps([found.recipe, found.emulated, found.mixed]))"
    )
    expected = {"recipe": "tensorwise and rowwise", "fast_accumulation_in_gradients": False}
    ended = run(tmp_path, script)
    assert json.loads(ended.stdout) == [expected, False, True], transcript(ended)


def test_a_deepspeed_config_object_gets_the_policy() -> None:
    from types import SimpleNamespace

    from mpguard.runtime.guard import Guard
    from mpguard.runtime.patches import deepspeed_config
    from mpguard.runtime.plan import Plan

    guard = Guard(Plan(mpguard.recipe("bf16_mixed"), enforce="off"))
    given = {"config": SimpleNamespace(_param_dict={"train_batch_size": 1})}
    assert deepspeed_config.arguments(given, guard)[0]["config"]["bf16"] == {"enabled": True}
    with pytest.raises(mpguard.ConfigError, match="a dict or a file is needed"):
        deepspeed_config.arguments({"config": 3}, guard)


# -- several processes ---------------------------------------------------------------------------

DISTRIBUTED = """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
rank = int(os.environ["RANK"]); dist.init_process_group("gloo"); x = x * (1 + rank)
"""
END = "\nprint('end', rank); dist.destroy_process_group()"

NO_SYNC = """
m = DDP(net()); o = adam(m)
for _ in range(2):
    with m.no_sync(), amp(): m(x).float().pow(2).mean().backward()
    o.step()
"""
METHOD = """
def hook(state, bucket):
    half = bucket.buffer().bfloat16().div_(2)
    return dist.group.WORLD.allreduce([half]).get_future().then(lambda f: bucket.buffer().copy_(f.value()[0]))
m = DDP(net()); m.register_comm_hook(None, hook); train(m, adam(m))
"""
PROBE = """
if rank == 0:
    probe = net(); train(probe, adam(probe))
dist.barrier()
m = DDP(net()); train(m, adam(m))
"""
FSDP2 = """
from torch.distributed.fsdp import fully_shard
m = net(); fully_shard(m, mesh=dist.init_device_mesh("cpu", (2,))); m.compile(backend="eager")
train(m, adam(m), enabled=False)
"""


@pytest.mark.parametrize(
    ("script", "kind", "expected"),
    [
        ("m = DDP(net()); train(m, adam(m))", "MULTI_CPU", None),
        (PROBE, "MULTI_CPU", None),
        (FSDP2, "FSDP", None),
        ("m = DDP(net()); train(m, adam(m), enabled=rank == 0)", "MULTI_CPU", "rank 1: compute: fp32"),
        (NO_SYNC, "MULTI_CPU", "the gradients differ between ranks"),
        (METHOD, "MULTI_CPU", "reduction: bf16 (the collective); asked: fp32"),
        ("m = net(); train(m, adam(m))", "MULTI_CPU", "no wrapper around the model; asked: ddp"),
        ("m = DDP(net()); o = adam(m); m(x).sum().backward()\nif rank: raise ValueError\no.step()", "MULTI_CPU",
         "rank 1: not proven"),
    ],
)  # fmt: skip
def test_ranks_agree_and_none_waits_for_ever(tmp_path: Path, script: str, kind: str, expected: str | None) -> None:
    """Rank 0, which hosts the store, ends last, so that the others can read the result."""
    (tmp_path / "t.py").write_text(HEAD + DISTRIBUTED + script + END)
    config = mp_yaml(tmp_path, distributed_type=kind, num_processes=2, fsdp_config="{fsdp_version: 2}")
    ended = ranks_in_fork(["--config", config, "t.py"], cwd=tmp_path, timeout=seconds(60))
    assert [each.returncode for each in ended] == [1 if expected else 0] * 2, "\n".join(map(transcript, ended))
    assert (expected or "proven in force on all 2 ranks") in ended[0].stderr, transcript(ended[0])


def test_gradients_are_compared_between_ranks() -> None:
    report, same = consensus.Report, Fingerprint({"weight": (1.0, 0.5)})
    assert consensus.combine([report([], same), report([], Fingerprint({"weight": (1.0, 0.5 + 1e-6)}))]) == []
    (found,) = consensus.combine([report([], same), report([], Fingerprint({"weight": (1.0, -0.5)}))])
    assert "the gradients differ between ranks" in found.text


@pytest.mark.parametrize("kind", [observe.Observed, Progress])
def test_each_field_has_a_comment(kind: type) -> None:
    lines = [line.strip() for line in inspect.getsource(kind).splitlines()]
    fields = [each.name for each in dataclasses.fields(kind)]
    before: dict[str, str] = {}
    for number, line in enumerate(lines):
        before.setdefault(line.partition(":")[0], lines[number - 1])  # methods have variables of the same name
    assert fields and [name for name in fields if not before[name].startswith("#: ")] == []
