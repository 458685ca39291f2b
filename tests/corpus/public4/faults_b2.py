"""Reports of averages, freezing, packing, speech, experts, diffusion, pairs, quantization and images."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from corpus.batches import BOS, EOS, PAD, VOCAB, generator, inside, padded_text, text
from corpus.public2.blocks import remade, setup

from .case import report
from .parts_b import (
    Attention,
    Batch,
    Llama,
    Rotary,
    Trunk,
    causal_mask,
    decayed_adamw,
    draw_weights,
    labelled_loss,
    logps_of_next,
    masked_mean,
    next_token_loss,
    rotated,
    trained_adamw,
)

if TYPE_CHECKING:
    from corpus.case import Arguments

# ------------------------------------------------------------------------------------------------ detection


class Backbone(nn.Module):
    """A plain ViT that gives the states of patches."""

    def __init__(self, dim: int, patches: int, layers: int = 2):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, dim, 6, 6)
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, patches, dim))
        make_layer = partial(
            nn.TransformerEncoderLayer, dim, 4, 2 * dim, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.ModuleList(make_layer() for _ in range(layers))
        self.norm = nn.LayerNorm(dim)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch_embed(images).flatten(2).transpose(1, 2) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class Detector(nn.Module):
    """Queries that look for objects in the patches, as DETR's do."""

    def __init__(self, dim: int = 48, queries: int = 5, classes: int = 4, *, freeze_encoder: bool = False):
        super().__init__()
        self.backbone = Backbone(dim, patches=16)
        self.projector = nn.Linear(dim, dim)
        self.queries = nn.Parameter(torch.randn(queries, dim))
        self.decoder = nn.TransformerDecoderLayer(dim, 4, 2 * dim, 0.0, batch_first=True, norm_first=True)
        self.norm = nn.LayerNorm(dim)
        self.class_embed = nn.Linear(dim, classes + 1)
        self.bbox_embed = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, 4))
        if freeze_encoder:
            self.backbone.requires_grad_(False)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of classes and the boxes of each query."""
        memory = self.projector(self.backbone(images))
        x = self.norm(self.decoder(self.queries.expand(len(images), -1, -1), memory))
        return self.class_embed(x), self.bbox_embed(x).sigmoid()


@torch.no_grad()
def matched(logits: Tensor, boxes: Tensor, labels: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Return the queries and the objects of one image that belong together at the least cost."""
    cost = 5 * torch.cdist(boxes, wanted, p=1) - logits.softmax(-1)[:, labels]
    queries, objects = linear_sum_assignment(cost.numpy())
    return torch.as_tensor(queries), torch.as_tensor(objects)


