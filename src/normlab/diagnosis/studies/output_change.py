"""Measure how far the output moves when the weights change, and how that grows with depth."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from normlab.base.chart import Growth
from normlab.diagnosis.laws import Curve, fits_of_curves
from normlab.diagnosis.structure import StackView, Structure
from normlab.diagnosis.studies.dependency import depends_strongly
from normlab.diagnosis.study import LIU, SMALL_BATCH, Finding, Study
from normlab.diagnosis.subject import AnyOptimizer, Subject
from normlab.diagnosis.tables import Row, Table, Tables, Value, as_float
from normlab.diagnosis.wording import at_peak, format_number
from normlab.errors import UserError
from normlab.trace.autograd import Weights, trainable
from normlab.trace.trace import at_weights

ASKED: Final = 4
"""Number of random weight changes in a diagnosis, for the interval of the exponent."""
FAST_CHANGE: Final = 0.5
"""Exponent of the output change: log N has a local exponent of 1 / ln N, which is below one half from 8
sublayers on. An interval that lies entirely above this is not a logarithm. If branches are small beside the
stack's input, changes add up like N in a Pre-LN too, so it only counts if sublayers depend on their branches.
"""
REPLACED: Final = 1.0
"""Share of the output's mean square that one step changes; two unrelated outputs differ by 2."""

SIZE = 0.01
"""Size of a random change, relative to each matrix's root mean square."""
MIN_DEPTHS = 3
"""The fewest depths that a law needs."""


def output_change(
    subject: Subject,
    *,
    stacks: Sequence[str] | None = None,
    optimizer: AnyOptimizer | None = None,
    size: float = SIZE,
    seeds: Sequence[int] = (0,),
) -> Table:
    r"""Measure :math:`\frac{1}{d} \mathbb{E} \|F_l(x_0, W) - F_l(x_0, W^*)\|^2` for the prefixes :math:`F_l`
    of one model: the stream after sublayer l, through the final norm of its stack if it has one.

    Two kinds: ``random``, :math:`W^* = W + \delta` with :math:`\delta` normal of ``size`` times each
    matrix's root mean square, on the matrices of the sublayers of every stack, so :math:`x_0` stays;
    and, with an ``optimizer``, ``update``: the weights after one update (``Trace.update``) of all that it
    trains, including embeddings. For a subject with ``warmup_steps`` there is a third one, ``first``: the
    update times ``first_share``, as at the first step of a warm-up. Values are per element, without padding
    and dropout. For normed streams the change is at most about 2, where it is no longer linear in the size.

    ``stacks`` is the last one unless named; all of them look at one changed model. An update depends on no
    seed; its rows have the first of ``seeds``, and are about the last stack alone. Columns: stack, kind,
    depth (l, from 1), change, seed.

    Liu et al. 2020, Theorem 2 and Figure 4 (arXiv 2004.08249). Raises UserError for a stack that does not
    exist, and for a model without gradients, whose sublayers own nothing.
    """
    chosen = _stacks_named(subject.structure, stacks)
    before = _outputs(subject, chosen, {})
    changes = list[_Change]()
    for seed in seeds:
        moved = random_change(subject, size=size, seed=seed)
        for number, after in enumerate(_outputs(subject, chosen, moved)):
            changes += _changes(chosen[number], number, before[number], after, seed=seed, kind="random")
    if optimizer is not None:
        last, seed = len(chosen) - 1, seeds[0]
        for kind, moved in _updates(subject, optimizer).items():
            (after,) = _outputs(subject, chosen[last:], moved)
            changes += _changes(chosen[last], last, before[last], after, seed=seed, kind=kind)
    rows = (
        {
            "stack": chosen[change.stack].name,
            "kind": change.kind,
            "depth": change.depth,
            "change": change.change,
            "seed": change.seed,
        }
        for change in sorted(changes)
    )
    return Table("output_change", tuple(rows))


class _Change(NamedTuple):
    """One row, with its stack's number; rows are sorted by these fields in this order."""

    stack: int
    seed: int
    kind: str
    depth: int
    change: float


def _stacks_named(structure: Structure, names: Sequence[str] | None) -> list[StackView]:
    """Return the stacks of these names, or the last one. Raises UserError for a name that does not exist."""
    by_name = {stack.name: stack for stack in structure.stacks}
    if not names:
        return list(structure.stacks[-1:])
    for name in names:
        if name not in by_name:
            known = ", ".join(map(repr, by_name))
            raise UserError(f"the model has no stack {name!r}; its stacks are {known}")
    return [by_name[name] for name in names]


