"""DeepSpeed's optimizer wrappers: which tensors each of them steps, and for which parameters.

There is one reader per kind of wrapper, chosen by `read_optimizer_wrapper`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from distmon.layout.deepspeed.master_slice import MasterSlice, flat_region
from distmon.layout.shard import Everything

Tensors = Sequence[torch.Tensor]
PendingGrad = Callable[[], torch.Tensor | None]
"""Returns the gradient of one slice before the step; None when there is none."""
GradReader = Callable[[int, int], PendingGrad]
"""Takes `begin` and `length` of a slice in the rank's partition."""


class OptimizerTensors(NamedTuple):
    """The tensors that the inner optimizer steps on this rank."""

    slices: dict[int, MasterSlice]
    """The slice of a master that belongs to a parameter, by `id` of the parameter."""
    masters: list[list[torch.Tensor]]
    """The masters of each param group."""


def read_optimizer_wrapper(wrapper: Any) -> OptimizerTensors | None:
    """Return the tensors that the wrapper steps; None for an unknown kind of wrapper."""
    for attribute, read in _READERS.items():
        if hasattr(wrapper, attribute):
            return read(wrapper)
    return None


def _sub_groups(wrapper: Any) -> OptimizerTensors:
    """Stage 3: every parameter is sharded over all ranks; sub-groups are stepped one by one."""
    masters: list[list[torch.Tensor]] = [[] for _ in wrapper.optimizer.param_groups]
    slices: dict[int, MasterSlice] = {}
    for number, parameters in enumerate(wrapper.fp16_groups):
        master = wrapper.fp32_partitioned_groups_flat[number]
        masters[wrapper.sub_group_to_group_id[number]].append(master)
        for index, parameter in enumerate(parameters):
            _, begin, size = wrapper.grad_position[wrapper.get_param_id(parameter)]
            rank, ranks = _partition_group(parameter, wrapper.dp_process_group)
            length = partition_length(parameter.ds_numel, rank, size)
            slices[id(parameter)] = MasterSlice(
                master,
                begin,
                length,
                flat_region(rank * size, length, parameter.ds_numel),
                sharded_over(ranks),
                _sub_group_grad(wrapper, number, index, length),
            )
    return OptimizerTensors(slices, masters)


def partition_length(numel: int, rank: int, size: int) -> int:
    """Return how many of a partition's `size` elements are not padding on this rank."""
    return max(0, min(numel - rank * size, size))


def _sub_group_grad(wrapper: Any, number: int, index: int, length: int) -> PendingGrad:
    def pending_grad() -> torch.Tensor | None:
        gradients = wrapper.averaged_gradients.get(number)
        return None if gradients is None else gradients[index].view(-1)[:length]

    return pending_grad


def _flat_partitions(wrapper: Any) -> OptimizerTensors:
    """Stages 1 and 2: one vector per param group, sharded over all ranks."""

    def grad_reader(group: int) -> GradReader:
        return _AveragedGradients(wrapper, group).at

    return _sharded_vectors(
        wrapper,
        wrapper.bit16_groups,
        wrapper.bit16_groups_flat,
        wrapper.single_partition_of_fp32_groups,
        grad_reader,
    )


def _flat_partitions_of_bf16(wrapper: Any) -> OptimizerTensors:
    """BF16 optimizer: as stage 1, with gradients accumulated in one fp32 vector per group."""

    def grad_reader(group: int) -> GradReader:
        vector = wrapper.fp32_groups_gradient_flat_partition[group]
        return lambda begin, length: lambda: vector[begin : begin + length]

    return _sharded_vectors(
        wrapper,
        wrapper.bf16_groups,
        wrapper.bf16_groups_flat,
        wrapper.fp32_groups_flat_partition,
        grad_reader,
    )


