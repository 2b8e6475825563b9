"""From reduced rows to the statistics of each parameter. Vectorised over parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from csrc_triton.row_layout import GROUPS, MAX, RUN, SUM
from distmon.metrics import TOPK_FROZEN_PREFIX
from distmon.record import Column, ParamTable
from distmon.reduce import Reduced
from distmon.sampling import Sample


@dataclass(frozen=True)
class Sampling:
    """What is known of every parameter's sample before anything is measured."""

    names: tuple[str, ...]
    slots: Column
    """Elements in the sample."""
    group_share: NDArray[np.float64]
    """[parameters, GROUPS]: share of the sample that falls into each group."""
    expansion: Column
    """Sum over the parameter / expected sum over the sample."""
    unseen: Column
    """Share of the parameter that the sample leaves out; 0 when it is read whole."""
    numel: Column
    ndim: Column
    trainable: NDArray[np.bool_]
    """Whether it was to learn when the monitor was attached."""
    exact: bool
    """Weight and gradient columns cover every element."""

    @classmethod
    def describe(
        cls,
        names: tuple[str, ...],
        samples: Sequence[Sample],
        ndim: Sequence[int],
        trainable: Sequence[bool],
        exact: bool,
    ) -> Sampling:
        """Tabulate the samples of all parameters."""
        share = np.full((len(names), GROUPS), 1 / GROUPS)
        for i, sample in enumerate(samples):
            count = sample.count
            group = np.arange(0, count, RUN) // RUN % GROUPS
            sizes = np.full(len(group), float(RUN))
            if count:
                sizes[-1] = count - RUN * (len(group) - 1)
                share[i] = np.bincount(group, weights=sizes, minlength=GROUPS) / count
        slots = np.array([s.count for s in samples], dtype=np.float64)
        numel = np.array([s.numel for s in samples], dtype=np.float64)
        whole = np.array([s.whole for s in samples])
        with np.errstate(divide="ignore", invalid="ignore"):
            unseen = np.where(whole, 0.0, 1 - slots / numel)
        return cls(
            names=names,
            slots=slots,
            group_share=share,
            expansion=np.array([s.expansion for s in samples]),
            unseen=unseen,
            numel=numel,
            ndim=np.array(ndim, dtype=np.float64),
            trainable=np.array(trainable, dtype=bool),
            exact=exact,
        )


@dataclass(frozen=True)
class Moments:
    """Estimated totals of one quantity (weight, gradient or update) by parameter."""

    copies: Column
    """How many ranks hold each element: what sums are divided by."""
    square: Column
    variance: Column
    """Sampling variance of `square`."""
    norm: Column
    stderr: Column
    mean: Column
    std: Column


def moments(reduced: Reduced, sampling: Sampling) -> dict[str, Moments]:
    """Of weights "w", gradients "g" and updates "u"."""
    return {what: _moments(reduced, sampling, what) for what in "wgu"}


def _moments(reduced: Reduced, sampling: Sampling, what: str) -> Moments:
    sums = reduced.sums
    exact = sampling.exact and what != "u"
    expected = sampling.numel if exact else sampling.slots
    expansion = np.ones_like(expected) if exact else sampling.expansion
    unseen = np.zeros_like(expected) if exact else sampling.unseen
    count = sums[:, SUM[f"{what}_count"]]
    first = SUM[f"{what}_sq0"]
    with np.errstate(divide="ignore", invalid="ignore"):
        copies = np.where(count > 0, count / expected, np.nan)
        scale = expansion / copies
        groups = sums[:, first : first + GROUPS] * scale[:, None]
        square = groups.sum(1)
        spread = ((groups - square[:, None] * sampling.group_share) ** 2).sum(1)
        variance = GROUPS / (GROUPS - 1) * spread * unseen
        # The root of an unbiased square is a little low; this is the second-order correction.
        relative = np.where(square > 0, variance / square**2, 0.0)
        norm = np.sqrt(square) * (1 + relative / 8)
        stderr = np.where(square > 0, np.sqrt(variance) / (2 * np.sqrt(square)), 0.0)
        mean = sums[:, SUM[f"{what}_sum"]] * scale / sampling.numel
        std = np.sqrt(np.maximum(square / sampling.numel - mean**2, 0.0))
        stderr = np.where(count > 0, stderr, np.nan)
        source = "w" if what == "u" else what
        bad = sums[:, SUM[f"{source}_nan"]] + sums[:, SUM[f"{source}_inf"]] > 0
        norm, mean, std = (np.where(bad, np.nan, x) for x in (norm, mean, std))
    return Moments(copies, square, variance, norm, stderr, mean, std)


