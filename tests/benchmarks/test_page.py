"""The page: whole, without a request to anybody, and with names that are not taken for markup."""

from __future__ import annotations

import base64
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from made_results import CONTEXT, SECONDS, write, write_growing

from distmon_benchmarks import page
from distmon_benchmarks.plots import NoMatplotlibError, draw

VOID = {"meta", "img", "br", "hr"}


class _Tags(HTMLParser):
    """Checks that what is opened is closed, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href"):
                assert str(value).startswith("data:")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_self_contained(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    text = page.write(write_growing(tmp_path, few=True)).read_text()
    tags = _Tags()
    tags.feed(text)
    assert tags.open == []
    assert "http" not in text
    assert not re.search(r"url\(|@import|<script|<link", text)
    for words in ("naive clone", "Goals", "Growth", "mosaicml is not installed", "2.13.0"):
        assert words in text
    pictures = re.findall(r'src="data:image/png;base64,([^"]+)"', text)
    assert len(pictures) == tags.seen.count("img") == len([*tmp_path.glob("*.png")])
    assert all(base64.b64decode(p).startswith(b"\x89PNG") for p in pictures)
    assert {"share.png", "memory.png", "observation-gpt2-fp32.png"} <= {
        path.name for path in tmp_path.glob("*.png")
    }


def test_names_are_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    context = replace(CONTEXT, wrong={"<b>": "1 < 2 & 3"}, command="run <script>")
    text = page.write(write(tmp_path, {**SECONDS, "<i>": 1.0}, context=context)).read_text()
    assert "&lt;b&gt;" in text
    assert "1 &lt; 2 &amp; 3" in text
    assert "run &lt;script&gt;" in text
    assert "<i>" not in text


def test_without_matplotlib_there_is_a_page_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    text = page.write(write(tmp_path, noise=0.0)).read_text()
    assert "pip install &#x27;distmon[bench]&#x27;" in text
    assert "500 ms" in text
    with pytest.raises(NoMatplotlibError):
        draw(tmp_path)


def test_times_below_zero_are_named_not_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pictures = draw(write(tmp_path, {"distmon sampled": 1e-3, "naive hooks": -2e-3}, noise=0.0))
    assert "naive hooks (-2.00 ms)" in pictures[0].caption
