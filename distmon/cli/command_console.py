"""The console that commands print to."""

from __future__ import annotations

from distmon.untrusted.terminal import SafeConsole, terminal


def command_console() -> SafeConsole:
    """Return a console as wide as the terminal; 140 columns when there is none."""
    console = terminal()
    return console if console.is_terminal else terminal(width=140)
