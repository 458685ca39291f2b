"""What several cases of this half are made of: a Llama, its optimizers and what is read off its logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW

from corpus.batches import VOCAB

if TYPE_CHECKING:
    from collections.abc import Callable

Batch = dict[str, Tensor]


def causal_mask(length: int, device: torch.device | None = None) -> Tensor:
    """Return which keys `[T, T]` each query may see."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate the halves of heads against each other."""
    cos, sin = angles.cos(), angles.sin()
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Rotary(nn.Module):
    """Angles of positions, for halves of a head that are rotated against each other."""

    inv_freq: Tensor

    def __init__(self, head_dim: int, theta: float = 10_000.0):
        super().__init__()
        inv_freq = theta ** (-torch.arange(0, head_dim, 2).float() / head_dim)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate `[B, H, T, D]` by positions `[T]` or `[B, T]`."""
        angles = positions[..., None].float() * self.inv_freq
        return rotated(x, angles[:, None] if angles.dim() == 3 else angles)


class Attention(nn.Module):
    """Attention with rotary positions whose keys and values have fewer heads than its queries."""

    def __init__(self, dim: int, heads: int, kv_heads: int, make_linear: Callable[..., nn.Module]):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim // heads
        self.q_proj = make_linear(dim, dim, bias=False)
        self.k_proj = make_linear(dim, kv_heads * self.head_dim, bias=False)
        self.v_proj = make_linear(dim, kv_heads * self.head_dim, bias=False)
        self.o_proj = make_linear(dim, dim, bias=False)
        self.rotary = Rotary(self.head_dim)

    def forward(self, x: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k = self.k_proj(x).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)
        q, k = self.rotary(q, positions), self.rotary(k, positions)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, dim: int, hidden: int, make_linear: Callable[..., nn.Module]):
        super().__init__()
        self.gate_proj = make_linear(dim, hidden, bias=False)
        self.up_proj = make_linear(dim, hidden, bias=False)
        self.down_proj = make_linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, dim: int, heads: int, kv_heads: int, make_linear: Callable[..., nn.Module]):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.self_attn = Attention(dim, heads, kv_heads, make_linear)
        self.mlp = FeedForward(dim, 2 * dim, make_linear)

    def forward(self, x: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), mask, positions)
        return x + self.mlp(self.post_attention_layernorm(x))


def draw_weights(module: nn.Module, std: float = 0.02) -> None:
    """Draw the weights of maps and tables, and clear biases."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=std)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


class Trunk(nn.Module):
    """Layers of the Llama kind and their last norm, over embeddings."""

    def __init__(
        self,
        dim: int = 48,
        layers: int = 2,
        *,
        heads: int = 4,
        kv_heads: int = 2,
        make_linear: Callable[..., nn.Module] = nn.Linear,
    ):
        super().__init__()
        self.layers = nn.ModuleList(Layer(dim, heads, kv_heads, make_linear) for _ in range(layers))
        self.norm = nn.RMSNorm(dim)
        self.apply(draw_weights)

    def forward(self, x: Tensor, mask: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        """Return the normed states of embeddings `[B, T, C]`; a mask is true where a key is seen."""
        if mask is None:
            mask = causal_mask(x.shape[1], x.device)
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device)
        for layer in self.layers:
            x = layer(x, mask, positions)
        return self.norm(x)


class Llama(nn.Module):
    """A decoder of the Llama kind with a head of its own."""

    def __init__(self, dim: int = 48, layers: int = 2, *, vocab: int = VOCAB, **options: Any):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, dim)
        self.model = Trunk(dim, layers, **options)
        self.lm_head = nn.Linear(dim, vocab, bias=False)
        draw_weights(self.embed_tokens)
        draw_weights(self.lm_head)

    def forward(self, ids: Tensor, mask: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        return self.lm_head(self.model(self.embed_tokens(ids), mask, positions))


def logps_of_next(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the log-probability `[B, T - 1]` of each token after the first."""
    logps = logits[:, :-1].float().log_softmax(-1)
    return logps.gather(-1, ids[:, 1:, None]).squeeze(-1)


def next_token_loss(model: nn.Module, ids: Tensor) -> Tensor:
    return -logps_of_next(model(ids), ids).mean()


def labelled_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean loss of labels that stand at the tokens themselves; -100 is left out."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=-100)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum() / mask.sum()


def decayed_adamw(model: nn.Module, lr: float = 1e-3, weight_decay: float = 0.1) -> AdamW:
    """Return AdamW that decays the weights of linear maps and convolutions alone."""
    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d)
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    matrices = {id(module.weight) for module in model.modules() if isinstance(module, kinds)} - tables
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            matrices.add(id(module.in_proj_weight))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decayed = [parameter for parameter in trained if id(parameter) in matrices]
    others = [parameter for parameter in trained if id(parameter) not in matrices]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return AdamW([group for group in groups if group["params"]], lr=lr, betas=(0.9, 0.95))


def trained_adamw(model: nn.Module, lr: float = 1e-3) -> AdamW:
    """Return AdamW of all trained parameters, without decay."""
    return AdamW([p for p in model.parameters() if p.requires_grad], lr=lr, weight_decay=0.0)
