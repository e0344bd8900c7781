"""Recipe x backend x strategy: works on this machine, or why not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mpguard.core.errors import PolicyError
from mpguard.doctor.accelerators import Accelerator, found_by_torch
from mpguard.doctor.machine import Machine
from mpguard.doctor.packages import Packages
from mpguard.doctor.probes import ProbeOutcome
from mpguard.doctor.report import RecipeCell
from mpguard.policy import hardware
from mpguard.policy.policy import Policy
from mpguard.policy.recipes import recipe, recipes
from mpguard.targets.capabilities import require_supported
from mpguard.targets.plugin import STRATEGIES

_DISTRIBUTION = {"te": "transformer-engine", "torchao": "torchao"}
_MODULE = {"te": "transformer_engine.pytorch", "torchao": "torchao"}


def hardware_of(machine: Machine, packages: Packages, other: Accelerator | None = None) -> hardware.Hardware:
    """Return the hardware as policies see it: the visible GPU with the lowest capability, or another accelerator."""
    libraries = {name: packages.versions[each] for name, each in _DISTRIBUTION.items() if each in packages.versions}
    libraries |= {
        name: packages.versions[name] for name in ("accelerate", "deepspeed", "torch") if name in packages.versions
    }
    gpus = sorted(machine.used, key=lambda gpu: gpu.capability or (0,))
    if not gpus:
        return hardware.Hardware(libraries=libraries, other=other.name if other is not None else "")
    return hardware.Hardware(gpus[0].name, gpus[0].capability, len(gpus), packages.cuda, libraries)


def probes_for(machine: Machine, packages: Packages) -> list[str]:
    """Return the names of the probes that say something about this machine."""
    if "torch" not in packages.versions:
        return []
    names = ["import:torch", "device", "product:fp32", "product:bf16", "product:fp16"]
    here = hardware_of(machine, packages)
    if machine.used:
        names.append("product:tf32")
    if "torchao" in packages.versions:
        names += ["import:torchao", *(f"torchao:{each}" for each in ("tensorwise", "rowwise", "rowwise_with_gw_hp")
                                      if not machine.used or here.lacks(each) is None)]  # fmt: skip
    if "transformer-engine" in packages.versions:
        names.append("import:transformer_engine.pytorch")
        kinds = ("delayed", "tensorwise", "blockwise", "mxfp8", "nvfp4")
        names += [f"te:{each}" for each in kinds if machine.used and here.lacks(each) is None]
    names += [f"import:{each}" for each in ("accelerate", "transformers", "deepspeed") if each in packages.versions]
    if "flash-attn" in packages.versions:
        names.append("import:flash_attn")
    return names


def cells(machine: Machine, packages: Packages, outcomes: Mapping[str, ProbeOutcome]) -> Iterator[RecipeCell]:
    """Yield a cell for each recipe that mpguard brings, each of its backends and each strategy."""
    other = found_by_torch(outcomes) if not machine.used else None
    here = hardware_of(machine, packages, other)
    for name in recipes():
        if name == "auto":
            continue
        policy = recipe(name)
        for backend in policy.backends or ("-",):
            chosen = policy if backend == "-" else policy.replace(backend=backend, name=policy.name)
            reason, shown = _reason(chosen, backend, here, packages, outcomes)
            for strategy in STRATEGIES:
                alone = other.refuses(strategy) if other is not None else ""
                why = reason or alone or _strategy(chosen, strategy, here, packages, outcomes)
                yield RecipeCell(name, backend, strategy, not why, why or shown, bool(not why and shown))


def _reason(
    policy: Policy, backend: str, here: hardware.Hardware, packages: Packages, outcomes: Mapping[str, ProbeOutcome]
) -> tuple[str, str]:
    """Return why a policy does not work under any strategy, or an empty string; and what has shown that it works."""
    if "torch" not in packages.versions:
        return "torch is not installed", ""
    if (torch := _failed(outcomes, "import:torch")) is not None:
        return f"torch cannot be imported: {torch}", ""
    if backend != "-" and _DISTRIBUTION[backend] not in packages.versions:
        return f"{_DISTRIBUTION[backend]} is not installed", ""
    if refused := here.refuses(policy):
        return refused, ""
    if here.gpu is not None and packages.cuda is None:
        return f"torch {packages.versions['torch']} is built without CUDA", ""
    if here.gpu is not None and (device := _failed(outcomes, "device")) is not None:
        return f"torch cannot compute on {here.gpu}: {device}", ""
    if backend != "-" and (library := _failed(outcomes, f"import:{_MODULE[backend]}")) is not None:
        return f"{_MODULE[backend]} cannot be imported: {library}", ""
    kind = f"{backend}:{policy.low_bit_recipe}" if backend != "-" else f"product:{_format(policy)}"
    if (product := _failed(outcomes, kind)) is not None:
        return f"a small matmul failed: {product}", ""
    outcome = outcomes.get(kind)
    return "", f"a small matmul ran: {outcome.detail}" if outcome is not None else ""


def _format(policy: Policy) -> str:
    return "tf32" if policy.tf32 and not policy.low_precision else policy.compute_dtype.short


def _strategy(
    policy: Policy, strategy: str, here: hardware.Hardware, packages: Packages, outcomes: Mapping[str, ProbeOutcome]
) -> str:
    """Return why a policy that works in one process does not under a strategy; empty if it does."""
    library = "deepspeed" if strategy.startswith("deepspeed") else "accelerate"
    if library not in packages.versions:
        return f"{library} is not installed"
    if (failed := _failed(outcomes, f"import:{library}")) is not None:
        return f"{library} cannot be imported: {failed}"
    if here.gpu is None and not here.other and strategy not in ("single", "ddp"):
        return "accelerate applies it on GPUs only"
    try:
        require_supported("accelerate", policy, strategy)
    except PolicyError as error:
        return str(error).splitlines()[0]
    return ""


def _failed(outcomes: Mapping[str, ProbeOutcome], name: str) -> str | None:
    outcome = outcomes.get(name)
    return None if outcome is None or outcome.ok else outcome.detail
