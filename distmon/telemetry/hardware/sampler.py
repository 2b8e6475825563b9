"""Reads the device now and then in a thread of its own; the training thread only picks up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

from distmon.telemetry.hardware.field_by_field import in_words
from distmon.telemetry.hardware.reading import (
    HardwareReader,
    HardwareReading,
    OpenReader,
    Summary,
)


class HardwareSampler:
    """One per rank. Opening, reading and closing happen in a daemon thread, so a driver that
    hangs holds up nobody.

    `period_s` lies between readings, `retry_s` between attempts while the device has a problem:
    it is then opened anew. A driver that has not answered for `patience_s` is a problem too. When
    nothing can be opened at the start, the reason stays in `latest().problem` and the thread ends.
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
        self._lock = threading.Lock()  # held for assignments only, never during a call out
        self._latest = HardwareReading()
        self._since_take = Summary()
        self._untold: str | None = None
        self._busy_since: float | None = None
        self._device: str | None = None
        self._missing: dict[str, str] = {}
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="distmon-hardware", daemon=True)
        self._thread.start()

    @property
    def device(self) -> str | None:
        """Name and UUID of the device that is read; None until it has been opened."""
        return self._device

    @property
    def missing(self) -> dict[str, str]:
        """Why a field is NaN, by field, as of the newest reading."""
        return self._missing

    def latest(self) -> HardwareReading:
        """The newest reading; empty before the first. Neither waits nor asks the driver."""
        with self._lock:
            self._notice_silence()
            return self._latest

    def take(self) -> HardwareReading:
        """What was read since the last `take()`, as one reading; counting starts anew.

        Without a reading since then it is the newest one again, with `samples` 0. `problem` is
        told once, not again before the device has answered in between.
        """
        with self._lock:
            self._notice_silence()
            summary, self._since_take = self._since_take.result(), Summary()
            problem, self._untold = self._untold, None
            taken = summary if summary.samples else self._latest
            return replace(taken, samples=summary.samples, problem=problem)

    def close(self, timeout_s: float = 1.0) -> None:
        """End the thread; one that hangs in the driver is left behind after `timeout_s`."""
        self._ending.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        reader: HardwareReader | None = None
        while not self._ending.is_set():
            self._busy_since = self._now()
            reader, reading = self._look(reader)
            with self._lock:
                self._busy_since = None
                self._publish(reading)
            if self._device is None:
                return
            self._ending.wait(self._period_s if reading.problem is None else self._retry_s)
        if reader is not None:
            reader.close()

    def _look(self, reader: HardwareReader | None) -> tuple[HardwareReader | None, HardwareReading]:
        """Read, after opening where needed. A reader of a device with a problem is given up."""
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
            return None, HardwareReading(problem=in_words(error))

    def _publish(self, reading: HardwareReading) -> None:
        if reading.problem is None:
            self._since_take.add(reading)
        elif self._latest.problem is None:
            self._untold = reading.problem
        self._latest = reading

    def _notice_silence(self) -> None:
        """A driver that hangs reports nothing, so the one who asks for a reading has to see it."""
        busy = 0.0 if self._busy_since is None else self._now() - self._busy_since
        if busy > self._patience_s and self._latest.problem is None:
            seconds = f"{self._patience_s:g} s"
            self._publish(HardwareReading(problem=f"the driver has not answered for {seconds}"))
