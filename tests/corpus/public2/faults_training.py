"""Reports of the loop: accumulation, clipping, groups, rates, resuming, precision, starts and adapters."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler

from corpus.batches import MASK, VOCAB, generator, text, tokens
from corpus.case import Arguments

from .blocks import (
    Decoder,
    EncoderLayer,
    RMSNorm,
    adamw,
    decaying_adamw,
    init_weights,
    inverse_frequencies,
    language_loss,
    remade,
    rotate,
    setup,
)
from .case import report

# -------------------------------------------------------------------------------------------------- the step


def accumulating_step(
    model: nn.Module,
    batch: Tensor,
    optimizer: Optimizer,
    scheduler: LRScheduler | None = None,
    *,
    fixed: bool,
    accumulation_steps: int = 4,
) -> Tensor:
    """Step on what an epoch's last cycle is left with: fewer micro-batches than it accumulates."""
    model.train()
    micro_batches = batch.split(2)
    divisor = accumulation_steps if fixed else len(micro_batches)
    total = torch.zeros(())
    for ids in micro_batches:
        loss = language_loss(model, ids) / divisor
        loss.backward()
        total += loss.detach()
    clip_grad_norm_(model.parameters(), 50.0)
    optimizer.step()
    optimizer.zero_grad()
    return total


@report("huggingface/transformers#39659", "accumulation", "step", place="*")
def last_cycle_divided_by_all(*, faulty: bool) -> Arguments:
    """The last cycle of an epoch has three micro-batches, whose losses are divided by the usual four."""
    step = partial(accumulating_step, fixed=faulty)
    return setup(Decoder, text(6, 32, seed=10), language_loss, step=step)


class LowRank(nn.Module):
    """A frozen map with an adapter ``scale * B(A(x))``."""

    def __init__(self, frozen: nn.Linear, rank: int, scale: float):
        super().__init__()
        self.frozen, self.scale = frozen.requires_grad_(False), scale
        self.lora_a = nn.Linear(frozen.in_features, rank, bias=False)
        self.lora_b = nn.Linear(rank, frozen.out_features, bias=False)
        nn.init.kaiming_uniform_(self.lora_a.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.scale * self.lora_b(self.lora_a(x))


def adapted(rank: int = 8, scale: float = 2.0, layers: int = 2) -> Decoder:
    """Return a frozen decoder with adapters of its queries, values and feed-forwards."""
    model = Decoder(layers=layers).requires_grad_(False)
    for layer in model.layers:
        for part, name in ((layer.self_attn, "q_proj"), (layer.self_attn, "v_proj"), (layer.mlp, "up_proj")):
            setattr(part, name, LowRank(getattr(part, name), rank, scale))
    return model


def trained_alone(model: nn.Module) -> AdamW:
    return AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.0)


def trainer_step(
    model: nn.Module,
    batch: Tensor,
    optimizer: Optimizer,
    scheduler: LRScheduler | None = None,
    *,
    clear: bool,
) -> Tensor:
    model.train()
    loss = language_loss(model, batch)
    loss.backward()
    optimizer.step()
    if clear:
        optimizer.zero_grad()
    return loss.detach()


@report("tenstorrent/tt-blacksmith#711", "steps", "step")
def gradients_never_cleared(*, faulty: bool) -> Arguments:
    """The trainer of adapters never clears gradients: each step adds to those of all before it."""
    step = partial(trainer_step, clear=not faulty)
    return setup(adapted, text(4, 32, seed=11), language_loss, trained_alone, step=step)


class TableTransformer(nn.Module):
    """A Transformer over the columns of a table, whose values are scaled and shifted vectors."""

    def __init__(self, columns: int = 12, dim: int = 48):
        super().__init__()
        bound = dim**-0.5
        self.weight = nn.Parameter(torch.empty(columns, dim).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(columns, dim).uniform_(-bound, bound))
        self.cls = nn.Parameter(torch.empty(1, 1, dim).uniform_(-bound, bound))
        self.blocks = nn.ModuleList(EncoderLayer(dim, 4) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 1)

    def forward(self, values: Tensor) -> Tensor:
        x = values[..., None] * self.weight + self.bias
        x = torch.cat((self.cls.expand(len(x), -1, -1), x), dim=1)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0])).squeeze(-1)


