"""Finds out what MFU can be computed from: the model's FLOPs and the device's peak."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from distmon.config import MfuConfig
from distmon.errors import DistmonError
from distmon.telemetry.mfu.formula import TransformerShape
from distmon.telemetry.mfu.measured_peak import measure_peak, peak_dtype
from distmon.telemetry.mfu.model_flops import ModelFlops, given_flops
from distmon.telemetry.mfu.model_shape import shape_of_model
from distmon.telemetry.mfu.peaks import Peak, resolve_peak
from distmon.telemetry.mfu.unavailable import MfuUnavailableError
from distmon.telemetry.mfu.utilization import Mfu
from distmon.telemetry.utilization import Utilization

log = logging.getLogger("distmon")


def set_up(
    utilization: Utilization,
    settings: MfuConfig,
    models: Sequence[nn.Module],
    device: torch.device,
    dtype: torch.dtype,
    speaks: bool,
) -> None:
    """Prepare `utilization`, or say once why there is no MFU.

    Nobody who asked for nothing is told what is missing: `speaks` is for rank 0, and for runs whose
    `mfu` settings say something.
    """
    asked = bool(settings.model_fields_set)
    try:
        peak = _peak(settings, device, dtype)
        if settings.count:
            utilization.count_once(peak, settings.causal)
            return
        utilization.mfu = Mfu(_flops(settings, models), peak)
        if speaks:
            log.info("MFU: %s", utilization.mfu.provenance.describe())
    except DistmonError as error:
        if speaks:
            log.log(logging.WARNING if asked else logging.DEBUG, "%s", error)


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
            "no MFU: the length of a training sequence is not known; set mfu.context, or "
            "mfu.flops_per_token"
        )
    if settings.model is not None:
        shape = TransformerShape(context=settings.context, **settings.model.model_dump())
        return shape.flops(settings.causal)
    if len(models) != 1:
        raise MfuUnavailableError("no MFU: this rank holds a part of the model; set mfu.model")
    return shape_of_model(models[0], settings.context).flops(settings.causal)
