"""A NaN gradient and an overflow of the loss scale, told right in every stage."""

from __future__ import annotations

import numpy as np
import pytest
from engine_cases import OVERFLOWING, SPOILED, Seen


@pytest.mark.parametrize("name", SPOILED)
def test_nan_gradient_is_traced_to_its_parameter(trained: list[dict[str, Seen]], name: str) -> None:
    seen = trained[0][name]
    found = seen.last.nonfinite
    assert found is not None
    assert {place.param for place in found.places} == {"first.weight"}
    assert found.param_count == 1
    where = found.places[0]
    if name == "nan0":
        # The bare optimizer applies it, and the next loss shows it.
        assert (found.step, found.signal) == (4, "loss")
        assert (where.weight_nan, where.grad_nan) == (1, 0)
        assert seen.last.metrics["train/skipped_steps"] == 0.0
    else:
        # DeepSpeed leaves the step out, and nothing was observed at it.
        assert (found.step, found.signal) == (3, "gradient norm")
        assert (where.weight_nan, where.grad_nan) == (0, 1)
        assert seen.last.metrics["train/skipped_steps"] == 1.0
    partitioned = name not in ("nan0", "bf16_nan0")
    assert len(found.places) == (1 if partitioned else 2), "element [50, 7] is on one rank only"
    alerts = [alert for alert in seen.alerts if alert["rule"] == "nonfinite"]
    assert "first.weight holds 1 NaN" in alerts[-1]["message"]
    assert alerts[-1]["severity"] == "critical"


@pytest.mark.parametrize("name", OVERFLOWING)
def test_overflow_of_the_loss_scale_is_a_skipped_step(
    trained: list[dict[str, Seen]], name: str
) -> None:
    seen = trained[0][name]
    skipped = [record for record in seen.records if not record.applied]
    assert [record.step for record in seen.records] == [1, 2, 3], "skipped steps count"
    assert [record.step for record in skipped] == ([2] if name == "overflow0" else [1, 2, 3])
    for record in skipped:
        assert record.metrics["train/skipped_steps"] == 1.0
        assert record.nonfinite is None, "a scaler looks for its scale"
        assert "monitor/grad_norm" not in record.metrics
        assert np.isfinite(record.params.columns["weight_norm"]).all()
    assert "nonfinite" not in {alert["rule"] for alert in seen.alerts}
