"""The command line: every option is declared once, typed, and checked before training starts."""

# ruff: noqa: RUF009  (`_option` is `dataclasses.field` with more metadata, and as harmless)
from __future__ import annotations

import argparse
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn

from bad_input import BadInput
from burdens import BURDENS
from faults import KINDS, FaultRequest
from gpt import ACTIVATIONS, Shape
from modes import MODES, divide
from monitoring import STOPPED, MonitorRequest, split_monitor_options
from optimization import OPTIMIZERS, SCHEDULES
from tasks import KIND_COUNT

EPILOG = f"""\
parallelism (--parallel): weights, batches and loss are the same in every mode, and a checkpoint of
one can be resumed in any other.
  ddp      every rank holds the model; a single process without torchrun is not wrapped
  fsdp     FSDP2: every parameter in as many pieces as ranks
  fsdp1    the same with FullyShardedDataParallel
  hsdp     FSDP2 in 2 replicas; an even number of ranks from 4 on
  tp       every layer split over all ranks: --heads and --context must be divisible by their number
  fsdp+tp  FSDP2 over groups of --tensor-parallel ranks that split every layer
  pp       consecutive blocks on consecutive ranks; as many micro-batches as ranks, or --accumulate
  deepspeed  a DeepSpeed engine with --zero 0 to 3, configured by launch/ds_zero*.json

monitoring: torchrun takes a bare --monitor for its own --monitor-interval and stops; there, write
--monitoring, or put -- before the script: torchrun --nproc-per-node 2 -- launch/train.py --monitor
With it, any key of distmon's configuration is an option, for example:
  --monitor.interval 20             steps from one observation to the next
  --monitor.sample-size exact       elements read per parameter, or all of them
  --monitor.topk 5                  how many of the worst parameters are named
  --monitor.sinks console,jsonl     where records go
  --monitor.run-dir runs/first      the run folder
  --monitor.rules.frozen.patience 2
  --monitor.actions.stop nonfinite  end the run when this rule fires
  --monitor.config monitor.yaml     a file with such keys; options win over it

faults (--inject): frozen drops the gradient of one parameter from that step on, as a misplaced hook
does; nan makes one gradient element NaN on one rank; spike trains one step on random bytes with the
loss 50 times too large; desync adds a little noise to one weight on one rank; dead pushes the
weights of one MLP to where no unit of it is ever active; straggler sleeps in every forward of one
rank; slow_data sleeps before every batch; memory_leak keeps 8 MB per step on one rank. All are
real.

exit code: 0 done; 2 bad input; {STOPPED} stopped by a rule of the monitor; 130 interrupted.
torchrun itself returns 1 when a rank's is not 0, and names that of each rank in its report.
"""


def _option(
    default: Any,
    help: str,
    *,
    group: str,
    low: float | None = None,
    kind: type | None = None,
    choices: tuple[str, ...] | None = None,
    metavar: str | None = None,
) -> Any:
    """A dataclass field that is also a command line option; `low` is its smallest valid value."""
    kind = kind or type(default)
    metavar = metavar or {int: "N", float: "X", Path: "PATH"}.get(kind)
    about = {
        "help": help,
        "group": group,
        "low": low,
        "kind": kind,
        "choices": choices,
        "metavar": metavar,
    }
    return field(default=default, metadata=about)


