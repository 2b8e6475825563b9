"""The sections of the configuration, and what a value of them may be given as."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveInt,
    SecretStr,
)
from pydantic_core import PydanticCustomError

SINKS: Final = {
    "console": "",
    "jsonl": "",
    "arrow": "",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "prometheus": "prometheus_client",
    "mlflow": "mlflow",
    "logging_lines": "",
}
"""Modules of `distmon.sinks`, and the optional package that each needs; its extra has the name of
the sink."""


def _known_sink(name: str) -> str:
    if name not in SINKS:
        raise PydanticCustomError("sink", f"it must be one of {', '.join(SINKS)}")
    return name


SinkName = Annotated[str, AfterValidator(_known_sink)]


def as_list(value: Any) -> Any:
    """Accept `"a,b"` where a list is meant, as command lines and environments give it."""
    return (
        [part.strip() for part in value.split(",") if part.strip()]
        if isinstance(value, str)
        else value
    )


def split_urls(value: Any) -> Any:
    """Accept `"a://x, b://y"` where a list is meant; a comma inside a URL is part of it."""
    if not isinstance(value, str):
        return value
    return [part for part in re.split(r"[,\s]+(?=[\w+.-]+://|env:|$)", value.strip()) if part]


NameList = Annotated[tuple[str, ...], BeforeValidator(as_list)]
UrlList = Annotated[tuple[SecretStr, ...], BeforeValidator(split_urls)]


class Section(BaseModel):
    """Base of the sections: an unknown key is a mistake."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        # Pydantic's own message would quote the whole value, which may hold a secret.
        hide_input_in_errors=True,
    )


class WandbConfig(Section):
    """How the wandb run is opened. Everything else is taken from wandb's own environment."""

    project: str = "distmon"
    """wandb project."""
    name: str | None = None
    """Display name of the run; the name of the run folder when absent."""
    mode: Literal["online", "offline", "disabled"] | None = None
    """Absent: as wandb's environment says."""
    tags: NameList = ()
    """Tags of the wandb run."""


class LossConfig(Section):
    """What is known about the training loss."""

    expected_to_fall: bool | None = None
    """False: the loss of a healthy run may rise (GAN, reinforcement learning, curriculum). Absent:
    found out, where optimizers take turns or the loss keeps changing its sign."""


class GradientGainConfig(Section):
    """Gain of the backward pass, block by block."""

    enabled: bool = True
    """Measure the gain of the blocks on observed steps."""
    blocks: NameList = ()
    """Globs of the modules that are blocks; without one, the model's repeated blocks are found."""
    window: int = Field(default=5, ge=2, le=10**4)
    """Observations in the moving average and the drift of the mean gain."""


InsideKind = Literal["activations", "attention", "experts", "spectra"]


class InsideConfig(Section):
    """What is watched inside the model. `inside: all` or `inside: [activations, experts]` is short
    for `kinds`."""

    kinds: tuple[InsideKind, ...] = ()
    """Kinds of statistics; none by default."""
    every: int = Field(default=1, ge=1)
    """Observations from one measurement to the next."""
    modules: NameList = ()
    """Globs of further modules whose output is watched as an activation."""
    routers: NameList = ()
    """Globs of the modules that route tokens to experts; found by name and shape when absent."""
    matrices: NameList = ()
    """Globs of the parameters whose spectral norm is estimated; those of the blocks when absent."""
    attention_sample: tuple[PositiveInt, PositiveInt, PositiveInt] = (2, 4, 16)
    """Examples, heads and queries of each call of attention whose logits are computed."""
    window: int = Field(default=3, ge=1)
    """Measurements over which a unit or an expert must be inactive to count as dead."""


def as_inside(value: Any) -> Any:
    """Accept `all`, a kind or a list of kinds where a mapping is meant."""
    if isinstance(value, str | list | tuple):
        value = {"kinds": value}
    if isinstance(value, Mapping) and "kinds" in value:
        kinds = as_list(value["kinds"])
        if isinstance(kinds, list | tuple) and "all" in kinds:
            kinds = get_args(InsideKind)
        return {**value, "kinds": kinds}
    return value


