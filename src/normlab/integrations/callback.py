"""What the callbacks of all trainers share."""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from normlab.diagnosis import Probe, Structure
from normlab.integrations.observation import Emit
from normlab.integrations.watch import OUT, Watch


class WatchingCallback(ABC):  # noqa: B024 - each trainer names its hooks otherwise
    """Base of the callbacks: it holds the ``Watch`` that their trainer's hooks drive."""

    def __init__(
        self,
        probes: str | Sequence[Probe] = "standard",
        *,
        out: str | Path = OUT,
        every_steps: int = 50,
        emit: Emit | None = None,
        structure: Structure | None = None,
        sinks: Sequence[Any] = (),
    ) -> None:
        self.watch = Watch(
            probes, out=out, every_steps=every_steps, emit=emit, structure=structure, sinks=sinks
        )

    def stepping(self, *_: Any, **__: Any) -> None:
        """Measure weights and gradients before the optimiser steps."""
        self.watch.stepping()

    def end(self, *_: Any, **__: Any) -> None:
        """Write the measurements of a step and remove their hooks."""
        self.watch.end()

    def close(self, *_: Any, **__: Any) -> None:
        """Write the measurements, remove all hooks and draw the page."""
        self.watch.close()
