"""Clean parameter names: the user's names, without the parts that wrappers insert."""

from __future__ import annotations

from distmon.untrusted.values import encodable

_WRAPPER_PARTS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


def clean_name(name: str) -> str:
    """Return the name without the parts that torch.compile, FSDP and checkpointing insert.

    The `module.` of DDP is kept: a user's own submodule may have that name, so `capture` unwraps
    DDP by its type. A lone surrogate becomes its escape: no file could hold it.
    """
    kept = ".".join(part for part in name.split(".") if part not in _WRAPPER_PARTS)
    return encodable(kept)
