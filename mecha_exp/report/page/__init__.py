"""`report.html`: one file, from page.html, page.css, page.js (tables) and charts.js (interactive figures)."""

from mecha_exp.report.page.html import REPORT_FILE, write_report

__all__ = ["REPORT_FILE", "write_report"]
