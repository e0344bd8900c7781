"""The numbers of `mpguard sensitivity` while layers train in FP8: eager and compiled code, each recipe, all ranks."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="the real library runs here")

import torch
from torch import nn

import mpguard
from mpguard.nn import layer_error, number_formats
from mpguard.nn.fp8 import observation
from mpguard.runtime.proof import consensus
from mpguard.watching import drift, fp8_report, fp8_shares
from mpguard.watching.fp8_report import Fp8Report
from mpguard.watching.output import WatchEvent

OUTLIERS = 1e5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(64, 128), nn.ReLU(inplace=True), nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(x)))  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def no_watch() -> Iterator[None]:
    yield
    mpguard.watch(level="off")
    observation.listen(None)


def converted(recipe: str, blocks: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(blocks)))
    form = "hybrid" if recipe == "tensorwise" else "e4m3"
    policy = mpguard.recipe("bf16_with_fp8_current_scaling_mixed").replace(
        backend="torchao", fp8=form, fp8_recipe=recipe, fp8_emulate=True, first_last_layers_bf16=False, compile=False
    )
    mpguard.convert(model, policy)
    return model


def trained(model: nn.Module, file: Path | None, level: str = "full") -> tuple[list[float], list[dict[str, Any]]]:
    """Return the losses of 11 steps of two micro-batches, and the lines of the watch's file."""
    mpguard.watch(level=level, jsonl=None if file is None else str(file))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator, losses = torch.Generator().manual_seed(0), []
    for _ in range(11):
        for _ in range(2):
            x = torch.randn(4, 32, 64, generator=generator)
            x[..., 3] *= OUTLIERS
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(x).float().square().mean() / OUTLIERS
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    mpguard.watch(level="off")
    assert not observation.enabled
    return losses, [] if file is None else [json.loads(line) for line in file.read_text().splitlines()]


