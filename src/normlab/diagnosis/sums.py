"""Find which of the tensors that were recorded is the sum of which others, and with which factors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations
from typing import NamedTuple

import torch
from torch import Tensor

Factor = float | tuple[float, ...]
"""One number, or one for each channel."""

FEWEST_ROWS = 8
"""With fewer rows, a factor for each channel would fit tensors that have nothing to do with each other."""
SMALL_ERROR = 0.02
"""An error must be this small beside every part of a sum: within the rounding of large parts, any tensor
would do for a small one.
"""


class Sum(NamedTuple):
    r""":math:`t = a \odot s + c \odot y_1 + y_2` for a stream s: the numbers of t and of the one or two y."""

    total: int
    terms: tuple[int, ...]
    shortcut: Factor = 1.0
    scale: Factor = 1.0

    @property
    def is_plain(self) -> bool:
        """Whether it has no factors."""
        return self.shortcut == 1.0 and self.scale == 1.0


class Sums:
    """The sums among tensors of one shape.

    Products of all samples, channel by channel, give the squared error of every possible sum at once. The
    few sums with a small error are then computed as the model would have.

    Inside, a tensor goes by its position among ``numbers``: s is that of the stream, t of the total, y and z
    of branches. A tensor of errors is indexed by t and y.
    """

    def __init__(self, numbers: Sequence[int], made: set[int], samples: Sequence[Tensor]) -> None:
        """Prepare the products.

        Args:
            numbers: The tensors' numbers, in the order in which they appeared.
            made: The numbers of tensors that a module outputs; only these count as branches.
            samples: Samples `[R, D]` by number.
        """
        self._numbers = list(numbers)
        self._native = [samples[number] for number in numbers]
        """Samples in the precision in which the model adds them."""
        self._x = torch.stack([x.double() for x in self._native])
        self._made = torch.tensor([number in made for number in numbers])
        self._eps = max(torch.finfo(x.dtype).eps for x in self._native)
        # far above rounding, since this only chooses what is examined
        self._near = max(64 * self._eps, 1e-6) ** 2
        self._products = torch.einsum("ird,jrd->ijd", self._x, self._x)
        self._gram = self._products.sum(-1)

    def of(self, stream: int) -> Iterator[Sum]:
        """Yield the sums that the stream is part of: first plain ones, then with factors, then of three."""
        s = self._numbers.index(stream)
        for candidate in self._candidates(s):
            fitted = self._refit(s, candidate)
            if self._holds(s, fitted):
                terms = tuple(self._numbers[y] for y in fitted.terms)
                yield fitted._replace(total=self._numbers[fitted.total], terms=terms)

    def _candidates(self, s: int) -> Iterator[Sum]:
        """Yield what may be a sum, by positions. In less than float32's precision a factor fits by chance."""
        yield from self._plain(s)
        if self._eps < 1e-5:
            yield from self._scaled(s)
            if self._x.shape[1] >= FEWEST_ROWS:
                yield from self._scaled_by_channel(s)
        yield from self._plain_of_three(s)

    # ------------------------------------------------------------------- choose what is examined, by products

    def _pairs(self, error: Tensor, s: int) -> Iterator[tuple[int, int]]:
        """Yield (t, y) of small squared error `[T, Y]`, in order of t, if y came after s and t after y."""
        sizes = self._gram.diagonal()
        order = torch.arange(len(sizes))
        later = (order[:, None] > order) & (order > s) & self._made
        near = later & (error <= self._near * (sizes[:, None] + sizes + sizes[s]))
        return ((t, y) for t, y in near.nonzero().tolist())

    def _plain(self, s: int) -> Iterator[Sum]:
        r""":math:`\|t - s - y\|^2`."""
        g = self._gram
        size = g.diagonal()
        error = size[:, None] + size + size[s] - 2 * (g[:, s, None] + g - g[s])
        for t, y in self._pairs(error, s):
            yield Sum(t, (y,))

    def _plain_of_three(self, s: int) -> Iterator[Sum]:
        r""":math:`\|(t - s) - (y + z)\|^2`."""
        g = self._gram
        size = g.diagonal()
        rest = size - 2 * g[s] + size[s]
        cross = g - g[s]
        both = size[:, None] + size + 2 * g
        error = rest[:, None, None] + both - 2 * (cross[:, :, None] + cross[:, None, :])
        for z in range(len(size)):
            is_branch = z > s and bool(self._made[z])
            for t, y in self._pairs(error[:, :, z], s):
                comes_again = is_branch and z < y  # with y and z exchanged
                if z < t and z not in (s, y) and not comes_again:
                    yield Sum(t, (y, z))

    def _scaled(self, s: int) -> Iterator[Sum]:
        r""":math:`\min_{a, c} \|t - a s - c y\|^2`, from the normal equations."""
        g = self._gram
        size = g.diagonal()
        det = size[s] * size - g[s] ** 2
        a = (g[:, s, None] * size - g * g[s]) / det
        c = (g * size[s] - g[:, s, None] * g[s]) / det
        error = size[:, None] - a * g[:, s, None] - c * g
        for t, y in self._pairs(error, s):
            yield Sum(t, (y,), _near_one(a[t, y]), _near_one(c[t, y]))

    def _scaled_by_channel(self, s: int) -> Iterator[Sum]:
        r""":math:`\min_a \|t - a \odot s - y\|^2`, then :math:`\min_c \|t - s - c \odot y\|^2`."""
        p = self._products
        size = p.diagonal().T
        a = (p[:, s, None] - p[s]) / size[s]
        error = size[:, None] - 2 * p + size - a**2 * size[s]
        for t, y in self._pairs(error.sum(-1), s):
            yield Sum(t, (y,), shortcut=tuple(a[t, y].tolist()))
        c = (p - p[s]) / size
        error = (size - 2 * p[s] + size[s])[:, None] - c**2 * size
        for t, y in self._pairs(error.sum(-1), s):
            yield Sum(t, (y,), scale=tuple(c[t, y].tolist()))

    # --------------------------------------------------------------- examine it, by the tensors themselves

    def _refit(self, s: int, candidate: Sum) -> Sum:
        """Fit factors again, since products have lost digits."""
        if candidate.is_plain:
            return candidate
        (y,) = candidate.terms
        return refit(candidate, stream=self._x[s], branch=self._x[y], total=self._x[candidate.total])

    def _holds(self, s: int, candidate: Sum) -> bool:
        """Return whether a total is its sum, bit for bit or within the rounding of its parts."""
        positions = s, *candidate.terms
        if candidate.is_plain and self._bit_identical(candidate.total, positions):
            return True
        factors = [candidate.shortcut, candidate.scale]
        factors += [1.0] * (len(positions) - 2)
        x = self._x
        parts = [x[i] * x.new_tensor(factor) for i, factor in zip(positions, factors, strict=True)]
        error = x[candidate.total] - torch.stack(parts).sum(0)
        if not (error.abs() <= self._rounding(parts, factors)).all():
            return False
        smallest = min(part.norm() for part in parts)
        return bool(error.norm() <= SMALL_ERROR * smallest)

    def _bit_identical(self, t: int, terms: tuple[int, ...]) -> bool:
        """Return whether the terms, added in some order in their own precision, are bit for bit the total."""
        for first, *others in permutations(self._native[i] for i in terms):
            total = first
            for x in others:
                total = total + x
            if torch.equal(total, self._native[t]):
                return True
        return False

    def _rounding(self, parts: Sequence[Tensor], factors: Sequence[Factor]) -> Tensor:
        r"""Return how far each element of a sum may be from its parts.

        Every element is rounded to a few units of the size of its terms, :math:`\delta_i = 4 \epsilon
        \sum_p |p_i|`. By Cauchy and Schwarz these errors move a fitted factor, and with it the part p, by at
        most :math:`|p_i| \, \|\delta\| / \|p\|`, with norms over what the factor was fitted to.
        """
        size = 4 * self._eps * torch.stack([part.abs() for part in parts]).sum(0)
        bound = size.clone()
        for part, factor in zip(parts, factors, strict=True):
            if factor == 1.0:
                continue
            fitted_over = 0 if isinstance(factor, tuple) else (0, 1)
            share = size.norm(dim=fitted_over) / part.norm(dim=fitted_over)
            bound += share.nan_to_num() * part.abs()
        return bound


