"""Run by Python at its start, in every process of a training under `distmon run`.

Nothing of distmon is imported before the first optimizer exists, so processes that do not train,
such as the workers of a DataLoader, are left alone. The module stays out of sight: its folder is
removed from `sys.path`, and the user's own `sitecustomize` is imported in its place.
"""

import atexit
import functools
import importlib.util
import json
import os
import sys
import threading


class _AfterImport:
    """Finder that calls a function once a package has been imported."""

    def __init__(self, name, then):
        self.name = name
        self.then = then

    def find_spec(self, name, path=None, target=None):  # noqa: ARG002
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            _guarded(lambda: self.then(module))

        spec.loader.exec_module = exec_module
        return spec


def _guarded(function):
    """Call a function; what it raises is printed, and the training goes on without the monitor."""
    try:
        function()
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        print(f"distmon: {text}; training continues without the monitor", file=sys.stderr)


def _wait_for_optimizer(torch):
    optimizer_class = torch.optim.Optimizer
    original = optimizer_class.__init__
    lock, is_ready = threading.RLock(), threading.Event()

    @functools.wraps(original)
    def __init__(self, *args, **kwargs):
        if is_ready.is_set():
            original(self, *args, **kwargs)
            return
        # Threads that create an optimizer meanwhile wait, so that the watch notes theirs too.
        with lock:
            if not has_begun.is_set():
                has_begun.set()
                _guarded(_watch)  # replaces Optimizer.__init__ again, on top of this function
                is_ready.set()
        (optimizer_class.__init__ if is_ready.is_set() else original)(self, *args, **kwargs)

    optimizer_class.__init__ = __init__


def _is_the_script():
    """Whether this is the process of the script, on rank 0: not one that it has started."""
    started = json.loads(os.environ["_DISTMON_RUN"])
    is_rank_0 = os.getppid() == started.get("agent") and os.environ.get("RANK") == "0"
    return os.getpid() == started.get("script") or is_rank_0


def _say_what_was_missing():
    # After an error of the script its traceback says enough.
    if not has_begun.is_set() and not hasattr(sys, "last_value"):
        print(
            "distmon: this process created no torch optimizer, so nothing in it was monitored",
            file=sys.stderr,
        )


def _watch():
    from distmon.integrations.launcher.training_watch import begin

    begin()


def _enable_deepspeed(_):
    from distmon.integrations.launcher.training_watch import enable_deepspeed

    enable_deepspeed()


def _step_aside():
    """Import the `sitecustomize` that would have been found without this one."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != here]
    mine = sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # noqa: F401
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
        if mine is not None:
            sys.modules["sitecustomize"] = mine


has_begun = threading.Event()
"""Set when the first optimizer is created."""
if "_DISTMON_RUN" in os.environ:
    _guarded(lambda: _is_the_script() and atexit.register(_say_what_was_missing))
    sys.meta_path.insert(0, _AfterImport("torch", _wait_for_optimizer))
    sys.meta_path.insert(0, _AfterImport("deepspeed", _enable_deepspeed))
_step_aside()
