"""Reports of training: optimizer groups, rates, reductions, labels, checkpoints, images, series."""

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
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import LlamaConfig, LlamaForCausalLM

from corpus.batches import BOS, EOS, PAD, VOCAB, generator, inside, padded_text, text
from corpus.case import Arguments
from corpus.public2.blocks import remade, setup

from .case import report
from .parts_a import (
    Batch,
    Block,
    FeedForward,
    causal_pairs,
    decaying_adamw,
    draw_weights,
    mean_token_loss,
    next_token_loss,
    redraw_layers,
    rotated,
    step_of,
    undecayed_adamw,
    waves,
)

# ---------------------------------------------------------------------------------------- optimizer groups


class StackedLanguageModel(nn.Module):
    """A causal language model made of PyTorch's own encoder layers."""

    def __init__(self, dim: int = 48, heads: int = 4, layers: int = 3):
        super().__init__()
        self.token_embedding, self.position_embedding = nn.Embedding(VOCAB, dim), nn.Embedding(64, dim)
        layer = nn.TransformerEncoderLayer(
            dim, heads, 2 * dim, dropout=0.1, activation="gelu", batch_first=True, norm_first=True
        )
        self.stack = nn.TransformerEncoder(layer, layers, norm=nn.LayerNorm(dim), enable_nested_tensor=False)
        self.output = nn.Linear(dim, VOCAB)
        draw_weights(self)
        redraw_layers(self.stack)

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        at = torch.arange(length, device=ids.device)
        future = ~causal_pairs(length).to(ids.device)
        x = self.token_embedding(ids) + self.position_embedding(at)
        return self.output(self.stack(x, mask=future, is_causal=True))


def adamw_of_all(model: nn.Module, weight_decay: float = 0.1) -> AdamW:
    return AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=weight_decay)


def warmup_then_level(step: int, warmup: int = 10) -> float:
    return min(1.0, (step + 1) / warmup)


@report("dingo-actual/om#12", "optimizer groups", "groups")
def everything_decays(*, faulty: bool) -> Arguments:
    """Weight decay is applied to all parameters, biases and norms among them."""
    return remade(
        StackedLanguageModel,
        text(4, 33, seed=420),
        next_token_loss,
        adamw_of_all if faulty else partial(decaying_adamw, weight_decay=0.1),
        scheduler=lambda optimizer: LambdaLR(optimizer, warmup_then_level),
    )


class ConvBackbone(nn.Sequential):
    def __init__(self, dim: int):
        super().__init__(
            nn.Conv2d(3, 16, 3, 2, 1), nn.GroupNorm(4, 16), nn.ReLU(), nn.Conv2d(16, dim, 3, 2, 1)
        )


class ActionChunks(nn.Module):
    """Looks at a camera and the joints, and gives the next actions at once, each by a query of its own."""

    def __init__(self, dim: int = 32, chunk: int = 10, joints: int = 6):
        super().__init__()
        self.backbone = ConvBackbone(dim)
        self.state_proj = nn.Linear(joints, dim)
        self.camera_positions = nn.Parameter(torch.randn(16, dim) * 0.02)
        self.encoder = nn.ModuleList(Block(dim, 4) for _ in range(2))
        self.queries = nn.Parameter(torch.randn(chunk, dim) * 0.02)
        self.decoder = nn.ModuleList(Block(dim, 4, cross=True) for _ in range(2))
        self.encoder_norm, self.decoder_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.action_head = nn.Linear(dim, joints)

    def forward(self, image: Tensor, state: Tensor) -> Tensor:
        pixels = self.backbone(image).flatten(2).transpose(1, 2) + self.camera_positions
        memory = torch.cat((self.state_proj(state).unsqueeze(1), pixels), dim=1)
        for block in self.encoder:
            memory = block(memory)
        memory = self.encoder_norm(memory)
        x = self.queries.expand(len(image), -1, -1)
        for block in self.decoder:
            x = block(x, memory=memory)
        return self.action_head(self.decoder_norm(x))


