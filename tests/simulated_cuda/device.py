"""Load the extension into this process and let `torch.cuda` answer for it.

`install()` comes before `import torch`: torch asks once which devices exist.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib.machinery
import importlib.util
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from simulated_cuda.build import NAME, library

DEVICES = 2
extension: Any = None
"""The C++ module, once installed."""


def install() -> None:
    """Make the device type `cuda` exist, with two devices."""
    global extension
    if extension is not None:
        return
    assert "torch" not in sys.modules, "the simulated device is loaded before torch"
    path = library()
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    libraries = Path(spec.origin).parent / "lib"
    for name in ("libc10.so", "libtorch_cpu.so", "libtorch_python.so"):
        ctypes.CDLL(str(libraries / name), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
    import torch  # noqa: F401

    extension = _load_module(path)
    _patch_cuda()
    _patch_storages()
    atexit.register(_drain)


def _load_module(path: Path) -> Any:
    loader = importlib.machinery.ExtensionFileLoader(NAME, str(path))
    spec = importlib.util.spec_from_loader(NAME, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _drain() -> None:
    if extension.capturing():
        extension.end_capture()
    extension.drain()


# ---------------------------------------------------------------- what tests ask


def set_order(seed: int) -> None:
    """0: nothing runs before the host waits for it. Other seeds: streams advance on their own."""
    extension.set_order(seed)


def take_waits(thread: int | None = None) -> list[str]:
    """Return what the host waited for since the last call, in this thread unless given."""
    wanted = threading.get_native_id() if thread is None else thread
    return [kind for kind, by in extension.take_waits() if by == wanted]


@contextmanager
def launches() -> Iterator[list[str]]:
    """Collect the names of the jobs that are launched."""
    names: list[str] = []
    extension.record_launches(True)
    try:
        yield names
    finally:
        names += extension.record_launches(False)


def peek(tensor: Any) -> Any:
    """Return what the device memory holds now: jobs that have not run are not in it."""
    return extension.bytes_of(tensor.detach()).clone()


# ---------------------------------------------------------------- torch.cuda


class Graph:
    """`torch.cuda.CUDAGraph`: what is launched while it is captured runs at `replay` only."""

    def __init__(self, keep_graph: bool = False) -> None:  # noqa: ARG002
        self._graph: Any = None

    def capture_begin(self, *_: Any, **__: Any) -> None:
        extension.begin_capture()

    def capture_end(self) -> None:
        self._graph = extension.end_capture()
        if self._graph.invalidated:
            raise RuntimeError("simulated CUDA: failed due to a previous error in capture")

    def replay(self) -> None:
        extension.replay(self._graph)


class Capture:
    """`torch.cuda.graph`."""

    def __init__(self, graph: Graph, **_: Any) -> None:
        self._graph = graph

    def __enter__(self) -> None:
        self._graph.capture_begin()

    def __exit__(self, *_: object) -> None:
        self._graph.capture_end()


class DeviceContext:
    """`torch.cuda.device`."""

    def __init__(self, device: Any) -> None:
        self._index = _index(device)

    def __enter__(self) -> None:
        self._before = extension.current_device()
        extension.set_device(self._index)

    def __exit__(self, *_: object) -> None:
        extension.set_device(self._before)


class StreamContext:
    """`torch.cuda.stream`."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        if self._stream is not None:
            self._stream.__enter__()

    def __exit__(self, *error: object) -> None:
        if self._stream is not None:
            self._stream.__exit__(*error)


class _EventType(type):
    """Events of C++ cannot be subclassed so that torch takes them: this one only makes them."""

    def __call__(cls, enable_timing: bool = False, **_: Any) -> Any:
        import torch

        return torch.Event("cuda", enable_timing=enable_timing)

    def __instancecheck__(cls, instance: Any) -> bool:
        import torch

        return isinstance(instance, torch.Event)


class Event(metaclass=_EventType):
    """`torch.cuda.Event`."""


