"""One SUM and one MAX all_reduce carry everything that ranks tell each other in an observation.

The SUM buffer (float64) holds the rows of all parameters, one telemetry slot per rank (zeros on
the others, so the sum is a gather), the losses since the last observation, and the gradients of the
blocks. The MAX buffer
(float32) holds the maxima. Both have the same size on every rank whatever happens locally: an error
travels as text inside the rank's slot, so nobody waits for anybody.
"""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from csrc_triton.row_layout import BINS, MAX_COLUMNS, SUM_COLUMNS
from distmon.device_marks import DeviceMark, to_device
from distmon.errors import CollectiveError, PlanMismatchError
from distmon.metrics import RANK_METRICS
from distmon.probe import Rows

Floats = NDArray[np.float64]

_SLOT = {metric.name: i for i, metric in enumerate(RANK_METRICS)}
_TEXT_NUMBERS = 12
_BYTES_PER_NUMBER = 6  # a float64 holds 48 bits exactly
SLOT_SIZE = len(RANK_METRICS) + _TEXT_NUMBERS


class Ranks:
    """The ranks that observe together, on a process group of the monitor's own.

    Without an initialised process group it is a world of one. Creating it is a collective call.
    """

    def __init__(self, timeout_s: float, device: torch.device | None = None) -> None:
        """`device` is where the tensors will be that ranks exchange."""
        self.together = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if self.together else 0
        self.size = dist.get_world_size() if self.together else 1
        self._group = None
        self._seconds = 0.0
        if self.together:
            timeout = timedelta(seconds=timeout_s)
            self._group = dist.new_group(timeout=timeout, backend=_backend_for(device))
        self._told_at = self._board() if self.together else None

    def _board(self) -> Any:
        """A place of the monitor's own in the job's key-value store, used after a failure only."""
        c10d: Any = dist.distributed_c10d
        name = getattr(self._group, "group_name", "")
        return c10d.PrefixStore(f"distmon/{name}", c10d._get_default_store())

    def whereabouts(self, step: int, patience_s: float = 5.0) -> str:
        """After a failed collective: who got how far, in words. Waits a few seconds at most.

        Every rank that finds the ranks apart says where it is; the one that says nothing is
        the one that is missing.
        """
        if self._told_at is None:
            return ""
        steps, told = {self.rank: step}, {self.rank: time.time()}
        others = [rank for rank in range(self.size) if rank != self.rank]
        # The store may be gone with the process that served it; then nothing is known.
        with suppress(Exception):
            self._told_at.set(str(self.rank), f"{step} {told[self.rank]}")
            deadline = time.monotonic() + patience_s
            while len(steps) < self.size and time.monotonic() < deadline:
                for rank in others:
                    if rank not in steps and self._told_at.check([str(rank)]):
                        at, when = self._told_at.get(str(rank)).split()
                        steps[rank], told[rank] = int(at), float(when)
                time.sleep(0.05)
        words = [
            f"rank {_listed(r for r in sorted(steps) if steps[r] == at)} at step {at}"
            for at in sorted({*steps.values()})
        ]
        if silent := [rank for rank in others if rank not in steps]:
            words.append(f"rank {_listed(silent)} did not come")
        late = told[self.rank] - max(
            (told[r] for r in others if r in told), default=told[self.rank]
        )
        if late > patience_s / 2:
            words.append(f"rank {self.rank} came {late:.0f} s after the others had given up")
        return "; ".join(words)

    def all_reduce(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType) -> None:
        """Reduce in place; on CUDA it is queued on the current stream and returns at once."""
        self.all_reduce_together((tensor, op))

    def all_reduce_together(self, *each: tuple[torch.Tensor, dist.ReduceOp.RedOpType]) -> None:
        """The same for several tensors side by side: ranks wait for each other only once."""
        if not self.together:
            return
        begin = time.perf_counter()
        try:
            works = [
                dist.all_reduce(tensor, op=op, group=self._group, async_op=True)
                for tensor, op in each
            ]
            for work in works:
                if work is not None:
                    work.wait()
        except Exception as error:
            raise CollectiveError(f"{type(error).__name__}: {error}") from error
        finally:
            self._seconds += time.perf_counter() - begin

    def take_seconds(self) -> float:
        """The time of this thread in collectives since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def meet(self, device: torch.device) -> None:
        """Return when all ranks have come here."""
        mark = torch.zeros(1, device=device)
        self.all_reduce(mark, dist.ReduceOp.SUM)
        mark.cpu()

    def hosts(self, device: torch.device) -> tuple[str, ...]:
        """The host name of every rank, cut to 32 bytes. A collective call."""
        raw = socket.gethostname().encode("ascii", "replace")[:32].ljust(32, b"\0")
        table = self.sum_by_rank(torch.tensor([*raw], dtype=torch.uint8, device=device))
        names = (bytes(row).rstrip(b"\0").decode("ascii", "replace") for row in table.tolist())
        return tuple(names)

    def sum_by_rank(self, values: torch.Tensor) -> torch.Tensor:
        """Gather equal-sized integer tables from all ranks: [size, *values.shape]."""
        table = torch.zeros((self.size, *values.shape), dtype=values.dtype, device=values.device)
        table[self.rank] = values
        self.all_reduce(table, dist.ReduceOp.SUM)
        return table

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Give everybody the tensor of the rank `source`, in place."""
        if self.together:
            dist.broadcast(tensor, src=source, group=self._group)
        return tensor

    def agree(self, what: Mapping[str, int], ready: bool, device: torch.device) -> None:
        """Raise on every rank alike when a rank is not ready or is set up differently.

        `what` are hashes, by name, of everything that must be the same. A rank that is not ready
        raises its own error; the others learn here that it does.
        """
        mine = torch.tensor([int(ready), *what.values()], dtype=torch.int64, device=device)
        table = self.sum_by_rank(mine).T.tolist()
        unready = [str(rank) for rank, is_ready in enumerate(table[0]) if not is_ready]
        if unready:
            raise PlanMismatchError(
                f"rank {', '.join(unready)} could not attach; its own message says why"
            )
        for name, hashes in zip(what, table[1:], strict=True):
            if others := minority(hashes):
                raise PlanMismatchError(
                    f"rank {', '.join(map(str, others))} would observe with other {name} than the "
                    f"other {self.size - len(others)} ranks; every rank must attach the same model "
                    "with the same config and version"
                )

    def close(self) -> None:
        """Give the process group back; harmless when the default group is already gone."""
        if self._group is not None and dist.is_initialized():
            # The default group may have been destroyed and made anew since.
            with suppress(Exception):
                dist.destroy_process_group(self._group)
        self._group = None
        self.together = False


