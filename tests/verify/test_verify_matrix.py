"""The contract: one record, however the model is distributed."""

from __future__ import annotations

import pytest

from distmon.layout.arrangements import ARRANGEMENTS
from distmon.verify import verify

NEED_FOUR = {"fsdp1-hybrid", "fsdp1-hybrid-flat", "hsdp", "fsdp+tp", "pp+ddp"}


@pytest.mark.parametrize(("ranks", "skipped"), [(2, NEED_FOUR), (4, set())])
def test_every_configuration_gives_the_record_of_the_unsharded_model(
    ranks: int, skipped: set[str]
) -> None:
    verdicts = [*verify([*ARRANGEMENTS.values()], None, ranks, steps=4)]
    assert [v.arrangement.name for v in verdicts] == [*ARRANGEMENTS]
    assert {v.arrangement.name for v in verdicts if v.skipped} == skipped
    wrong = {
        v.arrangement.name: v.error or (v.comparison and (v.comparison.problems, v.comparison.off))
        for v in verdicts
        if not v.ok
    }
    assert wrong == {}
    for verdict in verdicts:
        if verdict.comparison is None or verdict.arrangement.name == "plain":
            continue
        assert verdict.comparison.collectives == 2
        assert verdict.comparison.not_compared == ()
        held, all_of_it = sum(verdict.comparison.sampled), verdict.comparison.sample
        if verdict.arrangement.name.startswith(("fsdp1-full", "fsdp-", "pp")):
            replicas = 2 if verdict.arrangement.name == "pp+ddp" else 1
            assert held == replicas * all_of_it
            assert max(verdict.comparison.sampled) < all_of_it
