"""The configuration: one pydantic model, read from a dict, a YAML or JSON file, or the environment.

A mistake in any of them is one `ConfigError` sentence that names the key and, for an unknown key,
the nearest valid one.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
)
from pydantic_core import PydanticCustomError

from distmon.errors import ConfigError
from distmon.redaction import HIDDEN, Redactor
from distmon.rule_presets import with_preset
from distmon.untrusted.documents import check_plain, parse_json, parse_yaml
from distmon.untrusted.files import read_regular

ENV_PREFIX = "DISTMON_"
LARGEST_FILE: Final = 256 << 10
"""Bytes of a config file."""
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


def _as_list(value: Any) -> Any:
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


NameList = Annotated[tuple[str, ...], BeforeValidator(_as_list)]
UrlList = Annotated[tuple[SecretStr, ...], BeforeValidator(split_urls)]


class _Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        # Pydantic's own message would quote the whole value, which may hold a secret.
        hide_input_in_errors=True,
    )


class WandbConfig(_Section):
    """How the wandb run is opened. Everything else is taken from wandb's own environment."""

    project: str = "distmon"
    """wandb project."""
    name: str | None = None
    """Display name of the run; the name of the run folder when absent."""
    mode: Literal["online", "offline", "disabled"] | None = None
    """Absent: as wandb's environment says."""
    tags: NameList = ()
    """Tags of the wandb run."""


class LossConfig(_Section):
    """What is known about the training loss."""

    expected_to_fall: bool | None = None
    """False: the loss of a healthy run may rise (GAN, reinforcement learning, curriculum). Absent:
    found out, where optimizers take turns or the loss keeps changing its sign."""


class GradientGainConfig(_Section):
    """Gain of the backward pass, block by block."""

    enabled: bool = True
    """Measure the gain of the blocks on observed steps."""
    blocks: NameList = ()
    """Globs of the modules that are blocks; without one, the model's repeated blocks are found."""
    window: int = Field(default=5, ge=2, le=10**4)
    """Observations in the moving average and the drift of the mean gain."""


InsideKind = Literal["activations", "attention", "experts", "spectra"]


class InsideConfig(_Section):
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
    window: int = Field(default=3, ge=1)
    """Measurements over which a unit or an expert must be inactive to count as dead."""


def _as_inside(value: Any) -> Any:
    """Accept `all`, a kind or a list of kinds where a mapping is meant."""
    if isinstance(value, str | list | tuple):
        value = {"kinds": value}
    if isinstance(value, Mapping) and "kinds" in value:
        kinds = _as_list(value["kinds"])
        if isinstance(kinds, list | tuple) and "all" in kinds:
            kinds = get_args(InsideKind)
        return {**value, "kinds": kinds}
    return value


class ModelConfig(_Section):
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


class MfuConfig(_Section):
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


class PrometheusConfig(_Section):
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


class NotifyConfig(_Section):
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


class ActionsConfig(_Section):
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


def _as_actions(value: Any) -> Any:
    """Accept `stop` or `[stop, bundle]` where a mapping is meant."""
    names = _as_list(value)
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


