"""Compare the step that an optimiser really takes, after clipping and rounding, with the declared rate."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from normlab.diagnosis.probing.passes import BackwardPass, backward_pass, parts_of
from normlab.diagnosis.probing.step import OptimiserFactory, Twin
from normlab.diagnosis.probing.stepping import LossGradients, trainable
from normlab.diagnosis.reading.subject import Subject
from normlab.diagnosis.rules.finding import Finding, Tables, cosine, number, numbers, percent, said
from normlab.diagnosis.study import Study
from normlab.diagnosis.table import Row, Table
from normlab.spec.units import count

MOVED: Final = 0.5
"""Share of the entries of a matrix that one step changes, below which rounding takes the step away."""
FELT: Final = 1e-3
"""Largest gradient of a parameter, relative to the model's, below which a step may be lost in rounding."""
CUT: Final = 0.5
"""Share of a step that clipping leaves, below which it decides the rate."""
UPHILL: Final = -0.1
"""Cosine of a step with the negative gradient below which it climbs the loss."""
LEAST_MATRICES: Final = 4
"""Matrices below which the middle one says nothing of a rate."""
AT_ONCE: Final = 1.0
"""Steps of Adam that change a matrix by its own size, below which each step writes it anew."""
NEVER: Final = 3e5
"""Steps that change a matrix by its own size, above which the rate is hardly meant."""
SHRINKS: Final = 0.5
"""Cosine of a step with the negative weights above which weight decay decides it."""


def first_step(
    subject: Subject,
    optimiser: Optimizer | OptimiserFactory,
    *,
    max_grad_norm: float | None = None,
    backward: BackwardPass | None = None,
) -> Table:
    r"""Tabulate the step of every trainable parameter: its root mean square (``step_rms``), the same without
    clipping (``unclipped_rms``), its cosines with the negative gradient (``downhill``) and with the negative
    weights (``shrinking``), the share of its entries that change (``moved``), and the largest gradient
    (``grad_max``).

    Gradients are clipped to a global norm of ``max_grad_norm`` as ``torch.nn.utils.clip_grad_norm_`` does:
    :math:`g \min(1, c / \|g\|)`.
    """
    backward = backward or backward_pass(subject)
    found = backward.loss_gradients
    clipped = found if max_grad_norm is None else _clipped(found, max_grad_norm)
    before = {path: p.detach() for path, p in trainable(subject.model).items()}
    after = _stepped(subject, optimiser, clipped)
    plain = after if clipped is found else _stepped(subject, optimiser, found)
    parts = parts_of(subject, backward.forward)
    rows: list[Row] = []
    for path, p in before.items():
        for part in parts[path]:
            old, new, free = (_wide(part.of(x.to_dense())) for x in (p, after[path], plain[path]))
            gradient = _wide(part.of(found.gradients[path].to_dense()))
            step = new - old
            rows.append(
                {
                    "parameter": path,
                    "role": part.kind,
                    "dtype": str(p.dtype).removeprefix("torch."),
                    "step_rms": _rms(step),
                    "unclipped_rms": _rms(step if plain is after else free - old),
                    "moved": step.count_nonzero().item() / step.numel(),
                    "downhill": -_cosine(step, gradient),
                    "shrinking": -_cosine(step, old),
                    "grad_max": gradient.abs().max().item(),
                }
            )
    return Table("first_step", tuple(rows))


def _stepped(
    subject: Subject, optimiser: Optimizer | OptimiserFactory, first: LossGradients
) -> dict[str, Tensor]:
    """The parameters after one step, or after two where the first changes none, as that of ADOPT."""
    twin, before = Twin(subject.model, optimiser), trainable(subject.model)
    twin.step(subject, first)
    if all(torch.equal(p.to_dense(), before[path].to_dense()) for path, p in twin.weights.items()):
        twin.step(subject)
    return twin.weights


def _wide(x: Tensor) -> Tensor:
    """Return a tensor in float32 at least, in which a step of half precision is exact."""
    return x.to(torch.promote_types(x.dtype, torch.float32)).flatten()


def _rms(step: Tensor) -> float:
    return torch.linalg.vector_norm(step).item() / math.sqrt(step.numel())


def _cosine(x: Tensor, y: Tensor) -> float:
    lengths = torch.linalg.vector_norm(x) * torch.linalg.vector_norm(y)
    return (torch.dot(x, y) / lengths).item() if lengths else 0.0


def _clipped(found: LossGradients, most: float) -> LossGradients:
    norm = math.sqrt(sum(float(g.to_dense().double().square().sum()) for g in found.gradients.values()))
    factor = min(1.0, most / (norm + 1e-6))
    return LossGradients(found.loss, {path: g * factor for path, g in found.gradients.items()})


