"""Greedy and beam search with caches."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from normlab.nn.context import Cache
from normlab.nn.model import Seq2Seq

BOS, EOS = 2, 3
MAX_LEN = 1024
"""No output is longer, in tokens: a line that somebody forgot to split must not take hours."""


@dataclass
class _Finished:
    """The hypotheses of one sentence that have ended, best first when sorted by score."""

    found: list[tuple[float, list[int]]] = field(default_factory=list)

    def best(self) -> list[int]:
        """Empty where nothing was found: a diverged model's scores are not finite."""
        return max(self.found, key=lambda pair: pair[0], default=(0.0, []))[1]


@torch.inference_mode()
def beam_search(
    model: Seq2Seq,
    source: Tensor,
    *,
    beams: int = 5,
    length_penalty: float = 1.0,
    max_len_ratio: float = 1.5,
    allowed: Tensor | None = None,
) -> list[list[int]]:
    r"""The best translation of each source row `[B, S]`, as token ids without BOS and EOS.

    The score of a hypothesis y is :math:`\log p(y \mid x) / |y|^\alpha` with :math:`\alpha` =
    ``length_penalty`` and EOS counted in :math:`|y|`. A sentence ends when ``beams`` hypotheses have ended,
    or at ``max_len_ratio * |x| + 10`` tokens (at most ``MAX_LEN``, or the model's positions), where EOS is
    forced. One beam is greedy search. ``allowed`` `[V]` masks types that must not be produced.
    """
    memory, real = model.encode(source)
    limits = ((real.sum(1) * max_len_ratio).long() + 10).clamp(
        max=min(MAX_LEN, model.positions.longest or MAX_LEN)
    )
    search = _Search(len(source), beams, int(limits.max()), length_penalty, source.device)
    while search.rows.numel():
        hidden = model.decode_step(search.last, memory, real, search.cache)
        logits = model.embedding.logits(hidden).float()
        if allowed is not None:
            logits = logits.masked_fill(~allowed, float("-inf"))
        search.advance(torch.log_softmax(logits, -1), limits)
        kept = search.drop_ended()
        if kept is not None:
            memory, real, limits = memory[kept], real[kept], limits[kept]
    return [f.best() for f in search.finished]


class _Search:
    """Beams of the sentences that still go on: ``tokens`` `[B', K, t]`, ``scores`` `[B', K]`."""

    def __init__(
        self, sentences: int, beams: int, max_len: int, penalty: float, device: torch.device
    ) -> None:
        self.beams, self.penalty = beams, penalty
        self.cache = Cache(sentences, beams, max_len, device)
        self.finished = [_Finished() for _ in range(sentences)]
        self.rows = torch.arange(sentences, device=device)
        self.tokens = torch.full((sentences, beams, 1), BOS, device=device)
        self.scores = torch.full((sentences, beams), float("-inf"), device=device)
        self.scores[:, 0] = 0.0
        self.ended = torch.zeros(sentences, dtype=torch.bool, device=device)

    @property
    def last(self) -> Tensor:
        return self.tokens[:, :, -1]

    def advance(self, log_p: Tensor, limits: Tensor) -> None:
        """Take the next token of every beam from `[B', K, V]`."""
        vocab = log_p.shape[-1]
        length = self.tokens.shape[-1]
        at_limit = (limits <= length)[:, None, None]
        if at_limit.any():
            only_eos = torch.full_like(log_p[:1, :1], float("-inf"))
            only_eos[..., EOS] = 0.0
            log_p = torch.where(at_limit, only_eos + log_p[..., EOS, None], log_p)
        total = (self.scores[:, :, None] + log_p).flatten(1)
        scores, flat = total.topk(2 * self.beams, dim=1)
        parents, words = flat // vocab, flat % vocab
        self._collect(scores, parents, words, length)
        alive = scores.masked_fill(words == EOS, float("-inf"))
        self.scores, chosen = alive.topk(self.beams, dim=1)
        parents, words = parents.gather(1, chosen), words.gather(1, chosen)
        history = self.tokens.gather(1, parents[:, :, None].expand_as(self.tokens))
        self.tokens = torch.cat((history, words[:, :, None]), dim=2)
        if self.beams > 1:
            self.cache.reorder(parents)

    def _collect(self, scores: Tensor, parents: Tensor, words: Tensor, length: int) -> None:
        """Move hypotheses that end among the best K candidates to their sentence's finished ones."""
        ends = (words == EOS) & scores.isfinite()
        ends[:, self.beams :] = False
        ends &= ~self.ended[:, None]
        for row, k in ends.nonzero().tolist():
            finished = self.finished[int(self.rows[row])]
            hypothesis = self.tokens[row, parents[row, k], 1:].tolist()
            finished.found.append((float(scores[row, k]) / length**self.penalty, hypothesis))
            if len(finished.found) >= self.beams:
                self.ended[row] = True

    def drop_ended(self) -> Tensor | None:
        """Leave out ended sentences once they are a quarter of the batch; the kept rows, or None."""
        self.ended |= ~self.scores.isfinite().any(1)
        if 4 * int(self.ended.sum()) < len(self.ended):
            return None
        kept = (~self.ended).nonzero().squeeze(1)
        self.rows, self.tokens, self.scores = self.rows[kept], self.tokens[kept], self.scores[kept]
        self.ended = self.ended[kept]
        self.cache.keep(kept)
        return kept
