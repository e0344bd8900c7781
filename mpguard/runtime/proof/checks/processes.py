"""Checks of the processes: the engine that wraps the model, and their number."""

from __future__ import annotations

import os
import sys

from mpguard.policy.allow import IDLE_RANKS, LOCAL_SGD
from mpguard.runtime.plan import Plan
from mpguard.runtime.proof.checks.common import is_stage, part_of_model, reduced_by_script
from mpguard.runtime.proof.observe import Observed
from mpguard.runtime.proof.verdict import Row, Verdict

ACCELERATE_ENGINES = (
    "accelerate applies FSDP and DeepSpeed only on a GPU, and silently continues elsewhere. Run where there is a "
    "GPU, or wrap the model in the script"
)
ACCELERATE_ON_CPU = (
    "without a GPU accelerate distributes the model only with ACCELERATE_USE_CPU=true (`mpguard launch` sets it)"
)

#: What is found as engine where several processes have no wrapper.
NO_WRAPPER = "no wrapper around the model"

#: What is found as engine where the script reduces.
BY_SCRIPT = "gradients reduced by the script itself"


def engine(seen: Observed, plan: Plan) -> Row:
    """Compare the engine that wraps the model with that of the config. `allow: local_sgd` accepts none."""
    name, asked = "engine", plan.strategy
    names = {"none": part_of_model(seen) or NO_WRAPPER, "single": "single process"}
    found = names.get(seen.engine, seen.engine)
    if asked is None:
        return Row(name, found, "", Verdict.NOT_ASKED)
    one = asked == "single" or (asked == "ddp" and seen.idle)
    if one and seen.engine in ("single", "ddp") and seen.world_size == 1:
        return Row(name, found, asked, Verdict.AS_ASKED)
    if asked == "ddp" and seen.engine == "tp":
        return Row(name, "tensor parallel", asked, Verdict.AS_ASKED)
    if asked == "ddp" and is_stage(seen) and not reduced_by_script(seen):
        return Row(name, found, asked, Verdict.AS_ASKED)
    if asked == "ddp" and reduced_by_script(seen):
        return Row(name, BY_SCRIPT, asked, Verdict.AS_ASKED)
    if seen.engine == asked:
        return Row(name, found, asked, Verdict.AS_ASKED)
    if found == NO_WRAPPER and plan.allowed(LOCAL_SGD):
        return Row(name, found, asked, Verdict.ALLOWED, LOCAL_SGD)
    # Without a wrapper the script may reduce in a way that was not seen: ranks compare their gradients.
    verdict = Verdict.UNPROVEN if found == NO_WRAPPER and asked == "ddp" else Verdict.WRONG
    return Row(name, found, asked, verdict, advice=_engine_advice(seen, asked))


def _engine_advice(seen: Observed, asked: str) -> str:
    accelerate = "accelerate" in sys.modules
    if seen.engine in ("none", "single", "ddp") and asked.startswith(("fsdp", "deepspeed")):
        return ACCELERATE_ENGINES if accelerate else "Wrap the model in the engine, or change the engine in the config"
    if seen.engine == "none":
        each = f"Each of {seen.launched} processes may train a model of its own"
        return f"{each}; {ACCELERATE_ON_CPU}" if accelerate else f"{each}: wrap it in DistributedDataParallel"
    return ""


def processes(seen: Observed, plan: Plan) -> Row:
    """Compare the number of processes with the config's, or with the launcher's. `allow: idle_ranks` names some."""
    name = "processes"
    if seen.idle:
        total = seen.world_size + seen.idle
        found = f"{total}, of which {seen.idle} {'does' if seen.idle == 1 else 'do'} not train"
        names = "; ".join(str(each) for each in plan.allow if each.kind == IDLE_RANKS)
        if plan.processes not in (None, total):
            return Row(name, found, str(plan.processes), Verdict.WRONG, advice=_processes_advice(seen))
        return Row(name, found, str(plan.processes or total), Verdict.ALLOWED, names)
    if plan.processes is None:
        same = seen.launched in (1, seen.world_size)
        verdict = Verdict.NOT_ASKED if same else Verdict.WRONG
    else:
        verdict = Verdict.of(seen.world_size == plan.processes)
    asked = seen.launched if plan.processes is None else plan.processes
    return Row(name, str(seen.world_size), str(asked), verdict, advice=_processes_advice(seen))


def _without_group() -> str:
    """Return how to get a process group in common, without what the launch has set already."""
    use_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes", "on", "y", "t")
    if "accelerate" not in sys.modules:
        return (
            "The script builds no process group: use accelerate.Accelerator, or call "
            "torch.distributed.init_process_group and wrap the model in DistributedDataParallel"
        )
    if use_cpu:
        return "The script trains without its Accelerator: pass model and optimizer through `accelerator.prepare`"
    return "Without a GPU set ACCELERATE_USE_CPU=true, or `distributed_type: MULTI_CPU` for `mpguard launch`"


def _processes_advice(seen: Observed) -> str:
    if seen.world_size == 1 and seen.launched > 1:
        return (
            f"{seen.launched} processes were started without a process group in common, and each trains a model of "
            f"its own. {_without_group()}"
        )
    return "Start as many as the config defines (`mpguard launch` does), or change `num_processes`"
