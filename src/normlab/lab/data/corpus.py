"""Prepared corpora: folders with a tokenizer, tokens and facts, each named after its text and complete from
the moment it exists.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import hashlib
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from normlab.base.files import sha256_of
from normlab.errors import UserError
from normlab.lab.config import DataConfig
from normlab.lab.data.tokenizer import Tokenizer
from normlab.lab.data.vocabulary import digests, load

FORMAT = 4
"""Version of prepared folders. Raise it when their files or the meaning of these change."""

SEAL = "sha256"
"""The entry of a manifest that holds the digest of the others."""


@dataclass(frozen=True, kw_only=True)
class PreparedCorpus:
    """What every prepared corpus holds; its tokens stay on disk until needed."""

    folder: Path
    tokenizer: Tokenizer
    unigram_entropy_nats: float
    """Entropy of what training predicts: the loss of a model that knows only the frequencies."""
    target_vocab: NDArray[np.bool_]
    """``[V]``: vocabulary entries that training predicts, EOS included."""
    facts: dict[str, str]
    """Facts for the terminal and the page, by their labels."""
    overlap: dict[str, float] = field(default_factory=dict)
    """The shares of sentences that also occur in another text, see ``text.Overlap``."""
    warning: str = ""
    """A sentence that the user should read about the text before training; empty if there is none."""


def with_digest(config: DataConfig, texts: Iterable[bytes]) -> DataConfig:
    """Fill the digest of its texts and tokenizer into a configuration: SHA-256 over the SHA-256 of each, so
    that one text cannot run into the next.

    Raises UserError if the configuration already has the digest of another text.
    """
    digest = hashlib.sha256(b"".join([*texts, *digests(config)])).hexdigest()
    if config.digest not in ("", digest):
        raise UserError(
            f"the text has digest {digest}, but the configuration was made with {config.digest}; bring that "
            f"text back, or empty the field digest to use this one"
        )
    return replace(config, digest=digest)


def prepare_folder(root: str | Path, key: Sequence[Any], fill: Callable[[Path], dict[str, Any]]) -> Path:
    """Return the folder under ``root`` for a key that covers its content; ``fill`` writes it if it is missing
    or if a file in it has changed since.

    ``fill`` receives an empty folder and returns its manifest. A folder is built under a temporary name and
    then renamed, so nobody ever sees a half-written one.
    """
    name = hashlib.sha256(json.dumps([*key, FORMAT]).encode()).hexdigest()[:12]
    folder = Path(root) / name
    if _intact(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        _write(folder, fill)
    except OSError as error:
        if type(error) is not OSError or error.filename is not None:
            raise
        # NumPy says only how many bytes it could not write, and a stream knows no file name.
        code = error.errno or errno.ENOSPC
        raise OSError(code, os.strerror(code), str(folder)) from error
    return folder


def open_corpus(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the manifest of a folder, and the fields of its ``PreparedCorpus``.

    Raises FileNotFoundError if the folder is missing or incomplete.
    """
    manifest = _read_manifest(folder)
    if manifest is None:
        raise FileNotFoundError(f"{folder} is not a complete prepared corpus; prepare the data again")
    tokenizer = load(folder / "tokenizer.json")
    target_vocab = np.zeros(tokenizer.vocab_size, bool)
    target_vocab[manifest["target_vocab"]] = True
    fields = {key: manifest[key] for key in ("unigram_entropy_nats", "facts", "overlap")}
    return manifest, {"folder": folder, "tokenizer": tokenizer, "target_vocab": target_vocab, **fields}


def count_facts(counts: NDArray[np.int64]) -> dict[str, Any]:
    """Return what a manifest says about how often each vocabulary entry occurs."""
    share = counts[counts > 0] / counts.sum()
    return {
        "vocab_size": len(counts),
        "unigram_entropy_nats": float(-(share * np.log(share)).sum()),
        "target_vocab": np.flatnonzero(counts).tolist(),
    }


