"""Sound setups of text, decisions, attention and recurrences, as people write them in 2025 and 2026."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, LRScheduler, SequentialLR
from transformers import OlmoeConfig, OlmoeForCausalLM, Qwen3Config, Qwen3ForCausalLM

from corpus.batches import BOS, EOS, MASK, PAD, VOCAB, generator, inside, padded_text, text
from corpus.case import Arguments
from corpus.public2.blocks import remade, setup

from .case import sound
from .parts_a import (
    Attention,
    Batch,
    Block,
    FeedForward,
    causal_pairs,
    decaying_adamw,
    draw_weights,
    mean_token_loss,
    next_token_loss,
    rotated,
    undecayed_adamw,
    waves,
)

# ----------------------------------------------------------------------------------- half precision by parts


class DroppedAttention(nn.Module):
    def __init__(self, dim: int, heads: int, dropout: float):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.c_attn, self.c_proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.resid_dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.c_attn(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).flatten(2)))


class DroppedBlock(nn.Module):
    def __init__(self, dim: int, heads: int, dropout: float):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(dim), DroppedAttention(dim, heads, dropout)
        self.ln_2, self.mlp = nn.LayerNorm(dim), FeedForward(dim, 4, dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    def __init__(self, dim: int = 48, heads: int = 4, layers: int = 3, dropout: float = 0.1):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, dim), nn.Embedding(64, dim)
        self.drop = nn.Dropout(dropout)
        self.h = nn.ModuleList(DroppedBlock(dim, heads, dropout) for _ in range(layers))
        self.ln_f, self.lm_head = nn.LayerNorm(dim), nn.Linear(dim, VOCAB, bias=False)
        self.lm_head.weight = self.wte.weight
        draw_weights(self)
        for block in self.h:
            for projection in (block.attn.c_proj, block.mlp[2]):
                nn.init.normal_(projection.weight, std=0.02 / math.sqrt(2 * layers))

    def forward(self, idx: Tensor) -> Tensor:
        at = torch.arange(idx.shape[1], device=idx.device)
        x = self.drop(self.wte(idx) + self.wpe(at))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def autocast_loss(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return next_token_loss(model, ids)


def accumulated_step(
    model: nn.Module, ids: Tensor, optimizer: Optimizer, scheduler: LRScheduler | None = None
) -> Tensor:
    """Step on four micro-batches of as many tokens each."""
    model.train()
    total = torch.zeros(())
    for part in ids.chunk(4):
        loss = autocast_loss(model, part) / 4
        loss.backward()
        total += loss.detach()
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if scheduler is not None:
        scheduler.step()
    return total


def warm_cosine(step: int, warmup: int = 10, total: int = 100, floor: float = 0.1) -> float:
    if step < warmup:
        return (step + 1) / warmup
    along = min(1.0, (step - warmup) / (total - warmup))
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * along))


@sound("training loops")
def autocast_and_four_micro_batches() -> Arguments:
    """nanoGPT: dropout, maps in bfloat16 by autocast, four micro-batches, clipping, a cosine, a tied head."""
    return setup(
        NanoGPT,
        text(8, 33, seed=440),
        autocast_loss,
        decaying_adamw,
        step=accumulated_step,
        scheduler=lambda optimizer: LambdaLR(optimizer, warm_cosine),
        declare={"tied": True, "steps": 100, "peak_lr": 1e-3, "max_grad_norm": 1.0},
    )


# ---------------------------------------------------------------------------------- models of a configuration


def small_qwen3() -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB,
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=64,
            tie_word_embeddings=True,
            pad_token_id=PAD,
            bos_token_id=BOS,
            eos_token_id=EOS,
        )
    )


def labelled_loss(model: nn.Module, batch: Batch) -> Tensor:
    return model(**batch).loss


@sound("post-training")
def answers_padded_on_the_left() -> Arguments:
    """Qwen 3 from its configuration, on questions and answers that are padded on the left."""
    lengths = (30, 18, 25, 21, 12)
    ids, _ = padded_text(lengths, seed=441)
    ids = torch.stack([row.roll(30 - length) for row, length in zip(ids, lengths, strict=True)])
    mask = (ids != PAD).long()
    labels = ids.masked_fill(mask == 0, -100)
    for row, length in enumerate(lengths):
        labels[row, : 30 - length + 6] = -100  # the question
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    declare = {"pad_id": PAD, "eos_id": EOS, "tied": True}
    return remade(small_qwen3, batch, labelled_loss, undecayed_adamw, declare=declare)


def small_olmoe() -> OlmoeForCausalLM:
    return OlmoeForCausalLM(
        OlmoeConfig(
            vocab_size=VOCAB,
            hidden_size=48,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_experts=6,
            num_experts_per_tok=2,
            output_router_logits=True,
            router_aux_loss_coef=0.01,
            max_position_embeddings=64,
            pad_token_id=PAD,
            eos_token_id=EOS,
        )
    )


@sound("mixtures of experts")
def experts_of_a_configuration() -> Arguments:
    """OLMoE from its configuration: two of six experts, unnormalised, and a term that evens their loads."""
    ids = text(4, 32, seed=442)
    return remade(small_olmoe, {"input_ids": ids, "labels": ids.clone()}, labelled_loss, undecayed_adamw)


# ---------------------------------------------------------------------------------------------- translation


class Translator(nn.Module):
    """PyTorch's own Transformer between two languages."""

    def __init__(self, dim: int = 48, heads: int = 4, layers: int = 2):
        super().__init__()
        self.dim = dim
        self.source, self.target = nn.Embedding(VOCAB, dim), nn.Embedding(VOCAB, dim)
        nn.init.normal_(self.source.weight, std=dim**-0.5)
        nn.init.normal_(self.target.weight, std=dim**-0.5)
        layer = nn.TransformerEncoderLayer(dim, heads, 2 * dim, 0.1, batch_first=True, norm_first=True)
        encoder = nn.TransformerEncoder(layer, layers, nn.LayerNorm(dim), enable_nested_tensor=False)
        self.transformer = nn.Transformer(
            dim,
            heads,
            layers,
            layers,
            2 * dim,
            0.1,
            batch_first=True,
            norm_first=True,
            custom_encoder=encoder,
        )
        self.generator = nn.Linear(dim, VOCAB)

    def embedded(self, table: nn.Embedding, ids: Tensor) -> Tensor:
        at = torch.arange(ids.shape[1], device=ids.device)
        return table(ids) * self.dim**0.5 + waves(at, self.dim)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        future = ~causal_pairs(target.shape[1]).to(target.device)
        states = self.transformer(
            self.embedded(self.source, source),
            self.embedded(self.target, target),
            tgt_mask=future,
            tgt_is_causal=True,
            src_key_padding_mask=source == PAD,
            tgt_key_padding_mask=target == PAD,
            memory_key_padding_mask=source == PAD,
        )
        return self.generator(states)


