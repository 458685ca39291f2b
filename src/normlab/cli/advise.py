"""``normlab advise``: forecast for a training that is planned, and for what may be changed about it."""

from __future__ import annotations

import json
import shlex
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from normlab.cli import failures
from normlab.cli.examined import Examined, flags_for_arguments
from normlab.errors import UserError

if TYPE_CHECKING:
    from normlab.examine.advice import Advice, Alternative


@dataclass(frozen=True, kw_only=True)
class Advise(Examined):
    """Say which changes of a planned training would make it train: placement, warm-up, learning rate.

    Examine a recipe and others with the rest of its configuration, or the setup of a file of yours with
    changes that need no rewrite: normlab advise train.py:setup. Each is measured before its first step, on
    the same batch, and its forecast is drawn over learning rates.
    """

    recipes: tuple[str, ...] = ()
    """Recipes to try in the place of --recipe; by default a warm-up, and some that often help."""
    page: ClassVar[str] = "advice"

    def run(self) -> None:
        """Raises UserError for a plan that cannot be examined."""
        from normlab.report.advice import write_advice
        from normlab.spec.serialise import to_plain

        self._require_whole()
        if self.source and self.recipes:
            raise UserError("a setup of yours is not built from a recipe, so that --recipes says nothing")
        with flags_for_arguments():
            advice, name = self._advice()
        plain = to_plain({**advice.to_plain(), "command": shlex.join(["normlab", *sys.argv[1:]])})
        page = write_advice(plain, self.out or self.runs, name)
        if self.as_json:
            print(json.dumps(plain, ensure_ascii=False, allow_nan=False))
            return
        _say(advice)
        print(f"page: {page}")

    def _advice(self) -> tuple[Advice, str]:
        """Return the advice and the name of its page."""
        from normlab.examine.advising import Advisor, advise_case, advise_recipe

        advisor = Advisor(_done, self.blocks, self.branches)
        if self.source:
            with ExitStack() as stack:
                return advise_case(self._own(stack), advisor), self._named(self.source)
        config = self._resolved()
        advice = advise_recipe(config, self.runs, tokens=self.tokens, others=self.recipes, advisor=advisor)
        return advice, self._named(config)


def _done(alternative: Alternative) -> None:
    """Say which forecasts are made, as they are."""
    failures.write(f"examined: {alternative.name}")


def _say(advice: Advice) -> None:
    """Print the advice in a line, the forecasts, and what to type or to write for the changes."""
    from rich.text import Text

    from normlab.cli import terminal
    from normlab.examine.advice import told

    console = terminal.console()
    console.print(Text(advice.sentence, "bold"))
    width = max(len(one.name) for one in advice.alternatives)
    for one in advice.alternatives:
        console.print(Text(f"{one.name:{width}}  {told(one)}"))
        if one.do:
            console.print(Text(f"{'':{width}}  {one.do}", "dim"))
