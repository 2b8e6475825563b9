"""The monitor's state in a checkpoint: older versions load, unknown ones are refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import quiet, small_model, train

import distmon
from distmon.runtime.state import STATE_VERSION, StateVersionError, state_hash, upgrade

FROZEN_OF_0_1 = {
    "observation": 4,
    "tracks": {"0.bias": {"streak": 3, "calm": 0, "told": 1, "gravity": 1, "last": 4}},
    "memory": {},
}


def _state_of_0_1(step: int) -> dict[str, Any]:
    """As distmon 0.1.0 wrote it, with what was optional then."""
    return {
        "version": 1,
        "step": step,
        "loss_ema": 2.5,
        "losses": [[step - 1, 2.0], [step, 3.0]],
        "rules": {"rules": {"frozen": FROZEN_OF_0_1}},
        "known_bad": False,
        "evaluations": {"number": 2, "train": 1.0, "val": 1.5, "unchanged": 1},
        "pending_evaluations": [[step, 0.5, 1.0, 1.2]],
        "gain": [1.1, 1.2],
        "stretch": 3,
    }


@pytest.fixture
def monitor(tmp_path: Path) -> Any:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with distmon.attach(model, optimizer, **quiet(tmp_path, interval=10, budget=0.5)) as attached:
        yield attached


def test_the_state_of_0_1_continues(monitor: Any) -> None:
    monitor.load_state_dict(_state_of_0_1(44))
    state = monitor.state_dict()
    assert state["version"] == STATE_VERSION
    assert state["schedule"] == {"step": 44}
    assert state["cost"] == {"stretch": 3}
    assert monitor.schedule.next_observation == 60
    assert state["cycle"]["losses"] == [(43, 2.0), (44, 3.0)]
    assert state["cycle"]["evaluations"] == [[44, 0.5, 1.0, 1.2]]
    (track,) = state["cycle"]["rules"]["rules"]["frozen"]["tracks"].values()
    assert track == {"streak": 3, "calm": 0, "alerts": 1, "gravity": 1, "last": 4}
    assert state["cycle"]["record"] == {
        "loss_ema": 2.5,
        "gain": [1.1, 1.2],
        "evaluations": {"number": 2, "train": 1.0, "val": 1.5, "unchanged": 1},
    }


def test_the_oldest_states_lack_what_came_later(monitor: Any) -> None:
    later = ("evaluations", "pending_evaluations", "gain", "stretch")
    state = {key: value for key, value in _state_of_0_1(44).items() if key not in later}
    monitor.load_state_dict(state)
    assert monitor.schedule.completed == 44
    assert monitor.schedule.interval == 10


@pytest.mark.parametrize("version", [0, 99, "two", None])
def test_an_unknown_version_is_one_sentence_and_a_fresh_start(
    monitor: Any, version: object, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(StateVersionError, match=f"version {version!r} and this distmon reads"):
        upgrade({"version": version})
    with caplog.at_level(logging.WARNING, logger="distmon"):
        monitor.load_state_dict({**_state_of_0_1(44), "version": version})
    (line,) = caplog.messages
    assert line.endswith("continuing from a fresh state")
    assert monitor.schedule.completed == 0


def test_state_is_plain_and_survives_json(tmp_path: Path) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with distmon.attach(model, optimizer, **quiet(tmp_path, interval=4)) as monitor:
        train(model, optimizer, monitor, range(1, 7))
        monitor.evaluated(val_loss=1.0)
        state = monitor.state_dict()
    with distmon.attach(model, optimizer, **quiet(tmp_path, interval=4)) as resumed:
        resumed.load_state_dict(json.loads(json.dumps(state)))
        assert json.dumps(resumed.state_dict()) == json.dumps(state)


def _without(state: dict[str, Any], path: str) -> dict[str, Any]:
    """A copy of `state` without the key at the end of `path`."""
    copied = json.loads(json.dumps(state))
    *outer, last = path.split("/")
    section = copied
    for key in outer:
        section = section[key]
    del section[last]
    return dict(copied)


def _with(state: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    """A copy of `state` with another value at `path`."""
    copied = _without(state, path)
    *outer, last = path.split("/")
    section = copied
    for key in outer:
        section = section[key]
    section[last] = value
    return copied


KEYS = (
    *("schedule", "schedule/step", "finite_watch", "finite_watch/nonfinite_known", "cost"),
    *("cycle", "cycle/losses", "cycle/evaluations", "cycle/record", "cycle/record/loss_ema"),
    *("cycle/record/evaluations/val", "cycle/rules", "cycle/rules/rules"),
    "cycle/rules/rules/frozen/tracks",
)
WRONG: tuple[tuple[str, object], ...] = (
    ("schedule", []),
    ("schedule/step", "soon"),
    ("schedule/step", -4),
    ("schedule/step", None),
    ("finite_watch/nonfinite_known", "no"),
    ("cost/stretch", 0),
    ("cost/stretch", 10**9),
    ("cost/stretch", float("nan")),
    ("cycle/losses", 7),
    ("cycle/losses", [[1]]),
    ("cycle/losses", [[1, "low"]]),
    ("cycle/evaluations", [[1, 2]]),
    ("cycle/evaluations", [[1, None, "a", 1.0]]),
    ("cycle/record/loss_ema", "low"),
    ("cycle/record/gain", [[]]),
    ("cycle/record/evaluations", "none"),
    ("cycle/record/evaluations/val", {}),
    ("cycle/rules/rules", []),
    ("cycle/rules/rules/frozen/tracks", {"0.bias": {"streak": "long"}}),
    ("cycle/rules/rules/frozen/tracks", {"0.bias": {"length": 3}}),
    ("cycle/rules/rules/frozen/memory", 3),
)


@pytest.fixture
def saved(tmp_path: Path) -> dict[str, Any]:
    """A state with something in every part, as a checkpoint holds it."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    settings = quiet(tmp_path / "saved", interval=10, budget=0.5)
    with distmon.attach(model, optimizer, **settings) as monitor:
        monitor.load_state_dict(_state_of_0_1(44))
        train(model, optimizer, monitor, range(45, 48))
        state = json.loads(json.dumps(monitor.state_dict()))
    return dict(state)


