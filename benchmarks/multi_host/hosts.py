"""Hosts as network namespaces with names and addresses of their own; no traffic leaves."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType

SWITCH = Path(__file__).with_name("switch.py")
TRAINING = Path(__file__).with_name("training.py")
OFFLOAD = """
import ctypes, fcntl, socket, struct, sys
link = socket.socket()
for command in (0x17, 0x1f, 0x24):  # checksums, segmentation: done by hardware that is not there
    value = ctypes.create_string_buffer(struct.pack("II", command, 0))
    request = struct.pack("16sP", sys.argv[1].encode(), ctypes.addressof(value))
    try:
        fcntl.ioctl(link, 0x8946, request)
    except OSError:
        pass
"""


class Hosts:
    """A number of hosts behind one switch."""

    def __init__(self, count: int, folder: Path, delay_ms: float = 0, loss: float = 0) -> None:
        self.count = count
        self._prefix = f"dm{os.getpid() % 10_000}"
        self._cut_file = folder / "cut"
        self._names = folder / "hosts"
        self._delay_ms, self._loss = delay_ms, loss
        self._switch: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Hosts:
        try:
            self._create()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._remove()

    def start(
        self, host: int, arguments: list[str], environ: dict[str, str]
    ) -> subprocess.Popen[str]:
        """Start a Python program on a host."""
        # A mount of this program only: `ip netns exec` gives it mounts of its own.
        named = f'mount --bind "{self._names}" /etc/hosts && hostname host{host} && exec "$@"'
        inside = ["unshare", "--uts", "sh", "-c", named, "sh", sys.executable, *arguments]
        return subprocess.Popen(
            ["ip", "netns", "exec", self._host(host), *inside],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **environ, "GLOO_SOCKET_IFNAME": "eth0", "TP_SOCKET_IFNAME": "eth0"},
        )

    def address(self, host: int) -> str:
        """Return the address of a host."""
        return f"10.78.0.{host + 1}"

    def cut(self, is_cut: bool) -> None:
        """Cut all links, or join them again."""
        self._cut_file.touch() if is_cut else self._cut_file.unlink(missing_ok=True)

    def _host(self, host: int) -> str:
        return f"{self._prefix}h{host}"

    def _create(self) -> None:
        lines = ["127.0.0.1 localhost"]
        lines += [f"{self.address(host)} host{host}" for host in range(self.count)]
        self._names.write_text("\n".join([*lines, ""]))
        switch = f"{self._prefix}s"
        _ip("netns", "add", switch)
        ends = []
        for host in range(self.count):
            name, end = self._host(host), f"{self._prefix}e{host}"
            _ip("netns", "add", name)
            _ip("link", "add", end, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", end, "netns", switch)
            _ip("-n", switch, "link", "set", end, "up")
            _ip("-n", name, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            for link in ("eth0", "lo"):
                _ip("-n", name, "link", "set", link, "up")
            for place, link in ((name, "eth0"), (switch, end)):
                command = ["ip", "netns", "exec", place, sys.executable, "-c", OFFLOAD, link]
                subprocess.run(command, check=True)
            ends.append(end)
        options = [str(self._delay_ms), str(self._loss), str(self._cut_file), *ends]
        self._switch = subprocess.Popen(
            ["ip", "netns", "exec", switch, sys.executable, str(SWITCH), *options]
        )

    def _remove(self) -> None:
        if self._switch is not None:
            self._switch.kill()
            self._switch.wait()
        for name in (f"{self._prefix}s", *map(self._host, range(self.count))):
            with suppress(subprocess.CalledProcessError):
                _ip("netns", "del", name)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
