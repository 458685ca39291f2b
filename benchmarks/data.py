"""Memory and speed of preparing and of reading a parallel text, by its size.

    python benchmarks/data.py                                # 10 and 100 thousand pairs, printed
    python benchmarks/data.py --pairs 10000000 --write       # keep a size, and write docs/data-scale.md
    python benchmarks/data.py --page                         # the page again, from what is kept

Text is made of invented words, drawn by Zipf's law, and written to a temporary folder: 265 bytes a pair, and
120 more when it is prepared. Preparation and training run in a process of their own each, whose peak memory
is the most that was resident at any instant, mapped files included.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from normlab.lab.data.text import LINES_AT_A_TIME as PART
from normlab.lab.data.tokenizer import MOST_WORDS as KEPT

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results/data.json"
PAGE = ROOT / "docs/data-scale.md"
QUICK, SIZES = (10_000, 100_000), (10_000, 1_000_000, 10_000_000)
MOST_MIB = 300
"""By which a large text may need more memory than a small one."""
WORDS, VOCAB_SIZE, MAX_TOKENS = 50_000, 8000, 1024
STEPS, AT_RANDOM = 20, 2000
HELD_OUT = 500
_AT_A_TIME = 50_000
NEWLINE = "\n"


@dataclass(frozen=True)
class Row:
    """What one size needed."""

    pairs: int
    text_mib: float
    survey_seconds: float
    tokenizer_seconds: float
    encode_seconds: float
    prepare_mib: float
    training_mib: float
    begin_seconds: float
    """From a prepared folder to a task that can give batches: shapes and buckets; the digest not counted."""
    plan_seconds: float
    """The order of an epoch."""
    batch_ms: float
    """A batch at a random place of the second epoch, read for the first time by its process."""
    waiting: float
    """Share of the training steps that waited for their batch."""
    machine: str

    @property
    def prepare_seconds(self) -> float:
        return self.survey_seconds + self.tokenizer_seconds + self.encode_seconds


@cache
def words(seed: int) -> list[str]:
    """Different invented words; frequent ones are short."""
    rng = np.random.default_rng(seed)
    syllables = [c + v for c in "bdfgjklmnprstvz" for v in ("a", "e", "i", "o", "u", "ai", "ou")]
    made: dict[str, None] = {}
    while len(made) < WORDS:
        syllable_count = 1 + int(len(made) ** 0.12 + rng.random())
        made["".join(rng.choice(syllables, syllable_count))] = None
    return list(made)


def sides(pairs: int, seed: int) -> Iterator[tuple[str, str]]:
    """Source and target text, some lines of each at a time. The two sides of a pair are similarly long."""
    rng = np.random.default_rng(seed)
    share = 1 / np.arange(1, WORDS + 1)
    edges = share.cumsum() / share.sum()
    spelled = [np.array(words(k), dtype=object) for k in (1, 2)]
    for start in range(0, pairs, _AT_A_TIME):
        count = min(_AT_A_TIME, pairs - start)
        usual = rng.lognormal(2.7, 0.55, count)
        texts = []
        for vocabulary in spelled:
            lengths = np.clip(np.round(usual * rng.lognormal(0, 0.15, count)), 1, 90).astype(int)
            drawn = vocabulary[np.searchsorted(edges, rng.random(lengths.sum()))].tolist()
            ends = lengths.cumsum().tolist()
            lines = (" ".join(drawn[a:b]) for a, b in zip([0, *ends], ends, strict=False))
            texts.append("\n".join(lines) + "\n")
        yield texts[0], texts[1]


def write_text(folder: Path, pairs: int) -> None:
    """The six files of a data configuration."""
    for seed, (name, count) in enumerate((("train", pairs), ("dev", HELD_OUT), ("test", HELD_OUT))):
        with (folder / f"{name}_src").open("w") as source, (folder / f"{name}_tgt").open("w") as target:
            for source_text, target_text in sides(count, seed):
                source.write(source_text)
                target.write(target_text)


def config(folder: Path) -> Any:
    """A Transformer that is too small to matter, on the text of a folder."""
    from normlab.lab.config import Config, DataConfig, MachineConfig, ModelConfig, TrainConfig
    from normlab.lab.recipes.grammar import resolve

    names = [f"{name}_{side}" for name in ("train", "dev", "test") for side in ("src", "tgt")]
    return resolve(
        "pre",
        Config(
            model=ModelConfig(dim=32, ffn_dim=64, heads=2, encoder_layers=1, decoder_layers=1),
            data=DataConfig(**{name: str(folder / name) for name in names}, vocab_size=VOCAB_SIZE),
            train=TrainConfig(steps=STEPS, max_tokens=MAX_TOKENS, precision="fp32"),
            machine=MachineConfig(threads=1, probes=""),
        ),
    )


def peak_mib() -> float:
    """Most memory this process ever had resident."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024
    except (OSError, StopIteration):
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


