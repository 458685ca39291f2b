"""One model in several sizes, with its data and optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from normlab.config.config import Config, SeedConfig
from normlab.config.model import ModelConfig
from normlab.errors import UserError
from normlab.scaling.exponents import Axis
from normlab.trace.setup import Setup, shown
from normlab.trace.untouched import same_random_state
from normlab.training.own_setups import with_step
from normlab.training.setups import called, setup_from_config

AXES: Final[dict[Axis, str]] = {"width": "widths", "depth": "depths"}


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
    what: Any,
    title: str,
    *,
    widths: Sequence[int] = (),
    depths: Sequence[int] = (),
    root: Path = Path("runs"),
) -> SetupFamily:
    """The family of a function ``setup(width=, seed=)`` or ``setup(depth=, seed=)``, or of a configuration.

    Raises UserError for anything else, and unless just one of both lists holds two sizes or more.
    """
    if bool(widths) == bool(depths):
        raise UserError("give widths or depths, such as widths 64 128 256 512, and not both")
    axis: Axis = "width" if widths else "depth"
    sizes = widths or depths
    if wrong := [n for n in sizes if not isinstance(n, int) or isinstance(n, bool) or n < 1]:
        raise UserError(f"{AXES[axis]} has {shown(wrong[0])}, but must hold whole numbers above 0")
    if len(set(sizes)) < 2:
        raise UserError(f"{AXES[axis]} has {shown(list(sizes))}, but must hold at least two sizes")
    every = tuple(sorted(set(sizes)))
    if isinstance(what, Config):
        return _of_config(what, title, axis, every, root)
    return SetupFamily(title, axis, every, lambda size, seed: called(what, title, seed, **{axis: size}))


def _of_config(config: Config, title: str, axis: Axis, sizes: tuple[int, ...], root: Path) -> SetupFamily:
    """A recipe's family. Its base is its smallest size, unless it has a base of its own."""

    def make(size: int, seed: int) -> Setup:
        model = resized(config.model, axis, size, sizes[0])
        own = replace(config, model=model, seeds=SeedConfig.of(seed))
        return setup_from_config(own, root, tokens=own.train.max_tokens).setup

    return SetupFamily(title, axis, sizes, make, config.model.parametrisation)


def resized(model: ModelConfig, axis: Axis, size: int, base: int) -> ModelConfig:
    """A model in another width or depth, whose parametrisation changes nothing at the size ``base``.

    The feed-forward's width keeps its ratio to the stream's. The number of heads stays, so heads become
    wider; if ``head_dim`` fixes their width, there are more of them.
    """
    if axis == "depth":
        layers: dict[str, Any] = {
            name: size for name in ("encoder_layers", "decoder_layers") if getattr(model, name)
        }
        return replace(model, **layers, base_layers=model.base_layers or base)
    heads = {name: getattr(model, name) * size for name in ("heads", "kv_heads") if model.head_dim}
    if any(number % model.dim for number in heads.values()):
        step = math.lcm(*(model.dim // math.gcd(model.dim, number // size) for number in heads.values()))
        raise UserError(
            f"width {size} holds no whole number of heads, and of kv_heads, of {model.head_dim} each; give "
            f"multiples of {step}, or leave out --head-dim, so that heads become wider"
        )
    return replace(
        model,
        dim=size,
        ffn_dim=max(model.ffn_dim * size // model.dim, 1),
        base_dim=model.base_dim or base,
        **{name: number // model.dim for name, number in heads.items()},
    )
