"""The named exceptions of the library. Each carries one sentence for the person who reads it."""

from __future__ import annotations


class DistmonError(Exception):
    """Base of everything that distmon raises on purpose."""


class ConfigError(DistmonError):
    """A configuration key or value is wrong."""


class LayoutError(DistmonError):
    """The model or its optimizer cannot be observed as given."""


class PlanMismatchError(DistmonError):
    """Ranks do not agree on what they observe."""


class CollectiveError(DistmonError):
    """A collective has failed, or ranks diverged: they can no longer observe together."""


class RunFolderError(DistmonError):
    """A run folder cannot be read or written."""


class UnreadableParameterError(LayoutError):
    """A parameter has no elements that can be read; the text says what it is."""
