"""Measure how much the output of each sublayer depends on each branch, including its own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Final

import torch
from torch import Tensor, nn
from torch.func import functional_call

from normlab.base.chart import HeatMap
from normlab.diagnosis.structure import StackView, SublayerView
from normlab.diagnosis.study import LIU, SMALL_BATCH, Finding, Study
from normlab.diagnosis.subject import Subject
from normlab.diagnosis.sums import Factor
from normlab.diagnosis.tables import Row, Table, Tables, Value, floats, mean
from normlab.diagnosis.wording import format_number, format_share
from normlab.errors import UserError
from normlab.trace.tensors import Tap

ASKED: Final = 32
"""Number of tokens in a diagnosis; every branch is followed through every later norm."""
LEANING: Final = 1.5
"""Multiple of the harmonic number beyond which dependencies fall more slowly than equal branches' 1/i."""
SHALLOW: Final = 12
"""Sublayers of a 6-layer encoder, which every placement trains with warm-up: up to here, only a note."""

MAX_TOKENS = 256
INPUT: Final = -1
"""The number of the stack's input among the branches."""
_REST: Final = -2
"""The number of what comes from neither the input nor a branch, r."""


def dependency(subject: Subject, *, tokens: int = 64) -> Table:
    r"""Measure :math:`\beta_{ij}^2 = \mathbb{E}_t[\mathrm{Var}[D_{ij}] / \mathrm{Var}[x_i]]` with the stream
    after sublayer i, :math:`x_i = \sum_{j \le i} D_{ij} + r_i`, split into what the input (j = -1) and every
    branch brought into it.

    A norm passes each part on with the denominators of the whole stream on this batch, which is a linear
    map: :math:`D \mapsto \gamma \odot (D - \bar D) / \sigma(x)` for LayerNorm. Variances are over channels,
    the mean over ``tokens`` evenly spaced tokens without padding. :math:`r_i` holds what no branch brings,
    such as the norms' own biases. The shares of the parts add up to 1 if they are uncorrelated; what is
    missing from 1, or beyond it, is their cross terms and r. Branches that run side by side enter the stream
    together. Columns: stack, of (i), on (j), beta_sq.

    Liu et al. 2020, Section 4.1 and Figures 7 and 8 (arXiv 2004.08249). Raises UserError for more than 256
    tokens, and for a stack whose sums are not seen.
    """
    if not 1 <= tokens <= MAX_TOKENS:
        raise UserError(f"{tokens} tokens; dependency takes 1 to {MAX_TOKENS}, spread over the batch")
    modules, rows = dict(subject.model.named_modules()), list[Row]()
    with torch.no_grad():
        for stack in subject.structure.stacks:
            rows += _follow(stack, _Sample(subject, stack, tokens), modules)
    return Table("dependency", tuple(rows))


def residual_dependency(subject: Subject, dependencies: Table) -> Table:
    r"""Return :math:`\beta_{ii}^2` and :math:`\sum_j \beta_{ij}^2` of each sublayer in a table of
    ``dependency``, of some stacks or of all.

    Columns: stack, index, role, beta_sq, total. The first share is 1/i in a Pre-LN whose branches all have
    the same variance, and constant in a Post-LN; by Theorem 2, the output change is proportional to its sum
    over i. Liu et al. 2020, Section 4.2 (arXiv 2004.08249).
    """
    total: dict[tuple[Value, Value], float] = defaultdict(float)
    on_itself: dict[tuple[Value, Value], float] = {}
    for row in dependencies:
        sublayer, share = (row["stack"], row["of"]), row["beta_sq"]
        total[sublayer] += share
        if row["of"] == row["on"]:
            on_itself[sublayer] = share
    rows = list[Row]()
    for stack, view in subject.structure.sublayers:
        sublayer = stack, view.index
        if sublayer in total:
            shares = {"beta_sq": on_itself[sublayer], "total": total[sublayer]}
            rows.append({"stack": stack, "index": view.index, "role": view.role, **shares})
    return Table("residual_dependency", tuple(rows))


