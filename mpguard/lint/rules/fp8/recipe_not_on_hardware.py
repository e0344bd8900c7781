from __future__ import annotations

import re
from collections.abc import Iterator

from mpguard.lint import (
    Bad,
    Call,
    Constant,
    Diagnostic,
    Facts,
    Good,
    Note,
    Rule,
    any_of,
    errors,
    fp8_facts,
    hardware,
    lazy_pattern,
    library_names,
)

#: Keywords by which a script requests a GPU of a cloud.
_GPU_KEYWORDS = frozenset({"gpu", "gpus", "gpu_type", "accelerator_type", "instance_gpu"})
_ARCHITECTURE = "TORCH_CUDA_ARCH_LIST"
_COUNT = lazy_pattern(r"(?::\d+|!|\+ptx)$", re.IGNORECASE)


class RecipeNotOnHardware(Rule):
    """A recipe that the project's GPU cannot run.

    ## What it does
    Reports recipes of Transformer Engine (and `use_mxfp8_block_scaling=True` of accelerate's `TERecipeKwargs`) that
    need another GPU, or a newer CUDA, than the project has. The hardware is that of `--gpu` or `[tool.mpguard] gpu`, of
    the script (`gpu="H100"` of a cloud function, `TORCH_CUDA_ARCH_LIST`), or of the project's requirements (`+cu124`).

    ## Why is this bad
    MXFP8 and NVFP4 are arithmetic of Blackwell: on an H200 Transformer Engine 2.20 stops with "Device compute
    capability 10.0 or higher required". Block scaling of FP8 needs compute capability 9.0 and CUDA 12.9. The
    requirements of each recipe come from the table that `mpguard recipes` uses (`mpguard/policy/hardware.py`).

    ## Known limits
    A recipe under a condition is not checked, since the condition may test the hardware. Nothing is reported if several
    GPUs are named, or none.
    """

    code, name = "MPG408", "recipe-not-on-hardware"
    severity = "error"
    message = "`{recipe}` {lacks}"
    help = "use a recipe that this hardware has, such as Float8CurrentScaling"
    triggers = (any_of(b"BlockScaling", b"CurrentScaling", b"DelayedScaling", b"use_mxfp8_block_scaling"),)
    examples = (
        Bad(
            """\
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling

with te.autocast(recipe=MXFP8BlockScaling()):  # !
    model(x)
four = NVFP4BlockScaling()  # !
block = Float8BlockScaling()
""",
            files={"mpguard.toml": 'gpu = "h100"\n'},
        ),
        Good(
            """\
import modal
from transformer_engine.common.recipe import DelayedScaling, MXFP8BlockScaling

app = modal.App()

@app.function(gpu="B200")
def train():
    recipe = MXFP8BlockScaling()

old = DelayedScaling()
print("H100", gpu)
""",
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        recipes = [(event.call, self._kind(event.call, facts)) for event in facts.events("fp8_recipe")]
        for event in facts.events("fp8_handler"):
            if fp8_facts.is_true(facts, event.call.keywords.get("use_mxfp8_block_scaling"), event.call):
                recipes.append((event.call, "mxfp8"))
        recipes = [(call, kind) for call, kind in recipes if kind and not facts.guard_of(call)]
        if not recipes:
            return
        own, place = self._hardware(facts)
        if own is None:
            return
        for call, kind in recipes:
            lacks = own.lacks(kind)
            if lacks is not None and not (place is not None and own.capability is None):
                notes = (Note("the GPU is named here", place),) if place is not None else ()
                yield self.at(call, recipe=call.path or call.name, lacks=lacks, notes=notes)

    def _kind(self, call: Call, facts: Facts) -> str:
        return library_names.FP8_RECIPES.get(facts.called_path(call).rsplit(".", 1)[-1], "")

    def _hardware(self, facts: Facts) -> tuple[hardware.Hardware | None, tuple[int, int] | None]:
        """Return the hardware of the settings, the script or the requirements, and the place in the script, if any."""
        gpu = facts.project.gpu(facts.path)
        place: tuple[int, int] | None = None
        if gpu is None:
            found = list(self._in_script(facts))
            if len({name for name, _ in found}) != 1:
                return None, None
            gpu, place = found[0]
        try:
            own = hardware.named(gpu)
        except errors.PolicyError:
            return None, None
        cuda = facts.required("transformer_engine").cuda
        return hardware.Hardware(gpu, own.capability, 1, cuda or own.cuda, own.libraries), place

    def _in_script(self, facts: Facts) -> Iterator[tuple[str, tuple[int, int]]]:
        for calls in facts.calls.values():
            for call in calls:
                for keyword in _GPU_KEYWORDS & set(call.keywords):
                    for each in facts.evaluate(call.keywords[keyword], call):
                        if isinstance(each.atom, Constant) and isinstance(each.atom.value, str):
                            yield _COUNT.sub("", each.atom.value), call.span
        for scope in facts.scopes:
            for key, bindings in scope.bindings.items():
                for binding in bindings:
                    if _ARCHITECTURE in key or (binding.kind == "item" and _ARCHITECTURE in facts.short(binding.node)):
                        for each in facts.evaluate(binding.value, binding):
                            if isinstance(each.atom, Constant) and isinstance(each.atom.value, str):
                                yield _COUNT.sub("", each.atom.value), binding.span
