"""``capture``: take the setup of a training that runs in a block of your code, as in a notebook.

A script's process ends with it, but a notebook goes on. So everything that a training may change is kept as
it was: the objects that are alive (``_alive``), and what holds them, such as a trainer.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Final

import numpy
import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Sampler

from normlab.errors import UserError
from normlab.private_torch import children_of
from normlab.setups.ending import EnoughSeen
from normlab.setups.files import KeptFileError
from normlab.setups.from_recording import setup_from_recording
from normlab.setups.harvest import Harvester
from normlab.setups.holders import make_numbers_plain, owners_of
from normlab.setups.named import NamedSetup
from normlab.setups.patches import recorded
from normlab.setups.script import trackers_offline, with_batches
from normlab.setups.setup import Setup
from normlab.setups.withheld import saving_withheld
from normlab.trace.restore import same, same_random_state

GENERATORS: Final = (random.Random, numpy.random.Generator, numpy.random.RandomState)
STATEFUL: Final = (nn.Module, Optimizer, LRScheduler, GradScaler, *GENERATORS)
"""Kinds of objects that a training changes."""


class Captured:
    """What a block showed, once it has ended."""

    def __init__(self) -> None:
        self._named: NamedSetup | None = None
        self._error: UserError | None = None

    @property
    def setup(self) -> Setup:
        """The setup of the first training step. Raises UserError if none was seen, or if it cannot be
        computed again.
        """
        return self.named.setup

    @property
    def facts(self) -> Mapping[str, str]:
        """What was recorded and withheld, in words."""
        return self.named.facts

    @property
    def named(self) -> NamedSetup:
        """The setup with its facts; raises as ``setup`` does."""
        if self._error is not None:
            raise self._error
        if self._named is None:
            raise UserError("the block of normlab.capture() has not ended; ask for captured.setup below it")
        return self._named


@contextmanager
def capture(*, batches: int = 1, optimizer: int = 1) -> Iterator[Captured]:
    """Record the first training step that runs in this block: ``captured.setup`` is its ``Setup``.

    The block ends early, without an exception, when an optimizer is about to make its second step; for more
    ``batches``, when so many were seen. No step of an optimizer is made, and what a trainer saves is
    withheld. After the block models, optimizers, schedules, random states and files are as they were. Of
    several optimizers that step after passes of their own, as in a GAN, ``optimizer`` is the number of one.

    >>> with normlab.capture() as captured:
    ...     for _ in range(10):
    ...         optimizer.zero_grad()
    ...         loss(model, batch).backward()
    ...         optimizer.step()
    >>> normlab.check(captured.setup).ok
    True
    """
    captured, harvester = Captured(), Harvester(batches, optimizer=optimizer)
    alive = _alive()
    with ExitStack() as stack:
        stack.callback(make_numbers_plain)
        stack.enter_context(same_random_state())
        kept = stack.enter_context(same(*alive, parameters=True))
        for owner in owners_of(alive):  # each by itself: a large one leaves no less room for the others
            kept.walk_data(owner)
        with trackers_offline(), saving_withheld() as withheld, recorded(harvester):
            for value in alive:
                # a wrapper around an optimizer, such as Accelerate's, shows the groups of what it wraps
                if isinstance(value, Optimizer) and "param_groups" in vars(value):
                    harvester.add_optimizer(value)
                if isinstance(value, LRScheduler):
                    harvester.add_scheduler(value)
            refusal = ""
            try:
                yield captured
            except EnoughSeen:
                pass
            except KeptFileError as error:
                refusal = harvester.ended_by = str(error)
        try:
            if not harvester.recording.first_window and refusal:
                raise UserError(refusal)
            if not harvester.recording.first_window and not harvester.recording.step_by_hand:
                raise UserError(
                    "the block of normlab.capture() ended without a step of an optimizer after a backward "
                    "pass; call what trains in it, as in trainer.train()"
                )
            named = setup_from_recording(
                harvester.recording, "the captured block", harvester.proven, optimizer=optimizer
            )
            named = replace(named, facts={**named.facts, **withheld.facts, **kept.not_copied()})
            captured._named = with_batches(named, harvester, batches)
        except UserError as error:
            captured._error = error


def _alive() -> list[Any]:
    """Return the objects in this process that a training changes: modules that no other module holds,
    optimizers, schedules, and generators of random numbers.
    """
    gc.collect()
    # by their type: asking an object for its class may run code of its own
    everything = gc.get_objects()
    held = [x for x in everything if issubclass(type(x), STATEFUL)]
    inner = {id(m) for x in held if isinstance(x, nn.Module) for m in children_of(x).values()}
    loaders = [x for x in everything if issubclass(type(x), (DataLoader, Sampler))]
    generators = [getattr(x, "generator", None) for x in loaders]
    held += [g for g in generators if isinstance(g, torch.Generator)]
    return [x for x in held if id(x) not in inner]
