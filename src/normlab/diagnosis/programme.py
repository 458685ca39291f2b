"""Which studies a preset does, and how each is asked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

from torch.optim import Optimizer

from normlab.diagnosis.step import Make
from normlab.diagnosis.studies.attention import attention
from normlab.diagnosis.studies.cropping import cropped
from normlab.diagnosis.studies.curvature import critical_lr, curvature
from normlab.diagnosis.studies.dependency import dependency, dependency_own
from normlab.diagnosis.studies.gradients import parameter_gradients, sublayer_gradients
from normlab.diagnosis.studies.jacobian import jacobian
from normlab.diagnosis.studies.output_change import MIN_DEPTHS, output_change, output_change_fit
from normlab.diagnosis.studies.representation import norm_parameters, similarity
from normlab.diagnosis.studies.scales import scales
from normlab.diagnosis.studies.updates import updates
from normlab.diagnosis.subject import Subject
from normlab.diagnosis.table import Row, Table
from normlab.diagnosis.tokens import Real, real_tokens

SEEDS: Final = 2
"""Random changes of the weights, for the interval of the exponent; dear where there are many weights."""
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
    def real(self) -> Real:
        """Which tokens are no padding."""
        return real_tokens(self.subject)

    @cached_property
    def small(self) -> Subject:
        """On a mini-batch, or on some rows of the batch where the loss can be had of them."""
        if self.batches:
            return replace(self.subject, batch=self.batches[0])
        try:
            return cropped(self.subject, SMALL_TOKENS)[0]
        except ValueError:
            return self.subject

    @cached_property
    def small_real(self) -> Real:
        """The same of the small subject."""
        return real_tokens(self.small)


Study = Callable[[Question], Iterable[Table]]


def _output_change(question: Question) -> Iterator[Table]:
    """Of every stack that is deep enough for a law: a random change a seed; of the last, whose output is the
    model's, one update, too. A few tokens are enough for a mean square.
    """
    changes, fits = list[Row](), list[Row]()
    deep = [s for s in question.subject.structure.stacks if len(s.sublayers) >= MIN_DEPTHS]
    for stack in deep:
        tables = [
            output_change(
                question.small,
                optimiser=question.optimiser if stack is deep[-1] and not seed else None,
                seed=seed,
                stack=stack.name,
                real=question.small_real,
            )
            for seed in range(SEEDS)
        ]
        own = Table("output_change", tuple(row for table in tables for row in table))
        changes.extend({"stack": stack.name, **row} for row in own)
        fits.extend({"stack": stack.name, **row} for row in output_change_fit(own))
    yield Table("output_change", tuple(changes))
    yield Table("output_change_fit", tuple(fits))


def _dependency(question: Question) -> Iterator[Table]:
    table = dependency(question.small, tokens=FOLLOWED)
    yield table
    yield dependency_own(question.small, table)


STUDIES: Final[dict[str, Study]] = {
    "scales": lambda q: [scales(q.subject, real=q.real)],
    "sublayer_gradients": lambda q: [sublayer_gradients(q.subject, real=q.real)],
    "attention": lambda q: [attention(q.subject, real=q.real)],
    "norm_parameters": lambda q: [norm_parameters(q.small)],
    "similarity": lambda q: [similarity(q.subject, real=q.real)],
    "parameter_gradients": lambda q: [parameter_gradients(q.subject, batches=q.batches)],
    "jacobian": lambda q: [jacobian(q.small, real=q.small_real, tokens=JACOBIANS)],
    "dependency": _dependency,
    "updates": lambda q: [updates(q.subject, q.optimiser)],
    "output_change": _output_change,
    "critical_lr": lambda q: [critical_lr(q.small, q.optimiser)],
    "curvature": lambda q: [curvature(q.small, q.optimiser)],
}
"""By name, in the order in which they are done. Tables of one name are put together."""

PRESETS: Final[dict[str, tuple[str, ...]]] = {
    "cheap": ("scales", "sublayer_gradients", "attention", "norm_parameters", "similarity"),
    "standard": tuple(name for name in STUDIES if name != "curvature"),
    "full": tuple(STUDIES),
}
"""Names of studies: cheap are a few passes, standard all without second derivatives, full is all."""
