"""serve: only what is new is sent, to many clients; nothing but runs can be read."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
from browser import LONG_S, chromium, opened, shows
from live_server import events, served
from test_view import write_more

from benchmarks.report.synthetic_run import layer_names, made_up_record, write_run
from distmon.errors import ConfigError, RunFolderError
from distmon.report.server.access import check_address
from distmon.report.server.catalog import RunCatalog
from distmon.runs.run_folder import RunFolder
from distmon.sinks.jsonl import JsonlSink

NAMES = layer_names(6)
HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_run(tmp_path / "runs" / "a", 6, 5, total_steps=1000)
    write_run(tmp_path / "runs" / "deep" / "er" / HOSTILE, 6, 5)
    write_run(tmp_path / "outside", 6, 5)
    (tmp_path / "runs" / "link").symlink_to(tmp_path / "outside")
    (tmp_path / "secret.txt").write_text("secret")
    return tmp_path / "runs"


def test_a_record_without_its_time_is_listed(root: Path) -> None:
    file = root / "a" / "records.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps({**line, "time": "noon"}) + "\n" for line in lines))
    listed = {line["name"]: line for line in RunCatalog(root).summaries()}
    assert (listed["a"]["time"], listed["a"]["step"]) == (None, 50)


def test_only_runs_of_the_folder_can_be_read(root: Path) -> None:
    assert {*RunCatalog(root).find()} == {"a", f"deep/er/{HOSTILE}"}
    with served(root) as address, httpx.Client(base_url=address) as client:
        assert client.get("/api/view?run=a").json()["view"]["name"] == "a"
        bad = ("../outside", "/etc/passwd", "link", "a/../../outside", "..%2foutside", "a\0b", "")
        for name in bad:
            answer = client.get(f"/api/view?run={quote(name)}")
            assert (answer.status_code, answer.text) == (404, "no such run"), name
            assert client.get(f"/api/events?run={quote(name)}&after=0").status_code == 404
        for path in ("/static/../secret.txt", "/static/%2e%2e/secret.txt", "/secret.txt", "/runs"):
            assert client.get(path).status_code == 404, path
        for query in (
            "run=a",
            "after=1",
            "run=a&after=x",
            "run=a&after=-1",
            "run=a&after=" + "9" * 30,
        ):
            assert client.get(f"/api/events?{query}").status_code == 400, query
        assert client.post("/api/runs").status_code == 405
        lines = {line["name"]: line for line in client.get("/api/runs").json()}
        assert lines["a"]["step"] == 50
        assert (lines["a"]["state"], lines["a"]["ranks"]) == ("died", 2)


def test_every_answer_has_its_policy_and_other_hosts_are_refused(root: Path) -> None:
    with served(root) as address, httpx.Client(base_url=address) as client:
        for path in ("/", "/api/runs", "/static/page.js", "/nothing"):
            headers = client.get(path).headers
            assert "script-src 'self';" in headers["content-security-policy"]
            assert headers["x-content-type-options"] == "nosniff"
        answer = client.get("/api/runs", headers={"host": "evil.example"})
        assert (answer.status_code, answer.text) == (403, "unknown host")


def test_elsewhere_only_with_a_token(root: Path) -> None:
    with pytest.raises(ConfigError, match="DISTMON_SERVE_TOKEN"):
        check_address("0.0.0.0", None)
    with pytest.raises(ConfigError, match="16 characters"):
        check_address("0.0.0.0", "short")
    check_address("::1", None)
    token = "a token of some length"
    with served(root, token) as address, httpx.Client(base_url=address) as client:
        assert client.get("/api/runs").status_code == 401
        assert client.get("/", params={"token": "wrong"}).status_code == 401
        bearer = {"authorization": f"Bearer {token}"}
        assert client.get("/api/runs", headers=bearer).status_code == 200
        answer = client.get("/", params={"token": token, "run": "a"})
        assert (answer.status_code, answer.headers["location"]) == (303, "/?run=a")
        assert "HttpOnly" in answer.headers["set-cookie"]
        assert client.get("/api/runs").status_code == 200
    with pytest.raises(RunFolderError):
        RunCatalog(root / "nowhere")


def test_twenty_clients_get_what_is_new_and_only_that(root: Path) -> None:
    def listen(address: str, ready: list[int]) -> list[dict]:
        sequence = httpx.get(f"{address}/api/view?run=a").json()["sequence"]
        with events(address, f"run=a&after={sequence}") as stream:
            ready.append(1)
            found = [next(stream)]
            while found[-1]["kind"] != "reload":
                found.append(next(stream))
            return found

    with served(root) as address, ThreadPoolExecutor(20) as pool:
        ready: list[int] = []
        clients = [pool.submit(listen, address, ready) for _ in range(20)]
        while len(ready) < 20 and not any(client.done() for client in clients):
            time.sleep(0.05)
        write_more(root / "a", range(60, 81, 10), NAMES)
        with events(address, "run=a&after=0") as stream:
            assert next(stream)["data"]["scalars"]["steps"][-1] == 80
        folder = RunFolder.open(root / "a", config={}, parameters=[])
        folder.begin_attempt(resumed_from=60, world_size=2)
        sink = JsonlSink(folder)
        sink.record(made_up_record(70, NAMES, 10, 2, 1))
        sink.close()
        for client in clients:
            *changes, last = client.result(120)
            steps = [s for each in changes for s in each["data"]["scalars"]["steps"]]
            assert steps == [60, 70, 80]
            assert changes[-1]["data"]["params"]["grids"]["update_ratio"]["rows"] == 6
            assert last["kind"] == "reload"
            assert "about" not in changes[0]["data"]
            assert "names" not in changes[0]["data"]["params"]
        view = httpx.get(f"{address}/api/view?run=a").json()["view"]
        assert view["scalars"]["steps"][-1] == 70
        assert [each["attempt"] for each in view["about"]["attempts"]] == [0, 1]


def test_the_page_grows_without_a_reload(root: Path) -> None:
    with chromium() as browser, served(root) as address:
        with opened(browser, f"{address}/?run=a") as page:
            page.evaluate("window.stays = 1")
            loss = "distmon.charts.find((c) => c.title === 'Loss').plot.data"
            assert page.evaluate(f"{loss}.find((t) => t.name === 'loss').x.length") == 50
            write_more(root / "a", range(60, 71, 10), NAMES)
            # Not wait_for_function: the policy of the page forbids to evaluate text.
            while page.evaluate(f"{loss}.find((t) => t.name === 'loss').x.length") < 70:
                page.wait_for_timeout(100)
            assert page.evaluate("window.stays") == 1
            assert shows(page.locator(".cards"), "70 / 1000")
        page = browser.new_page()
        page.set_default_timeout(1000 * LONG_S)
        page.goto(address)
        page.wait_for_selector("tbody tr")
        assert HOSTILE in page.locator("tbody").text_content()
        assert page.locator("tbody img").count() == 0
        page.fill("#run-search", "deep")
        assert page.locator("tbody tr").count() == 1
        page.fill("#run-search", "")
        for box in page.locator("tbody input").all():
            box.check()
        page.click("text=Overlay")
        page.wait_for_selector(".plot .main-svg")
        assert page.locator(".plot .legendtext").first.text_content() in ("a", f"deep/er/{HOSTILE}")


def test_a_list_says_when_it_is_empty_and_fits_a_narrow_window(tmp_path: Path) -> None:
    with chromium() as browser, served(tmp_path) as address:
        page = browser.new_page(viewport={"width": 400, "height": 900})
        page.set_default_timeout(1000 * LONG_S)
        page.goto(address)
        assert shows(page.locator("#main"), "There is no run in this folder yet.")
        heading = page.locator(".runs thead th", has_text="alerts").bounding_box()
        assert heading["width"] > 50, "a word on one line"
        assert page.evaluate("document.documentElement.scrollWidth") == 400
