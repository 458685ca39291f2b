"""The search of a fine-tuning over batch, learning rate and epochs, and its best cell with other seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Final, TypeAlias, TypedDict, Unpack

import numpy as np

from normlab.base.metric import NLL
from normlab.lab.config import Config, SeedConfig
from normlab.lab.runs.folder import RunFolder, find_run, read_scores
from normlab.lab.tasks.classification import Classification
from normlab.lab.training.devices import resolved_precision
from normlab.lab.training.jobs import Queue
from normlab.lab.training.weights import with_start
from normlab.papers.artefact import Measurement
from normlab.papers.bases import GLUE
from normlab.papers.bases import fine_tuning as of_pairs
from normlab.papers.estimate import Estimate, mean
from normlab.papers.lab import Lab, finished
from normlab.papers.studies.trained import trainings

BATCHES: Final = (16, 32)
LRS: Final = (1e-5, 2e-5, 5e-5, 1e-4)
EPOCHS: Final = (3, 4, 5, 6, 7, 8)
"""The paper's ranges; it does not say which rates between 1e-5 and 1e-4."""


class _Ranges(TypedDict, total=False):
    """What a search goes through, if not the paper's ranges."""

    batches: Sequence[int]
    lrs: Sequence[float]
    epochs: Sequence[int]


SEEDS: Final = 6
SEARCH_SEED: Final = 0
"""The seed of the search, which is not reported; reported seeds start at 1."""


@dataclass(frozen=True)
class FineTuned:
    """The best cell of a search, and the accuracy of its model on the test pairs over seeds."""

    chosen: Config
    runs: tuple[RunFolder, ...]
    majority: float
    """The accuracy of always giving the training pairs' commonest label, in percent."""

    @property
    def scores(self) -> tuple[float, ...]:
        return tuple(read_scores(folder.scores)["accuracy"] for folder in self.runs)

    @property
    def accuracy(self) -> Estimate:
        """The accuracy in percent, with its 95% interval over seeds."""
        return mean(self.scores)

    @property
    def beats_majority(self) -> bool:
        """Whether the whole interval is above the commonest label's accuracy."""
        return self.accuracy.low > self.majority


def fine_tuning(lab: Lab, *, tasks: Sequence[str], **ranges: Unpack[_Ranges]) -> Measurement:
    """Return the tables of the fine-tuned runs, as in ``trainings``: cells are named by the task in ``GLUE``
    and by the pre-trained run's cell, whose first seed is fine-tuned, as in ``fine_tuned``.
    """
    searches = {
        f"{task} {cell}": _prepare(source.path, of_pairs(GLUE[task], steps=100), lab.root, **ranges)
        for task in tasks
        for cell, (source, *_) in lab.runs.items()
    }
    lab.log(f"fine-tuning {', '.join(searches)}")
    models = _fine_tuned(searches, SEEDS, lab.queue(lab.root), lab.queue(lab.root))
    facts: dict[str, str] = {}
    for name, model in models.items():
        chosen = model.chosen
        batch = chosen.train.max_tokens // chosen.data.block_len
        facts[name] = (
            f"batch {batch}, lr {chosen.optim.lr:g}, {chosen.train.steps} steps; the commonest label is "
            f"{model.majority:.1f}% of the test pairs"
        )
    measured = trainings(replace(lab, runs={name: model.runs for name, model in models.items()}))
    return replace(measured, facts={**measured.facts, **facts})


def fine_tuned(
    pretrained: str | Path,
    base: Config,
    root: Path,
    *,
    seeds: int = SEEDS,
    queue: Callable[[Path], Queue] = Queue,
    **ranges: Unpack[_Ranges],
) -> FineTuned:
    """Fine-tune a pre-trained run in every cell of the search with a seed that is not reported, and in the
    cell that is best on dev with ``seeds`` others. Runs that are done are not done again.

    Xiong et al. 2020, Appendix A.3 (arXiv 2002.04745): batches of 16 and 32, rates 1e-5 to 1e-4, 3 to 8
    epochs, six seeds. The paper chooses and scores the cell on GLUE's dev pairs.
    """
    searched = _prepare(pretrained, base, root, **ranges)
    return _fine_tuned({"": searched}, seeds, queue(root), queue(root))[""]


_Search: TypeAlias = tuple[list[Config], float]
"""The cells of a search, and the accuracy of the commonest label, as in ``FineTuned``."""


def _prepare(pretrained: str | Path, base: Config, root: Path, **ranges: Unpack[_Ranges]) -> _Search:
    """Prepare the search for the fine-tuning of a run (see ``fine_tuned``); nothing is trained yet."""
    source = find_run(str(pretrained), root)
    given = source.config()
    recipe = "+".join(dict.fromkeys([*given.recipe.split("+"), *base.recipe.split("+")[1:]]))
    base = replace(base, recipe=recipe, model=given.model, machine=given.machine)
    base = with_start(replace(base, train=replace(base.train, init_from=str(source.path))), root)
    data, corpus = Classification.prepare(base.data, root / "data")
    base = resolved_precision(replace(base, data=data))
    commonest = int(np.bincount(corpus.train.labels).argmax())
    majority = 100 * float(np.mean(corpus.test.labels == commonest))
    return [*search(base, len(corpus.train), **ranges)], majority


def _fine_tuned(
    searches: Mapping[str, _Search], seeds: int, searching: Queue, reporting: Queue
) -> dict[str, FineTuned]:
    """Train the cells of all searches, then the best ones on dev with other seeds."""
    swept = finished({name: cells for name, (cells, _) in searches.items()}, searching)
    chosen = {name: max(folders, key=_merit).config() for name, folders in swept.items()}
    seeded = {
        name: [replace(config, seeds=SeedConfig.of(seed)) for seed in range(1, 1 + seeds)]
        for name, config in chosen.items()
    }
    runs = finished(seeded, reporting)
    return {name: FineTuned(chosen[name], runs[name], majority) for name, (_, majority) in searches.items()}


def search(base: Config, pairs: int, **ranges: Unpack[_Ranges]) -> Iterator[Config]:
    """Yield the search's configurations for this many training pairs; if the base has a warm-up, it takes a
    tenth of the steps.
    """
    batches, lrs = ranges.get("batches", BATCHES), ranges.get("lrs", LRS)
    for batch, lr, passes in product(batches, lrs, ranges.get("epochs", EPOCHS)):
        epoch = -(-pairs // batch)
        steps = passes * epoch
        warmup_steps = steps // 10 if base.optim.warmup_steps else 0
        train = replace(
            base.train, steps=steps, validate_every_steps=epoch, max_tokens=batch * base.data.block_len
        )
        optim = replace(base.optim, lr=lr, warmup_steps=warmup_steps)
        yield replace(base, optim=optim, train=train, seeds=SeedConfig.of(SEARCH_SEED))


def _merit(folder: RunFolder) -> tuple[float, float]:
    """Return the best dev accuracy of a run and, to break ties, its NLL."""
    dev = folder.status().best_dev
    return dev.get("accuracy", -1.0), NLL.sort_key(dev.get("nll"))
