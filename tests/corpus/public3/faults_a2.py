"""Reports of training: losses, accumulation, rates, precision, checkpoints, starts and labels."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, MultiStepLR

from corpus.batches import EOS, VOCAB, generator, padded_text, text
from corpus.case import Arguments
from corpus.public2.blocks import remade, setup

from .case import report
from .parts_a import GPT, GPTConfig, configure_adamw, plain_adamw, shifted_loss, token_loss, train_step

Batch = dict[str, Tensor]

# ------------------------------------------------------------------------------------ accumulation and rates


def answer_batch() -> Batch:
    """Return conversations whose answers, the only targets, are of very different lengths."""
    ids = text(8, 33, seed=320)
    labels = ids[:, 1:].clone()
    for row, prompt in enumerate((4, 9, 27, 30, 15, 29, 6, 24)):
        labels[row, :prompt] = -100
    return {"input_ids": ids[:, :-1], "labels": labels}


def answer_loss(model: nn.Module, batch: Batch) -> Tensor:
    return token_loss(model(batch["input_ids"]), batch["labels"])


def micro_batches(batch: Batch, rows: int) -> list[Batch]:
    parts = {name: tensor.split(rows) for name, tensor in batch.items()}
    return [dict(zip(parts, row, strict=True)) for row in zip(*parts.values(), strict=True)]


def answer_step(
    model: nn.Module,
    batch: Batch,
    optimizer: Optimizer,
    scheduler: LRScheduler | None = None,
    *,
    count_globally: bool,
) -> Tensor:
    """Step on four micro-batches, clipped once."""
    model.train()
    optimizer.zero_grad()
    parts = micro_batches(batch, rows=2)
    valid_tokens = (batch["labels"] != -100).sum()
    total = torch.zeros(())
    for part in parts:
        logits = model(part["input_ids"])
        if count_globally:
            loss = token_loss(logits, part["labels"], reduction="sum") / valid_tokens
        else:
            loss = token_loss(logits, part["labels"]) / len(parts)
        loss.backward()
        total += loss.detach()
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if scheduler is not None:
        scheduler.step()
    return total


@report("pytorch/torchtitan#2206", "accumulation and reduction", "step")
def mean_of_means(*, faulty: bool) -> Arguments:
    """Each micro-batch is averaged over its own valid tokens, however few they are."""
    step = partial(answer_step, count_globally=not faulty)
    declare = {"max_grad_norm": 1.0}
    return setup(GPT, answer_batch(), answer_loss, configure_adamw, step=step, declare=declare)


def cosine_with_warmup(step: int, *, warmup: int, total: int, floor: float = 0.1) -> float:
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))


class Accumulator:
    """Says, as an accelerator does, whether a micro-batch is the last before the optimizer steps."""

    def __init__(self, steps: int):
        self.steps, self.sync_gradients = steps, False

    def split(self, ids: Tensor) -> list[Tensor]:
        return list(ids.chunk(self.steps))

    def enter(self, index: int) -> None:
        self.sync_gradients = index == self.steps - 1


def accelerated_step(
    model: nn.Module,
    batch: Tensor,
    optimizer: Optimizer,
    scheduler: LRScheduler | None = None,
    *,
    guard_scheduler: bool,
    accumulator: Accumulator,
) -> Tensor:
    """Accumulate over micro-batches; the optimizer only steps and clears where gradients are whole."""
    model.train()
    total = torch.zeros(())
    for index, ids in enumerate(accumulator.split(batch)):
        accumulator.enter(index)
        loss = shifted_loss(model, ids) / accumulator.steps
        loss.backward()
        total += loss.detach()
        if accumulator.sync_gradients:
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if scheduler is not None and (accumulator.sync_gradients or not guard_scheduler):
            scheduler.step()
    return total


@report("starVLA/starVLA#210", "schedules", "schedule", "step")
def rate_moves_with_micro_batches(*, faulty: bool) -> Arguments:
    """The schedule moves with each micro-batch, though the optimizer steps once for four of them."""
    share = partial(cosine_with_warmup, warmup=10, total=200)
    step = partial(accelerated_step, guard_scheduler=not faulty, accumulator=Accumulator(4))
    return setup(
        GPT,
        text(8, 33, seed=321),
        shifted_loss,
        configure_adamw,
        step=step,
        scheduler=lambda optimizer: LambdaLR(optimizer, share),
        declare={"steps": 200, "peak_lr": 1e-3, "max_grad_norm": 1.0},
    )


def warmup_stable_decay(
    step: int, *, warmup: int, n_steps: int, decay_fraction: float, min_ratio: float, whole: bool
) -> float:
    """Return the share of the peak: up, level, and down to ``min_ratio`` over the last steps."""
    decay_length = int(n_steps * decay_fraction)
    if step < warmup:
        return (step + 1) / warmup
    if step <= n_steps - decay_length:
        return 1.0
    if step <= n_steps:
        span = n_steps if whole else decay_length
        along = (step - (n_steps - decay_length)) / span
        return 1.0 / (along * (1.0 / min_ratio) + (1.0 - along))
    return min_ratio


@report("facebookresearch/lingua#72", "schedules")
def decay_ends_above_its_floor(*, faulty: bool) -> Arguments:
    """The decay is measured by the whole training instead of by its own length, and ends above its floor."""
    share = partial(
        warmup_stable_decay, warmup=4, n_steps=20, decay_fraction=0.2, min_ratio=0.1, whole=faulty
    )
    return setup(
        GPT,
        text(4, 33, seed=322),
        shifted_loss,
        configure_adamw,
        step=train_step,
        scheduler=lambda optimizer: LambdaLR(optimizer, share),
        declare={"steps": 20, "peak_lr": 1e-3},
    )


# ------------------------------------------------------------------------------------------ rates of layers


class LayerDecayAdamW(AdamW):
    """AdamW whose groups have rates that fall towards the first layers."""

    def __init__(self, groups: list[dict[str, Any]], lr: float, *, every_step: bool):
        super().__init__(groups, lr=lr, betas=(0.9, 0.999))
        self.every_step = every_step
        if not every_step:
            self.scale_rates()

    def scale_rates(self) -> None:
        for group in self.param_groups:
            group["lr"] *= group["lr_scale"]

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        if self.every_step:
            self.scale_rates()
        return super().step(closure)


class PatchBlock(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.attn(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class PoseViT(nn.Module):
    """A plain ViT that predicts a heat map of each joint."""

    def __init__(self, dim: int = 48, depth: int = 3, joints: int = 4):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, dim, 4, 4)
        self.pos_embed = nn.Parameter(torch.randn(1, 36, dim) * 0.02)
        self.blocks = nn.ModuleList(PatchBlock(dim, 4) for _ in range(depth))
        self.last_norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, joints)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch_embed(images).flatten(2).transpose(1, 2) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.head(self.last_norm(x)).transpose(1, 2)


def layer_of(name: str, depth: int) -> int:
    """Return the number of a parameter's layer: 0 for the embeddings, ``depth + 1`` for the head."""
    if name.startswith(("patch_embed", "pos_embed")):
        return 0
    if name.startswith("blocks."):
        return int(name.split(".")[1]) + 1
    return depth + 1


