"""Small programs of the libraries: in each, functions are called whose wrappers the run depends on.

`fit.behaviours` runs them with the installed library and sees if it calls the function; a program raises
`AssertionError` if a library behaves in another way than the wrapper relies on. They run on a CPU, in a process of
their own.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from mpguard.core.patches import NotHere, Obsolete


@contextlib.contextmanager
def _group() -> Iterator[None]:
    """A process group of this process alone."""
    from torch import distributed
    from torch._C._distributed_c10d import HashStore

    distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """Set environment variables, and restore all of them afterwards."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _linear() -> Any:
    import torch

    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))


def _input() -> Any:
    import torch

    return torch.ones(2, 4)


# -- torch: training steps -----------------------------------------------------------------------


def step() -> None:
    """A step of an optimizer with another group of parameters, after its state was loaded."""
    import torch

    model, other = _linear(), _linear()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.add_param_group({"params": list(other.parameters())})
    optimizer.load_state_dict(optimizer.state_dict())
    other(model(_input()).expand(2, 4)).sum().backward()
    optimizer.step()


def scaled_step() -> None:
    """A step of a GradScaler that was loaded: it skips steps whose gradients are infinite, and halves its scale."""
    import torch

    model = _linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.load_state_dict(scaler.state_dict())
    for factor, applied in ((1.0, True), (float("inf"), False)):
        before = model[0].weight.detach().clone()
        optimizer.zero_grad()
        scaler.scale(model(_input()).sum() * factor).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(before, model[0].weight) is not applied, "the scaler applies a step with infinite gradients"
    assert scaler.get_scale() == 4.0, "the scaler does not halve its scale after an overflow"


def fsdp1_scaler() -> None:
    """FSDP1's GradScaler scales a loss."""
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    with _group():
        assert ShardedGradScaler("cpu", init_scale=8.0).scale(_input().sum()).item() == 64.0, "the loss is not scaled"


def autocast() -> None:
    """Autocast is entered, and switched off around a part."""
    import torch

    model = _linear()
    with torch.autocast("cpu", torch.bfloat16):
        assert model(_input()).dtype is torch.bfloat16, "autocast does not cast"
        with torch.autocast("cpu", enabled=False):
            assert model(_input()).dtype is torch.float32, "autocast cannot be switched off"


def clipped() -> None:
    """The norm of gradients is clipped, and returned."""
    import torch

    model = _linear()
    model(_input()).sum().backward()
    assert float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)) > 0, "clip_grad_norm_ returns no norm"
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.1)
    assert float(model[0].weight.grad.abs().max()) < 0.11, "clip_grad_value_ does not clip"


# -- torch: modules and checkpoints --------------------------------------------------------------


def module() -> None:
    """A module is cast, loaded and evaluated."""
    import torch

    model = _linear().to(torch.bfloat16)
    assert model[1].weight.dtype is torch.bfloat16, "`Module.to` does not cast"
    model.load_state_dict(_linear().state_dict())
    model.eval()


def selective_checkpointing() -> None:
    """A model is computed with selective activation checkpointing, which keeps the results of matmuls."""
    import torch
    from torch.utils import checkpoint

    kept = functools.partial(checkpoint.create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
    checkpoint.checkpoint(_linear(), _input(), use_reentrant=False, context_fn=kept).sum().backward()


def swap() -> None:
    """A module whose parameters are exchanged for others when it is cast."""
    import torch

    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        _linear().to(torch.bfloat16)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def build_lock() -> None:
    """A build of an extension takes a lock that is a file."""
    from torch.utils import cpp_extension

    kind: Any = getattr(cpp_extension, "FileBaton", None)

    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "lock"))
        if kind is None:
            Path(path).touch()  # as a build that was killed leaves it
            own: Any = cpp_extension
            with own.FileLock(path):
                raise Obsolete("since torch 2.14 the lock is the kernel's, and ends with its process")
        baton = kind(path)
        assert baton.try_acquire() and Path(path).exists(), "the lock is no file"
        baton.release()


def build() -> None:
    """An extension is built; the compiler refuses this one at once."""
    from torch.utils import cpp_extension

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "extension.cpp")
        source.write_text("#error\n", encoding="utf-8")
        with contextlib.suppress(RuntimeError):  # also where there is no ninja
            cpp_extension.load("mpguard_check", [str(source)], build_directory=folder)


# -- torch: compiled code ------------------------------------------------------------------------


