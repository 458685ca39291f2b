"""Records as JSON lines, in a file that a resumed training continues."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch

from normlab.diagnosis import Record
from normlab.runs.files import append_rows, write_json_atomic, write_text_atomic
from normlab.watching.observation import Place


class Rows:
    """Writes records to ``path`` as JSON lines with the fields of ``Record``, and beside these the role and
    the layer of a sublayer; numbers that are not finite are words. A rank above 0 writes a file of its own,
    ``watch.rank1.jsonl`` beside ``watch.jsonl``.
    """

    def __init__(self, path: str | Path) -> None:
        self._asked = Path(path)
        self._waiting: list[Record] = []
        self.places: Mapping[tuple[str | None, int | None], Place] = {}
        """The sublayers by stack and index."""

    @property
    def rank(self) -> int:
        """The rank of this process."""
        many = torch.distributed.is_available() and torch.distributed.is_initialized()
        return torch.distributed.get_rank() if many else 0

    @property
    def path(self) -> Path:
        """The file of this rank."""
        rank = self.rank
        name = f"{self._asked.stem}.rank{rank}{self._asked.suffix}" if rank else self._asked.name
        return self._asked.with_name(name)

    def __call__(self, record: Record) -> None:
        self._waiting.append(record)

    def write(self) -> None:
        """Append the pending records to the file."""
        rows, self._waiting = self._waiting, list[Record]()
        if rows:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            append_rows(self.path, map(self._placed, rows))

    def write_flight(
        self, path: Path, reports: Sequence[Mapping[str, Any]], notes: Sequence[str], *, losses: int
    ) -> None:
        """Write the reports of the flight recorder, the notes and the number of losses that it was given,
        which the page shows with the rows.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json_atomic(path, {"reports": reports, "notes": notes, "losses": losses}, flat=True)

    def _placed(self, record: Record) -> dict[str, Any]:
        place = self.places.get((record.stack, record.index))
        role, layer = (place.role, place.layer) if place is not None else (None, None)
        row = record._asdict()
        return {
            "step": row.pop("step"),
            "stack": row.pop("stack"),
            "index": row.pop("index"),
            "role": role,
            "layer": layer,
        } | row

    def begin(self, step: int) -> dict[int, float]:
        """Make place for a training that begins at ``step``; return the rates of the earlier one by step.

        At step 0 the files of an earlier training are renamed to the first free number, as watch.1.jsonl; of
        a resumed training the rows of ``step`` and later ones are removed, since these steps are repeated.
        """
        path = self.path
        if not path.exists():
            return {}
        lines = path.read_text(encoding="utf-8").splitlines()
        rows = [(line, row) for line in lines if (row := _row(line)) is not None]
        rows = [(line, row) for line, row in rows if row["step"] < step or step == 0]
        if step == 0:
            _set_aside(path)
        else:
            write_text_atomic(path, "".join(f"{line}\n" for line, _ in rows))
        return {row["step"]: row["value"] for _, row in rows if row["signal"] == "lr"}


def _set_aside(path: Path) -> None:
    number = next(n for n in count(1) if not path.with_suffix(f".{n}{path.suffix}").exists())
    for suffix in (".flight.json", ".html", path.suffix):  # the rows last, because they take the name
        if (old := path.with_suffix(suffix)).exists():
            old.rename(path.with_suffix(f".{number}{suffix}"))


def _row(line: str) -> dict[str, Any] | None:
    """Parse a row; None for a line that was cut off when a training was killed."""
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return None
