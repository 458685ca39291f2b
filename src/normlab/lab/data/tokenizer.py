"""The interface of tokenizers, and those learned as byte pairs: of characters, the default, or of bytes."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar, Final, Self, final

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from normlab.errors import UserError

PAD, UNK, BOS, EOS = range(4)

# A space inside the name: no merge of the text's own pieces can ever spell it.
SPECIALS = ("[ pad ]", "[ unk ]", "[ bos ]", "[ eos ]")
_SPACE = "\u2581"


class Tokenizer(ABC):
    """Turns text into ids and back; PAD = 0, UNK = 1, BOS = 2 and EOS = 3 in every tokenizer."""

    verbatim: ClassVar[bool] = False
    """Whether a language model's text reaches it verbatim; if not, line by line, without ends of lines."""

    kind: str
    """The kind of tokenizer in words."""

    @property
    @abstractmethod
    def vocab_size(self) -> int: ...

    @abstractmethod
    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """Return the ids of source text without special tokens; characters without a piece become UNK."""

    def encode_target(self, lines: Sequence[str]) -> list[list[int]]:
        """Return the ids of target text: those of ``encode``, unless languages have their own rules."""
        return self.encode(lines)

    @abstractmethod
    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """Return target text without special tokens."""

    def byte_counts(self) -> NDArray[np.int64]:
        """Return the bytes that each entry stands for, `[V]`. Raises TypeError unless ``verbatim``."""
        raise TypeError(f"the entries of {self.kind} do not each stand for bytes")

    @abstractmethod
    def to_json(self) -> str:
        """Return the whole tokenizer as JSON, for ``vocabulary.load``."""

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json(), encoding="utf-8", newline="\n")


class LearnedPairs(Tokenizer):
    """Base of byte-pair encodings that the library ``tokenizers`` learns here, and runs."""

    def __init__(self, backend: Backend) -> None:
        # Text that happens to spell a special token stays text.
        backend.encode_special_tokens = True
        self._backend = backend

    @staticmethod
    @abstractmethod
    def untrained() -> Backend:
        """Return the library's tokenizer with everything but pieces."""

    @classmethod
    def of_json(cls, fields: Mapping[str, Any]) -> Self:
        """Read a tokenizer from its JSON. Raises UserError if it is not one, has other special tokens or
        differs from ours in more than its pieces: it could make the library run regular expressions that take
        exponential time, or ask for more memory than there is.
        """
        _require_ours(fields, cls.untrained())
        with library_errors():
            return cls(Backend.from_str(json.dumps(fields)))

    @property
    def vocab_size(self) -> int:
        return self._backend.get_vocab_size()

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        return [line.ids for line in self._backend.encode_batch_fast(list(lines), add_special_tokens=False)]

    def to_json(self) -> str:
        return self._backend.to_str(pretty=True)


@final
class BytePairs(LearnedPairs):
    """Byte-pair encoding (Sennrich et al. 2016, Section 3.2, arXiv 1508.07909) after NFC normalisation.

    White space of any kind and length becomes one space, written U+2581 at the start of a word, so that
    decoding restores it. U+2581 in the text itself reads as a space.
    """

    kind = "byte-pair encoding"

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self._by_word = WordCache(super().encode, _SPACE)

    @staticmethod
    def untrained() -> Backend:
        backend = Backend(models.BPE(unk_token=SPECIALS[UNK]))
        backend.normalizer = normalizers.Sequence(
            [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
        )
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE)
        backend.decoder = decoders.Metaspace(replacement=_SPACE)
        return backend

    @classmethod
    def train(cls, lines: Iterable[str], vocab_size: int) -> BytePairs:
        """Learn merges until there are ``vocab_size`` entries, special tokens and single characters included.

        There are fewer if the text has no more pairs to merge. Raises UserError if the characters alone are
        more.
        """
        backend = cls.untrained()
        trainer = trainers.BpeTrainer(
            vocab_size=max(vocab_size, 0), special_tokens=list(SPECIALS), show_progress=False
        )
        backend.train_from_iterator(lines, trainer)
        require_room_for_characters(vocab_size, least=backend.get_vocab_size())
        return cls(backend)

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        return self._by_word(lines)

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """Invert ``encode`` up to NFC, white space and unseen characters."""
        return self._backend.decode_batch([list(line) for line in ids], skip_special_tokens=True)


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


_PRINTABLE: Final = (*range(33, 127), *range(161, 173), *range(174, 256))
_OTHERS: Final = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTE_OF: Final = {chr(b): b for b in _PRINTABLE} | {chr(256 + n): b for n, b in enumerate(_OTHERS)}
"""The byte that a character of a piece's name stands for: GPT-2's alphabet of 256 printable characters."""


