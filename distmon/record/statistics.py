"""From reduced rows to the statistics of each parameter. Vectorised over parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from csrc_triton.row_layout import GROUPS, MAX, SUM
from distmon.metrics import TOPK_FROZEN_PREFIX
from distmon.record.record import NO_UPDATE, Column, ParamTable
from distmon.record.sample_tables import Sampling
from distmon.record.standard_error import DEGREES, student_factor
from distmon.record.update_errors import update_error_floor
from distmon.reduce.reduced import Reduced

if TYPE_CHECKING:
    pass


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
    found = {what: _moments(reduced, sampling, what) for what in "wgu"}
    update = found["u"]
    floor = update_error_floor(reduced, found, sampling) * update.norm
    found["u"] = replace(update, stderr=np.maximum(update.stderr, floor))  # NaN where either is
    return found


def _moments(reduced: Reduced, sampling: Sampling, what: str) -> Moments:
    sums, table = reduced.sums, sampling.tables[what]
    count = sums[:, SUM[f"{what}_count"]]
    first = SUM[f"{what}_sq0"]
    with np.errstate(divide="ignore", invalid="ignore"):
        copies = np.where(count > 0, count / table.slots, np.nan)
        scale = table.expansion / copies
        groups = sums[:, first : first + GROUPS] * scale[:, None]
        square = groups.sum(1)
        spread = ((groups - square[:, None] * table.group_shares.table) ** 2).sum(1)
        variance = GROUPS / (GROUPS - 1) * spread * table.unseen
        # Where all that was sampled is zero, nothing is known of the rest.
        unknown = (square == 0) & (table.unseen > 0)
        # The root of an unbiased square is a little low; this is the second-order correction.
        relative = np.where(square > 0, variance / square**2, 0.0)
        norm = np.sqrt(square) * (1 + relative / 8)
        stderr = np.where(square > 0, np.sqrt(variance) / (2 * np.sqrt(square)), 0.0)
        stderr = stderr * student_factor(DEGREES)
        mean = sums[:, SUM[f"{what}_sum"]] * scale / sampling.numel
        std = np.sqrt(np.maximum(square / sampling.numel - mean**2, 0.0))
        stderr = np.where((count > 0) & ~unknown, stderr, np.nan)
        source = "w" if what == "u" else what
        bad = sums[:, SUM[f"{source}_nan"]] + sums[:, SUM[f"{source}_inf"]] > 0
        norm, mean, std = (np.where(bad, np.nan, x) for x in (norm, mean, std))
        if what == "g":
            norm, mean, std = (np.where(unknown, np.nan, x) for x in (norm, mean, std))
    return Moments(copies, square, variance, norm, stderr, mean, std)


def param_table(
    reduced: Reduced,
    estimates: Mapping[str, Moments],
    sampling: Sampling,
    eps: float,
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
                column("u_lost_bound_sq", update.copies) * sampling.tables["u"].expansion
            ),
            "lr": sums[:, SUM["lr"]] / sums[:, SUM["in_optimizer"]],
            "ndim": sampling.ndim,
            "requires_grad": sums[:, SUM["requires_grad"]] / holders,
            "in_optimizer": sums[:, SUM["in_optimizer"]] / holders,
            "has_grad": (sums[:, SUM["g_count"]] > 0).astype(np.float64),
        }
    expected = sampling.trainable & ~(columns["lr"] == 0) & _is_conclusive(reduced, sampling)
    columns["update_expected"] = expected.astype(np.float64)
    bins = None
    if reduced.bins is not None:
        copies = np.where(np.isnan(grad.copies), 1.0, grad.copies)[:, None]
        bins = np.divide(reduced.bins, copies, dtype=np.float32, casting="same_kind")
    return ParamTable(sampling.names, columns, bins)


def _stderr_of_norm(norm: float, variances: Column) -> float:
    """Return the standard error of a norm over parameters whose squares vary by `variances`."""
    total = float(variances.sum())
    if norm == 0 or total == 0:
        return 0.0
    # By Satterthwaite: the more parameters share the error, the better it is known.
    degrees = DEGREES * total**2 / float((variances**2).sum())
    return float(np.sqrt(total)) / (2 * norm) * student_factor(degrees)


def grad_norm_metrics(
    metrics: Mapping[str, float], ranks: Mapping[str, Column]
) -> dict[str, float]:
    """Return the total gradient norm: the one that the trainer reported, or else the estimate."""
    there = (ranks["failed"] == 0) & (ranks["reported_norm"] != -1)
    if not there.any():
        found = {f"monitor/grad_norm{x}": f"monitor/applied_grad_norm{x}" for x in ("", "_stderr")}
        return {tag: metrics[source] for tag, source in found.items() if source in metrics}
    norms, shares = ranks["reported_norm"][there], ranks["reported_norm_share"][there]
    norm = float(np.sqrt((norms**2 * shares).sum())) if shares.any() else float(norms.max())
    return {
        "train/unclipped_grad_norm": norm,
        "monitor/grad_norm": norm,
        "monitor/grad_norm_stderr": 0.0,
    }


def suspects(table: ParamTable, sampling: Sampling) -> list[int]:
    """Parameters whose sample had no gradient and did not move, though the rest may have.

    A sample cannot see that a few rows of an embedding learn, so before such a parameter is called
    frozen its whole gradient is read at the next observation.
    """
    c = table.columns
    with np.errstate(invalid="ignore"):
        quiet = (c["update_ratio"] <= NO_UPDATE) & (c["grad_zero_fraction"] == 1)
    return [int(i) for i in np.flatnonzero(quiet & (sampling.unseen > 0) & sampling.trainable)]


def _is_conclusive(reduced: Reduced, sampling: Sampling) -> NDArray[np.bool_]:
    """Return where an update of zero in the sample proves an update of zero everywhere."""
    sums = reduced.sums
    nothing_to_apply = (sums[:, SUM["g_count"]] == 0) & (sums[:, SUM["g_unreadable"]] == 0)
    gradient_ignored = sums[:, SUM["u_graded"]] > 0
    # By every rank that holds a part of it: each decides by the records that it has derived.
    held = sampling.numel * sums[:, SUM["w_count"]] / np.maximum(sampling.tables["w"].slots, 1)
    whole = (sums[:, SUM["whole_count"]] > 0) & (sums[:, SUM["whole_count"]] >= 0.999999 * held)
    read_in_full = whole & (sums[:, SUM["whole_nonzero"]] == 0)
    gradient_is_zero = (sums[:, SUM["g_zero"]] == sums[:, SUM["g_count"]]) & (
        sampling.tables["g"].unseen == 0
    )
    not_owned = sums[:, SUM["in_optimizer"]] == 0
    conclusive = nothing_to_apply | gradient_ignored | read_in_full | not_owned
    conclusive |= gradient_is_zero & (sums[:, SUM["g_count"]] > 0)
    return np.asarray(conclusive | (sampling.unseen == 0))


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
    # What no optimizer owns is not trained, and nothing clears its gradient.
    owned = c["in_optimizer"] != 0
    if not owned.any():  # the trainer steps by other means
        owned[:] = True
    ratio = c["update_ratio"][np.isfinite(c["update_ratio"]) & (c["requires_grad"] > 0) & owned]
    if ratio.size:
        metrics |= {
            "monitor/update_ratio_median": float(np.median(ratio)),
            "monitor/update_ratio_p95": float(np.percentile(ratio, 95)),
            "monitor/update_ratio_min": float(ratio.min()),
            "monitor/update_ratio_max": float(ratio.max()),
            "monitor/frozen_count": float(table.frozen().sum()),
        }
    for what, tag in (("w", "param"), ("g", "applied_grad")):
        estimate = estimates[what]
        seen = ~np.isnan(estimate.copies)
        # A parameter that moved had a gradient: where it was freed before it could be read, as by
        # an optimizer that runs within the backward pass, the total is not known.
        unread = what == "g" and (~seen & (c["update_norm"] > 0)).any()
        if what == "g":
            seen &= owned
        if unread or not seen.any():
            continue
        prefix = "weight" if what == "w" else "grad"
        bad = np.nansum(c[f"{prefix}_nan"]) + np.nansum(c[f"{prefix}_inf"]) > 0
        norm = float(np.sqrt(estimate.square[seen].sum()))
        unknown = norm == 0 and (sampling.tables[what].unseen[seen] > 0).any()
        if unknown and what == "g" and not bad:
            continue  # a sample of zeros says nothing of the rest
        metrics[f"monitor/{tag}_norm"] = float("nan") if bad else norm
        if not unknown:
            metrics[f"monitor/{tag}_norm_stderr"] = _stderr_of_norm(norm, estimate.variance[seen])
    copies = estimates["u"].copies
    expansion = sampling.tables["u"].expansion
    scale = np.where(np.isnan(copies), 0.0, expansion / np.where(copies > 0, copies, 1))
    graded = float((reduced.sums[:, SUM["u_graded"]] * scale).sum())
    if graded > 0:
        lost = float((reduced.sums[:, SUM["u_lost"]] * scale).sum())
        metrics["monitor/update_lost_fraction"] = lost / graded
    for kind in ("nan", "inf"):
        either = (reduced.sums[:, SUM[f"w_{kind}"]] > 0) | (reduced.sums[:, SUM[f"g_{kind}"]] > 0)
        metrics[f"debug/{kind}_param_count"] = float(either.sum())
    frozen = np.flatnonzero(table.frozen())
    for i in frozen[np.argsort(c["update_ratio"][frozen], kind="stable")][:topk]:
        metrics[TOPK_FROZEN_PREFIX + table.names[i]] = float(c["update_ratio"][i])
    return metrics
