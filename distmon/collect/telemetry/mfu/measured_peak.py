"""Measure the peak with a real matrix product, and find the dtype of a run's products."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from distmon.collect.telemetry.mfu.peaks import Peak
from distmon.collect.telemetry.mfu.unavailable import MfuUnavailableError

_TORCH_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "tf32": torch.float32,
    "fp32": torch.float32,
}
# Large enough that an accelerator is busy for a millisecond, small enough for a CPU core.
_ACCELERATOR_SIZE = 8192
_CPU_SIZE = 512


def peak_dtype(dtype: torch.dtype, device_type: str) -> str | None:
    """Return the column of the peak table for matrix products in `dtype`; None if there is none.

    `dtype` is that of autocast, or else of the parameters. float32 on CUDA is tf32 if the run
    allows it.
    """
    if dtype is torch.float32:
        return "tf32" if device_type == "cuda" and _tf32_allowed() else "fp32"
    names = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    return names.get(dtype) or ("fp8" if "float8" in str(dtype) else None)


def measure_peak(
    device: torch.device,
    dtype: str,
    size: int | None = None,
    seconds: float = 0.3,
    now: Callable[[], float] = time.perf_counter,
) -> Peak:
    """Return the best rate of square matrix products on the device within `seconds`.

    It synchronizes the device and uses up to 800 MB on an accelerator, so it must run before
    training. A measured peak is below the datasheet's, so MFU relative to it is higher; `source`
    says which one was used. Raises MfuUnavailableError when the product fails.
    """
    if dtype not in _TORCH_DTYPES:
        raise MfuUnavailableError(f"no MFU: a peak in {dtype} cannot be measured here")
    if (dtype == "tf32") != (peak_dtype(_TORCH_DTYPES[dtype], device.type) == "tf32"):
        raise MfuUnavailableError(
            f"no MFU: a peak in {dtype} cannot be measured, because torch multiplies float32 in "
            f"{'fp32' if dtype == 'tf32' else 'tf32'} here"
        )
    size = size or (_CPU_SIZE if device.type == "cpu" else _ACCELERATOR_SIZE)
    try:
        best = _best_time(device, _TORCH_DTYPES[dtype], size, seconds, now)
    except RuntimeError as error:
        raise MfuUnavailableError(
            f"no MFU: measuring the peak failed: {str(error).splitlines()[0]}"
        ) from None
    return Peak(2 * size**3 / best, dtype, f"measured, {size} x {size} matrix product")


@torch.no_grad()
def _best_time(
    device: torch.device, dtype: torch.dtype, size: int, seconds: float, now: Callable[[], float]
) -> float:
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(size, size, device=device, generator=generator).to(dtype) for _ in range(2))
    out = torch.empty_like(a)

    def product() -> float:
        begin = now()
        torch.mm(a, b, out=out)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return now() - begin

    product()  # loads the kernel
    best = product()
    end = now() + seconds
    while now() < end:
        best = min(best, product())
    return best


def _tf32_allowed() -> bool:
    # Newer versions raise on reading the older setting once the newer one is set.
    precision = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    return bool(torch.backends.cuda.matmul.allow_tf32) if precision is None else precision == "tf32"
