"""Runs of a step in float64, in which any change shows, and the comparison of two runs part by part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from normlab.errors import in_one_line
from normlab.trace.autograd import Weights
from normlab.trace.copies import copied_model
from normlab.trace.tensors import Place, is_zero, later_counts, map_tensors, rows_of, tensors_in
from normlab.trace.trace import Event, Trace

LARGE: Final = 1_000_000_000
"""Positions times parameters for which a pass in float64 takes about a quarter of a second on one core, so
that all properties take about a minute.
"""
COLUMNS: Final = 32
"""The fewest columns that a part of a batch keeps."""
Part = Callable[[Tensor], Tensor | None]
"""Selects the entries of a tensor to compare; None if it has no such entries."""


class Located(NamedTuple):
    """How large a difference or a share is, and the module where it begins."""

    size: float
    module: str


def distance(a: Tensor, b: Tensor) -> float:
    """Return the largest difference of two tensors, relative to their largest entry; equal non-finite entries
    agree. Nested tensors are compared row by row.
    """
    if a.is_nested and b.is_nested:
        pairs = zip(a.unbind(), b.unbind(), strict=True)
        return max((distance(x, y) for x, y in pairs), default=0.0)
    if a.shape != b.shape:
        return float("inf")
    if not a.numel():
        return 0.0
    a, b = a.detach().double(), b.detach().double()
    same = (a == b) | (a.isnan() & b.isnan())
    apart = (a - b).abs().masked_fill(same, 0.0)
    if not torch.isfinite(apart).all():
        return float("inf")
    size = torch.maximum(a.nan_to_num(0, 0, 0).abs().max(), b.nan_to_num(0, 0, 0).abs().max())
    return float(apart.max() / size.clamp_min(1e-300))


def blame(a: Trace, b: Trace, part: Part, limit: float) -> str:
    """Return the first module, in order of completion, whose inputs agree in the part but whose outputs do
    not, or "" if there is none.
    """
    for one, other in zip(a.events, b.events, strict=False):
        if one.module != other.module or part_ways(one, other, part, limit):
            return one.module
    return ""


def part_ways(a: Event, b: Event, part: Part, limit: float) -> bool:
    """Return whether two runs agree in the part of a module's inputs but not of its outputs."""
    return _differ(a.outputs, b.outputs, part, limit) > _differ(a.inputs, b.inputs, part, limit)


def whole(x: Tensor) -> Tensor:
    """Select all of a tensor."""
    return x


def part_of(mask: Tensor, rows: Tensor | None = None) -> Part:
    """Select the entries where a mask over rows `[B]`, or rows and positions `[B, T]`, is True, in any tensor
    with the layout `[B, T, …]`, `[T, B, …]`, `[B, H, T, …]` or `[B·T, …]`.

    For a tensor without an axis for positions, ``rows`` are selected, or else those that are True throughout.
    """
    if rows is None:
        rows = mask if mask.ndim == 1 else mask.all(1)
    return lambda x: _selected(x, mask.to(x.device), rows.to(x.device))


def _differ(a: Sequence[Tensor], b: Sequence[Tensor], part: Part, limit: float) -> bool:
    pairs = ((part(x), part(y)) for x, y in zip(a, b, strict=False) if x.is_floating_point())
    return any(x is not None and y is not None and distance(x, y) > limit for x, y in pairs)


def _selected(x: Tensor, mask: Tensor, rows: Tensor) -> Tensor | None:
    """Return the entries that a part selects; None instead of a selection of nothing, which would agree with
    anything.
    """
    count = len(mask)
    if mask.ndim == 2 and (shown := laid_out(x, *mask.shape)) is not None:
        selected = shown[mask[:, : shown.shape[1]]]
    elif x.ndim and x.shape[0] == count:
        selected = x[rows]
    elif x.ndim >= 2 and x.shape[1] == count:
        selected = x[:, rows]
    else:
        return None
    return selected if selected.numel() else None


def laid_out(x: Tensor, rows: int, width: int) -> Tensor | None:
    """Return the tensor as `[B, T, …]`, perhaps one position shorter; None if it has no such axes."""
    shape = x.shape
    if x.ndim >= 2 and shape[0] == rows and 0 <= width - shape[1] <= 1 and shape[1] > 0:
        return x
    if x.ndim >= 2 and shape[:2] == (width, rows):
        return x.transpose(0, 1)
    if x.ndim >= 4 and shape[0] == rows and shape[2] == width:
        return x.transpose(1, 2)
    if x.ndim >= 2 and rows > 1 and shape[0] in (rows * width, rows * (width - 1)):
        return x.reshape(rows, -1, *shape[1:])
    return None


def _awake(model: nn.Module) -> dict[str, Tensor]:
    """Return small draws for parameters that are zero: ReZero's scalars and FixUp's and LoRA's last matrices
    hide their branch at the start. So do gates that open during training; their counts are advanced.
    """
    generator, values = torch.Generator().manual_seed(3), dict[str, Tensor]()
    for name, p in model.named_parameters():
        if p.is_floating_point() and p.numel() and is_zero(p):
            values[name] = (0.02 * torch.randn(p.shape, generator=generator)).to(p)
    return values | later_counts(model)


def positions_in(batch: Any) -> int:
    """Return the number of rows times that of the columns of ids, if there are any."""
    return rows_of(batch) * max((x.shape[1] for x in _ids_in(batch)), default=1)


def _ids_in(batch: Any) -> list[Tensor]:
    """Return the matrices of integers that have a row for each row of the batch."""
    rows = rows_of(batch)
    tensors = [x for _, x in tensors_in(batch) if not x.is_nested]
    return [x for x in tensors if x.ndim == 2 and x.shape[0] == rows and not x.is_floating_point()]


