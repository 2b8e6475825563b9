"""Which records a run folder lacks: those listed as gaps, and those that no file mentions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from itertools import pairwise
from typing import Any, Final

PARAMS_SINK: Final = "arrow"
RECORDS_SINK: Final = "jsonl"


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
    info: Mapping[str, Any],
    records: Iterable[Mapping[str, Any]],
    ends: Iterable[Mapping[str, Any]],
    oldest_left_out: bool = False,
) -> list[str]:
    """Return a sentence for each attempt that lacks observations.

    Each process numbers its observations from 1 and notes the last number when it closes its
    monitor (`ends`), so that a hole shows whatever caused it, also one at the end.
    `oldest_left_out`: the oldest records were not read, so that the first attempt starts later.
    """
    by_attempt: dict[int, dict[int, int]] = {}
    for record in records:
        number = record.get("observation")
        if isinstance(number, int) and number > 0:
            by_attempt.setdefault(record["attempt"], {})[number] = record["step"]
    last = {}
    if RECORDS_SINK in info["config"].get("sinks", (RECORDS_SINK,)):
        last = {end["attempt"]: (end["observations"], end["step"]) for end in ends}
    found = []
    for attempt in sorted({*by_attempt, *last}):
        steps = by_attempt.get(attempt, {})
        if oldest_left_out and attempt == min(by_attempt, default=attempt):
            if not steps:
                continue
            first = min(steps)
        else:
            first = 1
        observed, last_step = last.get(attempt, (0, 0))
        total = max((*steps, observed))
        missing = total - first + 1 - len(steps)
        if missing:
            known = [first - 1, *sorted(steps), total + 1]
            before = [n for n, after in pairwise(known) if after > n + 1]
            places = ", ".join(f"after step {steps.get(n, 0)}" for n in before[:3])
            more = ", ..." if len(before) > 3 else ""
            if total not in steps:
                more += f" up to the last observed step, {last_step}"
            found.append(
                f"records.jsonl lacks {missing} of {total} observations of attempt {attempt}: "
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
