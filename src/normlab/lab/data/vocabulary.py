"""The tokenizer that a configuration asks for: learned or from a file, with or without a pretokenizer.

A pretokenizer splits text into words before a tokenizer sees it, and joins the words again afterwards.
Punctuation and contractions are split off by the rules of the language (like Moses itself, by the English
ones if Moses has none). Nothing is escaped: ``&`` stays ``&`` and an apostrophe an apostrophe. Hyphens stay
inside words (the default of ``tokenizer.perl``, without ``-a``).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, final

import numpy as np

from normlab.base.io import from_plain, parsed
from normlab.errors import UserError, nearest
from normlab.lab.config import DataConfig
from normlab.lab.data import foreign
from normlab.lab.data.text import located
from normlab.lab.data.tokenizer import (
    SPECIALS,
    UNK,
    BytePairs,
    BytePieces,
    Tokenizer,
    require_room_for_characters,
)

_PIECES = "sentencepiece"
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
        tokens and single characters included; fewer if the text does not yield as many.

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
        """Raises UserError if the value is not base 64 or not a SentencePiece model."""
        value = content[_PIECES]
        try:
            model = base64.b64decode(value if isinstance(value, str) else "", validate=True)
        except binascii.Error as error:
            raise UserError(f"its JSON is damaged: {_PIECES} is not base 64 ({error})") from error
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
        return json.dumps({_PIECES: base64.b64encode(self._model).decode("ascii")})


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
"""Numbers of the fields that follow a model's pieces."""


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


LEARNED: Mapping[str, type[BytePairs | SentencePieces | BytePieces]] = {
    "bpe": BytePairs,
    "unigram": SentencePieces,
    "byte_bpe": BytePieces,
}
"""Tokenizers learned from the training text. Any other ``DataConfig.tokenizer`` is the path of a file."""
_PRETOKENIZER = "pretokenizer"
"""Key of the pretokenizer in the JSON of a tokenizer that has one."""
TIKTOKEN = "tiktoken:"
"""The prefix for the name of a tiktoken encoding, in place of a file's path."""
_FORMS = "--tokenizer bpe, unigram or byte_bpe to learn one from the text, or name the file of a model"


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


@dataclass(frozen=True)
class _PretokenizerEntry:
    """The pretokenizer in the JSON of a ``PretokenizerChain``."""

    name: str
    languages: tuple[str, str]


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

    @classmethod
    def of_json(cls, fields: Mapping[str, Any]) -> PretokenizerChain:
        entry: _PretokenizerEntry = from_plain(_PretokenizerEntry, fields[_PRETOKENIZER], _PRETOKENIZER)
        if not isinstance(fields.get("tokenizer"), dict):
            raise UserError("its JSON is damaged: it has no object 'tokenizer'")
        return cls(parse(json.dumps(fields["tokenizer"]).encode()), entry.name, entry.languages)

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
        return json.dumps({_PRETOKENIZER: about, "tokenizer": json.loads(self.inner.to_json())})


def vocabulary(config: DataConfig, source: Iterable[str], target: Iterable[str]) -> Tokenizer:
    """Learn the tokenizer of a configuration from both sides of a text, or read it from its file."""
    languages = (config.source_lang, config.target_lang)
    if config.tokenizer not in LEARNED:
        inner = _from_file(config)
    else:
        if config.pretokenizer:
            words = [PRETOKENIZERS[config.pretokenizer](language) for language in languages]
            source, target = map(words[0].split, source), map(words[1].split, target)
        inner = LEARNED[config.tokenizer].train(itertools.chain(source, target), config.vocab_size)
    return PretokenizerChain(inner, config.pretokenizer, languages) if config.pretokenizer else inner


def is_verbatim(config: DataConfig) -> bool:
    """Whether the tokenizer of a configuration takes text verbatim, see ``Tokenizer.verbatim``. Raises what
    ``vocabulary`` raises for a file that is not a tokenizer.
    """
    return (LEARNED.get(config.tokenizer) or _from_file(config)).verbatim


def digests(config: DataConfig) -> list[bytes]:
    """Return digests of the tokenizer: none for the default, else of its name if learned, or of its file."""
    if config.tokenizer == "bpe":
        return []
    learned = config.tokenizer in LEARNED
    content = config.tokenizer.encode() if learned else _content(config.tokenizer)
    return [hashlib.sha256(content).digest()]


