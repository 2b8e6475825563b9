"""Group parameters by layer of a stack, from names such as `blocks.2.mlp.up.weight`."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from distmon.record.record import ParamTable
from distmon.rules.base import layer_of

Rows = NDArray[np.int64]
"""Indices into the parameter table."""
_SAME_SIZE: Final = 1.25
"""Sizes are estimated from norms; equal ones differ by less than this factor."""


@dataclass(frozen=True)
class Stack:
    """A numbered list of modules, such as `blocks`, in order of depth."""

    layers: tuple[str, ...]
    """`blocks.0`, `blocks.1`, ..."""
    rows: tuple[Rows, ...]
    """The parameters of each layer."""
    roles: Mapping[str, Rows]
    """From `blocks.*.mlp.up.weight` to that parameter in every layer that has parameters of these
    names; at least two layers. An embedding and a linear layer, in one nn.Sequential, have not."""


@lru_cache(maxsize=4)  # the names are the same in every record of a run
def stacks(names: tuple[str, ...]) -> tuple[Stack, ...]:
    """Return all stacks of at least two layers, in the order of their first parameters."""
    found: dict[str, dict[int, list[int]]] = {}
    for row, name in enumerate(names):
        stack, _, number = layer_of(name).rpartition(".")
        if number.isdigit():
            found.setdefault(stack, {}).setdefault(int(number), []).append(row)
    return tuple(
        _stack(names, stack, dict(sorted(layers.items())))
        for stack, layers in found.items()
        if len(layers) > 1
    )


def _stack(names: tuple[str, ...], stack: str, layers: Mapping[int, list[int]]) -> Stack:
    prefix = f"{stack}." if stack else ""
    roles: dict[tuple[tuple[str, ...], str], list[int]] = {}
    for number, rows in layers.items():
        kind = tuple(names[row].removeprefix(f"{prefix}{number}") for row in rows)
        for rest, row in zip(kind, rows, strict=True):
            roles.setdefault((kind, f"{prefix}*{rest}"), []).append(row)
    shared = {role: np.array(rows) for role, rows in roles.items() if len(rows) > 1}
    kinds = [*dict.fromkeys(kind for kind, _ in shared)]
    return Stack(
        layers=tuple(f"{prefix}{number}" for number in layers),
        rows=tuple(np.array(rows) for rows in layers.values()),
        roles={
            f"{role} ({kinds.index(kind) + 1})" if kinds.index(kind) else role: rows
            for (kind, role), rows in shared.items()
        },
    )


@lru_cache(maxsize=4)
def fingerprint(names: tuple[str, ...]) -> int:
    """Return a hash of the names, to check that saved rows refer to the same table."""
    return zlib.crc32("\n".join(names).encode())


def sizes(table: ParamTable) -> NDArray[np.float64]:
    """Estimate the elements of each parameter as norm ** 2 / mean square; NaN if unknown."""
    c = table.columns
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(c["weight_norm"] ** 2 / (c["weight_std"] ** 2 + c["weight_mean"] ** 2))


def roles_of_one_size(table: ParamTable, min_ndim: float) -> Iterator[tuple[str, Rows]]:
    """Yield the parameters of one role and one size, in order of depth."""
    size = sizes(table)
    for stack in stacks(table.names):
        for role, rows in stack.roles.items():
            large = rows[table.columns["ndim"][rows] >= min_ndim]
            for i, same_size in enumerate(_by_size(large, size)):
                if len(same_size) > 1:
                    yield f"{role} {i}" if i else role, same_size


def fewest_of(role: str) -> int:
    """Return how many parameters of a role it takes to call one of them odd.

    Two repetitions of a block are alike. Modules that stand side by side in an nn.Sequential
    (`*.weight`) may be of different kinds, such as an embedding and an output layer.
    """
    return 2 if "." in role.partition("*.")[2] else 3


def _by_size(rows: Rows, size: NDArray[np.float64]) -> list[Rows]:
    """Split rows by size: layers of an nn.Sequential may have equal names but other shapes."""
    known = rows[np.isfinite(size[rows]) & (size[rows] > 0)]
    order = np.argsort(size[known], kind="stable")
    larger = np.diff(np.log(size[known][order])) > math.log(_SAME_SIZE)
    return [known[np.sort(part)] for part in np.split(order, np.flatnonzero(larger) + 1)]
