"""Make docs/report.png: a screenshot of a run's report. `make picture` runs it on the demo."""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from distmon.report import write_report

SIZE = {"width": 1300, "height": 1000}
COLORS = 256


def picture(run: Path, target: Path) -> None:
    """Write a picture of summary, alerts, losses and heat map."""
    page_file = write_report(run)
    with sync_playwright() as playwright:
        chromium = shutil.which("chromium") or shutil.which("chromium-browser")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport=SIZE, color_scheme="light")
        page.goto(page_file.resolve().as_uri())
        page.wait_for_selector(".plot .main-svg")
        page.add_style_tag(content=".chart:not(.wide) { display: none; }")
        page.evaluate("distmon.charts.forEach((c) => { c.visible = true; c.refresh(); })")
        page.wait_for_timeout(500)
        heat = page.locator("figure", has_text="Update ratio of every parameter").bounding_box()
        height = heat["y"] + heat["height"] + 12
        page.set_viewport_size({**SIZE, "height": int(height)})
        page.wait_for_timeout(500)
        shot = page.screenshot()
        browser.close()
    image = Image.open(io.BytesIO(shot)).convert("RGB")
    image = image.quantize(COLORS, dither=Image.Dither.NONE)
    image.save(target, optimize=True)
    print(f"{target}: {image.width} x {image.height}, {target.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    picture(Path(sys.argv[1]), Path(sys.argv[2]))
