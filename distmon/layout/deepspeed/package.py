"""Import of DeepSpeed, an optional dependency that takes seconds to import."""

from __future__ import annotations

from types import ModuleType

from distmon.errors import ConfigError

SHARED_MEMORY = "deepspeed_shm_comm"


def import_deepspeed() -> ModuleType:
    """Import DeepSpeed and return it; raise ConfigError with the install command if that fails."""
    try:
        import deepspeed
    except ImportError as error:
        raise ConfigError(
            f"DeepSpeed cannot be imported ({error}): pip install 'distmon[deepspeed]'"
        ) from error
    return deepspeed  # type: ignore[no-any-return]


def skip_builds() -> None:
    """Keep `deepspeed.initialize` from compiling its shared-memory collectives on a CPU.

    The build takes minutes and fails without a compiler; without it the collectives are gloo's.
    Call it before `deepspeed.initialize`. On a GPU it changes nothing.
    """
    import_deepspeed()
    from deepspeed import ops

    ops.__compatible_ops__[SHARED_MEMORY] = False
