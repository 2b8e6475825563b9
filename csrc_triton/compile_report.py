"""Compile every shipped kernel configuration without a GPU and read the resources it takes.

`python -m csrc_triton.compile_report` prints one JSON line per kernel, configuration and target.
It must run without TRITON_INTERPRET: an interpreted function cannot be compiled.
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

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from csrc_triton.dtypes import DTYPE_CODES, dtype_set
from csrc_triton.sampled_stats import sampled_stats_kernel
from csrc_triton.snapshot import snapshot_kernel
from csrc_triton.tables import SAMPLED_WARPS

TARGETS: Final[dict[str, GPUTarget]] = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
_BINARIES: Final = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Configuration:
    """One kernel with the constants that it is compiled for."""

    kernel: str
    name: str
    function: Any
    pointers: dict[str, str]
    constants: dict[str, Any]
    warps: int


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel takes. Spills are in bytes, or registers on AMD."""

    kernel: str
    configuration: str
    target: str
    warps: int
    registers: int
    shared_bytes: int
    spills: int
    instructions: int
    classes: dict[str, int] = field(default_factory=dict)
    loads: dict[str, int] = field(default_factory=dict)
    """Global loads by bits per thread."""
    stores: dict[str, int] = field(default_factory=dict)


def shipped_configurations() -> list[Configuration]:
    """The dtype sets of real models, each alone and all together, with every option once."""
    fp32, bf16, fp16 = torch.float32, torch.bfloat16, torch.float16
    no64 = dtype_set(d for d in DTYPE_CODES if d != torch.float64)
    sets = {
        "fp32": dtype_set([fp32]),
        "bf16": dtype_set([bf16]),
        "fp16": dtype_set([fp16]),
        "bf16+fp32": dtype_set([bf16, fp32]),
        "fp16+fp32": dtype_set([fp16, fp32]),
        "fp8+bf16+fp32": dtype_set([torch.float8_e4m3fn, torch.float8_e5m2, bf16, fp32]),
        "all but fp64": no64,
    }
    rows = {"p_addresses": "*i64", "p_starts": "*i64", "p_widths": "*i32", "p_group_counts": "*i32"}
    outputs = {
        "p_applied": "*fp64",
        "p_sums": "*fp64",
        "p_maxima": "*fp32",
        "p_bins": "*fp64",
        "p_checksums": "*i64",
    }
    result = []

    def sampled(name: str, dtypes: int, value: str, offset: tl.dtype, bins: int, width: int) -> None:
        kept = f"*{value}"
        constants = {
            "DTYPES": dtypes,
            "VALUE": tl.float64 if value == "fp64" else tl.float32,
            "OFFSET": offset,
            "BLOCK_W": width,
        }
        result.append(
            Configuration(
                "sampled_stats",
                name,
                sampled_stats_kernel,
                {**rows, "p_half_ulp": "*fp64", "p_snapshot": kept, **outputs},
                {**constants, "HISTOGRAM": bins},
                SAMPLED_WARPS,
            )
        )
        if bins == 1:
            pointers = {**rows, "p_snapshot": kept}
            result.append(
                Configuration("snapshot", name, snapshot_kernel, pointers, constants, SAMPLED_WARPS)
            )

    for name, dtypes in sets.items():
        sampled(name, dtypes, "fp32", tl.int32, 1, 128)
    everything = no64 | dtype_set([torch.float64])
    sampled("fp64", dtype_set([torch.float64]), "fp64", tl.int32, 1, 128)
    sampled("all, kept as fp64", everything, "fp64", tl.int64, 1, 128)
    sampled("all, kept as fp32", everything, "fp32", tl.int64, 1, 128)
    sampled("bf16+fp32, no bins", sets["bf16+fp32"], "fp32", tl.int32, 0, 128)
    sampled("bf16+fp32, weight bins", sets["bf16+fp32"], "fp32", tl.int32, 2, 128)
    sampled("bf16+fp32, update bins", sets["bf16+fp32"], "fp32", tl.int32, 3, 128)
    sampled("bf16+fp32, small sample", sets["bf16+fp32"], "fp32", tl.int32, 1, 16)
    return result


def compile_one(configuration: Configuration, target: str) -> Resources:
    """Compile for `target` and read the resources from the binary."""
    function = configuration.function
    names = function.arg_names
    given = {**configuration.pointers, **dict.fromkeys(configuration.constants, "constexpr")}
    source = ASTSource(
        fn=function,
        signature={name: given[name] for name in names},
        constexprs={(names.index(k),): v for k, v in configuration.constants.items()},
    )
    compiled = triton.compile(
        source, target=TARGETS[target], options={"num_warps": configuration.warps}
    )
    shared = int(compiled.metadata.shared)
    read = _read_amd if TARGETS[target].backend == "hip" else _read_nvidia
    text = compiled.asm["amdgcn"] if TARGETS[target].backend == "hip" else compiled.asm["cubin"]
    return Resources(
        kernel=configuration.kernel,
        configuration=configuration.name,
        target=target,
        warps=configuration.warps,
        shared_bytes=shared,
        **read(text),
    )


def _read_nvidia(cubin: bytes) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _run("cuobjdump", "--dump-resource-usage", file.name)
        sass = _run("cuobjdump", "-sass", file.name)
    numbers = {k: int(v) for k, v in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    codes = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", sass, re.M)
    codes = [c for c in codes if not c.startswith("NOP")]
    return {
        "registers": numbers["REG"],
        "spills": numbers["STACK"] + numbers["LOCAL"],
        "instructions": len(codes),
        "classes": dict(Counter(_nvidia_class(c) for c in codes)),
        "loads": dict(Counter(_nvidia_width(c) for c in codes if c.startswith("LDG"))),
        "stores": dict(Counter(_nvidia_width(c) for c in codes if c.startswith("STG"))),
    }


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


def compile_all(targets: Sequence[str] = tuple(TARGETS), match: str = "") -> Iterator[Resources]:
    """Every shipped configuration whose kernel or name contains `match`, for every target."""
    for configuration in shipped_configurations():
        if match in f"{configuration.kernel} {configuration.name}":
            for target in targets:
                yield compile_one(configuration, target)


if __name__ == "__main__":
    targets = sys.argv[1].split(",") if len(sys.argv) > 1 else tuple(TARGETS)
    for resources in compile_all(targets, sys.argv[2] if len(sys.argv) > 2 else ""):
        print(json.dumps(asdict(resources)), flush=True)
