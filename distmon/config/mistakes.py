"""One sentence about a mistake: it names the key and, for an unknown key, the nearest valid one."""

from __future__ import annotations

import difflib
from typing import Any

from pydantic import BaseModel, ValidationError

from distmon.redaction import HIDDEN, Redactor


def explain(error: ValidationError, model: type[BaseModel], origin: str) -> str:
    """Return one sentence about the first mistake in `error`, without secrets."""
    return Redactor().text(_sentence(error, model, origin))


def _sentence(error: ValidationError, model: type[BaseModel], origin: str) -> str:
    first = error.errors()[0]
    path = [str(part) for part in first["loc"] if not _is_union_branch(part)]
    key = ".".join(path)
    if first["type"] == "extra_forbidden":
        section: type[BaseModel] = model
        for part in path[:-1]:
            annotation = (
                section.model_fields[part].annotation if part in section.model_fields else None
            )
            if isinstance(annotation, type) and issubclass(annotation, BaseModel):
                section = annotation
        hint = suggest(path[-1], list(section.model_fields))
        return f'unknown key "{key}" in {origin}; {hint}'
    value = first.get("input")
    # A token cannot be distinguished from a word: of `notify`, only numbers are quoted.
    hidden = path[:1] == ["notify"] and not isinstance(value, int | float)
    shown = HIDDEN if hidden else _shortened(value)
    wanted = first["msg"][0].lower() + first["msg"][1:]
    if key == "sample_size":
        wanted = 'it must be a whole number of at least 1, "auto", "sampled" or "exact"'
    return f'bad value {shown} for "{key}" in {origin}: {wanted}'


def _shortened(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:  # of a user's object, or an integer of thousands of digits
        return f"of type {type(value).__name__}"
    return text if len(text) <= 120 else f"{text[:117]}..."


def suggest(word: str, choices: list[str]) -> str:
    """Return `did you mean ...?` when a choice is similar, else the list of choices."""
    near = difflib.get_close_matches(word, choices, n=1, cutoff=0.6)
    return f'did you mean "{near[0]}"?' if near else f"valid keys are {', '.join(sorted(choices))}"


def _is_union_branch(part: Any) -> bool:
    """Return whether pydantic added it to the location: the branch of a union that it tried."""
    return isinstance(part, str) and (
        part.startswith(("literal[", "constrained")) or part in ("int", "str")
    )
