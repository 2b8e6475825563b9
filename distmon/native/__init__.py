"""Loops over tensors in C++, for what costs too much per parameter in Python.

Optional: everything here has a Python counterpart with the same results. `pip install` compiles it
where torch and a compiler are present, `python -m distmon.native` at any time; importing distmon or
attaching a monitor only looks for a finished file.
"""

from distmon.native.loading import (
    WHOLE_GRAD,
    WHOLE_WEIGHT,
    GainHooks,
    HookEntry,
    IdleLane,
    Missing,
    NativeModule,
    PlaceReader,
    RowReader,
    Status,
    load,
    status,
)

__all__ = [
    "WHOLE_GRAD",
    "WHOLE_WEIGHT",
    "GainHooks",
    "HookEntry",
    "IdleLane",
    "Missing",
    "NativeModule",
    "PlaceReader",
    "RowReader",
    "Status",
    "load",
    "status",
]
