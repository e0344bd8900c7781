"""The proof in one process: what is observed, what fails, when it is concluded. Each script really trains."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the real library runs here")

import short_programs
import torch
from paths import PROGRAMS
from processes import command, in_fork, mp_yaml, proof, transcript

import mpguard
from mpguard.policy.allow import allowances
from mpguard.policy.policy import Policy
from mpguard.runtime.plan import Plan
from mpguard.runtime.proof.checks import compare, failures, verdict_on
from mpguard.runtime.proof.checks.common import format_counts
from mpguard.runtime.proof.checks.compute import NO_TF32
from mpguard.runtime.proof.fp8 import Fp8Layers
from mpguard.runtime.proof.observe import Computed, Observed, observe
from mpguard.runtime.proof.recorder import Recorder
from mpguard.runtime.proof.report import Proof
from mpguard.runtime.proof.verdict import Row, Verdict
from mpguard.targets.plugin import get

SCRIPT = PROGRAMS / "scripted.py"

#: A BF16 run under FSDP2 with two ranks that is in force.
GOOD = Observed(
    engine="fsdp2", world_size=2, launched=2, step=1,
    parameters={"fp32": 1000}, computed=[Computed(True, "bf16", 900, "layers.0", "layers.0 (Linear of Net)")],
    optimizer="AdamW", masters={"fp32": 1000}, gradients={"fp32": 1000}, states={"fp32": 2000},
    reductions={"fp32": 1000}, reduced_by="the collective",
)  # fmt: skip
PLAN = Plan(mpguard.recipe("bf16_mixed"), strategy="fsdp2", processes=2)
FP8 = Plan(
    mpguard.recipe("bf16_with_fp8_current_scaling_mixed").replace(backend="torchao"), strategy="fsdp2", processes=2
)
FP16 = Plan(mpguard.recipe("fp16_mixed"), strategy="fsdp2", processes=2)


def wrong(plan: Plan, **seen: object) -> list[str]:
    """Return the names of the rows that do not match the plan."""
    return [row.name for row in compare(dataclasses.replace(GOOD, **seen), plan) if row.verdict is Verdict.WRONG]  # type: ignore[arg-type]


def test_a_run_as_requested_has_no_failures() -> None:
    assert wrong(PLAN) == []


@pytest.mark.parametrize(
    ("row", "seen"),
    [
        ("engine", {"engine": "ddp"}),
        ("engine", {"engine": "none"}),
        ("engine", {"engine": "fsdp1"}),
        ("processes", {"world_size": 1}),
        ("parameters", {"parameters": {"bf16": 1000}}),
        ("compute", {"computed": [Computed(True, "fp32", 900)]}),
        ("compute", {"computed": [Computed(True, "bf16", 880), Computed(True, "fp32", 120)]}),
        ("compute", {"computed": [Computed(True, "bf16", 899), Computed(True, "fp16", 1)]}),
        ("attention", {"computed": [*GOOD.computed, Computed(True, "fp16", 1, attention=True)]}),
        ("frozen parts", {"computed": [*GOOD.computed, Computed(False, "fp16", 1, inside=True)]}),
        ("gradients", {"gradients": {"bf16": 1000}}),
        ("reduction", {"reductions": {"bf16": 1000}}),
        ("reduction", {"reductions": {"fp32": 500, "bf16": 500}}),
        ("optimizer", {"masters": {"bf16": 1000}}),
        ("optimizer", {"states": {"bf16": 2000}}),
        ("fp8", {"fp8": Fp8Layers("torchao", ["a"], recipe={"recipe": "tensorwise"})}),
    ],
)
def test_each_fact_is_compared(row: str, seen: dict[str, object]) -> None:
    assert wrong(PLAN, **seen) == [row]


def test_what_graphs_imply_is_compared_where_operators_could_not_be_recorded() -> None:
    """With a wider limit, because the graph shows only results; without a result, the run is not refused."""
    part = Computed(True, "fp32", 400, "head", "head")
    inferred = dataclasses.replace(GOOD, computed=[*GOOD.computed, part], inferred="another profiler runs")
    row = next(row for row in compare(inferred, PLAN) if row.name == "compute")
    assert row.verdict is Verdict.AS_ASKED and "(inferred from autograd's graph: another profiler runs)" in row.found
    assert wrong(PLAN, computed=[part], inferred="another profiler runs") == ["compute"]
    nothing = dataclasses.replace(GOOD, computed=[], inferred="another profiler runs")
    rows = compare(nothing, PLAN)
    assert not failures(rows, PLAN, nothing) and verdict_on(rows, PLAN, []) == "not proven"


def test_frozen_parts_in_a_lower_dtype_can_be_allowed() -> None:
    frozen = [Computed(False, dtype, 1, inside=True) for dtype in ("fp16", "int8")]
    plan = dataclasses.replace(PLAN, allow=allowances("frozen: fp16"))
    assert wrong(PLAN, computed=[*GOOD.computed, frozen[0]]) == ["frozen parts"]
    assert wrong(plan, computed=[*GOOD.computed, *frozen]) == ["frozen parts"]
    seen = dataclasses.replace(GOOD, computed=[*GOOD.computed, frozen[0]])
    row = next(row for row in compare(seen, plan) if row.name == "frozen parts")
    assert (row.verdict, row.allowed) == (Verdict.ALLOWED, "frozen: fp16") and not failures(
        compare(seen, plan), plan, seen
    )


def test_layers_in_a_wider_dtype_are_named_and_allowed() -> None:
    router = Computed(True, "fp32", 50, "router", "router (Linear of Net)")
    seen = dataclasses.replace(GOOD, computed=[*GOOD.computed, router])
    row = next(row for row in compare(seen, PLAN) if row.name == "compute")
    assert row.verdict is Verdict.AS_ASKED and "router" in row.found


def test_a_wider_reduction_than_requested_is_in_force() -> None:
    assert "reduction" not in wrong(dataclasses.replace(PLAN, policy=PLAN.policy.replace(grad_reduce_in_fp32=False)))


AO = Fp8Layers("torchao", ["layers.0", "layers.1"], {"lm_head": "fp8_exclude"}, recipe={"recipe": "tensorwise"})
DELAYED = Policy(bf16=True, fp8="hybrid", fp8_recipe="delayed", fp8_amax_history_len=16, fp8_amax_compute_algo="max")
IN_FP8 = [Computed(True, "fp8", 900, "layers.0", "layers.0 (Linear of Net)")]
TE = Fp8Layers("te", ["layers.0"], entered=True, recipe={**get("te").build_arguments(DELAYED), "override": None})


@pytest.mark.parametrize(
    ("changed", "row"),
    [
        ({}, None),
        ({"recipe": {"recipe": "rowwise"}}, "fp8"),
        ({"emulated": True}, "fp8"),
        ({"left": {"layers.2": ""}}, "not in fp8"),
        ({"left": {"layers.2": "13 is not a multiple of 16"}}, None),
        ({"against": ["lm_head"]}, "fp8_exclude"),
        ({"unmatched": ["*typo*"]}, "fp8_exclude"),
        ({"backend": "te"}, "fp8"),
        ({"beside": ["layers.0"]}, "fp8 products"),
    ],
)
def test_fp8_is_compared_layer_by_layer(changed: dict[str, Any], row: str | None) -> None:
    assert wrong(FP8, fp8=dataclasses.replace(AO, **changed), computed=IN_FP8) == ([row] if row else [])


def test_fp8_requested_without_fp8_layers_is_a_failure() -> None:
    assert wrong(FP8, fp8=None) == ["fp8"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"entered": False}, "autocast not entered"),
        ({"recipe": {**TE.recipe, "amax_history_len": 1024}}, "amax_history_len is 1024, not 16"),
        ({"recipe": {**TE.recipe, "amax_compute_algo": "most_recent"}}, "amax_compute_algo is most_recent, not max"),
        ({"recipe": {**TE.recipe, "recipe": "Float8CurrentScaling"}}, "recipe is Float8CurrentScaling"),
    ],
)
def test_the_recipe_of_transformer_engine_is_compared_field_by_field(changed: dict[str, Any], message: str) -> None:
    plan = dataclasses.replace(FP8, policy=DELAYED)
    assert wrong(plan, fp8=TE, computed=IN_FP8) == []
    seen = dataclasses.replace(GOOD, fp8=dataclasses.replace(TE, **changed))
    assert message in "; ".join(map(str, failures(compare(seen, plan), plan, seen)))


def test_fp16_needs_a_scaler_that_is_enabled() -> None:
    fp16 = {"computed": [Computed(True, "fp16", 900)]}
    scaler = {"kind": "GradScaler", "enabled": True, "scale": 2.0**16, "window": 1000}
    assert wrong(FP16, **fp16) == ["scaler"]
    assert wrong(FP16, **fp16, scaler={**scaler, "enabled": False}) == ["scaler"]
    assert wrong(FP16, **fp16, scaler={**scaler, "window": 2000}) == ["scaler"]
    seen = dataclasses.replace(GOOD, **fp16, scaler={**scaler, "window": 2000})
    (why,) = failures(compare(seen, FP16), FP16, seen)
    assert "only if mpguard is active when it is created" in why.advice
    assert wrong(FP16, **fp16, scaler=scaler) == []


def test_a_failure_contains_what_is_what_was_requested_and_what_to_do() -> None:
    seen = dataclasses.replace(GOOD, engine="none", world_size=1)
    engine, processes = failures(compare(seen, PLAN), PLAN, seen)
    assert "asked: fsdp2" in engine.text and "rap the model in the" in engine.advice
    assert "asked: 2" in processes.text and "without a process group" in processes.advice


def test_the_table_and_the_file_have_the_same_rows(tmp_path: Path) -> None:
    made = Proof("in force", PLAN, compare(GOOD, PLAN), (), GOOD)
    made.write(tmp_path / "proof.json")
    rows = json.loads((tmp_path / "proof.json").read_text())["rows"]
    assert "step 1 proven in force on all 2 ranks" in made.table()
    assert all(row["name"] in made.table() and row["found"] in made.table() for row in rows)


@pytest.mark.parametrize("width", [60, 80])
def test_the_table_fits_on_a_terminal_and_says_the_same(width: int) -> None:
    seen = dataclasses.replace(GOOD, engine="none", world_size=1)
    rows = [
        *compare(seen, PLAN),
        Row("low in bf16", "lm_head; model.layers.0.self_attn.q_proj; " * 3, "", Verdict.NOT_ASKED),
        Row("a name of more than its column", "fp32", "", Verdict.ALLOWED, "fp32: the script computes the loss so"),
    ]
    made = Proof("not in force", PLAN, tuple(rows), (), seen)
    lines = made.table(width=width).splitlines()
    assert all(len(line) <= width for line in lines), "\n".join(lines)
    assert sorted("".join("".join(lines).split())) == sorted("".join(made.table().split()))


# -- real runs -----------------------------------------------------------------------------------


def trained(
    folder: Path, *arguments: object, recipe: str = "bf16_mixed", options: tuple[object, ...] = (), **keys: object
):  # type: ignore[no-untyped-def]
    """Run scripted.py under `mpguard.run`; its proof is in proof.json."""
    config = mp_yaml(folder, recipe=recipe, **keys)
    return in_fork(
        ["--config", config, "--proof-json", folder / "proof.json", *options, SCRIPT, *arguments], cwd=folder
    )


def test_a_custom_loop_is_proven_after_its_first_step(tmp_path: Path) -> None:
    run = trained(tmp_path)
    made = proof(tmp_path / "proof.json")
    assert run.returncode == 0 and "finished" in run.stdout, transcript(run)
    assert "step 1 proven in force on 1 process" in run.stderr and "bf16_mixed" in run.stderr
    assert made["verdict"] == "in force"
    assert made["observed"]["compute"].keys() == {"bf16"} and made["observed"]["states"].keys() == {"fp32"}


@pytest.mark.parametrize(
    ("what", "arguments"),
    [
        ("compute", ("--autocast", "none")),
        ("compute", ("--autocast", "float16")),
        ("optimizer", ("--parameters", "bfloat16", "--autocast", "none")),
    ],
)
def test_another_precision_than_that_of_the_policy_ends_the_run(
    tmp_path: Path, what: str, arguments: tuple[str, ...]
) -> None:
    run = trained(tmp_path, *arguments)
    assert run.returncode == 1 and "finished" not in run.stdout, transcript(run)
    assert "mpguard: not in force" in run.stderr and "Traceback" not in run.stderr
    assert proof(tmp_path / "proof.json")["rows"][what]["ok"] is False


def test_enforce_warn_reports_the_failure_and_continues(tmp_path: Path) -> None:
    run = trained(tmp_path, "--autocast", "none", options=("--enforce", "warn"))
    assert run.returncode == 0 and "finished" in run.stdout, transcript(run)
    assert "mpguard: not in force (continuing: enforce is warn): compute: fp32; asked: bf16" in run.stderr


def test_enforce_off_proves_nothing(tmp_path: Path) -> None:
    run = trained(tmp_path, "--autocast", "none", options=("--enforce", "off"))
    assert run.returncode == 0 and "proven" not in run.stderr, transcript(run)
    made = proof(tmp_path / "proof.json")
    assert made["verdict"] == "not proven" and "enforce is off" in made["failures"][0]


def test_a_script_that_swallows_the_exception_still_fails(tmp_path: Path) -> None:
    run = trained(tmp_path, "--autocast", "none", "--swallow")
    assert run.returncode == 1 and "finished" in run.stdout, transcript(run)


def test_fp16_is_proven_after_the_steps_that_overflow(tmp_path: Path) -> None:
    """The policy has no first scale of its own: that of the script holds."""
    arguments = ("--autocast", "float16", "--scaler", 2.0**31, "--steps", 30)
    run = trained(tmp_path, *arguments, recipe="fp16_mixed", mixed_precision="fp16")
    made = proof(tmp_path / "proof.json")
    assert run.returncode == 0, transcript(run)
    assert made["observed"]["skipped"] > 4, "2**31 overflows FP16"
    assert made["rows"]["scaler"]["ok"] and made["observed"]["scaler"]["window"] == 1000
    assert "GradScaler: init_scale" not in run.stderr, transcript(run)


@pytest.mark.parametrize("way", ["GradScaler", "policy", "accelerate"])
def test_a_short_run_in_fp16_is_proven(tmp_path: Path, way: str) -> None:
    """From 2**32, the first scale of the recipe, all steps would be skipped."""
    made = {
        "GradScaler": "scaler = torch.amp.GradScaler('cpu')",
        "policy": "import mpguard; scaler = mpguard.recipe('fp16_mixed').to('torch').scaler('cpu')",
        "accelerate": "import accelerate; scaler = accelerate.Accelerator(mixed_precision='fp16', cpu=True).scaler",
    }
    script = (
        "m = net(); o = adam(m)\n"
        "for _ in range(6):\n"
        "    with amp(torch.float16): loss = m(x).float().pow(2).mean()\n"
        "    scaler.scale(loss).backward(); scaler.step(o); scaler.update(); o.zero_grad()\n"
    )
    run = short_programs.run(tmp_path, f"{made[way]}\n{script}", recipe="fp16_mixed")
    assert run.returncode == 0 and "in force at steps 1-" in run.stderr, transcript(run)
    assert "init_scale" not in run.stderr and proof(tmp_path / "proof.json")["rows"]["scaler"]["ok"], transcript(run)


def test_fp16_without_a_scaler_is_not_in_force(tmp_path: Path) -> None:
    run = trained(tmp_path, "--autocast", "float16", recipe="fp16_mixed", mixed_precision="fp16")
    assert run.returncode == 1 and "scaler: none" in run.stderr, transcript(run)


def test_steps_that_are_always_skipped_end_the_run(tmp_path: Path) -> None:
    arguments = ("--autocast", "float16", "--scaler", 2.0, "--always-inf", "--steps", 400)
    run = trained(tmp_path, *arguments, recipe="fp16_mixed", mixed_precision="fp16")
    assert run.returncode == 1 and "skipped" in run.stderr and "finished" not in run.stdout, transcript(run)


def test_a_fused_optimizer_whose_steps_were_all_skipped_had_gradients(tmp_path: Path) -> None:
    """A scaler calls `step` of a fused optimizer at the steps that it skips, too."""
    script = (
        "m = net(); o = torch.optim.AdamW(m.parameters(), fused=True); scaler = torch.amp.GradScaler('cpu')\n"
        "for _ in range(3):\n"
        "    with amp(torch.float16): loss = m(x).float().sum() * float('inf')\n"
        "    scaler.scale(loss).backward(); scaler.step(o); scaler.update(); o.zero_grad()\n"
    )
    run = short_programs.run(tmp_path, script, recipe="fp16_mixed")
    assert run.returncode == 1 and "ended before an optimizer step was applied (3 steps" in run.stderr, transcript(run)


def test_gradient_accumulation_only_delays_the_proof(tmp_path: Path) -> None:
    run = trained(tmp_path, "--accumulate", 8)
    assert run.returncode == 0 and "step 1 proven in force" in run.stderr, transcript(run)


def test_a_run_that_ends_before_its_first_step_is_not_proven(tmp_path: Path) -> None:
    run = trained(tmp_path, "--backward-only")
    assert run.returncode == 1 and "mpguard: not proven" in run.stderr, transcript(run)
    assert proof(tmp_path / "proof.json")["verdict"] == "not proven"


def test_not_proven_is_a_warning_under_enforce_warn(tmp_path: Path) -> None:
    config = mp_yaml(tmp_path)
    words = ("-m", "mpguard.run", "--config", config, "--enforce", "warn", SCRIPT, "--backward-only")
    run = command("python", *words, cwd=tmp_path)
    assert run.returncode == 0 and "NotProven" in run.stderr, transcript(run)


def test_a_script_that_never_trains_is_no_failure(tmp_path: Path) -> None:
    run = trained(tmp_path, "--evaluate")
    assert run.returncode == 0 and "evaluated" in run.stdout and "not proven" not in run.stderr, transcript(run)


def test_a_run_is_proven_again_after_a_checkpoint_was_loaded(tmp_path: Path) -> None:
    run = trained(tmp_path, "--resume", "fp32")
    assert run.returncode == 0 and "proven in force again" in run.stderr, transcript(run)


def test_a_resumed_run_in_another_precision_is_not_in_force(tmp_path: Path) -> None:
    run = trained(tmp_path, "--resume", "bf16", "--autocast", "bfloat16", options=())
    assert run.returncode == 1 and "optimizer: AdamW, weights bf16" in run.stderr, transcript(run)
    assert "are the master weights: remove the cast (" in run.stderr and "scripted.py:" in run.stderr
    assert "or train without master weights: recipe bf16_full" in run.stderr


def float8(**more: str) -> dict[str, str]:
    """An mp.yaml for torchao in software, with BF16 parameters."""
    overrides = {"backend": "torchao", "fp8_emulate": "true", "master_dtype": "bf16", **more}
    fields = ", ".join(f"{field}: {value}" for field, value in overrides.items())
    section = f"{{mpguard_recipe: hopper_bf16_with_fp8_mixed, mpguard_overrides: {{{fields}}}}}"
    return {"fp8_config": section, "mixed_precision": "fp8"}


def test_emulated_float8_with_bf16_parameters_is_proven(tmp_path: Path) -> None:
    arguments = ("--float8", "--parameters", "bfloat16", "--autocast", "none")
    run = trained(tmp_path, *arguments, **float8(fp8_exclude="['0']"))
    assert run.returncode == 0, transcript(run)
    assert "1 of 2 Linear (torchao tensorwise, emulated)" in run.stderr
    assert proof(tmp_path / "proof.json")["observed"]["fp8"]["left"] == {"0": "fp8_exclude"}


def test_a_layer_that_stayed_out_of_float8_for_no_reason_is_not_in_force(tmp_path: Path) -> None:
    arguments = ("--float8", "--parameters", "bfloat16", "--autocast", "none")
    run = trained(tmp_path, *arguments, **float8())
    assert run.returncode == 1 and "not in fp8: `0` (Linear of Sequential)" in run.stderr, transcript(run)


def test_a_script_without_fp8_is_converted_if_the_policy_requires_fp8(tmp_path: Path) -> None:
    """Converted when the optimizer is made; with FP32 parameters, under autocast of the CPU."""
    run = trained(tmp_path, **float8(master_dtype="fp32"))
    made = proof(tmp_path / "proof.json")
    assert (
        run.returncode == 0 and "mpguard: 2 of 2 Linear layers in FP8 (torchao tensorwise, emulated)" in run.stderr
    ), transcript(run)
    assert made["observed"]["fp8"]["converted"] == ["0", "2"] and made["rows"]["compute"]["found"] == "fp8"


DIRECT = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.taken, self.called = nn.Linear(32, 32), nn.Linear(32, 96)
    def forward(self, x):
        return self.called(nn.functional.linear(x, self.taken.weight))
net = Net()
optimizer = torch.optim.AdamW(net.parameters())
with torch.autocast("cpu", torch.bfloat16):
    loss = net(torch.randn(16, 32)).float().sum()
loss.backward()
optimizer.step()
"""


