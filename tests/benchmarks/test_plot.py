"""Plots: drawn from the results alone."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from made_results import write, write_growing

from benchmarks.plot import draw
from distmon.bench.plot import NoMatplotlibError


def test_costs_and_growth_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    paths = draw(write_growing(tmp_path, few=True))
    names = {path.name for path in paths}
    assert names == {
        "costs-gpt2-fp32.png",
        "costs-tensors-100-fp32.png",
        "costs-tensors-1000-fp32.png",
        "growth.png",
    }
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


def test_a_time_below_zero_and_a_wrong_answer_can_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    seconds = {"distmon sampled": 1e-3, "naive hooks": -2e-3}
    folder = write(tmp_path, seconds, noise=0.0, wrong={"distmon sampled": "a is 2"})
    (path,) = draw(folder)
    assert path.exists()


def test_without_matplotlib_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(NoMatplotlibError, match=r"pip install 'distmon\[bench\]'"):
        draw(write(tmp_path))
