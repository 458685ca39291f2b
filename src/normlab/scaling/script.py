"""A training script as a model in several sizes: it is recorded once for each, with its own arguments."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from normlab.base.libraries import is_library
from normlab.errors import UserError
from normlab.scaling.exponents import Axis
from normlab.scaling.family import AXES, SetupFamily, family_of
from normlab.setups.script import Script, recorded_setup
from normlab.setups.setup import Setup


@contextmanager
def family_of_script(
    script: Script,
    *,
    widths: Sequence[int] = (),
    depths: Sequence[int] = (),
    batches: int,
    seconds: float,
    tell: Callable[[str], None] = lambda line: None,
) -> Iterator[SetupFamily]:
    """Yield the family of a script whose arguments hold ``{width}`` or ``{depth}``, and ``{seed}``.

    At the smallest size so many ``batches`` are harvested in so many seconds: all sizes see these. ``tell``
    gets a sentence about those of each seed. Raises UserError for arguments that do not hold the size.
    """
    # `make` follows below: it needs the axis and the sizes, which are checked here
    family = family_of(lambda: None, script.name, widths=widths, depths=depths)
    _require_places(script, family.axis)
    recordings = _Recordings(script, family.axis, family.sizes[0], batches, seconds, tell)
    hint = f"type {{seed}} where it takes its seed, as in {script.name} -- --seed={{seed}}"
    with script.surroundings():
        yield replace(family, make=recordings.setup, seed_hint=hint)


def _require_places(script: Script, axis: Axis) -> None:
    given = " ".join(script.arguments)
    for other, flag in AXES.items():
        if other != axis and f"{{{other}}}" in given:
            raise UserError(f"{{{other}}} needs --{flag}, but --{AXES[axis]} is given; name one of both")
    if f"{{{axis}}}" not in given:
        raise UserError(
            f"{script.name} would get the same arguments at every {axis}: type {{{axis}}} where it takes its "
            f"{axis}, as in {script.name} --{AXES[axis]} … -- --{axis}={{{axis}}}"
        )


@dataclass
class _Recordings:
    """Records a script at a size and a seed; its batches are harvested once for each seed."""

    script: Script
    axis: Axis
    smallest: int
    batches: int
    seconds: float
    tell: Callable[[str], None]
    harvested: dict[int, Any] = field(default_factory=dict)
    """By seed, the batches of the smallest size."""

    def setup(self, size: int, seed: int) -> Setup:
        """Run the script at a size with a seed, and return the setup that it shows."""
        filled = [
            argument.replace(f"{{{self.axis}}}", str(size)).replace("{seed}", str(seed))
            for argument in self.script.arguments
        ]
        script = replace(self.script, arguments=filled)
        harvests = size == self.smallest and seed not in self.harvested
        before = set(sys.modules)
        named = recorded_setup(
            script, batches=self.batches if harvests else 1, seconds=self.seconds, seed=seed
        )
        _forget_modules(before)
        if harvests:
            self.harvested[seed] = named.setup.batches
            about = "; ".join(f"{name}: {fact}" for name, fact in named.facts.items())
            self.tell(f"{script.name} with seed {seed}: {about}")
        return replace(named.setup, batches=self.harvested.get(seed, named.setup.batches))


def _forget_modules(before: set[str]) -> None:
    """Forget the script's own modules, so that the next run imports them anew: what they computed is of this
    run's size.
    """
    for name in sys.modules.keys() - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file and not is_library(file):
            del sys.modules[name]
