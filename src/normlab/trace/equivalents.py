"""The same in another way: in float32, loaded again, padded differently, token by token, in another order."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from normlab.trace.autograd import Weights
from normlab.trace.compare import distance, laid_out, shaken, whole
from normlab.trace.facts import Unknown
from normlab.trace.facts.documents import restarts
from normlab.trace.facts.facts import Facts
from normlab.trace.facts.padding import Arranged, Frames, Padding
from normlab.trace.facts.stacks import stream_of
from normlab.trace.facts.tokens import Tokens
from normlab.trace.functions import FunctionCall, Functions
from normlab.trace.step_under_test import StepUnderTest
from normlab.trace.tensors import Place, apart, copied_batch, first_calls, map_tensors, replaced, tensors_in
from normlab.trace.trace import Event, Trace

DRAWS: Final = 3
WHOLE: Final = (torch.int32, torch.int64)
LOW: Final = frozenset({torch.bfloat16, torch.float16})
GENERATED: Final = 24
"""Number of tokens in a sequence that is generated with a cache; the first of them are read at once."""


def low_calls(step: StepUnderTest) -> tuple[Mapping[str, Any], float, bool]:
    """Run the model once, under autocast if the user's step runs it so. Return the first call of each module,
    the largest relative rounding, and whether anything runs under autocast.

    Raises Unknown if all is in float32.
    """
    trace, cast = step.unchanged, _autocast(step)
    inner = {path: module for path, module in trace.model.named_modules() if path}
    types, casts = {p.dtype for p in trace.model.parameters()}, set[torch.dtype]()
    device = next(trace.model.parameters()).device.type

    def keep(values: Any) -> Any:
        casts.update([torch.get_autocast_dtype(device)] if torch.is_autocast_enabled(device) else ())
        return copied_batch(values)  # objects too: a cache is filled by the call that it enters

    with torch.autocast(device, cast, enabled=cast is not None), first_calls(inner, keep) as calls:
        trace.once()
    written = {x.dtype for _, outputs in calls.values() for x in _floating(outputs)}
    low = LOW & (types | casts | written)
    if not low:
        raise Unknown("nothing is in low precision: no parameter, and no output of a module")
    return calls, max(torch.finfo(t).eps for t in low), bool(casts)


def _autocast(step: StepUnderTest) -> torch.dtype | None:
    """Return the type of the autocast under which the user's step runs the model, if it does."""
    if step.setup.step is not None:
        with suppress(Exception):
            return step.whole_step.twice[1].cast
    return None


def roundings(step: StepUnderTest) -> Iterator[tuple[str, float, int]]:
    """Yield each module with the error of its first call in low precision, inner ones first, in units of what
    one rounding of its inputs and output causes, and its number of operations.

    A module that makes another choice in float32, such as other experts for a token, is left out: it then
    computes another function, and how far apart two functions are is no matter of rounding. Raises Unknown if
    all is in float32.
    """
    (calls, eps, cast), twins = low_calls(step), step.copies.make().float().eval()
    for path, (values, written) in calls.items():
        with suppress(Exception):  # a module may insist on its own dtype
            twin = twins.get_submodule(path)
            weights = dict(twin.named_parameters()) if cast else {}
            wide = copied_batch(values, torch.float32)
            plain, operations, choices = _run(twin, wide)
            if choices and not _same(choices, _choices_in_low_precision(step, path, values)):
                continue
            moved = _moved_by_one_rounding(twin, weights, wide, eps)
            yield path, _ratio(plain, moved, _floating(written), eps), max(operations, 1)


def roundings_of_loss(step: StepUnderTest) -> tuple[float, int] | None:
    """Return how far the loss that is made of outputs in low precision is from that of the same outputs in
    float32, and how many operations make it. The distance is counted in roundings of the loss, or in what one
    rounding of the outputs and of the batch does to it where that is more. None without such outputs, or if
    the loss is made of other things as well.
    """
    trace, cast = step.unchanged, _autocast(step)
    device = next(trace.model.parameters()).device.type
    with torch.autocast(device, cast, enabled=cast is not None):
        with first_calls({"": trace.model}, copied_batch) as calls:
            low = trace.once().loss
        written = calls[""][1] if "" in calls else None
        types = {x.dtype for x in _floating(written)} & LOW
        if low is None or not types or not step.copies.loss_runs_model:
            return None
        if not torch.equal(low, _loss_of_outputs(step, trace, written, trace.batch)[0]):
            return None
    eps, generator = max(torch.finfo(dtype).eps for dtype in types), torch.Generator().manual_seed(0)
    wide = [copied_batch(values, torch.float32) for values in (written, trace.batch)]
    exact, operations = _loss_of_outputs(step, trace, *wide)

    def moved(_: Any, x: Tensor) -> Tensor:
        return shaken(x, eps, generator) if x.is_floating_point() else x

    rounded = eps / 2
    for _ in range(DRAWS):
        other, _ = _loss_of_outputs(step, trace, *(map_tensors(values, moved) for values in wide))
        rounded = max(rounded, _apart(exact, other))
    return _apart(exact, low) / rounded, operations


