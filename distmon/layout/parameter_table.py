"""The table of all parameters that any rank holds, agreed on once, when the monitor is attached.

Where all ranks hold the same model, one small collective confirms it. Where they do not, as with
pipeline stages, one rank of each kind sends its list to the others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from distmon.errors import PlanMismatchError
from distmon.layout import Shard, absent_shard


@dataclass(frozen=True)
class Entry:
    """A parameter in the table of all ranks, whether or not this rank holds a shard of it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool
    may_be_partial: bool


@dataclass(frozen=True)
class ModuleEntry:
    """A module that may be a block whose gradient gain is measured."""

    name: str
    kind: str
    """Equal for repetitions of the same block."""


_Named = TypeVar("_Named", Entry, ModuleEntry)


@dataclass(frozen=True)
class RankContents:
    """The parameters and modules that one rank reports to the others."""

    parameters: Sequence[Entry] = ()
    modules: Sequence[ModuleEntry] = ()
    inside: Sequence[ModuleEntry] = ()
    """What may be watched inside the model, by kind of statistics."""


def describe(shards: Iterable[Shard]) -> list[Entry]:
    """Return the table entries of this rank's own shards."""
    return [
        Entry(
            s.name,
            s.global_shape,
            str(s.dtype).removeprefix("torch."),
            s.requires_grad(),
            s.may_be_partial,
        )
        for s in shards
    ]


def parameter_names(contents: Mapping[int, RankContents]) -> list[str]:
    """Return the names of all parameters of all ranks, in the same order on every rank."""
    return [*dict.fromkeys(entry.name for each in contents.values() for entry in each.parameters)]


def held_shares(names: Sequence[str], shards: Iterable[Shard]) -> list[float]:
    """Return how much of each of the named parameters this rank holds, from 0 to 1."""
    shares = dict.fromkeys(names, 0.0)
    for shard in shards:
        shares[shard.name] = shard.weight().numel() / max(1, shard.numel)
    return [*shares.values()]


def merge(lists: Mapping[int, Sequence[Entry]]) -> list[Entry]:
    """Merge the entries of all ranks into one table in layer order.

    Raises PlanMismatchError when ranks disagree about the shape or dtype of a parameter.
    """
    table: dict[str, tuple[int, Entry]] = {}
    for rank, entries in lists.items():
        for entry in entries:
            first, known = table.setdefault(entry.name, (rank, entry))
            if (known.shape, known.dtype) != (entry.shape, entry.dtype):
                raise PlanMismatchError(
                    f"{entry.name} is {known.dtype} {known.shape} on rank {first} and {entry.dtype}"
                    f" {entry.shape} on rank {rank}; every rank must attach the same model, and "
                    "pipeline stages must use the parameter names of the whole model: pass "
                    "`rename` where a stage numbers its layers from 0"
                )
    merged = [entry for _, entry in table.values()]
    return merged if len(lists) == 1 else _in_layer_order(merged)


def merge_modules(lists: Collection[Sequence[ModuleEntry]]) -> list[ModuleEntry]:
    """Return the modules of all ranks in layer order, each once."""
    merged = {entry.name: entry for entries in lists for entry in entries}
    return [*merged.values()] if len(lists) == 1 else _in_layer_order([*merged.values()])


def _in_layer_order(entries: Sequence[_Named]) -> list[_Named]:
    """Return the entries by first appearance, with numbered layers of a stack in numeric order.

    Interleaved pipeline stages list the blocks 0, 1, 4, 5 on one rank and 2, 3, 6, 7 on the next.
    """
    first: dict[str, int] = {}
    keys = []
    for position, entry in enumerate(entries):
        parts = entry.name.split(".")
        at = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        stack = entry.name if at is None else ".".join(parts[:at])
        number = -1 if at is None else int(parts[at])
        keys.append((first.setdefault(stack, position), number, position))
    return [entries[i] for i in sorted(range(len(entries)), key=keys.__getitem__)]


def complete(table: Sequence[Entry], mine: Sequence[Shard], device: torch.device) -> list[Shard]:
    """Return a shard for every entry of the table; absent shards for those of other ranks."""
    held = {shard.name: shard for shard in mine}
    return [
        held.get(e.name)
        or absent_shard(
            e.name,
            e.shape,
            getattr(torch, e.dtype),
            device,
            requires_grad=e.requires_grad,
            may_be_partial=e.may_be_partial,
        )
        for e in table
    ]