def param_table(
    reduced: Reduced,
    estimates: Mapping[str, Moments],
    sampling: Sampling,
    eps: float,
    frozen_ratio: float,
) -> ParamTable:
    """Every per-parameter statistic; NaN where nothing was measured."""
    sums, maxima = reduced.sums, reduced.maxima
    weight, grad, update = (estimates[what] for what in "wgu")

    def column(name: str, copies: Column) -> Column:
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(np.isnan(copies), np.nan, sums[:, SUM[name]] / copies)

    def extreme(name: str) -> Column:
        values = maxima[:, MAX[name]]
        return np.where(np.isneginf(values), np.nan, values)

    with np.errstate(divide="ignore", invalid="ignore"):
        holders = np.where(sums[:, SUM["holders"]] > 0, sums[:, SUM["holders"]], np.nan)
        ratio = update.norm / (weight.norm + eps)
        graded = sums[:, SUM["u_graded"]]
        columns: dict[str, Column] = {
            "weight_norm": weight.norm,
            "weight_norm_stderr": weight.stderr,
            "weight_mean": weight.mean,
            "weight_std": weight.std,
            "weight_absmax": extreme("w_absmax"),
            "weight_nan": column("w_nan", weight.copies),
            "weight_inf": column("w_inf", weight.copies),
            "grad_norm": grad.norm,
            "grad_norm_stderr": grad.stderr,
            "grad_mean": grad.mean,
            "grad_std": grad.std,
            "grad_min": -extreme("g_negmin"),
            "grad_max": extreme("g_max"),
            "grad_zero_fraction": sums[:, SUM["g_zero"]] / sums[:, SUM["g_count"]],
            "grad_nan": column("g_nan", grad.copies),
            "grad_inf": column("g_inf", grad.copies),
            "update_norm": update.norm,
            "update_norm_stderr": update.stderr,
            "update_absmax": extreme("u_absmax"),
            "update_ratio": ratio,
            "update_lost_fraction": np.where(graded > 0, sums[:, SUM["u_lost"]] / graded, np.nan),
            "update_lost_bound": np.sqrt(
                column("u_lost_bound_sq", update.copies) * sampling.expansion
            ),
            "lr": sums[:, SUM["lr"]] / sums[:, SUM["in_optimizer"]],
            "ndim": sampling.ndim,
            "requires_grad": sums[:, SUM["requires_grad"]] / holders,
            "in_optimizer": sums[:, SUM["in_optimizer"]] / holders,
            "has_grad": (sums[:, SUM["g_count"]] > 0).astype(np.float64),
        }
    still = (ratio <= frozen_ratio) & sampling.trainable & ~(columns["lr"] == 0)
    columns["frozen"] = (still & _proven(reduced, sampling)).astype(np.float64)
    bins = None
    if reduced.bins is not None:
        copies = np.where(np.isnan(grad.copies), 1.0, grad.copies)[:, None]
        # Half the memory, and exact up to 16 million elements in a bin.
        bins = np.divide(reduced.bins, copies, dtype=np.float32, casting="same_kind")
    return ParamTable(sampling.names, columns, bins)


def suspects(table: ParamTable, sampling: Sampling, frozen_ratio: float) -> list[int]:
    """Parameters whose sample had no gradient and did not move, though the rest may have.

    A sample cannot see that a few rows of an embedding learn, so before such a parameter is called
    frozen its whole gradient is read at the next observation.
    """
    c = table.columns
    with np.errstate(invalid="ignore"):
        quiet = (c["update_ratio"] <= frozen_ratio) & (c["grad_zero_fraction"] == 1)
    return [int(i) for i in np.flatnonzero(quiet & (sampling.unseen > 0) & sampling.trainable)]


def _proven(reduced: Reduced, sampling: Sampling) -> NDArray[np.bool_]:
    """Where no movement in the sample means no movement at all."""
    sums = reduced.sums
    nothing_to_apply = (sums[:, SUM["g_count"]] == 0) & (sums[:, SUM["g_unreadable"]] == 0)
    gradient_ignored = sums[:, SUM["u_graded"]] > 0
    read_in_full = (sums[:, SUM["whole_count"]] > 0) & (sums[:, SUM["whole_nonzero"]] == 0)
    not_owned = sums[:, SUM["in_optimizer"]] == 0
    proven = nothing_to_apply | gradient_ignored | read_in_full | not_owned
    return np.asarray(proven | (sampling.unseen == 0))


def run_metrics(
    reduced: Reduced,
    estimates: Mapping[str, Moments],
    table: ParamTable,
    sampling: Sampling,
    topk: int,
) -> dict[str, float]:
    """The metrics over all parameters. What was not measured is absent."""
    c = table.columns
    metrics: dict[str, float] = {}
    ratio = c["update_ratio"][np.isfinite(c["update_ratio"])]
    if ratio.size:
        metrics |= {
            "monitor/update_ratio_median": float(np.median(ratio)),
            "monitor/update_ratio_p95": float(np.percentile(ratio, 95)),
            "monitor/update_ratio_min": float(ratio.min()),
            "monitor/update_ratio_max": float(ratio.max()),
            "monitor/frozen_count": float(c["frozen"].sum()),
        }
    for what, tag in (("w", "param"), ("g", "grad")):
        estimate = estimates[what]
        seen = ~np.isnan(estimate.copies)
        if not seen.any():
            continue
        prefix = "weight" if what == "w" else "grad"
        bad = np.nansum(c[f"{prefix}_nan"]) + np.nansum(c[f"{prefix}_inf"]) > 0
        norm = float(np.sqrt(estimate.square[seen].sum()))
        spread = float(np.sqrt(estimate.variance[seen].sum()))
        metrics[f"monitor/{tag}_norm"] = float("nan") if bad else norm
        metrics[f"monitor/{tag}_norm_stderr"] = spread / (2 * norm) if norm > 0 else 0.0
    copies = estimates["u"].copies
    scale = np.where(np.isnan(copies), 0.0, sampling.expansion / np.where(copies > 0, copies, 1))
    graded = float((reduced.sums[:, SUM["u_graded"]] * scale).sum())
    if graded > 0:
        lost = float((reduced.sums[:, SUM["u_lost"]] * scale).sum())
        metrics["monitor/update_lost_fraction"] = lost / graded
    for kind in ("nan", "inf"):
        either = (reduced.sums[:, SUM[f"w_{kind}"]] > 0) | (reduced.sums[:, SUM[f"g_{kind}"]] > 0)
        metrics[f"debug/{kind}_param_count"] = float(either.sum())
    frozen = np.flatnonzero(c["frozen"] > 0)
    for i in frozen[np.argsort(c["update_ratio"][frozen], kind="stable")][:topk]:
        metrics[TOPK_FROZEN_PREFIX + table.names[i]] = float(c["update_ratio"][i])
    return metrics