class Clock:
    """Seconds spent in functions."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, watched."""
        self.seconds.setdefault(name, 0.0)

        def watched(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name] += time.perf_counter() - start

        return watched


def preparing(folder: Path) -> dict[str, Any]:
    """What ``normlab`` does with a new text before its first run."""
    from normlab.lab.data import parallel, text

    clock, wanted = Clock(), config(folder)
    for module, name in ((text, "survey"), (parallel, "vocabulary"), (parallel, "_encode_train")):
        setattr(module, name, clock.timed(name, getattr(module, name)))
    parallel.prepare(wanted.data, folder / "data")
    return {**clock.seconds, "mib": peak_mib()}


def training(folder: Path) -> dict[str, Any]:
    """Some steps on a prepared text, the order of the second epoch, and some of its batches at random."""
    from dataclasses import replace

    from normlab.lab.tasks import TASKS
    from normlab.lab.training.devices import hardware, prepare_process
    from normlab.lab.training.trainer import Trainer

    wanted = config(folder)
    device = prepare_process(wanted.machine)
    kind = TASKS[wanted.task]
    data, corpus = kind.prepare(wanted.data, folder / "data")
    wanted = replace(wanted, data=data)
    clock = Clock()
    task = clock.timed("begin", kind)(wanted, corpus, device)
    task.batch = clock.timed("waiting", task.batch)
    trainer = Trainer(task)
    for _ in range(STEPS):
        clock.timed("step", trainer.step)()
    batches = task.batches
    clock.timed("plan", batches.at)(batches.steps_per_epoch)
    places = np.random.default_rng(0).integers(0, batches.steps_per_epoch, AT_RANDOM)
    read = clock.timed("read", batches.at)
    for place in places.tolist():
        read(batches.steps_per_epoch + place)
    return {**clock.seconds, "mib": peak_mib(), "machine": hardware(device)}


