"""SentencePiece models as tokenizers: learned here, or from a file."""

from __future__ import annotations

import base64
import binascii
import io
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, final

import numpy as np

from normlab.errors import UserError
from normlab.lab.data.tokenizer import SPECIALS, UNK, Tokenizer, require_room_for_characters

SENTENCEPIECE = "sentencepiece"
"""Key of the model, in base 64, in the JSON of such a tokenizer."""


@final
class SentencePieces(Tokenizer):
    """A SentencePiece model (Kudo and Richardson 2018, arXiv 1808.06226) after our special tokens.

    Our special tokens replace the model's unknown and control pieces (``<unk>``, ``<s>``, ``</s>``, ``<pad>``
    …); its other pieces follow from 4 on, in the model's order. The model normalises text as in its training,
    and decoding cannot undo that.
    """

    kind = "SentencePiece"

    def __init__(self, model: bytes) -> None:
        """Raises UserError if the bytes are not a SentencePiece model. None of them is executed."""
        self._model = model
        self._backend: Any = _processor(model)
        text_pieces = []
        for number in range(self._backend.get_piece_size()):
            if not self._backend.is_unknown(number) and not self._backend.is_control(number):
                text_pieces.append(number)
        self._theirs = [0] * len(SPECIALS) + text_pieces
        """The model's number of each of our entries."""
        self._ours = np.full(self._backend.get_piece_size(), UNK)
        """Our entry for each of the model's pieces."""
        self._ours[text_pieces] = np.arange(len(SPECIALS), len(self._theirs))

    @classmethod
    def train(cls, lines: Iterable[str], vocab_size: int) -> SentencePieces:
        """Learn a unigram model (Kudo 2018, Section 3, arXiv 1804.10959) of ``vocab_size`` entries, special
        tokens and single characters included; fewer if the text does not yield as many.

        Normalisation (``nmt_nfkc``) and defaults are SentencePiece's own, but every line and every character
        is used; the text is held in memory. Raises UserError if the characters alone are more.
        """
        from sentencepiece import SentencePieceTrainer

        model = io.BytesIO()
        entries = max(vocab_size, len(SPECIALS))
        try:
            SentencePieceTrainer.train(
                sentence_iterator=iter(lines),
                model_writer=model,
                model_type="unigram",
                vocab_size=entries,
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
            match = re.search(rf"\b{entries} vs (\d+)", str(error))  # how many the characters need
            if match:
                require_room_for_characters(vocab_size, least=int(match[1]))
            raise UserError(f"no unigram model can be learned from this text ({error})") from error
        return cls(model.getvalue())

    @classmethod
    def of_json(cls, content: dict[str, Any]) -> SentencePieces:
        """Raises UserError if the value is not base 64 or not a SentencePiece model."""
        value = content[SENTENCEPIECE]
        try:
            model = base64.b64decode(value if isinstance(value, str) else "", validate=True)
        except binascii.Error as error:
            raise UserError(f"its JSON is damaged: {SENTENCEPIECE} is not base 64 ({error})") from error
        return cls(model)

    @property
    def vocab_size(self) -> int:
        return len(self._theirs)

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        encoded = self._backend.encode(list(lines), out_type=int)
        return [self._ours[ids].tolist() if ids else [] for ids in encoded]

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """Invert ``encode`` up to the model's normalisation and unknown characters."""
        pieces = [[self._theirs[i] for i in line if i >= len(SPECIALS)] for line in ids]
        return [self._backend.decode(line) if line else "" for line in pieces]

    def to_json(self) -> str:
        return json.dumps({SENTENCEPIECE: base64.b64encode(self._model).decode("ascii")})


def _processor(model: bytes) -> Any:
    from sentencepiece import SentencePieceProcessor

    if not model:
        raise UserError("it is empty")
    try:
        complete = {_TRAINER, _NORMALISER} <= set(_fields(model))
        backend = SentencePieceProcessor(model_proto=model)
    except (RuntimeError, IndexError) as error:
        raise UserError("it is neither JSON nor a SentencePiece model") from error
    if not complete or not backend.get_piece_size():
        raise UserError("it is a SentencePiece model with a part missing")
    return backend


_TRAINER, _NORMALISER = 2, 3
"""Numbers of the fields that follow a model's pieces."""
_WITH_LENGTH = 2
"""The wire type of a field that begins with its length."""


def _fields(message: bytes) -> Iterator[int]:
    """Yield the numbers of a protocol buffer's fields with a length, up to the first field without one.

    They show whether a model is whole: the library accepts one that ends after any of its pieces. Raises
    IndexError if the message ends within a number.
    """
    place = 0

    def number() -> int:
        """Read a number: seven bits a byte, the lowest first, and a high bit on all bytes but the last."""
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
        field, wire_type = tag >> 3, tag & 7
        if wire_type != _WITH_LENGTH:
            return
        yield field
        length = number()
        place += length