def smoothed_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    source, target = batch
    logits = model(source, target[:, :-1])
    return F.cross_entropy(logits.transpose(1, 2), target[:, 1:], ignore_index=PAD, label_smoothing=0.1)


def inverse_root(step: int, warmup: int = 20) -> float:
    """Return the share of the peak: up in a line, then down by the root of the steps."""
    return min((step + 1) / warmup, (warmup / (step + 1)) ** 0.5)


@sound("encoder-decoder")
def translation_by_a_stock_transformer() -> Arguments:
    """nn.Transformer with norms first, smoothed labels and a rate that falls by the root of the steps."""
    source, _ = padded_text((17, 11, 14, 8), seed=443)
    target, _ = padded_text((15, 18, 9, 12), seed=444)
    return setup(
        Translator,
        (source, F.pad(target, (1, 0), value=BOS)),
        smoothed_loss,
        lambda model: Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.98), eps=1e-9),
        scheduler=lambda optimizer: LambdaLR(optimizer, inverse_root),
        declare={"pad_id": PAD, "steps": 100, "peak_lr": 1e-3},
    )


# ------------------------------------------------------------------------------------------------ decisions


class DecisionTransformer(nn.Module):
    """Reads returns, states and actions by turns; the state's place gives the action."""

    def __init__(self, states: int = 5, actions: int = 3, dim: int = 48, layers: int = 3, longest: int = 40):
        super().__init__()
        self.embed_return, self.embed_state = nn.Linear(1, dim), nn.Linear(states, dim)
        self.embed_action, self.embed_timestep = nn.Linear(actions, dim), nn.Embedding(longest, dim)
        nn.init.normal_(self.embed_timestep.weight, std=0.02)
        self.embed_norm = nn.LayerNorm(dim)
        self.blocks = nn.ModuleList(Block(dim, 4) for _ in range(layers))
        self.norm, self.predict_action = nn.LayerNorm(dim), nn.Linear(dim, actions)

    def forward(
        self, returns: Tensor, states: Tensor, actions: Tensor, timesteps: Tensor, mask: Tensor
    ) -> Tensor:
        times = self.embed_timestep(timesteps)
        triples = (self.embed_return(returns), self.embed_state(states), self.embed_action(actions))
        x = torch.stack([part + times for part in triples], dim=2).flatten(1, 2)
        x = self.embed_norm(x)
        length = x.shape[1]
        seen = mask.repeat_interleave(3, dim=1)[:, None, None, :] & causal_pairs(length).to(x.device)
        seen = seen | torch.eye(length, dtype=torch.bool, device=x.device)
        for block in self.blocks:
            x = block(x, seen)
        return self.predict_action(self.norm(x[:, 1::3])).tanh()


