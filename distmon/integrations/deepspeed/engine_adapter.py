"""Connect a DeepSpeed engine to its monitor: steps, losses, gradient norms, checkpoints."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch

from distmon.integrations.patches import Patches
from distmon.layout.deepspeed import EngineLayout
from distmon.monitor import Monitor
from distmon.record.record import Record

log = logging.getLogger("distmon")

STATE = "distmon"
"""Key of the monitor's state in the client state of a checkpoint."""
_BEFORE_CLEARING = ("_skip_invalid_grad_norm", "_update_scale", "clear_hp_grads")
"""Methods of optimizer wrappers that run after a non-finite gradient is found and before it is
cleared."""


class EngineAdapter:
    """Connects one engine to its monitor.

    It patches some methods of the engine object so that they also report to the monitor; `end`
    restores them. Exceptions of the monitor do not reach the training loop.
    """

    def __init__(
        self,
        engine: Any,
        layout: EngineLayout,
        monitor: Monitor,
        tokens: float | Callable[[], float] | None = None,
    ) -> None:
        self.monitor = monitor
        self._engine = engine
        self._layout = layout
        self._tokens = tokens
        self._loss: torch.Tensor | None = None
        self._norm_reported = False
        self._written: Record | None = None
        self._patches = Patches()
        self._norm_hook: torch.utils.hooks.RemovableHandle | None = None

    def begin(self) -> None:
        """Patch the methods and install the monitor's hooks on the inner optimizer."""
        patch = self._patches.apply
        patch(self._engine, "_take_model_step", self._reporting_steps)
        patch(self._engine, "backward", self._reporting_losses)
        patch(self._engine, "save_checkpoint", self._saving_state)
        patch(self._engine, "load_checkpoint", self._loading_state)
        patch(self._engine, "destroy", self._ending)
        wrapper = self._engine.optimizer
        if not self._layout.scales_loss:
            for name in _BEFORE_CLEARING:
                if hasattr(wrapper, name):
                    patch(wrapper, name, partial(self._checking_nonfinite_gradients, name))
        # Before the monitor's own hooks, so that a NaN is located before any weight changes.
        self._norm_hook = self._layout.inner.register_step_pre_hook(lambda *_: self._report_norm())
        self.monitor.install_hooks()

    def end(self) -> None:
        """Remove patches and hooks, and close the monitor. Safe to call twice."""
        self._patches.undo()
        if self._norm_hook is not None:
            self._norm_hook.remove()
            self._norm_hook = None
        self.monitor.close()

    # -- patched methods -------------------------------------------------------------------------

    def _reporting_steps(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def _take_model_step(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self._after_step()
            return result

        return _take_model_step

    def _reporting_losses(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def backward(*args: Any, **kwargs: Any) -> Any:
            # Before the backward pass: a NaN loss makes every gradient NaN.
            self.monitor.faults.guard(
                "loss", lambda: self._report_loss(args[0] if args else kwargs["loss"])
            )
            result = original(*args, **kwargs)
            self.monitor.faults.guard("loss", lambda: self._add_loss(result))
            return result

        return backward

    def _saving_state(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def save_checkpoint(*args: Any, **kwargs: Any) -> Any:
            call = inspect.signature(original).bind(*args, **kwargs)
            state = self.monitor.faults.guard("state", self.monitor.state_dict)
            if state is not None:
                client_state = call.arguments.get("client_state") or {}
                call.arguments["client_state"] = {**client_state, STATE: state}
            return original(*call.args, **call.kwargs)

        return save_checkpoint

    def _loading_state(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
            call = inspect.signature(original).bind(*args, **kwargs)
            path, client_state = original(*args, **kwargs)
            # Loading only the weights starts a new run, so the monitor's state is dropped.
            if isinstance(client_state, dict) and STATE in client_state:
                state = client_state.pop(STATE)
                if not call.arguments.get("load_module_only"):
                    self.monitor.faults.guard("state", lambda: self.monitor.load_state_dict(state))
            return path, client_state

        return load_checkpoint

    def _ending(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def destroy(*args: Any, **kwargs: Any) -> Any:
            self.monitor.faults.guard("end", self.end)
            return original(*args, **kwargs)

        return destroy

    def _checking_nonfinite_gradients(
        self, name: str, original: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Report a non-finite gradient; without loss scaling it is an error, not an overflow."""
        always = name == "_skip_invalid_grad_norm"

        @wraps(original)
        def check_first(*args: Any, **kwargs: Any) -> Any:
            if always or getattr(self._engine.optimizer, "overflow", False):
                self.monitor.check(grad_norm=math.inf)
            return original(*args, **kwargs)

        return check_first

    # -- reports to the monitor ------------------------------------------------------------------

    def _report_norm(self) -> None:
        """Report the norm before clipping, once per step, while the gradients exist."""
        if not self._norm_reported:
            self._norm_reported = True
            norm = self.monitor.faults.guard("gradient norm", self._layout.grad_norm)
            if norm is not None:
                self.monitor.check(grad_norm=norm)

    def _report_loss(self, loss: Any) -> None:
        if isinstance(loss, torch.Tensor):
            self.monitor.check(loss=loss)

    def _add_loss(self, loss: Any) -> None:
        """Add the loss of a micro-batch, which `backward` returns divided by their number."""
        if isinstance(loss, torch.Tensor):
            share = loss.detach().float()
            self._loss = share if self._loss is None else self._loss + share

    def _after_step(self) -> None:
        loss = self.monitor.faults.guard("loss", self._take_loss)
        tokens = self.monitor.faults.guard("tokens", self._count_tokens)
        self._norm_reported = False
        self.monitor.step(loss=loss, tokens=tokens, step=self._engine.global_steps)
        self.monitor.faults.guard("DeepSpeed's monitors", self._write_events)

    def _take_loss(self) -> torch.Tensor | None:
        loss, self._loss = self._loss, None
        total = getattr(self._engine, "total_loss", None)
        if isinstance(total, torch.Tensor):
            # A pipeline engine does not call backward(); its last stage adds up the micro-batches.
            loss = (total.detach() / self._engine.gradient_accumulation_steps()).float()
        if loss is not None and self._layout.device.type == "cpu":
            # With masters on the host, the step has already waited for the device.
            loss = loss.cpu()
        return loss

    def _count_tokens(self) -> float | None:
        return self._tokens() if callable(self._tokens) else self._tokens

    def _write_events(self) -> None:
        """Write the newest record to the monitors that the DeepSpeed config enables.

        It runs on this thread and waits for the record, unlike the sinks: DeepSpeed writes to wandb
        from this thread at every step, and wandb drops values of earlier steps.
        """
        deepspeed_monitor = getattr(self._engine, "monitor", None)
        if self._engine.global_rank != 0 or deepspeed_monitor is None:
            return
        if not deepspeed_monitor.enabled:
            return
        record = self.monitor.last_record
        if record is not None and record is not self._written:
            self._written = record
            samples = self._engine.global_samples
            events = [(tag, value, samples) for tag, value in record.metrics.items()]
            deepspeed_monitor.write_events(events)
