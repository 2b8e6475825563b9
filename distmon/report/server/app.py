"""The web application: pages, the list of runs, views, and a stream of what is new."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from string import Template
from typing import Final

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from distmon.errors import DistmonError
from distmon.report.encoding import script_json
from distmon.report.html_page import SHARED_SCRIPTS, page_file, plotly_script
from distmon.report.server.access import Guard
from distmon.report.server.catalog import RunCatalog
from distmon.report.server.live_run import Change, LiveRun

SCRIPTS: Final = (*SHARED_SCRIPTS, "overlay.js", "live.js")
MOST_STREAMS: Final = 200
MOST_RUNS_PER_STREAM: Final = 8
KEEP_ALIVE_S: Final = 15.0
POLL_S: Final = 0.5
"""How soon a stream notices that the server stops."""


class Pages:
    """Answers requests about the runs of one catalog."""

    def __init__(self, catalog: RunCatalog) -> None:
        self._catalog = catalog
        self._live: dict[str, LiveRun] = {}
        self._streams = 0
        self.closing = False
        """Set when the server stops, so that streams end."""
        self._lock = asyncio.Lock()
        scripts = ("plotly.js", *SCRIPTS)
        tags = "\n".join(f'<script src="/static/{name}"></script>' for name in scripts)
        self._page = Template(page_file("page.html")).substitute(
            policy="", style='<link rel="stylesheet" href="/static/page.css">', scripts=tags
        )
        self._static = {
            "plotly.js": ("text/javascript", plotly_script()),
            "page.css": ("text/css", page_file("page.css")),
            **{name: ("text/javascript", page_file(name)) for name in SCRIPTS},
        }

    async def index(self, request: Request) -> Response:  # noqa: ARG002
        """Return the page; its script asks for what the address names."""
        return Response(self._page, media_type="text/html")

    async def static(self, request: Request) -> Response:
        """Return a script or the style sheet, from memory."""
        found = self._static.get(request.path_params["name"])
        if found is None:
            return PlainTextResponse("no such file", 404)
        headers = {"Cache-Control": "max-age=3600"}
        return Response(found[1], media_type=found[0], headers=headers)

    async def runs(self, request: Request) -> Response:  # noqa: ARG002
        """Return the list of runs."""
        async with self._lock:
            lines = await asyncio.to_thread(self._catalog.summaries)
        return _json(script_json(lines))

    async def view(self, request: Request) -> Response:
        """Return the view of a run."""
        run = await self._run(request.query_params.get("run", ""))
        if run is None:
            return PlainTextResponse("no such run", 404)
        try:
            return _json(await run.view())
        except DistmonError as error:
            return PlainTextResponse(str(error), 404)

    async def events(self, request: Request) -> Response:
        """Return a stream of changes of up to eight runs, as server-sent events."""
        names = request.query_params.getlist("run")
        after = request.query_params.getlist("after")
        if len(names) != len(after) or not 0 < len(names) <= MOST_RUNS_PER_STREAM:
            return PlainTextResponse("expected run=...&after=... for up to eight runs", 400)
        if not all(number.isascii() and number.isdigit() and len(number) < 16 for number in after):
            return PlainTextResponse("after is not a number", 400)
        runs = [await self._run(name) for name in names]
        if self._streams >= MOST_STREAMS:
            return PlainTextResponse("too many clients", 503)
        known = [run for run in runs if run is not None]
        if len(known) != len(runs):
            return PlainTextResponse("no such run", 404)
        pairs = [*zip(known, map(int, after), strict=True)]
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(
            self._stream(pairs), media_type="text/event-stream", headers=headers
        )

    async def _stream(self, pairs: list[tuple[LiveRun, int]]) -> AsyncIterator[str]:
        self._streams += 1
        queue: asyncio.Queue[tuple[str, Change]] = asyncio.Queue(maxsize=64)

        async def forward(run: LiveRun, after: int) -> None:
            async for change in run.changes(after):
                await queue.put((run.name, change))

        tasks = [asyncio.create_task(forward(run, after)) for run, after in pairs]
        try:
            yield "retry: 2000\n\n"
            silent = 0.0
            while not self.closing:
                try:
                    name, change = await asyncio.wait_for(queue.get(), POLL_S)
                except TimeoutError:
                    silent += POLL_S
                    if silent >= KEEP_ALIVE_S:
                        silent = 0.0
                        yield ": still here\n\n"
                    continue
                head = script_json({"run": name, "sequence": change.sequence, "kind": change.kind})
                yield f'data: {head[:-1]},"data":{change.data}}}\n\n'
        finally:
            self._streams -= 1
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, name: str) -> LiveRun | None:
        path = await asyncio.to_thread(self._catalog.path_of, name)
        if path is None:
            self._live.pop(name, None)
            return None
        for idle in [n for n, run in self._live.items() if not run.readers and n != name][:-8]:
            del self._live[idle]
        return self._live.setdefault(name, LiveRun(name, path))


def build_app(root: Path, token: str | None = None) -> Starlette:
    """Return the application for the runs below `root`."""
    pages = Pages(RunCatalog(root))
    routes = [
        Route("/", pages.index),
        Route("/static/{name}", pages.static),
        Route("/api/runs", pages.runs),
        Route("/api/view", pages.view),
        Route("/api/events", pages.events),
    ]
    middleware = [Middleware(Guard, token=token), Middleware(GZipMiddleware, minimum_size=1000)]
    app = Starlette(routes=routes, middleware=middleware)
    app.state.pages = pages
    return app


def _json(text: str) -> Response:
    return Response(text, media_type="application/json", headers={"Cache-Control": "no-store"})
