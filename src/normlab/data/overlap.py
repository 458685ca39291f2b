"""The share of a text's sentences that stand in another text as well."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import final


@final
class Overlap:
    """Counts how many sentences of one text, empty ones left out, were seen in another, read part by part."""

    def __init__(self, sentences: Iterable[str]) -> None:
        self._wanted = Counter(filter(None, map(_plain, sentences)))
        self._seen: set[str] = set()

    def see(self, sentences: Iterable[str]) -> Overlap:
        """Read a part of the other text."""
        self._seen |= self._wanted.keys() & set(map(_plain, sentences))
        return self

    @property
    def share(self) -> float:
        """The share of the sentences that were seen, 0 to 1."""
        return sum(self._wanted[sentence] for sentence in self._seen) / max(1, self._wanted.total())


def shares(train: Mapping[str, Overlap], dev: Iterable[str], test: Iterable[str]) -> dict[str, float]:
    """Return the shares of dev and test that stand in training, in ``train``, and that of test in dev."""
    found = {f"{name} in training": overlap.share for name, overlap in train.items()}
    return {**found, "test in dev": Overlap(test).see(dev).share}


def said(shares: Mapping[str, float]) -> str:
    """Name the shares in words."""
    return ", ".join(f"{100 * share:.1f}% of {name}" for name, share in shares.items())


def _plain(sentence: str) -> str:
    return " ".join(sentence.split())
