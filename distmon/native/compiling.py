"""Compile the C++ files of this folder against the torch that is installed.

Imports nothing of distmon: setup.py runs this file before the package is installed.
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from csrc_triton import row_layout
from csrc_triton.address_layout import ADDRESS, ADDRESS_COLUMNS

MODULE = "distmon_native"
SUFFIX = ".so"
SOURCE_FOLDER = Path(__file__).parent
SLOWEST = "place_reader.cpp"
"""The one that includes torch's headers; the others take less time together."""
FLAGS = (
    *("-std=c++20", "-O3", "-ffp-contract=off", "-fPIC", "-pthread"),
    "-fvisibility=hidden",
)
_PROCESSOR_FLAGS = {
    "AVX2": ["-mavx2"],
    "AVX512": ["-mavx2", "-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl"],
}
"""By what torch itself uses of this processor. Eight lanes of fp64 at once make a full pass as fast
as memory is: on GPT-2 it took two thirds of the time with AVX2."""
_COMPILERS = ("c++", "g++", "clang++")


class CompileError(Exception):
    """The native module cannot be compiled here; says why in one sentence."""


def sources() -> list[Path]:
    """Return the C++ files, the slowest first."""
    return sorted(SOURCE_FOLDER.glob("*.cpp"), key=lambda path: (path.name != SLOWEST, path))


def layout_header() -> str:
    """Return the numbers of columns and bins as C++ constants, so that Python alone states them."""
    numbers = {
        "groups": row_layout.GROUPS,
        "run": row_layout.RUN,
        "by_lane": row_layout.BY_LANE,
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


def build_key() -> str:
    """Return a hash that is equal for two processes exactly when they can load the same file."""
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
    """Return what a finished file carries in its name."""
    return hashlib.sha256(content).hexdigest()[:16]


def compile_into(folder: Path) -> Path:
    """Compile and return the finished file in `folder`, which must exist.

    Its name holds the key and its own checksum, and it gets the name in one step: processes that
    compile at the same time do not disturb each other, and no unfinished file is ever loaded.
    CompileError says why it cannot be compiled, OSError why it cannot be written.
    """
    with tempfile.TemporaryDirectory(prefix="building-", dir=folder) as scratch:
        fresh = Path(scratch) / f"{MODULE}{SUFFIX}"
        _compile(fresh)
        fresh.chmod(0o755)  # whatever the umask says; others must not be able to write to it
        final = folder / f"{MODULE}-{build_key()}-{checksum(fresh.read_bytes())}{SUFFIX}"
        fresh.replace(final)
    return final


def _compile(out: Path) -> None:
    generated = out.parent / "generated"
    generated.mkdir()
    (generated / "row_layout.h").write_text(layout_header(), encoding="utf-8")
    compiler = _compiler()
    flags = [*FLAGS, *_processor_flags(), f"-I{generated}", *_include_flags()]
    objects = {path: out.parent / f"{path.stem}.o" for path in sources()}
    commands = [
        [*compiler, *flags, "-c", str(path), "-o", str(object_file)]
        for path, object_file in objects.items()
    ]
    with ThreadPoolExecutor(min(len(commands), os.cpu_count() or 1)) as threads:
        list(threads.map(_run, commands))
    link = [*compiler, "-shared", "-pthread", *map(str, objects.values()), "-o", str(out)]
    _run([*link, *_link_flags()])


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        lines = [line for line in result.stderr.splitlines() if "error" in line] or [
            f"exit code {result.returncode}"
        ]
        raise CompileError(f"the native module does not compile with {command[0]}: {lines[0]}")


def _compiler() -> list[str]:
    chosen = shlex.split(os.environ.get("CXX", ""))
    if chosen:
        if shutil.which(chosen[0]) is None:
            raise CompileError(f"the native module needs a C++ compiler: {chosen[0]} is not there")
        return chosen
    found = next((path for name in _COMPILERS if (path := shutil.which(name))), None)
    if found is None:
        raise CompileError(
            "the native module needs a C++ compiler and there is none "
            f"({', '.join(_COMPILERS)}, or the variable CXX); Python does its work meanwhile"
        )
    return [found]


def _processor_flags() -> list[str]:
    """Return what the processor can do. In the key: nodes of several kinds may share one home."""
    return _PROCESSOR_FLAGS.get(torch.backends.cpu.get_cpu_capability(), [])


def _include_flags() -> list[str]:
    from torch.utils.cpp_extension import include_paths

    return [
        *(f"-isystem{path}" for path in [*include_paths(), sysconfig.get_path("include")]),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
    ]


def _link_flags() -> list[str]:
    from torch.utils.cpp_extension import library_paths

    flags = [*(f"-L{path}" for path in library_paths()), "-ltorch_python", "-ltorch_cpu", "-lc10"]
    if sys.platform == "darwin":
        return [*flags, "-undefined", "dynamic_lookup"]
    # A symbol that this torch lacks shows when the file is loaded, not in the middle of a run.
    return [*flags, "-Wl,-z,now"]
