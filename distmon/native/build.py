"""Compile the native module into the user's cache: one compiler call, nothing but torch's headers.

Safe when many processes do it at once: each builds in a folder of its own, and a finished file gets
its name in one step. The name tells the file's own checksum, so what is not whole is never loaded.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from csrc_triton import row_layout
from csrc_triton.address_layout import ADDRESS, ADDRESS_COLUMNS
from distmon.errors import DistmonError

MODULE = "distmon_native"
SOURCE_FOLDER = Path(__file__).parent
FLAGS = (
    *("-std=c++20", "-O3", "-ffp-contract=off", "-fPIC", "-shared", "-pthread"),
    "-fvisibility=hidden",
)
_COMPILERS = ("c++", "g++", "clang++")
_SUFFIX = ".so"


class NativeBuildError(DistmonError):
    """The native module cannot be compiled here."""


@dataclass(frozen=True)
class Built:
    """A finished build."""

    path: Path
    seconds: float


def sources() -> list[Path]:
    """The C++ files, in a fixed order."""
    return sorted(SOURCE_FOLDER.glob("*.cpp"))


def layout_header() -> str:
    """The numbers of columns and bins as C++ constants: they are stated in one place only."""
    numbers = {
        "groups": row_layout.GROUPS,
        "run": row_layout.RUN,
        "bins": row_layout.BINS,
        "half_bins": row_layout.HALF_BINS,
        "key_shift": row_layout.KEY_SHIFT,
        "key_base": row_layout.KEY_BASE,
        "address_columns": len(ADDRESS_COLUMNS),
        **ADDRESS,
        "sum_columns": len(row_layout.SUM_COLUMNS),
        **{name: row_layout.SUM[name] for name in row_layout.SCALAR_COLUMNS},
        **{f"{what}_sq": row_layout.SUM[f"{what}_sq0"] for what in "wgu"},
        "max_columns": len(row_layout.MAX_COLUMNS),
        **row_layout.MAX,
    }
    lines = [f"constexpr int {name} = {number};" for name, number in numbers.items()]
    return "\n".join(["#pragma once", "namespace layout {", *lines, "}", ""])


def cache_folder() -> Path:
    """Where builds are kept: `$XDG_CACHE_HOME/distmon/native`."""
    # The standard says that a relative path there is to be ignored.
    chosen = Path(os.environ.get("XDG_CACHE_HOME", ""))
    base = chosen if chosen.is_absolute() else Path.home() / ".cache"
    return base / "distmon" / "native"


def build_key() -> str:
    """Equal for two processes exactly when they can load the same file."""
    parts = [
        torch.__version__,
        str(torch.version.git_version),
        str(torch.compiled_with_cxx11_abi()),
        str(sysconfig.get_config_var("SOABI")),
        sys.version,
        sysconfig.get_platform(),
        *FLAGS,
        *_processor_flags(),
        layout_header(),
    ]
    digest = hashlib.sha256("\n".join(parts).encode())
    for path in sorted([*sources(), *SOURCE_FOLDER.glob("*.h")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def checksum(content: bytes) -> str:
    """What a finished file carries in its name."""
    return hashlib.sha256(content).hexdigest()[:16]


def is_whole(path: Path) -> bool:
    """Whether a file is the one that its name speaks of."""
    return path.stem.endswith(checksum(path.read_bytes()))


def candidates() -> list[Path]:
    """Finished files for this torch, this Python and this source; normally none or one."""
    return sorted(cache_folder().glob(f"{MODULE}-{build_key()}-*{_SUFFIX}"))


def build() -> Built:
    """Compile; NativeBuildError says in one sentence why not."""
    begin = time.perf_counter()
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="building-", dir=folder) as scratch:
            fresh = Path(scratch) / f"{MODULE}{_SUFFIX}"
            _compile(fresh)
            name = f"{MODULE}-{build_key()}-{checksum(fresh.read_bytes())}{_SUFFIX}"
            final = folder / name
            fresh.replace(final)
        for path in candidates():
            # Whole ones may be about to be loaded by others.
            if path.is_file() and not is_whole(path):
                path.unlink(missing_ok=True)
    except OSError as error:
        raise NativeBuildError(
            f"the native module cannot be written to {folder}: {error}"
        ) from None
    return Built(final, time.perf_counter() - begin)


def _compile(out: Path) -> None:
    generated = out.parent / "generated"
    generated.mkdir()
    (generated / "row_layout.h").write_text(layout_header(), encoding="utf-8")
    files = [f"-I{generated}", *map(str, sources()), "-o", str(out)]
    command = [*_compiler(), *files, *FLAGS, *_processor_flags(), *_torch_flags()]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        lines = [line for line in result.stderr.splitlines() if "error" in line] or [
            f"exit code {result.returncode}"
        ]
        raise NativeBuildError(f"the native module does not compile with {command[0]}: {lines[0]}")


def _compiler() -> list[str]:
    chosen = shlex.split(os.environ.get("CXX", ""))
    if chosen:
        if shutil.which(chosen[0]) is None:
            raise NativeBuildError(
                f"the native module needs a C++ compiler: {chosen[0]} is not there"
            )
        return chosen
    found = next((path for name in _COMPILERS if (path := shutil.which(name))), None)
    if found is None:
        raise NativeBuildError(
            "the native module needs a C++ compiler and there is none "
            f"({', '.join(_COMPILERS)}, or the variable CXX); Python does its work meanwhile"
        )
    return [found]


def _processor_flags() -> list[str]:
    """Part of the key: nodes of different kinds may share one home folder."""
    wide = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    return ["-mavx2"] if wide else []


def _torch_flags() -> list[str]:
    # Not from torch.utils.cpp_extension, which needs setuptools to be imported.
    home = Path(torch.__file__).parent
    flags = [
        f"-I{home / 'include'}",
        f"-I{sysconfig.get_path('include')}",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-L{home / 'lib'}",
        "-ltorch_python",
        "-lc10",
    ]
    if sys.platform == "darwin":
        return [*flags, "-undefined", "dynamic_lookup"]
    # A symbol that this torch lacks shows when the file is loaded, not in the middle of a run.
    return [*flags, "-Wl,-z,now"]
