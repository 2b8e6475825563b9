"""The wire protocol of rank slots: what each rank sends about itself in an observation.

A slot is a row of float64 numbers, one per rank, all zeros on the other ranks, so that a SUM is a
gather. It holds the rank telemetry (`distmon.metrics.RANK_METRICS`), the fields below that only the
monitor itself reads, and the text of an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from distmon.metrics import PENDING_EVALUATIONS, RANK_METRICS
from distmon.reduce.reduced import any_nonzero
from distmon.sampling.sample import REPLICA_CLASSES

Floats = NDArray[np.float64]

WIRE_FIELDS: Final[tuple[str, ...]] = (
    "plan_hash",  # what the rank samples, 48 bits
    *(f"region_key{i}" for i in range(REPLICA_CLASSES)),  # which shards of the class, 48 bits
    *(f"checksum{i}" for i in range(REPLICA_CLASSES)),  # of the class's sampled weights, 48 bits
    "signal_step",  # first step whose loss or gradient norm was not finite, else 0
    "signal_counted_at",  # step in which that rank counted its NaN and Inf, else 0
    "signal_kind",  # index into `collect.finite_watch.SIGNALS`
    "nonfinite_known",  # 1 when an earlier record has located the NaN that is still there
    "reported_norm",  # newest gradient norm that the trainer reported, -1 without one
    "reported_norm_share",  # of its square in the total's; 0 when it is the total
    "flops_per_token",  # of forward and backward, 0 while unknown
    "peak_flops",  # of the rank's device, 0 while unknown
    "proposed_interval",  # by rank 0: in effect from the next observation but one, 0 for none
    "acknowledged_interval",  # proposed in the observation before, which this rank has
    "record_step",  # of the newest record that the rank derived, with `check_records`
    "record_hash",  # of that record, 48 bits
    "lr",  # that the trainer reported, or of this rank's first param group; NaN without one
    *(
        f"eval{i}_{what}"  # evaluation i since the last record; step 0: none
        for i in range(PENDING_EVALUATIONS)
        for what in ("step", "epoch", "train_loss", "val_loss")
    ),
    "task_key",  # which tasks were measured since the last record, 48 bits, 0 for none
)
FIELDS: Final = (*(metric.name for metric in RANK_METRICS), *WIRE_FIELDS)
INDEX: Final = {name: i for i, name in enumerate(FIELDS)}
"""Where each field is in a slot."""
_TEXT_NUMBERS: Final = 12
_BYTES_PER_NUMBER: Final = 6  # a float64 holds 48 bits exactly
_NOTHING: Final = dict.fromkeys(FIELDS, 0.0)
SLOT_SIZE: Final = len(FIELDS) + _TEXT_NUMBERS
CHECKSUMS: Final = slice(INDEX["checksum0"], INDEX["checksum0"] + REPLICA_CLASSES)
"""Where the checksums are; they are computed on the device and written there directly."""
FAILURE: Final = tuple(INDEX[name] for name in ("failed", "step", "plan_hash"))
"""Where a rank that failed writes that it did, and to which observation its slot belongs."""


def pack(values: Mapping[str, Any], number: Callable[[Any], float], error: str) -> list[float]:
    """Return one slot; a field that `values` lacks is 0. `number` converts what is no float.

    A name that is no field is ignored.
    """
    known = {**_NOTHING, **values}
    if len(known) > len(FIELDS):
        known = {name: known[name] for name in FIELDS}
    slot = [value if type(value) is float else number(value) for value in known.values()]
    return [*slot, *_pack_text(error)]


class RankFields(Mapping[str, Floats]):
    """`fields[name][rank]`, found when it is asked for. Pickled as one table."""

    def __init__(self, table: Floats) -> None:
        """`table`: [FIELDS, ranks]."""
        self._table = table

    def __getitem__(self, name: str) -> Floats:
        row: Floats = self._table[INDEX[name]]
        return row

    def __iter__(self) -> Iterator[str]:
        return iter(FIELDS)

    def __len__(self) -> int:
        return len(FIELDS)

    def __reduce__(self) -> tuple[Any, ...]:
        return RankFields, (self._table,)


def unpack(slots: Floats) -> tuple[Mapping[str, Floats], dict[int, str]]:
    """Return `fields[name][rank]` and the error texts by rank, from [ranks, SLOT_SIZE]."""
    fields = RankFields(slots.T[: len(FIELDS)].copy())
    texts = slots[:, len(FIELDS) :]
    if not any_nonzero(texts, axis=None):
        return fields, {}
    errors = {rank: _unpack_text(row) for rank, row in enumerate(texts)}
    return fields, {rank: text for rank, text in errors.items() if text}


def _pack_text(text: str) -> list[float]:
    if not text:
        return [0.0] * _TEXT_NUMBERS
    raw = text.encode("ascii", "replace")[: _TEXT_NUMBERS * _BYTES_PER_NUMBER]
    raw = raw.ljust(_TEXT_NUMBERS * _BYTES_PER_NUMBER, b"\0")
    parts = range(0, len(raw), _BYTES_PER_NUMBER)
    return [float(int.from_bytes(raw[i : i + _BYTES_PER_NUMBER], "little")) for i in parts]


def _unpack_text(numbers: Floats) -> str:
    raw = b"".join(int(n).to_bytes(_BYTES_PER_NUMBER, "little") for n in numbers)
    return raw.rstrip(b"\0").decode("ascii", "replace")
