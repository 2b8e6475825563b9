"""Gradient flow: how much the gradient grows or shrinks on its way back through each block."""

from distmon.flow.backward_norms import BackwardNorms
from distmon.flow.blocks import Blocks, candidates, choose
from distmon.flow.gain import GainWindow, flow_table

__all__ = ["BackwardNorms", "Blocks", "GainWindow", "candidates", "choose", "flow_table"]