def _from_file(config: DataConfig) -> Tokenizer:
    """Return the tokenizer in a file that a user names, without its pretokenizer.

    Raises FileNotFoundError if there is no such file, and UserError if it is not a tokenizer or has a
    different pretokenizer from the configuration.
    """
    path, content = config.tokenizer, _content(config.tokenizer)
    try:
        tokenizer = parse(content)
    except UserError as error:
        raise UserError(f"{path} is no tokenizer: {error}; type {_FORMS}") from error
    if not isinstance(tokenizer, PretokenizerChain):
        return tokenizer
    name, (source, target) = tokenizer.name, tokenizer.languages
    if (config.pretokenizer, config.source_lang, config.target_lang) != (name, source, target):
        raise UserError(
            f"{path} has the pretokenizer {name} for {source} and {target}; type --pretokenizer {name} "
            f"--source-lang {source} --target-lang {target} beside it"
        )
    return tokenizer.inner


def load(path: str | Path) -> Tokenizer:
    """Read the tokenizer of a run or a prepared corpus; its content shows which kind it is."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no tokenizer file {path}; prepare the data again")
    try:
        return parse(Path(path).read_bytes())
    except UserError as error:
        raise UserError(
            f"{path} is no tokenizer ({error}); bring back the file that the model was trained with"
        ) from error


@lru_cache(1)
def parse(content: bytes) -> Tokenizer:
    """Read a tokenizer: our JSON, another ``tokenizer.json``, tiktoken's ranks or a SentencePiece model. The
    most recent one is kept, since a run asks for it several times, and large ones take seconds.

    Nothing is executed, whatever the bytes are. Raises UserError, with the reason, if they are no tokenizer.
    """
    if re.match(rb"[A-Za-z0-9+/]+=* \d+\r?\n", content):
        return foreign.of_ranks(content)
    if not content.lstrip().startswith(b"{"):
        return SentencePieces(content)
    try:
        fields = parsed(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"byte {error.start} is not UTF-8") from error
    own: dict[str, Callable[[dict[str, Any]], Tokenizer]] = {
        _PRETOKENIZER: PretokenizerChain.of_json,
        _PIECES: SentencePieces.of_json,
        foreign.FOREIGN: lambda fields: foreign.of_json(fields[foreign.FOREIGN]),
    }
    read = next((read for key, read in own.items() if key in fields), _from_library)
    return read(fields)


def _from_library(fields: dict[str, Any]) -> Tokenizer:
    """Read a ``tokenizer.json`` of the library: made by others, unless it has one of our special tokens."""
    model, words = (
        part if isinstance(part := fields.get(key), dict) else {} for key in ("model", "pre_tokenizer")
    )
    if not (isinstance(model.get("vocab"), dict) and any(map(model["vocab"].__contains__, SPECIALS))):
        return foreign.of_json(fields)
    return (BytePairs if words.get("type") == "Metaspace" else BytePieces).of_json(fields)


def _ranks_of_tiktoken(name: str) -> bytes:
    """Return the ranks of a tiktoken encoding, as in tiktoken's files. The package first looks for the file
    in its cache.
    """
    try:
        tiktoken: Any = import_module("tiktoken")
    except ImportError as error:
        raise FileNotFoundError(
            f"{TIKTOKEN}{name} needs the package tiktoken; type: pip install tiktoken, or name its file"
        ) from error
    known = tiktoken.list_encoding_names()
    if name not in known:
        raise UserError(f"tiktoken has no encoding {name!r}{nearest(name, known)}; it has {', '.join(known)}")
    ranks: Mapping[bytes, int] = tiktoken.get_encoding(name)._mergeable_ranks
    in_order = sorted(ranks.items(), key=lambda entry: entry[1])
    return b"".join(b"%s %d\n" % (base64.b64encode(piece), rank) for piece, rank in in_order)


def _content(path: str) -> bytes:
    if not path:
        raise UserError(f"the name of the tokenizer is empty; type {_FORMS}")
    if path.startswith(TIKTOKEN):
        return _ranks_of_tiktoken(path.removeprefix(TIKTOKEN))
    file = located(path)
    if file.exists() and not (file.is_file() or file.is_dir()):
        raise UserError(f"{file} is no regular file; type {_FORMS}")
    try:
        return file.read_bytes()
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no tokenizer model {file}; type {_FORMS}") from None
    except IsADirectoryError:
        raise UserError(f"{file} is a folder; type {_FORMS}") from None
