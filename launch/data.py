"""Text as bytes, its training and validation parts, and batches that depend on the step alone."""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from launch.options import Options
from launch.parallel.base import MicroBatch, Sizes
from launch.ranks import BadInput

VALIDATION_SHARE = 0.05
SEGMENTS = 10  # validation is cut from so many places, because one place may be one topic


class Corpus(NamedTuple):
    """Training and validation bytes, disjoint, as uint8 tensors in main memory."""

    train: torch.Tensor
    validation: torch.Tensor


def load_corpus(data: Path | None, megabytes: float, context: int) -> Corpus:
    """Read at most `megabytes` of `data`, or of Python's standard library, and split them.

    Both parts hold at least one sequence of `context` bytes and the byte that follows it.
    """
    limit = int(megabytes * 1e6)
    text = read_standard_library(limit) if data is None else read_file(data, limit)
    # The share of every segment is rounded down, which may lose a byte per segment.
    needed = math.ceil((context + 1 + SEGMENTS) / VALIDATION_SHARE)
    if len(text) < needed:
        source = "the text" if data is None else str(data)
        raise BadInput(
            f"{source} has {len(text)} bytes, and --context {context} needs at least {needed}"
        )
    return split(torch.frombuffer(bytearray(text), dtype=torch.uint8))


def split(text: torch.Tensor) -> Corpus:
    """Cut the text into segments; the end of each is for validation."""
    train, validation = [], []
    for segment in text.tensor_split(SEGMENTS):
        cut = len(segment) - int(len(segment) * VALIDATION_SHARE)
        train.append(segment[:cut])
        validation.append(segment[cut:])
    return Corpus(torch.cat(train), torch.cat(validation))


def read_standard_library(limit: int) -> bytes:
    """Return the first `limit` bytes of the top-level modules, in order of name."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        if len(text) >= limit:
            break
        # Written when Python was built: differs from machine to machine.
        if not path.name.startswith("_sysconfigdata"):
            text += path.read_bytes()
    if not text:
        raise BadInput(f"there are no Python sources in {folder} to train on; give --data FILE")
    return bytes(text[:limit])


def read_file(path: Path, limit: int) -> bytes:
    """Return the first `limit` bytes of a file."""
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
    """The data of every step, cut for one rank and on its device.

    Where the sequences of a step start is drawn from `(seed, step)` for the whole global batch,
    which is then sliced by micro-batch and rank. So the global batch is the same for any number of
    ranks and micro-batches, and a resumed run continues with the data that it would have seen.
    """

    corpus: Corpus
    options: Options
    sizes: Sizes
    rank: int = 0
    device: torch.device | None = None

    def of_step(self, step: int) -> list[MicroBatch]:
        """Return this rank's part of a step's batch; the loss of the step is the mean over it."""
        options, sizes, text = self.options, self.sizes, self.corpus.train
        draw = np.random.default_rng([options.seed, step])
        starts = draw.integers(0, len(text) - options.context, options.batch_size)
        starts = starts.reshape(sizes.micro_batches, sizes.data, -1)
        own = starts[:, sizes.data_rank(self.rank)]
        return [MicroBatch(*self._windows(text, each), 1 / len(own)) for each in own]

    def validation(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
        """Yield inputs, targets and their weight: this rank's part of a fixed set of sequences.

        Ranks may need each other in every forward pass, so each gets as many batches as the first,
        which has most; what fills up a rank's last batches has weight 0. A batch is not larger than
        in training, so that evaluation fits into memory too.
        """
        options, sizes, text = self.options, self.sizes, self.corpus.validation
        at_once = options.batch_size // (sizes.micro_batches * sizes.data)
        starts = validation_starts(len(text), options.context, options.eval_sequences)
        own = starts[sizes.data_rank(self.rank) :: sizes.data]
        for at in range(0, len(starts[:: sizes.data]), at_once):
            chunk = own[at : at + at_once]
            yield *self._windows(text, chunk if len(chunk) else starts[:1]), len(chunk)

    def _windows(self, text: torch.Tensor, starts: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets, int64 of shape (sequences, context); targets are one later."""
        positions = torch.from_numpy(starts)[:, None] + torch.arange(self.options.context + 1)
        sequences = text[positions].long().to(self.device)
        return sequences[:, :-1], sequences[:, 1:]


def validation_starts(length: int, context: int, sequences: int) -> np.ndarray:
    """Return where `sequences` sequences begin, spread evenly over `length` bytes."""
    last = length - context - 1
    return np.linspace(0, last, min(sequences, last + 1)).astype(np.int64)
