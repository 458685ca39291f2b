"""Sound setups of graphs, sets, images, sounds, tables and videos, as people write them in 2025 and 2026."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, StepLR

from corpus.batches import PAD, generator, inside
from corpus.case import Arguments
from corpus.public2.blocks import remade, setup

from .case import sound
from .parts_a import (
    Attention,
    Batch,
    Block,
    FeedForward,
    decaying_adamw,
    draw_weights,
    matrices,
    undecayed_adamw,
    waves,
)

# --------------------------------------------------------------------------------------------------- graphs


class GraphTransformer(nn.Module):
    """Nodes with their degrees, scores moved by the length of paths, and a node that stands for the graph."""

    def __init__(self, kinds: int = 12, dim: int = 32, heads: int = 4, layers: int = 3, farthest: int = 6):
        super().__init__()
        self.farthest = farthest
        self.atom_encoder = nn.Embedding(kinds, dim, padding_idx=PAD)
        self.degree_encoder = nn.Embedding(8, dim)
        self.graph_token = nn.Parameter(torch.randn(1, 1, dim) * 0.02)
        self.path_bias = nn.Embedding(farthest + 2, heads)
        self.graph_token_bias = nn.Parameter(torch.zeros(heads))
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm, self.readout = nn.LayerNorm(dim), nn.Linear(dim, 1)
        for table in (self.atom_encoder, self.degree_encoder, self.path_bias):
            nn.init.normal_(table.weight, std=0.02)
        with torch.no_grad():
            self.atom_encoder.weight[PAD] = 0.0

    def scores(self, distances: Tensor, real: Tensor) -> Tensor:
        """Return what is added to scores `[B, H, 1 + N, 1 + N]`; the graph's node is the first."""
        inner = self.path_bias(distances.clamp(max=self.farthest + 1)).permute(0, 3, 1, 2)
        bias = F.pad(inner, (1, 0, 1, 0))
        edge = torch.zeros_like(bias[0, 0])
        edge[0], edge[:, 0] = 1.0, 1.0
        bias = bias + self.graph_token_bias[:, None, None] * edge
        seen = F.pad(real, (1, 0), value=True)
        return bias.masked_fill(~seen[:, None, None, :], float("-inf"))

    def forward(self, atoms: Tensor, degrees: Tensor, distances: Tensor) -> Tensor:
        real = atoms != PAD
        x = self.atom_encoder(atoms) + self.degree_encoder(degrees)
        x = torch.cat((self.graph_token.expand(len(x), -1, -1), x), dim=1)
        bias = self.scores(distances, real)
        for block in self.blocks:
            x = block(x, bias)
        return self.readout(self.norm(x[:, 0])).squeeze(-1)


def path_lengths(edges: Tensor, farthest: int) -> Tensor:
    """Return the number of edges between nodes, or one more than the farthest where there is no path."""
    count = edges.shape[-1]
    lengths = torch.full(edges.shape, farthest + 1)
    reached = torch.eye(count).expand_as(edges)
    for length in range(farthest + 1):
        lengths = torch.where((reached > 0) & (lengths > farthest), length, lengths)
        reached = (reached @ (edges.float() + torch.eye(count)) > 0).float()
    return lengths


def graph_loss(model: nn.Module, batch: Batch) -> Tensor:
    predicted = model(batch["atoms"], batch["degrees"], batch["distances"])
    return (predicted - batch["energies"]).abs().mean()


@sound("graphs")
def graphs_with_path_lengths() -> Arguments:
    """Graphormer: no order but degrees and lengths of paths, padded graphs, and a node that is read."""
    draw = generator(460)
    real = inside((12, 7, 10, 5, 9, 11), 12)
    upper = (torch.rand(6, 12, 12, generator=draw) < 0.2).triu(1)
    chain = torch.eye(12, dtype=torch.bool).roll(1, 1).triu(1)
    edges = upper | chain
    edges = (edges | edges.transpose(1, 2)) & real[:, :, None] & real[:, None, :]
    batch = {
        "atoms": torch.randint(1, 12, (6, 12), generator=draw) * real,
        "degrees": edges.sum(-1).clamp(max=7),
        "distances": path_lengths(edges, farthest=6),
        "energies": torch.randn(6, generator=draw),
    }
    return setup(GraphTransformer, batch, graph_loss, decaying_adamw)


