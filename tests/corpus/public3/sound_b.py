"""Sound setups of today's kinds, whose choices differ from those of the second list."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW

from corpus.batches import BOS, PAD, VOCAB, generator, inside, padded_text, text, tokens
from corpus.case import Arguments
from corpus.public2.blocks import Decoder, GatedMLP, RMSNorm, remade, setup, sinusoids

from .blocks_b import GPT, Block, configure_adamw, gathered_logps, gpt2_init, plain_adamw
from .case import sound

# --------------------------------------------------------------------------------------------------- vision


def smooth_images(rows: int, side: int, seed: int) -> Tensor:
    coarse = torch.randn(rows, 3, side // 4, side // 4, generator=generator(seed))
    return F.interpolate(coarse, size=side, mode="bilinear")


def axial_angles(side: int, width: int, base: float = 100.0) -> tuple[Tensor, Tensor]:
    """Return cosines and sines `[side * side, width]`: half of the waves follow rows, half columns."""
    at = (torch.arange(side) + 0.5) / side * 2 - 1
    rows, columns = torch.meshgrid(at, at, indexing="ij")
    waves = math.pi / base ** (torch.arange(width // 4) / (width // 4))
    angles = torch.stack((rows.flatten(), columns.flatten()), dim=1)[:, :, None] * waves
    angles = angles.flatten(1).repeat(1, 2)
    return angles.cos(), angles.sin()


class RotatedViTBlock(nn.Module):
    """A block with normed queries and keys, of which those of patches are rotated by rows and columns."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.q_norm, self.k_norm = nn.RMSNorm(dim // heads), nn.RMSNorm(dim // heads)
        self.mlp = GatedMLP(dim)

    @staticmethod
    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        patches, registers = x.split((len(cos), x.shape[2] - len(cos)), dim=2)
        first, second = patches.chunk(2, dim=-1)
        patches = patches * cos + torch.cat((-second, first), dim=-1) * sin
        return torch.cat((patches, registers), dim=2)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = self.rotate(self.q_norm(q), cos, sin), self.rotate(self.k_norm(k), cos, sin)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class RotatedViT(nn.Module):
    """A vision Transformer whose registers follow the patches, read by one learned query."""

    cos: Tensor
    sin: Tensor

    def __init__(self, dim: int = 64, heads: int = 4, layers: int = 2, registers: int = 4):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, dim, 4, 4)
        self.registers = nn.Parameter(0.02 * torch.randn(registers, dim))
        cos, sin = axial_angles(4, dim // heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.blocks = nn.ModuleList(RotatedViTBlock(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.query = nn.Parameter(0.02 * torch.randn(1, 1, dim))
        self.pool = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.head = nn.Linear(dim, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch_embed(images).flatten(2).transpose(1, 2)
        x = torch.cat((x, self.registers.expand(len(x), -1, -1)), dim=1)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        patches = self.norm(x)[:, : len(self.cos)]
        pooled, _ = self.pool(self.query.expand(len(x), -1, -1), patches, patches, need_weights=False)
        return self.head(pooled[:, 0])


def mixed_label_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the cross-entropy with labels that are shares of two classes (mixup)."""
    return F.cross_entropy(model(batch[0]), batch[1])


@sound("vision Transformers")
def registers_and_axial_rotation() -> Arguments:
    """A ViT with two-dimensional rotary positions, registers behind the patches, and a pooling query."""
    images = smooth_images(8, 16, 131)
    labels = F.one_hot(torch.arange(8), 10).float()
    share = 0.7
    batch = (share * images + (1 - share) * images.flip(0), share * labels + (1 - share) * labels.flip(0))
    return remade(RotatedViT, batch, mixed_label_loss, configure_adamw)


class MaskedAutoencoder(nn.Module):
    """An encoder of a quarter of the patches and a small decoder of all, with fixed positions (MAE)."""

    place: Tensor
    decoder_place: Tensor

    def __init__(self, dim: int = 48, small: int = 32, pixels: int = 48, patches: int = 16):
        super().__init__()
        self.embed = nn.Linear(pixels, dim)
        self.register_buffer("place", sinusoids(torch.arange(patches), dim))
        self.register_buffer("decoder_place", sinusoids(torch.arange(patches), small))
        self.encoder = nn.ModuleList(Block(dim, 4, causal=False) for _ in range(2))
        self.norm, self.bridge = nn.LayerNorm(dim), nn.Linear(dim, small)
        self.mask_token = nn.Parameter(0.02 * torch.randn(1, 1, small))
        self.decoder = nn.ModuleList(Block(small, 4, causal=False) for _ in range(1))
        self.decoder_norm, self.pixels = nn.LayerNorm(small), nn.Linear(small, pixels)

    def forward(self, patches: Tensor, kept: int = 4) -> tuple[Tensor, Tensor]:
        """Return predicted pixels of all patches, and which were hidden."""
        count = patches.shape[1]
        order = torch.rand(patches.shape[:2], device=patches.device).argsort(dim=1)
        back, visible = order.argsort(dim=1), order[:, :kept, None]
        x = self.embed(patches) + self.place
        x = x.gather(1, visible.expand(-1, -1, x.shape[-1]))
        for block in self.encoder:
            x = block(x)
        x = self.bridge(self.norm(x))
        x = torch.cat((x, self.mask_token.expand(len(x), count - kept, -1)), dim=1)
        x = x.gather(1, back[..., None].expand(-1, -1, x.shape[-1])) + self.decoder_place
        for block in self.decoder:
            x = block(x)
        return self.pixels(self.decoder_norm(x)), back >= kept


def hidden_pixel_loss(model: nn.Module, images: Tensor) -> Tensor:
    """Return the error of normed pixels in hidden patches."""
    patches = F.unfold(images, 4, stride=4).transpose(1, 2)
    predicted, hidden = model(patches)
    mean, var = patches.mean(-1, keepdim=True), patches.var(-1, keepdim=True)
    errors = (predicted - (patches - mean) / (var + 1e-6).sqrt()).square().mean(-1)
    return (errors * hidden).sum() / hidden.sum()


@sound("masked images")
def hidden_pixels() -> Arguments:
    """MAE: three quarters of the patches are hidden at random, and their normed pixels predicted."""
    return setup(MaskedAutoencoder, smooth_images(8, 16, 132), hidden_pixel_loss, configure_adamw)


# ---------------------------------------------------------------------------------------- self-distillation


class CropViT(nn.Module):
    """A vision Transformer of crops of two sizes, whose positions are interpolated for the small ones."""

    def __init__(self, dim: int = 48, side: int = 4, drop_path: float = 0.1):
        super().__init__()
        self.side, self.drop_path = side, drop_path
        self.patch_embed = nn.Conv2d(3, dim, 4, 4)
        self.cls_token = nn.Parameter(0.02 * torch.randn(1, 1, dim))
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, 1 + side * side, dim))
        self.blocks = nn.ModuleList(Block(dim, 4, causal=False) for _ in range(2))
        self.norm = nn.LayerNorm(dim)

    def positions(self, side: int) -> Tensor:
        if side == self.side:
            return self.pos_embed
        grid = self.pos_embed[:, 1:].transpose(1, 2).unflatten(2, (self.side, self.side))
        grid = F.interpolate(grid, size=side, mode="bicubic", antialias=True)
        return torch.cat((self.pos_embed[:, :1], grid.flatten(2).transpose(1, 2)), dim=1)

    def skipped(self, x: Tensor, y: Tensor) -> Tensor:
        """Return a block's output `y`, or its input for rows that skip it while training."""
        if not self.training:
            return y
        kept = torch.rand(len(x), 1, 1, device=x.device) >= self.drop_path
        return x + (y - x) * kept / (1 - self.drop_path)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch_embed(images)
        side = x.shape[-1]
        x = x.flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(len(x), -1, -1), x), dim=1) + self.positions(side)
        for block in self.blocks:
            x = self.skipped(x, block(x))
        return self.norm(x)[:, 0]


