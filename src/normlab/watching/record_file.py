"""The file of what was recorded of a training: JSON lines, those of an earlier training set aside."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

import torch

from normlab.base.files import append_rows, row_line, write_text_atomic
from normlab.base.rows import read_lines, require_probes
from normlab.diagnosis.presets import SublayerSite
from normlab.diagnosis.probes import Record


class RecordFile:
    """Writes records to ``path`` as JSON lines with the fields of ``Record`` and the role and layer of a
    sublayer; numbers that are not finite are words. A rank above 0 writes a file of its own, such as
    ``watch.rank1.jsonl`` next to ``watch.jsonl``.
    """

    def __init__(self, path: str | Path) -> None:
        self._of_rank_0 = Path(path)
        self._waiting: list[Record] = []
        self.sites: Mapping[tuple[str | None, int | None], SublayerSite] = {}
        """The sublayers by stack and index."""

    @property
    def rank(self) -> int:
        in_group = torch.distributed.is_available() and torch.distributed.is_initialized()
        return torch.distributed.get_rank() if in_group else 0

    @property
    def path(self) -> Path:
        path, rank = self._of_rank_0, self.rank
        return path.with_name(f"{path.stem}.rank{rank}{path.suffix}") if rank else path

    def __call__(self, record: Record) -> None:
        self._waiting.append(record)

    def write(self) -> None:
        """Append the records that were given since the last call."""
        rows, self._waiting = self._waiting, list[Record]()
        if rows:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            append_rows(self.path, map(self._placed, rows))

    def _placed(self, record: Record) -> dict[str, Any]:
        """Return a row, with the role and the layer of the record's sublayer."""
        site = self.sites.get((record.stack, record.index))
        return {
            "step": record.step,
            "stack": record.stack,
            "index": record.index,
            "role": None if site is None else site.role,
            "layer": None if site is None else site.layer,
            **record._asdict(),
        }

    def begin(self, step: int) -> dict[int, float]:
        """Make room for a training that begins at ``step``; return the rates of the earlier one by step.

        At step 0, the files of an earlier training are renamed to the first free number, as in watch.1.jsonl;
        for a resumed training, the rows from ``step`` on are removed, since these steps are repeated.
        """
        path = self.path
        if not path.exists():
            return {}
        rows = [row for _, row in read_lines(path)]
        require_probes(rows, path)
        before = [row for row in rows if row["step"] < step or step == 0]
        if step == 0:
            _set_aside(path)
        else:
            write_text_atomic(path, "".join(map(row_line, before)))
        return {row["step"]: float(row["value"]) for row in before if row["signal"] == "lr"}


def _set_aside(path: Path) -> None:
    """Rename the files of a training to the first free number."""
    number = next(n for n in count(1) if not path.with_suffix(f".{n}{path.suffix}").exists())
    for suffix in (".flight.json", ".html", path.suffix):  # the rows last, because they take the name
        old = path.with_suffix(suffix)
        if old.exists():
            old.rename(path.with_suffix(f".{number}{suffix}"))
