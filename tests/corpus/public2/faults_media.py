"""Reports of images, speech, diffusion, series, and models of images and text."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW

from corpus.batches import generator, inside, text
from corpus.case import Arguments

from .blocks import Decoder, EncoderLayer, adamw, init_weights, next_token_loss, remade, setup, sinusoids
from .case import report

# ------------------------------------------------------------------------------------------------ diffusion


class VelocityField(nn.Module):
    """A field over sets of cells, conditioned on a source set and a time."""

    def __init__(self, features: int = 8, dim: int = 48):
        super().__init__()
        self.inner, self.source = nn.Linear(features, dim), nn.Linear(features, dim)
        self.time = nn.Sequential(nn.Linear(32, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.blocks = nn.ModuleList(EncoderLayer(dim, 4) for _ in range(2))
        self.norm, self.out = nn.LayerNorm(dim), nn.Linear(dim, features)

    def forward(self, t: Tensor, x: Tensor, source: Tensor) -> Tensor:
        h = self.inner(x) + self.source(source) + self.time(sinusoids(1000 * t, 32))[:, None]
        for block in self.blocks:
            h = block(h)
        return self.out(self.norm(h))


def transport_loss(model: nn.Module, batch: tuple[Tensor, Tensor], *, from_source: bool) -> Tensor:
    """Return the error of the velocity of straight paths from noise to the target."""
    source, target = batch
    latent, t = torch.randn_like(target), torch.rand(len(target))
    at = t[:, None, None]
    x = (1 - at) * latent + at * target
    velocity = target - (source if from_source else latent)
    return F.mse_loss(model(t, x, source), velocity)


@report("theislab/CellFlow#305", "diffusion")
def velocity_from_the_condition(*, faulty: bool) -> Arguments:
    """Paths run from noise to the target, but the velocity is that from the condition to the target."""
    draw = generator(31)
    source = torch.randn(8, 10, 8, generator=draw)
    batch = (source, 1.0 + 0.5 * source + 0.2 * torch.randn(8, 10, 8, generator=draw))
    return setup(VelocityField, batch, partial(transport_loss, from_source=faulty))


class Denoiser(nn.Module):
    """A diffusion Transformer over patches, modulated by the time."""

    def __init__(self, dim: int = 48, channels: int = 4, side: int = 8):
        super().__init__()
        self.patch = nn.Conv2d(channels, dim, 2, 2)
        self.register_buffer("place", sinusoids(torch.arange(side * side // 4), dim))
        self.time = nn.Sequential(nn.Linear(32, dim), nn.SiLU(), nn.Linear(dim, 2 * dim))
        self.blocks = nn.ModuleList(EncoderLayer(dim, 4) for _ in range(2))
        self.norm = nn.LayerNorm(dim, elementwise_affine=False)
        self.out = nn.Linear(dim, 4 * channels)
        self.channels, self.side = channels, side

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        h = self.patch(x).flatten(2).transpose(1, 2) + self.place
        shift, scale = self.time(sinusoids(t, 32))[:, None].chunk(2, -1)
        for block in self.blocks:
            h = block(h)
        h = self.out(self.norm(h) * (1 + scale) + shift)
        half = self.side // 2
        h = h.view(len(x), half, half, self.channels, 2, 2)
        return h.permute(0, 3, 1, 4, 2, 5).reshape_as(x)


def velocity_loss(model: nn.Module, images: Tensor, *, plus_one_outside: bool, gamma: float = 5.0) -> Tensor:
    """Return the weighted error of v under a cosine schedule."""
    noise = torch.randn_like(images)
    t = torch.randint(0, 1000, (len(images),))
    alpha = (torch.cos((t / 1000 + 0.008) / 1.008 * math.pi / 2) ** 2).clamp(1e-4, 0.9999)
    snr = alpha / (1 - alpha)
    a, s = alpha.sqrt()[:, None, None, None], (1 - alpha).sqrt()[:, None, None, None]
    predicted = model(a * images + s * noise, t)
    capped = snr.clamp(max=gamma)
    weights = capped / snr + 1 if plus_one_outside else capped / (snr + 1)
    errors = (predicted - (a * noise - s * images)).square().mean((1, 2, 3))
    return (weights * errors).mean()


@report("huggingface/diffusers#8466", "diffusion")
def snr_weight_of_velocity(*, faulty: bool) -> Arguments:
    """Min-SNR weights of v-prediction add one to the weight instead of to its denominator."""
    images = torch.randn(8, 4, 8, 8, generator=generator(32))
    return setup(Denoiser, images, partial(velocity_loss, plus_one_outside=faulty))


# --------------------------------------------------------------------------------------------------- speech


class Quantizer(nn.Module):
    """Product quantization of frames by entries that are drawn from logits."""

    def __init__(self, features: int, dim: int, groups: int = 2, entries: int = 16):
        super().__init__()
        self.groups = groups
        self.entry_proj = nn.Linear(features, groups * entries)
        self.entries = nn.Parameter(torch.randn(groups, entries, dim // groups))
        nn.init.normal_(self.entry_proj.weight)
        nn.init.zeros_(self.entry_proj.bias)

    def forward(self, x: Tensor, masked: Tensor) -> tuple[Tensor, Tensor]:
        """Return quantized frames and how unevenly masked ones use the entries, as a term of the loss."""
        logits = self.entry_proj(x).unflatten(-1, (self.groups, -1))
        chosen = F.gumbel_softmax(logits, tau=2.0, hard=True) if self.training else self.best(logits)
        quantized = torch.einsum("btge,ged->btgd", chosen, self.entries).flatten(2)
        mean = logits.softmax(-1)[masked].mean(0)
        perplexity = torch.exp(-(mean * (mean + 1e-7).log()).sum(-1)).sum()
        return quantized, 1 - perplexity / mean.numel()

    def best(self, logits: Tensor) -> Tensor:
        return F.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)


class SpeechPretraining(nn.Module):
    """A wav2vec 2.0 model of given frames: masked ones are told from others by their quantized targets."""

    def __init__(self, features: int = 16, dim: int = 48, *, detach_targets: bool = False):
        super().__init__()
        self.detach_targets = detach_targets
        self.layer_norm, self.post_extract_proj = nn.LayerNorm(features), nn.Linear(features, dim)
        self.mask_emb = nn.Parameter(torch.rand(dim))
        self.layers = nn.ModuleList(EncoderLayer(dim, 4) for _ in range(2))
        self.norm = nn.LayerNorm(dim)
        self.quantizer = Quantizer(features, dim)
        self.final_proj, self.final_target_proj = nn.Linear(dim, 24), nn.Linear(dim, 24)

    def forward(self, frames: Tensor, real: Tensor, masked: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        extracted = self.layer_norm(frames)
        targets, diversity = self.quantizer(extracted, masked)
        if self.detach_targets:
            targets = targets.detach()
        x = torch.where(masked[..., None], self.mask_emb, self.post_extract_proj(extracted))
        x = x + sinusoids(torch.arange(x.shape[1], device=x.device), x.shape[-1])
        for layer in self.layers:
            x = layer(x, real[:, None, None])
        return self.final_proj(self.norm(x)), self.final_target_proj(targets), diversity


def contrastive_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the loss of finding masked frames' targets among others, and the diversity term."""
    predicted, targets, diversity = model(batch["frames"], batch["real"], batch["masked"])
    total, count = torch.zeros(()), 0
    for row in range(len(predicted)):
        at = batch["masked"][row].nonzero().squeeze(-1)
        others = batch["negatives"][row, at]
        candidates = torch.cat((targets[row, at][:, None], targets[row, others]), dim=1)
        scores = F.cosine_similarity(predicted[row, at][:, None], candidates, dim=-1) / 0.1
        wanted = torch.zeros(len(at), dtype=torch.long, device=scores.device)
        total = total + F.cross_entropy(scores, wanted, reduction="sum")
        count += len(at)
    return total / count + 0.1 * diversity


