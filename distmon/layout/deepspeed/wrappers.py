"""DeepSpeed's optimizer wrappers: what each of them steps, and on behalf of which parameters.

Every function takes the wrapper and gives the pieces by `id` of the parameter, together with the
tensors that the inner optimizer steps for each of its param groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from distmon.layout.deepspeed.pieces import Piece, flat_region
from distmon.layout.shard import Everything

Tensors = Sequence[torch.Tensor]


class Owned(NamedTuple):
    """What an optimizer owns here."""

    pieces: dict[int, Piece]
    """By id of the model's parameter."""
    masters: list[list[torch.Tensor]]
    """By param group."""


def pieces_of(wrapper: Any) -> Owned | None:
    """What the wrapper owns; None when it is of a kind that is not known."""
    for attribute, read in _READERS.items():
        if hasattr(wrapper, attribute):
            return read(wrapper)
    return None


def _sub_groups(wrapper: Any) -> Owned:
    """Stage 3: every parameter is cut over all ranks; sub-groups are stepped one by one."""
    masters: list[list[torch.Tensor]] = [[] for _ in wrapper.optimizer.param_groups]
    pieces: dict[int, Piece] = {}
    for number, parameters in enumerate(wrapper.fp16_groups):
        master = wrapper.fp32_partitioned_groups_flat[number]
        masters[wrapper.sub_group_to_group_id[number]].append(master)
        for place, parameter in enumerate(parameters):
            _, begin, size = wrapper.grad_position[wrapper.get_param_id(parameter)]
            rank, ranks = _partition_group(parameter, wrapper.dp_process_group)
            length = partition_length(parameter.ds_numel, rank, size)
            pieces[id(parameter)] = Piece(
                master,
                begin,
                length,
                flat_region(rank * size, length, parameter.ds_numel),
                cut_over(ranks),
                _waiting_in_sub_group(wrapper, number, place, length),
            )
    return Owned(pieces, masters)


def partition_length(numel: int, rank: int, size: int) -> int:
    """Elements of a parameter among the `size` that a rank holds; the last ranks hold padding."""
    return max(0, min(numel - rank * size, size))


def _waiting_in_sub_group(
    wrapper: Any, number: int, place: int, length: int
) -> Callable[[], torch.Tensor | None]:
    def waiting() -> torch.Tensor | None:
        gradients = wrapper.averaged_gradients.get(number)
        return None if gradients is None else gradients[place].view(-1)[:length]

    return waiting


def _flat_partitions(wrapper: Any) -> Owned:
    """Stages 1 and 2: the parameters of a group lie in one vector that is cut over all ranks."""

    def waiting_in(group: int) -> Callable[[int, int], Callable[[], torch.Tensor | None]]:
        return _WaitingPartition(wrapper, group).at

    return _cut_vectors(
        wrapper,
        wrapper.bit16_groups,
        wrapper.bit16_groups_flat,
        wrapper.single_partition_of_fp32_groups,
        waiting_in,
    )


def _flat_partitions_of_bf16(wrapper: Any) -> Owned:
    """As stage 1, with gradients added up in a vector of their own."""

    def waiting_in(group: int) -> Callable[[int, int], Callable[[], torch.Tensor | None]]:
        vector = wrapper.fp32_groups_gradient_flat_partition[group]
        return lambda begin, length: lambda: vector[begin : begin + length]

    return _cut_vectors(
        wrapper,
        wrapper.bf16_groups,
        wrapper.bf16_groups_flat,
        wrapper.fp32_groups_flat_partition,
        waiting_in,
    )


