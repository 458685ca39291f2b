"""Record a forward pass as a list of events: which tensors entered and left which module, in order.

Tensors are told apart by their values, not by their names or addresses, and a sample of their rows is kept.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from normlab.errors import UserError
from normlab.trace.step import Weights
from normlab.trace.tensors import (
    Call,
    Place,
    Side,
    Tap,
    activations,
    bytes_of,
    forward_hooks,
    refusal,
    tensors_in,
    wide,
)
from normlab.trace.trace import Trace

ROWS = 32
"""Rows of each tensor that are kept, evenly spaced."""


class ModuleEvent(NamedTuple):
    """A module is entered (``"input"``) or left (``"output"``); ``seen`` maps places to tensors' numbers."""

    path: str
    side: Side
    call: int
    seen: dict[Place, int]

    def tap(self, number: int) -> Tap:
        place = next(place for place, seen in self.seen.items() if seen == number)
        return Tap(self.path, self.side, place, self.call)


class Recording:
    """The events of a pass, with the shape and a sample `[R, D]` of each tensor by its number.

    A tensor and a view of it in which other dimensions lead are one; ``sizes`` are rows and width,
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
        """Whether two tensors have the same rows in whatever order, but for rows of zeros."""
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
    """Run one pass in evaluation mode, with ``weights`` in the place of the model's own of these names.

    Raises UserError with what to change when the model raises.
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


def awake(model: nn.Module) -> dict[str, Tensor]:
    """Draw other values for the parameters that are zero to the precision of float32.

    ReZero's scalars, FixUp's last matrices and LayerScale's vectors hide a branch after initialisation; which
    tensors are added to which does not depend on them.
    """
    generator = torch.Generator().manual_seed(0)
    known = ((name, p.detach()) for name, p in model.named_parameters() if p.numel() and not p.is_meta)
    asleep = {name: p for name, p in known if wide(p).abs().amax() < 1e-3}
    values: dict[str, Tensor] = {}
    for name, parameter in asleep.items():
        drawn = torch.rand(parameter.shape, generator=generator)
        value = 0.3 + 0.4 * drawn if parameter.ndim < 2 else (drawn - 0.5) * 3 * parameter.shape[-1] ** -0.5
        values[name] = value.to(parameter)
    return values