def refit(known: Sum, *, stream: Tensor, branch: Tensor, total: Tensor) -> Sum:
    """Fit the factors of a sum to other samples `[R, D]`; a branch of zeros changes nothing."""
    s, y, t = stream.double(), branch.double(), total.double()
    if not y.any():
        return known
    by_channel = isinstance(known.shortcut, tuple) or isinstance(known.scale, tuple)
    if known.shortcut == 1.0:
        return known._replace(scale=_ratio(t - s, y, by_channel=by_channel))
    if known.scale == 1.0:
        return known._replace(shortcut=_ratio(t - y, s, by_channel=by_channel))
    columns = torch.stack([s.flatten(), y.flatten()], 1)
    a, c = torch.linalg.lstsq(columns, t.flatten()[:, None]).solution.flatten()
    return known._replace(shortcut=_near_one(a), scale=_near_one(c))


def _ratio(x: Tensor, to: Tensor, *, by_channel: bool) -> Factor:
    if by_channel:
        return tuple(((x * to).sum(0) / to.square().sum(0)).tolist())
    return _near_one((x * to).sum() / to.square().sum())


def _near_one(value: Tensor) -> float:
    """Return a factor, as exactly 1 if it differs from 1 by rounding alone."""
    number = float(value)
    return 1.0 if abs(number - 1) < 1e-5 else number
