"""S1 to S4, S12 to S15, S19, S31 and S33: Transformer Engine, accelerate's own FSDP and DeepSpeed, cuDNN. Needs a GPU.

As in tests/stock: what the libraries do by themselves, and under mpguard. All in one process, a world of one.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import in_fork, results, run_python, transcript
from stock import PROGRAMS, clean_accelerate, fixed_upstream
from torch import nn

import mpguard
from mpguard.nn import compile as compilation
from mpguard.policy.policy import Policy
from mpguard.runtime import activation
from mpguard.runtime import guard as guards
from mpguard.runtime.plan import Plan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("one_rank"),
    pytest.mark.filterwarnings("ignore::mpguard.MpguardWarning"),
]

te = pytest.importorskip("transformer_engine.pytorch")
recipes = pytest.importorskip("transformer_engine.common.recipe")
accelerate = pytest.importorskip("accelerate")

DELAYED = Policy(bf16=True, fp8="e4m3", fp8_recipe="delayed", fp8_amax_history_len=16, backend="te")  # most_recent
CURRENT = Policy(bf16=True, fp8="hybrid", backend="te")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.odd, self.down = nn.Linear(width, 2 * width), nn.Linear(width, 100), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(nn.functional.gelu(self.up(x))) + self.odd(x).mean(-1, keepdim=True)
        return y


class Net(nn.Module):
    """An `lm_head` that FP8 should leave alone, and a layer of an odd size before another."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.first = nn.Linear(64, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(2))
        self.lm_head = nn.Linear(width, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x.to(self.first.weight.dtype))
        for layer in self.layers:
            x = layer(x)
        y: torch.Tensor = self.lm_head(x)
        return y


@dataclasses.dataclass
class Trained:
    """recipes: what each call of a Transformer Engine layer ran under, None outside of FP8. dtypes: of all outputs."""

    accelerator: Any
    model: nn.Module
    recipes: list[Any]
    dtypes: set[torch.dtype]


@contextlib.contextmanager
def activated(policy: Policy, strategy: str) -> Iterator[None]:
    """mpguard's patches with this policy, without its proof: what is in force is checked here."""
    before = guards._current
    guards._current = None
    try:
        activation.start(Plan(policy, strategy=strategy, enforce="off", announced=True))
        yield
    finally:
        guards._current = before


def trained(handlers: tuple[Any, ...] = (), **arguments: Any) -> Trained:
    """Two steps of an ordinary script with accelerate."""
    accelerator = accelerate.Accelerator(kwargs_handlers=list(handlers), **arguments)
    torch.manual_seed(0)
    model: Any = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.utils.data.TensorDataset(torch.randn(64, 64), torch.randn(64, 32))
    model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(data, 32))
    seen: list[Any] = []
    dtypes: set[torch.dtype] = set()

    def hook(module: nn.Module, _inputs: Any, output: Any) -> None:
        if isinstance(module, te.Linear):
            seen.append(module.fp8_meta["recipe"] if module.fp8 else None)
        if isinstance(module, (nn.Linear, te.Linear)):
            dtypes.add(output.dtype)

    handle = nn.modules.module.register_module_forward_hook(hook)
    try:
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs).float(), targets.float())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    finally:
        handle.remove()
    return Trained(accelerator, model, seen, dtypes)


def fsdp2(**more: Any) -> dict[str, Any]:
    plugin = accelerate.FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False, **more)
    return {"fsdp_plugin": plugin}


def te_handler(**fields: Any) -> Any:
    return accelerate.utils.TERecipeKwargs(**fields)


def test_s01_fsdp2_with_te_trains_in_bf16() -> None:
    with clean_accelerate():
        stock = trained((te_handler(),), mixed_precision="fp8", **fsdp2())
        assert stock.recipes and set(stock.recipes) == {None}, fixed_upstream(1)
    with clean_accelerate(), activated(CURRENT, "fsdp2"):
        ours = trained((te_handler(),), mixed_precision="fp8", **fsdp2())
        assert ours.recipes and {type(recipe) for recipe in ours.recipes} == {recipes.Float8CurrentScaling}


def test_s02_deepspeed_with_te_ignores_the_recipe() -> None:
    def run() -> Trained:
        plugin = accelerate.DeepSpeedPlugin(zero_stage=2, gradient_clipping=1.0)
        handler = te_handler(fp8_format="E4M3", amax_history_len=16)
        return trained((handler,), mixed_precision="fp8", deepspeed_plugin=plugin)

    def asked(recipe: Any) -> tuple[Any, ...]:
        return recipe.fp8_format.name, recipe.amax_history_len, recipe.amax_compute_algo

    with clean_accelerate(ACCELERATE_USE_DEEPSPEED="true"):
        assert set(map(asked, run().recipes)) == {("HYBRID", 1024, "max")}, fixed_upstream(2)
    with clean_accelerate(ACCELERATE_USE_DEEPSPEED="true"), activated(DELAYED, "deepspeed-zero2"):
        assert set(map(asked, run().recipes)) == {("E4M3", 16, "most_recent")}


def test_s03_most_recent_never_reaches_te() -> None:
    def run() -> set[str]:
        found = trained((te_handler(amax_compute_algo="most_recent"),), mixed_precision="fp8")
        return {recipe.amax_compute_algo for recipe in found.recipes}

    with clean_accelerate():
        assert run() == {"max"}, fixed_upstream(3)
    with clean_accelerate(), activated(DELAYED, "single"):
        assert run() == {"most_recent"}


