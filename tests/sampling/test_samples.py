"""What is kept of the samples of many parameters that are alike."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from distmon.layout import capture
from distmon.record.sample_tables import Sampling
from distmon.sampling.plan import SamplePlan, build_plan
from distmon.sampling.reading import Reading
from distmon.sampling.sample import Sample


def _plan() -> SamplePlan:
    """60 parameters of two shapes: 2560 elements, of which 1024 are sampled, and 40."""
    model = nn.Sequential(*[nn.Linear(64, 40) for _ in range(30)])
    return build_plan(capture(model), Reading(), 5, torch.device("cpu"))


def test_parameters_of_one_design_share_it_and_their_shares() -> None:
    plan = _plan()
    for samples in (plan.samples, plan.gradient_samples):
        assert len({id(like) for like in samples.designs}) == 2
    for numbers in (plan.numbers, plan.gradient_numbers):
        assert len(numbers.group_shares.rows) == 2


def test_what_is_known_of_weights_and_of_updates_is_one_table() -> None:
    tables = Sampling.describe(_plan(), [2, 1] * 30, [True] * 60).tables
    assert tables["w"] is tables["u"]


def test_a_sample_has_the_name_of_its_parameter() -> None:
    samples = _plan().samples
    assert [s.name for s in samples] == [
        f"{i}.{own}" for i in range(30) for own in ("weight", "bias")
    ]
    assert samples[4] == Sample("2.weight", 2560, 5, row_strata=1, cell_strata=128)
    assert samples[-2:][0] == samples[58]
    assert len({sample.indices.tobytes() for sample in samples[::2]}) == 30


def test_a_plan_whose_slots_somebody_else_has_takes_no_memory_for_them() -> None:
    plan = _plan()
    bare = plan.without_slots()
    assert plan.nbytes - bare.nbytes == plan.offsets.nbytes + sum(
        chunk.padding.nbytes for chunk in plan.chunks if chunk.padding is not None
    )
    assert [c.offsets.shape for c in bare.chunks] == [c.offsets.shape for c in plan.chunks]
    assert bare.snapshot is plan.snapshot
    with pytest.raises(RuntimeError):
        bare.chunks[0].offsets.tolist()
