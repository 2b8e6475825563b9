"""Loops over tensors in C++, for what costs too much per parameter in Python.

Optional: everything here has a Python twin of the same meaning. `python -m distmon.native` compiles
it; importing distmon or attaching a monitor only looks for a finished file and never waits.
"""

from distmon.native.loading import NativeModule, Status, load, status

__all__ = ["NativeModule", "Status", "load", "status"]
