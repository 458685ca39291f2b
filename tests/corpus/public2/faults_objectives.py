"""Reports of what is optimized in text: post-training, mixtures, distillation, further heads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.batches import BOS, EOS, PAD, VOCAB, generator, inside, padded_text, text, tokens
from corpus.case import Arguments

from .blocks import (
    Decoder,
    DecoderLayer,
    EncoderLayer,
    GatedMLP,
    RMSNorm,
    adamw,
    init_weights,
    language_loss,
    next_token_loss,
    remade,
    setup,
    token_log_probs,
)
from .case import report

USER, ASSISTANT = 3, 4
"""The markers that open a message of each role."""

# ----------------------------------------------------------------------------------------------------- SFT


def conversations(*, close_turns: bool, rows: int = 4, length: int = 48, seed: int = 22) -> dict[str, Tensor]:
    """Return conversations whose turns have no end but the next marker, with labels of the assistant's words.

    ``close_turns`` also labels the marker after each of the assistant's turns, which ends it.
    """
    draw = generator(seed)
    ids = text(rows, length, seed=seed)
    assistant = torch.zeros_like(ids, dtype=torch.bool)
    for row in range(rows):
        column, speaker = 1, USER
        ids[row, 0] = BOS
        while column < length:
            said = int(torch.randint(4, 9, (), generator=draw))
            ids[row, column] = speaker
            if speaker == ASSISTANT:
                last = min(column + said + 1, length)
                assistant[row, column + 1 : last + close_turns] = True
            column += said + 1
            speaker = ASSISTANT if speaker == USER else USER
    return {"input_ids": ids, "labels": ids.masked_fill(~assistant, -100)}


def labelled_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return next_token_loss(model(batch["input_ids"]), batch["labels"])


@report("huggingface/trl#5988", "tokens", "counted")
def end_of_turn_outside_the_mask(*, faulty: bool) -> Arguments:
    """The marker that ends the assistant's turn belongs to the next message and is never a target."""
    batch = conversations(close_turns=not faulty)
    return setup(Decoder, batch, labelled_loss, declare={"eos_id": USER})


# ------------------------------------------------------------------------------------------------------- RL


