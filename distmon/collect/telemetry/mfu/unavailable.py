"""The error that explains why there is no MFU."""

from __future__ import annotations

from distmon.errors import DistmonError


class MfuUnavailableError(DistmonError):
    """MFU cannot be computed because an input is unknown; the message says which."""
