"""Set up MFU: determine the model's FLOPs and the device's peak."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from distmon.collect.telemetry.mfu.formula import TransformerShape
from distmon.collect.telemetry.mfu.measured_peak import measure_peak, peak_dtype
from distmon.collect.telemetry.mfu.model_flops import ModelFlops, given_flops
from distmon.collect.telemetry.mfu.model_shape import shape_of_model
from distmon.collect.telemetry.mfu.peaks import Peak, resolve_peak
from distmon.collect.telemetry.mfu.unavailable import MfuUnavailableError
from distmon.collect.telemetry.mfu.utilization import Mfu
from distmon.collect.telemetry.utilization import Utilization
from distmon.config import MfuConfig
from distmon.errors import DistmonError
from distmon.layout import Shard

log = logging.getLogger("distmon")


def set_up_mfu(
    utilization: Utilization,
    settings: MfuConfig,
    models: Sequence[nn.Module],
    example: Shard,
    is_logging: bool,
) -> None:
    """Prepare `utilization`, or log once why there is no MFU.

    `example` gives the device and the dtype of the parameters. Only the rank with `is_logging`
    logs; it warns if the user set any `mfu` option, else it logs at DEBUG.
    """
    configured = bool(settings.model_fields_set)
    try:
        peak = _peak(settings, example.weight().device, example.dtype)
        if settings.count:
            utilization.count_once(peak, settings.causal)
            return
        utilization.mfu = Mfu(_flops(settings, models), peak)
        if is_logging:
            log.info("distmon: MFU from %s", utilization.mfu.provenance.describe())
    except DistmonError as error:
        if is_logging:
            log.log(logging.WARNING if configured else logging.DEBUG, "distmon: %s", error)


def _peak(settings: MfuConfig, device: torch.device, dtype: torch.dtype) -> Peak:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    wanted = settings.dtype or peak_dtype(dtype, device.type)
    measure = None
    if settings.measure_peak and wanted is not None:
        measure = partial(measure_peak, device, wanted)
    return resolve_peak(name, wanted, settings.peak_flops, measure)


def _flops(settings: MfuConfig, models: Sequence[nn.Module]) -> ModelFlops:
    if settings.flops_per_token is not None:
        return given_flops(settings.flops_per_token)
    if settings.context is None:
        raise MfuUnavailableError(
            "no MFU: the length of the training sequences is unknown; set mfu.context, or "
            "mfu.flops_per_token"
        )
    if settings.model is not None:
        shape = TransformerShape(context=settings.context, **settings.model.model_dump())
        return shape.flops(settings.causal)
    if len(models) != 1:
        raise MfuUnavailableError("no MFU: this rank holds only part of the model; set mfu.model")
    return shape_of_model(models[0], settings.context).flops(settings.causal)
