"""Replicas that diverged: ranks that should have equal weights but do not."""

from __future__ import annotations

from collections.abc import Iterable

from distmon.record.record import Record
from distmon.rules.base import Finding, Limits, Memory, Rule, name_some


def check(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:  # noqa: ARG001
    """Yield one finding with the ranks that diverged and the parameters that differ."""
    found = record.desync
    if found is None or record.has_nonfinite:
        return  # a NaN that is not on every rank yet is reported by `nonfinite`
    ranks = name_some([str(rank) for rank in found.ranks])
    reference = (
        f"rank {found.reference} (no majority: the lowest rank is the reference)"
        if found.tie
        else f"the majority (rank {found.reference} and ranks equal to it)"
    )
    where = (
        name_some(found.params)
        if found.params
        else "no parameter named, the weights were equal again during the search"
    )
    yield Finding(
        key="replicas",
        message=f"rank {ranks} no longer holds the same weights as {reference}: {where}",
        params=found.params,
        ranks=found.ranks,
        measured=float(len(found.params)),
        threshold=0.0,
    )


RULES = (
    Rule(
        name="replica_desync",
        summary="checksums differ between ranks that hold the same shards",
        check=check,
        severity="critical",
        advice=(
            "restart from a checkpoint: the ranks now train different models",
            "look for code that changes weights or seeds on one rank only, and for gradients that "
            "are not all-reduced (no_sync, a parameter outside the wrapper)",
            "if the same rank diverges again, test that host's GPU and memory",
        ),
    ),
)
