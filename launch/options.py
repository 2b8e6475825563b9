"""The command line: every option is declared once, typed and checked before training starts."""

from __future__ import annotations

import io
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass, field, fields
from functools import partial
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any, Literal, get_type_hints

import typer

from launch.faults import FAULTS
from launch.model import ACTIVATIONS, KIND_COUNT, Shape
from launch.monitoring import STOPPED, split_monitor_options
from launch.parallel import PARALLELISMS, parallelism_class
from launch.ranks import BadInput

EPILOG = "\n".join(
    [
        "--parallel: all train the same; a checkpoint of one can be resumed in any other.",
        *(f"  {name:12}{about}" for name, (_, about) in PARALLELISMS.items()),
        "",
        "--inject: all are real.",
        *(f"  {name:12}{kind.act.__doc__}" for name, kind in FAULTS.items()),
        "",
        "--monitor: any key of distmon's configuration is an option, for example:",
        "  --monitor.interval 20             steps from one observation to the next",
        "  --monitor.sinks console,jsonl     where records go",
        "  --monitor.run-dir runs/first      the run folder",
        "  --monitor.rules.frozen.patience 2",
        "  --monitor.actions.stop nonfinite  end the run when this rule fires",
        "  --monitor.config monitor.yaml     a file with such keys; options win over it",
        "torchrun takes a bare --monitor for its own --monitor-interval: write",
        "--monitoring there, or put -- before the script.",
        "",
        f"Exit code: 0 done, 2 bad input, {STOPPED} stopped by a rule, 130 interrupted.",
        "torchrun returns 1 when a rank's is not 0, and lists that of each rank.",
    ]
)
UNSUPPORTED = [
    ("tasks", PARALLELISMS.keys() - {"ddp"}, ": a task's own gradient needs whole parameters"),
    ("tied", {"pp"}, ": embedding and head are on different ranks"),
    # Tensor parallelism trains, but compiled code keeps the process groups after the run.
    ("compile", {"tp", "fsdp+tp", "deepspeed"}, ""),
    ("bf16_weights", {"deepspeed"}, ", whose engine keeps float32 copies of the weights"),
]
"""Options that do not work with some choices of `--parallel`, and why."""


def option(panel: str, default: Any, about: str, *names: str, **limits: Any) -> Any:
    """Declare an option: its panel in --help, its default, and what typer checks and shows."""
    declared = typer.Option(default, *names, rich_help_panel=panel, help=about, **limits)
    return field(default=default, metadata={"option": declared})


PANELS = ("data", "model", "training", "parallelism", "output", "checkpoints", "faults", "monitor")
_data, _model, _train, _parallel, _output, _checkpoints, _faults, _monitor = (
    partial(option, panel) for panel in PANELS
)


@dataclass
class Options:
    """Train a small language model on bytes, with one process or with torchrun."""

    data: Path | None = _data(
        None, "text to train on; else Python's standard library", metavar="FILE"
    )
    corpus_mb: float = _data(4.0, "read at most this many megabytes", min=0.001)
    seed: int = _data(0, "determines weights and batches", min=0)

    layers: int = _model(4, "blocks", min=1)
    width: int = _model(128, "size of the residual stream", min=1)
    heads: int = _model(4, "attention heads", min=1)
    context: int = _model(128, "bytes per sequence", min=1)
    tied: bool = _model(False, "share the weight of embedding and head", "--tied")
    activation: Literal[tuple(ACTIVATIONS)] = _model("gelu", "between the matrices of an MLP")
    no_residual: bool = _model(False, "blocks without residual connections", "--no-residual")
    init_std: float = _model(0.02, "standard deviation of new weights", min=0)
    bf16_weights: bool = _model(False, "bfloat16 weights and optimizer state", "--bf16-weights")

    steps: int = _train(300, "optimizer steps of the whole run", min=1)
    batch_size: int = _train(16, "sequences per step, over all ranks and micro-batches", min=1)
    accumulate: int = _train(1, "micro-batches per step", min=1)
    optimizer: Literal["adamw", "sgd"] = _train("adamw", "sgd has momentum 0.9")
    lr: float = _train(3e-3, "peak learning rate", min=0)
    warmup: int = _train(20, "steps of linear warmup", min=0)
    schedule: Literal["cosine", "constant"] = _train("cosine", "of lr after the warmup")
    weight_decay: float = _train(0.1, "of matrices", min=0)
    clip: float = _train(1.0, "largest gradient norm", min=1e-12)
    bf16: bool = _train(False, "autocast to bfloat16", "--bf16")
    tasks: bool = _train(False, "a second head predicts the kind of the next character", "--tasks")
    task_weight: float | None = _train(None, "factor on the loss of that head (default 1)", min=0)
    compile: bool = _train(False, "torch.compile the model", "--compile")
    device: Literal["auto", "cpu", "cuda"] = _train("auto", "device to train on")

    parallel: Literal[tuple(PARALLELISMS)] = _parallel("ddp", "how ranks share the work, see below")
    tensor_parallel: int | None = _parallel(
        None, "ranks that split a layer under fsdp+tp (default 2)", min=2
    )
    zero: int | None = _parallel(None, "stage of ZeRO under deepspeed (default 2)", min=0, max=3)

    log_every: int = _output(10, "steps between lines, where there is no bar and no monitor", min=1)
    eval_every: int = _output(
        100, "steps between evaluations; also first and last; 0 for none", min=0
    )
    eval_sequences: int = _output(256, "sequences per evaluation", min=1)

    checkpoint_dir: Path = _checkpoints(Path("runs/checkpoints"), "folder of the checkpoints")
    save_every: int = _checkpoints(
        100, "steps between checkpoints; also at the end; 0 for none", min=0
    )
    keep: int = _checkpoints(1, "older checkpoints kept besides the latest", min=0)
    resume: str | None = _checkpoints(
        None, "continue, in any mode on any number of ranks", metavar="PATH|latest"
    )

    inject: Literal[tuple(FAULTS)] | None = _faults(None, "plant a real fault, see below")
    inject_at: int = _faults(40, "step of the fault", min=1)
    inject_rank: int | None = _faults(
        None, "default: the last for nan, desync, straggler, memory_leak; else all", min=0
    )
    inject_param: str | None = _faults(
        None, "default: a mlp.up.weight in the middle", metavar="NAME"
    )
    inject_seconds: float = _faults(0.2, "how much longer straggler and slow_data take", min=0)

    monitor: bool = _monitor(False, "monitor with distmon, see below", "--monitor", "--monitoring")
    monitor_settings: dict[str, Any] = field(default_factory=dict, init=False)
    """Keyword arguments for `distmon.attach`, from `--monitor.KEY VALUE`."""

    @property
    def shape(self) -> Shape:
        """The model's shape."""
        return Shape(
            *(self.layers, self.width, self.heads, self.context),
            tied=self.tied,
            residual=not self.no_residual,
            activation=self.activation,
            kinds=KIND_COUNT if self.tasks else 0,
            dtype="bfloat16" if self.bf16_weights else "float32",
        )

    @property
    def tokens_per_step(self) -> int:
        """Bytes that all ranks together train on in a step."""
        return self.batch_size * self.context

    @property
    def kind_weight(self) -> float | None:
        """Factor on the loss of the second task; None without one."""
        if not self.tasks:
            return None
        return 1.0 if self.task_weight is None else self.task_weight


