"""Train one parallelism with the monitor attached, on this rank, and return its records."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from distmon.attach import attach_source
from distmon.errors import DistmonError
from distmon.layout import Shard, capture, named_modules, written_module
from distmon.monitor import Monitor
from distmon.record.record import Record
from distmon.runtime.source import Options, Source
from distmon.sampling.reading import SampleSize
from distmon.sampling.sample import Sample
from distmon.verify.expected_inside import WINDOW
from distmon.verify.expected_row import EPS, SAMPLE_SEED
from distmon.verify.parallelisms import DistributedModel, Parallelism
from distmon.verify.workloads import load_workload

_SETTINGS: Final[dict[str, Any]] = {
    "enabled": True,
    "budget": None,  # `auto` then reads all gradients
    "seed": SAMPLE_SEED,
    "eps": EPS,
    "percentiles": True,
    "replica_check": True,
    # A sample of all logits does not depend on which of them a rank computes.
    "inside": {"kinds": "all", "window": WINDOW, "attention_sample": (10**6,) * 3},
    "flow": {"enabled": False},
    "include": ["*"],
    "exclude": [],
    "sinks": [],
    "timeout_s": 60.0,
}


@dataclass(frozen=True)
class Observed:
    """The records and the cost of the monitor on one rank."""

    records: tuple[Record, ...]
    sampled: dict[str, int]
    """Number of elements that this rank reads, by parameter."""
    partial: frozenset[str]
    """Parameters whose gradient may be partial, so that their sampled elements are sent."""
    collectives: tuple[int, ...]
    """Number of collectives, by observation."""
    nbytes: tuple[int, ...]
    """Bytes sent into those collectives, by observation."""
    watched: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Modules, routers and matrices that are watched inside the model, by kind."""
    spectra_lag: int = 0
    """Observations from the one whose weights a sweep of spectral norms reads to its record."""
    watched_bytes: int = 0
    """Bytes of these among the bytes of an observation."""


def observe(
    parallelism: Parallelism,
    source: str | None,
    steps: int,
    interval: int,
    folder: Path,
    sample_size: SampleSize = "sampled",
) -> Observed:
    """Train for `steps` steps; every rank of the process group must call it.

    `interval` must be at least 2: the steps that are not observed give the number of collectives
    that the optimizer itself starts.
    """
    distributed = parallelism.build(load_workload(source))
    shards = (
        distributed.shards() if distributed.shards is not None else capture(distributed.modules)
    )
    settings: dict[str, Any] = {"interval": interval, "sample_size": sample_size}
    if not distributed.calls_modules:
        settings["inside"] = []
    monitor = _attach(distributed, shards, settings | {"run_dir": folder / parallelism.name})
    plan, catalog = monitor.cycle.observer.rows.plan, monitor.cycle.observer.inside.catalog
    samples = dict(zip(plan.names, plan.samples, strict=True))
    elsewhere = monitor.cycle.observer.spectra.channel_name
    records, calls, nbytes = _train(distributed, monitor, steps, interval)
    if distributed.close is not None:
        distributed.close()
    return Observed(
        records=tuple(records),
        sampled={shard.name: _held(shard, samples[shard.name]) for shard in shards},
        partial=frozenset(shard.name for shard in shards if shard.may_be_partial),
        collectives=tuple(calls),
        nbytes=tuple(nbytes),
        watched={
            "activations": catalog.activations,
            "attention": catalog.attention,
            "experts": tuple(name for name, _ in catalog.experts),
            "spectra": catalog.matrices,
        },
        spectra_lag=1 if elsewhere else 0,  # one process exchanges nothing, and is done at once
        watched_bytes=8 * catalog.sums + 4 * catalog.maxima,
    )


def _train(
    distributed: DistributedModel, monitor: Monitor, steps: int, interval: int
) -> tuple[list[Record], list[int], list[int]]:
    """Train, and close the monitor; return records, collectives and bytes by observation."""
    records: list[Record] = []
    calls: list[int] = []
    nbytes: list[int] = []
    usual = 0
    elsewhere = monitor.cycle.observer.spectra.channel_name
    with monitor:
        for step in range(1, steps + 1):
            for module in distributed.modules:
                module.zero_grad()  # also parameters that no optimizer owns
            loss = distributed.backward(step)
            with _CollectiveCounter(elsewhere) as stepping:
                _step(distributed)
            with _CollectiveCounter(elsewhere) as own:
                monitor.step(loss=loss)
                # On a busy machine the first observation is launched while its record is awaited.
                record = None if step % interval else monitor.last_record
            _finish_spectra(monitor)
            if step % interval:
                usual = stepping.calls  # some optimizers communicate in their step
                continue
            if record is None or record.step != step:
                raise DistmonError(f"the monitor has no record of step {step}")
            records.append(record)
            calls.append(own.calls + stepping.calls - usual)
            nbytes.append(own.nbytes)
    return records, calls, nbytes


def _attach(
    distributed: DistributedModel, shards: list[Shard], settings: dict[str, Any]
) -> Monitor:
    source = Source(
        find_shards=lambda _: shards,
        device=shards[0].weight().device,
        optimizers=distributed.optimizers,
        find_modules=lambda: named_modules([written_module(m) for m in distributed.modules]),
        param_groups=distributed.groups,
    )
    monitor = attach_source(source, Options(overrides=_SETTINGS | settings))
    assert isinstance(monitor, Monitor)
    return monitor


def _finish_spectra(monitor: Monitor) -> None:
    """Take the estimate of spectral norms to its end with the weights of this step."""
    deadline = time.monotonic() + _SETTINGS["timeout_s"]
    while monitor.cycle.observer.spectra.busy:
        if time.monotonic() > deadline:
            raise DistmonError("the estimate of spectral norms did not finish in time")
        monitor.cycle.model_watch.advance_spectra(begin=False)
        time.sleep(0.0005)


def _step(distributed: DistributedModel) -> None:
    if distributed.step is not None:
        distributed.step()
        return
    for optimizer in distributed.optimizers:
        optimizer.step()


def _held(shard: Shard, sample: Sample) -> int:
    """Return the number of sampled elements that this rank holds."""
    return int((shard.region.local(sample.indices) >= 0).sum())


class _CollectiveCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the collectives and bytes that are sent in its context.

    All collectives pass torch's dispatcher in one of two namespaces, so none is missed. Those of
    the process group `elsewhere` do not count.
    """

    def __init__(self, elsewhere: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._elsewhere = elsewhere
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
            return NotImplemented  # a DTensor: the collective inside it is dispatched on its own
        collective = func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.__name__
        if collective and self._elsewhere not in _group_names(args):
            self.calls += 1
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            self.nbytes += sum(t.numel() * t.element_size() for t in tensors)
        return func(*args, **(kwargs or {}))


def _group_names(args: tuple[Any, ...]) -> Iterator[str]:
    """Yield the process groups among the arguments of a collective."""
    for each in args:
        if isinstance(each, torch.ScriptObject) and str(each._type()).endswith("ProcessGroup"):
            yield dist.ProcessGroup.unbox(each).group_name