class ActionPolicy(nn.Module):
    """Holds the model, and knows which of its parameters have a rate of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.model = ActionChunks()

    def get_optim_params(self, lr_backbone: float, backbone: str) -> list[dict[str, Any]]:
        named = list(self.named_parameters())
        return [
            {"params": [p for name, p in named if not name.startswith(backbone)]},
            {"params": [p for name, p in named if name.startswith(backbone)], "lr": lr_backbone},
        ]

    def forward(self, image: Tensor, state: Tensor) -> Tensor:
        return self.model(image, state)


def action_loss(policy: nn.Module, batch: Batch) -> Tensor:
    error = (policy(batch["image"], batch["state"]) - batch["action"]).abs()
    real = ~batch["action_is_pad"].unsqueeze(-1)
    return (error * real).sum() / (real.sum() * error.shape[-1])


def policy_adamw(policy: Any, *, backbone: str) -> AdamW:
    groups = policy.get_optim_params(lr_backbone=1e-4, backbone=backbone)
    return AdamW(groups, lr=1e-3, weight_decay=0.0)


@report("huggingface/lerobot#280", "optimizer groups", "groups")
def backbone_gets_the_main_rate(*, faulty: bool) -> Arguments:
    """Names of the backbone begin with "model.", so that none is found, and it gets the main rate."""
    draw = generator(421)
    batch = {
        "image": torch.rand(6, 3, 16, 16, generator=draw),
        "state": torch.randn(6, 6, generator=draw),
        "action": torch.randn(6, 10, 6, generator=draw).cumsum(1) * 0.2,
        "action_is_pad": ~inside((10, 6, 10, 8, 4, 10), 10),
    }
    optimizer = partial(policy_adamw, backbone="backbone" if faulty else "model.backbone")
    return setup(ActionPolicy, batch, action_loss, optimizer)


# ------------------------------------------------------------------------------------------------ schedules


class StateSpace(nn.Module):
    """A linear recurrence with complex, diagonal rates, run over the whole sequence."""

    def __init__(self, dim: int, states: int):
        super().__init__()
        self.log_decay = nn.Parameter(torch.full((states,), math.log(0.5)))
        self.frequency = nn.Parameter(math.pi * torch.arange(states).float())
        self.B = nn.Parameter(torch.randn(states, dim, 2) * (2 * dim) ** -0.5)
        self.C = nn.Parameter(torch.randn(dim, states, 2) * states**-0.5)
        self.D = nn.Parameter(torch.randn(dim))
        low, high = math.log(0.01), math.log(0.1)
        self.log_step = nn.Parameter(torch.rand(states) * (high - low) + low)

    def forward(self, u: Tensor) -> Tensor:
        rates = torch.complex(-self.log_decay.exp(), self.frequency)
        kept = (rates * self.log_step.exp()).exp()
        scaled = ((kept - 1) / rates)[:, None] * torch.view_as_complex(self.B)
        inputs = u.to(scaled.dtype) @ scaled.T
        state, outputs = torch.zeros_like(inputs[:, 0]), []
        for at in range(u.shape[1]):
            state = kept * state + inputs[:, at]
            outputs.append(state)
        y = torch.stack(outputs, dim=1) @ torch.view_as_complex(self.C).T
        return 2 * y.real + self.D * u


class StateSpaceLayer(nn.Module):
    def __init__(self, dim: int, states: int):
        super().__init__()
        self.norm, self.seq, self.gate = nn.LayerNorm(dim), StateSpace(dim, states), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.seq(self.norm(x)))
        return x + y * self.gate(y).sigmoid()


class SequenceClassifier(nn.Module):
    def __init__(self, dim: int = 32, states: int = 16, layers: int = 3, classes: int = 5):
        super().__init__()
        self.encoder = nn.Linear(1, dim)
        self.layers = nn.ModuleList(StateSpaceLayer(dim, states) for _ in range(layers))
        self.norm, self.decoder = nn.LayerNorm(dim), nn.Linear(dim, classes)

    def forward(self, signal: Tensor) -> Tensor:
        x = self.encoder(signal.unsqueeze(-1))
        for layer in self.layers:
            x = layer(x)
        return self.decoder(self.norm(x).mean(dim=1))


def signal_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    signals, classes = batch
    return F.cross_entropy(model(signals), classes)


def slow_recurrences(model: nn.Module, lr: float = 4e-3) -> AdamW:
    """Return AdamW with a lower rate and no decay for what the recurrences hold."""
    recurrent = {
        p for module in model.modules() if isinstance(module, StateSpace) for p in module.parameters()
    }
    maps = {module.weight for module in model.modules() if isinstance(module, nn.Linear)}
    others = [p for p in model.parameters() if p not in recurrent | maps]
    groups = [
        {"params": [p for p in model.parameters() if p in maps], "weight_decay": 0.05},
        {"params": others, "weight_decay": 0.0},
        {"params": [p for p in model.parameters() if p in recurrent], "weight_decay": 0.0, "lr": lr / 4},
    ]
    return AdamW(groups, lr=lr)


def warmup_then_cosine(
    step: int, *, warmup: int, total: int, count_from_warmup: bool, floor: float = 1e-3
) -> float:
    """Return the share of the peak: up in a line, then down by a cosine to the floor."""
    if step < warmup:
        return (step + 1) / warmup
    done = step - warmup if count_from_warmup else step
    along = min(done, total - warmup) / (total - warmup)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * along))


@report("lindermanlab/S5#11", "schedules")
def cosine_begins_in_the_middle(*, faulty: bool) -> Arguments:
    """The cosine counts the steps of the warm-up, too: the rate drops where it begins and ends too early."""
    signals = torch.randn(10, 32, generator=generator(422)).cumsum(1) * 0.3
    share = partial(warmup_then_cosine, warmup=10, total=100, count_from_warmup=not faulty)
    return setup(
        SequenceClassifier,
        (signals, torch.arange(10) % 5),
        signal_loss,
        slow_recurrences,
        step=step_of(signal_loss),
        scheduler=lambda optimizer: LambdaLR(optimizer, share),
        declare={"steps": 100, "peak_lr": 4e-3},
    )


class VolumeSegmenter(nn.Module):
    """Cuts a volume into cubes, lets them see each other, and marks each voxel of every cube."""

    def __init__(self, dim: int = 32, depth: int = 3, patch: int = 4, classes: int = 2):
        super().__init__()
        self.down_projection = nn.Conv3d(1, dim, patch, patch)
        self.pos_embed = nn.Parameter(torch.randn(1, 27, dim) * 0.02)
        self.eva = nn.ModuleList(Block(dim, 4) for _ in range(depth))
        self.norm, self.up_projection = nn.LayerNorm(dim), nn.ConvTranspose3d(dim, classes, patch, patch)

    def forward(self, volume: Tensor) -> Tensor:
        x = self.down_projection(volume)
        grid = x.shape[2:]
        x = x.flatten(2).transpose(1, 2) + self.pos_embed
        for block in self.eva:
            x = block(x)
        return self.up_projection(self.norm(x).transpose(1, 2).unflatten(2, grid))


def segmentation_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the cross-entropy and one minus the overlap of the marked voxels."""
    logits, labels = model(batch["image"]), batch["label"]
    ink = logits.softmax(1)[:, 1]
    overlap = (2 * (ink * labels).sum() + 1) / (ink.sum() + labels.sum() + 1)
    return F.cross_entropy(logits, labels) + 1 - overlap


