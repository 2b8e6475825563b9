"""What one observed step says about the training loop: passes, inputs, modes, replaced weights."""

from distmon.collect.signals.step_signals import StepSignals

__all__ = ["StepSignals"]
