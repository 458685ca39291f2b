"""How far the output moves when the weights do, and how that grows with depth."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from normlab.diagnosis.probing.passes import Pass, Seen, look
from normlab.diagnosis.probing.step import Make, updated
from normlab.diagnosis.probing.stepping import Weights, at_weights
from normlab.diagnosis.reading.structure import StackView
from normlab.diagnosis.reading.subject import Subject
from normlab.diagnosis.reading.taps import Tap, capture
from normlab.diagnosis.reading.tokens import Real, real_tokens, rows
from normlab.diagnosis.rules.fits import Curve, fits_of_curves
from normlab.diagnosis.table import Table
from normlab.errors import UserError

SIZE = 0.01
"""Of a random change, relative to each matrix's root mean square."""
MIN_DEPTHS = 3
"""That a law is fitted to."""


def output_change(
    subject: Subject,
    *,
    optimiser: Optimizer | Make | None = None,
    size: float = SIZE,
    seed: int = 0,
    stack: str | None = None,
    real: Real | None = None,
) -> Table:
    r""":math:`\frac{1}{d} \mathbb{E} \|F_l(x_0, W) - F_l(x_0, W^*)\|^2` for the prefixes :math:`F_l` of one
    model: the stream after sublayer l, through the final norm of its stack where there is one.

    Two kinds: ``random``, :math:`W^* = W + \delta` with :math:`\delta` normal of ``size`` times each
    matrix's root mean square, on the matrices of the sublayers of every stack, so that :math:`x_0` stays;
    and, with an ``optimiser``, ``update``: the weights that one update of it leads to (``step.updated``), all
    that it trains, embeddings included. Per element, over real tokens, without dropout. Of normed streams
    the change is at most about 2, where it is no longer linear in the size. ``stack`` is the last one unless
    named. Columns: kind, depth (l, from 1), change, seed.

    Liu et al. 2020, Theorem 2 and Figure 4 (arXiv 2004.08249). Raises UserError for a stack that does not
    exist, and for a model without gradients, whose sublayers own nothing.
    """
    view = _stack(subject, stack)
    found = output_changes(subject, [view], optimiser=optimiser, size=size, seeds=[seed], real=real)
    return Table("output_change", tuple({k: x for k, x in row.items() if k != "stack"} for row in found))


def output_changes(
    subject: Subject,
    stacks: Sequence[StackView],
    *,
    optimiser: Optimizer | Make | None = None,
    size: float = SIZE,
    seeds: Sequence[int] = (0,),
    real: Real | None = None,
    passed: Pass | None = None,
) -> Table:
    """The same of several stacks for several random changes, with the stack's name as the first column.

    All stacks look at one changed model. The update, into which no seed enters, has the first one, and is
    that of the last of the stacks. ``passed`` is of the subject, if there was a pass.
    """
    # branches side by side are one place, which has the last one's depth
    taps = {view.name: {v.after: v.index + 1 for v in view.sublayers} for view in stacks}
    found = _changes(subject, taps, optimiser=optimiser, size=size, seeds=seeds, real=real, passed=passed)
    order = {name: i for i, name in enumerate(taps)}
    kinds = {"random": 0, "update": 1}
    ordered = sorted(found, key=lambda r: (order[r[0]], r[-1], kinds[r[1]], r[2]))
    return Table("output_change", tuple({"stack": r[0], **_row(*r[1:])} for r in ordered))


def output_change_family(
    family: Callable[[int], Subject],
    depths: Sequence[int],
    *,
    optimiser: Make | None = None,
    size: float = SIZE,
    seed: int = 0,
    stack: str | None = None,
) -> Table:
    """The same for the whole stack of each model of a family, ``family(n)`` for n in ``depths``.

    In the table, depth counts the sublayers of all stacks of the model. Models are made one after the other,
    and for another ``seed`` by a family of other starts.
    """
    found: list[tuple[str, int, float, int]] = []
    for n in depths:
        subject = family(n)
        view = _stack(subject, stack)
        sublayers = sum(len(stack.sublayers) for stack in subject.structure.stacks)
        whole = {view.name: {view.sublayers[-1].after: sublayers}}
        changes = _changes(
            subject, whole, optimiser=optimiser, size=size, seeds=[seed], real=None, passed=None
        )
        found.extend(change[1:] for change in changes)
    return Table("output_change", tuple(_row(*change) for change in found))


def output_change_fit(changes: Table) -> Table:
    """The laws of ``fits.fits_of_curves`` for each kind of ``output_change``, one curve for each seed.

    Columns: kind, law, coefficient, exponent, low, high, r2, aic. A kind of fewer than three depths has no
    rows, and one with a change of 0 no power law. Liu et al. 2020, Corollaries 1 and 2 (arXiv 2004.08249): a
    Pre-LN follows log N, a Post-LN N. The logarithm begins where the branches together outweigh the stack's
    input; before that a Pre-LN's change grows like N as well.
    """
    found = []
    for kind in dict.fromkeys(changes.column("kind")):
        some = changes.where(kind=kind)
        curves = [_curve(some.where(seed=seed)) for seed in dict.fromkeys(some.column("seed"))]
        if all(len(depths) >= MIN_DEPTHS for depths, _ in curves):
            found.extend({"kind": kind, **vars(fit)} for fit in fits_of_curves(curves))
    return Table("output_change_fit", tuple(found))


