"""Formulas of docstrings as text that a terminal and a page can show."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

_MATH = re.compile(r":math:`([^`]*)`")
_TOKEN = re.compile(r"\\[a-zA-Z]+|\\.|[{}^_]|\s+|[^\\{}^_\s]")
_SIGNS = {"|": "‖", "left": "", "right": ""}
"""Commands for which pylatexenc has no sign; it knows the others."""
_UPRIGHT = ("mathrm", "text", "operatorname")
_ACCENTS = {"hat": "\N{COMBINING CIRCUMFLEX ACCENT}", "bar": "\N{COMBINING MACRON}"}
_SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
_SUBSCRIPTS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")


def readable(text: str) -> str:
    r"""Replace the formulas of a paragraph: ``\sqrt{d} \, x \leftarrow y`` becomes ``√d x ← y``."""
    text = _MATH.sub(lambda match: _formula(iter(_TOKEN.findall(match[1]))), " ".join(text.split()))
    return text.replace("`", "")


def _formula(tokens: Iterator[str]) -> str:
    """Return a formula up to its end, or to the brace that closes the group it is in."""
    parts: list[str] = []
    for token in tokens:
        if token == "}":
            break
        parts.append(_rendered(token, tokens))
    text = re.sub(r"\s+", " ", "".join(parts)).strip()
    return re.sub(r"(?<=[(⌊]) | (?=[)⌋])", "", text)


def _rendered(token: str, rest: Iterator[str]) -> str:
    """Return a token as text, with what it takes from the ``rest``."""
    if token == "{":
        return _formula(rest)
    if token.startswith("\\"):
        return _command(token[1:], rest)
    if token not in "^_":
        return token
    content = _argument(rest)
    if content.isdecimal():
        return content.translate(_SUPERSCRIPTS if token == "^" else _SUBSCRIPTS)
    return token + _bracketed(content)


def _command(name: str, rest: Iterator[str]) -> str:
    if name == "frac":
        return f"{_bracketed(_argument(rest))}/{_bracketed(_argument(rest))} "
    if name == "sqrt":
        return f"√{_bracketed(_argument(rest))}"
    if name in _ACCENTS or name in _UPRIGHT:
        return _argument(rest) + _ACCENTS.get(name, "")
    return _sign(name)


def _argument(rest: Iterator[str]) -> str:
    """Return the argument of a command or a script: a group, a command or one sign."""
    token = next((token for token in rest if not token.isspace()), "")
    return _rendered(token, rest) if token else ""


def _bracketed(content: str) -> str:
    """Put brackets around the content unless it is one word, number or sign."""
    bare = re.sub(f"[{''.join(_ACCENTS.values())}]", "", content)
    return content if re.fullmatch(r"\w*|\W", bare) else f"({content})"


@cache
def _sign(name: str) -> str:
    """Return the sign that a command stands for, or its name (``max``) if it stands for none."""
    from pylatexenc.latex2text import get_default_latex_context_db

    if name in _SIGNS:
        return _SIGNS[name]
    known = get_default_latex_context_db().get_macro_spec(name)
    sign = getattr(known, "simplify_repl", None)
    return sign if isinstance(sign, str) else name
