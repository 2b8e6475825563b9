"""`distmon serve`: the views of runs in a browser, live."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.text import Text

from distmon.errors import ConfigError

ADDRESS = "127.0.0.1"
PORT = 8471
NICENESS = 15
"""Added to that of the process: where cores are few, the training next to it goes first."""


def serve(console: Console, root: Path, address: str, port: int, token: str | None) -> None:
    """Serve until Ctrl-C."""
    try:
        import starlette  # noqa: F401
        import uvicorn
    except ImportError:
        raise ConfigError("serving needs packages: pip install 'distmon[report]'") from None
    from distmon.report.server.access import check_address
    from distmon.report.server.app import build_app

    check_address(address, token)
    app = build_app(root, token)
    listener = _listen(address, port)
    shown = f"[{address}]" if ":" in address else address
    url = f"http://{shown}:{listener.getsockname()[1]}/"
    console.print(Text(f"distmon: runs of {root} at {url}" + ("?token=..." if token else "")))

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            app.state.pages.closing = True
            super().handle_exit(sig, frame)

    config = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=3, lifespan="off"
    )
    with suppress(OSError, AttributeError):
        os.nice(NICENESS)
    with suppress(KeyboardInterrupt):
        Server(config).run(sockets=[listener])


def _listen(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {address} port {port}: {error.strerror or error}"
        ) from None
    return listener