def layer_decay_adamw(model: nn.Module, *, every_step: bool, rate: float = 0.75) -> LayerDecayAdamW:
    depth = len(model.blocks)
    groups: dict[tuple[int, bool], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        layer, decays = layer_of(name, depth), parameter.dim() > 1 and "pos_embed" not in name
        scale, decay = rate ** (depth + 1 - layer), 0.1 if decays else 0.0
        group = {"params": [], "lr_scale": scale, "weight_decay": decay}
        groups.setdefault((layer, decays), group)["params"].append(parameter)
    return LayerDecayAdamW(list(groups.values()), lr=5e-4, every_step=every_step)


def heat_map_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch["images"]), batch["heat_maps"])


@report("jaehyunnn/ViTPose_pytorch#20", "optimizer groups", "schedule", "groups")
def layer_rates_decay_each_step(*, faulty: bool) -> Arguments:
    """Rates of layers are scaled down in each step instead of once, and fall to nothing."""
    draw = generator(323)
    batch = {
        "images": torch.randn(6, 3, 24, 24, generator=draw),
        "heat_maps": torch.rand(6, 4, 36, generator=draw).pow(8),
    }
    return setup(
        PoseViT,
        batch,
        heat_map_loss,
        partial(layer_decay_adamw, every_step=faulty),
        scheduler=lambda optimizer: MultiStepLR(optimizer, milestones=[60, 85], gamma=0.1),
    )