class MonitorConfig(_Section):
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
    sinks: Annotated[tuple[SinkName, ...], BeforeValidator(_as_list)] = (
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
    inside: Annotated[InsideConfig, BeforeValidator(_as_inside)] = InsideConfig()
    """What is watched inside the model; nothing by default."""
    task_interval: int = Field(default=100, ge=1, le=10**9)
    """Steps from one measurement of the tasks to the next."""
    notify: NotifyConfig = NotifyConfig()
    """Alerts to people."""
    actions: Annotated[ActionsConfig, BeforeValidator(_as_actions)] = ActionsConfig()
    """Actions on alerts; none by default."""
    rules: Annotated[dict[str, RuleConfig], BeforeValidator(with_preset)] = Field(
        default_factory=dict
    )
    """Settings by rule name, or a preset; `distmon rules` lists them."""


def load_config(
    source: MonitorConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> MonitorConfig:
    """Build the configuration; later sources win: `source`, then the environment, then `overrides`.

    `source` is a `MonitorConfig`, a mapping, or a path ending in .yaml, .yml or .json. Environment
    variables are `DISTMON_INTERVAL`, or `DISTMON_RULES__FROZEN__PATIENCE` for nested keys.
    """
    if isinstance(source, MonitorConfig):
        values = source.model_dump(exclude_unset=True)
        origin = "the distmon config"
    elif isinstance(source, Mapping):
        values = dict(source)
        origin = "the distmon config"
    elif source is None:
        values, origin = {}, "the distmon config"
    else:
        values, origin = read_config_file(Path(source)), str(source)
    values = _merge(values, _from_environment(os.environ if environ is None else environ))
    values = _merge(values, dict(overrides or {}))
    try:
        return MonitorConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain(error, MonitorConfig, origin)) from None


def read_config_file(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML or JSON file."""
    try:
        text = read_regular(path, LARGEST_FILE).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read the config file {path}: {reason}") from None
    try:
        content = parse_json(text) if path.suffix == ".json" else parse_yaml(text)
        check_plain(content)
    except ValueError as error:
        raise ConfigError(f"{path} is not valid {path.suffix[1:] or 'YAML'}: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold keys and values, not a {type(content).__name__}")
    return content


def explain(error: ValidationError, model: type[BaseModel], origin: str) -> str:
    """Return one sentence about the first mistake in `error`, without secrets."""
    return Redactor().text(_sentence(error, model, origin))


def _sentence(error: ValidationError, model: type[BaseModel], origin: str) -> str:
    first = error.errors()[0]
    path = [str(part) for part in first["loc"] if not _is_union_branch(part)]
    key = ".".join(path)
    if first["type"] == "extra_forbidden":
        section: type[BaseModel] = model
        for part in path[:-1]:
            annotation = (
                section.model_fields[part].annotation if part in section.model_fields else None
            )
            if isinstance(annotation, type) and issubclass(annotation, BaseModel):
                section = annotation
        hint = suggest(path[-1], list(section.model_fields))
        return f'unknown key "{key}" in {origin}; {hint}'
    value = first.get("input")
    # A token cannot be distinguished from a word: of `notify`, only numbers are quoted.
    hidden = path[:1] == ["notify"] and not isinstance(value, int | float)
    shown = HIDDEN if hidden else _shortened(value)
    wanted = first["msg"][0].lower() + first["msg"][1:]
    if key == "sample_size":
        wanted = 'it must be a whole number of at least 1, "auto", "sampled" or "exact"'
    return f'bad value {shown} for "{key}" in {origin}: {wanted}'


def _shortened(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:  # of a user's object, or an integer of thousands of digits
        return f"of type {type(value).__name__}"
    return text if len(text) <= 120 else f"{text[:117]}..."


def suggest(word: str, choices: list[str]) -> str:
    """Return `did you mean ...?` when a choice is similar, else the list of choices."""
    near = difflib.get_close_matches(word, choices, n=1, cutoff=0.6)
    return f'did you mean "{near[0]}"?' if near else f"valid keys are {', '.join(sorted(choices))}"


def _is_union_branch(part: Any) -> bool:
    """Return whether pydantic added it to the location: the branch of a union that it tried."""
    return isinstance(part, str) and (
        part.startswith(("literal[", "constrained")) or part in ("int", "str")
    )


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for variable, text in environ.items():
        if not variable.startswith(ENV_PREFIX):
            continue
        path = variable.removeprefix(ENV_PREFIX).lower().split("__")
        section = values
        for part in path[:-1]:
            section = section.setdefault(part, {})
            if not isinstance(section, dict):
                raise ConfigError(
                    f"the environment variable {variable} sets a key inside of {part}, which "
                    "another variable sets to a value"
                )
        try:
            section[path[-1]] = parse_yaml(text)
            check_plain(section[path[-1]])
        except ValueError:
            raise ConfigError(
                f"the environment variable {variable} does not hold a valid YAML value"
            ) from None
    return values


def _merge(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in top.items():
        below = merged.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            merged[key] = _merge(below, value)
        else:
            merged[key] = value
    return merged
