"""What is inside a model does not depend on how it is distributed.

`distmon verify` compares attention, experts and spectra too, with references in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gloo_ranks import run_ranks
from inside_rank_cases import STEPS, WAYS, cases, dead_units, experts, observed

import distmon
from distmon import Record
from distmon.verify.expected_inside import spectrum_statistics
from distmon.verify.workloads import load_workload

EXACT = ("mean", "std", "absmax", "rms", "norm", "zero_fraction", "dead_fraction", "units")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[Record]:
    return observed("plain", tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(cases, 2, tmp_path_factory.mktemp("together"), writer="thread")


@pytest.mark.parametrize("way", WAYS)
def test_numbers_are_those_of_one_process(
    way: str, alone: list[Record], together: list[dict[str, Any]]
) -> None:
    for rank in together:
        for record, expected in zip(rank[way], alone, strict=True):
            assert record.faults == ()
            if way == "pp" and record.step == 1:
                assert "activations" not in record.inside  # there has been a trial run
                continue
            found, want = record.inside["activations"], expected.inside["activations"]
            assert set(found.names) == set(want.names)
            order = [found.names.index(name) for name in want.names]
            for column in EXACT:
                have = found.columns[column][order]
                # Pipelines and ZeRO compute in other orders; what is 0 but for rounding is small.
                np.testing.assert_allclose(have, want.columns[column], rtol=1e-5, atol=1e-7)
            estimates = [
                table.columns["effective_rank"][place]
                for table, place in ((found, order), (want, slice(None)))
            ]
            np.testing.assert_allclose(*estimates, rtol=0.5)


def test_spectral_norms_of_changing_weights_are_those_of_an_svd(tmp_path: Path) -> None:
    """Within 1% from the third observation on."""
    workload = load_workload(None)
    model = workload.model
    matrices = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    settings: dict[str, Any] = {"interval": 1, "run_dir": tmp_path, "sinks": []}
    with distmon.attach(model, optimizer, inside="spectra", **settings) as monitor:
        for step in range(1, 13):
            optimizer.zero_grad()
            batch = workload.batch(step)
            workload.loss(model(batch), batch).backward()
            optimizer.step()
            monitor.step()
            table = monitor.last_record.inside["spectra"]
            assert len(table.names) == 2 * 6
            for name in table.names if step >= 3 else ():
                want, row = spectrum_statistics(matrices[name]), table.row(name)
                norm = want["spectral_norm"]
                assert row["spectral_norm"] == pytest.approx(norm, rel=0.01), (step, name)
                assert row["stable_rank"] == pytest.approx(want["stable_rank"], rel=0.02)
                assert abs(row["spectral_norm"] - norm) <= row["spectral_norm_error"] + 1e-5


@pytest.mark.parametrize("parallel", ["tp", "ddp"])
def test_a_unit_is_dead_when_no_rank_has_seen_it(
    parallel: str, together: list[dict[str, Any]], tmp_path: Path
) -> None:
    expected = dead_units(0, 1, tmp_path, parallel="ddp" if parallel == "ddp" else "none")
    for rank in together:
        found = rank[f"dead-{parallel}"]
        assert found["dead_fraction"] == expected["dead_fraction"] == 10 / 40
        assert found["units"] == 40
        assert found["rms"] == pytest.approx(expected["rms"], rel=1e-5)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_loads_of_experts_are_those_of_the_whole_batch(
    parallel: str, together: list[dict[str, Any]], tmp_path: Path
) -> None:
    expected = experts(0, 1, tmp_path, parallel="none")
    assert len(expected) == 2
    for rank in together:
        found = rank[f"experts-{parallel}"]
        assert found.keys() == expected.keys()
        for name, row in expected.items():
            assert found[name] == pytest.approx(row, rel=1e-6, nan_ok=True), name


def test_there_are_records_of_all_steps(alone: list[Record]) -> None:
    assert len(alone) == STEPS
