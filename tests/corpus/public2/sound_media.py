"""Sound models of images, speech, diffusion, series, and of images with text."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from corpus.batches import BOS, PAD, VOCAB, generator, inside, padded_text, text
from corpus.case import Arguments
from corpus.models.parts import causal

from .blocks import Decoder, EncoderLayer, adamw, adamw_of, init_weights, remade, setup, sinusoids
from .case import sound

# --------------------------------------------------------------------------------------------------- images


class ScaledLayer(nn.Module):
    """A layer with small learned scales of its branches, which are skipped at random while training."""

    def __init__(self, dim: int, heads: int, skip: float):
        super().__init__()
        self.layer, self.skip = EncoderLayer(dim, heads), skip
        self.ls1, self.ls2 = nn.Parameter(torch.full((dim,), 0.1)), nn.Parameter(torch.full((dim,), 0.1))

    def kept(self, branch: Tensor) -> Tensor:
        if not self.training or self.skip == 0:
            return branch
        keep = torch.empty(len(branch), 1, 1, device=branch.device).bernoulli_(1 - self.skip)
        return branch * keep / (1 - self.skip)

    def forward(self, x: Tensor) -> Tensor:
        layer = self.layer
        x = x + self.kept(self.ls1 * layer.attend(layer.norm1(x), None))
        return x + self.kept(self.ls2 * layer.fc2(F.gelu(layer.fc1(layer.norm2(x)))))


class Registers(nn.Module):
    """A vision Transformer with a class token and registers that have no positions."""

    def __init__(self, dim: int = 48, registers: int = 3, layers: int = 3):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, dim, 4, 4)
        self.cls_token = nn.Parameter(torch.randn(1, 1, dim) * 0.02)
        self.reg_token = nn.Parameter(torch.randn(1, registers, dim) * 0.02)
        self.pos_embed = nn.Parameter(torch.randn(1, 17, dim) * 0.02)
        self.blocks = nn.ModuleList(ScaledLayer(dim, 4, 0.1 * i / (layers - 1)) for i in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(2 * dim, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch_embed(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(len(x), -1, -1), x), dim=1) + self.pos_embed
        x = torch.cat((x[:, :1], self.reg_token.expand(len(x), -1, -1), x[:, 1:]), dim=1)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        patches = x[:, 1 + self.reg_token.shape[1] :]
        return self.head(torch.cat((x[:, 0], patches.mean(1)), dim=-1))


def smoothed_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1)


def without_decay_of_tokens(model: nn.Module) -> AdamW:
    """Return AdamW that decays maps and kernels, but no token, position, bias or gain."""
    decayed = [
        p
        for n, p in model.named_parameters()
        if p.dim() > 1 and not n.endswith(("_token", "pos_embed", "table"))
    ]
    chosen = {id(p) for p in decayed}
    return adamw_of(decayed, [p for p in model.parameters() if id(p) not in chosen])


def pictures(rows: int = 8, size: int = 16, seed: int = 80) -> Tensor:
    """Return smooth images."""
    coarse = torch.randn(rows, 3, size // 4, size // 4, generator=generator(seed))
    return F.interpolate(coarse, size=size, mode="bilinear")


@sound("vision")
def registers_and_layer_scale() -> Arguments:
    """A ViT with registers, layer scale, random depth, and a head that reads the class token and the mean."""
    return setup(Registers, (pictures(), torch.arange(8)), smoothed_loss, without_decay_of_tokens)


class WindowLayer(nn.Module):
    """Attention in windows, which every other layer shifts, with a bias for each displacement (Swin)."""

    index: Tensor
    apart: Tensor

    def __init__(self, dim: int, side: int, window: int, shift: int, heads: int = 4):
        super().__init__()
        self.side, self.window, self.shift, self.heads = side, window, shift, heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.fc1, self.fc2 = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.table = nn.Parameter(torch.zeros((2 * window - 1) ** 2, heads))
        nn.init.trunc_normal_(self.table, std=0.02)
        at = torch.stack(torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")).flatten(1)
        gap = at[:, :, None] - at[:, None] + window - 1
        self.register_buffer("index", gap[0] * (2 * window - 1) + gap[1], persistent=False)
        self.register_buffer("apart", self.regions(), persistent=False)

    def windows(self, x: Tensor) -> Tensor:
        """Return `[B, windows, w * w, D]` of `[B, side, side, D]`."""
        count = self.side // self.window
        x = x.unflatten(2, (count, self.window)).unflatten(1, (count, self.window))
        return x.permute(0, 1, 3, 2, 4, 5).flatten(3, 4).flatten(1, 2)

    def joined(self, x: Tensor) -> Tensor:
        count = self.side // self.window
        x = x.unflatten(1, (count, count)).unflatten(3, (self.window, self.window))
        return x.permute(0, 1, 3, 2, 4, 5).flatten(3, 4).flatten(1, 2)

    def regions(self) -> Tensor:
        """Return which pairs of each window lie together in the image `[windows, w * w, w * w]`."""
        region = torch.zeros(1, self.side, self.side, 1)
        if self.shift:
            spans = (slice(0, -self.window), slice(-self.window, -self.shift), slice(-self.shift, None))
            for number, (rows, columns) in enumerate((a, b) for a in spans for b in spans):
                region[:, rows, columns] = number
        own = self.windows(region)[0, ..., 0]
        return own[:, :, None] == own[:, None]

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(3, 0, 1, 4, 2, 5)
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + self.table[self.index].permute(2, 0, 1)
        weights = scores.masked_fill(~self.apart[:, None], -torch.inf).softmax(-1)
        return self.proj((weights @ v).transpose(2, 3).flatten(3))

    def forward(self, x: Tensor) -> Tensor:
        grid = self.norm1(x).unflatten(1, (self.side, self.side)).roll((-self.shift, -self.shift), (1, 2))
        mixed = self.joined(self.attend(self.windows(grid))).roll((self.shift, self.shift), (1, 2))
        x = x + mixed.flatten(1, 2)
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class Windows(nn.Module):
    """Two stages of shifted windows with a merging of patches between them."""

    def __init__(self, dim: int = 24):
        super().__init__()
        self.patch, self.norm = nn.Conv2d(3, dim, 2, 2), nn.LayerNorm(dim)
        self.stage1 = nn.Sequential(WindowLayer(dim, 8, 4, 0), WindowLayer(dim, 8, 4, 2))
        self.merge_norm, self.merge = nn.LayerNorm(4 * dim), nn.Linear(4 * dim, 2 * dim, bias=False)
        self.stage2 = nn.Sequential(WindowLayer(2 * dim, 4, 4, 0), WindowLayer(2 * dim, 4, 4, 0))
        self.final_norm, self.head = nn.LayerNorm(2 * dim), nn.Linear(2 * dim, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.norm(self.patch(images).flatten(2).transpose(1, 2))
        x = self.stage1(x).unflatten(1, (4, 2, 4, 2)).permute(0, 1, 3, 2, 4, 5).flatten(3).flatten(1, 2)
        x = self.stage2(self.merge(self.merge_norm(x)))
        return self.head(self.final_norm(x).mean(1))


@sound("vision")
def shifted_windows() -> Arguments:
    """Swin: windows that shift, masks of what a shift joins, biases of displacements, merged patches."""
    return remade(Windows, (pictures(seed=81), torch.arange(8)), smoothed_loss, without_decay_of_tokens)


class Predictive(nn.Module):
    """A student that predicts a slow teacher's states of hidden patches (I-JEPA)."""

    def __init__(self, dim: int = 48, hidden: tuple[int, ...] = (2, 5, 6, 11, 12)):
        super().__init__()
        self.hidden = list(hidden)
        self.rest = [place for place in range(16) if place not in hidden]
        self.context = PatchEncoder(dim)
        self.target = copy.deepcopy(self.context).requires_grad_(False)
        self.mask_token = nn.Parameter(torch.randn(1, 1, dim) * 0.02)
        self.predictor = nn.ModuleList(EncoderLayer(dim, 4) for _ in range(2))
        self.out = nn.Linear(dim, dim)

    def forward(self, patches: Tensor) -> tuple[Tensor, Tensor]:
        """Return predicted and wanted states `[B, H, D]` of the hidden patches."""
        with torch.no_grad():
            wanted = F.layer_norm(self.target(patches, None), (patches.shape[-1],))[:, self.hidden]
        seen = self.context(patches, self.rest)
        place = sinusoids(torch.arange(patches.shape[1], device=patches.device), patches.shape[-1])
        asked = (self.mask_token + place[self.hidden]).expand(len(seen), -1, -1)
        x = torch.cat((seen + place[self.rest], asked), dim=1)
        for layer in self.predictor:
            x = layer(x)
        return self.out(x[:, -len(self.hidden) :]), wanted

    @torch.no_grad()
    def follow(self, momentum: float = 0.99) -> None:
        for slow, fast in zip(self.target.parameters(), self.context.parameters(), strict=True):
            slow.lerp_(fast, 1 - momentum)