def completions(model: nn.Module, *, rows: int = 8, prompt: int = 8, seed: int = 23) -> dict[str, Tensor]:
    """Return prompts with sampled completions of several lengths, and what the policy said of them."""
    lengths = torch.tensor([24, 15, 19, 24, 11, 24, 22, 17][:rows])
    ids = tokens(rows, 24, seed=seed)
    real = inside(lengths.tolist(), 24)
    ends = lengths < 24
    ids[ends, lengths[ends] - 1] = EOS
    ids = ids.masked_fill(~real, PAD)
    for group in ids.view(2, rows // 2, -1):
        group[:, :prompt] = group[0, :prompt]
    completion = real.clone()
    completion[:, :prompt] = False
    rewards = torch.randn(rows, generator=generator(seed))
    groups = rewards.view(2, -1)
    advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    with torch.no_grad():
        old = token_log_probs(model(ids), ids)
    return {
        "ids": ids,
        "completion_mask": completion[:, 1:].float(),
        "truncated": ~ends,
        "advantages": advantages.flatten(),
        "old_logps": old,
    }


def group_loss(model: nn.Module, batch: dict[str, Tensor], *, count_truncated: bool) -> Tensor:
    """Return the token-normalised policy loss of completions that were not cut off."""
    raw = batch["completion_mask"]
    mask = raw * ~batch["truncated"][:, None]
    ratio = (token_log_probs(model(batch["ids"]), batch["ids"]) - batch["old_logps"]).exp()
    advantages = batch["advantages"][:, None]
    clipped = ratio.clamp(0.8, 1.28)
    each = -torch.min(ratio * advantages, clipped * advantages)
    items = raw.sum() if count_truncated else mask.sum()
    return (each * mask).sum() / items.clamp(min=1)


@report("huggingface/trl#6439", "policy gradients", "reduction", "counted")
def truncated_completions_counted(*, faulty: bool) -> Arguments:
    """Tokens of truncated completions are left out of the loss, but still divide it."""
    torch.manual_seed(0)
    model = Decoder()
    loss = partial(group_loss, count_truncated=faulty)
    return {
        "model": model,
        "batch": completions(model),
        "loss": loss,
        "optimizer": adamw(model),
        "declare": {"pad_id": PAD},
    }


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.decoder = Decoder()
        self.value_head = nn.Linear(self.decoder.dim, 1)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        states = self.decoder.hidden(ids)
        return self.decoder.lm_head(states), self.value_head(states).squeeze(-1)


def advantages_of(rewards: Tensor, values: Tensor, gamma: float = 1.0, smooth: float = 0.95) -> Tensor:
    """Return the advantages of one run of actions (generalised advantage estimation)."""
    out, carry = torch.zeros_like(values), values.new_zeros(())
    following = values.new_zeros(())
    for t in reversed(range(len(values))):
        carry = rewards[t] + gamma * following - values[t] + gamma * smooth * carry
        following, out[t] = values[t], carry
    return out


@torch.no_grad()
def estimated(batch: dict[str, Tensor], *, all_tokens: bool) -> Tensor:
    """Return the advantage of each token; the score falls to the last action of a row."""
    advantages = torch.zeros_like(batch["old_values"])
    for row, score in enumerate(batch["scores"]):
        chosen = batch["response_mask"][row] if all_tokens else batch["loss_mask"][row]
        at = chosen.nonzero().squeeze(-1)
        rewards = torch.zeros(len(at))
        rewards[-1] = score
        advantages[row, at] = advantages_of(rewards, batch["old_values"][row, at])
    return advantages


def agent_loss(model: nn.Module, batch: dict[str, Tensor], *, all_tokens: bool) -> Tensor:
    advantages = estimated(batch, all_tokens=all_tokens)
    returns = advantages + batch["old_values"]
    logits, values = model(batch["ids"])
    ratio = (token_log_probs(logits, batch["ids"]) - batch["old_logps"]).exp()
    policy = torch.max(-ratio * advantages, -ratio.clamp(0.8, 1.2) * advantages)
    value = (values[:, :-1] - returns).square()
    mask = batch["loss_mask"]
    return ((policy + 0.5 * value) * mask).sum() / mask.sum()


def agent_batch(model: nn.Module) -> dict[str, Tensor]:
    """Return answers of an agent, in which some tokens are what its tools replied."""
    ids = tokens(4, 28, seed=24)
    response = torch.ones(4, 27)
    response[:, :6] = 0
    loss_mask = response.clone()
    for row, (begin, end) in enumerate(((12, 18), (10, 20), (15, 19), (20, 27))):
        loss_mask[row, begin:end] = 0
    with torch.no_grad():
        logits, values = model(ids)
    return {
        "ids": ids,
        "response_mask": response,
        "loss_mask": loss_mask,
        "scores": torch.tensor([1.0, -0.5, 0.3, 1.5]),
        "old_logps": token_log_probs(logits, ids),
        "old_values": values[:, :-1],
    }


@report("radixark/miles#1827", "policy gradients")
def advantages_cross_tool_replies(*, faulty: bool) -> Arguments:
    """Advantages run over the tools' replies too, so that scores reach the agent's own tokens diluted."""
    torch.manual_seed(0)
    model = ActorCritic()
    loss = partial(agent_loss, all_tokens=faulty)
    return {"model": model, "batch": agent_batch(model), "loss": loss, "optimizer": adamw(model)}


# -------------------------------------------------------------------------------------------- distillation


def distilled_loss(
    model: nn.Module, batch: dict[str, Tensor], *, teacher: nn.Module, count_padding: bool, hot: float = 2.0
) -> Tensor:
    """Return the mean of the loss of the words and of the divergence from the teacher."""
    ids, mask = batch["input_ids"], batch["attention_mask"]
    labels = ids.clone() if count_padding else ids.masked_fill(mask == 0, -100)
    logits = model(ids)
    with torch.no_grad():
        wanted = (teacher(ids) / hot).softmax(-1)
    divergence = F.kl_div((logits / hot).log_softmax(-1), wanted, reduction="none").sum(-1)
    if count_padding:
        soft = divergence.mean()
    else:
        soft = (divergence * mask).sum() / mask.sum()
    return 0.5 * next_token_loss(logits, labels) + 0.5 * hot**2 * soft


@report("peremartra/optipfair#34", "distillation", "counted", "padding")
def padding_distilled(*, faulty: bool) -> Arguments:
    """All terms of a distillation run over padding: labels are a copy of the ids, nothing is masked."""
    torch.manual_seed(1)
    teacher = Decoder(layers=3).requires_grad_(False).eval()
    ids, real = padded_text((28, 15, 20, 11), seed=25)
    loss = partial(distilled_loss, teacher=teacher, count_padding=faulty)
    batch = {"input_ids": ids, "attention_mask": real}
    return setup(Decoder, batch, loss, declare={"pad_id": PAD, "eos_id": EOS})


# -------------------------------------------------------------------------------------- multi-token heads


class Ahead(nn.Module):
    """A decoder with a module that predicts one token further, from its state and the next token."""

    def __init__(self):
        super().__init__()
        self.decoder = Decoder()
        dim = self.decoder.dim
        self.hnorm, self.enorm = RMSNorm(dim), RMSNorm(dim)
        self.eh_proj = nn.Linear(2 * dim, dim, bias=False)
        self.block, self.final_norm = DecoderLayer(dim, 4), RMSNorm(dim)
        self.eh_proj.apply(init_weights)
        self.block.apply(init_weights)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        states = self.decoder.hidden(ids)
        following = self.decoder.embed_tokens(ids[:, 1:])
        x = self.eh_proj(torch.cat((self.hnorm(states[:, :-1]), self.enorm(following)), dim=-1))
        x = self.block(x, self.decoder.rotary(torch.arange(x.shape[1], device=x.device)))
        return self.decoder.lm_head(states), self.decoder.lm_head(self.final_norm(x))


def rolled(labels: Tensor) -> Tensor:
    """Return labels moved by one place, with nothing to predict at the end."""
    moved = labels.roll(-1, dims=1)
    moved[:, -1] = -100
    return moved


def ahead_loss(model: nn.Module, ids: Tensor, *, shifted_before: bool) -> Tensor:
    """Return the loss of the next token and a part of that of the token after it."""
    logits, further = model(ids)
    labels = rolled(ids)
    further_labels = rolled(rolled(rolled(ids)) if shifted_before else labels)
    main = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    extra = F.cross_entropy(further.flatten(0, 1), further_labels[:, :-1].flatten(), ignore_index=-100)
    return main + 0.3 * extra


@report("radixark/miles#2215", "multi-token prediction", "targets")
def ahead_labels_shifted_twice(*, faulty: bool) -> Arguments:
    """The further head's labels arrive shifted and are shifted again: targets are one token too far."""
    return remade(Ahead, text(4, 32, seed=26), partial(ahead_loss, shifted_before=faulty))


# ------------------------------------------------------------------------------------------------ mixtures


class Router(nn.Module):
    """A layer of experts, the best two of which take each token, with a term that balances their loads."""

    def __init__(self, dim: int, experts: int = 4, top: int = 2, *, balance: Callable[..., Tensor]):
        super().__init__()
        self.top, self.balance = top, balance
        self.gate = nn.Linear(dim, experts, bias=False)
        self.experts = nn.ModuleList(GatedMLP(dim, dim) for _ in range(experts))
        self.aux_loss = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        scores, selected = self.gate(flat).softmax(-1).topk(self.top, dim=-1)
        scores = scores / scores.sum(-1, keepdim=True)
        self.aux_loss = self.balance(scores, selected, len(self.experts))
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(selected == number)
            out = out.index_add(0, token, expert(flat[token]) * scores[token, slot, None])
        return out.view_as(x)


def broadcast_balance(scores: Tensor, selected: Tensor, experts: int) -> Tensor:
    fraction = F.one_hot(selected, experts).float().sum(1).mean(0) / selected.shape[1]
    mean_score = scores.mean(0)
    return experts * (fraction[:, None] * mean_score[None, :]).sum()


def load_balance(scores: Tensor, selected: Tensor, experts: int) -> Tensor:
    fraction = F.one_hot(selected, experts).float().sum(1).mean(0) / selected.shape[1]
    share = torch.zeros(experts, device=scores.device).index_add(0, selected.flatten(), scores.flatten())
    return experts * (fraction * share / len(scores)).sum()


class MixtureLayer(DecoderLayer):
    def __init__(self, dim: int, heads: int, *, mixture: Callable[[int], nn.Module]):
        super().__init__(dim, heads)
        self.mlp = mixture(dim)


def balanced_loss(model: Any, ids: Tensor) -> Tensor:
    logits = model(ids)
    return next_token_loss(logits, ids) + 0.01 * sum(layer.mlp.aux_loss for layer in model.layers)


@report("mindspore-ai/hyper-parallel#752", "mixtures of experts", "explained", "derivative")
def balance_is_constant(*, faulty: bool) -> Arguments:
    """The balancing term mixes loads and scores of unlike axes and is the same for any routing."""
    mixture = partial(Router, balance=broadcast_balance if faulty else load_balance)
    make = partial(Decoder, layer=partial(MixtureLayer, mixture=mixture))
    return setup(make, text(4, 32, seed=27), balanced_loss)


class SharedGateMixture(nn.Module):
    """Routed experts and a shared one, whose output a gate of its own scales."""

    def __init__(self, dim: int, *, use_gate: bool):
        super().__init__()
        self.router = nn.Linear(dim, 4, bias=False)
        self.experts = nn.ModuleList(GatedMLP(dim, dim) for _ in range(4))
        self.shared_experts, self.shared_gate = GatedMLP(dim, dim), nn.Linear(dim, 1, bias=False)
        self.use_gate = use_gate

    def forward(self, x: Tensor) -> Tensor:
        shares, selected = self.router(x).softmax(-1).topk(2, dim=-1)
        weights = torch.zeros(*x.shape[:-1], 4, device=x.device).scatter(-1, selected, shares)
        out = self.shared_experts(x)
        if self.use_gate:
            out = out * self.shared_gate(x).sigmoid()
        for number, expert in enumerate(self.experts):
            out = out + weights[..., number, None] * expert(x)
        return out


@report("NousResearch/torchtitan#36", "mixtures of experts", "gradients", place="*mlp*")
def shared_gate_unused(*, faulty: bool) -> Arguments:
    """The gate of the shared expert is made and loaded, but a refactoring lost its use."""
    mixture = partial(SharedGateMixture, use_gate=not faulty)
    return remade(
        partial(Decoder, layer=partial(MixtureLayer, mixture=mixture)), text(4, 32, seed=28), language_loss
    )


# ------------------------------------------------------------------------------------------------ encoders


class DifferenceEncoder(nn.Module):
    """Sentence embeddings from dropout alone, and a discriminator of replaced tokens that reads them."""

    def __init__(self, dim: int = 48):
        super().__init__()
        self.word_embeddings, self.position_embeddings = nn.Embedding(VOCAB, dim), nn.Embedding(64, dim)
        self.dropout = nn.Dropout(0.1)
        self.layers = nn.ModuleList(EncoderLayer(dim, 4) for _ in range(2))
        self.discriminator = nn.ModuleList(EncoderLayer(dim, 4) for _ in range(1))
        self.norm, self.classifier = nn.LayerNorm(dim), nn.Linear(dim, 2)
        self.apply(init_weights)

    def embed(self, ids: Tensor) -> Tensor:
        return self.dropout(self.word_embeddings(ids) + self.position_embeddings.weight[: ids.shape[1]])

    def sentence(self, ids: Tensor, mask: Tensor) -> Tensor:
        x, seen = self.embed(ids), mask.bool()[:, None, None]
        for layer in self.layers:
            x = layer(x, seen)
        return self.norm(x)[:, 0]

    def forward(self, ids: Tensor, replaced: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first, second = self.sentence(ids, mask), self.sentence(ids, mask)
        x = torch.cat((first[:, None], self.embed(replaced)[:, 1:]), dim=1)
        for layer in self.discriminator:
            x = layer(x, mask.bool()[:, None, None])
        return first, second, self.classifier(x)


def difference_loss(model: nn.Module, batch: dict[str, Tensor], *, count_padding: bool) -> Tensor:
    ids, mask = batch["ids"], batch["mask"]
    first, second, logits = model(ids, batch["replaced"], mask)
    similar = F.cosine_similarity(first[:, None], second[None], dim=-1) / 0.05
    labels = (batch["replaced"] != ids).long()
    if not count_padding:
        labels = labels.masked_fill(mask == 0, -100)
    contrast = F.cross_entropy(similar, torch.arange(len(ids), device=ids.device))
    return contrast + 0.5 * F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


@report("voidism/DiffCSE#26", "encoders", "counted", "padding")
def replaced_tokens_in_padding(*, faulty: bool) -> Arguments:
    """The discriminator is also asked about padding, which counts as a token that was not replaced."""
    ids, real = padded_text((26, 14, 20, 9, 17, 23), seed=29)
    ids[:, 0] = BOS
    draw = generator(29)
    chosen = (torch.rand(ids.shape, generator=draw) < 0.25) & (real == 1)
    chosen[:, 0] = False
    replaced = torch.where(chosen, tokens(6, 26, seed=30), ids)
    batch = {"ids": ids, "replaced": replaced, "mask": real}
    return setup(
        DifferenceEncoder, batch, partial(difference_loss, count_padding=faulty), declare={"pad_id": PAD}
    )