# ----------------------------------------------------------------------------------------------------- sets


class InducedBlock(nn.Module):
    """A set reads a few learned points, which have read the set."""

    def __init__(self, dim: int, heads: int, points: int):
        super().__init__()
        self.points = nn.Parameter(torch.randn(points, dim) * dim**-0.5)
        self.read_norm, self.write_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.read, self.write = Attention(dim, heads), Attention(dim, heads)
        self.ff_norm, self.ff = nn.LayerNorm(dim), FeedForward(dim)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        y = self.read_norm(x)
        points = self.points.expand(len(x), -1, -1)
        points = points + self.read(points, y, seen)
        x = x + self.write(y, self.write_norm(points))
        return x + self.ff(self.ff_norm(x))


class SetTransformer(nn.Module):
    def __init__(self, features: int = 3, dim: int = 32, classes: int = 4):
        super().__init__()
        self.embed = nn.Linear(features, dim)
        self.encoder = nn.ModuleList(InducedBlock(dim, 4, points=6) for _ in range(2))
        self.seed = nn.Parameter(torch.randn(1, dim) * dim**-0.5)
        self.pool_norm, self.pool = nn.LayerNorm(dim), Attention(dim, 4)
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, classes)

    def forward(self, points: Tensor, mask: Tensor) -> Tensor:
        seen = mask[:, None, None, :]
        x = self.embed(points)
        for block in self.encoder:
            x = block(x, seen)
        pooled = self.pool(self.seed.expand(len(x), -1, -1), self.pool_norm(x), seen)
        return self.head(self.norm(pooled.squeeze(1)))


def set_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["points"], batch["mask"]), batch["shapes"])


@sound("sets")
def points_in_any_order() -> Arguments:
    """Set Transformer: induced points, pooling by a query, padded clouds, and no positions at all."""
    mask = inside((16, 9, 12, 7, 16, 14), 16)
    points = torch.randn(6, 16, 3, generator=generator(461)) * mask[..., None]
    batch = {"points": points, "mask": mask, "shapes": torch.tensor([0, 1, 2, 3, 1, 0])}
    return setup(SetTransformer, batch, set_loss, decaying_adamw, declare={"positions": False})


# ------------------------------------------------------------------------------------------------ detection


class DetectorLayer(nn.Module):
    """A Post-LN layer whose queries and keys, but not its values, know their places."""

    def __init__(self, dim: int, heads: int, *, cross: bool):
        super().__init__()
        self.self_attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.cross_attn = nn.MultiheadAttention(dim, heads, batch_first=True) if cross else None
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(3 if cross else 2))
        self.ff = FeedForward(dim)

    def forward(
        self, x: Tensor, places: Tensor, memory: Tensor | None = None, memory_places: Tensor | None = None
    ) -> Tensor:
        q = x + places
        x = self.norms[0](x + self.self_attn(q, q, x, need_weights=False)[0])
        if self.cross_attn is not None:
            keys = memory + memory_places
            x = self.norms[1](x + self.cross_attn(x + places, keys, memory, need_weights=False)[0])
        return self.norms[-1](x + self.ff(x))


