"""Text as bytes, its two halves, and batches that depend on the step and on nothing else."""

from __future__ import annotations

import math
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from bad_input import BadInput

VOCABULARY = 256
VALIDATION_SHARE = 0.05
# Validation is cut from this many places, so that it does not consist of one topic only.
SEGMENTS = 10


@dataclass(frozen=True)
class Corpus:
    """Training and validation bytes, disjoint, as uint8 tensors in main memory."""

    train: torch.Tensor
    validation: torch.Tensor


def load_corpus(data: Path | None, megabytes: float, context: int) -> Corpus:
    """Read `data`, or the sources of Python's standard library, and split it.

    At most `megabytes` are read. Both parts hold at least one sequence of `context` bytes and the
    byte that follows it; a text too short for that is bad input.
    """
    limit = int(megabytes * 1e6)
    text = standard_library_text(limit) if data is None else file_text(data, limit)
    # Every segment's share is rounded down, which may lose a byte per segment.
    needed = math.ceil((context + 1 + SEGMENTS) / VALIDATION_SHARE)
    if len(text) < needed:
        source = "the text" if data is None else str(data)
        raise BadInput(
            f"{source} has {len(text)} bytes, and --context {context} needs at least {needed}"
        )
    return split(torch.frombuffer(bytearray(text), dtype=torch.uint8))


def split(text: torch.Tensor) -> Corpus:
    """Cut the text in segments; the last part of each goes to validation."""
    train, validation = [], []
    for segment in text.tensor_split(SEGMENTS):
        cut = len(segment) - int(len(segment) * VALIDATION_SHARE)
        train.append(segment[:cut])
        validation.append(segment[cut:])
    return Corpus(torch.cat(train), torch.cat(validation))


def standard_library_text(limit: int) -> bytes:
    """The top-level modules of the standard library in order of name, the first `limit` bytes."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    pieces: list[bytes] = []
    size = 0
    for path in sorted(folder.glob("*.py")):
        # Written when Python was built: differs from machine to machine.
        if path.name.startswith("_sysconfigdata"):
            continue
        if size >= limit:
            break
        pieces.append(path.read_bytes())
        size += len(pieces[-1])
    if not pieces:
        raise BadInput(f"there are no Python sources in {folder} to train on; give --data FILE")
    return b"".join(pieces)[:limit]


def file_text(path: Path, limit: int) -> bytes:
    """The first `limit` bytes of the user's file."""
    try:
        with path.open("rb") as file:
            text = file.read(limit)
    except OSError as error:
        raise BadInput(f"cannot read --data {path}: {error.strerror}") from None
    if not text:
        raise BadInput(f"--data {path} is empty")
    return text


@dataclass(frozen=True)
class Batches:
    """The training data of every step, cut for one rank.

    The starts of the sequences of a step are drawn from `(seed, step)` for the whole global batch
    and then sliced by micro-batch and rank. So the global batch is the same for any number of ranks
    and micro-batches, and a resumed run continues with the data it would have seen.
    """

    text: torch.Tensor
    context: int
    global_batch: int
    micro_batches: int
    rank: int
    world: int
    seed: int

    @property
    def sequences(self) -> int:
        """Sequences in one micro-batch of one rank."""
        return self.global_batch // (self.micro_batches * self.world)

    def starts(self, step: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Positions where the sequences of the global batch begin."""
        draw = np.random.default_rng([self.seed, step])
        return draw.integers(0, len(self.text) - self.context, self.global_batch)

    def micro_batch(self, step: int, micro: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets, int64 of shape (sequences, context), of this rank."""
        first = (micro * self.world + self.rank) * self.sequences
        return windows(self.text, self.starts(step)[first : first + self.sequences], self.context)


def windows(
    text: torch.Tensor, starts: np.ndarray[tuple[int], np.dtype[np.int64]], context: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets (the same bytes, one further) that begin at `starts`."""
    positions = torch.from_numpy(starts)[:, None] + torch.arange(context + 1)
    piece = text[positions].long()
    return piece[:, :-1], piece[:, 1:]


def validation_starts(
    length: int, context: int, sequences: int
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Where `sequences` sequences begin, spread evenly over `length` bytes."""
    last = length - context - 1
    return np.linspace(0, last, min(sequences, last + 1)).astype(np.int64)
