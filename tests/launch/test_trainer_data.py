"""The text is split without overlap and a step's data depends on the step alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from launch.data import Batches, Corpus, load_corpus, split, validation_starts
from launch.options import Options
from launch.parallel.base import Sizes
from launch.ranks import BadInput


def batches(rank: int = 0, world: int = 1, micro_batches: int = 1, seed: int = 3) -> Batches:
    text = torch.arange(5000).remainder(251).to(torch.uint8)
    options = Options(context=16, batch_size=8, seed=seed)
    return Batches(
        Corpus(text, text), options, Sizes(replicas=world, micro_batches=micro_batches), rank
    )


def whole_step(step: int, world: int, micro_batches: int) -> torch.Tensor:
    """The inputs of a step on all ranks, in the order of the global batch."""
    parts = [
        batches(rank, world, micro_batches).of_step(step)[micro].inputs
        for micro in range(micro_batches)
        for rank in range(world)
    ]
    return torch.cat(parts)


def test_split_keeps_every_byte_once() -> None:
    # Every position is its own value, so a position in both parts would be seen.
    positions = torch.arange(100_003)
    corpus = split(positions)
    assert torch.equal(torch.cat([corpus.train, corpus.validation]).sort().values, positions)
    assert len(corpus.validation) == pytest.approx(0.05 * len(positions), rel=0.01)


@pytest.mark.parametrize(("world", "micro_batches"), [(2, 1), (4, 1), (1, 4), (2, 2), (4, 2)])
def test_global_batch_is_the_same_for_any_number_of_ranks(world: int, micro_batches: int) -> None:
    for step in (1, 2, 700):
        assert torch.equal(whole_step(step, world, micro_batches), whole_step(step, 1, 1))


def test_batches_differ_by_step_and_seed_and_repeat_exactly() -> None:
    first = batches().of_step(5)[0].inputs
    assert torch.equal(first, batches().of_step(5)[0].inputs)
    assert not torch.equal(first, batches().of_step(6)[0].inputs)
    assert not torch.equal(first, batches(seed=4).of_step(5)[0].inputs)


def test_targets_are_the_next_bytes() -> None:
    ((inputs, targets, factor),) = batches().of_step(1)
    assert factor == 1
    assert inputs.shape == targets.shape == (8, 16)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(targets, (inputs + 1) % 251)


def test_validation_is_spread_over_the_whole_text() -> None:
    starts = validation_starts(1000, 16, 50)
    assert len(set(starts)) == 50
    assert (starts.min(), starts.max()) == (0, 1000 - 16 - 1)


def test_default_text_is_python_and_capped() -> None:
    corpus = load_corpus(None, 0.5, 128)
    assert len(corpus.train) + len(corpus.validation) == 500_000
    assert b"import" in bytes(corpus.train[:50_000].tolist())


def test_shortest_accepted_file_gives_a_batch_of_each_part(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"x" * 540)  # (16 + 1 + 10) / 0.05
    corpus = load_corpus(path, 4, 16)
    assert min(len(corpus.train), len(corpus.validation)) >= 17
    path.write_bytes(b"x" * 539)
    with pytest.raises(BadInput, match="539 bytes, and --context 16 needs at least 540"):
        load_corpus(path, 4, 16)
