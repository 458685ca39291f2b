"""Reports of images, speech, diffusion, self-distillation, quantization, and freezing."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW

from corpus.batches import PAD, VOCAB, generator, padded_text, text
from corpus.case import Arguments
from corpus.public2.blocks import EncoderLayer, remade, setup, sinusoids

from .blocks_b import GPT, configure_adamw, plain_adamw
from .case import report

# ----------------------------------------------------------------------------------------- residual codebooks


class ResidualQuantizer(nn.Module):
    """Codebooks of which each quantizes what those before it left over; fewer are used at random."""

    def __init__(self, dim: int, count: int, entries: int, *, most_left_out: int):
        super().__init__()
        self.codebooks = nn.ModuleList(nn.Embedding(entries, dim) for _ in range(count))
        self.most_left_out = most_left_out
        for codebook in self.codebooks:
            nn.init.uniform_(codebook.weight, -1.0, 1.0)

    def used(self) -> int:
        """Return how many codebooks are used, so that one model serves several bit rates."""
        count = len(self.codebooks)
        if not self.training:
            return count
        return int(torch.randint(1, count + 1 - self.most_left_out, ()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return quantized frames and the codebooks' and the encoder's terms."""
        residual, total, terms = x, torch.zeros_like(x), x.new_zeros(())
        for codebook in self.codebooks[: self.used()]:
            distances = torch.cdist(residual, codebook.weight[None])
            entry = codebook(distances.argmin(-1))
            terms = terms + F.mse_loss(entry, residual.detach())
            terms = terms + 0.25 * F.mse_loss(residual, entry.detach())
            total, residual = total + entry, residual - entry.detach()
        return x + (total - x).detach(), terms


class AudioCodec(nn.Module):
    """An autoencoder of spectral frames with residual codebooks in the middle."""

    def __init__(self, bands: int = 20, dim: int = 32, *, most_left_out: int = 0):
        super().__init__()
        self.in_conv = nn.Conv1d(bands, dim, 4, stride=2, padding=1)
        self.encoder = nn.ModuleList(EncoderLayer(dim, 4) for _ in range(2))
        self.quantizer = ResidualQuantizer(dim, 4, 32, most_left_out=most_left_out)
        self.decoder = nn.ModuleList(EncoderLayer(dim, 4) for _ in range(2))
        self.out_norm, self.out_conv = (
            nn.LayerNorm(dim),
            nn.ConvTranspose1d(dim, bands, 4, stride=2, padding=1),
        )

    def forward(self, frames: Tensor) -> tuple[Tensor, Tensor]:
        x = self.in_conv(frames.transpose(1, 2)).transpose(1, 2)
        x = x + sinusoids(torch.arange(x.shape[1], device=x.device), x.shape[2])
        for layer in self.encoder:
            x = layer(x)
        x, terms = self.quantizer(x)
        for layer in self.decoder:
            x = layer(x)
        return self.out_conv(self.out_norm(x).transpose(1, 2)).transpose(1, 2), terms


def codec_loss(model: nn.Module, frames: Tensor) -> Tensor:
    rebuilt, terms = model(frames)
    return F.l1_loss(rebuilt, frames) + F.mse_loss(rebuilt, frames) + terms


