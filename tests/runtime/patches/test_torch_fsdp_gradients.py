"""Gradients that FSDP2 takes under tensor parallelism, also of torch 2.14's parameters with `spmd_types`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="the real library runs here")

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.testing._internal.distributed.fake_pg import FakeStore

from mpguard.runtime.patches import torch_fsdp_gradients

Take = Callable[[Any, torch.Tensor], torch.Tensor]


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    dist.destroy_process_group()


def take_as_in_torch_2_14(self: Any, grad: torch.Tensor) -> torch.Tensor:
    """Do what `FSDPParam._get_grad_inner_tensor` of torch 2.14 does with a plain gradient, where torch is older."""
    if self.is_spmd_types:
        placements = tuple(self._spmd_grad_placements)
        grad = DTensor.from_local(grad, self._unsharded_dtensor_spec.mesh, placements, run_check=False)
    assert isinstance(grad, DTensor)
    return grad.redistribute(placements=self._unsharded_dtensor_spec.placements).to_local()


def original() -> Take:
    installed: Take = inspect.unwrap(FSDPParam._get_grad_inner_tensor)
    return installed if "is_spmd_types" in inspect.getsource(installed) else take_as_in_torch_2_14


@pytest.mark.parametrize(
    ("spmd", "partial", "guarded", "reduce_dtype", "summed"),
    [
        (True, True, True, torch.float32, torch.float32),
        (True, True, False, torch.float32, torch.bfloat16),  # what stock torch does
        (True, True, True, None, torch.bfloat16),
        (True, False, True, torch.float32, None),  # nothing is summed: FSDP casts it later
        (False, True, True, torch.float32, torch.float32),
        (False, False, True, torch.float32, None),
    ],
)
def test_partial_gradients_are_summed_over_tensor_parallel_ranks_in_the_reduction_dtype(
    mesh: DeviceMesh,
    monkeypatch: pytest.MonkeyPatch,
    spmd: bool,
    partial: bool,
    guarded: bool,
    reduce_dtype: torch.dtype | None,
    summed: torch.dtype | None,
) -> None:
    """The gradient of a norm. spmd: it is a plain tensor, and its placements are an attribute of the parameter."""
    monkeypatch.setattr(torch_fsdp_gradients.guards, "current", lambda: object() if guarded else None)
    sent: list[torch.dtype] = []
    reduce = collectives.all_reduce

    def recorded(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(tensor.dtype)
        return reduce(tensor, *args, **kwargs)

    monkeypatch.setattr(collectives, "all_reduce", recorded)
    placements = (Partial() if partial else Replicate(),)
    gradient = torch.ones(4, dtype=torch.bfloat16)
    whole = DTensor.from_local(gradient, mesh, (Replicate(),), run_check=False)
    parameter = SimpleNamespace(
        is_spmd_types=spmd, is_dtensor=True, reduce_dtype=reduce_dtype,
        _spmd_grad_placements=placements if spmd else (),
        _unsharded_dtensor_spec=whole._spec, mesh_info=SimpleNamespace(is_spmd_mesh=False),
    )  # fmt: skip
    if not spmd:
        gradient = DTensor.from_local(gradient, mesh, placements, run_check=False)
    found = torch_fsdp_gradients._take_gradient(original())(parameter, gradient)
    assert sent == ([summed] if summed is not None else [])
    assert found.dtype == (summed or torch.bfloat16) and not isinstance(found, DTensor)