def cosine_over(step: int, horizon: int) -> float:
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * step / horizon)))


@report("ScrollPrize/villa#1495", "schedules", "schedule")
def horizon_in_epochs(*, faulty: bool) -> Arguments:
    """The schedule moves with each step but is given the number of epochs: the rate falls to 0 and rises."""
    epochs, steps_of_an_epoch = 20, 10
    volume = torch.randn(4, 1, 12, 12, 12, generator=generator(423))
    volume = F.avg_pool3d(volume, 3, 1, 1) * 3
    batch = {"image": volume, "label": (volume[:, 0] > 0.4).long()}
    share = partial(cosine_over, horizon=epochs if faulty else epochs * steps_of_an_epoch)
    return setup(
        VolumeSegmenter,
        batch,
        segmentation_loss,
        decaying_adamw,
        step=step_of(segmentation_loss),
        scheduler=lambda optimizer: LambdaLR(optimizer, share),
        declare={"steps": epochs * steps_of_an_epoch, "peak_lr": 1e-3},
    )


# ---------------------------------------------------------------------------------- reductions and labels


class RotaryBlock(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.attn_norm, self.ffn_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.wqkv, self.wo = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.gate_up, self.down = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.wqkv(self.attn_norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        x = x + self.wo(y.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.ffn_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class RotaryModel(nn.Module):
    def __init__(self, dim: int = 48, heads: int = 4, layers: int = 3):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.layers = nn.ModuleList(RotaryBlock(dim, heads) for _ in range(layers))
        self.norm, self.final_proj = nn.RMSNorm(dim), nn.Linear(dim, VOCAB, bias=False)
        draw_weights(self)

    def forward(self, seqs: Tensor) -> Tensor:
        x = self.embed(seqs)
        for layer in self.layers:
            x = layer(x)
        return self.final_proj(self.norm(x))


def masked_mean(losses: Tensor, counted: Tensor, *, over_counted: bool) -> Tensor:
    losses = losses * counted
    return losses.sum() / counted.sum() if over_counted else losses.mean()


def answer_loss(model: nn.Module, batch: Batch, *, over_counted: bool) -> Tensor:
    """Return the mean loss of the answers; a mask hides prompts, and padding is no target."""
    logits, targets = model(batch["seqs"][:, :-1]), batch["seqs"][:, 1:]
    losses = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    counted = batch["target_mask"][:, 1:] & (targets != PAD)
    return masked_mean(losses, counted, over_counted=over_counted)


@report("facebookresearch/fairseq2#1455", "reduction", "padded_loss", "reduction", "counted")
def mean_over_what_is_hidden(*, faulty: bool) -> Arguments:
    """The mean of the loss divides by all places, those of padding and of prompts among them."""
    seqs, _ = padded_text((33, 19, 27, 14, 30, 22), seed=424)
    prompts = torch.tensor([9, 4, 15, 6, 20, 3])
    batch = {"seqs": seqs, "target_mask": torch.arange(33) >= prompts[:, None]}
    loss = partial(answer_loss, over_counted=not faulty)
    return setup(RotaryModel, batch, loss, decaying_adamw, declare={"pad_id": PAD, "eos_id": EOS})


def small_llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=64,
            tie_word_embeddings=False,
        )
    )


def xy_batch(data: Tensor, *, shift: bool) -> tuple[Tensor, Tensor]:
    return (data[:, :-1], data[:, 1:]) if shift else (data, data)


def hugging_face_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return model(input_ids=x, labels=y).loss


@report("delphi-suite/delphi#134", "tokens and labels", "targets")
def labels_shifted_by_data_and_model(*, faulty: bool) -> Arguments:
    """Batches hold the next tokens as labels, which the model shifts again: targets are two tokens ahead."""
    batch = xy_batch(text(4, 33, seed=425), shift=faulty)
    return remade(small_llama, batch, hugging_face_loss, undecayed_adamw)


class MoleculeTokens(nn.Module):
    """A variational autoencoder of padded strings of molecules."""

    def __init__(self, vocab: int = 40, dim: int = 32, latent: int = 12, longest: int = 24):
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim, padding_idx=PAD)
        self.positions = nn.Parameter(torch.randn(longest, dim) * 0.02)
        self.encoder = nn.ModuleList(Block(dim, 4) for _ in range(2))
        self.fc_mu, self.fc_log_var = nn.Linear(dim, latent), nn.Linear(dim, latent)
        self.fc_latent = nn.Linear(latent, dim)
        self.decoder = nn.ModuleList(Block(dim, 4) for _ in range(2))
        self.norm, self.fc_out = nn.LayerNorm(dim), nn.Linear(dim, vocab)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        real = tokens != PAD
        seen, positions = real[:, None, None, :], self.positions[: tokens.shape[1]]
        x = self.embedding(tokens) + positions
        for block in self.encoder:
            x = block(x, seen)
        pooled = (x * real[..., None]).sum(1) / real.sum(1, keepdim=True)
        mu, log_var = self.fc_mu(pooled), self.fc_log_var(pooled)
        z = mu + torch.randn_like(mu) * (0.5 * log_var).exp()
        x = self.fc_latent(z).unsqueeze(1) + positions
        for block in self.decoder:
            x = block(x, seen)
        return self.fc_out(self.norm(x)), mu, log_var


