"""Assemble pages: one self-contained file, or a page whose parts the server sends."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib import resources
from string import Template
from typing import Any, Final

from distmon.errors import ConfigError
from distmon.report.encoding import script_json

SHARED_SCRIPTS: Final = ("view.js", "chart.js", "sections.js", "params.js", "page.js")


def page_file(name: str) -> str:
    """Return a file of the pages: a style sheet, a script or the template."""
    return resources.files("distmon.report").joinpath("page", name).read_text(encoding="utf-8")


def plotly_script() -> str:
    """Return plotly.js from its Python package; ConfigError without it."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise ConfigError("plots need a package: pip install 'distmon[report]'") from None
    return str(get_plotlyjs())


def self_contained(view: Any, start: Sequence[str]) -> str:
    """Return a page with everything in it: data, plotly, scripts of the page.

    Its content security policy allows these scripts by their hashes and no network, so nothing that
    a log contains can run or be loaded.
    """
    code = "\n".join(page_file(name) for name in (*SHARED_SCRIPTS, *start))
    scripts = [_closed(plotly_script()), _closed(code)]
    hashes = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    policy = (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    data = f'<script type="application/json" id="view">{script_json(view)}</script>'
    return Template(page_file("page.html")).substitute(
        policy=f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        style=f"<style>{page_file('page.css')}</style>",
        scripts="\n".join([data, *(f"<script>{script}</script>" for script in scripts)]),
    )


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _closed(script: str) -> str:
    """Return the script without anything that could end its element early."""
    # The parser normalizes line ends before the hash is computed.
    return script.replace("</script", "<\\/script").replace("\r\n", "\n").replace("\r", "\n")
