"""Steps between observations, counted in compiled code.

Between observations a step is a number, a loss, a gradient norm and the times of its phases to
keep. The compiled lane takes these calls over from the monitor; whatever it
cannot do it passes on to the monitor's own methods. What it has counted is settled, that is, given
to the parts of the monitor, before anything looks at them, and before the next step is prepared
where that is to be observed.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from distmon.collect.telemetry.phases import PHASE_NUMBERS, STEPS
from distmon.native import NativeModule

if TYPE_CHECKING:
    from distmon.runtime.assembly import Parts

MOST_STEPS = 4096
"""Steps that the lane counts at most before they are settled."""


class PythonLane:
    """Stands for the lane where there is none: every step is the monitor's own."""

    calls: dict[str, Callable[..., None]]
    """The compiled entries of the lane, by the method of the monitor that they replace."""

    def __init__(self) -> None:
        self.calls = {}

    def settle(self) -> None:
        """Give what was counted to the parts."""

    def open(self) -> None:
        """Let the lane count the coming steps, as far as nothing else is to be done in them."""


class CompiledLane(PythonLane):
    """Counts idle steps of a monitor whose weights are on the CPU."""

    def __init__(
        self,
        parts: Parts,
        own: dict[str, Callable[..., None]],
        prepare: Callable[[], None],
        stepped: Callable[[], None],
        native: NativeModule,
    ) -> None:
        """`own`: the monitor's methods, in the order of the module; `stepped`: after each step.

        `prepare` is called after a step that was counted, where the lane can go no further.
        """
        super().__init__()
        self._parts = parts
        self._stepped = stepped
        self._settling = threading.RLock()
        self._is_settled = True
        optimizers = max(1, len(parts.cycle.observer.rows.optimizers))
        number = PHASE_NUMBERS
        self._lane = native.idle_lane(
            (*own.values(), prepare),
            optimizers,
            MOST_STEPS,
            STEPS,
            number["optimizer"],
            number["other"],
        )
        parts.telemetry.phases.lane = self._lane
        parts.cost.lane = self._lane
        self.calls = {name: getattr(self._lane, name) for name in own}

    def settle(self) -> None:
        if self._is_settled:
            return
        with self._settling:  # another thread must not look at the parts before all is given
            counted = self._lane.take()
            if counted is not None:
                self._give(counted)
            self._is_settled = True

    def _give(self, counted: dict[str, Any]) -> None:
        """Give each part its share, whatever fails in the others; the steps count first."""
        parts, steps = self._parts, counted["steps"]
        if steps:
            parts.schedule.pass_to(steps[-1], counted["stride"])
        for give in (self._give_losses, self._give_telemetry, parts.finite_watch.take_in_idle):
            try:
                give(counted)
            except Exception as error:
                parts.faults.report("step", error)
        if steps:
            self._stepped()

    def _give_losses(self, counted: dict[str, Any]) -> None:
        self._parts.cycle.observer.losses.extend(counted["steps"], counted["losses"])

    def _give_telemetry(self, counted: dict[str, Any]) -> None:
        parts, steps = self._parts, len(counted["steps"])
        if steps:
            parts.telemetry.steps.tick_idle(
                counted["last"], steps, counted["tokens"], counted["samples"]
            )
            parts.cost.add_idle(counted["seconds"])
            if counted["lr"] is not None:
                parts.cycle.lr = counted["lr"]
        if counted["phases"] is not None:
            parts.telemetry.phases.take_in(*counted["phases"])

    def open(self) -> None:
        parts = self._parts
        schedule, phases = parts.schedule, parts.telemetry.phases
        if schedule.coming_is_observed or not (
            schedule.begun
            and parts.cycle.steps_may_pass
            and parts.cycle.observer.gain.at_rest
            and parts.cycle.observer.inside.at_rest
            and parts.telemetry.is_idle
            and parts.finite_watch.is_idle
            and parts.actions.stopped is None
        ):
            return
        with self._settling:  # another thread may be at the end of it
            self._is_settled = False  # first: Ctrl-C may come after the next call
            self._lane.open_until(
                schedule.completed,
                schedule.stride,
                phases.until(schedule.next_observation),
                parts.finite_watch.expects_optimizer,
                phases.active,
                phases.since,
            )


def idle_lane(
    parts: Parts,
    own: dict[str, Callable[..., None]],
    prepare: Callable[[], None],
    stepped: Callable[[], None],
    native: NativeModule | None,
) -> PythonLane:
    """Return the compiled lane where the native module is used, else none."""
    # The module's clock is that of `time.perf_counter` on Linux.
    if native is None or not sys.platform.startswith("linux"):
        return PythonLane()
    return CompiledLane(parts, own, prepare, stepped, native)
