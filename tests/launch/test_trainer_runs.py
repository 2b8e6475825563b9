"""The script itself, in processes of its own: one, resumed, two, and without distmon.

Real starts by `python` and by torchrun are those of Ctrl-C, of bad input, without distmon, and of
the threads that a run leaves behind.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from trainer_process import ROOT, TINY, losses, python, torchrun, train


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where every run of this file happens."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def whole(folder: Path) -> str:
    """The output of one process that trains for 6 steps: the truth for all other runs."""
    arguments = ["--checkpoint-dir=whole", "--eval-every=3", "--save-every=3"]
    result = train(folder, *arguments)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_one_process(whole: str, folder: Path) -> None:
    truth = losses(whole)
    assert list(truth) == [1, 2, 3, 4, 5, 6]
    assert truth[6] < truth[1]
    assert [f"step:{step}/6 val_loss:" in whole for step in range(7)] == [1, 0, 0, 1, 0, 0, 1]
    assert "checkpoint whole/step-000006.pt" in whole.splitlines()[-1]
    saved = torch.load(folder / "whole/step-000006.pt", weights_only=True)
    assert saved["step"] == 6
    assert "monitor" not in saved


def test_resumed_run_ends_with_the_same_weights(whole: str, folder: Path) -> None:
    alone = train(folder, "--resume=whole/step-000003.pt", "--checkpoint-dir=alone")
    assert alone.returncode == 0, alone.stderr
    truth = losses(whole)
    assert losses(alone.stdout) == {step: truth[step] for step in (4, 5, 6)}
    saved = torch.load(folder / "whole/step-000006.pt", weights_only=True)
    again = torch.load(folder / "alone/step-000006.pt", weights_only=True)
    for name, weight in saved["model"].items():
        assert torch.equal(weight, again["model"][name]), name


def test_two_ranks_resume_what_one_has_saved(whole: str, folder: Path) -> None:
    pair = train(folder, "--resume=whole/step-000003.pt", "--checkpoint-dir=pair", ranks=2)
    assert pair.returncode == 0, pair.stderr
    truth = losses(whole)
    # Sums in another order: float32 rounding, and four printed decimals.
    assert losses(pair.stdout) == pytest.approx({s: truth[s] for s in (4, 5, 6)}, abs=2e-4)


def test_two_ranks_with_accumulation_train_as_one_process(whole: str, folder: Path) -> None:
    pair = train(folder, "--save-every=0", "--accumulate=2", ranks=2)
    assert pair.returncode == 0, pair.stderr
    assert losses(pair.stdout) == pytest.approx(losses(whole), abs=2e-4)
    assert pair.stdout.count("done: 6/6 steps") == 1


@pytest.mark.parametrize("ranks", [0, 2])
def test_ctrl_c_ends_all_ranks_after_the_same_step(ranks: int, tmp_path: Path) -> None:
    script = [*torchrun(ranks), str(ROOT / "launch/train.py"), *TINY]
    process = subprocess.Popen(
        [sys.executable, *script, "--steps=1000000", "--save-every=1000000"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("step:1/")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=600)
    finally:
        process.kill()
    found = re.findall(r"^interrupted after (\d+)/1000000 steps", out, flags=re.MULTILINE)
    assert len(found) == 1, err
    assert "Traceback" not in out
    (saved,) = tmp_path.rglob("*.pt")
    assert torch.load(saved, weights_only=True)["step"] == int(found[0])
    # torchrun passes the signal on to every rank and exits with a code of its own.
    assert process.returncode == 130 if not ranks else process.returncode != 0


def test_bad_input_under_torchrun_is_said_once(tmp_path: Path) -> None:
    result = train(tmp_path, "--batch-size", "7", ranks=2, launched=True)
    assert result.returncode != 0
    assert result.stderr.count("--batch-size 7 must be divisible by 2") == 1
    # torchrun adds its own summary, with the code that each rank ended with.
    assert "exitcode  : 2" in result.stderr
    assert "BadInput" not in result.stderr
    assert result.stdout == ""


def test_without_monitor_distmon_is_not_imported(tmp_path: Path) -> None:
    """And the optimizer carries no hook when the run ends."""
    script = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from launch import train
from launch.parallel import base
built = []
make = base.build_optimizer
base.build_optimizer = lambda *a: built.append(make(*a)) or built[-1]
assert train.main(sys.argv[1:]) == 0
assert not [name for name in sys.modules if name.split(".")[0] in ("distmon", "csrc_triton")]
(optimizer,) = built
assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
print("clean")
"""
    result = python(["-c", script, *TINY, "--steps", "2"], tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("clean\n")


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads thread names from /proc")
def test_no_thread_of_the_process_group_outlives_the_run(tmp_path: Path) -> None:
    """One left behind aborts the process now and then while Python shuts down."""
    script = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
from launch import train
assert train.main(sys.argv[1:]) == 0
tasks = [open(f"/proc/self/task/{{each}}/comm").read() for each in os.listdir("/proc/self/task")]
print("left:", [name for name in tasks if "gloo" in name])
"""
    result = python(["-c", script, *TINY, "--steps", "2", "--save-every", "0"], tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("left: []\n")
