"""Decoding with caches: beam search, and outputs sampled from the distribution of a model."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from normlab.errors import UserError
from normlab.nn.context import Cache
from normlab.nn.kernels.linear import kept_copies
from normlab.nn.model import PAD, Decoder, Seq2Seq

BOS, EOS = 2, 3
FREE = -1
"""Marks a position that a prefix leaves free."""
MAX_LEN = 1024
"""Longest output in tokens, so a line that was never split into sentences does not take hours."""


def _power_penalty(length: int, alpha: float) -> float:
    r""":math:`|y|^\alpha`.

    :math:`\alpha = 1` makes the score a mean over tokens, 0 a sum. Wu et al. 2016, Section 7
    (arXiv 1609.08144).
    """
    return length**alpha


def _gnmt_penalty(length: int, alpha: float) -> float:
    r""":math:`((5 + |y|) / 6)^\alpha`.

    Wu et al. 2016, Section 7, Equation 14 (arXiv 1609.08144), without its coverage penalty.
    """
    return ((5 + length) / 6) ** alpha


LENGTH_PENALTIES: dict[str, Callable[..., float]] = {"power": _power_penalty, "gnmt": _gnmt_penalty}
"""Divisors of the log-probability of an output, given its length in tokens (with EOS) and alpha."""


@dataclass(frozen=True)
class Hypothesis:
    """A finished output."""

    ids: list[int]
    """Token ids without BOS and EOS."""
    score: float


@dataclass(frozen=True)
class Bounds:
    """Constraints on the outputs. ``allowed`` acts before the softmax, so that the entries left add up to 1;
    what the others rule out is not redistributed.
    """

    max_len_ratio: float
    """An output has at most ``max_len_ratio * |x| + 10`` tokens, and no more than ``MAX_LEN`` or the model's
    positions. This includes the EOS that is forced at the limit.
    """
    min_length: int = 0
    """Minimum number of tokens before EOS."""
    prefix: Tensor | None = None
    """`[B, P]`: ids with which each output begins, followed by ``FREE``."""
    allowed: Tensor | None = None
    """`[V]`: vocabulary entries marked False get the logit minus infinity."""

    def limits(self, model: Seq2Seq, mask: Tensor) -> Tensor:
        """Return the largest length of each output, `[B]`. Raises UserError if the constraints do not fit."""
        longest = min(MAX_LEN, model.position_encoding.longest or MAX_LEN)
        lengths = mask.sum(1)
        forced = torch.zeros_like(lengths) if self.prefix is None else (self.prefix != FREE).sum(1)
        least = forced.clamp(min=self.min_length) + 1
        if int(least.max()) > longest:
            raise UserError(
                f"min_length is {self.min_length} and the longest prefix has {int(forced.max())} tokens, but "
                f"an output has at most {longest - 1} before its end; lower min_length or shorten the prefix"
            )
        return torch.maximum((lengths * self.max_len_ratio).long() + 10, least).clamp(max=longest)

    def log_p(self, logits: Tensor, length: int, limits: Tensor, rows: Tensor) -> Tensor:
        """Return the log-probabilities `[B', K, V]` of the ``length``-th token, minus infinity for ruled-out
        tokens; ``rows`` are the indices of the B' sentences among the B.
        """
        if self.allowed is not None:
            logits = logits.masked_fill(~self.allowed, float("-inf"))
        log_p = torch.log_softmax(logits, -1)
        if length <= self.min_length:
            log_p[..., EOS] = float("-inf")
        at_limit = (limits[rows] <= length)[:, None, None]
        if at_limit.any():
            only_eos = torch.full_like(log_p[:1, :1], float("-inf"))
            only_eos[..., EOS] = 0.0
            log_p = torch.where(at_limit, only_eos + log_p[..., EOS, None], log_p)
        if self.prefix is not None and length <= self.prefix.shape[1]:
            forced = self.prefix[rows, length - 1][:, None]
            others = (forced != FREE) & (forced != torch.arange(log_p.shape[-1], device=log_p.device))
            log_p = log_p.masked_fill(others[:, None], float("-inf"))
        return log_p


class _Continuations(ABC):
    """K continuations of each unfinished sentence: ``tokens`` `[B', K, t]` and ``scores`` `[B', K]`, minus
    infinity for a continuation that has ended.
    """

    def __init__(self, limits: Tensor, width: int) -> None:
        sentences, device = len(limits), limits.device
        self.width = width
        self.cache = Cache(sentences, width, int(limits.max()), device)
        self.rows = torch.arange(sentences, device=device)
        self.tokens = torch.full((sentences, width, 1), BOS, device=device)
        self.scores = torch.zeros(sentences, width, device=device)
        self.ended = torch.zeros(sentences, dtype=torch.bool, device=device)

    @property
    def length(self) -> int:
        """The length of an output that ends now, with EOS."""
        return self.tokens.shape[-1]

    @abstractmethod
    def advance(self, log_p: Tensor) -> None:
        """Choose the next token of every continuation, given log-probabilities `[B', K, V]`, which may be
        overwritten.
        """

    @abstractmethod
    def results(self) -> list[list[Hypothesis]]:
        """Return the finished outputs; there are none if the model diverged and no score is finite."""

    def drop_ended(self) -> Tensor | None:
        """Drop ended sentences once they are a quarter of the batch; return the rows that stay, or None."""
        self.ended |= ~self.scores.isfinite().any(1)
        if 4 * int(self.ended.sum()) < len(self.ended):
            return None
        unfinished = (~self.ended).nonzero().squeeze(1)
        self.rows, self.tokens = self.rows[unfinished], self.tokens[unfinished]
        self.scores, self.ended = self.scores[unfinished], self.ended[unfinished]
        self.cache.keep(unfinished)
        return unfinished


@torch.inference_mode()
@kept_copies()
def decode(
    model: Seq2Seq, source: Tensor, bounds: Bounds, begin: Callable[[Tensor], _Continuations]
) -> list[list[Hypothesis]]:
    """Run a search on source rows `[B, S]`; ``begin`` builds it from the limits `[B]` of the outputs.

    Raises UserError if the bounds leave an output no room.
    """
    memory, mask = model.encode(source)
    limits = bounds.limits(model, mask)
    search = begin(limits)
    while search.rows.numel():
        hidden = model.decode_step(search.tokens[:, :, -1], memory, mask, search.cache)
        logits = model.logits(hidden).float()
        search.advance(bounds.log_p(logits, search.length, limits, search.rows))
        unfinished = search.drop_ended()
        if unfinished is not None:
            memory, mask = memory[unfinished], mask[unfinished]
    return search.results()


def search(
    model: Seq2Seq,
    source: Tensor,
    bounds: Bounds,
    *,
    beams: int = 5,
    length_penalty: float = 1.0,
    formula: str = "power",
) -> list[list[Hypothesis]]:
    r"""Return the outputs with the highest scores :math:`\log p(y \mid x) / \mathrm{lp}(|y|)` for each source
    row `[B, S]`, best first.

    lp is one of ``LENGTH_PENALTIES`` with :math:`\alpha` = ``length_penalty``. The search for a sentence ends
    once it has ``beams`` finished hypotheses or reaches its length limit. One beam is greedy search.

    The released code of Nguyen and Salazar 2019 (arXiv 1910.05895) lets finished hypotheses compete in the
    beam by their scores, so one can be lost, and ends when the whole beam has finished: its best output can
    be a different one.
    """
    penalty = partial(LENGTH_PENALTIES[formula], alpha=length_penalty)
    return decode(model, source, bounds, lambda limits: _Beams(limits, beams, penalty))


class _Beams(_Continuations):
    """Beam search: the K best of all continuations of the previous K."""

    def __init__(self, limits: Tensor, width: int, penalty: Callable[[int], float]) -> None:
        super().__init__(limits, width)
        self.penalty = penalty
        self.finished: list[list[Hypothesis]] = [[] for _ in range(len(limits))]
        self.scores[:, 1:] = float("-inf")  # all beams begin alike, so only one of them counts

    def advance(self, log_p: Tensor) -> None:
        vocab = log_p.shape[-1]
        total = log_p.add_(self.scores[:, :, None]).flatten(1)
        # Twice as many as needed: K of them may end here, and K others go on.
        scores, flat = total.topk(2 * self.width, dim=1)
        parents, words = flat // vocab, flat % vocab
        self._collect(scores, parents, words)
        alive = scores.masked_fill(words == EOS, float("-inf"))
        self.scores, chosen = alive.topk(self.width, dim=1)
        parents, words = parents.gather(1, chosen), words.gather(1, chosen)
        history = self.tokens.gather(1, parents[:, :, None].expand_as(self.tokens))
        self.tokens = torch.cat((history, words[:, :, None]), dim=2)
        if self.width > 1:
            self.cache.reorder(parents)

    def results(self) -> list[list[Hypothesis]]:
        return [sorted(hypotheses, key=lambda h: -h.score) for hypotheses in self.finished]

    def _collect(self, scores: Tensor, parents: Tensor, words: Tensor) -> None:
        """Store each hypothesis that ends among the best K candidates under its sentence."""
        ends = (words == EOS) & scores.isfinite()
        ends[:, self.width :] = False
        ends &= ~self.ended[:, None]
        for row, k in ends.nonzero().tolist():
            hypotheses = self.finished[int(self.rows[row])]
            ids = self.tokens[row, parents[row, k], 1:].tolist()
            hypotheses.append(Hypothesis(ids, float(scores[row, k]) / self.penalty(self.length)))
            if len(hypotheses) >= self.width:
                self.ended[row] = True


def sample(
    model: Seq2Seq,
    source: Tensor,
    seeds: Sequence[Sequence[int]],
    bounds: Bounds,
    choose: Callable[[Tensor], Tensor],
) -> list[list[Hypothesis]]:
    r"""Sample :math:`y_t` for each source row from the log-weights that ``choose``, such as ``truncated``,
    makes of :math:`\log p(\cdot \mid y_{<t}, x)`.

    ``seeds`` `[B][K]`: one for each sample, which depends only on its seed and sentence. The score is
    the model's own :math:`\log p(y \mid x)`, whatever the sampling. Samples that never end are left out.
    """
    return decode(model, source, bounds, lambda limits: _Samples(limits, seeds, choose))


def likeliest(log_p: Tensor, count: int) -> Tensor:
    """Return log-probabilities `[..., V]` with minus infinity in all but the ``count`` largest; 0 keeps all.

    Entries tied with the last of these are kept as well. Fan et al. 2018 (arXiv 1805.04833).
    """
    if not 0 < count < log_p.shape[-1]:
        return log_p
    least = log_p.topk(count, dim=-1).values[..., -1:]
    return log_p.masked_fill(log_p < least, float("-inf"))


def nucleus(log_p: Tensor, mass: float) -> Tensor:
    """Return log-weights `[..., V]` with minus infinity in all but the fewest likeliest entries that together
    have a probability of at least ``mass``.

    Holtzman et al. 2020, Section 3.1 (arXiv 1904.09751).
    """
    if mass >= 1:
        return log_p
    weights, order = torch.softmax(log_p, -1).sort(dim=-1, descending=True, stable=True)
    beyond = weights.cumsum(-1) - weights >= mass
    return log_p.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), float("-inf"))


def truncated(log_p: Tensor, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """Return log-weights `[..., V]` at a temperature, with minus infinity outside the ``top_k`` likeliest
    entries and, among these, outside the nucleus of ``top_p``.
    """
    return nucleus(likeliest(log_p / temperature, top_k), top_p)


class _Samples(_Continuations):
    """Sampling: K independent outputs of each sentence."""

    def __init__(
        self, limits: Tensor, seeds: Sequence[Sequence[int]], choose: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__(limits, len(seeds[0]))
        self.choose = choose
        self.finished: list[dict[int, Hypothesis]] = [{} for _ in range(len(limits))]
        longest = int(limits.max())
        draws = [torch.stack([_uniform(longest, seed) for seed in row]) for row in seeds]
        self.uniform = torch.stack(draws).to(limits.device)
        """The draw of each token of each sample, `[B, K, longest]`."""

    def advance(self, log_p: Tensor) -> None:
        # A token is drawn by where a uniform number falls among the cumulative shares; float64, or many
        # small shares would add up to less than they are.
        shares = torch.softmax(self.choose(log_p.double()), -1).cumsum(-1)
        point = self.uniform[self.rows, :, self.length - 1, None] * shares[..., -1:]
        words = torch.searchsorted(shares, point, right=True).clamp(max=log_p.shape[-1] - 1)
        self.scores = self.scores + log_p.gather(-1, words).squeeze(-1)
        words = words.squeeze(-1)
        ends = (words == EOS) & self.scores.isfinite()
        for row, k in ends.nonzero().tolist():
            hypothesis = Hypothesis(self.tokens[row, k, 1:].tolist(), float(self.scores[row, k]))
            self.finished[int(self.rows[row])][k] = hypothesis
        self.scores = self.scores.masked_fill(ends, float("-inf"))
        self.tokens = torch.cat((self.tokens, words[:, :, None]), dim=2)

    def results(self) -> list[list[Hypothesis]]:
        return [[ended[k] for k in sorted(ended)] for ended in self.finished]


def _uniform(count: int, seed: int) -> Tensor:
    """Draw `[count]` numbers in [0, 1); a larger count continues the numbers of a smaller one."""
    return torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
@kept_copies()
def generate(
    model: Decoder,
    prompt: Sequence[int],
    seeds: Sequence[int],
    choose: Callable[[Tensor], Tensor],
    *,
    count: int,
    window: int,
) -> Tensor:
    """Return ``count`` tokens after a prompt `[P]` for each of K seeds, `[K, count]`.

    Each is drawn from ``choose`` of the log-probabilities `[K, V]` of all tokens but PAD, and sees the
    ``window`` tokens before it: from caches while the window reaches back to the first token of the prompt,
    recomputed after that.
    """
    device = next(model.parameters()).device
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    ids = torch.tensor([list(prompt)] * len(seeds), device=device)
    cache = Cache(len(seeds), 1, window, device)
    for _ in range(count):
        if ids.shape[1] > window:
            hidden = model.hidden(ids[:, -window:])[:, -1]
        elif cache.length:
            hidden = model.decode_step(ids[:, -1:], cache)[:, 0]
        else:
            hidden = model.decode_prompt(ids, cache)[:, -1]
        logits = model.logits(hidden).double().cpu()
        logits[:, PAD] = -math.inf
        log_p = torch.log_softmax(logits.nan_to_num(0.0, neginf=-math.inf), -1)
        weights = torch.softmax(choose(log_p), -1)
        drawn = [torch.multinomial(w, 1, generator=g) for w, g in zip(weights, generators, strict=True)]
        ids = torch.cat([ids, torch.stack(drawn).to(device)], 1)
    return ids[:, len(prompt) :]
