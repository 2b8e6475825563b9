"""Which records a run folder lacks: those listed as gaps, and those that no file mentions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Any, Final

PARAMS_SINK: Final = "arrow"


def describe_gaps(gaps: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a sentence for each line of `gaps.jsonl`."""
    found = []
    for gap in gaps:
        count, what = gap.get("count", 1), gap.get("what", "record")
        things = f"1 {what}" if count == 1 else f"{count} {what}s"
        first, last = gap["step"], gap.get("last_step", gap["step"])
        steps = f"step {first}" if first == last else f"steps {first} to {last}"
        found.append(
            f"the sink {gap.get('sink')} lost {things} ({steps}): {gap.get('reason', 'unknown')}"
        )
    return found


def missing_observations(
    records: Iterable[Mapping[str, Any]], oldest_left_out: bool = False
) -> list[str]:
    """Return a sentence for each attempt that lacks observations between those it has.

    Each process numbers its observations from 1, so that a hole shows whatever caused it.
    `oldest_left_out`: the oldest records were not read, so that the first attempt starts later.
    """
    by_attempt: dict[int, dict[int, int]] = {}
    for record in records:
        number = record.get("observation")
        if isinstance(number, int) and number > 0:
            by_attempt.setdefault(record["attempt"], {})[number] = record["step"]
    found = []
    for attempt, steps in sorted(by_attempt.items()):
        known = sorted(steps)
        first = known[0] if oldest_left_out and attempt == min(by_attempt) else 1
        missing = known[-1] - first + 1 - len(steps)
        if missing:
            starts = [first - 1, *known]
            before = [n for n, after in zip(starts, known, strict=False) if after > n + 1]
            places = ", ".join(f"after step {steps.get(n, 0)}" for n in before[:3])
            more = ", ..." if len(before) > 3 else ""
            found.append(
                f"records.jsonl lacks {missing} of {known[-1]} observations of attempt {attempt}: "
                f"{places}{more}"
            )
    return found


def missing_rows(
    info: Mapping[str, Any], records: Iterable[Mapping[str, Any]], steps: Set[int]
) -> list[str]:
    """Return a sentence when steps with a record have no rows of parameters.

    Where there are none at all, or the sink is off, the run was meant to have none.
    """
    if not steps or PARAMS_SINK not in info["config"].get("sinks", ()):
        return []
    observed = [record["step"] for record in records if not record.get("partial")]
    lacking = [step for step in observed if step not in steps]
    if not lacking:
        return []
    return [
        f"params.arrow lacks the rows of {len(lacking)} of {len(observed)} records, "
        f"the first of step {lacking[0]}"
    ]
