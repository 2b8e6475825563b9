"""Two hosts, as network namespaces, whose link is cut: the monitor adds nothing to a step."""

from __future__ import annotations

import ctypes
import json
import math
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cut_link_training
import pytest
from forked_python import fork_server

ADDED_S = 5.0
"""Most that the monitor may add to a step, on a busy machine; it was 900 s when a failed collective
asked the job's store which rank was missing."""


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def _namespaces_work() -> bool:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"distmon-{os.getpid()}-try"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return made.returncode == 0


pytestmark = pytest.mark.skipif(not _namespaces_work(), reason="no network namespaces here")


class _Hosts:
    """Two namespaces with a link between them; their addresses are seen nowhere else."""

    def __init__(self, name: str) -> None:
        self.names = [f"{name}0", f"{name}1"]
        self.links = [f"{name}v0", f"{name}v1"]

    def create(self) -> None:
        for name in self.names:
            _run("ip", "netns", "add", name)
        _run("ip", "link", "add", self.links[0], "type", "veth", "peer", "name", self.links[1])
        for i, (name, link) in enumerate(zip(self.names, self.links, strict=True)):
            _run("ip", "link", "set", link, "netns", name)
            _run("ip", "-n", name, "addr", "add", f"10.77.0.{i + 1}/24", "dev", link)
            _run("ip", "-n", name, "link", "set", link, "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")

    def cut(self, cut: bool) -> None:
        # Only one end: the processes there keep their address, as behind a broken switch.
        _run("ip", "-n", self.names[1], "link", "set", self.links[1], "down" if cut else "up")

    def remove(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def start(self, rank: int, folder: Path, what: str, timeout_s: int) -> Any:
        arguments = (rank, "10.77.0.1", self.links[rank], folder, what == "monitored", timeout_s)
        process = fork_server().Process(target=_enter, args=(self.names[rank], *arguments))
        process.start()
        return process


def _enter(host: str, rank: int, *others: Any) -> None:
    """Move this process, which has no threads yet, to a host, and train there."""
    output = os.open(others[2] / f"output{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.pop("DISTMON_WRITER", None)
    try:
        with Path(f"/run/netns/{host}").open() as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"cannot enter {host}")
        cut_link_training.main(rank, *others)
    except BaseException:
        traceback.print_exc()
        sys.exit(1)


@contextmanager
def _hosts(name: str) -> Iterator[_Hosts]:
    hosts = _Hosts(name)
    try:
        hosts.create()
        yield hosts
    finally:
        hosts.remove()


@dataclass(frozen=True)
class _Cut:
    """How the link is cut, and the timeout of the job's own collectives."""

    name: str
    seconds: float
    """`inf`: until the ranks have ended."""
    job_timeout_s: int = 8

    @property
    def for_good(self) -> bool:
        return math.isinf(self.seconds)


CUTS = [_Cut("for two seconds", 2.0), _Cut("for good", math.inf)]
LONG_CUTS = [
    _Cut("for 8 s", 8.0, job_timeout_s=60),
    _Cut("for 30 s", 30.0, job_timeout_s=60),
    _Cut("for good, with a long timeout", math.inf, job_timeout_s=60),
]
"""Run with LONG_CUTS=1 in the environment."""


def _train(what: str, cut: _Cut, folder: Path) -> list[dict[str, Any]]:
    """Train on two hosts whose link is cut; what each rank found."""
    folder.mkdir()
    with _hosts(f"dm{os.getpid() % 10000}{what[0]}") as hosts:
        processes = [hosts.start(rank, folder, what, cut.job_timeout_s) for rank in range(2)]
        while not (folder / "step0").exists() or int((folder / "step0").read_text() or 0) < 11:
            time.sleep(0.02)
            assert processes[0].exitcode is None, (folder / "output0").read_text()
        hosts.cut(True)
        if not cut.for_good:
            time.sleep(cut.seconds)
            hosts.cut(False)
        for rank, process in enumerate(processes):
            process.join(300)
            if process.exitcode is None:
                process.kill()
            assert (folder / f"result{rank}").exists(), (folder / f"output{rank}").read_text()
    return [json.loads((folder / f"result{rank}").read_text()) for rank in range(2)]


@pytest.mark.parametrize(
    "cut", CUTS + (LONG_CUTS if os.environ.get("LONG_CUTS") else []), ids=lambda cut: cut.name
)
def test_a_cut_link_costs_no_more_with_the_monitor(tmp_path: Path, cut: _Cut) -> None:
    with ThreadPoolExecutor(2) as pool:
        bare, monitored = pool.map(
            lambda what: _train(what, cut, tmp_path / what), ("bare", "monitored")
        )
    for rank, (alone, watched) in enumerate(zip(bare, monitored, strict=True)):
        for name in ("longest", "seconds"):
            print(f"rank {rank}: {name} {alone[name]:.2f} s bare, {watched[name]:.2f} s monitored")
        assert bool(watched["error"]) == bool(alone["error"]) == cut.for_good
        assert watched["longest"] < alone["longest"] + ADDED_S
        assert watched["seconds"] < alone["seconds"] + 2 * ADDED_S
        both = min(len(watched["losses"]), len(alone["losses"]))
        assert watched["losses"][:both] == alone["losses"][:both]