@dataclass(frozen=True)
class Options:
    """Everything that can be set about a training run."""

    data: Path | None = _option(
        None,
        "text file to train on; Python's own standard library when absent",
        group="data",
        kind=Path,
        metavar="FILE",
    )
    corpus_mb: float = _option(4.0, "read at most this many megabytes", group="data", low=0.001)
    seed: int = _option(0, "fixes weights and batches", group="data", low=0)

    layers: int = _option(4, "blocks", group="model", low=1)
    width: int = _option(128, "size of the residual stream", group="model", low=1)
    heads: int = _option(4, "attention heads", group="model", low=1)
    context: int = _option(128, "bytes per sequence", group="model", low=1)
    tied: bool = _option(False, "share the weight of embedding and head", group="model")
    activation: str = _option(
        "gelu", "between the matrices of an MLP", group="model", choices=tuple(ACTIVATIONS)
    )
    no_residual: bool = _option(False, "blocks without residual connections", group="model")
    init_std: float = _option(0.02, "standard deviation of new weights", group="model", low=0)
    bf16_weights: bool = _option(
        False, "weights and optimizer state in bfloat16, without float32 copies", group="model"
    )

    steps: int = _option(300, "optimizer steps of the whole run", group="training", low=1)
    batch_size: int = _option(
        16, "sequences per step, over all ranks and micro-batches", group="training", low=1
    )
    accumulate: int = _option(1, "micro-batches per step", group="training", low=1)
    optimizer: str = _option(
        "adamw", "sgd has a momentum of 0.9", group="training", choices=OPTIMIZERS
    )
    lr: float = _option(3e-3, "peak learning rate", group="training", low=0)
    warmup: int = _option(20, "steps of linear warmup", group="training", low=0)
    schedule: str = _option(
        "cosine", "of the learning rate after the warmup", group="training", choices=SCHEDULES
    )
    weight_decay: float = _option(0.1, "of matrices", group="training", low=0)
    clip: float = _option(1.0, "largest gradient norm", group="training", low=1e-12)
    bf16: bool = _option(False, "autocast to bfloat16", group="training")
    tasks: bool = _option(
        False, "a second head learns what kind of character comes next", group="training"
    )
    task_weight: float | None = _option(
        None, "factor on the loss of that head (default 1)", group="training", low=0, kind=float
    )
    compile: bool = _option(False, "torch.compile the model", group="training")
    device: str = _option(
        "auto", "what to train on", group="training", choices=("auto", "cpu", "cuda")
    )

    parallel: str = _option(
        "ddp", "how torchrun's ranks share the work, see below", group="parallelism", choices=MODES
    )
    tensor_parallel: int | None = _option(
        None,
        "ranks that split a layer under fsdp+tp (default 2)",
        group="parallelism",
        low=2,
        kind=int,
    )

    zero: str | None = _option(
        None,
        "stage of ZeRO under deepspeed (default 2)",
        group="parallelism",
        kind=str,
        choices=("0", "1", "2", "3"),
    )

    log_every: int = _option(
        10, "steps between plain lines, where there is no bar and no monitor", group="output", low=1
    )
    eval_every: int = _option(
        100, "steps between evaluations; also first and last; 0 for none", group="output", low=0
    )
    eval_sequences: int = _option(256, "validation sequences per evaluation", group="output", low=1)

    checkpoint_dir: Path = _option(
        Path("runs/checkpoints"), "folder of the checkpoints", group="checkpoints", kind=Path
    )
    save_every: int = _option(
        100, "steps between checkpoints; also at the end; 0 for none", group="checkpoints", low=0
    )
    keep: int = _option(1, "older checkpoints kept besides the latest", group="checkpoints", low=0)
    resume: str | None = _option(
        None,
        "continue from a checkpoint, in any mode and on any number of ranks",
        group="checkpoints",
        kind=str,
        metavar="PATH|latest",
    )

    inject: str | None = _option(
        None, "plant a real fault, see below", group="faults", kind=str, choices=(*KINDS, *BURDENS)
    )
    inject_at: int = _option(40, "step of the fault", group="faults", low=1)
    inject_rank: int | None = _option(
        None,
        "rank of the fault; nan, desync, straggler, memory_leak: the last one; others: all",
        group="faults",
        low=0,
        kind=int,
    )
    inject_param: str | None = _option(
        None,
        "parameter of the fault; a middle mlp.up.weight when absent",
        group="faults",
        kind=str,
        metavar="NAME",
    )

    inject_seconds: float = _option(
        0.2, "how much longer straggler and slow_data take", group="faults", low=0
    )

    monitor: MonitorRequest | None = None
    """None: distmon is not even imported."""

    @property
    def fault(self) -> FaultRequest | None:
        """What `--inject` and its companions ask for."""
        if self.inject is None:
            return None
        return FaultRequest(
            self.inject, self.inject_at, self.inject_param, self.inject_rank, self.seed
        )

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
    def kind_weight(self) -> float | None:
        """Factor on the loss of the second task; None without one."""
        if not self.tasks:
            return None
        return 1.0 if self.task_weight is None else self.task_weight


class _Parser(argparse.ArgumentParser):
    """Reports mistakes as `BadInput`, so that only one of many ranks prints them."""

    def __init__(self, speaks: bool) -> None:
        super().__init__(
            prog="train.py",
            description="Train a small language model on bytes, with one process or with torchrun.",
            epilog=EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self.speaks = speaks

    def error(self, message: str) -> NoReturn:
        raise BadInput(f"{message} (--help lists the options)")

    def print_help(self, file: Any = None) -> None:
        if self.speaks:
            super().print_help(file)


def read_options(arguments: list[str], world: int, speaks: bool = True) -> Options:
    """Parse and check the command line of a run on `world` ranks; `speaks`: print `--help`."""
    arguments, request = split_monitor_options(arguments)
    parser = _build_parser(speaks)
    values = vars(parser.parse_args(arguments))
    monitored = values.pop("monitor")
    if not monitored and (request.overrides or request.config):
        raise BadInput(
            "--monitor.* options do nothing without --monitor; add --monitor or --monitoring"
        )
    options = Options(**values, monitor=request if monitored else None)
    _check(options, world)
    return options


def _build_parser(speaks: bool) -> _Parser:
    parser = _Parser(speaks)
    groups: dict[str, Any] = {}
    for each in fields(Options):
        about = each.metadata
        if not about:
            continue
        group = groups.setdefault(about["group"], None) or parser.add_argument_group(about["group"])
        groups[about["group"]] = group
        flag = "--" + each.name.replace("_", "-")
        text = about["help"]
        if each.default is not None and each.default is not False:
            text = f"{text} (default {each.default})".strip()
        if about["kind"] is bool:
            group.add_argument(flag, action="store_true", help=text)
        else:
            group.add_argument(
                flag,
                type=about["kind"],
                default=each.default,
                choices=about["choices"],
                metavar=about["metavar"],
                help=text,
            )
    parser.add_argument_group("monitoring").add_argument(
        "--monitor",
        "--monitoring",
        action="store_true",
        help="watch the run with distmon, see below",
    )
    return parser


def _check(options: Options, world: int) -> None:
    for each in fields(Options):
        low, value = each.metadata.get("low"), getattr(options, each.name)
        # Written so that NaN, which compares as false with everything, is refused too.
        if low is not None and value is not None and not value >= low:
            flag = "--" + each.name.replace("_", "-")
            raise BadInput(f"{flag} must be at least {low}, not {value}")
    if options.width % options.heads:
        raise BadInput(f"--width {options.width} must be divisible by --heads {options.heads}")
    if options.task_weight is not None and not options.tasks:
        raise BadInput("--task-weight is for --tasks; add --tasks")
    divide(options, world)
    if options.inject and options.inject_at > options.steps:
        raise BadInput(
            f"--inject-at {options.inject_at} is after the last step, --steps {options.steps}"
        )
