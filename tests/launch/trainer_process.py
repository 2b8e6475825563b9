"""Runs the training script on a tiny model in processes of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from forked_python import run_script

ROOT = Path(__file__).resolve().parents[2]
TINY = [
    *("--layers=2", "--width=32", "--heads=2", "--context=32", "--batch-size=8", "--steps=6"),
    *("--corpus-mb=0.2", "--log-every=1", "--eval-every=0"),
]


def python(
    arguments: list[str], folder: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run Python in `folder` with one thread, as if nothing else had started it."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=_environ(environment),
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


def forked(
    script: str, *arguments: str, folder: Path, ranks: int = 0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a script as `python` does, in processes that have imported torch already."""
    return run_script([script, *arguments], folder, _environ(environment), ranks)


def _environ(environment: dict[str, str]) -> dict[str, str]:
    without = ("RANK", "WORLD_SIZE", "FORCE_COLOR", "DISTMON_WRITER")
    environ = {k: v for k, v in os.environ.items() if k not in without}
    return {**environ, "OMP_NUM_THREADS": "1", **environment}


def train(
    folder: Path, *arguments: str, ranks: int = 0, launched: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run the trainer. Arguments win over the tiny defaults; `ranks=0` is without a process group.

    `launched`: by a real `python` or torchrun, which takes several seconds longer.
    """
    script = [str(ROOT / "launch/train.py"), *TINY, *arguments]
    if launched:
        return python([*torchrun(ranks), *script], folder)
    return forked(*script, folder=folder, ranks=ranks)


def torchrun(ranks: int) -> list[str]:
    """What stands between `python` and a script that is to run on `ranks` ranks."""
    if not ranks:
        return []
    return ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]


def losses(output: str) -> dict[int, float]:
    """Training loss by step, from the plain lines."""
    found = re.findall(r"^step:(\d+)/\d+ loss:(\S+)", output, flags=re.MULTILINE)
    return {int(step): float(loss) for step, loss in found}
