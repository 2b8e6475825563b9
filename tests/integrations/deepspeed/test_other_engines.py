"""Pipelines and mixtures of experts under DeepSpeed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_cases import Seen, disagreement
from other_engines import pipeline_reference


def test_pipeline_agrees_with_the_unsharded_model(parts: Any, tmp_path: Path) -> None:
    seen, losses = parts(0, "pipeline")
    expected = pipeline_reference(tmp_path)
    assert disagreement(seen, expected) < 1e-5
    assert [loss for r in seen.records for loss in r.losses.values()] == pytest.approx(losses)
    for record, other in zip(seen.records, expected.records, strict=True):
        assert record.losses == pytest.approx(other.losses, rel=1e-6)
        assert record.desync is None
        if record.step == 1:
            continue  # the backward pass of a pipeline is watched from the second step on
        assert record.gradient_gain is not None
        assert other.gradient_gain is not None
        assert record.gradient_gain.blocks == ("2", "3")
        assert record.gradient_gain.gain == pytest.approx(other.gradient_gain.gain, rel=1e-5)


def test_experts_have_their_numbers_in_the_whole_model(parts: Any) -> None:
    """Spread over two ranks or replicated, the same two experts with the same numbers."""
    found: dict[tuple[int, int], Seen] = parts(0, "experts")
    together, spread = found[2, 1], found[2, 2]
    assert together.last.params.names == spread.last.params.names
    assert any(".deepspeed_experts.1." in name for name in spread.last.params.names)
    for seen in found.values():
        for record in seen.records:
            assert record.desync is None
            assert record.faults == ()
    for seen in (together, spread):
        for record in seen.records:
            norm = record.metrics["train/unclipped_grad_norm"]
            assert record.metrics["monitor/grad_norm"] == pytest.approx(norm, rel=1e-5)
    for column in ("grad_norm", "update_norm"):
        assert spread.column(column) == pytest.approx(found[0, 2].column(column), rel=1e-5)
