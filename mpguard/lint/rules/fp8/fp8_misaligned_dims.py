from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from mpguard.lint import (
    Bad,
    Diagnostic,
    Event,
    Facts,
    Good,
    Note,
    Object,
    Rule,
    any_of,
    constant,
    fp8_facts,
    hardware,
    library_names,
)

_MAKERS = frozenset({"randn", "rand", "zeros", "ones", "empty"})
#: The multiple for rows in Transformer Engine's forward pass. The backward pass needs that of the sizes.
_ROWS_FORWARD = 8


class Fp8MisalignedDims(Rule):
    """A literal size that FP8 matmuls refuse.

    ## What it does
    Reports sizes that are not a multiple of 16 (of 32 with MXFP8), if they are literals or follow from literals and
    defaults of the program: of Transformer Engine's layers that are called in an FP8 region, and of `nn.Linear`
    layers of a model that torchao converts without a filter. Also reports the literal number of rows of a tensor that
    such a layer is called with.

    ## Why is this bad
    The matmul raises: "FP8 execution requires the product of all dimensions except the last to be divisible by 8 and
    the last dimension to be divisible by 16", or in the backward pass "Leading dimension requirement ... Caller must
    pad". Tried on an H200 with Transformer Engine 2.20 (delayed, current and block scaling) and torchao 0.18
    (tensorwise, rowwise): a size of 72 or 10 fails in forward or backward, and so do 24 rows if the layer trains.
    accelerate's conversion to Transformer Engine skips such a layer, and all its later siblings, without a warning.

    ## Known limits
    Sizes from a config are not checked, nor layers that a container of modules runs in a loop. A filter and
    `pad_inner_dim=True` of torchao are assumed to leave out, or pad, sizes that do not fit. Tests are not checked: they
    convert a small layer without calling it, or expect the error. NVFP4 needs 16 here; 128 is
    the multiple to which grouped matmuls are padded.
    """

    code, name = "MPG404", "fp8-misaligned-dims"
    severity = "error"
    message = "{what} of {size}: FP8 needs multiples of {multiple}"
    help = "choose or pad to a multiple of {multiple}"
    triggers = (
        any_of(b"transformer_engine", b"convert_to_float8_training"),
        any_of(b"Linear(", b"LayerNormMLP(", b"TransformerLayer(", b"MultiheadAttention("),
    )
    triggers_nearby = (any_of(b"autocast", b"convert_to_float8_training"),)
    examples = (
        Bad(
            """\
import torch
import transformer_engine.pytorch as te

layer = te.Linear(784, 10).cuda()  # !
with te.autocast():
    out = layer(torch.randn(64, 784, device="cuda"))
"""
        ),
        Good(
            """\
import torch
import transformer_engine.pytorch as te

class Embedder(torch.nn.Module):
    def __init__(self, vocab, dim=178, widths=(2, 3, 4, 5)):
        super().__init__()
        self.table = torch.nn.Embedding(vocab, dim)
        self.size = dim * len(widths)

    def forward(self, x):
        return self.table(x).flatten(1)

class Net(torch.nn.Module):
    def __init__(self, vocab):
        super().__init__()
        self.embed = Embedder(vocab, dim=192)
        self.head = te.Linear(self.embed.size, 64)

    def forward(self, x):
        return self.head(self.embed(x))
""",
            name="net.py",
            files={
                "train.py": """\
import transformer_engine.pytorch as te
from torch.nn.parallel import DistributedDataParallel

from net import Net

model = DistributedDataParallel(Net(100))
for x in loader:
    with te.autocast():
        model(x).sum().backward()
"""
            },
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        seen: set[cst.CSTNode] = set()
        for layer in fp8_facts.layers_in_fp8(facts):
            multiple = self._multiple(layer)
            notes = (Note("called here, in FP8", layer.call.span),) if layer.call is not None else ()
            if layer.facts is facts:
                yield from self._sizes(layer, multiple, notes, seen)
            yield from self._rows(layer, multiple, seen, facts)
        for event in facts.events("convert"):
            if event.subject is None or not self._converts_all(event, facts):
                continue
            for layer in fp8_facts.layers_of(facts, event.subject, event.call, "torch.nn."):
                if layer.path == "torch.nn.Linear" and layer.facts is facts:
                    notes = (Note("converted here", event.span),)
                    yield from self._sizes(layer, hardware.NEEDS["tensorwise"].multiple, notes, seen)

    def _multiple(self, layer: fp8_facts.Layer) -> int:
        """Return the smallest multiple that a recipe of the region needs."""
        recipes = fp8_facts.recipe_of(layer.region) if layer.region is not None else {""}
        return min(hardware.NEEDS[library_names.FP8_RECIPES.get(recipe, "delayed")].multiple for recipe in recipes)

    def _sizes(
        self, layer: fp8_facts.Layer, multiple: int, notes: tuple[Note, ...], seen: set[cst.CSTNode]
    ) -> Iterator[Diagnostic]:
        wrong = [str(size) for _, size in layer.sizes() if size > 0 and size % multiple]
        if wrong and layer.made.node not in seen:
            seen.add(layer.made.node)
            what = f"`{layer.path.rsplit('.', 1)[-1]}`"
            help = self.help.format(multiple=multiple)
            yield self.at(layer.made, size=" and ".join(wrong), multiple=multiple, what=what, notes=notes, help=help)

    def _rows(
        self, layer: fp8_facts.Layer, multiple: int, seen: set[cst.CSTNode], facts: Facts
    ) -> Iterator[Diagnostic]:
        """Yield a finding if the input of a layer has a literal number of rows that does not fit."""
        call = layer.call
        if call is None or not call.positional:
            return
        atoms = [each.atom for each in facts.evaluate(call.positional[0], call)]
        made = atoms[0].call if len(atoms) == 1 and isinstance(atoms[0], Object) else None
        if made is None or made.name not in _MAKERS or made.starred or made.node in seen or len(made.positional) < 2:
            return
        sizes = [fp8_facts.number(facts, each, made) for each in made.positional]
        rows = 1
        for size in sizes[:-1]:
            if size is None:
                return
            rows *= size
        needed = multiple if facts.any_training else _ROWS_FORWARD
        if rows % needed:
            seen.add(made.node)
            help = self.help.format(multiple=needed)
            yield self.at(made, size=f"{rows} rows", multiple=needed, what="an input", help=help)

    def _converts_all(self, event: Event, facts: Facts) -> bool:
        """True if a conversion leaves no layer out and pads none."""
        call = event.call
        chosen = call.argument(None, "module_filter_fn")
        if (chosen is not None and constant(chosen) != (None,)) or call.starred or fp8_facts.emulated(facts, call):
            return False
        config = call.argument(None, "config")
        if config is None or constant(config) == (None,):
            return True
        made = fp8_facts.float8_configs(facts, config, call)
        return all(each is not None and each.whole and each.setting("pad_inner_dim") is None for each in made)
