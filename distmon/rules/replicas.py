"""Ranks that should hold equal weights and do not."""

from __future__ import annotations

from collections.abc import Iterable

from distmon.record import Record
from distmon.rules.base import Finding, Limits, Memory, Rule, name_some


def check(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:  # noqa: ARG001
    """One finding naming the ranks that left and the parameters that differ."""
    found = record.desync
    if found is None or record.has_nonfinite:
        return  # a NaN that has not reached every rank yet is told by its own rule
    ranks = name_some([str(rank) for rank in found.ranks])
    believed = (
        f"rank {found.reference} (no majority: the lowest rank is taken as right)"
        if found.tie
        else f"the majority (rank {found.reference} and those equal to it)"
    )
    where = (
        name_some(found.params) if found.params else "weights that were equal again when looked at"
    )
    yield Finding(
        key="replicas",
        message=f"rank {ranks} no longer holds the same weights as {believed}: {where}",
        params=found.params,
        ranks=found.ranks,
        measured=float(len(found.params)),
        threshold=0.0,
    )


RULES = (
    Rule(
        name="replica_desync",
        summary="checksums of ranks that hold the same pieces differ",
        check=check,
        severity="critical",
        advice=(
            "restart from a checkpoint: the ranks now train different models",
            "look for code that changes weights or seeds on one rank only, and for gradients that "
            "are not all-reduced (no_sync, a parameter outside the wrapper)",
            "if the same rank does it again, test that host's GPU and memory",
        ),
    ),
)
