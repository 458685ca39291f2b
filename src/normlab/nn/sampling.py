"""Outputs sampled from the distribution of a model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from normlab.nn.decode import EOS, Bounds, Hypothesis, Search, decode
from normlab.nn.model import Seq2Seq


def sample(
    model: Seq2Seq,
    source: Tensor,
    seeds: Sequence[Sequence[int]],
    bounds: Bounds,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> list[list[Hypothesis]]:
    r"""Sample :math:`y_t \sim \mathrm{softmax}(\log p(\cdot \mid y_{<t}, x) / \tau)` for each source row,
    from the ``top_k`` likeliest vocabulary entries and, of these, the nucleus of ``top_p``.

    ``seeds`` `[B][K]`: one for each sample, which depends on its seed and sentence alone. The score is
    :math:`\log p(y \mid x)` of the model itself, whatever the sampling. Samples without an end are left out.
    """

    def begin(limits: Tensor) -> Search:
        return _Samples(limits, seeds, temperature=temperature, top_k=top_k, top_p=top_p)

    return decode(model, source, bounds, begin)


def likeliest(log_p: Tensor, count: int) -> Tensor:
    """Return log-probabilities `[..., V]` with minus infinity in all but the ``count`` largest; 0 keeps all.

    Entries as likely as the last of these are kept as well. Fan et al. 2018 (arXiv 1805.04833).
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


class _Samples(Search):
    """Sampling: K independent outputs of each sentence."""

    def __init__(
        self, limits: Tensor, seeds: Sequence[Sequence[int]], *, temperature: float, top_k: int, top_p: float
    ) -> None:
        super().__init__(limits, len(seeds[0]))
        self.temperature, self.top_k, self.top_p = temperature, top_k, top_p
        self.found: list[dict[int, Hypothesis]] = [{} for _ in range(len(limits))]
        self.uniform = torch.stack(
            [torch.stack([_uniform(int(limits.max()), seed) for seed in row]) for row in seeds]
        ).to(limits.device)

    def advance(self, log_p: Tensor) -> None:
        log_weights = nucleus(likeliest(log_p.double() / self.temperature, self.top_k), self.top_p)
        shares = torch.softmax(log_weights, -1).cumsum(-1)
        point = self.uniform[self.rows, :, self.length - 1, None] * shares[..., -1:]
        words = torch.searchsorted(shares, point, right=True).clamp(max=log_p.shape[-1] - 1)
        self.scores = self.scores + log_p.gather(-1, words).squeeze(-1)
        words = words.squeeze(-1)
        ends = (words == EOS) & self.scores.isfinite()
        for row, k in ends.nonzero().tolist():
            hypothesis = Hypothesis(self.tokens[row, k, 1:].tolist(), float(self.scores[row, k]))
            self.found[int(self.rows[row])][k] = hypothesis
        self.scores = self.scores.masked_fill(ends, float("-inf"))
        self.tokens = torch.cat((self.tokens, words[:, :, None]), dim=2)

    def results(self) -> list[list[Hypothesis]]:
        return [[found[k] for k in sorted(found)] for found in self.found]


def _uniform(count: int, seed: int) -> Tensor:
    """Draw `[count]` numbers in [0, 1), the first of which are the same for every count."""
    return torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