def regression_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def clipping_step(
    model: nn.Module,
    batch: tuple[Tensor, Tensor],
    optimizer: Optimizer,
    scheduler: LRScheduler | None = None,
    *,
    clip_first: bool,
) -> Tensor:
    model.train()
    optimizer.zero_grad()
    loss = regression_loss(model, batch)
    if clip_first:
        clip_grad_norm_(model.parameters(), 1.0)
    loss.backward()
    if not clip_first:
        clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


@report("yandex-research/tabm#20", "clipping", "step")
def clipped_before_backward(*, faulty: bool) -> Arguments:
    """Gradients are clipped before the backward pass, when there are none."""
    draw = generator(12)
    values = torch.randn(16, 12, generator=draw)
    batch = (values, 4.0 + 3.0 * values[:, 0] - 2.0 * values[:, 3])
    step = partial(clipping_step, clip_first=faulty)
    return setup(TableTransformer, batch, regression_loss, step=step, declare={"max_grad_norm": 1.0})


# ------------------------------------------------------------------------------------------------- groups


def muon_and_adamw(model: nn.Module, *, spare_embeddings: bool) -> list[Optimizer]:
    """Return Muon of the matrices and AdamW of the rest."""
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        outer = "embed" in name or "lm_head" in name
        use_muon = parameter.ndim >= 2 and not (spare_embeddings and outer)
        (matrices if use_muon else others).append(parameter)
    return [torch.optim.Muon(matrices, lr=5e-3, weight_decay=0.01), AdamW(others, lr=1e-3, weight_decay=0.0)]


@report("deepspeedai/DeepSpeed#7641", "optimizer groups", "groups")
def muon_of_embeddings(*, faulty: bool) -> Arguments:
    """Muon takes every matrix, the embedding table and the output head among them."""
    optimizer = partial(muon_and_adamw, spare_embeddings=not faulty)
    return remade(Decoder, text(4, 32, seed=13), language_loss, optimizer)


# --------------------------------------------------------------------------------------------------- rates


def warmup_and_cosine(step: int, *, warmup: int, total: int, begin: int = 1) -> float:
    """Return the share of the peak rate: up in ``warmup`` parts from ``begin``, then down to a twentieth."""
    if step < warmup:
        return (step + begin) / warmup
    along = min(1.0, (step - warmup) / (total - warmup))
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * along))


@report("EleutherAI/gpt-neox#1379", "schedules", "schedule", "update")
def first_rate_is_zero(*, faulty: bool) -> Arguments:
    """The warm-up begins at a rate of 0, so that the first step changes nothing."""
    share = partial(warmup_and_cosine, warmup=20, total=200, begin=0 if faulty else 1)
    return setup(
        Decoder,
        text(4, 32, seed=14),
        language_loss,
        decaying_adamw,
        scheduler=lambda optimizer: LambdaLR(optimizer, share),
        declare={"steps": 200, "peak_lr": 1e-3},
    )


def denoising_schedule(optimizer: Optimizer, *, plain_cosine: bool) -> LRScheduler:
    """Return the schedule of a training of 60 steps, 20 of which warm up."""
    total, warmup = 60, 20
    if plain_cosine:
        return CosineAnnealingLR(optimizer, T_max=total - warmup, eta_min=0.0)
    return LambdaLR(optimizer, partial(warmup_and_cosine, warmup=warmup, total=total))


@report("Tencent-Hunyuan/UniRL#223", "schedules", "schedule")
def cosine_without_warmup(*, faulty: bool) -> Arguments:
    """A warm-up only shortens the cosine: the rate is 0 after two thirds of the steps, then rises."""
    return setup(
        Decoder,
        text(4, 32, seed=15),
        language_loss,
        decaying_adamw,
        scheduler=partial(denoising_schedule, plain_cosine=faulty),
        declare={"steps": 60, "peak_lr": 1e-3},
    )


def loop_step(
    model: nn.Module, batch: Tensor, optimizer: Optimizer, scheduler: LRScheduler | None = None
) -> Tensor:
    model.train()
    loss = language_loss(model, batch)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if scheduler is not None:
        scheduler.step()
    return loss.detach()


