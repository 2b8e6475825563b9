"""`--fail-if 'final_loss > 1%'`: conditions for CI."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from distmon.config import suggest
from distmon.errors import ConfigError
from distmon.report.compare.verdicts import QUANTITIES, Compared

_OPERATORS: Final[dict[str, Callable[[float, float], bool]]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}
_FORM: Final = re.compile(r"\s*([\w/]+)\s*(>=|<=|>|<)\s*([-+]?[\d.]+(?:[eE][-+]?\d+)?)\s*(%?)\s*")


@dataclass(frozen=True)
class Condition:
    """The change of a quantity against a limit; met only by a change that is more than noise."""

    text: str
    key: str
    sign: str
    limit: float
    relative: bool

    def met_by(self, compared: Sequence[Compared]) -> bool | None:
        """Return whether it is met; None where the runs do not both have the quantity."""
        for each in compared:
            if each.quantity.key == self.key:
                value = each.change if self.relative else each.other - each.first
                beyond = _OPERATORS[self.sign](value, self.limit)
                return beyond and each.verdict not in ("within noise", "equal")
        return None


def parse_condition(text: str) -> Condition:
    """Parse `quantity > 1%` or `quantity > 0.05`; raise ConfigError otherwise."""
    found = _FORM.fullmatch(text)
    keys = [quantity.key for quantity in QUANTITIES]
    if found is None:
        raise ConfigError(f'bad condition "{text}": expected such as final_loss > 1%')
    key, sign, number, percent = found.groups()
    if key not in keys:
        raise ConfigError(f'unknown quantity "{key}" in --fail-if; {suggest(key, keys)}')
    try:
        limit = float(number)
    except ValueError:
        raise ConfigError(f'bad condition "{text}": {number} is not a number') from None
    return Condition(text.strip(), key, sign, limit / 100 if percent else limit, bool(percent))
