"""Declare studies: each names, in its own file, its measurement, its rules and its charts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final, TypedDict

from torch.optim import Optimizer

from normlab.config.chart import StudyChart
from normlab.config.fields import Count
from normlab.diagnosis.probing.passes import BackwardPass, backward_pass, padding_masks_of
from normlab.diagnosis.probing.presets import PRESETS, require_preset
from normlab.diagnosis.reading.subject import PaddingMasks, Subject, cropped
from normlab.diagnosis.rules.finding import SEVERITIES, Finding, Rule, Tables
from normlab.diagnosis.table import Table
from normlab.errors import UserError, nearest
from normlab.trace.step import OptimizerFactory

SMALL_TOKENS: Final = 256
"""Size of the batch for studies that make many passes or need second derivatives."""
WHOLE_BATCH: Final = "the whole batch"
SMALL_BATCH: Final = f"the first mini-batch, or about {SMALL_TOKENS} tokens of the batch"
MINI_BATCHES: Final = "the mini-batches, or the batch in four parts"


class Plan(TypedDict, total=False):
    """The training to come, where it is more than an optimiser and its learning rate."""

    warmup_steps: Count
    """Steps over which the learning rate rises to its peak."""


@dataclass(frozen=True)
class StudyContext:
    """The model, its batch and its optimiser, with the passes that several studies share."""

    subject: Subject
    optimiser: Optimizer | OptimizerFactory
    batches: Sequence[Any] = ()
    """Mini-batches; without any, studies of several batches split the subject's."""
    plan: Plan = field(default_factory=Plan)
    """The training to come, as it is declared."""

    @property
    def warmup_steps(self) -> int:
        """The declared steps of warm-up; 0 for an optimiser in the middle of its training."""
        amid = isinstance(self.optimiser, Optimizer) and bool(self.optimiser.state)
        return 0 if amid else int(self.plan.get("warmup_steps") or 0)

    @cached_property
    def backward(self) -> BackwardPass:
        """A forward and backward pass on the whole batch."""
        return backward_pass(self.subject)

    @cached_property
    def padding_masks(self) -> PaddingMasks:
        """The padding masks of the whole batch."""
        return padding_masks_of(self.subject, self.backward)

    @cached_property
    def small(self) -> Subject:
        """The subject on a mini-batch, or on some rows of the batch if its loss can be taken on them."""
        if self.batches:
            return replace(self.subject, batch=self.batches[0])
        if not self.subject.structure.stacks:
            return self.subject
        try:
            return cropped(self.subject, SMALL_TOKENS)[0]
        except UserError:
            return self.subject

    @cached_property
    def _of_small(self) -> StudyContext:
        return self if self.small is self.subject else replace(self, subject=self.small)

    @property
    def small_backward(self) -> BackwardPass:
        """A forward and backward pass of the small subject."""
        return self._of_small.backward

    @property
    def small_padding_masks(self) -> PaddingMasks:
        """The padding masks of the small subject."""
        return self._of_small.padding_masks


@dataclass(frozen=True)
class Study:
    """A measurement of a model, with everything that a diagnosis needs to run, judge and draw it.

    Raises UserError for a preset that does not exist.
    """

    name: str
    measure: Callable[[StudyContext], Iterable[Table]]
    """Returns the tables. Tables of one name, from several studies, are joined."""
    preset: str
    """The smallest preset that includes it: ``cheap``: a few passes; ``standard``: no second derivatives."""
    rules: tuple[Rule, ...] = ()
    """Draw findings from the tables."""
    title: str = ""
    """Heading of its charts on the page; a study without charts needs none."""
    intro: str = ""
    """An explanation of the charts, with their source."""
    charts: tuple[StudyChart, ...] = ()
    batch: str = WHOLE_BATCH
    """The part of the batch that it is measured on, in words."""
    clean_if_empty: bool = False
    """Whether tables without a row say that all is well; else they say that the study does not apply."""
    order: int = 100
    """Its place among the studies: small numbers run, and stand on the page, first."""

    def __post_init__(self) -> None:
        require_preset(self.preset)

    def to_plain(self) -> dict[str, Any]:
        """Return the description that a page needs, for JSON."""
        words = {"name": self.name, "title": self.title, "intro": self.intro, "batch": self.batch}
        return words | {"charts": [chart.to_plain() for chart in self.charts]}


_STUDIES: Final[dict[str, Study]] = {}


def register(study: Study) -> Study:
    """Add a study to every diagnosis whose preset includes it. Raises UserError if its name is taken."""
    if _STUDIES.setdefault(study.name, study) is not study:
        raise UserError(f"the study name {study.name!r} is taken; give yours another")
    return study


def registered(preset: str = PRESETS[-1]) -> list[Study]:
    """Return the studies that a preset includes, in their order."""
    require_preset(preset)
    included = PRESETS[: PRESETS.index(preset) + 1]
    return sorted((s for s in _STUDIES.values() if s.preset in included), key=lambda s: (s.order, s.name))


def named(names: Iterable[str]) -> list[Study]:
    """Return the studies of these names, in their order. Raises UserError for a name that is none."""
    wanted = list(names)
    for name in wanted:
        if name not in _STUDIES:
            raise UserError(f"there is no study {name!r}{nearest(name, _STUDIES)}")
    return [study for study in registered() if study.name in wanted]


def find(tables: Mapping[str, Table], lr: float | None = None) -> tuple[Finding, ...]:
    """Apply the rules of all studies to these tables; the most severe findings come first."""
    known = Tables(tables, lr)
    found = [f for study in registered() for rule in study.rules for f in rule(known)]
    return tuple(sorted(found, key=lambda f: -SEVERITIES.index(f.severity)))
