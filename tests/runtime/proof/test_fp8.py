"""Which modules are FP8 layers."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="the real library runs here")

import torch
from torch import nn

import mpguard
from mpguard.runtime.plan import Plan
from mpguard.runtime.proof import fp8
from mpguard.runtime.proof.checks import compare, failures
from mpguard.runtime.proof.observe import Computed, Observed
from mpguard.runtime.proof.verdict import Verdict


class Linear(nn.Module):
    """As a layer of Transformer Engine under FSDP1 on several processes: a flat part of its weight."""

    __module__ = "transformer_engine.stand_in"

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.fp8_meta = nn.Parameter(torch.zeros(7)), {"recipe": None}


class Attention(Linear):
    """It multiplies, and not with a weight."""

    __module__ = "transformer_engine.stand_in"

    def __init__(self) -> None:
        super().__init__()
        del self.weight
        self.softmax_offset = nn.Parameter(torch.zeros(7))


class Norm(nn.LayerNorm):
    __module__ = "transformer_engine.stand_in"


def test_layers_are_found_when_their_weights_are_flat() -> None:
    model = nn.ModuleDict({"linear": Linear(), "attention": Attention(), "norm": Norm(16)})
    policy = mpguard.Policy(bf16=True, fp8="hybrid", fp8_recipe="delayed", backend="te")
    found = fp8.find_fp8_layers(list(model.named_modules()), policy, [])
    assert found is not None and (found.backend, found.converted) == ("te", ["linear"])


class Model(nn.Module):
    """A body and an output head."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.lm_head = nn.Linear(32, 32), nn.Linear(32, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.body(x).relu())  # type: ignore[no-any-return]


def test_the_head_and_fast_accumulation_are_in_the_layers_and_proven() -> None:
    pytest.importorskip("torchao")
    plain = mpguard.Policy(bf16=True, fp8="hybrid", backend="torchao", fp8_emulate=True)
    asked = plain.replace(fp8_head=True, fp8_fast_accum=True)
    rows = {}
    for converted in (plain, asked):
        model = Model()
        mpguard.convert(model, converted)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(torch.randn(16, 32)).sum().backward()
        for name in ("gemm_config_grad_input", "gemm_config_grad_weight"):
            assert getattr(model.body.config, name).use_fast_accum is converted.fp8_fast_accum
        seen = Observed(fp8=fp8.find_fp8_layers(list(model.named_modules()), asked, []))
        rows[converted.fp8_head] = {row.name: row for row in compare(seen, Plan(asked))}
    assert (
        rows[True]["fp8"].verdict is Verdict.AS_ASKED
        and rows[True]["fp8"].found == "2 of 2 Linear (torchao tensorwise, emulated)"
    )
    assert rows[False]["fp8"].verdict is Verdict.WRONG
    assert rows[False]["fp8"].found.endswith("fast_accumulation_in_gradients is False, not True")
    assert (rows[False]["not in fp8"].found, rows[False]["not in fp8"].verdict) == ("lm_head", Verdict.WRONG)
    assert (rows[True]["fp8 head"].found, rows[True]["fp8 head"].verdict) == ("lm_head in fp8", Verdict.AS_ASKED)


def llama(vocabulary: int, tied: bool) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_attention_heads=2, num_hidden_layers=1, vocab_size=vocabulary,
        max_position_embeddings=32, use_cache=False, tie_word_embeddings=tied,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize(
    ("vocabulary", "tied", "found", "verdict"),
    [
        (64, True, "lm_head in fp8", Verdict.AS_ASKED),
        (64, False, "lm_head in fp8", Verdict.AS_ASKED),
        (57, False, "left in bf16 (lm_head: 57 is not a multiple of 16)", Verdict.NOT_ASKED),
    ],
)
def test_heads_of_transformers_are_in_fp8_tied_ones_too(
    vocabulary: int, tied: bool, found: str, verdict: Verdict
) -> None:
    pytest.importorskip("torchao")
    policy = mpguard.Policy(bf16=True, fp8="hybrid", backend="torchao", fp8_emulate=True, fp8_head=True)
    ids = torch.randint(0, vocabulary, (2, 16), generator=torch.Generator().manual_seed(0))
    gradients = {}
    for converted in (False, True):
        model = llama(vocabulary, tied)
        if converted:
            mpguard.convert(model, policy)
        with torch.autocast("cpu", torch.bfloat16):
            model(input_ids=ids, labels=ids).loss.backward()
        gradients[converted] = model.model.embed_tokens.weight.grad
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    cosine = torch.nn.functional.cosine_similarity(gradients[False].flatten(), gradients[True].flatten(), dim=0)
    assert cosine > 0.98, "the gradients of both uses of a tied weight"
    seen = Observed(fp8=fp8.find_fp8_layers(list(model.named_modules()), policy, []))
    row = next(row for row in compare(seen, Plan(policy)) if row.name == "fp8 head")
    assert (row.found, row.verdict) == (found, verdict)


