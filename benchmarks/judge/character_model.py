"""A small real training script: a language model of characters, numpy alone, a fraction of a second a run.

An embedding of the last characters, one hidden layer, Adam; the text is the LICENSE of this repository. It
prints ``val_loss``. ``--salt`` changes nothing but the random numbers, as any change to a script may.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

TEXT = Path(__file__).parents[2] / "LICENSE"
Array = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True)
class Options:
    """What can be changed."""

    seed: int = 1
    salt: int = 0
    steps: int = 150
    batch: int = 64
    context: int = 6
    embedding: int = 12
    hidden: int = 64
    lr: float = 3e-3
    beta1: float = 0.9
    beta2: float = 0.999
    decay: float = 0.0
    init: float = 1.0
    """Factor on the hidden layer's initial standard deviation."""
    head_init: float = 1.0
    activation: str = "tanh"
    schedule: str = "constant"
    dropout: float = 0.0
    smoothing: float = 0.0
    clip: float = 0.0


@cache
def data() -> tuple[np.ndarray[Any, Any], int]:
    """The text as numbers of characters, and how many characters there are."""
    text = TEXT.read_text(encoding="utf-8")
    characters = sorted(set(text))
    return np.array([characters.index(c) for c in text]), len(characters)


def windows(ids: np.ndarray[Any, Any], context: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Every stretch of ``context`` characters, and the character after it."""
    stretches = np.lib.stride_tricks.sliding_window_view(ids, context + 1)
    return stretches[:, :-1], stretches[:, -1]


def start(options: Options, random: np.random.Generator, characters: int) -> dict[str, Array]:
    """Draw the initial weights."""
    inputs = options.context * options.embedding
    shapes = {
        "embedding": ((characters, options.embedding), 1.0),
        "hidden": ((inputs, options.hidden), options.init / inputs**0.5),
        "hidden_bias": ((options.hidden,), 0.0),
        "head": ((options.hidden, characters), options.head_init / options.hidden**0.5),
        "head_bias": ((characters,), 0.0),
    }
    return {
        name: (scale * random.standard_normal(shape)).astype(np.float32)
        for name, (shape, scale) in shapes.items()
    }


def forward(weights: dict[str, Array], inputs: Any, activation: str, mask: Any = 1.0) -> tuple[Any, Any, Any]:
    """Return the flattened embeddings, the hidden layer and the log-probabilities."""
    embedded = weights["embedding"][inputs].reshape(len(inputs), -1)
    before = embedded @ weights["hidden"] + weights["hidden_bias"]
    hidden = np.tanh(before) if activation == "tanh" else np.maximum(before, 0)
    hidden = hidden * mask
    logits = hidden @ weights["head"] + weights["head_bias"]
    logits = logits - logits.max(axis=1, keepdims=True)
    return embedded, hidden, logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def gradients(
    weights: dict[str, Array], inputs: Any, targets: Any, options: Options, mask: Any
) -> dict[str, Any]:
    """The gradient of the mean cross-entropy."""
    embedded, hidden, logs = forward(weights, inputs, options.activation, mask)
    rows = np.arange(len(targets))
    wanted = np.full_like(logs, options.smoothing / logs.shape[1])
    wanted[rows, targets] += 1 - options.smoothing
    at_logits = (np.exp(logs) - wanted) / len(targets)
    at_hidden = at_logits @ weights["head"].T * mask
    slope = 1 - (hidden / np.where(mask == 0, 1, mask)) ** 2 if options.activation == "tanh" else hidden > 0
    at_before = at_hidden * slope
    at_embedded = (at_before @ weights["hidden"].T).reshape(*inputs.shape, -1)
    at_table = np.zeros_like(weights["embedding"])
    np.add.at(at_table, inputs, at_embedded)
    return {
        "embedding": at_table,
        "hidden": embedded.T @ at_before,
        "hidden_bias": at_before.sum(axis=0),
        "head": hidden.T @ at_logits,
        "head_bias": at_logits.sum(axis=0),
    }


def train(options: Options) -> float:
    """Train once, and return the loss on the last tenth of the text."""
    ids, characters = data()
    cut = int(0.9 * len(ids))
    inputs, targets = windows(ids[:cut], options.context)
    random = np.random.default_rng([options.seed, options.salt])
    weights = start(options, random, characters)
    first = {name: np.zeros_like(w) for name, w in weights.items()}
    second = {name: np.zeros_like(w) for name, w in weights.items()}
    for step in range(1, options.steps + 1):
        rows = random.integers(len(targets), size=options.batch)
        mask: Any = np.ones(1, dtype=np.float32)
        if options.dropout:
            kept = random.random((options.batch, options.hidden)) >= options.dropout
            mask = kept.astype(np.float32) / (1 - options.dropout)
        slopes = gradients(weights, inputs[rows], targets[rows], options, mask)
        if options.clip:
            norm = float(np.sqrt(sum((g**2).sum() for g in slopes.values())))
            slopes = {name: g * min(1.0, options.clip / norm) for name, g in slopes.items()}
        rate = options.lr
        if options.schedule == "linear":
            rate *= 1 - (step - 1) / options.steps
        for name, gradient in slopes.items():
            first[name] = options.beta1 * first[name] + (1 - options.beta1) * gradient
            second[name] = options.beta2 * second[name] + (1 - options.beta2) * gradient**2
            mean = first[name] / (1 - options.beta1**step)
            spread = np.sqrt(second[name] / (1 - options.beta2**step))
            weights[name] = weights[name] - rate * (mean / (spread + 1e-8) + options.decay * weights[name])
    inputs, targets = windows(ids[cut:], options.context)
    logs = forward(weights, inputs, options.activation)[2]
    return float(-logs[np.arange(len(targets)), targets].mean())


def main() -> None:
    """Train with what is typed, and print the loss."""
    parser = argparse.ArgumentParser()
    for option in fields(Options):
        parser.add_argument(f"--{option.name}", type=type(option.default), default=option.default)
    print(f"val_loss: {train(Options(**vars(parser.parse_args()))):.5f}")


if __name__ == "__main__":
    main()
