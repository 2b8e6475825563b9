"""The Prometheus endpoint, scraped over HTTP and read by Prometheus' own parser."""

from __future__ import annotations

import logging
import re
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from sample_run import MakeRecord

from distmon.config import PrometheusConfig
from distmon.errors import ConfigError
from distmon.metrics import RANK_METRICS, RUN_METRICS
from distmon.rules.alert import Alert
from distmon.sinks.prometheus import PrometheusSink, metric_name

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@pytest.fixture
def sink() -> Iterator[PrometheusSink]:
    made = PrometheusSink(PrometheusConfig(port=0), "demo")
    yield made
    made.close()


def scrape(sink: PrometheusSink) -> Samples:
    with urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_scrape_has_the_newest_numbers(sink: PrometheusSink, make_record: MakeRecord) -> None:
    sink.record(make_record(10))
    sink.record(make_record(20, metrics={"train/step_loss": 2.5}))
    sink.alert(Alert("frozen", "warning", 20, "it is frozen"))
    found = scrape(sink)
    run = (("run", "demo"),)
    assert found["distmon_step", run] == 20
    assert found["distmon_train_step_loss", run] == 2.5
    assert ("distmon_monitor_grad_norm", run) not in found  # not measured at step 20
    rank = (("rank", "1"), ("run", "demo"))
    assert found["distmon_rank_step_seconds", rank] == 0.041
    alert = (("rule", "frozen"), ("run", "demo"), ("severity", "warning"))
    assert found["distmon_alerts_total", alert] == 1


def test_labels_grow_with_neither_parameters_nor_steps(make_record: MakeRecord) -> None:
    def series(params: int, steps: int) -> int:
        sink = PrometheusSink(PrometheusConfig(port=0, most_ranks=2), "demo")
        for step in range(1, steps + 1):
            ranks = {"step_seconds": np.ones(100)}
            sink.record(make_record(step, params, histogram=False, ranks=ranks))
        found = scrape(sink)
        sink.close()
        return len(found)

    assert series(3, 1) == series(300, 1) == series(3, 30)


def test_names_are_unique_and_carry_their_unit() -> None:
    names = [metric_name(m) for m in RUN_METRICS] + [metric_name(m, "rank_") for m in RANK_METRICS]
    assert len(set(names)) == len(names)
    by_name = {metric.name: metric_name(metric) for metric in RUN_METRICS}
    assert by_name["performance/step_seconds"] == "distmon_performance_step_seconds"
    assert by_name["memory/rss_bytes"] == "distmon_memory_rss_bytes"
    assert by_name["hardware/temperature"] == "distmon_hardware_temperature_celsius"


def test_the_dashboard_asks_for_what_there_is(sink: PrometheusSink) -> None:
    known = {sample.name for family in sink.registry.collect() for sample in family.samples}
    known |= {family.name for family in sink.registry.collect()} | {"distmon_alerts_total"}
    dashboard = (Path(__file__).parents[2] / "docs/grafana.json").read_text()
    asked = set(re.findall(r"distmon_\w+", dashboard))
    assert len(asked) > 20
    assert asked <= known, asked - known


def test_a_taken_port_is_not_the_end(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with caplog.at_level(logging.WARNING, "distmon"):
            sink = PrometheusSink(PrometheusConfig(port=port), "demo")
        assert sink.port != port
        sink.close()
        assert f"port {port} is in use" in caplog.text
        with pytest.raises(ConfigError, match=f"no port from {port} to {port} of 127.0.0.1"):
            PrometheusSink(PrometheusConfig(port=port, ports=1), "demo")


def test_an_address_that_others_reach_needs_a_token() -> None:
    with pytest.raises(ConfigError, match=r"0.0.0.0 can be reached .* set prometheus.token"):
        PrometheusSink(PrometheusConfig(address="0.0.0.0", port=0), "demo")
    with pytest.raises(ConfigError, match="at least 16 characters"):
        PrometheusSink(PrometheusConfig(port=0, token="short"), "demo")  # type: ignore[arg-type]


def test_only_who_knows_the_token_reads() -> None:
    token = "0123456789abcdef"
    settings = PrometheusConfig(address="0.0.0.0", port=0, token=token)  # type: ignore[arg-type]
    assert token not in repr(settings)
    guarded = PrometheusSink(settings, "demo")
    try:
        address = f"http://127.0.0.1:{guarded.port}/metrics"
        for sent in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer "}):
            request = urllib.request.Request(address, headers=sent)
            with pytest.raises(urllib.error.HTTPError, match="401"):
                urllib.request.urlopen(request, timeout=10)
        request = urllib.request.Request(address, headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(request, timeout=10) as answer:
            assert answer.status == 200
        request = urllib.request.Request(
            f"http://127.0.0.1:{guarded.port}/metrics", b"x", {"Authorization": f"Bearer {token}"}
        )
        with pytest.raises(urllib.error.HTTPError, match="405"):
            urllib.request.urlopen(request, timeout=10)
    finally:
        guarded.close()
