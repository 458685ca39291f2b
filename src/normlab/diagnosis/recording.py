"""Record which tensors entered and left which module, and find which tensor is the sum of which.

Tensors are told apart by their values, not by their names or addresses, and a sample of their rows is kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import permutations
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from normlab.errors import UserError
from normlab.trace.autograd import Weights
from normlab.trace.tensors import (
    Call,
    Place,
    Side,
    Tap,
    activations,
    bytes_of,
    forward_hooks,
    later_counts,
    refusal,
    tensors_in,
)
from normlab.trace.trace import Trace

ROWS = 32
"""How many rows of each tensor are kept, evenly spaced."""


class ModuleEvent(NamedTuple):
    """A module is entered (``"input"``) or left (``"output"``); ``seen`` maps places to tensor numbers."""

    path: str
    side: Side
    call: int
    seen: dict[Place, int]

    def tap(self, number: int) -> Tap:
        place = next(place for place, seen in self.seen.items() if seen == number)
        return Tap(self.path, self.side, place, self.call)


class Recording:
    """The events of a pass, with the shape and a sample `[R, D]` of each tensor by its number.

    A tensor and a view of it with other leading dimensions are one; ``sizes`` are rows and width,
    ``moments`` `[2, D]` the sum and the norm of each channel over all rows.
    """

    def __init__(self) -> None:
        self.events: list[ModuleEvent] = []
        self.shapes: list[torch.Size] = []
        self.sizes: list[tuple[int, int]] = []
        self.samples: list[Tensor] = []
        self.moments: list[Tensor] = []
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._calls: Counter[tuple[str, Side]] = Counter()

    def see(self, path: str, side: Side, values: Any) -> None:
        seen = {place: self._number(x) for place, x in activations(values)}
        self.events.append(ModuleEvent(path, side, self._calls[path, side], seen))
        self._calls[path, side] += 1

    def _number(self, x: Tensor) -> int:
        rows = x.detach().flatten(0, -2)
        kept = torch.linspace(0, len(rows) - 1, min(ROWS, len(rows))).long()
        sample = rows[kept.to(rows.device)].cpu().contiguous()
        size = len(rows), x.shape[-1]
        key = size, x.dtype, bytes_of(sample)
        if key not in self._numbers:
            self._numbers[key] = len(self.samples)
            self.samples.append(sample)
            self.shapes.append(x.shape)
            self.sizes.append(size)
            self.moments.append(_moments(rows))
        return self._numbers[key]

    def rearranged(self, x: int, y: int) -> bool:
        """Return whether two tensors have the same rows in any order, apart from rows of zeros."""
        a, b = self.moments[x], self.moments[y]
        return a.shape == b.shape and torch.allclose(a, b, rtol=1e-9, atol=1e-9 * b[1].max().item())

    def at(self, tap: Tap) -> Tensor:
        where = tap.module, tap.side, tap.call
        event = next(e for e in self.events if (e.path, e.side, e.call) == where)
        return self.samples[event.seen[tap.place]]

    def broken(self) -> str | None:
        """Return the path of the first module whose output holds a value that is not a number."""
        for event in self.events:
            if event.side == "output" and any(self.samples[n].isnan().any() for n in event.seen.values()):
                return event.path
        return None


def _moments(rows: Tensor) -> Tensor:
    wide = (rows.cpu() if rows.is_mps else rows).double()  # an MPS has no float64
    return torch.stack([wide.sum(0), torch.linalg.vector_norm(wide, dim=0)]).cpu()


def record(model: nn.Module, batch: Any, call: Call, weights: Weights) -> Recording:
    """Run one pass in evaluation mode, with ``weights`` in place of the model's own of the same names.

    Raises UserError, saying what to change, if the model raises.
    """
    recording = Recording()
    with forward_hooks(dict(model.named_modules()), recording.see):
        try:
            Trace(model, batch, call, weights=weights).once()
        except Exception as error:
            refuse_elsewhere(model, batch)
            raise UserError(refusal(type(model).__name__, batch, error, "call")) from error
    return recording


def refuse_elsewhere(model: nn.Module, batch: Any) -> None:
    """Raise UserError for a model and a batch on different devices."""
    homes = sorted({str(p.device) for p in model.parameters()})
    strangers = sorted({str(x.device) for _, x in tensors_in(batch)} - set(homes))
    if homes and strangers:
        how = f'as in model.to("{strangers[0]}")'
        if "meta" in strangers:
            how = f"or rather make the batch on {homes[0]}: on meta it holds no numbers"
        raise UserError(
            f"the model is on {', '.join(homes)} and the batch on {', '.join(strangers)}; move one of them, "
            f"{how}"
        )


def _wide(x: Tensor) -> Tensor:
    """Return a tensor of one-byte numbers in float32, since torch can do little with it; others unchanged."""
    return x.float() if x.is_floating_point() and x.element_size() == 1 else x


def awake(model: nn.Module) -> dict[str, Tensor]:
    """Draw other values for the parameters that are zero to the precision of float32.

    ReZero's scalars, FixUp's last matrices and LayerScale's vectors hide a branch after initialisation, as
    does a gate that opens with the step count; none of them affects which tensors are added to which.
    """
    generator = torch.Generator().manual_seed(0)
    known = ((name, p.detach()) for name, p in model.named_parameters() if p.numel() and not p.is_meta)
    asleep = {name: p for name, p in known if _wide(p).abs().amax() < 1e-3}
    values = later_counts(model)
    for name, parameter in asleep.items():
        drawn = torch.rand(parameter.shape, generator=generator)
        value = 0.3 + 0.4 * drawn if parameter.ndim < 2 else (drawn - 0.5) * 3 * parameter.shape[-1] ** -0.5
        values[name] = value.to(parameter)
    return values


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
    a module outputs (``made``) count as a branch.

    Samples are `[R, D]`. Products of all of them, for every channel, give the squared error of every possible
    sum at once; sums with a small error are then computed as the model would have.
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

        Factors need the precision of float32 and, if there is one per channel, eight rows.
        """
        s = self._numbers.index(stream)
        yield from self._plain(s)
        if self._eps < 1e-5:
            yield from self._scaled(s)
            if self._x.shape[1] >= 8:
                yield from self._scaled_by_channel(s)
        yield from self._plain_of_three(s)

    def _pairs(self, error: Tensor, s: int) -> Iterator[tuple[int, int]]:
        """Yield (t, y) of small squared error `[T, Y]`, in order of t, if y came after s and t after y."""
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
        r"""Return how far each element of a sum may be from its parts.

        Every element is rounded to a few units of the size of its terms, :math:`\delta_i = 4 \epsilon
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
        """Return whether the terms, added in some order in their own precision, are bit for bit the total."""
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


def _ratio(x: Tensor, to: Tensor, *, by_channel: bool) -> Factor:
    if by_channel:
        return tuple(((x * to).sum(0) / to.square().sum(0)).tolist())
    return _near_one((x * to).sum() / to.square().sum())


def _near_one(value: Tensor) -> float:
    number = float(value)
    return 1.0 if abs(number - 1) < 1e-5 else number
