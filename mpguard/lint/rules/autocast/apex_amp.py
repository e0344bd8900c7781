from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import Bad, Binding, Diagnostic, Facts, Good, Rule, any_of, imports, lazy_pattern

_AMP = lazy_pattern(r"apex\.(?:amp|fp16_utils)(?:\.|$)|apex\.(?:contrib\.)?optimizers\.(?:\w+\.)?FP16_Optimizer$")


class ApexAmp(Rule):
    """Mixed precision by NVIDIA's apex: `apex.amp`, `apex.fp16_utils`, apex's `FP16_Optimizer`.

    ## What it does
    Reports the import of one of these modules or classes, once, if the file uses it. Where the code writes `apex.amp`
    in full, reports the first use.

    ## Why is this bad
    They are unmaintained. NVIDIA removed `apex.amp` from apex in 2025 (NVIDIA/apex#1896), so the import fails with a
    current apex (NVIDIA/apex#1912). `apex.amp` patches torch's functions in place (O1) or casts the model to FP16 (O2),
    and supports neither FSDP nor `torch.compile`. `torch.amp` needs no extension to be built.

    ## Known limits
    apex's fused optimizers, norms and losses are not reported, nor is anything in a project that requires a torch older
    than 1.6, which has no `torch.amp`. A fallback for a torch without `torch.amp` is not
    reported: an import in an `except` arm, or under a condition on torch's version. An import that the file does not
    use is not reported, because other files may use it to test whether apex is installed.
    """

    code, name = "MPG305", "apex-amp"
    severity = "warning"
    in_tests = True
    versions = {"torch": ">=1.6"}
    message = "`{what}` is unmaintained"
    help = "use torch.autocast and torch.amp.GradScaler, or BF16 and no scaler"
    triggers = (any_of(b"apex"), any_of(b"amp", b"fp16_utils", b"FP16_Optimizer"))
    examples = (
        Bad(
            """\
from apex import amp  # !

model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
for x in loader:
    loss = model(x).sum()
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
"""
        ),
        Good(
            """\
import apex
from apex.normalization import FusedLayerNorm

try:
    from torch.cuda import amp
except ImportError:
    from apex import amp

optimizer = apex.optimizers.FusedAdam(model.parameters())
"""
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        if imports.own(facts, "apex"):
            return
        found = []
        for binding in imports.imports(facts):
            path = f"{binding.target}.{binding.name}".rstrip(".")
            if imports.stands_in(binding):
                continue
            if _AMP.match(path):
                found.append(binding)
            elif path == "apex":
                yield from self._written_out(binding, facts)
        for statement, bindings in imports.by_statement(found).items():
            first = bindings[0]
            if any(imports.uses(facts, binding) for binding in bindings):
                yield self.at(facts.span(statement, first), what=f"{first.target}.{first.name}".rstrip("."))

    def _written_out(self, binding: Binding, facts: Facts) -> Iterator[Diagnostic]:
        """Yield the first use of `apex.amp` after a plain `import apex`."""
        for use in imports.uses(facts, binding):
            if _AMP.match(use.path.replace(binding.key, "apex", 1)) and not imports.stands_in(use):
                yield self.at(use, what=use.path)
                return