def spectra(rows: int, length: int, bands: int, seed: int) -> Tensor:
    """Return frames `[B, T, F]` that change slowly."""
    draw = generator(seed)
    slow = torch.randn(rows, length // 4, bands, generator=draw)
    frames = F.interpolate(slow.transpose(1, 2), size=length, mode="linear").transpose(1, 2)
    return frames + 0.1 * torch.randn(rows, length, bands, generator=draw)


@report("kaiidams/soundstream-pytorch#7", "quantization", "gradients")
def last_codebook_left_out(*, faulty: bool) -> Arguments:
    """The number of codebooks is drawn from a range without its end: the last one is never trained."""
    make = partial(AudioCodec, most_left_out=1 if faulty else 0)
    return setup(make, spectra(6, 32, 20, 121), codec_loss, plain_adamw)


# ------------------------------------------------------------------------------------------ self-distillation


class PatchViT(nn.Module):
    """A vision Transformer with a class token, in which patches may be replaced by a mask token."""

    def __init__(self, dim: int = 48, layers: int = 2, side: int = 4):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, dim, 4, 4)
        self.cls_token = nn.Parameter(0.02 * torch.randn(1, 1, dim))
        self.mask_token = nn.Parameter(0.02 * torch.randn(1, 1, dim))
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, side * side + 1, dim))
        self.blocks = nn.ModuleList(EncoderLayer(dim, 4) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)

    def forward(self, images: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the states of the class token and of the patches."""
        x = self.patch_embed(images).flatten(2).transpose(1, 2)
        if mask is not None:
            x = torch.where(mask[..., None], self.mask_token, x)
        x = torch.cat((self.cls_token.expand(len(x), -1, -1), x), dim=1) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return x[:, 0], x[:, 1:]


def projection_head(dim: int, prototypes: int = 64) -> nn.Sequential:
    """Return a head that compares states of one size with small prototypes."""
    last = nn.Linear(24, prototypes, bias=False)
    nn.init.normal_(last.weight, std=0.04)
    return nn.Sequential(nn.Linear(dim, 64), nn.GELU(), nn.Linear(64, 24), nn.RMSNorm(24), last)


class SelfDistillation(nn.Module):
    """A student and a teacher with a head for images and one for masked patches (DINOv2)."""

    def __init__(self, dim: int = 48):
        super().__init__()
        self.student_backbone = PatchViT(dim)
        self.student_dino_head, self.student_ibot_head = projection_head(dim), projection_head(dim)
        for part in ("backbone", "dino_head", "ibot_head"):
            teacher = copy.deepcopy(getattr(self, f"student_{part}"))
            setattr(self, f"teacher_{part}", teacher.requires_grad_(False).eval())

    def train(self, mode: bool = True) -> SelfDistillation:  # noqa: FBT001, FBT002
        super().train(mode)
        for part in (self.teacher_backbone, self.teacher_dino_head, self.teacher_ibot_head):
            part.eval()
        return self

    @torch.no_grad()
    def update_teacher(self, parts: Iterable[str], momentum: float) -> None:
        for part in parts:
            fast, slow = getattr(self, f"student_{part}"), getattr(self, f"teacher_{part}")
            for new, kept in zip(fast.parameters(), slow.parameters(), strict=True):
                kept.lerp_(new, 1 - momentum)


@torch.no_grad()
def sinkhorn(logits: Tensor, temperature: float = 0.07, rounds: int = 3) -> Tensor:
    """Return assignments of rows to prototypes that use all prototypes alike."""
    q = (logits / temperature).softmax(-1)
    for _ in range(rounds):
        q = q / q.sum(0, keepdim=True)
        q = q / q.sum(1, keepdim=True)
    return q


def dinov2_loss(model: SelfDistillation, batch: dict[str, Tensor]) -> Tensor:
    """Return the losses of the other view's image and of the masked patches."""
    views, mask = batch["views"], batch["mask"]
    with torch.no_grad():
        cls_token, patches = model.teacher_backbone(views)
        wanted_image = sinkhorn(model.teacher_dino_head(cls_token))
        wanted_patch = sinkhorn(model.teacher_ibot_head(patches[mask]))
    cls_token, patches = model.student_backbone(views, mask)
    image = (model.student_dino_head(cls_token) / 0.1).log_softmax(-1)
    patch = (model.student_ibot_head(patches[mask]) / 0.1).log_softmax(-1)
    swapped = wanted_image.roll(len(views) // 2, 0)
    return -(swapped * image).sum(-1).mean() - (wanted_patch * patch).sum(-1).mean()


def dinov2_step(
    model: Any, batch: dict[str, Tensor], optimizer: AdamW, scheduler: Any = None, *, parts: tuple[str, ...]
) -> Tensor:
    model.train()
    optimizer.zero_grad()
    loss = dinov2_loss(model, batch)
    loss.backward()
    nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 3.0)
    optimizer.step()
    if scheduler is not None:
        scheduler.step()
    model.update_teacher(parts, momentum=0.99)
    return loss.detach()


def two_views(seed: int, rows: int = 6) -> dict[str, Tensor]:
    """Return two noisy views of each image, and which patches of them are hidden."""
    draw = generator(seed)
    images = F.interpolate(torch.randn(rows, 3, 4, 4, generator=draw), size=16, mode="bilinear")
    views = torch.cat((images, images.flip(-1))) + 0.1 * torch.randn(2 * rows, 3, 16, 16, generator=draw)
    return {"views": views, "mask": torch.rand(2 * rows, 16, generator=draw) < 0.4}


@report("lightly-ai/lightly#1844", "self-distillation")
def patch_head_of_the_teacher_stays(*, faulty: bool) -> Arguments:
    """The teacher's separate head for patches never follows the student's: it is left out of the update."""
    parts = ("backbone", "dino_head") if faulty else ("backbone", "dino_head", "ibot_head")
    return setup(
        SelfDistillation,
        two_views(122),
        dinov2_loss,
        configure_adamw,
        step=partial(dinov2_step, parts=parts),
        declare={"frozen": ("teacher_*",), "max_grad_norm": 3.0},
    )


# ------------------------------------------------------------------------------------------------ vision


class PrefixViT(nn.Module):
    """A vision Transformer whose convolutions see where patches are, so that it needs no positions."""

    def __init__(self, dim: int = 48, layers: int = 3, registers: int = 2, *, return_early: bool):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, dim // 2, 3, 2, 1), nn.GELU(), nn.Conv2d(dim // 2, dim, 3, 2, 1), nn.GELU(),
            nn.Conv2d(dim, dim, 3, 1, 1),
        )  # fmt: skip
        self.pos_embed = None
        self.cls_token = nn.Parameter(1e-2 * torch.randn(1, 1, dim))
        self.reg_token = nn.Parameter(1e-2 * torch.randn(1, registers, dim))
        self.blocks = nn.ModuleList(EncoderLayer(dim, 4) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 10)
        self.return_early = return_early

    def with_prefix(self, x: Tensor) -> Tensor:
        """Put the class token and registers before the patches, which have positions where there are any."""
        if self.pos_embed is None and self.return_early:
            return x
        prefix = torch.cat((self.cls_token, self.reg_token), dim=1).expand(len(x), -1, -1)
        if self.pos_embed is not None:
            x = x + self.pos_embed
        return torch.cat((prefix, x), dim=1)

    def forward(self, images: Tensor) -> Tensor:
        x = self.with_prefix(self.stem(images).flatten(2).transpose(1, 2))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


