"""Which studies a preset does, and how each is asked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

from torch.optim import Optimizer

from normlab.diagnosis.probing.passes import Pass, examine, real_of
from normlab.diagnosis.probing.step import Make
from normlab.diagnosis.reading.subject import Subject
from normlab.diagnosis.reading.tokens import Real
from normlab.diagnosis.studies.attention import attention
from normlab.diagnosis.studies.cropping import cropped
from normlab.diagnosis.studies.curvature import critical_lr, curvature
from normlab.diagnosis.studies.dependency import dependency, dependency_own
from normlab.diagnosis.studies.gradients import parameter_gradients, sublayer_gradients
from normlab.diagnosis.studies.jacobian import jacobian
from normlab.diagnosis.studies.output_change import MIN_DEPTHS, output_change_fit, output_changes
from normlab.diagnosis.studies.representation import norm_parameters, similarity
from normlab.diagnosis.studies.scales import scales
from normlab.diagnosis.studies.updates import updates
from normlab.diagnosis.table import Table
from normlab.errors import UserError

SEEDS: Final = 4
"""Random changes of the weights, for the interval of the exponent; dear where there are many weights."""
CLOSE: Final = 0.2
"""The rate that raises the loss is known within this share."""
JACOBIANS: Final = 1
"""Tokens at which every norm's Jacobian is taken, d rows each; it hardly differs between tokens."""
FOLLOWED: Final = 32
"""Tokens whose stream is taken apart; every branch is followed through every later norm."""
SMALL_TOKENS: Final = 256
"""Of a batch for studies that make many passes, look at few tokens or need second derivatives."""


@dataclass(frozen=True)
class Question:
    """What a study may use."""

    subject: Subject
    optimiser: Optimizer | Make
    batches: Sequence[Any] = ()
    """Mini-batches; none: those who want some split the subject's."""

    @cached_property
    def passed(self) -> Pass:
        """A pass forward and back."""
        return examine(self.subject)

    @cached_property
    def real(self) -> Real:
        """Which tokens are no padding."""
        return real_of(self.subject, self.passed)

    @cached_property
    def small(self) -> Subject:
        """On a mini-batch, or on some rows of the batch where the loss can be had of them."""
        if self.batches:
            return replace(self.subject, batch=self.batches[0])
        try:
            return cropped(self.subject, SMALL_TOKENS)[0]
        except UserError:
            return self.subject

    @cached_property
    def small_passed(self) -> Pass:
        """A pass of the small subject."""
        return self.passed if self.small is self.subject else examine(self.small)

    @cached_property
    def small_real(self) -> Real:
        """Which of its tokens are no padding."""
        return self.real if self.small is self.subject else real_of(self.small, self.small_passed)


Study = Callable[[Question], Iterable[Table]]


def _output_change(question: Question) -> Iterator[Table]:
    """Of every stack that is deep enough for a law: a random change a seed; of the last, whose output is the
    model's, one update, too. A few tokens are enough for a mean square.
    """
    deep = [s for s in question.subject.structure.stacks if len(s.sublayers) >= MIN_DEPTHS]
    if not deep:
        return
    changes = output_changes(
        question.small,
        deep,
        optimiser=question.optimiser,
        seeds=range(SEEDS),
        real=question.small_real,
        passed=question.small_passed,
    )
    yield changes
    fits = [(stack.name, output_change_fit(changes.where(stack=stack.name))) for stack in deep]
    yield Table("output_change_fit", tuple({"stack": n, **row} for n, table in fits for row in table))


def _dependency(question: Question) -> Iterator[Table]:
    seen, real = question.small_passed.seen, question.small_real
    table = dependency(question.small, tokens=FOLLOWED, real=real, seen=seen)
    yield table
    yield dependency_own(question.small, table)


STUDIES: Final[dict[str, Study]] = {
    "scales": lambda q: [scales(q.subject, real=q.real, seen=q.passed.seen)],
    "sublayer_gradients": lambda q: [sublayer_gradients(q.subject, real=q.real, passed=q.passed)],
    "attention": lambda q: [attention(q.subject, real=q.real)],
    "norm_parameters": lambda q: [norm_parameters(q.subject, seen=q.passed.seen)],
    "similarity": lambda q: [similarity(q.subject, real=q.real, seen=q.passed.seen)],
    "parameter_gradients": lambda q: [
        parameter_gradients(q.subject, batches=q.batches, first=q.small_passed if q.batches else None)
    ],
    "jacobian": lambda q: [jacobian(q.small, real=q.small_real, tokens=JACOBIANS)],
    "dependency": _dependency,
    "updates": lambda q: [updates(q.subject, q.optimiser, passed=q.passed)],
    "output_change": _output_change,
    "critical_lr": lambda q: [critical_lr(q.small, q.optimiser, tolerance=CLOSE, slope=q.small_passed.slope)],
    "curvature": lambda q: [curvature(q.small, q.optimiser)],
}
"""By name, in the order in which they are done. Tables of one name are put together."""

PRESETS: Final[dict[str, tuple[str, ...]]] = {
    "cheap": ("scales", "sublayer_gradients", "attention", "norm_parameters", "similarity"),
    "standard": tuple(name for name in STUDIES if name != "curvature"),
    "full": tuple(STUDIES),
}
"""Names of studies: cheap are a few passes, standard all without second derivatives, full is all."""