def statistics_of(lines: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    return {line["step"]: line["value"] for line in lines if line["event"] == "fp8_statistics"}


@pytest.mark.filterwarnings("ignore::mpguard.MpguardWarning")
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8"])
def test_the_shares_of_each_layer_and_tensor(recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, _ = trained(converted(recipe), None, "off")
    losses, lines = trained(converted(recipe), tmp_path / "run.jsonl")
    assert losses == plain, "losses are the same bit for bit"
    found = statistics_of(lines)
    assert list(found) == [1, 10]
    assert set(found[1]["layers"]) == {"0.up", "0.down", "1.up", "1.down"}
    for layer in found[1]["layers"].values():
        assert set(layer) == {"snr", "input", "weight", "gradient of the output"}
    x = torch.randn(4, 32, 64, generator=torch.Generator().manual_seed(0))
    x[..., 3] *= OUTLIERS
    values = x.reshape(-1, 64)
    form = "rowwise" if recipe == "rowwise_with_gw_hp" else recipe
    held = number_formats.rounded(values, form)
    own = found[1]["layers"]["0.up"]["input"]
    assert own["amax"] == pytest.approx(float(values.abs().max()), rel=1e-2), "of the first micro-batch, all of it"
    assert own["underflow"] == pytest.approx(float(held.underflow) / values.numel(), rel=0.1)
    printed = capsys.readouterr().err
    assert "FP8 at step 10, 4 layers" in printed and "its own code failed" not in printed
    events = [line for line in lines if line["event"] == "fp8_noise"]
    below = {layer for step in found for layer, own in found[step]["layers"].items() if own["snr"] < 20}
    assert {layer for line in events for layer in line["value"]["snr"]} == below, "each layer once"
    assert all("mpguard_fp8_modules" in line["suggestion"] for line in events)


def zeroed(matrix: torch.Tensor, recipe: str, dtype: torch.dtype = torch.float8_e4m3fn) -> float:
    """Return the share of values that torch's cast makes zero, with the scales of torchao's documentation."""
    matrix, most = matrix.detach().double(), torch.finfo(dtype).max  # the layers scale in FP32: a value or two differ
    if recipe == "mxfp8":  # a power of two per 32 values, rounded up, so that the largest one fits
        blocks = matrix.reshape(-1, 32)
        scale = 2.0 ** -(blocks.abs().amax(1, keepdim=True) / most).log2().ceil()
    elif recipe == "rowwise":  # a power of two per row, rounded down
        blocks = matrix
        scale = 2.0 ** (most / blocks.abs().amax(1, keepdim=True)).log2().floor()
    else:
        blocks, scale = matrix, most / matrix.abs().max()
    held = (blocks * scale).float().to(dtype).float()
    return ((held == 0) & (blocks != 0)).sum().item() / matrix.numel()


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "mxfp8"])
def test_the_numbers_are_those_of_the_tensors_rounded_independently(recipe: str, tmp_path: Path) -> None:
    """Of tensors that are small enough to be seen whole: the shares, and the noise of what the layer returns."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64))
    form = "hybrid" if recipe == "tensorwise" else "e4m3"
    mpguard.convert(model, mpguard.Policy(
        bf16=True, fp8=form, fp8_recipe=recipe, backend="torchao", fp8_emulate=True, compile=False, fp8_exclude=(),
    ))  # fmt: skip
    generator, file = torch.Generator().manual_seed(0), tmp_path / "run.jsonl"
    x = torch.randn(64, 64, generator=generator) * 10 ** torch.empty(64, 64).uniform_(-6, 0, generator=generator)
    wanted = torch.randn(64, 64, generator=generator) * 10 ** torch.empty(64, 64).uniform_(-7, 1, generator=generator)
    weight = model[0].weight.detach().clone()
    if recipe == "mxfp8":  # the layers of the other recipes round the FP32 weight
        weight = weight.bfloat16().float()
    gradients = list[torch.Tensor]()
    mpguard.watch(level="full", jsonl=str(file))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with torch.autocast("cpu", torch.bfloat16):
        output = model(x)
    output.register_hook(gradients.append)
    (output.float() * wanted).sum().backward()
    optimizer.step()
    mpguard.watch(level="off")
    (found,) = statistics_of([json.loads(line) for line in file.read_text().splitlines()]).values()
    own = found["layers"]["0"]
    held, gradient = x.bfloat16().float(), gradients[0].float()
    of_gradient = torch.float8_e5m2 if recipe == "tensorwise" else torch.float8_e4m3fn
    for tensor, matrix, dtype in (
        ("input", held, torch.float8_e4m3fn),
        ("weight", weight, torch.float8_e4m3fn),
        ("gradient of the output", gradient.t(), of_gradient),  # of the weight's gradient, a sum over rows
    ):
        assert own[tensor]["underflow"] == pytest.approx(zeroed(matrix, recipe, dtype), abs=2 / 4096), tensor
        assert (
            own[tensor]["amax"] == pytest.approx(matrix.abs().max().item(), rel=1e-2) and not own[tensor]["saturated"]
        )
    assert max(own["input"]["underflow"], own["gradient of the output"]["underflow"]) > 0.01
    exact = (held @ weight.t())[::4, ::4]  # the outputs that are sampled
    error = output[::4, ::4].float() - model[0].bias[::4] - exact
    noise = error.square().sum() / exact.square().sum()
    assert own["snr"] == pytest.approx(-10 * math.log10(noise.item()), abs=0.3), "emulation multiplies in BF16"


def test_compiled_code_shows_the_same_numbers_and_shares_its_blocks(tmp_path: Path) -> None:
    _, eager = trained(converted("tensorwise", 3), tmp_path / "eager.jsonl")
    model = converted("tensorwise", 3)
    torch._dynamo.reset()
    counted = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    for block in model:
        block.compile(backend=counted, fullgraph=True)
    _, compiled = trained(model, tmp_path / "compiled.jsonl")
    assert counted.frame_count == 2, "equal blocks are one graph; the input of the first one needs no gradient"
    assert statistics_of(compiled) == statistics_of(eager)


def test_a_layer_that_the_script_has_converted(tmp_path: Path) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64, bias=False))
    convert_to_float8_training(model, config=Float8LinearConfig(emulate=True))
    mpguard.watch(model, level="full", jsonl=str(tmp_path / "run.jsonl"))
    model(torch.randn(32, 64)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    mpguard.watch(level="off")
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert set(statistics_of(lines)[1]["layers"]) == {"0", "1"}


@pytest.mark.parametrize("form", list(number_formats.FORMATS))
def test_a_sample_of_a_tensor_that_is_small_enough_is_all_of_it(form: str) -> None:
    matrix = torch.randn(32, 128, generator=torch.Generator().manual_seed(1))
    matrix[:, 5] *= 1e6
    samples = [fp8_shares.sample(each, form, "input") for each in (matrix, matrix / 3)]
    for each, row in zip((matrix, matrix / 3), fp8_shares.rounded_together(samples).tolist(), strict=True):
        held = number_formats.rounded(each, form)
        assert row == pytest.approx(
            [float(each.abs().max()), float(held.underflow) / 4096, float(held.saturated) / 4096]
        )


def test_a_large_tensor_is_sampled_evenly_and_with_the_scales_of_all_of_it() -> None:
    matrix = torch.ones(1000, 640)
    matrix[:, 600:] = 2.0
    matrix[7] *= 1e5
    found = fp8_shares.sample(matrix, "tensorwise", "input")
    assert found.values.numel() == fp8_shares.VALUES and float(found.largest) == 2e5
    assert float((found.values == 2).float().mean()) == pytest.approx(40 / 640, rel=0.3)
    weight = fp8_shares.sample(matrix, "blockwise", "weight")
    assert set(weight.of_groups.flatten().tolist()) <= {1.0, 2.0, 1e5, 2e5}
    assert float(fp8_shares.rounded_together([found])[0, 1]) == 0.0
    matrix[7] *= 1e3  # the other rows are then below half of the smallest number: 2e8 / 448 / 2**10
    (row,) = fp8_shares.rounded_together([fp8_shares.sample(matrix, "tensorwise", "input")]).tolist()
    assert row[1] > 0.9


class StandIn(nn.Linear):
    """What Transformer Engine's layer with delayed scaling has, which cannot run here."""

    __module__ = "transformer_engine.pytorch.module.linear"

    def __init__(self) -> None:
        super().__init__(128, 128, bias=False)
        recipe = SimpleNamespace(delayed=lambda: True, fp8_format=SimpleNamespace(name="HYBRID"))
        self.fp8, self.fp8_meta = True, {
            "recipe": recipe,
            "scaling_fwd": SimpleNamespace(scale=torch.tensor([448.0, 448.0, 1.0])),
            "scaling_bwd": SimpleNamespace(scale=torch.tensor([57344.0, 1.0])),
        }  # fmt: skip


