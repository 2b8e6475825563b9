"""Keep secrets out of everything that is written: logs, errors, files.

Hides what is known to be secret (the URLs of `notify.urls` and every part of them), and what has
the form of a secret (passwords in URLs, `api_key=...`, tokens of well-known services).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final
from urllib.parse import quote, quote_plus, unquote

HIDDEN: Final = "***"
SHORTEST_PART: Final = 4
"""A shorter part of a URL is not hidden where it stands alone: it would match in any text."""

_PLAIN_SCHEMES: Final = re.compile(
    r"https?|s?ftps?|file|tcp|udp|wss?|s3|gs|hdfs|abfss?|az|wandb-artifact", re.IGNORECASE
)
"""What follows them is an address; in any other URL, such as `slack://...`, it is the secret."""
_PLAIN_OPTIONS: Final = re.compile(
    r"format|overflow|verify|redirect|rto|cto|retry|wait|emojis|tz|smtp|port|mode|method|image"
    r"|footer|avatar|region|priority"
)
"""Options of apprise URLs whose values are no secrets."""
_PLAIN_HOST: Final = re.compile(r"localhost|(\d{1,3}\.){3}\d{1,3}|([a-z0-9-]+\.)+[a-z]{2,}")
"""Some services have their token where others have the host."""

_SECRET_NAME: Final = (
    r"(?:[\w-]*[_-])?(?:api[_-]?key|apikey|(?:access|secret|private|auth)[_-]?key|token|secret"
    r"|passw(?:or)?d|passphrase|pwd|credentials?|auth(?:orization)?)"
)
_SECRET_OPTION: Final = re.compile(rf"--?{_SECRET_NAME}", re.IGNORECASE)
_SECRET_VARIABLE: Final = re.compile(
    r"KEY|TOKEN|SECRET|PASS|PWD|URL|DSN|AUTH|CREDENTIAL|COOKIE|WEBHOOK", re.IGNORECASE
)
_ASSIGNED: Final = re.compile(
    rf"""(?<![\w-])({_SECRET_NAME}["']?\s*[=:]\s*["']?)"""
    r"""(?:(?:Bearer|Basic)\s+)?[^\s"',;&)}\]]+""",
    re.IGNORECASE,
)
_URL: Final = re.compile(r"""\b([A-Za-z][A-Za-z0-9+.-]*)://([^\s"'<>)\]}]+)""")
_LONG_SEGMENT: Final = re.compile(r"(?<=/)(?=[^/?#]*\d)(?=[^/?#]*[A-Za-z])[\w:.~-]{20,}")
_TOKEN: Final = re.compile(
    r"\b(?:xox[a-z]-|xapp-|ghp_|gho_|github_pat_|glpat-|hf_|sk-|AKIA|ya29\.)[\w.-]{8,}"
    r"|\b(?:Bearer|Basic)\s+[\w.~+/=-]{8,}"
)


class Redactor:
    """Replaces secrets by `***`."""

    def __init__(self, urls: Iterable[str] = ()) -> None:
        parts = {form for url in urls for part in _parts(url) for form in _spellings(part)}
        # Longest first, so that no tail of a long secret is left after a short one.
        listed = "|".join(map(re.escape, sorted(parts, key=len, reverse=True)))
        self._known = re.compile(listed, re.IGNORECASE) if parts else None

    def text(self, text: str) -> str:
        """Return `text` without secrets."""
        if self._known is not None:
            text = self._known.sub(HIDDEN, text)
        text = _URL.sub(_without_secrets, text)
        text = _TOKEN.sub(HIDDEN, text)
        return _ASSIGNED.sub(rf"\1{HIDDEN}", text)

    def variables(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return environment variables; values of those named like a secret are hidden whole."""
        return {
            name: HIDDEN if _SECRET_VARIABLE.search(name) else self.text(value)
            for name, value in environ.items()
        }

    def arguments(self, argv: Sequence[str]) -> list[str]:
        """Return a command line; a secret may be the argument after its name."""
        before = ["", *argv]
        return [
            HIDDEN if _SECRET_OPTION.fullmatch(name) else self.text(argument)
            for name, argument in zip(before, argv, strict=False)
        ]


def _parts(url: str) -> Iterator[str]:
    """Yield the URL itself and every part of it that may be a credential."""
    _, marked, rest = url.partition("://")
    rest = rest if marked else url
    yield from (url, rest)
    user, _, host = re.split(r"[/?#]", rest, maxsplit=1)[0].rpartition("@")
    name, _, port = host.partition(":")
    plain = {host, name, port} if _PLAIN_HOST.fullmatch(name) else set()
    yield from (part for part in (user, *user.split(":", 1)) if len(part) >= SHORTEST_PART)
    for option in re.split(r"[/?&#]+", rest):
        key, given, value = option.partition("=")
        if given and _PLAIN_OPTIONS.fullmatch(key):
            continue
        for part in (option, value, *re.split(r"[@:,; ]+", value if given else option)):
            if len(part) >= SHORTEST_PART and part not in plain:
                yield part


def _spellings(part: str) -> set[str]:
    """Return the same text as it is written in a URL, outside of one, and in JSON."""
    plain = unquote(part)
    return {part, plain, quote(plain, safe=""), quote_plus(plain), json.dumps(plain)[1:-1]}


def _without_secrets(url: re.Match[str]) -> str:
    scheme, rest = url.groups()
    if not _PLAIN_SCHEMES.fullmatch(scheme):
        return f"{scheme}://{HIDDEN}"
    authority, slash, path = rest.partition("/")
    if "@" in authority:
        authority = f"{HIDDEN}@{authority.rpartition('@')[2]}"
    return f"{scheme}://{authority}" + _LONG_SEGMENT.sub(HIDDEN, slash + path)