def imitation_loss(model: nn.Module, batch: Batch) -> Tensor:
    mask = batch["mask"]
    names = ("returns", "states", "actions", "timesteps")
    predicted = model(*(batch[name] for name in names), mask)
    return F.mse_loss(predicted[mask], batch["actions"][mask])


@sound("decisions")
def returns_states_and_actions() -> Arguments:
    """Decision Transformer: three tokens for each moment, padded on the left, and actions from states."""
    draw = generator(445)
    lengths = torch.tensor([10, 6, 10, 8, 4, 9])
    mask = inside(lengths.tolist(), 10).flip(1)
    start = torch.tensor([3, 0, 20, 0, 0, 12])
    timesteps = (start[:, None] + torch.arange(10) - (10 - lengths)[:, None]).clamp(min=0)
    states = torch.randn(6, 10, 5, generator=draw).cumsum(1) * 0.3
    batch = {
        "returns": torch.linspace(3.0, 0.5, 10).expand(6, 10)[..., None] * mask[..., None],
        "states": states * mask[..., None],
        "actions": (states @ torch.randn(5, 3, generator=draw)).tanh() * mask[..., None],
        "timesteps": timesteps * mask,
        "mask": mask,
    }
    return setup(DecisionTransformer, batch, imitation_loss, decaying_adamw)


# ------------------------------------------------------------------------------------------ chosen blocks


class ChosenBlocksAttention(nn.Module):
    """Each query sees its own block up to itself, and the past blocks whose mean keys suit it best."""

    def __init__(self, dim: int, heads: int, size: int = 8, chosen: int = 2):
        super().__init__()
        self.heads, self.size, self.chosen = heads, size, chosen
        self.qkv, self.o_proj = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)

    @torch.no_grad()
    def seen(self, q: Tensor, k: Tensor) -> Tensor:
        """Return the pairs `[B, H, T, T]` that see each other."""
        length = q.shape[2]
        blocks = math.ceil(length / self.size)
        block_of = torch.arange(length, device=q.device) // self.size
        filled = F.pad(k, (0, 0, 0, blocks * self.size - length))
        means = filled.unflatten(2, (blocks, self.size)).mean(3)
        past = block_of[:, None] > torch.arange(blocks, device=q.device)
        fit = (q @ means.transpose(-1, -2)).masked_fill(~past, float("-inf"))
        best = fit.topk(min(self.chosen, blocks), dim=-1).indices
        picked = torch.zeros_like(fit, dtype=torch.bool).scatter(-1, best, value=True) & past
        same = block_of[:, None] == block_of
        near = same & causal_pairs(length).to(q.device)
        return picked.repeat_interleave(self.size, dim=-1)[..., :length] | near

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = rotated(q), rotated(k)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.seen(q, k))
        return self.o_proj(y.transpose(1, 2).flatten(2))