@report("PolymathicAI/the_well#63", "resuming", "schedule")
def schedule_not_resumed(*, faulty: bool) -> Arguments:
    """A checkpoint holds model and optimizer, but no schedule: resumed, the rate warms up again."""
    torch.manual_seed(0)
    batch = text(4, 32, seed=16)
    share = partial(warmup_and_cosine, warmup=20, total=120)

    def trainer() -> tuple[Decoder, AdamW, LambdaLR]:
        model = Decoder()
        optimizer = decaying_adamw(model)
        return model, optimizer, LambdaLR(optimizer, share)

    model, optimizer, scheduler = trainer()
    for _ in range(40):
        loop_step(model, batch, optimizer, scheduler)
    checkpoint: dict[str, Any] = {
        "model": copy.deepcopy(model.state_dict()),
        "optimizer": copy.deepcopy(optimizer.state_dict()),
        "scheduler": copy.deepcopy(scheduler.state_dict()),
    }
    model, optimizer, scheduler = trainer()
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    if not faulty:
        scheduler.load_state_dict(checkpoint["scheduler"])
    return {
        "model": model,
        "batch": batch,
        "loss": language_loss,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "step": loop_step,
        "declare": {"steps": 120, "trained": True},
    }


# ----------------------------------------------------------------------------------------------- precision


class PhaseCache(nn.Module):
    """Rotations of positions, made anew when rows get longer."""

    inv_freq: Tensor

    def __init__(self, width: int, *, keep_float32: bool):
        super().__init__()
        self.width, self.keep_float32 = width, keep_float32
        self.register_buffer("inv_freq", inverse_frequencies(width), persistent=False)

    def forward(self, length: int) -> tuple[Tensor, Tensor]:
        if self.keep_float32:
            rates = inverse_frequencies(self.width).to(self.inv_freq.device)
            at = torch.arange(length, device=rates.device, dtype=torch.float32)
        else:
            rates = self.inv_freq.clone()
            at = torch.arange(length, device=rates.device).type_as(rates)
        angles = torch.outer(at, rates)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()


def normed(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])


