"""Texts of several files: folders and patterns of text files, Parquet tables, and token shards."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, ClassVar, Final, TypeAlias, final

import numpy as np

from normlab.errors import UserError
from normlab.lab.data.ragged import TOKENS_AT_A_TIME, Ints
from normlab.lab.data.sources import Text, file_of, open_text
from normlab.lab.data.text import TextFile, Unit, filled_in
from normlab.lab.data.tokenizer import EOS

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
    """The column ``text`` of Parquet tables; each row is a document. Needs the package pyarrow."""

    name: str
    files: tuple[Path, ...]
    in_rows: ClassVar[bool] = True

    def __iter__(self) -> Iterator[str]:
        return (line for text, _ in self.units() for line in text.split("\n"))

    def units(self) -> Iterator[Unit]:
        """Yield the rows. Raises UserError for a file that is no such table, and for a row without text."""
        try:
            from pyarrow import ArrowException, parquet
        except ImportError as error:
            raise FileNotFoundError(
                f"{self.name} is Parquet, which needs the package pyarrow; type: pip install 'normlab[hf]'"
            ) from error
        for file in self.files:
            try:
                table = parquet.ParquetFile(file)
                names = table.schema_arrow.names
                if TEXT_COLUMN not in names:
                    raise UserError(
                        f"{file} has no column {TEXT_COLUMN!r}; it has {', '.join(names)}; rename the one "
                        f"with the texts"
                    )
                for part in table.iter_batches(_ROWS_AT_A_TIME, columns=[TEXT_COLUMN]):
                    for text in part.column(0).to_pylist():
                        if not isinstance(text, str):
                            raise UserError(f"{file} has a row without text in its column {TEXT_COLUMN!r}")
                        yield text, True
            except ArrowException as error:
                raise UserError(f"{file} is not a Parquet table ({error}); write it again") from error


@dataclass(frozen=True)
class _Layout:
    """How the tokens of a shard are stored in its file: ``count`` of them from the byte ``offset`` on."""

    dtype: str
    offset: int
    count: int
    starts: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    """The first token of each document, if a file next to the shard lists them."""


_HEADER_BYTES: Final = 1024
_MAGIC: Final = {20240520: (1, "<u2"), 20240801: (7, "<u4"), 20240522: (0, "")}
"""Version and token type by the first number of llm.c's header: for GPT-2, Llama 3 and evaluations."""


_MEGATRON: Final = struct.Struct("<9sQBQQ")
"""The beginning of Megatron's index: mark, version, token type, and the lengths of its two lists, of
sequences and of those that begin documents (megatron/core/datasets/indexed_dataset.py).
"""
_MARK: Final = b"MMIDIDX\0\0"
_TYPES: Final = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


def layout_of(file: Path) -> _Layout:
    """Return the layout of a shard: ``.npy``; or ``.bin``, with Megatron's index ``.idx`` next to it, with
    llm.c's header (the same as modded-nanogpt's), or with uint16 tokens alone, as nanoGPT writes it. A file
    ``.idx.npy`` next to it may list the numbers of the documents' first tokens.

    Raises UserError for a file of the wrong size, and for other numbers at its beginning.
    """
    index, list_of_starts = file.with_suffix(".idx"), file.with_suffix(".idx.npy")
    if file.suffix == ".npy":
        mapped = _integers(file)
        layout = _Layout(mapped.dtype.str, mapped.offset, len(mapped))
    elif index.exists():
        layout = _megatron(file, index)
    else:
        layout = _raw(file)
    if not list_of_starts.exists():
        return layout
    starts = _integers(list_of_starts).astype(np.int64)
    ascending = (np.diff(starts, prepend=-1) > 0).all()
    if not ascending or starts.max(initial=0) > layout.count:
        raise UserError(
            f"{list_of_starts} must hold the number of each document's first token, in their order, below "
            f"the {layout.count:,} tokens of {file}; write it again, or move it away"
        )
    return replace(layout, starts=starts[starts < layout.count])


def _integers(file: Path) -> np.memmap[Any, Any]:
    """Map an array of integers, `[n]`."""
    try:
        mapped = np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise UserError(f"{file} is not a NumPy array ({error})") from error
    if not isinstance(mapped, np.memmap) or mapped.ndim != 1 or mapped.dtype.kind not in "ui":
        raise UserError(f"{file} is not one row of whole numbers; write it as such")
    return mapped


