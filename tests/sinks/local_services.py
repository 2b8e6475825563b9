"""Real services on loopback that messages are sent to: HTTP and SMTP."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email import message_from_bytes
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from aiosmtpd.controller import Controller
from aiosmtpd.smtp import AuthResult, Envelope


class HttpService:
    """Keeps what was posted; `answer` gives the status of each request and may wait."""

    def __init__(self, answer: Callable[[int], int]) -> None:
        self.posts: list[tuple[str, Any]] = []
        self.answer = answer
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                service.posts.append((self.path, json.loads(body)))
                status = service.answer(len(service.posts))
                try:
                    self.send_response(status)
                    self.end_headers()
                    # Slack says so in words, PagerDuty with the status alone.
                    self.wfile.write(b"ok")
                except ConnectionError:
                    pass  # the client has timed out and closed the connection

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.server_port}"

    @property
    def titles(self) -> list[str]:
        return [str(post["title"]) for _, post in self.posts]


@contextmanager
def http_service(answer: Callable[[int], int] = lambda _: 200) -> Iterator[HttpService]:
    service = HttpService(answer)
    thread = threading.Thread(target=service.server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield service
    finally:
        service.server.shutdown()
        service.server.server_close()
        thread.join()


class SmtpService(Controller):
    """Takes mail from those who know the password."""

    def __init__(self, user: str, password: str) -> None:
        self.mails: list[Message] = []
        self.refused: set[str] = set()
        """Addresses that are turned away once."""

        def authenticate(*given: Any) -> AuthResult:
            login = given[-1]
            known = (login.login, login.password) == (user.encode(), password.encode())
            return AuthResult(success=known, handled=False)

        super().__init__(
            self,
            hostname="127.0.0.1",
            port=0,
            authenticator=authenticate,
            auth_require_tls=False,
        )

    async def handle_RCPT(
        self, _server: object, _session: object, envelope: Envelope, address: str, _options: object
    ) -> str:
        if address in self.refused:
            self.refused.remove(address)
            return "450 mailbox busy"
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(self, _server: object, _session: object, envelope: Envelope) -> str:
        content = envelope.content
        assert isinstance(content, bytes)
        self.mails.append(message_from_bytes(content))
        return "250 OK"

    def _trigger_server(self) -> None:
        # The system chose the port; the controller looks for its server there.
        assert self.server is not None
        self.port = self.server.sockets[0].getsockname()[1]
        super()._trigger_server()


@contextmanager
def smtp_service(user: str, password: str) -> Iterator[SmtpService]:
    service = SmtpService(user, password)
    service.start()
    try:
        yield service
    finally:
        service.stop()
