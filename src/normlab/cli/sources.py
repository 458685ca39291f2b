"""What ``check`` and ``diagnose`` examine: a file's setup, a recipe, or a run at its checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from normlab.cli import errors
from normlab.cli.options import SourceFlags
from normlab.lab.runs.folder import find_run

if TYPE_CHECKING:
    from normlab.setups.named import NamedSetup


@dataclass(frozen=True, kw_only=True)
class ExaminedFlags(SourceFlags):
    """The flags that say what is examined: one setup, or one for each checkpoint of a run."""

    checkpoints: tuple[Literal["last", "best", "average"], ...] = ()
    """Checkpoints of a run; by default the last, and the best if it is another one."""
    step: int | None = None
    """For a run with --keep-checkpoints: examine the weights after this step."""
    tokens: int
    """Padded positions in the batch of a recipe or a run."""

    def sources(self) -> Iterator[tuple[NamedSetup, bool]]:
        """Yield what is to be examined, and whether it is one of several. The folder of a file is on
        ``sys.path`` until the next one is asked for.
        """
        if self.kind == "file":
            from normlab.setups.function import setup_from_file

            errors.write(f"running {self.source}")
            with setup_from_file(self.source, seed=self.seed) as source:
                yield source, False
            return
        if self.kind == "script":
            from normlab.setups.script import setup_from_script

            script = self.module or self.source
            errors.write(f"running {script} up to its first steps")
            with setup_from_script(script, self.arguments, module=bool(self.module)) as source:
                yield source, False
            return
        from normlab.lab import setups  # the laboratory, which a file of the user's does not need

        if self.kind == "run":
            run = find_run(self.source, self.runs)
            wanted = setups.checkpoints(run, self.checkpoints, self.step)
            for one in wanted:
                yield setups.setup_from_run(run, one, tokens=self.tokens), len(wanted) > 1
        else:
            yield setups.setup_from_config(self.resolved(), self.runs, tokens=self.tokens), False
