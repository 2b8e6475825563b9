from __future__ import annotations

from pathlib import Path

from gloo_ranks import run_ranks
from tiny_training import race_on_rank

from benchmarks.scale.ranks import RankResult, merge

TENSORS = 10
ROUNDS = 2


def test_two_ranks_race_and_agree(tmp_path: Path) -> None:
    # Those of the strict group, which is in Python, do not pass the dispatcher: not counted.
    result = merge(run_ranks(race_on_rank, 2, str(tmp_path), strict=False))
    assert result.failed == {}
    assert set(result.wrong.values()) == {""}
    found: dict[tuple[str, str], list[float]] = {}
    for name, measure, _, value in result.numbers:
        found.setdefault((name, measure), []).append(value)
    assert found["distmon sampled", "collectives"] == [2]
    assert found["distmon sampled", "sent_bytes"][0] > 0
    assert found["naive clone", "collectives"][0] >= 2 * TENSORS
    for name in ("distmon sampled", "distmon exact", "naive clone"):
        assert len(found[name, "observation"]) == ROUNDS
    assert len(found["all_reduce", "collective"]) == ROUNDS
    assert len(found["none", "step"]) == ROUNDS
    # Nothing else is measured of the collective: it is no contender.
    assert {measure for name, measure in found if name == "all_reduce"} == {"collective"}


def test_an_answer_that_is_wrong_on_any_rank_is_wrong() -> None:
    first = RankResult([("a", "observation", 0, 1.0)], {"a": ""})
    merged = merge([first, RankResult(wrong={"a": "no"})])
    assert merged == RankResult([("a", "observation", 0, 1.0)], {"a": "rank 1: no"})


def test_a_contender_that_fails_on_any_rank_has_no_numbers() -> None:
    first = RankResult([("a", "observation", 0, 1.0), ("b", "observation", 0, 2.0)])
    merged = merge([first, RankResult(failed={"b": "no"})])
    assert merged == RankResult([("a", "observation", 0, 1.0)], failed={"b": "rank 1: no"})