class PrototypeHead(nn.Module):
    """A bottleneck of length one that is compared with prototypes of length one."""

    def __init__(self, dim: int, prototypes: int = 48):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(dim, 64), nn.GELU(), nn.Linear(64, 24))
        self.prototypes = nn.Parameter(torch.randn(prototypes, 24))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.mlp(x), dim=-1) @ F.normalize(self.prototypes, dim=-1).T


class Dino(nn.Module):
    """A student and its slow teacher, whose outputs are centred by a running mean."""

    center: Tensor
    updates: Tensor

    def __init__(self, prototypes: int = 48):
        super().__init__()
        self.student = nn.Sequential(CropViT(), PrototypeHead(48, prototypes))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.register_buffer("center", torch.zeros(prototypes))
        self.register_buffer("updates", torch.zeros((), dtype=torch.long))
        self.teacher.eval()

    def train(self, mode: bool = True) -> Dino:  # noqa: FBT001, FBT002
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, large: Tensor, small: Tensor) -> tuple[Tensor, Tensor]:
        """Return the student's outputs of all crops, and the teacher's of the large ones."""
        with torch.no_grad():
            wanted = self.teacher(large)
        return torch.cat((self.student(large), self.student(small))), wanted

    @torch.no_grad()
    def follow(self, large: Tensor, planned: int = 100, first: float = 0.99) -> None:
        """Move the teacher and the centre, once a step; the momentum rises to 1."""
        share = min(1.0, self.updates.item() / planned)
        momentum = 1 - (1 - first) * (math.cos(math.pi * share) + 1) / 2
        self.center.lerp_(self.teacher(large).mean(0), 0.1)
        for slow, fast in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            slow.lerp_(fast, 1 - momentum)
        self.updates += 1


