from __future__ import annotations

import logging

import numpy as np
import pytest
from sample_run import MakeRecord, bin_of, param_names

from csrc_triton.row_layout import BINS
from distmon.sinks.tags import (
    histogram_edges,
    param_histograms,
    param_scalars,
    scalars_by_step,
    select_params,
)


def test_every_value_lies_between_the_edges_of_its_bin() -> None:
    edges = histogram_edges()
    assert edges.shape == (BINS + 1,)
    assert (np.diff(edges) > 0).all()
    magnitudes = np.float32(10.0) ** np.linspace(-20, 12, 400, dtype=np.float32)
    for value in np.concatenate([magnitudes, -magnitudes, np.float32([1, -1, 2**-44, 0])]):
        place = bin_of(float(value))
        assert edges[place] <= value <= edges[place + 1]


def test_selection_is_in_table_order_and_warns_at_the_cap(
    caplog: pytest.LogCaptureFixture,
) -> None:
    names = param_names(10)
    with caplog.at_level(logging.WARNING, "distmon"):
        assert select_params(names, (), 50) == frozenset()
        assert select_params(names, ("*.attn.*",), 5) == {n for n in names if "attn" in n}
        assert caplog.messages == []
        assert select_params(names, ("*.attn.*", "blocks.0.*"), 3) == set(names[:3])
    assert caplog.messages == [
        "distmon: param_tags match 6 parameters; only the first 3 get tags (param_tag_cap)"
    ]


def test_the_number_of_tags_does_not_depend_on_the_number_of_parameters(
    make_record: MakeRecord,
) -> None:
    few = make_record(5, params=10, histogram=False)
    many = make_record(5, params=1000, histogram=False)
    selected = select_params(many.params.names, (), 50)
    assert param_scalars(many.params, selected) == {}
    assert scalars_by_step(few).keys() == scalars_by_step(many).keys() == {4, 5}
    assert scalars_by_step(few)[5].keys() == scalars_by_step(many)[5].keys()
    capped = select_params(many.params.names, ("*",), 4)
    assert len(param_scalars(many.params, capped)) == 4 * 6


def test_losses_stand_at_their_own_steps_once(make_record: MakeRecord) -> None:
    record = make_record(5, losses={4: 1.0, 5: 2.0}, loss_ema={4: 1.5, 5: 1.75})
    by_step = scalars_by_step(record)
    assert by_step[4] == {"train/step_loss": 1.0, "train/step_loss_ema": 1.5}
    assert by_step[5]["train/step_loss"] == 2.0
    assert by_step[5]["monitor/grad_norm"] == 0.81


def test_histograms_are_cut_to_what_they_hold(make_record: MakeRecord) -> None:
    record = make_record(5)
    name = record.params.names[1]
    bins = param_histograms(record.params, frozenset({name}))[f"gradients_hist/{name}"]
    assert bins.counts.sum() == 64
    assert len(bins.edges) == len(bins.counts) + 1
    assert bins.counts[0] > 0
    assert bins.counts[-1] > 0
    assert bins.edges[0] <= bins.smallest <= bins.edges[1]
    assert bins.edges[-2] <= bins.largest <= bins.edges[-1]
