"""What ``normlab compare --plan`` says of three comparisons before any run exists, and what they take.

    python benchmarks/plan.py --write

Each is planned, then trained, in an empty folder: two recipes, one learning rate, two seeds, as many runs at
the same time as there are cores.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

import torch

import normlab
from normlab.base.files import write_json_atomic
from normlab.base.units import duration
from normlab.cli.presets import CONFIGS
from normlab.lab.config import Config, ModelConfig
from normlab.lab.training.devices import hardware

RESULTS: Final = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Planned:
    """A comparison, the seconds that its plan gave, and those that it took."""

    name: str
    recipes: tuple[str, ...]
    planned: float
    taken: float


def comparisons() -> dict[str, tuple[tuple[str, ...], Config]]:
    """A language model, a translation and a BERT of the built-in corpora, each for a minute or two."""
    language, translation, bert = (CONFIGS[name]() for name in ("language_model", "demo", "bert"))
    language = replace(
        language,
        data=replace(language.data, vocab_size=700),
        train=replace(language.train, steps=350, max_tokens=1536),
    )
    return {
        "a language model": (
            ("like:llama", "pre+qknorm"),
            _sized(language, decoder_layers=3, dim=144, ffn_dim=432, heads=3),
        ),
        "a translation": (
            ("pre", "post+warmup"),
            _sized(
                replace(translation, train=replace(translation.train, steps=900)),
                encoder_layers=3,
                decoder_layers=2,
                dim=96,
                ffn_dim=320,
            ),
        ),
        "a BERT": (
            ("pre+rope", "pre+rmsnorm+rope"),
            _sized(
                replace(bert, train=replace(bert.train, steps=1400)), encoder_layers=3, dim=80, ffn_dim=256
            ),
        ),
    }


def _sized(config: Config, **sizes: int) -> Config:
    model: ModelConfig = replace(config.model, **sizes)
    return replace(config, model=model)


def measured(name: str, recipes: tuple[str, ...], base: Config, folder: Path) -> Planned:
    """Plan a comparison, then train it."""
    request = normlab.CompareRequest(
        title=name, recipes=recipes, lrs=(2e-3,), seeds=2, base=base, out=folder, jobs=0
    )
    planned = normlab.plan(request, kept=()).total_seconds
    began = time.perf_counter()
    normlab.compare(request)
    return Planned(name, recipes, planned, time.perf_counter() - began)


def main() -> None:
    """Measure, print, write when asked."""
    parser = argparse.ArgumentParser(description="How well --plan tells the time of a comparison.")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/plan.json")
    args = parser.parse_args()
    rows = list[Planned]()
    for name, (recipes, base) in comparisons().items():
        with tempfile.TemporaryDirectory() as folder:
            rows.append(row := measured(name, recipes, base, Path(folder)))
        print(
            f"{name}: planned {duration(row.planned)}, took {duration(row.taken)}, "
            f"{row.taken / row.planned:.2f}x",
            flush=True,
        )
    if args.write:
        content = {"hardware": hardware(torch.device("cpu")), "rows": [asdict(row) for row in rows]}
        write_json_atomic(RESULTS / "plan.json", content)


if __name__ == "__main__":
    main()