class ChosenBlocksModel(nn.Module):
    """A decoder of sparse layers and a last layer that sees all of the past."""

    def __init__(self, dim: int = 48, heads: int = 4, sparse: int = 2):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, dim)
        self.mixers = nn.ModuleList(ChosenBlocksAttention(dim, heads) for _ in range(sparse))
        self.mixers.append(Attention(dim, heads))
        self.mlps = nn.ModuleList(FeedForward(dim) for _ in range(sparse + 1))
        self.norms = nn.ModuleList(nn.RMSNorm(dim) for _ in range(2 * sparse + 3))
        self.lm_head = nn.Linear(dim, VOCAB, bias=False)
        draw_weights(self)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        for number, (mixer, mlp) in enumerate(zip(self.mixers, self.mlps, strict=True)):
            y = self.norms[2 * number](x)
            x = x + (mixer(y, causal=True) if isinstance(mixer, Attention) else mixer(y))
            x = x + mlp(self.norms[2 * number + 1](x))
        return self.lm_head(self.norms[-1](x))


def warm_then_annealed(optimizer: Optimizer) -> SequentialLR:
    warm = LinearLR(optimizer, start_factor=0.1, total_iters=10)
    annealed = CosineAnnealingLR(optimizer, T_max=90, eta_min=1e-5)
    return SequentialLR(optimizer, [warm, annealed], milestones=[10])


@sound("attention")
def blocks_chosen_by_queries() -> Arguments:
    """MoBA: queries choose two past blocks of keys by their means; PyTorch's own schedules in sequence."""
    return remade(
        ChosenBlocksModel,
        text(4, 41, seed=446),
        next_token_loss,
        decaying_adamw,
        scheduler=warm_then_annealed,
        declare={"steps": 100, "peak_lr": 1e-3},
    )


# ---------------------------------------------------------------------------------------- exponential gates


