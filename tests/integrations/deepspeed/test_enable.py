"""The "distmon" block of a DeepSpeed config, and the ways to enable it."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def facts(parts: Any) -> list[dict[str, Any]]:
    return [parts(rank, "enable") for rank in range(2)]


def test_mistake_in_the_block_stops_before_the_engine_is_built(
    facts: list[dict[str, Any]],
) -> None:
    for mine in facts:
        assert mine["typo"].startswith('unknown key "intervall"')
        assert 'did you mean "interval"?' in mine["typo"]
        assert '"distmon" block of the DeepSpeed config' in mine["typo"]
        assert mine["bad value"].startswith('bad value -1 for "interval"')
        assert "must be an object with keys, not true" in mine["no mapping"]


def test_drop_in_watches_the_engine(facts: list[dict[str, Any]]) -> None:
    record = facts[0]["drop-in record"]
    assert record.step == 4
    assert [*record.losses] == [3, 4]
    assert record.applied
    assert "already has a monitor" in facts[0]["twice"]
    assert "_take_model_step" in facts[0]["drop-in patched"]


def test_detach_leaves_the_engine_as_it_was(facts: list[dict[str, Any]]) -> None:
    assert facts[0]["detached"] == []


def test_without_the_block_or_switched_off_nothing_is_patched(
    facts: list[dict[str, Any]],
) -> None:
    for mine in facts:
        assert mine["no block"] == []
        assert mine["off"] == []
        assert mine["off, attached"] == ("DisabledMonitor", [])
        assert mine["never patched"]


def test_enable_reaches_a_function_imported_before(facts: list[dict[str, Any]]) -> None:
    record = facts[0]["by name"]
    assert facts[0]["by name, before"] == []
    assert record.step == 2
    assert [*record.losses] == [1, 2], "the first loss as well"
    assert record.applied


def test_enable_reaches_an_engine_that_is_there_already(facts: list[dict[str, Any]]) -> None:
    assert facts[0]["late"].step == 2
    assert [*facts[0]["late"].losses] == [1, 2]


def test_disable_and_a_disabled_block_restore_deepspeed(
    facts: list[dict[str, Any]],
) -> None:
    for mine in facts:
        assert mine["disabled"]
        assert mine["no"] == ([], True)


def test_deepspeed_monitors_get_every_metric_once(
    facts: list[dict[str, Any]], pair_folder: Path
) -> None:
    record = facts[0]["module"]
    for tag, value in record.metrics.items():
        with (pair_folder / "ways" / "csv" / f"{tag.replace('/', '_')}.csv").open() as file:
            rows = [*csv.reader(file)]
        assert float(rows[-1][1]) == pytest.approx(value)
        steps = [int(row[0]) for row in rows[1:]]
        if tag.endswith("_fraction") and len(steps) == 1:
            continue  # phases are known from the second observation on
        assert steps == [facts[0]["samples"] // 2, facts[0]["samples"]], tag


def test_monitor_goes_on_from_a_checkpoint(parts: Any) -> None:
    for mine in (parts(rank, "resume") for rank in range(2)):
        for stage in (0, 2, 3):
            whole, resumed = mine[f"whole{stage}"], mine[f"resumed{stage}"]
            assert mine[f"client{stage}"] == (7, False), "the user gets back what he saved"
            assert resumed.step == whole.step == 6
            assert resumed.losses == pytest.approx(whole.losses, rel=1e-6)
            ema = "train/step_loss_ema"
            assert resumed.metrics[ema] == pytest.approx(whole.metrics[ema], rel=1e-6)
            for column in ("weight_norm", "update_norm", "lr"):
                one, other = (r.params.columns[column] for r in (resumed, whole))
                assert one == pytest.approx(other, rel=1e-5, nan_ok=True)
