"""Everything that can be set about a monitor: one pydantic model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from distmon.config.rule_presets import with_preset
from distmon.config.sections import (
    ActionsConfig,
    GradientGainConfig,
    InsideConfig,
    LossConfig,
    MfuConfig,
    NameList,
    NotifyConfig,
    PrometheusConfig,
    RuleConfig,
    Section,
    SinkName,
    WandbConfig,
    as_actions,
    as_inside,
    as_list,
)


class MonitorConfig(Section):
    """Everything that can be set about a monitor."""

    enabled: bool = True
    """False: `attach` returns a monitor that does nothing."""
    interval: int = Field(default=100, ge=1, le=10**9)
    """Steps from one observation to the next."""
    first_observation: int = Field(default=10, ge=1, le=10**9)
    """Step of the first observation, where that is earlier than `interval`."""
    sample_size: Annotated[int, Field(ge=1, le=10**9)] | Literal["auto", "sampled", "exact"] = (
        "auto"
    )
    """What is read: `auto`, `sampled`, `exact`, or a number of elements per weight."""
    seed: int = 0
    """Chooses the sample together with each parameter's name."""
    topk: int = Field(default=5, ge=0, le=10**4)
    """How many of the worst frozen parameters get a tag of their own."""
    backend: Literal["auto", "torch", "triton", "native"] = "auto"
    """What fills rows; `auto`: Triton on a GPU, native (if built) on a CPU, else torch."""
    percentiles: bool = True
    """Gradient percentiles; off, an observation sends 12 times fewer bytes."""
    replica_check: bool = True
    """Compare checksums of ranks that hold the same shards."""
    batch_hash: bool = True
    """Hash the inputs of observed steps, to find batches that repeat and ranks that share one."""
    eps: float = Field(default=1e-12, gt=0)
    """Added to the weight norm in `update_ratio`."""
    ema_decay: float = Field(default=0.99, ge=0, lt=1)
    """Share of the old value in the moving average of the loss."""
    transport: Literal["auto", "host", "device"] = "auto"
    """`host`: reduce over gloo while training continues; `device`: with the job's own backend."""
    timeout_s: float = Field(default=600.0, gt=0, le=1e6)
    """Time without an answer after which a rank counts as gone; at least the job's own timeout."""
    callback_timeout_s: float = Field(default=5.0, gt=0, le=3600)
    """Longest time of a rule or callback of yours; one that takes longer is disabled."""
    strict: bool = False
    """Raise an error when the run folder cannot be opened, instead of using a temporary one."""
    check_records: bool = False
    """For debugging: all ranks derive every record, and ranks whose record differs are named."""
    include: NameList = ("*",)
    """Globs of the parameter names that are observed."""
    exclude: NameList = ()
    """Globs of the parameter names that are not."""
    run_dir: Path | None = None
    """The run folder, continued when it exists; absent: `runs/<script>-<date>-<time>`."""
    spool_dir: Path | None = None
    """A second folder, on another disk, where records wait while the run folder cannot be written;
    absent: they wait in memory."""
    sinks: Annotated[tuple[SinkName, ...], BeforeValidator(as_list)] = (
        "console",
        "jsonl",
        "arrow",
    )
    """Where records and alerts go."""
    writer: Literal["process", "thread"] = "process"
    """`process`: derive, evaluate and write beside the training; `thread`: within it."""
    queue_size: int = Field(default=64, ge=1, le=10**6)
    """Records that a sink may fall behind before newer ones are dropped and counted; sinks that
    write files have 64 MiB instead."""
    total_steps: int | None = Field(default=None, ge=1, le=10**12)
    """Length of the run, shown by the console as `step:20/300`."""
    param_tags: NameList = ()
    """Globs of parameters that get tags of their own; none by default."""
    param_tag_cap: int = Field(default=50, ge=0)
    """Most parameters that `param_tags` may select."""
    wandb: WandbConfig = WandbConfig()
    """Settings of the wandb sink."""
    budget: float | None = Field(default=0.001, gt=0)
    """Share of the training time that the monitor may cost; above it the interval is stretched."""
    budget_after_s: float = Field(default=60.0, ge=0)
    """Training time between two changes of the interval."""
    hardware_period_s: float = Field(default=10.0, gt=0, le=1e6)
    """Seconds between two readings of the device's driver, in a thread of its own."""
    mfu: MfuConfig = MfuConfig()
    """What MFU is computed from."""
    prometheus: PrometheusConfig = PrometheusConfig()
    """Settings of the prometheus sink."""
    loss: LossConfig = LossConfig()
    """What is known about the training loss."""
    flow: GradientGainConfig = GradientGainConfig()
    """Gain of the backward pass, block by block."""
    inside: Annotated[InsideConfig, BeforeValidator(as_inside)] = InsideConfig()
    """What is watched inside the model; nothing by default."""
    task_interval: int = Field(default=100, ge=1, le=10**9)
    """Steps from one measurement of the tasks to the next."""
    notify: NotifyConfig = NotifyConfig()
    """Alerts to people."""
    actions: Annotated[ActionsConfig, BeforeValidator(as_actions)] = ActionsConfig()
    """Actions on alerts; none by default."""
    rules: Annotated[dict[str, RuleConfig], BeforeValidator(with_preset)] = Field(
        default_factory=dict
    )
    """Settings by rule name, or a preset; `distmon rules` lists them."""
