"""Keep secrets out of everything that is written: logs, errors, files.

Hides what is known to be secret (the URLs of `notify.urls` and every part of them), and what has
the form of a secret (passwords in URLs, `api_key=...`, tokens of well-known services).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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

_SECRET_WORD: Final = (
    r"(?:key|token|secret|passw(?:or)?d|passphrase|pwd|credentials?|auth(?:orization)?|cookie"
    r"|sig(?:nature)?)"
)
_SECRET_NAME: Final = (
    rf"(?:(?:[\w.-]*[_.-])?(?!key\b){_SECRET_WORD}|[\w.-]*[_.-]key|[\w-]*(?:api|access|secret)key)"
)
"""What is assigned to it in a text is hidden; a bare `key` is too common a word."""
_SECRET_OPTION: Final = re.compile(rf"--?[\w.-]*{_SECRET_WORD}", re.IGNORECASE)
# Each pattern starts where the character before cannot belong to it, so that a long word is tried
# once and not from each of its characters.
_ASSIGNED: Final = re.compile(
    rf"""(?<![\w.-])({_SECRET_NAME}["']?\s{{0,8}}[=:]\s{{0,8}})"""
    r"""("[^"\n]*"|'[^'\n]*'|["']?(?:(?:Bearer|Basic)\s{1,8})?[^\s"',;&)}\]]+)""",
    re.IGNORECASE,
)
_OPTION_IN_TEXT: Final = re.compile(
    rf"""(?<!\S)(--[\w.-]*{_SECRET_WORD}(?:=|\s{{1,8}}))(?!-)\S+""", re.IGNORECASE
)
_URL: Final = re.compile(r"""(?<![A-Za-z0-9+.-])([A-Za-z0-9+.-]*)://([^\s"'<>)\]}]+)""")
_LONG_SEGMENT: Final = re.compile(r"(?<=/)(?=[^/?#]*\d)(?=[^/?#]*[A-Za-z])[\w:.~-]{20,}")
_TOKEN: Final = re.compile(
    r"(?<![\w-])(?:xox[a-z]-|xapp-|gh[a-z]_|github_pat_|glpat-|hf_|sk-|AKIA|ASIA|ya29\.|dapi|nvapi-"
    r"|AIza|npm_|pypi-)[\w.-]{8,}"
    r"|(?<![\w-])eyJ[\w-]{5,}\.[\w-]+(?:\.[\w-]*)?"  # a JSON web token
    r"|(?<![\w-])(?:Bearer|Basic)\s{1,8}[\w.~+/=-]{8,}"
)
LONGEST_TEXT: Final = 1 << 20
"""The rest of a longer text is left out: it cannot be part of a message."""


class Redactor:
    """Replaces secrets by `***`."""

    def __init__(self, urls: Iterable[str] = ()) -> None:
        parts = {form for url in urls for part in _parts(url) for form in _spellings(part)}
        # Longest first, so that no tail of a long secret is left after a short one.
        listed = "|".join(map(re.escape, sorted(parts, key=len, reverse=True)))
        self._known = re.compile(listed, re.IGNORECASE) if parts else None

    def text(self, text: str) -> str:
        """Return `text` without secrets, in time that grows with its length."""
        if len(text) > LONGEST_TEXT:
            text = f"{text[:LONGEST_TEXT]}..."
        if self._known is not None:
            text = self._known.sub(HIDDEN, text)
        text = _URL.sub(_without_secrets, text)
        text = _TOKEN.sub(HIDDEN, text)
        text = _OPTION_IN_TEXT.sub(rf"\1{HIDDEN}", text)
        return _ASSIGNED.sub(_hidden_value, text)

    def variables(self, environ: Mapping[str, str], allowed: Collection[str]) -> dict[str, str]:
        """Return the environment variables with a name in `allowed`, without secrets.

        By their exact names: the names and contents of others are unknown.
        """
        return {name: self.text(environ[name]) for name in sorted(allowed) if name in environ}

    def arguments(self, argv: Sequence[str]) -> list[str]:
        """Return a command line; a secret may be the argument after its name."""
        before = ["", *argv]
        return [
            HIDDEN if _SECRET_OPTION.fullmatch(name) else self._argument(argument)
            for name, argument in zip(before, argv, strict=False)
        ]

    def _argument(self, argument: str) -> str:
        name, given, _ = argument.partition("=")
        if given and _SECRET_OPTION.fullmatch(name):
            return f"{name}={HIDDEN}"
        return self.text(argument)


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


def _hidden_value(assigned: re.Match[str]) -> str:
    name, value = assigned.groups()
    quote_mark = value[0] if value[0] in "\"'" else ""
    closing = quote_mark if len(value) > 1 and value.endswith(quote_mark) else ""
    return f"{name}{quote_mark}{HIDDEN}{closing}"


def _without_secrets(url: re.Match[str]) -> str:
    scheme, rest = url.groups()
    if not _PLAIN_SCHEMES.fullmatch(scheme):
        return f"{scheme}://{HIDDEN}"
    address, query, _ = rest.partition("?")
    # All of a query: signatures of cloud storage have any name.
    ending = f"?{HIDDEN}" if query else ""
    authority, slash, path = address.partition("/")
    if "@" in authority:
        authority = f"{HIDDEN}@{authority.rpartition('@')[2]}"
    return f"{scheme}://{authority}{_LONG_SEGMENT.sub(HIDDEN, slash + path)}{ending}"
