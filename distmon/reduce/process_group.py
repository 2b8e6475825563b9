"""The ranks that observe together: their channels, and their agreement at attach."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final, Literal

import torch
import torch.distributed as dist

from distmon.errors import PlanMismatchError
from distmon.reduce.channel import Channel
from distmon.reduce.majority import listed, minority
from distmon.reduce.progress import Progress

Transport = Literal["auto", "host", "device"]
CONNECT_LATE: Final = 32
"""From this many ranks on, gloo connects two ranks when they first exchange something: a full mesh
of thousands of ranks would take all file descriptors of a host."""


class Ranks:
    """The ranks of the job, with process groups of the monitor's own.

    Without an initialized process group it is a world of one. Creating it is a collective call; so
    is `open`, before which nothing but the agreement at attach may be exchanged.
    """

    def __init__(self, timeout_s: float, device: torch.device | None = None) -> None:
        """`device` is where the weights are. Timeouts are never shorter than those of the job."""
        self.together = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if self.together else 0
        self.size = dist.get_world_size() if self.together else 1
        self.on_device = False
        """Whether observations are reduced where the weights are, and not on the host."""
        self._device = device
        self.timeout_s = max(timeout_s, _job_timeout()) if self.together else timeout_s
        """Seconds after which a collective of the monitor fails."""
        self.searches = self._channel()
        """Agreement at attach and at the first step, then searches, in the order of their
        observations. Always on the host: ranks agree on the transport of the others here."""
        self.observations = Channel()
        """Observations, at observed steps."""
        self.decisions = Channel()
        """What rank 0 has decided, at fixed steps after an observation."""
        self.progress = (
            Progress(self.searches.name, self.rank, self.size) if self.together else None
        )

    def open(self, transport: Transport) -> None:
        """Create the other channels. A collective call, with a transport that all ranks have."""
        self.on_device = self.together and transport == "device"
        self.observations = self._channel(self._device if self.on_device else None)
        self.decisions = self._channel()

    def open_channel(self) -> Channel:
        """Return a further channel, which its user closes. A collective call."""
        return self._channel()

    def _channel(self, device: torch.device | None = None) -> Channel:
        if not self.together:
            return Channel()
        timeout = timedelta(seconds=self.timeout_s)
        if device is not None and device.type != "cpu":
            options = _one_block_options(timeout)
            return Channel(dist.new_group(timeout=timeout, pg_options=options), local=False)
        # For `device` on a CPU the job's own backend, unless that serves accelerators only.
        backend = None if device is not None and _serves_cpu() else "gloo"
        with _late_connections(self.size >= CONNECT_LATE):
            group = dist.new_group(timeout=timeout, backend=backend)
        return Channel(group, local=dist.get_backend(group) == "gloo")

    def hosts(self) -> tuple[str, ...]:
        """Return the host name of every rank, cut to 32 bytes. A collective call."""
        raw = socket.gethostname().encode("ascii", "replace")[:32].ljust(32, b"\0")
        table = self.gather(torch.tensor([*raw], dtype=torch.uint8))
        names = (bytes(row).rstrip(b"\0").decode("ascii", "replace") for row in table.tolist())
        return tuple(names)

    def slowest(self, seconds: float) -> float:
        """Return the longest time of any rank, to the nanosecond. A collective call."""
        mine = torch.tensor([int(1e9 * seconds)])
        return float(self.gather(mine).max()) / 1e9

    def most_copies(self, held: Sequence[float]) -> int:
        """Return how many ranks hold the same elements of a parameter, of that with most copies.

        `held`: the share of each parameter that this rank holds. A collective call.
        """
        shares = torch.tensor(held, dtype=torch.float64)
        self.searches.all_reduce(shares, dist.ReduceOp.SUM)
        most = shares.max().item() if len(held) else 1.0
        return max(1, math.ceil(most - 1e-6))  # shares that add up to 1 may do so up to rounding

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Gather equal-sized integer tables from all ranks: [size, *values.shape]."""
        table = self.table(values)
        self.searches.all_reduce(table, dist.ReduceOp.SUM)
        return table

    def table(self, values: torch.Tensor) -> torch.Tensor:
        """Return [size, *values.shape] with `values` in this rank's row: its SUM is a gather."""
        table = torch.zeros((self.size, *values.shape), dtype=values.dtype)
        table[self.rank] = values
        return table

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Broadcast the tensor of rank `source`, in place."""
        self.searches.broadcast(tensor, source)
        return tensor

    def agree(self, hashes: Mapping[str, int], ready: bool) -> None:
        """Raise PlanMismatchError on every rank when a rank is not ready or set up differently.

        `hashes` are of everything that must be the same, by name. A rank that is not ready raises
        its own error; the others learn here which rank it is.
        """
        mine = torch.tensor([int(ready), *hashes.values()], dtype=torch.int64)
        table = self.gather(mine).T.tolist()
        unready = [rank for rank, is_ready in enumerate(table[0]) if not is_ready]
        if unready:
            raise PlanMismatchError(
                f"rank {listed(unready)} failed to attach; its own message says why"
            )
        for name, by_rank in zip(hashes, table[1:], strict=True):
            if others := minority(by_rank):
                rest = [rank for rank in range(self.size) if rank not in others]
                raise PlanMismatchError(
                    f"rank {listed(others)} has different {name} from rank {listed(rest)}; "
                    "attach the same model with the same config and version on every rank"
                )

    def close(self) -> None:
        """Leave all process groups. Enters no collective and waits for no rank."""
        for channel in (self.observations, self.searches, self.decisions):
            channel.close()
        self.together = False


def _serves_cpu() -> bool:
    """Return whether the job's own groups take tensors on the host."""
    c10d: Any = dist.distributed_c10d
    served = {d.type for d in getattr(c10d._get_default_group(), "_device_types", ())}
    return not served or "cpu" in served


def _job_timeout() -> float:
    """Return the timeout of the job's own collectives in seconds; 0 when it is unknown."""
    try:
        c10d: Any = dist.distributed_c10d
        group = c10d._get_default_group()
        backends = (group._get_backend(device) for device in group._device_types)
        return max(float(each.options._timeout.total_seconds()) for each in backends)
    except Exception:  # not part of torch's public interface
        return 0.0


@contextmanager
def _late_connections(late: bool) -> Iterator[None]:
    """Let a gloo group that is created inside connect two ranks at their first exchange."""
    name = "TORCH_GLOO_LAZY_INIT"
    before = os.environ.get(name)
    if late and before is None:
        os.environ[name] = "1"
    try:
        yield
    finally:
        if late and before is None:
            del os.environ[name]


def _one_block_options(timeout: timedelta) -> Any:
    """Return options of an NCCL communicator that takes one thread block and little memory.

    None where the job's backend is not NCCL.
    """
    if not dist.is_nccl_available() or dist.get_backend() != "nccl":
        return None
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timeout
    options.config.min_ctas = options.config.max_ctas = 1
    return options
