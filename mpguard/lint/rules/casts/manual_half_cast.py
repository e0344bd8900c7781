from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import (
    Bad,
    Call,
    Diagnostic,
    Dtype,
    Event,
    Facts,
    Note,
    Rule,
    accelerate_precision,
    any_of,
    compatible,
    dotted,
    dtype_triggers,
    events,
    input_casts,
    lazy_pattern,
    python_edits,
    text_of,
)

#: Classes of norms, and not a transform's `Normalize`.
_NORM = lazy_pattern(r"Norm(?!al)")
#: Events that show a policy which chooses the dtype, so that the cast need only be removed.
_POLICIES: tuple[events.EventKind, ...] = ("autocast", "accelerator", "initialize", "trainer")


class ManualHalfCast(Rule):
    """A model, tensor or batch is cast to FP16 by hand in code that trains.

    ## What it does
    Follows each cast to FP16 (`x.half()`, `x.to(torch.float16)`, `x.to("cuda", torch.half)`,
    `x.type("torch.cuda.HalfTensor")`, a dtype under any name) through the file, and reports it if the result is trained
    with: it reaches `backward`, an optimizer, `Accelerator.prepare`, `deepspeed.initialize`, a Trainer, FSDP or DDP.

    ## Why is this bad
    Under autocast, Accelerate or DeepSpeed the policy chooses the dtype of each operation. A cast by hand overrides it:
    a tensor that the policy keeps in FP32 is FP16, and a change of the policy to BF16 has no effect. An FP16
    *parameter* has no FP32 master copy: updates below 2^-11 of a weight are lost, and `GradScaler` raises "Attempting
    to unscale FP16 gradients".

    ## Fix safety
    The fix removes the cast and keeps a device move. It is unsafe: the value then has the policy's dtype, and code that
    needs FP16 (a kernel that takes nothing else) stops working. There is no fix if a branch holds only the cast, since
    the flag should be removed with it; then the other casts of the file have none either, because a model and its
    inputs must change their dtype together.

    ## Known limits
    Casts for inference are not reported: under `no_grad`, in functions called `evaluate`, `predict`, `generate`,
    `export` and the like, for frozen models and their inputs, for models that no optimizer takes and their inputs, for
    inputs of models that compute in FP16 anyway (under an FP16 autocast if the cast is not hard-coded, under one whose
    dtype a config gives and that the same condition enters, or with adapters on frozen weights), for inputs that take
    their dtype from the variable that gives it to weights, which are reported, for values other than weights that an
    option which names a precision makes FP16 (that is the program's own policy), for sines and cosines, for copies
    written to a checkpoint, for `.half().float()` rounding, for masks, for the targets of a loss, which have no
    gradient, and for the inputs of a DeepSpeed engine, also that of Lightning's `strategy`, whose
    parameters may be FP16; nor is a model that `deepspeed.initialize` takes, since its FP16 engine keeps FP32 masters
    of it, nor anything in a script that is launched with DeepSpeed in FP16. A dtype that follows
    `accelerator.mixed_precision` follows the policy, except for weights that an optimizer takes. An optimizer alone, or
    a `backward`, does not count as training if the file takes no step. Where something may keep FP32 masters
    (`FP16_Optimizer`, `optimizer.backward(loss)`, a framework's own FP16 module, an optimizer of the tree whose code
    has FP32 copies), no cast of the file is reported: such code has FP16 parameters by design. So has a function that
    casts the norms of its model back to FP32. Nothing is trained in a file that only measures the speed of steps on one
    synthetic batch, or that stops in a debugger at each step. A library's module that is trained elsewhere is not
    checked.
    """

    code, name = "MPG101", "manual-half-cast"
    severity = "error"
    message = "`{expr}` casts to FP16 by hand in code that trains"
    help = "remove the cast; autocast, or the launcher's policy, chooses the dtype"
    triggers = (
        any_of(*dtype_triggers.NAMES_HALF, b"(half", b".float16", b" float16", b"(float16", b'"float16', b"'float16",
               b"HalfTensor", b"DTYPE", b"_to_fp16()"),
    )  # fmt: skip
    triggers_nearby = (
        any_of(
            b"backward(",
            b".prepare(",
            b".prepare_model(",
            b"initialize(",
            b"Trainer",
            b"training_step",
            b"ptimizer",
            b"optim.",
            b"import optim",
            b"DistributedDataParallel",
            b"FullyShardedDataParallel",
            b"fully_shard",
        ),
    )
    pattern = lazy_pattern(rb"half\b(?<!\whalf)|float16|HalfTensor|DTYPE\b|_to_fp16\(")  # not `rotate_half`
    yields_to = ("MPG107", "MPG109", "MPG110", "MPG511", "MPG603")
    examples = (
        Bad(
            """\
import torch

model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for x, y in loader:
    x = x.half()  # !
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = (model(x) - y).pow(2).mean()
    loss.backward()
    optimizer.step()
""",
            fixed="""\
import torch

model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for x, y in loader:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = (model(x) - y).pow(2).mean()
    loss.backward()
    optimizer.step()
""",
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        casts = [
            (cast, low)
            for cast in (*facts.events("cast"), *facts.events("construct"))
            if (low := cast.may_be(Dtype.FP16))
        ]
        if not casts or facts.declared == "inference" or facts.may_keep_masters:
            return
        if _runs_in_half_engine(facts):
            return
        found = []
        chosen = set()
        norms = list(_norms_in_float32(facts))
        optimized = {
            each.event
            for each in facts.training_use.weights(Dtype.FP16)
            if facts.optimizers.plain(each.training) and not facts.master_weights.kept_for(each)
        }
        for cast, low in casts:
            may_follow = cast not in optimized
            guards = [guard for guard in low if not (may_follow and accelerate_precision.follows_policy(guard))]
            if any(
                cast.scope in call.scope.within() and compatible(facts.guard_of(call), cast.guard) for call in norms
            ):
                continue
            if not facts.casts.is_module(cast) and _is_started_with_half_weights(cast, facts):
                continue
            training = facts.training_use.cast(cast, Dtype.FP16, guards)
            if (
                training is not None
                and not training.reach.meets("initialize")
                and not any(facts.of(sink.call).may_keep_masters for sink in training.sinks)
                and not input_casts.loses_nothing(cast, Dtype.FP16, guards, training)
            ):
                fix = None if cast.kind == "construct" else python_edits.without_cast(facts, cast)
                found.append((cast, training, fix))
                if input_casts.is_chosen_input(cast, guards):
                    chosen.add(cast)
        modules = [cast for cast, _, _ in found if facts.casts.is_module(cast)]
        follow = chosen | {cast for cast, _, _ in found if _follows(cast, modules, facts)}
        # A model and its inputs change together.
        all_fixable = not follow and all(fix is not None for _, _, fix in found)
        policy = any(map(facts.events, _POLICIES)) or bool(facts.project.configs_for(facts.path))
        for cast, training, fix in found:
            if cast in follow or (cast in modules and facts.master_weights.runs_in_deepspeed):
                continue
            yield self.at(
                cast,
                message="`{expr}` makes FP16 weights in code that trains" if cast.kind == "construct" else None,
                expr=facts.short(cast.call.node),
                notes=(Note("trained with here", training.sink.call.span, facts.elsewhere(training.sink.call)),),
                fix=fix if all_fixable else None,
                help=None if policy else "remove the cast, and compute in FP16 under autocast with a GradScaler",
            )


def _runs_in_half_engine(facts: Facts) -> bool:
    """True if all configs that the file is launched with choose DeepSpeed and FP16: its parameters are FP16 anyway."""
    configs = facts.project.configs_for(facts.path)
    return bool(configs) and all(
        each.distributed_type == "DEEPSPEED" and each.mixed_precision == "fp16" for each in configs
    )


def _follows(cast: Event, weights: list[Event], facts: Facts) -> bool:
    """True if the cast of an input takes its dtype from the variable that gives weights theirs: it follows them."""
    name = _name_of_dtype(cast)
    return (
        bool(name)
        and cast not in weights
        and any(
            name == _name_of_dtype(each)
            and facts.bindings(name, cast.call, cast.call.guard) == facts.bindings(name, each.call, each.call.guard)
            for each in weights
        )
    )


def _name_of_dtype(cast: Event) -> str:
    """Return the name of the variable that gives the dtype of a cast; "" for anything else, as `torch.float16`."""
    given = cast.call.keywords.get("dtype")
    names = map(dotted, (given,) if given is not None else cast.call.positional)
    return next((name for name in names if "dtype" in name and "." not in name), "")


def _is_started_with_half_weights(cast: Event, facts: Facts) -> bool:
    """True if each program of another file that calls the function of a cast has a model with FP32 norms only."""
    above = [cast.scope]  # the function, and those that call it
    for scope in above:
        above += dict.fromkeys(call.scope for call in facts.callers(scope) if call.scope not in above)
    programs = [facts.of(each) for each in above if not facts.callers(each)]
    return facts not in programs and all(
        any(call.scope in above for call in _norms_in_float32(each)) for each in programs
    )


def _norms_in_float32(facts: Facts) -> Iterator[Call]:
    """Yield the calls that cast the norms of a model to FP32: the function is written for FP16 weights around them."""
    scopes = {
        check.scope
        for check in facts.calls.get("isinstance", ())
        if len(check.positional) == 2 and _NORM.search(text_of(check.positional[1]))
    }
    for name in ("float", "to") if scopes else ():
        for call in facts.calls.get(name, ()):
            if call.scope in scopes and any("isinstance" in flag for flag in facts.guard_of(call).flags()):
                given = call.argument(0, "dtype")
                dtypes = facts.dtypes(given, call) if name == "to" and given is not None else ()
                if name == "float" or any(dtype is Dtype.FP32 for _, dtype in dtypes):
                    yield call
