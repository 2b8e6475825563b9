"""The command line: what is accepted, and one sentence with exit code 2 for what is not."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.run import get_args_parser
from trainer_process import TINY

from launch.monitoring import split_monitor_options
from launch.options import Options, read_options
from launch.ranks import BadInput
from launch.train import main


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--steps 0", "Invalid value for '--steps': Input should be greater than or equal to 1"),
        ("--steps -3", "Invalid value for '--steps': Input should be greater than or equal to 1"),
        ("--steps ten", "Invalid value for '--steps': Input should be a valid integer"),
        ("--lr nan", "Invalid value for '--lr': Input should be greater than or equal to 0"),
        ("--stepz 5", "No such option: --stepz (Possible options:"),
        ("--width 30 --heads 4", "--width 30 must be divisible by --heads 4"),
        (
            "--batch-size 6 --accumulate 4",
            "must be divisible by 4, which is 1 rank x --accumulate 4",
        ),
        ("--data missing.txt", "cannot read --data missing.txt: No such file or directory"),
        ("--data empty.txt", "--data empty.txt is empty"),
        ("--data short.txt", "short.txt has 100 bytes, and --context 32 needs at least 860"),
        ("--data .", "cannot read --data .: Is a directory"),
        ("--resume missing.pt", "there is no checkpoint missing.pt to resume from"),
        ("--resume latest", "--resume latest found no checkpoint in runs/checkpoints"),
        ("--resume short.txt", "short.txt is damaged or is not a checkpoint of this trainer"),
        ("--resume other.pt", "other.pt is not a checkpoint of this trainer"),
        ("--checkpoint-dir empty.txt", "cannot write checkpoints to empty.txt: File exists"),
        ("--inject nan --inject-at 7", "--inject-at 7 is after the last step, --steps 6"),
        ("--inject nan --inject-at 2 --inject-rank 1", "--inject-rank 1 is out of range"),
        ("--inject nan --inject-at 2 --inject-param haed.weight", 'did you mean "head.weight"?'),
        ("--inject fire", "Invalid value for '--inject': "),
        (
            "--inject dead --inject-at 2 --inject-param head.weight",
            "--inject dead needs the mlp.up.weight of a block, and head.weight is none",
        ),
        (
            "--inject dead --inject-at 2 --inject-rank 0",
            "--inject dead happens on all ranks; leave --inject-rank out",
        ),
        ("--optimizer lion", "Invalid value for '--optimizer': Value error, 'lion' is not one of"),
        ("--task-weight 2", "--task-weight is for --tasks; add --tasks"),
        ("--tasks --task-weight nan", "Invalid value for '--task-weight': Input should be"),
        ("--init-std -1", "Invalid value for '--init-std': Input should be greater than"),
        ("--monitor.interval 5", "do nothing without --monitor; add --monitor"),
        ("--monitor.config x.yaml", "do nothing without --monitor; add --monitor"),
        ("--monitor --monitor.interval", "--monitor.interval needs a value"),
        ("--monitor --monitor.intervall 5", 'unknown key "intervall"'),
        ("--monitor --monitor.interval 0", 'bad value 0 for "interval"'),
        ("--monitor --monitor.config x.yaml", "cannot read the config file x.yaml"),
    ],
)
def test_bad_input_is_one_sentence(
    arguments: str,
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").touch()
    Path("short.txt").write_bytes(b"x" * 100)
    torch.save({"weights": torch.zeros(1)}, "other.pt")
    with pytest.raises(SystemExit) as exit_:
        main([*TINY, *arguments.split()])
    assert exit_.value.code == 2
    printed = capsys.readouterr()
    assert sentence in printed.err
    assert len(printed.err.splitlines()) == 1
    assert printed.out == ""
    assert not list(tmp_path.rglob("step-*"))


@pytest.mark.parametrize(
    ("arguments", "overrides"),
    [
        ("--monitor.interval 20", {"interval": 20}),
        ("--monitor.interval=20", {"interval": 20}),
        ("--monitor.sample-size exact", {"sample_size": "exact"}),
        ("--monitor.sinks console,jsonl", {"sinks": "console,jsonl"}),
        ("--monitor.run-dir 2024", {"run_dir": "2024"}),
        ("--monitor.percentiles false", {"percentiles": False}),
        ("--monitor.eps 1e-9", {"eps": 1e-9}),
        ("--monitor.wandb.name 2024-05-01", {"wandb": {"name": "2024-05-01"}}),
        (
            "--monitor.rules.frozen.patience 2 --monitor.rules.frozen.enabled true",
            {"rules": {"frozen": {"patience": 2, "enabled": True}}},
        ),
    ],
)
def test_monitor_options_become_overrides(arguments: str, overrides: dict[str, Any]) -> None:
    others, settings = split_monitor_options(["--steps", "3", *arguments.split(), "--monitor"])
    assert others == ["--steps", "3", "--monitor"]
    assert settings == overrides


def test_key_inside_a_value_is_refused() -> None:
    with pytest.raises(BadInput, match="inside a key that already has a value"):
        split_monitor_options(["--monitor.rules=3", "--monitor.rules.frozen.patience=2"])


def test_batch_must_fit_the_ranks() -> None:
    assert read_options(["--batch-size", "12", "--accumulate", "3"], world=4).batch_size == 12
    with pytest.raises(BadInput, match="divisible by 16, which is 4 ranks x --accumulate 4"):
        read_options(["--batch-size", "12", "--accumulate", "4"], world=4)


def test_torchrun_passes_every_option_on() -> None:
    """torchrun takes what abbreviates an option of its own for that option, wherever it stands."""
    names = [each.name for each in fields(Options) if each.init and each.name != "monitor"]
    own = ["--" + name.replace("_", "-") for name in names]
    for option in [*own, "--monitoring", "--monitor.interval"]:
        assert get_args_parser().parse_args(["train.py", option]).training_script_args == [option]
    parsed = get_args_parser().parse_args(["--", "train.py", "--monitor"])
    assert parsed.training_script_args == ["--monitor"]


@pytest.mark.parametrize("word", ["--monitor", "--monitoring"])
def test_both_words_turn_monitoring_on(word: str) -> None:
    assert not read_options([], world=1).monitor
    options = read_options([word, "--monitor.interval", "5"], world=1)
    assert options.monitor
    assert options.monitor_settings == {"interval": 5}