def _raw(file: Path) -> _Layout:
    """Return the layout of a file with llm.c's header, or with uint16 tokens alone."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        magic, version, count = np.frombuffer(stream.read(12).ljust(12, b"\0"), "<i4").tolist()
    if magic in _MAGIC:
        known, dtype = _MAGIC[magic]
        if version != known or not dtype:
            raise UserError(f"{file} has llm.c's header {magic}, version {version}, but is not a token shard")
        _require_size(file, count, dtype, _HEADER_BYTES)
        return _Layout(dtype, _HEADER_BYTES, count)
    if size % 2:
        raise UserError(f"{file} has {size:,} bytes, an odd number, but tokens in a .bin have two each")
    return _Layout("<u2", 0, size // 2)


def _require_size(file: Path, count: int, dtype: str, header: int = 0) -> None:
    size = file.stat().st_size
    if size != header + count * np.dtype(dtype).itemsize:
        raise UserError(f"{file} says that it has {count:,} tokens, but has {size:,} bytes; copy it again")


def _megatron(file: Path, index: Path) -> _Layout:
    """Return the layout of a file with Megatron's index: its sequences, and those that begin documents."""
    content = np.fromfile(index, np.uint8)
    head = content[: _MEGATRON.size].tobytes().ljust(_MEGATRON.size, b"\0")
    mark, version, kind, sequences, documents = _MEGATRON.unpack(head)
    if (mark, version) != (_MARK, 1) or kind not in _TYPES:
        raise UserError(
            f"{index} is not a Megatron index, version 1, with tokens of whole numbers; move it away if "
            f"{file} is a shard of another kind"
        )
    # After the head: the length and the place in bytes of each sequence, then the first one of each document.
    edges = list(accumulate((_MEGATRON.size, 4 * sequences, 8 * sequences, 8 * documents)))
    if len(content) not in (edges[-1], edges[-1] + sequences):  # a byte each, of multimodal text
        raise UserError(f"{index} has {len(content):,} bytes, not as many as it says; copy it again")
    lengths, places, first_sequences = (
        content[start:stop].view(dtype)
        for (start, stop), dtype in zip(pairwise(edges), ("<i4", "<i8", "<i8"), strict=True)
    )
    dtype = _TYPES[kind]
    ends = np.cumsum(lengths, dtype=np.int64)
    begins = ends - lengths
    count = int(ends[-1]) if sequences else 0
    _require_size(file, count, dtype)
    exist = lengths.min(initial=0) >= 0 and first_sequences.min(initial=0) >= 0
    exist = exist and first_sequences.max(initial=0) <= sequences
    if not exist or (begins * np.dtype(dtype).itemsize != places).any():
        raise UserError(f"{index} names places that {file} does not have; write both again")
    # The list of documents ends with the number of sequences, where none begins.
    starts = np.unique(begins[first_sequences[first_sequences < sequences]])
    return _Layout(dtype, 0, count, starts[starts < count])


@final
@dataclass(frozen=True)
class Shards:
    """Tokens that others wrote, in consecutive files; see ``layout_of``. Special tokens separate documents,
    or files next to the shards say where they begin; a document may continue in the next file.
    """

    name: str
    files: tuple[Path, ...]


@final
class ShardTokens:
    """The tokens of shards as entries of our vocabulary, with an EOS before the first. They stay on disk
    until needed. ``ours`` is our entry for each of theirs.

    A document that a file next to a shard lists begins after an EOS, which is added if there is no special
    token.
    """

    def __init__(self, files: Sequence[Path], ours: Ints) -> None:
        layouts = [layout_of(file) for file in files]
        self._ours, self._files = ours, files
        self._parts = [_mapped(file, layout) for file, layout in zip(files, layouts, strict=True)]
        self._starts = np.cumsum([1, *(layout.count for layout in layouts)])
        """The place of each file's first token, without added EOS; then the end of the last file."""
        self._breaks = np.concatenate([np.zeros(0, np.int64), *self._unmarked(layouts)])
        """The places before which an EOS is added, counted without those."""
        self._added = self._breaks + np.arange(len(self._breaks))
        """The places of the added EOS, counted with them."""

    def __len__(self) -> int:
        return int(self._starts[-1]) + len(self._breaks)

    def __getitem__(self, wanted: slice) -> Ints:
        start, stop, step = wanted.indices(len(self))
        if step != 1:
            raise ValueError("tokens of shards are read in their order")
        first, last = np.searchsorted(self._added, (start, max(start, stop))).tolist()
        written = self._written(start - first, stop - last)
        if first == last:
            return written
        return np.insert(written, self._breaks[first:last] - (start - first), EOS)

    def _written(self, start: int, stop: int) -> Ints:
        """Return tokens as the files have them, including the first EOS, which is at 0."""
        has_first = start < 1 <= stop
        tokens: list[Ints] = [np.full(int(has_first), EOS, self._ours.dtype)]
        number = max(0, int(np.searchsorted(self._starts, start, side="right")) - 1)
        while number < len(self._parts) and self._starts[number] < stop:
            begin = self._starts[number]
            part = self._parts[number][max(0, start - begin) : stop - begin]
            tokens.append(self._ours[part])
            number += 1
        return np.concatenate(tokens)

    def _unmarked(self, layouts: Sequence[_Layout]) -> Iterator[Ints]:
        """Yield the starts of a file's documents that are not an EOS and do not follow one."""
        last_of_file_before = np.int64(EOS)
        for begin, part, layout in zip(self._starts, self._parts, layouts, strict=False):
            starts = layout.starts
            # clip: ``digest`` reports a token that the tokenizer does not have
            here = self._ours.take(part[starts], mode="clip")
            before = self._ours.take(part[starts - 1], mode="clip")
            before[starts == 0] = last_of_file_before
            yield begin + starts[(here != EOS) & (before != EOS)]
            if len(part):
                last_of_file_before = self._ours.take(part[-1], mode="clip")

    def digest(self) -> bytes:
        """Return the SHA-256 of all tokens. Raises UserError for one that the tokenizer does not have."""
        sha = hashlib.sha256()
        for file, part in zip(self._files, self._parts, strict=True):
            for start in range(0, len(part), TOKENS_AT_A_TIME):
                tokens = part[start : start + TOKENS_AT_A_TIME]
                largest = int(tokens.max())
                if largest >= len(self._ours) or int(tokens.min()) < 0:
                    raise UserError(
                        f"{file} has the token {largest}, and the tokenizer has {len(self._ours):,} entries; "
                        f"name the one that it was written with, with --tokenizer"
                    )
                sha.update(tokens.astype("<u4").data)
        sha.update(self._breaks.astype("<i8").data)
        return sha.digest()