def reconstruction_loss(model: nn.Module, tokens: Tensor, *, pad_idx: int) -> Tensor:
    logits, mu, log_var = model(tokens)
    reconstruction = mean_token_loss(logits, tokens, ignore_index=pad_idx)
    divergence = -0.5 * (1 + log_var - mu.square() - log_var.exp()).sum(1).mean()
    return reconstruction + 0.01 * divergence


@report("DaoyuanLi2816/Molecule-Generator#20", "tokens and labels", "counted", "padded_loss", "reduction")
def padding_reconstructed(*, faulty: bool) -> Arguments:
    """The loss of an autoencoder asks for padding as well, of which short molecules mostly consist."""
    tokens, _ = padded_text((24, 9, 13, 7, 18, 11), vocab=40, seed=426)
    loss = partial(reconstruction_loss, pad_idx=-100 if faulty else PAD)
    return setup(MoleculeTokens, tokens, loss, undecayed_adamw, declare={"pad_id": PAD})


# ---------------------------------------------------------------------------------------------- checkpoints


class PatchClassifier(nn.Module):
    def __init__(self, dim: int = 32, depth: int = 3, classes: int = 6):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, dim, 4, 4)
        self.pos_embed = nn.Parameter(torch.randn(1, 25, dim) * 0.02)
        self.blocks = nn.ModuleList(Block(dim, 4) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch_embed(images).flatten(2).transpose(1, 2) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.mean(dim=1)))


