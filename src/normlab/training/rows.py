"""The rows of ``metrics.jsonl``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from normlab.config.io import from_plain
from normlab.runs.folder import RunFolder
from normlab.training.callbacks.base import Row
from normlab.watching.meter import StepRecord

_Steps = tuple[tuple[float, tuple[float, float, float]], ...]


class Rows:
    """The rows of a run so far, and the steps that are in no row yet."""

    def __init__(self, folder: RunFolder, device: torch.device, write: Callable[[Row], object]) -> None:
        self._folder, self._device, self._write = folder, device, write
        self.written: list[Row] = []
        self.pending: list[tuple[float, Tensor]] = []
        """Learning rate, and `[3]` loss, NLL and gradient norm, of every step since the last row."""

    def add(self, record: StepRecord) -> None:
        """Add a step to the row that comes next; nothing waits for the device."""
        self.pending.append((record.lr, record.values))

    def fetch(self) -> Row:
        """Fetch the pending steps from the device: their columns of a row.

        Loss and NLL are means over the steps; the gradient norm is the last step's, or the first one that is
        not finite.
        """
        values = torch.stack([v for _, v in self.pending]).tolist()
        norms = [v[2] for v in values]
        row = {
            "loss": sum(v[0] for v in values) / len(values),
            "nll": sum(v[1] for v in values) / len(values),
            "grad_norm_l2": next((n for n in norms if not math.isfinite(n)), norms[-1]),
            "lr": self.pending[-1][0],
        }
        self.pending.clear()
        return row

    def write(self, row: Row) -> None:
        """Add a row."""
        self.written.append(row)
        self._write(row)

    def validations(self) -> list[int]:
        """The steps of the validations."""
        return [row["step"] for row in self.written if row["kind"] == "dev"]

    def validated(self, step: int) -> bool:
        """Whether the last validation was at this step."""
        return step in self.validations()[-1:]

    def state_dict(self) -> dict[str, Any]:
        """The pending steps and the sizes of the files of rows."""
        pending = [(lr, values.tolist()) for lr, values in self.pending]
        return {"pending": pending, "sizes": self._folder.row_sizes()}

    def load_state_dict(self, state: Mapping[str, Any]) -> dict[str, int]:
        """Go on from ``state_dict()``; return the sizes. Raises UserError for anything else."""
        pending: _Steps = from_plain(_Steps, state.get("pending", []), "rows.pending")
        sizes: dict[str, int] = from_plain(dict[str, int], state.get("sizes", {}), "rows.sizes")
        self.pending = [(lr, torch.tensor(values, device=self._device)) for lr, values in pending]
        return sizes