class MaskedDiffusion(nn.Module):
    """A masked diffusion language model: an encoder with rotary positions that fills in masked tokens."""

    def __init__(self, dim: int = 48, heads: int = 4, *, keep_float32: bool):
        super().__init__()
        self.vocab_embed, self.heads = nn.Embedding(VOCAB, dim), heads
        self.rotary = PhaseCache(dim // heads, keep_float32=keep_float32)
        self.attn_qkv = nn.ModuleList(nn.Linear(dim, 3 * dim, bias=False) for _ in range(2))
        self.attn_out = nn.ModuleList(nn.Linear(dim, dim, bias=False) for _ in range(2))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim)) for _ in range(2)
        )
        self.output = nn.Linear(dim, VOCAB, bias=False)
        self.apply(init_weights)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.vocab_embed(ids)
        cosines = self.rotary(ids.shape[1])
        for i in range(2):
            q, k, v = self.attn_qkv[i](normed(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(rotate(q, cosines), rotate(k, cosines), v)
            x = x + self.attn_out[i](y.transpose(1, 2).flatten(2))
            x = x + self.mlp[i](normed(x))
        return self.output(normed(x))


def masked_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean loss of the masked tokens, each weighted by one over its row's share of masked ones."""
    masked = batch["masked"]
    logits = model(batch["ids"].masked_fill(masked, MASK)).float()
    losses = F.cross_entropy(logits.transpose(1, 2), batch["ids"], reduction="none")
    return (losses * masked / batch["share"][:, None]).sum() / masked.numel()


@report("nkalyanv99/UNI-D2#6", "precision", "precision", "buffers", place="*rotary*|*attn*|")
def positions_in_bfloat16(*, faulty: bool) -> Arguments:
    """Positions are counted in the precision of the model: in bfloat16, those above 256 coincide."""
    share = torch.tensor([0.3, 0.6])
    masked = torch.rand(2, 384, generator=generator(17)) < share[:, None]
    batch = {"ids": tokens(2, 384, seed=17), "masked": masked, "share": share}

    def make() -> nn.Module:
        return MaskedDiffusion(keep_float32=not faulty).to(torch.bfloat16)

    return setup(make, batch, masked_loss)


# -------------------------------------------------------------------------------------------------- starts


class SelectiveScan(nn.Module):
    """A Mamba mixer, whose time steps begin between a thousandth and a tenth."""

    def __init__(self, dim: int, states: int = 4, rank: int = 4):
        super().__init__()
        inner = 2 * dim
        self.states, self.rank = states, rank
        self.in_proj, self.out_proj = nn.Linear(dim, 2 * inner, bias=False), nn.Linear(inner, dim, bias=False)
        self.conv1d = nn.Conv1d(inner, inner, 4, groups=inner, padding=3)
        self.x_proj = nn.Linear(inner, rank + 2 * states, bias=False)
        self.dt_proj = nn.Linear(rank, inner)
        self.a_log = nn.Parameter(torch.arange(1, states + 1).float().log().repeat(inner, 1))
        self.d = nn.Parameter(torch.ones(inner))
        nn.init.uniform_(self.dt_proj.weight, -(rank**-0.5), rank**-0.5)
        step = torch.exp(torch.rand(inner) * (math.log(0.1) - math.log(0.001)) + math.log(0.001))
        with torch.no_grad():
            self.dt_proj.bias.copy_(step + torch.log(-torch.expm1(-step)))
        self.dt_proj.no_reinit = True

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        u, gate = self.in_proj(x).chunk(2, -1)
        u = F.silu(self.conv1d(u.transpose(1, 2))[..., :length].transpose(1, 2))
        time, b, c = self.x_proj(u).split((self.rank, self.states, self.states), dim=-1)
        time = F.softplus(self.dt_proj(time))
        decay = torch.exp(-time[..., None] * self.a_log.exp())
        write = (time * u)[..., None] * b[:, :, None]
        state, out = torch.zeros_like(write[:, 0]), []
        for t in range(length):
            state = decay[:, t] * state + write[:, t]
            out.append((state * c[:, t, None]).sum(-1))
        y = torch.stack(out, dim=1) + u * self.d
        return self.out_proj(y * F.silu(gate))


class MambaModel(nn.Module):
    def __init__(self, dim: int = 32, *, heed_mark: bool):
        super().__init__()
        self.heed_mark = heed_mark
        self.embedding = nn.Embedding(VOCAB, dim)
        self.mixers = nn.ModuleList(SelectiveScan(dim) for _ in range(2))
        self.norms = nn.ModuleList(RMSNorm(dim) for _ in range(2))
        self.norm, self.lm_head = RMSNorm(dim), nn.Linear(dim, VOCAB, bias=False)
        self.apply(self.init_weights)

    def init_weights(self, module: nn.Module) -> None:
        if self.heed_mark and getattr(module, "no_reinit", False):
            return
        init_weights(module)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for norm, mixer in zip(self.norms, self.mixers, strict=True):
            x = x + mixer(norm(x))
        return self.lm_head(self.norm(x))


@report("athms/mad-lab#3", "starts", "start", place="*dt_proj*|*mixers*|")
def mixer_start_overwritten(*, faulty: bool) -> Arguments:
    """The language model draws all linear maps anew, also those to which a mixer gave a start."""
    return remade(partial(MambaModel, heed_mark=not faulty), text(4, 24, seed=18), language_loss)


# ------------------------------------------------------------------------------------------------ adapters


@report("Blaizzy/mlx-vlm#845", "adapters")
def adapter_not_divided_by_rank(*, faulty: bool) -> Arguments:
    """Adapters of rank 8 with an alpha of 16 are scaled by 16 instead of by 16 / 8."""
    rank, alpha = 8, 16.0
    make = partial(adapted, rank, alpha if faulty else alpha / rank)
    return setup(make, text(4, 32, seed=19), language_loss, trained_alone)


# ------------------------------------------------------------------------------------------ shared modules


class ResidualHead(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.linear = nn.Linear(dim, dim)
        nn.init.zeros_(self.linear.weight)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.act(self.linear(x))


class Medusa(nn.Module):
    """A frozen decoder with heads for tokens further ahead."""

    def __init__(self, heads: int = 3, depth: int = 2, *, share: bool):
        super().__init__()
        self.base = Decoder().requires_grad_(False)
        dim = self.base.dim
        self.medusa_head = nn.ModuleList(
            nn.Sequential(*self.residuals(dim, depth, share=share), nn.Linear(dim, VOCAB, bias=False))
            for _ in range(heads)
        )

    def residuals(self, dim: int, depth: int, *, share: bool) -> list[nn.Module]:
        if share:
            return [ResidualHead(dim)] * depth
        return [ResidualHead(dim) for _ in range(depth)]

    def forward(self, ids: Tensor) -> list[Tensor]:
        with torch.no_grad():
            states = self.base.hidden(ids)
        return [head(states) for head in self.medusa_head]


def medusa_loss(model: nn.Module, ids: Tensor) -> Tensor:
    total = torch.zeros(())
    for ahead, logits in enumerate(model(ids), start=2):
        total = total + 0.8 ** (ahead - 1) * F.cross_entropy(
            logits[:, :-ahead].flatten(0, 1), ids[:, ahead:].flatten()
        )
    return total


@report("linkedin/Liger-Kernel#269", "shared modules", "ties", "siblings", "seeds")
def heads_repeat_one_block(*, faulty: bool) -> Arguments:
    """The layers of each extra head are one and the same block, by multiplying a list."""
    return setup(partial(Medusa, share=faulty), text(4, 32, seed=20), medusa_loss, trained_alone)


# -------------------------------------------------------------------------------------- moving averages


class SelfDistillation(nn.Module):
    """A student, a teacher that is its moving average, and the moving centre of the teacher's outputs."""

    center: Tensor

    def __init__(self, dim: int = 48, prototypes: int = 32):
        super().__init__()
        self.student = self.network(dim, prototypes)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.register_buffer("center", torch.zeros(prototypes))

    def network(self, dim: int, prototypes: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, dim, 4, 4),
            nn.Flatten(2),
            Transposed(),
            EncoderLayer(dim, 4),
            EncoderLayer(dim, 4),
            nn.LayerNorm(dim),
            Direction(),
            nn.Linear(dim, prototypes, bias=False),
        )

    def forward(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            teacher = self.teacher(first)
        return self.student(second), teacher

    @torch.no_grad()
    def follow(self, teacher: Tensor, momentum: float = 0.99) -> None:
        """Move the teacher towards the student and the centre towards these outputs."""
        for mean, parameter in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            mean.lerp_(parameter, 1 - momentum)
        self.center.lerp_(teacher.mean(0), 0.01)


class Transposed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


class Direction(nn.Module):
    """The direction of the mean of all patches."""

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x.mean(1), dim=-1)


def distance(model: Any, student: Tensor, teacher: Tensor) -> Tensor:
    targets = ((teacher - model.center) / 0.06).softmax(-1)
    return -(targets * (student / 0.1).log_softmax(-1)).sum(-1).mean()


def view_loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return distance(model, *model(*batch))


def view_step(
    model: Any,
    batch: tuple[Tensor, Tensor],
    optimizer: Optimizer,
    scheduler: LRScheduler | None = None,
    *,
    follow_each: bool,
) -> Tensor:
    """Accumulate two micro-batches, step, and let the teacher follow."""
    model.train()
    optimizer.zero_grad()
    total, outputs = torch.zeros(()), []
    for first, second in zip(batch[0].chunk(2), batch[1].chunk(2), strict=True):
        student, teacher = model(first, second)
        loss = distance(model, student, teacher) / 2
        loss.backward()
        total += loss.detach()
        outputs.append(teacher)
        if follow_each:
            model.follow(teacher)
    optimizer.step()
    if not follow_each:
        model.follow(torch.cat(outputs))
    return total


@report("lightly-ai/lightly-train#968", "moving averages", since=("step",))
def teacher_follows_each_micro_batch(*, faulty: bool) -> Arguments:
    """The teacher and the centre move with each micro-batch, not with each step."""
    draw = generator(21)
    clean = torch.randn(8, 3, 16, 16, generator=draw)
    batch = (clean, clean + 0.3 * torch.randn(8, 3, 16, 16, generator=draw))
    step = partial(view_step, follow_each=faulty)
    return setup(SelfDistillation, batch, view_loss, adamw, step=step)