def _sharded_vectors(
    wrapper: Any,
    groups: Sequence[Tensors],
    vectors: Tensors,
    masters: Tensors,
    grad_reader: Callable[[int], GradReader],
) -> OptimizerTensors:
    slices: dict[int, MasterSlice] = {}
    for number, (parameters, vector, master) in enumerate(
        zip(groups, vectors, masters, strict=True)
    ):
        group = wrapper.real_dp_process_group[number]
        rank, ranks = _rank_and_ranks(group)
        size = vector.numel() // len(ranks)
        read_grad = grad_reader(number)
        for parameter in parameters:
            # Computed from addresses: with round-robin gradients the order in the vector differs
            # from the order in the list, and there may be padding between parameters.
            offset = (parameter.data_ptr() - vector.data_ptr()) // vector.element_size()
            first = max(offset, rank * size)
            length = max(0, min(offset + parameter.numel(), (rank + 1) * size) - first)
            begin = first - rank * size if length else 0
            slices[id(parameter)] = MasterSlice(
                master,
                begin,
                length,
                flat_region(first - offset, length, parameter.numel()),
                sharded_over(ranks),
                read_grad(begin, length),
            )
    return OptimizerTensors(slices, [[master] for master in masters])


class _AveragedGradients:
    """Reads the list of gradients that stages 1 and 2 flatten into `master.grad` in their step.

    Keeps the index of each gradient by its offset in the partition, but no gradient.
    """

    def __init__(self, wrapper: Any, group: int) -> None:
        self._wrapper = wrapper
        self._group = group
        self._index: dict[int, int] = {}

    def at(self, begin: int, length: int) -> PendingGrad:
        def pending_grad() -> torch.Tensor | None:
            gradients = self._wrapper.averaged_gradients.get(self._group)
            if gradients is None:
                return None
            if not self._index:
                begins = accumulate((g.numel() for g in gradients), initial=0)
                # A gradient without elements has the offset of its successor, which wins here.
                self._index = {
                    b: i for i, (b, _) in enumerate(zip(begins, gradients, strict=False))
                }
            index = self._index.get(begin)
            if index is None or index >= len(gradients) or gradients[index].numel() != length:
                return None
            return gradients[index].reshape(-1)  # type: ignore[no-any-return]

        return pending_grad


def _whole_vectors(wrapper: Any) -> OptimizerTensors:
    """Stage 0 with a fused optimizer: one unsharded vector per param group."""
    slices: dict[int, MasterSlice] = {}
    for parameters, master in zip(wrapper.fp16_groups, wrapper.fp32_groups_flat, strict=True):
        begins = accumulate((p.numel() for p in parameters), initial=0)
        for parameter, begin in zip(parameters, begins, strict=False):
            slices[id(parameter)] = _whole(parameter, master, begin)
    return OptimizerTensors(slices, [[master] for master in wrapper.fp32_groups_flat])


def _whole_copies(wrapper: Any) -> OptimizerTensors:
    """Stage 0 with any other optimizer: an unsharded copy of each parameter."""
    slices = {
        id(parameter): _whole(parameter, master, 0)
        for parameters, masters in zip(wrapper.fp16_groups, wrapper.fp32_groups, strict=True)
        for parameter, master in zip(parameters, masters, strict=True)
    }
    return OptimizerTensors(slices, [[*masters] for masters in wrapper.fp32_groups])


def _whole(parameter: torch.Tensor, master: torch.Tensor, begin: int) -> MasterSlice:
    def pending_grad() -> torch.Tensor | None:
        return None if parameter.grad is None else parameter.grad.reshape(-1)

    return MasterSlice(master, begin, parameter.numel(), Everything(), "whole", pending_grad)


def sharded_over(ranks: Sequence[int]) -> str:
    """Return `Shard.sharding` for these ranks, hashed because there may be thousands of them."""
    return f"sharded over {len(ranks)} ranks {hash(tuple(ranks)):x}"


def _partition_group(parameter: Any, default: Any) -> tuple[int, list[int]]:
    return _rank_and_ranks(getattr(parameter, "ds_process_group", default))


def _rank_and_ranks(group: Any) -> tuple[int, list[int]]:
    """Return this rank's index in the group, and the global ranks of the group."""
    ranks = dist.get_process_group_ranks(group)
    return ranks.index(dist.get_rank()), ranks


# By an attribute that identifies the wrapper; the first match wins, so specific ones come first.
_READERS: dict[str, Callable[[Any], OptimizerTensors]] = {
    "fp32_partitioned_groups_flat": _sub_groups,
    "single_partition_of_fp32_groups": _flat_partitions,
    "fp32_groups_flat_partition": _flat_partitions_of_bf16,
    "fp32_groups_flat": _whole_vectors,
    "fp32_groups": _whole_copies,
}
