from __future__ import annotations

from tiny_training import TINY_MATRICES

from distmon_benchmarks import ranks


def test_two_ranks_race_and_agree() -> None:
    case, result = ranks.run("fsdp2", 2, rounds=2, workload=TINY_MATRICES)
    assert (case.parallel, case.ranks, case.tensors) == ("fsdp2", 2, 10)
    assert result.wrong == {}
    found = {(name, measure): value for name, measure, _, value in result.numbers}
    assert found["distmon sampled", "collectives"] == 2
    assert found["distmon sampled", "sent_bytes"] > 0
    assert found["naive clone", "collectives"] >= 2 * case.tensors
    for name in ("distmon sampled", "distmon exact", "naive clone"):
        assert found[name, "observation"] > 0
    assert found["all_reduce", "collective"] > 0
    assert found["none", "step"] > 0
