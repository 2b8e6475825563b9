"""Plant faults in functions, in the training and in its writer process, while a file exists."""

from __future__ import annotations

import builtins
import importlib
import os
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

from benchmarks.faults.scene import Act, Scene

Planted = tuple[str, str, float]
"""Name of a function, name of the exception that it raises, or empty and what it adds."""


def plant(planted: Sequence[Planted], flag: str) -> None:
    """Replace functions of this process; they work as before while there is no file `flag`."""
    exists = os.path.exists
    for where, error, added in planted:
        owner, name = _owner(where)
        setattr(owner, name, _replaced(getattr(owner, name), exists, flag, error, added))


def _replaced(
    real: Callable[..., Any], exists: Callable[[str], bool], flag: str, error: str, added: float
) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        if not exists(flag):
            return real(*arguments, **named)
        if error:
            raise getattr(builtins, error)("planted")
        return real(*arguments, **named) + added

    return call


def _owner(where: str) -> tuple[Any, str]:
    """Return the module or class that has the function, and the function's name in it."""
    parts = where.split(".")
    for count in range(len(parts) - 1, 0, -1):
        try:
            owner: Any = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        for part in parts[count:-1]:
            owner = getattr(owner, part)
        return owner, parts[-1]
    raise ImportError(where)


def planted_for_a_while(*planted: Planted) -> tuple[Act, Act, Act]:
    """Return what happens before, in the middle and afterwards."""

    def before(scene: Scene) -> None:
        from distmon.runtime import writer_start

        flag = str(scene.folder / "planted")
        plant(planted, flag)
        call = f"from benchmarks.faults.planting import plant; plant({[*planted]!r}, {flag!r}); "
        code = writer_start._RUN.replace("from distmon", call + "from distmon")
        mock.patch.object(writer_start, "_RUN", code).start()

    def middle(scene: Scene) -> None:
        (scene.folder / "planted").touch()

    def restored(scene: Scene) -> None:
        (scene.folder / "planted").unlink()

    return before, middle, restored
