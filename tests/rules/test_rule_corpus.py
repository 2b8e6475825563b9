"""The rules on the recorded runs in `tests/runs`: what `python -m benchmarks.alarms` prints."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.alarms.scenarios import FAILING, HEALTHY, SCENARIOS, Expectation
from benchmarks.alarms.scoring import ALARM_SHARE, CORPUS, LEAD, Score, score


def _recordings() -> list[Path]:
    """The folders of the corpus; the tests of run folders lie beside them."""
    return [each for each in CORPUS.iterdir() if each.is_dir() and each.name != "__pycache__"]


@functools.cache
def scored(name: str) -> Score:
    """Replayed once for all tests."""
    return score(SCENARIOS[name])


def test_every_scenario_is_recorded_and_nothing_else() -> None:
    assert {folder.name for folder in _recordings()} == set(SCENARIOS)
    assert len(HEALTHY) >= 10
    assert len(FAILING) >= 10
    assert sum(each.nan == "coming" for each in FAILING) >= 5


@pytest.mark.parametrize("name", SCENARIOS)
def test_rules_do_what_is_required(name: str) -> None:
    assert scored(name).misses == []


def test_healthy_runs_raise_few_alerts() -> None:
    scores = [scored(scenario.name) for scenario in HEALTHY]
    alerts = sum(len(each.alerts) for each in scores)
    assert alerts < ALARM_SHARE * sum(each.replay.observations for each in scores)


def test_a_wrong_answer_is_a_miss() -> None:
    frozen = SCENARIOS["frozen"]
    for expected in (
        Expectation(("frozen",), "head.weight"),
        Expectation(("frozen",), "blocks.1.*", (1, 60)),
        Expectation(("nonfinite",)),
    ):
        (miss,) = score(replace(frozen, expected=expected)).misses
        assert miss.startswith(f"no {expected.rules[0]} at ")
    sentence = "is not what this run is made for"
    assert score(replace(frozen, nan="coming")).misses == [f"NaN at step None {sentence}"]
    planted = SCENARIOS["nan-planted"]
    assert score(replace(planted, nan="never")).misses == [f"NaN at step 61 {sentence}"]
    misses = score(replace(planted, expected=None)).misses
    assert any(miss.startswith("critical nonfinite") for miss in misses)


def test_a_late_warning_is_a_miss() -> None:
    found = scored("nan-adamw")
    assert found.nonfinite_at is not None
    assert found.lead is not None
    late = replace(found, nonfinite_at=found.nonfinite_at - found.lead + LEAD - 1)
    assert late.misses == [f"NaN at step {late.nonfinite_at} foretold 4 steps before"]
    never = replace(found, foretold_by=None)
    assert never.misses == [f"NaN at step {found.nonfinite_at} foretold 0 steps before"]


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield key
            yield from _texts(each)
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)


def test_recordings_are_small_and_do_not_name_the_machine() -> None:
    recordings = _recordings()
    assert sum(file.stat().st_size for each in recordings for file in each.iterdir()) < 6e6
    for folder in recordings:
        files = {file.name for file in folder.iterdir()}
        assert files == {"run.json", "records.jsonl", "params.arrow", "alerts.jsonl"}
        info = json.loads((folder / "run.json").read_text())
        assert set(info["versions"]) <= {"distmon", "torch"}
        assert info["config"]["run_dir"] == folder.name
        lines = [
            json.loads(line)
            for name in ("records.jsonl", "alerts.jsonl")
            for line in (folder / name).read_text().splitlines()
        ]
        assert not [text for text in _texts([info, lines]) if text.startswith(("/", "~"))]
