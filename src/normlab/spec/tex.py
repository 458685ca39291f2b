"""TeX of docstrings as a terminal can show it."""

from __future__ import annotations

import re
import unicodedata

_MATH = re.compile(r":math:`([^`]*)`")
_TOKEN = re.compile(r"\\[a-zA-Z]+|\\.|[{}^_]|\s+|[^\\{}^_\s]")
_SYMBOLS = {
    "leftarrow": "←",
    "odot": "⊙",
    "cdot": "·",
    "times": "×",
    "le": "≤",
    "ge": "≥",
    "in": "∈",
    "infty": "∞",
    "sum": "Σ",
    "top": "T",
    "lfloor": "⌊",
    "rfloor": "⌋",
    "|": "‖",
    ";": " ",
    ",": " ",
    "quad": " ",
    "left": "",
    "right": "",
    "Phi": "Φ",
    "Pi": "Π",
    "lambda": "λ",
}
"""Commands that stand for a sign. Other small Greek letters go by their names, ``\\ln`` and such are words.
"""
_UPRIGHT = ("mathrm", "text", "operatorname")
_HAT = "\N{COMBINING CIRCUMFLEX ACCENT}"
_SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
_SUBSCRIPTS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")


def readable(text: str) -> str:
    r"""A docstring's paragraph without its marks: ``\sqrt{d} \, x \leftarrow y`` becomes ``√d x ← y``."""
    text = _MATH.sub(lambda found: _Reader(found[1]).whole(), " ".join(text.split()))
    return text.replace("`", "")


class _Reader:
    """Reads the tokens of one formula from left to right."""

    def __init__(self, formula: str) -> None:
        self.tokens = _TOKEN.findall(formula)
        self.at = 0

    def whole(self) -> str:
        """The formula up to its end, or to the brace that closes the group it is in."""
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
        """What a command or a script applies to: a group, a command or one sign."""
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
        if name == "hat":
            return self._argument() + _HAT
        if name in _UPRIGHT:
            return self._argument()
        if name in _SYMBOLS:
            return _SYMBOLS[name]
        return _greek(name) or name

    @staticmethod
    def _script(kind: str, content: str) -> str:
        if content.isdecimal():
            return content.translate(_SUPERSCRIPTS if kind == "^" else _SUBSCRIPTS)
        return kind + _bracketed(content)


def _bracketed(content: str) -> str:
    """In brackets, unless it is one word, number or sign."""
    return content if re.fullmatch(r"\w*|\W", content.replace(_HAT, "")) else f"({content})"


def _greek(name: str) -> str:
    try:
        return unicodedata.lookup(f"GREEK SMALL LETTER {name}")
    except KeyError:
        return ""