def read_options(arguments: list[str], world: int, is_main: bool = True) -> Options:
    """Parse and check the command line of a run on `world` ranks; only rank 0 prints `--help`."""
    arguments, monitor_settings = split_monitor_options(arguments)
    try:
        with nullcontext() if is_main else redirect_stdout(io.StringIO()):
            options = command().main(arguments, prog_name="train.py", standalone_mode=False)
    except typer.BadParameter.__base__ as error:  # UsageError: of click, or of typer's copy of it
        raise BadInput(f"{error.format_message()} (--help lists the options)") from None
    if not isinstance(options, Options):
        raise SystemExit(0)  # after --help
    options.monitor_settings = monitor_settings
    check_options(options, world)
    return options


def command() -> Any:
    """Return the command that turns arguments into `Options`."""

    def train(**values: Any) -> Options:
        return Options(**values)

    types = get_type_hints(Options)
    declared = {each.name: each.metadata.get("option") for each in fields(Options)}
    train.__signature__ = Signature(  # which typer reads
        Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=types[name])
        for name, default in declared.items()
        if default is not None
    )
    app = typer.Typer(add_completion=False)
    app.command(help=Options.__doc__, epilog=EPILOG)(train)
    return typer.main.get_command(app)


def check_options(options: Options, world: int) -> None:
    """Raise `BadInput` for options that do not fit together, or not on `world` ranks."""
    mode = options.parallel
    if options.monitor_settings and not options.monitor:
        raise BadInput(
            "--monitor.* options do nothing without --monitor; add --monitor or --monitoring"
        )
    if options.width % options.heads:
        raise BadInput(f"--width {options.width} must be divisible by --heads {options.heads}")
    if options.task_weight is not None and not options.tasks:
        raise BadInput("--task-weight is for --tasks; add --tasks")
    if options.inject and options.inject_at > options.steps:
        raise BadInput(
            f"--inject-at {options.inject_at} is after the last step, --steps {options.steps}"
        )
    if options.tensor_parallel is not None and mode != "fsdp+tp":
        uses = ", which uses all ranks" if mode == "tp" else ""
        raise BadInput(f"--tensor-parallel is for --parallel fsdp+tp, not {mode}{uses}")
    if options.zero is not None and mode != "deepspeed":
        raise BadInput(f"--zero is for --parallel deepspeed, not {mode}")
    if mode != "ddp" and world < 2:
        raise BadInput(f"--parallel {mode} needs at least 2 ranks; start with torchrun")
    for name, modes, why in UNSUPPORTED:
        if mode in modes and getattr(options, name):
            raise BadInput(f"--{name.replace('_', '-')} does not work with --parallel {mode}{why}")
    parallelism_class(mode).divide(options, world).check_batch(options.batch_size)