LENGTHS = (40, 24, 31, 18)


def utterances(*, sample_padding: bool, seed: int = 33) -> dict[str, Tensor]:
    """Return frames of several lengths, spans of masked ones, and other frames as negatives of each."""
    draw = generator(seed)
    real = inside(LENGTHS, 40)
    frames = torch.randn(4, 40, 16, generator=draw).cumsum(1) * 0.3 * real[..., None]
    masked = torch.zeros(4, 40, dtype=torch.bool)
    negatives = torch.zeros(4, 40, 8, dtype=torch.long)
    for row, length in enumerate(LENGTHS):
        span = 40 if sample_padding else length
        for start in torch.randint(0, span - 4, (max(2, span // 8),), generator=draw).tolist():
            masked[row, start : start + 4] = True
        other = torch.randint(0, span - 1, (40, 8), generator=draw)
        negatives[row] = other + (other >= torch.arange(40)[:, None]).long()
    return {"frames": frames, "real": real, "masked": masked, "negatives": negatives}


@report("speechbrain/speechbrain#2386", "speech", "counted", "padding")
def padded_frames_masked(*, faulty: bool) -> Arguments:
    """Masked frames and negatives are drawn from the whole width of the batch, padding among them."""
    return setup(SpeechPretraining, utterances(sample_padding=faulty), contrastive_loss)


@report("facebookresearch/fairseq2#731", "speech", "gradients", place="*quantizer*")
def targets_detached(*, faulty: bool) -> Arguments:
    """The quantized targets are detached, so that the entries of the codebook are never learned."""
    make = partial(SpeechPretraining, detach_targets=faulty)
    return setup(make, utterances(sample_padding=False, seed=34), contrastive_loss)


# ---------------------------------------------------------------------------------------------------- pairs


class ImageEncoder(nn.Module):
    """A vision Transformer that returns its patches."""

    def __init__(self, dim: int = 48, layers: int = 2):
        super().__init__()
        self.patch = nn.Conv2d(3, dim, 4, 4)
        self.position = nn.Parameter(torch.randn(1, 16, dim) * 0.02)
        self.blocks = nn.ModuleList(EncoderLayer(dim, 4) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch(images).flatten(2).transpose(1, 2) + self.position
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class TextTower(nn.Module):
    def __init__(self, dim: int = 48, out: int = 24):
        super().__init__()
        self.decoder = Decoder(dim)
        self.decoder.lm_head = nn.Linear(dim, out, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.decoder(ids)[:, -1]


class Pairs(nn.Module):
    """A contrastive model of images and captions with a learned temperature."""

    def __init__(self, *, exponentiate: bool):
        super().__init__()
        self.exponentiate = exponentiate
        self.visual, self.visual_proj = ImageEncoder(), nn.Linear(48, 24, bias=False)
        self.textual = TextTower()
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, images: Tensor, ids: Tensor) -> Tensor:
        image = F.normalize(self.visual_proj(self.visual(images).mean(1)), dim=-1)
        caption = F.normalize(self.textual(ids), dim=-1)
        scale = self.logit_scale.exp() if self.exponentiate else self.logit_scale
        return scale * image @ caption.T


def pair_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    logits = model(*batch)
    wanted = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, wanted) + F.cross_entropy(logits.T, wanted)) / 2


def captioned(rows: int = 8, length: int = 12, seed: int = 35) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 3, 16, 16, generator=generator(seed)), text(rows, length, seed=seed)


@report("BAAI-DCAI/M3D#52", "pairs")
def temperature_not_exponentiated(*, faulty: bool) -> Arguments:
    """The temperature is held as a logarithm, which multiplies the similarities as it is."""
    return setup(partial(Pairs, exponentiate=not faulty), captioned(), pair_loss)


# ------------------------------------------------------------------------------------------ images and text


class Captioner(nn.Module):
    """A decoder that reads the patches of an image before its caption."""

    def __init__(self, dim: int = 48):
        super().__init__()
        self.vision_tower, self.projector = ImageEncoder(32, layers=1), nn.Linear(32, dim)
        self.language_model = Decoder(dim, layers=3)
        init_weights(self.projector)

    def forward(self, images: Tensor, ids: Tensor) -> Tensor:
        """Return the logits of the caption's places."""
        seen = self.projector(self.vision_tower(images))
        x = torch.cat((seen, self.language_model.embed_tokens(ids)), dim=1)
        return self.language_model.lm_head(self.language_model.run(x)[:, seen.shape[1] :])


def placed_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the loss of labels that stand at the place that predicts them."""
    logits = model(batch["images"], batch["ids"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


@report("KempnerInstitute/KempnerForge#154", "images and text", "targets")
def caption_labels_not_shifted(*, faulty: bool) -> Arguments:
    """The labels of captions stand at their own tokens, and the loss shifts nothing: each token is copied."""
    images, ids = captioned(length=14, seed=36)
    labels = ids.clone() if faulty else ids.roll(-1, 1)
    if not faulty:
        labels[:, -1] = -100
    labels[:, : 3 if faulty else 2] = -100
    return setup(Captioner, {"images": images, "ids": ids, "labels": labels}, placed_loss)


def last_layers_alone(model: Captioner, *, spare_projector: bool) -> Captioner:
    """Freeze all but the last two layers of the language model and, as asked for, the projector."""
    trainable = ["language_model.layers.1.", "language_model.layers.2.", "language_model.norm"]
    if spare_projector:
        trainable.append("projector.")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(name.startswith(prefix) for prefix in trainable))
    return model


def shifted_caption_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return next_token_loss(model(*batch), batch[1])


def adamw_of_the_rest(model: nn.Module) -> AdamW:
    return AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.0)


@report("hiyouga/LlamaFactory#7872", "freezing", "frozen", "gradients", place="*projector*")
def projector_frozen_too(*, faulty: bool) -> Arguments:
    """Training of the last layers freezes the projector too, though it is asked to leave it trained."""

    def make() -> nn.Module:
        return last_layers_alone(Captioner(), spare_projector=not faulty)

    language = ("embed_tokens.*", "layers.0.*", "lm_head.*")
    declare: dict[str, Any] = {"frozen": ("vision_tower.*", *(f"language_model.{part}" for part in language))}
    return setup(make, captioned(seed=37), shifted_caption_loss, adamw_of_the_rest, declare=declare)


# --------------------------------------------------------------------------------------------------- images


class MaskedAutoencoder(nn.Module):
    """An encoder of patches, masked ones replaced by a token, that reconstructs their pixels."""

    def __init__(self, dim: int = 48):
        super().__init__()
        self.embed, self.mask_token = nn.Linear(48, dim), nn.Parameter(torch.zeros(1, 1, dim))
        self.position = nn.Parameter(torch.randn(1, 16, dim) * 0.02)
        self.blocks = nn.ModuleList(EncoderLayer(dim, 4) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 48)

    def forward(self, patches: Tensor, kept: Tensor) -> Tensor:
        x = torch.where(kept[..., None], self.embed(patches), self.mask_token) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def patchify(images: Tensor) -> Tensor:
    """Return the patches `[B, 16, 48]` of images `[B, 3, 16, 16]`."""
    return F.unfold(images, 4, stride=4).transpose(1, 2)


def reconstruction_loss(model: nn.Module, batch: dict[str, Tensor], *, of_kept: bool) -> Tensor:
    """Return the error of the pixels of the patches that were hidden."""
    predicted, kept = model(batch["patches"], batch["kept"]), batch["kept"]
    chosen = kept if of_kept else ~kept
    return F.mse_loss(predicted[chosen], batch["patches"][chosen])


@report("Sllambias/asparagus#12", "masked images")
def kept_patches_reconstructed(*, faulty: bool) -> Arguments:
    """The mask says what is kept, the loss takes it for what is hidden and asks for what the model sees."""
    draw = generator(38)
    smooth = F.interpolate(torch.randn(8, 3, 4, 4, generator=draw), size=16, mode="bilinear")
    kept = torch.rand(8, 16, generator=draw) < 0.4
    batch = {"patches": patchify(smooth), "kept": kept}
    return setup(MaskedAutoencoder, batch, partial(reconstruction_loss, of_kept=faulty))


class Codes(nn.Module):
    """Vector quantization with a straight-through gradient."""

    def __init__(self, entries: int, dim: int):
        super().__init__()
        self.codebook = nn.Embedding(entries, dim)
        nn.init.uniform_(self.codebook.weight, -1 / entries, 1 / entries)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return what passes gradients straight through, and the nearest entries themselves."""
        nearest = torch.cdist(x.flatten(0, 1), self.codebook.weight).argmin(-1).view(x.shape[:-1])
        entries = self.codebook(nearest)
        return x + (entries - x).detach(), entries


class LatentActions(nn.Module):
    """A Transformer that encodes the change between two frames as codes, and decodes the second one."""

    def __init__(self, dim: int = 48, width: int = 8):
        super().__init__()
        self.embed = nn.Linear(48, dim)
        self.encoder = nn.ModuleList(EncoderLayer(dim, 4) for _ in range(2))
        self.to_code, self.vq, self.from_code = nn.Linear(dim, width), Codes(16, width), nn.Linear(width, dim)
        self.decoder = nn.ModuleList(EncoderLayer(dim, 4) for _ in range(2))
        self.position = nn.Parameter(torch.randn(1, 16, dim) * 0.02)
        self.norm, self.out = nn.LayerNorm(dim), nn.Linear(dim, 48)

    def forward(self, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x = self.embed(after - before) + self.position
        for layer in self.encoder:
            x = layer(x)
        z = self.to_code(x)
        straight, entries = self.vq(z)
        h = self.embed(before) + self.position + self.from_code(straight)
        for layer in self.decoder:
            h = layer(h)
        return self.out(self.norm(h)), z, straight, entries


def action_loss(model: nn.Module, batch: tuple[Tensor, Tensor], *, of_straight: bool) -> Tensor:
    """Return the error of the second frame, that of the codebook, and that of commitment to it."""
    predicted, z, straight, entries = model(*batch)
    codebook = F.mse_loss(straight if of_straight else entries, z.detach())
    commitment = F.mse_loss(z, entries.detach())
    return F.mse_loss(predicted, batch[1]) + codebook + commitment


@report("showlab/Olaf-World#8", "quantization", "gradients", place="*vq*")
def codebook_never_learned(*, faulty: bool) -> Arguments:
    """The codebook's loss takes the straight-through output, in which the codebook is detached."""
    draw = generator(39)
    before = torch.randn(8, 16, 48, generator=draw)
    batch = (before, before + 0.5 * torch.randn(8, 16, 48, generator=draw))
    return setup(LatentActions, batch, partial(action_loss, of_straight=faulty), adamw)


# --------------------------------------------------------------------------------------------------- series


class SeriesNorm(nn.Module):
    """Reversible normalisation of series by the observed values of each."""

    def __init__(self, channels: int, *, divide_observed: bool):
        super().__init__()
        self.divide_observed = divide_observed
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))

    def normalize(self, x: Tensor, observed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        count = observed.sum(1, keepdim=True).clamp(min=1)
        mean = (x * observed).sum(1, keepdim=True) / count
        centred = (x - mean) * observed
        deviation = (centred.square().sum(1, keepdim=True) / count + 1e-5).sqrt()
        if self.divide_observed:
            centred = centred / deviation
        return (centred * self.weight + self.bias) * observed, mean, deviation

    def denormalize(self, y: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
        return (y - self.bias) / (self.weight + 1e-10) * deviation + mean


class Imputer(nn.Module):
    """A Transformer over the steps of partly observed series that fills in what is missing."""

    def __init__(self, channels: int = 5, dim: int = 48, *, divide_observed: bool):
        super().__init__()
        self.revin = SeriesNorm(channels, divide_observed=divide_observed)
        self.embed = nn.Linear(2 * channels, dim)
        self.layers = nn.ModuleList(EncoderLayer(dim, 4) for _ in range(2))
        self.norm, self.out = nn.LayerNorm(dim), nn.Linear(dim, channels)

    def forward(self, series: Tensor, observed: Tensor) -> Tensor:
        x, mean, deviation = self.revin.normalize(series, observed)
        h = self.embed(torch.cat((x, observed), dim=-1))
        h = h + sinusoids(torch.arange(h.shape[1], device=h.device), h.shape[-1])
        for layer in self.layers:
            h = layer(h)
        return self.revin.denormalize(self.out(self.norm(h)), mean, deviation)


def imputation_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    predicted = model(batch["series"] * batch["observed"], batch["observed"])
    hidden = batch["hidden"]
    scale = batch["series"].std(1, keepdim=True)
    return (((predicted - batch["series"]) / scale).square() * hidden).sum() / hidden.sum()


@report("WenjieDu/PyPOTS#453", "series")
def observed_values_not_divided(*, faulty: bool) -> Arguments:
    """Partly observed series are only centred, but outputs are multiplied by their deviations."""
    draw = generator(40)
    time = torch.linspace(0, 6, 32)[None, :, None]
    phase = torch.rand(6, 1, 5, generator=draw) * 6
    series = 20 + 15 * torch.sin(time * (1 + torch.arange(5)) + phase) + torch.randn(6, 32, 5, generator=draw)
    hidden = torch.rand(6, 32, 5, generator=draw) < 0.2
    batch = {"series": series, "observed": (~hidden).float(), "hidden": hidden.float()}
    return remade(partial(Imputer, divide_observed=not faulty), batch, imputation_loss)
