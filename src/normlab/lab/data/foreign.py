"""Tokenizers that others made: any Hugging Face ``tokenizer.json``, or tiktoken's ranks.

The library ``tokenizers`` runs them unchanged. Nothing in them is executed, and a regular expression that
would take exponential time ends after 10 million steps with an error of the library.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as Backend
from tokenizers import decoders

from normlab.errors import UserError
from normlab.lab.data.tokenizer import (
    EOS,
    SPECIALS,
    UNK,
    ByteLevel,
    Tokenizer,
    bytes_of,
    library_errors,
    name_of,
)

FOREIGN: Final = "foreign"
"""Key of the original in the JSON of such a tokenizer."""
MOST_ENTRIES: Final = 2**20
_OFFSET: Final = len(SPECIALS)
_ENDINGS: Final = "'s|'t|'re|'ve|'m|'ll|'d"
_MARKS: Final = r" ?[^\s\p{L}\p{N}]+"
_SPACES: Final = r"\s+(?!\S)|\s+"
_UPPER: Final = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_LOWER: Final = r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_START: Final = r"[^\r\n\p{L}\p{N}]?"
GPT2: Final = rf"{_ENDINGS}| ?\p{{L}}+| ?\p{{N}}+|{_MARKS}|{_SPACES}"
GPT4: Final = rf"(?i:{_ENDINGS})|{_START}\p{{L}}+|\p{{N}}{{1,3}}|{_MARKS}[\r\n]*|\s*[\r\n]+|{_SPACES}"
GPT4O: Final = (
    rf"{_START}[{_UPPER}]*[{_LOWER}]+(?i:{_ENDINGS})?|{_START}[{_UPPER}]+[{_LOWER}]*(?i:{_ENDINGS})?"
    rf"|\p{{N}}{{1,3}}|{_MARKS}[\r\n/]*|\s*[\r\n]+|{_SPACES}"
)


@dataclass(frozen=True)
class Encoding:
    """What a tiktoken file does not contain."""

    name: str
    words: str
    """The regular expression that splits text into words."""
    entries: int
    """Its vocabulary entries; those without a rank are special tokens."""


ENCODINGS: Final = {
    50_256: Encoding("gpt2", GPT2, 50_257),
    50_280: Encoding("p50k_base", GPT2, 50_281),
    100_256: Encoding("cl100k_base", GPT4, 100_277),
    128_000: Encoding("Llama 3", GPT4, 128_256),
    199_998: Encoding("o200k_base", GPT4O, 200_019),
}
"""The encodings by their number of ranks."""


class ForeignTokenizer(Tokenizer):
    """A tokenizer made by others, after our special tokens: its entry i is our entry i + 4, and its entry for
    unknown characters is UNK.

    Its special tokens are not used for text; in token shards they become our EOS. Templates, padding and
    truncation are left out, since they add to a text or cut it.
    """

    def __init__(
        self, backend: Backend, fields: Mapping[str, Any], special: NDArray[np.bool_], unknown: int | None
    ) -> None:
        """``special`` marks the entries that stand for no text, `[entries]`: special tokens and gaps."""
        self._backend, self._fields, self._special = backend, fields, special
        self.kind = f"{fields['model'].get('type', 'BPE')} made by others"
        self._entries = np.arange(_OFFSET, len(special) + _OFFSET, dtype=np.int32)
        if unknown is not None:
            self._entries[unknown] = UNK

    @property
    def vocab_size(self) -> int:
        return len(self._entries) + _OFFSET

    def ours(self) -> NDArray[np.int32]:
        """Return our entry for each of theirs, as in token shards."""
        return np.where(self._special & (self._entries != UNK), np.int32(EOS), self._entries)

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        with library_errors():
            encoded = self._backend.encode_batch_fast(list(lines), add_special_tokens=False)
        return [self._entries[line.ids].tolist() for line in encoded]

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """Invert ``encode``, as far as the tokenizer keeps the text."""
        theirs = [[i - _OFFSET for i in line if i >= _OFFSET] for line in ids]
        return self._backend.decode_batch(theirs, skip_special_tokens=True)

    def to_json(self) -> str:
        return json.dumps({FOREIGN: self._fields})

    def exported(self) -> tuple[Backend, NDArray[np.int32]]:
        """Return the library's tokenizer in its own numbers, and our entry for each of them.

        EOS takes the number of its special token if there is exactly one, and is added otherwise. Raises
        UserError if the library would add it under the number of another entry.
        """
        backend = Backend.from_str(self._backend.to_str())
        size = len(self._entries)
        names = [backend.id_to_token(int(i)) for i in np.flatnonzero(self.ours() == EOS)]
        special = [name for name in names if name is not None]
        name = special[0] if len(special) == 1 else SPECIALS[EOS]
        backend.add_special_tokens([name])
        end = backend.get_vocab()[name]
        if end < size and not self._special[end]:
            raise UserError("the numbers of its entries have gaps, so that no end of a text can be added")
        numbers = np.arange(max(size, end + 1))
        return backend, np.where(numbers == end, EOS, np.append(self._entries, EOS)[numbers])


@final
class ForeignPieces(ByteLevel, ForeignTokenizer):
    """A tokenizer made by others whose entries each stand for bytes; it has no unknown characters."""

    def __init__(self, backend: Backend, fields: Mapping[str, Any], pieces: Sequence[bytes]) -> None:
        """``pieces`` are the bytes of its entries, empty for special tokens and gaps."""
        super().__init__(backend, fields, np.array([not piece for piece in pieces]), None)
        self.pieces = [b""] * _OFFSET + list(pieces)


def of_json(fields: Mapping[str, Any]) -> ForeignTokenizer:
    """Read a ``tokenizer.json``. Raises UserError if the library cannot read it, if two entries have the same
    number or one has too large a number, and for a dropout.
    """
    with library_errors():
        backend = Backend.from_str(json.dumps({"version": "1.0", **fields}))
        backend.no_padding()
        backend.no_truncation()
    backend.encode_special_tokens = True
    model, names = fields["model"], backend.get_vocab()
    if model.get("dropout"):
        raise UserError("its model has a dropout, which gives a text other tokens each time; set it to null")
    numbers = set(names.values())
    if not numbers or len(numbers) < len(names):
        raise UserError("its JSON is damaged: it has no entries, or two with the same number")
    if max(numbers) >= MOST_ENTRIES:
        raise UserError(f"its entries have numbers up to {max(numbers):,}; {MOST_ENTRIES - 1:,} is allowed")
    added = backend.get_added_tokens_decoder()
    texts = {name: i for name, i in names.items() if i not in added or not added[i].special}
    pieces = _pieces(backend, fields, texts)
    if pieces:
        of_bytes = ForeignPieces(backend, fields, [pieces.get(i, b"") for i in range(max(numbers) + 1)])
        (decoded,) = of_bytes.decode(of_bytes.encode([_SAMPLE]))
        if decoded.removeprefix(" ") == _SAMPLE:
            return of_bytes
    special = ~np.isin(np.arange(max(numbers) + 1), list(texts.values()))
    unknown = model.get("unk_id", backend.token_to_id(model.get("unk_token") or ""))
    return ForeignTokenizer(backend, fields, special, unknown)


_SAMPLE: Final = "one two\n\n\tthree"
"""A text that comes back from the bytes of its entries only if these do not depend on their neighbours."""
_BYTE: Final = re.compile("<0x([0-9A-F]{2})>")


def _pieces(backend: Backend, fields: Mapping[str, Any], texts: Mapping[str, int]) -> dict[int, bytes]:
    """Return the bytes that each entry would stand for alone; empty if any name stands for no bytes."""
    steps = json.dumps([fields.get(name) for name in ("normalizer", "pre_tokenizer", "decoder")])
    added = backend.get_added_tokens_decoder()
    if '"type": "ByteLevel"' in steps:
        backend.decoder = backend.decoder or decoders.ByteLevel()
        try:
            # Names of added tokens are plain text, and not in GPT-2's alphabet.
            return {i: name.encode() if i in added else bytes_of(name) for name, i in texts.items()}
        except UserError:
            return {}
    alone = backend.decode_batch([[i] for i in texts.values()], skip_special_tokens=False)
    pieces = {i: text.encode() for i, text in zip(texts.values(), alone, strict=True)}
    if '"type": "ByteFallback"' in steps:
        for name, i in texts.items():
            byte = _BYTE.fullmatch(name)
            if byte:
                pieces[i] = bytes.fromhex(byte[1])
    return pieces


def of_ranks(content: bytes) -> ForeignTokenizer:
    """Read tiktoken's ranks, on each line a piece in base 64 and its rank. Raises UserError for any other
    file, and for ranks of none of the ``ENCODINGS``, which say what the file does not: how text is split.
    """
    ranks = dict(_ranks(content))
    encoding = ENCODINGS.get(len(ranks))
    if encoding is None:
        known = ", ".join(f"{encoding.name} ({number:,})" for number, encoding in ENCODINGS.items())
        raise UserError(f"it has {len(ranks):,} ranks, and the encodings that are known have {known}")
    names = {name_of(piece): rank for piece, rank in ranks.items()}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    without_rank = sorted(set(range(encoding.entries)) - set(ranks.values()))
    special = [{"id": i, "content": f"<|{i}|>", "special": True, **flags} for i in without_rank]
    split = {"type": "Split", "pattern": {"Regex": encoding.words}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return of_json(
        {
            "added_tokens": special,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
            "model": {"type": "BPE", "vocab": names, "merges": _merges(ranks), "ignore_merges": True},
        }
    )


def _ranks(content: bytes) -> Iterator[tuple[bytes, int]]:
    for number, line in enumerate(content.splitlines(), 1):
        piece, _, rank = line.partition(b" ")
        try:
            yield base64.b64decode(piece, validate=True), int(rank)
        except (binascii.Error, ValueError) as error:
            raise UserError(f"line {number} is not a piece in base 64 with its rank") from error


def _merges(ranks: Mapping[bytes, int]) -> list[tuple[str, str]]:
    """Return the pair that forms each piece of several bytes, in the order of the ranks."""
    pairs = []
    for piece, rank in sorted(ranks.items(), key=lambda entry: entry[1]):
        if len(piece) == 1:
            continue
        parts = _encoded(piece, ranks, below=rank)
        if len(parts) == 2:
            pairs.append((name_of(parts[0]), name_of(parts[1])))
    return pairs


def _encoded(piece: bytes, ranks: Mapping[bytes, int], *, below: int) -> list[bytes]:
    """Join the bytes of a piece, always the pair with the lowest rank first, using only ranks ``below``."""
    parts = [piece[i : i + 1] for i in range(len(piece))]
    while True:
        ranks_joined = [ranks.get(a + b, below) for a, b in pairwise(parts)]
        lowest = min(ranks_joined, default=below)
        if lowest >= below:
            return parts
        place = ranks_joined.index(lowest)
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
