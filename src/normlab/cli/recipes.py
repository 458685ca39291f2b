"""``normlab recipes``: list the parts of recipes, and say what whole recipes resolve to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby
from typing import Annotated

from rich.text import Text
from tyro.conf import Positional, arg

from normlab.cli import terminal
from normlab.cli.options import Imports, Switch, load
from normlab.errors import UserError, nearest
from normlab.lab.config import Config
from normlab.lab.formulas import readable

ROOMY = 160
"""Columns that a terminal needs to show an equation and its source side by side."""


@dataclass(frozen=True)
class RecipesCommand:
    """List the parts of recipes with their equations and sources, or explain whole recipes."""

    names: Annotated[Positional[tuple[str, ...]], arg(metavar="RECIPE")] = ()
    """Recipes to explain: their parts, initialisation and number of parameters."""
    axis: str = ""
    """List only the parts of one axis, such as placement or norm."""
    config: str = "demo"
    """Configuration for which recipes are explained: its name or a run's config.json."""
    force: Switch = False
    """Also explain combinations that their source does not define, with the reason."""
    imports: Imports = ()

    def run(self) -> None:
        from normlab.lab.recipes.grammar import resolve

        if not self.names:
            _print_parts(self.axis)
        base = load(self.config)
        if not base.optim.decay_step:  # schedules that decay at a step need one to be explained
            base = replace(base, optim=replace(base.optim, decay_step=base.train.steps // 2))
        for config in [resolve(name, base, force=self.force) for name in self.names]:
            _print_recipe(config)


def _print_parts(axis: str) -> None:
    """Print all parts, or those of one axis. Raises UserError for an unknown axis."""
    from normlab.lab.recipes.build import summary
    from normlab.lab.recipes.grammar import listed

    parts = listed()
    axes = dict.fromkeys(part.axis for part in parts)
    if axis and axis not in axes:
        raise UserError(f"there is no axis {axis!r}{nearest(axis, axes)}")
    is_roomy = terminal.console().width >= ROOMY
    columns = ("name", "equation", "source") if is_roomy else ("name", "equation")
    table = terminal.table(*columns)
    for heading, members in groupby(parts, key=lambda part: part.axis):
        if axis and heading != axis:
            continue
        table.add_row(Text(heading, "bold"))
        for part in members:
            equation, source = summary(part)
            texts = [Text(readable(equation)), Text(source, "dim")]
            if not is_roomy:
                texts = [Text("\n").join(filter(None, texts))]
            table.add_row(Text(f"  {part.name}"), *texts)
    terminal.write(table)
    if not axis:
        terminal.write(
            "A recipe is a placement, or enc:PLACEMENT/dec:PLACEMENT, and at most one name\n"
            "from each other axis, joined by +: post, post+warmup, pre+fixnorm+scalenorm,\n"
            "enc:post/dec:pre+rmsnorm. `normlab recipes RECIPE` says what it resolves to."
        )


def _print_recipe(config: Config) -> None:
    from normlab.lab.recipes.build import explain

    table = terminal.table("", "")
    table.show_header = False
    for label, text in explain(config).items():
        table.add_row(Text(label, "bold"), Text(text))
    terminal.write(Text(config.recipe, "bold"), table, "")
