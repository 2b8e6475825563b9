"""Describe machine and process for a debug bundle, without secrets."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from distmon.redaction import Redactor

RELEVANT_VARIABLES: Final = re.compile(
    "TORCH|PYTORCH|PYTHON|NCCL|RCCL|GLOO|UCX|FI_|CUDA|CUBLAS|CUDNN|NVIDIA|HIP|HSA|ROCR|ROCM|AMD_"
    "|TRITON|OMP_|MKL_|KMP_|OPENBLAS|DISTMON|DS_|DEEPSPEED|ACCELERATE|HF_|WANDB|SLURM|PBS_|LSB_"
    "|OMPI|PMIX|RANK|WORLD_SIZE|LOCAL_|GROUP_|ROLE_|MASTER_|TOKENIZERS|XLA_"
)
"""Prefixes of environment variables that change how a run behaves."""


def describe_environment(
    run_dir: Path,
    versions: Mapping[str, str],
    environ: Mapping[str, str],
    argv: Sequence[str],
    redactor: Redactor,
) -> dict[str, Any]:
    """Return JSON-serializable values. Never initializes CUDA if the run has not."""
    relevant = {
        name: value for name, value in sorted(environ.items()) if RELEVANT_VARIABLES.match(name)
    }
    return {
        "versions": dict(versions),
        "packages": _packages(),
        "platform": platform.platform(),
        "host": platform.node(),
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg() if hasattr(os, "getloadavg") else None,
        "disk_free_bytes": shutil.disk_usage(run_dir).free,
        "torch_config": torch.__config__.show().splitlines(),
        "torch_threads": torch.get_num_threads(),
        "devices": _devices(),
        "process_group": _process_group(),
        "python": sys.executable,
        "command": redactor.arguments(argv),
        "environment": redactor.variables(relevant),
    }


def _packages() -> dict[str, str]:
    found = ((each.metadata["Name"], each.version) for each in metadata.distributions())
    return dict(sorted((name, version) for name, version in found if name))


def _devices() -> list[dict[str, Any]]:
    cuda: Any = torch.cuda
    # Otherwise the query would allocate memory on a device that is not used.
    if not cuda.is_initialized():
        return []
    return [
        {
            "index": index,
            "name": (device := cuda.get_device_properties(index)).name,
            "capability": f"{device.major}.{device.minor}",
            "memory_bytes": device.total_memory,
            "allocated_bytes": cuda.memory_allocated(index),
            "reserved_bytes": cuda.memory_reserved(index),
        }
        for index in range(cuda.device_count())
    ]


def _process_group() -> dict[str, Any] | None:
    if not (dist.is_available() and dist.is_initialized()):
        return None
    return {"backend": dist.get_backend(), "world_size": dist.get_world_size()}