def test_s04_te_drops_arguments_that_it_does_not_know() -> None:
    recipe = recipes.DelayedScaling(interval=4, override_linear_precision=(False, False, True), colour="red")
    dropped = ("interval", "override_linear_precision", "colour")
    assert not any(hasattr(recipe, name) for name in dropped), fixed_upstream(4)
    # What mpguard writes are fields, each of them: test_te_objects.py


def test_s12_a_policy_in_fp16_computes_in_fp16_without_a_scaler() -> None:
    with clean_accelerate():
        stock = trained(mixed_precision="bf16", **fsdp2(mixed_precision_policy="fp16"))
        assert (stock.dtypes, stock.accelerator.scaler) == ({torch.float16}, None), fixed_upstream(12)
    with clean_accelerate(), activated(Policy(bf16=True), "fsdp2"):
        ours = trained(mixed_precision="bf16", **fsdp2(mixed_precision_policy="fp16"))
        assert ours.dtypes == {torch.bfloat16}


def test_s13_accelerates_fsdp2_reduces_in_bf16() -> None:
    def run() -> tuple[torch.dtype, torch.dtype]:
        found = trained(mixed_precision="bf16", **fsdp2())
        policy = found.model._get_fsdp_state()._mp_policy
        return policy.param_dtype, policy.reduce_dtype

    with clean_accelerate():
        assert run() == (torch.bfloat16, torch.bfloat16), fixed_upstream(13)
    with clean_accelerate(), activated(Policy(bf16=True), "fsdp2"):
        assert run() == (torch.bfloat16, torch.float32)


def converted(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, te.Linear)}


def by_accelerate() -> set[str]:
    from accelerate.utils.transformer_engine import convert_model

    model = Net().cuda()
    with clean_accelerate(), torch.no_grad():
        accelerate.Accelerator()
        convert_model(model)
    return converted(model)


def test_s14_te_conversion_stops_at_the_first_odd_layer() -> None:
    assert {name for name in by_accelerate() if "layers" in name} == {"layers.0.up", "layers.1.up"}, fixed_upstream(14)
    model = Net().cuda()
    done = mpguard.convert(model, CURRENT)
    assert converted(model) == {"first", "layers.0.up", "layers.0.down", "layers.1.up", "layers.1.down"}
    assert dict(done.skipped)["layers.0.odd"] == "100 is not a multiple of 16"


def test_s15_te_conversion_takes_the_output_head() -> None:
    assert "lm_head" in by_accelerate(), fixed_upstream(15)
    model = Net().cuda()
    assert dict(mpguard.convert(model, CURRENT).skipped)["lm_head"] == "fp8_exclude"


def test_s19_delayed_scaling_raises_under_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked as dynamo asks: what it makes of the error, a graph in parts or another error, differs by version."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with (
        pytest.raises(RuntimeError, match=r"not supported under torch\.compile"),
        te.autocast(recipe=recipes.DelayedScaling()),
    ):
        pytest.fail(fixed_upstream(19))
    assert compilation.choice(DELAYED).on is False


def test_s31_fused_adam_leaves_the_transposed_weights_of_delayed_scaling_behind() -> None:
    """The backward pass reads them on Hopper, which has no other FP8 matmul than that of rows."""
    from transformer_engine.pytorch.optimizers import FusedAdam

    recipe = recipes.DelayedScaling()
    with te.quantized_model_init(recipe=recipe):
        stock = te.Linear(64, 64, bias=False, params_dtype=torch.float32)
    ours = nn.Sequential(nn.Linear(64, 64, bias=False)).cuda()
    mpguard.convert(ours, DELAYED.replace(fp8_param=True))
    for model, fixed in ((stock, False), (ours, True)):
        optimizer = FusedAdam(model.parameters(), lr=0.1, master_weights=True)
        inputs = torch.randn(16, 64, device="cuda", requires_grad=True)
        for _ in range(2):
            with te.autocast(recipe=recipe) if not fixed else contextlib.nullcontext():
                model(inputs).square().sum().backward()
            optimizer.step()
        (weight,) = model.parameters()
        left = not weight._transpose_invalid and not torch.equal(weight._transpose, weight._data.t())
        assert left is not fixed, fixed_upstream(31)


def test_s33_rnns_compute_in_fp16_under_bf16_autocast(tmp_path: Path) -> None:
    stock = in_fork([PROGRAMS / "rnn.py"], cwd=tmp_path, program=run_python)
    assert stock.returncode == 0, transcript(stock)
    ours = in_fork(["--enforce", "warn", PROGRAMS / "rnn.py"], cwd=tmp_path, MPGUARD_POLICY='{"bf16": true}')
    assert ours.returncode == 0, transcript(ours)
    for kind in ("LSTM", "GRU", "RNN"):
        before, now = results(stock)[0][kind], results(ours)[0][kind]
        assert before["dtype"] == "torch.float16", fixed_upstream(33)
        assert (now["dtype"], now["finite"], now["gradient"]) == ("torch.bfloat16", True, "torch.float32")
        assert now["error"] < 0.05 and now["norm"] == pytest.approx(before["norm"], rel=0.1)