def _index(device: Any) -> int:
    import torch

    if isinstance(device, int) and not isinstance(device, bool):
        return int(device) if device >= 0 else int(extension.current_device())
    index = None if device is None else torch.device(device).index
    return int(extension.current_device()) if index is None else index


PROPERTIES = types.SimpleNamespace(
    name="Simulated GPU",
    total_memory=8 << 30,
    major=8,
    minor=0,
    multi_processor_count=1,
    uuid="simulated",
    pci_bus_id=0,
    pci_device_id=0,
    pci_domain_id=0,
    L2_cache_size=0,
    warp_size=32,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    gcnArchName="",
)


def _nested_stats(device: Any = None) -> dict[str, Any]:
    import torch

    nested: dict[str, Any] = {}
    for key, value in torch.accelerator.memory_stats(_index(device)).items():
        *path, last = key.split(".")
        inner = nested
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return nested


def _patch_cuda() -> None:
    import torch

    cuda: Any = torch.cuda
    accelerator = torch.accelerator

    def current_stream(device: Any = None) -> Any:
        return accelerator.current_stream(_index(device))

    def seed(number: int) -> None:
        for generator in cuda.default_generators:
            generator.manual_seed(number)

    answers: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "_is_compiled": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda *_, **__: True,
        "device_count": lambda: DEVICES,
        "current_device": extension.current_device,
        "set_device": lambda device: extension.set_device(_index(device)),
        "device": DeviceContext,
        "stream": StreamContext,
        "StreamContext": StreamContext,
        "Stream": lambda device=None, **_: torch.Stream(torch.device("cuda", _index(device))),
        "Event": Event,
        "CUDAGraph": Graph,
        "graph": Capture,
        "current_stream": current_stream,
        "default_stream": lambda device=None: torch.Stream(
            stream_id=0, device_index=_index(device), device_type=1
        ),
        "synchronize": lambda device=None: accelerator.synchronize(_index(device)),
        "is_current_stream_capturing": extension.capturing,
        "get_device_properties": lambda *_: PROPERTIES,
        "get_device_name": lambda *_: PROPERTIES.name,
        "get_device_capability": lambda *_: (8, 0),
        "memory_stats": lambda device=None: accelerator.memory_stats(_index(device)),
        "memory_stats_as_nested_dict": _nested_stats,
        "memory_allocated": lambda device=None: accelerator.memory_allocated(_index(device)),
        "memory_reserved": lambda device=None: accelerator.memory_reserved(_index(device)),
        "max_memory_allocated": lambda device=None: accelerator.max_memory_allocated(
            _index(device)
        ),
        "mem_get_info": lambda device=None: accelerator.get_memory_info(_index(device)),
        "manual_seed_all": seed,
        "manual_seed": seed,
        "default_generators": tuple(map(extension.default_generator, range(DEVICES))),
    }
    for name, answer in answers.items():
        setattr(cuda, name, answer)
    bindings: Any = torch._C
    bindings._cuda_getDevice = extension.current_device
    bindings._cuda_getDeviceCount = lambda: DEVICES
    # Unique over devices, so that a launch on the wrong one is seen.
    bindings._cuda_getCurrentRawStream = lambda index: (
        (index << 16) + current_stream(index).stream_id + 1
    )


def _patch_storages() -> None:
    """The wheel has no storage of this device that Python could make: deepcopy and load need it."""
    import torch

    storage: Any = torch.UntypedStorage
    make, resize = storage.__new__, storage.resize_

    def new(cls: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if device is None or torch.device(device).type != "cuda":
            given = {} if device is None else {"device": device}
            return make(cls, *args, **given, **kwargs)
        size = args[0] if args else 0
        return torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()

    def resize_(self: Any, size: int) -> Any:
        if self.device.type != "cuda":
            return resize(self, size)
        whole = torch.empty(0, dtype=torch.uint8, device=self.device).set_(self, 0, (0,))
        extension.resize_storage(whole, size)
        return self

    storage.__new__ = staticmethod(new)
    storage.resize_ = resize_