def test_an_fp8_layer_that_is_not_called_is_not_in_force(tmp_path: Path) -> None:
    """Code that uses the weight of an FP8 layer multiplies in BF16; if excluded, the table shows the share of FP8."""
    (tmp_path / "direct.py").write_text(DIRECT)
    config = mp_yaml(tmp_path, **float8(master_dtype="fp32"))
    run = in_fork(["--config", config, "direct.py"], cwd=tmp_path)
    assert run.returncode == 1 and "fp8 products: taken multiplied outside of the FP8 layer" in run.stderr, transcript(
        run
    )
    config = mp_yaml(tmp_path, **float8(master_dtype="fp32", fp8_exclude="['taken']"))
    run = in_fork(["--config", config, "direct.py"], cwd=tmp_path)
    assert run.returncode == 0 and "fp8 products   82 % of the matmuls" in run.stderr, transcript(run)


FUNCTION = """
class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return torch.mm(x.bfloat16(), weight.bfloat16().t())
    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight.bfloat16(), (gradient.t() @ x.bfloat16()).float()
"""


@pytest.mark.parametrize("compiled", ["", "net.compile()\n", "net.called.compile()\n"], ids=["eager", "whole", "part"])
@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("nn.functional.linear(x, self.taken.weight)", 1),
        ("Product.apply(x, self.taken.weight)", 1),  # as trl's output head does
        ("nn.functional.linear(self.taken(x), self.taken.weight)", 1),
        ("self.taken(x) + (self.taken.weight @ self.taken.weight.t()).sum()", 0),
    ],
)
def test_an_fp8_layer_whose_weight_other_code_multiplies_is_not_in_force(
    tmp_path: Path, line: str, status: int, compiled: str
) -> None:
    """A penalty on a weight, which multiplies it by itself, is no layer."""
    program = DIRECT.replace("nn.functional.linear(x, self.taken.weight)", line).replace(
        "class Net", FUNCTION + "class Net"
    )
    program = program.replace("optimizer =", f"{compiled}optimizer =")
    (tmp_path / "direct.py").write_text(program)
    run = in_fork(["--config", mp_yaml(tmp_path, **float8(master_dtype="fp32")), "direct.py"], cwd=tmp_path)
    named = "fp8 products: taken multiplied outside of the FP8 layer" in run.stderr
    assert (run.returncode, named) == (status, bool(status)), transcript(run)


