"""`attach`: one call for whatever the user trains with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console

from distmon.actions import AlertCall
from distmon.layout import capture, named_modules
from distmon.monitor import Monitor
from distmon.rules.base import Rule
from distmon.wiring import Config, Optimizers, watch


def attach(
    model: torch.nn.Module | Sequence[torch.nn.Module],
    optimizer: Optimizers = None,
    config: Config = None,
    *,
    hooks: bool = True,
    console: Console | None = None,
    rename: Callable[[str], str] = str,
    own_rules: Sequence[Rule] = (),
    on_alert: AlertCall | None = None,
    on_checkpoint: AlertCall | None = None,
    **overrides: Any,
) -> Monitor:
    """Watch `model` while `optimizer` (or several) trains it.

    Call it on every rank, after wrapping the model and before its first forward. `config` is a
    mapping, a YAML or JSON file, or a `MonitorConfig`; keyword arguments override its keys. With
    `hooks=False` the trainer calls `before_step()` and `after_step()` itself. `console` is where
    the console sink prints; pass that of your progress bar. A mistake is a `DistmonError`.

    Of a pipeline each rank gives its own stage, or a list of them. A parameter is known by its name
    in the whole model; where stages count their layers from 0, `rename` gives that name.

    `own_rules` are functions decorated with `distmon.rule`; give the same on every rank.

    `on_alert` is called with every alert; `on_checkpoint` where `actions.checkpoint` asks for one.
    Both are called on every rank, at the same step, from within `Monitor.step`.

    `model` may be a DeepSpeed engine, without an optimizer: see `distmon.deepspeed.attach`.
    """
    if optimizer is None and _is_engine(model):
        from distmon.deepspeed import attach as attach_engine

        return attach_engine(
            model,
            config,
            console=console,
            own_rules=own_rules,
            on_alert=on_alert,
            on_checkpoint=on_checkpoint,
            **overrides,
        )
    return watch(
        lambda settings: capture(model, settings.include, settings.exclude, rename),
        _device_of(model),
        optimizer,
        config,
        find_modules=lambda: named_modules(model, rename),
        models=_modules(model),
        hooks=hooks,
        console=console,
        own_rules=own_rules,
        on_alert=on_alert,
        on_checkpoint=on_checkpoint,
        **overrides,
    )


def _is_engine(model: object) -> bool:
    """Without importing DeepSpeed: whoever has an engine has done so."""
    return any(
        base.__name__ == "DeepSpeedEngine" and base.__module__.startswith("deepspeed.")
        for base in type(model).__mro__
    )


def _modules(model: object) -> list[torch.nn.Module]:
    """What was given, without what is no module; `capture` names that."""
    given = model if isinstance(model, list | tuple) else [model]
    return [module for module in given if isinstance(module, torch.nn.Module)]


def _device_of(model: object) -> torch.device:
    """Where the ranks' first collective takes place, also when the model is nothing of use."""
    for module in _modules(model):
        for parameter in module.parameters():
            return torch.device("cpu") if parameter.is_meta else parameter.device
    return torch.device("cpu")