# ------------------------------------------------------------------------------------------------ precision


class WeatherModel(nn.Module):
    """Predicts the next state of the atmosphere on a grid, as a change of the present one."""

    def __init__(self, variables: int = 4, dim: int = 48, patch: int = 4):
        super().__init__()
        self.embed = nn.Conv2d(variables, dim, patch, patch)
        self.grid_positions = nn.Parameter(torch.randn(1, 32, dim) * 0.02)
        self.blocks = nn.ModuleList(PatchBlock(dim, 4) for _ in range(2))
        self.norm, self.unembed = nn.LayerNorm(dim), nn.ConvTranspose2d(dim, variables, patch, patch)

    def forward(self, state: Tensor) -> Tensor:
        x = self.embed(state)
        height, width = x.shape[-2:]
        x = x.flatten(2).transpose(1, 2) + self.grid_positions
        for block in self.blocks:
            x = block(x)
        x = self.norm(x).transpose(1, 2).unflatten(2, (height, width))
        return state + self.unembed(x)


def weather_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch["now"]), batch["next"])


def scaled_step(
    model: nn.Module,
    batch: Batch,
    optimizer: Optimizer,
    scheduler: LRScheduler | None = None,
    *,
    scaler: GradScaler,
    unscale_first: bool,
) -> Tensor:
    """Step on a loss that is scaled up, so that its gradients survive half precision."""
    model.train()
    optimizer.zero_grad()
    loss = weather_loss(model, batch)
    scaler.scale(loss).backward()
    if unscale_first:
        scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    if scheduler is not None:
        scheduler.step()
    return loss.detach()


@report("NCAR/miles-credit#141", "precision", "step")
def clipped_while_scaled(*, faulty: bool) -> Arguments:
    """Gradients are clipped while they are still multiplied by the scale of the loss."""
    draw = generator(324)
    now = torch.randn(4, 4, 16, 32, generator=draw)
    batch = {"now": now, "next": now.roll(1, dims=-1) + 0.1 * torch.randn(now.shape, generator=draw)}
    step = partial(scaled_step, scaler=GradScaler("cpu", init_scale=2.0**16), unscale_first=not faulty)
    declare = {"max_grad_norm": 1.0}
    return setup(WeatherModel, batch, weather_loss, plain_adamw, step=step, declare=declare)


