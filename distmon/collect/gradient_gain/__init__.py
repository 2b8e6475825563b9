"""Gradient gain: how much the gradient grows or shrinks on its way back through each block."""

from distmon.collect.gradient_gain.backward_norms import BackwardNorms
from distmon.collect.gradient_gain.blocks import Blocks, candidates, choose

__all__ = ["BackwardNorms", "Blocks", "candidates", "choose"]
