"""Training batches whose frequencies are those of life: words, images, interactions.

A batch is a tuple of tensors with the items along the first dimension. `tokens` sets its size in
the unit that all families share; an image or an interaction counts as a fixed number of tokens.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Final

import torch

Batch = tuple[torch.Tensor, ...]
BatchSource = Callable[[int, torch.Generator], Batch]
"""Returns a batch of so many tokens, drawn with this generator."""

CONTEXT: Final = 64
"""Tokens in a sequence."""
MASKED: Final = 0.15
"""Share of the tokens that a masked language model predicts."""
IGNORED: Final = -100
"""Label of a token that does not count, as `cross_entropy` has it."""
IMAGE: Final = 32
"""Pixels along each side of an image."""
CLASSES: Final = 100
"""Classes of images."""
ZIPF_EXPONENT: Final = 1.05
"""Of the power law that users and items follow."""


@cache
def word_ranks() -> torch.Tensor:
    """Return the standard library's words in reading order, each as its rank by frequency."""
    folder = Path(os.__file__).parent
    text = "\n".join(p.read_text(errors="replace") for p in sorted(folder.glob("*.py")))
    words = re.findall(r"[A-Za-z]+", text)
    ranks = {word: rank for rank, (word, _) in enumerate(Counter(words).most_common())}
    return torch.tensor([ranks[word] for word in words])


def words(vocabulary: int) -> BatchSource:
    """Sequences of words; those too rare for the vocabulary share its last id."""

    def draw(tokens: int, generator: torch.Generator) -> Batch:
        text = word_ranks()
        count = max(tokens // CONTEXT, 1)
        starts = torch.randint(len(text) - CONTEXT, (count, 1), generator=generator)
        return (text[starts + torch.arange(CONTEXT)].clamp(max=vocabulary - 1),)

    return draw


def masked_words(vocabulary: int) -> BatchSource:
    """Sequences with some words replaced by the last id, and the replaced words as labels."""
    whole = words(vocabulary)

    def draw(tokens: int, generator: torch.Generator) -> Batch:
        (ids,) = whole(tokens, generator)
        masked = torch.rand(ids.shape, generator=generator) < MASKED
        masked[:, 0] = True  # every sequence has a word to predict
        return ids.masked_fill(masked, vocabulary - 1), ids.masked_fill(~masked, IGNORED)

    return draw


def images(tokens_per_image: int) -> BatchSource:
    """Images whose spectrum falls with frequency, as photographs' do, and their classes."""
    frequencies = torch.fft.fftfreq(IMAGE)
    falling = 1 / (frequencies[:, None].square() + frequencies.square() + IMAGE**-2.0).sqrt()
    fixed = torch.Generator().manual_seed(0)
    patterns = torch.randn(CLASSES, 3, IMAGE, IMAGE, generator=fixed)

    def draw(tokens: int, generator: torch.Generator) -> Batch:
        count = max(tokens // tokens_per_image, 1)
        labels = torch.randint(CLASSES, (count,), generator=generator)
        noise = torch.randn(count, 3, IMAGE, IMAGE, generator=generator)
        pixels = torch.fft.ifft2(torch.fft.fft2(noise + patterns[labels]) * falling).real
        return pixels / pixels.std(), labels

    return draw


def interactions(users: int, items: int) -> BatchSource:
    """Users, items and clicks; few users and items have most of the interactions."""

    def ids(count: int, size: int, generator: torch.Generator) -> torch.Tensor:
        shares = torch.arange(1, size + 1, dtype=torch.float64).pow(-ZIPF_EXPONENT)
        return torch.multinomial(shares, count, replacement=True, generator=generator)

    def draw(tokens: int, generator: torch.Generator) -> Batch:
        user, item = (ids(tokens, size, generator) for size in (users, items))
        clicked = (user * 7 + item * 13) % 5 < 2  # something that can be learned
        return user, item, clicked

    return draw