def labelled_image_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1)


@report("huggingface/pytorch-image-models#2676", "vision Transformers", "gradients")
def prefix_tokens_dropped(*, faulty: bool) -> Arguments:
    """Without position embeddings, the class token and registers are not put before the patches at all."""
    images = torch.randn(8, 3, 16, 16, generator=generator(123))
    make = partial(PrefixViT, return_early=faulty)
    declare = {"positions": False}
    return remade(make, (images, torch.arange(8)), labelled_image_loss, configure_adamw, declare=declare)


# --------------------------------------------------------------------------------------- images and text

IMAGE = 3
"""The id that stands for each patch of an image."""


class LlavaLike(nn.Module):
    """A GPT in which the places of image tokens hold projected patches."""

    def __init__(self, dim: int = 48):
        super().__init__()
        self.vision_tower = nn.Sequential(nn.Conv2d(3, 32, 4, 4), nn.Flatten(2))
        self.tower_blocks = nn.ModuleList(EncoderLayer(32, 4) for _ in range(1))
        self.tower_pos = nn.Parameter(0.02 * torch.randn(9, 32))
        self.projector = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, dim), nn.GELU(), nn.Linear(dim, dim))
        self.language_model = GPT(dim, layers=2)

    def forward(self, pixel_values: Tensor, input_ids: Tensor) -> Tensor:
        patches = self.vision_tower(pixel_values).transpose(1, 2) + self.tower_pos
        for block in self.tower_blocks:
            patches = block(patches)
        features = self.projector(patches)
        lm = self.language_model
        places = (input_ids == IMAGE)[..., None].expand(-1, -1, features.shape[-1])
        x = lm.wte(input_ids).masked_scatter(places, features) + lm.wpe.weight[: input_ids.shape[1]]
        for block in lm.h:
            x = block(x)
        return lm.lm_head(lm.ln_f(x))


