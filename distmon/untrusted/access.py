"""Who may connect: this machine without a token, everybody else with one."""

from __future__ import annotations

import ipaddress
from typing import Final

from distmon.errors import ConfigError

SHORTEST_TOKEN: Final = 16


def check_access(address: str, token: str | None, remedy: str) -> None:
    """Raise ConfigError for an address that others can reach without a token.

    `remedy` says how a token is given, as in "set DISTMON_SERVE_TOKEN".
    """
    if token is not None and len(token) < SHORTEST_TOKEN:
        raise ConfigError(f"the token must have at least {SHORTEST_TOKEN} characters")
    if token is None and not is_loopback(address):
        raise ConfigError(
            f"{address} can be reached from elsewhere: {remedy}, or use 127.0.0.1 and an ssh tunnel"
        )


def is_loopback(address: str) -> bool:
    """Return whether only this machine reaches the address."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
