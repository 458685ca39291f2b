"""Find which of the tensors that were recorded is the sum of which others, and with which factors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations
from typing import Final, NamedTuple

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


_ABOVE_FLOAT32: Final = 1e-5
"""Above what rounding does in float32, whose epsilon is 1.2e-7, and below that of float16, 9.8e-4."""
_LEAST_NEAR: Final = 1e-6
"""Products in float64 are off by about 1e-16, and show a squared error no better, an error no better than
1e-8; this is far above.
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

    A squared error is made of inner products: that of :math:`t = s + y` is :math:`tt + yy + ss - 2 (ts + ty -
    sy)`, where ts is the product of t and s. So the products of all pairs, made once, give the squared error
    of every possible sum. The few sums with a small error are then computed as the model would have.

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
        self._near = max(64 * self._eps, _LEAST_NEAR) ** 2
        """The squared error, relative to the squares of its terms, up to which a sum is examined: far above
        the model's own rounding, since this only chooses candidates.
        """
        self._products = torch.einsum("ird,jrd->ijd", self._x, self._x)
        """`[N, N, D]`: inner products of all pairs, channel by channel."""
        self._gram = self._products.sum(-1)
        """`[N, N]`: the same over all channels."""

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
        if self._eps < _ABOVE_FLOAT32:
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
        r""":math:`\|t - s - y\|^2 = \|t\|^2 + \|y\|^2 + \|s\|^2 - 2 (ts + ty - sy)`."""
        tt, yy, ss, ts, ty, sy = _inner(self._gram, s)
        error = tt + yy + ss - 2 * (ts + ty - sy)
        for t, y in self._pairs(error, s):
            yield Sum(t, (y,))

    def _plain_of_three(self, s: int) -> Iterator[Sum]:
        r""":math:`\|(t - s) - (y + z)\|^2 = \|t - s\|^2 + \|y + z\|^2 - 2 (t - s)(y + z)`."""
        _, yy, ss, _, ty, sy = _inner(self._gram, s)
        from_stream = yy - 2 * sy + ss  # [T]: the squared distance of each tensor from s
        both = yy[:, None] + yy + 2 * ty  # [Y, Z]: the squared norm of y + z
        along = ty - sy  # [T, Y]: the product of t - s with y, and as well [T, Z]: with z
        error = from_stream[:, None, None] + both - 2 * (along[:, :, None] + along[:, None, :])  # [T, Y, Z]
        for z in range(len(yy)):
            is_branch = z > s and bool(self._made[z])
            for t, y in self._pairs(error[:, :, z], s):
                comes_again = is_branch and z < y  # with y and z exchanged
                if z < t and z not in (s, y) and not comes_again:
                    yield Sum(t, (y, z))

    def _scaled(self, s: int) -> Iterator[Sum]:
        r""":math:`\min_{a, c} \|t - a s - c y\|^2`.

        The normal equations :math:`a\,ss + c\,sy = ts` and :math:`a\,sy + c\,yy = ty` are solved by Cramer's
        rule; what is left is :math:`tt - a\,ts - c\,ty`.
        """
        tt, yy, ss, ts, ty, sy = _inner(self._gram, s)
        determinant = ss * yy - sy**2
        a = (ts * yy - ty * sy) / determinant
        c = (ty * ss - ts * sy) / determinant
        error = tt - a * ts - c * ty
        for t, y in self._pairs(error, s):
            yield Sum(t, (y,), _near_one(a[t, y]), _near_one(c[t, y]))

    def _scaled_by_channel(self, s: int) -> Iterator[Sum]:
        r""":math:`\min_a \|t - a \odot s - y\|^2`, then :math:`\min_c \|t - s - c \odot y\|^2`.

        Each channel is a fit of one factor: of :math:`r = t - y` to s the best is :math:`a = rs / ss`, which
        leaves :math:`rr - a^2 ss`. Products have channels as their last dimension.
        """
        tt, yy, ss, ts, ty, sy = _inner(self._products, s)
        a = (ts - sy) / ss
        without_branch = tt - 2 * ty + yy  # [T, Y, D]: the squared norm of t - y
        error = without_branch - a**2 * ss
        for t, y in self._pairs(error.sum(-1), s):
            yield Sum(t, (y,), shortcut=tuple(a[t, y].tolist()))
        c = (ty - sy) / yy
        from_stream = yy - 2 * sy + ss  # [T, D]: the squared distance of each tensor from s
        error = from_stream[:, None] - c**2 * yy
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

        The model's own rounding comes first: two products and two additions, each off by at most
        :math:`\epsilon / 2` of its result. Twice their sum is allowed, :math:`\delta_i = 4 \epsilon \sum_p
        |p_i|`.

        These errors also move a fitted factor. With one factor, :math:`a = (t - y) s / ss`, so that
        :math:`\delta` in t moves it by :math:`|\delta s| / ss \le \|\delta\| / \|s\|` (Cauchy and Schwarz),
        and element i of the part :math:`p = a s` by :math:`|s_i| \, \|\delta\| / \|s\| = |p_i| \, \|\delta\|
        / \|p\|`. Norms are over what the factor was fitted to: all elements, or one channel.
        """
        of_terms = 4 * self._eps * torch.stack([part.abs() for part in parts]).sum(0)
        bound = of_terms.clone()
        for part, factor in zip(parts, factors, strict=True):
            if factor == 1.0:
                continue
            fitted_over = 0 if isinstance(factor, tuple) else (0, 1)
            relative = of_terms.norm(dim=fitted_over) / part.norm(dim=fitted_over)
            # a channel of zeros divides by 0, and stays 0 whatever its factor is
            bound += relative.nan_to_num() * part.abs()
        return bound


class _Inner(NamedTuple):
    """Inner products of a total t, a branch y and the stream s, shaped for `[T, Y]`, or `[T, Y, D]`."""

    tt: Tensor
    """`[T, 1]`."""
    yy: Tensor
    """`[Y]`."""
    ss: Tensor
    """`[]`."""
    ts: Tensor
    """`[T, 1]`."""
    ty: Tensor
    """`[T, Y]`."""
    sy: Tensor
    """`[Y]`."""


def _inner(products: Tensor, s: int) -> _Inner:
    """Shape the products of all pairs `[N, N]`, or `[N, N, D]` by channel, so that those of t and y combine.

    Any of the N tensors may be t, and any may be y.
    """
    squares = torch.einsum("ii...->i...", products)
    return _Inner(squares[:, None], squares, squares[s], products[:, s, None], products, products[s])


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
    return 1.0 if abs(number - 1) < _ABOVE_FLOAT32 else number
