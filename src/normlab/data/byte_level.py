"""Byte-level byte-pair encoding: every text is a sequence of bytes, so decoding gives it back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar, Final, final

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from normlab.data.tokenizer import SPECIALS, LearnedPairs, Tokenizer
from normlab.errors import UserError

_PRINTABLE: Final = (*range(33, 127), *range(161, 173), *range(174, 256))
_OTHERS: Final = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTE_OF: Final = {chr(b): b for b in _PRINTABLE} | {chr(256 + n): b for n, b in enumerate(_OTHERS)}
"""The byte that a character of a piece's name stands for: GPT-2's alphabet of 256 printable characters."""


class ByteLevel(Tokenizer):
    """Base of tokenizers whose entries each stand for bytes, so that they take text verbatim."""

    verbatim: ClassVar[bool] = True
    pieces: Sequence[bytes]
    """The bytes of each entry, `[V]`; none of special tokens."""

    def byte_counts(self) -> NDArray[np.int64]:
        return np.array([len(piece) for piece in self.pieces])

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """Invert ``encode``, up to what the tokenizer normalises. A model may write invalid UTF-8: U+FFFD
        replaces such bytes.
        """
        return [b"".join(map(self.pieces.__getitem__, line)).decode("utf-8", "replace") for line in ids]


@final
class BytePieces(ByteLevel, LearnedPairs):
    """Byte-level byte-pair encoding (Radford et al. 2019, Section 2.2, Language Models are Unsupervised
    Multitask Learners), with the words of GPT-2's regular expression, spaces and line ends included.

    Nothing is normalised, and no character is unknown.
    """

    kind = "byte-level byte-pair encoding"

    def __init__(self, backend: Backend) -> None:
        """Raises UserError for pieces that are not bytes."""
        super().__init__(backend)
        names = sorted(backend.get_vocab().items(), key=lambda entry: entry[1])
        self.pieces = [b"" if name in SPECIALS else bytes_of(name) for name, _ in names]

    @staticmethod
    def untrained() -> Backend:
        backend = Backend(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        return backend

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> BytePieces:
        """Learn merges until there are ``vocab_size`` entries, special tokens and 256 bytes included.

        There are fewer if the text has no more pairs to merge. Raises UserError if there is no room for the
        bytes.
        """
        least = len(SPECIALS) + len(BYTE_OF)
        if vocab_size < least:
            raise UserError(
                f"vocab_size is {vocab_size}, but {len(BYTE_OF)} bytes and {len(SPECIALS)} special tokens "
                f"are {least} already; pass at least {least}"
            )
        backend = cls.untrained()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=list(SPECIALS),
            initial_alphabet=sorted(BYTE_OF),
            show_progress=False,
        )
        backend.train_from_iterator(texts, trainer)
        return cls(backend)


def bytes_of(name: str) -> bytes:
    """Return the bytes that a piece's name stands for. Raises UserError if it stands for none."""
    try:
        return bytes(map(BYTE_OF.__getitem__, name))
    except KeyError as error:
        raise UserError(f"its entry {name!r} is no sequence of bytes") from error


def name_of(piece: bytes) -> str:
    """Invert ``bytes_of``."""
    return "".join(map(_NAMES.__getitem__, piece))


_NAMES: Final = [name for name, _ in sorted(BYTE_OF.items(), key=lambda entry: entry[1])]
