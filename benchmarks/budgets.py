"""Whether ``normlab check`` keeps its budget: thirty models of 1M to 500M parameters at three budgets.

    python benchmarks/budgets.py                                  # every model at every budget: an hour
    python benchmarks/budgets.py many_5000 gpt_500m --budgets 5   # some of them
    python benchmarks/budgets.py --processor                      # on a busy machine: see below
    python benchmarks/budgets.py --write                          # write benchmarks/results/budgets.json, too

Each check runs in a process of its own, one at a time. A check keeps its budget if it takes no more than a
tenth of it, or 5 s, beyond its budget, the construction of the model and one pass of the whole batch. A
budget that is too small for anything is refused, which must keep it as well. With ``--processor`` budgets and
times are seconds of the processor and not of the clock: what other programs take does not count. A pass that
sleeps moves this clock on and waits for nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

import normlab
from normlab.base.units import count

RESULTS = Path(__file__).resolve().parent / "results/budgets.json"
BUDGETS: Final = (5.0, 15.0, 60.0)
SHARE, LEAST_S = 0.1, 5.0
"""What a check may take beyond its budget: this share of it, or so many seconds, if that is more."""


class Block(nn.Module):
    """Attention and a feed-forward branch, each after a norm; several experts may share the latter."""

    def __init__(self, dim: int, heads: int, dropout: float, experts: int) -> None:
        super().__init__()
        self.heads, self.norm, self.last = heads, nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.maps, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)) for _ in range(experts)
        )
        self.router = nn.Linear(dim, experts) if experts > 1 else None
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.maps(self.norm(x)).chunk(3, -1)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        y = self.last(x)
        if self.router is None:
            return x + self.dropout(self.experts[0](y))
        weights = self.router(y).softmax(-1)
        outputs = (weights[..., i, None] * expert(y) for i, expert in enumerate(self.experts))
        return x + self.dropout(sum(outputs))


class Decoder(nn.Module):
    """A plain decoder; ``tied`` shares its embedding with its head."""

    def __init__(
        self,
        dim: int,
        layers: int,
        vocabulary: int,
        positions: int,
        *,
        dropout: float = 0.0,
        experts: int = 1,
        tied: bool = True,
    ) -> None:
        super().__init__()
        heads = max(2, dim // 64)
        self.words, self.places = nn.Embedding(vocabulary, dim), nn.Embedding(positions, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, dropout, experts) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocabulary, bias=False)
        for weight in (self.words.weight, self.places.weight, self.head.weight):
            nn.init.normal_(weight, std=0.02)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Gain(nn.Module):
    """One number that its input is multiplied by."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


class Many(nn.Module):
    """A model of very many modules, each of one parameter."""

    def __init__(self, modules: int, dim: int = 32, vocabulary: int = 48) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, dim)
        self.many = nn.Sequential(*(Gain() for _ in range(modules)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.many(self.words(ids))))


class Slow(Decoder):
    """A decoder whose pass takes a time that no size explains."""

    def forward(self, ids: Tensor) -> Tensor:
        time.sleep(3)
        return super().forward(ids)


class Recurrent(nn.Module):
    """An LSTM language model."""

    def __init__(self, dim: int, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, dim)
        self.mix = nn.LSTM(dim, dim, layers, batch_first=True)
        self.head = nn.Linear(dim, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.mix(self.words(ids))[0])