def _loss_of_outputs(step: StepUnderTest, trace: Trace, outputs: Any, batch: Any) -> tuple[Tensor, int]:
    """Return the loss of these outputs, whatever the model reads, and how many functions make it."""
    model, calls = step.copies.make(), list[str]()
    in_float32 = all(x.dtype not in LOW for x in _floating(outputs))
    model = model.float() if in_float32 else model
    model.forward = lambda *_, **__: outputs

    def counted(model: nn.Module, batch: Any) -> Tensor:
        with Functions(see=lambda call: calls.append(call.name)):
            return trace.loss_of(model, batch)

    return trace.again(model=model, batch=batch, loss_of=counted).loss, len(calls)


def _run(module: nn.Module, values: Any) -> tuple[list[Tensor], int, list[Tensor]]:
    """Run a module on copies of its arguments. Return its outputs, how many functions it called, and what
    it chose: the whole numbers that functions made of others, such as the experts with the largest scores.
    """
    operations, choices = 0, list[Tensor]()

    def see(call: FunctionCall) -> None:
        nonlocal operations
        operations += 1
        if any(x.is_floating_point() for _, x in tensors_in((call.args, call.kwargs))):
            made = (x for _, x in tensors_in(call.result))
            choices.extend(x.clone() for x in made if x.dtype in WHOLE)

    args, keywords = apart(copied_batch(values))
    with torch.no_grad(), Functions(see=see):
        outputs = _floating(module(*args, **keywords))
    return outputs, operations, choices


def _choices_in_low_precision(step: StepUnderTest, path: str, values: Any) -> list[Tensor]:
    """Return what a module of the user's model chooses when it is called again with these arguments."""
    trace, cast = step.unchanged, _autocast(step)
    device = next(trace.model.parameters()).device.type
    with trace.running(), torch.autocast(device, cast, enabled=cast is not None):
        return _run(trace.model.get_submodule(path), values)[2]


def _same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def _moved_by_one_rounding(twin: nn.Module, weights: Weights, wide: Any, eps: float) -> list[list[Tensor]]:
    """Return the outputs for inputs and weights that are each moved by a random rounding."""
    generator = torch.Generator().manual_seed(0)

    def moved(_: Any, x: Tensor) -> Tensor:
        return shaken(x, eps, generator) if x.is_floating_point() else x

    outputs = list[list[Tensor]]()
    with torch.no_grad():
        for _ in range(DRAWS):
            shaken_weights, read = (map_tensors(copied_batch(x), moved) for x in (weights, wide))
            args, keywords = apart(read)
            outputs.append(_floating(functional_call(twin, shaken_weights, args, keywords)))
    return outputs


def _ratio(plain: list[Tensor], moved: list[list[Tensor]], written: list[Tensor], eps: float) -> float:
    worst = 0.0
    for i, (x, low) in enumerate(zip(plain, written, strict=False)):
        if x.shape == low.shape and low.numel() > 1:
            fair = max(_apart(x, m[i]) for m in moved)
            worst = max(worst, _apart(x, low) / math.hypot(fair, eps / 12**0.5))
    return worst


def _floating(values: Any) -> list[Tensor]:
    return [x for _, x in tensors_in(values) if x.is_floating_point()]


