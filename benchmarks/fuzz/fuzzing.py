"""One input after the other: choose a seed, break it, give it to the readers."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from benchmarks.fuzz.mutations import (
    ODD_TEXTS,
    mutate_bytes,
    mutate_json,
    mutate_lines,
    remove,
    replace_file,
)
from benchmarks.fuzz.readers import Outcome, readers_of, run_reader
from benchmarks.fuzz.seeds import write_seeds

LARGEST_MUTATED: Final = 64 << 20


@dataclass
class Findings:
    """Counts of outcomes, and the first inputs of each kind of failure."""

    inputs: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[int, str, Outcome]] = field(default_factory=list)
    """Number of the input, seed, outcome."""

    @property
    def lines(self) -> list[str]:
        """The summary, one line each."""
        shown = ", ".join(f"{n} {kind}" for kind, n in sorted(self.counts.items()))
        found = [f"{self.inputs} inputs: {shown}"]
        for number, seed, outcome in self.failures[:20]:
            found.append(f"input {number} ({seed}) {outcome.command}: {outcome.kind}")
            found.append(outcome.detail)
        return found


class Fuzzer:
    """Repeatable: input `n` of a seed is always the same."""

    def __init__(self, folder: Path, seed: int = 0) -> None:
        self._folder = folder
        self._seed = seed
        seeds = folder / "seeds"
        seeds.mkdir(parents=True)
        self._seeds = write_seeds(seeds)
        # Imports take their time at the first input of each kind, which is not the input's fault.
        for kind, path in {_kind(name): path for name, path in self._seeds.items()}.items():
            for command, reader in readers_of(kind).items():
                run_reader(command, reader, path)

    def run(self, numbers: range, commands: int | None = None) -> Iterator[tuple[int, Findings]]:
        """Try inputs one by one; `commands` limits how many readers each is given to."""
        findings = Findings()
        for number in numbers:
            draw = random.Random(f"{self._seed}.{number}")
            name = draw.choice([*self._seeds])
            path = self._folder / "input" / self._seeds[name].name
            remove(path.parent)
            kind = self._make(name, path, draw)
            findings.inputs += 1
            readers = [*readers_of(kind).items()]
            chosen = draw.sample(readers, min(commands or len(readers), len(readers)))
            for command, reader in chosen:
                outcome = run_reader(command, reader, path)
                findings.counts[outcome.kind] += 1
                if outcome.kind in ("traceback", "hang", "output"):
                    findings.failures.append((number, name, outcome))
            yield number, findings

    def _make(self, name: str, path: Path, draw: random.Random) -> str:
        """Write the input and return its kind."""
        source = self._seeds[name]
        path.parent.mkdir(parents=True)
        if source.is_dir():
            shutil.copytree(source, path)
            for _ in range(draw.choice((1, 1, 2))):
                files = sorted(path.iterdir())
                file = draw.choice(files) if files else path
                if file.is_file() and not file.is_symlink():
                    _mutate(file, draw)
            return _kind(name)
        shutil.copyfile(source, path)
        _mutate(path, draw)
        return _kind(name)


def _kind(name: str) -> str:
    if name.startswith("run/"):
        return "run"
    return "config" if name.startswith("config") else "log"


def _mutate(file: Path, draw: random.Random) -> None:
    if file.stat().st_size > LARGEST_MUTATED:  # by the mutation before this one
        return
    kind = draw.random()
    if kind < 0.04:
        replace_file(file, draw)
        return
    content = file.read_bytes()
    if kind < 0.10:
        file.write_bytes(draw.choice(ODD_TEXTS))
    elif file.suffix == ".jsonl" and kind < 0.75:
        file.write_bytes(mutate_lines(content, draw))
    elif file.suffix == ".json" and kind < 0.75:
        try:
            value = json.loads(content)
            for _ in range(draw.choice((1, 1, 3))):
                value = mutate_json(value, draw)
            file.write_text(json.dumps(value))
        except (ValueError, RecursionError):
            file.write_bytes(mutate_bytes(content, draw))
    else:
        file.write_bytes(mutate_bytes(content, draw))
