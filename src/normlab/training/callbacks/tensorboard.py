"""Metrics and probes for TensorBoard, which is an extra."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, final

from normlab.errors import UserError
from normlab.training.callbacks.base import Callback, Event

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


def require_tensorboard() -> None:
    """Raise UserError with what to type where the package is missing."""
    if find_spec("tensorboard") is None:
        raise UserError(
            "--tensorboard needs the package tensorboard, which is not installed; type: "
            "pip install 'normlab[tensorboard]', or leave --tensorboard out"
        )


@final
class TensorBoard(Callback):
    """Writes scalars under ``runs/<id>/tensorboard``, at their steps: ``train/loss``, ``dev/nll`` and so on,
    and those of probes as ``<signal>.<statistic>/<module>``.

    A run that goes on from a step begins a new file, which replaces the later scalars of the old one.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: SummaryWriter | None = None

    def on_event(self, event: Event) -> None:
        if event.began:
            from torch.utils.tensorboard import SummaryWriter

            purge = event.step + 1 if event.step else None
            self._writer = SummaryWriter(str(self._folder), purge_step=purge)
        assert self._writer is not None
        scalars = [
            (f"{row['kind']}/{name}", value, row["step"])
            for row in event.rows
            for name, value in row.items()
            if name not in ("kind", "step")
        ]
        scalars += [
            (f"{row['signal']}.{row['statistic']}/{row['module'] or 'model'}", row["value"], row["step"])
            for row in event.probes
        ]
        for name, value, step in scalars:
            self._writer.add_scalar(name, float(value), int(step))
        if event.saved:
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