def detection_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss of classes, where most queries find nothing, and of the boxes of matched ones."""
    logits, boxes = model(batch["images"])
    none = logits.shape[-1] - 1
    classes = torch.full(logits.shape[:2], none)
    distance = boxes.new_zeros(())
    for row, (labels, wanted) in enumerate(zip(batch["labels"], batch["boxes"], strict=True)):
        queries, objects = matched(logits[row], boxes[row], labels, wanted)
        classes[row, queries] = labels[objects]
        distance = distance + (boxes[row, queries] - wanted[objects]).abs().sum()
    weight = torch.ones(none + 1)
    weight[none] = 0.1
    found = F.cross_entropy(logits.transpose(1, 2), classes, weight)
    return found + 5 * distance / batch["labels"].numel()


def pictures_of_objects(seed: int, rows: int = 4, objects: int = 2) -> Batch:
    draw = generator(seed)
    images = F.interpolate(torch.randn(rows, 3, 6, 6, generator=draw), size=24, mode="bilinear")
    return {
        "images": images,
        "labels": torch.randint(0, 4, (rows, objects), generator=draw),
        "boxes": 0.2 + 0.6 * torch.rand(rows, objects, 4, generator=draw),
    }


class Averaged(nn.Module):
    """A detector and the moving average of its weights, by which it is evaluated."""

    updates: Tensor

    def __init__(self, decay: float = 0.993, tau: float = 100.0, *, ignore_tau: bool):
        super().__init__()
        self.model = Detector()
        self.ema = copy.deepcopy(self.model).requires_grad_(False)
        self.register_buffer("updates", torch.zeros((), dtype=torch.long))
        self.decay, self.tau, self.ignore_tau = decay, tau, ignore_tau

    def current_decay(self) -> float:
        """Return the decay, which rises to its full value over some multiples of tau."""
        if self.ignore_tau:
            return self.decay
        return self.decay * (1 - math.exp(-self.updates.item() / self.tau))

    @torch.no_grad()
    def update_ema(self) -> None:
        self.updates += 1
        decay = self.current_decay()
        for slow, fast in zip(self.ema.parameters(), self.model.parameters(), strict=True):
            slow.lerp_(fast, 1 - decay)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        return self.model(images)


def averaged_step(model: Any, batch: Batch, optimizer: Optimizer, scheduler: Any = None) -> Tensor:
    model.train()
    optimizer.zero_grad()
    loss = detection_loss(model, batch)
    loss.backward()
    nn.utils.clip_grad_norm_(model.model.parameters(), 0.1)
    optimizer.step()
    if scheduler is not None:
        scheduler.step()
    model.update_ema()
    return loss.detach()


@report("roboflow/rf-detr#59", "moving averages")
def average_starts_at_full_decay(*, faulty: bool) -> Arguments:
    """Tau is not used in the decay of the average, which keeps the weights of the start for long."""
    make = partial(Averaged, ignore_tau=faulty)
    declare = {"frozen": ("ema.*",), "max_grad_norm": 0.1}
    return remade(
        make, pictures_of_objects(411), detection_loss, decayed_adamw, step=averaged_step, declare=declare
    )


def built_and_trained(*, at_build: bool) -> nn.Module:
    """Build a detector and hand on the options of training, by which freezing may come too late."""
    options = {"freeze_encoder": True}
    if at_build:
        return Detector(**options)
    model = Detector()
    for name, value in options.items():
        setattr(model, name, value)
    return model


def rates_of_parts(model: Any, lr: float = 1e-3, lr_encoder: float = 3e-4) -> AdamW:
    """Return AdamW with a lower rate of the encoder, where it is trained."""
    encoder = [parameter for parameter in model.backbone.parameters() if parameter.requires_grad]
    names_of_others = [name for name, _ in model.named_parameters() if not name.startswith("backbone.")]
    others = [model.get_parameter(name) for name in names_of_others]
    groups = [{"params": others, "lr": lr}, {"params": encoder, "lr": lr_encoder}]
    return AdamW([group for group in groups if group["params"]], lr=lr, weight_decay=0.0)


@report("roboflow/rf-detr#357", "freezing", "frozen")
def encoder_frozen_too_late(*, faulty: bool) -> Arguments:
    """Freezing the encoder works at the build alone; as an option of the training it changes nothing."""
    make = partial(built_and_trained, at_build=not faulty)
    declare = {"frozen": ("backbone.*",)}
    return setup(make, pictures_of_objects(412), detection_loss, rates_of_parts, declare=declare)


# -------------------------------------------------------------------------------------------------- packing


class PackedDecoder(nn.Module):
    """A decoder over rows of several samples, whose mask is made of ends or of positions."""

    def __init__(self, *, mask_by_ends: bool):
        super().__init__()
        self.decoder, self.mask_by_ends = Llama(), mask_by_ends

    def documents(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return the number of the document of each token."""
        if self.mask_by_ends:
            is_end = (tokens == EOS).long()
            return is_end.cumsum(1) - is_end
        return (positions == 0).cumsum(1)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        documents = self.documents(tokens, positions)
        same = documents[:, None, :, None] == documents[:, None, None, :]
        mask = same & causal_mask(tokens.shape[1], tokens.device)
        return self.decoder(tokens, mask, positions)