def _mapped(file: Path, layout: _Layout) -> Ints:
    """Return the tokens of a shard, which stay on disk."""
    if not layout.count:  # an empty file cannot be mapped
        return np.zeros(0, layout.dtype)
    return np.memmap(file, layout.dtype, "r", layout.offset, (layout.count,))


Files: TypeAlias = Folder | Parquet | Shards
AnyText: TypeAlias = "Text | Files"
_BY_SUFFIX: Final[dict[str, Callable[[str, tuple[Path, ...]], Files]]] = {
    ".parquet": Parquet,
    ".bin": Shards,
    ".npy": Shards,
}


def open_files(spec: str) -> AnyText:
    """Return the text that a path in a language model's configuration refers to.

    A folder (all its files whose names do not begin with a dot), a pattern (``shards/train_*.bin``,
    ``src/**/*.py``) and a single such file give ``Files`` of the kind that the names' endings tell; all else
    is up to ``sources.open_text``. Raises UserError if there is no file, or endings differ in kind.
    """
    path = Path(filled_in(spec))
    if path.is_dir():
        named = [file for file in path.rglob("*") if not _is_hidden(file.relative_to(path))]
    elif path.exists() or not any(mark in str(path) for mark in "*?["):
        if path.suffix in _BY_SUFFIX and path.is_file():
            return _BY_SUFFIX[path.suffix](spec, (path,))
        return open_text(spec)
    else:
        named = list(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
    files = sorted(file for file in named if file.is_file() and not _is_index(file))
    if not files and spec.endswith("]") and not path.is_dir():  # a part, such as text[:1000]
        return open_text(spec)
    kinds = {_BY_SUFFIX.get(file.suffix, Folder) for file in files}
    if len(kinds) != 1:
        endings = ", ".join(sorted({file.suffix for file in files}))
        wrong = f"files of several kinds, {endings}" if files else "no file"
        raise UserError(f"{spec} has {wrong}; name files of one kind, with a pattern such as 'texts/*.txt'")
    return kinds.pop()(spec, tuple(files))


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _is_index(file: Path) -> bool:
    """Whether a file says where the documents of the shard next to it begin, as ``layout_of`` reads it."""
    index = Path(file.name.removesuffix(".npy"))
    if index.suffix != ".idx":
        return False
    return any(file.with_name(index.stem + ending).exists() for ending in (".bin", ".npy"))


def apart(texts: Mapping[str, AnyText]) -> dict[str, AnyText]:
    """Return the texts, without those files of a text that also form another, smaller text.

    Raises UserError if none is left.
    """
    files = {name: {file.resolve() for file in _files_of(text)} for name, text in texts.items()}
    separated: dict[str, AnyText] = {}
    for name, text in texts.items():
        if not isinstance(text, Files):
            separated[name] = text
            continue
        in_smaller: set[Path] = set()
        for other in files.values():
            if other < files[name]:
                in_smaller |= other
        rest = tuple(file for file in text.files if file.resolve() not in in_smaller)
        if not rest:
            raise UserError(f"every file of {text.name} also belongs to another text; name other files")
        separated[name] = replace(text, files=rest)
    return separated


def _files_of(text: AnyText) -> tuple[Path, ...]:
    if isinstance(text, Files):
        return text.files
    file = file_of(text)
    return (file,) if file else ()
