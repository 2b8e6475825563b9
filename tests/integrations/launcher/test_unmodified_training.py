"""Eight scripts that know nothing of distmon: the same training, and a record of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from started_scripts import (
    EXAMPLES,
    in_this_process,
    monitored,
    plain,
    records,
    without_distmon,
)

FULL = {"train/step_loss", "monitor/grad_norm", "gradient_monitor/mean_gain", "train/lr"}
ONE_LINE = ("accelerate_loop.py", "lightning_trainer.py", "huggingface_trainer.py")
"""Examples with a line for distmon, which is taken out here."""
WITHOUT_GAIN = FULL - {"gradient_monitor/mean_gain"}


def _final(text: str) -> str:
    """The sum of all weights in full precision."""
    (found,) = re.findall(r"final (\S+)", text)
    return str(found)


@pytest.mark.parametrize(
    ("example", "count", "metrics"),
    [
        ("nanogpt.py", 1, FULL),
        ("gan.py", 1, WITHOUT_GAIN),
        ("lora.py", 1, FULL),
        ("fsdp2.py", 2, FULL),
        ("accelerate_loop.py", 2, FULL),
        ("lightning_trainer.py", 1, FULL),
        ("huggingface_trainer.py", 1, FULL),
        ("deepspeed_zero.py", 2, FULL),
    ],
)
def test_the_training_is_the_same_to_the_last_bit(
    example: str, count: int, metrics: set[str], tmp_path: Path
) -> None:
    script = without_distmon(example, tmp_path) if example in ONE_LINE else EXAMPLES / example
    watched = monitored(script, tmp_path / "monitored", "--steps", "20", count=count)
    assert watched.code == 0, watched.err
    without = plain(script, tmp_path / "plain", "--steps", "20", count=count)
    assert _final(watched.out) == _final(without)
    found = records(tmp_path / "monitored/run")
    assert [record["step"] for record in found] == [10, 20]
    assert all(record["applied"] for record in found)
    assert metrics <= found[-1]["metrics"].keys()
    assert "distmon: 2 records" in watched.err + watched.out
    assert found[-1]["metrics"]["performance/forward_fraction"] > 0
    assert found[-1]["world_size"] == count
    if example == "gan.py":  # two models, and each has its own loss
        (printed,) = re.findall(r"step 20 D (\S+) G (\S+)", watched.out)
        other = records(tmp_path / "monitored/run-model2")
        losses = [run[-1]["metrics"]["train/step_loss"] for run in (other, found)]
        assert [f"{loss:.4f}" for loss in losses] == [*printed]


@pytest.mark.parametrize("example", ONE_LINE)
def test_examples_with_a_line_for_distmon_run_as_they_are(example: str, tmp_path: Path) -> None:
    output = in_this_process(EXAMPLES / example, tmp_path / "here", "--steps", "12")
    assert "step:10" in output
    assert [record["step"] for record in records(tmp_path / "here/runs/latest")] == [10]


def test_examples_are_short() -> None:
    for example in EXAMPLES.glob("*.py"):
        assert len(example.read_text().splitlines()) < 80, example