def in_a_process(what: str, folder: Path) -> dict[str, Any]:
    """What a process of its own says of itself."""
    command = [sys.executable, __file__, "--child", what, str(folder)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def measured(pairs: int, root: Path | None = None, *, times: int = 1) -> Row:
    """One size, prepared once and read so many ``times``, of which the one with the least memory counts."""
    with tempfile.TemporaryDirectory(dir=root) as name:
        folder = Path(name)
        write_text(folder, pairs)
        size = sum(path.stat().st_size for path in folder.iterdir()) / 2**20
        prepared = in_a_process("preparing", folder)
        trained = min((in_a_process("training", folder) for _ in range(times)), key=lambda said: said["mib"])
    return Row(
        pairs=pairs,
        text_mib=round(size, 1),
        survey_seconds=round(prepared["survey"], 2),
        tokenizer_seconds=round(prepared["vocabulary"], 2),
        encode_seconds=round(prepared["_encode_train"], 2),
        prepare_mib=round(prepared["mib"]),
        training_mib=round(trained["mib"]),
        begin_seconds=round(trained["begin"], 2),
        plan_seconds=round(trained["plan"], 2),
        batch_ms=round(1000 * trained["read"] / AT_RANDOM, 2),
        waiting=round(trained["waiting"] / trained["step"], 4),
        machine=f"{os.cpu_count()} cores, {trained['machine']}",
    )


def kept() -> list[Row]:
    """What is committed, small texts first."""
    if not RESULTS.exists():
        return []
    return [Row(**row) for row in json.loads(RESULTS.read_text(encoding="utf-8"))]


def table(rows: list[Row]) -> list[str]:
    """Markdown lines."""
    head = (
        "pairs|text, MiB|peak of preparing, MiB|peak of training, MiB|preparing, s|pairs/s|digest, s|"
        "tokenizer, s|tokens, s|begin, s|plan an epoch, s|a batch, ms|waiting for batches"
    )
    lines = [f"| {' | '.join(head.split('|'))} |", "| " + "--- | " * (head.count("|") + 1)]
    for r in rows:
        seconds = (r.survey_seconds, r.tokenizer_seconds, r.encode_seconds, r.begin_seconds, r.plan_seconds)
        cells = [
            *(f"{r.pairs:,}", f"{r.text_mib:,.0f}", f"{r.prepare_mib:,.0f}", f"{r.training_mib:,.0f}"),
            *(f"{r.prepare_seconds:,.0f}", f"{r.pairs / r.prepare_seconds:,.0f}"),
            *(f"{s:,.1f}" for s in seconds),
            *(f"{r.batch_ms:.2f}", f"{r.waiting:.1%}"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return [line.rstrip() for line in lines]


def grown(rows: list[Row]) -> str:
    """How much more memory the largest text needed than the smallest, in a sentence."""
    small, large = rows[0], rows[-1]
    more = large.prepare_mib - small.prepare_mib, large.training_mib - small.training_mib
    verdict = "within" if max(more) <= MOST_MIB else "not within"
    return (
        f"{large.pairs:,} pairs need {more[0]:+.0f} MiB to prepare and {more[1]:+.0f} MiB to train, beside "
        f"{small.pairs:,}: {verdict} {MOST_MIB} MiB."
    )


def page(rows: list[Row]) -> str:
    """``docs/data-scale.md``."""
    text = f"""# Data at scale

This page shows how long it takes to prepare and to read a text much larger than those used here.

The text is parallel and made of invented words (Zipf's law, {WORDS:,} words a side, {VOCAB_SIZE:,} types
learned); `python benchmarks/data.py --write` prepares and reads it. Memory is the most that was ever
resident, mapped files included, in a process that prepares the text, and in one that trains a tiny model
for {STEPS} steps of {MAX_TOKENS:,} positions, plans the second epoch and reads {AT_RANDOM:,} batches of it
at random.

{NEWLINE.join(table(rows))}

{grown(rows)}

Machine: {"; ".join(sorted({r.machine for r in rows}))}.
*Digest* is the one pass over the text that finds out whether it is prepared already; every
run begins with it. A text that is not yet prepared takes two more: one that learns the *tokenizer*
from all of it, and one that turns it into *tokens*. Learning byte pairs counts each different word,
so a text with more different words needs more memory there; a unigram tokenizer is learned from the
whole text in memory. *Begin* chooses batch shapes from all lengths, *a batch* is read at a random
place, and *waiting* is the share of a training step spent waiting for its batch, with a tiny model.

How it is done: text is read, digested and encoded in parts of at most {PART:,} lines. Words are encoded
once each and looked up after that, until {KEPT:,} are known. Tokens go to files as they come. From large
files, training reads single sentences without the memory mapping, because a system with huge pages in its
file cache makes some MiB resident for each sentence read through it. The order of an epoch is the one that
sorting a random number for each pair gives. The order takes 5 bytes a pair, and 25 while it is made. A
batch depends on its number alone, so a run that resumes in the middle of an epoch plans that epoch and
reads no other batch.
"""
    blocks = text.strip().split("\n\n")
    lines = (block if block[0] in "#|" else " ".join(block.split()) for block in blocks)
    return "\n\n".join(lines) + "\n"


def main() -> None:
    """Measure, print, and keep it if asked."""
    parser = argparse.ArgumentParser(description="Memory and speed of data by size.")
    parser.add_argument("--pairs", type=int, nargs="+", help="sizes; else small ones, or with --write all")
    parser.add_argument("--write", action="store_true", help="keep the sizes, and write docs/data-scale.md")
    parser.add_argument("--page", action="store_true", help="write docs/data-scale.md from what is kept")
    parser.add_argument("--folder", type=Path, help="where the temporary text goes")
    args = parser.parse_args()
    rows = {row.pairs: row for row in kept()} if args.write or args.page else {}
    for pairs in () if args.page else args.pairs or (SIZES if args.write else QUICK):
        rows[pairs] = measured(pairs, args.folder)
        print(json.dumps(asdict(rows[pairs])), flush=True)
    ordered = [rows[pairs] for pairs in sorted(rows)]
    print("\n".join([*table(ordered), grown(ordered)]))
    if args.write:
        kept_text = ",\n ".join(json.dumps(asdict(row)) for row in ordered)
        RESULTS.write_text(f"[{kept_text}]\n", encoding="utf-8")
    if args.write or args.page:
        PAGE.write_text(page(ordered), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps({"preparing": preparing, "training": training}[sys.argv[2]](Path(sys.argv[3]))))
    else:
        main()
