"""A small causal language model, rows of prompts and answers, and what the scripts of this folder share."""

import sys
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

VOCABULARY, PAD, END = 40, 0, 1
WIDTH, HEADS, LAYERS = 32, 4, 2
MISTAKE = sys.argv[1] if len(sys.argv) > 1 else ""
"""The mistake that a script is asked to make, or nothing."""


class Block(nn.Module):
    """Attention and a feed-forward, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.output = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, visible: Tensor) -> Tensor:
        read = self.attention_norm(x)
        rows, length, _ = x.shape
        q, k, v = (
            layer(read).view(rows, length, HEADS, -1).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        x = x + self.output(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.ffn_norm(x))))


class LanguageModel(nn.Module):
    """Logits `[B, T, V]` of the next token, or scores `[B, T, 1]` with ``outputs=1``."""

    def __init__(self, outputs: int = VOCABULARY) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, outputs, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.05)

    def forward(
        self,
        ids: Tensor,
        mask: Tensor | None = None,
        documents: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        length = ids.shape[1]
        visible = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
        if mask is not None:
            visible = visible & (mask[:, None, None, :] == 1)
        if documents is not None:
            visible = visible & (documents[:, None, :, None] == documents[:, None, None, :])
        where = torch.arange(length) if positions is None else positions
        x = self.embedding(ids) + self.positions(where)
        for block in self.blocks:
            x = block(x, visible)
        return self.head(self.norm(x))


def answers(count: int, *, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Rows `[B, T]` of a prompt and an answer that ends, filled up on the right; where they hold tokens, and
    where tokens are of the answer.
    """
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, VOCABULARY, (count, 16), generator=draw)
    prompts = torch.randint(3, 6, (count, 1), generator=draw)
    lengths = torch.randint(9, 15, (count, 1), generator=draw)
    place = torch.arange(16)
    ids[place == lengths - 1] = END
    ids[place >= lengths] = PAD
    mask = (place < lengths).long()
    return ids, mask, mask * (place >= prompts)


def loaded(*tensors: Tensor, rows: int = 4) -> DataLoader:
    """Batches of so many rows of these tensors."""
    return DataLoader(TensorDataset(*tensors), batch_size=rows)


def side_by_side(batch: Sequence[Tensor]) -> list[Tensor]:
    """Each tensor of the chosen answers, the first half of a batch, with the one of the rejected answers, the
    second half, in the rows below it.
    """
    half = len(batch) // 2
    return [torch.cat(pair) for pair in zip(batch[:half], batch[half:], strict=True)]


def token_logps(logits: Tensor, ids: Tensor) -> Tensor:
    """Log-probabilities `[B, T - 1]` of each token after the first."""
    logp = logits[:, :-1].log_softmax(-1)
    return logp.gather(-1, ids[:, 1:, None])[..., 0]
