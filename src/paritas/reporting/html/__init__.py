"""A comparison as one HTML file that needs nothing but a browser."""

from paritas.reporting.html.page import html_report

__all__ = ["html_report"]
