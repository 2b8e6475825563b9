"""Hooks as part of a compiled backward pass.

Python code in a compiled graph is either traced, and then a switch in it means recompiling the
model whenever the switch changes, or it is an operator of our own, which is called. A visible
mutation of the row does not work either: autograd has saved the row for the backward pass, and
compilers that run their graph operation by operation find it modified when several forwards precede
a backward. So the operator does not declare the mutation; it is kept in the graph because it is
registered as an operator with an effect.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from distmon.collect.gradient_gain.rows import add_norm


@cache
def operator_library() -> torch.library.Library | None:
    """Register `torch.ops.distmon.add_norm`, at the first call.

    None where this torch cannot trace the hooks of tensors or has no operators with effects; then
    a compiled graph is left alone.
    """
    try:
        from torch._higher_order_ops import register_hook  # noqa: F401
    except ImportError:
        return None
    return register_effect(
        "add_norm(Tensor part, Tensor row, int side, int copies) -> ()", add_norm
    )


def register_effect(schema: str, function: Callable[..., None]) -> torch.library.Library | None:
    """Register an operator of `torch.ops.distmon` that a compiled graph calls for its effect.

    The result has to be kept. None where this torch has no operators with effects.
    """
    name = schema.partition("(")[0]
    try:
        from torch._library.effects import EffectType

        # Not `torch.library.custom_op`: its calls take 15 us, these 2.5.
        library = torch.library.Library("distmon", "FRAGMENT")  # type: ignore[no-untyped-call]
        library.define(schema, tags=(torch.Tag.flexible_layout,))  # type: ignore[no-untyped-call]
        library.impl(name, function, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"distmon::{name}", lambda *_: None, lib=library)
        library._register_effectful_op(f"distmon::{name}", EffectType.ORDERED)
    except (ImportError, AttributeError):
        return None
    return library


def something_was_compiled() -> bool:
    """Return whether torch has compiled anything in this process; True where that is unknown."""
    try:
        return any(torch._dynamo.utils.counters.values())
    except AttributeError:
        return True


def never_compile_alone(*functions: Callable[..., Any]) -> None:
    """Let Python run these functions, except as a part of a larger graph.

    A module that is compiled by itself calls its hooks outside of its graph. Each hook would become
    a small graph of its own, in which the tensor is an input without history.
    """
    try:
        from torch._dynamo.eval_frame import skip_code
    except ImportError:
        return
    for function in functions:
        skip_code(function.__code__)
