"""Runs the training script on a tiny model in processes of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TINY = [
    *("--layers=2", "--width=32", "--heads=2", "--context=32", "--batch-size=8", "--steps=6"),
    *("--corpus-mb=0.2", "--log-every=1", "--eval-every=0"),
]


def python(
    arguments: list[str], folder: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run Python in `folder` with one thread, as if nothing else had started it."""
    without = ("RANK", "WORLD_SIZE", "FORCE_COLOR", "DISTMON_WRITER")
    environ = {k: v for k, v in os.environ.items() if k not in without}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


def train(folder: Path, *arguments: str, ranks: int = 0) -> subprocess.CompletedProcess[str]:
    """Run the script. Arguments win over the tiny defaults; `ranks=0` is without torchrun."""
    return python([*torchrun(ranks), str(ROOT / "launch/train.py"), *TINY, *arguments], folder)


def torchrun(ranks: int) -> list[str]:
    """What stands between `python` and a script that is to run on `ranks` ranks."""
    if not ranks:
        return []
    return ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]


def losses(output: str) -> dict[int, float]:
    """Training loss by step, from the plain lines."""
    found = re.findall(r"^step:(\d+)/\d+ loss:(\S+)", output, flags=re.MULTILINE)
    return {int(step): float(loss) for step, loss in found}
