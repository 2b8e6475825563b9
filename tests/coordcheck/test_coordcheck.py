"""The coordinate check: slopes, verdicts, and the command."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from distmon.cli.coordcheck import run_coordcheck
from distmon.coordcheck.measuring import OUTPUT, Sizes
from distmon.coordcheck.verdicts import slope, verdicts_of
from distmon.coordcheck.workload import parse_widths
from distmon.errors import ConfigError

WIDTHS = (16, 32, 64, 128)


def test_the_slope_is_that_of_a_line_and_its_margin_covers_noise() -> None:
    exact = slope(WIDTHS, [3.0 * w**0.5 for w in WIDTHS])
    assert (exact.value, exact.margin) == (pytest.approx(0.5), pytest.approx(0.0, abs=1e-9))
    generator, missed = np.random.default_rng(0), 0
    for _ in range(400):
        noise = np.exp(0.1 * generator.standard_normal(8))
        found = slope(
            WIDTHS * 2, [float(w**0.5 * n) for w, n in zip(WIDTHS * 2, noise, strict=True)]
        )
        missed += abs(found.value - 0.5) > found.margin
    assert 5 <= missed <= 40  # 5% of 400 are 20


@pytest.mark.parametrize(
    ("power", "verdict"), [(0.0, "ok"), (0.5, "grows"), (-0.5, "shrinks"), (1.0, "grows")]
)
def test_the_verdict_follows_from_the_change(power: float, verdict: str) -> None:
    found = [Sizes("layer", w, s, (1.0, 1.0), (0.0, w**power)) for w in WIDTHS for s in range(2)]
    assert verdicts_of(found)[0].verdict == verdict


def test_a_small_output_of_a_wide_model_is_fine() -> None:
    found = [Sizes(OUTPUT, w, 0, (1.0, 1 / w), (0.0, 1.0)) for w in WIDTHS]
    assert verdicts_of(found)[0].verdict == "ok"


@pytest.mark.parametrize(("model", "passes"), [("standard", False), ("mup", True)])
def test_the_built_in_model(model: str, passes: bool, tmp_path: Path) -> None:
    console = Console(quiet=True)
    widths = "64,128,256,512"  # narrower ones have slopes of their own
    assert run_coordcheck(console, model, widths, 4, 1, 1e-3, tmp_path, plot=True) is passes
    written = json.loads((tmp_path / "coordcheck.json").read_text())
    verdicts = {each["module"]: each["verdict"] for each in written["modules"]}
    assert (verdicts[OUTPUT] == "grows") is not passes
    assert (tmp_path / "coordcheck.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("model", "widths", "words"),
    [
        ("nope", "1,2,3", "must be"),
        ("standard", "16,32", "at least 3"),
        ("standard", "a,b,c", "whole numbers"),
        ("os:getcwd", "8,16,32", "raises TypeError"),
    ],
)
def test_bad_options_are_one_sentence(model: str, widths: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        run_coordcheck(Console(quiet=True), model, widths, 2, 1, 1e-3, tmp_path, plot=False)


def test_widths_are_sorted() -> None:
    assert parse_widths("64, 16,32") == [16, 32, 64]
