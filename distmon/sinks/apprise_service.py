"""A notification service, addressed by its apprise URL, whose secrets are never logged."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, Final

from pydantic import SecretStr

from distmon.config import NotifyConfig, split_urls
from distmon.errors import ConfigError, DistmonError
from distmon.redaction import Redactor
from distmon.rules.alert import Severity

PAUSE_S: Final = 2.0
"""Pause between two attempts."""
LONGEST_THROTTLE_S: Final = 1.2
"""Maximum pause between two messages to a service. apprise waits up to 5.5 s by default, but a run
that is stopped has 10 s for all its messages; `per_hour` limits their number."""
LONGEST_REASON: Final = 500
OLDEST_APPRISE: Final = 2
"""The first version that, when it retries, skips targets that already have the message."""
OWN_VARIABLE: Final = "env:"
KINDS: Final[Mapping[Severity, str]] = {
    "info": "info",
    "warning": "warning",
    "critical": "failure",
}
"""apprise's name for each severity, which determines color and urgency."""
LEAKY_LOGGERS: Final = ("apprise", "urllib3.connectionpool", "urllib3.util.retry")
"""Loggers that print whole URLs at DEBUG; webhooks have their secret in the path."""


class DeliveryError(DistmonError):
    """A service did not accept a message."""


def resolve_urls(given: Sequence[SecretStr], environ: Mapping[str, str]) -> list[SecretStr]:
    """Return the URLs, with `env:NAME` replaced by the value of that environment variable."""
    urls: list[SecretStr] = []
    for position, entry in enumerate(given):
        if not entry.get_secret_value().startswith(OWN_VARIABLE):
            urls.append(entry)
            continue
        name = entry.get_secret_value().removeprefix(OWN_VARIABLE).strip()
        if not name.isidentifier():
            raise ConfigError(
                f"notify.urls[{position}] must name an environment variable after {OWN_VARIABLE!r}"
            )
        found = split_urls(environ.get(name, ""))
        if not found:
            raise ConfigError(
                f"notify.urls[{position}] takes its URL from the environment variable {name}, "
                "which is not set"
            )
        urls += map(SecretStr, found)
    return urls


def open_services(
    settings: NotifyConfig, urls: Sequence[SecretStr], pause_s: float = PAUSE_S
) -> list[AppriseService]:
    """Return a service per URL; raise ConfigError if apprise is missing or rejects a URL."""
    if find_spec("apprise") is None or int(version("apprise").split(".")[0]) < OLDEST_APPRISE:
        raise ConfigError(
            f"notify.urls needs apprise {OLDEST_APPRISE} or newer: pip install 'distmon[alerts]'"
        )
    services: list[AppriseService] = []
    for number, url in enumerate(urls, start=1):
        service = AppriseService.open(url, settings, pause_s)
        if service is None:
            # Neither the URL nor apprise's own message, which quotes parts of it.
            raise ConfigError(
                f"apprise rejects URL {number} of notify.urls: use the form in apprise's "
                "documentation of the service, such as slack://A/B/C or mailto://..., and install "
                "the package that some services need"
            )
        services.append(service)
    return services


class AppriseService:
    """Sends messages to the service of one URL. Its exceptions contain no secrets."""

    def __init__(self, plugin: Any, sender: Any, redactor: Redactor) -> None:
        self.name = str(plugin.schema)
        """Kind of service, such as `slack`; not unique."""
        self._sender = sender
        self._redactor = redactor

    @classmethod
    def open(
        cls, url: SecretStr, settings: NotifyConfig, pause_s: float = PAUSE_S
    ) -> AppriseService | None:
        """Return the service of a URL; None when apprise rejects the URL."""
        import apprise
        import apprise.plugins

        plugins: Any = apprise.plugins
        with _capture_logs():
            # No threads of apprise's own: they would keep the process from ending.
            asset = apprise.AppriseAsset(
                app_id="distmon",
                app_desc="distmon",
                async_mode=False,
                service_timeout=0,
                default_service_retry=settings.attempts - 1,
                default_service_wait=pause_s,
            )
            values = plugins.url_to_dict(url.get_secret_value())
            if values is None:
                return None
            # A service with a length limit gets a truncated message instead of none.
            defaults = {"rto": settings.timeout_s, "cto": settings.timeout_s}
            values = {**defaults, "overflow": "truncate", **values}
            plugin = apprise.Apprise.instantiate(values, asset=asset)
            if plugin is None:
                return None
            plugin.request_rate_per_sec = min(plugin.request_rate_per_sec, LONGEST_THROTTLE_S)
            sender = apprise.Apprise(plugin, asset=asset)
        return cls(plugin, sender, Redactor([url.get_secret_value()]))

    def send(self, title: str, body: str, severity: Severity) -> None:
        """Send one message; raise DeliveryError with the reason when all attempts fail."""
        with _capture_logs() as captured:
            try:
                delivered = bool(
                    self._sender.notify(
                        body=body, title=title, notify_type=KINDS[severity], body_format="text"
                    )
                )
            except Exception as error:
                delivered = False
                captured.append(f"{type(error).__name__}: {error}")
        if not delivered:
            # Every attempt logs the same reason, and a line that it was an attempt.
            reasons = [text for text in dict.fromkeys(captured) if not text.startswith("Attempt ")]
            reason = self._redactor.text(" ".join(" ".join(reasons).split()))
            raise DeliveryError(reason[:LONGEST_REASON] or "apprise gave no reason") from None


_captured: ContextVar[list[str] | None] = ContextVar("distmon_captured_logs", default=None)
"""Warnings that libraries log while this thread sends; None while it does not send."""


class _CaptureFilter(logging.Filter):
    """Keeps log records of this thread's sending out of the log; passes all others."""

    def filter(self, record: logging.LogRecord) -> bool:
        captured = _captured.get()
        if captured is None:
            return True
        if record.levelno >= logging.WARNING:
            captured.append(record.getMessage())
        return False


_CAPTURE_FILTER: Final = _CaptureFilter()


@contextmanager
def _capture_logs() -> Iterator[list[str]]:
    """Collect the warnings of the sending libraries: their only report of why sending failed."""
    for name in LEAKY_LOGGERS:
        # Adding the filter again has no effect; outside this context it passes everything.
        logging.getLogger(name).addFilter(_CAPTURE_FILTER)
    captured: list[str] = []
    token = _captured.set(captured)
    try:
        yield captured
    finally:
        _captured.reset(token)
