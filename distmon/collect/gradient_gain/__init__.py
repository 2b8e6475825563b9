"""Gradient gain: how much the gradient grows or shrinks on its way back through each block."""

from typing import TYPE_CHECKING

from distmon.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from distmon.collect.gradient_gain.backward_norms import BackwardNorms
    from distmon.collect.gradient_gain.block_table import Blocks
    from distmon.collect.gradient_gain.blocks import candidates, choose

__all__ = ["BackwardNorms", "Blocks", "candidates", "choose"]
__getattr__ = lazy_exports(
    __name__,
    {
        "BackwardNorms": "distmon.collect.gradient_gain.backward_norms",
        "Blocks": "distmon.collect.gradient_gain.block_table",
        "candidates": "distmon.collect.gradient_gain.blocks",
        "choose": "distmon.collect.gradient_gain.blocks",
    },
)
