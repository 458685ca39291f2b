"""Byte-level tokenizers that others made: a ``tokenizer.json`` of Hugging Face, or tiktoken's ranks.

The library's regular expressions backtrack, and one in a file could take any time. Therefore only those are
read that are listed here, which were looked at: each is linear in the length of a text, at worst
quadratic.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Self, final

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as Backend

from normlab.config.units import count
from normlab.data.byte_level import ByteLevel, bytes_of, name_of
from normlab.data.tokenizer import EOS, SPECIALS, library_errors
from normlab.errors import UserError

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
WORDS: Final = {
    GPT2: "GPT-2",
    GPT4: "GPT-4, Llama 3 and OLMo 2",
    GPT4.replace(r"\p{N}{1,3}", r"\p{N}"): "Qwen 2",
    GPT4O: "GPT-4o",
}
"""The regular expressions that may split text into words, and whose they are."""


@dataclass(frozen=True)
class Encoding:
    """What a file of tiktoken leaves out."""

    name: str
    words: str
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


@final
class ForeignPieces(ByteLevel):
    """A byte-level tokenizer of others behind our special tokens: its entry i is our entry i + 4.

    Its own special tokens stay unused in text; as parts of token shards they are our EOS.
    """

    def __init__(self, backend: Backend, pieces: Sequence[bytes], fields: Mapping[str, Any]) -> None:
        """``pieces`` are the bytes of its entries, none for a special token or a gap."""
        backend.encode_special_tokens = True
        self._backend, self._fields = backend, fields
        self.pieces = [b""] * _OFFSET + list(pieces)

    @classmethod
    def of_json(cls, fields: Mapping[str, Any]) -> Self:
        """Read a ``tokenizer.json``. Raises UserError if it is none, is not byte-level, or splits text by a
        regular expression that is not in ``WORDS``; before any of it is built.

        Templates, padding and truncation are left out: they add to a text.
        """
        kept = {name: fields.get(name) for name in ("added_tokens", "normalizer", "pre_tokenizer")}
        model = _model(fields)
        _require_normalizer(kept["normalizer"])
        _require_words(kept["pre_tokenizer"])
        added = _added(kept["added_tokens"])
        pieces = _pieces(model["vocab"], added)
        with library_errors():
            backend = Backend.from_str(json.dumps({"version": "1.0", **kept, "model": model}))
        return cls(backend, pieces, {**kept, "model": model})

    @classmethod
    def of_ranks(cls, content: bytes) -> Self:
        """Read tiktoken's ranks, in each line a piece in base 64 and its rank. Raises UserError for any other
        file, and for ranks of none of ``ENCODINGS``, which say how text is split and are not in the file.
        """
        ranks = dict(_ranks(content))
        encoding = ENCODINGS.get(len(ranks))
        if encoding is None:
            known = ", ".join(f"{each.name} ({ranks:,})" for ranks, each in ENCODINGS.items())
            raise UserError(f"it has {len(ranks):,} ranks, and the encodings that are known have {known}")
        names = {name_of(piece): rank for piece, rank in ranks.items()}
        special = [
            {"id": i, "content": f"<|{i}|>", "special": True, **dict.fromkeys(_FLAGS, False)}
            for i in sorted(set(range(encoding.entries)) - set(ranks.values()))
        ]
        split = {
            "type": "Split",
            "pattern": {"Regex": encoding.words},
            "behavior": "Isolated",
            "invert": False,
        }
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        return cls.of_json(
            {
                "added_tokens": special,
                "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
                "model": {"type": "BPE", "vocab": names, "merges": _merges(ranks), "ignore_merges": True},
            }
        )

    @property
    def vocab_size(self) -> int:
        return len(self.pieces)

    @property
    def kind(self) -> str:
        return "byte-level byte-pair encoding of others"

    def ours(self) -> NDArray[np.int32]:
        """Return our entry for each of theirs; special tokens and gaps are EOS."""
        entries = np.arange(_OFFSET, len(self.pieces), dtype=np.int32)
        return np.where(self.byte_counts()[_OFFSET:] > 0, entries, np.int32(EOS))

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        encoded = self._backend.encode_batch_fast(list(lines), add_special_tokens=False)
        return [[i + _OFFSET for i in line.ids] for line in encoded]

    def to_json(self) -> str:
        return json.dumps({FOREIGN: self._fields})


_FLAGS: Final = ("single_word", "lstrip", "rstrip", "normalized")


def _model(fields: Mapping[str, Any]) -> dict[str, Any]:
    model = fields.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict) or not model["vocab"]:
        raise UserError("its JSON is damaged: it has no model with a vocab")
    kind = model.get("type", "BPE")
    if kind != "BPE" or model.get("byte_fallback") or any(model.get(name) for name in _ODD):
        raise UserError(
            f"its model is {kind!r}, or has a dropout, a prefix, a suffix or a fallback to bytes; byte-level "
            f"BPE has none of these"
        )
    kept = ("vocab", "merges", "ignore_merges")
    return {"type": "BPE", **{name: model[name] for name in kept if name in model}}


_ODD: Final = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk")


def _require_normalizer(normalizer: Any) -> None:
    parts = normalizer.get("normalizers") if isinstance(normalizer, dict) else []
    kinds = [part.get("type") if isinstance(part, dict) else part for part in parts or [normalizer]]
    if not all(kind in (None, "NFC") for kind in kinds):
        raise UserError(f"it normalises text by {kinds}, and at most NFC is allowed")


def _require_words(words: Any) -> None:
    """Raise UserError unless text is split into words by parts that are known, the last of them by bytes."""
    several = isinstance(words, dict) and words.get("type") == "Sequence"
    parts = words.get("pretokenizers") if several else [words]
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts) or not parts:
        raise UserError("it does not say how text is split into words")
    for part in parts:
        kind, pattern = part.get("type"), part.get("pattern")
        regex = pattern.get("Regex") if isinstance(pattern, dict) else None
        if kind == "Split" and regex in WORDS and part.get("behavior") in ("Isolated", "Removed"):
            continue
        if kind == "Split":
            raise UserError(
                f"it splits text by {regex or pattern!r}, and a regular expression may take any time; those "
                f"of {', '.join(WORDS.values())} are known"
            )
        if kind not in ("ByteLevel", "Digits"):
            raise UserError(f"it splits text by {kind}, and only Split, Digits and ByteLevel are read")
    if parts[-1]["type"] != "ByteLevel":
        raise UserError("it is not byte-level: its last step is not ByteLevel")


def _added(tokens: Any) -> dict[int, bytes]:
    """Return the bytes of the added tokens by their ids; none of special ones."""
    added: dict[int, bytes] = {}
    for token in tokens or ():
        number = token.get("id") if isinstance(token, dict) else None
        if type(number) is not int or not isinstance(token.get("content"), str) or not token["content"]:
            raise UserError("its JSON is damaged: an added token has no number or no content")
        added[number] = b"" if token.get("special") else token["content"].encode()
    return added


def _pieces(vocab: Mapping[str, Any], added: Mapping[int, bytes]) -> list[bytes]:
    numbers = [number for number in vocab.values() if type(number) is int]
    if len(numbers) != len(vocab) or len(set(numbers)) != len(numbers):
        raise UserError("its JSON is damaged: its entries have no numbers, or two have the same")
    last = max(*numbers, *added, 0)
    if min(*numbers, *added, 0) < 0 or last >= MOST_ENTRIES:
        raise UserError(f"its entries have numbers up to {last:,}; 0 to {MOST_ENTRIES - 1:,} are allowed")
    pieces = [b""] * (last + 1)
    for name, number in vocab.items():
        if number not in added:
            pieces[number] = bytes_of(name)
    for number, content in added.items():
        pieces[number] = content
    if missing := 256 - len({piece for piece in pieces if len(piece) == 1}):
        raise UserError(f"{count(missing, 'byte')} of 256 have no entry, so that it cannot write every text")
    return pieces


def _ranks(content: bytes) -> Iterator[tuple[bytes, int]]:
    for number, line in enumerate(content.splitlines(), 1):
        piece, _, rank = line.partition(b" ")
        try:
            yield base64.b64decode(piece, validate=True), int(rank)
        except (binascii.Error, ValueError) as error:
            raise UserError(f"line {number} is no piece in base 64 with its rank") from error


def _merges(ranks: Mapping[bytes, int]) -> list[tuple[str, str]]:
    """Return the pair that makes each piece of several bytes, in the order of the ranks."""
    pairs = []
    for piece, rank in sorted(ranks.items(), key=lambda entry: entry[1]):
        if len(piece) > 1 and len(parts := _encoded(piece, ranks, below=rank)) == 2:
            pairs.append((name_of(parts[0]), name_of(parts[1])))
    return pairs


def _encoded(piece: bytes, ranks: Mapping[bytes, int], *, below: int) -> list[bytes]:
    """Join the bytes of a piece, always the pair with the lowest rank first, as far as ranks ``below`` go."""
    parts = [piece[i : i + 1] for i in range(len(piece))]
    while True:
        joint = [ranks.get(a + b, below) for a, b in pairwise(parts)]
        if not joint or min(joint) >= below:
            return parts
        place = joint.index(min(joint))
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
