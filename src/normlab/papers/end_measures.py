"""What the papers' figures show about trained models, measured on the weights that a finished run still has.

- ``gradients``: the gradients of the matrices of every layer (Xiong et al. 2020, Figure 3a and b, whose third
  curve is a Post-LN after its warm-up; Liu et al. 2020, Figures 5 and 11)
- ``dependency``: how much each sublayer's output depends on its own branch (Liu et al. 2020, Figures 7 and 8)
- ``updates``: how far each matrix moved since the weights before (Liu et al. 2020, Figures 5 and 11)

All are measured in float32 and without dropout on the same sentences of the dev text. The results are plain
data that fits into a line of JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, TypeAlias, cast

import numpy as np
from torch import Tensor

from normlab.base.roles import MATRIX_KINDS
from normlab.diagnosis.reading import read_structure
from normlab.diagnosis.studies.dependency import MAX_TOKENS, dependency, residual_dependency
from normlab.diagnosis.studies.gradients import parameter_gradients
from normlab.diagnosis.subject import Subject
from normlab.errors import UserError
from normlab.lab.data.batches import dev_batches
from normlab.lab.runs import RunFolder
from normlab.lab.setups import task_of
from normlab.lab.tasks.translation import Translation
from normlab.lab.training.checkpoint import load_checkpoint
from normlab.lab.training.weights import checkpoint_of, kept_steps
from normlab.papers.lab import READING_TOKENS, TaskInputs, subject_on

ByLayer: TypeAlias = dict[str, dict[str, Any]]
"""Stack to the kind of matrix, such as ``self_attention query``, to its values, first layer first."""
BATCHES: Final = 4
SENTENCES: Final = 64
"""Sentences of each mini-batch; mini-batch i begins at sentence ``SENTENCES * i`` of the dev text."""
DIGITS: Final = 4


def measure_run(folder: RunFolder, measures: Collection[str]) -> list[dict[str, Any]]:
    """Measure all weights that a run has kept of some steps, and its best weights on dev, in their order.

    Each entry has the ``step`` of its weights, whether they are the ``best``, and one more key per measure. A
    measure that a broken model does not allow is named under ``refused``, with the reason. Raises UserError
    for an unknown measure, and for a run that does not translate.
    """
    unknown = sorted(set(measures) - {*MEASURES, UPDATES})
    if unknown:
        raise UserError(
            f"there is no measure {', '.join(unknown)}; there are {', '.join(MEASURES)}, {UPDATES}"
        )
    best_step = folder.status().best_step
    steps = kept_steps(folder)
    weights: list[int | str] = [*steps]
    if best_step is not None and best_step not in steps:
        # the best weights come where their step is, since updates are differences of neighbours
        weights.insert(sum(step < best_step for step in steps), "best")
    entries: list[dict[str, Any]] = []
    before: Mapping[tuple[str, str, int], Tensor] = {}
    for name in weights:
        step = best_step if isinstance(name, str) else name
        subject = _subject(folder, name)
        entry = {"step": step, "best": step == best_step, **_measured(subject, measures)}
        if UPDATES in measures:
            now = {where: matrix.clone() for where, matrix in _matrices(subject)}
            if before:
                moved = {where: (now[where] - matrix).norm().item() for where, matrix in before.items()}
                entry[UPDATES] = _by_layer(moved)
            before = now
        entries.append(entry)
    return entries


def _measured(subject: Subject, measures: Collection[str]) -> dict[str, Any]:
    """What is measured on one set of weights: all but the updates, which need two."""
    entry: dict[str, Any] = {}
    for measure in measures:
        if measure == UPDATES:
            continue
        try:
            entry[measure] = MEASURES[measure](subject)
        except UserError as error:
            # a model that diverged still has its other measures and its scores
            entry.setdefault("refused", {})[measure] = str(error)
    return entry


def _subject(folder: RunFolder, weights: int | str) -> Subject:
    """Put a run's weights on the mini-batches of its dev text."""
    config = folder.config()
    task = task_of(config, folder.path.parent, config.train.max_tokens)
    if not isinstance(task, Translation):
        raise UserError(f"run {folder.path.name} is of the task {config.task}; only translation is measured")
    model = task.build()
    load_checkpoint(checkpoint_of(folder, weights), model, run=folder.id())
    batches = [_dev_batch(task, SENTENCES * i, SENTENCES) for i in range(BATCHES)]
    # a stack's structure is the same for every batch, and reading it keeps many tensors
    few = _dev_batch(task, 0, max(1, READING_TOKENS // SENTENCES))
    subject = subject_on(model, batches[0], read_structure(model, few))
    return replace(subject, batches=batches)


def _dev_batch(task: Translation, first: int, sentences: int) -> TaskInputs:
    """Return some sentences of the dev text as one batch; fewer if the text ends."""
    number = np.arange(len(task.corpus.dev))
    chosen = (first <= number) & (number < first + sentences)
    if not chosen.any():
        raise UserError(f"the dev text has {len(number)} sentences, too few for {BATCHES} mini-batches")
    longest = int(sum(lengths[chosen].max() + 1 for lengths in task.corpus.dev.lengths))
    (batch,) = dev_batches(task.corpus.dev.only(chosen), longest * sentences)
    batch = batch.to(task.device)
    return TaskInputs(task, batch, {"source": batch.source, "target_in": batch.target_in})


def gradients(subject: Subject) -> dict[str, ByLayer]:
    """The norm of each matrix's mean gradient over the mini-batches, and its mean norm in a mini-batch."""
    norms: dict[str, dict[tuple[str, str, int], float]] = {"mean_grad_l2": {}, "grad_l2": {}}
    for row in parameter_gradients(subject):
        is_matrix = row["kind"] in MATRIX_KINDS and "x" in str(row["shape"])
        if is_matrix and row["layer"] is not None:
            where = _where(str(row["stack"]), str(row["role"]), str(row["kind"]), cast("int", row["layer"]))
            for name, values in norms.items():
                values[where] = cast("float", row[name])
    return {name: _by_layer(values) for name, values in norms.items()}


def dependencies(subject: Subject) -> dict[str, dict[str, list[Any]]]:
    """Of each sublayer of a stack: its role, i β_ii², which is 1 if it leans evenly on all before it, and the
    sum of the shares of all branches.
    """
    table = residual_dependency(subject, dependency(subject, tokens=MAX_TOKENS))
    stacks: dict[str, dict[str, list[Any]]] = {}
    for row in table:
        stack = str(row["stack"]).partition(".")[0]
        columns = stacks.setdefault(stack, {"role": [], "i_beta_sq": [], "total": []})
        number = cast("int", row["index"]) + 1
        columns["role"].append(row["role"])
        columns["i_beta_sq"].append(_rounded(number * cast("float", row["beta_sq"])))
        columns["total"].append(_rounded(cast("float", row["total"])))
    return stacks


MEASURES: Final[Mapping[str, Callable[[Subject], Any]]] = {"gradients": gradients, "dependency": dependencies}
UPDATES: Final = "updates"
"""The measure that needs the weights before as well."""


def _matrices(subject: Subject) -> Iterator[tuple[tuple[str, str, int], Tensor]]:
    """Each matrix of a sublayer, with its place."""
    for path, parameter in subject.model.named_parameters():
        owner = subject.forward.owned[path]
        for part in subject.parts[path]:
            matrix = part.of(parameter.detach())
            if part.kind in MATRIX_KINDS and matrix.ndim == 2 and owner.layer is not None:
                yield _where(str(owner.stack), owner.role, part.kind, owner.layer), matrix


def _where(stack: str, role: str, kind: str, layer: int) -> tuple[str, str, int]:
    return stack.partition(".")[0], f"{role} {kind}", layer


def _by_layer(values: Mapping[tuple[str, str, int], float]) -> ByLayer:
    by_layer: ByLayer = {}
    for (stack, matrix, _), value in sorted(values.items(), key=lambda item: item[0][2]):
        by_layer.setdefault(stack, {}).setdefault(matrix, []).append(_rounded(value))
    return by_layer


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