def test_a_compiled_model_is_converted_to_fp8_too(tmp_path: Path) -> None:
    run = trained(tmp_path, "--compile", **float8(master_dtype="fp32"))
    assert run.returncode == 0 and "2 of 2 Linear (torchao tensorwise, emulated)" in run.stderr, transcript(run)


def test_delayed_scaling_is_not_compiled() -> None:
    """S19. Parts without FP8 layers may be compiled."""
    found = Fp8Layers("te", ["a"], recipe={"recipe": "DelayedScaling"}, entered=True)
    plan = Plan(Policy(bf16=True, fp8="hybrid", fp8_recipe="delayed"), strategy="fsdp2", processes=2)
    assert "compile" in wrong(plan, fp8=found, compiled=True, compiled_fp8=True)
    assert "compile" not in wrong(plan, fp8=found, compiled=True)
    seen = dataclasses.replace(GOOD, fp8=found, compiled=True, compiled_fp8=True)
    (failure,) = [each for each in failures(compare(seen, plan), plan, seen) if each.row == "compile"]
    assert "refuses delayed scaling under torch.compile: compile nothing" in failure.advice


def test_delayed_scaling_with_compile_is_refused_before_training(tmp_path: Path) -> None:
    run = trained(tmp_path, **float8(fp8_recipe="delayed", backend="te", fp8_emulate="false", compile="true"))
    assert run.returncode == 1 and "has compile=True, and Transformer Engine refuses" in run.stderr, transcript(run)
    assert "finished" not in run.stdout