def shifted_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["pixel_values"], batch["input_ids"])
    labels = batch["labels"]
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


def collate(seed: int, *, mask_images: bool) -> dict[str, Tensor]:
    """Return images with captions, whose ids hold one image token for each patch after two words."""
    ids, _ = padded_text((26, 21, 24, 19), seed=seed)
    ids[:, 2:11] = IMAGE
    labels = ids.clone()
    labels[labels == PAD] = -100
    if mask_images:
        labels[labels == IMAGE] = -100
    pixels = torch.randn(4, 3, 12, 12, generator=generator(seed))
    return {"pixel_values": pixels, "input_ids": ids, "labels": labels}


@report("NielsRogge/Transformers-Tutorials#513", "images and text", since=("counted",))
def image_places_in_the_loss(*, faulty: bool) -> Arguments:
    """Labels are a copy of the ids without padding, so that the model is asked for the image tokens."""
    batch = collate(124, mask_images=not faulty)
    return setup(LlavaLike, batch, shifted_loss, configure_adamw, declare={"pad_id": PAD})


# -------------------------------------------------------------------------------- flow matching and diffusion


class Flow(nn.Module):
    """A velocity field over image patches that are told the time."""

    def __init__(self, channels: int = 12, dim: int = 48):
        super().__init__()
        self.patchify, self.pos = nn.Linear(channels, dim), nn.Parameter(0.02 * torch.randn(1, 16, dim))
        self.time = nn.Sequential(nn.Linear(32, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.blocks = nn.ModuleList(EncoderLayer(dim, 4) for _ in range(2))
        self.norm, self.out = nn.LayerNorm(dim), nn.Linear(dim, channels)

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        h = self.patchify(x) + self.pos + self.time(sinusoids(1000 * times, 32))[:, None]
        for block in self.blocks:
            h = block(h)
        return self.out(self.norm(h))


class NanoFlow(nn.Module):
    """What trains a field: the path between noise and data, and the velocity along it."""

    def __init__(self, *, from_data: bool):
        super().__init__()
        self.model, self.from_data = Flow(), from_data

    def forward(self, data: Tensor) -> Tensor:
        times = torch.rand(len(data), device=data.device)
        noise = torch.randn_like(data)
        flow = data - noise
        padded = times[:, None, None]
        share = padded if self.from_data else 1 - padded
        noised = noise * share + data * (1 - share)
        return F.mse_loss(self.model(noised, times), flow)


def returned_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch)


def patched_images(seed: int, rows: int = 8) -> Tensor:
    coarse = torch.randn(rows, 3, 4, 4, generator=generator(seed))
    images = F.interpolate(coarse, size=8, mode="bilinear")
    return F.unfold(images, 2, stride=2).transpose(1, 2)


@report("lucidrains/rectified-flow-pytorch#14", "flow matching")
def path_runs_backwards(*, faulty: bool) -> Arguments:
    """Noised data run from data to noise as the time grows, but the velocity is that from noise to data."""
    return setup(partial(NanoFlow, from_data=faulty), patched_images(125), returned_loss, plain_adamw)


class GatedBlock(nn.Module):
    """A block whose norms are moved and scaled, and whose branches are gated, by the time (AdaLN-zero)."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.attn_norm = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.ff_norm = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.ada_linear = nn.Linear(dim, 6 * dim)
        self.to_qkv, self.to_out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.ff = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(approximate="tanh"), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        moves = self.ada_linear(F.silu(t))[:, None].chunk(6, dim=-1)
        shift_attn, scale_attn, gate_attn, shift_ff, scale_ff, gate_ff = moves
        h = self.attn_norm(x) * (1 + scale_attn) + shift_attn
        q, k, v = self.to_qkv(h).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + gate_attn * self.to_out(y)
        h = self.ff_norm(x) * (1 + scale_ff) + shift_ff
        return x + gate_ff * self.ff(h)


class SpeechInfilling(nn.Module):
    """A flow over spectral frames that fills a hidden span from the frames around it and the text (F5)."""

    def __init__(self, bands: int = 16, dim: int = 48, layers: int = 3, *, zero_gates: bool):
        super().__init__()
        self.text_embed = nn.Embedding(VOCAB, 24)
        self.input_proj = nn.Linear(2 * bands + 24, dim)
        self.conv_pos = nn.Conv1d(dim, dim, 7, padding=3, groups=4)
        self.time = nn.Sequential(nn.Linear(32, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.blocks = nn.ModuleList(GatedBlock(dim, 4) for _ in range(layers))
        self.norm_out, self.out_linear = nn.LayerNorm(dim, elementwise_affine=False), nn.Linear(dim, 2 * dim)
        self.proj_out = nn.Linear(dim, bands)
        if zero_gates:
            for linear in (*(block.ada_linear for block in self.blocks), self.out_linear, self.proj_out):
                nn.init.zeros_(linear.weight)
                nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor, cond: Tensor, words: Tensor, time: Tensor) -> Tensor:
        t = self.time(sinusoids(1000 * time, 32))
        h = self.input_proj(torch.cat((x, cond, self.text_embed(words)), dim=-1))
        place = sinusoids(torch.arange(h.shape[1], device=h.device), h.shape[2])
        h = h + place + F.mish(self.conv_pos(h.transpose(1, 2))).transpose(1, 2)
        for block in self.blocks:
            h = block(h, t)
        scale, shift = self.out_linear(F.silu(t))[:, None].chunk(2, dim=-1)
        return self.proj_out(self.norm_out(h) * (1 + scale) + shift)


def infilling_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the error of velocities in the hidden span alone."""
    mel, span = batch["mel"], batch["span"]
    noise, time = torch.randn_like(mel), torch.rand(len(mel), device=mel.device)
    t = time[:, None, None]
    cond = mel.masked_fill(span[..., None], 0.0)
    predicted = model((1 - t) * noise + t * mel, cond, batch["words"], time)
    return F.mse_loss(predicted, mel - noise, reduction="none")[span].mean()


@report("SWivid/F5-TTS#793", "diffusion")
def gates_not_zero(*, faulty: bool) -> Arguments:
    """The maps that gate branches by the time (AdaLN-zero) keep their random start: no block begins shut."""
    at = torch.arange(32)
    starts, widths = torch.tensor([4, 9, 0, 12, 6, 2]), torch.tensor([22, 20, 27, 18, 24, 26])
    span = (at >= starts[:, None]) & (at < (starts + widths)[:, None])
    batch = {"mel": spectra(6, 32, 16, 126), "span": span, "words": text(6, 32, seed=126)}
    return setup(partial(SpeechInfilling, zero_gates=not faulty), batch, infilling_loss, plain_adamw)


# -------------------------------------------------------------------------------------------- quantization


class RoundThrough(torch.autograd.Function):
    """Rounding whose gradient passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class FakeQuantizedLinear(nn.Linear):
    """A map whose weights are rounded to four bits in groups, while gradients pass to the real ones."""

    def __init__(self, width: int, out: int, *, group: int = 16, stop_at_bounds: bool):
        super().__init__(width, out, bias=False)
        self.group, self.stop_at_bounds = group, stop_at_bounds

    def fake_quantize(self, weight: Tensor, low: int = -8, high: int = 7) -> Tensor:
        grouped = weight.unflatten(-1, (-1, self.group))
        widest = grouped.detach().abs().amax(-1, keepdim=True)
        scale = (widest / ((high - low) / 2)).clamp(min=1e-8)
        steps = RoundThrough.apply(grouped * (1.0 / scale))
        clamped = steps.clamp(low, high)
        if self.stop_at_bounds:
            inside = (steps > low) & (steps < high)
        else:
            inside = (steps >= low) & (steps <= high)
        # written out, as the gradient of torch.clamp at a bound is not the same in all versions
        return (torch.where(inside, steps, clamped.detach()) * scale).flatten(-2)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.fake_quantize(self.weight))


class QuantizedBlock(nn.Module):
    """A block whose maps are trained for four bits."""

    def __init__(self, dim: int, heads: int, *, stop_at_bounds: bool):
        super().__init__()
        make = partial(FakeQuantizedLinear, stop_at_bounds=stop_at_bounds)
        self.heads = heads
        self.attention_norm, self.ffn_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.wq, self.wk, self.wv, self.wo = (make(dim, dim) for _ in range(4))
        self.w1, self.w2, self.w3 = make(dim, 2 * dim), make(2 * dim, dim), make(dim, 2 * dim)

    def forward(self, x: Tensor) -> Tensor:
        h = self.attention_norm(x)
        q, k, v = (
            project(h).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project in (self.wq, self.wk, self.wv)
        )
        x = x + self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        h = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class QuantizedDecoder(nn.Module):
    def __init__(self, dim: int = 48, layers: int = 2, *, stop_at_bounds: bool):
        super().__init__()
        self.tok_embeddings, self.positions = nn.Embedding(VOCAB, dim), nn.Embedding(48, dim)
        self.layers = nn.ModuleList(
            QuantizedBlock(dim, 4, stop_at_bounds=stop_at_bounds) for _ in range(layers)
        )
        self.norm, self.output = nn.RMSNorm(dim), nn.Linear(dim, VOCAB, bias=False)
        nn.init.normal_(self.tok_embeddings.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok_embeddings(ids) + self.positions.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def language_loss(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@report("pytorch/ao#4806", "quantization")
def saturated_weights_stop(*, faulty: bool) -> Arguments:
    """Weights that are rounded to the last step of four bits get no gradient, as clamping ends there."""
    make = partial(QuantizedDecoder, stop_at_bounds=faulty)
    return setup(make, text(4, 28, seed=127), language_loss, partial(configure_adamw, lr=2e-3))


# ------------------------------------------------------------------------------------------------ freezing


class TextLayer(nn.Module):
    """A layer of the language model, which also gives its keys and values to the expert beside it."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.q_proj, self.k_proj = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.v_proj, self.o_proj = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.up_proj, self.down_proj = (
            nn.Linear(dim, 2 * dim, bias=False),
            nn.Linear(2 * dim, dim, bias=False),
        )

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.input_layernorm(x)
        k, v = self.split(self.k_proj(h)), self.split(self.v_proj(h))
        y = F.scaled_dot_product_attention(self.split(self.q_proj(h)), k, v, is_causal=True)
        x = x + self.o_proj(y.transpose(1, 2).flatten(2))
        x = x + self.down_proj(F.gelu(self.up_proj(self.post_attention_layernorm(x))))
        return x, k, v


