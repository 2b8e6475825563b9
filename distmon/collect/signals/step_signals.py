"""The signals of an observed step, as fields of the rank slot."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

import torch
from torch import nn

from distmon.collect.signals.backward_passes import BackwardPasses
from distmon.collect.signals.forward_inputs import ForwardHook, ForwardInputs
from distmon.collect.signals.host_numbers import HostNumbers
from distmon.collect.signals.weight_jumps import WeightJumps
from distmon.native import NativeModule
from distmon.sampling.plan import SamplePlan

FIELDS: Final = (
    "stale_grad_norm",
    "local_grad_norm",
    "repeated_backward",
    "batch_hash",
    "weight_jump",
    "weight_jump_expected",
    "weight_jump_row",
    "forward_passes",
    "backward_passes",
    "eval_layers",
    "mode_layers",
    "eval_layer_row",
    "batchnorm_layers",
    "alternating",
    "adaptive",
    "holds_all",
    "decay_per_step",
)
"""Rank metrics of `take`. On an accelerator the first seven are those of the observation before."""
_ON_DEVICE: Final = 7
_MOST_FAULTS: Final = 3
"""Observations in a row that may fail before the signals are disabled."""
log = logging.getLogger("distmon")
Readings = Callable[[], tuple[SamplePlan, torch.Tensor | None]]
"""Returns the plan, whose snapshot holds the sampled weights, and the rows of this observation."""


class StepSignals:
    """Armed for observed steps; in the others each hook costs one check."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Sequence[torch.Tensor]],
        names_of_parameters: Mapping[int, int],
        matrices: list[int],
        readings: Readings,
        device: torch.device,
        hashes: bool = True,
        adaptive: float = math.nan,
        holds_all: bool = False,
        native: NativeModule | None = None,
        decay_per_step: Callable[[], float] = lambda: math.nan,
    ) -> None:
        """`optimizers`: the parameters of each; `names_of_parameters`: row by id of parameter.

        `adaptive` and `holds_all` are sent as they are; `native` is faster on a CPU.
        """
        self._decay_per_step = decay_per_step
        self._constants = {"adaptive": adaptive, "holds_all": float(holds_all)}
        self._backward = BackwardPasses(optimizers, device, native)
        self._forward = ForwardInputs(models, device, hashes)
        self._jumps = WeightJumps(readings()[0], matrices, device, native)
        self._readings = readings
        self._rows = names_of_parameters
        self._several = len(optimizers) > 1
        self._host = HostNumbers()
        self._passes_at_step: list[tuple[int, int]] = []
        """Forwards and backward passes before each step of an optimizer."""
        self.others_train = False
        """Whether other models are trained in turn with this one, each with a monitor."""
        self._armed_step = 0
        self._faults = 0
        self.switch_hooks: Callable[[bool], None] = lambda _: None
        """Called with whether the forwards of the coming step are observed."""

    @property
    def armed(self) -> bool:
        """Whether the coming step is observed."""
        return self._armed_step > 0

    @property
    def hook_seconds(self) -> float:
        """Time that the hooks took in forward and backward passes so far."""
        return self._forward.seconds + self._backward.seconds

    @property
    def forward_hook(self) -> Callable[..., None]:
        """The hook to run before the forward of each model, with keyword arguments."""
        return ForwardHook(self._forward)

    def step_begins(self, coming: int, next_observation: int) -> None:
        """Arm the hooks when the coming step is observed, else remove them."""
        if coming == next_observation and self._faults < _MOST_FAULTS:
            self._armed_step, self._passes_at_step = coming, []
            try:
                self._backward.arm()
                self._forward.arm()
                self.switch_hooks(True)
            except Exception as error:
                self._fail(error)
        elif self._armed_step:
            self.close()
        else:
            self.switch_hooks(False)

    def optimizer_begins(self) -> None:
        """Note that an optimizer steps."""
        if self._armed_step and self._several:
            self._passes_at_step.append((self._forward.count, self._backward.count))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Ignore the backward passes that the monitor runs itself."""
        with self._backward.paused():
            yield

    def take(self) -> dict[str, float]:
        """Return the fields of this observation; NaN for what is not known. Never raises."""
        fields = dict.fromkeys(FIELDS, math.nan)
        step = self._armed_step
        self.close()
        try:
            fault = self._backward.fault or self._forward.fault
            if fault is not None:
                raise fault
            if step:
                fields |= self._fields(step)
                self._faults = 0
        except Exception as error:
            self._fail(error)
        return fields

    def _fail(self, error: Exception) -> None:
        self._faults += 1
        self.close()
        self._backward.fault = self._forward.fault = None
        if self._faults == 1:
            log.warning("distmon: step signals failed (%r); continuing without them", error)

    def _fields(self, step: int) -> dict[str, float]:
        fields: dict[str, float] = {}
        passes, forwards = self._backward, self._forward
        jump = self._jumps.compare(step, *self._readings())
        numbers = self._numbers(jump)
        if numbers is not None:
            fields |= dict(zip(FIELDS[:_ON_DEVICE], numbers, strict=True))
        seen = bool(passes.known and passes.count)
        for name in ("stale_grad_norm", "local_grad_norm"):
            fields[name] = math.sqrt(fields.get(name, math.nan)) if seen else math.nan
        if seen:
            fields["backward_passes"] = float(passes.count)
        else:
            fields["repeated_backward"] = math.nan
        if forwards.count:
            fields["forward_passes"] = float(forwards.count)
            fields["mode_layers"] = float(forwards.layers)
            fields["eval_layers"] = float(len(forwards.in_eval))
            fields["batchnorm_layers"] = float(forwards.batchnorm_layers)
            fields["eval_layer_row"] = float(self._first_row(forwards.in_eval))
        fields |= self._constants
        fields["decay_per_step"] = self._decay_per_step()
        fields["alternating"] = float(self._alternates())
        return fields

    def _alternates(self) -> bool:
        """Return whether optimizers take turns: with forwards or backward passes between them."""
        if not self._passes_at_step:
            return self.others_train
        forwards = {forward for forward, _ in self._passes_at_step}
        # Optimizers that run within a backward pass step before it has reached what is hooked.
        backwards = {backward for _, backward in self._passes_at_step if backward}
        return self.others_train or len(forwards) > 1 or len(backwards) > 1

    def _numbers(self, jump: torch.Tensor | list[float] | None) -> list[float] | None:
        """Return the first fields, as far as they are on the host."""
        passes, batch = self._backward.numbers(), self._forward.hash()
        if isinstance(passes, list) and isinstance(batch, float):
            found = [math.nan] * 3 if jump is None else [float(number) for number in jump]
            return [*passes, batch, *found]
        assert isinstance(passes, torch.Tensor)  # both are on the same device
        assert isinstance(batch, torch.Tensor)
        device = passes.device
        unknown = torch.full((3,), math.nan, dtype=torch.float64, device=device)
        where = unknown if jump is None else torch.as_tensor(jump, device=device)
        return self._host.exchange(torch.cat([passes, batch[None], where]))

    def close(self) -> None:
        """Remove the hooks of the parameters."""
        self._armed_step = 0
        self._backward.disarm()
        self._forward.disarm()
        self.switch_hooks(False)

    def _first_row(self, layers: Sequence[nn.Module]) -> int:
        """Return the row of the first weight in these layers; -1 when they have none."""
        for layer in layers:
            for parameter in layer.parameters(recurse=False):
                if id(parameter) in self._rows:
                    return self._rows[id(parameter)]
        return -1