def packed_chats(seed: int, lengths: tuple[tuple[int, ...], ...] = ((14, 11, 7), (9, 15, 8))) -> Batch:
    """Return rows of conversations without their last tokens; labels are of answers and of their ends."""
    rows = []
    for number, row in enumerate(lengths):
        samples = text(len(row), max(row) + 1, seed=seed + number)
        samples[:, 0] = BOS
        parts = []
        for sample, length in zip(samples, row, strict=True):
            sample[length] = EOS
            labels = sample[1 : length + 1].clone()
            labels[: length // 2] = -100
            parts.append((sample[:length], labels, torch.arange(length)))
        rows.append([torch.cat(tensors) for tensors in zip(*parts, strict=True)])
    tokens, labels, positions = (torch.stack(tensors) for tensors in zip(*rows, strict=True))
    return {"input": tokens, "labels": labels, "positions": positions}


def chat_loss(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch["input"], batch["positions"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


@report("pytorch/torchtitan#3130", "packing", "documents")
def ends_missing_in_packed_inputs(*, faulty: bool) -> Arguments:
    """The mask of documents looks for ends, which only labels hold: samples of a row see each other."""
    make = partial(PackedDecoder, mask_by_ends=faulty)
    return setup(make, packed_chats(413), chat_loss, decayed_adamw, declare={"eos_id": EOS})


class UnpaddedDecoder(nn.Module):
    """A decoder over rows of samples that are padded to a multiple, by the limits of what is real."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = Llama()

    def forward(self, tokens: Tensor, sample_ids: Tensor, offsets: Tensor, unpadded: Tensor) -> Tensor:
        """Return logits; ``unpadded`` is the real length of the sample of each token."""
        same = sample_ids[:, None, :, None] == sample_ids[:, None, None, :]
        real = offsets < unpadded
        itself = torch.eye(tokens.shape[1], dtype=torch.bool, device=tokens.device)
        mask = same & causal_mask(tokens.shape[1], tokens.device)
        mask = mask & real[:, None, None] & real[:, None, :, None]
        return self.decoder(tokens, mask | itself, offsets)


def packed_questions(seed: int, *, which_end: int, multiple: int = 8) -> Batch:
    """Return rows of a question and an answer each, both with an end, padded with ends to a multiple."""
    turns = (((6, 8), (5, 4), (7, 5)), ((4, 9), (6, 3), (5, 9)))
    names = ("tokens", "loss_mask", "sample_ids", "offsets", "unpadded")
    rows: dict[str, list[Tensor]] = {name: [] for name in names}
    for number, row in enumerate(turns):
        samples = text(len(row), 32, seed=seed + number)
        parts: dict[str, list[Tensor]] = {name: [] for name in names}
        for index, (sample, (question, answer)) in enumerate(zip(samples, row, strict=True)):
            padded = math.ceil((question + answer) / multiple) * multiple
            sample[[question - 1, question + answer - 1]] = EOS
            sample[question + answer :] = EOS
            sample = sample[:padded]
            ends = (sample == EOS).nonzero().flatten()
            offsets = torch.arange(padded)
            parts["tokens"].append(sample)
            parts["loss_mask"].append((offsets >= question) & (offsets < question + answer))
            parts["sample_ids"].append(torch.full((padded,), index))
            parts["offsets"].append(offsets)
            parts["unpadded"].append((ends[which_end] + 1).expand(padded))
        for name, tensors in parts.items():
            rows[name].append(torch.cat(tensors))
    return {name: torch.stack(tensors) for name, tensors in rows.items()}


def packed_answer_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean loss of the tokens of answers."""
    tokens = batch["tokens"]
    logits = model(tokens, batch["sample_ids"], batch["offsets"], batch["unpadded"])
    return masked_mean(-logps_of_next(logits, tokens), batch["loss_mask"][:, 1:])


@report("NVIDIA-NeMo/Speech#14437", "packing", "reach")
def sample_ends_at_its_first_turn(*, faulty: bool) -> Arguments:
    """The first end in a packed sample, which is that of a turn, is taken for the length without padding."""
    batch = packed_questions(414, which_end=0 if faulty else 1)
    return setup(UnpaddedDecoder, batch, packed_answer_loss, decayed_adamw)


# --------------------------------------------------------------------------------------------------- speech

CODES, END_OF_SPEECH, QUANTIZERS = 40, 40, 4
"""Codes of each codebook, the one behind them that ends the first codebook's row, and codebooks."""


class Talker(nn.Module):
    """A decoder of the first code of each frame, and a smaller one of the others of the same frame."""

    def __init__(self, dim: int = 48, *, states_of_the_frame_itself: bool):
        super().__init__()
        self.text_embedding, self.talker = nn.Embedding(VOCAB, dim), Trunk(dim, layers=2)
        self.codec_head = nn.Linear(dim, CODES + 1, bias=False)
        self.codec_embeddings = nn.ModuleList(nn.Embedding(CODES, dim) for _ in range(QUANTIZERS))
        self.begin = nn.Parameter(0.02 * torch.randn(dim))
        self.code_predictor = Trunk(dim, layers=1)
        self.heads = nn.ModuleList(nn.Linear(dim, CODES, bias=False) for _ in range(QUANTIZERS - 1))
        self.states_of_the_frame_itself = states_of_the_frame_itself
        self.apply(draw_weights)

    def forward(self, text_ids: Tensor, codes: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return logits of the first code before each frame and behind the last, and those of the others."""
        of_codes = [table(codes[..., book]) for book, table in enumerate(self.codec_embeddings)]
        frames = torch.stack(of_codes).sum(0)
        begin = self.begin.expand(len(codes), 1, -1)
        words = self.text_embedding(text_ids)
        states = self.talker(torch.cat((words, begin, frames), dim=1))[:, words.shape[1] :]
        first = self.codec_head(states)
        states = states[:, 1:] if self.states_of_the_frame_itself else states[:, :-1]
        within = torch.stack((states, *of_codes[:-1]), dim=2).flatten(0, 1)  # [B * F, 1 + books, C]
        inner = self.code_predictor(within).unflatten(0, codes.shape[:2])
        return first, [head(inner[:, :, book + 1]) for book, head in enumerate(self.heads)]


def speech_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss of the first codes and a share of that of the others, without padding."""
    codes, real = batch["codes"], batch["frames"]
    first, others = model(batch["text_ids"], codes)
    wanted = codes[..., 0].masked_fill(~real, -100)
    wanted = F.pad(wanted, (0, 1), value=-100)
    wanted[torch.arange(len(codes)), real.sum(1)] = END_OF_SPEECH
    loss = F.cross_entropy(first.transpose(1, 2), wanted, ignore_index=-100)
    losses = [F.cross_entropy(logits[real], codes[real][:, book]) for book, logits in enumerate(others, 1)]
    return loss + 0.3 * torch.stack(losses).mean()


@report("QwenLM/Qwen3-TTS#337", "speech", "causality")
def frame_known_to_its_own_codes(*, faulty: bool) -> Arguments:
    """The other codes of a frame are predicted from the state that has read them, not from the one before."""
    draw = generator(415)
    codes = torch.randint(0, CODES, (4, 12, QUANTIZERS), generator=draw)
    frames = inside((12, 9, 7, 11), 12)
    batch = {"text_ids": text(4, 8, seed=415), "codes": codes * frames[..., None], "frames": frames}
    return setup(partial(Talker, states_of_the_frame_itself=faulty), batch, speech_loss, decayed_adamw)


# -------------------------------------------------------------------------------------- mixtures of experts


def feed_forward(dim: int) -> nn.Module:
    return nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))


class Experts(nn.Module):
    """Feed-forwards of limited capacity, of which each token asks for two."""

    def __init__(self, dim: int, experts: int = 4, *, rank_by_logits: bool):
        super().__init__()
        self.wg = nn.Linear(dim, experts, bias=False)
        self.experts = nn.ModuleList(feed_forward(dim) for _ in range(experts))
        self.rank_by_logits = rank_by_logits

    def gating(self, logits: Tensor, k: int = 2, capacity_factor: float = 1.8) -> tuple[Tensor, Tensor]:
        """Return the weight `[N, E]` of each expert for each token, and how unevenly they are asked for."""
        gates = logits.softmax(-1)
        count, experts = gates.shape
        importance = logits if self.rank_by_logits else gates
        best, index = importance.topk(k, dim=1)
        asked = torch.zeros_like(gates, dtype=torch.bool).scatter(1, index, value=True)
        balance = (gates.mean(0) * asked.float().mean(0)).mean() * experts * experts / k
        ranked = torch.zeros_like(gates).scatter(1, index, best)
        capacity = math.ceil(count * k / experts * capacity_factor)
        kept = ranked.topk(capacity, dim=0).indices
        served = asked & torch.zeros_like(asked).scatter(0, kept, value=True)
        weights = gates * served
        return weights / weights.sum(1, keepdim=True).clamp(min=1e-9), balance

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.flatten(0, 1)
        weights, balance = self.gating(self.wg(flat))
        outputs = torch.stack([expert(flat) for expert in self.experts], dim=1)
        return (weights[..., None] * outputs).sum(1).view_as(x), balance


class ExpertLayer(nn.Module):
    def __init__(self, dim: int, *, rank_by_logits: bool):
        super().__init__()
        self.ln1, self.ln2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.attn = Attention(dim, 4, 4, nn.Linear)
        self.moe = Experts(dim, rank_by_logits=rank_by_logits)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        positions = torch.arange(x.shape[1], device=x.device)
        x = x + self.attn(self.ln1(x), causal_mask(x.shape[1], x.device), positions)
        y, balance = self.moe(self.ln2(x))
        return x + y, balance


class ExpertDecoder(nn.Module):
    def __init__(self, dim: int = 32, layers: int = 2, *, rank_by_logits: bool):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.layers = nn.ModuleList(ExpertLayer(dim, rank_by_logits=rank_by_logits) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(dim), nn.Linear(dim, VOCAB, bias=False)
        draw_weights(self.embed)
        draw_weights(self.head)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(ids)
        total = x.new_zeros(())
        for layer in self.layers:
            x, balance = layer(x)
            total = total + balance
        return self.head(self.norm(x)), total / len(self.layers)


def balanced_loss(model: nn.Module, ids: Tensor) -> Tensor:
    logits, balance = model(ids)
    return -logps_of_next(logits, ids).mean() + 0.01 * balance


@report("deepspeedai/DeepSpeed#7986", "mixtures of experts")
def capacity_ranked_by_logits(*, faulty: bool) -> Arguments:
    """Places of an expert go by logits: tokens that ask for it by a negative one come behind all others."""
    make = partial(ExpertDecoder, rank_by_logits=faulty)
    return setup(make, text(4, 24, seed=416), balanced_loss, partial(decayed_adamw, lr=2e-3))


# ------------------------------------------------------------------------------------------------ diffusion


def timestep_embedding(t: Tensor, dim: int) -> Tensor:
    frequencies = torch.exp(-math.log(10_000) * torch.arange(dim // 2, device=t.device) / (dim // 2))
    angles = t[:, None].float() * frequencies
    return torch.cat((angles.sin(), angles.cos()), dim=-1)


class SelfAttention(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads, self.qkv_proj, self.output_proj = heads, nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv_proj(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.output_proj(y.transpose(1, 2).flatten(2))


class DiffusionLayer(nn.Module):
    """A layer whose norms and branches are moved and scaled by the step of the noise."""

    def __init__(self, dim: int, heads: int = 4, *, attend_twice: bool):
        super().__init__()
        self.att_norm = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.ff_norm = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.attn_block = SelfAttention(dim, heads)
        wide, narrow = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.mlp_block = nn.Sequential(wide, nn.GELU(approximate="tanh"), narrow)
        self.adaptive_norm_layer = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))
        nn.init.zeros_(self.adaptive_norm_layer[1].weight)
        nn.init.zeros_(self.adaptive_norm_layer[1].bias)
        self.attend_twice = attend_twice

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        params = self.adaptive_norm_layer(condition)[:, None].chunk(6, dim=-1)
        shift_attn, scale_attn, gate_attn, shift_mlp, scale_mlp, gate_mlp = params
        x = x + gate_attn * self.attn_block(self.att_norm(x) * (1 + scale_attn) + shift_attn)
        normed = self.ff_norm(x) * (1 + scale_mlp) + shift_mlp
        branch = self.attn_block if self.attend_twice else self.mlp_block
        return x + gate_mlp * branch(normed)


class NoiseModel(nn.Module):
    """A diffusion Transformer over patches that says which noise was added."""

    kept: Tensor

    def __init__(self, dim: int = 48, channels: int = 4, side: int = 8, *, attend_twice: bool):
        super().__init__()
        self.patch_embed = nn.Linear(channels * 4, dim)
        self.position = nn.Parameter(0.02 * torch.randn(1, (side // 2) ** 2, dim))
        self.t_proj = nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.layers = nn.ModuleList(DiffusionLayer(dim, attend_twice=attend_twice) for _ in range(3))
        self.norm = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.proj_out = nn.Linear(dim, channels * 4)
        nn.init.zeros_(self.proj_out.weight)
        nn.init.zeros_(self.proj_out.bias)
        betas = torch.linspace(1e-4, 0.02, 1000)
        self.register_buffer("kept", (1 - betas).cumprod(0), persistent=False)

    def forward(self, latents: Tensor, t: Tensor) -> Tensor:
        side = latents.shape[-1] // 2
        patches = F.pixel_unshuffle(latents, 2).flatten(2).transpose(1, 2)
        x = self.patch_embed(patches) + self.position
        condition = self.t_proj(timestep_embedding(t, x.shape[-1]))
        for layer in self.layers:
            x = layer(x, condition)
        x = self.proj_out(self.norm(x)).transpose(1, 2).unflatten(-1, (side, side))
        return F.pixel_shuffle(x, 2)


def noise_loss(model: Any, latents: Tensor) -> Tensor:
    t = torch.randint(0, 1000, (len(latents),), device=latents.device)
    noise = torch.randn_like(latents)
    kept = model.kept[t].view(-1, 1, 1, 1)
    return F.mse_loss(model(kept.sqrt() * latents + (1 - kept).sqrt() * noise, t), noise)


@report("explainingai-code/DiT-PyTorch#1", "diffusion", "gradients")
def attention_in_place_of_the_feed_forward(*, faulty: bool) -> Arguments:
    """The second branch of a layer runs its attention again instead of its feed-forward, which is unused."""
    latents = torch.randn(8, 4, 8, 8, generator=generator(417))
    make = partial(NoiseModel, attend_twice=faulty)
    return remade(make, latents, noise_loss, partial(trained_adamw, lr=2e-3))


# ------------------------------------------------------------------------------------ pairs and embeddings


class SentenceEncoder(nn.Module):
    """An encoder whose mean of the last states, or of those of an earlier layer, stands for a sentence."""

    def __init__(self, dim: int = 48, layers: int = 3, *, mask_goes_back: bool):
        super().__init__()
        self.words, self.positions = nn.Embedding(VOCAB, dim), nn.Embedding(32, dim)
        self.embed_norm = nn.LayerNorm(dim)
        make_layer = partial(nn.TransformerEncoderLayer, dim, 4, 2 * dim, 0.0, "gelu", batch_first=True)
        self.layer = nn.ModuleList(make_layer() for _ in range(layers))
        self.mask_goes_back = mask_goes_back
        nn.init.normal_(self.words.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)

    def pooled(self, features: Batch, states: Tensor) -> Tensor:
        """Return the mean state of what follows the prompt."""
        mask = features["attention_mask"].clone()
        begin = mask.argmax(1) + features["prompt_length"]
        mask[torch.arange(mask.shape[1], device=mask.device) < begin[:, None]] = 0
        if self.mask_goes_back:
            features["attention_mask"] = mask
        mask = mask[..., None].float()
        return (states * mask).sum(1) / mask.sum(1)

    def forward(self, features: Batch, layers: int | None = None) -> Tensor:
        """Return the embedding after so many layers."""
        ids = features["input_ids"]
        x = self.embed_norm(self.words(ids) + self.positions.weight[: ids.shape[1]])
        padding = features["attention_mask"] == 0
        for layer in self.layer[:layers]:
            x = layer(x, src_key_padding_mask=padding)
        return self.pooled(features, x)


def scores_of(queries: Tensor, documents: Tensor, scale: float = 20.0) -> Tensor:
    return scale * F.normalize(queries, dim=-1) @ F.normalize(documents, dim=-1).T


def adaptive_layer_loss(model: Any, batch: tuple[Batch, ...]) -> Tensor:
    """Return the loss of the last layer, and those of all before it, which also follow the last one."""
    queries, documents = (dict(features) for features in batch)
    scores = scores_of(model(queries), model(documents))
    right = torch.arange(len(scores))
    total = F.cross_entropy(scores, right)
    final = (scores.detach() / 0.3).softmax(-1)
    for depth in range(1, len(model.layer)):
        earlier = scores_of(model(queries, depth), model(documents, depth))
        total = total + F.cross_entropy(earlier, right) / depth / (len(model.layer) - 1)
        follows = F.kl_div((earlier / 0.3).log_softmax(-1), final, reduction="batchmean")
        total = total + 0.3 * follows / (len(model.layer) - 1)
    return total


def prompted_pairs(seed: int, prompt_length: int = 3) -> tuple[Batch, ...]:
    """Return queries and documents that begin with a prompt each, padded on the right."""
    sides = []
    for number, lengths in enumerate(((18, 14, 16, 20, 15, 17), (24, 19, 16, 22, 21, 18))):
        ids, real = padded_text(lengths, seed=seed + number)
        ids[:, :prompt_length] = text(1, prompt_length, seed=seed + 9 + number)
        prompts = torch.full((len(ids),), prompt_length)
        sides.append({"input_ids": ids, "attention_mask": real, "prompt_length": prompts})
    return tuple(sides)


@report("huggingface/sentence-transformers#3944", "pairs")
def prompt_hidden_from_later_passes(*, faulty: bool) -> Arguments:
    """Pooling leaves its mask without the prompt in the inputs, which a loss of all layers reads again."""
    make = partial(SentenceEncoder, mask_goes_back=faulty)
    optimizer = partial(trained_adamw, lr=2e-4)
    return setup(make, prompted_pairs(418), adaptive_layer_loss, optimizer, declare={"pad_id": PAD})


# --------------------------------------------------------------------------------------------- quantization


def rounded_through(x: Tensor, rounded: Tensor) -> Tensor:
    """Return what was rounded, with the gradient of what was not."""
    return x + (rounded - x).detach()


class BitLinear(nn.Linear):
    """A map of ternary weights, whose inputs are normed and rounded to eight bits."""

    scale_dim = -1

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False):
        super().__init__(in_features, out_features, bias=bias)
        self.rms_norm = nn.RMSNorm(in_features)

    def forward(self, x: Tensor) -> Tensor:
        x = self.rms_norm(x)
        scale = 127.0 / x.abs().amax(dim=self.scale_dim, keepdim=True).clamp(min=1e-5)
        x = rounded_through(x, (x * scale).round().clamp(-128, 127) / scale)
        step = self.weight.abs().mean().clamp(min=1e-5)
        weight = rounded_through(self.weight, (self.weight / step).round().clamp(-1, 1) * step)
        return F.linear(x, weight, self.bias)


class BitLinearAlongTokens(BitLinear):
    """The same, but inputs are scaled by the greatest one of all tokens."""

    scale_dim = -2


@report("joey00072/ohara#11", "quantization", "causality", "padding")
def activations_scaled_along_tokens(*, faulty: bool) -> Arguments:
    """The scale by which activations are rounded is taken over the sequence instead of over features."""
    make = partial(Llama, make_linear=BitLinearAlongTokens if faulty else BitLinear)
    return setup(make, text(4, 25, seed=419), next_token_loss, partial(decayed_adamw, lr=2e-3))


# ---------------------------------------------------------------------------------------- flows of actions


class ActionExpert(nn.Module):
    """A velocity of chunks of actions, which attend to what the robot sees and to each other."""

    def __init__(self, actions: int = 8, observed: int = 16, dim: int = 48, chunk: int = 6):
        super().__init__()
        self.observe = nn.Linear(observed, dim)
        self.action_in, self.action_out = nn.Linear(actions, dim), nn.Linear(dim, actions)
        self.time = nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.place = nn.Parameter(0.02 * torch.randn(chunk, dim))
        make_layer = partial(
            nn.TransformerDecoderLayer, dim, 4, 2 * dim, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.ModuleList(make_layer() for _ in range(2))
        self.norm = nn.LayerNorm(dim)

    def forward(self, noised: Tensor, t: Tensor, observation: Tensor, is_pad: Tensor) -> Tensor:
        x = self.action_in(noised) + self.place
        x = x + self.time(timestep_embedding(1000 * t, x.shape[-1]))[:, None]
        memory = self.observe(observation)
        for layer in self.layers:
            x = layer(x, memory, tgt_key_padding_mask=is_pad)
        return self.action_out(self.norm(x))


def action_loss(model: nn.Module, batch: Batch, *, count_padded_dims: bool) -> Tensor:
    """Return the mean error of the velocity of real steps, and of the dimensions that a robot has."""
    actions, is_pad = batch["actions"], batch["action_is_pad"]
    counted = (~is_pad)[..., None].expand_as(actions)
    noise, t = torch.randn_like(actions), torch.rand(len(actions), device=actions.device)
    if not count_padded_dims:
        has = torch.arange(actions.shape[-1], device=actions.device) < batch["action_dim"][:, None]
        noise = noise * has[:, None]
        counted = counted & has[:, None]
    share = t[:, None, None]
    velocity = model(share * noise + (1 - share) * actions, t, batch["observation"], is_pad)
    return masked_mean((velocity - (noise - actions)).square(), counted)


def robots(seed: int, rows: int = 6, chunk: int = 6, width: int = 8) -> Batch:
    """Return chunks of robots with unlike numbers of joints, filled up with zeros."""
    draw = generator(seed)
    dims = torch.tensor([8, 5, 3, 8, 6, 4][:rows])
    is_pad = ~inside((6, 4, 6, 5, 6, 3)[:rows], chunk)
    has = torch.arange(width) < dims[:, None]
    actions = torch.randn(rows, chunk, width, generator=draw) * has[:, None]
    return {
        "observation": torch.randn(rows, 10, 16, generator=draw),
        "actions": actions.masked_fill(is_pad[..., None], 0.0),
        "action_dim": dims,
        "action_is_pad": is_pad,
    }


@report("TensorAuto/OpenTau#344", "flow matching", "counted")
def missing_joints_in_the_loss(*, faulty: bool) -> Arguments:
    """Robots of fewer joints are filled up with zeros, and the loss asks for the velocity of these, too."""
    loss = partial(action_loss, count_padded_dims=faulty)
    return setup(ActionExpert, robots(420), loss, partial(trained_adamw, lr=2e-3))


# ------------------------------------------------------------------------------------------- packed turns


def packed_turns(seed: int, *, clear_behind_ends: bool) -> Batch:
    """Return rows of two conversations of several turns, with an end behind each turn, and of padding."""
    turns = (((6, 5, 4), (7, 6)), ((5, 8), (4, 3, 6)))
    length = 32
    tokens, labels = torch.full((2, length), EOS), torch.full((2, length), EOS)
    positions, mask = torch.zeros(2, length, dtype=torch.long), torch.zeros(2, length, dtype=torch.bool)
    for row, samples in enumerate(turns):
        begin = 0
        for number, sizes in enumerate(samples):
            sample = text(1, sum(sizes), seed=seed + 2 * row + number)[0]
            sample[torch.tensor(sizes).cumsum(0) - 1] = EOS
            end = begin + len(sample) - 1
            tokens[row, begin:end], labels[row, begin:end] = sample[:-1], sample[1:]
            positions[row, begin:end] = torch.arange(end - begin)
            mask[row, begin:end] = True
            begin = end
        positions[row, begin:] = torch.arange(length - begin)
    if clear_behind_ends:
        mask = mask & (tokens != EOS)
    return {"tokens": tokens, "labels": labels, "position_ids": positions, "loss_mask": mask}


def turns_loss(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch["tokens"], batch["position_ids"])
    losses = F.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none")
    return masked_mean(losses, batch["loss_mask"])


@report("NVIDIA-NeMo/Megatron-Bridge#5213", "packing", "counted")
def word_behind_a_turn_not_asked_for(*, faulty: bool) -> Arguments:
    """The collator clears the mask where the input is an end, which ends turns, too: what follows is lost."""
    batch = packed_turns(421, clear_behind_ends=faulty)
    return setup(partial(PackedDecoder, mask_by_ends=False), batch, turns_loss, decayed_adamw)


# ------------------------------------------------------------------------------------------ images and text

IMAGE = 3
"""The id that stands in the place of a patch of an image."""


class GridRotary(Rotary):
    """Angles of positions of three axes, which share the frequencies by turns."""

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate `[B, H, T, D]` by positions `[3, B, T]`."""
        axis = torch.arange(len(self.inv_freq), device=x.device) % 3
        angles = positions[axis].permute(1, 2, 0).float() * self.inv_freq
        return rotated(x, angles[:, None])


def positions_in_grids(ids: Tensor, grids: Tensor) -> Tensor:
    """Return time, row and column `[3, B, T]`; an image moves what follows by its longer side."""
    positions = torch.zeros(3, *ids.shape, dtype=torch.long, device=ids.device)
    sizes = iter(grids.tolist())
    for row, words in enumerate(ids.tolist()):
        place = t = 0
        while t < len(words):
            if words[t] != IMAGE:
                positions[:, row, t] = place
                place, t = place + 1, t + 1
                continue
            height, width = next(sizes)
            patch = torch.arange(height * width, device=ids.device)
            inside_grid = torch.stack((torch.zeros_like(patch), patch // width, patch % width))
            positions[:, row, t : t + len(patch)] = place + inside_grid
            place, t = place + max(height, width), t + len(patch)
    return positions


class ImageText(nn.Module):
    """A decoder of words and of patches, whose positions are those of words or those in the image."""

    def __init__(self, dim: int = 48, features: int = 12, *, count_in_a_row: bool):
        super().__init__()
        self.patch_embed = nn.Linear(features, dim)
        self.rows, self.columns = nn.Embedding(4, dim), nn.Embedding(4, dim)
        self.merger = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, dim))
        self.language = Llama(dim)
        for layer in self.language.model.layers:
            layer.self_attn.rotary = GridRotary(layer.self_attn.head_dim)
        self.count_in_a_row = count_in_a_row

    def images(self, patches: Tensor, grids: Tensor) -> Tensor:
        rows = torch.cat([torch.arange(h * w, device=grids.device) // w for h, w in grids])
        columns = torch.cat([torch.arange(h * w, device=grids.device) % w for h, w in grids])
        return self.merger(self.patch_embed(patches) + self.rows(rows) + self.columns(columns))

    def forward(self, ids: Tensor, patches: Tensor, grids: Tensor) -> Tensor:
        x = self.language.embed_tokens(ids)
        where = (ids == IMAGE)[..., None].expand_as(x)
        x = x.masked_scatter(where, self.images(patches, grids))
        if self.count_in_a_row:
            positions = torch.arange(ids.shape[1], device=ids.device).expand(3, len(ids), -1)
        else:
            positions = positions_in_grids(ids, grids)
        return self.language.lm_head(self.language.model(x, None, positions))


def described_loss(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch["input_ids"], batch["pixel_values"], batch["image_grid"])
    return labelled_loss(logits, batch["labels"])


def described_images(seed: int, length: int = 26) -> Batch:
    """Return rows of a few words, one or two images, and words about them."""
    ids = text(4, length, seed=seed)
    ids[:, 0], ids[:, -1] = BOS, EOS
    labels = ids.clone()
    grids = (((2, 3),), ((3, 4),), ((2, 2), (2, 4)), ((3, 3),))
    for row, (begin, sizes) in enumerate(zip((5, 3, 4, 6), grids, strict=True)):
        end = begin + sum(height * width for height, width in sizes)
        ids[row, begin:end] = IMAGE
        labels[row, :end] = -100
    flat = torch.tensor([size for sizes in grids for size in sizes])
    patches = torch.randn(int(flat.prod(1).sum()), 12, generator=generator(seed))
    return {"input_ids": ids, "labels": labels, "pixel_values": patches, "image_grid": flat}


@report("PrimeIntellect-ai/prime-rl#2819", "images and text")
def patches_counted_like_words(*, faulty: bool) -> Arguments:
    """The model is made for positions of three axes, but patches of images are counted on like words."""
    make = partial(ImageText, count_in_a_row=faulty)
    return setup(make, described_images(422), described_loss, decayed_adamw)
