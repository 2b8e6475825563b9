"""Small engines trained for real by a pair of gloo ranks, and the same without any wrapper.

Making an engine takes seconds, so one pair of ranks runs many cases one after the other.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import distmon
from distmon import Record

WORLD = 2
STEPS = 3
LR = 1e-2


class _Spoiled(torch.autograd.Function):
    """One element of the gradient becomes NaN."""

    @staticmethod
    def forward(_: Any, weight: torch.Tensor) -> torch.Tensor:
        return weight.view_as(weight)

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        gradient[50, 7] = torch.nan
        return gradient


class SpoilableLinear(nn.Linear):
    spoil = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = _Spoiled.apply(self.weight) if self.spoil else self.weight
        return nn.functional.linear(x, weight, self.bias)


class TiedModel(nn.Module):
    """Parameters larger and smaller than a sample, of odd sizes, one of them tied, one frozen."""

    def __init__(self, frozen: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 48)
        self.first = SpoilableLinear(48, 91)
        self.norm = nn.LayerNorm(91)
        self.second = nn.Linear(91, 48, bias=False)
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(48, 37, bias=False)
        self.head.weight = self.embed.weight
        self.second.weight.requires_grad_(not frozen)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = x + self.second(torch.nn.functional.gelu(self.norm(self.first(x)))) * self.scale
        return nn.functional.cross_entropy(
            self.head(x[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten()
        )


def model(frozen: bool = True) -> TiedModel:
    torch.manual_seed(0)
    return TiedModel(frozen)


def tokens(step: int, micro: int = 0) -> torch.Tensor:
    """The batch of all ranks."""
    generator = torch.Generator().manual_seed(100 * step + micro)
    return torch.randint(0, 37, (4, 12), generator=generator)


def groups(of: nn.Module) -> list[dict[str, Any]]:
    """Two param groups with learning rates of their own; matrices decay."""
    trained = [p for p in of.parameters() if p.requires_grad]
    dims = [getattr(p, "ds_shape", p.shape) for p in trained]
    return [
        {"params": [p for p, s in zip(trained, dims, strict=True) if len(s) > 1], "lr": LR},
        {
            "params": [p for p, s in zip(trained, dims, strict=True) if len(s) == 1],
            "lr": LR / 2,
            "weight_decay": 0.0,
        },
    ]


@dataclass
class Case:
    """One engine and what is done with it."""

    zero: dict[str, Any]
    config: dict[str, Any] = field(default_factory=dict)
    monitor: dict[str, Any] = field(default_factory=dict)
    steps: int = STEPS
    accumulation: int = 1
    zero_init: bool = False
    frozen: bool = True
    clip: float = 0.0
    spoil_at: int = 0
    """The step in which one gradient of `first.weight` is NaN."""
    between: Callable[[Any, int], None] | None = None
    """Called before each step with the engine and the step's number; importable."""

    def deepspeed_config(self) -> dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": self.accumulation,
            "zero_optimization": self.zero,
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": self.clip,
            "steps_per_print": 10**9,
            **self.config,
        }


@dataclass
class Seen:
    """What is left of a run, in plain values."""

    records: list[Record]
    alerts: list[dict[str, Any]]
    norms: list[float | None]

    @property
    def last(self) -> Record:
        return self.records[-1]

    def column(self, name: str) -> dict[str, float]:
        params = self.last.params
        return dict(zip(params.names, params.columns[name].tolist(), strict=True))


def reference(case: Case, folder: Path) -> Seen:
    """The whole batch in one process, no wrapper."""
    whole = model(case.frozen)
    optimizer = torch.optim.AdamW(groups(whole))
    seen = Seen([], [], [])
    settings = {**monitor_settings(case, folder), "writer": "thread"}
    with distmon.attach(whole, optimizer, settings) as monitor:
        for step in range(1, case.steps + 1):
            optimizer.zero_grad()
            total = 0.0
            for micro in range(case.accumulation):
                loss = whole(tokens(step, micro)) / case.accumulation
                loss.backward()
                total += loss.item()
            norm = torch.nn.utils.get_total_norm(
                [p.grad for p in whole.parameters() if p.grad is not None]
            )
            seen.norms.append(float(norm))
            if case.clip:
                torch.nn.utils.clip_grads_with_norm_(whole.parameters(), case.clip, norm)
            optimizer.step()
            monitor.step(loss=total)
            keep(seen, monitor)
    return seen