def test_a_compiled_module_with_fp8_layers_is_observed() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(16, 16))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    policy = Policy(bf16=True, fp8="hybrid", backend="torchao", fp8_emulate=True)
    assert not observe(Recorder(), [torch.compile(net)], optimizer, policy=policy).compiled_fp8
    mpguard.convert(net, policy)
    assert observe(Recorder(), [torch.compile(net)], optimizer, policy=policy).compiled_fp8
    assert not observe(Recorder(), [net], optimizer, policy=policy).compiled_fp8


def test_fp8_requested_with_all_layers_excluded_is_not_in_force(tmp_path: Path) -> None:
    arguments = ("--parameters", "bfloat16", "--autocast", "none")
    run = trained(tmp_path, *arguments, **float8(fp8_exclude="['0', '2']"))
    assert run.returncode == 1 and "no FP8 module in the model" in run.stderr, transcript(run)


@pytest.mark.parametrize(
    ("recipe", "row"),
    [
        ("fp32", {"name": "tf32", "found": "off", "asked": "off", "ok": True, "verdict": "as_asked"}),
        ("tf32", {"name": "tf32", "found": NO_TF32, "asked": "on", "ok": False, "verdict": "wrong"}),
    ],
)
def test_tf32_is_set_and_shown_and_does_not_exist_on_the_cpu(tmp_path: Path, recipe: str, row: dict[str, Any]) -> None:
    run = trained(tmp_path, "--autocast", "none", recipe=recipe, mixed_precision="'no'")
    made = proof(tmp_path / "proof.json")
    assert made["rows"]["tf32"] == row and run.returncode == int(not row["ok"]), transcript(run)


