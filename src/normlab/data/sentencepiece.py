"""SentencePiece models: unigram or BPE from a file, or unigram learned from the text."""

from __future__ import annotations

import base64
import binascii
import io
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, final

import numpy as np

from normlab.data.tokenizer import SPECIALS, UNK, Tokenizer, require_room_for_characters
from normlab.errors import UserError

KEY = "sentencepiece"
"""Key of the model, in base 64, in the JSON of such a tokenizer."""


@final
class SentencePieces(Tokenizer):
    """A SentencePiece model (Kudo and Richardson 2018, arXiv 1808.06226) behind our special tokens.

    Our special tokens replace the model's unknown and control pieces (``<unk>``, ``<s>``, ``</s>``, ``<pad>``
    …); its other pieces follow from 4 on, in the order of the model. The model normalises text as it was
    trained to, and decoding cannot undo that.
    """

    def __init__(self, model: bytes) -> None:
        """Raises UserError if the bytes are no SentencePiece model. No byte of them is executed."""
        self._model = model
        self._backend: Any = _processor(model)
        kept = [
            i
            for i in range(self._backend.get_piece_size())
            if not self._backend.is_unknown(i) and not self._backend.is_control(i)
        ]
        self._theirs = [0] * len(SPECIALS) + kept
        self._ours = np.full(self._backend.get_piece_size(), UNK)
        self._ours[kept] = np.arange(len(SPECIALS), len(self._theirs))

    @classmethod
    def train(cls, lines: Iterable[str], vocab_size: int) -> SentencePieces:
        """Learn a unigram model (Kudo 2018, Section 3, arXiv 1804.10959) of ``vocab_size`` entries, special
        tokens and single characters included; fewer when the text gives no more.

        Normalisation (``nmt_nfkc``) and defaults are SentencePiece's own, but every line and every character
        is used; the text is held in memory. Raises UserError if the characters alone are more.
        """
        from sentencepiece import SentencePieceTrainer

        model = io.BytesIO()
        try:
            SentencePieceTrainer.train(
                sentence_iterator=iter(lines),
                model_writer=model,
                model_type="unigram",
                vocab_size=max(vocab_size, len(SPECIALS)),
                hard_vocab_limit=False,
                character_coverage=1.0,
                max_sentence_length=2**30,
                pad_id=0,
                unk_id=1,
                bos_id=2,
                eos_id=3,
                minloglevel=2,
            )
        except RuntimeError as error:
            match = re.search(rf"\b{max(vocab_size, len(SPECIALS))} vs (\d+)", str(error))
            if match:
                require_room_for_characters(vocab_size, least=int(match[1]))
            raise UserError(f"no unigram model can be learned from this text ({error})") from error
        return cls(model.getvalue())

    @classmethod
    def of_json(cls, content: dict[str, Any]) -> SentencePieces:
        """Raises UserError if the value is not base 64 or no SentencePiece model."""
        value = content[KEY]
        try:
            model = base64.b64decode(value if isinstance(value, str) else "", validate=True)
        except binascii.Error as error:
            raise UserError(f"its JSON is damaged: {KEY} is not base 64 ({error})") from error
        return cls(model)

    @property
    def vocab_size(self) -> int:
        return len(self._theirs)

    @property
    def kind(self) -> str:
        return "SentencePiece"

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        encoded = self._backend.encode(list(lines), out_type=int)
        return [self._ours[ids].tolist() if ids else [] for ids in encoded]

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """Invert ``encode`` up to the model's normalisation and unknown characters."""
        pieces = [[self._theirs[i] for i in line if i >= len(SPECIALS)] for line in ids]
        return [self._backend.decode(line) if line else "" for line in pieces]

    def to_json(self) -> str:
        return json.dumps({KEY: base64.b64encode(self._model).decode("ascii")})


def _processor(model: bytes) -> Any:
    from sentencepiece import SentencePieceProcessor

    if not model:
        raise UserError("it is empty")
    try:
        whole = {_TRAINER, _NORMALISER} <= set(_fields(model))
        backend = SentencePieceProcessor(model_proto=model)
    except (RuntimeError, IndexError) as error:
        raise UserError("it is neither JSON nor a SentencePiece model") from error
    if not whole or not backend.get_piece_size():
        raise UserError("it is a SentencePiece model with a part missing")
    return backend


_TRAINER, _NORMALISER = 2, 3
"""Numbers of the fields that follow the pieces of a model."""


def _fields(message: bytes) -> Iterator[int]:
    """Yield the numbers of a protocol buffer's fields with a length, up to the first field without one.

    They show whether a model is whole: the library accepts one that ends after any of its pieces. Raises
    IndexError if the message ends within a number.
    """
    place = 0

    def number() -> int:
        nonlocal place
        value = shift = 0
        while True:
            byte = message[place]
            place += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while place < len(message):
        tag = number()
        if tag & 7 != 2:
            return
        yield tag >> 3
        length = number()
        place += length
