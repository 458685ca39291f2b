"""The design of the survey: models from a Sobol sequence, and the learning rates that each is trained at."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final, Literal, TypeAlias

from scipy.stats import qmc

from normlab.errors import UserError
from normlab.recipes.grammar import resolve
from normlab.spec.config import (
    Config,
    DataConfig,
    DecodeConfig,
    MachineConfig,
    ModelConfig,
    OptimConfig,
    SeedConfig,
    TrainConfig,
)
from normlab.spec.randomness import derive

Choices: TypeAlias = Mapping[str, str | float]
"""One value of each axis."""
Part: TypeAlias = Literal["narrow", "wide", "deep"]
"""The models of the sequence as they are drawn, those that a forecast is tested on, and deep ones beside."""


@dataclass(frozen=True)
class Text:
    """A text of the survey, and what is trained on it."""

    task: str
    data: DataConfig
    steps: int
    """The budget of a run."""
    encoders: int
    """1 for an encoder and a decoder of the same depth, 0 for a decoder alone."""


_BROWN: Final = "$NORMLAB_DATA/text/brown.txt"
TEXTS: Final[Mapping[str, Text]] = {
    "dates": Text(
        "translation", DataConfig(builtin="dates-de-en", builtin_pairs=5000, vocab_size=200), 200, encoders=1
    ),
    "brown": Text(
        "language_model",
        DataConfig(
            train_text=f"{_BROWN}[:20000]",
            dev_text=f"{_BROWN}[46368:46868]",
            test_text=f"{_BROWN}[50518:50618]",
            vocab_size=500,
            block_len=48,
        ),
        150,
        encoders=0,
    ),
}
"""Sentences to translate, and real text to model, by name."""
AXES: Final[Mapping[str, tuple[str | float, ...]]] = {
    "text": tuple(TEXTS),
    "placement": (
        *("post", "pre", "sandwich", "olmo2", "mixln", "lnscale", "keel", "b2t", "residual", "admin"),
        *("deepnorm", "layerscale", "rezero", "normformer"),
    ),
    "norm": ("layernorm", "rmsnorm", "scalenorm"),
    "scheme": ("xavier", "smallinit", "xavier_uniform"),
    "optimiser": ("adam", "adamw", "radam", "adam", "sgd", "adamw"),
    "beta2": (0.95, 0.98, 0.999),
    "layers": (1, 2, 3, 4, 6, 9, 12),
    "width": (16, 32, 64),
    "warmup": (0, 8, 30, 75),
}
"""Axes of the sequence; a value that is named twice is drawn twice as often."""
WARMED: Final = "warmup"
NORMLESS: Final = ("rezero",)
"""Placements without a norm of the stream, which refuse the name of one."""
EARLY: Final = (10, 50)
"""Steps after which the weights are kept, so that they can be measured as those of step 0."""
MOMENTUM: Final[Mapping[str, float]] = {"sgd": 0.9}
"""Momentum by optimiser, and 0 for the others, which have their own."""
STARTS: Final[Mapping[str, float]] = {"sgd": 1.0}
START: Final = 8e-3
"""Learning rates that a search begins with, by optimiser, and for the others."""
MOST: Final = 6
"""Runs of a search."""
STRIDE: Final = 4.0
GRID: Final = math.sqrt(2)
"""Ratio of rates while neither end is known, and the ratio of the two ends that are searched for."""
AROUND: Final = 4.0
"""Rates are drawn within this factor of the edge."""
LENGTH: Final = 2**10
"""Models of the sequence."""
WIDE: Final = 256.0
WIDE_LAYERS: Final = 4.0
"""Width of the wide models, four times the largest of the others, and the most layers that they have."""
DEEP: Final = 18.0
DEEP_WIDTH: Final = 32.0
DEEP_PLACEMENTS: Final = ("post", "pre", "admin", "deepnorm")
"""Layers of the deep models, their largest width, and their placements in turn."""
SEEDS: Final = (2, 3)
RATES: Final = 2
WIDE_RATES: Final = 3
"""Rates that are drawn for a model, trained with each of these seeds, a search with the seed 1; and for a
wide model, trained with the first of them.
"""


@dataclass(frozen=True)
class Model:
    """A model of the survey: everything about a run but its learning rate and its seed."""

    name: str
    """``s17`` for the seventeenth of the sequence, ``w17`` and ``d17`` for its wide and its deep one."""
    choices: Choices
    part: Part = "narrow"

    def config(self, lr: float, seed: int) -> Config:
        """The resolved configuration of a run. Raises UserError for a recipe that is not defined."""
        c = self.choices
        text = TEXTS[str(c["text"])]
        parts = [c["placement"], *([] if c["placement"] in NORMLESS else [c["norm"]]), c["scheme"]]
        parts += [c["optimiser"], *([WARMED] if c["warmup"] else [])]
        layers, width = int(c["layers"]), int(c["width"])
        base = Config(
            task=text.task,
            data=text.data,
            model=ModelConfig(
                dim=width,
                ffn_dim=4 * width,
                heads=max(1, width // 16),
                encoder_layers=layers * text.encoders,
                decoder_layers=layers,
                dropout=0.0,
            ),
            optim=OptimConfig(
                lr=lr,
                betas=(0.9, float(c["beta2"])),
                momentum=MOMENTUM.get(str(c["optimiser"]), 0.0),
                schedule="constant",
                warmup_steps=int(c["warmup"]),
            ),
            train=TrainConfig(
                steps=text.steps,
                max_tokens=512,
                validate_every_steps=text.steps // 2,
                dev_decode_sentences=50,
            ),
            decode=DecodeConfig(beam=1),
            seeds=SeedConfig(seed, seed, seed),
            machine=MachineConfig(probes="", keep_checkpoints=",".join(map(str, EARLY))),
        )
        return resolve("+".join(map(str, parts)), base)


def models(part: Part = "narrow") -> Iterator[Model]:
    """The models of a part of the survey whose recipes are defined, in the order of the sequence."""
    for index, point in enumerate(_sequence()):
        choices = {
            name: values[int(len(values) * x)] for (name, values), x in zip(AXES.items(), point, strict=True)
        }
        letter, changed = PARTS[part](index, choices)
        model = Model(f"{letter}{index}", choices | changed, part)
        if _defined(model):
            yield model


def _narrow(index: int, choices: Choices) -> tuple[str, dict[str, str | float]]:
    return "s", {}


def _wide(index: int, choices: Choices) -> tuple[str, dict[str, str | float]]:
    return "w", {"width": WIDE, "layers": min(float(choices["layers"]), WIDE_LAYERS)}


def _deep(index: int, choices: Choices) -> tuple[str, dict[str, str | float]]:
    placement = DEEP_PLACEMENTS[index % len(DEEP_PLACEMENTS)]
    width = min(float(choices["width"]), DEEP_WIDTH)
    return "d", {"layers": DEEP, "width": width, "placement": placement}


PARTS: Final[Mapping[Part, Callable[[int, Choices], tuple[str, dict[str, str | float]]]]] = {
    "narrow": _narrow,
    "wide": _wide,
    "deep": _deep,
}
"""The first letter of a model's name, and what it has in the place of the sequence's choices, by part."""


def _defined(model: Model) -> bool:
    try:
        model.config(START, 1)
    except UserError:
        return False
    return True


@cache
def _sequence() -> Sequence[Sequence[float]]:
    return qmc.Sobol(len(AXES), scramble=True, rng=derive(0, "survey")).random(LENGTH).tolist()


def start_rate(model: Model) -> float:
    """The learning rate that the search of a model begins with."""
    return STARTS.get(str(model.choices["optimiser"]), START)


def next_rate(tried: Mapping[float, bool], start: float) -> float | None:
    """The rate that a search for the edge trains next; None once it is over.

    ``tried`` tells of each rate whether the run trained. The edge lies between the largest rate that trained
    and the smallest one above it that did not.
    """
    low, high = edge(tried)
    if len(tried) >= MOST:
        return None
    if low is None:
        return start if high is None else high / STRIDE
    if high is None:
        return low * STRIDE
    return None if high / low <= GRID * 1.01 else math.sqrt(low * high)


def edge(tried: Mapping[float, bool]) -> tuple[float | None, float | None]:
    """The largest rate that trained, and the smallest one above it that did not."""
    low = max((lr for lr, trained in tried.items() if trained), default=None)
    high = min(
        (lr for lr, trained in tried.items() if not trained and (low is None or lr > low)), default=None
    )
    return low, high


def drawn_rates(model: Model, tried: Mapping[float, bool]) -> list[float]:
    """The rates around the edge of a model, log-uniform; around the last end where the search found one. For
    a wide model ``tried`` is of its narrow one.
    """
    low, high = edge(tried)
    middle = math.sqrt(low * high) if low is not None and high is not None else low or high or START
    unit = [
        derive(i, f"rate of {model.name}") / 2**63
        for i in range(WIDE_RATES if model.part == "wide" else RATES)
    ]
    return [float(f"{middle * AROUND ** (2 * u - 1):.4g}") for u in unit]


def runs_of(model: Model, tried: Mapping[float, bool]) -> list[Config]:
    """The runs of a model as far as they are known: the next one of its search, or those around the edge."""
    if model.part == "wide":
        return [model.config(lr, SEEDS[0]) for lr in drawn_rates(model, tried)]
    rate = next_rate(tried, start_rate(model))
    if rate is not None:
        return [model.config(float(f"{rate:.4g}"), 1)]
    return [model.config(lr, seed) for lr in drawn_rates(model, tried) for seed in SEEDS]