class Images(nn.Module):
    """A small vision transformer."""

    def __init__(self, dim: int, layers: int, patch: int = 16, size: int = 224) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, dim, patch, patch)
        self.places = nn.Parameter(0.02 * torch.randn((size // patch) ** 2, dim))
        layer = nn.TransformerEncoderLayer(dim, dim // 64, 4 * dim, 0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(dim, 100)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.places
        return self.head(self.layers(x).mean(1))


def next_token_loss(model: nn.Module, ids: Tensor) -> Tensor:
    """The cross-entropy of each next token."""
    return functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of every case."""
    return torch.optim.AdamW(model.parameters(), lr=3e-4)


def of_ids(model: nn.Module, vocabulary: int, rows: int, width: int) -> normlab.Setup:
    """A language model with a batch of random tokens."""
    ids = torch.randint(0, vocabulary, (rows, width))
    return normlab.Setup(model, ids, loss=next_token_loss, optimizer=adamw)


def decoder(
    dim: int, layers: int, vocabulary: int, rows: int, width: int, kind: type[Decoder] = Decoder, **more: Any
) -> normlab.Setup:
    """A decoder with a batch of its size."""
    return of_ids(kind(dim, layers, vocabulary, width, **more), vocabulary, rows, width + 1)


def many(modules: int) -> normlab.Setup:
    """A model of many modules."""
    return of_ids(Many(modules), 48, 4, 17)


def recurrent(dim: int, layers: int, rows: int, width: int) -> normlab.Setup:
    """A recurrent model."""
    return of_ids(Recurrent(dim, layers, 5000), 5000, rows, width)


def images(dim: int, layers: int, rows: int) -> normlab.Setup:
    """A model of images with their labels."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])

    batch = torch.randn(rows, 3, 224, 224), torch.arange(rows) % 100
    return normlab.Setup(Images(dim, layers), batch, loss=loss, optimizer=adamw)


def library(name: str, rows: int, width: int, **sizes: Any) -> normlab.Setup:
    """A model of transformers', which computes its loss itself."""
    import transformers

    config = getattr(transformers, f"{name}Config")(**sizes)
    kind = {"T5": "T5ForConditionalGeneration", "Bert": "BertForMaskedLM", "GPT2": "GPT2LMHeadModel"}
    model = getattr(transformers, kind.get(name, f"{name}ForCausalLM"))(config)
    ids = torch.randint(5, config.vocab_size, (rows, width))
    return normlab.Setup(model, {"input_ids": ids, "labels": ids.clone()}, optimizer=adamw)


LLAMA = {"num_attention_heads": 8, "num_key_value_heads": 4}
CASES: Final[dict[str, Callable[[], normlab.Setup]]] = {
    "many_100": partial(many, 100),
    "many_1000": partial(many, 1000),
    "many_5000": partial(many, 5000),
    "slow_pass": partial(decoder, 64, 2, 64, 4, 16, kind=Slow),
    "gpt_1m": partial(decoder, 128, 4, 256, 16, 64),
    "gpt_1m_dropout": partial(decoder, 128, 4, 256, 16, 64, dropout=0.1),
    "gpt_10m": partial(decoder, 384, 6, 65, 64, 256, dropout=0.2),
    "gpt_10m_one_row": partial(decoder, 384, 6, 65, 1, 256),
    "gpt_30m": partial(decoder, 512, 8, 8000, 8, 256),
    "gpt_60m": partial(decoder, 512, 12, 32000, 8, 512),
    "gpt_124m": partial(decoder, 768, 12, 50257, 4, 1024),
    "gpt_124m_small_batch": partial(decoder, 768, 12, 50257, 2, 64),
    "gpt_200m": partial(decoder, 1024, 12, 32000, 4, 256),
    "gpt_350m": partial(decoder, 1024, 24, 32000, 2, 256),
    "gpt_500m": partial(decoder, 1280, 24, 32000, 2, 128),
    "vocabulary_128k": partial(decoder, 256, 4, 128_000, 4, 128),
    "vocabulary_128k_untied": partial(decoder, 512, 4, 128_000, 4, 128, tied=False),
    "positions_4096": partial(decoder, 256, 4, 1000, 2, 4096),
    "positions_16384": partial(decoder, 128, 2, 256, 1, 16384),
    "layers_96": partial(decoder, 64, 96, 256, 4, 32),
    "layers_400": partial(decoder, 32, 400, 64, 2, 16),
    "experts_16": partial(decoder, 256, 6, 1000, 8, 128, experts=16),
    "rows_512": partial(decoder, 192, 4, 1000, 512, 64),
    "lstm_20m": partial(recurrent, 1024, 2, 8, 128),
    "vit_20m": partial(images, 384, 12, 16),
    "vit_86m": partial(images, 768, 12, 4),
    "hf_gpt2": partial(library, "GPT2", 4, 128),
    "hf_bert": partial(library, "Bert", 4, 128),
    "hf_t5": partial(library, "T5", 4, 64, decoder_start_token_id=0),
    "hf_llama": partial(
        library, "Llama", 4, 256, hidden_size=512, intermediate_size=1376, num_hidden_layers=8, **LLAMA
    ),
}
"""Functions that build a setup, by name."""


@dataclass(frozen=True)
class Row:
    """What one check took."""

    model: str
    parameters: int
    budget_s: float
    construction_s: float
    pass_s: float
    """The first forward pass of the whole batch, as the user's own step makes it."""
    check_s: float
    applicable: int
    judged: int
    refused: str = ""

    @property
    def beyond_s(self) -> float:
        """What the check took beyond its budget and one pass."""
        return self.check_s - self.pass_s - self.budget_s

    @property
    def keeps(self) -> bool:
        """Whether that is allowed."""
        return self.beyond_s <= max(SHARE * self.budget_s, LEAST_S)


def measured(name: str, budget_s: float) -> Row:
    """Build a model, run one pass, and check it."""
    torch.manual_seed(0)
    start = time.perf_counter()
    setup = CASES[name]()
    built = time.perf_counter()
    with torch.no_grad():
        setup.loss_of(setup.model, setup.batch)
    passed = time.perf_counter()
    refused, applicable, judged = "", 0, 0
    try:
        report = normlab.check(setup, budget_s=budget_s)
        judged = len(report.judged)
        applicable = judged + len(report.unjudged)
    except normlab.UserError as error:
        refused = str(error)
    ended = time.perf_counter()
    parameters = sum(p.numel() for p in setup.model.parameters())
    times = built - start, passed - built, ended - passed
    return Row(name, parameters, budget_s, *(round(t, 2) for t in times), applicable, judged, refused)


def in_a_process(name: str, budget_s: float, *options: str) -> Row:
    """The same in a process of its own, with one thread."""
    command = [sys.executable, __file__, name, "--budgets", str(budget_s), "--here", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        ended = done.stderr.strip().splitlines()[-1:] or [f"ended with {done.returncode}"]
        return Row(name, 0, budget_s, 0.0, 0.0, float("inf"), 0, 0, *ended)
    return Row(**json.loads(done.stdout.splitlines()[-1]))


def shown(row: Row) -> str:
    """A line of the table."""
    numbers = f"{row.budget_s:6.0f} {row.construction_s:12.1f} {row.pass_s:8.2f} {row.check_s:7.1f}"
    answers = row.refused[:60] if row.refused else f"{row.applicable:10d} {row.judged:6d}"
    mark = "" if row.keeps else f"   {row.beyond_s:.1f} s beyond"
    return f"{row.model:<24} {row.parameters / 1e6:8.1f} {numbers} {answers}{mark}"


def _read_the_processors_clock() -> None:
    """Let this process, and every check in it, read the time that it has computed or slept."""
    slept_s = 0.0

    def now() -> float:
        return time.process_time() + slept_s

    def sleep(seconds: float) -> None:
        nonlocal slept_s
        slept_s += seconds

    time.monotonic = time.perf_counter = now
    time.sleep = sleep


def main(argv: Sequence[str] | None = None) -> None:
    """Run what is asked for, print the table, and end with 1 if a budget is not kept."""
    parser = argparse.ArgumentParser(description="Whether check keeps its budget.")
    parser.add_argument("models", nargs="*", help=f"some of: {', '.join(CASES)}")
    parser.add_argument("--budgets", nargs="+", type=float, default=BUDGETS, help="seconds")
    parser.add_argument("--processor", action="store_true", help="count seconds of the processor")
    parser.add_argument("--here", action="store_true", help="measure in this process, and print JSON")
    parser.add_argument("--write", action="store_true", help="write the results file")
    args = parser.parse_args(argv)
    if unknown := set(args.models) - set(CASES):
        parser.error(f"no model is called {', '.join(sorted(unknown))}")
    asked = [(name, budget) for budget in args.budgets for name in args.models or CASES]
    if args.processor:
        _read_the_processors_clock()
    if args.here:
        for name, budget in asked:
            print(json.dumps(vars(measured(name, budget))))
        return
    print(f"{'model':<24} {'millions':>8} budget construction one pass check s applicable judged")
    rows = []
    for name, budget in asked:
        rows.append(in_a_process(name, budget, *["--processor"] * args.processor))
        print(shown(rows[-1]), flush=True)
    over = [row for row in rows if not row.keeps]
    print(f"{len(rows) - len(over)} of {count(len(rows), 'check')} kept their budgets")
    if args.write:
        RESULTS.write_text(json.dumps([vars(row) for row in rows], indent=1) + "\n", encoding="utf-8")
    if over:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