def compiled() -> None:
    """A model is compiled, by `torch.compile` and in place, and runs."""
    import torch

    model: Any = torch.compile(_linear(), backend="eager")
    model(_input())
    own = _linear()
    own.compile(backend="eager")
    assert callable(own._compiled_call_impl), "`Module.compile` keeps no compiled call"
    own(_input())
    torch.compiler.reset()


def compiled_by_inductor() -> None:
    """Code that inductor has compiled runs; a matmul alone needs no C++ compiler."""
    import torch

    multiply: Any = torch.compile(torch.mm)
    multiply(_input(), _input().t())
    torch.compiler.reset()


def profiled() -> None:
    """Profilers of a program begin and end."""
    import torch
    from torch.autograd import profiler

    kinds: tuple[Any, ...] = (profiler.emit_nvtx, profiler.emit_itt)
    with profiler.profile():
        torch.ones(1).add_(1)
    for kind in kinds:
        with contextlib.suppress(Exception), kind():  # without CUDA it raises once it has been entered
            pass
        kind(enabled=False).__exit__(None, None, None)


# -- torch: distributed training -----------------------------------------------------------------


def ddp() -> None:
    """A model is wrapped in DDP, its gradients pass a hook, and the weights are averaged."""
    import torch
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    with _group():
        model = torch.nn.parallel.DistributedDataParallel(_linear())
        model.register_comm_hook(torch.distributed.group.WORLD, allreduce_hook)
        model(_input()).sum().backward()
        PeriodicModelAverager(period=1)


def fsdp1() -> None:
    """A model is wrapped in FSDP1, and its gradients are clipped."""
    import torch
    from torch.distributed.fsdp import FullyShardedDataParallel

    with _group():
        model = FullyShardedDataParallel(_linear(), device_id=torch.device("cpu"))
        model(_input()).sum().backward()
        model.clip_grad_norm_(1.0)


def fsdp2() -> None:
    """A model is sharded by FSDP2; its gradients are taken from its parameters and reduced."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    with _group():
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = fully_shard(_linear(), mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
        model(_input()).sum().backward()
        assert next(model.parameters()).grad.dtype is torch.float32, "gradients are not reduced in the reduce_dtype"


def dtensor() -> None:
    """DTensor runs an operator on fake tensors first."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    with _group():
        whole = distribute_tensor(torch.ones(3, 5), init_device_mesh("cpu", (1,)), [Replicate()])
        _ = whole @ whole.T


# -- accelerate, DeepSpeed -----------------------------------------------------------------------


def accelerator() -> None:
    """An `Accelerator` prepares a model, averages its weights, and has trackers."""
    import torch
    from accelerate import Accelerator
    from accelerate.local_sgd import LocalSGD

    own = Accelerator(cpu=True)
    model = own.prepare(_linear())
    with LocalSGD(accelerator=own, model=model, local_sgd_steps=2, enabled=True):
        own.backward(model(_input()).sum())
    own.init_trackers("mpguard")
    own.end_training()
    assert isinstance(model, torch.nn.Module)


