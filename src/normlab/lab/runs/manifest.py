"""Checkpoint folders that are replaced as a whole and can tell whether they have changed since.

``state.json`` is written last. Its manifest holds the size and the SHA-256 of every other file. A new folder
is called ``<name>.new`` until it has replaced the old one; it counts as soon as it has a ``state.json``.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from normlab.base.files import sha256_of, sync, write_text_atomic
from normlab.base.io import from_plain, parsed
from normlab.errors import UserError

STATE: Final = "state.json"
_MANIFEST: Final = "manifest"


@dataclass(frozen=True)
class _File:
    """Size and digest of a file when it was written."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class _Manifest:
    """The files of a checkpoint, the run that it belongs to, and the digest of its state."""

    run: str
    files: dict[str, _File]
    state: str


class CheckpointError(UserError):
    """A checkpoint is damaged or belongs to another run: the reason, and the command to type."""

    def __init__(self, folder: Path, why: str, todo: str = "") -> None:
        self.why, self.todo = why, todo or train_anew(folder)
        super().__init__(f"{self.why}; {self.todo}")


def train_anew(folder: Path) -> str:
    """Return the command that trains the run of a checkpoint again from the beginning."""
    run = next((parent for parent in folder.parents if (parent / "config.json").exists()), folder.parent)
    path = shlex.quote(str(run))
    aside = shlex.quote(str(run.with_name(f"{run.name}.aside")))
    root = shlex.quote(str(run.parent))
    return f"to train it anew: mv {path} {aside} && normlab train --config {aside}/config.json --out {root}"


@contextmanager
def commit(
    folder: Path, state: Mapping[str, Any], *, run: str = "", keep: Path | None = None
) -> Generator[Path]:
    """Yield an empty folder to fill, then replace ``folder`` by it; the old one becomes ``keep``.

    ``committed(folder)`` is whole whenever the process ends. ``run`` is the id of the run that writes.
    """
    recover(folder, keep=keep)
    new = _new(folder)
    if new.exists():
        shutil.rmtree(new)
    try:
        new.parent.mkdir(exist_ok=True)  # but not the run's folder, in case that was removed
        new.mkdir()
        yield new
        for path in (*new.iterdir(), new):
            sync(path)
        _write_state(new, state, run)  # last, on the disk after what it vouches for
        sync(folder.parent)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)  # a full disk has no room for useless files
        raise
    recover(folder, keep=keep)


def recover(folder: Path, *, keep: Path | None = None) -> None:
    """Move a finished new folder into place, in case the process that wrote it ended before it could."""
    new = _new(folder)
    if not (new / STATE).exists():
        return
    if folder.exists():
        if keep is None:
            shutil.rmtree(folder)
        else:
            move(folder, keep)
    new.rename(folder)
    sync(folder.parent)


def move(folder: Path, to: Path) -> None:
    """Rename a folder, replacing any that already has the name."""
    if to.exists():
        shutil.rmtree(to)
    folder.rename(to)


def committed(folder: Path) -> Path:
    """Return the folder that counts: the new one if its process ended before it was in place."""
    new = _new(folder)
    return new if (new / STATE).exists() else folder


def read_state(folder: Path, *, run: str = "") -> dict[str, Any]:
    """Return a checkpoint's state if every file matches the manifest, and the run matches ``run``.

    Raises CheckpointError, with what is wrong, otherwise.
    """
    state, manifest = _parsed_state(folder)
    if run and manifest.run and manifest.run != run:
        raise CheckpointError(folder, f"{folder} belongs to the run {manifest.run}, and this is {run}")
    for path in sorted(folder.glob("*.safetensors")):
        if path.name not in manifest.files:
            raise CheckpointError(folder, f"{path} was added later: {STATE} does not name it")
    for name, written in manifest.files.items():
        _check(folder / name, written)
    return state


def _parsed_state(folder: Path) -> tuple[dict[str, Any], _Manifest]:
    """Return a checkpoint's state as it was written, and its manifest."""
    path = folder / STATE
    if not path.exists():
        raise CheckpointError(folder, f"{path} is missing")
    try:
        state = parsed(path.read_bytes().decode(errors="replace"))
        if not isinstance(state, dict):
            raise UserError("it holds no object")
        if _MANIFEST not in state:
            raise UserError("it has no manifest")
        entry = state.pop(_MANIFEST)
        manifest: _Manifest = from_plain(_Manifest, entry, _MANIFEST)
    except (UserError, OSError) as error:
        raise CheckpointError(folder, f"{path} is damaged ({error})") from error
    if manifest.state != _digest(state, entry):
        raise CheckpointError(folder, f"{path} was edited: it no longer has the SHA-256 of its manifest")
    return state, manifest


def _new(folder: Path) -> Path:
    return folder.with_name(folder.name + ".new")


def _write_state(folder: Path, state: Mapping[str, Any], run: str) -> None:
    paths = sorted(folder.iterdir())
    files = {path.name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)} for path in paths}
    state = json.loads(json.dumps(dict(state)))  # as it will be read
    manifest: dict[str, Any] = {"run": run, "files": files}
    manifest["state"] = _digest(state, manifest)
    write_text_atomic(folder / STATE, json.dumps({**state, _MANIFEST: manifest}))


def _digest(state: Mapping[str, Any], manifest: Mapping[str, Any]) -> str:
    content = json.dumps([state, manifest.get("run"), manifest.get("files")], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def _check(path: Path, written: _File) -> None:
    if not path.exists():
        wrong = "is missing"
    elif path.stat().st_size < written.bytes:
        wrong = "is shorter than it was written: cut off, or another file"
    elif path.stat().st_size > written.bytes or sha256_of(path) != written.sha256:
        wrong = f"was edited: it no longer has the SHA-256 that {STATE} gives"
    else:
        return
    raise CheckpointError(path.parent, f"{path} {wrong}")
