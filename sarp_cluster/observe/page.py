"""The page that a node shows to people: one table, and where to look further."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2rem;max-width:60rem}"
    "table{border-collapse:collapse}td,th{padding:.2rem .8rem;border-bottom:1px solid #ddd;text-align:left}"
    "th{font-weight:600}h1{font-size:1.3rem}"
)


def page(title: str, facts: Sequence[tuple[str, str]], links: Sequence[str] = ()) -> str:
    """HTML. Everything in it is escaped."""
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in facts)
    found = " · ".join(f'<a href="{escape(link)}">{escape(link)}</a>' for link in links)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style><h1>{escape(title)}</h1><table>{rows}</table><p>{found}</p></html>"
    )
