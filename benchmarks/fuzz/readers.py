"""Every command that reads, in this process: what it raises besides DistmonError is a finding."""

from __future__ import annotations

import contextlib
import io
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

from distmon.errors import DistmonError

LONGEST_S: Final = 60.0
"""An input that takes longer is a hang."""


@dataclass(frozen=True)
class Outcome:
    """What one command did with one input."""

    command: str
    kind: str
    """`ok`, `refused` (one sentence), `traceback`, `hang` or `output`."""
    detail: str = ""


class _HangError(BaseException):
    """Raised by the alarm."""


def readers_of(kind: str) -> dict[str, Callable[[Path], None]]:
    """Return the commands that take an input of this kind: run, config, log."""
    if kind == "run":
        return {
            "show": _show,
            "replay": _replay,
            "replay --own-rules": _replay_own_rules,
            "watch": _watch,
            "report": _view,
            "compare": _compare,
            "compare --json": _compare_json,
            "serve": _serve,
        }
    if kind == "config":
        return {
            "rules": _rules,
            "config": _config,
            "environment": _environment,
            "replay --rules": _replay_rules,
        }
    return {"replay": _replay, "compare": _compare}


def run_reader(command: str, reader: Callable[[Path], None], path: Path) -> Outcome:
    """Run one command on one input, with a limit of time."""
    started = time.perf_counter()
    printed = io.StringIO()
    try:
        with _alarm(), contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            reader(path)
    except DistmonError as error:
        sentence = str(error)
        printed.write(_printable(sentence))
        kind, detail = ("refused", sentence) if sentence else ("traceback", "an empty error")
    except _HangError:
        return Outcome(command, "hang", f"longer than {LONGEST_S:.0f} s")
    except BaseException:
        return Outcome(command, "traceback", traceback.format_exc())
    else:
        kind, detail = "ok", f"{time.perf_counter() - started:.3f}"
    bad = sorted({char for char in printed.getvalue() if ord(char) < 32 and char not in "\n\t"})
    if bad:
        return Outcome(command, "output", f"control characters {bad}")
    return Outcome(command, kind, detail)


def _printable(text: str) -> str:
    from distmon.untrusted.terminal import printable

    return printable(text)


@contextlib.contextmanager
def _alarm() -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        raise _HangError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, LONGEST_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _console() -> Any:
    from distmon.untrusted.terminal import terminal

    return terminal(width=140)


def _show(path: Path) -> None:
    from distmon.cli.show import print_run

    print_run(_console(), path, 10)


def _replay(path: Path) -> None:
    from distmon.cli.replay import ReplayOptions, replay_runs

    replay_runs(_console(), _console(), ReplayOptions([path]))


def _replay_own_rules(path: Path) -> None:
    from distmon.cli.replay import ReplayOptions, replay_runs

    replay_runs(_console(), _console(), ReplayOptions([path], own_rules=True))


def _replay_rules(path: Path) -> None:
    from distmon.replay import activate, load_rules

    activate(load_rules(path))


def _watch(path: Path) -> None:
    from distmon.cli.watch import watch

    watch(_console(), path, 1.0, True)


def _view(path: Path) -> None:
    from distmon.report.encoding import script_json
    from distmon.report.view import build_view
    from distmon.runs.reader import RunTail

    text = script_json(build_view(path.name, RunTail(path).read()))
    assert "<" not in text


def _compare(path: Path) -> None:
    from distmon.cli.compare import CompareOptions, compare

    compare(_console(), CompareOptions([path, path]))


def _compare_json(path: Path) -> None:
    from distmon.cli.compare import CompareOptions, compare

    compare(_console(), CompareOptions([path, path], json=True))


def _serve(path: Path) -> None:
    import asyncio

    from distmon.report.encoding import script_json
    from distmon.report.server.catalog import RunCatalog
    from distmon.report.server.live_run import LiveRun

    script_json(RunCatalog(path.parent).summaries())
    run = LiveRun(path.name, path)
    asyncio.run(run.view())
    run._read_new()


def _rules(path: Path) -> None:
    from distmon.cli.rules import print_rules

    print_rules(_console(), path)


def _config(path: Path) -> None:
    from distmon.config import load_config

    load_config(path, environ={})


def _environment(path: Path) -> None:
    from distmon.config import load_config

    text = ""
    if path.is_file():
        with path.open("rb") as file:  # of an input that may have gigabytes
            text = file.read(2000).decode("latin-1")
    load_config(environ={"DISTMON_RULES": text.replace("\0", "")})
