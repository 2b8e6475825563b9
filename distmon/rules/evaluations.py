"""Validation loss: slow improvement, overfitting, underfitting, a wrong learning rate."""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite

from distmon.record.record import Evaluation, Record
from distmon.rules.advice import lower_lr, raise_lr
from distmon.rules.base import MARGIN, Finding, Limits, Memory, Rule, Threshold
from distmon.rules.evaluation_noise import chance_difference, is_usual_batch
from distmon.rules.lr_schedule import lr_phase

_PLATEAU = 3
"""Evaluations in a row without a change."""
_LOWEST = 1.5
"""Times the difference that chance makes of two evaluations: that from the lowest of many."""


def _number(value: float | None) -> float:
    """Return NaN for None: comparisons with it are false, so nothing is reported."""
    return float("nan") if value is None else value


def _early(evaluation: Evaluation, limits: Limits) -> bool:
    """Return whether the rule applies to this evaluation, by `until_evaluation`."""
    until = limits["until_evaluation"]
    return evaluation.number >= 2 and (until == 0 or evaluation.number <= until)


def _share(evaluation: Evaluation, memory: Memory) -> float:
    """Return the share of the run so far between an evaluation and the previous one.

    Late in a run, or after a resume without state, two evaluations are close together compared with
    the steps before them, and their losses are similar in a healthy run too. The step of the
    previous evaluation is kept in `memory["evaluated"]`; without it, evaluations are assumed to be
    evenly spaced.
    """
    before = memory.get("evaluated", evaluation.step * (1 - 1 / evaluation.number))
    memory["evaluated"] = evaluation.step
    return (evaluation.step - before) / evaluation.step if evaluation.step > 0 else 1.0


def _matters(record: Record, difference: float, share: float) -> bool:
    """Return whether a difference of losses is a part of the progress that the run has made.

    Of a loss near zero, or one that has no natural zero, a relative difference means nothing.
    """
    start, best = record.history.start, record.history.best
    return start is None or best is None or difference > share * (start - best)


def _at(evaluation: Evaluation) -> str:
    return f"at evaluation {evaluation.number} (step {evaluation.step})"


def _chance_rate(record: Record, each: Evaluation, memory: Memory) -> float:
    """Return the improvement over the previous evaluation that chance can make or hide."""
    difference = chance_difference(record, each, memory)
    left = 1 - _number(each.improvement)
    return difference * abs(left / each.val_loss) if each.val_loss else 0.0


