"""The opt-ins on a GPU.

The kernel for AdamW with masters, `Conv1D` and the output head in FP8 matmuls, first scales of delayed scaling, and
FP8 copies of weights.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import te_models
import torch
from limits import seconds
from processes import launch, mp_yaml, proof, transcript
from te_models import POLICIES, Model, model
from torch import nn
from torch.utils.checkpoint import checkpoint

import mpguard
from mpguard.nn import master_weights
from mpguard.nn.master_weights import master_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(96, 1000), nn.GELU(), nn.Linear(1000, 7)).cuda()


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(number % 3)
    return (
        torch.randn(32, 96, device="cuda", generator=generator),
        torch.randn(32, 7, device="cuda", generator=generator),
    )


def train(model: nn.Module, optimizer: Any, steps: int) -> list[float]:
    losses = []
    for number in range(steps):
        x, wanted = batch(number)
        with torch.autocast("cuda", torch.bfloat16):
            loss = (model(x).float() - wanted).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("fused", [True, None])
def test_the_kernel_is_torchs_adamw(fused: bool | None) -> None:
    plain, model = network(), network()
    other = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.1, fused=fused)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=fused)
    assert master_weights.keep(optimizer) == 4
    assert train(model, optimizer, 30) == pytest.approx(train(plain, other, 30), rel=1e-3)
    assert master_weights._failed == []
    for own, exact in zip(model.parameters(), plain.parameters(), strict=True):
        master = master_of(own)
        assert master is not None and master.steps == 30, "the kernel ran"
        assert torch.equal(own, master.value.bfloat16()), "rounded to nearest"
        assert torch.allclose(master.value, exact, atol=3e-4)
        assert optimizer.state[own]["step"].item() == 30
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    resumed = network()
    again = torch.optim.AdamW(resumed.parameters(), lr=1e-3, weight_decay=0.1, fused=fused)
    master_weights.keep(again)
    resumed.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    assert train(model, optimizer, 5) == train(resumed, again, 5), "bit by bit"


def test_one_step_of_the_kernel_is_that_of_fp32_parameters() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    exact = nn.Parameter(torch.randn(5001, device="cuda", generator=generator))
    own = nn.Parameter(exact.detach().clone())
    other, optimizer = torch.optim.AdamW([exact], lr=1e-2, fused=True), torch.optim.AdamW([own], lr=1e-2, fused=True)
    master_weights.keep(optimizer)
    for _ in range(5):
        own.grad = torch.randn(5001, device="cuda", generator=generator).bfloat16()
        exact.grad = own.grad.float()
        other.step()
        optimizer.step()
        assert torch.allclose(master_of(own).value, exact, rtol=1e-6, atol=1e-6)  # type: ignore[union-attr]
    with torch.no_grad():
        own.data[7] = 3.0
    own.grad = torch.zeros_like(own)
    before = master_of(own).value.clone()  # type: ignore[union-attr]
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    after = master_of(own).value  # type: ignore[union-attr]
    assert after[7] == 3 and torch.equal(after[8:], before[8:]) and torch.equal(after[:7], before[:7])


def test_gpt2_and_its_head_run_in_fp8_products() -> None:
    pytest.importorskip("torchao")
    transformers = pytest.importorskip("transformers")
    from torch.profiler import ProfilerActivity, profile

    policy = mpguard.Policy(bf16=True, fp8="hybrid", backend="torchao", fp8_head=True, fp8_fast_accum=True)
    config = transformers.GPT2Config(
        vocab_size=1024, n_embd=256, n_layer=2, n_head=4, n_positions=128, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    ids = torch.randint(0, 1024, (4, 128), device="cuda")
    losses = []
    for fp8 in (False, True):
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(config).cuda()
        if fp8:
            done = mpguard.convert(model, policy.replace(compile=False))
            assert len(done.converted) == 9, done
        with torch.autocast("cuda", torch.bfloat16), profile(activities=[ProfilerActivity.CPU]) as trace:
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
        losses.append(loss.item())
    products = {event.key: event.count for event in trace.key_averages() if event.key == "aten::_scaled_mm"}
    assert products == {"aten::_scaled_mm": 27}, "9 layers, forward and both gradients"
    assert losses[1] == pytest.approx(losses[0], rel=0.01)


def gradients(net: nn.Module, scale: float = 1.0) -> dict[str, torch.Tensor]:
    net.zero_grad()
    tokens = torch.randint(0, 128, (8, 65), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    with torch.autocast("cuda", torch.bfloat16):
        logits = net(tokens[:, :-1])
    loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
    (loss * scale).backward()
    return {
        name: each.grad.clone() / scale
        for name, each in net.named_parameters()
        if each.grad is not None and name.startswith("layers") and each.ndim > 1
    }


def error(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    return max(float((found[name] - exact[name]).norm() / exact[name].norm()) for name in exact)


class Checkpointed(Model):
    reentrant = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        y: torch.Tensor = self.lm_head(x)
        return y


def test_calibrated_delayed_scaling_keeps_the_first_gradients() -> None:
    pytest.importorskip("transformer_engine.pytorch")
    delayed = POLICIES["delayed"]
    found = {}
    for calibrated in (False, True):
        net = model()
        mpguard.convert(net, delayed.replace(fp8_calibration=calibrated))
        exact = gradients(model(), 1e-3)
        found[calibrated] = error(gradients(net, 1e-3), exact)
        later = error(gradients(net, 1e-3), exact)
        print(f"calibrated: {calibrated}, error of the first gradients {found[calibrated]:.3f}, later {later:.3f}")
    assert found[False] > 0.5, "with scales of 1 most of them are lost"
    assert found[True] < 0.15


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_is_calibrated_too(reentrant: bool) -> None:
    pytest.importorskip("transformer_engine.pytorch")
    policy = POLICIES["delayed"].replace(fp8_calibration=True)
    found = []
    for kind in (Model, Checkpointed):
        torch.manual_seed(0)
        net = kind().cuda()
        if isinstance(net, Checkpointed):
            net.reentrant = reentrant
        mpguard.convert(net, policy)
        found.append(gradients(net))
    assert error(*found) == 0.0


@pytest.mark.parametrize("name", ["delayed", "tensorwise", "blockwise"])
@pytest.mark.parametrize("fused", [True, False])
def test_a_cached_weight_is_that_of_a_run_without_copies(name: str, fused: bool) -> None:
    """The same losses and weights bit for bit, but for delayed scaling, whose scales change from pass to pass."""
    pytest.importorskip("transformer_engine.pytorch")
    results = []
    for cached in (False, True):
        net = model()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=fused)
        mpguard.convert(net, POLICIES[name].replace(fp8_weight_cache=cached))
        losses = []
        for number in range(12):
            tokens = torch.randint(
                0, 128, (8, 65), device="cuda", generator=torch.Generator("cuda").manual_seed(number)
            )
            with torch.autocast("cuda", torch.bfloat16):
                logits = net(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            losses.append(loss.item())
            if number % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
        state = net.layers[0].up._mpguard_fp8
        assert (state.passes, state.roundings) == ((4, 1) if cached else (0, 0))
        assert net.layers[0].up.keeps_copy is cached
        results.append((losses, [each.detach() for each in net.parameters()]))
    (losses, weights), (others, other_weights) = results
    if name == "delayed":
        assert others == pytest.approx(losses, rel=0.01)
    else:
        assert others == losses and all(map(torch.equal, weights, other_weights))


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_uses_the_copies_of_its_first_pass(reentrant: bool) -> None:
    """A layer runs twice per micro-batch; it rounds its weight once per step, and nothing else changes."""
    pytest.importorskip("transformer_engine.pytorch")
    results = []
    for cached in (False, True):
        torch.manual_seed(0)
        net = Checkpointed().cuda()
        net.reentrant = reentrant
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        mpguard.convert(net, POLICIES["tensorwise"].replace(fp8_weight_cache=cached))
        found = []
        for _ in range(2):
            found.append(gradients(net))
            found.append(gradients(net))
            optimizer.step()
        if cached:
            state = net.layers[0].up._mpguard_fp8
            assert (state.passes, state.roundings) == (4, 1), "two forward passes and two recomputations"
        results.append(found)
    for own, other in zip(*results, strict=True):
        assert all(torch.equal(own[name], other[name]) for name in other)


SUPPORT = Path(te_models.__file__).parent

TRAIN = """
import sys
import torch
from accelerate import Accelerator
from te_models import Model