def test_a_compiled_model_is_proven_without_graph_breaks(tmp_path: Path) -> None:
    """mpguard neither breaks the graph nor causes a recompilation."""
    run = trained(tmp_path, "--compile")
    made = proof(tmp_path / "proof.json")
    assert run.returncode == 0 and "finished" in run.stdout and "Warning" not in run.stderr, transcript(run)
    assert made["observed"]["compiled"] and made["rows"]["compute"]["found"] == "bf16"
    assert "graphs 1" in run.stdout, transcript(run)


def test_prove_compares_a_model_and_an_optimizer() -> None:
    model = torch.nn.Linear(16, 16)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 16)).sum().backward()
    optimizer.step()
    made = mpguard.prove(model, optimizer, "fp32")
    assert made.in_force and {row.name for row in made.rows} >= {"parameters", "gradients", "optimizer", "engine"}
    with pytest.raises(mpguard.NotInForce, match="weights and states bf16"):
        mpguard.prove(model, optimizer, "bf16_full")


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        ({"bf16": 7}, "bf16"),
        ({"bf16": 976, "fp32": 24}, "bf16 97.6 %, fp32 2.4 %"),
        ({"bf16": 10**8, "fp32": 45}, "bf16 above 99.9 %, fp32 below 0.1 %"),
        ({"fp8": 999, "bf16": 1}, "fp8 99.9 %, bf16 0.1 %"),
    ],
)
def test_shares_are_readable_however_small(counts: dict[str, int], text: str) -> None:
    assert format_counts(counts) == text
