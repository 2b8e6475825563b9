"""`python -m benchmarks.report`: made-up runs of several sizes, reported and opened in Chromium."""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from statistics import median

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.report.synthetic_run import write_run
from distmon.report import write_report

SIZES = ((10, 100), (100, 100), (1000, 100), (10_000, 100))
OPENED = 3


def first_plot(report: Path) -> tuple[float, float] | None:
    """Open the report a few times: seconds, and seconds of CPU; None where there is no browser.

    The CPU time, of all of the browser's processes, is the one to compare on a busy machine.
    """
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        return None
    from playwright.sync_api import sync_playwright

    times, cpu = [], []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for _ in range(OPENED):
            page = browser.new_page(viewport={"width": 1300, "height": 900})
            before, begin = _browser_cpu(), time.perf_counter()
            page.goto(report.resolve().as_uri())
            page.wait_for_selector(".plot .main-svg")
            times.append(time.perf_counter() - begin)
            cpu.append(_browser_cpu() - before)
            page.close()
        browser.close()
    return median(times), median(cpu)


def _browser_cpu() -> float:
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if "chrom" in process.name():
                total += sum(process.cpu_times()[:2])
    return total


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", action="append", help="PARAMETERSxOBSERVATIONS, repeatable")
    parser.add_argument("--run", help="an existing run folder instead", type=Path)
    options = parser.parse_args()
    sizes = [tuple(map(int, each.split("x"))) for each in options.size or ()] or SIZES
    table = Table()
    for heading in ("run", "folder", "report", "written in", "first plot after", "of CPU"):
        table.add_column(heading, justify="right")
    with tempfile.TemporaryDirectory() as scratch:
        folders = {f"{p} x {o}": (p, o) for p, o in sizes} if options.run is None else {}
        for name, (params, observations) in folders.items():
            _row(table, name, write_run(Path(scratch) / name, params, observations), scratch)
        if options.run is not None:
            _row(table, options.run.name, options.run, scratch)
    Console(width=100).print(table)


def _row(table: Table, name: str, run: Path, scratch: str) -> None:
    size = sum(file.stat().st_size for file in run.iterdir() if file.is_file())
    begin = time.perf_counter()
    report = write_report(run, Path(scratch) / "report.html")
    written = time.perf_counter() - begin
    first = first_plot(report)
    shown = ("no browser", "") if first is None else tuple(f"{each:.1f} s" for each in first)
    megabytes = f"{size / 1e6:.1f} MB", f"{report.stat().st_size / 1e6:.1f} MB"
    table.add_row(name, *megabytes, f"{written:.1f} s", *shown)


if __name__ == "__main__":
    main()
