"""Other models of a step: in float64 with every branch awake, so that any change shows; and drawn anew."""

from __future__ import annotations

import copy
import sys
import sysconfig
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from normlab.trace.compare import distance
from normlab.trace.facts import Unknown
from normlab.trace.facts.stacks import settings, shared
from normlab.trace.setup import Setup, shown
from normlab.trace.starts import looks_drawn
from normlab.trace.tensors import Place, map_tensors, rows_of, tensors_in, unwrap
from normlab.trace.trace import Trace
from normlab.trace.untouched import same_globals, same_random_state

LARGE: Final = 4_000_000_000
"""Positions times parameters of a batch whose passes in float64 take about a second on one core."""
COLUMNS: Final = 32
"""The fewest columns of a part of a batch."""


def awake(model: nn.Module) -> nn.Module:
    """Give small draws to the parameters that are zero, in place: ReZero's scalars, FixUp's and LoRA's last
    matrices hide their branch at the start.
    """
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            if p.is_floating_point() and p.numel() and not bool(p.any()):
                p.copy_(0.02 * torch.randn(p.shape, generator=generator))
    return model


def small_part(batch: Any, parameters: int) -> Any:
    """Two rows, and the first columns, of a batch that is large for a model of so many parameters.

    Columns are left out only where all integers are of one width and none may be a mask, a position or a
    document: those of a part say something else.
    """
    rows = rows_of(batch)
    whole = [x for _, x in tensors_in(batch) if x.ndim == 2 and not x.is_floating_point()]
    ids = [x for x in whole if x.shape[0] == rows]
    widths = {x.shape[1] for x in ids}
    positions = rows * max(widths, default=1)
    if rows < 2 or positions * parameters <= LARGE:
        return batch
    falls = [float((x.diff(dim=1) < 0).float().mean()) for x in ids]  # what counts up seldom falls
    plain = len(widths) == 1 and min(falls) > 0.1 and all(len(torch.unique(x)) > 2 for x in ids)
    width = widths.pop() if plain else 0
    kept = max(COLUMNS, LARGE // parameters // 2)

    def cut(_: Place, x: Tensor) -> Tensor:
        if not x.ndim or x.shape[0] != rows:
            return x
        x = x[:2]
        for axis in range(1, x.ndim):
            if x.shape[axis] == width > kept:
                x = x.narrow(axis, 0, kept)
        return x

    return map_tensors(batch, cut)


def in_float64(trace: Trace) -> Trace | None:
    """The same step on a copy in float64, None where that does not run or does not give the same loss."""
    try:
        batch = map_tensors(trace.batch, lambda _, x: x.double() if x.is_floating_point() else x)
        wide = replace(trace, model=copy.deepcopy(trace.model).double(), batch=batch, exact=True)
        a, b = float(wide.loss), float(trace.loss)
        if abs(a - b) <= 0.05 * abs(b) + 1e-3 or a != a:
            return wide
        drawn = max(abs(float(trace.again(seed=seed).loss) - b) for seed in (1, 2))
    except Exception:
        return None
    return wide if abs(a - b) <= 0.05 * abs(b) + 4 * drawn + 1e-3 else None


def rounding_of(trace: Trace, value: Callable[[Trace], Tensor]) -> float:
    """The relative difference of a value that rounding alone may make, in the model's own precision: the
    largest that a change of each parameter by one rounding makes.
    """
    base, worst, draw = value(trace), 0.0, torch.Generator().manual_seed(0)
    for _ in range(2):
        moved, eps = rounded(trace.model, draw)
        worst = max(worst, distance(base, value(trace.again(weights=moved))))
    return 4 * worst + eps


def rounded(model: nn.Module, draw: torch.Generator) -> tuple[dict[str, Tensor], float]:
    """Parameters, each changed by one rounding at most, and the largest relative rounding."""
    own = {n: p.detach() for n, p in model.named_parameters() if p.is_floating_point()}
    eps = max(torch.finfo(p.dtype).eps for p in own.values())
    return {n: shaken(p, eps, draw) for n, p in own.items()}, eps


def shaken(x: Tensor, eps: float, draw: torch.Generator) -> Tensor:
    """The tensor with each entry changed by a relative eps at most."""
    return x * (1 + eps * (torch.rand(x.shape, generator=draw) - 0.5).to(x))


SEEDS: Final = (101, 202)


def from_library(one: object) -> bool:
    """Whether the class of an object was installed with a package, so that it is not the user's own."""
    source = getattr(sys.modules.get(type(one).__module__), "__file__", None)
    homes = {Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")}
    return source is not None and any(home in Path(source).resolve().parents for home in homes)


class Fresh:
    """The model of a setup as it is drawn anew."""

    def __init__(self, setup: Setup) -> None:
        self._model, self._make = unwrap(setup.model), setup.make
        self.by_class = from_library(self._model) and getattr(self._model, "config", None) is not None
        """Whether a library's own class draws it."""

    @cached_property
    def one(self) -> nn.Module:
        """The model of a seed. Raises Unknown where nothing says how it is drawn."""
        return self._draw(SEEDS[0])

    @cached_property
    def pair(self) -> tuple[nn.Module, nn.Module]:
        """The models of two seeds. Raises Unknown where nothing says how they are drawn."""
        return self.one, self._draw(SEEDS[1])

    @property
    def of_class(self) -> nn.Module | None:
        """The model as its library's class draws it; None where none does."""
        with suppress(Unknown):
            return self.one if self.by_class else None
        return None

    def exact(self, like: Trace) -> Trace | None:
        """The same step in float64, on the model of its class; None where it does not run."""
        if self.of_class is None:
            return None
        with suppress(Exception):
            return in_float64(replace(like, model=awake(copy.deepcopy(self.of_class)), dropout=False))
        return None

    def has_setting(self, path: str, name: str, value: Any) -> bool | None:
        """Whether a model made anew gives one of its modules this setting; None where that is not known."""
        with suppress(Unknown, KeyError):
            return settings(dict(self.one.named_modules())[path]).get(name) == value
        return None

    def draws(self, name: str, p: Tensor) -> bool:
        """Whether a parameter is drawn: two seeds differ in it, or it looks so where that is not known."""
        with suppress(Unknown):
            one, other = (dict(m.named_parameters()) for m in self.pair)
            varying = {n for n, x in one.items() if n in other and not torch.equal(x, other[n])}
            return name in varying if varying and name in one else looks_drawn(p)
        return looks_drawn(p)

    def copies(self, first: str, name: str) -> bool:
        """Whether the model's class, or a library's container (nn.TransformerEncoder), copies its blocks."""
        if self.of_class is not None:
            drawn = dict(self.of_class.named_parameters())
            return first in drawn and name in drawn and torch.equal(drawn[first], drawn[name])
        return from_library(self._model.get_submodule(".".join(shared((first, name))[:-1])))

    def built(self) -> nn.Module | None:
        """A model of ``make``, else of Hugging Face's class, in the type of the model; None without either.

        Raises Unknown where the class makes a model with other tensors.
        """
        library, model = sys.modules.get("transformers"), self._model
        if self._make is None and (library is None or not isinstance(model, library.PreTrainedModel)):
            return None
        with same_random_state(SEEDS[0]):
            made = self._made() if self._make is not None else self._configured()
        if self._make is None and made.state_dict().keys() != model.state_dict().keys():
            raise Unknown("the model was changed after its class had made it: pass make=")
        kinds = {p.dtype for p in model.parameters() if p.is_floating_point()}
        return made.to(kinds.pop()) if len(kinds) == 1 else made

    def on_meta(self) -> nn.Module | None:
        """What ``built`` makes on the meta device. Raises Unknown where the user's code cannot."""
        try:
            with torch.device("meta"):
                return self.built()
        except Unknown:
            raise
        except Exception as error:
            why = f"make() raises {type(error).__name__} on the meta device: {error}"
            raise Unknown(why) from error

    def _draw(self, seed: int) -> nn.Module:
        with same_random_state(seed), same_globals():
            if self.by_class:
                with suppress(Exception):
                    return self._configured()
            return self._made()

    def _configured(self) -> nn.Module:
        return type(self._model)(copy.deepcopy(self._model.config))

    def _made(self) -> nn.Module:
        made = None if self._make is None else self._make()
        if isinstance(made, nn.Module):
            return made
        if self._make is not None:
            raise Unknown(f"make() returned {shown(made)}, and must return a model")
        raise Unknown("nothing says how the model is drawn: pass make=, a function that builds it")
