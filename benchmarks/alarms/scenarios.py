"""The runs of the corpus: how each is trained, and which alerts it has to have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

COMMON = (
    "--layers 2 --width 48 --heads 4 --context 32 --batch-size 16 --steps 300 --eval-every 50 "
    "--eval-sequences 64 --save-every 0 --monitoring --monitor.interval 5 "
    "--monitor.budget null --monitor.percentiles false --monitor.sinks jsonl,arrow"
)
"""Of every run; the arguments of a scenario come after these and win."""

LOOSE = "--clip 1e9"
"""As good as no clipping."""


@dataclass(frozen=True)
class Expectation:
    """The alert that has to name a planted fault: by one of these rules, there, and then."""

    rules: tuple[str, ...]
    place: str = ""
    """Glob for a parameter, a layer or a `rank 1` of the alert; empty: the run as a whole."""
    steps: tuple[int, int] = (1, 10**9)
    words: str = ""
    """Part of the message."""


@dataclass(frozen=True)
class Scenario:
    """One run."""

    name: str
    about: str
    arguments: str
    expected: Expectation | None = None
    """None: the run is healthy."""
    nan: Literal["never", "coming", "planted"] = "never"
    """Whether it reaches NaN: by itself, so that rules can warn, or planted in one step."""
    ranks: int = 1
    resumed_at: int | None = None
    """Trained in two goes, the second from a checkpoint of this step; the rate must be constant."""

    @property
    def kind(self) -> Literal["healthy", "failing"]:
        """Whether rules should stay quiet."""
        return "failing" if self.expected else "healthy"


HEALTHY = (
    Scenario("adamw", "two layers, the trainer's own settings", ""),
    Scenario("adamw-deep", "four layers, a lower rate", "--layers 4 --width 32 --lr 1e-3"),
    Scenario("adamw-constant", "the rate stays", "--schedule constant --lr 1e-3"),
    Scenario(
        "adamw-wide",
        "tied, twice as wide, a long warmup",
        "--tied --width 96 --lr 2e-3 --warmup 60 --steps 240",
    ),
    Scenario("adamw-slow", "a low rate that still learns", "--lr 3e-4 --weight-decay 0"),
    Scenario("sgd", "momentum, clipped", "--optimizer sgd --lr 0.03"),
    Scenario(
        "sgd-gentle",
        "momentum, hardly ever clipped",
        f"--optimizer sgd --lr 0.01 {LOOSE}",
    ),
    Scenario("bf16", "autocast", "--bf16 --lr 2e-3"),
    Scenario("relu", "another activation", "--activation relu --layers 3"),
    Scenario("accumulate", "four micro-batches a step", "--accumulate 4 --lr 2e-3"),
    Scenario(
        "resumed",
        "from a checkpoint, as after a crash",
        "--lr 2e-3 --schedule constant",
        resumed_at=150,
    ),
    Scenario(
        "tasks", "two tasks of like force", "--tasks --task-weight 1 --monitor.task-interval 5"
    ),
    Scenario(
        "long",
        "a thousand steps",
        "--width 32 --steps 1000 --lr 2e-3 --monitor.interval 20 --eval-every 100",
    ),
    Scenario("two-ranks", "DDP", "--steps 200", ranks=2),
    Scenario("two-shards", "FSDP2", "--steps 200 --parallel fsdp --lr 1e-3", ranks=2),
)

TOO_HIGH = (
    *("gain_absolute", "gain_drift", "grad_norm_high", "grad_imbalance"),
    *("update_ratio_high", "loss_spike", "loss_divergence"),
)
"""Rules of gain, gradient, update ratio and loss that see a run get out of hand, and a NaN come."""
FAST = "--schedule constant --monitor.interval 2 --steps"

FAILING = (
    Scenario(
        "nan-sgd",
        "far too high a rate for SGD",
        f"--optimizer sgd --lr 1 {LOOSE} --layers 3 {FAST} 60",
        Expectation(TOO_HIGH),
        nan="coming",
    ),
    Scenario(
        "nan-sgd-late",
        "too high a rate for SGD: it looks well for a while",
        f"--optimizer sgd --lr 0.5 {LOOSE} --layers 3 {FAST} 90",
        Expectation(TOO_HIGH),
        nan="coming",
    ),
    Scenario(
        "nan-adamw",
        "rate times weight decay above 2: AdamW throws the weights about",
        f"--lr 25 {LOOSE} {FAST} 50",
        Expectation(TOO_HIGH),
        nan="coming",
    ),
    Scenario(
        "nan-no-residual",
        "without residual connections, too high a rate",
        f"--optimizer sgd --lr 0.5 {LOOSE} --layers 4 --no-residual {FAST} 70",
        Expectation(TOO_HIGH),
        nan="coming",
    ),
    Scenario(
        "nan-bf16",
        "autocast, too high a rate",
        f"--optimizer sgd --lr 0.7 {LOOSE} --bf16 --layers 3 {FAST} 70",
        Expectation(TOO_HIGH),
        nan="coming",
    ),
    Scenario(
        "nan-warmup",
        "full rate at once",
        f"--optimizer sgd --lr 0.7 --warmup 1 {LOOSE} --layers 3 {FAST} 50",
        Expectation(TOO_HIGH),
        nan="coming",
    ),
    Scenario(
        "nan-relu",
        "deeper, with ReLU, too high a rate",
        f"--optimizer sgd --lr 0.5 {LOOSE} --layers 5 --activation relu {FAST} 70",
        Expectation(TOO_HIGH),
        nan="coming",
    ),
    Scenario(
        "init-large",
        "starts with far too large weights",
        f"--optimizer sgd --lr 0.1 {LOOSE} --init-std 1 --layers 3 {FAST} 60",
        Expectation(TOO_HIGH),
    ),
    Scenario(
        "warmup-steep",
        "a high rate at once; it never recovers from the first steps",
        f"--lr 0.1 --warmup 2 {FAST} 60",
        Expectation((*TOO_HIGH, "lr_check"), steps=(1, 60)),
    ),
    Scenario(
        "dead-layer",
        "an MLP dies; the rest of its block lives",
        "--inject dead --inject-at 61 --activation relu --layers 3 --steps 150",
        Expectation(("grad_imbalance", "frozen"), "blocks.1*", (61, 100)),
    ),
    Scenario(
        "dead-block",
        "an MLP dies, and without residual connections all that is before it",
        "--inject dead --inject-at 61 --no-residual --layers 3 --steps 120",
        Expectation(("grad_imbalance",), "blocks.1", (61, 90)),
    ),
    Scenario(
        "vanishing",
        "deep, without residual connections",
        "--no-residual --layers 8 --width 32 --steps 120",
        Expectation(("grad_imbalance",), "blocks.0"),
    ),
    Scenario(
        "overfit",
        "three kilobytes of text, seventy times",
        "--corpus-mb 0.003 --width 96 --steps 400 --eval-every 40 --monitor.interval 10",
        Expectation(("overfit", "val_increase")),
    ),
    Scenario(
        "plateau",
        "a model that is too small to learn more",
        "--layers 1 --width 8 --heads 1 --schedule constant --steps 800 --monitor.interval 20",
        Expectation(("eval_plateau", "loss_plateau", "no_improvement")),
    ),
    Scenario(
        "lr-too-low",
        "hardly moves",
        "--lr 1e-6 --schedule constant --steps 150",
        Expectation(("lr_check", "eval_plateau", "loss_plateau")),
    ),
    Scenario(
        "glitch",
        "one batch of garbage",
        "--inject spike --inject-at 103 --steps 150",
        Expectation(("loss_spike",), steps=(103, 105)),
    ),
    Scenario(
        "frozen",
        "a hook drops a gradient",
        "--inject frozen --inject-at 61 --steps 150",
        Expectation(("frozen",), "blocks.1.mlp.up.weight", (61, 90)),
    ),
    Scenario(
        "rounding",
        "bf16 weights without float32 copies: the norms stand still",
        "--bf16-weights --lr 1e-4 --steps 150",
        Expectation(("frozen",), "blocks.*.norm*.weight"),
    ),
    Scenario(
        "rounding-all",
        "bf16 weights, a rate below what they can hold",
        "--bf16-weights --lr 1e-6 --steps 150",
        Expectation(("frozen",), "blocks.*.norm*.weight"),
    ),
    Scenario(
        "task-collapse",
        "one task shouts the other down",
        "--tasks --task-weight 30 --monitor.task-interval 5 --steps 150",
        Expectation(("task_collapse",), words="kind"),
    ),
    Scenario(
        "task-starved",
        "one task is not heard",
        "--tasks --task-weight 0.03 --monitor.task-interval 5 --steps 150",
        Expectation(("task_collapse",), words="byte"),
    ),
    Scenario(
        "nan-planted",
        "one NaN in one gradient, out of nothing",
        "--inject nan --inject-at 61 --steps 100",
        Expectation(("nonfinite",), "blocks.1.mlp.up.weight", (61, 65)),
        nan="planted",
    ),
    Scenario(
        "desync",
        "the replica of rank 1 drifts away",
        "--inject desync --inject-at 61 --steps 100",
        Expectation(("replica_desync",), "rank 1", (61, 65)),
        ranks=2,
    ),
)

SCENARIOS = {each.name: each for each in (*HEALTHY, *FAILING)}