def lost_in_rounding(tables: Tables) -> Iterator[Finding]:
    """Name matrices that a step leaves as they are, because it is smaller than half a digit of their type."""
    still = [
        row
        for row in tables.table("first_step")
        if row["dtype"] in ("bfloat16", "float16") and (number(row["grad_max"]) or 0.0) > 0
        and (number(row["moved"]) or 0.0) < MOVED
    ]  # fmt: skip
    if still:
        matrices = [row for row in still if row["role"] != "norm"]
        row = min(matrices or still, key=lambda r: number(r["moved"]) or 0.0)
        yield Finding(
            "lost_in_rounding",
            "problem" if matrices else "warning",
            f"one step changes {number(row['moved']) or 0.0:.0%} of the entries of {row['parameter']}, and "
            f"less than half of those of {len(still)} parameters: it is smaller than a digit of "
            f"{row['dtype']}",
            "first_step",
            {"moved": row["moved"], "step_rms": row["step_rms"], "parameters": len(still)},
            module=str(row["parameter"]).rpartition(".")[0],
            do="keep the weights that the optimiser changes in float32, and compute in autocast",
            explains=("large_update",),
        )


def not_stepped(tables: Tables) -> Iterator[Finding]:
    """Name parameters with a gradient that the optimiser does not change, such as one it does not hold."""
    largest = max((number(r["grad_max"]) or 0.0 for r in tables.table("first_step")), default=0.0)
    rows = [r for r in tables.table("first_step") if (number(r["grad_max"]) or 0.0) > FELT * largest]
    still = [r for r in rows if r["step_rms"] == 0 and r["dtype"] not in ("bfloat16", "float16")]
    if still and len(still) == len(rows):
        if not any(row["scheduled"] and not row["lr"] for row in tables.table("groups")):
            yield Finding(
                "not_stepped",
                "problem",
                f"a step of the optimiser changes no parameter of the model, though {len(still)} have a "
                "gradient",
                "first_step",
                {"parameters": len(still), "first": still[0]["parameter"]},
                do="give the optimiser the parameters of this model, after it was built for the last time "
                "and moved to its device, at a rate that is not 0",
            )
    elif still:
        module = str(still[0]["parameter"]).rpartition(".")[0]
        yield Finding(
            "not_stepped",
            "problem",
            f"the optimiser does not change {len(still)} parameters that have a gradient, the first "
            f"{still[0]['parameter']}",
            "first_step",
            {"parameters": len(still), "first": still[0]["parameter"]},
            module=module,
            do="give the optimiser these parameters, in a group whose learning rate is not 0",
        )


def dead_zero(tables: Tables) -> Iterator[Finding]:
    r"""Name the matrices that are zero and have no gradient: of :math:`W_2 \phi(W_1 x)` with
    :math:`\phi(0) = 0` the gradient of each is a product with the other, so that one of them may begin at
    zero, and not both.
    """
    unused = {row["parameter"] for row in tables.table("reach").where(reached=0)}
    zero = {
        (row["parameter"], row["role"]): row
        for row in tables.table("weights")
        if row["rms"] == 0 and "×" in str(row["shape"]) and row["parameter"] not in unused
    }
    steps = ((row, zero.get((row["parameter"], row["role"]))) for row in tables.table("first_step"))
    dead = [there for row, there in steps if there is not None and row["grad_max"] == 0]
    if dead:
        paths = list(dict.fromkeys(str(row["parameter"]) for row in dead))
        count = f" and {len(paths) - 1} other matrices" if len(paths) > 1 else ""
        how = "are zero and have no gradient: they stay" if count else "is zero and has no gradient: it stays"
        yield Finding(
            "dead_zero",
            "problem",
            f"{paths[0]}{count} {how} at zero",
            "weights",
            {"matrices": len(paths), "first": paths[0]},
            module=paths[0].rpartition(".")[0],
            do="initialise at random all matrices of a sublayer but its last one",
            explains=("no_gradient", "not_stepped", "initial_loss", "updates", "unused"),
        )


def unused_part(tables: Tables) -> Iterator[Finding]:
    """Name the parts of packed matrices that get no gradient while the others do, and none is zero. Where
    there is one key alone, neither keys nor queries have any.
    """
    parts: dict[str, list[Row]] = defaultdict(list)
    for row in tables.table("first_step"):
        parts[str(row["parameter"])].append(row)
    zero = {row["parameter"] for row in tables.table("weights") if row["rms"] == 0}
    rows_of_queries = tables.table("first_step").where(role="query")
    asking = {_holder(str(row["parameter"])) for row in rows_of_queries if row["grad_max"]}
    unused = [
        row
        for path, rows in parts.items()
        if len(rows) > 1
        and path not in zero
        and not path.endswith("bias")
        and any(r["grad_max"] for r in rows)
        for row in rows
        if row["grad_max"] == 0 and (row["role"] != "key" or _holder(path) in asking)
    ]
    if unused:
        path, role = str(unused[0]["parameter"]), unused[0]["role"]
        more = len(unused) - 1
        others = f", and those of {more} other {'matrix' if more == 1 else 'matrices'}" if more else ""
        yield Finding(
            "unused_part",
            "problem",
            f"the {role} rows of {path}{others} get no gradient: nothing uses what they compute",
            "first_step",
            {"first": path, "role": role, "matrices": len(unused)},
            module=path.rpartition(".")[0],
            do=f"look at how its output is split, and where the {role} part goes",
            explains=("no_gradient", "not_stepped", "updates"),
        )