def _changes(
    stack: StackView, number: int, before: list[Tensor], after: list[Tensor], *, seed: int, kind: str
) -> list[_Change]:
    """Return the changes after every sublayer; branches side by side are one, with the last one's depth."""
    depths = {view.after: view.index + 1 for view in stack.sublayers}.values()
    squares = torch.stack([(x - y).square().mean() for x, y in zip(before, after, strict=True)]).tolist()
    pairs = zip(depths, squares, strict=True)
    return [_Change(number, seed, kind, depth, square) for depth, square in pairs]


def _updates(subject: Subject, optimizer: AnyOptimizer) -> dict[str, Weights]:
    """Return the weights after one update and, with a warm-up, after its first one, by kind."""
    after = subject.trace().update(optimizer, subject.backward.slope)
    if not subject.warmup_steps:
        return {"update": after}
    share, weights = subject.first_share, trainable(subject.model)
    first = {path: p.detach().lerp(after[path], share) for path, p in weights.items()}
    return {"update": after, "first": first}


def output_change_fit(changes: Table) -> Table:
    """Fit the laws of ``laws.fits_of_curves`` to each kind of ``output_change``, with a curve for each seed.

    Columns: kind, law, coefficient, exponent, low, high, r2, aic. A kind with fewer than three depths has no
    rows, one with a change of 0 no power law. Liu et al. 2020, Corollaries 1 and 2 (arXiv 2004.08249): a
    Pre-LN follows log N, a Post-LN N. The logarithm begins where the branches together outweigh the stack's
    input; before that a Pre-LN's change grows like N as well.
    """
    rows = list[Row]()
    for kind in dict.fromkeys(changes.column("kind")):
        of_kind = changes.where(kind=kind)
        curves = [_curve(of_kind.where(seed=seed)) for seed in dict.fromkeys(of_kind.column("seed"))]
        if all(len(depths) >= MIN_DEPTHS for depths, _ in curves):
            rows.extend({"kind": kind, **vars(fit)} for fit in fits_of_curves(curves))
    return Table("output_change_fit", tuple(rows))


def random_change(subject: Subject, *, size: float = SIZE, seed: int = 0) -> dict[str, Tensor]:
    r"""Return :math:`W + \delta`, :math:`\delta_i \sim N(0, (\text{size} \cdot \mathrm{rms}(W))^2)`, for
    every matrix W of a sublayer, by its path.

    Vectors, which are gains, biases and factors of norms and shortcuts, are not drawn at random and stay: on
    the shortcut, noise in them moves the stream whatever its dependency is. Numbers depend only on the seed
    and the order of parameters, not on the device. Raises UserError if no sublayer owns a matrix that needs a
    gradient.
    """
    owned, generator = subject.forward.owned, torch.Generator().manual_seed(seed)
    changed: dict[str, Tensor] = {}
    for path, p in subject.model.named_parameters():
        is_matrix = sum(length > 1 for length in p.shape) > 1
        if owned[path].role != "other" and is_matrix:
            w = p.detach()
            noise = torch.randn(w.shape, generator=generator).to(w)
            rms = torch.linalg.vector_norm(w) / w.numel() ** 0.5
            changed[path] = noise.mul_(size * rms).add_(w)
    if not changed:
        raise UserError(
            "no matrix of a sublayer needs a gradient, so there is nothing to change; unfreeze them, as in "
            "model.requires_grad_()"
        )
    return changed


def _curve(changes: Table) -> Curve:
    points = sorted((row["depth"], row["change"]) for row in changes)
    return [n for n, _ in points], [y for _, y in points]


@torch.no_grad()
def _outputs(subject: Subject, stacks: Sequence[StackView], weights: Weights) -> list[list[Tensor]]:
    """Return, for each stack, the tokens `[N, D]` after every sublayer, through its final norm."""
    outputs = list[list[Tensor]]()
    with at_weights(subject.model, weights):
        seen = subject.calls(view.after for stack in stacks for view in stack.sublayers).once().taps
        for stack in stacks:
            final = subject.model.get_submodule(stack.final_norm) if stack.final_norm else nn.Identity()
            taps = dict.fromkeys(view.after for view in stack.sublayers)
            outputs.append([subject.tokens(stack.name, final(seen[tap])) for tap in taps])
    return outputs


def _growth_of_change(tables: Tables) -> Iterator[Finding]:
    for stack, fits in tables.stacks("output_change_fit"):
        laws = {str(row["law"]): row for row in fits.where(kind="random")}
        if "power" in laws and as_float(laws["power"]["exponent"]) is not None:
            yield _law(stack, laws, strong=depends_strongly(tables, fits.rows[0]["stack"]))
    for stack, changes in tables.stacks("output_change"):
        update, first = _deepest(changes, "update"), _deepest(changes, "first")
        if update is not None:
            yield _one_step(stack, update, first, tables)


