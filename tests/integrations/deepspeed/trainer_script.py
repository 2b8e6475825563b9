"""Runs the trainer many times on the same ranks: `trainer_script.py CASES RESULTS`.

As `trainer_cases.py` does, but DeepSpeed keeps process groups of its own until the process ends.
"""

import contextlib
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "launch"))
from trainer_cases import run_all

with contextlib.suppress(AssertionError):
    run_all(Path(sys.argv[1]), Path(sys.argv[2]))
