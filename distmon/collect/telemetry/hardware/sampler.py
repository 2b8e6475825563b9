"""Read the device periodically in a background thread, so that the training thread never waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

from distmon.collect.telemetry.hardware.device_queries import error_text
from distmon.collect.telemetry.hardware.reading import (
    HardwareReader,
    HardwareReading,
    OpenReader,
    Summary,
)


class HardwareSampler:
    """Samples one device per rank. A daemon thread opens, reads and closes it, so a driver that
    hangs blocks nothing else.

    `period_s` is the time between readings, `retry_s` the time before a device with a problem is
    opened again. A driver that does not respond for `patience_s` is a problem too. If the device
    cannot be opened at the start, `latest().problem` has the reason and the thread ends.
    """

    def __init__(
        self,
        open_reader: OpenReader,
        period_s: float = 1.0,
        retry_s: float = 30.0,
        patience_s: float = 10.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._open_reader = open_reader
        self._period_s = period_s
        self._retry_s = retry_s
        self._patience_s = patience_s
        self._now = now
        self._lock = threading.Lock()  # held for assignments only, never during a driver call
        self._latest = HardwareReading()
        self._since_take = Summary()
        self._unreported: str | None = None
        self._busy_since: float | None = None
        self._device: str | None = None
        self._missing: dict[str, str] = {}
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="distmon-hardware", daemon=True)
        self._thread.start()

    @property
    def device(self) -> str | None:
        """Name and UUID of the device; None until it has been opened."""
        return self._device

    @property
    def missing(self) -> dict[str, str]:
        """Why a field is NaN, by field, as of the newest reading."""
        return self._missing

    def latest(self) -> HardwareReading:
        """Return the newest reading; empty before the first. Never waits for the driver."""
        with self._lock:
            self._check_timeout()
            return self._latest

    def take(self) -> HardwareReading:
        """Return the readings since the last `take()` as one, and start a new summary.

        Without a new reading it repeats the newest one, with `samples` 0. A `problem` is reported
        once, and again only after the device has responded in between.
        """
        with self._lock:
            self._check_timeout()
            summary, self._since_take = self._since_take.result(), Summary()
            problem, self._unreported = self._unreported, None
            taken = summary if summary.samples else self._latest
            return replace(taken, samples=summary.samples, problem=problem)

    def close(self, timeout_s: float = 1.0) -> None:
        """End the thread; it is abandoned if it still hangs in the driver after `timeout_s`."""
        self._ending.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        reader: HardwareReader | None = None
        while not self._ending.is_set():
            self._busy_since = self._now()
            reader, reading = self._read(reader)
            with self._lock:
                self._busy_since = None
                self._publish(reading)
            if self._device is None:
                return
            self._ending.wait(self._period_s if reading.problem is None else self._retry_s)
        if reader is not None:
            reader.close()

    def _read(self, reader: HardwareReader | None) -> tuple[HardwareReader | None, HardwareReading]:
        """Read the device, opening it first if needed; close the reader after a problem."""
        try:
            if reader is None:
                reader, reason = self._open_reader()
                if reader is None:
                    return None, HardwareReading(problem=reason)
                self._device = reader.device
            reading = reader.read()
            self._missing = dict(reader.missing)
            if reading.problem is not None:
                reader.close()
                reader = None
            return reader, reading
        except Exception as error:
            return None, HardwareReading(problem=error_text(error))

    def _publish(self, reading: HardwareReading) -> None:
        if reading.problem is None:
            self._since_take.add(reading)
        elif self._latest.problem is None:
            self._unreported = reading.problem
        self._latest = reading

    def _check_timeout(self) -> None:
        """Publish a problem when the driver hangs, which the sampler's thread itself cannot do."""
        busy = 0.0 if self._busy_since is None else self._now() - self._busy_since
        if busy > self._patience_s and self._latest.problem is None:
            seconds = f"{self._patience_s:g} s"
            self._publish(HardwareReading(problem=f"the driver has not responded for {seconds}"))
