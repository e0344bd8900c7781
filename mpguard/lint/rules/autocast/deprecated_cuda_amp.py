from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterator

import libcst as cst

from mpguard.lint import (
    Bad,
    Binding,
    Call,
    Diagnostic,
    Edit,
    Facts,
    Fix,
    Record,
    Ref,
    Rule,
    Scope,
    Use,
    any_of,
    dotted,
    imports,
)

_MODULES = frozenset(
    f"torch.{device}.amp{inner}" for device in ("cuda", "cpu") for inner in ("", ".autocast_mode", ".grad_scaler")
)
#: The deprecated names, and the names of their positional arguments.
_NAMES = {
    "autocast": ("enabled", "dtype", "cache_enabled"),
    "GradScaler": ("init_scale", "growth_factor", "backoff_factor", "growth_interval", "enabled"),
    "custom_fwd": ("fwd",),
    "custom_bwd": ("bwd",),
}


#: The versions of torch from which on `torch.amp` has them.
_SINCE = {"autocast": (1, 10), "GradScaler": (2, 3), "custom_fwd": (2, 4), "custom_bwd": (2, 4)}


class DeprecatedCudaAmp(Rule):
    """`torch.cuda.amp` and `torch.cpu.amp` are deprecated in favour of `torch.amp`.

    ## What it does
    Reports `autocast`, `GradScaler`, `custom_fwd` and `custom_bwd` of `torch.cuda.amp` and `torch.cpu.amp` where they
    are called or used as decorators. A name that is imported from there is reported once, at the import.

    ## Why is this bad
    torch warns on every use (`FutureWarning`, since 2.4) and will remove them. The order of the arguments differs, so a
    search and replace is wrong: `torch.cuda.amp.autocast(enabled, dtype)` against
    `torch.amp.autocast(device_type, dtype, enabled)`.

    ## Fix safety
    Safe: the same classes with the device as first argument, and positional arguments written as keywords. There is no
    fix if the arguments come from `*args`, if a name is passed on as a value, or if `GradScaler` is a base class, whose
    own call of `__init__` would need the device; nor for an autocast without a dtype in a BF16 run, where MPG310's fix
    passes the dtype first. Unsafe if another file of the tree may import the name from the fixed
    module: the calls there would need the device too; and if the requirements of the project allow a torch that lacks
    the new name: `torch.amp.GradScaler` needs torch 2.3, `torch.amp.custom_fwd` 2.4.

    ## Known limits
    A fallback for old versions of torch is not reported: in an `except` arm, next to an import from `torch.amp`, or
    under a condition on the version. Neither are projects whose requirements exclude torch 2.4 and later, and the
    source tree of torch itself.
    """

    code, name = "MPG302", "deprecated-cuda-amp"
    severity = "warning"
    in_tests = True
    message = "`{old}` is deprecated; use `{new}`"
    help = "use torch.amp, which takes the device first"
    versions = {"torch": ">=2.4"}
    triggers = (
        any_of(b"cuda.amp", b"cpu.amp", b"torch.cuda import", b"torch.cpu import"),
        any_of(b"autocast", b"GradScaler", b"custom_fwd", b"custom_bwd"),
    )
    examples = (
        Bad(
            """\
import torch

scaler = torch.cuda.amp.GradScaler(1024.0)  # !
scaler = torch.cuda.amp.GradScaler(  )  # !
with torch.cuda.amp.autocast():  # !
    pass
with torch.cuda.amp.autocast(  # !
    # here
    enabled=True,
):
    pass
with torch.cuda.amp.autocast(args.amp, torch.bfloat16):  # !
    pass
with torch.cpu.amp.autocast(dtype=torch.bfloat16):  # !
    pass


class Mul(torch.autograd.Function):
    @staticmethod
    @torch.cuda.amp.custom_fwd  # !
    def forward(ctx, x):
        return x

    @staticmethod
    @torch.cuda.amp.custom_bwd  # !
    def backward(ctx, grad):
        return grad
""",
            fixed="""\
import torch

scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
scaler = torch.amp.GradScaler("cuda")
with torch.amp.autocast("cuda"):
    pass
with torch.amp.autocast("cuda",
    # here
    enabled=True,
):
    pass
with torch.amp.autocast("cuda", enabled=args.amp, dtype=torch.bfloat16):
    pass
with torch.amp.autocast("cpu", dtype=torch.bfloat16):
    pass


class Mul(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda")
    def forward(ctx, x):
        return x

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx, grad):
        return grad
""",
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        if imports.own(facts, "torch"):
            return
        paths: dict[Binding, str] = {}
        for binding in (*imports.imports(facts), *imports.renamed(facts)):
            path = self._deprecated_path(binding, facts)
            if path and not imports.stands_in(binding) and not self._has_other_arm(binding):
                paths[binding] = path
        for statement, found in imports.by_statement(list(paths)).items():
            if any(self._uses(binding, paths[binding], facts) for binding in found):
                yield self._at_import(statement, found, paths, facts)
        yield from self._calls(facts)

    # -- imports ------------------------------------------------------------------------------------

    def _deprecated_path(self, binding: Binding, facts: Facts) -> str:
        """Return the deprecated module or name that a binding refers to; empty if it is neither."""
        if binding.kind == "assign":  # amp = torch.cuda.amp
            spelled = ".amp" in dotted(binding.value) and binding.value is not None
            atoms = [each.atom for each in facts.evaluate(binding.value, binding)] if spelled else []
            path = atoms[0].path if len(atoms) == 1 and isinstance(atoms[0], Ref) else ""
        else:
            path = f"{binding.target}.{binding.name}".rstrip(".")
        module, _, name = path.rpartition(".")
        return path if path in _MODULES or (module in _MODULES and name in _NAMES) else ""

    def _has_other_arm(self, binding: Binding) -> bool:
        """True if another arm binds the same name for another version of torch."""
        return any(
            other is not binding
            and other.kind in ("from", "import", "assign", "def", "class")
            and other.guard != binding.guard
            and (other.target.startswith("torch.amp") or other.target == "torch" or "torch.amp" in dotted(other.value))
            for other in binding.scope.bindings.get(binding.key, ())
        )

    def _uses(self, binding: Binding, path: str, facts: Facts) -> list[Use]:
        """Return the uses of a deprecated name, or of the deprecated names of a module."""
        found = imports.uses(facts, binding)
        if path not in _MODULES:
            return found
        return [use for use in found if use.path[len(binding.key) + 1 :] in _NAMES]

    def _at_import(
        self, statement: cst.CSTNode, found: list[Binding], paths: dict[Binding, str], facts: Facts
    ) -> Diagnostic:
        first, path = found[0], paths[found[0]]
        old = path if path in _MODULES or len(found) == 1 else path.rpartition(".")[0]
        fix = self._fix_import(statement, found, paths, facts)
        return self.at(facts.span(statement, first), old=old, new=_replacement(old), fix=fix)

    def _fix_import(
        self, statement: cst.CSTNode, found: list[Binding], paths: dict[Binding, str], facts: Facts
    ) -> Fix | None:
        at, names = found[0], getattr(statement, "names", found)
        uses = {binding: self._uses(binding, paths[binding], facts) for binding in found}
        if len(names) != len(found) or any(len(imports.uses(facts, each)) != len(uses[each]) for each in found):
            return None  # the import binds other names too
        node: cst.CSTNode
        if isinstance(statement, cst.ImportFrom) and statement.module is not None:
            node = statement.module
        elif isinstance(statement, cst.Assign):
            node = statement.value
        else:
            node = names[0].name
        edits = [Edit(*facts.span(node, at), re.sub(r"\.(?:cuda|cpu)\b", "", facts.short(node)))]
        for binding in found:
            if not uses[binding] or len(binding.scope.bindings[binding.key]) > 1:
                return None  # other files may import it, or another arm binds a fallback
            path = paths[binding]
            for use in uses[binding]:
                name = use.path[len(binding.key) + 1 :] or path.rpartition(".")[2]
                made = self._use(use, name, path.split(".")[1], facts)
                if made is None:
                    return None
                edits += made
        elsewhere = at.scope.kind == "module" and any(facts.exported(b.key) for b in found)
        used = {use.path[len(b.key) + 1 :] or paths[b].rpartition(".")[2] for b in found for use in uses[b]}
        fix = _fix("Import from torch.amp, and name the device", used, edits, facts)
        return dataclasses.replace(fix, applicability="unsafe") if elsewhere else fix

    def _use(self, use: Use, name: str, device: str, facts: Facts) -> list[Edit] | None:
        """Return the edits that one use of a name needs; None if it cannot be fixed."""
        parent = facts.parent(use.node)
        if name not in _NAMES:
            return None
        made = facts.call_of(parent)
        if made is not None and made.func is use.node:
            return self._arguments(made, name, device, facts)
        if isinstance(parent, cst.Decorator):
            return [self._call_with_device(use.node, use, device, facts)] if name.startswith("custom_") else None
        call = facts.parent(parent) if isinstance(parent, cst.Arg) else None
        return [] if isinstance(call, cst.Call) and dotted(call.func) in ("isinstance", "issubclass") else None

    # -- calls --------------------------------------------------------------------------------------

    def _calls(self, facts: Facts) -> Iterator[Diagnostic]:
        for name in _NAMES:
            for call in facts.calls.get(name, ()):
                path = self._deprecated_use(call.path, call.scope, call.order, facts)
                if path and not imports.stands_in(call):
                    yield from self._report(call.span, path, self._fix_call(call, path, facts))
        for scope in facts.scopes:
            for decorator in scope.decorators:
                path = self._deprecated_use(dotted(decorator), scope.parent or scope, scope.order, facts)
                if path:
                    at = next(b for b in (scope.parent or scope).bindings[scope.name] if b.defines is scope)
                    device = path.split(".")[1]
                    edits = (self._renamed(decorator, at, facts), self._call_with_device(decorator, at, device, facts))
                    fixable = path.rsplit(".", 1)[1].startswith("custom_") and None not in edits
                    made = [each for each in edits if each is not None]
                    names = {path.rpartition(".")[2]}
                    fix = _fix("Use torch.amp, and name the device", names, made, facts) if fixable else None
                    yield from self._report(facts.span(decorator, at), path, fix)

    def _deprecated_use(self, path: str, scope: Scope, order: int, facts: Facts) -> str:
        """Return the full name if the code writes `cuda.amp` at the place of use."""
        if ".amp." not in f".{path}" or not path.endswith(tuple(_NAMES)) or path.count(".") < 2:
            return ""
        for each in facts.resolve(path, scope, order):
            full = getattr(each.atom, "path", "")
            module, _, name = full.rpartition(".")
            if module in _MODULES and name in _NAMES:
                return str(full)
        return ""

    def _report(self, span: tuple[int, int], path: str, fix: Fix | None) -> Iterator[Diagnostic]:
        yield self.at(span, old=path, new=_replacement(path), fix=fix)

    def _fix_call(self, call: Call, path: str, facts: Facts) -> Fix | None:
        module, _, name = path.rpartition(".")
        edits = self._arguments(call, name, module.split(".")[1], facts)
        func = self._renamed(call.func, call, facts)
        if edits is None or func is None:
            return None
        return _fix("Use torch.amp, and name the device", {name}, [func, *edits], facts)

    def _renamed(self, node: cst.CSTNode, at: Record, facts: Facts) -> Edit | None:
        text = facts.short(node)
        new = re.sub(r"\.(?:cuda|cpu)\.amp\.", ".amp.", text)
        return Edit(*facts.span(node, at), new) if new != text else None

    def _call_with_device(self, node: cst.CSTNode, at: Record, device: str, facts: Facts) -> Edit:
        end = facts.span(node, at)[1]
        return Edit(end, end, f'(device_type="{device}")')

    def _arguments(self, call: Call, name: str, device: str, facts: Facts) -> list[Edit] | None:
        """Return the edits that pass the device first and positional arguments as keywords."""
        if any(arg.star == "*" for arg in call.node.args) or len(call.positional) > len(_NAMES[name]):
            return None
        if (name.startswith("custom_") and call.positional) or call in facts.forgotten_dtypes:
            return None
        text = facts.file_text
        place = text.index("(", facts.outer_span(call.func, call)[1]) + 1
        first = f'device_type="{device}"' if name.startswith("custom_") else f'"{device}"'
        end = place
        while text[end] in " \t":
            end += 1
        edits = [Edit(place, place if text[end] in "\r\n#\\" else end, first + self._separator(text[end]))]
        for keyword, value in zip(_NAMES[name], call.positional, strict=False):
            start = facts.outer_span(value, call)[0]
            edits.append(Edit(start, start, f"{keyword}="))
        return edits

    def _separator(self, following: str) -> str:
        """Return the separator between the first argument and the text that follows it."""
        return "" if following == ")" else "," if following in "\r\n#\\" else ", "


def _fix(title: str, names: Collection[str], edits: list[Edit], facts: Facts) -> Fix:
    """Return a fix; an unsafe one that says so where the project allows a torch without one of the names."""
    least = max(_SINCE[name] for name in names)
    allowed = facts.required("torch")
    if (allowed.low is None and allowed.below is None) or allowed.since(least):
        return Fix(title, "safe", tuple(edits))
    return Fix(f"{title}; needs torch {'.'.join(map(str, least))}", "unsafe", tuple(edits))


def _replacement(path: str) -> str:
    return path.replace(".cuda.amp", ".amp").replace(".cpu.amp", ".amp")
