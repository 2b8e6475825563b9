"""The contract: the record does not depend on the parallelism."""

from __future__ import annotations

from pathlib import Path

import pytest
from forked_python import fork_server

from distmon.sampling.reading import SampleSize
from distmon.verify import verify
from distmon.verify.compare_inside import SPECTRA_FROM
from distmon.verify.parallelisms import PARALLELISMS

NEED_FOUR = {"fsdp1-hybrid", "fsdp1-hybrid-flat", "hsdp", "fsdp+tp", "pp+ddp"}


@pytest.fixture(autouse=True, scope="module")
def _ranks_are_forked_from_the_server_of_all_tests() -> None:
    """It has imported more than the server that `verify` would start."""
    fork_server()


@pytest.mark.parametrize(("ranks", "skipped"), [(2, NEED_FOUR), (4, set())])
def test_every_parallelism_has_the_record_of_the_unsharded_model(
    ranks: int, skipped: set[str]
) -> None:
    steps = 2 * (SPECTRA_FROM + 1) if ranks == 4 else 4
    verdicts = [*verify([*PARALLELISMS.values()], None, ranks, steps)]
    assert [v.parallelism.name for v in verdicts] == [*PARALLELISMS]
    assert {v.parallelism.name for v in verdicts if v.skipped} == skipped
    wrong = {
        v.parallelism.name: v.error or (v.comparison and (v.comparison.problems, v.comparison.off))
        for v in verdicts
        if not v.ok
    }
    assert wrong == {}
    for verdict in verdicts:
        if verdict.comparison is None or verdict.parallelism.name == "plain":
            continue
        assert verdict.comparison.collectives == 2
        assert verdict.comparison.not_compared == ()
        for kind in ("activations", "attention", "experts"):
            assert verdict.comparison.worst(kind) is not None
        assert (verdict.comparison.worst("spectra") is not None) is (ranks == 4)
        held, sample = sum(verdict.comparison.sampled), verdict.comparison.sample
        if verdict.parallelism.name.startswith(("fsdp1-full", "fsdp-", "pp")):
            replicas = 2 if verdict.parallelism.name == "pp+ddp" else 1
            assert held == replicas * sample
            assert max(verdict.comparison.sampled) < sample


@pytest.mark.parametrize("sample_size", ["auto", "exact"])
def test_every_reading_has_the_record_of_the_unsharded_model(sample_size: SampleSize) -> None:
    chosen = [PARALLELISMS[name] for name in ("ddp", "fsdp1-full", "fsdp", "tp-sequence", "pp")]
    verdicts = [*verify(chosen, None, 2, steps=4, sample_size=sample_size)]
    assert [(v.parallelism.name, v.error) for v in verdicts if not v.ok] == []
    assert len(verdicts) == len(chosen)


def test_a_hugging_face_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its loss is in float32, and its gradient norm above the default clipping of DeepSpeed."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")
    names = ("plain", "ddp", "fsdp1-full", "fsdp", "zero0", "zero1", "zero2", "zero3")
    chosen = [PARALLELISMS[name] for name in names]
    verdicts = [*verify(chosen, "verify_models:llama", 2, steps=4)]
    wrong = {
        v.parallelism.name: v.error or (v.comparison and (v.comparison.problems, v.comparison.off))
        for v in verdicts
        if not v.ok
    }
    assert wrong == {}
    assert not any(v.skipped for v in verdicts)
