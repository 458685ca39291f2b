"""Models that runs have trained: the scales g of ScaleNorm (Nguyen and Salazar 2019), the loss on the
training text, and Theorem 2's constant (Liu et al. 2020).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import torch
from safetensors.numpy import load_file

from normlab.diagnosis.reading import read_structure
from normlab.diagnosis.subject import Subject
from normlab.errors import UserError
from normlab.lab.runs import RunFolder
from normlab.lab.setups import NamedSetup, setup_from_config, setup_from_run
from normlab.lab.training.fold import measure_fold
from normlab.papers.intervals import Array
from normlab.papers.lab import Row
from normlab.papers.measures import ROLES
from normlab.papers.studies.amplification import theorem_constant

OUTPUT: Final = "decoder.end.g"
"""The scale of the last norm, before the logits."""
FOLLOWED: Final = 64
"""Number of tokens whose dependency on the branches is followed."""
TRAINING_BATCHES: Final = 16
"""Number of micro-batches of the training text on which a trained model's loss is measured."""


@dataclass(frozen=True)
class TrainedModel:
    """A run's best weights on dev."""

    folder: RunFolder

    @cached_property
    def scales(self) -> dict[str, float]:
        """The scales g by parameter name. Raises UserError if no weights are kept."""
        path = self.folder.best / "model.safetensors"
        if not path.exists():
            raise UserError(
                f"the scales of run {self.folder.path.name} are asked for, and {self.folder.path} keeps no "
                "weights; remove the folder, and the same command trains it again"
            )
        return {name: float(tensor[0]) for name, tensor in load_file(path).items() if name.endswith(".g")}

    def by_layer(self, role: str) -> Array:
        """Return the scales of one kind of sublayer, first layer first."""
        stack, period, place = ROLES[role]
        names = (f"{stack}.sublayers.{i}.place.norm.g" for i in range(place, len(self.scales), period))
        return np.array([self.scales[name] for name in names if name in self.scales])

    def scale_growth(self, role: str) -> float:
        """Return the least-squares slope of ln g by layer, for one kind of sublayer."""
        g = self.by_layer(role)
        return float(np.polyfit(np.arange(len(g)), np.log(g), 1)[0])

    def scale_at(self, where: str) -> float:
        """Return g at the ``output``, or its mean over the sublayers in the ``late`` third of the decoder."""
        if where == "output":
            return self.scales[OUTPUT]
        names = [name for name in self.scales if name.startswith("decoder.sublayers.")]
        names.sort(key=lambda name: int(name.split(".")[2]))
        late = names[-(len(names) // 3) :]
        return float(np.mean([self.scales[name] for name in late]))

    def scale_rows(self, cell: str, seed: int) -> Iterator[Row]:
        """Yield the rows of a table of the scales."""
        for role in ROLES:
            for layer, g in enumerate(self.by_layer(role), 1):
                yield {"cell": cell, "seed": seed, "kind": role, "layer": layer, "g": float(g)}
        yield {"cell": cell, "seed": seed, "kind": "output", "layer": 1, "g": self.scales[OUTPUT]}

    def constant_ratio(self, seed: int) -> float:
        """Return C of Theorem 2 at these weights over C at initialisation."""
        config = self.folder.config()
        first = setup_from_config(config, self.folder.path.parent, tokens=config.train.max_tokens)
        return _constant(self._best(), seed) / _constant(first, seed)

    @torch.no_grad()
    def training_loss(self) -> float:
        """Return the label-smoothed loss in nats per token on the first micro-batches of training."""
        setup = self._best().setup
        task, model = setup.batches.task, setup.model.eval()
        batches = [task.batch(i) for i in range(TRAINING_BATCHES)]
        total = sum(float(task.loss(model, batch).loss) for batch in batches)
        return total / sum(int(batch.tokens) for batch in batches)

    def fold_difference(self) -> float:
        """Return the largest difference in a logit of the plain form in float32, over the largest logit."""
        fold = measure_fold(self.folder)
        return fold.float32 / fold.largest_logit

    def _best(self) -> NamedSetup:
        return setup_from_run(self.folder, "best", tokens=self.folder.config().train.max_tokens)


def _constant(source: NamedSetup, seed: int) -> float:
    model, batch, loss = source.setup.model, source.setup.batch, source.setup.loss_of
    structure = read_structure(model, source.mini_batches()[0], call=loss)
    subject = Subject(model, batch, loss, structure, call=loss)
    return theorem_constant(subject, tokens=FOLLOWED, seed=seed)