accelerator = Accelerator(gradient_accumulation_steps=4)
torch.manual_seed(0)
model = Model()
if "compiled" in sys.argv:
    model = torch.compile(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer = accelerator.prepare(model, optimizer)
for number in range(12):
    tokens = torch.randint(0, 128, (8, 65), device="cuda")
    with accelerator.accumulate(model):
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        accelerator.backward(loss)
        if "stale" in sys.argv and number % 4 == 1:
            for parameter in model.parameters():
                parameter.data.mul_(0.9)
        optimizer.step()
        optimizer.zero_grad()
accelerator.end_training()
"""


def trained(folder: Path, recipe: str, overrides: str, *arguments: str) -> tuple[Any, Any]:
    """Launch the script; return its run and the rows of its proof."""
    (folder / "train.py").write_text(TRAIN)
    fields = f"{{mpguard_recipe: {recipe}, mpguard_overrides: {overrides}}}"
    config = mp_yaml(folder, use_cpu="false", mixed_precision="fp8", fp8_config=fields)
    file, path = folder / "proof.json", os.pathsep.join((str(SUPPORT), os.environ.get("PYTHONPATH", "")))
    words = ["--config", config, "--proof-json", file, folder / "train.py", *arguments]
    run = launch(*words, cwd=folder, timeout=seconds(180), PYTHONPATH=path)
    assert file.exists(), transcript(run)
    return run, proof(file)["rows"]


@pytest.mark.parametrize(
    "arguments", [[], ["compiled"], ["stale"], ["compiled", "stale"]], ids=lambda words: " ".join(words) or "eager"
)
def test_the_weight_cache_is_proven_in_a_run(tmp_path: Path, arguments: list[str]) -> None:
    pytest.importorskip("transformer_engine.pytorch")
    overrides = "{backend: te, first_last_layers_bf16: false, fp8_weight_cache: true}"
    run, rows = trained(tmp_path, "bf16_with_fp8_current_scaling_mixed", overrides, *arguments)
    assert "fp8 weight cache" in rows, (rows, transcript(run))
    row = rows["fp8 weight cache"]
    if "stale" in arguments:
        assert run.returncode != 0 and row["ok"] is False and "is not that of its weight" in row["found"], transcript(
            run
        )
    else:
        assert run.returncode == 0, transcript(run)
        assert row["found"] == "8 of 8 layers rounded once in 4 passes of a step" and row["ok"], row


def test_calibration_is_proven_in_a_run(tmp_path: Path) -> None:
    pytest.importorskip("transformer_engine.pytorch")
    run, rows = trained(tmp_path, "bf16_with_fp8_delayed_scaling_mixed", "{fp8_calibration: true}")
    assert run.returncode == 0, transcript(run)
    assert rows["fp8 calibration"]["ok"] and rows["fp8 calibration"]["found"] == "8 of 8 layers", rows[
        "fp8 calibration"
    ]
