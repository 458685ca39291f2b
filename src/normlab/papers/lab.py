"""The tools of every study of an artefact: text, initialised models, and tables of rows."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, Final, TypeAlias, TypedDict, TypeVar, Unpack, cast

import numpy as np
import torch
from torch import Tensor, nn

from normlab.base.model_config import derive
from normlab.base.units import count
from normlab.diagnosis.reading import read_structure
from normlab.diagnosis.structure import Structure
from normlab.diagnosis.subject import Subject
from normlab.errors import SpentError, UserError
from normlab.lab.config import Config, DataConfig, ModelConfig, SeedConfig, parallel_files, run_id
from normlab.lab.data.batches import Batch, dev_batches
from normlab.lab.data.draws import permutation
from normlab.lab.data.text import located
from normlab.lab.runs import RunFolder
from normlab.lab.setups import task_of
from normlab.lab.tasks.translation import Translation
from normlab.lab.training.jobs import Queue
from normlab.lab.training.trainer import AnyTask
from normlab.nn import PAD, Seq2Seq
from normlab.papers.bases import BASE, IWSLT14_PART, SMALL
from normlab.papers.trainings import LAPTOP, Scale

Row: TypeAlias = Mapping[str, Any]
K = TypeVar("K")


class TaskInputs(dict[str, Any]):
    """The keyword arguments of a model, with the task and the micro-batch that give its loss."""

    def __init__(self, task: AnyTask, batch: Any, arguments: Mapping[str, Any]) -> None:
        super().__init__(arguments)
        self.task, self.batch = task, batch


def mean_loss(model: nn.Module, inputs: TaskInputs) -> Tensor:
    """Return the task's loss on its micro-batch, as a mean over the tokens that it predicts."""
    return inputs.task.loss(model, inputs.batch).loss / inputs.batch.tokens


class Sizes(TypedDict):
    """The models that most studies look at, and their text."""

    text: str
    model: str
    """A name of ``SIZES``."""
    layers: int
    tokens: int
    seeds: int


SIZES: Final = {"small": SMALL.model, "base": BASE.model}
"""Transformer-small and Transformer-base of the papers, whose depth a study sets."""
TEXTS: Final = {
    "iwslt14.de-en": IWSLT14_PART,
    "wmt14.en-de": parallel_files(
        DataConfig(vocab_size=10_000),
        "wmt14.en-de",
        splits=("train.10k", "newstest2014.500", "newstest2014.500"),
        source="en",
        target="de",
    ),
}
"""Local data by the name of its folder, with as many vocabulary entries as about ten thousand pairs fill."""
READING_TOKENS: Final = 256
"""Number of positions in the batch on which the structure of a model is read."""


def quiet(line: str) -> None:
    """Report progress to nobody."""


@dataclass
class Lab:
    """The source of text and models for studies."""

    root: Path
    """The folder below which text is prepared."""
    log: Callable[[str], None] = quiet
    runs: Mapping[str, Sequence[RunFolder]] = field(default_factory=dict)
    """The artefact's finished trainings, by cell, in the order of their seeds."""
    scale: Scale = LAPTOP
    """The scale of these trainings."""
    queue: Callable[[Path], Queue] = Queue
    """Makes the queue in which a study trains its own runs below a folder."""
    _tasks: dict[tuple[str, int], Translation] = field(default_factory=dict)

    def model(self, config: ModelConfig, text: str, *, seed: int, tokens: int) -> Seq2Seq:
        """Build a model as ``seed`` initialises it; data-dependent parts read the first batch of the text."""
        self.log(f"{config.decoder_placement} {config.encoder_layers}-{config.decoder_layers}, seed {seed}")
        task = self._task(text, tokens)
        of_seed = replace(task.config, model=config, seeds=SeedConfig(init=seed))
        return Translation(of_seed, task.corpus, task.device).build()

    def subject(self, config: ModelConfig, text: str, *, seed: int, tokens: int) -> Subject:
        """Return ``model`` on the first batch of ``tokens`` padded positions, with its residual stream read.

        Seeds draw the weights; batches are the same for all seeds.
        """
        model = self.model(config, text, seed=seed, tokens=tokens)
        structure = read_structure(model, self.batches(text, READING_TOKENS, 1)[0])
        return subject_on(model, self.batches(text, tokens, 1)[0], structure)

    def subjects(
        self, placements: Iterable[str], **sizes: Unpack[Sizes]
    ) -> Iterator[tuple[str, int, Subject]]:
        """Yield the ``subject`` of every seed under every placement."""
        for placement, seed in product(placements, range(sizes["seeds"])):
            config = size(sizes["model"], placement, sizes["layers"])
            yield placement, seed, self.subject(config, sizes["text"], seed=seed, tokens=sizes["tokens"])

    def batches(self, text: str, tokens: int, count: int) -> list[TaskInputs]:
        """Return the first ``count`` batches of a text."""
        task = self._task(text, tokens)
        return [_inputs(task, task.batch(i)) for i in range(count)]

    def random_batches(self, text: str, tokens: int, count: int) -> list[TaskInputs]:
        """Draw ``count`` batches of at most ``tokens`` padded positions from sentences of any length.

        No sentence is in two of them.
        """
        task = self._task(text, tokens)
        pairs = task.corpus.train
        source, target = (lengths + 1 for lengths in pairs.lengths)
        order = permutation(len(pairs), derive(0, "random_batches"))
        drawn: list[TaskInputs] = []
        while len(drawn) < count:
            # the positions of a batch of the first k sentences: k times the widest pair among them
            widest = np.maximum.accumulate(source[order]) + np.maximum.accumulate(target[order])
            positions = widest * np.arange(1, len(order) + 1)
            sentences = int(np.searchsorted(positions, tokens, side="right"))
            if not sentences:
                raise UserError(f"{text} has no sentences left for {count} batches of {tokens} positions")
            chosen = np.isin(np.arange(len(pairs)), order[:sentences])
            (batch,) = dev_batches(pairs.only(chosen), tokens)
            drawn.append(_inputs(task, batch))
            order = order[sentences:]
        return drawn

    def facts(self, **sizes: Unpack[Sizes]) -> dict[str, str]:
        """Return what a study was measured on."""
        batch = "{tokens:,} positions, {seeds} seeds".format(**sizes)
        return {"text": self.text(sizes["text"]), "batch": batch}

    def missing(self) -> str:
        """The name of a text that a study asked for and that was not there; empty if all were."""
        return next((name for name, _ in self._tasks if not _is_there(name)), "")

    def text(self, name: str) -> str:
        """Describe a text: its training part and vocabulary, or the corpus that stands in for it."""
        if not _is_there(name):
            return f"the built-in corpus, because {name} is not there; set NORMLAB_DATA to its folder"
        data = TEXTS[name]
        train = Path(data.train_src).stem
        return f"{name}, {train}; a joint BPE of {data.vocab_size:,} vocabulary entries learnt on it"

    def _task(self, text: str, tokens: int) -> Translation:
        if (text, tokens) not in self._tasks:
            config = Config(data=TEXTS[text] if _is_there(text) else DataConfig())
            self._tasks[text, tokens] = cast("Translation", task_of(config, self.root, tokens))
        return self._tasks[text, tokens]


