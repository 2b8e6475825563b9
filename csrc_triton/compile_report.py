"""Compile every shipped kernel configuration without a GPU and report its resource usage.

`python -m csrc_triton.compile_report [TARGETS [KERNELS]]` prints one JSON line per kernel,
configuration and target. KERNELS are those whose instructions are counted on NVIDIA, all without
it: disassembling a small kernel takes longer than compiling it. It must run without
TRITON_INTERPRET: an interpreted function cannot be compiled.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from csrc_triton.configurations import Configuration, shipped_configurations
from csrc_triton.cubin import registers_and_stack

TARGETS: Final[dict[str, GPUTarget]] = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
_BINARIES: Final = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Resources:
    """Resource usage of one compiled kernel. Spills are in bytes, on AMD in registers."""

    kernel: str
    configuration: str
    target: str
    warps: int
    registers: int
    shared_bytes: int
    spills: int
    instructions: int
    """0, as all that follow, where they were not counted."""
    classes: dict[str, int] = field(default_factory=dict)
    loads: dict[str, int] = field(default_factory=dict)
    """Number of global loads by bits per thread."""
    stores: dict[str, int] = field(default_factory=dict)


def compile_one(configuration: Configuration, target: str, disassemble: bool = True) -> Resources:
    """Compile for `target` and read the resources from the binary."""
    function = configuration.function
    names = function.arg_names
    given = {**configuration.pointers, **dict.fromkeys(configuration.constants, "constexpr")}
    source = ASTSource(
        fn=function,
        signature={name: given[name] for name in names},
        constexprs={(names.index(k),): v for k, v in configuration.constants.items()},
    )
    amd = TARGETS[target].backend == "hip"
    options = {"num_warps": configuration.warps}
    if configuration.register_limit and not amd:
        options["maxnreg"] = configuration.register_limit
    compiled = triton.compile(source, target=TARGETS[target], options=options)
    if amd:
        numbers = _read_amd(compiled.asm["amdgcn"])
    else:
        numbers = _read_nvidia(compiled.asm["cubin"], disassemble)
    return Resources(
        kernel=configuration.kernel,
        configuration=configuration.name,
        target=target,
        warps=configuration.warps,
        shared_bytes=int(compiled.metadata.shared),
        **numbers,
    )


def _read_nvidia(cubin: bytes, disassemble: bool) -> dict[str, Any]:
    registers, stack = registers_and_stack(cubin)
    sass = _disassembled(cubin, registers, stack) if disassemble else ""
    codes = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", sass, re.M)
    codes = [c for c in codes if not c.startswith("NOP")]
    return {
        "registers": registers,
        "spills": stack,
        "instructions": len(codes),
        "classes": dict(Counter(_nvidia_class(c) for c in codes)),
        "loads": dict(Counter(_nvidia_width(c) for c in codes if c.startswith("LDG"))),
        "stores": dict(Counter(_nvidia_width(c) for c in codes if c.startswith("STG"))),
    }


def _disassembled(cubin: bytes, registers: int, stack: int) -> str:
    """Return the instructions; NVIDIA's tool must state the same resources."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = _run("cuobjdump", "--dump-resource-usage", "-sass", file.name)
    stated = {k: int(v) for k, v in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    if (stated["REG"], stated["STACK"] + stated["LOCAL"]) != (registers, stack):
        raise ValueError(f"{stated}, but the file has {registers} registers and {stack} bytes")
    return text


def _nvidia_width(code: str) -> str:
    for part, bits in ((".128", "128"), (".64", "64"), (".U16", "16"), (".U8", "8")):
        if part in code:
            return bits
    return "32"


def _nvidia_class(code: str) -> str:
    head = code.split(".")[0]
    for name, heads in {
        "global": ("LDG", "STG", "ATOMG", "RED", "REDG"),
        "shared": ("LDS", "STS", "ATOMS", "LDSM"),
        "local": ("LDL", "STL"),
        "shuffle": ("SHFL", "REDUX", "CREDUX"),
        "fp64": ("DADD", "DMUL", "DFMA", "DSETP", "DMNMX"),
        "convert": ("F2F", "F2I", "I2F", "HADD2", "I2FP", "F2FP"),
        "control": ("BRA", "BSSY", "BSYNC", "BAR", "EXIT", "CALL", "RET", "WARPSYNC", "BREAK"),
    }.items():
        if head in heads:
            return name
    return "fp32" if head.startswith("F") else "integer"


def _read_amd(assembly: str) -> dict[str, Any]:
    def number(key: str) -> int:
        found = re.search(rf"\.{key}:\s+(\d+)", assembly)
        return int(found.group(1)) if found else 0

    codes = re.findall(r"^\t((?:v|s|ds|global|buffer|flat|scratch)_\w+)", assembly, re.M)
    loads = [c for c in codes if re.match(r"(global|buffer|flat)_load", c)]
    stores = [c for c in codes if re.match(r"(global|buffer|flat)_store", c)]
    return {
        "registers": number("vgpr_count"),
        "spills": number("vgpr_spill_count")
        + number("sgpr_spill_count")
        + number("private_segment_fixed_size"),
        "instructions": len(codes),
        "classes": dict(Counter(_amd_class(c) for c in codes)),
        "loads": dict(Counter(_amd_width(c) for c in loads)),
        "stores": dict(Counter(_amd_width(c) for c in stores)),
    }


def _amd_width(code: str) -> str:
    for part, bits in (
        ("dwordx4", "128"),
        ("dwordx2", "64"),
        ("dword", "32"),
        ("short", "16"),
        ("byte", "8"),
    ):
        if part in code:
            return bits
    return "32"


def _amd_class(code: str) -> str:
    if code.startswith(("global_", "buffer_", "flat_")):
        return "global"
    if code.startswith("scratch_"):
        return "local"
    if code.startswith("ds_"):
        return "shuffle" if "permute" in code or "swizzle" in code else "shared"
    if "cvt" in code:
        return "convert"
    if "_dpp" in code:
        return "shuffle"
    if "f64" in code:
        return "fp64"
    if code.startswith(("s_cbranch", "s_branch", "s_barrier", "s_endpgm", "s_waitcnt")):
        return "control"
    return "fp32" if "f32" in code else "integer"


def _run(tool: str, *arguments: str) -> str:
    command = [str(_BINARIES / tool), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def compile_all(
    targets: Sequence[str] = tuple(TARGETS), match: str = "", counted: Sequence[str] | None = None
) -> Iterator[Resources]:
    """Compile every configuration whose kernel or name contains `match`, for every target.

    `counted`: kernels whose instructions are counted on NVIDIA; None for all.
    """
    for configuration in shipped_configurations():
        if match in f"{configuration.kernel} {configuration.name}":
            disassemble = counted is None or configuration.kernel in counted
            for target in targets:
                yield compile_one(configuration, target, disassemble)


if __name__ == "__main__":
    targets = sys.argv[1].split(",") if len(sys.argv) > 1 else tuple(TARGETS)
    kernels = sys.argv[2].split(",") if len(sys.argv) > 2 else None
    for resources in compile_all(targets, counted=kernels):
        print(json.dumps(asdict(resources)), flush=True)
