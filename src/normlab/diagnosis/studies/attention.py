"""Measure each attention head's entropy and largest logit, and how alike depth makes tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from normlab.base.chart import ByDepth
from normlab.diagnosis.probes import pair_cosines
from normlab.diagnosis.structure import StackView
from normlab.diagnosis.study import Finding, Study
from normlab.diagnosis.subject import Subject
from normlab.diagnosis.tables import Row, Table, Tables, as_float, floats, mean
from normlab.diagnosis.wording import format_cosine, format_number
from normlab.errors import UserError
from normlab.private_torch import SOFTMAX_OPERATORS, TorchDispatchMode
from normlab.trace.record import Seen, Want, record
from normlab.trace.tensors import Tap

SATURATED: Final = 100.0
"""A logit this far above the others leaves a softmax no gradient: float32's normal numbers end at e^-88."""
COLLAPSED_NATS: Final = 0.1
"""Entropy of attention below which one key has more than 97 % of the weight."""
UNIFORM: Final = 0.99
"""Share of uniform attention's entropy above which no key stands out."""

KERNEL: Final = (
    "its attention is a kernel of its own; run it as plain code, for Hugging Face's as in "
    'model.set_attn_implementation("eager")'
)
"""The reason why an attention sublayer shows no softmax."""


def attention(subject: Subject) -> Table:
    r"""Measure, for each head, the entropy :math:`-\sum_j p_{ij} \ln p_{ij}` in nats, as a mean over queries
    i, and the largest logit :math:`\max_{ij} z_{ij}`, with the attention weights :math:`p_i =
    \mathrm{softmax}(z_i)`.

    z is what goes into the softmax: scaled, with all biases, and only where it is not masked. ``uniform`` is
    the mean of :math:`\ln` of the number of keys that a query may look at, the largest possible entropy.
    Queries of padding are left out. Every softmax over scores `[..., T, S]` is seen that runs during a
    sublayer other than a feed-forward one, whatever implements the attention; for this pass, plain code
    replaces fused kernels.

    Zhai et al. 2023, Section 3 (arXiv 2303.06296) for the entropy; Dehghani et al. 2023, Section 2 (arXiv
    2302.05442) for the logits. Raises UserError if no softmax is seen.
    """
    masks, sequence_first = subject.masks, _is_sequence_first(subject.model)
    taps = [tap for _, view in subject.structure.sublayers for tap in (view.before, view.total)]
    wants = dict.fromkeys(Want(tap.module, tap.side, keep=_shape) for tap in taps)
    with sdpa_kernel(SDPBackend.MATH), record(subject.model, wants) as stream, _Softmaxes(stream) as seen:
        subject.calls().once()
    rows = list[Row]()
    for stack in subject.structure.stacks:
        rows += _rows(stack, seen, masks[stack.name], sequence_first=sequence_first)
    if not rows:
        roles = dict.fromkeys(view.role for _, view in subject.structure.sublayers)
        attends = any(role.endswith("attention") for role in roles)
        raise UserError(
            f"no softmax over attention scores ran in {type(subject.model).__name__}: "
            + (KERNEL if attends else f"none of its sublayers is attention, the roles are {', '.join(roles)}")
        )
    return Table("attention", tuple(rows))


class _Softmax(NamedTuple):
    """A softmax over `[N, T, S]`, and its statistics `[N, T]` for each query."""

    moment: int
    """How many tensors were recorded before it ran."""
    entropy: Tensor
    largest: Tensor
    uniform: Tensor
    """Minus infinity for a query that may look at no key."""


class _Softmaxes(TorchDispatchMode):
    """Keeps a pass's softmaxes, each with the number of stream tensors recorded before it.

    It sees every operator that torch dispatches, so an attention need not be a module or call a function of
    torch's. ``stream`` fills during the pass.
    """

    def __init__(self, stream: Sequence[Seen]) -> None:
        super().__init__()
        self._stream = stream
        self.softmaxes: list[_Softmax] = []

    @property
    def places(self) -> dict[Tap, tuple[int, torch.Size]]:
        """The place of each tensor among those that were recorded, and its shape."""
        return {seen.tap: (i, seen.value) for i, seen in enumerate(self._stream)}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if func.overloadpacket in SOFTMAX_OPERATORS:
            scores, dim = args[:2]
            if scores.ndim > 2 and dim in (-1, scores.ndim - 1):
                self.softmaxes.append(_summary(len(self._stream), scores, output))
        return output


def _shape(x: Tensor) -> torch.Size:
    return x.shape


def _summary(moment: int, scores: Tensor, weights: Tensor) -> _Softmax:
    wide = torch.promote_types(weights.dtype, torch.float32)
    # masks are minus infinity or the smallest number, to which a score may have been added
    allowed = scores > torch.finfo(scores.dtype).min / 2
    entropy = torch.special.entr(weights.to(wide)).sum(-1)
    parts = entropy, scores.amax(-1).to(wide), allowed.sum(-1).to(wide).log()
    return _Softmax(moment, *(part.flatten(0, -2) for part in parts))


