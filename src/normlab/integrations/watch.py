"""Observe some steps of another trainer: the part that both callbacks share."""

from __future__ import annotations

import warnings
from abc import ABC
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from normlab.diagnosis import Observer, Probe, Record, Structure, observe, read_structure
from normlab.diagnosis.probing.presets import require_preset, stream_probes, weight_probes
from normlab.diagnosis.reading.naming import candidates
from normlab.diagnosis.reading.subject import undisturbed
from normlab.diagnosis.reading.taps import bare, compiles
from normlab.errors import UserError
from normlab.integrations.rows import Rows
from normlab.spec.arguments import validate_arguments

Emit = Callable[[Record], None]
NAMED = 'name the modules, as in Probes([Probe("*.mlp", "output", "rms")])'


@validate_arguments
class Watch:
    """Observes one step in ``every_steps``, and has no hook on the model between them.

    A preset is of what ``structure`` says; without it the model is read when it is first called, on the
    arguments of that call, which draws no random number. Raises UserError for a preset that there is not and
    steps below 1.
    """

    def __init__(
        self,
        probes: str | Sequence[Probe],
        *,
        out: str | Path,
        every_steps: int,
        emit: Emit | None,
        structure: Structure | None,
    ) -> None:
        if every_steps < 1:
            raise UserError(f"every_steps is {every_steps}, and must be 1 or more, as in every_steps=50")
        self._preset = probes if isinstance(probes, str) else ""
        self._probes = [] if isinstance(probes, str) else list(probes)
        if isinstance(probes, str):
            require_preset(probes)
            self._probes = stream_probes(structure, probes) if structure else []
        elif not self._probes:
            raise UserError(f'there are no probes; give a preset, as in Probes("standard"), or {NAMED}')
        self._asked = self._probes
        self._every, self._rows = every_steps, Rows(out)
        self._emit: Emit = emit or self._rows
        self._open = ExitStack()
        self._observer: Observer | None = None
        self._step: int | None = None

    @property
    def path(self) -> Path:
        """The file of this process's rows."""
        return self._rows.path

    def start(self, step: int) -> None:
        """Begin or resume a training at ``step``; rows from there on will be written again."""
        self.end()
        self._probes = self._asked  # what was read of another model does not fit this one
        if self._emit is self._rows:
            self._rows.cut(step)

    def begin(self, model: nn.Module, step: int, *, compiled: bool = False, own_calls: int = 0) -> None:
        """Start to observe if it is this step's turn and it is not observed yet.

        ``compiled``: the trainer runs a compiled wrapper of this model. ``own_calls``: how many calls of the
        model by the trainer come before the one that is the forward pass.
        """
        if self._step is not None or step % self._every:
            return
        self._step = step
        model = bare(model)
        if self._probes:
            self._observe(model, compiled=compiled)
        elif compiled or any(compiles(m) for m in model.modules()):
            warnings.warn(
                f"the model runs compiled, so that of the preset {self._preset!r} only weights and their "
                "gradients are recorded; for what flows through it, train some steps without torch.compile",
                stacklevel=3,
            )
            self._probes = weight_probes(_blocks(model))
            self._observe(model, compiled=compiled)
        else:
            self._read_at_first_call(model, own_calls)

    def end(self) -> None:
        """Fetch and write the measurements of the step, and remove the hooks."""
        step, self._step = self._step, None
        try:
            if self._observer is not None and step is not None:
                self._observer.flush(step)
        finally:
            self._observer = None
            self._open.close()
            self._rows.write()

    def _observe(self, model: nn.Module, *, compiled: bool) -> None:
        # a wrapper of the trainer's kind, never run, tells that what flows here is compiled
        given: Any = torch.compile(model, backend="eager") if compiled else model
        self._observer = self._open.enter_context(observe(given, self._probes, self._emit))

    def _read_at_first_call(self, model: nn.Module, own_calls: int) -> None:
        """Wait for the first call of a module that holds blocks, which may be any part of the model."""
        modules = dict(model.named_modules())
        holders = dict.fromkeys(path for name in _blocks(model) for path in _ways_down(name))
        waiting = self._open.enter_context(ExitStack())
        left = own_calls

        def wait(path: str) -> None:
            def called(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                nonlocal left
                if not path and left:
                    left -= 1
                    return
                waiting.close()
                self._probes = self._read(module, (args, kwargs), f"{path}." if path else "")
                self._observe(model, compiled=False)

            waiting.callback(modules[path].register_forward_pre_hook(called, with_kwargs=True).remove)

        for path in holders:
            wait(path)

    def _read(self, module: nn.Module, given: tuple[tuple[Any, ...], dict[str, Any]], at: str) -> list[Probe]:
        def call(model: nn.Module, batch: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
            return model(*batch[0], **batch[1])

        try:
            with undisturbed(module):
                structure = read_structure(module, given, call=call)
        except UserError as error:
            raise UserError(f"{error}. Or {NAMED}") from error
        finally:
            torch.clear_autocast_cache()  # it keeps copies of weights, and those made here have no gradient
        return stream_probes(structure, self._preset, prefix=at)


class WatchingCallback(ABC):  # noqa: B024 - each trainer names its hooks otherwise
    """Base of the callbacks: it holds the ``Watch`` that their trainer's hooks drive."""

    def __init__(
        self,
        probes: str | Sequence[Probe] = "standard",
        *,
        out: str | Path = "probes.jsonl",
        every_steps: int = 50,
        emit: Emit | None = None,
        structure: Structure | None = None,
    ) -> None:
        self.watch = Watch(probes, out=out, every_steps=every_steps, emit=emit, structure=structure)

    def close(self, *_: Any, **__: Any) -> None:
        """Write the measurements and remove all hooks."""
        self.watch.end()


def _blocks(model: nn.Module) -> dict[str, list[list[str]]]:
    """Return the paths of each block and of all modules inside it, by container; UserError if none."""
    paths = [path for path, _ in model.named_modules()]
    found = {
        name: [[p for p in paths if f"{p}.".startswith(f"{block}.")] for block in blocks]
        for name, blocks in candidates(model, ())
    }
    if not found:
        raise UserError(f"{type(model).__name__} has no repeated blocks that a preset could watch; {NAMED}")
    return found


def _ways_down(path: str) -> Iterator[str]:
    """Yield the path of the model and of every module on the way to this one."""
    names = path.split(".") if path else []
    return (".".join(names[:i]) for i in range(len(names) + 1))