def test_delayed_scaling_saturates_with_the_scale_of_its_history() -> None:
    layer, found = StandIn(), fp8_shares.listening()
    x = torch.full((32, 128), 0.5)
    x[:, :16] = 2.0  # the scale allows 1.0
    x[:, 16:32] = 1e-7
    found.forward(layer, x, layer.weight.detach())
    gradient = torch.full((32, 128), 4.0)
    found.gradient(layer, gradient)
    rows = {name: row for names, table in found.take() for name, row in zip(names, table.tolist(), strict=True)}
    assert rows["StandIn: input"] == pytest.approx([2.0, 0.125, 0.125])
    assert rows["StandIn: weight"][2] == 0.0
    assert rows["StandIn: gradient of the output"] == pytest.approx([4.0, 0.0, 1.0])
    assert found.take() == [] and fp8_shares.casts_of(nn.Linear(2, 2)) is None


@pytest.mark.parametrize("form", ["tensorwise", "rowwise", "mxfp8", "nvfp4"])
def test_the_noise_of_the_output_is_that_of_sensitivity(form: str) -> None:
    """With outliers in the input too, of which only the products know what they cost."""
    generator = torch.Generator().manual_seed(0)
    inputs, weight = torch.randn(256, 256, generator=generator), torch.randn(128, 256, generator=generator)
    for factor in (1.0, 1e3, 1e5):
        factors = torch.ones(256)
        factors[:4] = factor
        left, right = inputs * factors, weight / factors
        samples = fp8_shares.sample(left, form, "input"), fp8_shares.sample(right, form, "weight")
        noise, bound = fp8_shares.output_noise(left, samples[0], right, samples[1]).tolist()
        whole = layer_error.output_errors(layer_error.keep(left), right, [form])[form].snr
        assert whole is not None and -10 * math.log10(noise) == pytest.approx(whole, abs=2.0)
        assert -10 * math.log10(bound) == pytest.approx(15.5 if form == "nvfp4" else 20.0)


