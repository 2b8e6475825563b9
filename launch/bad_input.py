"""The one exception for what the person at the keyboard can put right."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class BadInput(Exception):
    """Holds one sentence. The trainer prints it on rank 0 and ends with exit code 2."""


def nearest(word: str, choices: Iterable[str]) -> str:
    """`; did you mean "..."?` for the choice closest to `word`, or nothing when none is close."""
    near = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.5)
    return f'; did you mean "{near[0]}"?' if near else ""
