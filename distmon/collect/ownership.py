"""Which optimizer owns which parameter, and at which learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from csrc_triton.row_layout import SUM_COLUMNS
from distmon.collect.losses import Number, host_value, on_host
from distmon.errors import LayoutError
from distmon.layout import Shard

OWNERSHIP_COLUMNS = SUM_COLUMNS[:4]
LR_COLUMN = 3
"""Holders, requires_grad, in_optimizer and lr: what is known without reading a tensor."""
_MOST_SETS = 16
"""Sets of rows that are kept, by the tensors of param groups."""
_DECAY_IN_GRADIENT = (
    *(torch.optim.Adam, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax),
    *(torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RMSprop, torch.optim.Rprop),
)
"""Adaptive optimizers whose weight decay is a part of the gradient, unless a group says otherwise.
AdamW is an Adam whose groups do."""


class Ownership:
    """The table of parameters against optimizers and their param groups.

    Read anew at every observation: groups may be added and learning rates change.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        optimizers: Sequence[torch.optim.Optimizer],
        groups: Callable[[], Iterable[Mapping[str, Any]]] | None = None,
    ) -> None:
        """`groups`: returns the user's param groups, where those of the optimizers are others."""
        self.optimizers = [unwrap_optimizer(optimizer) for optimizer in optimizers]
        self._shards = shards
        self._groups = groups or self._groups_of_optimizers
        self._held: dict[int, list[int]] = {}
        self._known: set[int] = set()
        self.refresh()
        self._table = np.zeros((len(shards), len(OWNERSHIP_COLUMNS)))
        self.first_lr: Number = math.nan
        """Learning rate of the first param group when `columns` was last called."""
        self.device_rates: list[tuple[NDArray[np.int64], torch.Tensor]] = []
        """Rows and learning rates that were on a device then, as with a capturable optimizer."""
        for optimizer in self.optimizers:
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise LayoutError(
                    f"attach needs a torch.optim.Optimizer, not a {type(optimizer).__name__}"
                )
            tensors = [p for group in optimizer.param_groups for p in group["params"]]
            if groups is None and not any(id(p) in self._held for p in tensors):
                raise LayoutError(
                    f"none of the {len(tensors)} tensors in {type(optimizer).__name__} belongs to "
                    "the observed model: build the optimizer from this model's parameters, after "
                    "wrapping; if it steps copies, such as fp32 master weights, use "
                    "attach(model, hooks=False) without it, and call before_step() before its step "
                    "and after_step() when the weights are copied back"
                )
        self._known |= {id(p) for p in self._strangers()}

    def refresh(self) -> None:
        """Take in that shards have been replaced."""
        self._known.update(self._held)
        self._held = {}  # one tensor of an optimizer may hold shards of many parameters
        for i, shard in enumerate(self._shards):
            if shard.parameter is not None:
                self._held.setdefault(id(shard.parameter), []).append(i)
        self._gates = [shard.gate for shard in self._shards]
        self._holds = np.array([shard.parameter is not None for shard in self._shards])
        self._found: dict[tuple[int, ...], NDArray[np.int64]] = {}
        self._filled_for: tuple[list[bool], list[tuple[float, int]]] | None = None
        """Which shards required gradients, and rates and rows of the groups, when it was filled."""
        self._groups_changed = False
        self._sets: dict[tuple[int, ...], frozenset[int]] = {}

    def columns(self) -> NDArray[np.float64]:
        """Return [parameters, 4] in the order of OWNERSHIP_COLUMNS; the next call overwrites it."""
        required = [gate.requires_grad for gate in self._gates]
        owned = [
            (group.get("lr", math.nan), self._rows(group["params"])) for group in self._groups()
        ]
        rates = [(host_value(lr) if on_host(lr) else math.nan, id(rows)) for lr, rows in owned]
        if self._filled_for != (required, rates):
            self._fill(required, owned)
            self._filled_for = required, rates
        # Copied before a scheduler changes it.
        self.device_rates = [
            (rows, lr.detach().reshape(()).clone()) for lr, rows in owned if not on_host(lr)
        ]
        if owned:
            self.first_lr = rates[0][0] if on_host(owned[0][0]) else self.device_rates[0][1]
        return self._table

    def _fill(
        self, required: Sequence[bool], owned: Sequence[tuple[Number, NDArray[np.int64]]]
    ) -> None:
        """Write the table: mostly it is the same as at the last observation, and stays."""
        table = self._table
        table[:, 0] = self._holds
        table[:, 1] = np.logical_and(required, self._holds)
        table[:, 2:] = 0
        for lr, rows in owned:
            table[rows, 2] = 1
            if on_host(lr):
                table[rows, LR_COLUMN] = host_value(lr)

    def rows_of(self, optimizer: torch.optim.Optimizer) -> frozenset[int]:
        """Return the rows of the parameters in the optimizer's param groups, as they are now."""
        return self._set_of(optimizer.param_groups)

    def unowned(self) -> frozenset[int]:
        """Return the rows of the parameters that no optimizer owns."""
        return frozenset(range(len(self._shards))) - self._set_of(self._groups())

    def _set_of(self, groups: Iterable[Mapping[str, Any]]) -> frozenset[int]:
        """Return the rows of all tensors of these groups; cached until the tensors change."""
        ids = tuple([id(tensor) for group in groups for tensor in group["params"]])
        if ids not in self._sets:
            rows = frozenset(row for i in ids for row in self._held.get(i, ()))
            self._sets = {**dict([*self._sets.items()][-_MOST_SETS:]), ids: rows}
        return self._sets[ids]

    def added(self) -> list[torch.Tensor]:
        """Return the tensors that were put into a param group after attach and have no row.

        Each is returned once. What an optimizer owned beside the model at attach is not meant.
        """
        if not self._groups_changed:
            return []
        self._groups_changed = False
        new = [p for p in self._strangers() if id(p) not in self._known and p.requires_grad]
        self._known.update(map(id, new))
        return new

    def _strangers(self) -> Iterator[torch.Tensor]:
        return (p for group in self._groups() for p in group["params"] if id(p) not in self._held)

    def _groups_of_optimizers(self) -> Iterable[Mapping[str, Any]]:
        return (group for optimizer in self.optimizers for group in optimizer.param_groups)

    def _rows(self, tensors: Sequence[torch.Tensor]) -> NDArray[np.int64]:
        """Return the rows of the tensors of a param group; cached until the tensors change."""
        ids = tuple(map(id, tensors))
        if ids not in self._found:
            rows = [row for i in ids for row in self._held.get(i, ())]
            self._found[ids] = np.array(rows, dtype=np.int64)
            self._groups_changed = True
        return self._found[ids]


