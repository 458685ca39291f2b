"""``normlab transfer``: say whether the best learning rate of a small model carries to a larger one."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from rich.text import Text

from normlab.cli import errors, terminal
from normlab.cli.options import FAILS, SourceFlags, command_line, load, progress_line, title_lines
from normlab.cli.trial import OTHERS, budget_of, interrupted, with_steps
from normlab.config.config import Config
from normlab.config.io import to_plain
from normlab.config.units import count, duration, short_rate
from normlab.errors import UserError
from normlab.scaling import FACTOR, FIRST_SEED, SEEDS, STEPS

if TYPE_CHECKING:
    from normlab.scaling.family import SetupFamily


@dataclass(frozen=True, kw_only=True)
class TransferCommand(SourceFlags):
    """Train a model in several sizes at several learning rates, and say whether the best one carries.

    SOURCE is train.py:setup, a function of yours that takes width, or depth, and seed, and returns
    normlab.Setup(model, batches, optimizer=…); your file is run. Without SOURCE, --recipe names a recipe,
    which has as many heads at every width. --steps is the length of a trial. Ctrl-C gives the answer so far.
    The exit code is 3 if the rate does not carry, and 0 if it does or the trials cannot say.
    """

    WHAT: ClassVar[
        str
    ] = """transfer trains a model in several widths or depths, at several rates each; type one of:

  normlab transfer train.py:setup --widths 64 128 256 512   your function setup(width=256, seed=0)
  normlab transfer train.py:setup --depths 2 4 8 16         your function setup(depth=4, seed=0)
  normlab transfer --recipe pre+mup --widths 64 128 256     a recipe of normlab's"""

    OWN: ClassVar[Sequence[str]] = ("--steps",)

    widths: tuple[int, ...] = ()
    """Widths of the model, such as 64 128 256 512."""
    depths: tuple[int, ...] = ()
    """Depths to try instead of widths, such as 2 4 8 16."""
    seeds: int = SEEDS
    """How many seeds each trial is run with, counting up from --seed."""
    rates: tuple[float, ...] = ()
    """Rates to try at every size, instead of five octaves around its best."""
    decays: tuple[str, ...] = ("1",)
    """Factors on the weight decay to try, such as 0 1 4, or independent (of the rate), or independent:4."""
    target: int | None = None
    """Size whose best rate is wanted; by default the largest."""
    factor: float = FACTOR
    """The rate carries if the best one changes by at most this factor over all sizes."""
    budget: str = "30min"
    """Time to spend at most, such as 10min or 2h, from the moment your file starts to run."""
    folder: Path | None = None
    """Folder that keeps the trials, so that the same command continues where it stopped."""
    out: Path | None = None
    """File of a page to write, such as transfer.html."""

    @classmethod
    def defaults(cls, argv: Sequence[str]) -> Self:
        """Return the defaults of ``normlab.transfer``, whose first seed is not the configuration's."""
        return replace(super().defaults(argv), seed=FIRST_SEED)

    @classmethod
    def adapted(cls, base: Config) -> Config:
        """A configuration's values, but with the steps of a trial and not those of the planned run."""
        return with_steps(base, STEPS)

    def run(self) -> None:
        """Raises SystemExit with the code ``FAILS`` if the rate does not carry, and KeyboardInterrupt, after
        the answer so far, if the trials were interrupted.
        """
        from normlab.scaling.answer import SHIFTS
        from normlab.scaling.transfer import transfer

        since, command, budget_s = time.monotonic(), command_line(), budget_of(self.budget)
        with self._family() as family, redirect_stdout(sys.stderr), progress_line() as progress:
            answer = transfer(
                family,
                steps=self.flags.train.steps,
                seeds=self.seeds,
                budget_s=budget_s,
                rates=self.rates,
                decays=self.decays,
                target=self.target,
                factor=self.factor,
                seed=self.seed,
                folder=self.folder,
                progress=progress,
                announce=errors.write,
                since=since,
            )
        plain = {**to_plain(answer.to_dict()), "command": command}
        if self.as_json:
            self.print_json([plain])
        else:
            _print(plain)
        if self.out is not None:
            from normlab.report.transfer import transfer_page

            self.print_page(transfer_page(plain).write(self.out))
        if answer.interrupted:
            raise interrupted(self.folder)
        if answer.verdict == SHIFTS:
            raise SystemExit(FAILS)

    @contextmanager
    def _family(self) -> Iterator[SetupFamily]:
        """Yield the model in its sizes. Raises UserError for no model, or for flags that would be ignored."""
        from normlab.scaling.family import family_of
        from normlab.training.setups import function_from_file

        if self.kind in OTHERS:
            raise UserError(OTHERS[self.kind])
        self.require_one()
        sizes: dict[str, Any] = {"widths": self.widths, "depths": self.depths}
        if self.kind == "recipe":
            config = with_steps(self.resolved(), load(self.config).train.steps)
            yield family_of(config, config.recipe, root=self.runs, **sizes)
            return
        errors.write(f"running {self.source}")
        with function_from_file(self.source, seed=self.seed) as function:
            yield family_of(function, self.source, **sizes)


def _print(plain: Mapping[str, Any]) -> None:
    first, *rest = plain["lines"]
    scales = len({model["rate"] for model in plain["models"]}) > 1
    times = [">times its own"] * scales
    table = terminal.table(f">{plain['axis']}", ">parameters", ">best rate", *times, ">95% interval", "")
    for own, model in zip(plain["decays"][0]["sizes"], plain["models"], strict=True):
        best, multiple = own["optimum"], own["multiple"]["value"]
        ends = ["" if best[end] is None else short_rate(best[end]) for end in ("low", "high")]
        value = "" if best["value"] is None else short_rate(best["value"])
        between = f"{ends[0]} to {ends[1]}" if all(ends) else ends[0] and f"above {ends[0]}"
        between = between or (ends[1] and f"below {ends[1]}")
        times = ["" if multiple is None else f"{multiple:.2g}x"] * scales
        table.add_row(str(own["size"]), f"{model['parameters']:,}", value, *times, between, best["why"])
    cost = plain["cost"]
    terminal.write(
        Text(first, "bold"),
        *map(Text, rest),
        table,
        *title_lines(plain["title"], plain["facts"]),
        f"{count(cost['trials'], 'trial')} of {plain['steps']} steps in {duration(cost['seconds'])}",
    )
