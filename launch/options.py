"""The command line: every option is declared once, typed and checked before training starts."""

from __future__ import annotations

import io
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

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
        *(f"  {name:12}{kind.help}" for name, kind in FAULTS.items()),
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
PANELS = ("data", "model", "training", "parallelism", "output", "checkpoints", "faults", "monitor")
_data, _model, _training, _parallel, _output, _checkpoints, _faults, _monitor = (
    partial(typer.Option, rich_help_panel=panel) for panel in PANELS
)


@dataclass
class Options:
    """Train a small language model on bytes, with one process or with torchrun."""

    data: Annotated[
        Path | None, _data(metavar="FILE", help="text to train on; else Python's standard library")
    ] = None
    corpus_mb: Annotated[float, _data(min=0.001, help="read at most this many megabytes")] = 4.0
    seed: Annotated[int, _data(min=0, help="determines weights and batches")] = 0

    layers: Annotated[int, _model(min=1, help="blocks")] = 4
    width: Annotated[int, _model(min=1, help="size of the residual stream")] = 128
    heads: Annotated[int, _model(min=1, help="attention heads")] = 4
    context: Annotated[int, _model(min=1, help="bytes per sequence")] = 128
    tied: Annotated[bool, _model("--tied", help="share the weight of embedding and head")] = False
    activation: Annotated[
        Literal[tuple(ACTIVATIONS)], _model(help="between the matrices of an MLP")
    ] = "gelu"
    no_residual: Annotated[
        bool, _model("--no-residual", help="blocks without residual connections")
    ] = False
    init_std: Annotated[float, _model(min=0, help="standard deviation of new weights")] = 0.02
    bf16_weights: Annotated[
        bool, _model("--bf16-weights", help="weights and optimizer state in bfloat16 only")
    ] = False

    steps: Annotated[int, _training(min=1, help="optimizer steps of the whole run")] = 300
    batch_size: Annotated[
        int, _training(min=1, help="sequences per step, over all ranks and micro-batches")
    ] = 16
    accumulate: Annotated[int, _training(min=1, help="micro-batches per step")] = 1
    optimizer: Annotated[Literal["adamw", "sgd"], _training(help="sgd has momentum 0.9")] = "adamw"
    lr: Annotated[float, _training(min=0, help="peak learning rate")] = 3e-3
    warmup: Annotated[int, _training(min=0, help="steps of linear warmup")] = 20
    schedule: Annotated[
        Literal["cosine", "constant"], _training(help="of the learning rate after the warmup")
    ] = "cosine"
    weight_decay: Annotated[float, _training(min=0, help="of matrices")] = 0.1
    clip: Annotated[float, _training(min=1e-12, help="largest gradient norm")] = 1.0
    bf16: Annotated[bool, _training("--bf16", help="autocast to bfloat16")] = False
    tasks: Annotated[
        bool, _training("--tasks", help="a second head predicts the kind of the next character")
    ] = False
    task_weight: Annotated[
        float | None, _training(min=0, help="factor on the loss of that head (default 1)")
    ] = None
    compile: Annotated[bool, _training("--compile", help="torch.compile the model")] = False
    device: Annotated[Literal["auto", "cpu", "cuda"], _training(help="device to train on")] = "auto"

    parallel: Annotated[
        Literal[tuple(PARALLELISMS)], _parallel(help="how ranks share the work, see below")
    ] = "ddp"
    tensor_parallel: Annotated[
        int | None, _parallel(min=2, help="ranks that split a layer under fsdp+tp (default 2)")
    ] = None
    zero: Annotated[
        int | None, _parallel(min=0, max=3, help="stage of ZeRO under deepspeed (default 2)")
    ] = None

    log_every: Annotated[
        int, _output(min=1, help="steps between lines, where there is no bar and no monitor")
    ] = 10
    eval_every: Annotated[
        int, _output(min=0, help="steps between evaluations; also first and last; 0 for none")
    ] = 100
    eval_sequences: Annotated[int, _output(min=1, help="sequences per evaluation")] = 256

    checkpoint_dir: Annotated[Path, _checkpoints(help="folder of the checkpoints")] = Path(
        "runs/checkpoints"
    )
    save_every: Annotated[
        int, _checkpoints(min=0, help="steps between checkpoints; also at the end; 0 for none")
    ] = 100
    keep: Annotated[int, _checkpoints(min=0, help="older checkpoints kept besides the latest")] = 1
    resume: Annotated[
        str | None,
        _checkpoints(metavar="PATH|latest", help="continue, in any mode on any number of ranks"),
    ] = None

    inject: Annotated[
        Literal[tuple(FAULTS)] | None, _faults(help="plant a real fault, see below")
    ] = None
    inject_at: Annotated[int, _faults(min=1, help="step of the fault")] = 40
    inject_rank: Annotated[
        int | None,
        _faults(min=0, help="default: the last for nan, desync, straggler, memory_leak; else all"),
    ] = None
    inject_param: Annotated[
        str | None, _faults(metavar="NAME", help="default: a mlp.up.weight in the middle")
    ] = None
    inject_seconds: Annotated[
        float, _faults(min=0, help="how much longer straggler and slow_data take")
    ] = 0.2

    monitor: Annotated[
        bool, _monitor("--monitor", "--monitoring", help="monitor with distmon, see below")
    ] = False
    monitor_settings: dict[str, Any] = field(default_factory=dict, init=False)
    """Keyword arguments for `distmon.attach`, from `--monitor.KEY VALUE`."""

    @property
    def shape(self) -> Shape:
        """The model's shape."""
        return Shape(
            self.layers,
            self.width,
            self.heads,
            self.context,
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
    app = typer.Typer(add_completion=False)
    app.command(epilog=EPILOG)(Options)
    command = typer.main.get_command(app)
    try:
        with nullcontext() if is_main else redirect_stdout(io.StringIO()):
            options = command.main(arguments, prog_name="train.py", standalone_mode=False)
    except typer.BadParameter.__base__ as error:  # UsageError: of click, or of typer's copy of it
        raise BadInput(f"{error.format_message()} (--help lists the options)") from None
    if not isinstance(options, Options):
        raise SystemExit(0)  # after --help
    options.monitor_settings = monitor_settings
    check_options(options, world)
    return options


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
