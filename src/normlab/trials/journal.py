"""Trials on disk: one JSON line each, so that a stopped command can continue where it stopped."""

from __future__ import annotations

import hashlib
import inspect
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from normlab.base.files import append_rows, regular
from normlab.base.io import parsed
from normlab.errors import UserError
from normlab.setups.setup import Setup
from normlab.trace.dry_run import groups_of
from normlab.trace.optimizers import copied
from normlab.trace.restore import restored
from normlab.trace.tensors import bytes_of, tensors_in

FILE: Final = "trials.jsonl"
MARK_S: Final = 10.0
"""If a trial is killed, at most so many of its seconds are not counted."""


class Journal:
    """Rows of trials, kept in a file of the folder, or in memory if there is none. Some describe the setup:
    digests of its parts by name, such as ``model``, or ``model at width 64`` if it has several sizes.

    Each row holds the seconds that were ``spent`` when it was written.
    """

    def __init__(self, folder: str | Path | None, setup: dict[str, str], since: float | None = None) -> None:
        """The clock runs from ``since``, by default from now. Raises UserError if the folder holds rows of
        another setup, or something else than rows; sizes that only one of the two has may differ.
        """
        self.path = None if folder is None else Path(folder) / FILE
        self.rows = [] if self.path is None else _rows(self.path)
        spent = [sum(row.get("seconds", 0.0) for row in self.rows), *(r.get("spent", 0.0) for r in self.rows)]
        self.began = (time.monotonic() if since is None else since) - max(spent)
        setups = [row["setup"] for row in self.rows if "setup" in row]
        if self.rows and ("setup" not in self.rows[0] or not all(isinstance(own, dict) for own in setups)):
            raise UserError(f"{self.path} holds no trials; name another folder")
        held = {name: mark for own in setups for name, mark in own.items()}
        self._require_same(folder, setup, held)
        if not self.rows or setup.keys() - held.keys():
            self.append({"setup": {name: mark for name, mark in setup.items() if name not in held}})

    def _require_same(self, folder: Any, setup: dict[str, str], held: dict[str, str]) -> None:
        both = {*map(_size, setup)} & {*map(_size, held)}
        if held and not both:
            sizes = ", ".join(dict.fromkeys(map(_size, held))) or "a setup of one size"
            raise UserError(
                f"{folder} holds trials of {sizes}, but none of that is asked for, so nothing shows whether "
                "they are of the same setup; ask for one of them, too, or name another folder"
            )
        every = {name: None for name in (*setup, *held) if _size(name) in both}
        if other := [name for name in every if setup.get(name) != held.get(name)]:
            raise UserError(
                f"{folder} holds trials of another setup: {', '.join(other)} differ; to continue, draw the "
                "same from the same seed, or name another folder"
            )

    @property
    def seconds(self) -> float:
        """Seconds since the first call began, not counting the time between calls."""
        return time.monotonic() - self.began

    def row(self, **key: Any) -> dict[str, Any] | None:
        """The row with these entries, if there is one."""
        return next((r for r in self.rows if key.items() <= r.items()), None)

    def append(self, row: dict[str, Any]) -> None:
        """Add a row, to the file as well."""
        row = {**row, "spent": self.seconds}
        self.rows.append(row)
        if self.path is not None:
            append_rows(self.path, [row])

    def mark(self, every_s: float = MARK_S) -> None:
        """Write down the seconds spent so far, unless that was done less than ``every_s`` ago."""
        if self.seconds - self.rows[-1].get("spent", 0.0) > every_s:
            self.append({})


def _size(name: str) -> str:
    return name.partition(" at ")[2]


def _rows(path: Path) -> list[dict[str, Any]]:
    """The complete rows; a last one that a killed process left incomplete is cut off."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        return []
    with open(path, "rb", opener=regular) as file:
        whole, newline, torn = file.read().rpartition(b"\n")
    if torn:
        os.truncate(path, len(whole) + len(newline))
    try:
        rows = [parsed(line.decode()) for line in whole.splitlines()]
    except (UserError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is damaged: {error}; delete it to start again") from error
    if not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{path} holds no trials; name another folder")
    return rows


def fingerprint(setup: Setup, batches: Sequence[Any], **plan: Any) -> dict[str, str]:
    """Digests, by name, of what changes the losses of trials: weights, optimizer, code, batches, plan."""
    with restored(setup):
        model, optimizers, _ = copied(setup)
        state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        options = [sorted((k, v) for k, v in g.items() if k != "params") for g in groups_of(optimizers)]
    parts = {
        "model": [type(model).__name__, *_bits(state)],
        "optimizer": [*(type(o).__name__ for o in optimizers), repr(options)],
        **{name: [_code(getattr(setup, name))] for name in ("loss", "step", "scheduler")},
        "batches": [bits for b in {id(b): b for b in batches}.values() for bits in _bits(b)],
    }
    return {**{name: _digest(own) for name, own in parts.items()}, **{k: str(v) for k, v in plan.items()}}


def _bits(value: Any) -> Iterator[bytes | str]:
    for place, x in tensors_in(value):
        yield f"{place} {x.dtype} {list(x.shape)}"
        yield bytes_of(x)


def _digest(parts: Sequence[bytes | str]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update((part if isinstance(part, bytes) else part.encode()) + b"\0")
    return digest.hexdigest()


def _code(value: Any) -> str:
    """The source of a function, and the plain values that it closes over; for an object, of its class."""
    function = getattr(value, "__func__", value)
    if not inspect.isfunction(function):
        return type(value).__name__
    text = function.__code__.co_code.hex()
    with suppress(OSError):  # a function that was typed in has no source
        text = inspect.getsource(function)
    held = [*inspect.getclosurevars(function).nonlocals.values(), *(function.__defaults__ or ())]
    return f"{text} {[x for x in held if isinstance(x, (bool, int, float, str))]!r}"