def _apart(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    known = torch.isfinite(a).all() and torch.isfinite(b).all()
    return float((a - b).norm() / a.norm().clamp_min(1e-300)) if known else 0.0


def difference_when_loaded(step: StepUnderTest, model: nn.Module) -> tuple[str, str] | None:
    """Load the state of the exact trace's model and what it leaves out; return where and how that differs."""
    model, own = model.double() if step.is_exact else model, step.exact.model
    state = {**own.state_dict(), **left_out(step, own)}
    try:
        result = model.load_state_dict(state, strict=False)
    except RuntimeError as error:
        return "", f"the state does not fit a model made anew: {str(error).splitlines()[-1].strip()}"
    if keys := [*result.missing_keys, *result.unexpected_keys]:
        return keys[0], f"either the model or one made anew has no such name ({len(keys)} in all)"
    apart = step.comparison.difference(step.exact, step.exact.again(model=model), whole)
    return (apart.module, f"outputs differ by {apart.size:.1e} after the round trip") if apart else None


def left_out(step: StepUnderTest, model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters that are declared frozen and that no state dict holds."""
    held = model.state_dict().keys()
    return {n: p for n, p in model.named_parameters() if n not in held and step.declare.is_frozen(n)}


def places_along(facts: Facts, tokens: Tokens, padded: Padding) -> dict[str, Any]:
    """Return which tokens are arranged anew, and at which places of the batch only: those of the tokens and
    their mask, unless nothing else is as long.
    """
    widths = {padded.real.shape[1], padded.real.shape[1] + 1}
    others = [t for t in facts.sources if t.place != tokens.place and t.entry.shape[1] in widths]
    alone = tokens.place == facts.tokens.place and not others
    return {"tokens": tokens, "only": () if alone else {tokens.place, padded.mask}}


def with_more_padding(step: StepUnderTest, tokens: Tokens, padded: Padding) -> tuple[Trace, Trace] | None:
    """Return the training step on the rows that hold padding, and the same with one more column of it; None
    if the batch holds no such rows, or if the model does not run on them.
    """
    facts, more = step.facts, padded.arranged().get("more")
    if more is None:
        return None
    where = places_along(facts, tokens, padded)
    try:
        as_it_is = step.training.again(batch=facts.rearranged(more._replace(columns=None), **where))
        longer = step.training.again(batch=facts.rearranged(more, **where))
        known = bool(torch.isfinite(as_it_is.loss)) and bool(torch.isfinite(longer.loss))
    except Exception:  # a model of a fixed width, or of a fixed number of rows, accepts no other
        return None
    return (as_it_is, longer) if known else None


def off_arranged(
    step: StepUnderTest, real: Tensor, one: Arranged, other: Arranged | None = None, **where: Any
) -> float:
    """Return how far outputs at these tokens `[B, T]` differ between a batch arranged as ``one`` and another,
    or the step's own; NaN if it does not run. ``where`` says which tokens, and which places only.

    What a model draws belongs to the places of its batch. If that moves outputs, all rows are kept where they
    are; and NaN is returned if a pass then still draws other numbers.
    """
    other = other or Arranged(one.rows)
    a, b = (_arranged(step, real, way, **where) for way in (one, other))
    apart = math.nan if a is None or b is None or a.shape != b.shape else distance(a, b)
    if not apart > step.rounding or not step.comparison.outputs_are_drawn:
        return apart
    a, b = (_arranged(step, real, way, in_place=True, **where) for way in (one, other))
    return math.nan if a is None or b is None or a.shape != b.shape else distance(a, b)


def _arranged(
    step: StepUnderTest,
    real: Tensor,
    arranged: Arranged,
    tokens: Tokens | None = None,
    *,
    in_place: bool = False,
    **where: Any,
) -> Tensor | None:
    base, (rows, columns, _), facts = step.comparison.logits(step.exact), arranged, step.facts
    pick, shown = real[rows], base if base.shape[0] == facts.rows else base.transpose(0, 1)
    if columns is None:
        shown = shown[rows]
    else:
        try:
            way = arranged.in_place(facts.rows) if in_place else arranged
            other = step.exact.again(batch=facts.rearranged(way, tokens or facts.tokens, **where))
            if in_place and not step.comparison.draws_the_same(other):
                return None
            shown = step.comparison.logits(other)
        except Exception:  # a model of a fixed width accepts no other
            return None
        shown = shown if base.shape[0] == facts.rows else shown.transpose(0, 1)
        shown = shown[rows] if in_place else shown
        pick = pick.gather(1, columns(real.shape[1]))
    if (tokens and tokens.place != facts.tokens.place) or not facts.by_position(base):
        return shown
    if shown.shape[1] < pick.shape[1]:  # the last token has no output
        pick = (pick & pick.roll(-1, 1))[:, : shown.shape[1]]
    return shown[:, : pick.shape[1]][pick]


def off_with_more_frames(step: StepUnderTest, frames: Frames) -> float:
    """Return how far the outputs of the row that holds the most padding are from those that it gives with one
    more frame of it; NaN if the model does not run on such frames, or draws other numbers then.
    """
    facts, real = step.facts, frames.real
    batch = frames.with_one_more(facts.entries, step.exact.batch)
    if batch is None:
        return math.nan
    try:
        longer = step.exact.again(batch=batch)
        base, other = (step.comparison.logits(trace) for trace in (step.exact, longer))
    except Exception:  # a model of a fixed width accepts no other
        return math.nan
    if step.comparison.outputs_are_drawn and not step.comparison.draws_the_same(longer):
        return math.nan
    rows, length = real.shape
    if base.shape[0] != rows:
        return math.nan
    row = int(real.sum(1).argmin())
    base, other = base[row], other[row]
    if other.ndim and base.ndim and (len(base), len(other)) == (length, length + 1):
        base, other = base[real[row]], other[:length][real[row]]
    return distance(base, other) if base.shape == other.shape else math.nan


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
    row, places = _two_tokens(facts)
    swapped = facts.tokens.ids.clone()
    swapped[row, places] = swapped[row, places[::-1]]
    return _Exchange(facts.with_tokens(swapped), _with_exchanged(facts, logits, row, places))


def exchanged_places(facts: Facts, logits: Tensor) -> _Exchange:
    """Exchange two tokens with all that the batch holds of them, such as their distances to others, but for
    counts, which are positions themselves.

    Raises Unknown if the tokens repeat, or if it is not known what of the batch belongs to a token.
    """
    row, places = _two_tokens(facts)
    rows, width = facts.tokens.ids.shape
    order = torch.arange(width)
    order[places] = order[places[::-1]]

    def change(_: Place, x: Tensor) -> Tensor:
        if x.ndim < 2 or x.shape[0] != rows:
            return x
        axes = [axis for axis in range(1, x.ndim) if x.shape[axis] == width]
        if not axes:
            raise Unknown("the batch holds more than tokens, and nothing says which of it belongs to which")
        if not x.is_floating_point() and bool((x.diff(dim=axes[0]) == 1).all()):
            return x
        x = x.clone()
        for axis in axes:
            x[row] = x[row].index_select(axis - 1, order.to(x.device))
        return x

    batch = map_tensors(facts.trace.batch, change)
    return _Exchange(batch, _with_exchanged(facts, logits, row, places))


def _two_tokens(facts: Facts) -> tuple[int, list[int]]:
    """Return a row and two places of it whose tokens differ. Raises Unknown if there is none."""
    ids = facts.tokens.ids
    one, other = 1, ids.shape[1] // 2
    for row, tokens in enumerate(ids):
        if tokens[one] != tokens[other]:
            return row, [one, other]
    raise Unknown("tokens repeat")


def _with_exchanged(facts: Facts, logits: Tensor, row: int, places: list[int]) -> Tensor:
    """Return the logits of a model that does not see the order."""
    expected = logits.clone()
    if logits.ndim >= 3 and logits.shape[:2] == facts.tokens.ids.shape:
        expected[row, places] = logits[row, places[::-1]]
    return expected


def runs_over_tokens(step: StepUnderTest, exchanged: Trace) -> bool:
    """Return whether some block's stream holds the tokens: where two of them are exchanged, two of its
    vectors change places, and no other one changes. Without blocks nothing tells, and they count as held.

    Words that other tokens read by cross-attention are in no stream.
    """
    blocks = {block.path for block in step.facts.blocks}
    pairs = zip(step.exact.events, exchanged.events, strict=False)
    entered = [(a.inputs, b.inputs) for a, b in pairs if a.module == b.module and a.module in blocks]
    streams = [(stream_of(a), stream_of(b)) for a, b in entered]
    known = [(x, y) for x, y in streams if x is not None and y is not None and x.shape == y.shape]
    return not known or any(_two_change_places(x, y, step.rounding) for x, y in known)


def _two_change_places(x: Tensor, y: Tensor, limit: float) -> bool:
    """Return whether one stream is the other with two of its vectors exchanged, up to rounding."""
    x, y = x.flatten(0, -2), y.flatten(0, -2)
    least = limit * float(x.abs().max())
    moved = ((x - y).abs().amax(-1) > least).nonzero()[:, 0]
    return len(moved) == 2 and distance(x[moved], y[moved.flip(0)]) <= limit


def exchanged_patches(facts: Facts, logits: Tensor) -> _Exchange:
    """Exchange two patches of each image. Raises Unknown if none is cut into patches."""
    model, batch = facts.trace.model, facts.trace.batch
    has_layers = bool(facts.stacks) or any(facts.listed.values())
    images = {place: x for place, x in facts.entries.items() if x.ndim == 4}
    calls = facts.tapped.events if has_layers and logits.ndim == 2 else ()
    for event in calls:
        for place, x in images.items():
            size = _size_of_patches(model.get_submodule(event.module), event, x)
            if size is None:
                continue
            high, wide = size
            down, across = x.shape[2] // high, x.shape[3] // wide
            if min(down, across) < 2:
                continue
            one, other = _first_two(high, wide)
            swapped = x.clone()
            swapped[one], swapped[other] = x[other], x[one]
            counts = {down * across + more for more in range(3)}
            held = any(counts & {*p.shape} for p in model.parameters())
            return _Exchange(replaced(batch, place, swapped), logits, event.module, held)
    raise Unknown("the batch holds neither tokens nor an image that is cut into patches")


def _size_of_patches(module: nn.Module, event: Event, images: Tensor) -> tuple[int, int] | None:
    """Return the height and width of the patches into which a call cuts images `[B, C, H, W]`: by a
    convolution, or by any rearrangement, which gives rows of the same numbers. None if it does not.
    """
    if isinstance(module, nn.Conv2d):
        cuts = module.kernel_size == module.stride and event.inputs[0].shape == images.shape
        return (module.stride[0], module.stride[1]) if cuts else None
    for rows in (*event.inputs, *event.outputs):
        if rows.ndim != 3 or len(rows) != len(images) or rows.numel() != images.numel():
            continue
        area = images[0, 0].numel() / rows.shape[1]
        side = math.isqrt(int(area))
        if side * side != area or any(length % side for length in images.shape[2:]):
            continue
        squares = [images[place].flatten(1) for place in _first_two(side, side)]
        if all(torch.equal(a.sort().values, rows[:, i].to(a).sort().values) for i, a in enumerate(squares)):
            return side, side
    return None


def _first_two(high: int, wide: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the places of the first two patches of each image."""
    return (..., slice(high), slice(wide)), (..., slice(high), slice(wide, 2 * wide))


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


class Repeated(NamedTuple):
    """What one self-attention computes on one repeated token."""

    module: str
    scores: Tensor
    """`[B, H, T, T]`, before the softmax."""
    values: Tensor | None
    read: tuple[Tensor, Tensor] | None = None
    """Queries and keys, `[B, H, T, D]`, if they are seen."""

    @property
    def turned(self) -> tuple[float, float] | None:
        """How far the directions of queries, and those of keys, differ among positions. Their sizes may, as
        where queries are scaled by how many keys they see.
        """
        if self.read is None:
            return None
        queries, keys = (variation(F.normalize(x, dim=-1), 2) for x in self.read)
        return queries, keys

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


def repeated(trace: Trace, width: int) -> Iterator[Repeated]:
    """Yield what each self-attention over this many positions computes."""
    for call in trace.functions("scaled_dot_product_attention", "softmax"):
        if call.name == "softmax":
            x = call.argument(0, "input")
            if x.ndim == 4 and x.shape[-2] == width and (scores := _of_tokens(x.detach())) is not None:
                yield Repeated(call.module, scores, None)
            continue
        q, k = call.argument(0, "query"), call.argument(1, "key")
        if q.ndim != 4 or q.shape[-2] != k.shape[-2] or q.shape[-2] != width:
            continue
        scores, bias = call.products().detach(), call.argument(3, "attn_mask")
        if isinstance(bias, Tensor) and bias.is_floating_point():
            scores = scores + bias
        yield Repeated(call.module, scores, call.argument(2, "value").detach(), (q.detach(), k.detach()))


def _of_tokens(scores: Tensor) -> Tensor | None:
    """Return the scores `[…, T, T]` of the tokens among `[…, T, S]`, which may hold sinks before or behind
    them; None if these cannot be told apart.

    The first query sees the first token and every sink, and no later token. Only differences between the
    scores of a query mean anything, and code may take its largest off, such as that of a sink, so those of
    tokens are counted from a sink's: what is left of them would be the rounding of what was taken off.
    """
    width, keys = scores.shape[-2:]
    if keys <= width:
        return scores if keys == width else None
    seen = scores[..., 0, :].double().softmax(-1).flatten(0, -2).any(0)
    later = (~seen).nonzero()[:, 0].tolist()
    if len(later) != width - 1 or later != list(range(later[0], later[0] + width - 1)) or not later[0]:
        return None
    first = later[0] - 1
    sink = 0 if first else keys - 1
    return scores[..., first : first + width] - scores[..., sink, None]


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