def bytes_of(name: str) -> bytes:
    """Return the bytes that a piece's name stands for. Raises UserError if it stands for none."""
    try:
        return bytes(map(BYTE_OF.__getitem__, name))
    except KeyError as error:
        raise UserError(f"its entry {name!r} is not a sequence of bytes") from error


def name_of(piece: bytes) -> str:
    """Invert ``bytes_of``."""
    return "".join(map(_NAMES.__getitem__, piece))


_NAMES: Final = [name for name, _ in sorted(BYTE_OF.items(), key=lambda entry: entry[1])]


def _require_ours(fields: Mapping[str, Any], untrained: Backend) -> None:
    """Raise UserError for a tokenizer that differs from ours in more than its pieces, before it is built."""
    model = fields.get("model")
    model = model if isinstance(model, dict) else {}
    pieces = model.get("vocab")
    pieces = pieces if isinstance(pieces, dict) else {}
    numbers = [number for number in pieces.values() if type(number) is int]
    if not numbers or sorted(numbers) != list(range(len(pieces))):
        raise UserError("its JSON is damaged: it has no entries with the numbers 0, 1, 2 and so on")
    added = fields.get("added_tokens")
    names: list[Any] = []
    if isinstance(added, list):
        names = [token.get("content") for token in added if isinstance(token, dict)]
    if names != list(SPECIALS) or [pieces.get(name) for name in SPECIALS] != [PAD, UNK, BOS, EOS]:
        raise UserError(f"its first entries are not {', '.join(SPECIALS)}")
    ours = json.loads(untrained.to_str())
    ours["added_tokens"] = added
    ours["model"]["vocab"] = pieces
    ours["model"]["merges"] = model.get("merges")
    different = _first_difference(fields, ours)
    if different:
        raise UserError(f"its {different} is not that of the tokenizers that normlab learns")


def _first_difference(fields: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """Return the name of a field that differs from ours; empty if there is none. A missing field has the
    library's default, so that files of its earlier versions can be read.
    """
    for name, value in fields.items():
        our_value = ours.get(name)
        if isinstance(value, dict) and isinstance(our_value, dict):
            inner = _first_difference(value, our_value)
            if inner:
                return f"{name}.{inner}"
        elif name not in ours or value != our_value:
            return name
    return ""


@contextmanager
def library_errors() -> Iterator[None]:
    """Raise UserError for errors of the library; its panics are not an ``Exception``."""
    try:
        yield
    except Exception as error:  # the library raises nothing narrower
        raise UserError(f"the library tokenizers cannot read it: {error}") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise UserError(f"the library tokenizers gave up on it: {error}") from error


def require_room_for_characters(vocab_size: int, *, least: int) -> None:
    """Raise UserError if ``vocab_size`` is below ``least``, the characters of the text and special tokens."""
    if least > vocab_size:
        raise UserError(
            f"vocab_size is {vocab_size}, but the text's different characters and the {len(SPECIALS)} "
            f"special tokens are {least} already; pass at least {least}"
        )


MOST_WORDS = 2**17
"""The cache is emptied before it holds more words, some 30 MB; frequent words are soon back."""


class WordCache:
    """Encode lines as ``encode`` does, an encoder that splits at white space and sees each word alone.

    Only lines whose white space is U+0020 are split here: printable ones, in the sense of
    ``str.isprintable``. Other lines go to ``encode`` unchanged, and so do lines with ``mark``, the character
    that ``encode`` uses for a space. Safe to call from several threads.
    """

    def __init__(self, encode: Callable[[Sequence[str]], list[list[int]]], mark: str) -> None:
        self._encode, self._mark = encode, mark
        self._ids_of: dict[str, list[int]] = {}
        self._lock = Lock()

    def __call__(self, lines: Sequence[str]) -> list[list[int]]:
        ids: list[list[int]] = [[]] * len(lines)
        simple: list[int] = []
        others: list[int] = []
        for number, line in enumerate(lines):
            splits_at_spaces = line.isprintable() and self._mark not in line
            (simple if splits_at_spaces else others).append(number)
        if others:
            for number, row in zip(others, self._encode([lines[i] for i in others]), strict=True):
                ids[number] = row
        rows = self._joined([lines[i].split() for i in simple])
        for number, row in zip(simple, rows, strict=True):
            ids[number] = row
        return ids

    def _joined(self, lines: list[list[str]]) -> list[list[int]]:
        """Return the ids of each line's words, one after the other."""
        with self._lock:
            words = set(chain.from_iterable(lines))
            new = words - self._ids_of.keys()
            if len(self._ids_of) + len(new) > MOST_WORDS:
                self._ids_of.clear()
                new = words
            # Sorted, so that the calls of the library do not depend on how strings are hashed.
            in_order = sorted(new)
            if in_order:
                self._ids_of.update(zip(in_order, self._encode(in_order), strict=True))
            return [list(chain.from_iterable(self._ids_of[word] for word in line)) for line in lines]
