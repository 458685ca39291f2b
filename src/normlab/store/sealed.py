"""Folders that are replaced as a whole, and that say by themselves whether they are as they were written.

``state.json`` is written last, with the size and the SHA-256 of each file beside it. A new folder is called
``<name>.new`` until it has taken the old one's place; once it has its ``state.json`` it is what counts.
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

from normlab.errors import UserError
from normlab.spec.serialise import from_plain, parsed
from normlab.store.files import sync, write_text_atomic

STATE: Final = "state.json"
_SEAL: Final = "seal"


@dataclass(frozen=True)
class _File:
    """A file as it was written."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Seal:
    """What a state's seal says."""

    run: str
    files: dict[str, _File]
    state: str


class SealError(UserError):
    """A folder is not what was written there, or was written for another run: why, and what to do."""

    def __init__(self, folder: Path, why: str, todo: str = "") -> None:
        self.why, self.todo = why, todo or train_anew(folder)
        super().__init__(f"{self.why}; {self.todo}")


def train_anew(folder: Path) -> str:
    """What to type where nothing in the run that a folder is part of can be used any more."""
    run = next((p for p in folder.parents if (p / "config.json").exists()), folder.parent)
    path, aside, root = (shlex.quote(str(p)) for p in (run, run.with_name(f"{run.name}.aside"), run.parent))
    return f"to train it anew: mv {path} {aside} && normlab train --config {aside}/config.json --out {root}"


@contextmanager
def replaced(
    folder: Path, state: Mapping[str, Any], *, run: str = "", keep: Path | None = None
) -> Generator[Path]:
    """Gives an empty folder to fill, which takes the place of ``folder``; the old one goes to ``keep``.

    Whenever the process ends, ``standing(folder)`` is whole. ``run`` is the id of the run that it is of.
    """
    settle(folder, keep=keep)
    new = _new(folder)
    if new.exists():
        shutil.rmtree(new)
    try:
        new.mkdir(parents=True)
        yield new
        for path in (*new.iterdir(), new):
            sync(path)
        _seal(new, state, run)
        sync(folder.parent)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)  # a full disk has no room for what nobody can use
        raise
    settle(folder, keep=keep)


def settle(folder: Path, *, keep: Path | None = None) -> None:
    """Put a new folder in its place where the process that wrote it did not come to that."""
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
    """Rename a folder; what was there goes."""
    if to.exists():
        shutil.rmtree(to)
    folder.rename(to)


def standing(folder: Path) -> Path:
    """Where the content of ``folder`` is: in the new one, if a process ended before it was in its place."""
    new = _new(folder)
    return new if (new / STATE).exists() else folder


def unsealed(folder: Path, *, run: str = "") -> dict[str, Any]:
    """The state of a folder whose files are all as they were written, and of this run if one is given.

    Raises SealError with what is wrong.
    """
    path = folder / STATE
    if not path.exists():
        raise SealError(folder, f"{path} is missing")
    try:
        state = parsed(path.read_bytes().decode(errors="replace"))
        if not isinstance(state, dict):
            raise UserError("it holds no object")
        if _SEAL not in state:
            raise UserError("it has no seal")
        said = state.pop(_SEAL)
        seal: Seal = from_plain(Seal, said, _SEAL)
    except (UserError, OSError) as error:
        raise SealError(folder, f"{path} is damaged ({error})") from error
    if seal.state != _digest(state, said):
        raise SealError(folder, f"{path} was edited: it no longer has the SHA-256 that it says")
    if run and seal.run and seal.run != run:
        raise SealError(folder, f"{folder} is of the run {seal.run}, and this is {run}")
    for path in sorted(folder.glob("*.safetensors")):
        if path.name not in seal.files:
            raise SealError(folder, f"{path} was put there later: {STATE} does not name it")
    for name, written in seal.files.items():
        _check(folder / name, written.bytes, written.sha256)
    return state


def _new(folder: Path) -> Path:
    return folder.with_name(folder.name + ".new")


def _seal(folder: Path, state: Mapping[str, Any], run: str) -> None:
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(folder.iterdir())
    }
    plain = json.loads(json.dumps(dict(state)))  # as it will be read
    seal: dict[str, Any] = {"run": run, "files": files}
    seal["state"] = _digest(plain, seal)
    write_text_atomic(folder / STATE, json.dumps({**plain, _SEAL: seal}))


def _digest(state: Mapping[str, Any], seal: Mapping[str, Any]) -> str:
    said = json.dumps([state, seal.get("run"), seal.get("files")], sort_keys=True)
    return hashlib.sha256(said.encode()).hexdigest()


def _check(path: Path, size: int, sha256: str) -> None:
    if not path.exists():
        raise SealError(path.parent, f"{path} is missing")
    found = path.stat().st_size
    if found < size:
        raise SealError(path.parent, f"{path} is shorter than it was written: cut off, or another file")
    if found > size or _sha256(path) != sha256:
        raise SealError(path.parent, f"{path} was edited: it no longer has the SHA-256 that {STATE} says")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