def test_ranks_are_reduced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 writes the largest values and the mean shares, when all have published; what is left, at the end."""
    store, events, number = torch.distributed.HashStore(), list[WatchEvent](), [0]
    monkeypatch.setattr(consensus, "default_store", lambda: store)
    for module in (drift, fp8_report):
        monkeypatch.setattr(module, "rank", lambda: number[0])
        monkeypatch.setattr(module, "world_size", lambda: (2, ""))
    first, second = Fp8Report(events.append), Fp8Report(events.append)
    first.add(1, {"a: input": [4.0, 0.1, 0.0], "a: weight": [math.inf, 0.0, 0.0], "a": [0.01, 0.01]}, None)
    first.add(10, {"a: input": [5.0, 0.1, 0.0]}, None)
    assert events == []
    number[0] = 1
    second.add(1, {"a: input": [3.0, 0.3, 0.2], "a": [0.03, 0.01]}, None)
    number[0] = 0
    first.add(20, {}, None)
    statistics, noise = events
    assert statistics.step == 1 and statistics.value["ranks"] == 2
    tensor = {"amax": 4.0, "underflow": 0.2, "saturated": 0.1}
    assert statistics.value["layers"] == {"a": {"snr": 16.99, "input": tensor}}
    assert noise.event == "fp8_noise" and noise.module == "a"
    assert noise.text == "the output of `a` keeps 17.0 dB in FP8, less than 20: 20% of its input become zero"
    line = "FP8 at step 10, 1 layer: at most 10.00% become zero (the input of `a`); no values saturate"
    assert first.finish(None) == line
    assert [each.step for each in events] == [1, 1, 10] and events[-1].value["ranks"] == 1


def test_compare_draws_what_the_watch_has_written(tmp_path: Path) -> None:
    from mpguard.compare import compare
    from mpguard.compare.page import page_data
    from mpguard.compare.readers import read_run

    logs = {}
    for name, saturated in (("bf16", None), ("fp8", 0.0)):
        lines: list[dict[str, Any]] = [{"event": "run", "version": 1}]
        for step in range(1, 60):
            lines.append({"event": "step", "step": step, "loss": 1 / step})
            if saturated is not None and step % 10 == 0:
                value = {"snr": 28.0 - step / 10, "underflow": step / 100, "saturated": saturated, "layers": {}}
                lines.append({"event": "fp8_statistics", "step": step, "value": value})
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        logs[name] = [read_run(tmp_path / f"{name}.jsonl")]
    assert logs["fp8"][0].events == () and logs["bf16"][0].fp8 == {}
    plots = page_data(compare(logs, "bf16"))["plots"]
    (series,) = plots["fp8_snr"]
    assert series["label"] == "fp8" and series["steps"] == [10, 20, 30, 40, 50]
    assert len(plots["fp8_underflow"]) == 1 and "fp8_saturated" not in plots


def test_layers_of_two_models_with_one_name() -> None:
    models, found = (converted("tensorwise", 1), converted("tensorwise", 1)), fp8_shares.listening()
    for model in models:
        with torch.autocast("cpu", torch.bfloat16):
            model(torch.randn(32, 64)).float().sum().backward()
    noise = found.take_noise()
    assert noise is not None and set(noise[0]) == {"0.up", "0.down", "0.up (2)", "0.down (2)"}
