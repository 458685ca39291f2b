"""Measure the factor between products of queries and keys and the scores that go into a softmax."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from normlab.diagnosis.reading.batches import at, decoded, replaced
from normlab.diagnosis.reading.naming import layer_of
from normlab.diagnosis.reading.subject import Subject
from normlab.diagnosis.reading.taps import call_model, evaluating, watching
from normlab.diagnosis.rules.finding import Finding, Tables, number, said
from normlab.diagnosis.study import Study
from normlab.diagnosis.table import Row, Table
from normlab.spec.units import count as counted

LARGE: Final = 1.5
"""Factor above 1/√d that is none of the usual scales."""
EXPLAINED: Final = 0.5
"""Share of the scores' variance that the products have to explain, whatever biases are added."""
MASKED: Final = -1e4
"""Scores below this are masked."""
CLOSED: Final = 0.99
"""Share of later keys that are masked from which a mask is causal."""
NORMED: Final = 0.01
"""Deviation of the norms of queries, relative to their mean, below which they are normalised."""

PRODUCTS: Final[frozenset[Callable[..., Any]]] = frozenset(
    (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm)
)
SOFTMAXES: Final[frozenset[Callable[..., Any]]] = frozenset((F.softmax, torch.softmax, Tensor.softmax))


def attention_scale(subject: Subject) -> Table:
    r"""Measure s in the scores :math:`s\, q^\top k` of every attention, beside the usual :math:`1/\sqrt{d}`
    of heads of width d (Vaswani et al. 2017, Section 3.2.1, arXiv 1706.03762).

    s is the argument of a fused kernel, or the slope of what a softmax gets by the products before it,
    without masked entries. ``query_over_key`` is the ratio of the root mean squares of the two factors of the
    product, which carries the factor where the initialisation does, or where queries are divided before the
    product; ``normed`` is 1 for normalised queries. Attentions whose products are not seen have no row.

    ``later_closed`` is the share of the pairs of a query i and a later key j > i that are masked, of the keys
    that any query of their row sees. ``memory`` is 1 where the keys, and not the queries, stay as they are
    when the decoder reads other tokens: the keys are of what an encoder puts out.
    """
    seen = again = _recorded(subject, subject.batch)
    if seen.rows and (place := decoded(subject.batch)) is not None:
        others = at(subject.batch, place).roll(1, 1)
        again = _recorded(subject, replaced(subject.batch, place, others))
    if len(seen.sums) != len(again.sums):  # other products explain the scores of other tokens
        again = seen
    pairs = zip(seen.sums, again.sums, strict=True)
    memory = (int(keys == keys_again and queries != queries_again)
              for (queries, keys), (queries_again, keys_again) in pairs)  # fmt: skip
    rows = ({**row, "memory": one} for row, one in zip(seen.rows, memory, strict=True))
    return Table("attention_scale", tuple(rows))


def _recorded(subject: Subject, batch: Any) -> _Recorder:
    recorder = _Recorder()
    modules = dict(subject.model.named_modules())
    with evaluating(subject.model), watching(modules, recorder.see), recorder:
        call_model(subject.model, batch)
    return recorder


