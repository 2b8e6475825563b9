"""A real headless Chromium; tests that need one are skipped with one line where there is none."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

LONG_S = 120.0
"""What is waited for comes much sooner, but not on a busy machine."""
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser without a window."""
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed: apt-get install chromium")
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def opened(browser: Any, address: str | Path, **options: Any) -> Iterator[Any]:
    """The page at an address, with its first plot drawn. Nothing may be wrong on its console."""
    page = browser.new_page(viewport={"width": 1300, "height": 900}, **options)
    page.set_default_timeout(1000 * LONG_S)
    wrong: list[str] = []
    loaded: list[str] = []
    page.on("console", lambda m: wrong.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda request: loaded.append(request.url))
    url = address if isinstance(address, str) else address.resolve().as_uri()
    page.goto(url)
    page.wait_for_selector(".plot .main-svg")
    page.loaded = loaded
    yield page
    assert wrong == []
    page.close()


def draw_all(page: Any) -> None:
    """Draw the plots that are not in the window too."""
    page.evaluate("distmon.charts.forEach((c) => { c.visible = true; c.refresh(); })")
    page.wait_for_function("distmon.charts.every((c) => c.drawn || c.plot.matches('.empty'))")


def chart_of(page: Any, title: str) -> Any:
    return page.locator("figure", has=page.locator("figcaption", has_text=title)).first


def colors_in(page: Any, title: str, at_least: int) -> int:
    """How many colors the plot's pixels have: one or two where nothing is drawn.

    A plot is drawn some time after it comes into the window: it is looked at until there are enough
    colors, or for a long time.
    """
    import io

    from PIL import Image

    chart = chart_of(page, title).locator(".plot")
    chart.scroll_into_view_if_needed()
    deadline = time.monotonic() + LONG_S
    while True:
        image = Image.open(io.BytesIO(chart.screenshot())).convert("RGB")
        colors = len(image.getcolors(1 << 24) or ())
        if colors >= at_least or time.monotonic() > deadline:
            return colors
        page.wait_for_timeout(100)


def shows(element: Any, text: str) -> bool:
    """Wait until an element has the text: some are written when the browser has time for it."""
    element.filter(has_text=text).first.wait_for(state="attached")
    return True
