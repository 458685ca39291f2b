"""What a page shows: its sections, the texts of its elements, and the cells of its tables."""

from __future__ import annotations

import re
from html import unescape


def text_of(html: str) -> str:
    """The words of some HTML, without scripts and tags."""
    html = re.sub(r"<(script|style).*?</\1>", "", html, flags=re.DOTALL)
    return unescape(" ".join(re.sub(r"<[^>]+>", " ", html).split()))


def section(html: str, anchor: str) -> str:
    """The section with this id."""
    start = html.index(f'<section id="{anchor}"')
    return html[start : html.index("</section>", start)]


def of_class(html: str, name: str) -> list[str]:
    """The texts of the paragraphs and notes of a class."""
    elements = re.findall(rf'<(p|li) class="{name}">(.*?)</\1>', html, re.DOTALL)
    return [text_of(inner) for _, inner in elements]


def alarms(html: str) -> list[str]:
    """What a page warns of, except that the charts need JavaScript."""
    return of_class(re.sub(r"<noscript>.*?</noscript>", "", html, flags=re.DOTALL), "alarm")


def rows_of(html: str) -> list[list[str]]:
    """The cells of every row of its tables."""
    return [
        [text_of(cell) for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL)]
        for row in re.findall(r"<tr.*?</tr>", html, re.DOTALL)
    ]