class ModelEMA(nn.Module):
    """A moving average of a model, which follows it closely at first."""

    updates: Tensor

    def __init__(self, model: nn.Module, *, save_updates: bool, decay: float = 0.99, warmups: int = 10):
        super().__init__()
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay, self.warmups = decay, warmups
        self.register_buffer("updates", torch.zeros((), dtype=torch.long), persistent=save_updates)

    def train(self, mode: bool = True) -> ModelEMA:  # noqa: FBT001, FBT002
        return super().train(False)

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        self.updates += 1
        decay = self.decay * (1 - math.exp(-int(self.updates) / self.warmups))
        for mean, value in zip(self.model.parameters(), model.parameters(), strict=True):
            mean.lerp_(value, 1 - decay)


class TrainModule(nn.Module):
    def __init__(self, *, save_updates: bool):
        super().__init__()
        self.model = PatchClassifier()
        self.ema = ModelEMA(self.model, save_updates=save_updates)

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images)


def averaged_step(
    module: Any, batch: tuple[Tensor, Tensor], optimizer: Optimizer, scheduler: LRScheduler | None = None
) -> Tensor:
    module.train()
    optimizer.zero_grad()
    loss = signal_loss(module, batch)
    loss.backward()
    optimizer.step()
    module.ema.update(module.model)
    if scheduler is not None:
        scheduler.step()
    return loss.detach()


@report("lightly-ai/lightly-train#892", "checkpoints")
def average_forgets_its_updates(*, faulty: bool) -> Arguments:
    """The average's count of updates is not saved: once resumed, its first update overwrites it."""
    images = torch.randn(6, 3, 20, 20, generator=generator(427))
    batch = (images, torch.arange(6))
    torch.manual_seed(0)
    module = TrainModule(save_updates=not faulty)
    optimizer = decaying_adamw(module)
    for _ in range(40):
        averaged_step(module, batch, optimizer)
    saved = copy.deepcopy({"module": module.state_dict(), "optimizer": optimizer.state_dict()})

    module = TrainModule(save_updates=not faulty)
    optimizer = decaying_adamw(module)
    module.load_state_dict(saved["module"])
    optimizer.load_state_dict(saved["optimizer"])
    return {
        "model": module,
        "batch": batch,
        "loss": signal_loss,
        "optimizer": optimizer,
        "step": averaged_step,
        "declare": {"frozen": ("ema.*",)},
    }


# --------------------------------------------------------------------------------------------------- vision


