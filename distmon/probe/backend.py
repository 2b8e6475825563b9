"""Which probe reads the samples: Triton kernels on CUDA and ROCm, plain torch everywhere else."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from typing import Literal, Protocol

import torch

from csrc_triton.row_layout import BINS, MAX_COLUMNS, SUM_COLUMNS
from distmon.errors import ConfigError
from distmon.layout import Shard
from distmon.probe.rows import Rows
from distmon.probe.torch_twin import TorchProbe
from distmon.sampling import SamplePlan

log = logging.getLogger("distmon")

Backend = Literal["auto", "torch", "triton"]


class Probe(Protocol):
    """Fills rows for one plan: `snapshot()` just before the step, `measure()` just after it."""

    row_checksums: torch.Tensor

    def snapshot(self) -> None: ...

    def measure(self, rows: Rows, applied: torch.Tensor) -> None: ...

    def read_whole_gradients(self, rows: Rows, parameters: Iterable[int]) -> None: ...


def choose_probe(
    backend: Backend, plan: SamplePlan, shards: Sequence[Shard], exact: bool = False
) -> Probe:
    """The probe for this plan.

    `auto` takes Triton on a GPU and says in one line why when it cannot; "triton" raises
    ConfigError instead, unless TRITON_INTERPRET=1 lets the kernels run on the CPU.
    """
    gpu = plan.device.type == "cuda"  # ROCm calls itself cuda too
    if backend == "torch" or (backend == "auto" and not gpu):
        return TorchProbe(plan, shards, exact)
    if not gpu and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError(
            f"backend: triton needs a CUDA or ROCm model and this one is on {plan.device}; "
            "use backend: auto"
        )
    try:
        from distmon.probe.triton_probe import TritonProbe

        probe = TritonProbe(plan, shards, exact)
        if gpu:
            _compile_now(probe, plan)
        return probe
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        if backend == "triton":
            raise ConfigError(f"backend: triton cannot be used: {reason}") from error
        log.warning("reading samples with torch instead of Triton: %s", reason)
        return TorchProbe(plan, shards, exact)


def _compile_now(probe: Probe, plan: SamplePlan) -> None:
    """Run once on rows that are thrown away.

    The kernels compile here and not in the middle of the first observed step, and a missing
    compiler or driver shows while there is still a choice. The only wait, at attach.
    """
    count, device = len(plan.names), plan.device
    rows = Rows(
        torch.empty((count, len(SUM_COLUMNS)), dtype=torch.float64, device=device),
        torch.empty((count, len(MAX_COLUMNS)), device=device),
        torch.empty((count, BINS), dtype=torch.float64, device=device),
    )
    probe.snapshot()
    probe.measure(rows, torch.zeros(count, dtype=torch.float64, device=device))
    torch.cuda.synchronize(device)