class ExpertLayer(nn.Module):
    """A layer of the action expert: it attends to itself and to the keys and values of the text beside it."""

    def __init__(self, dim: int, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm, self.mlp_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv, self.o_proj = nn.Linear(dim, 3 * width, bias=False), nn.Linear(width, dim, bias=False)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, own_k, own_v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, torch.cat((k, own_k), dim=2), torch.cat((v, own_v), dim=2))
        x = x + self.o_proj(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


class VisionLanguageModel(nn.Module):
    """A language model with images before its text, as it was pretrained, with its head."""

    def __init__(self, dim: int, layers: int):
        super().__init__()
        self.vision_model = nn.Sequential(nn.Conv2d(3, dim, 4, 4), nn.Flatten(2))
        self.text_model = nn.Module()
        self.text_model.embed_tokens = nn.Embedding(VOCAB, dim)
        self.text_model.layers = nn.ModuleList(TextLayer(dim, 4) for _ in range(layers))
        self.text_model.norm = nn.RMSNorm(dim)
        self.lm_head = nn.Linear(dim, VOCAB, bias=False)


class ActionPolicy(nn.Module):
    """A language model and an expert that moves noisy actions along a flow (SmolVLA)."""

    def __init__(self, dim: int = 32, expert: int = 24, layers: int = 3, actions: int = 6):
        super().__init__()
        self.vlm = VisionLanguageModel(dim, layers)
        self.action_in, self.action_out = nn.Linear(actions, expert), nn.Linear(expert, actions)
        self.time = nn.Sequential(nn.Linear(32, expert), nn.SiLU(), nn.Linear(expert, expert))
        self.chunk_pos = nn.Parameter(0.02 * torch.randn(8, expert))
        self.expert = nn.ModuleList(ExpertLayer(expert, dim, 4) for _ in range(layers))
        self.expert_norm = nn.RMSNorm(expert)

    def set_requires_grad(self, prefix: str) -> ActionPolicy:
        """Freeze the images' encoder, and of the text's what no action reads: the last layer and the head."""
        self.vlm.vision_model.requires_grad_(False)
        last = len(self.vlm.text_model.layers) - 1
        frozen_layers = ["lm_head", f"{prefix}norm.weight", f"{prefix}layers.{last}."]
        for name, parameter in self.vlm.named_parameters():
            if any(pattern in name for pattern in frozen_layers):
                parameter.requires_grad_(False)
        return self

    def forward(self, images: Tensor, ids: Tensor, actions: Tensor, time: Tensor) -> Tensor:
        text_model = self.vlm.text_model
        seen = self.vlm.vision_model(images).transpose(1, 2)
        seen = seen + sinusoids(torch.arange(seen.shape[1], device=seen.device), seen.shape[2])
        x = torch.cat((seen, text_model.embed_tokens(ids)), dim=1)
        a = self.action_in(actions) + self.chunk_pos + self.time(sinusoids(1000 * time, 32))[:, None]
        for layer, expert in zip(text_model.layers, self.expert, strict=True):
            x, k, v = layer(x)
            a = expert(a, k, v)
        return self.action_out(self.expert_norm(a))


def action_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    actions = batch["actions"]
    noise, time = torch.randn_like(actions), torch.rand(len(actions), device=actions.device)
    t = time[:, None, None]
    predicted = model(batch["images"], batch["ids"], t * noise + (1 - t) * actions, time)
    return F.mse_loss(predicted, noise - actions)


@report("huggingface/lerobot#4019", "freezing", "gradients", "frozen", place="*text_model*")
def freeze_names_match_nothing(*, faulty: bool) -> Arguments:
    """Names of what is to be frozen have a part too many: the last layer and norm stay trainable, unused."""
    prefix = "text_model.model." if faulty else "text_model."
    draw = generator(128)
    batch = {
        "images": torch.randn(6, 3, 12, 12, generator=draw),
        "ids": text(6, 8, seed=128),
        "actions": 0.5 * torch.randn(6, 1, 6, generator=draw) + 0.1 * torch.randn(6, 8, 6, generator=draw),
    }
    frozen = ("vlm.vision_model.*", "vlm.lm_head.*", "vlm.text_model.norm.*", "vlm.text_model.layers.2.*")

    def make() -> nn.Module:
        return ActionPolicy().set_requires_grad(prefix)

    return setup(make, batch, action_loss, plain_adamw, declare={"frozen": frozen})
