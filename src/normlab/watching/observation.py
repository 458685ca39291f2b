"""Observe one step of another trainer: its hooks, and what is recorded if a model cannot be read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from normlab.diagnosis import Observer, Probe, Structure, observe, read_structure
from normlab.diagnosis.containers import candidates
from normlab.diagnosis.presets import SublayerSite, preset_probes, require_preset, stream_sites
from normlab.diagnosis.probes import Emit
from normlab.errors import UserError
from normlab.private_torch import runs_compiled
from normlab.trace.facts.stacks import within
from normlab.trace.tensors import Side, apart, forward_hooks, unwrap

_Warn = Callable[[str], None]
HOW = 'name the modules, as in probes=[Probe("*.mlp", "output", "rms")]'


class Observation:
    """Observes a step of a model from ``begin`` to ``end``, and has no hooks on the model otherwise.

    A preset applies to ``structure``; without it the model is read at its first call, on the arguments of
    that call, without drawing random numbers. If that fails, ``warn`` gets a sentence and only weights and
    gradients are recorded. Raises UserError for a preset that does not exist.
    """

    def __init__(
        self, probes: str | Sequence[Probe], structure: Structure | None, emit: Emit, warn: _Warn
    ) -> None:
        self.preset = probes if isinstance(probes, str) else ""
        if isinstance(probes, str):
            require_preset(probes)
        elif not probes:
            raise UserError(f'there are no probes; give a preset, as in probes="standard", or {HOW}')
        self._given, self._structure, self._emit, self._warn = probes, structure, emit, warn
        self._open = ExitStack()
        self._observer: Observer | None = None
        self._step: int | None = None
        self.reset()

    def reset(self) -> None:
        self.end()
        self._has_failed = False
        self.sites: list[SublayerSite] = []
        self._probes = [] if isinstance(self._given, str) else list(self._given)
        if self._structure is not None and self.preset:
            self._use(self._structure, "")

    @property
    def running(self) -> bool:
        return self._step is not None

    def begin(
        self,
        model: nn.Module,
        step: int,
        *,
        compiled: bool = False,
        own_calls: int = 0,
        given: tuple[Any, Any] | None = None,
        missed: bool = False,
    ) -> None:
        """Start to observe a step, unless one is already observed.

        ``compiled``: the trainer runs a compiled wrapper of this model. ``own_calls``: how many calls of the
        model the trainer makes before the one that is the forward pass. ``given``: the arguments of the call
        that begins here. ``missed``: the optimizer is about to step, but no call was seen.
        """
        if self._step is not None:
            return
        self._step = step
        model = unwrap(model)
        if self._probes:
            self._observe(model, compiled=compiled)
        elif compiled or any(runs_compiled(m) for m in model.modules()):
            self._observe_weights(model, compiled=compiled)
            self._warn(
                f"the model runs compiled: of the preset {self.preset!r} only weights, gradients and updates "
                "are recorded; for what flows through it, train some steps without torch.compile"
            )
        elif missed:
            self._without_stream(model, "no call of the model in training mode was seen")
        elif not _blocks(model):
            self._without_stream(model, f"{type(model).__name__} has no repeated blocks")
        elif given is not None:
            self._read_and_observe(model, model, given, "")
        else:
            self._read_at_first_call(model, own_calls)

    def end(self) -> None:
        """Fetch and emit the measurements of the step, and remove the hooks."""
        step, self._step = self._step, None
        try:
            if self._observer is not None and step is not None:
                self._observer.flush(step)
        finally:
            self._observer = None
            self._open.close()

    def _without_stream(self, model: nn.Module, why: str) -> None:
        self._observe_weights(model, compiled=False)
        self._warn(f"{why}: weights, gradients and updates are recorded by module, but no stream. Or {HOW}")

    def _observe_weights(self, model: nn.Module, *, compiled: bool) -> None:
        """Record weights and gradients of the blocks, or of the model's parts if it has none."""
        groups = _blocks(model) or {"": list(_parts(model))}
        self.sites = [SublayerSite(name, None, tuple(m)) for name, blocks in groups.items() for m in blocks]
        self._probes = list[Probe]()
        for site in self.sites:
            self._probes += [*site.probes("weight", "l2"), *site.probes("grad", "l2")]
        self._observe(model, compiled=compiled)

    def _use(self, structure: Structure, prefix: str) -> None:
        """Probe a structure by the preset; ``prefix`` is that of ``stream_sites``."""
        self.sites = stream_sites(structure, prefix)
        self._probes = preset_probes(self.sites, self.preset)

    def _read_and_observe(
        self, model: nn.Module, module: nn.Module, given: tuple[Any, Any], prefix: str
    ) -> None:
        """Read a module of the model on the arguments of its call, and observe the model from there on."""
        try:
            self._use(_read(module, given), prefix)
        except Exception as error:  # a training must not end because its model cannot be read
            why = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            self._without_stream(model, f"the residual stream was not found ({why})")
        else:
            self._observe(model, compiled=False)

    def _observe(self, model: nn.Module, *, compiled: bool) -> None:
        self._observer = self._open.enter_context(
            observe(model, self._probes, self._emit, on_error=self._failed, compiled=compiled)
        )

    def _failed(self, error: Exception) -> None:
        """Warn once that something cannot be measured; the model's pass continues."""
        if not self._has_failed:
            self._has_failed = True
            self._warn(f"something is not measured ({type(error).__name__}: {error}); the training goes on")

    def _read_at_first_call(self, model: nn.Module, own_calls: int) -> None:
        """Wait for the first call of a module that holds blocks; it may be any part of the model."""
        containers = _blocks(model)
        holders = {
            path: module
            for path, module in model.named_modules()
            if not path or any(within(name, path) for name in containers)
        }
        waiting = self._open.enter_context(ExitStack())
        calls_to_skip = own_calls

        def called(path: str, side: Side, entered: Mapping[Any, Any]) -> None:
            nonlocal calls_to_skip
            if side == "output":
                return
            if not path and calls_to_skip:
                calls_to_skip -= 1
                return
            waiting.close()
            self._read_and_observe(model, holders[path], apart(entered), f"{path}." if path else "")

        waiting.enter_context(forward_hooks(holders, called))


def _read(module: nn.Module, given: tuple[Any, Any]) -> Structure:
    try:
        return read_structure(module, given, call=lambda model, batch: model(*batch[0], **batch[1]))
    finally:
        torch.clear_autocast_cache()  # it keeps copies of weights; those made here have no gradient


def _blocks(model: nn.Module) -> dict[str, list[list[str]]]:
    """Return the paths of all modules in each possible block, by the path of the blocks' container."""
    paths = [path for path, _ in model.named_modules()]
    blocks_of: dict[str, list[list[str]]] = {}
    for container, blocks in candidates(model, ()):
        blocks_of[container] = [[path for path in paths if within(path, block)] for block in blocks]
    return blocks_of


def _parts(model: nn.Module) -> Iterator[list[str]]:
    """Yield the paths of each direct child with parameters and of all modules inside it, or the model's."""
    if next(model.parameters(recurse=False), None) is not None:
        yield [""]
    for name, child in model.named_children():
        if next(child.parameters(), None) is not None:
            yield [path for path, _ in child.named_modules(prefix=name)]
