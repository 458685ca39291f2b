"""A model drawn anew: by its library's class on its own configuration, else by ``make``."""

from __future__ import annotations

import copy
import sys
import sysconfig
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Final

from torch import nn

from normlab.trace.exact import awake, in_float64
from normlab.trace.facts import Unknown
from normlab.trace.setup import Setup
from normlab.trace.tensors import unwrap
from normlab.trace.trace import Trace
from normlab.trace.untouched import same_globals, same_random_state

SEEDS: Final = (101, 202)


def from_library(one: object) -> bool:
    """Whether the class of an object was installed with a package, so that it is not the user's own."""
    source = getattr(sys.modules.get(type(one).__module__), "__file__", None)
    homes = {Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")}
    return source is not None and any(home in Path(source).resolve().parents for home in homes)


class Fresh:
    """The model of a setup as it is drawn anew, once for each seed."""

    def __init__(self, setup: Setup) -> None:
        self._model, self._make = unwrap(setup.model), setup.make
        self.by_class = from_library(self._model) and getattr(self._model, "config", None) is not None
        """Whether a library's own class draws it."""

    @cached_property
    def pair(self) -> tuple[nn.Module, nn.Module]:
        """The models of two seeds. Raises Unknown where nothing says how they are drawn."""
        drawn = []
        for seed in SEEDS:
            with same_random_state(seed), same_globals():
                drawn.append(self._draw())
        return drawn[0], drawn[1]

    @property
    def of_class(self) -> nn.Module | None:
        """The model as its library's class draws it; None where none does."""
        with suppress(Unknown):
            return self.pair[0] if self.by_class else None
        return None

    def exact(self, like: Trace) -> Trace | None:
        """The same step in float64, on the model of its class; None where it does not run."""
        if self.of_class is None:
            return None
        with suppress(Exception):
            return in_float64(replace(like, model=awake(copy.deepcopy(self.of_class)), dropout=False))
        return None

    def _draw(self) -> nn.Module:
        if self.by_class:
            with suppress(Exception):
                return type(self._model)(copy.deepcopy(self._model.config))
        made = None if self._make is None else self._make()
        if isinstance(made, nn.Module):
            return made
        raise Unknown("nothing says how the model is drawn: pass make=, a function that builds it")
