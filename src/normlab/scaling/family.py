"""One model in several sizes, with its data and optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol, runtime_checkable

from normlab.errors import UserError
from normlab.scaling.exponents import Axis
from normlab.setups.function import setup_from_function
from normlab.setups.setup import Setup, shown
from normlab.setups.step import with_step
from normlab.trace.restore import same_random_state

AXES: Final[dict[Axis, str]] = {"width": "widths", "depth": "depths"}


@runtime_checkable
class Sized(Protocol):
    """A model that can be built in any size, such as a recipe's configuration (``normlab.sized``)."""

    @property
    def title(self) -> str:
        """What to call it."""

    @property
    def parametrisation(self) -> str:
        """The name of its parametrisation; empty if it is not known."""

    def at(self, axis: Axis, size: int, *, base: int, seed: int) -> Setup:
        """Return the setup at a width or depth, drawn from a seed; at the size ``base`` its parametrisation
        changes nothing.
        """


@dataclass(frozen=True)
class SetupFamily:
    """A model in several sizes: ``make(size, seed)`` builds its setup at one."""

    title: str
    axis: Axis
    """The size that changes."""
    sizes: tuple[int, ...]
    """From the smallest on."""
    make: Callable[[int, int], Setup]
    parametrisation: str = ""
    """The one that a recipe names; empty if it is not known."""
    seed_hint: str = (
        "declare seed, as in def setup(…, seed=0), and call torch.manual_seed(seed) before the model is made"
    )
    """What to type if every seed draws the same model."""

    def build(self, size: int, seed: int) -> Setup:
        """The setup of a size, drawn from a seed. Raises UserError if it has no optimizer."""
        with same_random_state(seed), self.named(size):
            setup = with_step(self.make(size, seed))
        if setup.optimizer is None:
            raise UserError(
                f"{self.title} has no optimizer: pass optimizer= to normlab.Setup, as in "
                "torch.optim.AdamW(model.parameters(), lr=1e-3)"
            )
        return setup

    @contextmanager
    def named(self, size: int) -> Iterator[None]:
        """Add the size to a UserError that is raised inside this block."""
        try:
            yield
        except UserError as error:
            raise UserError(f"at {self.axis} {size}: {error}") from error


def family_of(
    source: Any, title: str = "", *, widths: Sequence[int] = (), depths: Sequence[int] = ()
) -> SetupFamily:
    """The family of a function ``setup(width=, seed=)`` or ``setup(depth=, seed=)``, or of what is ``Sized``,
    whose base is its smallest size.

    Raises UserError for anything else, and unless just one of both lists holds two sizes or more.
    """
    if bool(widths) == bool(depths):
        raise UserError("give widths or depths, such as widths 64 128 256 512, and not both")
    axis: Axis = "width" if widths else "depth"
    sizes = widths or depths
    for size in sizes:
        is_whole = isinstance(size, int) and not isinstance(size, bool)
        if not is_whole or size < 1:
            raise UserError(f"{AXES[axis]} has {shown(size)}, but must hold whole numbers above 0")
    if len(set(sizes)) < 2:
        raise UserError(f"{AXES[axis]} has {shown(list(sizes))}, but must hold at least two sizes")
    ascending = tuple(sorted(set(sizes)))
    if isinstance(source, Sized):
        base = ascending[0]

        def make_from_base(size: int, seed: int) -> Setup:
            return source.at(axis, size, base=base, seed=seed)

        return SetupFamily(title or source.title, axis, ascending, make_from_base, source.parametrisation)
    if not callable(source):
        raise UserError(
            f"transfer got {shown(source)}, and takes a function setup({axis}=, seed=), or, for a recipe's "
            "configuration, normlab.sized(config)"
        )
    name = title or getattr(source, "__qualname__", "setup")

    def make(size: int, seed: int) -> Setup:
        return setup_from_function(source, name, seed, **{axis: size})

    return SetupFamily(name, axis, ascending, make)
