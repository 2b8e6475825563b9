"""Ranks that attach together: what one of them does alone, and what all of them must know first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeVar

import torch

from distmon.config import MonitorConfig
from distmon.errors import DistmonError, PlanMismatchError
from distmon.reduce.channel import Channel
from distmon.reduce.majority import by_value
from distmon.reduce.process_group import Ranks

_Result = TypeVar("_Result")


class LocalSteps:
    """Runs steps that may fail on this rank alone, so that every rank reaches the agreement."""

    def __init__(self) -> None:
        self._error: Exception | None = None

    def run(self, step: Callable[[], _Result], otherwise: _Result) -> _Result:
        """Return the result of `step`, or `otherwise` when it or an earlier step failed."""
        if self._error is None:
            try:
                return step()
            except Exception as error:
                self._error = error
        return otherwise

    @property
    def failed(self) -> bool:
        """Whether a step has failed here."""
        return self._error is not None

    def agree(self, ranks: Ranks, hashes: Mapping[str, int]) -> None:
        """Raise on every rank when one failed or differs; prefer this rank's own error."""
        try:
            ranks.agree(hashes, self._error is None)
        except DistmonError:
            if self._error is not None:
                raise self._error from None
            raise


@dataclass(frozen=True)
class Begin:
    """What all ranks know before anything is built; the same on each of them."""

    enabled: bool
    """Whether they continue; False when monitoring is disabled on all of them."""
    failed: bool
    """A rank has failed: all of them raise at the agreement."""
    spectra: bool
    """All of them estimate spectral norms."""


def agree_to_begin(ranks: Ranks, settings: MonitorConfig, local: LocalSteps) -> Begin:
    """Compare what ranks must know of each other before they create further groups.

    Raises on every rank when they differ in it. A rank whose config is invalid takes part with the
    default one, and raises its error when all ranks have met in the end.
    """
    with_spectra = "spectra" in settings.inside.kinds
    mine = [settings.enabled, settings.transport == "device", with_spectra, local.failed]
    table = ranks.gather(torch.tensor(mine, dtype=torch.int64))
    enabled, on_device, spectra, failed = table.T.tolist()
    if not any(failed):
        for what, values in (("enabled", enabled), ("transport: device", on_device)):
            if len({*values}) > 1:
                words = by_value([bool(value) for value in values])
                raise PlanMismatchError(
                    f"ranks have different settings of {what} ({words}); set the same on every rank"
                )
    return Begin(any(failed) or all(enabled), any(failed), all(spectra))


def open_channels(
    ranks: Ranks, settings: MonitorConfig, begin: Begin, undo: ExitStack
) -> Channel | None:
    """Create the groups that all ranks need; return that of the spectral norms."""
    if begin.failed:
        return None
    ranks.open(settings.transport)
    if not begin.spectra:
        return None
    channel = ranks.open_channel()
    undo.callback(channel.close)
    return channel
