"""The same in another way: in float32, loaded again, padded differently, token by token, in another order."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from normlab.trace.autograd import Weights
from normlab.trace.compare import distance, laid_out, shaken, whole
from normlab.trace.facts import Unknown
from normlab.trace.facts.facts import Facts
from normlab.trace.facts.tokens import Arranged, Tokens, restarts
from normlab.trace.functions import Functions
from normlab.trace.step_under_test import StepUnderTest
from normlab.trace.tensors import Place, apart, first_calls, map_tensors, replaced, tensors_in
from normlab.trace.trace import Trace

DRAWS: Final = 3
GENERATED: Final = 24
"""Number of tokens in a sequence that is generated with a cache; the first of them are read at once."""


def low_calls(step: StepUnderTest) -> tuple[Mapping[str, Any], float, bool]:
    """Run the model once, under autocast if the user's step runs it so. Return the first call of each module,
    the largest relative rounding, and whether anything runs under autocast.

    Raises Unknown if all is in float32.
    """
    trace, cast = step.plain, None
    if step.setup.step is not None:
        with suppress(Exception):
            cast = step.twice[1].cast
    inner = {path: module for path, module in trace.model.named_modules() if path}
    types, casts = {p.dtype for p in trace.model.parameters()}, set[torch.dtype]()
    device = next(trace.model.parameters()).device.type

    def keep(values: Any) -> Any:
        casts.update([torch.get_autocast_dtype(device)] if torch.is_autocast_enabled(device) else ())
        return map_tensors(values, lambda _, x: x.detach().clone())

    with torch.autocast(device, cast, enabled=cast is not None), first_calls(inner, keep) as calls:
        trace.once()
    low = {torch.bfloat16, torch.float16} & (types | casts)
    if not low:
        raise Unknown("no parameter is in low precision, and nothing runs under autocast")
    return calls, max(torch.finfo(t).eps for t in low), bool(casts)


def roundings(step: StepUnderTest) -> Iterator[tuple[str, float, int]]:
    """Yield each module with the error of its first call in low precision, inner ones first, in units of what
    one rounding of its inputs and output causes, and its number of operations.

    Raises Unknown if all is in float32.
    """
    (calls, eps, cast), twins = low_calls(step), step.copy().float().eval()
    for path, (values, written) in calls.items():
        with suppress(Exception):  # a module may insist on its own dtype
            twin = twins.get_submodule(path)
            weights = dict(twin.named_parameters()) if cast else {}
            yield path, *_ratio(twin, weights, values, _floating(written), eps)


def _ratio(
    twin: nn.Module, weights: Weights, values: Any, written: list[Tensor], eps: float
) -> tuple[float, int]:
    operations: list[str] = []
    wide = map_tensors(values, lambda _, x: x.float() if x.is_floating_point() else x)
    generator = torch.Generator().manual_seed(0)

    def moved_by_one(_: Any, x: Tensor) -> Tensor:
        return shaken(x, eps, generator) if x.is_floating_point() else x

    def run(weights: Any, read: Any) -> list[Tensor]:
        args, keywords = apart(read)
        return _floating(functional_call(twin, weights, args, keywords))

    with torch.no_grad():
        with Functions(see=lambda call: operations.append(call.name)):
            plain = run({}, wide)
        moved = [run(*(map_tensors(x, moved_by_one) for x in (weights, wide))) for _ in range(DRAWS)]
    worst = 0.0
    for i, (x, own) in enumerate(zip(plain, written, strict=False)):
        if x.shape == own.shape and own.numel() > 1:
            fair = max(_apart(x, m[i]) for m in moved)
            worst = max(worst, _apart(x, own) / math.hypot(fair, eps / 12**0.5))
    return worst, max(len(operations), 1)


def _floating(values: Any) -> list[Tensor]:
    return [x for _, x in tensors_in(values) if x.is_floating_point()]


def _apart(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    known = torch.isfinite(a).all() and torch.isfinite(b).all()
    return float((a - b).norm() / a.norm().clamp_min(1e-300)) if known else 0.0


def difference_when_loaded(step: StepUnderTest, model: nn.Module) -> tuple[str, str] | None:
    """Load the state of the exact trace's model and what it leaves out; return where and how that differs."""
    model, own = model.double() if step.is_exact else model, step.exact.model
    state = copy.deepcopy(own.state_dict())
    state.update(left_out(step, own))
    try:
        result = model.load_state_dict(state, strict=False)
    except RuntimeError as error:
        return "", f"the state does not fit a model made anew: {str(error).splitlines()[-1].strip()}"
    if keys := [*result.missing_keys, *result.unexpected_keys]:
        return keys[0], f"either the model or one made anew has no such name ({len(keys)} in all)"
    apart = step.difference(step.exact, step.exact.again(model=model), whole)
    return (apart.module, f"outputs differ by {apart.size:.1e} after the round trip") if apart else None