def _deepest(changes: Table, kind: str) -> Row | None:
    rows = [row for row in changes.where(kind=kind) if as_float(row["change"]) is not None]
    return max(rows, key=lambda row: row["depth"], default=None)


def _law(stack: str, laws: Mapping[str, Row], *, strong: bool) -> Finding:
    power = laws["power"]
    exponent, low, high = power["exponent"], as_float(power["low"]), as_float(power["high"])
    interval = "" if low is None or high is None else f" (95% interval {low:.2f} to {high:.2f})"
    sentence = (
        f"a small random change of the sublayers' matrices moves the output of {stack} like "
        f"N^{exponent:.2f}{interval} as the number N of sublayers grows"
    )
    aic = {law: as_float(laws[law]["aic"]) for law in ("log", "linear") if law in laws}
    log_aic, linear_aic = aic.get("log"), aic.get("linear")
    steep = False
    if log_aic is not None and linear_aic is not None:
        steep = linear_aic < log_aic
        winner, loser = ("N", "log N") if steep else ("log N", "N")
        best, other = sorted((log_aic, linear_aic))
        sentence += f"; {winner} fits better than {loser}, with an AIC of {best:.1f} against {other:.1f}"
    fast = strong and steep and (exponent if low is None else low) > FAST_CHANGE
    if fast:
        sentence += ": depth amplifies every update; warm up, or choose an initialisation that bounds it"
    return Finding(
        "output_change",
        "warning" if fast else "note",
        sentence,
        "output_change_fit",
        {"exponent": exponent, "low": low, "high": high, **{f"aic_{law}": a for law, a in aic.items()}},
        LIU.format("Theorem 2, Corollaries 1 and 2"),
    )


def _one_step(stack: str, update: Row, first: Row | None, tables: Tables) -> Finding:
    """Compare one step with the output's own mean square; with a declared warm-up, judge its first step.

    Shares are of the output's mean square here; ``tables.first_share`` is one of the learning rate.
    """
    size = _output_size(tables, update["stack"])
    changed = update["change"] / size
    changed_first = changed if first is None else first["change"] / size
    steps = 0 if first is None else tables.warmup_steps
    sentence = (
        f"one step of the optimizer changes the output of {stack} by {format_number(changed)} of its mean "
        f"square{at_peak(format_number(changed_first), steps, tables.first_share)}"
    )
    replaced = changed_first > REPLACED
    if replaced:
        sentence += f"; use a lower learning rate or a {'longer ' if steps else ''}warm-up"
    return Finding(
        "update_change",
        "warning" if replaced else "note",
        sentence,
        "output_change",
        {
            "depth": update["depth"],
            "change": update["change"],
            "share": changed,
            "first_share": changed_first,
        },
        LIU.format("Section 4.2, Figure 4"),
    )


def _output_size(tables: Tables, stack: Value) -> float:
    """Return the mean square of a stack's output: 1 after a norm, otherwise as measured."""
    sublayers = tables.table("structure").where(stack=stack).rows
    scales = tables.table("scales").where(stack=stack, signal="after").rows
    if not sublayers or not scales:
        return 1.0
    last = sublayers[-1]
    if last["norm_write"] is not None or last["final_norm"] is not None:
        return 1.0
    return as_float(scales[-1]["mean_square"]) or 1.0


def _measure(subject: Subject) -> Iterator[Table]:
    """Measure all stacks that are deep enough for a law; a few tokens are enough for a mean square."""
    deep = [stack.name for stack in subject.structure.stacks if len(stack.sublayers) >= MIN_DEPTHS]
    if not deep:
        return
    changes = output_change(subject.small, stacks=deep, optimizer=subject.optimizer, seeds=range(ASKED))
    yield changes
    rows = list[Row]()
    for name in deep:
        rows += [{"stack": name, **row} for row in output_change_fit(changes.where(stack=name))]
    yield Table("output_change_fit", tuple(rows))


OUTPUT_CHANGE: Final = Study(
    "output_change",
    _measure,
    "standard",
    rules=(_growth_of_change,),
    title="Output change",
    intro="How far the output of the first N sublayers moves when the matrices of all sublayers change, "
    "in mean square. Solid: the power law that fits best; dashed: a line in N; dotted: log N. Theory "
    "expects N for a Post-LN and log N for a Pre-LN (Liu et al. 2020, Theorem 2).",
    charts=(
        Growth(
            "output_change",
            "Output change",
            "output_change_fit",
            {
                "random": "a random change of the sublayers' matrices",
                "update": "one step of the optimizer",
                "first": "the first step of the warm-up",
            },
            caption="A point per seed.",
        ),
    ),
    batch=SMALL_BATCH,
    order=30,
)
