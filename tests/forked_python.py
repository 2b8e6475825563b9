"""Run Python scripts in processes that are forked from one that has imported torch already.

Importing torch takes two seconds of a core, and the first optimizer two more: longer than most
trainings of the tests. What such a process does not have is a start by `python` itself or by
torchrun; the tests about those start real ones.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

PRELOADED = [
    *("pytest", "torch", "torch._dynamo", "distmon.monitor", "distmon.verify"),
    "torch._inductor.compile_fx",  # DeepSpeed's first optimizer imports it: 1.6 s of a core
]
"""What the server imports once, for all processes that are forked from it."""
GRACE_S = 30.0
"""Time that the other ranks get to end after one has failed."""


def fork_server() -> Any:
    """Return the context whose processes are forked from the server, which runs from now on."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    # Now, because the first that starts it decides what it imports.
    multiprocessing.forkserver.ensure_running()
    return context


def run_script(
    arguments: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    ranks: int = 0,
    timeout_s: float = 400,
) -> subprocess.CompletedProcess[str]:
    """Run a script and its arguments in `folder`, on ranks as torchrun starts them.

    The outputs of all ranks are together, as those of torchrun are. The code is that of the first
    rank that has failed; `ranks=0` is one process without a process group.
    """
    with tempfile.TemporaryDirectory() as outputs, contextlib.ExitStack() as stack:
        environments = [dict(environment)]
        if ranks:
            # The store is here and is nobody's rank: there is no port that another may take.
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            environments = [{**environment, **_as_torchrun(r, ranks, store)} for r in range(ranks)]
        processes = []
        for each in environments:
            process = fork_server().Process(
                target=_enter, args=([*arguments], str(folder), each, outputs)
            )
            process.start()
            stack.callback(_kill, process)
            processes.append(process)
        code = _wait(processes, timeout_s)
        out, err = ((Path(outputs) / name).read_text() for name in ("out", "err"))
    return subprocess.CompletedProcess([*arguments], code, out, err)


def _as_torchrun(rank: int, ranks: int, store: dist.TCPStore) -> dict[str, str]:
    """The variables that torchrun sets."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "ROLE_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_WORLD_SIZE": "1",
        "ROLE_WORLD_SIZE": str(ranks),
        "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": f"forked-{store.port}",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }


def _wait(processes: Sequence[Any], timeout_s: float) -> int:
    """Wait for the end of all; return the code of the first that has failed, or 0."""
    deadline, code = time.monotonic() + timeout_s, 0
    waiting = {process.sentinel: process for process in processes}
    while waiting:
        remaining = deadline - time.monotonic()
        ended = multiprocessing.connection.wait([*waiting], max(0.0, remaining))
        for sentinel in ended:
            process = waiting.pop(sentinel)
            process.join()
            if process.exitcode and not code:
                code = process.exitcode
                deadline = min(deadline, time.monotonic() + GRACE_S)
        if not ended and remaining <= 0:
            return code or -15  # as after a signal
    return code


def _kill(process: Any) -> None:
    if process.is_alive():
        process.kill()
    process.join()


def _enter(arguments: list[str], folder: str, environment: dict[str, str], outputs: str) -> None:
    """Become the process of a script."""
    # A collection need not walk through everything that the server has imported: 0.4 s of a core.
    gc.freeze()
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(Path(outputs) / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    script, sys.argv = arguments[0], arguments
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [str(Path(script).parent), *filter(None, paths)]
    # A script that a person starts is nobody's child.
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]
    code: Any = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as leaving:
        code = leaving.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
        code = 1
    # A forked process ends without these.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(code or 0)