class Detector(nn.Module):
    """Finds objects by queries: each gives a class, or none, and a box."""

    def __init__(self, dim: int = 32, classes: int = 4, queries: int = 5, layers: int = 2):
        super().__init__()
        self.dim = dim
        self.backbone = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, dim, 3, 2, 1))
        self.encoder = nn.ModuleList(DetectorLayer(dim, 4, cross=False) for _ in range(layers))
        self.query_content = nn.Parameter(torch.randn(queries, dim))
        self.query_places = nn.Parameter(torch.randn(queries, dim))
        self.decoder = nn.ModuleList(DetectorLayer(dim, 4, cross=True) for _ in range(layers))
        self.class_embed = nn.Linear(dim, classes + 1)
        self.bbox_embed = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, 4))

    def grid(self, height: int, width: int) -> Tensor:
        """Return waves `[H * W, D]` of the rows and columns of a grid."""
        rows = waves(torch.arange(height), self.dim // 2)[:, None].expand(-1, width, -1)
        columns = waves(torch.arange(width), self.dim // 2)[None].expand(height, -1, -1)
        return torch.cat((rows, columns), dim=-1).flatten(0, 1)

    def forward(self, images: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return classes and boxes after each layer of the decoder."""
        features = self.backbone(images)
        places = self.grid(*features.shape[-2:])
        memory = features.flatten(2).transpose(1, 2)
        for layer in self.encoder:
            memory = layer(memory, places)
        x = self.query_content.expand(len(images), -1, -1)
        outputs = []
        for layer in self.decoder:
            x = layer(x, self.query_places, memory, places)
            outputs.append((self.class_embed(x), self.bbox_embed(x).sigmoid()))
        return outputs


@torch.no_grad()
def best_queries(logits: Tensor, boxes: Tensor, classes: Tensor, targets: Tensor) -> Tensor:
    """Return which query `[objects]` of a row answers for each object at the least cost."""
    cost = 5 * torch.cdist(boxes, targets, p=1) - logits.softmax(-1)[:, classes]
    choices = torch.tensor(list(permutations(range(len(boxes)), len(targets))))
    costs = cost[choices, torch.arange(len(targets))].sum(1)
    return choices[costs.argmin()]


def layer_loss(logits: Tensor, boxes: Tensor, batch: Batch) -> Tensor:
    """Return the loss of classes, in which "none" counts a tenth, and of the matched boxes."""
    none = logits.shape[-1] - 1
    wanted = torch.full(logits.shape[:2], none)
    distance = torch.zeros(())
    for row, (classes, targets) in enumerate(zip(batch["classes"], batch["boxes"], strict=True)):
        chosen = best_queries(logits[row], boxes[row], classes, targets)
        wanted[row, chosen] = classes
        distance = distance + (boxes[row, chosen] - targets).abs().sum()
    weight = torch.ones(none + 1)
    weight[none] = 0.1
    return (
        F.cross_entropy(logits.transpose(1, 2), wanted, weight=weight) + distance / batch["classes"].numel()
    )


def detection_loss(model: nn.Module, batch: Batch) -> Tensor:
    losses = [layer_loss(logits, boxes, batch) for logits, boxes in model(batch["images"])]
    return torch.stack(losses).sum()


def two_rates(model: Any) -> AdamW:
    """Return AdamW with a tenth of the rate for the backbone; only matrices decay."""
    decayed = matrices(model)
    backbone = set(model.backbone.parameters())
    groups = []
    for inside_backbone in (False, True):
        rate = 1e-4 if inside_backbone else 1e-3
        chosen = [p for p in model.parameters() if (p in backbone) == inside_backbone]
        groups.append({"params": [p for p in chosen if p in decayed], "lr": rate, "weight_decay": 1e-2})
        groups.append({"params": [p for p in chosen if p not in decayed], "lr": rate, "weight_decay": 0.0})
    return AdamW(groups)


def clipped_detection_step(
    model: nn.Module, batch: Batch, optimizer: Optimizer, scheduler: LRScheduler | None = None
) -> Tensor:
    model.train()
    loss = detection_loss(model, batch)
    optimizer.zero_grad()
    loss.backward()
    clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    if scheduler is not None:
        scheduler.step()
    return loss.detach()


@sound("detection")
def boxes_by_queries() -> Arguments:
    """DETR: queries matched to objects after each layer, a slower backbone, clipping at a tenth."""
    draw = generator(462)
    batch = {
        "images": torch.rand(4, 3, 16, 16, generator=draw),
        "classes": torch.randint(0, 4, (4, 3), generator=draw),
        "boxes": torch.rand(4, 3, 4, generator=draw) * 0.5 + 0.2,
    }
    return setup(
        Detector,
        batch,
        detection_loss,
        two_rates,
        step=clipped_detection_step,
        scheduler=lambda optimizer: StepLR(optimizer, step_size=80, gamma=0.1),
        declare={"max_grad_norm": 0.1},
    )


# ------------------------------------------------------------------------------------------------ codebooks


class ConditionDropout(nn.Module):
    """Blanks the whole condition of some rows in training, so that the model also learns to do without."""

    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate

    def forward(self, condition: Tensor) -> Tensor:
        if not self.training:
            return condition
        kept = torch.rand(len(condition), 1, 1, device=condition.device) >= self.rate
        return condition * kept


class MusicModel(nn.Module):
    """Writes several codebooks at once, each a step behind the one before it, and reads a description."""

    def __init__(self, codebooks: int = 4, card: int = 48, dim: int = 48, words: int = 20, layers: int = 3):
        super().__init__()
        self.codebooks, self.card, self.dim = codebooks, card, dim
        self.emb = nn.ModuleList(nn.Embedding(card + 1, dim) for _ in range(codebooks))
        self.cfg_dropout, self.output_proj = ConditionDropout(0.1), nn.Linear(words, dim)
        self.transformer = nn.ModuleList(Block(dim, 4, cross=True) for _ in range(layers))
        self.out_norm = nn.LayerNorm(dim)
        self.linears = nn.ModuleList(nn.Linear(dim, card, bias=False) for _ in range(codebooks))
        draw_weights(self)

    def delayed(self, codes: Tensor) -> Tensor:
        """Return codes `[B, K, T + K]` that start with the special one, and begin one later in each book."""
        rows, books, length = codes.shape
        sequence = torch.full((rows, books, length + books), self.card, device=codes.device)
        for book in range(books):
            sequence[:, book, book + 1 : book + 1 + length] = codes[:, book]
        return sequence

    def forward(self, codes: Tensor, text: Tensor, text_mask: Tensor) -> Tensor:
        """Return logits `[B, K, T, card]`, each in its code's place again."""
        length = codes.shape[2]
        sequence = self.delayed(codes)[:, :, :-1]
        x = torch.stack([table(part) for table, part in zip(self.emb, sequence.unbind(1), strict=True)]).sum(
            0
        )
        x = x + waves(torch.arange(x.shape[1], device=x.device), self.dim)
        memory, seen = self.output_proj(self.cfg_dropout(text)), text_mask[:, None, None, :]
        for block in self.transformer:
            x = block(x, memory=memory, memory_mask=seen, causal=True)
        x = self.out_norm(x)
        logits = [linear(x[:, book : book + length]) for book, linear in enumerate(self.linears)]
        return torch.stack(logits, dim=1)


def codebook_loss(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch["codes"], batch["text"], batch["text_mask"])
    return F.cross_entropy(logits.flatten(0, 2), batch["codes"].flatten())


@sound("sounds")
def delayed_codebooks() -> Arguments:
    """MusicGen: four codebooks, each a step behind the last, and a padded description, dropped at times."""
    draw = generator(463)
    mask = inside((8, 5, 3, 7), 8)
    batch = {
        "codes": torch.randint(0, 48, (4, 4, 16), generator=draw),
        "text": torch.randn(4, 8, 20, generator=draw) * mask[..., None],
        "text_mask": mask,
    }
    return setup(MusicModel, batch, codebook_loss, decaying_adamw)


# --------------------------------------------------------------------------------------------------- scales


class ScaleModel(nn.Module):
    """Writes an image's codes scale by scale, all codes of a scale at once, from the scales before it."""

    codebook: Tensor
    scale_of: Tensor

    def __init__(
        self,
        scales: tuple[int, ...] = (1, 2, 4),
        codes: int = 32,
        width: int = 8,
        dim: int = 48,
        classes: int = 5,
    ):
        super().__init__()
        self.scales = scales
        self.register_buffer("codebook", torch.randn(codes, width, generator=generator(464)))
        sizes = torch.tensor([side * side for side in scales])
        scale_of = torch.repeat_interleave(torch.arange(len(scales)), sizes)
        self.register_buffer("scale_of", scale_of, persistent=False)
        self.class_emb, self.word_embed = nn.Embedding(classes, dim), nn.Linear(width, dim)
        self.lvl_embed, self.pos = (
            nn.Embedding(len(scales), dim),
            nn.Parameter(torch.empty(len(scale_of), dim)),
        )
        self.blocks = nn.ModuleList(Block(dim, 4) for _ in range(3))
        self.head_norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, codes)
        draw_weights(self)
        nn.init.normal_(self.pos, std=0.02)

    def inputs(self, codes: Tensor) -> Tensor:
        """Return what is known of the image before each scale but the first, at that scale's places."""
        largest, parts = self.scales[-1], []
        picture = self.codebook.new_zeros(len(codes), self.codebook.shape[1], largest, largest)
        sizes = [side * side for side in self.scales]
        for part, side, following in zip(codes.split(sizes, 1), self.scales, self.scales[1:], strict=False):
            grid = self.codebook[part].transpose(1, 2).unflatten(2, (side, side))
            picture = picture + F.interpolate(grid, size=largest, mode="bilinear")
            parts.append(F.adaptive_avg_pool2d(picture, following).flatten(2).transpose(1, 2))
        return torch.cat(parts, dim=1)

    def forward(self, codes: Tensor, labels: Tensor) -> Tensor:
        start = self.class_emb(labels)[:, None]
        x = torch.cat((start, self.word_embed(self.inputs(codes))), dim=1)
        x = x + self.lvl_embed(self.scale_of) + self.pos
        seen = self.scale_of[:, None] >= self.scale_of
        for block in self.blocks:
            x = block(x, seen)
        return self.head(self.head_norm(x))


def scale_loss(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch["codes"], batch["labels"])
    return F.cross_entropy(logits.flatten(0, 1), batch["codes"].flatten())


@sound("images by scales")
def scales_of_an_image() -> Arguments:
    """VAR: codes of one, four and sixteen places, each scale at once and seen by itself and by later ones."""
    draw = generator(465)
    batch = {"codes": torch.randint(0, 32, (6, 21), generator=draw), "labels": torch.arange(6) % 5}
    return setup(ScaleModel, batch, scale_loss, decaying_adamw)


# --------------------------------------------------------------------------------------------------- tables


class TableLayer(nn.Module):
    """Cells look at their row, then at their column; only rows with a known label are looked at."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.features, self.items = Attention(dim, heads), Attention(dim, heads)
        self.norms, self.ff = nn.ModuleList(nn.LayerNorm(dim) for _ in range(3)), FeedForward(dim)

    def forward(self, x: Tensor, known: int) -> Tensor:
        """Return cells `[B, rows, columns, D]`."""
        tables = len(x)
        rows = x.flatten(0, 1)
        rows = rows + self.features(self.norms[0](rows))
        columns = rows.unflatten(0, (tables, -1)).transpose(1, 2).flatten(0, 1)
        y = self.norms[1](columns)
        columns = columns + self.items(y, y[:, :known])
        x = columns.unflatten(0, (tables, -1)).transpose(1, 2)
        return x + self.ff(self.norms[2](x))


class TableModel(nn.Module):
    """Learns from a table's known rows what the others' classes are, in one pass."""

    def __init__(self, columns: int = 5, dim: int = 32, classes: int = 3, layers: int = 3):
        super().__init__()
        self.cell = nn.Linear(1, dim)
        self.column = nn.Embedding(columns, dim)
        self.label, self.unknown = nn.Embedding(classes, dim), nn.Parameter(torch.randn(dim) * 0.02)
        self.layers = nn.ModuleList(TableLayer(dim, 4) for _ in range(layers))
        self.norm, self.decoder = nn.LayerNorm(dim), nn.Linear(dim, classes)
        draw_weights(self)

    def forward(self, x: Tensor, known_labels: Tensor) -> Tensor:
        """Return logits `[B, unknown rows, classes]` of a table `[B, rows, columns]`."""
        known = known_labels.shape[1]
        mean, deviation = x[:, :known].mean(1, keepdim=True), x[:, :known].std(1, keepdim=True)
        cells = self.cell(((x - mean) / (deviation + 1e-6))[..., None]) + self.column.weight
        hidden = self.unknown.expand(len(x), x.shape[1] - known, -1)
        labels = torch.cat((self.label(known_labels), hidden), dim=1).unsqueeze(2)
        cells = torch.cat((cells, labels), dim=2)
        for layer in self.layers:
            cells = layer(cells, known)
        return self.decoder(self.norm(cells[:, known:, -1]))


def table_loss(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch["x"], batch["known_labels"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


@sound("tables")
def rows_learned_in_context() -> Arguments:
    """TabPFN: attention along rows and columns by turns, and rows to be told that see only the known ones."""
    draw = generator(466)
    x = torch.randn(8, 18, 5, generator=draw)
    scores = torch.einsum("brc,bck->brk", x, torch.randn(8, 5, 3, generator=draw))
    labels = scores.argmax(-1)
    batch = {"x": x, "known_labels": labels[:, :12], "labels": labels[:, 12:]}
    return setup(TableModel, batch, table_loss, decaying_adamw)


# --------------------------------------------------------------------------------------------------- videos


class DropPath(nn.Module):
    """Leaves out a branch for some rows in training, and makes up for it in the others."""

    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.rate == 0.0:
            return x
        kept = torch.rand(len(x), *(1 for _ in x.shape[1:]), device=x.device) >= self.rate
        return x * kept / (1 - self.rate)


class DividedBlock(nn.Module):
    """Attends along time at each place, then within each frame."""

    def __init__(self, dim: int, heads: int, drop: float):
        super().__init__()
        self.time_norm, self.time = nn.LayerNorm(dim), Attention(dim, heads)
        self.space_norm, self.space = nn.LayerNorm(dim), Attention(dim, heads)
        self.mlp_norm, self.mlp, self.drop_path = nn.LayerNorm(dim), FeedForward(dim), DropPath(drop)

    def forward(self, x: Tensor) -> Tensor:
        """Return tubes `[B, T, N, D]`."""
        rows, frames, places, _ = x.shape
        y = self.time_norm(x).transpose(1, 2).flatten(0, 1)
        y = self.time(y).unflatten(0, (rows, places)).transpose(1, 2)
        x = x + self.drop_path(y)
        y = self.space(self.space_norm(x).flatten(0, 1)).unflatten(0, (rows, frames))
        x = x + self.drop_path(y)
        return x + self.drop_path(self.mlp(self.mlp_norm(x)))


class VideoModel(nn.Module):
    """Cuts a video into tubes of two frames and names what happens in it."""

    def __init__(self, dim: int = 32, depth: int = 3, classes: int = 5, drop_path: float = 0.1):
        super().__init__()
        self.tubes = nn.Conv3d(3, dim, (2, 4, 4), (2, 4, 4))
        self.space_positions = nn.Parameter(torch.randn(1, 1, 9, dim) * 0.02)
        self.time_positions = nn.Parameter(torch.randn(1, 4, 1, dim) * 0.02)
        rates = torch.linspace(0.0, drop_path, depth).tolist()
        self.blocks = nn.ModuleList(DividedBlock(dim, 4, rate) for rate in rates)
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, classes)

    def forward(self, video: Tensor) -> Tensor:
        x = self.tubes(video).flatten(3).permute(0, 2, 3, 1)
        x = x + self.space_positions + self.time_positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(dim=(1, 2)))


def action_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    videos, actions = batch
    return F.cross_entropy(model(videos), actions, label_smoothing=0.1)


@sound("videos")
def time_then_space() -> Arguments:
    """TimeSformer: attention along time, then within frames; random depth, smoothed labels, one cycle."""
    videos = torch.rand(6, 3, 8, 12, 12, generator=generator(467))
    return remade(
        VideoModel,
        (videos, torch.arange(6) % 5),
        action_loss,
        undecayed_adamw,
        scheduler=lambda optimizer: OneCycleLR(optimizer, max_lr=1e-3, total_steps=200, cycle_momentum=False),
        declare={"steps": 200, "peak_lr": 1e-3},
    )
