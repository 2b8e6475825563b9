"""The ways to attach a monitor to an engine, run one after the other on two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from engine_cases import Case, make_engine, model, prepare, train_steps

import distmon
from distmon.errors import ConfigError, DistmonError

REPLACED = ("_take_model_step", "backward", "save_checkpoint", "load_checkpoint", "destroy")


def block(folder: Path, **keys: Any) -> dict[str, Any]:
    return {"distmon": {"interval": 2, "sinks": ["jsonl"], "run_dir": str(folder), **keys}}


def own_attributes(engine: Any) -> list[str]:
    """What of distmon sticks to an engine."""
    wrapper = engine.optimizer
    found = [name for name in (*REPLACED, "distmon") if name in vars(engine)]
    found += [name for name in ("_update_scale", "clear_hp_grads") if name in vars(wrapper)]
    hooks = len(wrapper.optimizer._optimizer_step_pre_hooks)
    return found + ["hook"] * hooks


def make(initialize: Any, config: dict[str, Any]) -> Any:
    whole = model()
    parameters = [p for p in whole.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    engine, given, loader, scheduler = initialize(model=whole, optimizer=optimizer, config=config)
    assert given is engine.optimizer
    assert loader is scheduler is None
    return engine


def enable_cases_of_rank(rank: int, place: Path) -> dict[str, Any]:
    """Facts by name."""
    deepspeed = prepare()
    by_name = deepspeed.initialize
    methods = {name: vars(deepspeed.DeepSpeedEngine).get(name) for name in REPLACED}
    from distmon import deepspeed as ours

    def config(keys: dict[str, Any]) -> dict[str, Any]:
        return Case({"stage": 2}, keys).deepspeed_config()

    def untouched() -> bool:
        now = {name: vars(deepspeed.DeepSpeedEngine).get(name) for name in REPLACED}
        return now == methods and deepspeed.initialize is by_name

    facts: dict[str, Any] = {}

    # A mistake in the block: nothing is built.
    for key, keys in {
        "typo": {"intervall": 5},
        "bad value": {"interval": -1},
    }.items():
        try:
            ours.initialize(model=None, config=config(block(place, **keys)))
        except ConfigError as error:
            facts[key] = str(error)
    try:
        ours.initialize(model=None, config=config({"distmon": True}))
    except ConfigError as error:
        facts["no mapping"] = str(error)

    # The drop-in.
    engine = make(ours.initialize, config(block(place / "drop_in")))
    facts["drop-in patched"] = own_attributes(engine)
    train_steps(engine, rank, range(1, 5))
    facts["drop-in record"] = engine.distmon.monitor.last_record
    try:
        distmon.attach(engine)
    except DistmonError as error:
        facts["twice"] = str(error)
    ours.detach(engine)
    facts["detached"] = own_attributes(engine)
    engine.destroy()

    # Without a block, and switched off.
    engine = make(ours.initialize, config({}))
    facts["no block"] = own_attributes(engine)
    engine.destroy()
    engine = make(ours.initialize, config(block(place / "off", enabled=False)))
    facts["off"] = own_attributes(engine)
    silent = distmon.attach(engine)
    facts["off, attached"] = (type(silent).__name__, own_attributes(engine))
    engine.destroy()
    facts["never patched"] = untouched()

    # enable(), with the function imported by name before.
    ours.enable()
    engine = make(by_name, config(block(place / "by_name")))
    facts["by name, before"] = own_attributes(engine)
    train_steps(engine, rank, range(1, 3))
    facts["by name"] = engine.distmon.monitor.last_record
    engine.destroy()

    # enable(), through the module, with DeepSpeed's own monitors.
    csv = {"csv_monitor": {"enabled": True, "output_path": str(place), "job_name": "csv"}}
    engine = make(deepspeed.initialize, config({**block(place / "module"), **csv}))
    train_steps(engine, rank, range(1, 5))
    facts["module"] = engine.distmon.monitor.last_record
    facts["samples"] = engine.global_samples
    engine.destroy()

    # disable(), then enable() with an engine that is there already.
    ours.disable()
    facts["disabled"] = untouched()
    engine = make(deepspeed.initialize, config(block(place / "late")))
    ours.enable()
    ours.enable()
    train_steps(engine, rank, range(1, 3))
    facts["late"] = engine.distmon.monitor.last_record
    engine.destroy()

    # A block that says no switches everything off.
    engine = make(deepspeed.initialize, config(block(place / "no", enabled=False)))
    train_steps(engine, rank, range(1, 3))
    facts["no"] = (own_attributes(engine), untouched())
    engine.destroy()
    return facts


def resume(rank: int, folder: Path) -> dict[str, Any]:
    """Save in the middle, go on in a new engine, and do the same without a break."""
    deepspeed = prepare()
    facts: dict[str, Any] = {}
    for stage in (0, 2, 3):
        place = folder / f"stage{stage}"
        keys = block(place / "run", interval=2, ema_decay=0.5)
        case = Case({"stage": stage}, keys)
        engine = make_engine(deepspeed, case)
        monitor = distmon.attach(engine, run_dir=str(place / "whole"))
        train_steps(engine, rank, range(1, 7))
        facts[f"whole{stage}"] = monitor.last_record
        engine.destroy()

        engine = make_engine(deepspeed, case)
        distmon.attach(engine)
        train_steps(engine, rank, range(1, 5))
        engine.save_checkpoint(str(place / "saved"), client_state={"epoch": 7})
        engine.destroy()

        engine = make_engine(deepspeed, case)
        monitor = distmon.attach(engine)
        _, client_state = engine.load_checkpoint(str(place / "saved"))
        facts[f"client{stage}"] = (client_state["epoch"], "distmon" in client_state)
        train_steps(engine, rank, range(5, 7))
        facts[f"resumed{stage}"] = monitor.last_record
        engine.destroy()
    return facts
