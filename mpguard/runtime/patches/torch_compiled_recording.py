"""Record what dynamo compiles, and prepare what compiled code is called with."""

from __future__ import annotations

import contextlib
import functools
from types import ModuleType
from typing import Any

from mpguard.core.patches import AnyFunction, adjustment, patch
from mpguard.nn import attention, cuda_graphs
from mpguard.nn.fp8 import first_batch
from mpguard.runtime import guard as guards
from mpguard.runtime.patches import checks
from mpguard.runtime.proof.compiled_graphs import GRAPH_CALL


@patch(
    "torch._dynamo.output_graph:OutputGraph.call_user_compiler",
    needs=("gm",),
    reason="compiled code opens no ranges of modules: the modules of its matmuls are in dynamo's graph",
    lost="compiled code is proven without the names of its modules, and dynamo may warn about hooks",
    check=checks.compiled,
)
def _compiled_graph(original: AnyFunction) -> AnyFunction:
    @functools.wraps(original)
    def call_user_compiler(self: Any, gm: Any, *args: Any, **kwargs: Any) -> Any:
        guard = guards.current()
        if guard is None or not guard.listening:
            return original(self, gm, *args, **kwargs)
        # Between checks too: a graph is compiled once, and runs later. It is read before the compiler changes it.
        record = guard.recorder.graph_to_record(gm, getattr(self, "local_scope", {}).get("self"))
        compiled = original(self, gm, *args, **kwargs)
        record()
        return compiled

    return call_user_compiler


@patch(
    "torch.nn.modules.module:Module.compile",
    needs=("args", "kwargs"),
    reason="a padding mask can be read before compiled code is called, not in it (S38)",
    lost="attention may run with a mask: about 13 % slower in BF16",
    check=checks.compiled,
)
def _module_compile(original: AnyFunction) -> AnyFunction:
    @functools.wraps(original)
    def compile(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        call = attention.reading_masks(self, self._compiled_call_impl)
        call = cuda_graphs.keeping_gradients(self, call)
        self._compiled_call_impl = first_batch.telling(self, _marking_evaluation(self, call))

    return compile


def _marking_evaluation(module: Any, call: AnyFunction) -> AnyFunction:
    """Return a function that calls compiled code: what runs without gradients is evaluation, not a frozen part."""

    @functools.wraps(call)
    def marking_evaluation(*args: Any, **kwargs: Any) -> Any:
        import torch

        guard = guards.current()
        if guard is None or torch.compiler.is_compiling():
            return call(*args, **kwargs)
        with guard.recorder.account.evaluation(module):
            return call(*args, **kwargs)

    return marking_evaluation


@patch(
    "torch._dynamo.eval_frame:OptimizedModule.__call__",
    needs=("args", "kwargs"),
    reason="the same for models that `torch.compile` returns (S38)",
    lost="attention may run with a mask: about 13 % slower in BF16",
    check=checks.compiled,
)
def _optimized_module(original: AnyFunction) -> AnyFunction:
    @functools.wraps(original)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        first_batch.seen(self._orig_mod, args, kwargs)
        attention.read_mask(self._orig_mod, kwargs.get("attention_mask"))
        cuda_graphs.keep_gradients(self._orig_mod)
        return _marking_evaluation(self._orig_mod, functools.partial(original, self))(*args, **kwargs)

    return __call__


@patch(
    "torch._dynamo.eval_frame:OptimizedModule.__init__",
    needs=("mod",),
    reason="dynamo warns about global hooks of modules, and guards on them: those of the account are removed before",
    lost="compiled code is proven without the names of its modules, and dynamo may warn about hooks",
    check=checks.compiled,
)
def _compiled_module(original: AnyFunction) -> AnyFunction:
    @functools.wraps(original)
    def __init__(*args: Any, **kwargs: Any) -> None:
        _leave_to_dynamo()
        original(*args, **kwargs)

    return __init__


@patch(
    "torch._dynamo.eval_frame:_callback_from_stance",
    needs=("callback",),
    reason="the same, where compiled code is entered in another way",
    lost="compiled code is proven without the names of its modules, and dynamo may warn about hooks",
    check=checks.compiled,
)
def _enter_compiled_code(original: AnyFunction) -> AnyFunction:
    @functools.wraps(original)
    def callback_from_stance(callback: Any) -> Any:
        if callback not in (None, False):  # else dynamo is switched off
            _leave_to_dynamo()
        return original(callback)

    return callback_from_stance


@patch(
    "torch._inductor.output_code:CompiledFxGraph.__call__",
    needs=("inputs",),
    reason="the operators of a graph that was recorded before cost most of a check, and show nothing new",
    lost="checks of compiled models take longer",
    check=checks.compiled_by_inductor,
)
def _known_graph(original: AnyFunction) -> AnyFunction:
    @functools.wraps(original)
    def __call__(self: Any, inputs: Any) -> Any:
        guard = guards.current()
        if guard is None or not guard.recorder.account.running:
            return original(self, inputs)
        name = f"{GRAPH_CALL} {getattr(self, '_fx_graph_cache_key', None)} ##"
        known = guard.recorder.account.known_graph(name)
        with contextlib.nullcontext() if known is None else known:
            return original(self, inputs)

    return __call__


def _leave_to_dynamo() -> None:
    guard = guards.current()
    if guard is not None:
        guard.recorder.account.enter_compiled_code()


@adjustment(
    "torch._functorch.config",
    "torch._functorch.config.backward_pass_autocast",
    reason="compiled, backward of a custom Function or operator runs under the forward's autocast; not in eager (S35)",
    lost="compiled backward passes of custom functions run under autocast",
    check=checks.compiled_backward,
    option="backward_pass_autocast",
)
def _compiled_backward(config: ModuleType) -> str | None:
    """Compile backward passes as eager ones run: outside of the autocast region of the forward pass."""
    options: Any = config
    if not hasattr(options, "backward_pass_autocast"):
        return "there is no such option in the installed version"
    if options.backward_pass_autocast == "same_as_forward":  # torch's default
        options.backward_pass_autocast = "off"
    return None