class Encoded:
    """Facts about a text once it is encoded: how often each entry is predicted, its size and digest."""

    def __init__(self, vocab_size: int) -> None:
        self.counts = np.zeros(vocab_size, np.int64)
        self.words = self.bytes = 0
        self.digest = b""
        self.lost = ""
        """The first part of the text that decoding did not restore, and what to type; empty if none is."""

    @property
    def size(self) -> dict[str, int]:
        return {"words": self.words, "bytes": self.bytes}

    def compare(self, texts: Sequence[str], decoded: Sequence[str]) -> None:
        """Record in ``lost`` the first of these texts that was not restored, unless one is known already."""
        for text, back in zip(texts, decoded, strict=True):
            if not self.lost and text != back:
                place = _first_difference(text, back)
                start, stop = max(0, place - _BEFORE), place + _AFTER
                difference = f"{text[start:stop]!r} comes back as {back[start:stop]!r}"
                self.lost = f"{difference}; type --tokenizer byte_bpe"


_BEFORE, _AFTER = 12, 20
"""Characters shown before and after the first one that was not restored."""


def _first_difference(a: str, b: str) -> int:
    for place, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return place
    return min(len(a), len(b))


def _read_manifest(folder: Path) -> dict[str, Any] | None:
    """Read the manifest of a folder; None if the folder is missing or incomplete, or the manifest is not what
    was written: whoever uses its entries does not check them again.
    """
    try:
        manifest = json.loads((folder / "manifest.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(manifest, dict) or manifest.pop(SEAL, None) != _digest_of(manifest):
        return None
    complete = all((folder / name).is_file() for name in manifest["files"])
    return manifest if complete else None


def _digest_of(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _intact(folder: Path) -> bool:
    """Whether every file of a folder has the SHA-256 of its manifest."""
    manifest = _read_manifest(folder)
    if manifest is None:
        return False
    return all(sha256_of(folder / name) == sha for name, sha in manifest["files"].items())


def id_type(vocab_size: int) -> type[np.integer]:
    """Return the smallest integer type that holds every id."""
    return np.uint16 if vocab_size <= 2**16 else np.int32


def _write(folder: Path, fill: Callable[[Path], dict[str, Any]]) -> None:
    """Fill a new folder, seal its manifest, and move it to its place."""
    with _workplace(folder) as work:
        work.chmod(0o755)  # mkdtemp lets nobody else read it
        manifest = {"format": FORMAT, **fill(work)}
        manifest["files"] = {path.name: sha256_of(path) for path in sorted(work.iterdir())}
        manifest = json.loads(json.dumps(manifest))  # as it will be read
        sealed = {**manifest, SEAL: _digest_of(manifest)}
        (work / "manifest.json").write_text(json.dumps(sealed, ensure_ascii=False), "utf-8")
        try:
            if folder.exists() and not _intact(folder):
                folder.rename(work / "broken")
                shutil.rmtree(work / "broken")
            work.rename(folder)
        except OSError:
            # Another process was faster; the same text gives the same folder.
            if not _intact(folder):
                raise


@contextmanager
def _workplace(folder: Path) -> Generator[Path]:
    """Make a folder next to another one, and delete those that killed processes of this host left there.

    A process locks its own folder, and the lock ends with the process.
    """
    host = socket.gethostname()
    with ExitStack() as stack:
        with _locked(folder.parent.resolve()):  # nobody may see a new folder before it is locked
            for leftover in folder.parent.glob(f".*-{glob.escape(host)}-*"):
                with suppress(OSError), _locked(leftover, fcntl.LOCK_NB):  # OSError: its process lives
                    shutil.rmtree(leftover)
            work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-{host}-", dir=folder.parent))
            stack.enter_context(_locked(work))
        stack.callback(shutil.rmtree, work, ignore_errors=True)
        yield work


@contextmanager
def _locked(folder: Path, flags: int = 0) -> Generator[None]:
    """Hold the lock of a folder; raise OSError instead of waiting for it with the flag ``LOCK_NB``."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | flags)
        yield
    finally:
        os.close(descriptor)
