"""The page of a run as one HTML text, with its style and scripts, and for a static page its data."""

from __future__ import annotations

import json
from importlib import resources
from typing import Final

from .document import Document

_PLACEHOLDER: Final = "/*DATA*/null/*DATA*/"
#: The page and the files inlined into it, so that a saved page is one self-contained file.
_PARTS: Final = ("page.html", "page.css", "charts.js", "page.js", "list.js", "sweep.js", "runs.js")
_STYLE: Final = "/*STYLE*/"
_SCRIPT: Final = "/*SCRIPT*/"


def page(content: Document | None = None) -> str:
    """Return the HTML of the page: a live one, or with ``content`` one that contains its data."""
    files = resources.files(__package__ or "accelerate.guests.monitor")
    html, style, *scripts = (files.joinpath(name).read_text("utf-8") for name in _PARTS)
    html = html.replace(_STYLE, style, 1).replace(_SCRIPT, "\n".join(scripts), 1)
    if content is None:
        return html
    # "</script>" inside a text of the run must not end the element that holds it.
    text = json.dumps(content).replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    return html.replace(_PLACEHOLDER, text, 1)
