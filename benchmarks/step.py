"""A training step of ours against ``torch.nn.Transformer`` of the same size, interleaved in one process.

Equal on both sides: parameters (their number is checked), one embedding tied three ways, sinusoidal
positions, dropout on embeddings, attention weights, the activation and every branch's output, batches, the
label-smoothed loss, fused Adam, fp32 or bf16 autocast. What differs:

- torch.nn draws its dropout masks element by element, ours cuts four from one integer (``nn.ops.dropout``);
- torch.nn wants an additive causal matrix, which is made once a length and kept;
- starting weights, which change no time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from normlab.data.batches import Batch, Batches, Ragged, TokenPairs, plan_shapes
from normlab.nn import PAD, Embedding
from normlab.nn.position import sinusoids
from normlab.optim import build_optimiser
from normlab.run.devices import autocast, hardware, prepare_process
from normlab.spec.config import MachineConfig, ModelConfig, OptimConfig
from normlab.tasks.build import build_seq2seq
from normlab.tasks.loss import label_smoothed

RESULTS = Path(__file__).parent / "results"
CPU = torch.device("cpu")
VOCAB = 5000
SMOOTHING = 0.1


class TorchTransformer(nn.Module):
    """torch.nn's encoder and decoder between our embedding and positions; no final norms for Post-LN."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embedding = Embedding.registry[config.embedding](VOCAB, config.dim)
        self.embedding.start_(torch.Generator().manual_seed(1))
        self.dropout = nn.Dropout(config.dropout)
        self.register_buffer("positions", sinusoids(256, config.dim), persistent=False)
        self.positions: Tensor
        first = config.encoder_placement == "pre"
        layer = {
            "d_model": config.dim,
            "nhead": config.heads,
            "dim_feedforward": config.ffn_dim,
            "dropout": config.dropout,
            "batch_first": True,
            "norm_first": first,
        }
        norms = [nn.LayerNorm(config.dim) if first else None for _ in range(2)]
        encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(**layer), config.encoder_layers, norms[0], enable_nested_tensor=False
        )
        decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(**layer), config.decoder_layers, norms[1])
        self.transformer = nn.Transformer(
            config.dim, config.heads, custom_encoder=encoder, custom_decoder=decoder, batch_first=True
        )
        self.causal: dict[int, Tensor] = {}

    def embed(self, ids: Tensor) -> Tensor:
        return self.dropout(self.embedding(ids) + self.positions[: ids.shape[1]])

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Logits `[B, T, V]`."""
        length = target.shape[1]
        if length not in self.causal:
            self.causal[length] = nn.Transformer.generate_square_subsequent_mask(length)
        padding = source == PAD
        hidden = self.transformer(
            self.embed(source),
            self.embed(target),
            tgt_mask=self.causal[length],
            tgt_is_causal=True,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        return self.embedding.logits(hidden)


def batches(max_tokens: int, count: int) -> list[Batch]:
    """Random tokens in the lengths of image captions: about 14 on either side, from 3 to 40."""
    rng = np.random.default_rng(1)
    source = np.clip(rng.lognormal(2.6, 0.3, 6000).round(), 3, 40).astype(int)
    target = np.clip((source * rng.lognormal(0.0, 0.15, 6000)).round(), 3, 40).astype(int)
    pairs = TokenPairs(
        *(Ragged.of([rng.integers(4, VOCAB, n).tolist() for n in lengths]) for lengths in (source, target))
    )
    made = Batches(pairs, plan_shapes(*pairs.lengths, max_tokens), 1)
    return [made.at(i) for i in range(min(count, made.steps_per_epoch))]


def stepper(model: nn.Module, precision: str) -> Callable[[Batch], float]:
    """A training step; its seconds."""
    optimiser = build_optimiser(model.parameters(), OptimConfig())
    for group in optimiser.param_groups:
        group["lr"].fill_(1e-4)
    model.train()

    def step(batch: Batch) -> float:
        start = time.perf_counter()
        with autocast(CPU, precision):
            sums = label_smoothed(
                model(batch.source, batch.target_in), batch.target_out, SMOOTHING, None, PAD
            )
        (sums.loss / batch.tokens).backward()
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        return time.perf_counter() - start

    return step


@dataclass(frozen=True)
class Row:
    """One setting: milliseconds a step, quartiles over batches and rounds."""

    placement: str
    precision: str
    threads: int
    steps: int
    ours_ms: tuple[float, float, float]
    torch_ms: tuple[float, float, float]
    ratio: tuple[float, float, float]
    """Ours over torch.nn, step by step on the same batch; below 1 is faster."""
    tokens_per_second: float
    """Source and target tokens of ours, without padding."""


def measure(config: ModelConfig, precision: str, threads: int, data: list[Batch], seconds: float) -> Row:
    """Ours and torch's step on each batch in turn, whose turn is first alternating, until the time is up."""
    prepare_process(MachineConfig(threads=threads))
    models = (build_seq2seq(config, VOCAB, 1), TorchTransformer(config))
    sizes = [sum(p.numel() for p in model.parameters()) for model in models]
    if sizes[0] != sizes[1]:
        raise AssertionError(f"not the same model: {sizes[0]} parameters against torch.nn's {sizes[1]}")
    steps = [stepper(model, precision) for model in models]
    for step in steps:
        step(max(data, key=lambda b: b.target_in.numel()))
    pairs: list[tuple[float, float]] = []
    end = time.perf_counter() + seconds
    tokens = 0
    while time.perf_counter() < end or len(pairs) < 4:
        batch = data[len(pairs) // 2 % len(data)]
        if len(pairs) % 2:
            theirs, ours = steps[1](batch), steps[0](batch)
        else:
            ours, theirs = steps[0](batch), steps[1](batch)
        pairs.append((ours, theirs))
        tokens += batch.tokens + batch.source_tokens
    ours_ms, torch_ms = ([1000 * t for t in side] for side in zip(*pairs, strict=True))
    return Row(
        config.encoder_placement,
        precision,
        threads,
        len(pairs),
        quartiles(ours_ms),
        quartiles(torch_ms),
        quartiles([a / b for a, b in pairs]),
        tokens / sum(a for a, _ in pairs),
    )


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def table(rows: list[Row]) -> Iterator[str]:
    """Markdown lines."""
    yield "| placement | precision | threads | steps | ours, ms | torch.nn, ms | ratio | our tokens/s |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for r in rows:
        ours, theirs = (f"{m:.0f} ({a:.0f} to {b:.0f})" for a, m, b in (r.ours_ms, r.torch_ms))
        low, middle, high = r.ratio
        yield (
            f"| {r.placement} | {r.precision} | {r.threads} | {r.steps} | {ours} | {theirs} "
            f"| {middle:.2f} ({low:.2f} to {high:.2f}) | {r.tokens_per_second:.0f} |"
        )


def main() -> None:
    """Measure every setting, print the table, write it when asked."""
    parser = argparse.ArgumentParser(description="A training step against torch.nn.Transformer.")
    parser.add_argument("--seconds", type=float, default=20.0, help="for each setting")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--placements", nargs="+", choices=["post", "pre"], default=["post", "pre"])
    parser.add_argument("--max-tokens", type=int, default=4096)
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/step.json and step.md")
    args = parser.parse_args()
    data = batches(args.max_tokens, 16)
    size = replace(ModelConfig(), dropout=0.1, attention_dropout=0.1, ffn_dropout=0.1)
    rows = []
    for threads in args.threads:
        for precision in args.precisions:
            for placement in args.placements:
                config = replace(size, encoder_placement=placement, decoder_placement=placement)
                rows.append(measure(config, precision, threads, data, args.seconds))
                print(list(table(rows))[-1], flush=True)
    machine = hardware(CPU).replace(f"{torch.get_num_threads()} threads, ", "")
    about = (
        f"{size.encoder_layers}+{size.decoder_layers} layers, d {size.dim}, FFN {size.ffn_dim}, "
        f"vocabulary {VOCAB}, dropout 0.1, at most {args.max_tokens} positions a batch; "
        f"medians with quartiles; {machine}"
    )
    text = "\n".join([about, "", *table(rows), ""])
    print(f"\n{text}")
    if args.write:
        RESULTS.mkdir(exist_ok=True)
        content = {"about": about, "rows": [asdict(row) for row in rows]}
        (RESULTS / "step.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        (RESULTS / "step.md").write_text(f"# A training step\n\n{text}", encoding="utf-8")


if __name__ == "__main__":
    main()
