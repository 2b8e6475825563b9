"""The profile of an observation."""

from __future__ import annotations

import pytest
from tiny_training import TINY_MATRICES

from benchmarks.overhead.cpu_parts import Spent
from benchmarks.overhead.where_time_goes import HOOKS, PARTS, main, profile


def test_every_part_has_a_time_for_every_round() -> None:
    seconds = profile(TINY_MATRICES, 2, settle=lambda: 0.0)
    assert {len(times) for times in seconds.values()} == {2}
    assert {part for _, part in seconds} == {HOOKS, *(part for part, _, _ in PARTS)}
    methods = {method: part for part, _, method in PARTS}
    for method, part in methods.items():
        assert min(seconds["observed", part]) > 0, method
    for kind in ("observed", "unobserved"):
        for method in ("before_step", "after_step", "step"):
            assert min(seconds[kind, methods[method]]) > 0
    for method in ("snapshot", "measure", "start"):
        assert seconds["unobserved", methods[method]] == [0.0, 0.0]


def test_no_rounds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["where_time_goes", "--rounds", "0"])
    with pytest.raises(SystemExit) as refused:
        main()
    assert refused.value.code == 2


def test_the_methods_whose_cpu_time_is_listed_exist() -> None:
    spent = Spent()
    with spent.around():
        pass  # raises for a method that has another name by now
    timed = spent.timed("part", lambda: sum(range(1000)))
    assert timed() == 499500
    assert spent.calls == {"part": 1}
