"""Where the thresholds come from: each statistic on healthy runs and on the faults of its rule.

    python -m benchmarks.alarms.statistics

On the two halves of the second corpus, not on the other sets. Each rule is evaluated with a
threshold that almost everything passes, and the extreme of what it measured is kept for each run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from benchmarks.alarms.corpus import CASES
from benchmarks.alarms.score_cases import CaseScore, score_all
from distmon.config import load_config
from distmon.rules import BUILTIN, RuleEngine, configure


@dataclass(frozen=True)
class Statistic:
    """One statistic of a rule, and thresholds that let everything pass."""

    rule: str
    threshold: str
    loose: dict[str, float]
    worst: Callable[[Iterable[float]], float]
    """`max` or `min`: which extreme is that of a faulty run."""


STATISTICS = (
    Statistic("grad_norm_high", "ratio", {"ratio": 1e-9, "sensitive": 1e99}, max),
    Statistic("grad_norm_high", "sensitive", {"sensitive": 0.0, "ratio": 1e99}, max),
    Statistic("loss_divergence", "lost", {"lost": 0.0}, max),
    Statistic("not_learning", "ratio", {"ratio": 1e9}, min),
    Statistic("weights_replaced", "factor", {"factor": 0.0, "change": 0.2}, max),
    Statistic("weight_collapse", "share", {"share": 2.0}, min),
    Statistic("exploding_rows", "growth", {"growth": 0.0, "lately": 0.0}, max),
    Statistic("update_lost", "fraction", {"fraction": 0.0}, max),
    Statistic("stale_gradients", "share", {"share": 0.0}, max),
    Statistic("lr_jump", "factor", {"factor": 0.0}, max),
    Statistic("loss_insensitive", "product", {"product": 1e9}, min),
    Statistic("wrong_sign", "pace", {"pace": 0.0}, max),
    Statistic("grad_imbalance", "vanishing", {"vanishing": 1e9, "dead": -1.0}, min),
)


def measured(statistic: Statistic, score: CaseScore) -> float | None:
    """Return the extreme that the rule measured on one run; None when it measured nothing."""
    rules = [rule for rule in BUILTIN if rule.name == statistic.rule]
    settings = {statistic.rule: {**statistic.loose, "patience": 1, "cooldown": 0}}
    engine = RuleEngine(configure(rules, load_config({"rules": settings}, environ={}).rules))
    begin = score.begin
    values = [
        alert.measured
        for record in score.replay.records
        for alert in engine.evaluate(record)[0]
        if alert.measured is not None and record.step >= begin
    ]
    return statistic.worst(values) if values else None


def main() -> int:
    """Print one line for each statistic."""
    scores = [*score_all(half="tuning"), *score_all(half="held_back")]
    table = Table("rule", "statistic", "threshold", "healthy runs, worst", "faults, mildest")
    for statistic in STATISTICS:
        rule = next(each for each in BUILTIN if each.name == statistic.rule)
        mild = min if statistic.worst is max else max
        found: dict[bool, list[tuple[float, str]]] = {True: [], False: []}
        for score in scores:
            expected = CASES[score.case.name].expected
            if expected is not None and expected.rules[0] != statistic.rule:
                continue
            value = measured(statistic, score)
            if value is not None:
                found[expected is not None].append((value, score.case.name))
        healthy, faulty = found[False], found[True]
        table.add_row(
            statistic.rule,
            statistic.threshold,
            f"{rule.thresholds[statistic.threshold].value:g}",
            "{:.3g} ({})".format(*statistic.worst(healthy)) if healthy else "",
            "{:.3g} ({})".format(*mild(faulty)) if faulty else "",
        )
    Console(width=120).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