def monitor_settings(case: Case, folder: Path) -> dict[str, Any]:
    # A writer process for each case would take longer than the case; those with _PROCESS have one.
    settings = {"interval": 1, "sinks": ["jsonl"], "run_dir": str(folder / "run")}
    return {**settings, "writer": "thread", **case.monitor}


def keep(seen: Seen, monitor: distmon.Monitor) -> None:
    last = monitor.last_record
    if last is not None and (not seen.records or seen.records[-1] is not last):
        seen.records.append(last)


def prepare() -> Any:
    """DeepSpeed in a rank of a test: nothing is compiled, nothing is printed."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": os.environ["RANK"]}
    is_first = "deepspeed" not in sys.modules
    import deepspeed

    if is_first:  # DeepSpeed collects garbage for every engine of stage 3, now of engines only
        gc.freeze()
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.simplefilter("ignore", FutureWarning)  # of torch, about DeepSpeed's collectives
    # So that overflows of the loss scale can be shown without a GPU.
    accelerator = deepspeed.accelerator.get_accelerator()
    accelerator.is_fp16_supported = lambda: True
    return deepspeed


def make_engine(deepspeed: Any, case: Case) -> Any:
    config = case.deepspeed_config()
    if case.zero_init:
        with deepspeed.zero.Init(config_dict_or_path=config):
            sharded = model(case.frozen)
    else:
        sharded = model(case.frozen)
    optimizer = torch.optim.AdamW(groups(sharded))
    engine, *_ = deepspeed.initialize(model=sharded, optimizer=optimizer, config=config)
    return engine


def train(engine: Any, case: Case, rank: int, seen: Seen, monitor: Any, steps: range) -> None:
    for step in steps:
        engine.module.first.spoil = step == case.spoil_at
        if case.between is not None:
            case.between(engine, step)
        for micro in range(case.accumulation):
            mine = tokens(step, micro).chunk(WORLD)[rank]
            engine.backward(engine(mine))
            engine.step()
        norm = engine.get_global_grad_norm()
        seen.norms.append(None if norm is None else float(norm))
        keep(seen, monitor)


def train_steps(engine: Any, rank: int, steps: range) -> None:
    """Nothing but the training."""
    for step in steps:
        engine.backward(engine(tokens(step).chunk(WORLD)[rank]))
        engine.step()


def run_cases(rank: int, world: int, cases: dict[str, Case], folder: str) -> dict[str, Seen]:
    """Every case on an engine of its own; for `run_ranks`."""
    assert world == WORLD
    deepspeed = prepare()
    found: dict[str, Seen] = {}
    for name, case in cases.items():
        engine = make_engine(deepspeed, case)
        place = Path(folder) / name
        monitor = distmon.attach(engine, config=monitor_settings(case, place))
        seen = Seen([], [], [])
        train(engine, case, rank, seen, monitor, range(1, case.steps + 1))
        engine.destroy()
        if rank == 0:
            seen.alerts = [dict(a) for a in distmon.read_run(place / "run").alerts]
        found[name] = seen
    return found


NORMS = ("weight_norm", "grad_norm", "update_norm", "update_ratio", "weight_absmax")
STATES = ("lr", "requires_grad", "in_optimizer", "has_grad", "update_expected")


def disagreement(one: Seen, other: Seen) -> float:
    """Largest relative difference over all records and parameters.

    Means and extremes are compared on the scale of the parameter's own norm or largest value.
    """
    worst = 0.0
    for a, b in zip(one.records, other.records, strict=True):
        assert a.params.names == b.params.names
        for column in STATES:
            assert np.array_equal(a.params.columns[column], b.params.columns[column], True), column
        scales = {name: name for name in NORMS}
        scales |= {"grad_min": "grad_max", "grad_max": "grad_max", "grad_mean": "grad_norm"}
        scales |= {"weight_mean": "weight_absmax", "update_absmax": "update_absmax"}
        for column, by in scales.items():
            x, y = a.params.columns[column], b.params.columns[column]
            scale = np.abs(b.params.columns[by])
            assert np.array_equal(np.isnan(x), np.isnan(y)), (column, x, y)
            with np.errstate(invalid="ignore", divide="ignore"):
                apart = np.where(x == y, 0.0, np.abs(x - y) / scale)
            worst = max(worst, float(np.nanmax(apart, initial=0.0)))
    return worst


def away_and_back(engine: Any, step: int) -> None:
    """States leave the device and come back to other addresses.

    Stage 3 does this with an optimizer only that has to be compiled, so there the masters are
    moved in the way it would.
    """
    if step not in (2, 3):
        return
    before = [t.data_ptr() for t in _masters(engine)]
    if engine.zero_optimization_stage() < 3:
        engine.offload_states(pin_memory=False)
    kept = []
    for master in _masters(engine):
        kept.append(master.data)  # so that the copy is really elsewhere
        master.data = master.data.clone()
    for old in kept:
        old.fill_(torch.nan)
    if engine.zero_optimization_stage() < 3:
        engine.reload_states()
    assert [t.data_ptr() for t in _masters(engine)] != before


def _masters(engine: Any) -> list[torch.Tensor]:
    wrapper = engine.optimizer
    for name in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups"):
        if hasattr(wrapper, name):
            return list(getattr(wrapper, name))
    return [p for group in wrapper.param_groups for p in group["params"]]


_BF16 = {"bf16": {"enabled": True}}
_FP16 = {"fp16": {"enabled": True, "initial_scale_power": 40}}
_FP32_SUMS = {**_BF16, "data_types": {"grad_accum_dtype": "fp32"}}
_OWN_ADAM = {"zero_force_ds_cpu_optimizer": False}
_TO_CPU = {"offload_optimizer": {"device": "cpu"}}
_FLOW = {"flow": {"blocks": ["first", "norm", "second"]}}
_PROCESS = {"writer": "process"}
_SPOILED: dict[str, Any] = {"spoil_at": 3, "steps": 4, "monitor": {"interval": 2}}

EXACT: dict[str, Case] = {
    **{f"stage{z}": Case({"stage": z}, clip=1.0, monitor=_FLOW) for z in (0, 1)},
    **{f"stage{z}": Case({"stage": z}, clip=1.0, monitor=_FLOW | _PROCESS) for z in (2, 3)},
    "round_robin": Case({"stage": 2, "round_robin_gradients": True}),
    "aligned": Case({"stage": 1, "parameter_alignment": True}),
    "accumulation1": Case({"stage": 1}, accumulation=2, clip=1.0),
    "sub_groups": Case({"stage": 3, "sub_group_size": 1000}, accumulation=2, monitor=_FLOW),
    "no_persistence": Case({"stage": 3, "stage3_param_persistence_threshold": 0}),
    "zero_init": Case({"stage": 3}, zero_init=True),
    "offload2": Case({"stage": 2, **_TO_CPU}, _OWN_ADAM, clip=1.0),
    "offload3": Case({"stage": 3, **_TO_CPU}, _OWN_ADAM),
    "moved2": Case({"stage": 2}, between=away_and_back),
    "moved3": Case({"stage": 3}, between=away_and_back),
    "exact3": Case({"stage": 3}, monitor={"sample_size": "exact"}),
}
"""fp32: agree with training without any wrapper."""
ROUNDED: dict[str, Case] = {
    **{f"bf16_stage{z}": Case({"stage": z}, _BF16) for z in range(4)},
    "bf16_fp32_sums": Case({"stage": 1}, _FP32_SUMS),
}
"""bf16 with fp32 masters: agree with each other."""
SPOILED: dict[str, Case] = {
    **{f"nan{z}": Case({"stage": z}, **_SPOILED) for z in range(4)},
    **{f"bf16_nan{z}": Case({"stage": z}, _BF16, **_SPOILED) for z in (0, 2, 3)},
    "bf16_nan_fp32_sums": Case({"stage": 1}, _FP32_SUMS, **_SPOILED),
}
OVERFLOWING: dict[str, Case] = {
    "overflow0": Case({"stage": 0}, _FP16, spoil_at=2),
    **{f"overflow{z}": Case({"stage": z}, _FP16) for z in (1, 2, 3)},
}
