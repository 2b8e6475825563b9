"""Which probe is chosen, and what is said when Triton cannot be used."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from given_shard import given_shard

from distmon.errors import ConfigError
from distmon.layout.plain import plain_shard
from distmon.layout.shard import Everything, Shard
from distmon.probe import TorchProbe
from distmon.probe.backend import check_triton_version, choose_probe
from distmon.sampling.plan import SamplePlan, build_plan
from distmon.sampling.reading import Reading


@pytest.fixture
def planned() -> tuple[SamplePlan, list[Shard]]:
    shards = [plain_shard("w", torch.nn.Parameter(torch.randn(20)))]
    return build_plan(shards, Reading(8), 0, torch.device("cpu")), shards


@pytest.fixture
def on_gpu(
    planned: tuple[SamplePlan, list[Shard]], monkeypatch: pytest.MonkeyPatch
) -> tuple[SamplePlan, list[Shard]]:
    """The same plan, said to be on a GPU; the torch probe takes it as if it were on the CPU."""
    plan, shards = planned
    monkeypatch.setattr(
        "distmon.probe.backend.TorchProbe", lambda _, shards: TorchProbe(plan, shards)
    )
    return replace(plan, device=torch.device("cuda", 0)), shards


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_torch_on_a_cpu(
    backend: str,
    planned: tuple[SamplePlan, list[Shard]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # where no native module is
    monkeypatch.setattr("distmon.native.build.PACKAGE_FOLDER", tmp_path)
    assert isinstance(choose_probe(backend, *planned), TorchProbe)


def test_triton_on_a_cpu_is_an_error_in_one_sentence(
    planned: tuple[SamplePlan, list[Shard]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match="needs a CUDA or ROCm model and this one is on cpu"):
        choose_probe("triton", *planned)


def test_triton_on_a_cpu_when_interpreted(
    planned: tuple[SamplePlan, list[Shard]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert type(choose_probe("triton", *planned)).__name__ == "TritonProbe"


def test_auto_falls_back_with_one_line_when_triton_is_missing(
    on_gpu: tuple[SamplePlan, list[Shard]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name in [m for m in sys.modules if m.startswith("csrc_triton.") and "layout" not in m]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "distmon.probe.triton_probe", raising=False)
    monkeypatch.delitem(sys.modules, "distmon.probe.address_table", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    with caplog.at_level(logging.WARNING, "distmon"):
        assert isinstance(choose_probe("auto", *on_gpu), TorchProbe)
    assert len(caplog.messages) == 1
    assert "torch instead of Triton" in caplog.messages[0]
    assert "triton" in caplog.messages[0]
    with pytest.raises(ConfigError, match="backend: triton cannot be used"):
        choose_probe("triton", *on_gpu)


def test_a_dtype_that_kernels_cannot_read_is_named(
    on_gpu: tuple[SamplePlan, list[Shard]], caplog: pytest.LogCaptureFixture
) -> None:
    plan, shards = on_gpu
    strange = torch.zeros(20, dtype=torch.float8_e4m3fnuz)
    shards = [given_shard("w", (20,), Everything(), weight=lambda: strange)]
    with caplog.at_level(logging.WARNING, "distmon"):
        assert isinstance(choose_probe("auto", plan, shards), TorchProbe)
    assert "not float8_e4m3fnuz" in caplog.messages[0]


def test_an_old_triton_is_named() -> None:
    check_triton_version("3.4.0")
    check_triton_version("3.10.1")
    with pytest.raises(RuntimeError, match=r"3\.3\.1 is older than 3\.4"):
        check_triton_version("3.3.1")
