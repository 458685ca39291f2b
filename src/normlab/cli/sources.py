"""What ``check`` and ``diagnose`` examine: a file's setup, a recipe, or a run at its checkpoints."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from normlab.cli import errors
from normlab.cli.advice import find_named_run
from normlab.cli.options import SourceFlags
from normlab.errors import UserError

if TYPE_CHECKING:
    from normlab.setups.named import NamedSetup


@dataclass(frozen=True, kw_only=True)
class ExaminedFlags(SourceFlags):
    """The flags that say what is examined: one setup, or one for each checkpoint of a run."""

    OF_RECIPE: ClassVar[Collection[str]] = (*SourceFlags.OF_RECIPE, "checkpoints", "step", "tokens")

    checkpoints: tuple[Literal["last", "best", "average"], ...] = ()
    """Checkpoints of a run; by default the last, and the best if it is another one."""
    step: int | None = None
    """For a run with --keep-checkpoints: examine the weights after this step."""
    tokens: int
    """Padded positions in the batch of a recipe or a run."""
    optimizer: int = 1
    """Which optimizer's step is examined, by its number, if a script steps several, as a GAN does."""

    def sources(self) -> Iterator[tuple[NamedSetup, bool]]:
        """Yield what is to be examined, and whether it is one of several. The folder of a file is on
        ``sys.path`` until the next one is asked for.
        """
        if self.optimizer != 1 and self.kind != "script":
            raise UserError("--optimizer needs a training script, as in train.py --optimizer 2")
        if self.kind == "file":
            from normlab.setups.function import setup_from_file

            errors.write(f"running {self.source}")
            with setup_from_file(self.source, seed=self.seed) as source:
                yield source, False
        elif self.kind == "script":
            with self.script_setup(optimizer=self.optimizer) as source:
                yield source, False
        elif self.kind == "run":
            yield from self._checkpoints_of_run()
        else:
            from normlab.lab import setups  # the laboratory, which a file of the user's does not need

            yield setups.setup_from_config(self.resolved(), self.runs, tokens=self.tokens), False

    def _checkpoints_of_run(self) -> Iterator[tuple[NamedSetup, bool]]:
        from normlab.lab import setups

        run = find_named_run(self.source, self.runs, self.command)
        wanted = setups.checkpoints(run, self.checkpoints, self.step)
        for checkpoint in wanted:
            yield setups.setup_from_run(run, checkpoint, tokens=self.tokens), len(wanted) > 1
