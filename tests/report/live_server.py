"""A real server on a free port of this machine, and a reader of its event streams."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from distmon.report.server.app import build_app


@contextmanager
def served(root: Path, token: str | None = None) -> Iterator[str]:
    """The address of a server of the runs below `root`."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    options = {"log_level": "warning", "lifespan": "off", "timeout_graceful_shutdown": 3}
    app = build_app(root, token)
    server = uvicorn.Server(uvicorn.Config(app, **options))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        app.state.pages.closing = server.should_exit = True
        thread.join(20)


@contextmanager
def events(address: str, query: str) -> Iterator[Iterator[dict[str, Any]]]:
    """The events of a stream, as they come, for two minutes at most."""
    deadline = time.monotonic() + 120

    def found(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
        for line in lines:
            assert time.monotonic() < deadline, "nothing but signs of life"
            if line.startswith("data: "):
                yield json.loads(line[6:])

    with httpx.stream("GET", f"{address}/api/events?{query}", timeout=60) as answer:
        assert answer.status_code == 200
        lines = answer.iter_lines()
        assert next(lines).startswith("retry:")
        yield found(lines)