def test_experts_have_a_row_with_what_they_multiplied_in() -> None:
    pytest.importorskip("torchao")
    transformers = pytest.importorskip("transformers")
    plain = mpguard.Policy(bf16=True, fp8="hybrid", backend="torchao", fp8_emulate=True)
    asked = plain.replace(fp8_experts=True)
    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=2,
    )  # fmt: skip
    model, name = transformers.MixtralForCausalLM(config), "model.layers.0.mlp.experts"

    def rows(policy: mpguard.Policy, dtype: str = "fp8") -> dict[str, Any]:
        computed = [Computed(True, dtype, 1000, name, name), Computed(True, "fp8", 1000, "fc", "fc")]
        layers = fp8.find_fp8_layers(list(model.named_modules()), policy, [])
        return {row.name: row for row in compare(Observed(fp8=layers, computed=computed), Plan(policy))}

    mpguard.convert(model, plain)
    assert (rows(asked)["not in fp8"].verdict, "fp8 experts" in rows(plain)) == (Verdict.WRONG, False)
    assert name in rows(asked)["not in fp8"].found
    mpguard.convert(mpguard.revert(model), asked)
    found = rows(asked)
    assert (
        found["fp8"].verdict is Verdict.AS_ASKED
        and found["fp8 experts"].verdict is Verdict.AS_ASKED
        and "not in fp8" not in found
    )
    assert found["fp8 experts"].found == f"{name}, model.layers.1.mlp.experts in fp8 (e4m3, a scale per row)"
    assert rows(asked, "bf16")["fp8 experts"].found == f"{name} multiplied in bf16"
    assert rows(asked, "bf16")["fp8 experts"].verdict is Verdict.WRONG
    assert rows(asked.replace(fp8_exclude=("*layers.0.mlp.experts",)))["fp8_exclude"].verdict is Verdict.WRONG, (
        "in FP8 all the same"
    )
    alone = asked.replace(fp8_exclude=("*_proj", "*lm_head"))
    mpguard.convert(mpguard.revert(model), alone)
    found = rows(alone)
    assert (found["fp8"].verdict, found["fp8"].found) == (Verdict.AS_ASKED, "0 of 9 Linear (torchao, emulated)")
    assert found["fp8 experts"].verdict is Verdict.AS_ASKED
    mpguard.convert(mpguard.revert(model), asked)
    model.set_experts_implementation("eager")
    left = rows(asked)["fp8 experts"]
    assert left.verdict is Verdict.NOT_ASKED and left.found.startswith(
        f"left in bf16 ({name}: are computed by the implementation eager"
    )


def share(fp8_flops: int, *, required: bool = True) -> Any:
    policy = mpguard.Policy(bf16=True, fp8="hybrid", backend="torchao", fp8_emulate=True, fp8_required=required)
    computed = [
        Computed(True, "bf16", 1000 - fp8_flops, "body", "body (Conv2d of Net)"),
        Computed(True, "fp8", fp8_flops, "fc", "fc (Linear of Net)"),
    ]
    layers = fp8.Fp8Layers("torchao", ["fc"], recipe={"recipe": "tensorwise"}, emulated=True)
    seen = Observed(fp8=layers, computed=computed)
    rows = compare(seen, Plan(policy))
    row = next(row for row in rows if row.name == "fp8 products")
    return row, failures([row], Plan(policy), seen)


def test_a_model_in_which_fp8_covers_almost_nothing_is_refused() -> None:
    row, messages = share(3)
    assert row.verdict is Verdict.WRONG and row.found == "0.3 % of the matmuls; the others are in body (Conv2d of Net)"
    assert "asked: at least 5 %: FP8 saves no time here. Only Linear layers become FP8" in str(messages[0])
    row, messages = share(3, required=False)
    assert row.verdict is Verdict.NOT_ASKED and row.found.startswith("0.3 %") and not messages
    row, messages = share(60)
    assert (row.found, row.verdict, messages) == ("6 % of the matmuls", Verdict.NOT_ASKED, [])
