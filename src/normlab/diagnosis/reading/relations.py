"""Find which tensor is the sum of which, by products of samples, and confirm it element by element."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations
from typing import NamedTuple

import torch
from torch import Tensor

Factor = float | tuple[float, ...]
"""One number, or one for each channel."""


class Sum(NamedTuple):
    r""":math:`t = a \odot s + c \odot y_1 + y_2` for a stream s: the numbers of t and of the one or two y."""

    total: int
    terms: tuple[int, ...]
    shortcut: Factor = 1.0
    scale: Factor = 1.0


class Sums:
    """The sums among tensors of one shape, ``numbers`` in the order in which they appeared; only tensors that
    a module puts out (``made``) count as a branch.

    Samples are `[R, D]`. Products of all of them, for every channel, give the squared error of every possible
    sum at once; what is small is then computed as the model would have.
    """

    def __init__(self, numbers: Sequence[int], made: set[int], samples: Sequence[Tensor]) -> None:
        self._numbers = list(numbers)
        self._native = [samples[n] for n in numbers]
        self._x = torch.stack([x.double() for x in self._native])
        self._made = torch.tensor([n in made for n in numbers])
        self._eps = max(torch.finfo(x.dtype).eps for x in self._native)
        self._near = max(64 * self._eps, 1e-6) ** 2
        self._products = torch.einsum("ird,jrd->ijd", self._x, self._x)
        self._gram = self._products.sum(-1)

    def of(self, stream: int) -> Iterator[Sum]:
        """Yield the sums that the stream is part of: first plain ones, then with factors, then of three.

        Factors need the precision of float32 and, one a channel, eight rows.
        """
        s = self._numbers.index(stream)
        yield from self._plain(s)
        if self._eps < 1e-5:
            yield from self._scaled(s)
            if self._x.shape[1] >= 8:
                yield from self._scaled_by_channel(s)
        yield from self._plain_of_three(s)

    def _pairs(self, error: Tensor, s: int) -> Iterator[tuple[int, int]]:
        """(t, y) of small squared error `[T, Y]`, in order of t, where y came after s and t after y."""
        sizes = self._gram.diagonal()
        order = torch.arange(len(sizes))
        later = (order[:, None] > order) & (order > s) & self._made
        near = later & (error <= self._near * (sizes[:, None] + sizes + sizes[s]))
        return ((t, y) for t, y in near.nonzero().tolist())

    def _sum(
        self, s: int, t: int, ys: tuple[int, ...], shortcut: Factor = 1.0, scale: Factor = 1.0
    ) -> Iterator[Sum]:
        x, first = self._x, (s, *ys)
        one = Sum(t, ys, shortcut, scale)
        if (shortcut, scale) != (1.0, 1.0):
            one = refit(one, stream=x[s], branch=x[ys[0]], total=x[t])
        factors = (one.shortcut, one.scale, *(1.0 for _ in ys[1:]))
        fitted = any(factor != 1.0 for factor in factors)
        if fitted or not self._bit_identical(t, first):
            parts = [x[i] * x.new_tensor(factor) for i, factor in zip(first, factors, strict=True)]
            error = x[t] - torch.stack(parts).sum(0)
            rounding = bool((error.abs() <= self._rounding(parts, factors)).all())
            if not rounding or error.norm() > 0.02 * min(part.norm() for part in parts):
                return
        numbers = self._numbers
        yield one._replace(total=numbers[t], terms=tuple(numbers[y] for y in ys))

    def _rounding(self, parts: Sequence[Tensor], factors: Sequence[Factor]) -> Tensor:
        r"""How far each element of a sum may be from its parts.

        Every element is rounded to a few units of the size of what is added, :math:`\delta_i = 4 \epsilon
        \sum_p |p_i|`. By Cauchy and Schwarz these errors move a fitted factor, and with it the part p, by at
        most :math:`|p_i| \, \|\delta\| / \|p\|`, with norms over what the factor was fitted to.
        """
        size = 4 * self._eps * torch.stack([part.abs() for part in parts]).sum(0)
        bound = size.clone()
        for part, factor in zip(parts, factors, strict=True):
            if factor != 1.0:
                over = 0 if isinstance(factor, tuple) else (0, 1)
                share = size.norm(dim=over) / part.norm(dim=over)
                bound += share.nan_to_num() * part.abs()
        return bound

    def _bit_identical(self, t: int, terms: tuple[int, ...]) -> bool:
        """Whether the terms, added in some order in their own precision, are the total to the last bit."""
        for first, *others in permutations(self._native[i] for i in terms):
            total = first
            for x in others:
                total = total + x
            if torch.equal(total, self._native[t]):
                return True
        return False

    def _plain(self, s: int) -> Iterator[Sum]:
        g = self._gram
        size = g.diagonal()
        error = size[:, None] + size + size[s] - 2 * (g[:, s, None] + g - g[s])
        for t, y in self._pairs(error, s):
            yield from self._sum(s, t, (y,))

    def _plain_of_three(self, s: int) -> Iterator[Sum]:
        g, size = self._gram, self._gram.diagonal()
        rest = size - 2 * g[s] + size[s]
        cross = g - g[s]
        both = size[:, None] + size + 2 * g
        error = rest[:, None, None] + both - 2 * (cross[:, :, None] + cross[:, None, :])
        for z in range(len(size)):
            for t, y in self._pairs(error[:, :, z], s):
                once = y < z if z > s and self._made[z] else True
                if z not in (s, t, y) and z < t and once:
                    yield from self._sum(s, t, (y, z))

    def _scaled(self, s: int) -> Iterator[Sum]:
        g, size = self._gram, self._gram.diagonal()
        det = size[s] * size - g[s] ** 2
        a = (g[:, s, None] * size - g * g[s]) / det
        c = (g * size[s] - g[:, s, None] * g[s]) / det
        error = size[:, None] - a * g[:, s, None] - c * g
        for t, y in self._pairs(error, s):
            yield from self._sum(s, t, (y,), _near_one(a[t, y]), _near_one(c[t, y]))

    def _scaled_by_channel(self, s: int) -> Iterator[Sum]:
        p = self._products
        size = p.diagonal().T
        a = (p[:, s, None] - p[s]) / size[s]
        error = size[:, None] - 2 * p + size - a**2 * size[s]
        for t, y in self._pairs(error.sum(-1), s):
            yield from self._sum(s, t, (y,), shortcut=tuple(a[t, y].tolist()))
        c = (p - p[s]) / size
        error = (size - 2 * p[s] + size[s])[:, None] - c**2 * size
        for t, y in self._pairs(error.sum(-1), s):
            yield from self._sum(s, t, (y,), scale=tuple(c[t, y].tolist()))


def refit(one: Sum, *, stream: Tensor, branch: Tensor, total: Tensor) -> Sum:
    """Fit the factors of a sum to other samples `[R, D]`; a branch of zeros changes nothing."""
    s, y, t = stream.double(), branch.double(), total.double()
    if not y.any():
        return one
    by_channel = isinstance(one.shortcut, tuple) or isinstance(one.scale, tuple)
    if one.shortcut == 1.0:
        return one._replace(scale=_ratio(t - s, y, by_channel=by_channel))
    if one.scale == 1.0:
        return one._replace(shortcut=_ratio(t - y, s, by_channel=by_channel))
    columns = torch.stack([s.flatten(), y.flatten()], 1)
    a, c = torch.linalg.lstsq(columns, t.flatten()[:, None]).solution.flatten()
    return one._replace(shortcut=_near_one(a), scale=_near_one(c))


def proportion(x: Tensor, to: Tensor) -> float | None:
    """Return k if x is k times ``to`` within rounding, otherwise None."""
    x, to = x.double(), to.double()
    k = float((x * to).sum() / to.square().sum())
    return k if (x - k * to).norm() <= 1e-5 * x.norm() and k else None


def _ratio(x: Tensor, to: Tensor, *, by_channel: bool) -> Factor:
    if by_channel:
        return tuple(((x * to).sum(0) / to.square().sum(0)).tolist())
    return _near_one((x * to).sum() / to.square().sum())


def _near_one(value: Tensor) -> float:
    number = float(value)
    return 1.0 if abs(number - 1) < 1e-5 else number
