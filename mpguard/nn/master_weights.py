"""Keep FP32 master weights in the optimizer, for parameters in low precision: `master_weights: optimizer` of a policy.

The parameters of a model are in the compute dtype, so that nothing casts them in each forward pass, nor their
gradients in each backward pass. Each has a master: its FP32 value, which the step updates and from which it is rounded.

Any optimizer: during `step` its groups have the masters in place of the parameters, with their states and FP32
gradients, so that its own code runs as it would for FP32 parameters. The parameters themselves never change their
dtype: DDP and others hold their gradient accumulators. AdamW on a GPU is one kernel instead (`master_kernel`): it reads
gradients as they are, and writes master and parameter in one pass over memory.

A parameter whose value is not that of its master was changed by other code (`load_state_dict`, a constraint): the step
begins with its value then. `state_dict` of the optimizer has the masters, under `KEY`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mpguard.core.errors import MpguardWarning, NotInForce

#: The attribute of a parameter with its `Master`.
ATTRIBUTE = "_mpguard_master"

#: The key of the master in the states of a `state_dict`.
KEY = "master_weight"

#: The dtypes of the parameters that get a master.
DTYPES = (torch.float32, torch.bfloat16)

#: How many parameters, and values of each, show whether a step updates the masters.
SAMPLED = 16


@dataclasses.dataclass(eq=False)
class Master:
    """The FP32 value of a parameter. dtype: to which the parameter is rounded.

    steps: how many were applied to it; None if only the optimizer's state knows. widens: gradients of several backward
    passes are added up in FP32; not under DDP, whose buckets have the dtype of the parameters.
    """

    value: nn.Parameter
    dtype: torch.dtype = torch.bfloat16
    steps: int | None = None
    widens: bool = True


def master_of(parameter: Any) -> Master | None:
    """Return the master of a parameter; None if it has none."""
    return getattr(parameter, "__dict__", {}).get(ATTRIBUTE)


def split(parameter: torch.Tensor, dtype: torch.dtype) -> None:
    """Give a parameter a master with its value, and round the parameter itself to a dtype."""
    if master_of(parameter) is not None or parameter.dtype not in DTYPES or parameter.is_meta:
        return
    gradient, parameter.grad = parameter.grad, None
    value = parameter.data
    setattr(parameter, ATTRIBUTE, Master(nn.Parameter(value.float(), requires_grad=parameter.requires_grad), dtype))
    if value.dtype != dtype:
        parameter.data = value.to(dtype)
    if gradient is not None:
        parameter.grad = gradient.to(parameter.dtype)
    _add_up_in_fp32(parameter)


def _add_up_in_fp32(parameter: torch.Tensor) -> None:
    if parameter.requires_grad and hasattr(parameter, "grad_dtype"):  # else the proof shows that BF16 is added up
        parameter.grad_dtype = None  # of any dtype
        hook = functools.partial(_widen, weakref.ref(parameter))
        parameter.register_hook(hook)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def exchanging(*tensors: torch.Tensor) -> Iterator[None]:
    """Keep the masters of tensors that are exchanged (`torch.utils.swap_tensors`): optimizers have the same objects.

    torch refuses to exchange tensors to which there are weak references.
    """
    masters = [(each, master) for each in tensors if (master := master_of(each)) is not None]
    for each, _ in masters:
        delattr(each, ATTRIBUTE)
        hooks = each._backward_hooks or {}
        for key in [key for key, hook in hooks.items() if getattr(hook, "func", None) is _widen]:
            del hooks[key]
    try:
        yield
    finally:
        for each, master in masters:
            if each.shape == master.value.shape and each.dtype in DTYPES:
                setattr(each, ATTRIBUTE, master)
                each.data = each.data.to(master.dtype)
                _add_up_in_fp32(each)


def _widen(ref: weakref.ref[torch.Tensor], _gradient: torch.Tensor) -> None:
    """Convert the gradient of earlier backward passes to FP32 before that of another one is added."""
    parameter = ref()
    master = master_of(parameter)
    if parameter is None or master is None or parameter.grad is None or not master.widens:
        return
    if parameter.grad.dtype in (torch.bfloat16, torch.float16):
        parameter.grad = parameter.grad.to(torch.float32)


def join(parameters: Iterable[torch.Tensor]) -> None:
    """Undo `split`: the parameters are FP32, with the values of their masters."""
    for parameter in parameters:
        master = master_of(parameter)
        if master is not None:
            _take_over(parameter, master)
            delattr(parameter, ATTRIBUTE)
            gradient, parameter.grad = parameter.grad, None
            parameter.data = master.value.data
            parameter.grad = None if gradient is None else gradient.float()


def keep(
    optimizer: torch.optim.Optimizer, dtype: torch.dtype = torch.bfloat16, without: frozenset[int] = frozenset()
) -> int:
    """Keep the masters of an optimizer's parameters in it, and round the parameters. Returns the number of masters.

    A second call adds parameters that are new. without: ids of parameters that stay as they are.
    """
    count = 0
    for parameter in _parameters(optimizer):
        if id(parameter) not in without:
            split(parameter, dtype)
        count += master_of(parameter) is not None
    if count and optimizer not in _kept:
        _kept.add(optimizer)
        _Exchange().register(optimizer)
    return count


#: Optimizers with masters.
_kept: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def sensitive(modules: Iterable[nn.Module]) -> set[int]:
    """Return the ids of parameters that stay in FP32: those of modules whose kernels take no others.

    Batch norms have FP32 statistics; RNNs have their weights in one piece of memory.
    """
    kinds = (nn.modules.batchnorm._NormBase, nn.RNNBase)
    return {id(own) for module in modules if isinstance(module, kinds) for own in module.parameters(recurse=False)}


def loaded(named: Iterable[tuple[str, torch.Tensor]], saved: Mapping[str, Any]) -> None:
    """Give masters the values that a model has loaded, which have more digits than the parameters.

    named: the parameters by their names in `saved`.
    """
    for name, parameter in named:
        master, value = master_of(parameter), saved.get(name)
        if master is None or not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
            continue
        if value.is_floating_point() and value.dtype.itemsize > parameter.dtype.itemsize:
            value = value.to(parameter.device)
            with torch.no_grad():
                master.value.data = torch.where(value.to(parameter.dtype) == parameter, value.float(), parameter)


def share(ddp: Any, *, reduce_in_fp32: bool) -> None:
    """Broadcast the masters of a model in DDP from its first rank. reduce_in_fp32: reduce its gradients in FP32."""
    group = ddp.process_group
    first = dist.get_global_rank(group, 0)
    kept = [(own, master) for own in ddp.module.parameters() if (master := master_of(own)) is not None]
    with torch.no_grad():
        for parameter, master in kept:
            _take_over(parameter, master)
            master.widens = False
            dist.broadcast(master.value.detach(), first, group=group)
    if kept and reduce_in_fp32:
        ddp.register_forward_pre_hook(_reduce_in_fp32)


def _reduce_in_fp32(ddp: Any, _inputs: Any) -> None:
    """Register a hook of DDP's buckets at the first forward pass, unless the script has registered one."""
    if not ddp._comm_hooks:
        ddp.register_comm_hook(ddp.process_group, _summed_in_fp32)