def _backend_for(device: torch.device | None) -> str | None:
    """gloo for weights on the host in a job that has only told its accelerator to communicate, as
    with an offloaded optimizer; None for the job's own backend."""
    c10d: Any = dist.distributed_c10d
    served = {d.type for d in getattr(c10d._get_default_group(), "_device_types", ())}
    if device is None or device.type != "cpu" or not served or "cpu" in served:
        return None
    return "gloo"


@dataclass(frozen=True)
class Reduced:
    """What every rank knows after the two collectives, on the host."""

    sums: Floats
    maxima: Floats
    bins: Floats | None
    ranks: Mapping[str, Floats]
    errors: Mapping[int, str]
    """Text by rank that could not observe."""
    losses: Floats
    """Mean over ranks by step since the last observation."""
    loss_given: NDArray[np.bool_]
    """Which of those steps had a loss on any rank."""
    addends: Floats
    """The sums that `AddedGradients` asked for."""
    blocks: Floats
    """The sums that `BackwardNorms` asked for."""

    def losses_by_step(self, steps: Sequence[int]) -> list[tuple[int, float]]:
        """The losses that there are, with the numbers of their steps."""
        return [(steps[i], float(self.losses[i])) for i in np.flatnonzero(self.loss_given).tolist()]


class Buffers:
    """The two buffers of one monitor and the views of their parts, allocated once."""

    def __init__(
        self,
        parameters: int,
        ranks: Ranks,
        bins: bool,
        loss_slots: int,
        device: torch.device,
        addends: int = 0,
        blocks: int = 0,
    ) -> None:
        self._ranks = ranks
        columns = len(SUM_COLUMNS)
        sizes = (
            parameters * columns,
            parameters * BINS if bins else 0,
            ranks.size * SLOT_SIZE,
            2 * loss_slots,
            addends,
            blocks,
        )
        self._sum = torch.zeros(sum(sizes), dtype=torch.float64, device=device)
        self._max = torch.zeros(parameters * len(MAX_COLUMNS), dtype=torch.float32, device=device)
        parts = torch.split(self._sum, [*sizes])
        rows, histogram, slots, losses, self.addends, self.blocks = parts
        self.rows = Rows(
            sums=rows.view(parameters, columns),
            maxima=self._max.view(parameters, len(MAX_COLUMNS)),
            bins=histogram.view(parameters, BINS) if bins else None,
        )
        self._slots = slots.view(ranks.size, SLOT_SIZE)
        self._losses = losses.view(2, loss_slots)
        self._host_sum, self._host_max = self._on_host()
        seen = [part.numpy() for part in torch.split(self._host_sum, [*sizes])]
        self._seen_sums = seen[0].reshape(parameters, columns)
        self._seen_bins = seen[1].reshape(parameters, BINS) if bins else None
        self._seen_slots = seen[2].reshape(ranks.size, SLOT_SIZE)
        self._seen_losses = seen[3].reshape(2, loss_slots)
        self._seen_addends, self._seen_blocks = seen[4:]
        self._seen_maxima = self._host_max.numpy().reshape(parameters, -1)
        self._host_slot = torch.zeros(SLOT_SIZE, dtype=torch.float64)
        self._copied: DeviceMark | None = None

    def _on_host(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the reduced numbers of both buffers are read."""
        pinned = self._sum.is_cuda
        return (
            torch.empty_like(self._sum, device="cpu", pin_memory=pinned),
            torch.empty_like(self._max, device="cpu", pin_memory=pinned),
        )

    @property
    def nbytes(self) -> int:
        """Bytes that one rank sends into the collectives of one observation."""
        return sum(t.numel() * t.element_size() for t in (self._sum, self._max))

    def put_owners(self, columns: Floats) -> None:
        """Who owns which parameter: the first of the summed columns."""
        owners = to_device(torch.from_numpy(columns), self._sum.device)
        self.rows.sums[:, : columns.shape[1]] = owners

    def put_telemetry(
        self, values: Mapping[str, float], checksums: torch.Tensor | Sequence[int], error: str
    ) -> None:
        """Fill this rank's slot and clear the others; `checksums` are int64 by replica class."""
        self._host_slot.numpy()[:] = _slot_of(values, error)
        self._slots.zero_()
        mine = self._slots[self._ranks.rank]
        mine.copy_(to_device(self._host_slot, mine.device))
        first = _SLOT["checksum0"]
        mine[first : first + len(checksums)] = torch.as_tensor(checksums)

    def put_losses(self, values: torch.Tensor | Floats, given: Floats) -> None:
        """Losses by step since the last observation, and 1 where this rank has one."""
        there = to_device(torch.from_numpy(given), self._sum.device)
        self._losses.zero_()
        self._losses[0, : len(given)] = torch.where(there > 0, torch.as_tensor(values), 0.0)
        self._losses[1, : len(given)] = there

    def take_rows(self, other: Buffers) -> None:
        """What was measured into `other` and not sent yet."""
        mine, theirs = self.rows, other.rows
        mine.sums.copy_(theirs.sums)
        mine.maxima.copy_(theirs.maxima)
        if mine.bins is not None and theirs.bins is not None:
            mine.bins.copy_(theirs.bins)
        self.addends.copy_(other.addends)

    def clear(self) -> None:
        """Make everything that this rank sends add nothing."""
        self._sum.zero_()
        self._max.fill_(-torch.inf)

    def start(self) -> None:
        """Enter the two collectives and queue the copy to the host. Does not wait on CUDA."""
        self._ranks.all_reduce_together(
            (self._sum, dist.ReduceOp.SUM), (self._max, dist.ReduceOp.MAX)
        )
        self._copy_to_host()

    def _copy_to_host(self) -> None:
        self._host_sum.copy_(self._sum, non_blocking=True)
        self._host_max.copy_(self._max, non_blocking=True)
        self._copied = DeviceMark() if self._sum.is_cuda else None

    def finish(self, steps: int) -> Reduced:
        """The reduced numbers; `steps` is how many losses are meant.

        Most are views that are good until the next observation is measured. Called some steps
        after `start` on CUDA, when the copy is long done.
        """
        if self._copied is not None:
            self._copied.wait()
        loss_sum, loss_count = self._seen_losses[:, :steps]
        texts = self._seen_slots[:, len(RANK_METRICS) :]
        errors = map(_unpack_text, texts) if texts.any() else ()
        given = loss_count > 0
        return Reduced(
            sums=self._seen_sums,
            maxima=self._seen_maxima.astype(np.float64),
            bins=self._seen_bins,
            ranks=dict(zip(_SLOT, self._seen_slots.T.copy(), strict=False)),
            errors={rank: text for rank, text in enumerate(errors) if text},
            losses=np.divide(loss_sum, loss_count, where=given, out=np.full(steps, np.nan)),
            loss_given=given,
            addends=self._seen_addends,
            blocks=self._seen_blocks,
        )


class HostBuffers(Buffers):
    """Buffers of a model on the CPU: the reduced numbers are read where they were sent from.

    And in numpy: after a step of training all code is cold, and an operation of torch takes longer
    than what it does here.
    """

    def _on_host(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._sum, self._max

    def put_owners(self, columns: Floats) -> None:
        self._seen_sums[:, : columns.shape[1]] = columns

    def put_telemetry(
        self, values: Mapping[str, float], checksums: torch.Tensor | Sequence[int], error: str
    ) -> None:
        self._seen_slots.fill(0)
        mine = self._seen_slots[self._ranks.rank]
        mine[:] = _slot_of(values, error)
        first = _SLOT["checksum0"]
        mine[first : first + len(checksums)] = checksums

    def put_losses(self, values: torch.Tensor | Floats, given: Floats) -> None:
        self._seen_losses.fill(0)
        self._seen_losses[0, : len(given)] = np.where(given > 0, values, 0.0)
        self._seen_losses[1, : len(given)] = given

    def _copy_to_host(self) -> None:
        pass


def buffers_on(device: torch.device) -> type[Buffers]:
    """The kind of buffers for tensors on `device`."""
    return HostBuffers if device.type == "cpu" else Buffers


def _slot_of(values: Mapping[str, float], error: str) -> list[float]:
    return [*(values.get(name, 0.0) for name in _SLOT), *_pack_text(error)]


def minority(values: Sequence[float]) -> list[int]:
    """Ranks whose value is not the most frequent one; with a tie the lowest rank's counts."""
    most, _ = Counter(values).most_common(1)[0]  # of equal ones the first that appeared
    return [rank for rank, value in enumerate(values) if value != most]


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))


def _pack_text(text: str) -> list[float]:
    if not text:
        return [0.0] * _TEXT_NUMBERS
    raw = text.encode("ascii", "replace")[: _TEXT_NUMBERS * _BYTES_PER_NUMBER]
    raw = raw.ljust(_TEXT_NUMBERS * _BYTES_PER_NUMBER, b"\0")
    parts = range(0, len(raw), _BYTES_PER_NUMBER)
    return [float(int.from_bytes(raw[i : i + _BYTES_PER_NUMBER], "little")) for i in parts]


def _unpack_text(numbers: Sequence[float] | Floats) -> str:
    raw = b"".join(int(n).to_bytes(_BYTES_PER_NUMBER, "little") for n in numbers)
    return raw.rstrip(b"\0").decode("ascii", "replace")
