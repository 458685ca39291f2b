"""Where the numbers of a watched step go: a file of JSON lines, wandb, trackio or TensorBoard."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch

from normlab.base.files import append_rows, row_line, write_text_atomic
from normlab.base.rows import read_lines, require_probes
from normlab.diagnosis.presets import SublayerSite
from normlab.diagnosis.probes import Record
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
    opened = cache(lambda: open_sink(import_module(module), folder))
    return lambda step, values: opened()(step, values)


class RecordFile:
    """Writes records to ``path`` as JSON lines with the fields of ``Record`` and the role and layer of a
    sublayer; numbers that are not finite are words. A rank above 0 writes a file of its own, such as
    ``watch.rank1.jsonl`` next to ``watch.jsonl``.
    """

    def __init__(self, path: str | Path) -> None:
        self._asked = Path(path)
        self._waiting: list[Record] = []
        self.sites: Mapping[tuple[str | None, int | None], SublayerSite] = {}
        """The sublayers by stack and index."""

    @property
    def rank(self) -> int:
        many = torch.distributed.is_available() and torch.distributed.is_initialized()
        return torch.distributed.get_rank() if many else 0

    @property
    def path(self) -> Path:
        rank = self.rank
        name = f"{self._asked.stem}.rank{rank}{self._asked.suffix}" if rank else self._asked.name
        return self._asked.with_name(name)

    def __call__(self, record: Record) -> None:
        self._waiting.append(record)

    def write(self) -> None:
        rows, self._waiting = self._waiting, list[Record]()
        if rows:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            append_rows(self.path, map(self._placed, rows))

    def _placed(self, record: Record) -> dict[str, Any]:
        site = self.sites.get((record.stack, record.index))
        role, layer = (site.role, site.layer) if site is not None else (None, None)
        step, stack, index, *_ = record
        place = {"step": step, "stack": stack, "index": index, "role": role, "layer": layer}
        return place | record._asdict()

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
    number = next(n for n in count(1) if not path.with_suffix(f".{n}{path.suffix}").exists())
    for suffix in (".flight.json", ".html", path.suffix):  # the rows last, because they take the name
        if (old := path.with_suffix(suffix)).exists():
            old.rename(path.with_suffix(f".{number}{suffix}"))
