"""The report as one HTML file that loads nothing and runs only its own script.

Autoescape is on for every value. The content policy allows the one style sheet and the one script by their
digests, so that nothing that slipped into a text could run or restyle the page.
"""

import base64
import hashlib
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from harness.report.text import STATUS_MARKS
from harness.report.view import ReportView

__all__ = ["render_html"]

TEMPLATES = Path(__file__).resolve().parent / "templates"


def render_html(view: ReportView) -> str:
    """The page."""
    css, js = _asset("report.css"), _asset("report.js")
    return (
        _environment()
        .get_template("report.html.j2")
        .render(
            view=view,
            marks=tuple(STATUS_MARKS),
            css=Markup(css),  # ours, and its digest is in the policy
            js=Markup(js),
            css_hash=_source_hash(css),
            js_hash=_source_hash(js),
        )
    )


@cache
def _environment() -> Environment:
    return Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )


def _asset(name: str) -> str:
    return (TEMPLATES / name).read_text(encoding="utf-8")


def _source_hash(text: str) -> str:
    """Content-Security-Policy source of an inline element."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
