"""Where the numbers of a watched step go besides the file: wandb, trackio, TensorBoard or a function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, TypeAlias

from normlab.errors import UserError

Sink: TypeAlias = Callable[[int, Mapping[str, float]], None]
"""Receives a watched step and its numbers, by name."""


class WandbSink:
    """Log to a wandb run: ``WandbSink(wandb.init(...))``."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def __call__(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)


class TrackioSink(WandbSink):
    """Log to a trackio run, whose ``log`` is like wandb's: ``TrackioSink(trackio.init(...))``."""


class TensorBoardSink:
    """Log to a ``torch.utils.tensorboard.SummaryWriter``."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def __call__(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()


_SINKS: Final[Mapping[str, tuple[str, Callable[[Any, Path], Sink]]]] = {
    "wandb": ("wandb", lambda wandb, _: WandbSink(wandb.run or wandb.init())),
    "trackio": ("trackio", lambda trackio, _: TrackioSink(trackio)),  # logs to the run that was begun last
    "tensorboard": (
        "torch.utils.tensorboard",
        lambda tensorboard, folder: TensorBoardSink(tensorboard.SummaryWriter(str(folder))),
    ),
}
"""By name, the module to import, and the function that opens the sink with it."""


def sink_of(given: str | Sink, folder: Path) -> Sink:
    """Return a given sink, or the one with this name, which opens at the first watched step: by then the
    trainer has begun its run. Raises UserError for an unknown name or a missing library.
    """
    if not isinstance(given, str):
        if not callable(given):
            raise UserError(f"a sink is called with a step and its values, but {given!r} cannot be called")
        return given
    if given not in _SINKS:
        raise UserError(f"there is no sink {given!r}; there are {', '.join(_SINKS)}, or pass a function")
    if find_spec(given) is None:
        raise UserError(f"the sink {given!r} needs a library that is missing; type: pip install {given}")
    module, open_sink = _SINKS[given]

    @cache  # opened at the first step, once
    def opened() -> Sink:
        return open_sink(import_module(module), folder)

    return lambda step, values: opened()(step, values)
