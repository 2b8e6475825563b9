"""User-defined rules: a condition in the config, or a Python function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from distmon.config import RuleConfig
from distmon.errors import ConfigError
from distmon.metrics import RUN_METRICS, current_name
from distmon.record.record import Record
from distmon.rules.alert import Severity
from distmon.rules.base import Finding, Limits, Memory, Rule, Threshold
from distmon.rules.expressions import Expression, parse

Check = Callable[[Record, Limits, Memory], Iterable[Finding]]
_FORMER_PARTS = {"flow": "gradient_gain"}
"""Names of record parts in `needs` before 0.2, and their present names."""


def rule_from_config(name: str, given: RuleConfig) -> Rule:
    """Return the rule of `rules.<name>.when`; raise ConfigError if the condition is invalid."""
    assert given.when is not None
    if given.model_extra:
        key = next(iter(given.model_extra))
        raise ConfigError(
            f'unknown key "{key}" in rules.{name}: a rule with `when` has no thresholds'
        )
    try:
        condition = parse(given.when, [metric.name for metric in RUN_METRICS])
    except ConfigError as error:
        raise ConfigError(f"rules.{name}.when: {error}") from None
    return Rule(
        name=name,
        summary=given.when,
        check=_Condition(condition, given.message),
        severity="warning",
        advice=given.advice,
    )


class _Condition:
    """Evaluates one expression on every record; past values are kept in the rule's memory."""

    def __init__(self, condition: Expression, message: str | None) -> None:
        self._condition = condition
        self._message = message

    def __call__(self, record: Record, _: Limits, memory: Memory) -> Iterable[Finding]:
        before = memory.setdefault("seen", {})
        holds = self._condition.holds(record.metrics, before)
        for metric, window in self._condition.windows.items():
            value = record.metrics.get(metric)
            if value is not None:
                before[metric] = [*before.get(metric, []), value][-window:]
        if holds:
            yield Finding(key="when", message=self._format(record.metrics))

    def _format(self, metrics: Mapping[str, float]) -> str:
        values = {name: metrics.get(tag) for name, tag in self._condition.names.items()}
        if self._message is not None:
            text = self._message
            for name, value in values.items():
                text = text.replace(f"{{{name}}}", "?" if value is None else f"{value:.4g}")
            return text
        now = ", ".join(
            f"{name} {value:.4g}" for name, value in values.items() if value is not None
        )
        return f"{self._condition.text} ({now})"


def rule(
    *,
    severity: Severity = "warning",
    summary: str = "",
    advice: Iterable[str] = (),
    thresholds: Mapping[str, float] | None = None,
    patience: int = 1,
    cooldown: int = 10,
    needs: Iterable[str] = (),
) -> Callable[[Check], Rule]:
    """Make a rule from a function `(record, limits, memory) -> findings`.

    The rule has the function's name. `memory` is a dict of JSON-serializable values that is saved
    in the checkpoint. The rule is not evaluated on a record that has none of the parts in `needs`
    (`params`, `gradient_gain`, `evaluations`, `tasks`, or the tag of a metric). Pass the rule to
    `attach(..., own_rules=[...])`; its settings can be changed in the config as for any other rule.
    """

    def decorate(check: Check) -> Rule:
        documented = (check.__doc__ or "").strip().splitlines() or [check.__name__]
        return Rule(
            name=check.__name__,
            summary=summary or documented[0],
            check=check,
            severity=severity,
            advice=tuple(advice),
            thresholds={k: Threshold(v, "") for k, v in (thresholds or {}).items()},
            patience=patience,
            cooldown=cooldown,
            needs=tuple(current_name(_FORMER_PARTS.get(part, part)) for part in needs),
            users=True,
        )

    return decorate


def with_users_rules(
    rules: Iterable[Rule], settings: Mapping[str, RuleConfig], own: Iterable[Any] = ()
) -> list[Rule]:
    """Return the built-in rules, then the user's functions, then the user's conditions.

    Raises ConfigError for an object that is no rule, or for a name that is already used.
    """
    known = {each.name: each for each in rules}
    for each in own:
        if not isinstance(each, Rule):
            raise ConfigError(
                f"own_rules contains a {type(each).__name__}, not a rule: decorate the function "
                "with @distmon.rule"
            )
        if each.name in known:
            raise ConfigError(f'there are two rules with the name "{each.name}"; rename yours')
        known[each.name] = each
    for name, given in settings.items():
        if given.when is not None:
            if name in known:
                raise ConfigError(
                    f'rules.{name} has `when`, but there already is a rule "{name}"; rename yours'
                )
            known[name] = rule_from_config(name, given)
    return [*known.values()]
