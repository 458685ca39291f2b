"""Texts of several files: folders and patterns of text files, tables of Parquet, and shards of tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Final, TypeAlias, final

import numpy as np

from normlab.data.ragged import TOKENS_AT_A_TIME, Ints
from normlab.data.sources import Text, file_of, open_text
from normlab.data.text import TextFile, Unit, filled_in
from normlab.data.tokenizer import EOS
from normlab.errors import UserError

_ROWS_AT_A_TIME: Final = 1000
TEXT_COLUMN: Final = "text"


@final
@dataclass(frozen=True)
class Folder:
    """Text files, plain, ``.gz`` or ``.xz``; each is a document, in the order of their paths."""

    name: str
    files: tuple[Path, ...]
    in_rows: ClassVar[bool] = False

    def __iter__(self) -> Iterator[str]:
        return (line for file in self.files for line in TextFile(file))

    def units(self) -> Iterator[Unit]:
        return (unit for file in self.files for unit in TextFile(file).units())


@final
@dataclass(frozen=True)
class Parquet:
    """The column ``text`` of tables of Parquet; each row is a document. Needs the package pyarrow."""

    name: str
    files: tuple[Path, ...]
    in_rows: ClassVar[bool] = True

    def __iter__(self) -> Iterator[str]:
        return (line for text, _ in self.units() for line in text.split("\n"))

    def units(self) -> Iterator[Unit]:
        """Yield the rows. Raises UserError for a file that is no such table, and a row without text."""
        try:
            from pyarrow import ArrowException, parquet
        except ImportError as error:
            raise FileNotFoundError(
                f"{self.name} is Parquet, which needs the package pyarrow; type: pip install 'normlab[hf]'"
            ) from error
        for file in self.files:
            try:
                for part in parquet.ParquetFile(file).iter_batches(_ROWS_AT_A_TIME, columns=[TEXT_COLUMN]):
                    for text in part.column(0).to_pylist():
                        if not isinstance(text, str):
                            raise UserError(f"{file} has a row without text in its column {TEXT_COLUMN!r}")
                        yield text, True
            except (ArrowException, IndexError) as error:
                raise UserError(
                    f"{file} is no Parquet table with a column {TEXT_COLUMN!r} ({error}); write its texts "
                    f"into such a column"
                ) from error


@dataclass(frozen=True)
class Layout:
    """How the tokens of a shard lie in its file: ``count`` of them from the byte ``offset`` on."""

    dtype: str
    offset: int
    count: int


_HEADER_BYTES: Final = 1024
_MAGIC: Final = {20240520: (1, "<u2"), 20240801: (7, "<u4"), 20240522: (0, "")}
"""Version and type of tokens by the first number of llm.c's header: of GPT-2, of Llama 3, of evaluations."""


