"""What users may write as a condition, and that nothing else gets through."""

from __future__ import annotations

import ast
import contextlib
import math
import statistics

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from distmon.errors import ConfigError
from distmon.rules.expressions import LONGEST_WINDOW, Expression, parse

METRICS = ("monitor/grad_norm", "train/step_loss", "train/lr", "a/same", "b/same")


@pytest.mark.parametrize(
    ("text", "now", "expected"),
    [
        ("grad_norm > 5", {"monitor/grad_norm": 6.0}, True),
        ("grad_norm > 5", {"monitor/grad_norm": 5.0}, False),
        ("'monitor/grad_norm' >= 5", {"monitor/grad_norm": 5.0}, True),
        ("1 < step_loss <= 2", {"train/step_loss": 2.0}, True),
        ("1 < step_loss <= 2", {"train/step_loss": 2.5}, False),
        ("not (step_loss > 1 and lr > 0)", {"train/step_loss": 2.0, "train/lr": 0.0}, True),
        ("-step_loss + 2 * 3 / 4 - 1 == -1.5", {"train/step_loss": 2.0}, True),
        ("step_loss ** 2 != 4", {"train/step_loss": -2.0}, False),
        ("abs(step_loss) > 1 or isfinite(lr)", {"train/step_loss": -2.0, "train/lr": 1.0}, True),
        ("not isfinite(step_loss)", {"train/step_loss": math.nan}, True),
        ("sqrt(step_loss) == log10(1000)", {"train/step_loss": 9.0}, True),
        ("step_loss / lr > 1", {"train/step_loss": 1.0, "train/lr": 0.0}, None),
        ("sqrt(step_loss) > 1", {"train/step_loss": -1.0}, None),
        ("step_loss > 1", {}, None),
    ],
)
def test_conditions(text: str, now: dict[str, float], expected: bool | None) -> None:
    assert parse(text, METRICS).holds(now, {}) is expected


@pytest.mark.parametrize("name", ["median", "mean", "std", "min", "max"])
def test_windows_must_be_full(name: str) -> None:
    function = {
        "median": statistics.median,
        "mean": statistics.fmean,
        "std": statistics.pstdev,
        "min": min,
        "max": max,
    }[name]
    past = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0]
    condition = parse(f"{name}(step_loss, 4) == {function(past[-4:])!r}", METRICS)
    assert condition.windows == {"train/step_loss": 4}
    assert condition.holds({}, {"train/step_loss": past}) is True
    assert condition.holds({}, {"train/step_loss": past[:3]}) is None


def test_previous_is_the_value_that_many_observations_ago() -> None:
    condition = parse("step_loss > 2 * previous(step_loss, 3)", METRICS)
    assert condition.holds({"train/step_loss": 3.0}, {"train/step_loss": [1.0, 5.0, 6.0]}) is True
    assert condition.holds({"train/step_loss": 2.0}, {"train/step_loss": [1.0, 5.0, 6.0]}) is False


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("step_loss.real > 1", "'step_loss.real' is not allowed"),
        ("().__class__", "is not allowed"),
        ("__import__('os').system('x')", "is not allowed"),
        ("__import__('os')", 'there is no function "__import__"'),
        ("eval('1')", 'there is no function "eval"'),
        ("median.__globals__", "is not allowed"),
        ("step_loss[0] > 1", "is not allowed"),
        ("[x for x in (1, 2)]", "is not allowed"),
        ("lambda: 1", "is not allowed"),
        ("1 if step_loss else 2", "is not allowed"),
        ("step_loss in (1, 2)", "is not allowed"),
        ("f'{step_loss}'", "is not allowed"),
        ("b'a' > 1", "is not allowed"),
        ("1j > 0", "is not allowed"),
        ("step_loss % 2 > 1", "is not allowed"),
        ("True", "True or False"),
        ("x := 1", "cannot parse the condition"),
        ("step_loss >", "cannot parse the condition"),
        ("", "cannot parse the condition"),
        ("step_loss > 1; 2", "cannot parse the condition"),
        ("2 ** 2 ** 30 > 1", "exponent"),
        ("2 ** step_loss > 1", "exponent"),
        ("step_loss ** 1000 > 1", "exponent"),
        ("1e301 > 1", "too large"),
        ("-" * 60 + "step_loss > 1", "too deeply nested"),
        (" + ".join(["1"] * 300) + " > 1", "too deeply nested"),
        ("median(step_loss)", "takes a metric and a number of observations"),
        ("median(step_loss, 2.5) > 1", "takes a metric and a number of observations"),
        ("median(step_loss + 1, 2) > 1", "takes a metric and a number of observations"),
        (f"median(step_loss, {LONGEST_WINDOW + 1}) > 1", "window of median must be 1 to"),
        ("abs(step_loss, 2) > 1", "abs takes one value"),
        ("step_los > 1", 'there is no metric "step_los"; did you mean "step_loss"'),
        ("same > 1", '"same" may be a/same or b/same'),
    ],
)
def test_invalid_conditions_raise_with_a_reason(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(text, METRICS)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


@given(st.text(max_size=200))
def test_any_text_is_a_condition_or_a_config_error(text: str) -> None:
    with contextlib.suppress(ConfigError):
        _assert_safe(parse(text, METRICS))


_ALLOWED = ["step_loss", "'train/lr'", "1", "2.5", "median(step_loss, 3)", "sqrt(lr)"]
_FORBIDDEN = ["x.y", "().__class__", "eval('1')", "step_loss[0]", "[1]", "same", "(1 if 2 else 3)"]


def _conditions(values: list[str]) -> st.SearchStrategy[str]:
    """Comparisons of arithmetic on these values, joined by `and`, `or` and `not`."""
    numbers = st.recursive(
        st.sampled_from(values),
        lambda inner: st.one_of(
            st.builds("({} {} {})".format, inner, st.sampled_from("+-*/"), inner),
            st.builds("{}({})".format, st.sampled_from(["abs", "sqrt", "-"]), inner),
        ),
        max_leaves=6,
    )
    compared = st.builds("{} {} {}".format, numbers, st.sampled_from(["<", ">=", "=="]), numbers)
    return st.recursive(
        compared,
        lambda inner: st.one_of(
            st.builds("({} {} {})".format, inner, st.sampled_from(["and", "or"]), inner),
            st.builds("not ({})".format, inner),
        ),
        max_leaves=4,
    )


@given(_conditions(_ALLOWED))
def test_combinations_of_what_is_allowed_are_accepted(text: str) -> None:
    _assert_safe(parse(text, METRICS))


@given(_conditions(_ALLOWED + _FORBIDDEN))
def test_what_is_forbidden_is_refused_wherever_it_stands(text: str) -> None:
    assume(any(each in text for each in _FORBIDDEN))
    with pytest.raises(ConfigError):
        parse(text, METRICS)


def _assert_safe(condition: Expression) -> None:
    """It is made of known nodes, and evaluates to whether it holds, or to None for no answer."""
    allowed = (
        ast.Constant | ast.Name | ast.UnaryOp | ast.BinOp | ast.BoolOp | ast.Compare | ast.Call
    )
    for node in ast.walk(condition.tree):
        if isinstance(node, ast.expr):
            assert isinstance(node, allowed)
    assert condition.holds(dict.fromkeys(METRICS, 2.0), {}) in (True, False, None)
