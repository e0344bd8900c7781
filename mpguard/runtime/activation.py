"""Put a policy in force in this process: apply the patches, install the hooks, start the guard that proves it."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import math
import os
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from mpguard.core.console import enable_line_buffering, print_line
from mpguard.core.errors import NotInForce
from mpguard.nn import attention
from mpguard.nn import compile as compilation
from mpguard.policy.allow import allowances
from mpguard.policy.policy import Policy
from mpguard.policy.recipes import given
from mpguard.runtime import exit_hooks
from mpguard.runtime.guard import Guard, current, set_current
from mpguard.runtime.messages import OVERRIDE, header
from mpguard.runtime.meter import Meter
from mpguard.runtime.patches import import_hooks, windows
from mpguard.runtime.patches.table import apply_patches
from mpguard.runtime.patches.windows import InstalledLibrary
from mpguard.runtime.plan import Plan, enforcement
from mpguard.runtime.ranks import is_started_by_script, launcher_variable, rank
from mpguard.targets.capabilities import require_supported
from mpguard.targets.inject import build


def start(plan: Plan, *, launched: bool = True) -> Guard:
    """Put a plan in force for everything that is built after this call, and return its guard.

    launched: False in a script that activates its policy itself, and may start the planned processes itself.
    A second call with another policy replaces the plan of the first. Raises `PolicyError`, `NotInForce`.
    """
    guard = current()
    if guard is None:
        require_supported("accelerate", plan.policy, plan.strategy)
        guard = Guard(plan)
        set_current(guard)
        _begin(guard, launched)
    guard.withdraw_refusal()
    if guard.plan.policy != plan.policy:
        guard.plan = dataclasses.replace(plan, announced=guard.plan.announced)
        guard.rearm()
    attention.switch(guard.plan.policy.attention_fix)
    return guard


def activate(
    policy: Policy | str | None = None,
    *,
    enforce: str | None = None,
    proof_json: str | None = None,
    allow: object = None,
) -> Policy:
    """Put a policy in force for everything that is built after this call, and prove it. Returns the policy.

    policy: a `Policy`, or the name of a recipe; by default the policy that the launcher handed over,
    else `[tool.mpguard] recipe` (`ConfigError` if there is none). enforce: "error" (default),
    "warn", "off". proof_json: the file that the proof is written to. allow: deviations that are wanted, such as
    `["local_sgd", "frozen: fp16", "fp32: lm_head"]`.

    Precision settings that the frameworks get after this call (`Accelerator`, `deepspeed.initialize`, FSDP, GradScaler,
    TF32) are replaced by the policy's, and each override is logged. After the first applied optimizer step,
    `NotInForce` is raised if the run does not match the policy. Call it before models and optimizers are built.
    """
    before = current()
    if policy is None:
        plan = (
            before.plan
            if before is not None
            else Plan.resolve(None, enforce=enforce, proof_json=proof_json, allow=allow)
        )
    else:
        policy = given(policy, "activate")
        inherited = Plan.from_environment() or Plan(policy, enforce=enforcement(None, Path.cwd()))
        plan = dataclasses.replace(
            inherited,
            policy=policy,
            enforce=enforcement(enforce or inherited.enforce, Path.cwd()),
            proof_json=proof_json or inherited.proof_json,
            allow=(*inherited.allow, *allowances(allow)),
        )
    guard = start(plan, launched=False)
    if before is None:
        exit_hooks.ExitHooks(guard).install()
    return guard.plan.policy


def _begin(guard: Guard, launched: bool) -> None:
    """Print the header unless the launcher did, check what is known already, and register the patches."""
    guard.spawned = not launched and is_started_by_script()
    guard.meter = Meter.from_environment(functools.partial(exit_hooks.leave_together, guard))
    if guard.meter is not None:
        guard.budget.spent = math.inf  # no checks after the first two: they would be timed
    if launcher_variable("WORLD_SIZE", 1) > 1:
        enable_line_buffering()
    atexit.register(exit_hooks.drain_gloo_threads)
    libraries = libraries_to_compare(guard.plan)
    check_start(guard.plan, libraries, launched=launched or "WORLD_SIZE" in os.environ)
    if rank() == 0 and not guard.spawned:  # a process that the script has started does not know its rank yet
        if not guard.plan.announced:
            print_line(header(guard.plan))
            for line in windows.lines(libraries):
                print_line(f"mpguard: {line}")
        guard.reporter.reset_proof_file(guard.plan)
    os.register_at_fork(after_in_child=guard.begin_again)

    def on_torch_import(_torch: ModuleType) -> None:
        if guard.plan.policy.tf32 is not None:
            build(guard.plan.policy, "torch", warn=False).set_tf32()
        guard.listen()

    compilation.share_compile_threads()
    apply_patches()
    import_hooks.after("torch", on_torch_import)
    import_hooks.after("transformer_engine", lambda _: guard.recorder.listen_to_modules())
    if guard.plan.enforce == "error":
        exit_hooks.patch_os_exit()


def libraries_to_compare(plan: Plan) -> list[InstalledLibrary]:
    """Return the installed libraries that are compared with a plan: none if the launcher has done it.

    An engine that the plan does not name is left to the proof.
    """
    return [] if plan.announced else windows.of_run(plan.policy, plan.strategy)


def check_start(plan: Plan, libraries: Sequence[InstalledLibrary] = (), *, launched: bool = True) -> None:
    """Check what a worker can know before it trains. Raises `NotInForce`.

    libraries: those whose patches are compared with the plan. launched: False if the number of processes is not known
    yet: the proof compares it.
    """
    if plan.enforce == "error" and (reason := compilation.conflict(plan.policy)):
        raise NotInForce(reason)
    if plan.enforce == "error" and (reasons := windows.refusals(libraries, plan.policy, plan.strategy)):
        raise NotInForce("\n  ".join(reasons) + ".", override=OVERRIDE)
    started, requested = launcher_variable("WORLD_SIZE", 1), plan.processes
    if launched and requested is not None and started != requested and plan.enforce == "error":
        raise NotInForce(
            f"{plan.config or 'the plan'} asks for {requested} process{'es' if requested > 1 else ''}, "
            f"{started} {'was' if started == 1 else 'were'} started; "
            "stock accelerate starts one for MULTI_CPU. Use `mpguard launch --config`, `torchrun --nproc_per_node "
            f"{requested}`, or set `num_processes: {started}`"
        )
