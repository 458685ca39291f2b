"""Metrics and probes for TensorBoard, which is an extra."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from normlab.errors import UserError

Row = Mapping[str, Any]
_NO_SCALARS: Final = ("kind", "step")


def require_tensorboard() -> None:
    """Raise UserError with what to type where the package is missing."""
    if find_spec("tensorboard") is None:
        raise UserError(
            "--tensorboard needs the package tensorboard, which is not installed; type: "
            "pip install 'normlab[tensorboard]', or leave --tensorboard out"
        )


class Board:
    """Scalars of one run under ``runs/<id>/tensorboard``, at their steps: ``train/loss``, ``dev/bleu`` and so
    on, and those of probes as ``<signal>.<statistic>/<module>``.

    A run that goes on from a step begins a new file that takes the place of what was written after it.
    """

    def __init__(self, folder: Path, step: int) -> None:
        require_tensorboard()
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=step + 1 if step else None)

    def metrics(self, row: Row) -> None:
        """One row of ``metrics.jsonl``."""
        for name, value in row.items():
            if name not in _NO_SCALARS:
                self._writer.add_scalar(f"{row['kind']}/{name}", float(value), int(row["step"]))

    def probes(self, rows: Sequence[Row]) -> None:
        """Rows of ``probes.jsonl``."""
        for row in rows:
            self._writer.add_scalar(
                f"{row['signal']}.{row['statistic']}/{row['module'] or 'model'}",
                float(row["value"]),
                int(row["step"]),
            )

    def saved(self) -> None:
        """Write out what is buffered."""
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
