"""Pretokenizers: they split text into words before a tokenizer sees it, and join the words again afterwards.

Punctuation and contractions are split off by the rules of the language (like Moses itself, by the English
ones if Moses has none). Nothing is escaped: ``&`` stays ``&`` and an apostrophe an apostrophe. Hyphens stay
inside words (the default of ``tokenizer.perl``, without ``-a``).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, final

from normlab.errors import UserError
from normlab.lab.data.tokenizer import Tokenizer

PRETOKENIZER = "pretokenizer"
"""Key of the pretokenizer in the JSON of a tokenizer that has one."""


@final
class Moses:
    """The words of the Moses tokenizer (Koehn et al. 2007, P07-2045), from sacremoses."""

    def __init__(self, language: str) -> None:
        from sacremoses import MosesDetokenizer, MosesTokenizer

        language = primary(language)
        self._split: Any = MosesTokenizer(lang=language)
        self._join: Any = MosesDetokenizer(lang=language)

    def split(self, line: str) -> str:
        """Return the words of a line with single spaces between them."""
        return self._split.tokenize(line, aggressive_dash_splits=False, escape=False, return_str=True)

    def join(self, line: str) -> str:
        """Invert ``split``, as far as the rules go."""
        return self._join.detokenize(line.split(), return_str=True, unescape=False)


PRETOKENIZERS = {"moses": Moses}


def primary(language: str) -> str:
    """Return a language without its region: ``zh`` for ``zh-CN``, ``zh_TW`` and ``ZH``."""
    return language.replace("_", "-").partition("-")[0].lower()


@final
class PretokenizerChain(Tokenizer):
    """A tokenizer after a pretokenizer: lines are split into words before it and joined again afterwards."""

    def __init__(self, inner: Tokenizer, name: str, languages: tuple[str, str]) -> None:
        """``languages`` are source and target. Raises UserError for an unknown pretokenizer."""
        if name not in PRETOKENIZERS:
            raise UserError(f"there is no pretokenizer {name!r}; there is {', '.join(PRETOKENIZERS)}")
        self.inner, self.name, self.languages = inner, name, languages
        self.kind = f"{inner.kind} of {name} words"
        self._source, self._target = (PRETOKENIZERS[name](language) for language in languages)

    @property
    def vocab_size(self) -> int:
        return self.inner.vocab_size

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        return self.inner.encode([self._source.split(line) for line in lines])

    def encode_target(self, lines: Sequence[str]) -> list[list[int]]:
        return self.inner.encode_target([self._target.split(line) for line in lines])

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        return [self._target.join(line) for line in self.inner.decode(ids)]

    def to_json(self) -> str:
        about = {"name": self.name, "languages": self.languages}
        return json.dumps({PRETOKENIZER: about, "tokenizer": json.loads(self.inner.to_json())})
