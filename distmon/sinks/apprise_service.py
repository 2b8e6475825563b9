"""One service that takes messages to people, by its apprise URL, without telling its secrets."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, Final

from pydantic import SecretStr

from distmon.alert import Severity
from distmon.config import NotifyConfig, split_urls
from distmon.errors import ConfigError, DistmonError
from distmon.redaction import Redactor

PAUSE_S: Final = 2.0
"""Between two attempts."""
LONGEST_THROTTLE_S: Final = 1.2
"""Between two messages to a service. apprise waits up to 5.5 s, and a run that is stopped has 10 s
for all it has to say; `per_hour` is what keeps it from being too much."""
LONGEST_REASON: Final = 500
OLDEST_APPRISE: Final = 2
"""The first version that remembers who has a message when it tries again."""
OWN_VARIABLE: Final = "env:"
KINDS: Final[Mapping[Severity, str]] = {
    "info": "info",
    "warning": "warning",
    "critical": "failure",
}
"""apprise's name for each severity: it chooses colour and urgency."""
TALKATIVE: Final = ("apprise", "urllib3.connectionpool", "urllib3.util.retry")
"""Loggers that name whole URLs at DEBUG; webhooks have their secret in the path."""


class DeliveryError(DistmonError):
    """A service did not take a message."""


def resolve_urls(given: Sequence[SecretStr], environ: Mapping[str, str]) -> list[SecretStr]:
    """The URLs themselves, with `env:NAME` replaced by what the environment holds."""
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
    """A service for each URL; `ConfigError` when apprise is missing or does not take one."""
    if find_spec("apprise") is None or int(version("apprise").split(".")[0]) < OLDEST_APPRISE:
        raise ConfigError(
            f"notify.urls needs apprise {OLDEST_APPRISE} or newer: pip install 'distmon[alerts]'"
        )
    services: list[AppriseService] = []
    for number, url in enumerate(urls, start=1):
        service = AppriseService.open(url, settings, pause_s)
        if service is None:
            # Neither the URL nor apprise's own words, which quote pieces of it.
            raise ConfigError(
                f"apprise does not take URL {number} of notify.urls: expected the form that its "
                "documentation gives for the service, such as slack://A/B/C or mailto://..., and "
                "the package that some services need"
            )
        services.append(service)
    return services


class AppriseService:
    """Sends messages to what one URL names. Everything it raises is free of secrets."""

    def __init__(self, plugin: Any, sender: Any, redactor: Redactor) -> None:
        self.name = str(plugin.schema)
        """Of the kind of service, such as `slack`; not unique."""
        self._sender = sender
        self._redactor = redactor

    @classmethod
    def open(
        cls, url: SecretStr, settings: NotifyConfig, pause_s: float = PAUSE_S
    ) -> AppriseService | None:
        """None when apprise does not take the URL."""
        import apprise
        import apprise.plugins

        plugins: Any = apprise.plugins
        with _overhear():
            # Without threads of apprise's own, which would keep the process from ending. apprise
            # remembers which targets of a URL have taken a message and does not repeat it to them.
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
            # A service with a short limit gets the beginning instead of nothing.
            defaults = {"rto": settings.timeout_s, "cto": settings.timeout_s}
            values = {**defaults, "overflow": "truncate", **values}
            plugin = apprise.Apprise.instantiate(values, asset=asset)
            if plugin is None:
                return None
            plugin.request_rate_per_sec = min(plugin.request_rate_per_sec, LONGEST_THROTTLE_S)
            sender = apprise.Apprise(plugin, asset=asset)
        return cls(plugin, sender, Redactor([url.get_secret_value()]))

    def send(self, title: str, body: str, severity: Severity) -> None:
        """Deliver one message, in several attempts; `DeliveryError` with the reason if none did."""
        with _overhear() as heard:
            try:
                delivered = bool(
                    self._sender.notify(
                        body=body, title=title, notify_type=KINDS[severity], body_format="text"
                    )
                )
            except Exception as error:
                delivered = False
                heard.append(f"{type(error).__name__}: {error}")
        if not delivered:
            # Every attempt says the same, and that it was one.
            said = [text for text in dict.fromkeys(heard) if not text.startswith("Attempt ")]
            reason = self._redactor.text(" ".join(" ".join(said).split()))
            raise DeliveryError(reason[:LONGEST_REASON] or "apprise gave no reason") from None


_heard: ContextVar[list[str] | None] = ContextVar("distmon_heard", default=None)
"""What libraries have logged while this thread sends; None while it does not."""


class _Overhearing(logging.Filter):
    """Takes the records of our own sending out of the log, and leaves everybody else's alone."""

    def filter(self, record: logging.LogRecord) -> bool:
        heard = _heard.get()
        if heard is None:
            return True
        if record.levelno >= logging.WARNING:
            heard.append(record.getMessage())
        return False


_OVERHEARING: Final = _Overhearing()


@contextmanager
def _overhear() -> Iterator[list[str]]:
    """Warnings of the libraries that send, which are the only reason they give for a failure."""
    for name in TALKATIVE:
        # Adding it again changes nothing; it stays, and does nothing outside of this block.
        logging.getLogger(name).addFilter(_OVERHEARING)
    heard: list[str] = []
    token = _heard.set(heard)
    try:
        yield heard
    finally:
        _heard.reset(token)
