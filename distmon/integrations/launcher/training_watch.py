"""Find model, optimizers, losses and steps of an unmodified script, and attach monitors to them."""

from __future__ import annotations

import atexit
import functools
import json
import logging
import os
import warnings
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from distmon.attach import attach, is_engine
from distmon.config import MonitorConfig, load_config
from distmon.integrations.auto.loop_signals import LoopSignals
from distmon.integrations.launcher.command import VARIABLE, leave_children_alone
from distmon.integrations.launcher.followed_model import (
    FollowedModel,
    RunFolders,
    Start,
    has_monitor,
    steps_taken,
)
from distmon.integrations.launcher.model_search import ModelSearch
from distmon.integrations.launcher.rendezvous import (
    all_ranks_meet,
    is_side_process,
    ranks_are_known,
)
from distmon.integrations.launcher.training_thread import TrainingThread
from distmon.integrations.patches import Patches
from distmon.monitor import Monitor
from distmon.untrusted.terminal import terminal

log = logging.getLogger("distmon")
_WITHOUT_LOSS: Final = 10
"""Steps after which a loss that was never found is mentioned."""


def begin() -> TrainingWatch:
    """Watch the training of this process, with the settings that `distmon run` was given."""
    watch = TrainingWatch(_settings())
    watch.begin()
    return watch


def enable_deepspeed() -> None:
    """Monitor DeepSpeed engines; their config need not have a block."""
    from distmon.integrations.deepspeed import enable

    enable(_settings())


def _settings() -> MonitorConfig:
    given = json.loads(os.environ.get(VARIABLE) or "{}")
    return load_config(given.get("config"), given.get("overrides") or {})


