"""What sinks need is imported before training; a broken package does not end anything there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import numpy as np
import pyarrow as pa
from distmon.sinks import preload

preload(["jsonl", "arrow", "tensorboard"])
print(len(pa.array(np.zeros(3))))
"""


def test_a_package_that_raises_as_it_is_imported_is_left_alone(tmp_path: Path) -> None:
    """pandas that was built for another numpy raises ValueError; pyarrow passes that on."""
    broken = tmp_path / "pandas"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise ValueError('numpy.dtype size changed')\n")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={"PYTHONPATH": str(tmp_path), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "3"), done.stderr
