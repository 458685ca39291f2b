"""A model drawn afresh, as make() or its class draws it."""

from __future__ import annotations

import copy
import sys
import sysconfig
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from normlab.setups.setup import Setup, shown
from normlab.trace.exact import awake_step
from normlab.trace.facts import Unknown
from normlab.trace.facts.stacks import settings, shared
from normlab.trace.modules import unwrap
from normlab.trace.restore import same_globals, same_random_state
from normlab.trace.trace import Trace

SEEDS: Final = (101, 202)


def from_library(one: object) -> bool:
    """Return whether the class of an object came with an installed package, so it is not the user's own."""
    source = getattr(sys.modules.get(type(one).__module__), "__file__", None)
    homes = {Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")}
    return source is not None and any(home in Path(source).resolve().parents for home in homes)


class Fresh:
    """The model of a setup, drawn afresh."""

    def __init__(self, setup: Setup) -> None:
        self._model, self._make = unwrap(setup.model), setup.make
        self.by_class = from_library(self._model) and getattr(self._model, "config", None) is not None
        """Whether a library's own class draws it."""

    @cached_property
    def one(self) -> nn.Module:
        """The model of one seed. Raises Unknown if nothing says how it is drawn."""
        return self._draw(SEEDS[0])

    @cached_property
    def pair(self) -> tuple[nn.Module, nn.Module]:
        """The models of two seeds. Raises Unknown if nothing says how they are drawn."""
        return self.one, self._draw(SEEDS[1])

    @property
    def of_class(self) -> nn.Module | None:
        """The model as its library's class draws it; None if it has no such class."""
        with suppress(Unknown):
            return self.one if self.by_class else None
        return None

    def exact(self, like: Trace) -> Trace | None:
        """Return the same step in float64, on the model as its class draws it; None if it does not run."""
        if self.of_class is None:
            return None
        with suppress(Exception):
            step = awake_step(like, copy.deepcopy(self.of_class))
            return step if step.exact else None
        return None

    def has_setting(self, path: str, name: str, value: Any) -> bool | None:
        """Return whether a newly made model gives this setting to one of its modules; None if unknown."""
        with suppress(Unknown, KeyError):
            return settings(dict(self.one.named_modules())[path]).get(name) == value
        return None

    def draws(self, name: str, p: Tensor) -> bool:
        """Return whether a parameter is drawn: two seeds differ in it or, if that is unknown, it looks so."""
        with suppress(Unknown):
            one, other = (dict(m.named_parameters()) for m in self.pair)
            varying = {n for n, x in one.items() if n in other and not torch.equal(x, other[n])}
            return name in varying if varying and name in one else _looks_drawn(p)
        return _looks_drawn(p)

    def copies(self, first: str, name: str) -> bool:
        """Return whether the model's class or a library's container (nn.TransformerEncoder) copies blocks."""
        if self.of_class is not None:
            drawn = dict(self.of_class.named_parameters())
            return first in drawn and name in drawn and torch.equal(drawn[first], drawn[name])
        return from_library(self._model.get_submodule(".".join(shared((first, name))[:-1])))

    def built(self) -> nn.Module | None:
        """Build a model by ``make``, else by Hugging Face's class, in the model's dtype; None without either.

        Raises Unknown if the class makes a model with other tensors.
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
        """Return what ``built`` makes on the meta device. Raises Unknown if the user's code cannot do it."""
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
        if self._make is None:
            raise Unknown("nothing says how the model is drawn: pass make=, a function that builds it")
        if not isinstance(made := self._make(), nn.Module):
            raise Unknown(f"make() returned {shown(made)}, and must return a model")
        return made


def _looks_drawn(p: Tensor) -> bool:
    """Return whether a matrix has more distinct entries than diagonals; an identity or a table has not."""
    part = p.detach().flatten(1)[:64, :64]
    return p.numel() > 1 and len(part.unique()) >= sum(part.shape)
