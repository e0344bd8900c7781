"""Patches of torch: FSDP, gradient scalers, optimizers, backward passes, DDP, loading of checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

from mpguard.nn import attention, cuda_graphs
from mpguard.nn.fp8 import first_batch
from mpguard.runtime import casts
from mpguard.runtime import guard as guards
from mpguard.runtime.exit_hooks import drain_gloo_threads
from mpguard.runtime.launch import build_locks
from mpguard.runtime.patches import compile as compilation
from mpguard.runtime.patches import fp8_conversion, fp32_modules, master_weights
from mpguard.runtime.patches.patch import Adjustment, AnyFunction, Patch
from mpguard.runtime.proof import account, profiler
from mpguard.runtime.proof.gradients import are_applicable
from mpguard.runtime.proof.observe import name_of, updated_by
from mpguard.runtime.proof.samples import safely
from mpguard.targets.inject import Change, build

#: The position of the inputs among the arguments of a backward pass, after the outputs.
INPUTS = 3

#: The position of `create_graph` among them.
CREATE_GRAPH = 2


def _mixed_precision(target: str, parameter: str, fields: tuple[str, ...]) -> Callable[[AnyFunction], AnyFunction]:
    """Return a wrapper that puts the policy's dtypes into the mixed precision object of FSDP 1 or 2.

    target: the plugin (`fsdp1`, `fsdp2`). parameter: the argument that takes the object. fields: its dtypes.
    """

    def wrap(original: AnyFunction) -> AnyFunction:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            guard = guards.current()
            if guard is None:
                return original(*args, **kwargs)
            bound = signature.bind(*args, **kwargs)
            given_module = bound.arguments["module"]
            models = given_module if isinstance(given_module, list) else [given_module]
            fp8_conversion.keeps_fp8_weights(guard, target, models=models)
            master_weights.leave_to_engine(guard, models)
            for model in models:
                guard.recorder.record_weights(model.parameters())
            wanted = build(guard.plan.policy, target, warn=False)
            given = bound.arguments.get(parameter)
            bound.arguments[parameter] = _with_dtypes(given, wanted, fields, target, guard)
            if target == "fsdp1" and not bound.arguments.get("use_orig_params"):
                reason = _reason_for_orig_params(guard, bound.arguments["module"])
                if reason:
                    change = Change("use_orig_params", False, True, reason)
                    guard.reporter.log_override("FullyShardedDataParallel", change)
                    bound.arguments["use_orig_params"] = True
            if target == "fsdp1":
                fp32_modules.fsdp1_arguments(guard, type(bound.arguments["self"]), bound.arguments)
            elif not fp32_modules.fully_shard_separately(guard, original, bound.arguments):
                return given_module
            return original(*bound.args, **bound.kwargs)

        return wrapped

    return wrap


def _with_dtypes(given: Any, wanted: Any, fields: tuple[str, ...], target: str, guard: guards.Guard) -> Any:
    """Return a mixed precision object with the policy's dtypes, and log what is overridden."""
    if given is None:
        return wanted
    new = {field: value for field in fields if (value := getattr(wanted, field)) is not None}
    for field, value in new.items():
        old = getattr(given, field)
        if old is not None and old != value:
            change = Change(field, str(old).removeprefix("torch."), str(value).removeprefix("torch."))
            guard.reporter.log_override(target, change)
    return dataclasses.replace(given, **new)


def _reason_for_orig_params(guard: guards.Guard, model: Any) -> str:
    """Return why FSDP1 must keep the original parameters of a model instead of flat ones; empty if it need not."""
    if guard.plan.policy.low_bit_recipe:
        return "FP8 layers need their own weights"
    own = {id(parameter) for parameter in model.parameters()}
    if any(id(each) in own for optimizer in guard.optimizers for each in updated_by(optimizer)):
        return "an optimizer that was created before would step parameters that are no longer trained"
    return ""


