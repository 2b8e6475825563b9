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
    """The ranks can no longer talk to each other."""


class RunFolderError(DistmonError):
    """A run folder cannot be read or written."""
