"""``normlab train``: one recipe, trained and tested."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Self

from normlab.cli.options import RUNS, ConfigFlags, ConfigParts, Imports, Switch, base_of, resolved
from normlab.lab.config import Config


@dataclass(frozen=True)
class TrainCommand:
    """Train one recipe, and score its best checkpoint on the test text.

    A finished run is not repeated, and an interrupted one continues from its last checkpoint.
    """

    WHAT: ClassVar[str] = """train trains one recipe; type one of:

  normlab train --recipe pre+rmsnorm --lr 1e-3                     on the built-in corpus
  normlab train --config language_model --train-text train.txt --dev-text dev.txt --test-text test.txt
  normlab train --config runs/ID/config.json                       the same run again"""

    recipe: str
    """A placement and other parts, such as pre+scalenorm; `normlab recipes` lists the parts."""
    lr: float
    """Peak learning rate."""
    seed: int
    """Seed of the initialisation, the order of the data and dropout."""
    flags: ConfigParts
    out: Path
    """Folder of the run folders."""
    config: str
    """Configuration with the defaults: its name (demo, text, multi30k ...) or a run's config.json."""
    init_from: str = ""
    """Start from the weights of this run (its folder, or the beginning of its id), wherever they fit."""
    force: Switch = False
    """Also train a combination that its source does not define; the run is marked."""
    imports: Imports = ()

    @classmethod
    def defaults(cls, argv: Sequence[str]) -> Self:
        name, base = base_of(argv)
        return cls(base.recipe, base.optim.lr, base.seeds.init, ConfigFlags.of(base), RUNS, name)

    def resolved(self) -> Config:
        """The configuration to train. Only what was typed changes the configuration of a run's own file."""
        config = resolved(
            self.config, self.flags, recipe=self.recipe, lr=self.lr, seed=self.seed, force=self.force
        )
        if self.init_from:
            start = replace(config.train, init_from=self.init_from, init_digest="")
            config = replace(config, train=start)
        return config

    def run(self) -> None:
        from normlab.cli.progress import ProgressDisplay
        from normlab.cli.run import print_run
        from normlab.lab.tasks import TASKS
        from normlab.lab.training.ranks import leads
        from normlab.lab.training.train import train

        config = self.resolved()
        if not leads():  # another of torchrun's processes shows the progress
            train(config, self.out)
            return
        with ProgressDisplay() as display:
            metrics = TASKS[config.task].metrics
            folder = train(config, self.out, display.watch_one(config, metrics, self.out))
        print_run(folder)
