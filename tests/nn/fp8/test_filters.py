"""Which Linear layers are output heads: found by weights, declarations, sizes, then names."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="the real library runs here")

from torch import nn

import mpguard
from mpguard.nn.fp8 import filters

POLICY = mpguard.recipe("hopper_bf16_with_fp8_mixed")


class Block(nn.Module):
    def __init__(self, width: int = 64, out: int = 64) -> None:
        super().__init__()
        self.up, self.output = nn.Linear(width, 128), nn.Linear(128, out)


class Net(nn.Module):
    """A model of blocks, with an embedding of 256 rows and the given modules at the top level."""

    def __init__(self, *, embedding: bool = True, **modules: nn.Module) -> None:
        super().__init__()
        if embedding:
            self.tok, self.positions = nn.Embedding(256, 64), nn.Embedding(128, 64)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        for name, module in modules.items():
            self.add_module(name, module)


def heads(model: nn.Module) -> dict[str, str]:
    """Return the names of the heads, each with how it was found."""
    modules = [(name, module) for name, module in model.named_modules(remove_duplicate=False)]
    found = filters.heads(modules)
    return {name: found[id(module)] for name, module in modules if id(module) in found}


@pytest.mark.parametrize("name", ["lm_head", "out", "output", "head", "unembed", "h", "to_logits", "decoder"])
def test_a_layer_with_as_many_outputs_as_the_embedding_has_rows_is_a_head(name: str) -> None:
    assert heads(Net(**{name: nn.Linear(64, 256, bias=False)})) == {name: "as many outputs as tok has rows"}


def test_a_head_inside_of_a_module_that_is_no_block() -> None:
    model = Net(decoder=nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256)))
    assert heads(model) == {"decoder.1": "as many outputs as tok has rows"}


def test_several_heads_for_several_tokens() -> None:
    model = Net(heads=nn.ModuleList(nn.Linear(64, 256) for _ in range(3)))
    assert set(heads(model)) == {"heads.0", "heads.1", "heads.2"}


def test_a_tied_weight_tells_more_than_sizes() -> None:
    model = Net(h=nn.Linear(64, 256, bias=False), other=nn.Linear(64, 256))
    model.h.weight = model.tok.weight
    assert heads(model) == {"h": "its weight is that of tok"}


@pytest.mark.parametrize("name", filters.HEAD_NAMES)
def test_without_an_embedding_the_name_at_the_top_level_tells(name: str) -> None:
    assert heads(Net(embedding=False, **{name: nn.Linear(64, 1024)})) == {name: "by its name"}


def test_layers_of_blocks_are_no_heads_whatever_their_name_and_size() -> None:
    model = Net(embedding=False)
    model.tok = nn.Embedding(128, 64)  # the blocks have layers with 128 outputs, and some are called `output`
    assert heads(model) == {}


def test_a_projection_as_wide_as_the_positions_are_long_is_no_head() -> None:
    assert heads(Net(pooler=nn.Linear(64, 128))) == {}


def test_the_report_says_which_layer_is_the_head_and_why() -> None:
    model = Net(h=nn.Linear(64, 256))
    emulated = POLICY.replace(fp8_emulate=True, backend="torchao", compile=False)
    report = mpguard.convert(model, emulated)
    assert report.skipped == (("h", "output head: as many outputs as tok has rows"),)
    assert type(model.h) is nn.Linear
    mpguard.revert(model)
    assert "h" in mpguard.convert(model, emulated.replace(fp8_head=True)).converted
