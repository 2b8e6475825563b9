"""Sweeps of spectral norms: what fails on this rank ends them here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_runs import small_model

from distmon.collect.inside.catalog import Catalog
from distmon.layout import capture
from distmon.reduce.channel import Channel
from distmon.runtime.spectra_sweeps import SpectraSweeps


def _sweeps(shards: list[Any]) -> SpectraSweeps:
    names = [shard.name for shard in shards if len(shard.global_shape) == 2]
    found = SpectraSweeps(Catalog(matrices=tuple(names)), shards, torch.device("cpu"), 0)
    found.open(Channel())
    return found


def test_a_sweep_that_fails_to_begin_is_the_last() -> None:
    """The one after it would be of other matrices than that of the other ranks."""
    shards = [*capture(small_model(), ["*"], [], str)]
    sweeps = _sweeps(shards)
    removed = shards.pop(0)
    with pytest.raises(RuntimeError, match="no longer estimated"):
        sweeps.begin()
    shards.insert(0, removed)
    sweeps.begin()
    assert not sweeps.busy


def test_a_sweep_begins() -> None:
    sweeps = _sweeps([*capture(small_model(), ["*"], [], str)])
    sweeps.begin()
    assert sweeps.busy
    assert sweeps.advance() is not None
