"""Send what is watched to wandb, trackio or TensorBoard."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Protocol

from normlab.errors import UserError


class Sink(Protocol):
    """Receives the numbers of a watched step by name."""

    def __call__(self, step: int, values: Mapping[str, float]) -> None: ...


class WandbSink:
    """Log to a run of wandb: ``WandbSink(wandb.init(...))``."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def __call__(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)


class TrackioSink(WandbSink):
    """Log to a run of trackio, whose ``log`` is that of wandb: ``TrackioSink(trackio.init(...))``."""


class TensorBoardSink:
    """Log to a ``torch.utils.tensorboard.SummaryWriter``."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def __call__(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()


def _wandb(_: Path) -> Sink:
    module: Any = import_module("wandb")
    return WandbSink(module.run or module.init())


def _trackio(_: Path) -> Sink:
    return TrackioSink(import_module("trackio"))  # the module logs to the run that was begun last


def _tensorboard(folder: Path) -> Sink:
    module: Any = import_module("torch.utils.tensorboard")
    return TensorBoardSink(module.SummaryWriter(str(folder)))


NAMED: Final[Mapping[str, Callable[[Path], Sink]]] = {
    "wandb": _wandb,
    "trackio": _trackio,
    "tensorboard": _tensorboard,
}
"""The sinks that have a name, opened at the first watched step: by then the trainer has begun its run."""


class _Late:
    """A sink that is opened when it is first needed."""

    def __init__(self, name: str, folder: Path) -> None:
        self._name, self._folder = name, folder
        self._sink: Sink | None = None

    def __call__(self, step: int, values: Mapping[str, float]) -> None:
        self._sink = self._sink or NAMED[self._name](self._folder)
        self._sink(step, values)


def sink_of(given: str | Sink, folder: Path) -> Sink:
    """Return a sink, or the one of this name. Raises UserError for a name or a library that is not there."""
    if not isinstance(given, str):
        if not callable(given):
            raise UserError(f"a sink is called with a step and its values, and {given!r} cannot be called")
        return given
    if given not in NAMED:
        raise UserError(f"there is no sink {given!r}; there are {', '.join(NAMED)}, or pass a function")
    if find_spec(given) is None:
        raise UserError(f"the sink {given!r} needs a library that is missing; type: pip install {given}")
    return _Late(given, folder)
