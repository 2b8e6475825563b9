"""Describe machine and process for a debug bundle, without secrets."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from distmon.redaction import Redactor

SHOWN_VARIABLES: Final = frozenset(
    [
        "CUDA_VISIBLE_DEVICES",
        "CUDA_DEVICE_ORDER",
        "CUDA_LAUNCH_BLOCKING",
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "CUDA_MODULE_LOADING",
        "CUBLAS_WORKSPACE_CONFIG",
        "NVIDIA_TF32_OVERRIDE",
        "NVIDIA_VISIBLE_DEVICES",
        "HIP_VISIBLE_DEVICES",
        "ROCR_VISIBLE_DEVICES",
        "HSA_OVERRIDE_GFX_VERSION",
        "NCCL_DEBUG",
        "NCCL_DEBUG_SUBSYS",
        "NCCL_SOCKET_IFNAME",
        "NCCL_IB_DISABLE",
        "NCCL_IB_HCA",
        "NCCL_P2P_DISABLE",
        "NCCL_P2P_LEVEL",
        "NCCL_SHM_DISABLE",
        "NCCL_ALGO",
        "NCCL_PROTO",
        "NCCL_NET",
        "NCCL_TIMEOUT",
        "NCCL_BUFFSIZE",
        "NCCL_MIN_NCHANNELS",
        "NCCL_MAX_NCHANNELS",
        "NCCL_CROSS_NIC",
        "NCCL_NVLS_ENABLE",
        "NCCL_CUMEM_ENABLE",
        "TORCH_NCCL_BLOCKING_WAIT",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
        "TORCH_NCCL_ENABLE_MONITORING",
        "TORCH_NCCL_TRACE_BUFFER_SIZE",
        "TORCH_NCCL_DUMP_ON_TIMEOUT",
        "TORCH_NCCL_AVOID_RECORD_STREAMS",
        "TORCH_CPP_LOG_LEVEL",
        "TORCH_DISTRIBUTED_DEBUG",
        "TORCH_LOGS",
        "TORCH_SHOW_CPP_STACKTRACES",
        "TORCH_CUDA_ARCH_LIST",
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES",
        "TORCHDYNAMO_DISABLE",
        "TORCH_COMPILE_DISABLE",
        "TORCH_GLOO_LAZY_INIT",
        "GLOO_SOCKET_IFNAME",
        "PYTORCH_CUDA_ALLOC_CONF",
        "PYTORCH_ALLOC_CONF",
        "PYTORCH_NO_CUDA_MEMORY_CACHING",
        "TRITON_INTERPRET",
        "TRITON_DEBUG",
        "TRITON_CACHE_DIR",
        "OMP_NUM_THREADS",
        "OMP_PROC_BIND",
        "OMP_PLACES",
        "MKL_NUM_THREADS",
        "MKL_SERVICE_FORCE_INTEL",
        "KMP_AFFINITY",
        "KMP_BLOCKTIME",
        "OPENBLAS_NUM_THREADS",
        "NUMEXPR_NUM_THREADS",
        "PYTHONHASHSEED",
        "PYTHONFAULTHANDLER",
        "PYTHONUNBUFFERED",
        "PYTHONOPTIMIZE",
        "PYTHONDONTWRITEBYTECODE",
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "ROLE_RANK",
        "ROLE_NAME",
        "ROLE_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_RESTART_COUNT",
        "TORCHELASTIC_MAX_RESTARTS",
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_USE_AGENT_STORE",
        "TORCHELASTIC_ERROR_FILE",
        "SLURM_JOB_ID",
        "SLURM_JOB_NAME",
        "SLURM_JOB_NODELIST",
        "SLURM_JOB_NUM_NODES",
        "SLURM_NNODES",
        "SLURM_NODEID",
        "SLURM_NTASKS",
        "SLURM_NTASKS_PER_NODE",
        "SLURM_PROCID",
        "SLURM_LOCALID",
        "SLURM_CPUS_PER_TASK",
        "SLURM_GPUS_ON_NODE",
        "SLURM_GPUS_PER_NODE",
        "SLURM_JOB_PARTITION",
        "SLURM_RESTART_COUNT",
        "SLURM_ARRAY_JOB_ID",
        "SLURM_ARRAY_TASK_ID",
        "PBS_JOBID",
        "PBS_JOBNAME",
        "LSB_JOBID",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "DS_ACCELERATOR",
        "ACCELERATE_USE_DEEPSPEED",
        "ACCELERATE_MIXED_PRECISION",
        "TOKENIZERS_PARALLELISM",
        "HF_HUB_OFFLINE",
        "TRANSFORMERS_OFFLINE",
        "WANDB_MODE",
        "WANDB_PROJECT",
        "DISTMON_ENABLED",
        "DISTMON_INTERVAL",
        "DISTMON_SINKS",
        "DISTMON_RUN_DIR",
        "DISTMON_BACKEND",
        "DISTMON_TRANSPORT",
        "DISTMON_SAMPLE_SIZE",
    ]
)
"""Environment variables that change how a run behaves and whose values are no secrets."""


@dataclass(frozen=True)
class TrainingProcess:
    """What a bundle says of the training process, which may be another one."""

    argv: Sequence[str] = field(default_factory=lambda: sys.argv)
    torch: Callable[[], Mapping[str, Any]] = lambda: describe_torch()
    """Describes torch, its devices and the process group."""

    def fixed(self) -> TrainingProcess:
        """Return it with what is true now, to be sent to another process."""
        return TrainingProcess([*self.argv], _Fixed(dict(self.torch())))


@dataclass(frozen=True)
class _Fixed:
    values: Mapping[str, Any]

    def __call__(self) -> Mapping[str, Any]:
        return self.values


def describe_environment(
    run_dir: Path,
    versions: Mapping[str, str],
    environ: Mapping[str, str],
    training: TrainingProcess,
    redactor: Redactor,
) -> dict[str, Any]:
    """Return JSON-serializable values. Never initializes CUDA if the run has not."""
    return {
        "versions": dict(versions),
        "packages": _packages(),
        "platform": platform.platform(),
        "host": platform.node(),
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg() if hasattr(os, "getloadavg") else None,
        "disk_free_bytes": shutil.disk_usage(run_dir).free,
        **training.torch(),
        "python": sys.executable,
        "command": redactor.arguments(training.argv),
        "environment": redactor.variables(environ, SHOWN_VARIABLES),
    }


def _packages() -> dict[str, str]:
    found = ((each.metadata["Name"], each.version) for each in metadata.distributions())
    return dict(sorted((name, version) for name, version in found if name))


def describe_torch() -> dict[str, Any]:
    """Return what is known of torch in this process."""
    import torch

    parts: dict[str, Callable[[], Any]] = {
        "torch_config": lambda: torch.__config__.show().splitlines(),
        "torch_threads": torch.get_num_threads,
        "devices": _devices,
        "process_group": _process_group,
    }
    found: dict[str, Any] = {}
    for name, describe in parts.items():
        try:
            found[name] = describe()
        except Exception as error:  # `attach` goes on without it
            found[name] = f"unknown: {type(error).__name__}"
    return found


def _devices() -> list[dict[str, Any]]:
    import torch

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
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return None
    return {"backend": dist.get_backend(), "world_size": dist.get_world_size()}