class ModelConfig(Section):
    """The shape of a transformer, for its FLOPs."""

    layers: int = Field(ge=1)
    """Blocks."""
    width: int = Field(ge=1)
    """Size of the residual stream."""
    heads: int = Field(ge=1)
    """Attention heads."""
    vocabulary: int = Field(ge=1)
    """Rows of the output head."""
    kv_heads: int | None = Field(default=None, ge=1)
    """Heads of keys and values; as many as `heads` when absent."""
    head_size: int | None = Field(default=None, ge=1)
    """`width / heads` when absent."""
    mlp: int | None = Field(default=None, ge=1)
    """Inner width of the MLP; four times `width` when absent."""
    gated: bool = False
    """The MLP has a third matrix, as SwiGLU does."""


class MfuConfig(Section):
    """What MFU is computed from; nothing is guessed, and what is missing is named."""

    flops_per_token: float | None = Field(default=None, gt=0)
    """FLOPs of forward and backward per token, if you know them."""
    model: ModelConfig | None = None
    """The model's shape; found in its own config when absent."""
    context: int | None = Field(default=None, ge=1)
    """Tokens in a training sequence."""
    causal: bool = True
    """Count half of the attention, because of the causal mask."""
    count: bool = False
    """Count the FLOPs of one training step, which is slower for it."""
    peak_flops: float | None = Field(default=None, gt=0)
    """Peak of one device in FLOP/s; from the table by its name when absent."""
    dtype: Literal["bf16", "fp16", "tf32", "fp32", "fp8"] | None = None
    """What the matrices are multiplied in; that of the parameters when absent."""
    measure_peak: bool = False
    """Measure the peak with a matrix product where the table has none."""


class PrometheusConfig(Section):
    """Where the prometheus sink listens."""

    address: str = "127.0.0.1"
    """Loopback by default: only this host can read it. Any other needs a `token`."""
    token: SecretStr | None = None
    """What a scrape must send as `Authorization: Bearer ...`; at least 16 characters."""
    port: int = Field(default=9464, ge=0, le=65535)
    """The port, or the first of those that are tried; 0 for any."""
    ports: int = Field(default=10, ge=1, le=1000)
    """How many ports are tried."""
    most_ranks: int = Field(default=64, ge=0)
    """Ranks that get a series of their own."""


class NotifyConfig(Section):
    """Alerts to people, through any service that apprise supports."""

    urls: UrlList = ()
    """apprise URLs, such as `slack://...`; `env:NAME` takes them from the environment."""
    severity: Literal["info", "warning", "critical"] = "warning"
    """The least severe alert that is sent."""
    per_hour: int = Field(default=20, ge=1)
    """Most messages to a service in an hour; what is held back is counted in the next one."""
    attempts: int = Field(default=3, ge=1, le=10)
    """How often a message is tried before it counts as failed."""
    timeout_s: float = Field(default=10.0, gt=0)
    """Longest wait for an answer; `rto` and `cto` in the URL override it."""


class ActionsConfig(Section):
    """What is done when an alert is raised. Each lists rules by glob, or severities; none is on by
    default. `actions: stop` is short for `stop: [warning, critical]`."""

    stop: NameList = ()
    """End the training on every rank at the same step; also writes a bundle."""
    checkpoint: NameList = ()
    """Ask the trainer for a checkpoint: call the function given as `attach(on_checkpoint=...)`."""
    bundle: NameList = ()
    """Write a debug bundle into the run folder."""
    on_alert_everywhere: bool = False
    """Call `on_alert` on every rank, at the same step, on the training thread; else on rank 0."""


def as_actions(value: Any) -> Any:
    """Accept `stop` or `[stop, bundle]` where a mapping is meant."""
    names = as_list(value)
    if isinstance(names, list | tuple) and all(isinstance(name, str) for name in names):
        return dict.fromkeys(names, ("warning", "critical"))
    return value


class RuleConfig(BaseModel):
    """Settings of one rule. Keys not listed here are the rule's own thresholds."""

    model_config = ConfigDict(extra="allow", frozen=True, use_attribute_docstrings=True)

    enabled: bool = True
    """Whether the rule is evaluated."""
    severity: Literal["info", "warning", "critical"] | None = None
    """Replaces the rule's own severity."""
    patience: int | None = Field(default=None, ge=1, le=10**9)
    """Consecutive observations before it fires."""
    cooldown: int | None = Field(default=None, ge=0, le=10**9)
    """Observations of silence about the same thing after it fired."""
    when: str | None = None
    """Makes a rule of your own: a condition over metrics, see docs/rules.md."""
    message: str | None = None
    """What an alert of your own rule says; `{metric}` stands for a value."""
    advice: NameList = ()
    """What an alert of your own rule advises."""
