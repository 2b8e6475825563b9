"""Pieces are found again in the whole."""

from __future__ import annotations

import torch
from holdings import Holdings, Place, everything

SHAPE = torch.Size((4, 3))
WHOLE = torch.arange(12).view(4, 3)


def test_a_piece_is_a_view_of_its_part() -> None:
    box = Place((2, 1), (2, 2)).within(WHOLE)
    assert box.tolist() == [[7, 8], [10, 11]]
    assert box.untyped_storage().data_ptr() == WHOLE.untyped_storage().data_ptr()
    assert Place((5,), (4,), flat=True).within(WHOLE).tolist() == [5, 6, 7, 8]
    assert torch.equal(everything(SHAPE).within(WHOLE), WHOLE)


def test_copies_and_first_holders() -> None:
    """Two replicas of two uneven shards, and a parameter that only rank 3 has."""
    top, bottom = Place((0, 0), (3, 3)), Place((3, 0), (1, 3))
    places = [{"w": top}, {"w": bottom}, {"w": top}, {"w": bottom, "b": everything(SHAPE)}]
    holdings = Holdings({"w": SHAPE, "b": SHAPE}, places)
    assert holdings.copies("w") == 2
    assert holdings.copies("b") == 1
    assert holdings.holders("w") == [0, 1, 2, 3]
    assert holdings.holders("b") == [3]
    assert [holdings.is_first("w", rank) for rank in range(4)] == [True, True, False, False]
    assert holdings.is_first("b", 3)
