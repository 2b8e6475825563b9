"""Engines of every stage against the same training without any wrapper."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_cases import EXACT, ROUNDED, Seen, disagreement, reference

NAMES = (
    "scale",
    "embed.weight",
    "first.weight",
    "first.bias",
    "norm.weight",
    "norm.bias",
    "second.weight",
)
"""Of the whole model, the tied parameter once."""


@pytest.mark.parametrize("name", EXACT)
def test_engine_agrees_with_the_unsharded_model(
    trained: list[dict[str, Seen]], name: str, tmp_path: Path
) -> None:
    expected, found = reference(EXACT[name], tmp_path), trained[0][name]
    assert found.last.params.names == NAMES
    assert disagreement(found, expected) < 1e-5
    for record, other in zip(found.records, expected.records, strict=True):
        assert record.losses == pytest.approx(other.losses, rel=1e-6)
        assert record.applied
        assert record.faults == ()
        assert record.desync is None
        assert record.metrics["performance/monitor_collectives"] == 2.0


@pytest.mark.parametrize("name", [name for name in EXACT if name != "stage0"])
def test_norm_before_clipping_is_in_the_record(
    trained: list[dict[str, Seen]], name: str, tmp_path: Path
) -> None:
    expected = reference(EXACT[name], tmp_path)
    norms = [record.metrics["train/unclipped_grad_norm"] for record in trained[0][name].records]
    assert norms == pytest.approx(expected.norms, rel=1e-5)


@pytest.mark.parametrize("name", [name for name in EXACT if "flow" in EXACT[name].monitor])
def test_gains_are_those_of_the_global_batch(
    trained: list[dict[str, Seen]], name: str, tmp_path: Path
) -> None:
    expected = reference(EXACT[name], tmp_path)
    for record, other in zip(trained[0][name].records, expected.records, strict=True):
        assert record.gradient_gain is not None
        assert other.gradient_gain is not None
        assert (
            record.gradient_gain.blocks == other.gradient_gain.blocks == ("first", "norm", "second")
        )
        assert record.gradient_gain.gain == pytest.approx(other.gradient_gain.gain, rel=1e-5)
        assert record.gradient_gain.output_norm == pytest.approx(
            other.gradient_gain.output_norm, rel=1e-5
        )


@pytest.mark.parametrize("name", [*EXACT, *ROUNDED])
def test_both_ranks_have_the_same_record(trained: list[dict[str, Seen]], name: str) -> None:
    one, other = (seen[name] for seen in trained)
    assert disagreement(one, other) == 0.0


def test_bf16_stages_agree_with_each_other(trained: list[dict[str, Seen]]) -> None:
    """To the rounding of bf16 gradients: 8 bits, and Adam's normalisation keeps it there."""
    base = trained[0]["bf16_stage2"]
    assert disagreement(trained[0]["bf16_stage1"], base) == 0.0
    for name in ("bf16_stage3", "bf16_fp32_sums"):
        assert disagreement(trained[0][name], base) < 2**-6, name
    assert disagreement(trained[0]["bf16_fp32_sums"], trained[0]["bf16_stage3"]) < 1e-5


@pytest.mark.parametrize("name", ROUNDED)
def test_bf16_weights_are_the_fp32_masters(trained: list[dict[str, Seen]], name: str) -> None:
    """A bf16 weight near 1 could only move by 1/128, and `scale` moves by its learning rate."""
    values = [record.params.columns["weight_mean"] for record in trained[0][name].records]
    moved = values[1][NAMES.index("scale")] - values[0][NAMES.index("scale")]
    assert 0 < abs(moved) < 2**-7
    for record in trained[0][name].records:
        assert record.metrics["monitor/update_lost_fraction"] < 0.01


@pytest.mark.parametrize("name", [*EXACT, *ROUNDED])
def test_frozen_parameters_are_recorded(trained: list[dict[str, Seen]], name: str) -> None:
    seen = trained[0][name]
    assert seen.column("requires_grad")["second.weight"] == 0.0
    assert seen.column("in_optimizer")["second.weight"] == 0.0
    assert seen.column("has_grad")["second.weight"] == 0.0
    assert seen.column("weight_norm")["second.weight"] > 1.0, "readable although frozen"
    assert seen.column("update_expected")["second.weight"] == 0.0, "it is not trained"
    others = [name for name in NAMES if name != "second.weight"]
    assert all(seen.column("requires_grad")[name] == 1.0 for name in others)
    assert all(seen.column("in_optimizer")[name] == 1.0 for name in others)
    assert "frozen" not in {alert["rule"] for alert in seen.alerts}