def layout_of(file: Path) -> Layout:
    """Return the layout of a shard: ``.npy``, a ``.bin`` with llm.c's header (modded-nanogpt has the same),
    or one of uint16 alone, as nanoGPT writes it.

    Raises UserError for a file whose size does not fit, and for other numbers at its beginning.
    """
    size = file.stat().st_size
    if file.suffix == ".npy":
        try:
            mapped = np.load(file, mmap_mode="r", allow_pickle=False)
        except ValueError as error:
            raise UserError(f"{file} is no array of NumPy ({error})") from error
        if mapped.ndim != 1 or mapped.dtype.kind not in "ui" or not isinstance(mapped, np.memmap):
            raise UserError(
                f"{file} holds {mapped.dtype} in {mapped.ndim} dimensions; tokens are whole numbers in one"
            )
        return Layout(mapped.dtype.str, mapped.offset, len(mapped))
    with file.open("rb") as stream:
        magic, version, count = np.frombuffer(stream.read(12).ljust(12, b"\0"), "<i4").tolist()
    if magic in _MAGIC:
        known, dtype = _MAGIC[magic]
        if version != known or not dtype:
            raise UserError(
                f"{file} has llm.c's header {magic}, version {version}, and is no shard of tokens"
            )
        if size != _HEADER_BYTES + count * np.dtype(dtype).itemsize:
            raise UserError(
                f"{file} says that it has {count:,} tokens, and has {size:,} bytes; copy it again"
            )
        return Layout(dtype, _HEADER_BYTES, count)
    if file.with_suffix(".idx").exists():
        raise UserError(f"{file} has an index beside it, as Megatron's data; write it as uint16 alone")
    if size % 2:
        raise UserError(f"{file} has {size:,} bytes, an odd number, and tokens in a .bin have two each")
    return Layout("<u2", 0, size // 2)


@final
@dataclass(frozen=True)
class Shards:
    """Tokens that others wrote, in files one after the other; see ``layout_of``. Special tokens separate
    documents, and a document may go on in the next file.
    """

    name: str
    files: tuple[Path, ...]

    def tokens(self, ours: Ints) -> ShardTokens:
        """Map the files; ``ours`` is our entry for each of theirs."""
        return ShardTokens(self.files, ours)


@final
class ShardTokens:
    """The tokens of shards, after an EOS, in our numbers; they stay on disk until they are read."""

    def __init__(self, files: Sequence[Path], ours: Ints) -> None:
        layouts = [layout_of(file) for file in files]
        self._parts = [
            np.memmap(file, each.dtype, "r", each.offset, (each.count,))
            if each.count
            else np.zeros(0, each.dtype)
            for file, each in zip(files, layouts, strict=True)
        ]
        self._ours, self._files = ours, files
        self._starts = np.cumsum([1, *(each.count for each in layouts)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, wanted: slice) -> Ints:
        start, stop, step = wanted.indices(len(self))
        if step != 1:
            raise ValueError("tokens of shards are read in their order")
        found = [np.full(max(0, min(1, stop) - start), EOS, self._ours.dtype)]
        for number in range(np.searchsorted(self._starts, start, side="right") - 1, len(self._parts)):
            begin = self._starts[number] if number >= 0 else 1
            if begin >= stop:
                break
            if number >= 0:
                found.append(self._ours[self._parts[number][max(0, start - begin) : stop - begin]])
        return np.concatenate(found)

    def digest(self) -> bytes:
        """Return the SHA-256 of all tokens. Raises UserError for one that the tokenizer does not have."""
        whole = hashlib.sha256()
        for file, part in zip(self._files, self._parts, strict=True):
            for start in range(0, len(part), TOKENS_AT_A_TIME):
                tokens = part[start : start + TOKENS_AT_A_TIME]
                if (largest := int(tokens.max())) >= len(self._ours) or int(tokens.min()) < 0:
                    raise UserError(
                        f"{file} has the token {largest}, and the tokenizer has {len(self._ours):,} entries; "
                        f"name the one that it was written with, with --tokenizer"
                    )
                whole.update(tokens.astype("<u4").data)
        return whole.digest()


Files: TypeAlias = Folder | Parquet | Shards
AnyText: TypeAlias = "Text | Files"
_KINDS: Final[dict[str, Callable[[str, tuple[Path, ...]], Files]]] = {
    ".parquet": Parquet,
    ".bin": Shards,
    ".npy": Shards,
}


def open_files(spec: str) -> AnyText:
    """Return the text that a path of a language model's configuration means.

    A folder, all files in it whose names begin with no dot, and a pattern (``shards/train_*.bin``,
    ``src/**/*.py``) are ``Files`` by the ending of their names, as is one such file; everything else is as
    ``sources.open_text`` has it. Raises UserError if there is no file, or endings differ in kind.
    """
    path = Path(filled_in(spec))
    if path.is_dir():
        files = [f for f in path.rglob("*") if f.is_file() and not _hidden(f.relative_to(path))]
    elif path.exists() or not any(mark in str(path) for mark in "*?["):
        files = [path] if path.suffix in _KINDS and path.is_file() else []
        if not files:
            return open_text(spec)
    else:
        files = [f for f in Path(path.anchor).glob(str(path.relative_to(path.anchor))) if f.is_file()]
        if not files and spec.endswith("]"):  # a part, such as text[:1000]
            return open_text(spec)
    kinds = {_KINDS.get(file.suffix, Folder) for file in files}
    if len(kinds) != 1:
        found = (
            "no file"
            if not files
            else f"files of several kinds, {', '.join(sorted({f.suffix for f in files}))}"
        )
        raise UserError(f"{spec} has {found}; name files of one kind, with a pattern such as 'texts/*.txt'")
    return kinds.pop()(str(spec), tuple(sorted(files)))


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def apart(texts: Mapping[str, AnyText]) -> dict[str, AnyText]:
    """Return the texts, those of several files without the files of another text that has fewer of them.

    Raises UserError if none is left.
    """
    files = {name: {file.resolve() for file in _files_of(text)} for name, text in texts.items()}
    left: dict[str, AnyText] = {}
    for name, text in texts.items():
        if not isinstance(text, Files):
            left[name] = text
            continue
        others = set[Path]().union(*(own for own in files.values() if own < files[name]))
        kept = tuple(file for file in text.files if file.resolve() not in others)
        if not kept:
            raise UserError(f"every file of {text.name} is one of another text as well; name other files")
        left[name] = replace(text, files=kept)
    return left


def _files_of(text: AnyText) -> tuple[Path, ...]:
    if isinstance(text, Files):
        return text.files
    file = file_of(text)
    return (file,) if file else ()
