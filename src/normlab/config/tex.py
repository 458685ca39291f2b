"""Formulas of docstrings as text that a terminal can show.

The library pylatexenc supplies the signs. Its own text drops the braces of scripts, so that ``x_{i+1}`` and
``x_i+1`` would read alike; the grouping is therefore done here.
"""

from __future__ import annotations

import re
from functools import cache

_MATH = re.compile(r":math:`([^`]*)`")
_TOKEN = re.compile(r"\\[a-zA-Z]+|\\.|[{}^_]|\s+|[^\\{}^_\s]")
_SIGNS = {"|": "‖", "left": "", "right": ""}
"""Commands that pylatexenc has no sign for; it knows the others."""
_UPRIGHT = ("mathrm", "text", "operatorname")
_ACCENTS = {"hat": "\N{COMBINING CIRCUMFLEX ACCENT}", "bar": "\N{COMBINING MACRON}"}
_SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
_SUBSCRIPTS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")


def readable(text: str) -> str:
    r"""Replace the formulas of a paragraph: ``\sqrt{d} \, x \leftarrow y`` becomes ``√d x ← y``."""
    text = _MATH.sub(lambda found: _Reader(found[1]).whole(), " ".join(text.split()))
    return text.replace("`", "")


class _Reader:
    """Read the tokens of one formula from left to right."""

    def __init__(self, formula: str) -> None:
        self.tokens = _TOKEN.findall(formula)
        self.at = 0

    def whole(self) -> str:
        """Return the formula up to its end, or to the brace that closes the group it is in."""
        parts: list[str] = []
        while self.at < len(self.tokens):
            token = self.tokens[self.at]
            self.at += 1
            if token == "}":
                break
            parts.append(self._said(token))
        text = re.sub(r"\s+", " ", "".join(parts)).strip()
        return re.sub(r"(?<=[(⌊]) | (?=[)⌋])", "", text)

    def _said(self, token: str) -> str:
        if token == "{":
            return self.whole()
        if token in "^_":
            return self._script(token, self._argument())
        if token.startswith("\\"):
            return self._command(token[1:])
        return token

    def _argument(self) -> str:
        """Return the argument of a command or a script: a group, a command or one sign."""
        while self.at < len(self.tokens) and self.tokens[self.at].isspace():
            self.at += 1
        token = self.tokens[self.at] if self.at < len(self.tokens) else ""
        self.at += 1
        return self._said(token) if token else ""

    def _command(self, name: str) -> str:
        if name == "frac":
            return f"{_bracketed(self._argument())}/{_bracketed(self._argument())} "
        if name == "sqrt":
            return f"√{_bracketed(self._argument())}"
        if name in _ACCENTS:
            return self._argument() + _ACCENTS[name]
        if name in _UPRIGHT:
            return self._argument()
        return _sign(name)

    @staticmethod
    def _script(kind: str, content: str) -> str:
        if content.isdecimal():
            return content.translate(_SUPERSCRIPTS if kind == "^" else _SUBSCRIPTS)
        return kind + _bracketed(content)


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