class PatchEncoder(nn.Module):
    """An encoder of those patches that are kept, at fixed positions."""

    def __init__(self, dim: int):
        super().__init__()
        self.embed = nn.Linear(48, dim)
        self.layers = nn.ModuleList(EncoderLayer(dim, 4) for _ in range(2))
        self.norm = nn.LayerNorm(dim)

    def forward(self, patches: Tensor, kept: list[int] | None) -> Tensor:
        x = self.embed(patches)
        x = x + sinusoids(torch.arange(x.shape[1], device=x.device), x.shape[-1])
        if kept is not None:
            x = x[:, kept]
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def predictive_loss(model: nn.Module, patches: Tensor) -> Tensor:
    return F.smooth_l1_loss(*model(patches))


def predictive_step(
    model: Any, batch: Tensor, optimizer: Optimizer, scheduler: LRScheduler | None = None
) -> Tensor:
    model.train()
    optimizer.zero_grad()
    loss = predictive_loss(model, batch)
    loss.backward()
    optimizer.step()
    model.follow()
    return loss.detach()


@sound("vision")
def predicted_states() -> Arguments:
    """I-JEPA: states of hidden patches by a teacher that is the student's moving average."""
    patches = F.unfold(pictures(seed=82), 4, stride=4).transpose(1, 2)
    return setup(Predictive, patches, predictive_loss, adamw, step=predictive_step)


