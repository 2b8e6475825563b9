"""Spectral norms between observations: one sweep after another, on a channel of its own."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Final

import torch
import torch.distributed as dist

from distmon.collect.inside.catalog import SPECTRUM_SUMS, Catalog
from distmon.collect.inside.matrix_products import ShardProducts
from distmon.device import is_accelerator
from distmon.errors import CollectiveError
from distmon.layout import Shard
from distmon.reduce.channel import Channel, Pending
from distmon.reduce.spectra import Ready, SpectralState, Spectrum, sweep

ELEMENTS: Final = {"cpu": 1 << 22, "accelerator": 1 << 30}
"""Elements of the matrices of one sweep: it reads them 16 times. With more, the matrices take
turns. At 4 million a sweep takes about 50 ms of a CPU."""


class SpectraSweeps:
    """Begins a sweep at an observed step, and takes it on in the steps after it.

    All ranks begin the same sweeps in the same order, each at a step of its own: what they launch
    on the channel is then in the same order too. What fails here ends the sweeps, nothing else.
    """

    def __init__(
        self, catalog: Catalog, shards: Sequence[Shard], device: torch.device, rank: int
    ) -> None:
        """`shards` may change while it runs: parameters are replaced."""
        self._names = catalog.matrices
        self._shards = shards
        self._device = device
        self._rank = rank
        self._state = SpectralState()
        self._groups = _groups(catalog.matrices, shards, device)
        self._next_group = 0
        self._running: Generator[Ready, None, dict[str, Spectrum]] | None = None
        self._pending: Ready = Pending()
        self._channel: Channel | None = None

    def open(self, channel: Channel) -> None:
        """Use `channel` from now on; without one, nothing is done."""
        self._channel = channel

    @property
    def channel_name(self) -> str:
        """Name of its process group; empty without one."""
        return "" if self._channel is None else self._channel.name

    @property
    def busy(self) -> bool:
        """Whether a sweep is under way."""
        return self._running is not None

    def begin(self) -> None:
        """Begin a sweep, unless one is under way.

        What fails ends the sweeps: the next one would be of other matrices than on other ranks.
        """
        if self._channel is None or not self._groups or self.busy:
            return
        try:
            self._begin(self._channel)
        except Exception as error:
            self.close()
            raise _ended(error) from error

    def _begin(self, channel: Channel) -> None:
        group = self._groups[self._next_group % len(self._groups)]
        self._next_group += 1
        by_name = {shard.name: shard for shard in self._shards}
        matrices = {name: ShardProducts(by_name[name]) for name in group}

        def launch(tensor: torch.Tensor) -> Pending:
            return channel.launch((tensor, dist.ReduceOp.SUM))

        self._running = sweep(matrices, self._state, self._device, launch)
        self._pending = Pending()

    def advance(self) -> torch.Tensor | None:
        """Take the sweep as far as it has come, without waiting.

        Returns the rows of all matrices when it has ended: those of rank 0 count.
        """
        running = self._running
        if running is None:
            return None
        try:
            while self._pending.done():
                if isinstance(self._pending, Pending):
                    self._pending.join()
                self._pending = next(running)
        except StopIteration as end:
            self._running = None
            return self._rows(end.value)
        except Exception as error:
            self.close()
            raise _ended(error) from error
        return None

    def _rows(self, found: dict[str, Spectrum]) -> torch.Tensor:
        rows = torch.zeros((len(self._names), len(SPECTRUM_SUMS)), dtype=torch.float64)
        if self._rank == 0:
            for row, name in enumerate(self._names):
                if name in found:
                    each = found[name]
                    values = (1.0, each.norm, each.error, each.stable_rank)
                    rows[row] = torch.tensor(values, dtype=torch.float64)
        return rows

    def close(self) -> None:
        """Begin nothing more, and leave the channel."""
        channel, self._channel, self._running = self._channel, None, None
        if channel is not None:
            channel.close()


def _ended(error: Exception) -> Exception:
    if isinstance(error, CollectiveError):
        return error
    return RuntimeError(f"{type(error).__name__}: {error}; spectral norms are no longer estimated")


def _groups(names: Sequence[str], shards: Sequence[Shard], device: torch.device) -> list[list[str]]:
    """Return the matrices in groups of limited size, in order."""
    most = ELEMENTS["accelerator" if is_accelerator(device) else "cpu"]
    sizes = {shard.name: shard.numel for shard in shards}
    groups: list[list[str]] = []
    room = 0
    for name in names:
        if not groups or sizes[name] > room:
            groups.append([])
            room = most
        groups[-1].append(name)
        room -= sizes[name]
    return groups