def check_slow(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:
    """Find evaluations that improve too little on the previous one, whatever their noise hides."""
    phase = lr_phase(record, memory)
    for each in record.evaluations:
        rate, chance = _number(each.improvement), _chance_rate(record, each, memory)
        # Three in a row are reported by `eval_plateau`; a rate that warms up or has decayed
        # explains slow improvement.
        applies = each.unchanged < _PLATEAU and phase not in ("rising", "ending")
        poor = -limits["worse"] <= rate < limits["poor"] - chance
        memory["poor"] = memory.get("poor", 0) + 1 if poor else 0
        # While the training loss comes down, one such evaluation is no news.
        comes_down = _comes_down(record)
        applies &= memory["poor"] > 1 or not comes_down
        if _share(each, memory) >= limits["share"] and applies and poor:
            before = each.val_loss / (1 - rate)
            moved = f"improved by {rate:.2%}" if rate >= 0 else f"rose by {-rate:.2%}"
            yield Finding(
                key="slow",
                message=f"the validation loss {moved} {_at(each)}, from {before:.4g} to "
                f"{each.val_loss:.4g} (poor below {limits['poor']:.0%}, good above "
                f"{limits['good']:.0%})",
                severity="info" if comes_down else None,
                measured=rate,
                threshold=limits["poor"],
            )


def _falls(each: Evaluation) -> bool:
    """Return whether the training loss is lower than at the previous evaluation."""
    return _number(each.train_improvement) > 0


def _comes_down(record: Record) -> bool:
    """Return whether the training loss has come down or does so, however slowly."""
    history = record.history
    return history.has_fallen or (len(history.losses) > 0 and history.falls)


def _seen_often_enough(record: Record, each: Evaluation, memory: Memory, high: bool) -> bool:
    """Return whether a loss is too high twice in a row, or once as no training batch was lately."""
    memory["high"] = memory.get("high", 0) + 1 if high else 0
    return memory["high"] > 1 or (high and not is_usual_batch(record, each))


def check_overfit(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:
    """Find a validation loss above the training loss; an info while it still improves."""
    for each in record.evaluations:
        gap, train = _number(each.gap), _number(each.train_loss)
        # What is left of the gap if chance made as much of it as it can.
        certain = gap - chance_difference(record, each, memory) / abs(train) if train else gap
        mild = limits["mild"] < certain <= limits["severe"] and _early(each, limits)
        high = mild or certain > (1 - MARGIN) * limits["severe"]
        if not _seen_often_enough(record, each, memory, high):
            continue
        if not _matters(record, each.val_loss - train, limits["progress"]):
            continue
        improves = each.improvement is None or each.improvement > limits["improves"]
        limit = limits["mild" if mild else "severe"]
        yield Finding(
            key="gap",
            message=f"{'mild' if mild else 'severe'} overfitting {_at(each)}: the validation loss "
            f"{each.val_loss:.4g} is {gap:.0%} above the training loss "
            f"{train:.4g} (limit {limit:.0%})",
            severity="info" if mild or improves else None,
            measured=gap,
            threshold=limit,
            fading=certain <= limit,
        )


def check_increase(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:
    """Find a validation loss that rises, by more than chance makes."""
    for each in record.evaluations:
        if not isfinite(each.val_loss):
            continue
        best = min(memory.get("best", each.val_loss), each.val_loss)
        memory["best"] = best
        rise = each.val_loss - memory.get("val_losses", [each.val_loss])[-1]
        chance = chance_difference(record, each, memory)
        risen = -_number(each.improvement) > limits["noise"] and rise > chance
        diverging = risen and _falls(each)
        memory["apart"] = memory.get("apart", 0) + 1 if diverging else 0
        above = (each.val_loss - best) / best if best > 0 else 0.0
        training = ", while the training loss falls" if diverging else ""
        # The lowest of several is lower than usual by chance, this one higher.
        certain = above - _LOWEST * chance / best if best > 0 else 0.0
        high = certain > (1 - MARGIN) * limits["rise"]
        confirmed = _seen_often_enough(record, each, memory, high)
        if not _matters(record, each.val_loss - best, limits["progress"]):
            continue
        if high and confirmed:
            yield Finding(
                key="increase",
                message=f"the validation loss is {each.val_loss:.4g} {_at(each)}, {above:.0%} "
                f"above its best {best:.4g} (limit {limits['rise']:.0%}){training}",
                measured=above,
                threshold=limits["rise"],
                fading=certain <= limits["rise"],
            )
        elif memory["apart"] >= limits["apart"]:
            yield Finding(
                key="increase",
                message=f"the validation loss rose {memory['apart']} times in a row while the "
                f"training loss fell; it is {each.val_loss:.4g} {_at(each)}, {above:.1%} above its "
                f"best {best:.4g}",
                measured=float(memory["apart"]),
                threshold=limits["apart"],
            )


def check_plateau(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:
    """Find evaluations in a row with hardly any change."""
    phase = lr_phase(record, memory)
    for each in record.evaluations:
        if each.unchanged >= limits["evaluations"] and phase != "ending":
            yield Finding(
                key="plateau",
                message=f"the validation loss has hardly changed for {each.unchanged} evaluations "
                f"(each by less than 1%); it is {each.val_loss:.4g} {_at(each)}",
                advice=(lower_lr(record), *_ADVICE_PLATEAU[1:]),
                severity="info" if _comes_down(record) else None,
                measured=float(each.unchanged),
                threshold=limits["evaluations"],
            )


def check_underfit(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:  # noqa: ARG001
    """Find training and validation losses that are close together and both fall slowly."""
    for each in record.evaluations:
        rates = _number(each.improvement), _number(each.train_improvement)
        slowly = all(limits["slowest"] <= rate <= limits["fastest"] for rate in rates)
        if _early(each, limits) and abs(_number(each.gap)) < limits["gap"] and slowly:
            yield Finding(
                key="underfit",
                message=f"the model underfits {_at(each)}: training {_number(each.train_loss):.4g} "
                f"and validation {each.val_loss:.4g} are {_number(each.gap):.1%} apart (below "
                f"{limits['gap']:.0%}) and fall slowly, by {rates[1]:.1%} and {rates[0]:.1%}",
                advice=(*_ADVICE_UNDERFIT[:2], raise_lr(record)),
                measured=_number(each.gap),
                threshold=limits["gap"],
            )


def check_lr(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:
    """Compare the second evaluation with the first: did the loss fall, stay or rise?"""
    for each in record.evaluations:
        chance = _chance_rate(record, each, memory)
        if _share(each, memory) < limits["share"] or each.number != 2:
            continue
        rate = _number(each.improvement)
        risen = each.val_loss - each.val_loss / (1 - rate) if rate < 0 else 0.0
        if -rate > limits["spiked"] + chance:
            # While the training loss falls, the model overfits; the rate is not to blame.
            if _falls(each) or not _matters(record, risen, limits["progress"]):
                continue
            yield Finding(
                key="high",
                message=f"the validation loss rose by {-rate:.0%} to {each.val_loss:.4g} between "
                f"the first two evaluations (limit {limits['spiked']:.0%}): the learning rate is "
                "too high",
                severity="warning",
                advice=(lower_lr(record), *_ADVICE_LR[1:]),
                measured=-rate,
                threshold=limits["spiked"],
            )
        elif abs(rate) < limits["moved"] - chance:
            yield Finding(
                key="low",
                message=f"the validation loss moved by {rate:.2%} to {each.val_loss:.4g} between "
                f"the first two evaluations (limit {limits['moved']:.0%}): the learning rate looks "
                "too low",
                advice=(raise_lr(record), *_ADVICE_LR[1:]),
                measured=abs(rate),
                threshold=limits["moved"],
            )


_ADVICE_PLATEAU = (
    "halve the learning rate, or begin its decay",
    "if the training loss still falls, the model overfits: more data or regularization",
    "if neither changes and both are good enough, stop the run",
)
_ADVICE_UNDERFIT = (
    "train longer: both losses still fall",
    "use a larger model, or less weight decay and dropout",
    "raise the learning rate",
)
_ADVICE_LR = (
    "halve the learning rate if the loss rose, double it if it did not change",
    "run a short sweep over learning rates, each 3x the previous one",
    "compare the length of the warmup with the steps between the two evaluations",
)


_PROGRESS = {"progress": Threshold(0.05, "share of the progress so far that counts")}
_UNTIL = {"until_evaluation": Threshold(3, "last evaluation that the rule checks; 0: no limit")}

RULES = (
    Rule(
        name="slow_improvement",
        summary="validation loss better by < poor; an info once the loss has fallen; not when the "
        "lr has decayed",
        check=check_slow,
        severity="warning",
        needs=("evaluations",),
        thresholds={
            "poor": Threshold(0.01, "improvement below which it is poor"),
            "good": Threshold(0.05, "improvement above which it is good"),
            "worse": Threshold(0.1, "rise above which val_increase reports it instead"),
            "share": Threshold(0.1, "minimum share of the run between two evaluations"),
        },
        advice=(
            "compare with the training loss: if it still falls, the model overfits",
            "double the learning rate if both losses have been slow from the start, halve it if "
            "both fell fast before",
            "use a larger model or more varied data if neither changes",
        ),
    ),
    Rule(
        name="eval_plateau",
        summary="validation loss changed < 1% in each of `evaluations`; not when the lr has "
        "decayed; an info once the loss has fallen",
        check=check_plateau,
        severity="warning",
        needs=("evaluations",),
        thresholds={"evaluations": Threshold(3, "evaluations in a row without a change")},
        advice=_ADVICE_PLATEAU,
    ),
    Rule(
        name="overfit",
        summary="validation above training loss by > severe, an info while it improves; > mild "
        "(info) until `until_evaluation`",
        check=check_overfit,
        severity="warning",
        needs=("evaluations",),
        thresholds={
            "mild": Threshold(0.1, "gap above which it is mild"),
            "severe": Threshold(0.3, "gap above which it is severe"),
            "improves": Threshold(0.01, "improvement of the validation loss that makes it an info"),
            **_PROGRESS,
            **_UNTIL,
        },
        advice=(
            "train on more or more varied data, or for fewer epochs",
            "raise weight decay or dropout, or use a smaller model",
            "keep the checkpoint with the best validation loss and stop when it rises",
        ),
    ),
    Rule(
        name="val_increase",
        summary="validation loss > rise above its best, or rising `apart` times in a row while "
        "training falls",
        check=check_increase,
        severity="warning",
        needs=("evaluations",),
        thresholds={
            "rise": Threshold(0.1, "above the best validation loss"),
            "apart": Threshold(2, "evaluations in a row that rise while training falls"),
            "noise": Threshold(0.01, "relative rise that is ignored as noise"),
            **_PROGRESS,
        },
        advice=(
            "resume from the checkpoint with the best validation loss",
            "if the training loss falls, the model overfits: more data, more weight decay, dropout",
            "if it rises too, halve the learning rate and look at the data of the last steps",
        ),
    ),
    Rule(
        name="underfit",
        summary="gap < gap while both losses fall by slowest..fastest, until `until_evaluation`",
        check=check_underfit,
        severity="info",
        needs=("evaluations",),
        thresholds={
            "gap": Threshold(0.1, "gap below which both losses count as equal"),
            "slowest": Threshold(0.01, "improvement below which the loss counts as unchanged"),
            "fastest": Threshold(0.15, "improvement above which it is fast"),
            **_UNTIL,
        },
        advice=_ADVICE_UNDERFIT,
    ),
    Rule(
        name="lr_check",
        summary="from the first to the second evaluation the loss rose by > spiked (warning), or "
        "moved by < moved",
        check=check_lr,
        severity="info",
        needs=("evaluations",),
        thresholds={
            "moved": Threshold(0.01, "relative change below which the lr is too low"),
            "spiked": Threshold(0.1, "relative rise above which the lr is too high"),
            **_PROGRESS,
            "share": Threshold(0.33, "minimum share of the run between the two"),
        },
        advice=_ADVICE_LR,
    ),
)
