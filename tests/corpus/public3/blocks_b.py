"""What several cases of this half are made of: a small GPT, an encoder, and what they are trained with."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW

from corpus.batches import VOCAB


class Block(nn.Module):
    """A Pre-LN block with biases, as in GPT-2; without ``causal``, every token sees every real one."""

    def __init__(self, dim: int, heads: int, *, causal: bool, dropout: float = 0.0):
        super().__init__()
        self.heads, self.causal, self.dropout = heads, causal, dropout
        self.ln_1, self.ln_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.c_attn, self.c_proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.c_fc, self.mlp_proj = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.resid_drop = nn.Dropout(dropout)

    def attend(self, x: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.c_attn(x).chunk(3, -1)
        )
        if self.causal and mask is not None:
            mask = mask & torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.causal and mask is None)
        return self.c_proj(y.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.resid_drop(self.attend(self.ln_1(x), mask))
        return x + self.resid_drop(self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh")))


def gpt2_init(module: nn.Module, layers: int) -> None:
    """Draw weights as GPT-2 does: those that write to the stream are smaller the deeper the model is."""
    for name, parameter in module.named_parameters():
        if name.endswith(("c_proj.weight", "mlp_proj.weight")):
            nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5)
        elif parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)


class GPT(nn.Module):
    """A decoder with learned positions and a tied head."""

    def __init__(
        self, dim: int = 48, layers: int = 2, heads: int = 4, *, length: int = 64, dropout: float = 0.0
    ):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, dim), nn.Embedding(length, dim)
        self.drop = nn.Dropout(dropout)
        self.h = nn.ModuleList(Block(dim, heads, causal=True, dropout=dropout) for _ in range(layers))
        self.ln_f = nn.LayerNorm(dim)
        self.lm_head = nn.Linear(dim, VOCAB, bias=False)
        self.lm_head.weight = self.wte.weight
        gpt2_init(self, layers)

    def states(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return the normed states; a mask of real tokens is needed where rows are padded on the left."""
        if attention_mask is None:
            positions, mask = torch.arange(ids.shape[1], device=ids.device), None
        else:
            positions = (attention_mask.cumsum(1) - 1).clamp(min=0)
            itself = torch.eye(ids.shape[1], dtype=torch.bool, device=ids.device)
            mask = attention_mask.bool()[:, None, None] | itself
        x = self.drop(self.wte(ids) + self.wpe(positions))
        for block in self.h:
            x = block(x, mask)
        return self.ln_f(x)

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.lm_head(self.states(ids, attention_mask))


def gathered_logps(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the log-probability `[B, T - 1]` of each token after the first."""
    logps = F.log_softmax(logits[:, :-1].float(), dim=-1)
    return logps.gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)


def configure_adamw(model: nn.Module, lr: float = 1e-3, weight_decay: float = 0.1) -> AdamW:
    """Return AdamW that decays the matrices of linear maps and convolutions."""
    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d)
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    decayed = [m.weight for m in model.modules() if isinstance(m, kinds) and m.weight.requires_grad]
    decayed = [p for p in decayed if id(p) not in tables]
    chosen = {id(p) for p in decayed}
    others = [p for p in model.parameters() if p.requires_grad and id(p) not in chosen]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return AdamW([group for group in groups if group["params"]], lr=lr, betas=(0.9, 0.95))


def plain_adamw(model: nn.Module, lr: float = 1e-3) -> AdamW:
    """Return AdamW of all trained parameters, without decay."""
    return AdamW([p for p in model.parameters() if p.requires_grad], lr=lr, weight_decay=0.0)
