"""Resources of the compiled kernels per architecture, and the bytes that they move."""

from __future__ import annotations

from csrc_triton.address_layout import ADDRESS_COLUMNS
from csrc_triton.compile_report import TARGETS, Resources, compile_all
from csrc_triton.row_layout import BINS, MAX_COLUMNS, RUN, SUM_COLUMNS

# Registers and threads of one SM (CUDA), or VGPRs per lane and waves of one SIMD (gfx942).
THREADS_PER_SM = 2048
REGISTERS_PER_SM = 65536
BANDWIDTH = {"sm_80": 2.0e12, "sm_90": 3.35e12, "sm_100": 8.0e12, "gfx942": 5.3e12}
"""Bytes per second of HBM as the vendors state them: A100 80GB, H100 SXM, B200, MI300X."""


def occupancy(r: Resources) -> float:
    """Return the share of the resident threads that registers allow."""
    if r.target == "gfx942":
        return min(8, 512 // max(8, -(-r.registers // 8) * 8)) / 8
    per_warp = -(-r.registers * 32 // 256) * 256
    blocks = REGISTERS_PER_SM // (per_warp * r.warps)
    return min(blocks * r.warps * 32, THREADS_PER_SM) / THREADS_PER_SM


def resource_table() -> None:
    """Print one line per kernel, configuration and target. Compiles for about a minute."""
    print(
        f"\n{'kernel':14}{'configuration':24}{'target':8}{'regs':>5}{'spill':>6}{'shared':>7}"
        f"{'occup.':>7}{'instr':>7}  loads by bits / stores by bits / instructions by class"
    )
    for r in compile_all(tuple(TARGETS)):
        widths = " ".join(f"{k}:{v}" for k, v in sorted(r.loads.items(), key=lambda x: -int(x[0])))
        stores = " ".join(f"{k}:{v}" for k, v in sorted(r.stores.items(), key=lambda x: -int(x[0])))
        classes = " ".join(f"{k} {v}" for k, v in sorted(r.classes.items(), key=lambda x: -x[1]))
        print(
            f"{r.kernel:14}{r.configuration:24}{r.target:8}{r.registers:5}{r.spills:6}"
            f"{r.shared_bytes:7}{occupancy(r):7.0%}{r.instructions:7}  "
            f"{widths} / {stores} / {classes}",
            flush=True,
        )


def bytes_table(sample: int = 1024) -> None:
    """Print the bytes of one observation per parameter, against the least possible.

    The least: 32-byte sectors of the sampled weights before and after and of the gradients, and the
    row that is written. The rest is offsets, the kept samples and the tables.
    """
    print("\nbytes per parameter and observation, sample 1024, bins on")
    row = 8 * len(SUM_COLUMNS) + 4 * len(MAX_COLUMNS) + 8 * BINS + 8
    tables = 2 * (8 * len(ADDRESS_COLUMNS) + 8 + 4 + 32) + 8 + 8
    for name, size in (("fp32", 4), ("bf16", 2)):
        sectors = sample // RUN * -(-RUN * size // 32) * 32
        least = 3 * sectors + row
        moved = least + 2 * 4 * sample + 2 * 4 * sample + tables
        print(f"  {name}: least {least:6}  moved {moved:6}  factor {moved / least:.2f}")
        for target, bandwidth in BANDWIDTH.items():
            least_us = 1000 * moved / bandwidth * 1e6
            print(
                f"    estimate, not measured: 1000 parameters on {target} at the stated "
                f"{bandwidth / 1e12:.2f} TB/s take at least {least_us:.1f} us"
            )
