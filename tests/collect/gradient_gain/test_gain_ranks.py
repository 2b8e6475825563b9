"""The gain is that of the global batch, however the model is distributed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gain_rank_cases import PIPELINE, WAYS, cases, observed
from gloo_ranks import run_ranks

from distmon import Record


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[Record]:
    return observed("plain", tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(cases, 2, tmp_path_factory.mktemp("together"), writer="thread")


@pytest.mark.parametrize("way", [*WAYS, PIPELINE])
def test_gains_are_those_of_one_process(
    way: str, alone: list[Record], together: list[dict[str, Any]]
) -> None:
    for rank in together:
        for record, expected in zip(rank[way], alone, strict=True):
            if way == PIPELINE and record.step == 1:
                assert record.gradient_gain is None  # there has been a trial run
                continue
            assert expected.gradient_gain is not None
            assert record.gradient_gain is not None
            assert record.faults == ()
            assert (
                record.gradient_gain.blocks == expected.gradient_gain.blocks == ("block0", "block1")
            )
            assert record.gradient_gain.gain == pytest.approx(expected.gradient_gain.gain, rel=1e-5)
            for name in ("mean_gain", "amplification"):
                tag = f"gradient_monitor/{name}"
                assert record.metrics[tag] == pytest.approx(expected.metrics[tag], rel=1e-5)
            assert record.metrics["performance/monitor_collectives"] == 2


@pytest.mark.parametrize("way", WAYS)
def test_norms_are_those_of_the_global_batch(
    way: str, alone: list[Record], together: list[dict[str, Any]]
) -> None:
    """Where two ranks work on one batch, by the factor in docs/flow.md."""
    factor = {"tp": 2**-0.5, "tp-sequence": 0.5}.get(way, 1.0)
    for record, expected in zip(together[0][way], alone, strict=True):
        for norm in ("input_norm", "output_norm"):
            norms = factor * getattr(expected.gradient_gain, norm)
            assert getattr(record.gradient_gain, norm) == pytest.approx(norms, rel=1e-5)


def test_parts_of_an_activation_that_lies_on_several_ranks(together: list[dict[str, Any]]) -> None:
    for rank in together:
        assert rank["parts"] == {"cut": (4, 1), "whole": (8, 2), "addends": None}


def test_a_glob_that_matches_nothing_is_told_by_every_rank(together: list[dict[str, Any]]) -> None:
    for rank in together:
        assert rank["glob"].startswith('no module matches "layers.*"')


@pytest.mark.parametrize("what", ["fault", "error"])
def test_what_one_rank_could_not_measure_is_not_made_up(
    what: str, together: list[dict[str, Any]]
) -> None:
    for rank in together:
        first, second = rank[what]
        assert first.gradient_gain is None
        assert "gradient_monitor/mean_gain" not in first.metrics
        assert np.isfinite(second.gradient_gain.gain).all()
        assert bool(first.faults) == (what == "error")
