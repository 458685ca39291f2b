"""The same model drawn anew: by ``make``, or by its class on its own configuration."""

from __future__ import annotations

import copy
import sys
import sysconfig
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from torch import nn

from normlab.checks.property import Untestable
from normlab.checks.step import Step
from normlab.trace.exact import awake, in_float64
from normlab.trace.trace import Trace
from normlab.trace.untouched import same_globals, same_random_state


def from_library(one: object) -> bool:
    """Whether the class of an object was installed with a package, so that it is not the user's own."""
    module = sys.modules.get(type(one).__module__)
    source = getattr(module, "__file__", None)
    homes = {Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")}
    return source is not None and any(home in Path(source).resolve().parents for home in homes)


def drawn_by_class(step: Step) -> bool:
    """Whether a library's own class can draw the model anew from its configuration."""
    return from_library(step.model) and getattr(step.model, "config", None) is not None


def fresh(step: Step, seed: int) -> nn.Module:
    """Draw the model anew from a seed, by its library's class, else by ``make``. Raises Untestable."""
    key = f"fresh {seed}"
    if key not in step.kept:
        with same_random_state(seed), same_globals():
            step.kept[key] = _drawn(step)
    return step.kept[key]


def _drawn(step: Step) -> nn.Module:
    if drawn_by_class(step):
        with suppress(Exception):
            return type(step.model)(copy.deepcopy(step.model.config))
    if step.setup.make is None:
        raise Untestable("nothing says how the model is drawn: pass make=, a function that builds it anew")
    made = step.setup.make()
    if not isinstance(made, nn.Module):
        raise Untestable(f"make() returned {type(made).__name__}, and must return a model")
    return made


def exact_fresh(step: Step) -> Trace | None:
    """The exact step on the model as its library draws it; None where no library does."""
    if not drawn_by_class(step):
        return None
    with suppress(Exception):
        return in_float64(replace(step.plain, model=awake(copy.deepcopy(fresh(step, 101))), dropout=False))
    return None