def small_parts(batch: Any, parameters: int, positions: float) -> list[Any]:
    """Return parts of a batch with so many positions, if these are too many for that many parameters: two
    rows with the first columns, if columns may be dropped, and two rows as they are. The model may not run
    on either.

    Columns are dropped only if all integers have one width and none may be a mask, a position or a document,
    which would mean something else in a part. Rows of different lengths in one nested tensor are never cut.
    """
    rows, has_nested = rows_of(batch), any(x.is_nested for _, x in tensors_in(batch))
    if has_nested or rows < 2 or positions * parameters <= LARGE:
        return []
    ids = _ids_in(batch)
    widths = {x.shape[1] for x in ids}
    falls = [float((x.diff(dim=1) < 0).float().mean()) for x in ids]  # a count rarely falls
    plain = len(widths) == 1 and min(falls) > 0.1 and all(len(torch.unique(x)) > 2 for x in ids)
    width, kept = max(widths, default=0), max(COLUMNS, LARGE // parameters // 2)
    parts = [_cut(batch, rows, width, kept)] if plain and width > kept else []
    return [*parts, first_rows(batch)] if rows > 2 else parts


def first_rows(batch: Any) -> Any:
    """Return the first two rows of a batch."""
    return _cut(batch, rows_of(batch), 0, 0)


def _cut(batch: Any, rows: int, width: int, kept: int) -> Any:
    """Return the first two of so many rows; of axes of that width, as much as is kept.

    Parts are contiguous, as batches are when they are drawn: a model may call ``targets.view(-1)``.
    """

    def cut(_: Place, x: Tensor) -> Tensor:
        if not x.ndim or x.shape[0] != rows:
            return x
        x = x[:2]
        for axis in range(1, x.ndim):
            if width and x.shape[axis] == width:
                x = x.narrow(axis, 0, kept)
        return x.contiguous()

    return map_tensors(batch, cut)


def awake_step(trace: Trace, copy: Callable[[], nn.Module]) -> Trace:
    """Return the same step without dropout on a copy of its model, which is made awake: in float64, unless it
    does not run there or gives another loss.
    """

    def awake() -> Trace:
        model = copy()
        own = dict((*model.named_parameters(), *model.named_buffers()))
        with torch.no_grad():
            for name, value in _awake(model).items():
                own[name].copy_(value)
        return trace.again(model=model, dropout=False)

    # the same copy is widened, parameter by parameter, for two of a large model would not fit in memory
    return _wide(awake, lambda step: {"model": step.model.double()})


def awake_in_place(trace: Trace) -> Trace:
    """Return the same step without dropout on the same model, which gets other weights in each pass: those of
    ``awake_step``, in float64 under the same conditions.
    """
    awake = trace.again(weights=_awake(trace.model), dropout=False)

    def wide(step: Trace) -> dict[str, Any]:
        held = {**step.parameters, **step.buffers}
        return {"weights": {n: x.double() for n, x in held.items() if x.is_floating_point()}}

    return _wide(lambda: awake, wide)


def _wide(awake: Callable[[], Trace], changes: Callable[[Trace], dict[str, Any]]) -> Trace:
    """Return a step in float64, which these changes make of it, or the step as it is if that does not run or
    gives another loss. The changes may use the step up; ``awake`` makes it again.
    """
    own = awake()
    try:
        batch = map_tensors(own.batch, lambda _, x: x.double() if x.is_floating_point() else x)
        b = float(own.loss)
        wide = own.again(**changes(own), batch=batch, exact=True)
        a = float(wide.loss)
        if abs(a - b) <= 0.05 * abs(b) + 1e-3 or a != a:
            return wide
        own = awake()
        drawn = max(abs(float(own.again(seed=seed).loss) - b) for seed in (1, 2))
    except Exception:
        return awake()
    return wide if abs(a - b) <= 0.05 * abs(b) + 4 * drawn + 1e-3 else own


def why_inexact(trace: Trace) -> str:
    """Say why ``awake_step`` leaves this step in its own precision: what the model raises in float64, or the
    loss that it gives there.
    """
    try:
        batch = map_tensors(trace.batch, lambda _, x: x.double() if x.is_floating_point() else x)
        wide = trace.again(model=copied_model(trace.model).double(), batch=batch, exact=True)
        there, here = float(wide.loss), float(trace.loss)
    except Exception as error:  # the model may be anyone's
        return f"in float64 the model raises {in_one_line(error)}"
    return f"the loss is {there:.4g} in float64, but {here:.4g} in the model's own precision"


def rounding_of(trace: Trace, value: Callable[[Trace], Tensor]) -> float:
    """Return the relative difference in a value that rounding alone may cause, in the model's own precision:
    the largest that changing each parameter by one rounding causes.
    """
    base, worst, draw = value(trace), 0.0, torch.Generator().manual_seed(0)
    for _ in range(2):
        moved, eps = rounded(trace.parameters, draw)
        worst = max(worst, distance(base, value(trace.again(weights=moved))))
    return 4 * worst + eps


def rounded(parameters: Weights, draw: torch.Generator) -> tuple[dict[str, Tensor], float]:
    """Return the parameters, each changed by at most one rounding, and the largest relative rounding."""
    own = {n: p.detach() for n, p in parameters.items() if p.is_floating_point()}
    eps = max(torch.finfo(p.dtype).eps for p in own.values())
    return {n: shaken(p, eps, draw) for n, p in own.items()}, eps


def shaken(x: Tensor, eps: float, draw: torch.Generator) -> Tensor:
    """Return the tensor with each entry changed by a relative eps at most."""
    return x * (1 + eps * (torch.rand(x.shape, generator=draw) - 0.5).to(x))