def _cut_vectors(
    wrapper: Any,
    groups: Sequence[Tensors],
    vectors: Tensors,
    masters: Tensors,
    waiting_in: Callable[[int], Callable[[int, int], Callable[[], torch.Tensor | None]]],
) -> Owned:
    pieces: dict[int, Piece] = {}
    for number, (parameters, vector, master) in enumerate(
        zip(groups, vectors, masters, strict=True)
    ):
        group = wrapper.real_dp_process_group[number]
        rank, ranks = _rank_and_ranks(group)
        size = vector.numel() // len(ranks)
        waiting = waiting_in(number)
        for parameter in parameters:
            # Where the parameter really lies: its place in the list is not where it is when
            # gradients go round robin, and there may be padding in between.
            offset = (parameter.data_ptr() - vector.data_ptr()) // vector.element_size()
            first = max(offset, rank * size)
            length = max(0, min(offset + parameter.numel(), (rank + 1) * size) - first)
            begin = first - rank * size if length else 0
            pieces[id(parameter)] = Piece(
                master,
                begin,
                length,
                flat_region(first - offset, length, parameter.numel()),
                cut_over(ranks),
                waiting(begin, length),
            )
    return Owned(pieces, [[master] for master in masters])


class _WaitingPartition:
    """The list of gradients that stages 1 and 2 flatten into `master.grad` when they step.

    Where each begins in the vector is worked out once; the gradients themselves are never kept.
    """

    def __init__(self, wrapper: Any, group: int) -> None:
        self._wrapper = wrapper
        self._group = group
        self._index: dict[int, int] = {}

    def at(self, begin: int, length: int) -> Callable[[], torch.Tensor | None]:
        def waiting() -> torch.Tensor | None:
            gradients = self._wrapper.averaged_gradients.get(self._group)
            if gradients is None:
                return None
            if not self._index:
                begins = accumulate((g.numel() for g in gradients), initial=0)
                # Of pieces without elements the last is at the same place as what follows them.
                self._index = {
                    b: i for i, (b, _) in enumerate(zip(begins, gradients, strict=False))
                }
            place = self._index.get(begin)
            if place is None or place >= len(gradients) or gradients[place].numel() != length:
                return None
            return gradients[place].reshape(-1)  # type: ignore[no-any-return]

        return waiting


def _whole_vectors(wrapper: Any) -> Owned:
    """Stage 0 with a fused optimizer: one vector per group, whole on every rank."""
    pieces: dict[int, Piece] = {}
    for parameters, master in zip(wrapper.fp16_groups, wrapper.fp32_groups_flat, strict=True):
        begins = accumulate((p.numel() for p in parameters), initial=0)
        for parameter, begin in zip(parameters, begins, strict=False):
            pieces[id(parameter)] = _whole(parameter, master, begin)
    return Owned(pieces, [[master] for master in wrapper.fp32_groups_flat])


def _whole_copies(wrapper: Any) -> Owned:
    """Stage 0 with any other optimizer: a copy of each parameter, whole on every rank."""
    pieces = {
        id(parameter): _whole(parameter, master, 0)
        for parameters, masters in zip(wrapper.fp16_groups, wrapper.fp32_groups, strict=True)
        for parameter, master in zip(parameters, masters, strict=True)
    }
    return Owned(pieces, [[*masters] for masters in wrapper.fp32_groups])


def _whole(parameter: torch.Tensor, master: torch.Tensor, begin: int) -> Piece:
    def waiting() -> torch.Tensor | None:
        return None if parameter.grad is None else parameter.grad.reshape(-1)

    return Piece(master, begin, parameter.numel(), Everything(), "whole", waiting)


def cut_over(ranks: Sequence[int]) -> str:
    """The spread of what is cut over these ranks; a list of thousands would be a long name."""
    return f"cut over {len(ranks)} ranks {hash(tuple(ranks)):x}"


def _partition_group(parameter: Any, otherwise: Any) -> tuple[int, list[int]]:
    return _rank_and_ranks(getattr(parameter, "ds_process_group", otherwise))


def _rank_and_ranks(group: Any) -> tuple[int, list[int]]:
    """This rank's number in the group, and the ranks of the group."""
    ranks = dist.get_process_group_ranks(group)
    return ranks.index(dist.get_rank()), ranks


# By an attribute that only this wrapper has, from the most particular to the least.
_READERS: dict[str, Callable[[Any], Owned]] = {
    "fp32_partitioned_groups_flat": _sub_groups,
    "single_partition_of_fp32_groups": _flat_partitions,
    "fp32_groups_flat_partition": _flat_partitions_of_bf16,
    "fp32_groups_flat": _whole_vectors,
    "fp32_groups": _whole_copies,
}
