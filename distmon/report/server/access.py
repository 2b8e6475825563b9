"""Who may read: loopback without a token, other hosts with one."""

from __future__ import annotations

import hmac
from typing import Final
from urllib.parse import urlencode

from starlette.datastructures import Headers, MutableHeaders, QueryParams
from starlette.requests import cookie_parser
from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from distmon.untrusted.access import check_access

COOKIE: Final = "distmon_token"
HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
        "img-src data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
_LOCAL_NAMES: Final = ("localhost", "127.0.0.1", "[::1]")


def check_address(address: str, token: str | None) -> None:
    """Raise ConfigError for an address that others can reach without a token."""
    check_access(address, token, "set DISTMON_SERVE_TOKEN")


class Guard:
    """Checks every request, and gives every answer its security headers."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
            await send(message)

        answer = self._refusal(scope)
        await (answer or self._app)(scope, receive, with_headers)

    def _refusal(self, scope: Scope) -> ASGIApp | None:
        headers, query = Headers(scope=scope), QueryParams(scope["query_string"])
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("this server is read-only", 405)
        if self._token is None:
            # A page of another site that has its own name resolve to this machine has that name.
            host = headers.get("host", "").rpartition(":")[0] or headers.get("host", "")
            return None if host in _LOCAL_NAMES else PlainTextResponse("unknown host", 403)
        given = query.get("token")
        if given is not None and self._is_token(given):
            rest = [(key, value) for key, value in query.multi_items() if key != "token"]
            answer = RedirectResponse(f"{scope['path']}?{urlencode(rest)}", 303)
            answer.set_cookie(COOKIE, given, httponly=True, samesite="strict")
            return answer
        bearer = headers.get("authorization", "").removeprefix("Bearer ")
        cookie = cookie_parser(headers.get("cookie", "")).get(COOKIE, "")
        if self._is_token(bearer) or self._is_token(cookie):
            return None
        return PlainTextResponse("a token is needed: open /?token=...", 401)

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), (self._token or "").encode())