class TemporalSpatialViT(nn.Module):
    """Looks at each place over the days of a year, then at all places, by one token for each class."""

    def __init__(
        self,
        bands: int = 4,
        dim: int = 32,
        patch: int = 2,
        side: int = 4,
        classes: int = 3,
        *,
        rearrange: bool,
    ):
        super().__init__()
        self.patch, self.side, self.classes, self.rearrange = patch, side, classes, rearrange
        self.to_patch = nn.Conv2d(bands, dim, patch, patch)
        self.day_embedding = nn.Embedding(366, dim)
        nn.init.normal_(self.day_embedding.weight, std=0.02)
        self.temporal_token = nn.Parameter(torch.randn(classes, dim) * 0.02)
        self.space_positions = nn.Parameter(torch.randn(side * side, dim) * 0.02)
        self.temporal_blocks = nn.ModuleList(Block(dim, 4) for _ in range(2))
        self.space_blocks = nn.ModuleList(Block(dim, 4) for _ in range(2))
        self.temporal_norm, self.space_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.mlp_head = nn.Linear(dim, patch * patch)

    def forward(self, images: Tensor, days: Tensor) -> Tensor:
        """Return logits `[B, classes, H, W]` of images `[B, T, bands, H, W]`."""
        rows, times = days.shape
        places = self.side * self.side
        x = self.to_patch(images.flatten(0, 1)).flatten(2).unflatten(0, (rows, times))
        x = x.permute(0, 3, 1, 2) + self.day_embedding(days)[:, None]
        tokens = self.temporal_token.expand(rows, places, -1, -1)
        x = torch.cat((tokens, x), dim=2).flatten(0, 1)
        for block in self.temporal_blocks:
            x = block(x)
        x = self.temporal_norm(x[:, : self.classes]).unflatten(0, (rows, places))
        x = x.transpose(1, 2).flatten(0, 1) + self.space_positions
        for block in self.space_blocks:
            x = block(x)
        x = self.mlp_head(self.space_norm(x)).unflatten(0, (rows, self.classes))
        height = self.side * self.patch
        if not self.rearrange:
            return x.permute(0, 2, 3, 1).reshape(rows, height, height, self.classes).permute(0, 3, 1, 2)
        x = x.unflatten(3, (self.patch, self.patch)).unflatten(2, (self.side, self.side))
        return x.permute(0, 1, 2, 4, 3, 5).reshape(rows, self.classes, height, height)


def crop_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["images"], batch["days"]), batch["crops"])


@report("michaeltrs/DeepSatModels#22", "vision")
def patches_laid_out_as_rows(*, faulty: bool) -> Arguments:
    """Outputs of patches are reshaped into the image as they are: a patch's pixels become part of a row."""
    draw = generator(428)
    images = F.avg_pool3d(torch.randn(4, 4, 6, 8, 8, generator=draw), 3, 1, 1).transpose(1, 2) * 3
    mean = images.mean(dim=(1, 2))
    batch = {
        "images": images,
        "days": torch.randint(0, 366, (4, 6), generator=draw).sort(dim=1).values,
        "crops": (mean > -0.15).long() + (mean > 0.15).long(),
    }
    make = partial(TemporalSpatialViT, rearrange=not faulty)
    return setup(make, batch, crop_loss, decaying_adamw)


