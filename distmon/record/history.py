"""What earlier records said: the run's own past, which scale-free thresholds are relative to."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np

if TYPE_CHECKING:
    from distmon.record.record import Record

_Derived = TypeVar("_Derived")
NORMS: Final = 32
"""Observations whose gradient norms are kept."""
LOSSES: Final = 128
"""Steps whose losses are kept."""
FIRST: Final = 5
"""Steps whose median loss is where the run started."""
MIDDLES: Final = 32
"""Observations whose median losses are kept."""
SIGN_CHANGES: Final = 6
"""Changes of sign in the kept losses that show a loss which need not fall."""
FEWEST: Final = 3
"""Records before anything is compared with the past."""


class RunHistory:
    """The records before the present one. Everything in it can be saved as JSON."""

    def __init__(self) -> None:
        self.records = 0
        self.norms: deque[float] = deque(maxlen=NORMS)
        """Gradient norms before clipping, of the last observations."""
        self.first_norm: float | None = None
        """The gradient norm of the first observation."""
        self.losses: deque[float] = deque(maxlen=LOSSES)
        """Losses of the last steps."""
        self.first_losses: list[float] = []
        self.best: float | None = None
        """Lowest median loss of a record."""
        self.middles: deque[float] = deque(maxlen=MIDDLES)
        """Median losses of the last records."""
        self.lr_at_best: float | None = None
        """The learning rate of the record with the lowest median loss."""
        self.lrs: deque[float] = deque(maxlen=4)
        """Learning rates of the last observations."""
        self.lr_peak: float | None = None
        self.negative = False
        """Whether a loss was below zero: then its zero means nothing."""
        self.alternating = False
        """Whether optimizers were seen to step in turns."""
        self.shared: dict[str, Any] = {}
        """What several rules remember together."""
        self._derived: dict[str, Any] = {}

    def once(self, what: str, derive: Callable[[], _Derived]) -> _Derived:
        """Return what rules derive of the present record, derived for the first that asks."""
        if what not in self._derived:
            self._derived[what] = derive()
        found: _Derived = self._derived[what]
        return found

    def update(self, record: Record) -> None:
        """Take in a record, after the rules have compared it with what was before."""
        self._derived = {}
        lr = record.metrics.get("train/lr")
        if lr is not None and math.isfinite(lr):
            self.lrs.append(lr)
            self.lr_peak = max(lr, self.lr_peak or 0.0)
        if record.partial:
            return
        self.records += 1
        norm = record.metrics.get("monitor/grad_norm")
        if norm is not None and math.isfinite(norm) and norm > 0:
            self.norms.append(norm)
            self.first_norm = norm if self.first_norm is None else self.first_norm
        losses = [loss for loss in record.losses.values() if math.isfinite(loss)]
        self.losses.extend(losses)
        self.first_losses = (self.first_losses + losses)[:FIRST]
        if losses:
            self.negative |= min(losses) < 0
            middle = statistics.median(losses)
            self.middles.append(middle)
            if self.best is None or middle < self.best:
                self.best, self.lr_at_best = middle, self.lr
        self.alternating |= _alternates(record)

    @property
    def lr(self) -> float | None:
        """The learning rate of the observation before."""
        return self.lrs[-1] if self.lrs else None

    @property
    def norm_median(self) -> float | None:
        """The usual gradient norm; None at the start of a run."""
        return statistics.median(self.norms) if len(self.norms) >= FEWEST else None

    @property
    def norm_high(self) -> float | None:
        """The gradient norm that one of ten observations exceeded."""
        return float(np.percentile(self.norms, 90)) if len(self.norms) >= FEWEST else None

    @property
    def start(self) -> float | None:
        """The loss at the start of the run."""
        return statistics.median(self.first_losses) if self.first_losses else None

    @property
    def noise(self) -> float:
        """Standard deviation of the loss from step to step, without its trend and its outliers."""
        return self.once("noise", self._noise)

    @property
    def usual_rise(self) -> float:
        """The largest rise of the loss above its best that this run has recovered from lately."""
        return self.once("usual rise", self._usual_rise)

    def _noise(self) -> float:
        steps = [abs(after - before) for before, after in pairwise(self.losses)]
        usual = statistics.median(steps) if len(self.losses) >= FIRST else 0.0
        return usual / (0.6745 * math.sqrt(2))

    def _usual_rise(self) -> float:
        kept = np.array(self.middles)
        if len(kept) < FEWEST:
            return 0.0
        lowest = np.minimum.accumulate(kept)
        # What came after the newest best is not known to recover.
        recovered = (kept - lowest)[: int(np.flatnonzero(kept == lowest)[-1])]
        return float(recovered.max(initial=0.0))

    @property
    def has_fallen(self) -> bool:
        """Whether the loss has come down from its start, by a tenth of it and above its noise."""
        if self.start is None or self.best is None:
            return False
        return self.start - self.best > max(0.1 * abs(self.start), 3 * self.noise)

    @property
    def falls(self) -> bool:
        """Whether the loss fell over the kept steps, by more than its noise."""
        third = len(self.losses) // 3
        if third < FIRST:
            return True
        kept = [*self.losses]
        fall = statistics.fmean(kept[:third]) - statistics.fmean(kept[-third:])
        return fall > 3 * self.noise * math.sqrt(2 / third)

    def need_not_fall(self, record: Record) -> bool:
        """Return whether the loss of a healthy run of this kind may rise."""
        said = record.metrics.get("train/loss_expected_to_fall")
        if said is not None:
            return said == 0
        if self.alternating or _alternates(record):
            return True
        signs = np.sign([loss for loss in self.losses if loss])
        return int((np.diff(signs) != 0).sum()) >= SIGN_CHANGES

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        kept = {name: value for name, value in vars(self).items() if name[0] != "_"}
        return kept | {name: [*kept[name]] for name in ("norms", "losses", "middles", "lrs")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        fresh = RunHistory()
        fresh.records = int(state["records"])
        fresh.norms.extend(_floats(state["norms"]))
        fresh.losses.extend(_floats(state["losses"]))
        fresh.middles.extend(_floats(state.get("middles", [])))
        fresh.first_losses = _floats(state["first_losses"])
        fresh.lrs.extend(_floats(state["lrs"]))
        for name in ("best", "lr_peak", "lr_at_best", "first_norm"):
            value = state.get(name)
            setattr(fresh, name, None if value is None else float(value))
        fresh.shared = dict(state.get("shared", {}))
        fresh.negative, fresh.alternating = bool(state["negative"]), bool(state["alternating"])
        vars(self).update(vars(fresh))


def _alternates(record: Record) -> bool:
    """Return whether optimizers stepped in turns in the observed step."""
    return bool((record.ranks.get("alternating", np.zeros(1)) > 0).any())


def _floats(values: Iterable[Any]) -> list[float]:
    return [float(value) for value in values]
