from __future__ import annotations

from pathlib import Path

from gloo_ranks import run_ranks
from tiny_training import race_on_rank

from distmon_benchmarks.ranks import RankResult, together

TENSORS = 10
ROUNDS = 2


def test_two_ranks_race_and_agree(tmp_path: Path) -> None:
    result = together(run_ranks(race_on_rank, 2, str(tmp_path)))
    assert result.wrong == {}
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
    # Nothing else is said of the collective: it is no contender.
    assert {measure for name, measure in found if name == "all_reduce"} == {"collective"}


def test_who_is_wrong_on_any_rank_has_no_numbers() -> None:
    first = RankResult([("a", "observation", 0, 1.0), ("b", "observation", 0, 2.0)])
    second = RankResult([("a", "observation", 0, 1.5)], {"b": "no"})
    assert together([first, second]) == RankResult([("a", "observation", 0, 1.0)], {"b": "no"})