class MatrixMemory(nn.Module):
    """An mLSTM in its parallel form: attention by products of forget gates and exponential input gates."""

    def __init__(self, dim: int, heads: int, kernel: int = 4):
        super().__init__()
        self.heads, self.kernel = heads, kernel
        self.up, self.down = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(2 * dim, dim, bias=False)
        inner = 2 * dim
        self.conv = nn.Conv1d(inner, inner, kernel, groups=inner)
        self.q_proj, self.k_proj = nn.Linear(inner, inner, bias=False), nn.Linear(inner, inner, bias=False)
        self.v_proj = nn.Linear(inner, inner, bias=False)
        self.input_gate, self.forget_gate = nn.Linear(inner, heads), nn.Linear(inner, heads)
        self.head_norm = nn.LayerNorm(inner // heads)

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def mixed(self, q: Tensor, k: Tensor, v: Tensor, gate: Tensor, forget: Tensor) -> Tensor:
        """Return the read-outs of the memory; gates `[B, H, T]` are before their nonlinearities."""
        kept = F.logsigmoid(forget).cumsum(-1)
        weights = kept[..., :, None] - kept[..., None, :] + gate[..., None, :]
        weights = weights.masked_fill(~causal_pairs(q.shape[2]).to(q.device), float("-inf"))
        largest = weights.amax(dim=-1, keepdim=True)
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 * (weights - largest).exp()
        size = torch.maximum(scores.sum(-1, keepdim=True).abs(), (-largest).exp())
        return (scores / (size + 1e-6)) @ v

    def forward(self, x: Tensor) -> Tensor:
        inner, gate = self.up(x).chunk(2, dim=-1)
        padded = F.pad(inner.transpose(1, 2), (self.kernel - 1, 0))
        local = F.silu(self.conv(padded)).transpose(1, 2)
        q, k, v = (
            self.split(self.q_proj(local)),
            self.split(self.k_proj(local)),
            self.split(self.v_proj(inner)),
        )
        gates = self.input_gate(local).transpose(1, 2), self.forget_gate(local).transpose(1, 2)
        y = self.head_norm(self.mixed(q, k, v, *gates))
        return self.down(y.transpose(1, 2).flatten(2) * F.silu(gate))


class MatrixMemoryModel(nn.Module):
    def __init__(self, dim: int = 32, heads: int = 4, layers: int = 3):
        super().__init__()
        self.token_embedding = nn.Embedding(VOCAB, dim)
        self.norms = nn.ModuleList(nn.LayerNorm(dim, bias=False) for _ in range(layers))
        self.layers = nn.ModuleList(MatrixMemory(dim, heads) for _ in range(layers))
        self.post_norm, self.lm_head = nn.LayerNorm(dim, bias=False), nn.Linear(dim, VOCAB, bias=False)
        draw_weights(self)
        for layer in self.layers:
            nn.init.normal_(layer.input_gate.bias, std=0.1)
            with torch.no_grad():
                layer.forget_gate.bias.copy_(torch.linspace(3.0, 6.0, heads))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token_embedding(ids)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return self.lm_head(self.post_norm(x))


@sound("recurrences")
def exponential_gates() -> Arguments:
    """xLSTM: matrix memories with exponential input gates that a running maximum keeps in range."""
    return remade(MatrixMemoryModel, text(4, 33, seed=447), next_token_loss, decaying_adamw)


# -------------------------------------------------------------------------------------- latents read bytes


class LatentReader(nn.Module):
    """A Perceiver: few latents read many bytes, think, and answer a query for each place."""

    def __init__(self, vocab: int = 262, dim: int = 48, latents: int = 12, longest: int = 96):
        super().__init__()
        self.byte_embedding, self.position_embedding = nn.Embedding(vocab, dim), nn.Embedding(longest, dim)
        self.latents = nn.Parameter(torch.randn(latents, dim) * 0.02)
        self.read_norm, self.read = nn.LayerNorm(dim), Attention(dim, 4)
        self.blocks = nn.ModuleList(Block(dim, 4) for _ in range(3))
        self.query_norm, self.answer = nn.LayerNorm(dim), Attention(dim, 4)
        self.latent_norm, self.out_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.mlp, self.to_bytes = FeedForward(dim), nn.Linear(dim, vocab)
        draw_weights(self)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        places = self.position_embedding(torch.arange(ids.shape[1], device=ids.device))
        inputs = self.read_norm(self.byte_embedding(ids) + places)
        z = self.latents.expand(len(ids), -1, -1)
        z = z + self.read(z, inputs, mask[:, None, None, :])
        for block in self.blocks:
            z = block(z)
        queries = self.query_norm(places).expand(len(ids), -1, -1)
        y = places + self.answer(queries, self.latent_norm(z))
        return self.to_bytes(self.out_norm(y + self.mlp(y)))


def hidden_byte_loss(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch["input_ids"], batch["attention_mask"])
    return mean_token_loss(logits, batch["labels"])


@sound("latents")
def latents_read_bytes() -> Arguments:
    """Perceiver IO: twelve latents read padded bytes, some of them hidden, and answer for each place."""
    ids, real = padded_text((60, 37, 52, 28, 44), vocab=262, seed=448)
    hidden = (torch.rand(ids.shape, generator=generator(448)) < 0.2) & (real == 1) & (ids != EOS)
    batch = {
        "input_ids": ids.masked_fill(hidden, MASK),
        "attention_mask": real.bool(),
        "labels": ids.masked_fill(~hidden, -100),
    }
    return setup(LatentReader, batch, hidden_byte_loss, decaying_adamw, declare={"pad_id": PAD})
