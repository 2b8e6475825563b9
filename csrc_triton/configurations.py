"""Every kernel configuration that ships: what the compile tests and the benchmark compile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl

from csrc_triton import activation_stats, exact_stats, gradient_runs, nonfinite_counts
from csrc_triton.address_layout import DTYPE_CODES, dtype_set
from csrc_triton.histogram import count_constants
from csrc_triton.row_layout import BIN_WORDS
from csrc_triton.sampled_stats import REGISTER_LIMITS, STATS_BLOCK_WIDTH, sampled_stats_kernel
from csrc_triton.snapshot import snapshot_kernel
from csrc_triton.tables import SAMPLED_WARPS, VALUE_TYPES

_ROWS = {"p_addresses": "*i64", "p_starts": "*i64", "p_widths": "*i32", "p_group_counts": "*i32"}
_TORCH = {value: dtype for dtype, value in VALUE_TYPES.items()}
_OUTPUTS = {"p_sums": "*fp64", "p_maxima": "*fp32", "p_bins": "*fp64"}


@dataclass(frozen=True)
class Configuration:
    """One kernel with the constants that it is compiled for."""

    kernel: str
    name: str
    function: Any
    pointers: dict[str, str]
    """Types of the arguments that are not constants."""
    constants: dict[str, Any]
    warps: int
    register_limit: int = 0
    """On NVIDIA; 0 for none."""


def shipped_configurations() -> list[Configuration]:
    """The dtype sets of real models, each alone and all together, and every option once."""
    fp32, bf16, fp16, fp64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
    mixed = dtype_set([bf16, fp32])
    sets = {
        "fp32": dtype_set([fp32]),
        "bf16": dtype_set([bf16]),
        "fp16": dtype_set([fp16]),
        "bf16+fp32": mixed,
        "fp8+bf16+fp32": mixed | dtype_set([torch.float8_e4m3fn, torch.float8_e5m2]),
    }
    everything = dtype_set(DTYPE_CODES)
    result: list[Configuration] = []
    for name, dtypes in sets.items():
        result += [
            _snapshot(name, dtypes, tl.float32, tl.int32),
            _sampled(name, dtypes, tl.float32, tl.int32, BIN_WORDS[0]),
            _exact_chunks(name, dtypes, tl.float32, True),
            _exact_chunks(f"{name} no bins", dtypes, tl.float32, False),
            _run_chunks(name, dtypes, tl.float32, tl.int32),
            _nonfinite(name, dtypes, tl.float32),
        ]
    for name, dtypes, value in (
        ("fp64", dtype_set([fp64]), tl.float64),
        ("all as fp64", everything, tl.float64),
        ("all as fp32", everything, tl.float32),
    ):
        result += [
            _snapshot(name, dtypes, value, tl.int64),
            _sampled(name, dtypes, value, tl.int64, BIN_WORDS[-1]),
            _exact_chunks(name, dtypes, value, True),
            _run_chunks(name, dtypes, value, tl.int64),
            _nonfinite(name, dtypes, value),
        ]
    result += [
        _snapshot("bf16+fp32 small sample", mixed, tl.float32, tl.int32, width=16),
        _sampled("bf16+fp32 many ranks", mixed, tl.float32, tl.int32, BIN_WORDS[1]),
        _sampled("bf16+fp32 no bins", mixed, tl.float32, tl.int32, 0),
        _exact_chunks("all as fp64 no bins", everything, tl.float64, False),
        *(_exact_rows(words) for words in (*BIN_WORDS, 0)),
        _run_rows(),
        *(_activation(name) for name in ("fp32", "bf16", "fp16", "fp64")),
    ]
    return result


def _snapshot(
    name: str, dtypes: int, value: tl.dtype, offset: tl.dtype, width: int = 128
) -> Configuration:
    constants = {"DTYPES": dtypes, "VALUE": value, "OFFSET": offset, "BLOCK_W": width}
    pointers = {**_ROWS, "p_snapshot": f"*{value.name}"}
    return Configuration("snapshot", name, snapshot_kernel, pointers, constants, SAMPLED_WARPS)


def _sampled(
    name: str, dtypes: int, value: tl.dtype, offset: tl.dtype, words: int
) -> Configuration:
    pointers = {
        **_ROWS,
        "p_half_ulp": "*fp64",
        "p_snapshot": f"*{value.name}",
        "p_applied": "*fp64",
        **_OUTPUTS,
        "p_checksums": "*i64",
    }
    constants = {
        "DTYPES": dtypes,
        "VALUE": value,
        "OFFSET": offset,
        **count_constants(words),
        "BLOCK_W": STATS_BLOCK_WIDTH,
    }
    return Configuration(
        "sampled_stats",
        name,
        sampled_stats_kernel,
        pointers,
        constants,
        SAMPLED_WARPS,
        REGISTER_LIMITS[_TORCH[value]],
    )


def _exact_chunks(name: str, dtypes: int, value: tl.dtype, histogram: bool) -> Configuration:
    pointers = {
        "p_addresses": "*i64",
        "p_rows": "*i32",
        "p_numels": "*i64",
        "p_chunk_tensors": "*i32",
        "p_first_chunks": "*i64",
        "p_partials": "*fp64",
        "p_counts": "*i64",
        "gradients": "i32",
    }
    constants = {
        "DTYPES": dtypes,
        "VALUE": value,
        "HISTOGRAM": histogram,
        "CHUNK": exact_stats.CHUNK,
        "BLOCK": exact_stats.BLOCK,
    }
    return Configuration(
        "exact_chunks",
        name,
        exact_stats.exact_chunks_kernel,
        pointers,
        constants,
        exact_stats.WARPS,
        exact_stats.chunk_registers(histogram, _TORCH[value]),
    )


def _exact_rows(words: int) -> Configuration:
    pointers = {
        "p_addresses": "*i64",
        "p_rows": "*i32",
        "p_numels": "*i64",
        "p_first_chunks": "*i64",
        "p_partials": "*fp64",
        "p_counts": "*i64",
        "p_applied": "*fp64",
        **_OUTPUTS,
        "gradients": "i32",
    }
    return Configuration(
        "exact_rows",
        f"bins in {words} words" if words else "no bins",
        exact_stats.exact_rows_kernel,
        pointers,
        {**count_constants(words), "LINES": exact_stats.LINES},
        exact_stats.WARPS,
        exact_stats.ROW_REGISTERS,
    )


def _run_chunks(name: str, dtypes: int, value: tl.dtype, offset: tl.dtype) -> Configuration:
    pointers = {
        "p_addresses": "*i64",
        "p_rows": "*i32",
        "p_first_runs": "*i64",
        "p_chunk_tensors": "*i32",
        "p_first_chunks": "*i64",
        "p_offsets": "*i32" if offset == tl.int32 else "*i64",
        "p_codes": "*u8",
        "p_partials": "*fp64",
    }
    constants = {
        "DTYPES": dtypes,
        "VALUE": value,
        "CHUNK_RUNS": gradient_runs.CHUNK_RUNS,
        "BLOCK_RUNS": gradient_runs.BLOCK_RUNS,
    }
    return Configuration(
        "run_chunks",
        name,
        gradient_runs.run_chunks_kernel,
        pointers,
        constants,
        gradient_runs.WARPS,
        gradient_runs.CHUNK_REGISTERS[_TORCH[value]],
    )


def _run_rows() -> Configuration:
    pointers = {
        "p_addresses": "*i64",
        "p_rows": "*i32",
        "p_elements": "*i64",
        "p_first_chunks": "*i64",
        "p_partials": "*fp64",
        "p_applied": "*fp64",
        "p_sums": "*fp64",
        "p_maxima": "*fp32",
    }
    return Configuration(
        "run_rows",
        "all",
        gradient_runs.run_rows_kernel,
        pointers,
        {"LINES": gradient_runs.LINES},
        gradient_runs.WARPS,
        gradient_runs.ROW_REGISTERS,
    )


def _nonfinite(name: str, dtypes: int, value: tl.dtype) -> Configuration:
    pointers = {
        "p_addresses": "*i64",
        "p_numels": "*i64",
        "p_chunk_tensors": "*i32",
        "p_first_chunks": "*i64",
        "p_counts": "*i64",
        "parameters": "i32",
    }
    constants = {
        "DTYPES": dtypes,
        "VALUE": value,
        "CHUNK": nonfinite_counts.CHUNK,
        "BLOCK": nonfinite_counts.BLOCK,
    }
    return Configuration(
        "nonfinite_counts",
        name,
        nonfinite_counts.nonfinite_counts_kernel,
        pointers,
        constants,
        nonfinite_counts.WARPS,
    )


def _activation(dtype: str) -> Configuration:
    pointers = {
        "p_values": f"*{dtype}",
        "p_sums": "*fp64",
        "p_absmax": "*fp32",
        "p_slots": "*fp32",
        **dict.fromkeys(("positions", "units", "inner"), "i32"),
        **dict.fromkeys(("stride_outer", "stride_unit", "stride_inner"), "i32"),
        **dict.fromkeys(("first", "all_units"), "i32"),
        **dict.fromkeys(("low", "high"), "fp32"),
    }
    constants = {
        "SLOTS": 256,
        "WIDE": tl.float64 if dtype == "fp64" else tl.float32,
        "POSITIONS": activation_stats.POSITIONS,
        "UNITS": activation_stats.UNITS,
        "PASSES": activation_stats.PASSES,
    }
    return Configuration(
        "activation_stats",
        dtype,
        activation_stats.activation_stats_kernel,
        pointers,
        constants,
        activation_stats.WARPS,
        activation_stats.REGISTERS,
    )
