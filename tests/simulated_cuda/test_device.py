"""The simulated device itself."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from simulated_cuda.build import CannotBuildError, library
from simulated_cuda.child import assert_passed, child_environment, names_of

pytestmark = pytest.mark.usefixtures("device_library")
CHECKS = "simulated_cuda.device_checks"


@pytest.mark.parametrize("name", names_of(CHECKS))
def test_device(name: str) -> None:
    assert_passed(CHECKS, name)


def test_the_host_cannot_read_device_memory() -> None:
    code = (
        "from simulated_cuda import device; device.install(); import ctypes, torch;"
        "ctypes.string_at(torch.ones(3, device='cuda').data_ptr(), 1)"
    )
    environment = child_environment() | {"PYTHONFAULTHANDLER": ""}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, check=False)
    assert ended.returncode == -signal.SIGSEGV


def test_without_a_compiler_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(CannotBuildError, match="no C\\+\\+ compiler"):
        library()