def left_out(step: StepUnderTest, model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters that are declared frozen and that no state dict holds."""
    held = model.state_dict().keys()
    return {n: p for n, p in model.named_parameters() if n not in held and step.declare.is_frozen(n)}


def off_arranged(
    step: StepUnderTest, real: Tensor, one: Arranged, other: Arranged | None = None, **where: Any
) -> float:
    """Return how far outputs at these tokens `[B, T]` differ between a batch arranged as ``one`` and another,
    or the step's own; NaN if it does not run. ``where`` says which tokens, and which places only.
    """
    a, b = (_arranged(step, real, way, **where) for way in (one, other or Arranged(one.rows)))
    return math.nan if a is None or b is None or a.shape != b.shape else distance(a, b)


def _arranged(
    step: StepUnderTest, real: Tensor, arranged: Arranged, tokens: Tokens | None = None, **where: Any
) -> Tensor | None:
    base, (rows, columns, _), facts = step.logits(step.exact), arranged, step.facts
    pick, shown = real[rows], base if base.shape[0] == facts.rows else base.transpose(0, 1)
    if columns is None:
        shown = shown[rows]
    else:
        try:
            batch = facts.rearranged(arranged, tokens or facts.tokens, **where)
            shown = step.logits(step.exact.again(batch=batch))
        except Exception:  # a model of a fixed width accepts no other
            return None
        shown = shown if base.shape[0] == facts.rows else shown.transpose(0, 1)
        pick = pick.gather(1, columns(real.shape[1]))
    if (tokens and tokens.place != facts.tokens.place) or not facts.by_position(base):
        return shown
    if shown.shape[1] < pick.shape[1]:  # the last token has no output
        pick = (pick & pick.roll(-1, 1))[:, : shown.shape[1]]
    return shown[:, : pick.shape[1]][pick]


def generated(trace: Trace, ids: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Return the logits of a full pass over ids `[B, T]`, and of generating them with a cache.

    Raises Unknown for a model that has no cache.
    """
    model, past, parts = trace.model, None, list[Tensor]()
    ids = ids[:2, :GENERATED].to(next(model.parameters()).device)
    start = max(ids.shape[1] // 6, 1)
    with trace.running():
        full = _attribute(model(**{name: ids, "use_cache": False}), "logits")
        for part in (ids[:, :start], *ids[:, start:].split(1, dim=1)):
            output = model(**{name: part.contiguous(), "past_key_values": past, "use_cache": True})
            past = _attribute(output, "past_key_values")
            parts.append(_attribute(output, "logits"))
    return full, torch.cat(parts, 1)


def _attribute(output: Any, name: str) -> Any:
    value = getattr(output, name, None)
    if value is None:
        raise Unknown(f"its output has no {name}")
    return value


class _Exchange(NamedTuple):
    """A batch in which two places of a row, or of images, are exchanged."""

    batch: Any
    expected: Tensor
    """The logits of a model that does not see the order."""
    module: str = ""
    has_positions: bool = True
    """Whether some parameter of the model may hold an entry for each place."""


def exchanged_tokens(facts: Facts, logits: Tensor) -> _Exchange:
    """Exchange two tokens. Raises Unknown if they repeat."""
    ids, expected = facts.tokens.ids, logits.clone()
    one, other = 1, ids.shape[1] // 2
    row = next((i for i, own in enumerate(ids) if own[one] != own[other]), None)
    if row is None:
        raise Unknown("tokens repeat")
    swapped = ids.clone()
    swapped[row, [one, other]] = ids[row, [other, one]]
    if logits.ndim >= 3 and logits.shape[:2] == ids.shape:
        expected[row, [one, other]] = logits[row, [other, one]]
    return _Exchange(facts.with_tokens(swapped), expected)


def exchanged_patches(facts: Facts, logits: Tensor) -> _Exchange:
    """Exchange two patches of each image. Raises Unknown if none is cut into patches."""
    model, batch = facts.trace.model, facts.trace.batch
    for event in facts.trace.events:
        module = model.get_submodule(event.module)
        if not isinstance(module, nn.Conv2d) or module.kernel_size != module.stride or not facts.stacks:
            continue
        images = event.inputs[0]
        place = next((p for p, x in facts.entries.items() if x.shape == images.shape), None)
        high, wide = module.stride
        down, across = images.shape[2] // high, images.shape[3] // wide
        if place is None or logits.ndim != 2 or min(down, across) < 2:
            continue
        one, other = (..., slice(high), slice(wide)), (..., slice(high, 2 * high), slice(wide, 2 * wide))
        swapped = facts.entries[place].clone()
        swapped[one], swapped[other] = swapped[other].clone(), swapped[one].clone()
        counts = {down * across + more for more in range(3)}
        held = any(counts & {*p.shape} for p in model.parameters())
        return _Exchange(replaced(batch, place, swapped), logits, event.module, held)
    raise Unknown("the batch holds neither tokens nor an image that is cut into patches")


def one_token(facts: Facts) -> Any:
    """Return the batch with one token everywhere, no padding, and positions as the model counts them."""
    tokens, ids = facts.tokens, facts.tokens.ids
    pool = torch.unique(ids[ids != facts.declared.pad_id] if facts.declared.pad_id is not None else ids)

    def plain(place: Place, x: Tensor) -> Tensor:
        if place == tokens.place or x.is_floating_point() or x.shape != ids.shape:
            return x
        if set(torch.unique(x.long()).tolist()) <= {0, 1}:
            return torch.ones_like(x)
        return x if restarts(x.long()) is None else torch.arange(x.shape[1]).expand_as(x).to(x)

    return map_tensors(facts.with_tokens(torch.full_like(ids, int(pool[len(pool) // 2]))), plain)


class _Repeated(NamedTuple):
    """What one self-attention computes on one repeated token."""

    module: str
    scores: Tensor
    """`[B, H, T, T]`, before the softmax."""
    values: Tensor | None

    @property
    def seen(self) -> Tensor:
        """Which keys get a weight from a query in a model that looks back; a mask leaves the others none."""
        return (self.scores.double().softmax(-1) > 0).tril()

    @property
    def size(self) -> Tensor:
        """The largest score of a key that is seen."""
        return self.scores.masked_fill(~self.seen, 0).abs().max().clamp_min(1e-300)

    @property
    def slope(self) -> float:
        """How far the last query's scores differ among the keys that it sees, relative to the largest."""
        last, seen = self.scores[..., -1, :], self.seen[..., -1, :]
        far, near = last.masked_fill(~seen, -torch.inf).amax(-1), last.masked_fill(~seen, torch.inf).amin(-1)
        return float((far - near).max() / self.size)

    @property
    def beyond_distance(self) -> float:
        """How far the scores of two neighbouring queries differ beyond a factor and a constant each."""
        worst, s, seen = 0.0, self.scores, self.seen
        for i in range(4, s.shape[-1]):  # by distance: those of a query, and of the query before
            both = seen[..., i, 1 : i + 1] & seen[..., i - 1, :i]
            pair = (x.masked_fill(~both, torch.nan) for x in (s[..., i, 1 : i + 1], s[..., i - 1, :i]))
            x, y = ((part - part.nanmean(-1, keepdim=True)).nan_to_num(0) for part in pair)
            factor = (x * y).sum(-1, keepdim=True) / y.square().sum(-1, keepdim=True).clamp_min(1e-300)
            worst = max(worst, float((x - factor * y).abs().max() / self.size))
        return worst


def repeated(trace: Trace, width: int) -> Iterator[_Repeated]:
    """Yield what each self-attention over this many positions computes."""
    for call in trace.functions("scaled_dot_product_attention", "softmax"):
        if call.name == "softmax":
            x = call.argument(0, "input")
            if x.ndim == 4 and x.shape[-1] == x.shape[-2] == width:
                yield _Repeated(call.module, x.detach(), None)
            continue
        q, k = call.argument(0, "query"), call.argument(1, "key")
        if q.ndim != 4 or q.shape[-2] != k.shape[-2] or q.shape[-2] != width:
            continue
        scores, bias = call.products().detach(), call.argument(3, "attn_mask")
        if isinstance(bias, Tensor) and bias.is_floating_point():
            scores = scores + bias
        yield _Repeated(call.module, scores, call.argument(2, "value").detach())


def stream_variation(trace: Trace, module: str, size: tuple[int, int]) -> float:
    """Return how far the stream `[B, T, …]` read nearest around a module varies over T. Raises Unknown."""
    inside = module.split(".")
    for around in [".".join(inside[:depth]) for depth in range(len(inside), -1, -1)]:
        for event in trace.events:
            shown = (laid_out(x, *size) for x in event.inputs if x.is_floating_point())
            here = [x for x in shown if x is not None and x.ndim > 2]
            if event.module == around and here:
                return variation(min(here, key=Tensor.dim), 1)
    raise Unknown("no module around attention reads a stream with an axis for positions")


def variation(x: Tensor, axis: int) -> float:
    """Return how far a tensor differs along an axis from its first entry there."""
    return distance(x, x.narrow(axis, 0, 1).expand_as(x))