def _backward(original: AnyFunction) -> AnyFunction:
    @functools.wraps(original)
    def run(t_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        guard = guards.current()
        accumulates = bool(kwargs.get("accumulate_grad"))
        if guard is not None and guard.meter is not None and accumulates:
            guard.meter.record_loss(t_outputs, scaled=guard.plan.policy.fp16)
        if guard is None or not guard.waiting:
            applicable = guard is not None and guard.looks_at_passes and _are_applicable(args, accumulates)
            result = original(t_outputs, *args, **kwargs)
            cuda_graphs.backward_ended()
            if guard is not None and guard.listening and accumulates:
                guard.backward_unrecorded(t_outputs)
            if guard is not None and applicable:
                guard.backward_ended([], accumulates=accumulates)
            return result
        guard.check_limits()
        applicable = _are_applicable(args, accumulates)
        watched = guard.recorder.gradients.during_backward(t_outputs, accumulates)
        with guard.recorder.record_backward(t_outputs, accumulates, list(guard.optimizers)), watched as leaves:
            result = original(t_outputs, *args, **kwargs)
        cuda_graphs.backward_ended()
        if not accumulates and len(args) > INPUTS and args[INPUTS]:
            leaves = guard.recorder.gradients.record_returned(args[INPUTS], result)
        if applicable:
            guard.backward_ended(leaves, accumulates=accumulates)
        return result

    return run


def _are_applicable(args: tuple[Any, ...], accumulates: bool) -> bool:
    """True if a backward pass makes gradients that can be applied. args: of the call, after the outputs."""
    if accumulates:
        return True
    inputs = args[INPUTS] if len(args) > INPUTS else None
    return bool(inputs and safely(are_applicable, inputs, create_graph=bool(args[CREATE_GRAPH])))


def _compiled_graph(original: AnyFunction) -> AnyFunction:
    @functools.wraps(original)
    def call_user_compiler(self: Any, gm: Any, *args: Any, **kwargs: Any) -> Any:
        guard = guards.current()
        if guard is None or not guard.listening:
            return original(self, gm, *args, **kwargs)
        # Between looks too: a graph is compiled once, and runs later. It is read before the compiler changes it.
        record = guard.recorder.graph_to_record(gm, getattr(self, "local_scope", {}).get("self"))
        compiled = original(self, gm, *args, **kwargs)
        record()
        return compiled

    return call_user_compiler


def _module_compile(original: AnyFunction) -> AnyFunction:
    @functools.wraps(original)
    def compile(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        call = attention.reading_masks(self, self._compiled_call_impl)
        call = cuda_graphs.keeping_gradients(self, call)
        self._compiled_call_impl = first_batch.telling(self, call)

    return compile


def _optimized_module(original: AnyFunction) -> AnyFunction:
    @functools.wraps(original)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        first_batch.seen(self._orig_mod, args, kwargs)
        attention.read_mask(self._orig_mod, kwargs.get("attention_mask"))
        cuda_graphs.keep_gradients(self._orig_mod)
        return original(self, *args, **kwargs)

    return __call__


def _averager_init(original: AnyFunction) -> AnyFunction:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        guard = guards.current()
        if guard is not None:
            guard.recorder.averaging = type(self).__name__

    return __init__


def _compiled_module(original: AnyFunction) -> AnyFunction:
    @functools.wraps(original)
    def __init__(*args: Any, **kwargs: Any) -> None:
        _leave_to_dynamo()
        original(*args, **kwargs)

    return __init__


def _try_acquire(original: AnyFunction) -> AnyFunction:
    @functools.wraps(original)
    def try_acquire(self: Any) -> Any:
        acquired = original(self)
        if acquired:
            build_locks.sign(self.lock_file_path)
        return acquired

    return try_acquire


def _destroy_process_group(original: AnyFunction) -> AnyFunction:
    @functools.wraps(original)
    def destroy_process_group(group: Any = None) -> None:
        if guards.current() is not None:
            drain_gloo_threads()
        original(group)

    return destroy_process_group


def _enter_compiled_code(original: AnyFunction) -> AnyFunction:
    @functools.wraps(original)
    def callback_from_stance(callback: Any) -> Any:
        if callback not in (None, False):  # else dynamo is switched off
            _leave_to_dynamo()
        return original(callback)

    return callback_from_stance


def _leave_to_dynamo() -> None:
    guard = guards.current()
    if guard is not None:
        guard.recorder.account.enter_compiled_code()


def _profiler_start(original: AnyFunction) -> AnyFunction:
    @functools.wraps(original)
    def start(self: Any, *args: Any, **kwargs: Any) -> Any:
        guard = guards.current()
        if getattr(self, "enabled", True):
            profiler.other_profiler_starts(self)
            if guard is not None:
                guard.recorder.account.give_way()
        return original(self, *args, **kwargs)

    return start


def _profiler_end(original: AnyFunction) -> AnyFunction:
    @functools.wraps(original)
    def __exit__(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, *args, **kwargs)
        finally:
            profiler.other_profiler_ends(self)

    return __exit__


def _without_data(original: AnyFunction) -> AnyFunction:
    @functools.wraps(original)
    def propagate(*args: Any, **kwargs: Any) -> Any:
        guard = guards.current()
        with guard.recorder.account.range_without_data() if guard is not None else contextlib.nullcontext():
            return original(*args, **kwargs)

    return propagate


def _swap_tensors(original: AnyFunction) -> AnyFunction:
    @functools.wraps(original)
    def swap_tensors(t1: Any, t2: Any) -> None:
        guard = guards.current()
        if guard is not None:
            guard.tensors_are_exchanged((t1, t2))
        from mpguard.nn.master_weights import exchanging

        with exchanging(t1, t2):
            original(t1, t2)

    return swap_tensors


def _optimizer_init(original: AnyFunction) -> AnyFunction:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        guard = guards.current()
        if guard is not None:
            guard.optimizer_created(self)
            fp32_modules.keep_in_optimizer(guard, self)
            fp8_conversion.convert(guard, self)
            master_weights.keep_in_optimizer(guard, self)
            compilation.compile_models(guard, self)
            guard.recorder.record_optimizer(updated_by(self))

    return __init__


def _patch_step(original: AnyFunction) -> AnyFunction:
    @functools.wraps(original)
    def _patch_step_function(self: Any) -> None:
        original(self)
        step: Any = type(self).step
        if not getattr(step, "counted_by_mpguard", False):
            type(self).step = _counted_step(step)

    return _patch_step_function


def _counted_step(hooked: AnyFunction) -> AnyFunction:
    """Return the step of a class of optimizers, around the range that torch opens in the profiler."""

    @functools.wraps(hooked)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        guard = guards.current()
        if guard is not None:
            guard.step_begins(self)
        with account.step_of(self):
            result = hooked(self, *args, **kwargs)
        guard = guards.current()
        if guard is not None:
            guard.recorder.account.resume()
            _drop_stale_copies(guard)
        return result

    step.counted_by_mpguard = True  # type: ignore[attr-defined]
    return step


def _drop_stale_copies(guard: guards.Guard) -> None:
    """Drop the copies of weights that autocast keeps until its outermost region ends, if a step ran inside of one."""
    import torch

    if torch._C._is_any_autocast_enabled() and torch.is_autocast_cache_enabled():
        torch.clear_autocast_cache()
        guard.reporter.print_once(
            "optimizer.step() runs inside of autocast, which would keep multiplying by its copies of the weights from "
            "before the step (S39): mpguard drops them after each step. Enter autocast in each step, around the "
            "forward pass and the loss only"
        )


def _ddp_init(original: AnyFunction) -> AnyFunction:
    @functools.wraps(original)
    def __init__(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        guard = guards.current()
        init = original
        if guard is not None:
            fp32_modules.keep_in_model(guard, [module])
        if guard is not None and guard.plan.policy.fp8_param:
            from mpguard.nn.fp8.weights import broadcast_masters

            fp8_conversion.convert_before_ddp(guard, module)
            init = broadcast_masters(original)
        if guard is not None:
            master_weights.keep_in_model(guard, module)
        init(self, module, *args, **kwargs)
        if guard is not None:
            master_weights.share(guard, self)

    return __init__


def _load_state_dict(original: AnyFunction) -> AnyFunction:
    @functools.wraps(original)
    def load_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        guard = guards.current()
        if guard is not None:
            guard.states_loaded(self, args[0] if args else kwargs.get("state_dict", {}))
        return result

    return load_state_dict


def _module_load_state_dict(original: AnyFunction) -> AnyFunction:
    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        guard = guards.current()
        if guard is not None and guard.plan.policy.low_bit_recipe == "delayed":
            from mpguard.nn.fp8 import amax_history

            amax_history.store_pending(self, state_dict)
        trained = guard.trained_parameters() if guard is not None else {}
        before = casts.dtypes(self) if trained else {}
        result = original(self, state_dict, *args, **kwargs)
        if guard is not None:
            master_weights.load(guard, self, state_dict)
            guard.observing_load(lambda: guard.loaded.weights(self, state_dict))
            guard.weights_loaded(self)
            for optimizer in {trained[key] for key in casts.replaced(before, self) & trained.keys()}:
                _, place = casts.caller()
                name = name_of(optimizer)
                what = f"{place}: load_state_dict(assign=True) replaces the parameters of {name} in the model"
                guard.weights_cast(optimizer, what, casts.REPLACED_ADVICE)
        return result

    return load_state_dict


def _compiled_backward(config: ModuleType) -> str | None:
    """Compile backward passes as eager ones run: outside of the autocast region of the forward pass."""
    options: Any = config
    if not hasattr(options, "backward_pass_autocast"):
        return "there is no such option in the installed version"
    if options.backward_pass_autocast == "same_as_forward":  # torch's default
        options.backward_pass_autocast = "off"
    return None


def _rnn(torch: ModuleType) -> str | None:
    """Compute RNNs under autocast in its dtype."""
    if not torch.backends.cuda.is_built():
        return None
    from mpguard.nn import rnn

    return rnn.register()


ADJUSTMENTS = (
    Adjustment(
        "torch._functorch.config",
        "torch._functorch.config.backward_pass_autocast",
        "compiled, backward of a custom Function or operator runs under the forward's autocast; not in eager (S35)",
        "torch 2.13.0",
        _compiled_backward,
    ),
    Adjustment(
        "torch",
        "aten::_cudnn_rnn under autocast",
        "it computes RNNs in FP16 whatever the dtype of autocast is (S33)",
        "torch 2.13.0",
        _rnn,
    ),
)


def _module_apply(original: AnyFunction) -> AnyFunction:
    inside = False  # it calls itself for the children of a module

    @functools.wraps(original)
    def _apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        guard = guards.current()
        if guard is None or inside:
            return original(self, *args, **kwargs)
        trained = guard.trained_parameters()
        before = casts.dtypes(self)
        inside = True
        try:
            result = original(self, *args, **kwargs)
        finally:
            inside = False
        narrowed = casts.narrowed(self, before)
        method, place = casts.caller() if narrowed else ("", "")
        for new in {new for _, new in narrowed.values()}:
            guard.recorder.casts.setdefault((f"{place}: {method}()", new), weakref.WeakSet()).add(self)
        for optimizer, (old, new) in {
            trained[key]: change for key, change in narrowed.items() if key in trained
        }.items():
            name = name_of(optimizer)
            guard.weights_cast(optimizer, f"{place}: {method}() casts the weights of {name} from {old} to {new}")
        return result

    return _apply


def _eval(original: AnyFunction) -> AnyFunction:
    @functools.wraps(original)
    def eval(self: Any) -> Any:
        guard = guards.current()
        if guard is not None and self.training:
            guard.switch_to_evaluation()
        return original(self)

    return eval


def _add_param_group(original: AnyFunction) -> AnyFunction:
    @functools.wraps(original)
    def add_param_group(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        guard = guards.current()
        if guard is not None:
            if self in guard.optimizers:
                master_weights.keep_in_optimizer(guard, self)
            guard.group_added(self)

    return add_param_group


PATCHES = (
    Patch(
        "torch.distributed.fsdp.fully_sharded_data_parallel",
        "FullyShardedDataParallel.__init__",
        ("module", "mixed_precision", "use_orig_params"),
        "without a policy FSDP reduces in the parameters' dtype (S13); an earlier optimizer trains nothing (S32)",
        "torch 2.13.0",
        _mixed_precision("fsdp1", "mixed_precision", ("param_dtype", "reduce_dtype", "buffer_dtype")),
    ),
    Patch(
        "torch.distributed.fsdp._fully_shard._fully_shard",
        "fully_shard",
        ("mp_policy",),
        "without a policy FSDP2 reduces in the parameters' dtype (S13)",
        "torch 2.13.0",
        _mixed_precision("fsdp2", "mp_policy", ("param_dtype", "reduce_dtype", "output_dtype")),
    ),
    Patch(
        "torch.autograd.graph",
        "_engine_run_backward",
        ("t_outputs",),
        "a backward pass ends a part of the account of products; its leaves are in autograd's graph, which it frees",
        "torch 2.13.0",
        _backward,
    ),
    Patch(
        "torch._dynamo.output_graph",
        "OutputGraph.call_user_compiler",
        ("gm",),
        "compiled code opens no ranges of modules: the modules of its products are in dynamo's graph",
        "torch 2.13.0",
        _compiled_graph,
    ),
    Patch(
        "torch._dynamo.eval_frame",
        "OptimizedModule.__init__",
        ("mod",),
        "dynamo warns about global hooks of modules, and guards on them: those of the account are removed before",
        "torch 2.13.0",
        _compiled_module,
    ),
    Patch(
        "torch._dynamo.eval_frame",
        "_callback_from_stance",
        ("callback",),
        "the same, where compiled code is entered in another way",
        "torch 2.13.0",
        _enter_compiled_code,
    ),
    *(
        Patch("torch.autograd.profiler", f"{kind}.{method}", ("self",), reason, "torch 2.13.0", wrap)
        for kind, begins in (("profile", "_prepare_trace"), ("emit_nvtx", "__enter__"), ("emit_itt", "__enter__"))
        for method, reason, wrap in (
            (begins, "one profiler runs at a time: that of the proof gives way to the program's", _profiler_start),
            ("__exit__", "when the program's profiler has ended, that of the proof can run", _profiler_end),
        )
    ),
    Patch(
        "torch.utils",
        "swap_tensors",
        ("t1", "t2"),
        "torch exchanges no tensors that the profiler has seen: `Module.to` of FP8 parameters, FSDP2 on a GPU",
        "torch 2.13.0",
        _swap_tensors,
    ),
    Patch(
        "torch",
        "compile",
        ("model", "backend", "mode"),
        "models are compiled in the mode of the policy, whoever compiles them",
        "torch 2.13.0",
        compilation.in_the_policys_mode,
    ),
    Patch(
        "torch.nn.modules.module",
        "Module.compile",
        ("args", "kwargs"),
        "a padding mask can be read before compiled code is called, not in it (S38)",
        "torch 2.13.0",
        _module_compile,
    ),
    Patch(
        "torch._dynamo.eval_frame",
        "OptimizedModule.__call__",
        ("args", "kwargs"),
        "the same for models that `torch.compile` returns (S38)",
        "torch 2.13.0",
        _optimized_module,
    ),
    Patch(
        "torch.optim.optimizer",
        "Optimizer.__init__",
        ("params",),
        "every loop creates an optimizer: its models are converted to FP8, in each engine (S1, S2, S3, S14, S15)",
        "torch 2.13.0",
        _optimizer_init,
    ),
    Patch(
        "torch.distributed.tensor._sharding_prop",
        "ShardingPropagator._propagate_tensor_meta_non_cached",
        ("op_schema",),
        "DTensor runs each operator on fake tensors first, in FP32 inside of BF16 ones: they are no products",
        "torch 2.13.0",
        _without_data,
    ),
    Patch(
        "torch.optim.optimizer",
        "Optimizer._patch_step_function",
        ("self",),
        "the account of products goes on after a step, whose range in the profiler must be closed",
        "torch 2.13.0",
        _patch_step,
    ),
    Patch(
        "torch.nn.parallel.distributed",
        "DistributedDataParallel.__init__",
        ("module", "init_sync"),
        "DDP keeps references to parameters, and broadcasts FP8 ones inexactly: convert first, broadcast exact values",
        "torch 2.13.0",
        _ddp_init,
    ),
    Patch(
        "torch.distributed.distributed_c10d",
        "destroy_process_group",
        ("group",),
        "a gloo group that is destroyed with the GIL held waits for a thread that waits for the GIL (S26)",
        "torch 2.13.0",
        _destroy_process_group,
    ),
    Patch(
        "torch.utils.file_baton",
        "FileBaton.try_acquire",
        ("self",),
        "the lock of a build that was killed stops every later run: the launcher removes those of its workers",
        "torch 2.13.0",
        _try_acquire,
    ),
    Patch(
        "torch.distributed.algorithms.model_averaging.averagers",
        "ModelAverager.__init__",
        ("process_group",),
        "gradients may differ between ranks where it averages the weights",
        "torch 2.13.0",
        _averager_init,
    ),
    Patch(
        "torch.optim.optimizer",
        "Optimizer.load_state_dict",
        ("state_dict",),
        "a checkpoint can change dtypes: the next step is proven again",
        "torch 2.13.0",
        _load_state_dict,
    ),
    Patch(
        "torch.nn.modules.module",
        "Module.load_state_dict",
        ("state_dict",),
        "weights may be loaded before the optimizer is created, so before the conversion: their FP8 history is kept; "
        "the dtypes that were saved are reported",
        "torch 2.13.0",
        _module_load_state_dict,
    ),
    Patch(
        "torch.nn.modules.module",
        "Module._apply",
        ("fn",),
        "`model.half()` after the proof: the cast is reported, and training on with the rounded weights is refused",
        "torch 2.13.0",
        _module_apply,
    ),
    Patch(
        "torch.nn.modules.module",
        "Module.eval",
        ("self",),
        "code that evaluates may leave another precision behind: a step after it is looked at",
        "torch 2.13.0",
        _eval,
    ),
    Patch(
        "torch.optim.optimizer",
        "Optimizer.add_param_group",
        ("param_group",),
        "parameters that are added later are proven too",
        "torch 2.13.0",
        _add_param_group,
    ),
)  # fmt: skip
