"""The columns of a record that are compared, and how each difference is measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from distmon.metrics import GRAD_PERCENTILES

PARAMETER_KINDS: Final = (
    *("weights", "gradients", "updates", "maxima", "percentiles", "counts", "loss"),
)
INSIDE_KINDS: Final = ("activations", "attention", "experts", "spectra")
KINDS: Final = (*PARAMETER_KINDS, *INSIDE_KINDS)


@dataclass(frozen=True)
class Column:
    """How one column of a record is compared."""

    name: str
    kind: str
    scale: str
    """Reference columns, separated by spaces; a difference is divided by the root of their summed
    squares. "" divides by 1. A mean is divided by its standard deviation too, since the mean itself
    may be zero."""
    limit: str
    """The field of `Limits` that applies; "" for equality."""


def _moments(what: str, kind: str) -> Iterator[Column]:
    yield Column(f"{what}_norm", kind, f"{what}_norm", kind)
    yield Column(f"{what}_norm_stderr", kind, f"{what}_norm", kind)
    if what != "update":
        yield Column(f"{what}_mean", kind, f"{what}_mean {what}_std", kind)
        yield Column(f"{what}_std", kind, f"{what}_mean {what}_std", kind)


COLUMNS: Final = (
    *_moments("weight", "weights"),
    *_moments("grad", "gradients"),
    *_moments("update", "updates"),
    Column("update_ratio", "updates", "update_ratio", "updates"),
    Column("update_lost_bound", "updates", "update_norm update_lost_bound", "updates"),
    Column("weight_absmax", "maxima", "weight_absmax", "weights"),
    Column("grad_min", "maxima", "grad_min grad_max", "gradients"),
    Column("grad_max", "maxima", "grad_min grad_max", "gradients"),
    Column("update_absmax", "maxima", "update_absmax", "updates"),
    *(
        Column(f"grad_p{q}", "percentiles", "grad_min grad_max", "gradients")
        for q in GRAD_PERCENTILES
    ),
    *(
        Column(name, "counts", "", "")
        for name in (
            *("weight_nan", "weight_inf", "grad_nan", "grad_inf"),
            *("lr", "ndim", "requires_grad", "in_optimizer", "has_grad", "update_expected"),
        )
    ),
    Column("grad_zero_fraction", "counts", "", "bins"),
    Column("update_lost_fraction", "counts", "", "bins"),
)
ACTIVITY_COLUMNS: Final = (
    *(Column(name, "activations", "rms", "gradients") for name in ("mean", "std", "absmax", "rms")),
    *(
        Column(f"{what}_fraction", "activations", "", "gradients")
        for what in ("zero", "dead", "saturated")
    ),
    Column("logit_max", "attention", "logit_max", "gradients"),
    Column("entropy", "attention", "entropy", "gradients"),
    Column("relative_entropy", "attention", "", "gradients"),
    *(
        Column(name, "experts", "", "gradients")
        for name in ("load_max", "diversity", "dead_fraction", "dropped_fraction")
    ),
    Column("experts_per_token", "experts", "", "gradients"),
)
"""Columns of activations, attention and experts, by the kind of their table in a record."""
SPECTRA_COLUMNS: Final = (
    Column("spectral_norm", "spectra", "spectral_norm", "weights"),
    Column("stable_rank", "spectra", "stable_rank", "weights"),
)
TOTALS: Final = {
    "monitor/param_norm": "weights",
    "monitor/grad_norm": "gradients",
    "monitor/update_ratio_median": "updates",
    "monitor/update_ratio_min": "updates",
    "monitor/update_ratio_max": "updates",
    "monitor/frozen_count": "counts",
}
"""The kind of each metric over all parameters."""
