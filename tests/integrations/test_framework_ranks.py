"""Callbacks of frameworks on two ranks: DDP, and FSDP2 where the framework has it on a CPU."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

import distmon

sys.path.insert(0, str(Path(__file__).parent / "launcher"))
from started_scripts import plain

TRAININGS = (
    "accelerate_ddp",
    "accelerate_tracker",
    "lightning_ddp",
    "lightning_fsdp2",
    "transformers_ddp",
)


def test_two_ranks_in_each_framework(tmp_path: Path) -> None:
    script = Path(__file__).with_name("framework_ranks.py")
    output = plain(script, tmp_path / "output", str(tmp_path), *TRAININGS, count=2)
    (text,) = re.findall(r"^found (.*)$", output, re.M)
    trained = json.loads(text)
    for name in TRAININGS:
        assert isinstance(trained[name], dict), trained[name]
        assert trained[name]["is_sharded"] == name.endswith("fsdp2"), name
        found = [r for r in distmon.read_run(tmp_path / name).records if not r.get("partial")]
        assert [r["step"] for r in found] == [1, 2, 3, 4], name
        assert {r["world_size"] for r in found} == {2}, name
        assert all(r["applied"] for r in found), name
        assert [r["metrics"]["train/step_loss"] for r in found] == pytest.approx(
            trained[name]["losses"], rel=1e-5
        ), name
        assert all(r["metrics"]["monitor/grad_norm"] > 0 for r in found), name
        assert found[-1]["metrics"]["gradient_monitor/mean_gain"] > 0, name
    # The same model on the same data: what is measured does not depend on the framework.
    tracker = distmon.read_run(tmp_path / "accelerate_tracker").records
    assert tracker[-1]["metrics"]["evaluation/val_loss"] > 0
