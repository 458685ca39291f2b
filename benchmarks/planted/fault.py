"""A planted fault, and the places that a correct finding may name."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from .models import SEED, Case, build

OPTIMISER = "optimiser"
"""The place of a fault that lies in the step and in no module."""
LOSS = "loss"
"""The place of a fault that lies in the loss."""
BATCH = "batch"
"""The place of a fault that lies in the batch."""

Plant = Callable[[Case], None]


def within(*paths: str) -> tuple[str, ...]:
    """Return patterns of these modules, or parameters and buffers, and of all that is inside them."""
    return tuple(pattern for path in paths for pattern in (path, f"{path}.*"))


@dataclass(frozen=True)
class Fault:
    """A mistake in a model of one of the four architectures."""

    name: str
    architecture: str
    says: str
    """One sentence on the mistake."""
    module: tuple[str, ...]
    """Patterns of the paths that a correct first finding names: modules, parameters, buffers, OPTIMISER,
    LOSS or BATCH.
    """
    plant: Plant
    """Changes a sound case in place, as the mistake would."""
    declared: Mapping[str, Any] = field(default_factory=dict)
    """The start that was meant, where only this shows the mistake: deviations by role, and so on."""
    words: tuple[str, ...] = ()
    """Words, or their beginnings, of which the finding must hold one, where its place alone would not show
    that the mistake was recognised.
    """

    def case(self) -> Case:
        """Build the model with its fault."""
        case = build(self.architecture)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            self.plant(case)
        return case

    def named_by(self, path: str, sentence: str) -> bool:
        """Whether a finding about this path is a correct one."""
        placed = any(fnmatchcase(path, pattern) for pattern in self.module)
        begun = (re.search(rf"(?<!\w){re.escape(word)}", sentence, re.IGNORECASE) for word in self.words)
        return placed and (not self.words or any(begun))


@dataclass(frozen=True)
class Faults:
    """A list of faults, to which functions are added by ``@faults.add(...)``."""

    every: list[Fault] = field(default_factory=list)

    def add(
        self,
        architecture: str,
        *module: str,
        declared: Mapping[str, Any] | None = None,
        words: Sequence[str] = (),
    ) -> Callable[[Plant], Plant]:
        """Add a function by its name, with its docstring as the sentence."""

        def added(plant: Plant) -> Plant:
            says = inspect.cleandoc(plant.__doc__ or "")
            start = declared or {}
            self.every.append(Fault(plant.__name__, architecture, says, module, plant, start, tuple(words)))
            return plant

        return added


def becomes(module: nn.Module, kind: type[nn.Module]) -> None:
    """Let a module behave as if it had been written as this subclass of its own class."""
    if not issubclass(kind, type(module)):
        raise TypeError(f"{kind.__name__} is no subclass of {type(module).__name__}")
    module.__class__ = kind
