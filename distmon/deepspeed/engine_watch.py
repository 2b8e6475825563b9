"""What a watched engine tells its monitor, and when."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch

from distmon.deepspeed.replaced import Replaced
from distmon.layout.deepspeed import EngineLayout
from distmon.monitor import Monitor
from distmon.record import Record

log = logging.getLogger("distmon")

STATE = "distmon"
"""Key of the monitor's state in the client state of a checkpoint."""
_BEFORE_CLEARING = ("_skip_invalid_grad_norm", "_update_scale", "clear_hp_grads")
"""Methods of optimizer wrappers that run between finding a bad gradient and throwing it away."""


class EngineWatch:
    """Stands between one engine and its monitor.

    Some methods of the engine, of this one and of no other, are replaced by ones that do the same
    and tell the monitor; `end` puts things back. Nothing that goes wrong here reaches the training.
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
        self._norm_shown = False
        self._written: Record | None = None
        self._told: set[str] = set()
        self._replaced = Replaced()
        self._norm_hook: torch.utils.hooks.RemovableHandle | None = None

    def begin(self) -> None:
        """Replace the methods and let the inner optimizer call the monitor."""
        replace = self._replaced.put
        replace(self._engine, "_take_model_step", self._telling_steps)
        replace(self._engine, "backward", self._telling_losses)
        replace(self._engine, "save_checkpoint", self._saving_state)
        replace(self._engine, "load_checkpoint", self._loading_state)
        replace(self._engine, "destroy", self._ending)
        wrapper = self._engine.optimizer
        if not self._layout.scales_loss:
            for name in _BEFORE_CLEARING:
                if hasattr(wrapper, name):
                    look_first = partial(self._looking_at_bad_gradients, name)
                    replace(wrapper, name, look_first)
        # Before the monitor's own hooks: a NaN is looked for while nothing has been stepped.
        self._norm_hook = self._layout.inner.register_step_pre_hook(lambda *_: self._show_norm())
        self.monitor.install_hooks()

    def end(self) -> None:
        """Take everything off and close the monitor. Safe to call twice."""
        self._replaced.undo()
        if self._norm_hook is not None:
            self._norm_hook.remove()
            self._norm_hook = None
        self.monitor.close()

    # -- the methods that are replaced -----------------------------------------------------------

    def _telling_steps(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def _take_model_step(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self._after_step()
            return result

        return _take_model_step

    def _telling_losses(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def backward(*args: Any, **kwargs: Any) -> Any:
            # Before it spreads: a weight that makes the loss NaN makes every gradient NaN.
            self._safely("loss", lambda: self._show_loss(args[0] if args else kwargs["loss"]))
            result = original(*args, **kwargs)
            self._safely("loss", lambda: self._add_loss(result))
            return result

        return backward

    def _saving_state(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def save_checkpoint(*args: Any, **kwargs: Any) -> Any:
            call = inspect.signature(original).bind(*args, **kwargs)
            state = self._safely("state", self.monitor.state_dict)
            if state is not None:
                theirs = call.arguments.get("client_state") or {}
                call.arguments["client_state"] = {**theirs, STATE: state}
            return original(*call.args, **call.kwargs)

        return save_checkpoint

    def _loading_state(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
            call = inspect.signature(original).bind(*args, **kwargs)
            path, client_state = original(*args, **kwargs)
            # Weights alone are the start of another run.
            if isinstance(client_state, dict) and STATE in client_state:
                state = client_state.pop(STATE)
                if not call.arguments.get("load_module_only"):
                    self._safely("state", lambda: self.monitor.load_state_dict(state))
            return path, client_state

        return load_checkpoint

    def _ending(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def destroy(*args: Any, **kwargs: Any) -> Any:
            self._safely("end", self.end)
            return original(*args, **kwargs)

        return destroy

    def _looking_at_bad_gradients(
        self, name: str, original: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Without loss scaling a gradient that is not finite is no accident of the scale."""
        always = name == "_skip_invalid_grad_norm"

        @wraps(original)
        def look_first(*args: Any, **kwargs: Any) -> Any:
            if always or getattr(self._engine.optimizer, "overflow", False):
                self.monitor.check(grad_norm=math.inf)
            return original(*args, **kwargs)

        return look_first

    # -- what the monitor is told ----------------------------------------------------------------

    def _show_norm(self) -> None:
        """The norm before clipping, while the gradients are there; once in a step."""
        if not self._norm_shown:
            self._norm_shown = True
            norm = self._safely("gradient norm", self._layout.grad_norm)
            if norm is not None:
                self.monitor.check(grad_norm=norm)

    def _show_loss(self, loss: Any) -> None:
        if isinstance(loss, torch.Tensor):
            self.monitor.check(loss=loss)

    def _add_loss(self, loss: Any) -> None:
        """`backward` returns its share of the loss whose gradient the next step applies."""
        if isinstance(loss, torch.Tensor):
            share = loss.detach().float()
            self._loss = share if self._loss is None else self._loss + share

    def _after_step(self) -> None:
        loss = self._safely("loss", self._take_loss)
        tokens = self._safely("tokens", self._count_tokens)
        self._norm_shown = False
        self.monitor.step(loss=loss, tokens=tokens, step=self._engine.global_steps)
        self._safely("DeepSpeed's monitors", self._write_events)

    def _take_loss(self) -> torch.Tensor | None:
        loss, self._loss = self._loss, None
        total = getattr(self._engine, "total_loss", None)
        if isinstance(total, torch.Tensor):
            # A pipeline has no backward() of its own; its last stage adds up the micro-batches.
            loss = (total.detach() / self._engine.gradient_accumulation_steps()).float()
        if loss is not None and self._layout.device.type == "cpu":
            # With masters on the host the step has waited for the device long ago.
            loss = loss.cpu()
        return loss

    def _count_tokens(self) -> float | None:
        return self._tokens() if callable(self._tokens) else self._tokens

    def _write_events(self) -> None:
        """The newest record to the monitors that the user enabled in the DeepSpeed config.

        From this thread and at once: wandb drops what arrives after a later step, and DeepSpeed
        writes to it from this thread at every step. So this waits for the record, unlike sinks.
        """
        theirs = getattr(self._engine, "monitor", None)
        if self._engine.global_rank != 0 or theirs is None or not theirs.enabled:
            return
        record = self.monitor.last_record
        if record is not None and record is not self._written:
            self._written = record
            at = self._engine.global_samples
            theirs.write_events([(tag, value, at) for tag, value in record.metrics.items()])

    def _safely(self, what: str, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except Exception as error:
            if what not in self._told:
                self._told.add(what)
                log.warning("%s could not be told to or by the monitor: %s", what, error)
            return None
