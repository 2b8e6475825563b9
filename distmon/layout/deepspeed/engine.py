"""An engine as a whole: its inner optimizer, its param groups, the shards of its model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from distmon.errors import LayoutError
from distmon.layout.capture import capture
from distmon.layout.deepspeed.experts import WholeModelNames
from distmon.layout.deepspeed.pieces import flat_region, piece_shard
from distmon.layout.deepspeed.wrappers import Owned, cut_over, partition_length, pieces_of
from distmon.layout.modules import NamedModule, named_modules
from distmon.layout.plain import plain_shard
from distmon.layout.shard import Shard, absent_shard


class EngineLayout:
    """Who holds what under a DeepSpeed engine. Made once, after `deepspeed.initialize`.

    Weights are what the inner optimizer steps: the fp32 masters where there are any. Parameters
    that it does not own, such as frozen ones, are read as the model holds them.
    """

    def __init__(self, engine: Any) -> None:
        wrapper = engine.optimizer
        self._model: torch.nn.Module = engine.module
        self._owned: Owned | None = None
        if isinstance(wrapper, torch.optim.Optimizer):
            self.inner = wrapper
        else:
            inner = getattr(wrapper, "optimizer", None)
            if not isinstance(inner, torch.optim.Optimizer):
                raise LayoutError("this DeepSpeed engine has no optimizer, so nothing is trained")
            self.inner = inner
            self._owned = _read(wrapper)
        _refuse_tensor_parallel(engine)
        self._wrapper = wrapper
        self._names = WholeModelNames(self._model)
        self.scales_loss = _scales_loss(engine)
        """Whether a step may be left out because the loss was scaled too far."""
        self._param_groups: Sequence[dict[str, Any]] = self.inner.param_groups

    @property
    def device(self) -> torch.device:
        """Where the weights are that the optimizer steps."""
        if self._owned is not None:
            for masters in self._owned.masters:
                for master in masters:
                    return master.device
        tensors: list[torch.Tensor] = [p for g in self.inner.param_groups for p in g["params"]]
        return tensors[0].device

    def shards(self, include: Sequence[str] = ("*",), exclude: Sequence[str] = ()) -> list[Shard]:
        """The shards of all parameters of the whole model, in layer order."""
        return capture(self._model, include, exclude, self._names, self._shard)

    def modules(self) -> list[NamedModule]:
        """The modules of this rank, under the names of the whole model."""
        return named_modules(self._model, self._names)

    def groups(self) -> Iterator[Mapping[str, Any]]:
        """The param groups as the user set them up, with the tensors that are stepped for them."""
        # While it steps, the inner optimizer has one group after the other for its only one, and
        # loading a checkpoint gives it a new list.
        if len(self.inner.param_groups) == len(self._param_groups):
            self._param_groups = self.inner.param_groups
        if self._owned is None:
            yield from self._param_groups
            return
        for group, masters in zip(self._param_groups, self._owned.masters, strict=True):
            yield {**group, "params": masters}

    def grad_norm(self) -> float | torch.Tensor | None:
        """Total norm of the gradients that wait for the step, before clipping; None if unknown."""
        return getattr(self._wrapper, "_global_grad_norm", None)

    def _shard(self, name: str, parameter: torch.nn.Parameter) -> Shard:
        shard = self._make(name, parameter)
        experts = getattr(parameter, "group_name", "")
        # Experts are replicated over fewer ranks than the rest of the model.
        return replace(shard, spread=f"{shard.spread} {experts}") if experts else shard

    def _make(self, name: str, parameter: torch.nn.Parameter) -> Shard:
        if self._owned is None:
            return plain_shard(name, parameter)
        partitioned: Any = parameter if hasattr(parameter, "ds_numel") else None
        shape = tuple(partitioned.ds_shape if partitioned is not None else parameter.shape)
        piece = self._owned.pieces.get(id(parameter))
        if piece is not None:
            return piece_shard(name, shape, parameter, piece)
        held = parameter if partitioned is None else partitioned.ds_tensor
        if held.device != self.device:
            # Masters on the host beside weights on an accelerator: one monitor reads one device.
            return absent_shard(
                name, shape, held.dtype, self.device, requires_grad=parameter.requires_grad
            )
        if partitioned is None:
            return _not_stepped(plain_shard(name, parameter))
        return _partition_shard(name, shape, partitioned)


def _read(wrapper: Any) -> Owned:
    kind = type(wrapper).__name__
    if getattr(wrapper, "zenflow", False) or getattr(wrapper, "swap_optimizer", False):
        raise LayoutError(
            f"the masters of {kind} do not stay in memory with ZenFlow or NVMe offload, so they "
            "cannot be observed"
        )
    owned = pieces_of(wrapper)
    if owned is None:
        raise LayoutError(f"distmon does not know where DeepSpeed's {kind} keeps its weights")
    return owned


def _scales_loss(engine: Any) -> bool:
    scalers = (
        (engine, "torch_autocast_z0_gradscaler"),
        (engine.optimizer, "torch_autocast_gradscaler"),
    )
    return bool(engine.fp16_enabled() or any(getattr(*place, None) for place in scalers))


def _refuse_tensor_parallel(engine: Any) -> None:
    # To a pipeline its stages are model parallel too; its slices are the tensors that are cut.
    slices = getattr(engine.mpu, "get_slice_parallel_world_size", None)
    size = slices() if slices is not None else getattr(engine, "mp_world_size", 1)
    if size > 1:
        raise LayoutError(
            f"the model is cut over {size} tensor-parallel ranks, which distmon cannot tell apart "
            "under DeepSpeed"
        )


def _partition_shard(name: str, shape: tuple[int, ...], parameter: Any) -> Shard:
    """A parameter of stage 3 that no optimizer owns: the rank's range, in the model's own dtype."""
    ranks = torch.distributed.get_process_group_ranks(parameter.ds_process_group)
    rank, size = ranks.index(torch.distributed.get_rank()), parameter.ds_tensor.numel()
    length = partition_length(parameter.ds_numel, rank, size)
    return Shard(
        name=name,
        global_shape=shape,
        dtype=parameter.ds_tensor.dtype,
        region=flat_region(rank * size, length, parameter.ds_numel),
        weight=lambda: parameter.ds_tensor.data.view(-1)[:length],
        grad=lambda: None,
        gate=parameter,
        grad_is_unreadable=lambda: False,
        parameters=(parameter,),
        spread=cut_over(ranks),
    )


def _not_stepped(shard: Shard) -> Shard:
    """A whole parameter whose gradient, if any, is averaged and applied by nobody."""
    return replace(shard, grad=lambda: None, grad_is_unreadable=lambda: False, paths=None)