class FrozenNorm:
    r"""The linear map :math:`L_x` that a norm N becomes when its denominators are fixed at x `[T, D]`:
    :math:`N(x) = L_x x + N(0)`.

    For an RMSNorm, :math:`N(x) = \gamma \odot x / \mathrm{rms}(x)`: the offset :math:`N(0)` is 0, and
    :math:`L_x D = s \odot D` with the slope :math:`s = \gamma / \mathrm{rms}(x)`. For a LayerNorm,
    :math:`N(x) = \gamma \odot (x - \bar x) / \sigma(x) + b`: the offset is b, and :math:`L_x D = s \odot (D -
    \bar D)` with :math:`s = \gamma / \sigma(x)`. Offset, slope, and whether the mean is removed are found by
    calling the norm, since it may be anybody's.

    It is not the norm's Jacobian, under which the parts of x itself add up to nothing, since a norm ignores
    the length of x.
    """

    def __init__(self, norm: nn.Module, x: Tensor) -> None:
        wide = x.double()
        rms = wide.square().mean(-1, keepdim=True).sqrt()
        # at 0 its bias alone is left; a norm without an eps divides 0 by 0 there
        offset = _apply(norm, torch.zeros_like(wide)).nan_to_num()
        normed = _apply(norm, wide) - offset
        # one that removes the mean puts out the same if every channel is as much larger
        shifted = _apply(norm, wide + rms) - offset
        self.centres = bool((shifted - normed).norm() <= 1e-3 * normed.norm())
        """Whether the norm ignores the mean of a token."""
        # the slope is what the norm puts out over what it scales. Where that is nearly 0, the quotient would
        # be rounding noise, so these elements are moved by a millionth of the rms: as small as they are, they
        # change the denominator, the root of a sum of squares, by 1e-12 of its value
        is_small = self._centred(wide).abs() <= 1e-6 * rms
        away_from_zero = torch.where(is_small, wide + 1e-6 * rms + torch.finfo(x.dtype).tiny, wide)
        slope = (_apply(norm, away_from_zero) - offset) / self._centred(away_from_zero)
        self.slope = slope.nan_to_num().to(x.dtype)
        self.offset = offset.to(x.dtype)

    def _centred(self, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True) if self.centres else x

    def __call__(self, x: Tensor) -> Tensor:
        """Map parts `[..., T, D]` of the norm's input to parts of its output."""
        if self.centres:
            return self._centred(x).mul_(self.slope)  # in place, since it is a new tensor
        return x * self.slope


def _apply(norm: nn.Module, x: Tensor) -> Tensor:
    """Apply the norm in float64, on copies of its parameters."""
    wide = {name: p.double() for name, p in norm.named_parameters()}
    return functional_call(norm, wide, (x[None],))[0]


class _Parts:
    """The parts of the stream `[T, D]` so far: r, the input, and each branch that was added.

    They are kept in one tensor `[branches + 2, T, D]`, in the order of their numbers: r has the number -2,
    the input -1, and branches count from 0. The methods write into it, so that a deep stack needs no copies.
    """

    def __init__(self, stream: Tensor, branches: int) -> None:
        self._all = stream.new_zeros(_position(branches), *stream.shape)
        self._all[_position(INPUT)] = stream
        self._known = _position(INPUT) + 1
        """How many parts there are so far; later ones are still 0."""

    @property
    def _so_far(self) -> Tensor:
        """A view: what is written into it is written into the parts."""
        return self._all[: self._known]

    def sum(self) -> Tensor:
        return self._so_far.sum(0)

    def copy(self) -> Tensor:
        return self._so_far.clone()

    def scale_by(self, factor: Factor) -> None:
        """Scale every part, as a shortcut does, by one number or one per channel."""
        self._so_far.mul_(self._tensor(factor))

    def add_branch(self, number: int, y: Tensor, scale: Factor) -> None:
        """Add the scaled output of a branch, which is the part of this number."""
        self._all[_position(number)] = self._tensor(scale) * y
        self._known = _position(number) + 1

    def add_older(self, parts: Tensor) -> None:
        """Add the parts of an earlier state `[P, T, D]`, each to that of the same number."""
        self._all[: len(parts)] += parts

    def pass_through(self, norm: FrozenNorm) -> None:
        self._so_far.copy_(norm(self._so_far))
        self._all[_position(_REST)] += norm.offset

    def shares(self) -> list[float]:
        """Return the shares of the input and of each branch in the variance of the stream."""
        variance = self.sum().var(-1, correction=0).clamp(min=torch.finfo(self._all.dtype).tiny)
        variances = self._so_far[_position(INPUT) :].var(-1, correction=0)
        return (variances / variance).mean(-1).tolist()

    def _tensor(self, factor: Factor) -> Tensor:
        return torch.as_tensor(factor, dtype=self._all.dtype, device=self._all.device)


def _position(number: int) -> int:
    """Return where the part of this number is kept."""
    return number - _REST


class _Sample:
    """The same tokens `[T, D]` of every tensor of a stack, at least in float32."""

    def __init__(self, subject: Subject, stack: StackView, tokens: int) -> None:
        self.stack, self.rows = stack, dict[Tap, Tensor]()
        seen = subject.forward.tensors
        self._tolerance = 1e-3 + 16 * torch.finfo(seen[stack.sublayers[0].before].dtype).eps
        for tap in dict.fromkeys(tap for view in stack.sublayers for tap in view.taps):
            x = subject.tokens(stack.name, seen[tap])
            spaced = torch.linspace(0, len(x) - 1, min(tokens, len(x)))
            self.rows[tap] = x[spaced.long().to(x.device)]

    def check(self, total: Tensor, tap: Tap, view: SublayerView, claim: str) -> None:
        """Raise UserError unless the parts add up to the tensor that was seen, within its rounding so far."""
        expected = self.rows[tap]
        if (total - expected).norm() > self._tolerance * expected.norm():
            raise UserError(
                f"dependency cannot follow {self.stack.name}: sublayer {view.index} ({view.relation}) {claim}"
                "; make the sums and norms modules of their own, or give float32 weights"
            )


