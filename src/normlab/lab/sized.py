"""A recipe's configuration in other widths and depths."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from normlab.base.model_config import ModelConfig
from normlab.errors import UserError
from normlab.lab.config import Config, SeedConfig
from normlab.lab.setups import setup_from_config
from normlab.scaling.exponents import Axis
from normlab.setups.setup import Setup


@dataclass(frozen=True)
class SizedRecipe:
    """A configuration that ``transfer`` builds in any width or depth; its text is prepared in ``root``."""

    config: Config
    root: Path

    @property
    def title(self) -> str:
        """The name of the recipe."""
        return self.config.recipe

    @property
    def parametrisation(self) -> str:
        """The name of the recipe's parametrisation."""
        return self.config.model.parametrisation

    def at(self, axis: Axis, size: int, *, base: int, seed: int) -> Setup:
        """Return the setup at a width or depth, drawn from a seed; ``base`` is the size at which the
        parametrisation changes nothing, unless the configuration names one.
        """
        model = resized(self.config.model, axis, size, base)
        config = replace(self.config, model=model, seeds=SeedConfig.of(seed))
        return setup_from_config(config, self.root, tokens=config.train.max_tokens).setup


def sized(config: Config, root: str | Path = "runs") -> SizedRecipe:
    """Return a recipe's configuration as a model in any size, for ``normlab.transfer``; its text is prepared
    in the folder ``root``.

    >>> normlab.sized(normlab.resolve("pre+mup", config)).parametrisation
    'mup'
    """
    return SizedRecipe(config, Path(root))


def resized(model: ModelConfig, axis: Axis, size: int, base: int) -> ModelConfig:
    """A model in another width or depth, whose parametrisation changes nothing at the size ``base``.

    The feed-forward's width keeps its ratio to the stream's. The number of heads stays, so heads become
    wider; if ``head_dim`` fixes their width, there are more of them.
    """
    if axis == "depth":
        stacks = [name for name in ("encoder_layers", "decoder_layers") if getattr(model, name)]
        layers: dict[str, Any] = dict.fromkeys(stacks, size)
        return replace(model, **layers, base_layers=model.base_layers or base)
    heads: dict[str, Any] = {}
    if model.head_dim:
        heads = _heads_in_width(model, size)
    return replace(
        model,
        dim=size,
        ffn_dim=max(model.ffn_dim * size // model.dim, 1),
        base_dim=model.base_dim or base,
        **heads,
    )


def _heads_in_width(model: ModelConfig, width: int) -> dict[str, Any]:
    """Return the numbers of heads of a fixed width that fill another width as they fill the model's.

    Raises UserError unless they are whole numbers, with the widths at which they are.
    """
    heads = {"heads": model.heads, "kv_heads": model.kv_heads}
    if any(number * width % model.dim for number in heads.values()):
        step = math.lcm(*(model.dim // math.gcd(model.dim, number) for number in heads.values()))
        raise UserError(
            f"width {width} holds no whole number of heads, and of kv_heads, of {model.head_dim} each; give "
            f"multiples of {step}, or leave out --head-dim, so that heads become wider"
        )
    return {name: number * width // model.dim for name, number in heads.items()}