def _rows(stack: StackView, seen: _Softmaxes, mask: Tensor, *, sequence_first: bool) -> Iterator[Row]:
    """Yield the rows of a stack; among parallel sublayers, the first that attends owns a softmax."""
    mask = mask.T if sequence_first and mask.ndim == 2 else mask
    unowned, places = list(seen.softmaxes), seen.places
    for view in stack.sublayers:
        if view.role == "ffn":
            continue
        (start, shape), (end, _) = places[view.before], places[view.total]
        inside = [softmax for softmax in unowned if start < softmax.moment <= end]
        unowned = [softmax for softmax in unowned if not start < softmax.moment <= end]
        tokens = shape[:-1].numel()
        in_heads = [_by_head(softmax, tokens, mask) for softmax in inside]
        # a sublayer may call several softmaxes, one for each part of its queries, say
        for head, softmaxes in enumerate(zip(*filter(None, in_heads), strict=True)):
            yield {"stack": stack.name, "index": view.index, "head": head, **_joined(softmaxes)}


def _by_head(seen: _Softmax, tokens: int, mask: Tensor) -> list[_Softmax]:
    """Cut a softmax over `[B x H, T, S]` into heads without padding; nothing if it is not over heads."""
    n, t = seen.entropy.shape
    # B, T and H are known only as the products B x H, in n, and B x T, in tokens: the rows of all softmaxes,
    # B x H x T, over the tokens are the heads
    heads, odd = divmod(n * t, tokens)
    if odd or not heads or n % heads:
        return []
    is_token = mask.reshape(n // heads, t).to(seen.entropy.device)
    entropy, largest, uniform = (
        part.unflatten(0, (-1, heads)).unbind(1) for part in (seen.entropy, seen.largest, seen.uniform)
    )
    softmaxes = list[_Softmax]()
    for e, z, u in zip(entropy, largest, uniform, strict=True):
        counts = is_token & u.isfinite()
        softmaxes.append(_Softmax(seen.moment, e[counts], z[counts], u[counts]))
    return softmaxes


def _joined(softmaxes: Sequence[_Softmax]) -> Row:
    """Return a head's statistics over all its queries, or None if all are padding or masked."""
    entropy = torch.cat([softmax.entropy for softmax in softmaxes])
    largest = torch.cat([softmax.largest for softmax in softmaxes])
    uniform = torch.cat([softmax.uniform for softmax in softmaxes])
    if not len(entropy):
        return {"entropy": None, "max_logit": None, "uniform": None}
    return {
        "entropy": entropy.mean().item(),
        "max_logit": largest.max().item(),
        "uniform": uniform.mean().item(),
    }


def _is_sequence_first(model: nn.Module) -> bool:
    """Return whether streams are `[T, B, D]`, as in torch's layers unless they are ``batch_first``."""
    return any(getattr(module, "batch_first", True) is False for module in model.modules())


def _entropy_of_heads(tables: Tables) -> Iterator[Finding]:
    """Count heads that attend to only one key or to all alike, and report logits that saturate softmax."""
    for stack, table in tables.stacks("attention"):
        rows = [row for row in table if as_float(row["entropy"]) is not None]
        if not rows:
            continue
        entropies, largest = floats(rows, "entropy"), [as_float(row.get("uniform")) for row in rows]
        sharp = flat = 0
        for entropy, most in zip(entropies, largest, strict=True):
            has_choice = most is None or most > COLLAPSED_NATS  # of keys to attend to
            sharp += has_choice and entropy < COLLAPSED_NATS
            flat += bool(most) and entropy / most > UNIFORM
        yield Finding(
            "attention",
            "warning" if sharp else "note",
            f"the attention entropy in {stack} is {min(entropies):.2f} to {max(entropies):.2f} nats, "
            f"{mean(entropies):.2f} on average over {len(entropies)} heads"
            + (f"; {sharp} of them attend{'s' * (sharp == 1)} to one key only" if sharp else "")
            + (f"; {flat} of them attend{'s' * (flat == 1)} almost uniformly" if flat else ""),
            "attention",
            {"lowest": min(entropies), "highest": max(entropies), "collapsed": sharp, "uniform": flat},
            "Zhai et al. 2023, Section 3 (arXiv 2303.06296)",
        )
        highest = max(floats(table, "max_logit"), default=0.0)
        if highest > SATURATED:
            yield Finding(
                "attention_logits",
                "warning",
                f"attention logits in {stack} reach {format_number(highest)}: the softmax is saturated and "
                "passes no gradient; query-key normalisation bounds them",
                "attention",
                {"max_logit": highest},
                "Dehghani et al. 2023, Section 2 (arXiv 2302.05442)",
            )


ATTENTION: Final = Study(
    "attention",
    attention,
    "cheap",
    rules=(_entropy_of_heads,),
    title="Attention",
    intro="Entropy of the attention of each head, in nats; zero means a single key. Dashed: uniform "
    "attention.",
    charts=(ByDepth("attention", "Attention entropy", "entropy", "nats", theory="uniform", by_role=True),),
    order=70,
)

ALIKE: Final = 0.95
"""Mean cosine of two tokens' states beyond which less than a tenth of their energy distinguishes tokens."""


def similarity(subject: Subject) -> Table:
    r"""Measure :math:`\cos(x_i, x_j)`, the mean over pairs :math:`i \ne j` of tokens of a sequence, and the
    effective rank :math:`\exp(-\sum_k p_k \ln p_k)` with :math:`p_k = \sigma_k / \sum_l \sigma_l` of a
    sequence's singular values.

    The stream `[B, T, D]` is measured where a stack begins (index -1) and after each sublayer, as a mean over
    sequences of more than one token, without padding. A stream `[N, D]` is one sequence.

    Dong et al. 2021, Section 2 (arXiv 2103.03404) for tokens that grow alike; Roy and Vetterli 2007, Section
    2 (EUSIPCO) for the rank.
    """
    sequence_first, rows = _is_sequence_first(subject.model), list[Row]()
    for stack in subject.structure.stacks:
        taps = {-1: stack.sublayers[0].before} | {view.index: view.after for view in stack.sublayers}
        for index, tap in taps.items():
            x = subject.forward.tensors[tap]
            mask = subject.masks[stack.name].reshape(x.shape[:-1]).to(x.device)
            if sequence_first and x.ndim == 3:
                x, mask = x.transpose(0, 1), mask.T
            rows.append({"stack": stack.name, "index": index, **_alike(x, mask)})
    return Table("similarity", tuple(rows))


def _alike(x: Tensor, mask: Tensor) -> Row:
    """Return cosine and rank of the sequences of a stream `[..., T, D]` that have more than one token."""
    x = x.to(torch.promote_types(x.dtype, torch.float32)) * mask[..., None]  # padding of zeros adds nothing
    sequences, tokens = x.reshape(-1, *x.shape[-2:]), mask.reshape(-1, x.shape[-2]).sum(-1)
    sequences, tokens = sequences[tokens > 1], tokens[tokens > 1]
    if not len(sequences):
        return {"cosine": None, "effective_rank": None}
    cosines = pair_cosines(sequences) / (tokens * (tokens - 1))
    means = {"cosine": cosines.mean(), "effective_rank": effective_rank(sequences).mean()}
    return {name: value.item() if value.isfinite() else None for name, value in means.items()}


def effective_rank(x: Tensor) -> Tensor:
    r"""Return :math:`\exp(-\sum_k p_k \ln p_k)` with :math:`p_k = \sigma_k / \sum_l \sigma_l`, from the
    singular values :math:`\sigma` of each matrix `[..., T, D]`.

    It is 1 for a matrix of rank one or zero, min(T, D) for one with equal singular values, and NaN for one
    whose squares are not finite. Roy and Vetterli 2007, Section 2 (EUSIPCO).
    """
    x = x.double()  # squares of singular values, with half the digits, are what is computed
    gram = x @ x.mT if x.shape[-2] < x.shape[-1] else x.mT @ x
    finite = gram.isfinite().all(-1).all(-1)
    values = torch.linalg.eigvalsh(gram.where(finite[..., None, None], 0.0)).clamp(min=0).sqrt()
    shares = values / values.sum(-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)
    return torch.special.entr(shares).sum(-1).exp().where(finite, torch.nan)


def _similarity_of_tokens(tables: Tables) -> Iterator[Finding]:
    for stack, table in tables.stacks("similarity"):
        rows = [row for row in table if as_float(row["cosine"]) is not None]
        if not rows:
            continue
        first, last = floats([rows[0], rows[-1]], "cosine")
        rank = as_float(rows[-1]["effective_rank"])
        yield Finding(
            "similarity",
            "warning" if last > ALIKE else "note",
            f"the mean cosine between the states of two tokens goes from {format_cosine(first)} to "
            f"{format_cosine(last)} through {stack}"
            + ("" if rank is None else f", whose output has an effective rank of {format_number(rank)}")
            + ("; its tokens are nearly alike" if last > ALIKE else ""),
            "similarity",
            {"first": first, "last": last, "effective_rank": rank},
            "Dong et al. 2021, Section 2 (arXiv 2103.03404)",
        )


SIMILARITY: Final = Study(
    "similarity",
    similarity,
    "cheap",
    rules=(_similarity_of_tokens,),
    title="Similarity",
    intro="Mean cosine between the states of two tokens, and the effective rank of a sequence's states, "
    "which counts the directions that they use.",
    charts=(
        ByDepth("similarity", "Cosine of tokens", "cosine", "mean cosine"),
        ByDepth("similarity", "Directions in use", "effective_rank", "effective rank"),
    ),
    order=80,
)