class TrainingWatch:
    """Listens to torch in one process. A fault in it is logged once, and ends the watching."""

    def __init__(self, settings: MonitorConfig, console: Console | None = None) -> None:
        self._settings = settings
        self._console = console or terminal(stderr=True)
        self._search = ModelSearch()
        self._followed: list[FollowedModel] = []
        self._meetings = 0
        self._patches = Patches()
        self._signals = LoopSignals(self)
        self._looking: RemovableHandle | None = None
        self._ignored_warning: Any = None
        self._hooks: list[RemovableHandle] = []
        self._folders = RunFolders(settings.run_dir)
        self._thread = TrainingThread()
        self._has_stepped = False
        """An optimizer that no monitor has made a step."""
        self._ended = not settings.enabled
        self._pid = os.getpid()

    def begin(self) -> None:
        """Install the hooks."""
        if self._ended:
            return
        self._patches.apply(torch.optim.Optimizer, "__init__", self._noting_optimizers)
        self._hooks.append(register_optimizer_step_pre_hook(self._before_step))
        self._hooks.append(register_optimizer_step_post_hook(self._after_step))
        self._signals.begin()
        if dist.is_available():
            for owner in (dist, dist.distributed_c10d):
                self._patches.apply(owner, "destroy_process_group", self._closing_first)
        atexit.register(self.close)
        os.register_at_fork(after_in_child=self._forget)

    @property
    def monitors(self) -> list[Monitor]:
        """The open monitors, in the order in which they were attached."""
        return [followed.step.monitor for followed in self._followed]

    @property
    def _followed_here(self) -> list[FollowedModel]:
        """Those that what happens in the calling thread may belong to."""
        return [] if self._thread.is_other else [*self._followed]

    def close(self) -> None:
        """Close the monitors; a child process that was forked leaves them alone."""
        if os.getpid() != self._pid:
            return
        for followed in [*self._followed]:
            followed.close()
        if not self._meetings and not self._ended and self._search.optimizers:
            names = ", ".join(sorted({type(each).__name__ for each in self._search.optimizers}))
            reason = f"no module has all parameters of {names}"
            if not self._has_stepped:
                reason = f"the script ended before the first step of {names}"
            self._say(f"no monitor was attached: {reason}")
        self._end()

    # -- hooks -----------------------------------------------------------------------------------

    def _noting_optimizers(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def __init__(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            with self._thread.lock:
                if not self._ended:
                    self._search.add(optimizer)
                    self._look()

        return __init__

    def _closing_first(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def destroy_process_group(group: Any = None) -> Any:
            if group is None or group is dist.GroupMember.WORLD:
                self.close()
            return original(group)

        return destroy_process_group

    def _look(self) -> None:
        # A global hook costs a microsecond for every module call, so it is there only while a
        # model is searched for.
        if self._looking is None:
            # torch.compile warns of global hooks; this one is gone before anything is traced.
            warnings.filterwarnings("ignore", "Using `torch.compile.* global hooks on modules")
            self._ignored_warning = warnings.filters[0]
            self._looking = register_module_forward_pre_hook(self._on_call)

    def _on_call(self, module: nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling() or not (module.training and torch.is_grad_enabled()):
            return
        if is_engine(module):  # its integration attaches
            self._leave(self._search.optimizers)
        elif ranks_are_known() and self._search.call(module):
            self._guarded(lambda: self._attach(module))

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        self._thread.stepping = optimizer
        for followed in self._followed_here:  # a step that is stopped by a rule ends its monitor
            followed.step.optimizer_begins(optimizer)
        # Not in the first step of a closure, which has not called the model yet.
        if self._search.has_called:
            self._guarded(lambda: self._attach_late(optimizer))

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        if self._search.optimizers:
            self._has_stepped = True
            self._guarded(lambda: self._attach_late(optimizer, has_stepped=True))
        self._thread.stepping = None
        for followed in self._followed_here:
            followed.step.optimizer_stepped(optimizer)
            if not followed.step.has_loss and followed.step.completed == _WITHOUT_LOSS:
                self._guarded(self._say_without_loss)

    def loss(self, value: torch.Tensor) -> None:
        """Pass a loss on to the monitors; see `LoopSignals`."""
        for followed in self._followed_here:
            followed.step.loss(value)

    def grad_norm(self, parameters: list[torch.Tensor], norm: torch.Tensor) -> None:
        """Pass a gradient norm on to the monitors."""
        for followed in self._followed_here:
            followed.step.grad_norm(parameters, norm)

    def gradients_cleared(self, optimizer: Any) -> None:
        """Pass on that gradients were cleared."""
        for followed in self._followed_here:
            followed.step.gradients_cleared(optimizer)

    def scaler_stepped(self, optimizer: Any) -> None:
        """Pass a step of a scaler on to the monitors."""
        for followed in self._followed_here:
            followed.step.scaler_stepped(optimizer)

    # -- attaching -------------------------------------------------------------------------------

    def _attach_late(self, optimizer: Any, has_stepped: bool = False) -> None:
        """Attach at a step of an optimizer whose root was not called as a module."""
        if not ranks_are_known() or all(o is not optimizer for o in self._search.optimizers):
            return
        root = self._search.smallest_holder(optimizer)
        if root is None:
            called = self._search.called_by_hand(optimizer)
            if not called:
                self._leave([optimizer])
                self._say(f"{type(optimizer).__name__} trains no module and is not monitored")
                return
            root = nn.ModuleDict({_name_of(m, i): m for i, m in enumerate(called)})
        self._attach(root, has_stepped)

    def _attach(self, root: nn.Module, has_stepped: bool = False) -> None:
        optimizers = self._search.trained_in(root)
        self._leave(optimizers)
        if any(map(has_monitor, optimizers)):
            return
        if is_side_process():
            self._say("a child process that is not a rank trains; it is not monitored")
            self._end()
            return
        if not self._thread.claim(bool(self._followed)):
            self._thread.say_once(self._say)
            return
        earlier = next((f for f in self._followed if f.is_of(root)), None)
        start = Start(steps_taken(optimizers) - has_stepped) if earlier is None else earlier.end()
        optimizers = [*(earlier.still_needed(optimizers) if earlier else ()), *optimizers]
        self._meetings += 1
        agreed = all_ranks_meet(self._meetings, start.to_json())
        if agreed is None:
            self._say(f"{type(root).__name__} is not monitored: not every rank trains it")
            return
        folder = self._folders.new() if earlier is None else earlier.folder
        monitor = attach(root, optimizers, self._settings, console=self._console, run_dir=folder)
        if isinstance(monitor, Monitor):
            step = Start.from_json(agreed).begin(monitor, optimizers)
            if (stepping := self._thread.stepping) is not None:  # its closure calls the model
                step.optimizer_begins(stepping)
            self._followed.append(FollowedModel(root, step, folder, self._followed))
            if len(self._followed) > 1:
                self._note_turns()
            leave_children_alone()
            atexit.unregister(self.close)
            atexit.register(self.close)  # before what the monitor has registered

    def _note_turns(self) -> None:
        """Several models take turns, as in a GAN: their losses need not fall."""
        for monitor in self.monitors:
            if (signals := monitor.telemetry.signals) is not None:
                signals.others_train = True

    def _leave(self, optimizers: list[Any]) -> None:
        self._search.remove(optimizers)
        if not self._search.optimizers and self._looking is not None:
            self._looking.remove()
            self._looking = None
            if self._ignored_warning in warnings.filters:
                warnings.filters.remove(self._ignored_warning)  # type: ignore[attr-defined]

    def _guarded(self, function: Callable[[], None]) -> None:
        """Call a function; when it fails, watch nothing more and let the training go on."""
        try:
            with self._thread.lock:
                function()
        except Exception as error:
            self._say(f"{type(error).__name__}: {error}; training continues without the monitor")
            self._leave(self._search.optimizers)

    def _say(self, text: str) -> None:
        if not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0:
            log.warning("distmon: %s", text)

    def _say_without_loss(self) -> None:
        self._say(
            f"no loss was found in {_WITHOUT_LOSS} steps: backward() was not called on a scalar; "
            "the rest is monitored without it"
        )

    def _forget(self) -> None:
        """Leave a forked child alone: its monitors belong to the parent."""
        self._followed.clear()
        self._end()

    def _end(self) -> None:
        self._ended = True
        self._leave(self._search.optimizers)
        self._signals.end()
        self._patches.undo()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def _name_of(module: nn.Module, number: int) -> str:
    return f"{type(module).__name__}{number}".lower()
