"""Makes the files of `launch/` importable, as Python does for the script."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
# At the end: plain names such as `options` must not hide anybody else's.
sys.path += [str(HERE), str(HERE.parents[1] / "launch")]
