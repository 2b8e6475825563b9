"""All arrangements by name, and which of them a person asked for."""

from __future__ import annotations

from fnmatch import fnmatchcase

from distmon.config import suggest
from distmon.errors import ConfigError
from distmon.layout.arrangements import (
    flat_shards,
    pipeline,
    replicated,
    sharded,
    tensor_parallel,
    zero,
)
from distmon.layout.arrangements.arrangement import Arrangement

PLAIN = replicated.PLAIN
ARRANGEMENTS: dict[str, Arrangement] = {
    arrangement.name: arrangement
    for arrangement in (
        PLAIN,
        *replicated.ARRANGEMENTS,
        *flat_shards.ARRANGEMENTS,
        *sharded.ARRANGEMENTS,
        *tensor_parallel.ARRANGEMENTS,
        *pipeline.ARRANGEMENTS,
        *zero.ARRANGEMENTS,
    )
}


def select(wanted: str) -> list[Arrangement]:
    """The arrangements that comma-separated names and globs mean, in the order of the registry."""
    chosen: set[str] = set()
    for pattern in filter(None, (part.strip() for part in wanted.split(","))):
        matching = {name for name in ARRANGEMENTS if fnmatchcase(name, pattern)}
        if not matching:
            hint = suggest(pattern, list(ARRANGEMENTS)).replace("valid keys", "valid names")
            raise ConfigError(f'unknown configuration "{pattern}" in --parallel; {hint}')
        chosen |= matching
    if not chosen:
        raise ConfigError("--parallel names no configuration")
    return [arrangement for name, arrangement in ARRANGEMENTS.items() if name in chosen]