def deepspeed_engine() -> None:
    """An engine of DeepSpeed with ZeRO-1 trains for a step, and reports that it was applied."""
    import torch

    with contextlib.ExitStack() as stack:
        stack.enter_context(_environment(DS_ACCELERATOR="cpu", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1"))
        stack.enter_context(_group())
        import deepspeed

        # Its operator for the CPU takes a minute to compile, and is not needed by a process alone.
        stack.enter_context(mock.patch("deepspeed.comm.torch.build_shm_op", return_value=None))

        model = _linear()
        config = {
            "train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
        }  # fmt: skip
        optimizer = torch.optim.AdamW(model.parameters())
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        engine.backward(engine(_input().to(torch.bfloat16)).sum())
        engine.step()
        assert engine.was_step_applied() and engine.skipped_steps == 0, "the engine does not report an applied step"


# -- adjustments ---------------------------------------------------------------------------------


def compiled_backward() -> None:
    """A compiled backward pass of a custom function runs outside of the forward pass's autocast."""
    import torch

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any) -> Any:
            ctx.save_for_backward(weight)
            return x @ weight

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            (weight,) = ctx.saved_tensors
            return gradients[0].float() @ weight.float().t(), None

    torch.compiler.reset()
    apply: Any = Own.apply

    def forward(x: Any, weight: Any) -> Any:
        return apply(x, weight).float().sum()

    program: Any = torch.compile(forward, backend="aot_eager")
    x, weight = torch.ones(2, 4, requires_grad=True), torch.full((4, 4), 1 + 2.0**-12)  # which BF16 rounds to 1
    with torch.autocast("cpu", torch.bfloat16):
        loss = program(x, weight)
    loss.backward()
    torch.compiler.reset()
    assert x.grad is not None and torch.equal(x.grad, torch.full((2, 4), 4 * (1 + 2.0**-12))), "it runs under autocast"


def rnn() -> None:
    """An LSTM under autocast in BF16 is not computed in FP16."""
    import torch

    if not torch.cuda.is_available():
        raise NotHere("there is no GPU")
    with torch.autocast("cuda", torch.bfloat16):
        found, _ = torch.nn.LSTM(4, 4, device="cuda")(torch.ones(2, 3, 4, device="cuda"))
    assert found.dtype is not torch.float16, "it is computed in FP16"


# -- transformers --------------------------------------------------------------------------------


def trainer() -> None:
    """A `Trainer` saves a checkpoint and resumes from it."""
    import torch
    from transformers import Trainer, TrainingArguments

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = _linear()

        def forward(self, x: Any, labels: Any = None) -> Any:
            return {"loss": (self.inner(x) - labels).square().mean()}

    data = [{"x": torch.ones(4), "labels": torch.zeros(1)}] * 4
    with tempfile.TemporaryDirectory() as folder:
        for steps in (1, 2):
            arguments = TrainingArguments(
                folder, max_steps=steps, save_strategy="steps", save_steps=1, report_to=[], use_cpu=True,
                per_device_train_batch_size=1, disable_tqdm=True, logging_strategy="no",
            )  # fmt: skip
            Trainer(Model(), arguments, train_dataset=data).train(resume_from_checkpoint=steps == 2)


def trainer_with_deepspeed() -> None:
    """`TrainingArguments` with a DeepSpeed config compare it with their own precision."""
    from transformers import TrainingArguments

    config = {"train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 1}}
    with _environment(DS_ACCELERATOR="cpu"), tempfile.TemporaryDirectory() as folder, _group():
        TrainingArguments(folder, deepspeed=config, use_cpu=True, report_to=[], bf16=True)


def _kernels(**inputs: Any) -> list[str]:
    """Compile a Llama of one block, and return what its attention takes, without running another kernel."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from mpguard.runtime.proof.attention_masks import kernels_in_graph

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(
        vocab_size=32, max_position_embeddings=32, attn_implementation="sdpa", use_cache=False, **sizes
    )
    found: list[str] = []

    def backend(graph: Any, _inputs: Any) -> Callable[..., Any]:
        found.extend(kernels_in_graph(graph).elements())
        return graph.forward  # type: ignore[no-any-return]

    torch.compiler.reset()
    ids = torch.ones(2, 8, dtype=torch.long)
    model: Any = torch.compile(LlamaForCausalLM(config).train(), backend=backend)
    model(input_ids=ids, **inputs)
    torch.compiler.reset()
    return found


def attention_without_mask() -> None:
    """A compiled Llama without a padding mask keeps `is_causal`."""
    found = _kernels()
    assert found == ["is_causal"], f"attention of a compiled Llama takes {found}, not is_causal"


def attention_with_ones() -> None:
    """The same with a padding mask of ones that was read before."""
    import torch

    from mpguard.nn.attention import MARK

    mask = torch.ones(2, 8, dtype=torch.long)
    vars(mask)[MARK] = True
    found = _kernels(attention_mask=mask)
    assert found == ["is_causal"], f"attention of a compiled Llama takes {found} with a padding mask of ones"


def experts() -> None:
    """The grouped matmuls of experts are computed in the dtype of autocast."""
    import torch
    from transformers.integrations import moe

    weight = torch.ones(2, 16, 16)
    with torch.autocast("cpu", torch.bfloat16):
        found = moe._grouped_mm(torch.ones(4, 16), weight, torch.tensor([2, 4], dtype=torch.int32))
    assert found.dtype is torch.bfloat16, f"experts compute in {found.dtype} under autocast in BF16"


def fused_adam() -> None:
    """Transformer Engine's FusedAdam is created."""
    from transformer_engine.pytorch.optimizers import FusedAdam

    with contextlib.suppress(RuntimeError):  # without a GPU it raises once it has been entered
        FusedAdam(_linear().parameters())


def leaves() -> None:
    """`sys.exit` raises with the status that is given."""
    try:
        sys.exit(3)
    except SystemExit as error:
        assert error.code == 3, "`sys.exit` has another status"


def ends_at_once() -> None:
    """`os._exit` of a forked process ends it with the status that is given."""
    child = os.fork()
    if not child:
        os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3, "`os._exit` has another status"