def _holder(path: str) -> str:
    """The path of the module that holds the module of a parameter."""
    return path.rpartition(".")[0].rpartition(".")[0]


def rate(tables: Tables) -> Iterator[Finding]:
    """Say that one step moves matrices farther than they are large, or that it would take far too many to do
    so: by Adam, whose step has the size of the learning rate, or by SGD. The rate of an optimiser amid a
    schedule may be that of its first step, and is not judged.
    """
    groups = list(tables.table("groups"))
    sizes = {(row["parameter"], row["role"]): number(row["rms"]) for row in tables.table("weights")}
    moved = [
        (size, step)
        for row in tables.table("first_step")
        if (step := number(row["unclipped_rms"])) and (size := sizes.get((row["parameter"], row["role"])))
        and row["role"] != "norm" and row["dtype"] not in ("bfloat16", "float16")
    ]  # fmt: skip
    if not groups or any(row["scheduled"] for row in groups) or len(moved) < LEAST_MATRICES:
        return
    name, lr = str(groups[0]["optimiser"]), max(number(row["lr"]) or 0.0 for row in groups)
    adam = lr / 2 < _middle([step for _, step in moved]) < 2 * lr and groups[0]["beta2"] is not None
    needed = _middle([size / step for size, step in moved])
    if adam and needed < AT_ONCE:
        yield Finding(
            "fast_rate",
            "problem",
            f"the learning rate of {lr:.3g} is too large for {name}: one step at it changes the median "
            f"matrix by {said(1 / needed)} times its size",
            "first_step",
            {"lr": lr, "steps": needed},
            do="1e-4 to 1e-3 is usual; 0.1 is a rate of SGD",
            explains=("large_update", "update_change"),
        )
    elif needed > NEVER and (adam or name == "SGD"):
        yield Finding(
            "slow_rate",
            "warning",
            f"the learning rate of {lr:.3g} is too small for {name}: the median matrix would need about "
            f"{needed:,.0f} such steps to change by its own size",
            "first_step",
            {"lr": lr, "steps": needed},
            do="look whether a factor of the rate is applied twice"
            if adam
            else "a rate of Adam is too small where a step has the size of the gradient: 0.01 to 1 is usual",
        )


def clipped_step(tables: Tables) -> Iterator[Finding]:
    """Say by how much clipping shortens the step, which an optimiser like Adam takes out again."""
    groups: dict[str, list[float]] = defaultdict(list)
    for row in tables.table("first_step"):
        whole, left = number(row["unclipped_rms"]), number(row["step_rms"])
        if whole and left is not None:
            groups[str(row["role"])].append(left / whole)
    short = {role: _middle(shares) for role, shares in groups.items() if _middle(shares) < CUT}
    if short:
        role, share = min(short.items(), key=lambda one: one[1])
        yield Finding(
            "clipped_step",
            "warning",
            f"clipping leaves {percent(share)} of the step of the {role} matrices: it decides the learning "
            "rate, and not the schedule",
            "first_step",
            {"share": share, "roles": len(short)},
            do="clip at a norm that gradients seldom reach, or not at all where the optimiser's step has a "
            "norm of its own",
        )


def wrong_way(tables: Tables) -> Iterator[Finding]:
    """Say that the step climbs the loss, or that it shrinks the weights and does little else."""
    rows = [row for row in tables.table("first_step") if number(row["step_rms"]) and row["role"] != "norm"]
    if not rows:
        return
    downhill = _middle([number(row["downhill"]) or 0.0 for row in rows])
    shrinking = _middle([number(row["shrinking"]) or 0.0 for row in rows])
    if downhill < UPHILL:
        yield Finding(
            "uphill",
            "problem",
            "the optimiser's step goes up the loss: its cosine with the negative gradient is "
            f"{cosine(downhill)} in the middle one of {count(len(rows), 'parameter')}",
            "first_step",
            {"downhill": downhill, "parameters": len(rows)},
            do="look at the sign of the loss, and for maximize=True",
            explains=("update_change", "large_update"),
        )
    elif shrinking > max(SHRINKS, downhill) and any(numbers(tables.table("groups"), "weight_decay")):
        yield Finding(
            "decay",
            "warning",
            "the optimiser's step shrinks the weights and does little else: its cosine with the negative "
            f"weights is {cosine(shrinking)} in the middle one of {count(len(rows), 'parameter')}",
            "first_step",
            {"shrinking": shrinking, "downhill": downhill, "parameters": len(rows)},
            do="decouple the weight decay, as AdamW does, or lower it",
            explains=("update_change", "large_update"),
        )


def _middle(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


FIRST_STEP: Final = Study(
    "first_step",
    lambda c: [
        Table("plan", ({"warmup_steps": c.warmup_steps},) if c.warmup_steps else ()),
        first_step(c.subject, c.optimiser, max_grad_norm=c.plan.get("max_grad_norm"), backward=c.backward),
    ],
    "preflight",
    rules=(dead_zero, unused_part, lost_in_rounding, not_stepped, rate, clipped_step, wrong_way),
    order=-45,
)
