"""The tokenizer that a configuration asks for, and tokenizers from files."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normlab.config.config import DataConfig
from normlab.config.io import from_plain, parsed
from normlab.data import pieces, pretokenizer
from normlab.data.pieces import SentencePieces
from normlab.data.pretokenizer import PretokenizerChain, split_both
from normlab.data.text import located
from normlab.data.tokenizer import BytePairs, Tokenizer
from normlab.errors import UserError

LEARNED: Mapping[str, Callable[[Iterable[str], int], Tokenizer]] = {
    "bpe": BytePairs.train,
    "unigram": SentencePieces.train,
}
"""Tokenizers learned from the training text. Any other ``DataConfig.tokenizer`` is the path of a file."""


def vocabulary(config: DataConfig, source: Iterable[str], target: Iterable[str]) -> Tokenizer:
    """Learn the tokenizer of a configuration from both sides of a text, or read it from its file."""
    languages = (config.source_lang, config.target_lang)
    if config.tokenizer not in LEARNED:
        inner = _ready(config)
    else:
        both = itertools.chain(source, target)
        if config.pretokenizer:
            both = split_both(config.pretokenizer, languages, source, target)
        inner = LEARNED[config.tokenizer](both, config.vocab_size)
    return PretokenizerChain(inner, config.pretokenizer, languages) if config.pretokenizer else inner


def digests(config: DataConfig) -> list[bytes]:
    """Return digests of the tokenizer: none for the default, of the name if it is learned, or of its file."""
    if config.tokenizer == "bpe":
        return []
    learned = config.tokenizer in LEARNED
    content = config.tokenizer.encode() if learned else _content(config.tokenizer)
    return [hashlib.sha256(content).digest()]


def _ready(config: DataConfig) -> Tokenizer:
    """Return the tokenizer of a file that a user names, without its pretokenizer.

    Raises FileNotFoundError if there is no such file, and UserError if it is no tokenizer or has another
    pretokenizer than the configuration.
    """
    path, content = config.tokenizer, _content(config.tokenizer)
    try:
        found = parse(content)
    except UserError as error:
        raise UserError(f"{path} is no tokenizer: {error}; type {_FORMS}") from error
    if not isinstance(found, PretokenizerChain):
        return found
    source, target = found.languages
    if (config.pretokenizer, config.source_lang, config.target_lang) != (found.name, source, target):
        raise UserError(
            f"{path} has the pretokenizer {found.name} for {source} and {target}; type --pretokenizer "
            f"{found.name} --source-lang {source} --target-lang {target} beside it"
        )
    return found.inner


def load(path: str | Path) -> Tokenizer:
    """Read the tokenizer of a run or a prepared corpus; its content shows of which kind it is."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no tokenizer file {path}; prepare the data again")
    try:
        return parse(Path(path).read_bytes())
    except UserError as error:
        raise UserError(
            f"{path} is no tokenizer ({error}); bring back the file that the model was trained with"
        ) from error


def parse(content: bytes) -> Tokenizer:
    """Read a tokenizer, our JSON or a SentencePiece model.

    Nothing is executed, whatever the bytes are. Raises UserError with the reason if they are no tokenizer.
    """
    if not content.lstrip().startswith(b"{"):
        return SentencePieces(content)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"byte {error.start} is not UTF-8") from error
    fields = parsed(text)
    if pretokenizer.KEY in fields:
        return _chain(fields)
    if pieces.KEY in fields:
        return SentencePieces.of_json(fields)
    return BytePairs.of_json(fields)


@dataclass(frozen=True)
class PretokenizerEntry:
    """The pretokenizer in the JSON of a ``PretokenizerChain``."""

    name: str
    languages: tuple[str, str]


def _chain(fields: dict[str, Any]) -> PretokenizerChain:
    about: PretokenizerEntry = from_plain(PretokenizerEntry, fields[pretokenizer.KEY], pretokenizer.KEY)
    if not isinstance(fields.get("tokenizer"), dict):
        raise UserError("its JSON is damaged: it has no object 'tokenizer'")
    inner = json.dumps(fields["tokenizer"])
    return PretokenizerChain(parse(inner.encode()), about.name, about.languages)


_FORMS = "--tokenizer bpe or --tokenizer unigram to learn one from the text, or name the file of a model"


def _content(path: str | Path) -> bytes:
    if not str(path):
        raise UserError(f"the name of the tokenizer is empty; type {_FORMS}")
    file = located(path)
    if file.exists() and not (file.is_file() or file.is_dir()):
        raise UserError(f"{file} is no regular file; type {_FORMS}")
    try:
        return file.read_bytes()
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no tokenizer model {file}; type {_FORMS}") from None
    except IsADirectoryError:
        raise UserError(f"{file} is a folder; type {_FORMS}") from None
