"""Healthy runs of practice that other sets lack, and faults of their kinds; all of the tuning half.

Written after an audit by a stranger: losses that rise while the model learns, trainers that reach
into a run, very short and very long runs, rare and dense observations.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.alarms.cases import Case
from benchmarks.alarms.faulty.fault_case import DIVERGES, LR, fault_case
from benchmarks.alarms.healthy_cases import COSINE, healthy_case
from benchmarks.alarms.kinds import distributed as d
from benchmarks.alarms.kinds import faults as f
from benchmarks.alarms.kinds import habits as h
from benchmarks.alarms.kinds import interventions as i
from benchmarks.alarms.kinds import quick as q
from benchmarks.alarms.kinds import rising as r
from benchmarks.alarms.kinds.language import language
from benchmarks.alarms.kinds.setup import Fault, warmup_cosine
from benchmarks.alarms.kinds.tabular import regression
from benchmarks.alarms.kinds.vision import classifier


def _every(interval: int, case: Case) -> Case:
    return replace(case, interval=interval)


PRACTICE_HEALTHY: tuple[Case, ...] = (
    healthy_case("latent-codes", "latent-codes", r.latent_codes, 400),
    healthy_case("latent-codes-fast", "latent-codes", r.latent_codes, 400, lr=4e-3, clip=None),
    healthy_case("latent-codes-few", "latent-codes", r.latent_codes, 400, codes=8, lr=2e-3),
    healthy_case(
        "latent-codes-large", "latent-codes", r.latent_codes, 300, unit=5.0, schedule=COSINE
    ),
    healthy_case("latent-codes-sgd", "latent-codes", r.latent_codes, 400, optimizer="sgd", lr=0.03),
    healthy_case(
        "latent-codes-outrun", "latent-codes", r.latent_codes, 400, unit=3.0, pull=0.02, lr=5e-3
    ),
    healthy_case(
        "latent-codes-behind",
        "latent-codes",
        r.latent_codes,
        400,
        unit=3.0,
        slow=0.02,
        lr=3e-3,
        clip=None,
    ),
    healthy_case("growing-returns", "growing-returns", r.growing_returns, 400),
    healthy_case(
        "growing-returns-fast", "growing-returns", r.growing_returns, 400, growth=0.1, clip=None
    ),
    healthy_case("filling-queue", "filling-queue", r.filling_queue),
    healthy_case("filling-queue-slow", "filling-queue", r.filling_queue, fill=280, most=2048),
    healthy_case("task-switches", "task-switches", r.task_switches, 400),
    healthy_case(
        "task-switches-sgd", "task-switches", r.task_switches, 400, optimizer="sgd", lr=0.05
    ),
    healthy_case("task-switches-often", "task-switches", r.task_switches, 400, period=40, tasks=10),
    healthy_case("harder-views", "harder-views", r.harder_views),
    healthy_case("longer-rollouts", "longer-rollouts", r.longer_rollouts),
    healthy_case("confusion", "confusion", r.confusion),
    healthy_case("confusion-strong", "confusion", r.confusion, most=5.0),
    healthy_case("gradual-pruning", "gradual-pruning", i.gradual_pruning, 400),
    healthy_case("gradual-pruning-hard", "gradual-pruning", i.gradual_pruning, 400, most=0.97),
    healthy_case(
        "gradual-pruning-sgd", "gradual-pruning", i.gradual_pruning, 400, optimizer="sgd", lr=0.03
    ),
    healthy_case("pruned-once", "gradual-pruning", i.pruned_once, 400),
    healthy_case("quantized-late", "quantized-late", i.quantized_late),
    healthy_case("swapped-average", "swapped-average", i.swapped_average),
    healthy_case(
        "swapped-average-kept", "swapped-average", i.swapped_average, back=False, every=100
    ),
    healthy_case("idle-experts", "idle-experts", i.idle_experts),
    healthy_case("idle-experts-late", "idle-experts", i.idle_experts, late=150),
    healthy_case("idle-experts-stop", "idle-experts", i.idle_experts, stop=150),
    healthy_case("starving-router", "starving-router", i.starving_router, 400),
    healthy_case("starving-router-two", "starving-router", i.starving_router, 400, top=2),
    healthy_case("periodic-resets", "periodic-resets", i.periodic_resets, 400),
    healthy_case("small-graph", "small-graph", i.small_graph, 400),
    healthy_case("small-graph-few", "small-graph", i.small_graph, 400, known=32, noise=1.2),
    healthy_case("small-graph-often", "small-graph", i.small_graph, 300, evaluate_every=10),
    _every(1, healthy_case("gpt-each-step", "gpt", language, 60)),
    _every(1, healthy_case("cnn-each-step", "cnn", classifier, 80, optimizer="sgd", lr=0.05)),
    _every(50, healthy_case("gpt-rarely", "gpt", language, 1000, schedule=warmup_cosine(1000, 50))),
    _every(
        50, healthy_case("regression-rarely", "regression", regression, 1500, evaluate_every=150)
    ),
    healthy_case("cnn-short", "cnn", classifier, 30, schedule=warmup_cosine(30, 3)),
    healthy_case(
        "gpt-very-long", "gpt", language, 2500, schedule=warmup_cosine(2500), evaluate_every=250
    ),
    healthy_case(
        "cnn-triangular", "cnn", classifier, 400, schedule=h.triangular(0.02, 100), lr=1e-2
    ),
    healthy_case("gpt-triangular", "gpt", language, 400, schedule=h.triangular(0.0, 80), lr=5e-3),
    healthy_case("ramped-batch", "ramped-batch", h.ramped_batch),
    healthy_case("ramped-batch-sgd", "ramped-batch", h.ramped_batch, optimizer="sgd", lr=0.02),
    healthy_case("summed-loss", "summed-loss", h.summed_loss),
    healthy_case("summed-loss-clipped", "summed-loss", h.summed_loss, clip=10.0, lr=3e-3),
    healthy_case("two-sources", "two-sources", h.two_sources, 400),
    healthy_case("two-sources-slow", "two-sources", h.two_sources, 400, period=130, lr=1e-3),
    healthy_case("moving-teacher", "moving-teacher", h.moving_teacher, 400),
    healthy_case("sampled-inputs", "sampled-inputs", h.sampled_inputs),
    healthy_case("interpolated", "interpolated", h.interpolated, 500),
    healthy_case("faint-tuning", "faint-tuning", h.faint_tuning, 400),
    healthy_case("faint-tuning-decayed", "faint-tuning", h.faint_tuning, schedule=COSINE, lr=1e-5),
    healthy_case("noisy-steps", "noisy-steps", h.noisy_steps, 400),
    healthy_case("born-again", "born-again", h.born_again, 400),
    healthy_case("clipped-critic", "clipped-critic", h.clipped_critic, 500),
    healthy_case("clipped-critic-fast", "clipped-critic", h.clipped_critic, 500, sync=10, lr=3e-3),
    healthy_case("sigmoids", "unscaled", q.sigmoids, 400),
    healthy_case("ddp-mlp-domains", "ddp-mlp", d.domains, 250),
    healthy_case("ddp-cnn-domains", "ddp-cnn", d.domains, 250, model="cnn"),
    healthy_case("regression-very-long", "regression", regression, 4000, evaluate_every=200),
)
SIGN = ("wrong_sign", *DIVERGES)
STUCK = ("saturated", "loss_insensitive", "loss_flat", "not_learning")
PRACTICE_FAULTY: tuple[Case, ...] = (
    *(
        fault_case(
            f"ddp-{name}-labels{late}",
            f"ddp-{name}",
            d.data_parallel,
            f.ShuffledOnRank(at),
            "rank_outlier",
            "rank 1",
            steps=250,
            model=name,
        )
        for name in ("mlp", "cnn")
        for late, at in (("", 1), ("-late", 121))
    ),
    fault_case(
        "ddp-mlp-element",
        "ddp-mlp",
        d.data_parallel,
        f.OneElement("2.weight", 101),
        "replica_desync",
        "rank 1",
        steps=150,
    ),
    fault_case(
        "ddp-cnn-element",
        "ddp-cnn",
        d.data_parallel,
        f.OneElement("9.weight", 101, 0.1),
        "replica_desync",
        "rank 1",
        steps=150,
        has_signal=False,
        model="cnn",
    ),
    fault_case(
        "unscaled", "unscaled", q.sigmoids, f.Unscaled(), STUCK, steps=400, has_signal=False
    ),
    fault_case(
        "unscaled-stuck",
        "unscaled",
        q.sigmoids,
        f.Unscaled(2550.0),
        STUCK,
        steps=400,
        optimizer="sgd",
        lr=0.003,
        depth=3,
    ),
    *(
        fault_case(
            f"bursting-{name}", "bursting", q.bursting, Fault(), DIVERGES, causes=LR, **options
        )
        for name, options in (
            ("adam", {"optimizer": "adamw", "lr": 3.0}),
            ("sgd", {"lr": 2.0}),
            ("classes", {"optimizer": "adamw", "lr": 10.0, "classes": 5}),
            ("classes-sgd", {"lr": 300.0, "classes": 5}),
        )
    ),
    *(
        fault_case(
            f"flipped-{name}",
            "flipped",
            make,
            f.SignFlips(at),
            SIGN,
            causes=("sign",),
            steps=300,
            **options,
        )
        for name, make, at, options in (
            ("cnn", classifier, 151, {}),
            ("cnn-sgd", classifier, 155, {"optimizer": "sgd", "lr": 0.02}),
            ("regression", regression, 151, {}),
            ("regression-clipped", regression, 158, {"clip": 1.0, "lr": 1e-3}),
            ("gpt", language, 151, {"lr": 1e-3}),
            ("lstm", language, 153, {"model": "lstm", "lr": 1e-3}),
        )
    ),
    *(
        fault_case(
            f"flipped-loss-{name}",
            "flipped",
            make,
            f.LossFlips(151),
            SIGN,
            causes=("sign",),
            steps=300,
            **options,
        )
        for name, make, options in (
            ("cnn", classifier, {}),
            ("regression", regression, {"clip": 1.0}),
            ("gpt", language, {}),
        )
    ),
)
