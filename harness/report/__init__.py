"""Reports: one HTML file and one Markdown text, made from a bundle by anyone who has it."""

from harness.report.build import build_view
from harness.report.html import render_html
from harness.report.write import write_report

__all__ = ["build_view", "render_html", "write_report"]
