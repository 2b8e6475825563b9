"""The trainer with `--parallel deepspeed`: the same training, and checkpoints for every mode."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "launch"))
from trainer_cases import Case
from trainer_process import TINY, forked

SAVED = ["--save-every=4", "--keep=2", "--accumulate=2", "--eval-every=6"]
ENGINE = ["--parallel=deepspeed", *SAVED]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trainer")


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, Case]:
    def at(name: str) -> str:
        return f"--checkpoint-dir={folder / name}"

    watched = ["--monitor", f"--monitor.run-dir={folder / 'run'}", "--monitor.interval=2"]
    middle = f"--resume={folder / 'zero3' / 'step-000004.pt'}"
    cases = {
        "ddp": [*SAVED, at("ddp")],
        **{f"zero{z}": [*ENGINE, f"--zero={z}", at(f"zero{z}")] for z in range(3)},
        "zero3": [*ENGINE, "--zero=3", at("zero3"), *watched, "--monitor.sinks=jsonl"],
        "resumed": [*ENGINE, "--zero=1", at("resumed"), middle],
        "resumed by ddp": [*SAVED, at("resumed_ddp"), middle],
        "bf16": [*ENGINE, "--zero=2", "--bf16", "--save-every=0", at("bf16")],
        "fault": [*ENGINE, "--inject=nan", "--inject-at=2", at("fault")],
        "stray": ["--zero=1", at("stray")],
    }
    asked, answered = folder / "cases.json", folder / "results.json"
    asked.write_text(json.dumps({name: [*TINY, *each] for name, each in cases.items()}))
    script = Path(__file__).with_name("trainer_script.py")
    done = forked(str(script), str(asked), str(answered), folder=folder, ranks=2)
    assert answered.is_file(), done.stderr
    return {name: Case(**each) for name, each in json.loads(answered.read_text()).items()}


def _saved(folder: Path, name: str, step: int) -> Any:
    return torch.load(folder / name / f"step-{step:06d}.pt", weights_only=True)


@pytest.mark.parametrize(
    ("name", "where"),
    [(f"zero{z}", f"zero{z}") for z in range(4)]
    + [("resumed", "resumed"), ("resumed by ddp", "resumed_ddp")],
)
def test_trains_as_ddp_does(runs: dict[str, Case], folder: Path, name: str, where: str) -> None:
    assert runs[name].code == 0, runs[name].err
    expected, found = (_saved(folder, place, 6) for place in ("ddp", where))
    assert found["model"].keys() == expected["model"].keys()
    for key, value in expected["model"].items():
        torch.testing.assert_close(found["model"][key], value, rtol=1e-5, atol=1e-6)
    for parameter, state in expected["optimizer"].items():
        assert found["optimizer"][parameter].keys() == state.keys()
        for key, value in state.items():
            torch.testing.assert_close(
                found["optimizer"][parameter][key], value, rtol=1e-4, atol=1e-6
            )
    assert runs[name].validation[-1] == pytest.approx(runs["ddp"].validation[-1], abs=1e-4)


def test_the_engine_reports_to_the_monitor(runs: dict[str, Case], folder: Path) -> None:
    import distmon

    run = distmon.read_run(folder / "run")
    assert [r["step"] for r in run.records if not r["partial"]] == [2, 4, 6]
    assert run.losses.keys() == {1, 2, 3, 4, 5, 6}
    for step, loss in runs["ddp"].losses.items():
        assert run.losses[step] == pytest.approx(loss, abs=1e-4)
    assert run.records[-2]["metrics"]["performance/tokens_per_second"] > 0
    assert "monitor" in _saved(folder, "zero3", 4)


def test_bf16_runs_and_unsupported_settings_raise(runs: dict[str, Case]) -> None:
    assert runs["bf16"].code == 0, runs["bf16"].err
    assert runs["fault"].code == 2
    assert "--inject nan does not work with --parallel deepspeed" in runs["fault"].err
    assert runs["stray"].code == 2
    assert "--zero is for --parallel deepspeed, not ddp" in runs["stray"].err
