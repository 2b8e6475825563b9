"""A Prometheus endpoint: the newest numbers of the run, read by whoever scrapes."""

from __future__ import annotations

import logging
import re
from typing import Any, Final

from distmon.alert import Alert
from distmon.config import PrometheusConfig
from distmon.errors import ConfigError
from distmon.metrics import RANK_METRICS, RUN_METRICS, Metric
from distmon.record import Record

logger = logging.getLogger("distmon")

PREFIX: Final = "distmon_"
UNITS: Final = {"s": "seconds", "B": "bytes", "C": "celsius", "W": "watts", "MHz": "megahertz"}
"""Prometheus spells units out at the end of a name; rates and counts have theirs already."""
NOT_SCRAPED: Final = re.compile(
    r"time$|step$|plan_hash|region_key|checksum|signal_|eval\d|task_key"
)
"""What ranks tell each other that is no measurement."""


class PrometheusSink:
    """Gauges of every run metric, of every rank's telemetry (one label: rank, up to a cap), and a
    counter of alerts by rule and severity. Nothing is labelled by parameter or step."""

    def __init__(self, settings: PrometheusConfig, run: str) -> None:
        try:
            import prometheus_client as client
        except ImportError:
            raise ConfigError(
                "the sink \"prometheus\" needs a package: pip install 'distmon[prometheus]'"
            ) from None
        self._settings = settings
        self._run = run
        # A registry of its own: two monitors, or the trainer's own metrics, do not collide.
        self.registry = client.CollectorRegistry()
        self._gauges: dict[str, Any] = {}
        for metric in RUN_METRICS:
            self._gauges[metric.name] = client.Gauge(
                metric_name(metric), metric.help, ["run"], registry=self.registry
            )
        self._by_rank: dict[str, Any] = {
            metric.name: client.Gauge(
                metric_name(metric, "rank_"), metric.help, ["run", "rank"], registry=self.registry
            )
            for metric in RANK_METRICS
            if not NOT_SCRAPED.search(metric.name)
        }
        self._step = client.Gauge(
            f"{PREFIX}step", "step of the newest record", ["run"], registry=self.registry
        )
        self._seen = client.Gauge(
            f"{PREFIX}record_timestamp_seconds",
            "Unix time of the newest record",
            ["run"],
            registry=self.registry,
        )
        self._alerts = client.Counter(
            f"{PREFIX}alerts", "alerts raised", ["run", "rule", "severity"], registry=self.registry
        )
        self._server, self.port = _serve(client, settings, self.registry)

    def record(self, record: Record) -> None:
        self._step.labels(self._run).set(record.step)
        self._seen.labels(self._run).set(record.time)
        for name, gauge in self._gauges.items():
            value = record.metrics.get(name)
            # What was not measured this time has no value, rather than its last one.
            if value is None:
                gauge.clear()
            else:
                gauge.labels(self._run).set(value)
        for name, gauge in self._by_rank.items():
            values = record.ranks.get(name)
            if values is None:
                continue
            for rank, value in enumerate(values[: self._settings.most_ranks]):
                gauge.labels(self._run, str(rank)).set(float(value))

    def alert(self, alert: Alert) -> None:
        self._alerts.labels(self._run, alert.rule, alert.severity).inc()

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()


def metric_name(metric: Metric, inner: str = "") -> str:
    """`performance/step_seconds` -> `distmon_performance_step_seconds`; its unit comes last."""
    name = re.sub(r"[^a-zA-Z0-9_]", "_", metric.name)
    unit = UNITS.get(metric.unit, "")
    if unit and not name.endswith(f"_{unit}"):
        name = f"{name}_{unit}"
    return f"{PREFIX}{inner}{name}"


def _serve(client: Any, settings: PrometheusConfig, registry: Any) -> tuple[Any, int]:
    """The HTTP server in a thread of its own; the next free port when the wanted one is taken."""
    for port in range(settings.port, settings.port + settings.ports):
        try:
            server, _ = client.start_http_server(port, addr=settings.address, registry=registry)
        except OSError as error:
            reason = error.strerror or str(error)
            continue
        if port != settings.port:
            logger.warning(
                "port %d is taken: metrics are at http://%s:%d/metrics",
                settings.port,
                settings.address,
                server.server_port,
            )
        return server, int(server.server_port)
    last = settings.port + settings.ports - 1
    raise ConfigError(
        f"no port from {settings.port} to {last} of {settings.address} can be opened: {reason}"
    )
