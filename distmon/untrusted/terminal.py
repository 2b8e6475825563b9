"""Print untrusted text: it cannot move the cursor, hide a line or start a link.

Names of parameters and rules, file names and logs reach the terminal only through `terminal` or
`printable`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

from rich.console import Console
from rich.segment import Segment

_UNPRINTABLE: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters, among them ESC and CSI
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # reorder what follows on the line
    "\u2028\u2029\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)


def printable(text: str) -> str:
    """Return the text with everything that is no character to read as `\\x1b`; line ends stay."""
    return _UNPRINTABLE.sub(lambda found: ascii(found.group())[1:-1], text)


class SafeConsole(Console):
    """A console that prints only readable characters, besides the styles that rich adds itself."""

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        return super()._render_buffer(
            segment if segment.control else Segment(printable(segment.text), segment.style)
            for segment in buffer
        )


def terminal(**options: Any) -> SafeConsole:
    """Return a console; text is never read as markup unless it is a `rich.text.Text`."""
    return SafeConsole(markup=False, emoji=False, **options)
