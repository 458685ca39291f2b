"""Record which tensors entered and left which module during a pass.

Tensors are told apart by their values, not by their names or addresses, and a sample of their rows is kept.
"""

from __future__ import annotations

from collections import Counter
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
    """The events of a pass, and what is kept of each tensor by its number.

    A tensor and a view of it with other leading dimensions have the same number.
    """

    def __init__(self) -> None:
        self.events: list[ModuleEvent] = []
        self.shapes: list[torch.Size] = []
        self.sizes: list[tuple[int, int]] = []
        """Rows and width."""
        self.samples: list[Tensor] = []
        """`[R, D]`: evenly spaced rows."""
        self.moments: list[Tensor] = []
        """`[2, D]`: the sum and the norm of each channel over all rows."""
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._calls: Counter[tuple[str, Side]] = Counter()

    def see(self, path: str, side: Side, values: Any) -> None:
        seen = {place: self._number(x) for place, x in activations(values)}
        self.events.append(ModuleEvent(path, side, self._calls[path, side], seen))
        self._calls[path, side] += 1

    def _number(self, x: Tensor) -> int:
        rows = x.detach().flatten(0, -2)
        size = len(rows), x.shape[-1]
        spaced = torch.linspace(0, len(rows) - 1, min(ROWS, len(rows))).long()
        sample = rows[spaced.to(rows.device)].cpu().contiguous()
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
        """Return the sample of the tensor at a tap."""
        wanted = tap.module, tap.side, tap.call
        event = next(e for e in self.events if (e.path, e.side, e.call) == wanted)
        return self.samples[event.seen[tap.place]]

    def broken(self) -> str | None:
        """Return the path of the first module whose output holds a value that is not a number."""
        for event in self.events:
            if event.side != "output":
                continue
            if any(self.samples[number].isnan().any() for number in event.seen.values()):
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
    elsewhere = sorted({str(x.device) for _, x in tensors_in(batch)} - set(homes))
    if not homes or not elsewhere:
        return
    how = f'as in model.to("{elsewhere[0]}")'
    if "meta" in elsewhere:
        how = f"or rather make the batch on {homes[0]}: on meta it holds no numbers"
    raise UserError(
        f"the model is on {', '.join(homes)} and the batch on {', '.join(elsewhere)}; move one of them, {how}"
    )


ASLEEP = 1e-3
"""A parameter whose largest entry is below this counts as zero: sums are not seen if a branch adds so little
that float32 rounds it away.
"""


def awake(model: nn.Module) -> dict[str, Tensor]:
    """Draw other values for the parameters that are zero to the precision of float32.

    ReZero's scalars, FixUp's last matrices and LayerScale's vectors hide a branch after initialisation, as
    does a gate that opens with the step count; none of them affects which tensors are added to which.
    """
    generator = torch.Generator().manual_seed(0)
    values = later_counts(model)
    for name, parameter in model.named_parameters():
        if _is_asleep(parameter.detach()):
            values[name] = _drawn(parameter.shape, generator).to(parameter)
    return values


def _is_asleep(parameter: Tensor) -> bool:
    if not parameter.numel() or parameter.is_meta:
        return False
    narrow = parameter.is_floating_point() and parameter.element_size() == 1
    numbers = parameter.float() if narrow else parameter  # torch can do little with numbers of one byte
    return bool(numbers.abs().amax() < ASLEEP)


def _drawn(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Draw a factor between 0.3 and 0.7, or a matrix that keeps the size of what it maps."""
    uniform = torch.rand(shape, generator=generator)
    if len(shape) < 2:
        return 0.3 + 0.4 * uniform
    return (uniform - 0.5) * 3 * shape[-1] ** -0.5
