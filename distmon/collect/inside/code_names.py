"""What the code of a module calls: found without running it, so it is the same on every rank."""

from __future__ import annotations

import dis
from collections import Counter
from collections.abc import Iterator
from functools import cache
from types import CodeType, FunctionType

from torch import nn


@cache
def called_names(kind: type[nn.Module]) -> Counter[str]:
    """Return how often each attribute or global occurs in the methods of a module's class.

    Also `LOOP`, how many loops there are. Methods of torch's own classes do not count.
    """
    found: Counter[str] = Counter()
    seen: set[str] = set()
    for base in kind.__mro__:
        if base.__module__.startswith("torch."):
            continue
        for name, method in vars(base).items():
            if name in seen or name == "__init__":
                continue
            seen.add(name)
            if isinstance(method, FunctionType):
                for code in _codes(_innermost(method).__code__):
                    found.update(_names(code))
    return found


LOOP = "<loop>"


def _names(code: CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname.startswith(("LOAD_ATTR", "LOAD_GLOBAL", "LOAD_METHOD", "LOAD_NAME")):
            yield str(instruction.argval)
        elif instruction.opname == "FOR_ITER":
            yield LOOP


def _innermost(function: FunctionType) -> FunctionType:
    inner = getattr(function, "__wrapped__", function)
    return inner if isinstance(inner, FunctionType) else function


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
