"""The monitor's own process group: collectives, and agreement between ranks at attach."""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from distmon.errors import CollectiveError, PlanMismatchError


class Ranks:
    """The ranks that observe together, on a process group of the monitor's own.

    Without an initialized process group it is a world of one. Creating it is a collective call.
    """

    def __init__(self, timeout_s: float, device: torch.device | None = None) -> None:
        """`device` is where the tensors are that ranks exchange."""
        self.together = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if self.together else 0
        self.size = dist.get_world_size() if self.together else 1
        self._group = None
        self._seconds = 0.0
        if self.together:
            timeout = timedelta(seconds=timeout_s)
            self._group = dist.new_group(timeout=timeout, backend=_backend_for(device))
        self._progress = self._progress_store() if self.together else None

    def all_reduce(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType) -> None:
        """Reduce in place; on CUDA the collective is queued on the current stream."""
        self.all_reduce_together((tensor, op))

    def all_reduce_together(self, *each: tuple[torch.Tensor, dist.ReduceOp.RedOpType]) -> None:
        """Reduce several tensors in place at once: ranks wait for each other only once."""
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
        """Return the time that this thread spent in collectives since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def barrier(self, device: torch.device) -> None:
        """Return when all ranks have called this."""
        mark = torch.zeros(1, device=device)
        self.all_reduce(mark, dist.ReduceOp.SUM)
        mark.cpu()

    def hosts(self, device: torch.device) -> tuple[str, ...]:
        """Return the host name of every rank, cut to 32 bytes. A collective call."""
        raw = socket.gethostname().encode("ascii", "replace")[:32].ljust(32, b"\0")
        table = self.gather(torch.tensor([*raw], dtype=torch.uint8, device=device))
        names = (bytes(row).rstrip(b"\0").decode("ascii", "replace") for row in table.tolist())
        return tuple(names)

    def slowest(self, seconds: float, device: torch.device) -> float:
        """Return the longest time of any rank, to the nanosecond. A collective call."""
        mine = torch.tensor([int(1e9 * seconds)], device=device)
        return float(self.gather(mine).max()) / 1e9

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Gather equal-sized integer tables from all ranks: [size, *values.shape]."""
        table = torch.zeros((self.size, *values.shape), dtype=values.dtype, device=values.device)
        table[self.rank] = values
        self.all_reduce(table, dist.ReduceOp.SUM)
        return table

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Broadcast the tensor of rank `source`, in place."""
        if self.together:
            dist.broadcast(tensor, src=source, group=self._group)
        return tensor

    def agree(self, hashes: Mapping[str, int], ready: bool, device: torch.device) -> None:
        """Raise PlanMismatchError on every rank when a rank is not ready or set up differently.

        `hashes` are of everything that must be the same, by name. A rank that is not ready raises
        its own error; the others learn here which rank it is.
        """
        mine = torch.tensor([int(ready), *hashes.values()], dtype=torch.int64, device=device)
        table = self.gather(mine).T.tolist()
        unready = [rank for rank, is_ready in enumerate(table[0]) if not is_ready]
        if unready:
            raise PlanMismatchError(
                f"rank {_listed(unready)} failed to attach; its own message says why"
            )
        for name, by_rank in zip(hashes, table[1:], strict=True):
            if others := minority(by_rank):
                rest = [rank for rank in range(self.size) if rank not in others]
                raise PlanMismatchError(
                    f"rank {_listed(others)} has different {name} from rank {_listed(rest)}; "
                    "attach the same model with the same config and version on every rank"
                )

    def describe_progress(self, step: int, patience_s: float = 5.0) -> str:
        """Describe which rank has reached which step, after a failed collective.

        Each rank publishes its step in the job's key-value store; a rank that publishes nothing is
        the missing one.
        """
        if self._progress is None:
            return ""
        steps, published = {self.rank: step}, {self.rank: time.time()}
        others = [rank for rank in range(self.size) if rank != self.rank]
        # The store may be gone with the process that served it; then nothing is known.
        with suppress(Exception):
            self._progress.set(str(self.rank), f"{step} {published[self.rank]}")
            deadline = time.monotonic() + patience_s
            while len(steps) < self.size and time.monotonic() < deadline:
                for rank in others:
                    if rank not in steps and self._progress.check([str(rank)]):
                        at, when = self._progress.get(str(rank)).split()
                        steps[rank], published[rank] = int(at), float(when)
                time.sleep(0.05)
        parts = [
            f"rank {_listed(r for r in sorted(steps) if steps[r] == at)} at step {at}"
            for at in sorted({*steps.values()})
        ]
        if missing := [rank for rank in others if rank not in steps]:
            parts.append(f"rank {_listed(missing)} did not respond")
        newest = max((published[r] for r in others if r in published), default=None)
        delay = 0.0 if newest is None else published[self.rank] - newest
        if delay > patience_s / 2:
            parts.append(f"rank {self.rank} arrived {delay:.0f} s after the others timed out")
        return "; ".join(parts)

    def close(self) -> None:
        """Destroy the process group; harmless when the default group is already gone."""
        if self._group is not None and dist.is_initialized():
            # The default group may have been destroyed and created anew since.
            with suppress(Exception):
                dist.destroy_process_group(self._group)
        self._group = None
        self.together = False

    def _progress_store(self) -> Any:
        """Return a key space of the monitor's own in the job's store, used after a failure only."""
        c10d: Any = dist.distributed_c10d
        name = getattr(self._group, "group_name", "")
        return c10d.PrefixStore(f"distmon/{name}", c10d._get_default_store())


def minority(values: Sequence[float]) -> list[int]:
    """Return the ranks whose value is not the most frequent one; in a tie the lowest rank wins."""
    most, _ = Counter(values).most_common(1)[0]  # of equal ones the first that appeared
    return [rank for rank, value in enumerate(values) if value != most]


def _backend_for(device: torch.device | None) -> str | None:
    """Return gloo for weights on the host in a job whose groups serve an accelerator only, as with
    an offloaded optimizer; None for the job's own backend."""
    c10d: Any = dist.distributed_c10d
    served = {d.type for d in getattr(c10d._get_default_group(), "_device_types", ())}
    if device is None or device.type != "cpu" or not served or "cpu" in served:
        return None
    return "gloo"


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))
