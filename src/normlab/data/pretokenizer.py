"""Pretokenizers, which split text into words before a tokenizer sees it, and join the words again after it.

Punctuation and contractions are split off by the rules of the language (English ones where Moses has none, as
in Moses). Nothing is escaped: ``&`` stays ``&`` and an apostrophe an apostrophe. Hyphens stay inside words
(the default of ``tokenizer.perl``, without ``-a``).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, final

from normlab.data.tokenizer import Tokenizer
from normlab.errors import UserError

KEY = "pretokenizer"
"""Key of the pretokenizer in the JSON of a tokenizer that has one."""


@final
class Moses:
    """The words of the Moses tokenizer (Koehn et al. 2007, P07-2045), by sacremoses."""

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
    """A tokenizer behind a pretokenizer: lines are split into words before it, and joined again after it."""

    def __init__(self, inner: Tokenizer, name: str, languages: tuple[str, str]) -> None:
        """``languages`` are source and target. Raises UserError for an unknown pretokenizer."""
        if name not in PRETOKENIZERS:
            raise UserError(f"there is no pretokenizer {name!r}; there is {', '.join(PRETOKENIZERS)}")
        self.inner, self.name, self.languages = inner, name, languages
        self._source, self._target = (PRETOKENIZERS[name](language) for language in languages)

    @property
    def vocab_size(self) -> int:
        return self.inner.vocab_size

    @property
    def kind(self) -> str:
        return f"{self.inner.kind} of {self.name} words"

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        return self.inner.encode([self._source.split(line) for line in lines])

    def encode_target(self, lines: Sequence[str]) -> list[list[int]]:
        return self.inner.encode_target([self._target.split(line) for line in lines])

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        return [self._target.join(line) for line in self.inner.decode(ids)]

    def to_json(self) -> str:
        about = {"name": self.name, "languages": self.languages}
        return json.dumps({KEY: about, "tokenizer": json.loads(self.inner.to_json())})


def split_both(
    name: str, languages: tuple[str, str], source: Iterable[str], target: Iterable[str]
) -> Iterator[str]:
    """Yield the words of the source and then of the target, from which a joint vocabulary is learned."""
    for language, lines in zip(languages, (source, target), strict=True):
        words = PRETOKENIZERS[name](language)
        yield from (words.split(line) for line in lines)