class _Recorder(TorchFunctionMode):
    """Sees products, softmaxes and fused attention, with the module in which they are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Row] = []
        self.sums: list[tuple[float, float]] = []
        """Sums of the queries and of the keys of each row, which tell them from others."""
        self._inside: list[str] = []
        self._products: list[tuple[Tensor, Tensor, Tensor]] = []

    def see(self, path: str, side: str, _: Any) -> None:
        if side == "input":
            self._inside.append(path)
        elif path in self._inside:
            del self._inside[len(self._inside) - 1 - self._inside[::-1].index(path) :]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            q, k = args[:2] if len(args) > 1 else (kwargs["query"], kwargs["key"])
            usual = q.shape[-1] ** -0.5
            mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
            causal = kwargs.get("is_causal", args[5] if len(args) > 5 else False)
            self._add(q, k, kwargs.get("scale") or usual, _open(mask, q, k, causal=causal))
        elif func in PRODUCTS and output.ndim > 2:
            factors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
            if output.shape[-1] == factors[1].shape[-1]:
                self._products = [*self._products[-3:], (factors[0], factors[1], output)]
        elif func in SOFTMAXES and args and args[0].ndim > 2:
            for left, right, product in reversed(self._products):
                right = right.transpose(-1, -2)
                # keys may stand first
                ways = (left, right, product), (right, left, product.transpose(-1, -2))
                found = [(*_slope(x, args[0]), q, k) for q, k, x in ways if x.shape == args[0].shape]
                slope, explained, q, k = max(found, key=itemgetter(1), default=(0.0, 0.0, left, right))
                if explained > EXPLAINED:
                    self._add(q, k, slope, args[0].detach() > MASKED)
                    break
            self._products = []
        return output

    def _add(self, q: Tensor, k: Tensor, scale: float, visible: Tensor) -> None:
        path = self._inside[-1] if self._inside else ""
        norms = q.detach().float().norm(dim=-1)
        self.sums.append((q.detach().double().sum().item(), k.detach().double().sum().item()))
        self.rows.append(
            {
                "module": path,
                "layer": layer_of(path),
                "scale": float(scale),
                "usual": q.shape[-1] ** -0.5,
                "query_over_key": _rms(q) / max(_rms(k), 1e-30),
                "normed": int(bool(norms.std(correction=0) < NORMED * norms.mean())),
                "later_closed": _later_closed(visible),
            }
        )


def _open(mask: Tensor | None, q: Tensor, k: Tensor, *, causal: bool) -> Tensor:
    """The keys `[..., T, S]` that each query sees, by the mask of a fused kernel."""
    seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device)
    if causal:
        return seen.tril()
    return seen if mask is None else mask.detach() if mask.dtype == torch.bool else mask.detach() > MASKED


def _later_closed(visible: Tensor) -> float | None:
    """The share of masked pairs of a query and a later key, of the keys that any query sees."""
    later = visible.any(-2, keepdim=True) & torch.ones_like(visible).triu(1)
    return ((~visible & later).sum() / later.sum()).item() if later.any() else None


def _rms(x: Tensor) -> float:
    return x.detach().float().square().mean().sqrt().item()


def _slope(product: Tensor, scores: Tensor) -> tuple[float, float]:
    """The slope of scores by products over entries that are not masked, and the share of the scores' variance
    that the products explain.
    """
    x, y = product.detach().double(), scores.detach().double()
    kept = (y > MASKED) & y.isfinite()
    x, y = x[kept], y[kept]
    if len(x) < 2 or not (variance := float(x.var())) or not (of_scores := float(y.var())):
        return 0.0, 0.0
    covariance = float(((x - x.mean()) * (y - y.mean())).sum() / (len(x) - 1))
    return covariance / variance, covariance**2 / (variance * of_scores)


def no_scale(tables: Tables) -> Iterator[Finding]:
    """Name the attentions whose scores are larger than products over √d, and nothing makes up for it."""
    rows = list(tables.table("attention_scale"))
    large = [row for row in rows if _excess(row) > LARGE]
    if not large:
        return
    row = max(large, key=_excess)
    count = "" if len(large) == 1 else f" and of {counted(len(large) - 1, 'other attention')}"
    yield Finding(
        "no_scale",
        "warning",
        f"the scores of {large[0]['module']}{count} are products of queries and keys times "
        f"{said(row['scale'])}, and not over √d, {said(row['usual'])}",
        "attention_scale",
        {"scale": row["scale"], "usual": row["usual"], "attentions": len(large), "of": len(rows)},
        "Vaswani et al. 2017, Section 3.2.1 (arXiv 1706.03762)",
        module=str(large[0]["module"]),
        do="divide the scores by the square root of the width of a head",
        explains=("attention",),
    )


def hidden_memory(tables: Tables) -> Iterator[Finding]:
    """Name the attentions to an encoder whose mask is that of a decoder."""
    closed = [
        row
        for row in tables.table("attention_scale")
        if row["memory"] and (number(row["later_closed"]) or 0.0) > CLOSED
    ]
    if closed:
        others = f" and {counted(len(closed) - 1, 'other cross-attention')}" * (len(closed) > 1)
        yield Finding(
            "causal_memory",
            "problem",
            f"{closed[0]['module']}{others} mask the encoder's outputs causally: target token t reads those "
            "up to t alone, and never the rest of the source",
            "attention_scale",
            {"later_closed": closed[0]["later_closed"], "attentions": len(closed)},
            module=str(closed[0]["module"]),
            do="give the causal mask to the decoder's self-attention alone",
        )


def _excess(row: Row) -> float:
    """The scale over the usual one, less what one factor that is smaller than the other makes up for."""
    if row["normed"]:
        return 0.0
    ratio = (number(row["scale"]) or 0.0) / (number(row["usual"]) or 1.0)
    unlike = number(row["query_over_key"]) or 1.0
    return ratio * min(unlike, 1 / unlike)


ATTENTION_SCALE: Final = Study(
    "attention_scale",
    lambda c: [attention_scale(c.small)],
    "preflight",
    rules=(no_scale, hidden_memory),
    batch="the first mini-batch, or about 256 tokens of the batch",
    order=-44,
)
