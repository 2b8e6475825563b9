"""Train one arrangement under the monitor on this rank and bring back what it found."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from distmon.errors import DistmonError
from distmon.layout import Shard, capture
from distmon.layout.arrangements import Arranged, Arrangement
from distmon.record import Record
from distmon.sampling import choose
from distmon.verify.expected import EPS, SAMPLE_SEED, SAMPLE_SIZE
from distmon.verify.workloads import load_workload
from distmon.wiring import watch

_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Observed:
    """What the monitor of one rank found and cost."""

    records: tuple[Record, ...]
    sampled: dict[str, int]
    """Elements that this rank reads of each parameter."""
    added: frozenset[str]
    """Parameters whose gradient may still have to be added over ranks: their sampled elements
    travel one by one."""
    collectives: tuple[int, ...]
    """Entered by each observation."""
    nbytes: tuple[int, ...]
    """Sent into those collectives."""


def observe(
    arrangement: Arrangement, source: str | None, steps: int, interval: int, folder: Path
) -> Observed:
    """Train for `steps` steps; every rank of the process group calls it at the same time.

    `interval` is at least 2: steps that are not observed show what the optimizer sends by itself.
    """
    arranged = arrangement.build(load_workload(source))
    shards = arranged.shards() if arranged.shards is not None else capture(arranged.modules)
    monitor = watch(
        lambda _: shards,
        shards[0].weight().device,
        arranged.optimizers,
        groups=arranged.groups,
        enabled=True,
        interval=interval,
        sample_size=SAMPLE_SIZE,
        seed=SAMPLE_SEED,
        eps=EPS,
        percentiles=True,
        replica_check=True,
        include=["*"],
        exclude=[],
        sinks=[],
        run_dir=folder / arrangement.name,
        timeout_s=_TIMEOUT_S,
    )
    records: list[Record] = []
    calls: list[int] = []
    nbytes: list[int] = []
    usual = 0
    with monitor:
        for step in range(1, steps + 1):
            for module in arranged.modules:
                module.zero_grad()  # also what no optimizer owns
            loss = arranged.backward(step)
            with _Collectives() as stepping:
                _step(arranged)
            with _Collectives() as own:
                monitor.step(loss=loss)
            if step % interval:
                usual = stepping.calls  # some optimizers talk to each other by themselves
                continue
            if monitor.last_record is None or monitor.last_record.step != step:
                raise DistmonError(f"the monitor made no record of step {step}")
            records.append(monitor.last_record)
            calls.append(own.calls + stepping.calls - usual)
            nbytes.append(own.nbytes)
    if arranged.close is not None:
        arranged.close()
    return Observed(
        records=tuple(records),
        sampled={shard.name: _held(shard) for shard in shards},
        added=frozenset(shard.name for shard in shards if shard.may_be_addend),
        collectives=tuple(calls),
        nbytes=tuple(nbytes),
    )


def _step(arranged: Arranged) -> None:
    if arranged.step is not None:
        arranged.step()
        return
    for optimizer in arranged.optimizers:
        optimizer.step()


def _held(shard: Shard) -> int:
    """How many elements of the sample this rank holds."""
    sample = choose(shard.name, shard.numel, SAMPLE_SIZE, SAMPLE_SEED)
    return int((shard.region.local(sample.indices) >= 0).sum())


class _Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the collectives that are entered inside it, whichever function starts them.

    All of them pass torch's dispatcher under one of two namespaces, so none can be forgotten here.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = 0
        self.nbytes = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(kind.__module__.startswith("torch.distributed.") for kind in types):
            return NotImplemented  # of a tensor over several ranks, the next call shows the sending
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.__name__:
            self.calls += 1
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            self.nbytes += sum(t.numel() * t.element_size() for t in tensors)
        return func(*args, **(kwargs or {}))
