"""Which tokenizer a configuration asks for, and the one that a file holds."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normlab.data import pieces, words
from normlab.data.pieces import SentencePieces
from normlab.data.text import located
from normlab.data.tokenizer import BytePairs, Tokenizer
from normlab.data.words import Worded, split_both
from normlab.errors import UserError
from normlab.spec.config import DataConfig
from normlab.spec.serialise import from_plain

LEARNED: Mapping[str, Callable[[Iterable[str], int], Tokenizer]] = {
    "bpe": BytePairs.train,
    "unigram": SentencePieces.train,
}
"""From the training text. Everything else that ``DataConfig.tokenizer`` may be is a file."""

_DEFAULT = "bpe"


def vocabulary(config: DataConfig, source: Iterable[str], target: Iterable[str]) -> Tokenizer:
    """The tokenizer for a text: learned from both sides, each read once or not at all, or a ready one."""
    languages = (config.source_lang, config.target_lang)
    if config.tokenizer not in LEARNED:
        inner = _ready(config)
    else:
        both = itertools.chain(source, target)
        if config.pretokenizer:
            both = split_both(config.pretokenizer, languages, source, target)
        inner = LEARNED[config.tokenizer](both, config.vocab_size)
    return Worded(inner, config.pretokenizer, languages) if config.pretokenizer else inner


def digests(config: DataConfig) -> list[bytes]:
    """What a corpus's digest covers of its tokenizer: nothing of the one there has always been, the name of
    another one that is learned, the content of a ready one.
    """
    if config.tokenizer == _DEFAULT:
        return []
    learned = config.tokenizer in LEARNED
    content = config.tokenizer.encode() if learned else _content(config.tokenizer)
    return [hashlib.sha256(content).digest()]


def corpus_key(config: DataConfig) -> list[str]:
    """What the name of a prepared corpus covers beside its digest: how words are found, if they are."""
    return [config.pretokenizer, config.source_lang, config.target_lang] if config.pretokenizer else []


def _ready(config: DataConfig) -> Tokenizer:
    """The tokenizer of a file that a user names; of words, what stands behind the words that were asked for.

    Raises FileNotFoundError or UserError it.
    """
    path, content = config.tokenizer, _content(config.tokenizer)
    try:
        found = parse(content)
    except UserError as error:
        raise UserError(f"{path} is no tokenizer: {error}; type {_FORMS}") from error
    if not isinstance(found, Worded):
        return found
    source, target = found.languages
    if (config.pretokenizer, config.source_lang, config.target_lang) != (found.name, source, target):
        raise UserError(
            f"{path} is a tokenizer of {found.name} words of {source} and {target}; type --pretokenizer "
            f"{found.name} --source-lang {source} --target-lang {target} beside it"
        )
    return found.inner


def load(path: str | Path) -> Tokenizer:
    """The tokenizer that a run or a prepared corpus keeps; its content says of which kind it is."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no tokenizer file {path}; prepare the data again")
    try:
        return parse(Path(path).read_bytes())
    except UserError as error:
        raise UserError(
            f"{path} is no tokenizer ({error}); bring back the file that the model was trained with"
        ) from error


def parse(content: bytes) -> Tokenizer:
    """The tokenizer of a file's content: our JSON, that of the library tokenizers, or a SentencePiece model.

    Nothing is executed, whatever the bytes are. Raises UserError with the reason if they are none.
    """
    if not content.lstrip().startswith(b"{"):
        return SentencePieces(content)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"byte {error.start} is not UTF-8") from error
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return BytePairs.of_json(text)  # its error says where the JSON breaks off
    if words.KEY in fields:
        return _worded(fields)
    if pieces.KEY in fields:
        return SentencePieces.of_json(fields)
    return BytePairs.of_json(text)


@dataclass(frozen=True)
class PretokenizerEntry:
    """The entry of a ``Worded`` tokenizer's JSON that says how its words are found."""

    name: str
    languages: tuple[str, str]


def _worded(fields: dict[str, Any]) -> Worded:
    about: PretokenizerEntry = from_plain(PretokenizerEntry, fields[words.KEY], words.KEY)
    if not isinstance(fields.get("tokenizer"), dict):
        raise UserError("its JSON is damaged: it has no object 'tokenizer'")
    inner = json.dumps(fields["tokenizer"])
    return Worded(parse(inner.encode()), about.name, about.languages)


_FORMS = "--tokenizer bpe or --tokenizer unigram, which are learned from the text, or name a model's file"


def _content(path: str | Path) -> bytes:
    file = located(path)
    try:
        return file.read_bytes()
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no tokenizer model {file}; type {_FORMS}") from None
    except IsADirectoryError:
        raise UserError(f"{file} is a folder; type {_FORMS}") from None