# ------------------------------------------------------------------------------------------------ diffusion


class JointBlock(nn.Module):
    """Joint attention of text and image, each with maps and modulations of its own (Stable Diffusion 3)."""

    def __init__(self, dim: int, heads: int, *, last: bool):
        super().__init__()
        self.heads, self.last = heads, last
        self.image, self.words = Stream(dim, heads), Stream(dim, heads, reads_alone=last)

    def forward(self, image: Tensor, words: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        first, second = self.image.before(image, condition), self.words.before(words, condition)
        k, v = (torch.cat((first[part], second[part]), dim=2) for part in ("k", "v"))
        q = first["q"] if self.last else torch.cat((first["q"], second["q"]), dim=2)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        count = image.shape[1]
        image = self.image.after(image, y[:, :count], condition)
        return image, words if self.last else self.words.after(words, y[:, count:], condition)


class Stream(nn.Module):
    """One side of a joint block; the last block only reads the words."""

    def __init__(self, dim: int, heads: int, *, reads_alone: bool = False):
        super().__init__()
        self.heads = heads
        self.modulate = nn.Linear(dim, (2 if reads_alone else 6) * dim)
        nn.init.zeros_(self.modulate.weight)
        nn.init.zeros_(self.modulate.bias)
        self.norm1 = nn.LayerNorm(dim, elementwise_affine=False)
        self.kv, self.k_norm = nn.Linear(dim, 2 * dim), nn.RMSNorm(dim // heads)
        self.reads_alone = reads_alone
        if not reads_alone:
            self.q, self.q_norm = nn.Linear(dim, dim), nn.RMSNorm(dim // heads)
            self.out, self.norm2 = nn.Linear(dim, dim), nn.LayerNorm(dim, elementwise_affine=False)
            self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU("tanh"), nn.Linear(2 * dim, dim))

    def parts(self, condition: Tensor) -> tuple[Tensor, ...]:
        dim = condition.shape[-1]
        return self.modulate(F.silu(condition))[:, None].split(dim, dim=-1)

    def before(self, x: Tensor, condition: Tensor) -> dict[str, Tensor]:
        """Return the keys and values of this side, and its queries where it is written to."""
        shift, scale = self.parts(condition)[:2]
        y = self.norm1(x) * (1 + scale) + shift
        k, v = self.kv(y).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        made = {"k": self.k_norm(k), "v": v}
        if not self.reads_alone:
            made["q"] = self.q_norm(self.q(y).unflatten(-1, (self.heads, -1)).transpose(1, 2))
        return made

    def after(self, x: Tensor, mixed: Tensor, condition: Tensor) -> Tensor:
        _, _, gate, shift, scale, second = self.parts(condition)
        x = x + gate * self.out(mixed)
        return x + second * self.mlp(self.norm2(x) * (1 + scale) + shift)


class JointDiffusion(nn.Module):
    def __init__(self, dim: int = 32, layers: int = 2, channels: int = 4):
        super().__init__()
        self.patch = nn.Linear(4 * channels, dim)
        self.words = nn.Embedding(VOCAB, dim)
        self.pooled = nn.Linear(dim, dim)
        self.time = nn.Sequential(nn.Linear(32, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.blocks = nn.ModuleList(JointBlock(dim, 4, last=i == layers - 1) for i in range(layers))
        self.final, self.modulate = nn.LayerNorm(dim, elementwise_affine=False), nn.Linear(dim, 2 * dim)
        self.out = nn.Linear(dim, 4 * channels)
        for part in (self.modulate, self.out):
            nn.init.zeros_(part.weight)
            nn.init.zeros_(part.bias)

    def forward(self, patches: Tensor, t: Tensor, ids: Tensor) -> Tensor:
        place = sinusoids(torch.arange(patches.shape[1], device=patches.device), self.words.embedding_dim)
        image, words = self.patch(patches) + place, self.words(ids)
        condition = self.time(sinusoids(1000 * t, 32)) + self.pooled(words.mean(1))
        for block in self.blocks:
            image, words = block(image, words, condition)
        shift, scale = self.modulate(F.silu(condition))[:, None].chunk(2, -1)
        return self.out(self.final(image) * (1 + scale) + shift)


def rectified_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the error of velocities at logit-normal times; a tenth of the captions is dropped."""
    patches, ids = batch
    noise, t = torch.randn_like(patches), torch.randn(len(patches)).sigmoid()
    at = t[:, None, None]
    given = torch.where(torch.rand(len(ids), 1) < 0.1, torch.full_like(ids, PAD), ids)
    predicted = model((1 - at) * patches + at * noise, t, given)
    return F.mse_loss(predicted, noise - patches)


@sound("diffusion")
def joint_attention_flow() -> Arguments:
    """A rectified flow by joint blocks of text and image, whose last block does not write to the text."""
    patches = torch.randn(8, 16, 16, generator=generator(83))
    return setup(JointDiffusion, (patches, text(8, 6, seed=83)), rectified_loss, partial(adamw, lr=2e-3))


class Preconditioned(nn.Module):
    """A denoiser whose inputs and outputs are scaled by the level of noise (EDM)."""

    def __init__(self, dim: int = 48, data: float = 0.5):
        super().__init__()
        self.data = data
        self.embed, self.level = nn.Linear(12, dim), nn.Linear(32, dim)
        self.register_buffer("rates", torch.randn(16) * 2)
        self.blocks = nn.ModuleList(EncoderLayer(dim, 4) for _ in range(3))
        self.norm, self.out = nn.LayerNorm(dim), nn.Linear(dim, 12)

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        at = sigma[:, None, None]
        size = (at.square() + self.data**2).sqrt()
        angles = 2 * math.pi * (sigma.log() / 4)[:, None] * self.rates
        level = self.level(torch.cat((angles.sin(), angles.cos()), dim=-1))
        h = self.embed(x / size) + sinusoids(torch.arange(x.shape[1], device=x.device), level.shape[-1])
        h = h + level[:, None]
        for block in self.blocks:
            h = block(h)
        return self.data**2 / size.square() * x + at * self.data / size * self.out(self.norm(h))


def denoising_loss(model: Any, clean: Tensor) -> Tensor:
    sigma = torch.exp(torch.randn(len(clean)) * 1.2 - 1.2)
    weights = (sigma.square() + model.data**2) / (sigma * model.data).square()
    denoised = model(clean + sigma[:, None, None] * torch.randn_like(clean), sigma)
    return (weights[:, None, None] * (denoised - clean).square()).mean()


@sound("diffusion")
def preconditioned_denoiser() -> Arguments:
    """EDM: inputs, outputs and the loss are scaled by the level of noise."""
    clean = F.unfold(pictures(8, 8, seed=84), 2, stride=2).transpose(1, 2) * 0.5
    return setup(Preconditioned, clean, denoising_loss, partial(adamw, lr=2e-3))


# --------------------------------------------------------------------------------------------------- speech


class Listener(nn.Module):
    """An encoder of spectrograms behind two convolutions, and a decoder of words (Whisper)."""

    def __init__(self, bands: int = 16, dim: int = 48):
        super().__init__()
        self.conv1, self.conv2 = (
            nn.Conv1d(bands, dim, 3, padding=1),
            nn.Conv1d(dim, dim, 3, stride=2, padding=1),
        )
        self.register_buffer("place", sinusoids(torch.arange(40), dim), persistent=False)
        self.encoder = nn.ModuleList(EncoderLayer(dim, 4) for _ in range(2))
        self.encoder_norm = nn.LayerNorm(dim)
        self.tokens, self.positions = nn.Embedding(VOCAB, dim), nn.Parameter(torch.randn(32, dim) * 0.01)
        layer = nn.TransformerDecoderLayer(dim, 4, 2 * dim, 0.0, F.gelu, batch_first=True, norm_first=True)
        self.decoder = nn.TransformerDecoder(layer, 2, nn.LayerNorm(dim))
        self.tokens.apply(init_weights)

    def forward(self, sound_: Tensor, ids: Tensor) -> Tensor:
        x = F.gelu(self.conv2(F.gelu(self.conv1(sound_)))).transpose(1, 2)
        x = x + self.place[: x.shape[1]]
        for layer in self.encoder:
            x = layer(x)
        h = self.tokens(ids) + self.positions[: ids.shape[1]]
        later = ~causal(ids.shape[1], ids.device)
        return (
            self.decoder(h, self.encoder_norm(x), tgt_mask=later, tgt_is_causal=True) @ self.tokens.weight.T
        )


def transcript_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    ids = batch["ids"]
    logits = model(batch["sound"], ids[:, :-1])
    return F.cross_entropy(logits.transpose(1, 2), ids[:, 1:].masked_fill(ids[:, 1:] == PAD, -100))


@sound("speech")
def transcribed_spectrograms() -> Arguments:
    """Whisper: convolutions with a stride, fixed positions of frames, a decoder with a tied head."""
    ids, _ = padded_text((14, 9, 12, 11), seed=85)
    ids = F.pad(ids, (1, 0), value=BOS)
    batch = {"sound": torch.randn(4, 16, 60, generator=generator(85)), "ids": ids}
    return setup(Listener, batch, transcript_loss, declare={"pad_id": PAD, "tied": True})


class ConvolutionModule(nn.Module):
    """The convolution of a Conformer block, which sees no padding."""

    def __init__(self, dim: int, width: int = 7):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.expand, self.project = nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)
        self.depthwise = nn.Conv1d(dim, dim, width, padding=width // 2, groups=dim)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        x = F.glu(self.expand(self.norm(x)), -1) * real[..., None]
        x = self.depthwise(x.transpose(1, 2)).transpose(1, 2)
        return self.project(F.silu(self.inner(x)))


class ConformerBlock(nn.Module):
    def __init__(self, dim: int, heads: int = 4):
        super().__init__()
        self.ff1, self.ff2 = self.feed_forward(dim), self.feed_forward(dim)
        self.attn_norm = nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.conv, self.norm = ConvolutionModule(dim), nn.LayerNorm(dim)

    def feed_forward(self, dim: int) -> nn.Module:
        return nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        x = x + 0.5 * self.ff1(x)
        y = self.attn_norm(x)
        x = x + self.attn(y, y, y, key_padding_mask=~real, need_weights=False)[0]
        x = x + self.conv(x, real)
        return self.norm(x + 0.5 * self.ff2(x))


class Conformer(nn.Module):
    """Conformer blocks behind a convolution that halves the frames, with a head for CTC."""

    def __init__(self, bands: int = 16, dim: int = 32, classes: int = 20):
        super().__init__()
        self.subsample = nn.Conv1d(bands, dim, 2, stride=2)
        self.blocks = nn.ModuleList(ConformerBlock(dim) for _ in range(2))
        self.head = nn.Linear(dim, classes)

    def forward(self, frames: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probabilities `[B, T / 2, C]` and the lengths of rows."""
        lengths = lengths // 2
        x = self.subsample(frames.transpose(1, 2)).transpose(1, 2)
        real = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
        x = x + sinusoids(torch.arange(x.shape[1], device=x.device), x.shape[-1])
        for block in self.blocks:
            x = block(x, real)
        return self.head(x).log_softmax(-1), lengths


def alignment_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean CTC loss of a token."""
    logps, lengths = model(batch["frames"], batch["lengths"])
    wide = batch["target_lengths"]
    losses = F.ctc_loss(
        logps.transpose(0, 1), batch["targets"], lengths, wide, reduction="none", zero_infinity=True
    )
    return losses.sum() / wide.sum()


@sound("speech")
def aligned_frames() -> Arguments:
    """A Conformer with CTC over rows of several lengths."""
    draw = generator(86)
    lengths = torch.tensor([56, 40, 48, 32])
    real = inside(lengths.tolist(), 56)
    targets = torch.randint(1, 20, (4, 9), generator=draw)
    wide = torch.tensor([9, 6, 7, 5])
    batch = {
        "frames": torch.randn(4, 56, 16, generator=draw) * real[..., None],
        "lengths": lengths,
        "targets": targets.masked_fill(~inside(wide.tolist(), 9), 0),
        "target_lengths": wide,
    }
    return setup(Conformer, batch, alignment_loss)


# ------------------------------------------------------------------------------------------ images and text


class PrefixReader(nn.Module):
    """A decoder that sees the image and the question both ways, and the answer causally (PaliGemma)."""

    def __init__(self, dim: int = 48):
        super().__init__()
        self.patch, self.place = nn.Conv2d(3, 32, 4, 4), nn.Parameter(torch.randn(1, 16, 32) * 0.02)
        self.vision = nn.ModuleList(EncoderLayer(32, 4) for _ in range(1))
        self.vision_norm, self.projector = nn.LayerNorm(32), nn.Linear(32, dim)
        self.language = Decoder(dim)

    def forward(self, images: Tensor, ids: Tensor, prefix: Tensor) -> Tensor:
        """Return the logits of words; ``prefix`` `[B, T]` marks those of the question."""
        seen = self.patch(images).flatten(2).transpose(1, 2) + self.place
        for layer in self.vision:
            seen = layer(seen)
        seen = self.projector(self.vision_norm(seen))
        x = torch.cat((seen, self.language.embed_tokens(ids)), dim=1)
        both_ways = F.pad(prefix, (seen.shape[1], 0), value=True)
        pairs = causal(x.shape[1], x.device) | (both_ways[:, :, None] & both_ways[:, None])
        return self.language.lm_head(self.language.run(x, pairs[:, None])[:, seen.shape[1] :])


def answer_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the loss of the words after the question."""
    logits = model(batch["images"], batch["ids"], batch["prefix"])
    labels = batch["ids"].masked_fill(batch["prefix"], -100)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


@sound("images and text")
def question_both_ways() -> Arguments:
    """A prefix of image and question that sees itself both ways, and a causal answer."""
    ids = text(4, 16, seed=87)
    prefix = torch.arange(16) < torch.tensor([5, 4, 6, 5])[:, None]
    batch = {"images": pictures(4, seed=87), "ids": ids, "prefix": prefix}
    return setup(PrefixReader, batch, answer_loss)


# --------------------------------------------------------------------------------------------------- series


class Forecaster(nn.Module):
    """Patches of each channel by itself, normalised by the past, forecast by one head (PatchTST)."""

    def __init__(self, past: int = 48, future: int = 12, patch: int = 8, dim: int = 32):
        super().__init__()
        self.patch = patch
        count = (past - patch) // (patch // 2) + 1
        self.embed, self.place = nn.Linear(patch, dim), nn.Parameter(torch.randn(count, dim) * 0.02)
        self.layers = nn.ModuleList(EncoderLayer(dim, 4) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(count * dim, future)
        self.gain, self.bias = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(3))

    def forward(self, series: Tensor) -> Tensor:
        mean, deviation = (
            series.mean(1, keepdim=True),
            (series.var(1, keepdim=True, correction=0) + 1e-5).sqrt(),
        )
        x = ((series - mean) / deviation * self.gain + self.bias).transpose(1, 2)
        x = self.embed(x.unfold(-1, self.patch, self.patch // 2).flatten(0, 1)) + self.place
        for layer in self.layers:
            x = layer(x)
        y = self.head(self.norm(x).flatten(1)).unflatten(0, (len(series), -1)).transpose(1, 2)
        return (y - self.bias) / self.gain * deviation + mean


def forecast_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


@sound("series")
def forecast_of_patches() -> Arguments:
    """PatchTST: overlapping patches of single channels, with a reversible norm."""
    draw = generator(88)
    time = torch.arange(60)[None, :, None] / 6
    phase = torch.rand(6, 1, 3, generator=draw) * 6
    series = torch.sin(time * (1 + torch.arange(3) / 2) + phase) + 0.1 * torch.randn(6, 60, 3, generator=draw)
    return remade(Forecaster, (series[:, :48], series[:, 48:]), forecast_loss)
