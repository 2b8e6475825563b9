"""A Prometheus endpoint with the newest values of the run."""

from __future__ import annotations

import hmac
import logging
import re
from socketserver import ThreadingMixIn
from threading import Thread
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from distmon.config import PrometheusConfig
from distmon.errors import ConfigError
from distmon.metrics import RANK_METRICS, RUN_METRICS, Metric
from distmon.record.record import Record
from distmon.rules.alert import Alert
from distmon.sinks.base import SinkContext
from distmon.untrusted.access import check_access

logger = logging.getLogger("distmon")

PREFIX: Final = "distmon_"
UNITS: Final = {"s": "seconds", "B": "bytes", "C": "celsius", "W": "watts", "MHz": "megahertz"}
"""Prometheus ends a metric's name with its unit; the names of rates and counts have it already."""
NOT_SCRAPED: Final = ("time", "step")
"""Rank metrics that are exported as separate gauges."""


def open_sink(context: SinkContext) -> PrometheusSink:
    """Return the sink of a monitor."""
    return PrometheusSink(context.config.prometheus, context.folder.path.resolve().name)


class PrometheusSink:
    """Exports a gauge per run metric, gauges of rank telemetry labeled by rank (up to a cap), and
    a counter of alerts by rule and severity. Nothing is labeled by parameter or step."""

    def __init__(self, settings: PrometheusConfig, run: str) -> None:
        try:
            import prometheus_client as client
        except ImportError:
            raise ConfigError(
                "the sink \"prometheus\" needs a package: pip install 'distmon[prometheus]'"
            ) from None
        self._settings = settings
        self._run = run
        # Its own registry, so that it does not collide with other monitors or trainer metrics.
        self.registry = client.CollectorRegistry()
        self._gauges: dict[str, Any] = {}
        for metric in RUN_METRICS:
            self._gauges[metric.name] = client.Gauge(
                metric_name(metric), metric.description, ["run"], registry=self.registry
            )
        self._by_rank: dict[str, Any] = {
            metric.name: client.Gauge(
                metric_name(metric, "rank_"), metric.help, ["run", "rank"], registry=self.registry
            )
            for metric in RANK_METRICS
            if metric.name not in NOT_SCRAPED
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
            # A metric that was not measured has no value, rather than its last one.
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
    """Return the Prometheus name: `distmon_performance_step_seconds`, with the unit last."""
    name = re.sub(r"[^a-zA-Z0-9_]", "_", metric.name)
    unit = UNITS.get(metric.unit, "")
    if unit and not name.endswith(f"_{unit}"):
        name = f"{name}_{unit}"
    return f"{PREFIX}{inner}{name}"


def _serve(client: Any, settings: PrometheusConfig, registry: Any) -> tuple[Any, int]:
    """Start the HTTP server thread, on the next free port if the configured one is taken."""
    token = None if settings.token is None else settings.token.get_secret_value()
    check_access(settings.address, token, "set prometheus.token")
    app = _guarded(client.make_wsgi_app(registry), token)
    reason = ""
    for port in range(settings.port, settings.port + settings.ports):
        try:
            server = make_server(settings.address, min(port, 65535), app, _Server, _Handler)
        except OSError as error:
            reason = error.strerror or str(error)
            continue
        Thread(target=server.serve_forever, name="distmon-prometheus", daemon=True).start()
        if port != settings.port:
            logger.warning(
                "distmon: port %d is in use; metrics are at http://%s:%d/metrics",
                settings.port,
                settings.address,
                server.server_port,
            )
        return server, int(server.server_port)
    last = settings.port + settings.ports - 1
    raise ConfigError(
        f"no port from {settings.port} to {last} of {settings.address} can be opened: {reason}"
    )


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Handler(WSGIRequestHandler):
    timeout = 10  # a client that sends nothing does not keep a thread

    def log_message(self, *_: Any) -> None:
        """Print nothing: a scrape every few seconds would fill the log."""


def _guarded(app: Any, token: str | None) -> Any:
    """Answer only requests with the token, if there is one; and none that changes anything."""

    def answer(environ: dict[str, Any], start: Any) -> Any:
        given = str(environ.get("HTTP_AUTHORIZATION", "")).removeprefix("Bearer ")
        if environ.get("REQUEST_METHOD") not in ("GET", "HEAD"):
            status, text = "405 Method Not Allowed", "these metrics are read-only\n"
        elif token is None or hmac.compare_digest(given.encode(), token.encode()):
            return app(environ, start)
        else:
            status, text = "401 Unauthorized", "a token is needed\n"
        start(status, [("Content-Type", "text/plain")])
        return [text.encode()]

    return answer
