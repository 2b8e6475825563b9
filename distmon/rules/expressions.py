"""User-defined conditions: arithmetic and comparisons over metrics, never executed as code.

`grad_norm > 5 * median(grad_norm, 50)` is parsed by Python's own parser, and then only the nodes
listed here are accepted; nothing is ever passed to `eval`.
"""

from __future__ import annotations

import ast
import math
import operator
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from distmon.config import suggest
from distmon.errors import ConfigError
from distmon.metrics import current_name

MOST_NODES = 200
MOST_DEPTH = 20
LARGEST_POWER = 16
LONGEST_WINDOW = 10_000

History = Mapping[str, Sequence[float]]
"""The last values of each metric, newest last."""

_ARITHMETIC: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}
_COMPARISONS: Mapping[type[ast.cmpop], Callable[[float, float], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_PLAIN: Mapping[str, Callable[[float], float]] = {
    "abs": abs,
    "sqrt": math.sqrt,
    "log10": math.log10,
    "isfinite": lambda x: float(math.isfinite(x)),
}
_OVER_TIME: Mapping[str, Callable[[Sequence[float]], float]] = {
    "median": statistics.median,
    "mean": statistics.fmean,
    "std": statistics.pstdev,
    "min": min,
    "max": max,
    "previous": lambda values: values[0],
}
"""Over the n observations before this one; `previous` is the value n observations ago."""


@dataclass(frozen=True)
class Expression:
    """A parsed condition that contains only allowed nodes."""

    text: str
    tree: ast.expr
    names: Mapping[str, str]
    """The metric of each name in the text."""
    windows: Mapping[str, int]
    """Number of past observations that are needed, by metric."""

    def holds(self, now: Mapping[str, float], before: History) -> bool | None:
        """Return whether it is true; None when a metric is missing or a window is not full."""
        try:
            return bool(self._value(self.tree, now, before))
        except (_Unknown, ArithmeticError, ValueError):
            return None

    def _value(self, node: ast.expr, now: Mapping[str, float], before: History) -> float:
        def value(inner: ast.expr) -> float:
            return self._value(inner, now, before)

        match node:
            case ast.Constant(value=int() | float() as number):
                return float(number)
            case ast.Name() | ast.Constant():
                return _known(now, self.names[_spelling(node)])
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return float(not value(operand))
            case ast.UnaryOp(op=sign, operand=operand):
                return -value(operand) if isinstance(sign, ast.USub) else value(operand)
            case ast.BinOp(left=left, op=op, right=right):
                return float(_ARITHMETIC[type(op)](value(left), value(right)))
            case ast.BoolOp(op=op, values=values):
                results = (bool(value(v)) for v in values)
                return float(all(results) if isinstance(op, ast.And) else any(results))
            case ast.Compare(left=left, ops=ops, comparators=rights):
                sides = [value(left), *map(value, rights)]
                pairs = zip(ops, sides, sides[1:], strict=False)
                return float(all(_COMPARISONS[type(op)](a, b) for op, a, b in pairs))
            case ast.Call(func=ast.Name(id=name), args=[metric, ast.Constant(value=count)]):
                past = before.get(self.names[_spelling(metric)], ())
                window = int(count)  # type: ignore[arg-type]
                if len(past) < window:
                    raise _Unknown
                return float(_OVER_TIME[name](past[-window:]))
            case ast.Call(func=ast.Name(id=name), args=[argument]):
                return float(_PLAIN[name](value(argument)))
        raise AssertionError(f"{ast.dump(node)} passed the check")


class _Unknown(Exception):
    """A value that the expression needs is missing."""


def parse(text: str, metrics: Sequence[str]) -> Expression:
    """Parse a condition over `metrics`; raise ConfigError with the reason if it is invalid."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ConfigError(f"cannot parse the condition {text!r}") from None
    reader = _Reader(text, metrics)
    reader.check(tree, 0)
    return Expression(text, tree, reader.names, reader.windows)


class _Reader:
    def __init__(self, text: str, metrics: Sequence[str]) -> None:
        self._text = text
        self._by_name: dict[str, list[str]] = {}
        for metric in metrics:
            self._by_name[metric] = [metric]
        for metric in metrics:
            self._by_name.setdefault(metric.rpartition("/")[2], []).append(metric)
        self._seen = 0
        self.names: dict[str, str] = {}
        self.windows: dict[str, int] = {}

    def check(self, node: ast.expr, depth: int) -> None:
        self._seen += 1
        if depth > MOST_DEPTH or self._seen > MOST_NODES:
            raise self._error("it is too long or too deeply nested")
        match node:
            case ast.Constant(value=bool()):
                raise self._error("it contains True or False; compare metrics with numbers")
            case ast.Constant(value=int() | float() as number):
                if abs(number) > 1e300:
                    raise self._error("a number in it is too large")
            case ast.Name() | ast.Constant(value=str()):
                self._metric(node)
            case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.UAdd(), operand=operand):
                self.check(operand, depth + 1)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                if isinstance(op, ast.Pow):
                    self._power(right)
                self.check(left, depth + 1)
                self.check(right, depth + 1)
            case ast.BoolOp(values=values):
                for value in values:
                    self.check(value, depth + 1)
            case ast.Compare(left=left, ops=ops, comparators=rights) if all(
                type(op) in _COMPARISONS for op in ops
            ):
                for side in (left, *rights):
                    self.check(side, depth + 1)
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
                self._call(name, args, depth)
            case _:
                raise self._error(
                    f"{ast.unparse(node)[:40]!r} is not allowed: use metrics, numbers, "
                    "arithmetic, comparisons, and, or, not, and the listed functions"
                )

    def _power(self, exponent: ast.expr) -> None:
        match exponent:
            case ast.Constant(value=int() | float() as number) if abs(number) <= LARGEST_POWER:
                return
        raise self._error(f"an exponent must be a number of at most {LARGEST_POWER}")

    def _call(self, name: str, args: Sequence[ast.expr], depth: int) -> None:
        if name in _OVER_TIME:
            match args:
                case [ast.Name() | ast.Constant(value=str()) as metric, ast.Constant(value=int(n))]:
                    if isinstance(n, bool) or not 1 <= n <= LONGEST_WINDOW:
                        raise self._error(f"the window of {name} must be 1 to {LONGEST_WINDOW}")
                    tag = self._metric(metric)
                    self.windows[tag] = max(n, self.windows.get(tag, 0))
                    return
            raise self._error(f"{name} takes a metric and a number of observations")
        if name not in _PLAIN:
            known = [*_OVER_TIME, *_PLAIN]
            raise self._error(f'there is no function "{name[:40]}"; {suggest(name, known)}')
        if len(args) != 1:
            raise self._error(f"{name} takes one value")
        self.check(args[0], depth + 1)

    def _metric(self, node: ast.expr) -> str:
        name = _spelling(node)
        tags = self._by_name.get(name) or self._by_name.get(current_name(name))
        if not tags:
            raise self._error(
                f'there is no metric "{name[:60]}"; {suggest(name, [*self._by_name])}'
            )
        if len(tags) > 1:
            raise self._error(f'"{name}" may be {" or ".join(tags)}: write the whole tag in quotes')
        self.names[name] = tags[0]
        return tags[0]

    def _error(self, problem: str) -> ConfigError:
        shown = self._text if len(self._text) <= 80 else f"{self._text[:77]}..."
        return ConfigError(f"cannot use the condition {shown!r}: {problem}")


def _spelling(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else str(getattr(node, "value", ""))


def _known(now: Mapping[str, float], metric: str) -> float:
    value = now.get(metric)
    if value is None:
        raise _Unknown
    return value
