"""The tokenizer that a configuration asks for: learned or from a file, with or without a pretokenizer."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

from normlab.base.io import from_plain, parsed
from normlab.errors import UserError, nearest
from normlab.lab.config import DataConfig
from normlab.lab.data import foreign
from normlab.lab.data.pretokenizer import PRETOKENIZER, PRETOKENIZERS, PretokenizerChain
from normlab.lab.data.sentencepiece_model import SENTENCEPIECE, SentencePieces
from normlab.lab.data.text import located
from normlab.lab.data.tokenizer import SPECIALS, BytePairs, BytePieces, Tokenizer

LEARNED: Mapping[str, type[BytePairs | SentencePieces | BytePieces]] = {
    "bpe": BytePairs,
    "unigram": SentencePieces,
    "byte_bpe": BytePieces,
}
"""Tokenizers learned from the training text. Any other ``DataConfig.tokenizer`` is the path of a file."""
TIKTOKEN = "tiktoken:"
"""The prefix for the name of a tiktoken encoding, in place of a file's path."""
_FORMS = "--tokenizer bpe, unigram or byte_bpe to learn one from the text, or name the file of a model"


@dataclass(frozen=True)
class _PretokenizerEntry:
    """The pretokenizer in the JSON of a ``PretokenizerChain``."""

    name: str
    languages: tuple[str, str]


def vocabulary(config: DataConfig, source: Iterable[str], target: Iterable[str]) -> Tokenizer:
    """Learn the tokenizer of a configuration from both sides of a text, or read it from its file."""
    if config.tokenizer in LEARNED:
        inner = _learned(config, source, target)
    else:
        inner = _from_file(config)
    if not config.pretokenizer:
        return inner
    return PretokenizerChain(inner, config.pretokenizer, (config.source_lang, config.target_lang))


def _learned(config: DataConfig, source: Iterable[str], target: Iterable[str]) -> Tokenizer:
    if config.pretokenizer:
        kind = PRETOKENIZERS[config.pretokenizer]
        source = map(kind(config.source_lang).split, source)
        target = map(kind(config.target_lang).split, target)
    return LEARNED[config.tokenizer].train(itertools.chain(source, target), config.vocab_size)


def is_verbatim(config: DataConfig) -> bool:
    """Whether the tokenizer of a configuration takes text verbatim, see ``Tokenizer.verbatim``. Raises what
    ``vocabulary`` raises for a file that is not a tokenizer.
    """
    return (LEARNED.get(config.tokenizer) or _from_file(config)).verbatim


def digests(config: DataConfig) -> list[bytes]:
    """Return digests of the tokenizer: none for the default, else of its name if learned, or of its file."""
    if config.tokenizer == "bpe":
        return []
    name = config.tokenizer
    content = name.encode() if name in LEARNED else _content(name)
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
        raise UserError(f"{path} is not a tokenizer: {error}; type {_FORMS}") from error
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
        raise FileNotFoundError(f"there is not a tokenizer file {path}; prepare the data again")
    try:
        return parse(Path(path).read_bytes())
    except UserError as error:
        raise UserError(
            f"{path} is not a tokenizer ({error}); bring back the file that the model was trained with"
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
    if PRETOKENIZER in fields:
        return _chain_of(fields)
    if SENTENCEPIECE in fields:
        return SentencePieces.of_json(fields)
    if foreign.FOREIGN in fields:
        return foreign.of_json(fields[foreign.FOREIGN])
    return _from_library(fields)


def _chain_of(fields: Mapping[str, Any]) -> PretokenizerChain:
    entry: _PretokenizerEntry = from_plain(_PretokenizerEntry, fields[PRETOKENIZER], PRETOKENIZER)
    if not isinstance(fields.get("tokenizer"), dict):
        raise UserError("its JSON is damaged: it has no object 'tokenizer'")
    return PretokenizerChain(parse(json.dumps(fields["tokenizer"]).encode()), entry.name, entry.languages)


def _from_library(fields: dict[str, Any]) -> Tokenizer:
    """Read a ``tokenizer.json`` of the library: made by others, unless it has one of our special tokens."""
    vocab = _section(_section(fields, "model"), "vocab")
    if not any(name in vocab for name in SPECIALS):
        return foreign.of_json(fields)
    kind = BytePairs if _section(fields, "pre_tokenizer").get("type") == "Metaspace" else BytePieces
    return kind.of_json(fields)


def _section(fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return an object in JSON that may be damaged; an empty one if it is no object."""
    section = fields.get(name)
    return section if isinstance(section, dict) else {}


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
        raise UserError(f"{file} is not a regular file; type {_FORMS}")
    try:
        return file.read_bytes()
    except FileNotFoundError:
        raise FileNotFoundError(f"there is not a tokenizer model {file}; type {_FORMS}") from None
    except IsADirectoryError:
        raise UserError(f"{file} is a folder; type {_FORMS}") from None