def random_change(
    subject: Subject, *, size: float = SIZE, seed: int = 0, seen: Seen | None = None
) -> dict[str, Tensor]:
    r""":math:`W + \delta`, :math:`\delta_i \sim N(0, (\text{size} \cdot \mathrm{rms}(W))^2)`, for every
    matrix W of a sublayer, by its path.

    The gains, biases and factors of norms and shortcuts, vectors, are not drawn at random and stay: where
    they are on the shortcut, noise on them moves the stream whatever its dependency is. Numbers depend on the
    seed and the order of parameters only, not on the device. ``seen`` is found by ``look`` if not given.
    Raises UserError where no sublayer owns a matrix that needs a gradient.
    """
    seen = seen or look(subject)
    owned = {path for path, owner in seen.owned.items() if owner.role != "other"}
    generator = torch.Generator().manual_seed(seed)
    changed: dict[str, Tensor] = {}
    for path, p in subject.model.named_parameters():
        if path in owned and sum(length > 1 for length in p.shape) > 1:
            w = p.detach()
            noise = torch.randn(w.shape, generator=generator).to(w)
            rms = torch.linalg.vector_norm(w) / w.numel() ** 0.5
            changed[path] = noise.mul_(size * rms).add_(w)
    if not changed:
        raise UserError(
            "no matrix of a sublayer needs a gradient, so there is nothing to change; unfreeze them, as in "
            "model.requires_grad_(), and call this outside of torch.no_grad()"
        )
    return changed


def _curve(changes: Table) -> Curve:
    pairs = [(r["depth"], r["change"]) for r in changes]
    points = sorted((n, y) for n, y in pairs if isinstance(n, (int, float)) and isinstance(y, (int, float)))
    return [n for n, _ in points], [y for _, y in points]


def _row(kind: str, depth: int, change: float, seed: int) -> dict[str, str | int | float]:
    return {"kind": kind, "depth": depth, "change": change, "seed": seed}


def _changes(
    subject: Subject,
    wanted: Mapping[str, Mapping[Tap, int]],
    *,
    optimiser: Optimizer | Make | None,
    size: float,
    seeds: Sequence[int],
    real: Real | None,
    passed: Pass | None,
) -> Iterator[tuple[str, str, int, float, int]]:
    """Stack, kind, depth, change and seed at every tap of every stack; the update of the last stack alone."""
    masks = real or real_tokens(subject)
    seen = passed.seen if passed else look(subject)
    before = _outputs(subject, wanted, masks)

    def changes(kind: str, seed: int, weights: Weights) -> Iterator[tuple[str, str, int, float, int]]:
        stacks = list(wanted)[-1:] if kind == "update" else list(wanted)
        with at_weights(subject.model, weights):
            after = _outputs(subject, {name: wanted[name] for name in stacks}, masks)
        for name in stacks:
            pairs = zip(before[name], after[name], strict=True)
            found = torch.stack([(x - y).square().mean() for x, y in pairs]).tolist()
            yield from ((name, kind, n, c, seed) for n, c in zip(wanted[name].values(), found, strict=True))

    for seed in seeds:
        yield from changes("random", seed, random_change(subject, size=size, seed=seed, seen=seen))
    if optimiser is not None:
        slope = passed.slope if passed else None
        yield from changes("update", seeds[0], updated(subject, optimiser, slope))


@torch.no_grad()
def _outputs(
    subject: Subject, wanted: Mapping[str, Mapping[Tap, int]], masks: Real
) -> dict[str, list[Tensor]]:
    """Real tokens `[N, D]` of the stream at every tap, normed as its stack's output is, by stack."""
    with capture(subject.model, [tap for taps in wanted.values() for tap in taps]) as caught:
        subject.forward()
    finals = {stack.name: stack.final_norm for stack in subject.structure.stacks}
    found: dict[str, list[Tensor]] = {}
    for name, taps in wanted.items():
        path = finals[name]
        final = subject.model.get_submodule(path) if path else torch.nn.Identity()
        found[name] = [rows(final(caught[tap]), masks[name]) for tap in taps]
    return found


def _stack(subject: Subject, name: str | None) -> StackView:
    stacks = {stack.name: stack for stack in subject.structure.stacks}
    if name is None:
        return subject.structure.stacks[-1]
    if name not in stacks:
        raise UserError(f"the model has no stack {name!r}; its stacks are {', '.join(map(repr, stacks))}")
    return stacks[name]
