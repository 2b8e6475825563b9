"""Every shipped configuration compiles for every target within its resources, without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
DISASSEMBLED = "exact_chunks,nonfinite_counts"
"""Whose loads are looked at. Of the others the resources are enough: no stack, no local memory."""


@pytest.fixture(scope="module")
def compiled() -> list[dict]:
    """Resources of all configurations, from processes in which Triton compiles for sure."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "csrc_triton.compile_report", targets, DISASSEMBLED],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for targets in ("sm_80,sm_100", "sm_90,gfx942")
    ]
    results = []
    for process in processes:
        out, error = process.communicate(timeout=3600)
        assert process.returncode == 0, error[-3000:]
        results += [json.loads(line) for line in out.splitlines()]
    return results


def _of(compiled: list[dict], kernel: str) -> list[dict]:
    found = [r for r in compiled if r["kernel"] == kernel]
    assert {r["target"] for r in found} == set(TARGETS)
    return found


def test_every_kernel_on_every_target(compiled: list[dict]) -> None:
    kernels = {r["kernel"] for r in compiled}
    assert kernels == {
        "snapshot",
        "sampled_stats",
        "exact_chunks",
        "exact_rows",
        "run_chunks",
        "run_rows",
        "activation_stats",
        "nonfinite_counts",
    }
    names = {(r["kernel"], r["configuration"]) for r in compiled}
    assert len(compiled) == len(names) * len(TARGETS)


def test_nothing_spills(compiled: list[dict]) -> None:
    spilling = [(r["kernel"], r["configuration"], r["target"]) for r in compiled if r["spills"]]
    assert not spilling


def test_sampled_kernel_takes_64_registers_on_nvidia(compiled: list[dict]) -> None:
    for r in _of(compiled, "sampled_stats"):
        # Two waves of 64 lanes are as many threads as four warps; gfx942 has 512 VGPRs per lane,
        # so up to 128 leave four waves per SIMD.
        limit = 128 if r["target"] == "gfx942" else 96 if "fp64" in r["configuration"] else 64
        assert r["registers"] <= limit, (r["configuration"], r["target"], r["registers"])
        assert r["shared_bytes"] <= 4096


def test_kernels_over_runs_and_whole_gradients_stay_within_their_registers(
    compiled: list[dict],
) -> None:
    for kernel, fp32, fp64, amd in (("run_chunks", 96, 128, 64), ("run_rows", 72, 72, 64)):
        for r in _of(compiled, kernel):
            limit = fp64 if "fp64" in r["configuration"] else fp32
            limit = amd if r["target"] == "gfx942" else limit
            assert r["registers"] <= limit, (kernel, r["configuration"], r["target"])
            assert r["shared_bytes"] <= 512
    for r in _of(compiled, "exact_chunks"):
        if "no bins" in r["configuration"]:  # what reads gradients in full by default
            limit = 96 if r["target"] == "gfx942" else 200 if "fp64" in r["configuration"] else 128
            assert r["registers"] <= limit, (r["configuration"], r["target"], r["registers"])


def test_counting_nan_takes_few_registers(compiled: list[dict]) -> None:
    for r in _of(compiled, "nonfinite_counts"):
        assert r["registers"] <= 64, (r["configuration"], r["target"], r["registers"])
        assert r["shared_bytes"] <= 512


def test_kernels_over_whole_tensors_load_128_bits(compiled: list[dict]) -> None:
    for r in [*_of(compiled, "exact_chunks"), *_of(compiled, "nonfinite_counts")]:
        if r["target"] != "gfx942":
            assert r["loads"].get("128", 0) >= 1, (r["configuration"], r["target"], r["loads"])


def test_nothing_touches_local_memory(compiled: list[dict]) -> None:
    assert {r["kernel"] for r in compiled if r["classes"] and r["target"] != "gfx942"} == {
        *DISASSEMBLED.split(",")
    }
    assert not [r for r in compiled if r["classes"].get("local")]
