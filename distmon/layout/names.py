"""Clean parameter names: what the user called it, without what wrappers put in between."""

from __future__ import annotations

_WRAPPER_PARTS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


def clean_name(name: str) -> str:
    """Drop the parts that torch.compile, FSDP and activation checkpointing insert.

    The `module.` of DDP is not dropped here: a user's own submodule may bear that name, so
    `capture` unwraps DDP by its type.
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_PARTS)
