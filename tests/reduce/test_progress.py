"""Which rank has reached which step: few requests to the store, however many ranks there are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

from distmon.reduce import progress as module
from distmon.reduce.progress import Progress


class _Store:
    """A key-value store that counts requests."""

    def __init__(self, values: dict[str, str]) -> None:
        self.values = values
        self.checks = self.gets = 0

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def check(self, keys: list[str]) -> bool:
        self.checks += 1
        return all(key in self.values for key in keys)

    def get(self, key: str) -> bytes:
        self.gets += 1
        return self.values[key].encode()


Describe = Callable[[int, int, dict[int, int]], tuple[str, _Store]]


@pytest.fixture
def describe(monkeypatch: pytest.MonkeyPatch) -> Iterator[Describe]:
    """Return what a rank of some size says at step 7, given the steps that others published."""
    monkeypatch.setattr(module, "PATIENCE_S", 0.0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def ask(rank: int, size: int, published: dict[int, int]) -> tuple[str, _Store]:
        progress, said = Progress("test", rank, size), list[str]()
        store: Any = _Store({str(other): str(step) for other, step in published.items()})
        monkeypatch.setattr(progress, "_store", store)
        progress.describe(7, said.append).join()
        assert store.values[str(rank)] == "7"
        return said[0], store

    yield ask
    dist.destroy_process_group()


def test_every_rank_of_a_small_world_names_those_behind(describe: Describe) -> None:
    for rank in (0, 2):
        said, _ = describe(rank, 4, {0: 7, 1: 3, 2: 7})
        assert said == "rank 1 at step 3; rank 0, 2 at step 7; rank 3 did not respond"


def test_in_a_large_world_rank_0_asks_for_all_at_once(describe: Describe) -> None:
    published = dict.fromkeys(range(4096), 7)
    said, store = describe(0, 4096, published)
    assert said.startswith("rank 0, 1, 2, ")
    assert said.endswith(", 4095 at step 7")
    assert store.checks == 1

    del published[1234]
    said, store = describe(0, 4096, published | {9: 3})
    assert said.startswith("rank 9 at step 3; rank 0, ")
    assert said.endswith(" at step 7; rank 1234 did not respond")
    assert store.checks <= 2 * 12 + 1


def test_in_a_large_world_the_others_only_publish(describe: Describe) -> None:
    said, store = describe(5, 4096, {0: 7})
    assert said == "rank 5 at step 7; rank 0 lists the others"
    assert store.checks == store.gets == 0


@pytest.mark.usefixtures("describe")
def test_a_process_that_ends_waits_for_others_for_a_moment_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 3600.0)
    progress, said = Progress("test", 0, 2), list[str]()
    asking = progress.describe(7, said.append)
    progress.hurry()
    asking.join(60)
    assert said == ["rank 0 at step 7; rank 1 did not respond"]