class PatchBackbone(nn.Module):
    """A ViT that replaces hidden patches by a token, and scores each patch against prototypes."""

    def __init__(self, dim: int = 32, depth: int = 2, prototypes: int = 40):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, dim, 4, 4)
        self.mask_token = nn.Parameter(torch.randn(dim) * 0.02)
        self.pos_embed = nn.Parameter(torch.randn(1, 25, dim) * 0.02)
        self.blocks = nn.ModuleList(Block(dim, 4) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Sequential(FeedForward(dim), nn.Linear(dim, prototypes, bias=False))

    def forward(self, images: Tensor, hidden: Tensor | None = None) -> Tensor:
        x = self.patch_embed(images).flatten(2).transpose(1, 2)
        if hidden is not None:
            x = torch.where(hidden[..., None], self.mask_token, x)
        x = x + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class StudentAndTeacher(nn.Module):
    """A student that sees some patches only, and its moving average, which sees all of them."""

    centre: Tensor

    def __init__(self, prototypes: int = 40):
        super().__init__()
        self.student = PatchBackbone(prototypes=prototypes)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.register_buffer("centre", torch.zeros(prototypes))

    def forward(self, images: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            seen = self.teacher(images)
        return self.student(images, hidden), seen

    @torch.no_grad()
    def follow(self, images: Tensor, momentum: float = 0.99, centre_momentum: float = 0.9) -> None:
        for mean, value in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            mean.lerp_(value, 1 - momentum)
        self.centre.lerp_(self.teacher(images).mean(dim=(0, 1)), 1 - centre_momentum)


def patch_loss(model: Any, batch: Batch, *, apart: bool) -> Tensor:
    """Return the cross-entropy of the patches' prototypes, hidden and visible ones apart or together."""
    hidden = batch["hidden"]
    student, teacher = model(batch["images"], hidden)
    targets = ((teacher - model.centre) / 0.04).softmax(-1)
    losses = -(targets * (student / 0.1).log_softmax(-1)).sum(-1)
    if not apart:
        return losses.mean()
    masked = (losses * hidden).sum(1) / hidden.sum(1)
    visible = (losses * ~hidden).sum(1) / (~hidden).sum(1)
    return (masked + visible).mean()


def following_step(
    model: Any, batch: Batch, optimizer: Optimizer, scheduler: LRScheduler | None = None, *, apart: bool
) -> Tensor:
    model.train()
    optimizer.zero_grad()
    loss = patch_loss(model, batch, apart=apart)
    loss.backward()
    clip_grad_norm_(model.student.parameters(), 3.0)
    optimizer.step()
    model.follow(batch["images"])
    if scheduler is not None:
        scheduler.step()
    return loss.detach()


@report("lightly-ai/lightly#1937", "vision")
def hidden_patches_diluted(*, faulty: bool) -> Arguments:
    """The loss averages over all patches at once, in which the few hidden ones hardly count."""
    images = torch.randn(6, 3, 20, 20, generator=generator(429))
    order = torch.rand(6, 25, generator=generator(430)).argsort(dim=1)
    batch = {"images": images, "hidden": order < 4}
    return setup(
        StudentAndTeacher,
        batch,
        partial(patch_loss, apart=not faulty),
        decaying_adamw,
        step=partial(following_step, apart=not faulty),
        declare={"frozen": ("teacher.*",), "max_grad_norm": 3.0},
    )


# ------------------------------------------------------------------------------------------ encoder-decoder


class PositionalEmbedding(nn.Module):
    """Embeds words and their places, and says which words are real."""

    def __init__(self, dim: int, longest: int = 32):
        super().__init__()
        self.token_embeddings, self.position_embeddings = nn.Embedding(VOCAB, dim), nn.Embedding(longest, dim)
        nn.init.uniform_(self.token_embeddings.weight, -0.05, 0.05)
        nn.init.uniform_(self.position_embeddings.weight, -0.05, 0.05)

    def compute_mask(self, ids: Tensor) -> Tensor:
        return ids != PAD

    def forward(self, ids: Tensor) -> Tensor:
        at = torch.arange(ids.shape[1], device=ids.device)
        return self.token_embeddings(ids) + self.position_embeddings(at)


class KerasEncoder(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.attention = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.dense_proj = nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim))
        self.layernorm_1, self.layernorm_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        hidden = None if mask is None else ~mask
        y, _ = self.attention(x, x, x, key_padding_mask=hidden, need_weights=False)
        x = self.layernorm_1(x + y)
        return self.layernorm_2(x + self.dense_proj(x))


class KerasDecoder(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.attention_1 = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.attention_2 = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.dense_proj = nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim))
        self.layernorm_1, self.layernorm_2, self.layernorm_3 = (nn.LayerNorm(dim) for _ in range(3))

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None, memory_mask: Tensor | None) -> Tensor:
        future = ~causal_pairs(x.shape[1]).to(x.device)
        hidden = None if mask is None else ~mask
        y, _ = self.attention_1(x, x, x, attn_mask=future, key_padding_mask=hidden, need_weights=False)
        x = self.layernorm_1(x + y)
        hidden = None if memory_mask is None else ~memory_mask
        y, _ = self.attention_2(x, memory, memory, key_padding_mask=hidden, need_weights=False)
        x = self.layernorm_2(x + y)
        return self.layernorm_3(x + self.dense_proj(x))


class KerasTranslator(nn.Module):
    def __init__(self, dim: int = 48, heads: int = 4, *, propagate_masks: bool):
        super().__init__()
        self.propagate_masks = propagate_masks
        self.encoder_embedding, self.decoder_embedding = PositionalEmbedding(dim), PositionalEmbedding(dim)
        self.encoder = nn.ModuleList(KerasEncoder(dim, heads) for _ in range(2))
        self.decoder = nn.ModuleList(KerasDecoder(dim, heads) for _ in range(2))
        self.dense = nn.Linear(dim, VOCAB)

    def mask_of(self, embedding: PositionalEmbedding, ids: Tensor) -> Tensor | None:
        return embedding.compute_mask(ids) if self.propagate_masks else None

    def forward(self, encoder_inputs: Tensor, decoder_inputs: Tensor) -> Tensor:
        memory_mask = self.mask_of(self.encoder_embedding, encoder_inputs)
        mask = self.mask_of(self.decoder_embedding, decoder_inputs)
        memory = self.encoder_embedding(encoder_inputs)
        for layer in self.encoder:
            memory = layer(memory, memory_mask)
        x = self.decoder_embedding(decoder_inputs)
        for layer in self.decoder:
            x = layer(x, memory, mask, memory_mask)
        return self.dense(x)


