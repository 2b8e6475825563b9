"""Faults of code: rules and callbacks of the user's, sinks, values, states, clocks, memory."""

from __future__ import annotations

import gc
import json
import logging
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch

from benchmarks.faults.planting import planted_for_a_while
from benchmarks.faults.scene import Act, Fault, Scene

ERRORS: tuple[type[BaseException], ...] = (
    *(ValueError, KeyError, MemoryError, RecursionError, OSError, AssertionError, StopIteration),
    *(SystemExit, KeyboardInterrupt, GeneratorExit),
)


class Hostile:
    """An object that raises whatever is done with it."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("hostile")

    __float__ = __str__ = __repr__ = __len__ = __bool__ = __iter__ = __eq__ = _refuse
    __hash__ = object.__hash__


VALUES: dict[str, Any] = {
    "a string": "1.0",
    "complex": 1j,
    "an array": np.ones(3),
    "a list": [1.0],
    "NaN": math.nan,
    "infinite": math.inf,
    "a huge integer": 10**400,
    "None": None,
    "a bool": True,
    "a hostile object": Hostile(),
    "a tensor of many": torch.ones(5),
    "an empty tensor": torch.ones(0),
    "a complex tensor": torch.tensor(1j),
    "a meta tensor": torch.ones((), device="meta"),
}


def faults() -> Iterator[Fault]:
    """Yield all of them."""
    yield from _rules()
    yield from _sinks()
    yield from _values()
    yield from _states()
    yield from _processes()
    yield from _clocks()
    yield from _network()
    yield from _memory()


def _rules() -> Iterator[Fault]:
    for error in ERRORS:
        yield Fault("rules", f"rule raises {error.__name__}", before=_with_rule(_raising(error)))
        yield Fault(
            "rules", f"on_alert raises {error.__name__}", before=_with_alert(_raising(error))
        )
    for what, value in {"None": None, "a number": 1, "text": "x", "[None]": [None]}.items():
        yield Fault("rules", f"rule returns {what}", before=_with_rule(lambda *_, v=value: v))
    yield Fault("rules", "rule never returns", before=_with_rule(lambda *_: time.sleep(1000)))
    yield Fault("rules", "rule is slow", before=_with_rule(lambda *_: time.sleep(0.2) or []))
    yield Fault("rules", "on_alert never returns", before=_with_alert(lambda *_: time.sleep(1000)))
    yield Fault("rules", "rule yields without end", before=_with_rule(_endless))
    yield Fault("rules", "rule changes the record", before=_with_rule(_meddling))


def _sinks() -> Iterator[Fault]:
    for method in ("record", "close", "__init__"):
        for error in (OSError, MemoryError, SystemExit, RecursionError):
            yield Fault(
                "sinks", f"tensorboard {method} raises {error.__name__}",
                before=_broken_sink(method, _raising(error)),
            )  # fmt: skip
    yield Fault("sinks", "record hangs", before=_broken_sink("record", lambda *_: time.sleep(1000)))
    yield Fault(
        "sinks", "opening hangs", before=_broken_sink("__init__", lambda *_: time.sleep(1000))
    )
    yield Fault("sinks", "closing hangs", before=_broken_sink("close", lambda *_: time.sleep(1000)))
    yield Fault("sinks", "a queue of one record", before=lambda s: s.config.update(queue_size=1))
    yield Fault("sinks", "unknown package", before=_sinks_are(["jsonl", "mlflow"]), refused=True)
    yield Fault("sinks", "logging handler raises", before=_raising_handler)


def _values() -> Iterator[Fault]:
    for what, value in VALUES.items():
        for key in ("loss", "tokens", "grad_norm", "lr"):
            yield Fault("values", f"{key} is {what}", before=_report(key, value))
    for what, value in VALUES.items():
        yield Fault("values", f"step is {what}", before=_report("step", value))


def _states() -> Iterator[Fault]:
    states: dict[str, Any] = {
        "a list": [],
        "text": "x",
        "version 99": {"version": 99},
        "without parts": {"version": 2},
        "full of None": {"version": 2, "schedule": None, "finite_watch": None, "cost": None},
        "a hostile object": Hostile(),
        "nested": json.loads('{"version":' * 50 + "1" + "}" * 50),
    }
    for what, state in states.items():
        yield Fault("state", f"loaded state is {what}", middle=_load(state))
    yield Fault("state", "state_dict at every step", before=_report_with(lambda s: s.state_dict()))
    yield Fault(
        "state", "own state loaded again", middle=lambda s: _load(s.monitor.state_dict())(s)
    )
    yield Fault("state", "closed in the middle", middle=lambda s: s.monitor.close(), ends=True)
    yield Fault("state", "never closed", before=_not_closed, ends=True)
    yield Fault("state", "attached twice", middle=_again, ends=True)


def _processes() -> Iterator[Fault]:
    yield Fault("processes", "fork in the middle", middle=_fork(lambda _: None))
    yield Fault(
        "processes", "forked child calls step", middle=_fork(lambda s: s.monitor.step(loss=1.0))
    )
    yield Fault("processes", "forked child closes", middle=_fork(lambda s: s.monitor.close()))
    yield Fault("processes", "forked child exits by sys.exit", middle=_fork(_raising(SystemExit)))
    yield Fault("processes", "threads call step", middle=_threads)
    yield Fault("processes", "signals arrive", middle=_signals)
    yield Fault("processes", "garbage collection off", middle=lambda s: gc.disable())  # noqa: ARG005
    yield Fault("processes", "no thread can be started", middle=_no_threads)
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP):
        yield Fault(
            "processes", f"writer process gets {number.name}", middle=_signal_writer(number),
            restored=_signal_writer(signal.SIGCONT),
        )  # fmt: skip


def _clocks() -> Iterator[Fault]:
    for what, change in {"a day ahead": 86400.0, "a day back": -86400.0, "at zero": -1.8e9}.items():
        for name in ("time", "perf_counter", "monotonic"):
            if name == "monotonic" and change < 0:
                continue
            before, middle, _ = planted_for_a_while((f"time.{name}", "", change))
            yield Fault("clocks", f"time.{name} jumps: {what}", before, middle)
    yield Fault("clocks", "time.time raises", *planted_for_a_while(("time.time", "OSError", 0.0)))


def _network() -> Iterator[Fault]:
    dead = ["json://127.0.0.1:9/x"]
    yield Fault("network", "webhook refuses", before=_notify(dead))
    yield Fault(
        "network", "webhook does not resolve", before=_notify(["json://no.such.host.invalid"])
    )
    yield Fault("network", "webhook never answers", before=_silent_server)
    yield Fault("network", "prometheus: no port is free", before=_taken_port)
    yield Fault(
        "network", "prometheus: clients send garbage", _sinks_are(["jsonl", "prometheus"]), _pester
    )


def _memory() -> Iterator[Fault]:
    for where in (
        "distmon.record.builder.RecordBuilder.build",
        "distmon.runs.run_json.strict_json",
        "distmon.sinks.jsonl.record_entry",
        "distmon.rules.engine.RuleEngine.evaluate",
        "distmon.runs.params_file.batch_message",
    ):
        short = where.rpartition(".")[2]
        for error in ("MemoryError", "OSError"):
            acts = planted_for_a_while((where, error, 0.0))
            yield Fault("memory", f"{error} in {short} for a while", *acts)


def _raising(error: type[BaseException]) -> Callable[..., Any]:
    def raise_it(*_: Any, **__: Any) -> Any:
        raise error("planted")

    return raise_it


def _with_rule(check: Callable[..., Any]) -> Act:
    def act(scene: Scene) -> None:
        import distmon

        def planted(record: Any, limits: Any, memory: Any) -> Any:
            return check(record, limits, memory)

        scene.attach["own_rules"] = [distmon.rule()(planted)]

    return act


def _with_alert(call: Callable[..., Any]) -> Act:
    def act(scene: Scene) -> None:
        scene.attach["on_alert"] = call
        scene.config["rules"] = {"often": {"when": "step_loss > 0", "patience": 1, "cooldown": 0}}

    return act


def _endless(*_: Any) -> Iterator[Any]:
    while True:
        time.sleep(0.01)
        yield None


def _meddling(record: Any, *_: Any) -> list[Any]:
    record.metrics.clear()
    return []


def _broken_sink(method: str, replacement: Callable[..., Any]) -> Act:
    def act(scene: Scene) -> None:
        from distmon.sinks.tensorboard import TensorBoardSink

        scene.config |= {"sinks": ["jsonl", "arrow", "tensorboard"], "writer": "thread"}
        mock.patch.object(TensorBoardSink, method, replacement).start()

    return act


def _sinks_are(names: list[str]) -> Act:
    return lambda scene: scene.config.update(sinks=names)


def _raising_handler(scene: Scene) -> None:
    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:  # noqa: ARG002
            raise RuntimeError("planted")

    logging.raiseExceptions = False
    logging.getLogger("distmon").addHandler(Handler())
    scene.config["run_dir"] = "/proc/nothing"


def _report(key: str, value: Any) -> Act:
    def report(step: int, loss: Any) -> dict[str, Any]:
        return {"loss": loss, key: value} if 10 <= step < 13 else {"loss": loss}

    return lambda scene: setattr(scene, "report", report)


def _report_with(call: Callable[[Any], Any]) -> Act:
    def act(scene: Scene) -> None:
        def report(_: int, loss: Any) -> dict[str, Any]:
            call(scene.monitor)
            return {"loss": loss}

        scene.report = report

    return act


def _load(state: Any) -> Act:
    return lambda scene: scene.monitor.load_state_dict(state)


def _not_closed(scene: Scene) -> None:
    scene.close = False


def _again(scene: Scene) -> None:
    import distmon

    scene.monitor = distmon.attach(scene.model, scene.optimizer, scene.config)


def _fork(inside: Act) -> Act:
    def act(scene: Scene) -> None:
        pid = os.fork()
        if pid == 0:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.alarm(20)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            try:
                inside(scene)
            except BaseException:
                os._exit(3)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        if os.waitstatus_to_exitcode(status) not in (0, 3):
            raise RuntimeError(f"the forked child ended with {status}")

    return act


def _threads(scene: Scene) -> None:
    threads = [
        threading.Thread(target=lambda: [scene.monitor.phase("x") for _ in range(50)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _signals(scene: Scene) -> None:  # noqa: ARG001
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, lambda *_: None)
        os.kill(os.getpid(), number)


def _no_threads(scene: Scene) -> None:  # noqa: ARG001
    mock.patch.object(threading.Thread, "start", _raising(RuntimeError)).start()


def _signal_writer(number: int) -> Act:
    def act(scene: Scene) -> None:
        process = getattr(scene.monitor.cycle.worker, "process", None)
        if process is not None and process.poll() is None:
            os.kill(process.pid, number)
            time.sleep(0.2)

    return act


def _notify(urls: list[str]) -> Act:
    def act(scene: Scene) -> None:
        scene.config["notify"] = {"urls": urls, "severity": "info", "timeout_s": 0.5, "attempts": 1}
        scene.config["rules"] = {"often": {"when": "step_loss > 0", "cooldown": 0}}

    return act


def _silent_server(scene: Scene) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    _notify([f"json://127.0.0.1:{listener.getsockname()[1]}/x"])(scene)
    scene.attach["_listener"] = listener
    del scene.attach["_listener"]
    threading.Thread(target=lambda: listener.accept() and time.sleep(60), daemon=True).start()


def _taken_port(scene: Scene) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    threading.Thread(target=lambda: (time.sleep(60), listener.close()), daemon=True).start()
    scene.config |= {"sinks": ["jsonl", "prometheus"], "prometheus": {"port": port, "ports": 1}}


def _pester(scene: Scene) -> None:  # noqa: ARG001
    for port in range(9464, 9474):
        try:
            with socket.create_connection(("127.0.0.1", port), 0.2) as client:
                client.sendall(os.urandom(2000))
        except OSError:
            continue
