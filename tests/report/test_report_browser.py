"""The report in a real browser: plots drawn, nothing on the console, clicks and search work."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import chart_of, chromium, colors_in, draw_all, opened, shows
from small_runs import quiet, small_model, train

import distmon
from benchmarks.report.synthetic_run import write_run
from distmon.report import write_report
from distmon.rules.alert import Alert

HOSTILE = '</script><img src=x onerror="window.hacked=1"><b>bold</b>'
RATE = "distmon.charts.find((c) => c.title === 'Learning rate')"
LOSS = "distmon.charts.find((c) => c.title === 'Loss')"
ALERTS = (
    Alert("straggler", "warning", 120, "rank 1 is slow", ranks=(1,), advice=("look at its host",)),
    Alert(HOSTILE, "critical", 200, HOSTILE, params=(HOSTILE,), advice=(HOSTILE,)),
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    names = (*(f"blocks.{i}.mlp.weight" for i in range(39)), HOSTILE)
    folder = tmp_path_factory.mktemp("made") / "run"
    return write_report(write_run(folder, names=names, alerts=ALERTS))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_plot_is_drawn_or_says_why_not(browser: Any, report: Path, scheme: str) -> None:
    with opened(browser, report, color_scheme=scheme) as page:
        draw_all(page)
        for title in ("Loss", "Gradient norm", "Update ratio of every", "by depth", "Ranks over"):
            assert colors_in(page, title, 21) > 20, title
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (ground == "rgb(18, 21, 25)") == (scheme == "dark")
        for empty in page.locator(".plot.empty").all_text_contents():
            assert empty.endswith(".")
        assert "no GPU" in chart_of(page, "Devices").text_content()
        assert page.loaded == [report.resolve().as_uri()]


def test_a_search_then_a_click_shows_the_history_of_a_parameter(browser: Any, report: Path) -> None:
    with opened(browser, report) as page:
        page.fill("#param-search", "blocks.7. WEIGHT")
        assert page.locator(".count").text_content() == "1 of 40 parameters"
        heat = chart_of(page, "Update ratio of every").locator(".plot")
        heat.scroll_into_view_if_needed()
        # Drawn again for the search, when the browser has time for it.
        chart = "distmon.charts.find((c) => c.title.startsWith('Update ratio of'))"
        page.wait_for_function(f"{chart}.drawn && !{chart}.stale")
        heat.locator(".nsewdrag").first.click()
        history = page.locator("#param-history")
        assert "blocks.7.mlp.weight" in history.locator("h3").text_content()
        assert colors_in(page, "Gradient percentiles", 11) > 10
        page.fill("#param-search", "nothing like it")
        assert page.locator(".count").text_content() == "0 of 40 parameters"
        heat.scroll_into_view_if_needed()
        assert shows(chart_of(page, "Update ratio of every"), 'with "nothing like it"')


def test_keys_alone_reach_a_parameter_and_move_the_time_axis(browser: Any, report: Path) -> None:
    with opened(browser, report) as page:
        page.locator("#param-search").focus()
        page.keyboard.type("blocks.3.")
        for _ in range(20):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.matches('.params button')"):
                break
        page.keyboard.press("Enter")
        assert "blocks.3.mlp" in page.locator("#param-history h3").text_content()
        loss = chart_of(page, "Loss").locator(".plot")
        loss.focus()
        before = page.evaluate(f"{LOSS}.plot.layout.xaxis.range")
        page.keyboard.press("+")
        # Other plots follow one by one, each when the browser has time for it.
        drawn = "distmon.charts.filter((c) => c.drawn && c.visible && c.options.time)"
        page.wait_for_function(
            f"(before) => {drawn}.length > 1 && {drawn}.map((c) => c.plot.layout.xaxis.range)"
            ".every((r, _, [first]) => r[0] === first[0] && r[1] === first[1]"
            " && r[1] - r[0] < before[1] - before[0])",
            arg=before,
        )


def test_names_from_logs_are_text(browser: Any, report: Path) -> None:
    with opened(browser, report) as page:
        draw_all(page)
        page.fill("#param-search", "onerror")
        page.click(".params tbody button")
        draw_all(page)
        assert page.locator("#param-history h3").text_content().startswith(HOSTILE)
        assert HOSTILE in page.locator("#alerts").text_content()
        assert page.evaluate("window.hacked") is None
        assert page.locator("#main img, #main b").count() == 0


def test_a_real_run_with_a_nan_and_a_resumed_one(browser: Any, tmp_path: Path) -> None:
    import torch

    def spoil(step: int) -> None:
        if step == 6:
            next(model.parameters()).grad[0, 0] = float("nan")  # type: ignore[index]

    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with distmon.attach(model, optimizer, **quiet(tmp_path)) as monitor:
        train(model, optimizer, monitor, range(1, 5))
        state = monitor.state_dict()
        train(model, optimizer, monitor, range(5, 9))
    with distmon.attach(model, optimizer, **quiet(tmp_path)) as monitor:
        monitor.load_state_dict(state)
        train(model, optimizer, monitor, range(5, 9), spoil)
    with opened(browser, write_report(tmp_path / "run")) as page:
        draw_all(page)
        assert "nonfinite at step 6" in page.locator("#alerts").text_content()
        assert "resumed from step 4" in page.locator("#about").text_content()
        marks = page.evaluate(f"{LOSS}.plot.layout.annotations.map((a) => a.text)")
        assert marks == ["resumed from 4"]
        assert shows(chart_of(page, "Loss"), "NaN or Inf at")
        cards = page.locator("#summary .card").all_text_contents()
        (loss,) = [card for card in cards if card.startswith("loss")]
        assert loss.endswith("NaN or Infsince step 7"), "not the last good average"
        top = page.evaluate(f"{RATE}.plot._fullLayout.yaxis.range[1]")
        assert 1e-3 < top < 2e-3, "a constant rate is not drawn as zero"
        assert shows(chart_of(page, "Memory"), "host, GB"), "a single line has a unit, too"
        assert "1 rank" in page.locator("#about").text_content()
        assert "1 ranks" not in page.locator("#about").text_content()


def test_the_table_of_parameters_fits_a_narrow_window(browser: Any, report: Path) -> None:
    with opened(browser, report) as page:
        assert shows(page.locator("#main"), "Show 28 more"), "40 parameters, 12 of them shown"
        page.set_viewport_size({"width": 400, "height": 900})
        name, ratio = (page.locator(f".params tbody tr >> nth=0 >> {c}") for c in ("th", ".number"))
        assert name.bounding_box()["width"] >= 100
        assert name.bounding_box()["height"] < 80, "a name on a few lines, not a letter on each"
        table = page.locator(".params").bounding_box()
        assert table["x"] + table["width"] <= 400
        assert ratio.first.is_visible()
        in_lines = """(cells) => cells.map((cell) => {
            const text = document.createRange();
            text.selectNodeContents(cell);
            return text.getClientRects().length;
        })"""
        counts = page.locator(".params td.number").evaluate_all(in_lines)
        assert set(counts) == {1}, "a number is not broken into two lines"


def test_ten_thousand_parameters_stay_small_and_readable(browser: Any, tmp_path: Path) -> None:
    path = write_report(write_run(tmp_path / "run", 10_000, 75))
    assert path.stat().st_size < 12e6
    with opened(browser, path) as page:
        draw_all(page)
        assert colors_in(page, "Update ratio of every", 51) > 50
        note = chart_of(page, "Update ratio of every").locator(".note").text_content()
        assert "Each row is 42 neighboring parameters" in note
        page.fill("#param-search", "blocks.1234.")
        assert page.locator(".count").text_content() == "5 of 10000 parameters"
        page.click(".params tbody button >> nth=0")
        draw_all(page)
        assert shows(chart_of(page, "Gradient percentiles"), "distmon report --param")
