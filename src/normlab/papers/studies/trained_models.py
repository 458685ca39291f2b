"""Models that runs have trained: the scales g of ScaleNorm (Nguyen and Salazar 2019), the loss on the text of
the training, and Theorem 2's constant (Liu et al. 2020).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final, TypeAlias

import numpy as np
import torch
from safetensors.numpy import load_file

from normlab.diagnosis.structure import read_structure
from normlab.diagnosis.subject import Subject
from normlab.errors import UserError
from normlab.papers.intervals import Array
from normlab.papers.lab import Row
from normlab.papers.studies.amplification import theorem_constant
from normlab.runs import RunFolder
from normlab.training.fold import measure_fold
from normlab.training.subjects import Case, mean_loss, of_config, of_run

ROLES: Final = {
    "encoder attention": ("encoder", 2, 0),
    "encoder feed-forward": ("encoder", 2, 1),
    "decoder attention": ("decoder", 3, 0),
    "decoder-encoder attention": ("decoder", 3, 1),
    "decoder feed-forward": ("decoder", 3, 2),
}
"""Each kind of sublayer: its stack, the sublayers of a layer there, and its place among them."""
OUTPUT: Final = "decoder.end.g"
"""The scale of the last norm, before the logits."""
Scales: TypeAlias = Mapping[str, float]


def scale_growth(folder: RunFolder, role: str) -> float:
    """The slope of ln g by layer, for one kind of sublayer, by least squares."""
    g = by_layer(scales_of(folder), role)
    return float(np.polyfit(np.arange(len(g)), np.log(g), 1)[0])


def scales_of(folder: RunFolder) -> Scales:
    """The scales of a run's best weights by parameter name. Raises UserError where no weights are kept."""
    path = folder.best / "model.safetensors"
    if not path.exists():
        raise UserError(
            f"the scales of run {folder.path.name} are asked for, and {folder.path} keeps no weights; remove "
            "the folder, and the same command trains it again"
        )
    return {name: float(tensor[0]) for name, tensor in load_file(path).items() if name.endswith(".g")}


def by_layer(scales: Scales, role: str) -> Array:
    """The scales of one kind of sublayer, first layer first."""
    stack, period, place = ROLES[role]
    names = (f"{stack}.sublayers.{i}.place.norm.g" for i in range(place, len(scales), period))
    return np.array([scales[name] for name in names if name in scales])


def scale_at(folder: RunFolder, where: str) -> float:
    """g at the ``output``, or its mean over the sublayers in the ``late`` third of the decoder."""
    scales = scales_of(folder)
    if where == "output":
        return scales[OUTPUT]
    decoder = [scales[name] for name in sorted(scales, key=_depth) if name.startswith("decoder.sublayers.")]
    return float(np.mean(decoder[-(len(decoder) // 3) :]))


def _depth(name: str) -> int:
    """The index of the sublayer that a parameter belongs to; -1 where it belongs to none."""
    return next((int(part) for part in name.split(".") if part.isdecimal()), -1)


def scale_rows(runs: Iterable[tuple[str, int, RunFolder]]) -> Iterator[Row]:
    """The table of the scales that every run has learned, each given with its cell and seed."""
    for cell, seed, folder in runs:
        scales = scales_of(folder)
        for role in ROLES:
            for layer, g in enumerate(by_layer(scales, role), 1):
                yield {"cell": cell, "seed": seed, "kind": role, "layer": layer, "g": float(g)}
        yield {"cell": cell, "seed": seed, "kind": "output", "layer": 1, "g": scales[OUTPUT]}


FOLLOWED: Final = 64
"""Tokens whose dependency on the branches is followed."""
TRAINING_BATCHES: Final = 16
"""Micro-batches of the training text on which a trained model's loss is measured."""


def constant_ratio(folder: RunFolder, seed: int) -> float:
    """C of Theorem 2 at the best weights on dev over C at initialisation."""
    config = folder.config()
    first = of_config(config, folder.path.parent, tokens=config.train.max_tokens)
    last = of_run(folder, "best", tokens=config.train.max_tokens)
    return _constant(last, seed) / _constant(first, seed)


def _constant(case: Case, seed: int) -> float:
    structure = read_structure(case.model, case.batches[0])
    subject = Subject(case.model, case.batch, mean_loss, structure)
    return theorem_constant(subject, tokens=FOLLOWED, seed=seed)


@torch.no_grad()
def training_loss(folder: RunFolder) -> float:
    """The label-smoothed loss in nats per token on the first micro-batches of training."""
    case = of_run(folder, "best", tokens=folder.config().train.max_tokens)
    task, model = case.batch.task, case.model.eval()
    batches = [task.batch(i) for i in range(TRAINING_BATCHES)]
    total = sum(float(task.loss(model, batch).loss) for batch in batches)
    return total / sum(int(batch.tokens) for batch in batches)


def fold_difference(folder: RunFolder) -> float:
    """The largest difference of a logit of a run's plain form in float32, over the largest logit."""
    fold = measure_fold(folder)
    return fold.float32 / fold.largest_logit