def _follow(stack: StackView, seen: _Sample, modules: Mapping[str, nn.Module]) -> Iterator[Row]:
    """Yield the rows of a stack while its parts go through its sums and norms."""
    views = stack.sublayers
    parts = _Parts(seen.rows[views[0].before], len(views))
    older = _OlderStates(views, seen.rows)
    older.keep(views[0].before, parts)
    for _, together in groupby(views, key=lambda view: (view.before, view.total)):  # branches side by side
        group = list(together)
        first = group[0]
        seen.check(parts.sum(), first.before, first, "does not begin where the one before ended")
        _add(parts, group, seen.rows, older)
        seen.check(parts.sum(), first.total, first, "is not the sum of its stream and its branch")
        if first.norm_write is not None:
            parts.pass_through(FrozenNorm(modules[first.norm_write], seen.rows[first.total]))
        seen.check(parts.sum(), first.after, first, "does not end with that sum or its norm")
        older.keep(first.after, parts)
        shares = parts.shares()
        for view in group:
            for on, share in enumerate(shares, start=INPUT):
                yield {"stack": stack.name, "of": view.index, "on": on, "beta_sq": share}


class _OlderStates:
    """The states of a stream that a later sublayer adds again, each with its parts.

    States are told apart by their values, since one state has several taps.
    """

    def __init__(self, views: Sequence[SublayerView], rows: Mapping[Tap, Tensor]) -> None:
        branches = {view.branch for view in views}
        self._rows = rows
        self._needed = [rows[tap] for view in views for tap in view.beside if tap not in branches]
        self._kept: list[tuple[Tensor, Tensor]] = []

    def keep(self, tap: Tap, parts: _Parts) -> None:
        """Keep the state at a tap, if it is added again."""
        if any(torch.equal(self._rows[tap], needed) for needed in self._needed):
            self._kept.append((self._rows[tap], parts.copy()))

    def parts_of(self, tap: Tap) -> Tensor:
        """Return the parts `[P, T, D]` of the state at a tap, in the order of their numbers; a tensor of
        unknown origin is all r, the first of them.
        """
        for state, parts in self._kept:
            if torch.equal(state, self._rows[tap]):
                return parts
        return self._rows[tap][None]


def _add(
    parts: _Parts, group: Sequence[SublayerView], rows: Mapping[Tap, Tensor], older: _OlderStates
) -> None:
    """Add the branches of a group, and the older states beside them, to the stream."""
    parts.scale_by(group[0].shortcut)
    for view in group:
        parts.add_branch(view.index, rows[view.branch], view.scale)
    in_group = [view.branch for view in group]
    for tap in group[0].beside:
        if tap not in in_group:
            parts.add_older(older.parts_of(tap))


def _dependency_on_branches(tables: Tables) -> Iterator[Finding]:
    for stack, table in tables.stacks("residual_dependency"):
        shares = floats(table, "beta_sq")
        if len(shares) < 2:
            continue
        amplification, expected = sum(shares), _harmonic(len(shares))
        strong = amplification > LEANING * expected
        late = mean(shares[len(shares) // 2 :])
        sentence = (
            f"the residual branch contributes {format_share(mean(shares))} of the variance of a sublayer's "
            f"output in {stack}, {format_share(late)} in the upper half; over {len(shares)} sublayers the "
            f"dependency adds up to {format_number(amplification)}, where 1/i gives {format_number(expected)}"
        )
        if strong:
            sentence += "; in theory a change of weights is then amplified like N, not log N"
        yield Finding(
            "residual_dependency",
            "warning" if strong and len(shares) > SHALLOW else "note",
            sentence,
            "residual_dependency",
            {"mean_beta_sq": mean(shares), "sum_beta_sq": amplification, "sum_1_over_i": expected},
            LIU.format("Section 4.1 and Theorem 2"),
        )


def _harmonic(n: int) -> float:
    return sum(1 / i for i in range(1, n + 1))


def depends_strongly(tables: Tables, stack: Value) -> bool:
    """Return whether the sublayers of a stack depend on their residual branches, or it was not measured."""
    shares = floats(tables.table("residual_dependency").where(stack=stack), "beta_sq")
    return not shares or sum(shares) > LEANING * _harmonic(len(shares))


def _measure(subject: Subject) -> Iterator[Table]:
    table = dependency(subject.small, tokens=ASKED)
    yield table
    yield residual_dependency(subject, table)


DEPENDENCY: Final = Study(
    "dependency",
    _measure,
    "standard",
    rules=(_dependency_on_branches,),
    title="Dependency",
    intro="How much of the variance of each sublayer's output comes from which branch (Liu et al. 2020, "
    "Section 4.1, Figures 7 and 8). A dark diagonal means that sublayers depend on their own residual "
    "branches, even rows that they depend on all branches before.",
    charts=(
        HeatMap(
            "dependency",
            "Dependency on branches",
            "on",
            "of",
            "beta_sq",
            "branch (left column: the input)",
            "output of sublayer",
            caption="Light: no dependency. Dark: all of the variance.",
        ),
    ),
    batch=SMALL_BATCH,
    order=20,
)
