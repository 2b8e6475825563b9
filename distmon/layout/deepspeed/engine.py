"""A DeepSpeed engine: its inner optimizer, its param groups, the shards of its model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from distmon.errors import LayoutError
from distmon.layout.capture import capture
from distmon.layout.deepspeed.experts import WholeModelNames
from distmon.layout.deepspeed.master_slice import flat_region, master_slice_shard
from distmon.layout.deepspeed.optimizer_wrappers import (
    OptimizerTensors,
    partition_length,
    read_optimizer_wrapper,
    sharded_over,
)
from distmon.layout.modules import NamedModule, named_modules
from distmon.layout.plain import plain_shard
from distmon.layout.shard import Shard, absent_shard, description


class EngineLayout:
    """The shards of a DeepSpeed engine on this rank. Built once, after `deepspeed.initialize`.

    Weights are the tensors that the inner optimizer steps: the fp32 masters where there are any.
    Parameters that no optimizer owns, such as frozen ones, are read from the model.

    Raises LayoutError for an engine whose weights cannot be read.
    """

    def __init__(self, engine: Any) -> None:
        wrapper = engine.optimizer
        self._model: torch.nn.Module = engine.module
        self._tensors: OptimizerTensors | None = None
        if isinstance(wrapper, torch.optim.Optimizer):
            self.inner = wrapper
        else:
            inner = getattr(wrapper, "optimizer", None)
            if not isinstance(inner, torch.optim.Optimizer):
                raise LayoutError("this DeepSpeed engine has no optimizer, so nothing is trained")
            self.inner = inner
            self._tensors = _read(wrapper)
        _refuse_tensor_parallel(engine)
        self._wrapper = wrapper
        self._names = WholeModelNames(self._model)
        self.scales_loss = _scales_loss(engine)
        """Whether the engine scales the loss, so that it skips steps on overflow."""
        self._param_groups: Sequence[dict[str, Any]] = self.inner.param_groups

    @property
    def device(self) -> torch.device:
        """Device of the weights that the optimizer steps."""
        if self._tensors is not None:
            for masters in self._tensors.masters:
                for master in masters:
                    return master.device
        tensors: list[torch.Tensor] = [p for g in self.inner.param_groups for p in g["params"]]
        return tensors[0].device

    def shards(self, include: Sequence[str] = ("*",), exclude: Sequence[str] = ()) -> list[Shard]:
        """Return the shards of all parameters of the whole model, in layer order."""
        return capture(self._model, include, exclude, self._names, self._shard)

    def modules(self) -> list[NamedModule]:
        """Return the modules of this rank, named as in the whole model."""
        return named_modules(self._model, self._names)

    def groups(self) -> Iterator[Mapping[str, Any]]:
        """Yield the user's param groups, with the tensors that the inner optimizer steps."""
        # During a step DeepSpeed swaps single groups into the inner optimizer's list, and loading
        # a checkpoint replaces the list.
        if len(self.inner.param_groups) == len(self._param_groups):
            self._param_groups = self.inner.param_groups
        if self._tensors is None:
            yield from self._param_groups
            return
        for group, masters in zip(self._param_groups, self._tensors.masters, strict=True):
            yield {**group, "params": masters}

    def grad_norm(self) -> float | torch.Tensor | None:
        """Return the total norm of the gradients before clipping; None if DeepSpeed has none."""
        return getattr(self._wrapper, "_global_grad_norm", None)

    def _shard(self, name: str, parameter: torch.nn.Parameter) -> Shard:
        shard = self._make(name, parameter)
        experts = getattr(parameter, "group_name", "")
        # Experts are replicated over fewer ranks than the other parameters.
        return replace(shard, sharding=f"{shard.sharding} {experts}") if experts else shard

    def _make(self, name: str, parameter: torch.nn.Parameter) -> Shard:
        if self._tensors is None:
            return plain_shard(name, parameter)
        partitioned: Any = parameter if hasattr(parameter, "ds_numel") else None
        shape = tuple(partitioned.ds_shape if partitioned is not None else parameter.shape)
        master_slice = self._tensors.slices.get(id(parameter))
        if master_slice is not None:
            return master_slice_shard(name, shape, parameter, master_slice)
        held = parameter if partitioned is None else partitioned.ds_tensor
        if held.device != self.device:
            # Masters on the host, weights on an accelerator: one monitor reads one device.
            return absent_shard(
                name, shape, held.dtype, self.device, requires_grad=parameter.requires_grad
            )
        if partitioned is None:
            return _not_stepped(plain_shard(name, parameter))
        return _partition_shard(name, shape, partitioned)


def _read(wrapper: Any) -> OptimizerTensors:
    kind = type(wrapper).__name__
    if getattr(wrapper, "zenflow", False) or getattr(wrapper, "swap_optimizer", False):
        raise LayoutError(
            f"{kind} moves its master weights out of memory (ZenFlow or NVMe offload), so distmon "
            "cannot observe them"
        )
    tensors = read_optimizer_wrapper(wrapper)
    if tensors is None:
        raise LayoutError(
            f"distmon does not support DeepSpeed's {kind}: the location of its weights is unknown"
        )
    return tensors


def _scales_loss(engine: Any) -> bool:
    scalers = (
        (engine, "torch_autocast_z0_gradscaler"),
        (engine.optimizer, "torch_autocast_gradscaler"),
    )
    return bool(engine.fp16_enabled() or any(getattr(*scaler, None) for scaler in scalers))


def _refuse_tensor_parallel(engine: Any) -> None:
    # A pipeline engine counts its stages as model parallel; only slices are tensor parallel.
    slices = getattr(engine.mpu, "get_slice_parallel_world_size", None)
    size = slices() if slices is not None else getattr(engine, "mp_world_size", 1)
    if size > 1:
        raise LayoutError(
            f"the model is sharded over {size} tensor-parallel ranks, which distmon does not "
            "support under DeepSpeed"
        )


def _partition_shard(name: str, shape: tuple[int, ...], parameter: Any) -> Shard:
    """Return the shard of a stage-3 parameter that no optimizer owns, in the model's own dtype."""
    ranks = torch.distributed.get_process_group_ranks(parameter.ds_process_group)
    rank, size = ranks.index(torch.distributed.get_rank()), parameter.ds_tensor.numel()
    length = partition_length(parameter.ds_numel, rank, size)
    return PartitionShard(
        name=name,
        global_shape=shape,
        dtype=parameter.ds_tensor.dtype,
        region=flat_region(rank * size, length, parameter.ds_numel),
        gate=parameter,
        parameter=parameter,
        sharding=sharded_over(ranks),
        length=length,
    )


def _not_stepped(shard: Shard) -> Shard:
    """Return the shard without its gradient, which DeepSpeed neither averages nor applies."""
    return NotSteppedShard(**{**description(shard), "paths": None}, shard=shard)


@dataclass(slots=True, kw_only=True, eq=False)
class PartitionShard(Shard):
    """A rank's part of a stage-3 parameter that no optimizer owns."""

    parameter: Any
    length: int

    def weight(self) -> torch.Tensor:
        weight: torch.Tensor = self.parameter.ds_tensor.data.view(-1)[: self.length]
        return weight

    def grad(self) -> None:
        return None


@dataclass(slots=True, kw_only=True, eq=False)
class NotSteppedShard(Shard):
    """A whole parameter that no optimizer owns."""

    shard: Shard

    def weight(self) -> torch.Tensor:
        return self.shard.weight()

    def grad(self) -> None:
        return None
