"""The profile of an observation."""

from __future__ import annotations

import pytest
from tiny_training import TINY_MATRICES

from distmon_benchmarks import where_time_goes
from distmon_benchmarks.where_time_goes import PARTS, main, profile


def test_every_part_has_a_time_for_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(where_time_goes, "settle", lambda: 0.0)
    seconds = profile(TINY_MATRICES, 2)
    assert {len(times) for times in seconds.values()} == {2}
    assert {name for _, name in seconds} == {name for _, name, _ in PARTS}
    for kind in ("observed", "idle"):
        assert all(min(seconds[kind, name]) > 0 for name in ("before_step", "after_step", "step"))
    for name in ("snapshot", "measure"):
        assert seconds["idle", name] == [0.0, 0.0]
        assert min(seconds["observed", name]) > 0


def test_no_rounds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["where_time_goes.py", "--rounds", "0"])
    with pytest.raises(SystemExit) as refused:
        main()
    assert refused.value.code == 2