def english_to_spanish(model: nn.Module, batch: Batch, *, ignore_index: int) -> Tensor:
    spanish = batch["spanish"]
    logits = model(batch["english"], spanish[:, :-1])
    return mean_token_loss(logits, spanish[:, 1:], ignore_index=ignore_index)


@report("keras-team/keras-io#1997", "encoder-decoder", "padding", "counted", "padded_loss")
def masks_made_but_not_passed(*, faulty: bool) -> Arguments:
    """Masks of padding are computed but never used: not in attention to the source, nor in the loss."""
    english, _ = padded_text((17, 10, 14, 7), seed=431)
    spanish, _ = padded_text((13, 18, 9, 11), seed=432)
    batch = {"english": english, "spanish": F.pad(spanish, (1, 0), value=BOS)}
    make = partial(KerasTranslator, propagate_masks=not faulty)
    loss = partial(english_to_spanish, ignore_index=-100 if faulty else PAD)
    return setup(make, batch, loss, undecayed_adamw, declare={"pad_id": PAD})


# --------------------------------------------------------------------------------------------------- series


def mean_and_deviation(
    patch: Tensor, *, centre_first: bool, tolerance: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """Return the mean and deviation `[B, 1, 1]` of a row's first patch `[B, P]`."""
    mean = patch.mean(1)
    if centre_first:
        variance = (patch - mean[:, None]).square().mean(1)
        deviation = variance.clamp(min=0.0).sqrt().clamp(min=tolerance)
    else:
        variance = patch.square().mean(1) - mean.square()
        deviation = variance.clamp(min=0.0).sqrt()
        deviation = torch.where(deviation < tolerance, torch.ones_like(deviation), deviation)
    return mean[:, None, None], deviation[:, None, None]


class PatchForecaster(nn.Module):
    """Predicts, after each patch of a series, the patch that follows; scaled by the first patch."""

    def __init__(self, patch: int = 8, dim: int = 48, layers: int = 3, *, centre_first: bool):
        super().__init__()
        self.patch, self.dim, self.centre_first = patch, dim, centre_first
        self.residual = nn.Linear(patch, dim)
        self.input_layer = nn.Sequential(nn.Linear(patch, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.blocks = nn.ModuleList(Block(dim, 4) for _ in range(layers))
        self.norm, self.horizon_layer = nn.LayerNorm(dim), nn.Linear(dim, patch)

    def forward(self, series: Tensor) -> tuple[Tensor, Tensor]:
        """Return predictions and their targets, both scaled."""
        patches = series.unflatten(1, (-1, self.patch))
        mean, deviation = mean_and_deviation(patches[:, 0], centre_first=self.centre_first)
        scaled = (patches - mean) / deviation
        inputs, targets = scaled[:, :-1], scaled[:, 1:]
        x = self.input_layer(inputs) + self.residual(inputs)
        x = x + waves(torch.arange(x.shape[1], device=x.device), self.dim)
        for block in self.blocks:
            x = block(x, causal=True)
        return self.horizon_layer(self.norm(x)), targets


def forecast_loss(model: nn.Module, series: Tensor) -> Tensor:
    predicted, targets = model(series)
    return F.mse_loss(predicted, targets)


@report("vincent05r/FinCast-fts#8", "series")
def deviation_lost_in_rounding(*, faulty: bool) -> Arguments:
    """The deviation is the root of a difference of squares: in quiet series nothing is left, and it is 1."""
    draw = generator(433)
    level = torch.tensor([1.08, 0.92, 1.27, 1.31, 7.1, 0.65])[:, None]
    series = level * (1 + 1e-4 * torch.randn(6, 64, generator=draw))
    make = partial(PatchForecaster, centre_first=not faulty)
    return setup(make, series, forecast_loss, decaying_adamw)