def _inputs(task: Translation, batch: Batch) -> TaskInputs:
    return TaskInputs(task, batch, {"source": batch.source, "target_in": batch.target_in})


def _is_there(text: str) -> bool:
    return bool(os.environ.get("NORMLAB_DATA")) and located(TEXTS[text].train_src).exists()


def finished(wanted: Mapping[K, Sequence[Config]], queue: Queue) -> dict[K, tuple[RunFolder, ...]]:
    """Train what is not done yet in the queue's folder; return each name's run folders.

    Raises UserError for a run that fails, and SpentError if the queue's time is over before all are done.
    """
    configs = {run_id(config): config for group in wanted.values() for config in group}
    folders = {run: RunFolder(queue.root / run) for run in configs}
    for run, config in configs.items():
        if folders[run].status().state != "done":
            queue.add(config)
    queue.run()
    for run, reason in queue.failed.items():
        raise UserError(f"run {run} could not be trained: {reason}")
    left = sum(folder.status().state != "done" for folder in folders.values())
    if left:
        raise SpentError(f"the budget is spent; {left} of {count(len(folders), 'run')} left")
    return {name: tuple(folders[run_id(config)] for config in group) for name, group in wanted.items()}


def size(name: str, placement: str, layers: int, decoder: int | None = None) -> ModelConfig:
    """Return a model of ``layers`` + ``decoder`` layers, by default as many in both, under one placement, or
    under those of the encoder and of the decoder, such as ``post/pre``.
    """
    encoder, _, other = placement.partition("/")
    parts = {"encoder_placement": encoder, "decoder_placement": other or encoder}
    depth = layers if decoder is None else decoder
    return replace(SIZES[name], encoder_layers=layers, decoder_layers=depth, **parts)


def subject_on(model: nn.Module, batch: TaskInputs, structure: Structure) -> Subject:
    """Put a model on a batch; the encoder's mask is the source's, the decoder's the target's."""
    encoder, decoder = structure.stacks
    masks = {encoder.name: batch["source"] != PAD, decoder.name: batch["target_in"] != PAD}
    return Subject(model, batch, mean_loss, structure, masks)


def apart(rows: Iterable[Row], *columns: str) -> dict[str, list[Row]]:
    """Split rows into tables named by the values of some columns, such as ``encoder_W1``."""
    tables: dict[str, list[Row]] = {}
    for row in rows:
        tables.setdefault("_".join(str(row[column]) for column in columns), []).append(row)
    return tables


def having(rows: Iterable[Row], **equal: Any) -> list[Row]:
    """Return the rows that have these values."""
    return [row for row in rows if all(row[column] == value for column, value in equal.items())]


def curves(
    rows: Iterable[Row], y: str, x: str, values: Sequence[float], seeds: int, **equal: Any
) -> list[list[float]]:
    """Return for each seed the column ``y`` at each of ``values`` of ``x``, among the rows with ``equal``."""
    points = {(row[x], row["seed"]): float(row[y]) for row in having(rows, **equal)}
    return [[points[value, seed] for value in values] for seed in range(seeds)]


def generator(*, seed: int) -> torch.Generator:
    """Return a seeded generator for a study's random numbers."""
    return torch.Generator().manual_seed(seed)
