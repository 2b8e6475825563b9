"""Why there is no MFU, said in one sentence."""

from __future__ import annotations

from distmon.errors import DistmonError


class MfuUnavailableError(DistmonError):
    """MFU is not computed because an input would have to be guessed; the message says which."""
