"""``normlab watch``: run a training script to its end, watched, and draw a page."""

from __future__ import annotations

import warnings
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from tyro.conf import Positional, Suppress, arg

from normlab.base.units import count
from normlab.cli import errors
from normlab.cli.advice import refuse_what_is_no_source, require_script
from normlab.errors import UserError

if TYPE_CHECKING:
    from normlab.watching.watcher import Watch


@dataclass(frozen=True, kw_only=True)
class WatchCommand:
    """Run a training script to its end, watch its training, and write a page.

    The script really trains, and all that it saves is saved; losses and weights are those of a run without
    normlab. Each step goes to a flight recorder, which reports when training goes wrong; some steps are
    observed in every block.
    """

    WHAT: ClassVar[str] = """watch runs a training script to its end, and watches it; type one of:

  normlab watch train.py -- --lr 3e-4   your training script as it is, with its own arguments
  normlab watch -m package.train        the same, as a module"""

    source: Annotated[Positional[str], arg(metavar="SOURCE")] = ""
    """Your training script."""
    module: Annotated[str, arg(aliases=["-m"])] = ""
    """Run a module as the script, as in python -m."""
    arguments: Suppress[tuple[str, ...]] = ()
    """What the script is given: all that is typed after --."""
    out: Path = Path("watch")
    """Folder of the page and of what is recorded."""
    every_steps: int = 50
    """Observe one of this many steps."""
    probes: Literal["cheap", "standard", "full"] = "standard"
    """How much is observed in each observed step."""

    def run(self) -> None:
        """Raises UserError for anything but a script, and for one that raises or never trains."""
        self._require_script()
        from normlab.setups.script import Script
        from normlab.watching.training import follow
        from normlab.watching.watcher import Watch

        script = Script(self.module or self.source, self.arguments, bool(self.module))
        errors.write(f"running {script.name}, watched")
        watch = Watch(self.probes, out=self.out, every_steps=self.every_steps)
        with script.surroundings(), _warnings_as_sentences():
            training = follow(watch)
            try:
                script.run()
            finally:
                watch.close()
                if training.is_attached:
                    print(_last_line(script.name, watch))
        if not training.is_attached:
            raise UserError(
                f"{script.name} ended without a call of a model that an optimizer trains, so nothing was "
                "watched; name a script that trains, with the arguments that it needs after --"
            )

    def _require_script(self) -> None:
        if self.source and self.module:
            raise UserError(f"{self.source} and -m {self.module} are two scripts; name one of them")
        if self.module or (self.source.endswith(".py") and ":" not in self.source):
            require_script(self.module or self.source, is_module=bool(self.module), command="watch")
            return
        if not self.source:
            raise UserError(self.WHAT)
        if ":" not in self.source:
            refuse_what_is_no_source(self.source, "watch")
        raise UserError(
            f"{self.source} is not a training script; name one, as in normlab watch train.py, or use "
            "normlab.watch(model, optimizer) in your own loop"
        )


@contextmanager
def _warnings_as_sentences() -> Generator[None]:
    """Print a warning of the watch as its sentence, without the line of normlab that gave it."""
    from normlab.watching.watcher import WatchWarning

    usual = warnings.formatwarning

    def format_warning(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        if issubclass(category, WatchWarning):
            return f"{message}\n"
        return usual(message, category, filename, lineno, line)

    warnings.formatwarning = format_warning
    try:
        yield
    finally:
        warnings.formatwarning = usual


def _last_line(name: str, watch: Watch) -> str:
    """What was seen of a training, what went wrong first, and where the page is."""
    seen = f"watched {count(watch.steps, 'step')} of {name}: {watch.worst or 'nothing went wrong'}"
    return f"{seen}; page: {watch.page}" if watch.page.is_file() else seen
