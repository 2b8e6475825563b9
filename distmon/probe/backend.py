"""Which probe reads the samples: Triton kernels on GPUs, compiled loops or torch elsewhere."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal, Protocol

import torch

from csrc_triton.row_layout import BINS, MAX_COLUMNS, SUM_COLUMNS
from distmon import native
from distmon.errors import ConfigError
from distmon.layout import Shard
from distmon.probe.native_probe import NativeProbe
from distmon.probe.rows import Rows
from distmon.probe.torch_probe import TorchProbe
from distmon.sampling.plan import SamplePlan

if TYPE_CHECKING:
    from distmon.probe.triton_probe import TritonProbe

log = logging.getLogger("distmon")

OLDEST_TRITON = (3, 4)
Backend = Literal["auto", "torch", "triton", "native"]


class Probe(Protocol):
    """Fills rows for one plan: `snapshot()` just before the step, `measure()` just after it."""

    row_checksums: torch.Tensor
    has_own_slots: bool
    """Whether it needs those of the plan no more."""

    @property
    def without_grad(self) -> Sequence[int]:
        """Parameters of which the last `measure` read no gradient."""
        ...

    def snapshot(self) -> None: ...

    def measure(self, rows: Rows, applied: torch.Tensor) -> None: ...

    def read_whole_gradients(self, rows: Rows, parameters: Iterable[int]) -> None: ...

    def count_nonfinite(self) -> torch.Tensor:
        """Return the counts of `nonfinite_counts`; waits for the device once."""
        ...


def choose_probe(
    backend: Backend, plan: SamplePlan, shards: Sequence[Shard], words: int = BINS
) -> Probe:
    """The probe for this plan, ready to fill rows whose bins are packed into `words` words.

    `auto` takes Triton on a GPU and the native module on a CPU where it is built, and says in one
    line why when what is there cannot be used; "triton" and "native" raise ConfigError instead.
    TRITON_INTERPRET=1 lets "triton" run on the CPU.
    """
    if any(shard.copied for shard in shards):  # another probe would read the memory of a copy
        return TorchProbe(plan, shards)
    wanted: str = backend
    if backend == "auto":
        wanted = {"cuda": "triton", "cpu": "native"}.get(plan.device.type, "torch")
        if wanted == "triton" and os.environ.get("TRITON_INTERPRET") == "1":
            wanted = "torch"  # the interpreter would read addresses of the device on the host
    if wanted == "torch":
        return TorchProbe(plan, shards)
    _check_device(backend, plan.device)
    try:
        module = native.load()
        if wanted == "triton":
            check_triton_version()
            from distmon.probe.triton_probe import TritonProbe

            probe = TritonProbe(plan, shards, module)
            if plan.device.type == "cuda":
                _compile_now(probe, plan, words or BINS)
            return probe
        if module is not None:
            return NativeProbe(plan, shards, module)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        if backend != "auto":
            raise ConfigError(f"backend: {backend} cannot be used: {reason}") from error
        name = {"triton": "Triton", "native": "the native module"}[wanted]
        log.warning("reading samples with torch instead of %s: %s", name, reason)
    if backend == "native":
        raise ConfigError(f"backend: native cannot be used: {native.status().reason}")
    return TorchProbe(plan, shards)


def check_triton_version(version: str | None = None) -> None:
    """Raise RuntimeError for a Triton without masked histograms."""
    if version is None:
        import triton

        version = str(triton.__version__)
    numbers = tuple(int(part) for part in version.split(".")[:2])
    if numbers < OLDEST_TRITON:
        raise RuntimeError(f"Triton {version} is older than 3.4, which comes with torch 2.8")


def _check_device(backend: Backend, device: torch.device) -> None:
    """Raise ConfigError for a demand that cannot be met there. ROCm calls itself cuda too."""
    if backend == "triton" and device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError(
            f"backend: triton needs a CUDA or ROCm model and this one is on {device}; "
            "use backend: auto"
        )
    if backend == "triton" and device.type == "cuda" and os.environ.get("TRITON_INTERPRET") == "1":
        raise ConfigError(
            f"backend: triton cannot read a model on {device} with TRITON_INTERPRET=1, which runs "
            "kernels on the host; unset it"
        )
    if backend == "native" and device.type != "cpu":
        raise ConfigError(
            f"backend: native needs a model on the CPU and this one is on {device}; "
            "use backend: auto"
        )


def _compile_now(probe: TritonProbe, plan: SamplePlan, words: int) -> None:
    """Launch every kernel once on rows that are thrown away.

    The kernels compile here and not in the middle of the first observed step, and a missing
    compiler or driver shows while there is still a choice. The only wait, at attach.
    """
    count, device = len(plan.names), plan.device
    rows = Rows(
        torch.empty((count, len(SUM_COLUMNS)), dtype=torch.float64, device=device),
        torch.empty((count, len(MAX_COLUMNS)), device=device),
        torch.empty((count, words), dtype=torch.float64, device=device),
    )
    probe.compile(rows)
    torch.accelerator.synchronize(device)