def test_only_what_decides_the_order_of_collectives_must_be_equal(saved: dict[str, Any]) -> None:
    """Ranks may load what each of them saved."""
    for key, value in (
        ("cycle/record/loss_ema", 7.0),
        ("cycle/losses", []),
        ("cycle/rules/rules", {}),
        ("finite_watch/nonfinite_known", True),
    ):
        assert state_hash(_with(saved, key, value)) == state_hash(saved)
    for key, value in (("schedule/step", 46), ("cost/stretch", 2)):
        assert state_hash(_with(saved, key, value)) != state_hash(saved)


def _assert_stays_fresh(monitor: Any, broken: object, caplog: pytest.LogCaptureFixture) -> None:
    fresh = monitor.state_dict()
    with caplog.at_level(logging.WARNING, logger="distmon"):
        monitor.load_state_dict(broken)
    (line,) = caplog.messages
    assert line.startswith("distmon: loading the state failed on rank 0 (")
    assert line.endswith("; continuing from a fresh state")
    assert "\n" not in line
    assert monitor.state_dict() == fresh
    assert monitor.schedule.interval == 10


@pytest.mark.parametrize("key", KEYS)
def test_a_state_that_lacks_something_is_one_sentence_and_a_fresh_start(
    monitor: Any, saved: dict[str, Any], key: str, caplog: pytest.LogCaptureFixture
) -> None:
    _assert_stays_fresh(monitor, _without(saved, key), caplog)


@pytest.mark.parametrize(("key", "value"), WRONG)
def test_a_state_with_a_wrong_value_is_one_sentence_and_a_fresh_start(
    monitor: Any, saved: dict[str, Any], key: str, value: object, caplog: pytest.LogCaptureFixture
) -> None:
    _assert_stays_fresh(monitor, _with(saved, key, value), caplog)


@pytest.mark.parametrize("state", [[1, 2], "state", 7])
def test_what_is_no_state_at_all_is_one_sentence_and_a_fresh_start(
    monitor: Any, state: object, caplog: pytest.LogCaptureFixture
) -> None:
    _assert_stays_fresh(monitor, state, caplog)


def test_training_continues_after_a_broken_state(
    saved: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with distmon.attach(model, optimizer, **quiet(tmp_path, interval=2)) as monitor:
        monitor.load_state_dict(_without(saved, "cycle/rules"))
        records = train(model, optimizer, monitor, range(1, 7))
    assert [record.step for record in records] == [2, 4, 6]
    assert len(caplog.messages) == 1
