"""What is measured in the model's own calls: gradient gain, activations, spectral norms."""

from __future__ import annotations

from distmon.collect.gradient_gain import BackwardNorms
from distmon.collect.inside.inside import Inside
from distmon.runtime.fault_log import FaultLog
from distmon.runtime.observer import Observer


class ModelWatch:
    """Arms the hooks of the blocks on observed steps, and takes sweeps of spectral norms on.

    What fails here is reported, and ends nothing else.
    """

    def __init__(self, observer: Observer, faults: FaultLog) -> None:
        self._observer = observer
        self._faults = faults
        self._every = observer.config.inside.every
        self._looks_inside = bool(observer.inside.catalog)

    @property
    def inside_is_due(self) -> bool:
        """Whether the inside of the model is measured at the coming observation, or this one."""
        return self._looks_inside and (self._observer.sent % self._every) == 0

    def arm(self, observed: bool, first: bool) -> None:
        """Arm the hooks for the coming step if it is observed, else disarm them.

        `first`: it is the first step of the process.
        """
        gain, inside = self._observer.gain, self._observer.inside
        if not observed and gain.at_rest and inside.at_rest:
            return
        self._arm("gradient gain", gain, observed, first)
        if self._looks_inside:
            self._arm("inside", inside, observed and self.inside_is_due, first)

    def _arm(self, what: str, hooks: BackwardNorms | Inside, wanted: bool, first: bool) -> None:
        if fault := hooks.take_fault():
            self._faults.report(what, fault)
        try:
            hooks.arm(wanted, first=first)
        except Exception as error:
            self._faults.report(what, error)

    def advance_spectra(self, begin: bool) -> None:
        """Take the estimate of spectral norms on; `begin` a new one unless one is under way."""
        if not self._looks_inside:
            return
        try:
            spectra = self._observer.spectra
            found = spectra.advance()
            if begin and not spectra.busy:
                spectra.begin()
                found = spectra.advance() if found is None else found
            if found is not None:
                self._observer.inside.spectra = found
        except Exception as error:
            self._faults.report("spectra", error)

    def close(self) -> None:
        """Remove the hooks of the blocks."""
        self._observer.gain.remove()
        self._observer.inside.remove()
        self._observer.spectra.close()
