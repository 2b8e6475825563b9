"""Everything that the tests want to know of two DeepSpeed ranks, in one go.

Not in conftest.py: the ranks import it by name, and there are several files of that name.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


def everything(rank: int, world: int, folder: str) -> dict[str, Any]:
    """The results by part, or a text that says why there is none."""
    from enable_cases import enable_cases_of_rank, resume
    from engine_cases import EXACT, OVERFLOWING, ROUNDED, SPOILED, run_cases
    from other_engines import experts, pipeline

    place = Path(folder)
    cases = {**EXACT, **ROUNDED, **SPOILED, **OVERFLOWING}
    parts: dict[str, Callable[[], Any]] = {
        "cases": lambda: run_cases(rank, world, cases, folder),
        "enable": lambda: enable_cases_of_rank(rank, place / "ways"),
        "resume": lambda: resume(rank, place / "resume"),
        "experts": lambda: experts(rank, place),
        "pipeline": lambda: pipeline(place),  # last: it leaves its topology to the process
    }
    found: dict[str, Any] = {}
    for name, part in parts.items():
        try:
            found[name] = part()
        except Exception:
            found[name] = traceback.format_exc()
    return found