def _summed_in_fp32(group: Any, bucket: Any) -> Any:
    """Average the gradients of a bucket over the ranks in FP32."""
    wide = bucket.buffer().to(torch.float32).div_(dist.get_world_size(group))
    future = dist.all_reduce(wide, group=group, async_op=True).get_future()
    return future.then(lambda done: bucket.buffer().copy_(done.value()[0]))


_summed_in_fp32.__annotations__.clear()  # DDP accepts none, or the classes; not their names


def _parameters(optimizer: Any) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _take_over(parameter: torch.Tensor, master: Master) -> None:
    """Take over what other code has written into a parameter since the last step, or moved to another device."""
    value = master.value
    with torch.no_grad():
        if value.device != parameter.device:
            value.data = value.data.to(parameter.device)
        torch.where(value.to(master.dtype) == parameter, value, parameter, out=value.data)


def _values(parameter: torch.Tensor, master: Master) -> tuple[torch.Tensor, torch.Tensor]:
    """Return some values of a parameter and of its master, copied."""
    own, exact = (each.detach().reshape(-1)[:SAMPLED].clone() for each in (parameter, master.value))
    return own, exact


class _Exchange:
    """Hooks of one optimizer. own: while its groups have masters, the parameters of each group."""

    def __init__(self) -> None:
        self.own: list[list[Any]] | None = None
        self.exchanged: list[tuple[torch.Tensor, Master, int]] = []  # with the version of the parameter
        self.in_step = False
        self.first = True
        #: Values of some exchanged parameters and of their masters before a step, until a step has updated the masters:
        #: a fused kernel changes no version.
        self.before: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.updates_masters = False
        self.saved: dict[int, Any] = {}

    def register(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.register_step_pre_hook(self.before_step)
        optimizer.register_step_post_hook(self.after_step)
        optimizer.register_state_dict_post_hook(self.add_masters)
        optimizer.register_load_state_dict_pre_hook(self.before_load)
        optimizer.register_load_state_dict_post_hook(self.after_load)

    # -- step --------------------------------------------------------------------------------

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        self.give_back(optimizer)  # if the last step has raised an error
        place = next((index for index, each in enumerate(args) if index and callable(each)), None)
        closure = kwargs.get("closure") if place is None else args[place]
        if closure is not None:
            result = self._with_closure(optimizer, closure)
            if place is None:
                return args, {**kwargs, "closure": result}
            return (*args[:place], result, *args[place + 1 :]), kwargs
        self.hand_out(optimizer)
        return None

    def _with_closure(self, optimizer: Any, closure: Any) -> Any:
        """Return a closure that evaluates the model with its own parameters, whenever the optimizer calls it."""
        if _is_adamw(optimizer):  # calls it once, first
            with torch.enable_grad():
                loss = closure()
            self.hand_out(optimizer)
            return lambda: loss

        def evaluate() -> Any:
            self.give_back(optimizer)
            try:
                return closure()
            finally:
                self.hand_out(optimizer)

        self.hand_out(optimizer)
        return evaluate

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def after_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        self.give_back(optimizer)

    def hand_out(self, optimizer: Any, *, step: bool = True) -> None:
        """Put the masters into the groups of the optimizer; without the parameters that a kernel has updated already.

        step: False to load states: without gradients.
        """
        self.own = [list(group["params"]) for group in optimizer.param_groups]
        self.in_step = step
        kernel = _kernel(optimizer) if step else None
        for group, own in zip(optimizer.param_groups, self.own, strict=True):
            group["params"].clear()  # in place: some optimizers hold the list
            for parameter in own:
                master = master_of(parameter)
                if master is None:
                    group["params"].append(parameter)
                elif kernel is None or not _update(kernel, optimizer, group, parameter, master):
                    group["params"].append(master.value)
                    self._exchange(optimizer, parameter, master, step=step)
        self.first = self.first and not step
        capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if step and not self.updates_masters and not capturing:
            self.before = [_values(parameter, master) for parameter, master, _ in self.exchanged[:SAMPLED]]

    def _exchange(self, optimizer: Any, parameter: torch.Tensor, master: Master, *, step: bool) -> None:
        if step:
            _take_over(parameter, master)
            gradient = parameter.grad
            master.value.grad = gradient if gradient is None else gradient.to(torch.float32)
        master.steps = None
        state = optimizer.state.pop(parameter, None)
        if state is not None:
            if self.first:  # what an optimizer creates with itself has the dtype of the parameters
                state.update({name: each.float() for name, each in state.items() if _is_like(each, parameter)})
            optimizer.state[master.value] = state
        self.exchanged.append((parameter, master, parameter._version))

    def give_back(self, optimizer: Any) -> None:
        """Put the parameters back into the groups, with the values that the step has given their masters."""
        if self.own is None:
            return
        for group, own in zip(optimizer.param_groups, self.own, strict=True):
            group["params"][:] = own
        exchanged, self.own, self.exchanged = self.exchanged, None, []
        for parameter, master, _ in exchanged:
            if self.in_step and master.value.grad is None:
                parameter.grad = None  # the optimizer has released it
            state = optimizer.state.pop(master.value, None)
            if state is not None:
                optimizer.state[parameter] = state
            master.value.grad = None
        if any(parameter._version != version for parameter, _, version in exchanged) or self._passed_by(exchanged):
            raise NotInForce(
                f"master_weights: {type(optimizer).__name__} updates parameters that it has kept itself, and not those "
                "in its param_groups: FP32 masters cannot be updated by it. Use another optimizer, or set "
                "master_weights=model"
            )
        if exchanged:
            with torch.no_grad():
                own = [parameter for parameter, _, _ in exchanged]
                torch._foreach_copy_(own, [master.value.detach() for _, master, _ in exchanged])

    def _passed_by(self, exchanged: list[tuple[torch.Tensor, Master, int]]) -> bool:
        """Return True if a step has changed parameters in place of their masters."""
        before, self.before = self.before, []
        now = [_values(parameter, master) for parameter, master, _ in exchanged[: len(before)]]
        own, masters = (
            [not torch.equal(old[part], new[part]) for old, new in zip(before, now, strict=False)] for part in (0, 1)
        )
        self.updates_masters = self.updates_masters or any(masters)
        return any(own)

    # -- checkpoints -------------------------------------------------------------------------

    def add_masters(self, optimizer: Any, saved: dict[str, Any]) -> dict[str, Any]:
        """Add the masters to a `state_dict` of the optimizer."""
        states = dict(saved["state"])
        for own, group in zip(optimizer.param_groups, saved["param_groups"], strict=True):
            for parameter, index in zip(own["params"], group["params"], strict=True):
                master = master_of(parameter)
                if master is not None:
                    _take_over(parameter, master)
                    states[index] = {**states.get(index, {}), KEY: master.value.detach()}
        return {**saved, "state": states}

    def before_load(self, optimizer: Any, saved: dict[str, Any]) -> dict[str, Any] | None:
        """Take the masters out of a `state_dict`, and the masters into the groups: states are cast to their dtype."""
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        if sizes != [len(group["params"]) for group in saved["param_groups"]]:
            return None  # torch refuses it
        self.give_back(optimizer)
        indices = itertools.chain.from_iterable(group["params"] for group in saved["param_groups"])
        states = {index: dict(state) if isinstance(state, dict) else state for index, state in saved["state"].items()}
        self.saved = {}
        for parameter, index in zip(_parameters(optimizer), indices, strict=True):
            state = states.get(index)
            if isinstance(state, dict) and KEY in state:
                self.saved[id(parameter)] = state.pop(KEY)
                if not state:
                    del states[index]
        self.hand_out(optimizer, step=False)
        return {**saved, "state": states}

    def after_load(self, optimizer: Any) -> None:
        """Give the masters, and the parameters, the values that were saved."""
        for parameter, master, _ in self.exchanged:
            value = self.saved.get(id(parameter))
            if value is not None:
                master.value.data = value.to(parameter.device, torch.float32, copy=True).view_as(master.value)
            else:
                _take_over(parameter, master)
        self.saved = {}
        self.give_back(optimizer)


def _is_like(state: Any, parameter: torch.Tensor) -> bool:
    """True if a state has shape and dtype of a parameter."""
    return isinstance(state, torch.Tensor) and state.dtype == parameter.dtype and state.shape == parameter.shape


# -- AdamW in one kernel -----------------------------------------------------------------------------------------------


def _is_adamw(optimizer: Any) -> bool:
    """True for torch's AdamW itself, whose step is known; false for classes derived from it."""
    return type(optimizer) is torch.optim.AdamW


#: Why the kernel is not used in this process, after it has failed.
_failed: list[str] = []


def _kernel(optimizer: Any) -> ModuleType | None:
    """Return the module with the kernel, if it can do the step of an optimizer."""
    if _failed or not _is_adamw(optimizer) or getattr(optimizer, "found_inf", None) is not None:
        return None
    if not any(parameter.is_cuda for parameter in _parameters(optimizer)):
        return None
    try:
        from mpguard.nn import master_kernel
    except ImportError:  # no Triton
        return None
    return master_kernel


def _update(kernel: ModuleType, optimizer: Any, group: dict[str, Any], parameter: Any, master: Master) -> bool:
    """Update a parameter and its master with the kernel. False if it is not one that the kernel can update."""
    gradient, value = parameter.grad, master.value
    if gradient is None:
        return True
    dense = gradient.layout is torch.strided and all(each.is_contiguous() for each in (parameter, gradient, value))
    plain = all(type(each) in (torch.Tensor, nn.Parameter) for each in (parameter, gradient))
    here = parameter.is_cuda and value.device == parameter.device and parameter.dtype == master.dtype
    if not (dense and plain and here and gradient.numel()):
        return False
    options = (group[name] for name in ("amsgrad", "maximize", "capturable", "differentiable"))
    numbers = (group["lr"], *group["betas"], group["eps"], group["weight_decay"])
    if any(options) or any(isinstance(each, torch.Tensor) for each in numbers):
        return False
    state = optimizer.state[parameter]
    if not state:
        where = {"device": parameter.device} if group.get("fused") else {}
        state["step"] = torch.zeros((), dtype=torch.float32, **where)
        state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(value.detach()) for _ in range(2))
    if master.steps is None:
        master.steps = int(state["step"].item())
    try:
        kernel.adamw(parameter, gradient, value, state, group=group, step=master.steps + 1)
    except Exception as error:  # of Triton's compiler: nothing has been changed yet
        _failed.append(f"{type(error).__name__}: {error}")
        text = (
            f"master_weights: the kernel for AdamW cannot run ({_failed[0]:.200}); torch's own step runs, and is slower"
        )
        warnings.warn(MpguardWarning(text), stacklevel=2)
        return False
    master.steps += 1
    state["step"] += 1
    return True