def dino_loss(model: Dino, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy of each crop's output with that of each other large crop."""
    rows = len(batch["large"]) // 2
    student, teacher = model(batch["large"], batch["small"])
    wanted = ((teacher - model.center) / 0.05).softmax(-1).split(rows)
    given = (student / 0.1).log_softmax(-1).split(rows)
    terms = [-(w * g).sum(-1).mean() for i, w in enumerate(wanted) for j, g in enumerate(given) if i != j]
    return torch.stack(terms).mean()


def dino_step(model: Any, batch: dict[str, Tensor], optimizer: AdamW, scheduler: Any = None) -> Tensor:
    model.train()
    optimizer.zero_grad()
    loss = dino_loss(model, batch)
    loss.backward()
    nn.utils.clip_grad_norm_(model.student.parameters(), 1.0)
    optimizer.step()
    if scheduler is not None:
        scheduler.step()
    model.follow(batch["large"])
    return loss.detach()


@sound("self-distillation")
def crops_and_centred_teacher() -> Arguments:
    """DINO: large and small crops, a slow teacher in evaluation mode, and a centre that moves once a step."""
    large = smooth_images(6, 16, 133)
    draw = generator(133)
    large = torch.cat((large, large.flip(-1))) + 0.1 * torch.randn(12, 3, 16, 16, generator=draw)
    small = torch.cat((large[:6, :, :8, :8], large[:6, :, 4:12, 8:]))
    declare = {"frozen": ("teacher.*",), "max_grad_norm": 1.0}
    batch = {"large": large, "small": small}
    return remade(Dino, batch, dino_loss, configure_adamw, step=dino_step, declare=declare)


# ------------------------------------------------------------------------------------------------ diffusion


class ClassTable(nn.Module):
    """Embeddings of classes, of which a share is dropped while training so that guidance is possible."""

    def __init__(self, classes: int, dim: int, drop: float = 0.1):
        super().__init__()
        self.table, self.none, self.drop = nn.Embedding(classes + 1, dim), classes, drop
        nn.init.normal_(self.table.weight, std=0.02)

    def forward(self, labels: Tensor) -> Tensor:
        if self.training:
            dropped = torch.rand(labels.shape, device=labels.device) < self.drop
            labels = labels.masked_fill(dropped, self.none)
        return self.table(labels)


class DiTBlock(nn.Module):
    """A block that the time and the class move, scale and gate, and that begins as nothing."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.norm2 = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.q_norm, self.k_norm = nn.RMSNorm(dim // heads), nn.RMSNorm(dim // heads)
        self.mlp = nn.Sequential(
            nn.Linear(dim, 4 * dim), nn.GELU(approximate="tanh"), nn.Linear(4 * dim, dim)
        )
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))
        nn.init.zeros_(self.modulation[1].weight)
        nn.init.zeros_(self.modulation[1].bias)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(c)[:, None].chunk(6, dim=-1)
        h = self.norm1(x) * (1 + scale1) + shift1
        q, k, v = self.qkv(h).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v)
        x = x + gate1 * self.proj(y.transpose(1, 2).flatten(2))
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


class DiT(nn.Module):
    place: Tensor

    def __init__(self, channels: int = 4, side: int = 8, dim: int = 48, classes: int = 10):
        super().__init__()
        self.patch = nn.Conv2d(channels, dim, 2, 2)
        self.register_buffer("place", sinusoids(torch.arange((side // 2) ** 2), dim), persistent=False)
        self.time = nn.Sequential(nn.Linear(64, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.label = ClassTable(classes, dim)
        self.blocks = nn.ModuleList(DiTBlock(dim, 4) for _ in range(2))
        self.norm = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 2 * dim))
        self.out = nn.Linear(dim, 4 * channels)
        for linear in (self.modulation[1], self.out):
            nn.init.zeros_(linear.weight)
            nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        c = self.time(sinusoids(1000 * t, 64)) + self.label(labels)
        h = self.patch(x)
        grid = h.shape[-2:]
        h = h.flatten(2).transpose(1, 2) + self.place
        for block in self.blocks:
            h = block(h, c)
        shift, scale = self.modulation(c)[:, None].chunk(2, dim=-1)
        h = self.out(self.norm(h) * (1 + scale) + shift).transpose(1, 2).unflatten(2, grid)
        return F.pixel_shuffle(h, 2)


def logit_normal_flow_loss(model: nn.Module, batch: tuple[Tensor, Tensor], shift: float = 3.0) -> Tensor:
    """Return the error of velocities at times that are mostly in the middle, moved towards noise."""
    latents, labels = batch
    latents = (latents - 0.1) * 1.5  # the mean and the scale of the autoencoder's latents
    noise = torch.randn_like(latents)
    u = torch.randn(len(latents), device=latents.device).sigmoid()
    t = shift * u / (1 + (shift - 1) * u)
    at = t[:, None, None, None]
    predicted = model((1 - at) * latents + at * noise, t, labels)
    return F.mse_loss(predicted, noise - latents)


@sound("diffusion")
def latent_flow() -> Arguments:
    """A flow matching DiT with AdaLN-zero, logit-normal times that are shifted, and dropped classes."""
    latents = torch.randn(8, 4, 8, 8, generator=generator(134)) * 0.7 + 0.1
    return setup(DiT, (latents, torch.arange(8)), logit_normal_flow_loss, plain_adamw)


# --------------------------------------------------------------------------------------------------- speech


class ConvolvedBlock(nn.Module):
    """Half a feed-forward, attention, a gated convolution, and the other half (Conformer)."""

    def __init__(self, dim: int, heads: int, kernel: int = 7):
        super().__init__()
        self.half1, self.half2 = self.feed_forward(dim), self.feed_forward(dim)
        self.attn_norm = nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.conv_norm, self.widen = nn.LayerNorm(dim), nn.Linear(dim, 2 * dim)
        self.depthwise = nn.Conv1d(dim, dim, kernel, padding=kernel // 2, groups=dim)
        self.inner_norm, self.narrow = nn.LayerNorm(dim), nn.Linear(dim, dim)
        self.out_norm = nn.LayerNorm(dim)

    @staticmethod
    def feed_forward(dim: int) -> nn.Sequential:
        return nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, dim))

    def convolve(self, x: Tensor, real: Tensor) -> Tensor:
        h = F.glu(self.widen(self.conv_norm(x)), dim=-1) * real[..., None]
        h = self.depthwise(h.transpose(1, 2)).transpose(1, 2)
        return self.narrow(F.silu(self.inner_norm(h)))

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        x = x + 0.5 * self.half1(x)
        h = self.attn_norm(x)
        x = x + self.attn(h, h, h, key_padding_mask=~real, need_weights=False)[0]
        x = x + self.convolve(x, real)
        return self.out_norm(x + 0.5 * self.half2(x))


class RandomProjectionQuantizer(nn.Module):
    """A drawn projection and drawn codes, never trained, that give each stack of frames a number."""

    projection: Tensor
    codes: Tensor

    def __init__(self, width: int, codes: int = 32, size: int = 8):
        super().__init__()
        projection = nn.init.xavier_uniform_(torch.empty(width, size))
        self.register_buffer("projection", projection)
        self.register_buffer("codes", F.normalize(torch.randn(codes, size), dim=-1))

    @torch.no_grad()
    def forward(self, stacked: Tensor) -> Tensor:
        return (F.normalize(stacked @ self.projection, dim=-1) @ self.codes.T).argmax(-1)


class BestRQ(nn.Module):
    """A Conformer that names the codes of hidden frames, four frames at a time."""

    def __init__(self, bands: int = 16, dim: int = 40):
        super().__init__()
        self.subsample1 = nn.Conv1d(bands, dim, 3, stride=2, padding=1)
        self.subsample2 = nn.Conv1d(dim, dim, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(ConvolvedBlock(dim, 4) for _ in range(2))
        self.quantizer = RandomProjectionQuantizer(4 * bands)
        self.classify = nn.Linear(dim, 32)

    def forward(self, frames: Tensor, real: Tensor) -> Tensor:
        """Return the logits of codes for every fourth frame."""
        x = F.silu(self.subsample1(frames.transpose(1, 2))) * real[:, None, ::2]
        x = (F.silu(self.subsample2(x)) * real[:, None, ::4]).transpose(1, 2)
        x = x + sinusoids(torch.arange(x.shape[1], device=x.device), x.shape[2])
        for block in self.blocks:
            x = block(x, real[:, ::4])
        return self.classify(x)


def code_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the cross-entropy of codes in hidden stacks; what is hidden is replaced by noise."""
    frames, real, hidden = batch["frames"], batch["real"], batch["hidden"]
    codes = model.quantizer(frames.unflatten(1, (-1, 4)).flatten(2))
    noise = 0.1 * torch.randn_like(frames)
    given = torch.where(hidden.repeat_interleave(4, 1)[..., None], noise, frames)
    logits = model(given, real)
    return F.cross_entropy(logits[hidden], codes[hidden])


@sound("speech")
def random_projection_targets() -> Arguments:
    """BEST-RQ: codes of a drawn, fixed quantizer for spans of frames that are replaced by noise."""
    draw = generator(135)
    lengths = (64, 48, 56, 40)
    real = inside(lengths, 64)
    frames = torch.randn(4, 64, 16, generator=draw).cumsum(1) * 0.3
    frames = (frames - frames.mean(1, keepdim=True)) / frames.std(1, keepdim=True) * real[..., None]
    hidden = torch.rand(4, 16, generator=draw) < 0.2
    hidden = (hidden | hidden.roll(1, 1)) & real[:, ::4]
    batch = {"frames": frames, "real": real, "hidden": hidden}
    return setup(BestRQ, batch, code_loss, configure_adamw)


# ------------------------------------------------------------------------------------------- pairs and text


class PooledTower(nn.Module):
    """A bidirectional encoder that a learned query and a small feed-forward summarise (SigLIP)."""

    def __init__(self, dim: int, length: int, layers: int = 2):
        super().__init__()
        self.pos = nn.Parameter(torch.randn(1, length, dim) * dim**-0.5)
        self.blocks = nn.ModuleList(Block(dim, 4, causal=False) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.probe = nn.Parameter(nn.init.xavier_uniform_(torch.empty(1, dim))[None])
        self.attention = nn.MultiheadAttention(dim, 4, batch_first=True)
        self.head_norm = nn.LayerNorm(dim)
        self.head = nn.Sequential(
            nn.Linear(dim, 2 * dim), nn.GELU(approximate="tanh"), nn.Linear(2 * dim, dim)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.pos
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        pooled, _ = self.attention(self.probe.expand(len(x), -1, -1), x, x, need_weights=False)
        return (pooled + self.head(self.head_norm(pooled)))[:, 0]


class SigmoidPairs(nn.Module):
    def __init__(self, dim: int = 40, length: int = 10):
        super().__init__()
        self.patch, self.image = nn.Conv2d(3, dim, 4, 4), PooledTower(dim, 16)
        self.words, self.caption = nn.Embedding(VOCAB, dim), PooledTower(dim, length)
        self.log_scale = nn.Parameter(torch.tensor(math.log(10.0)))
        self.bias = nn.Parameter(torch.tensor(-10.0))
        nn.init.normal_(self.words.weight, std=dim**-0.5)

    def forward(self, images: Tensor, ids: Tensor) -> Tensor:
        """Return the logit `[B, B]` that an image and a caption belong together."""
        image = F.normalize(self.image(self.patch(images).flatten(2).transpose(1, 2)), dim=-1)
        caption = F.normalize(self.caption(self.words(ids)), dim=-1)
        return self.log_scale.exp() * image @ caption.T + self.bias


def sigmoid_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    logits = model(*batch)
    signs = 2 * torch.eye(len(logits), device=logits.device) - 1
    return -F.logsigmoid(signs * logits).sum(-1).mean()


@sound("pairs")
def sigmoid_pairs() -> Arguments:
    """SigLIP: a sigmoid loss of all pairs, with a learned scale and bias, and pooling by a query."""
    batch = (smooth_images(8, 16, 136), text(8, 10, seed=136))
    return remade(SigmoidPairs, batch, sigmoid_loss, partial(configure_adamw, lr=2e-3))


class FrozenTower(nn.Module):
    """A pretrained image encoder, of which the last layer but one is read."""

    def __init__(self, dim: int = 32, layers: int = 3):
        super().__init__()
        self.patch = nn.Conv2d(3, dim, 4, 4)
        self.pos = nn.Parameter(0.02 * torch.randn(1, 16, dim))
        self.blocks = nn.ModuleList(Block(dim, 4, causal=False) for _ in range(layers))
        self.requires_grad_(False)

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        x = self.patch(images).flatten(2).transpose(1, 2) + self.pos
        for block in self.blocks[:-1]:
            x = block(x)
        return x


PLACE = 3
"""The id that stands for a patch of an image."""


class Assistant(nn.Module):
    """A language model that reads four neighbouring patches as one token, in the places of image tokens."""

    def __init__(self, dim: int = 48):
        super().__init__()
        self.vision_tower = FrozenTower()
        self.mm_projector = nn.Sequential(nn.Linear(4 * 32, dim), nn.GELU(), nn.Linear(dim, dim))
        self.language_model = Decoder(dim, layers=2)

    def forward(self, images: Tensor, ids: Tensor) -> Tensor:
        grid = self.vision_tower(images).unflatten(1, (2, 2, 2, 2))
        merged = grid.permute(0, 1, 3, 2, 4, 5).flatten(3).flatten(1, 2)  # [B, 4, 4 * D]
        features = self.mm_projector(merged)
        x = self.language_model.embed_tokens(ids)
        x = x.masked_scatter((ids == PLACE)[..., None].expand_as(x), features)
        return self.language_model.lm_head(self.language_model.run(x))


def answer_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["images"], batch["ids"])
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)


def two_rates(model: Any) -> AdamW:
    """Return AdamW with a higher rate for the projector."""
    groups = [
        {"params": list(model.language_model.parameters()), "lr": 5e-4},
        {"params": list(model.mm_projector.parameters()), "lr": 2e-3},
    ]
    return AdamW(groups, weight_decay=0.0)


@sound("images and text")
def frozen_tower_and_projector() -> Arguments:
    """LLaVA: a frozen image tower, merged patches, a projector with its own rate, losses of answers alone."""
    ids, real = padded_text((22, 17, 20, 15), seed=137)
    ids[:, 0] = BOS
    ids[:, 1:5] = PLACE
    ids[:, 5:9] = tokens(4, 4, seed=137)  # the questions
    labels = ids.masked_fill(real == 0, -100)
    labels[:, :9] = -100
    batch = {"images": smooth_images(4, 16, 137), "ids": ids, "labels": labels}
    declare = {"frozen": ("vision_tower.*",), "pad_id": PAD}
    return setup(Assistant, batch, answer_loss, two_rates, declare=declare)


class EncoderBlock(nn.Module):
    """A bidirectional block with a window in some layers, rotary positions and gated feed-forwards."""

    def __init__(self, dim: int, heads: int, window: int | None):
        super().__init__()
        self.heads, self.window = heads, window
        self.attn_norm, self.mlp_norm = nn.LayerNorm(dim, bias=False), nn.LayerNorm(dim, bias=False)
        self.Wqkv, self.Wo = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.Wi, self.Wout = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        length, width = x.shape[1], x.shape[2] // self.heads
        at = torch.arange(length, device=x.device)
        waves = at[:, None] / 10_000 ** (torch.arange(0, width, 2, device=x.device) / width)
        cos, sin = waves.cos().repeat(1, 2), waves.sin().repeat(1, 2)
        q, k, v = self.Wqkv(self.attn_norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = (p * cos + torch.cat((-p[..., width // 2 :], p[..., : width // 2]), -1) * sin for p in (q, k))
        seen = real[:, None, None, :].expand(-1, 1, length, -1)
        if self.window is not None:
            seen = seen & ((at[:, None] - at).abs() <= self.window)
        seen = seen | torch.eye(length, dtype=torch.bool, device=x.device)  # padding sees itself
        x = x + self.Wo(F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2).flatten(2))
        value, gate = self.Wi(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.Wout(F.gelu(value) * gate)


class NestedEmbedder(nn.Module):
    """An encoder whose mean state, without the instruction's tokens, stands for a text."""

    def __init__(self, dim: int = 48, layers: int = 3):
        super().__init__()
        self.embed, self.embed_norm = nn.Embedding(VOCAB, dim), nn.LayerNorm(dim, bias=False)
        self.layers = nn.ModuleList(EncoderBlock(dim, 4, None if n % 3 == 0 else 4) for n in range(layers))
        self.final_norm = nn.LayerNorm(dim, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.trunc_normal_(module.weight, std=0.02)

    def forward(self, ids: Tensor, real: Tensor, pooled: Tensor) -> Tensor:
        x = self.embed_norm(self.embed(ids))
        for layer in self.layers:
            x = layer(x, real)
        weights = pooled.to(x.dtype)[..., None]
        return (self.final_norm(x) * weights).sum(1) / weights.sum(1)


def nested_loss(model: nn.Module, batch: dict[str, Any], widths: tuple[int, ...] = (48, 24, 12)) -> Tensor:
    """Return the contrastive losses of the first entries of embeddings, of several widths."""
    queries, documents = (model(*batch[side]) for side in ("queries", "documents"))
    wanted = torch.arange(len(queries), device=queries.device)
    total = queries.new_zeros(())
    for width in widths:
        scores = F.normalize(queries[:, :width], dim=-1) @ F.normalize(documents[:, :width], dim=-1).T
        total = total + F.cross_entropy(scores * 20, wanted)
    return total / len(widths)


@sound("retrieval")
def nested_embeddings() -> Arguments:
    """Matryoshka embeddings of queries with instructions, against their documents and hard negatives."""
    ids, real = padded_text((14, 10, 12, 9, 13, 11), seed=138)
    ids[:, :4] = tokens(1, 4, seed=138)  # the instruction
    pooled = real.bool()
    pooled[:, :4] = False
    documents, there = padded_text((20, 14, 17, 12, 19, 15, 16, 11, 18, 13, 20, 10), seed=139)
    batch = {
        "queries": (ids, real.bool(), pooled),
        "documents": (documents, there.bool(), there.bool()),  # six that answer, then six that do not
    }
    return setup(NestedEmbedder, batch, nested_loss, configure_adamw, declare={"pad_id": PAD})


# ------------------------------------------------------------------------------------- mixtures of experts


class SharedAndRouted(nn.Module):
    """Two experts a token by unnormalised probabilities, and one for all behind a gate of its own."""

    def __init__(self, dim: int, experts: int = 6, top_k: int = 2):
        super().__init__()
        self.top_k = top_k
        self.gate = nn.Linear(dim, experts, bias=False)
        self.experts = nn.ModuleList(GatedMLP(dim, dim) for _ in range(experts))
        self.shared_expert, self.shared_expert_gate = GatedMLP(dim), nn.Linear(dim, 1, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output, and the terms that even the loads of each row and keep logits small."""
        logits = self.gate(x).float()
        scores = logits.softmax(-1)
        weights, chosen = scores.topk(self.top_k, dim=-1)
        routed = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            row, column, place = (chosen == number).nonzero(as_tuple=True)
            y = expert(x[row, column]) * weights[row, column, place, None].type_as(x)
            routed = routed.index_put((row, column), y, accumulate=True)
        shared = self.shared_expert_gate(x).sigmoid() * self.shared_expert(x)
        share = F.one_hot(chosen, scores.shape[-1]).float().mean((1, 2))
        balance = scores.shape[-1] * (share * scores.mean(1)).sum(-1).mean()
        return routed + shared, 0.01 * balance + 1e-3 * logits.logsumexp(-1).square().mean()


class SharedExpertLM(nn.Module):
    def __init__(self, dim: int = 40, layers: int = 2):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, dim), nn.Linear(dim, VOCAB, bias=False)
        self.pos = nn.Embedding(48, dim)
        self.attentions = nn.ModuleList(
            nn.MultiheadAttention(dim, 4, bias=False, batch_first=True) for _ in range(layers)
        )
        self.experts = nn.ModuleList(SharedAndRouted(dim) for _ in range(layers))
        self.norms = nn.ModuleList(RMSNorm(dim) for _ in range(2 * layers + 1))
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(ids) + self.pos.weight[: ids.shape[1]]
        later = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device)
        terms = x.new_zeros(())
        for number, (attention, experts) in enumerate(zip(self.attentions, self.experts, strict=True)):
            h = self.norms[2 * number](x)
            x = x + attention(h, h, h, attn_mask=later, is_causal=True, need_weights=False)[0]
            y, term = experts(self.norms[2 * number + 1](x))
            x, terms = x + y, terms + term
        return self.head(self.norms[-1](x)), terms / len(self.experts)


def routed_loss(model: nn.Module, ids: Tensor) -> Tensor:
    logits, terms = model(ids)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()) + terms


@sound("mixtures of experts")
def gated_shared_expert() -> Arguments:
    """Two of six experts by softmax, unnormalised, a gated shared one, loads evened in each row, a z-loss."""
    return remade(SharedExpertLM, text(4, 28, seed=140), routed_loss, partial(configure_adamw, lr=2e-3))


# ---------------------------------------------------------------------------------------------- recurrences


class GatedRecurrence(nn.Module):
    """A linear recurrence whose decay the input gates (RG-LRU), behind a causal convolution."""

    def __init__(self, dim: int, width: int, blocks: int = 4, kernel: int = 4, sharpness: float = 8.0):
        super().__init__()
        self.blocks, self.kernel, self.sharpness = blocks, kernel, sharpness
        self.linear_x, self.linear_y = nn.Linear(dim, width), nn.Linear(dim, width)
        self.conv = nn.Conv1d(width, width, kernel, groups=width)
        self.input_gate = nn.Parameter(
            torch.randn(blocks, width // blocks, width // blocks) * (width // blocks) ** -0.5
        )
        self.decay_gate = nn.Parameter(
            torch.randn(blocks, width // blocks, width // blocks) * (width // blocks) ** -0.5
        )
        self.input_bias, self.decay_bias = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.zeros(width))
        decay = torch.empty(width).uniform_(0.9, 0.999)
        self.log_decay = nn.Parameter(torch.log(torch.expm1(-torch.log(decay) / sharpness)))
        self.out = nn.Linear(width, dim)

    def gate(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Return gates of blocks of features."""
        y = torch.einsum("btnd,nde->btne", x.unflatten(-1, (self.blocks, -1)), weight)
        return (y.flatten(2) + bias).sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        side = F.gelu(self.linear_y(x))
        h = F.pad(self.linear_x(x).transpose(1, 2), (self.kernel - 1, 0))
        h = self.conv(h).transpose(1, 2)
        log_a = -self.sharpness * self.gate(h, self.decay_gate, self.decay_bias) * F.softplus(self.log_decay)
        a = log_a.exp()
        given = (
            (1 - (2 * log_a).exp()).clamp(min=1e-6).sqrt()
            * self.gate(h, self.input_gate, self.input_bias)
            * h
        )
        state, states = torch.zeros_like(given[:, 0]), []
        for t in range(x.shape[1]):
            state = a[:, t] * state + given[:, t]
            states.append(state)
        return self.out(torch.stack(states, dim=1) * side)


class LocalAttention(nn.Module):
    """Attention of several heads to the keys and values of one, within a window, with rotary positions."""

    def __init__(self, dim: int, heads: int, window: int = 8):
        super().__init__()
        self.heads, self.window, self.width = heads, window, dim // heads
        self.q, self.kv = nn.Linear(dim, dim, bias=False), nn.Linear(dim, 2 * (dim // heads), bias=False)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        at = torch.arange(x.shape[1], device=x.device)
        waves = at[:, None] / 10_000 ** (torch.arange(0, self.width, 2, device=x.device) / self.width)
        cos, sin = waves.cos().repeat(1, 2), waves.sin().repeat(1, 2)
        q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = (part[:, None] for part in self.kv(x).chunk(2, dim=-1))
        half = self.width // 2
        q, k = (p * cos + torch.cat((-p[..., half:], p[..., :half]), dim=-1) * sin for p in (q, k))
        gap = at[:, None] - at
        seen = (gap >= 0) & (gap < self.window)
        y = F.scaled_dot_product_attention(q, k.expand_as(q), v.expand_as(q), attn_mask=seen)
        return self.out(y.transpose(1, 2).flatten(2))


class Griffin(nn.Module):
    """Two recurrences to each local attention, with gated feed-forwards and a scaled, tied table."""

    def __init__(self, dim: int = 40, layers: int = 3):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.mixers = nn.ModuleList(
            LocalAttention(dim, 4) if n % 3 == 2 else GatedRecurrence(dim, dim) for n in range(layers)
        )
        self.mlps = nn.ModuleList(GatedMLP(dim, 3 * dim) for _ in range(layers))
        self.norms = nn.ModuleList(RMSNorm(dim) for _ in range(2 * layers + 1))
        nn.init.normal_(self.embed.weight, std=dim**-0.5)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) * self.embed.embedding_dim**0.5
        for number, (mixer, mlp) in enumerate(zip(self.mixers, self.mlps, strict=True)):
            x = x + mixer(self.norms[2 * number](x))
            x = x + mlp(self.norms[2 * number + 1](x))
        logits = self.norms[-1](x) @ self.embed.weight.T
        return 30 * torch.tanh(logits / 30)


def next_loss(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@sound("recurrences")
def gated_linear_recurrence() -> Arguments:
    """Griffin: gated linear recurrences, local attention with one head of keys, and capped, tied logits."""
    declare = {"tied": True}
    return setup(Griffin, text(4, 28, seed=141), next_loss, configure_adamw, declare=declare)


# ----------------------------------------------------------------------------------- multi-token prediction


class ParallelHeads(nn.Module):
    """A trunk with a block for each of the next tokens, and one map to the vocabulary for all."""

    def __init__(self, dim: int = 48, ahead: int = 3):
        super().__init__()
        self.trunk = GPT(dim, layers=2)
        self.heads = nn.ModuleList(Block(dim, 4, causal=True) for _ in range(ahead))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(ahead))
        for head in self.heads:
            gpt2_init(head, 3)

    def forward(self, ids: Tensor) -> list[Tensor]:
        trunk = self.trunk
        x = trunk.wte(ids) + trunk.wpe.weight[: ids.shape[1]]
        for block in trunk.h:
            x = block(x)
        x = trunk.ln_f(x)
        return [trunk.lm_head(norm(head(x))) for head, norm in zip(self.heads, self.norms, strict=True)]


def several_ahead_loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the mean over heads of the loss of the token that each is for."""
    losses = []
    for step, logits in enumerate(model(ids), start=1):
        losses.append(F.cross_entropy(logits[:, :-step].flatten(0, 1), ids[:, step:].flatten()))
    return torch.stack(losses).mean()


@sound("multi-token prediction")
def parallel_heads() -> Arguments:
    """Three heads in parallel on one trunk, each for a token further ahead, with one shared unembedding."""
    return setup(
        ParallelHeads, text(4, 32, seed=142), several_ahead_loss, configure_adamw, declare={"tied": True}
    )


# ------------------------------------------------------------------------------------------- post-training


def two_sides(seed: int) -> tuple[Tensor, Tensor]:
    """Return four chosen answers, then four rejected ones to the same prompts, and which tokens answer."""
    ids, real = padded_text((24, 17, 20, 14, 16, 22, 13, 19), seed=seed)
    ids[:4, :6] = tokens(4, 6, seed=seed)
    ids[4:, :6] = ids[:4, :6]
    answer = real.bool()
    answer[:, :6] = False
    return ids, answer[:, 1:]


def cached_dpo_loss(
    model: nn.Module, batch: dict[str, Tensor], beta: float = 0.3, smooth: float = 0.05
) -> Tensor:
    """Return DPO's loss of mean log-probabilities, and that of the chosen answers' tokens."""
    ids, answer = batch["ids"], batch["answer"]
    logps = gathered_logps(model(ids), ids) * answer
    means = logps.sum(-1) / answer.sum(-1)
    chosen, rejected = (means - batch["reference"]).chunk(2)
    margin = beta * (chosen - rejected)
    preference = -(1 - smooth) * F.logsigmoid(margin) - smooth * F.logsigmoid(-margin)
    imitation = -logps[: len(chosen)].sum() / answer[: len(chosen)].sum()
    return preference.mean() + 0.2 * imitation


@sound("preference training")
def cached_reference() -> Arguments:
    """DPO with the reference's log-probabilities in the batch, both sides in one pass, and imitation."""
    torch.manual_seed(0)
    model = GPT()
    ids, answer = two_sides(143)
    with torch.no_grad():
        reference = (gathered_logps(model(ids), ids) * answer).sum(-1) / answer.sum(-1)
    batch = {"ids": ids, "answer": answer.float(), "reference": reference}
    declare = {"pad_id": PAD, "tied": True}
    return {
        "model": model,
        "batch": batch,
        "loss": cached_dpo_loss,
        "optimizer": plain_adamw(model, 3e-4),
        "declare": declare,
    }


def sequence_ratio_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return GSPO's loss: ratios of whole completions, by the mean over their tokens, and clipped."""
    ids, mask = batch["ids"], batch["mask"]
    gap = ((gathered_logps(model(ids), ids) - batch["old_logps"]) * mask).sum(-1) / mask.sum(-1)
    ratio, advantages = gap.exp(), batch["advantages"]
    return -torch.min(ratio * advantages, ratio.clamp(1 - 0.02, 1 + 0.03) * advantages).mean()


def policy_step(
    model: nn.Module, batch: dict[str, Tensor], optimizer: AdamW, scheduler: Any = None
) -> Tensor:
    """Step once on a batch of completions, in two micro-batches of whole groups."""
    model.train()
    optimizer.zero_grad(set_to_none=True)
    total = torch.zeros(())
    for rows in torch.arange(len(batch["ids"])).chunk(2):
        loss = sequence_ratio_loss(model, {name: value[rows] for name, value in batch.items()}) / 2
        loss.backward()
        total += loss.detach()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if scheduler is not None:
        scheduler.step()
    return total


@sound("policy gradients")
def sequence_ratios() -> Arguments:
    """GSPO: one clipped ratio for a completion, groups' advantages, and two micro-batches to a step."""
    torch.manual_seed(0)
    model = GPT()
    ids, answer = two_sides(144)
    ids = ids.view(2, 4, -1).transpose(0, 1).flatten(0, 1)  # two completions of each of four prompts
    answer = answer.view(2, 4, -1).transpose(0, 1).flatten(0, 1)
    rewards = torch.rand(4, 2, generator=generator(144))
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)
    with torch.no_grad():
        old = gathered_logps(model(ids), ids)
    batch = {"ids": ids, "mask": answer.float(), "old_logps": old, "advantages": advantages.flatten()}
    return {
        "model": model,
        "batch": batch,
        "loss": sequence_ratio_loss,
        "optimizer": plain_adamw(model, 3e-4),
        "step": policy_step,
        "declare": {"pad_id": PAD, "tied": True, "max_grad_norm": 1.0},
    }


def reverse_divergence_loss(model: nn.Module, batch: dict[str, Tensor], *, teacher: nn.Module) -> Tensor:
    """Return the divergence of the student from the teacher in each token that the student drew."""
    ids, mask = batch["ids"], batch["mask"]
    with torch.no_grad():
        wanted = teacher(ids)[:, :-1].log_softmax(-1)
    given = model(ids)[:, :-1].log_softmax(-1)
    divergence = (given.exp() * (given - wanted)).sum(-1)
    return (divergence * mask).sum() / mask.sum()


@sound("distillation")
def on_policy_distillation() -> Arguments:
    """The reverse divergence from a frozen, deeper teacher in completions that the student drew."""
    torch.manual_seed(1)
    teacher = Decoder(64, layers=3)
    nn.init.normal_(teacher.lm_head.weight, std=0.2)
    teacher.eval().requires_grad_(False)
    ids, answer = two_sides(145)
    loss = partial(reverse_divergence_loss, teacher=teacher)
    batch = {"ids": ids, "mask": answer.float()}
    return setup(GPT, batch, loss, plain_adamw, declare={"pad_id": PAD, "tied": True})


class Adapted(nn.Module):
    """A frozen map and its adapters, whose scale falls with the root of the rank."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float, dropout: float):
        super().__init__()
        self.base, self.dropout = base, nn.Dropout(dropout)
        self.lora_A = nn.Parameter(torch.empty(rank, base.in_features))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank))
        self.scaling = alpha / math.sqrt(rank)
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scaling * F.linear(F.linear(self.dropout(x), self.lora_A), self.lora_B)


def adapted_decoder() -> nn.Module:
    """Return a frozen decoder with adapters of all maps of its layers; the head is trained whole."""
    model = Decoder(layers=2).requires_grad_(False)
    for layer in model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name, child in list(part.named_children()):
                setattr(part, name, Adapted(child, 8, 16, 0.05))
    model.lm_head.requires_grad_(True)
    return model


@sound("adapters")
def adapters_with_dropout() -> Arguments:
    """Rank-stabilised LoRA with dropout on every map of the layers, and a head that is trained whole."""
    frozen = ("embed_tokens.*", "norm.*", "layers.*layernorm.*", "layers.*.base.*")
    return setup(
        adapted_decoder,
        text(4, 28, seed=146),
        next_loss,
        partial(plain_adamw, lr=2e-3),
        declare={"frozen": frozen},
    )