class HalfAdamW(Optimizer):
    """AdamW that computes in float32, for weights of bfloat16."""

    def __init__(self, groups: Any, lr: float, *, keep_master: bool, weight_decay: float = 0.0):
        super().__init__(groups, {"lr": lr, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": weight_decay})
        self.keep_master = keep_master

    def state_of(self, parameter: Tensor) -> dict[str, Any]:
        state = self.state[parameter]
        if not state:
            wide = parameter.detach().float()
            state.update(step=0, exp_avg=torch.zeros_like(wide), exp_avg_sq=torch.zeros_like(wide))
            if self.keep_master:
                state["master"] = wide.clone()
        return state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state, grad = self.state_of(parameter), parameter.grad.float()
                state["step"] += 1
                state["exp_avg"].lerp_(grad, 1 - beta1)
                state["exp_avg_sq"].lerp_(grad.square(), 1 - beta2)
                mean = state["exp_avg"] / (1 - beta1 ** state["step"])
                size = (state["exp_avg_sq"] / (1 - beta2 ** state["step"])).sqrt()
                weight = state["master"] if self.keep_master else parameter.float()
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.sub_(group["lr"] * mean / (size + group["eps"]))
                parameter.copy_(weight)


def half_adamw(model: nn.Module, *, keep_master: bool) -> HalfAdamW:
    return HalfAdamW(list(model.parameters()), lr=6e-4, keep_master=keep_master)


@report("workofart/ml-by-hand#85", "precision", "update")
def bfloat16_weights_stand_still(*, faulty: bool) -> Arguments:
    """Updates are computed in float32 but written to weights of bfloat16, whose gains of 1 never move."""

    def make() -> nn.Module:
        return GPT(GPTConfig(bias=True)).to(torch.bfloat16)

    optimizer = partial(half_adamw, keep_master=not faulty)
    return remade(make, text(4, 33, seed=325), shifted_loss, optimizer)


# ---------------------------------------------------------------------------------------------- checkpoints


def fill(template: Any, saved: Any) -> Any:
    """Return the template with its tensors read from what was saved, as a sharded checkpoint is read."""
    if isinstance(template, dict):
        return {key: fill(value, saved[key]) for key, value in template.items() if key in saved}
    if isinstance(template, list):
        return [fill(value, other) for value, other in zip(template, saved, strict=True)]
    return copy.deepcopy(saved)


def with_moments(optimizer: Optimizer) -> None:
    """Let an optimizer make its moments, without moving a weight."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


class CheckpointManager:
    """Saves a training and fills another one with it."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler):
        self.parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler}

    def save(self) -> dict[str, Any]:
        return {name: copy.deepcopy(part.state_dict()) for name, part in self.parts.items()}

    def load(self, checkpoint: dict[str, Any], *, allocate: bool) -> None:
        if allocate:
            with_moments(self.parts["optimizer"])
        for name, part in self.parts.items():
            part.load_state_dict(fill(part.state_dict(), checkpoint[name]))


@report("KempnerInstitute/KempnerForge#115", "checkpoints")
def moments_lost_on_resume(*, faulty: bool) -> Arguments:
    """A checkpoint is read into what a new optimizer holds, which are no moments yet: it drops them."""
    batch = text(4, 33, seed=326)
    share = partial(cosine_with_warmup, warmup=10, total=100)

    def training() -> tuple[GPT, AdamW, LambdaLR]:
        model = GPT()
        optimizer = configure_adamw(model)
        return model, optimizer, LambdaLR(optimizer, share)

    torch.manual_seed(0)
    model, optimizer, scheduler = training()
    for _ in range(30):
        train_step(model, batch, optimizer, scheduler)
    checkpoint = CheckpointManager(model, optimizer, scheduler).save()

    model, optimizer, scheduler = training()
    CheckpointManager(model, optimizer, scheduler).load(checkpoint, allocate=not faulty)
    return {
        "model": model,
        "batch": batch,
        "loss": shifted_loss,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "step": train_step,
        "declare": {"steps": 100, "peak_lr": 1e-3},
    }


# --------------------------------------------------------------------------------------- starts and tokens

MARKERS = ("[INST]", "[INPT]", "[RESP]", "[MARK]", "[COLN]")
WORDS_OF_MARKERS = (17, 42, 88, 130, 9)
"""The words whose vectors the markers start with."""


@torch.no_grad()
def add_markers(model: GPT, *, first: int) -> None:
    """Make room for the markers and start each with the vector of a word; rows are counted from the end."""
    old = model.wte.weight
    grown = torch.cat((old, old.mean(0, keepdim=True).expand(len(MARKERS), -1)))
    model.wte = nn.Embedding.from_pretrained(grown.clone(), freeze=False)
    model.lm_head = nn.Linear(grown.shape[1], len(grown), bias=False)
    model.lm_head.weight = model.wte.weight
    for number, word in enumerate(WORDS_OF_MARKERS):
        model.wte.weight[first + number] = old[word]


def marked_text() -> Tensor:
    """Return rows in which markers stand before the instruction, the input and the response."""
    ids = text(6, 33, seed=327)
    mark, inst, inpt, resp, colon = (VOCAB + number for number in (3, 0, 1, 2, 4))
    for start, kind in ((0, inst), (9, inpt), (20, resp)):
        ids[:, start], ids[:, start + 1], ids[:, start + 2] = mark, kind, colon
    return ids


@report("Sizhe-Chen/StruQ#7", "initialisation")
def markers_start_as_other_words(*, faulty: bool) -> Arguments:
    """New tokens' rows are counted from -4 to 0: each starts as another's word, and the first row is lost."""

    def make() -> nn.Module:
        model = GPT()
        add_markers(model, first=1 - len(MARKERS) if faulty else -len(MARKERS))
        return model

    return setup(make, marked_text(), shifted_loss, configure_adamw, declare={"tied": True})


def packed_for_training(sequence: Tensor, length: int, eos: int) -> Tensor:
    """Return a row of fixed length, padded by the end token, which this tokenizer pads with."""
    return F.pad(sequence, (0, length - len(sequence)), value=eos)


def supervised_batch(*, mask_by_value: bool) -> Batch:
    """Return inputs, the tokens after each, and a mask that leaves out padding."""
    ids, real = padded_text((33, 22, 28, 17, 25, 30), seed=328)
    ids[:, 11] = EOS  # a turn ends here, and another begins
    rows, masks = [], []
    for row, count in zip(ids, real.sum(1).tolist(), strict=True):
        sequence = packed_for_training(row[:count], 34, EOS)
        labels = sequence[1:]
        loss_mask = torch.ones(len(labels))
        if mask_by_value:
            loss_mask[labels == EOS] = 0.0
        else:
            loss_mask[count - 1 :] = 0.0
        rows.append(sequence)
        masks.append(loss_mask)
    tokens_ = torch.stack(rows)
    return {"tokens": tokens_[:, :-1], "labels": tokens_[:, 1:], "loss_mask": torch.stack(masks)}


def masked_token_loss(model: nn.Module, batch: Batch) -> Tensor:
    losses = token_loss(model(batch["tokens"]), batch["labels"], reduction="none")
    mask = batch["loss_mask"].flatten()
    return (losses * mask).sum() / mask.sum()


@report("NVIDIA-NeMo/Megatron-Bridge#4660", "tokens", "counted")
def end_masked_as_padding(*, faulty: bool) -> Arguments:
    """Padding is masked by its id, which is that of the end of a text: no end is ever a target."""
    batch = supervised_batch(mask_by_value=faulty)
    return setup(GPT, batch, masked_token_loss, configure_adamw, declare={"eos_id": EOS})


class MaskedInputGPT(GPT):
    """A GPT that gives a vector of zeros to ids below 0, which stand for no token."""

    def forward(self, idx: Tensor) -> Tensor:
        token_mask = (idx >= 0).unsqueeze(-1)
        x = self.wte(idx.clamp(min=0)) * token_mask + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def preprocess(batch: Batch, *, clone_labels: bool) -> tuple[Tensor, Tensor]:
    """Return inputs and labels of stored token ids; spans without a loss are marked in the labels."""
    token_ids = batch["token_ids"].long()
    labels = token_ids[:, 1:].clone() if clone_labels else token_ids[:, 1:]
    for row, (begin, end) in zip(labels, batch["loss_masking_spans"].tolist(), strict=True):
        row[max(begin - 1, 0) : end] = -100
    return token_ids[:, :-1], labels


def span_loss(model: nn.Module, batch: Batch, *, clone_labels: bool) -> Tensor:
    inputs, labels = preprocess(batch, clone_labels=clone_labels)
    return token_loss(model(inputs), labels)


@report("ServiceNow/Fast-LLM#253", "tokens", "reach")
def prompts_masked_in_the_inputs(*, faulty: bool) -> Arguments:
    """Labels share memory with the tokens: where the loss is masked, the model sees no token either."""
    batch = {
        "token_ids": text(6, 34, seed=329).to(torch.int32),
        "loss_masking_spans": torch.tensor([[0, 8], [3, 15], [0, 12], [10, 20], [0, 5], [6, 17]]),
    }
    return setup(MaskedInputGPT, batch, partial(span_loss, clone_labels=not faulty), configure_adamw)
