"""`wandb.watch(log="all")`: histograms of all weights and gradients, made in forward and backward.

wandb runs offline: what it writes stays in the folder.
"""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Iterator
from math import sqrt
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch

from distmon.bench.contender import (
    Answer,
    Contender,
    Norms,
    Observed,
    Session,
    trainable_parameters,
)

PATIENCE_S = 60.0
"""How long wandb's service process may take to end its file."""


class WatchSession(Session):
    """One offline run; the hooks are on the model in its own steps only."""

    def __init__(self, observed: Observed) -> None:
        import wandb

        self._model = observed.model
        self._folder = observed.folder
        with mock.patch.dict(os.environ, {"WANDB_SILENT": "true", "WANDB_MODE": "offline"}):
            self._run = wandb.init(
                dir=self._folder, project="benchmark", mode="offline", reinit=True
            )

    def enable(self) -> None:
        # A number of its own for every call would give every step new tags.
        self._run.watch(self._model, log="all", log_freq=1, idx=0)

    def after_step(self, loss: torch.Tensor) -> None:
        self._run.log({"loss": loss.item()})  # sends the histograms too

    def disable(self) -> None:
        self._run.unwatch(self._model)

    def detach(self) -> None:
        self._run.finish()

    def answer(self) -> Answer:
        last = self._written()
        return {
            name: _bounds(last[f"parameters/{name}"], last.get(f"gradients/{name}"))
            for name, _ in trainable_parameters(self._model)
        }

    def tags(self) -> int:
        return sum(not tag.startswith("_") for tag in self._written())

    def _written(self) -> dict[str, Any]:
        """Return the last observation in wandb's file, by tag."""
        (path,) = self._folder.glob("wandb/offline-run-*/*.wandb")
        deadline = time.monotonic() + PATIENCE_S
        while True:
            messages = [*_messages(path)]
            if any(message.HasField("exit") for message in messages):
                break
            if time.monotonic() > deadline:
                raise TimeoutError(f"wandb has not ended {path} within {PATIENCE_S:.0f} s")
            time.sleep(0.1)
        *_, last = (message.history for message in messages if message.HasField("history"))
        found: dict[str, Any] = {}
        for item in last.item:
            tag, *part = item.nested_key or [item.key]
            value = json.loads(item.value_json)
            if part:  # a histogram comes as its type, bins and values
                found.setdefault(tag, {})[part[0]] = value
            else:
                found[tag] = value
        return found


def _bounds(weight: Any, grad: Any) -> Norms:
    """Return the bounds of the norms: every value of a histogram lies inside of its bin."""
    weight_norm, weight_error = _norm_within(weight)
    if grad is None:
        return Norms(weight=weight_norm, weight_error=weight_error, certain=True)
    grad_norm, grad_error = _norm_within(grad)
    return Norms(
        weight=weight_norm,
        grad=grad_norm,
        weight_error=weight_error,
        grad_error=grad_error,
        certain=True,
    )


def _norm_within(histogram: Any) -> tuple[float, float]:
    """Return the middle of the possible range and half its width."""
    low = high = 0.0
    edges = zip(histogram["bins"], histogram["bins"][1:], strict=False)
    for count, (left, right) in zip(histogram["values"], edges, strict=True):
        nearest = 0.0 if left <= 0 <= right else min(abs(left), abs(right))
        low += count * nearest**2
        high += count * max(abs(left), abs(right)) ** 2
    return (sqrt(high) + sqrt(low)) / 2, (sqrt(high) - sqrt(low)) / 2


def _messages(path: Path) -> Iterator[Any]:
    """Yield the messages of wandb's file.

    It is a LevelDB log: 7 bytes, then blocks of 32 KiB with fragments of messages (checksum,
    length, kind); a message ends with a fragment of kind 1 or 4.
    """
    from wandb.proto import wandb_internal_pb2

    new_record: Any = wandb_internal_pb2.Record  # type: ignore[attr-defined]
    content = path.read_bytes()
    place, message = 7, b""
    while place + 7 <= len(content):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, place)
        message += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4) and place <= len(content):
            record = new_record()
            record.ParseFromString(message)
            yield record
            message = b""


WANDB_WATCH: Final = Contender(
    name="wandb.watch",
    description='wandb.watch(log="all", log_freq=1), offline, and wandb.log in every step',
    timing="whole step",
    begin=WatchSession,
    finds=("weight", "grad"),
    in_growth=False,
    package="wandb",
    install="pip install 'distmon[wandb]'",
)
