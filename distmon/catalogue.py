"""The table of all parameters that any rank holds, agreed on once, when the monitor is attached.

Most runs need one small collective for it: the ranks find that all of them see the same model.
Where they do not, as with pipeline stages, one rank of each kind tells its list to the others.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from distmon.errors import PlanMismatchError
from distmon.layout import Shard, absent_shard
from distmon.reduce import Ranks
from distmon.sampling import hash48


@dataclass(frozen=True)
class Entry:
    """What all ranks have to know of a parameter, whether they hold some of it or not."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool
    may_be_addend: bool


@dataclass(frozen=True)
class ModuleEntry:
    """A module that may be a block of the backward pass."""

    name: str
    kind: str
    """Equal for modules that repeat each other."""


_Named = TypeVar("_Named", Entry, ModuleEntry)


@dataclass(frozen=True)
class Holding:
    """What one rank tells the others that it has."""

    parameters: Sequence[Entry] = ()
    modules: Sequence[ModuleEntry] = ()


def describe(shards: Iterable[Shard]) -> list[Entry]:
    """The entries of this rank's own shards."""
    return [
        Entry(
            s.name,
            s.global_shape,
            str(s.dtype).removeprefix("torch."),
            s.requires_grad(),
            s.may_be_addend,
        )
        for s in shards
    ]


def exchange(ranks: Ranks, mine: Holding, device: torch.device) -> dict[int, Holding]:
    """What different ranks hold, each under the lowest rank that holds it.

    A collective call. A rank that has nothing to show, because it could not look at its model,
    gives an empty holding.
    """
    parameters = [
        [e.name, e.shape, e.dtype, e.requires_grad, e.may_be_addend] for e in mine.parameters
    ]
    text = json.dumps([parameters, [[e.name, e.kind] for e in mine.modules]])
    raw = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    table = ranks.sum_by_rank(torch.tensor([hash48(text), len(raw)], device=device)).tolist()
    tellers: dict[int, int] = {}
    for rank, (key, _) in enumerate(table):
        tellers.setdefault(key, rank)
    if len(tellers) == 1:
        return {0: mine}
    holdings = {}
    for rank in tellers.values():
        told = raw if rank == ranks.rank else torch.zeros(table[rank][1], dtype=torch.uint8)
        told = ranks.broadcast(told.to(device), rank).cpu()
        rows, modules = json.loads(told.numpy().tobytes())
        holdings[rank] = Holding(
            [Entry(name, tuple(shape), *rest) for name, shape, *rest in rows],
            [ModuleEntry(*each) for each in modules],
        )
    return holdings


def merge(lists: Mapping[int, Sequence[Entry]]) -> list[Entry]:
    """One table in layer order; PlanMismatchError when a name stands for different parameters."""
    table: dict[str, tuple[int, Entry]] = {}
    for rank, entries in lists.items():
        for entry in entries:
            first, known = table.setdefault(entry.name, (rank, entry))
            if (known.shape, known.dtype) != (entry.shape, entry.dtype):
                raise PlanMismatchError(
                    f"{entry.name} is {known.dtype} {known.shape} on rank {first} and {entry.dtype}"
                    f" {entry.shape} on rank {rank}; every rank must attach the same model, and "
                    "stages of a pipeline must call their parameters as the whole model does, with "
                    "`rename` where they count layers anew"
                )
    merged = [entry for _, entry in table.values()]
    return merged if len(lists) == 1 else _in_layer_order(merged)


def merge_modules(lists: Collection[Sequence[ModuleEntry]]) -> list[ModuleEntry]:
    """The modules of all ranks in layer order, each once."""
    merged = {entry.name: entry for entries in lists for entry in entries}
    return [*merged.values()] if len(lists) == 1 else _in_layer_order([*merged.values()])


def _in_layer_order(entries: Sequence[_Named]) -> list[_Named]:
    """Order of first appearance, but the numbered members of a stack in order of their numbers.

    Interleaved pipeline stages list the blocks 0, 1, 4, 5 on one rank and 2, 3, 6, 7 on the next.
    """
    first: dict[str, int] = {}
    keys = []
    for place, entry in enumerate(entries):
        parts = entry.name.split(".")
        at = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        stack = entry.name if at is None else ".".join(parts[:at])
        number = -1 if at is None else int(parts[at])
        keys.append((first.setdefault(stack, place), number, place))
    return [entries[i] for i in sorted(range(len(entries)), key=keys.__getitem__)]


def complete(table: Sequence[Entry], mine: Sequence[Shard], device: torch.device) -> list[Shard]:
    """A shard for every entry of the table; those that are not here are absent ones."""
    held = {shard.name: shard for shard in mine}
    return [
        held.get(e.name)
        or absent_shard(
            e.name,
            e.shape,
            getattr(torch, e.dtype),
            device,
            requires_grad=e.requires_grad,
            may_be_addend=e.may_be_addend,
        )
        for e in table
    ]
