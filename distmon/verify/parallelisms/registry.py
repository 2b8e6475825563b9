"""All parallelisms by name, and the selection of `--parallel`."""

from __future__ import annotations

from fnmatch import fnmatchcase
from importlib import import_module
from typing import Final

from distmon.config import suggest
from distmon.errors import ConfigError
from distmon.verify.parallelisms.parallelism import Parallelism
from distmon.verify.parallelisms.replicated import PLAIN

PARALLELISM_MODULES: Final = (
    "replicated",
    "fsdp1",
    "fsdp2",
    "tensor_parallel",
    "pipeline",
    "deepspeed_zero",
)
"""Modules of this folder that have PARALLELISMS, in the order of the table."""
PARALLELISMS: Final[dict[str, Parallelism]] = {
    PLAIN.name: PLAIN,
    **{
        each.name: each
        for module in PARALLELISM_MODULES
        for each in import_module(f"distmon.verify.parallelisms.{module}").PARALLELISMS
    },
}


def select(wanted: str) -> list[Parallelism]:
    """Return the parallelisms that comma-separated names and globs match, in registry order."""
    chosen: set[str] = set()
    for pattern in filter(None, (part.strip() for part in wanted.split(","))):
        matching = {name for name in PARALLELISMS if fnmatchcase(name, pattern)}
        if not matching:
            hint = suggest(pattern, list(PARALLELISMS)).replace("valid keys", "valid names")
            raise ConfigError(f'unknown configuration "{pattern}" in --parallel; {hint}')
        chosen |= matching
    if not chosen:
        raise ConfigError("--parallel names no configuration")
    return [parallelism for name, parallelism in PARALLELISMS.items() if name in chosen]