def unwrap_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer that steps, of a wrapper without step hooks such as accelerate's."""
    while not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, torch.optim.Optimizer):
            break
        optimizer = inner
    return optimizer


def found_inf(optimizer: torch.optim.Optimizer | None) -> torch.Tensor | None:
    """Return what a GradScaler found while a fused optimizer steps: 1 for a skipped step.

    Such an optimizer runs its hooks also for a skipped step. The result is a tensor on the device;
    do not wait for it.
    """
    found = getattr(optimizer, "found_inf", None)
    return found if isinstance(found, torch.Tensor) else None


def adaptive(optimizers: Sequence[torch.optim.Optimizer]) -> float:
    """Return 0 when updates scale with the gradients, as in SGD, else 1; NaN without optimizers."""
    plain = (torch.optim.SGD, torch.optim.ASGD, torch.optim.LBFGS)
    if not optimizers:
        return math.nan
    return 0.0 if any(isinstance(each, plain) for each in optimizers) else 1.0


def decay_per_step(optimizers: Sequence[torch.optim.Optimizer]) -> float:
    """Return the largest share of a weight that decay alone takes in one step: lr x weight decay.

    NaN without optimizers, and where a rate is on a device. Decay that is added to the gradient of
    an adaptive optimizer is divided by its size, and is not counted.
    """
    largest = math.nan
    for optimizer in optimizers:
        mixed = isinstance(optimizer, _DECAY_IN_GRADIENT)
        for group in optimizer.param_groups:
            lr, decay = group.get("lr"), group.get("weight_decay", 0.0)
            if lr is None or not on_host(lr) or not isinstance(decay, int | float):
                continue
            direct = group.get("decoupled_weight_decay", not mixed)
            taken = float(host_value(lr)) * float(decay) if direct else 0.0
            largest = taken if math.isnan(largest) else max(largest, taken)
    return largest
