"""Training of one model on prepared text, from the configuration that a run folder keeps.

Every so many steps the first sentences of dev are translated greedily; the weights with the best BLEU there,
and among equals with the lowest NLL, are scored on test. No run is ended early.
"""

from __future__ import annotations

import copy
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from model import PAD, Transformer
from sacrebleu.metrics import BLEU
from tokenizers import Tokenizer
from torch import Tensor, nn

BOS, EOS = 2, 3
Pair = tuple[list[int], list[int]]


@dataclass
class Text:
    """Pairs of token ids without marks, dev's target sentences, and the tokenizer."""

    train: list[Pair]
    dev: list[Pair]
    test: list[Pair]
    dev_lines: list[str]
    tokenizer: Tokenizer

    @property
    def entropy(self) -> float:
        """The loss of the target's token frequencies alone, ends of sentences included."""
        counts = np.bincount([token for _, target in self.train for token in [*target, EOS]]).astype(float)
        share = counts[counts > 0] / counts.sum()
        return float(-(share * np.log(share)).sum())


def read(runs: Path, digest: str) -> Text:
    """The prepared text with this digest among those beside the runs."""
    folder = next(
        path.parent
        for path in runs.glob("data/*/manifest.json")
        if json.loads(path.read_text())["digest"] == digest
    )
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def kept(side: str) -> list[list[int]]:
        ids, ends = (
            np.load(folder / f"train.{side}.tokens.npy"),
            np.load(folder / f"train.{side}.offsets.npy"),
        )
        return [part.tolist() for part in np.split(ids, ends[1:-1])]

    def encoded(name: str) -> list[list[int]]:
        return [line.ids for line in tokenizer.encode_batch((folder / name).read_text().splitlines())]

    def pairs(name: str) -> list[Pair]:
        return list(zip(encoded(f"{name}.src.txt"), encoded(f"{name}.tgt.txt"), strict=True))

    train = list(zip(kept("src"), kept("tgt"), strict=True))
    lines = (folder / "dev.tgt.txt").read_text().splitlines()
    return Text(train, pairs("dev"), pairs("test"), lines, tokenizer)


def padded(rows: list[list[int]]) -> Tensor:
    """Rows of one length."""
    return nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=PAD)


def tensors(pairs: list[Pair]) -> tuple[Tensor, Tensor, Tensor]:
    """Source, the decoder's input and what it is to say."""
    return (
        padded([[*source, EOS] for source, _ in pairs]),
        padded([[BOS, *target] for _, target in pairs]),
        padded([[*target, EOS] for _, target in pairs]),
    )


def batches(pairs: list[Pair], positions: int, random: np.random.Generator) -> list[list[Pair]]:
    """One epoch: pairs of like lengths together, source and target with padding at most ``positions``."""
    order = random.permutation(len(pairs))
    order = sorted(order, key=lambda i: (len(pairs[i][1]), len(pairs[i][0])))
    made: list[list[Pair]] = []
    batch: list[Pair] = []
    longest = [0, 0]
    for pair in (pairs[i] for i in order):
        wider = [max(size, len(side) + 1) for size, side in zip(longest, pair, strict=True)]
        if batch and sum(wider) * (len(batch) + 1) > positions:
            made.append(batch)
            batch, wider = [], [len(side) + 1 for side in pair]
        batch.append(pair)
        longest = wider
    made.append(batch)
    return [made[i] for i in random.permutation(len(made))]


def rate(optim: dict[str, Any], step: int) -> float:
    """The learning rate of a step, counted from 1."""
    warm = optim["warmup_steps"]
    match optim["schedule"]:
        case "constant":
            return optim["lr"] * (min(1.0, step / warm) if warm else 1.0)
        case "inverse_sqrt":
            return optim["lr"] * min(step / warm, math.sqrt(warm / step))
        case "step_decay_inverse_sqrt" if not warm:
            decay = optim["decay_step"]
            return optim["lr"] * (1.0 if step <= decay else optim["decay_factor"] * math.sqrt(decay / step))
    raise ValueError(f"no schedule named {optim['schedule']}")


@torch.no_grad()
def nll(model: Transformer, pairs: list[Pair], shift: int = 0) -> float:
    """Nats per target token, without smoothing; ``shift`` gives each target the source of another."""
    source, given, wanted = tensors(pairs)
    total = 0.0
    for rows in torch.arange(len(pairs)).split(100):
        logits = model(source[(rows + shift) % len(pairs)], given[rows])
        total += F.cross_entropy(
            logits.flatten(0, 1), wanted[rows].flatten(), ignore_index=PAD, reduction="sum"
        )
    return float(total / (wanted != PAD).sum())


@torch.no_grad()
def bleu(model: Transformer, text: Text, sentences: int, ratio: float) -> float:
    """BLEU of greedy translations of dev's first sentences, at most ``ratio`` times their source's length."""
    pairs = text.dev[:sentences]
    limits = [math.ceil(ratio * (len(source) + 1)) for source, _ in pairs]
    memory, seen = model.encode(tensors(pairs)[0])
    said = torch.full((len(pairs), 1), BOS)
    while said.shape[1] <= max(limits) and not (said == EOS).any(1).all():
        said = torch.cat([said, model.decode(said, memory, seen)[:, -1:].argmax(-1)], 1)
    rows = [row[1 : limit + 1] for row, limit in zip(said.tolist(), limits, strict=True)]
    rows = [row[: row.index(EOS)] if EOS in row else row for row in rows]
    return BLEU().corpus_score(text.tokenizer.decode_batch(rows), [text.dev_lines[:sentences]]).score


def state(dev: float, exchanged: float, entropy: float) -> str:
    """How a run ended, decided on dev; stuck is within 2% of the unigram entropy, or above it."""
    if not math.isfinite(dev):
        return "diverged"
    if dev > 0.98 * entropy:
        return "stuck"
    return "trained" if exchanged - dev > 0.05 else "ignores its source"


def run(config: dict[str, Any], text: Text, seed: int, marks: tuple[int, ...]) -> dict[str, Any]:
    """Train one model; test NLL of the best weights up to each mark, dev NLL by step, median gradient."""
    begun = time.process_time()
    optim, training, decode = config["optim"], config["train"], config["decode"]
    model = Transformer(config["model"], text.tokenizer.get_vocab_size(), seed)
    optimizer = torch.optim.Adam(model.parameters(), betas=tuple(optim["betas"]), eps=optim["eps"])
    random = np.random.default_rng(seed)
    queue: list[list[Pair]] = []
    norms: list[float] = []
    scores: dict[str, Any] = {}
    devs: dict[str, float] = {}
    best, weights = (-1.0, -math.inf), model.state_dict()
    for step in range(1, training["steps"] + 1):
        queue = queue or batches(text.train, training["max_tokens"], random)
        source, given, wanted = tensors(queue.pop())
        optimizer.param_groups[0]["lr"] = rate(optim, step)
        loss = F.cross_entropy(
            model(source, given).flatten(0, 1),
            wanted.flatten(),
            ignore_index=PAD,
            label_smoothing=optim["label_smoothing"],
        )
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), optim["max_grad_norm"] or math.inf)))
        optimizer.step()
        if step % config["machine"]["log_every_steps"] == 0:
            dev = devs[str(step)] = nll(model, text.dev)
        if step % training["validate_every_steps"] == 0:
            found = (bleu(model, text, training["dev_decode_sentences"], decode["max_len_ratio"]), -dev)
            print(
                f"  step {step}: dev NLL {dev:.3f}, BLEU {found[0]:.1f}, gradient {norms[-1]:.2f}", flush=True
            )
            if found > best:
                best, weights = found, copy.deepcopy(model.state_dict())
        if step in marks:
            kept = copy.deepcopy(model.state_dict())
            model.load_state_dict(weights)
            ended = state(-best[1], nll(model, text.dev, shift=1), text.entropy)
            scores[str(step)] = {"nll": nll(model, text.test), "dev_bleu": best[0], "state": ended}
            model.load_state_dict(kept)
    return {
        "seed": seed,
        "parameters": sum(p.numel() for p in model.parameters()),
        "first_grad_norm": norms[0],
        "median_grad_norm": float(np.median(norms)),
        "scores": scores,
        "dev_nll": devs,
        "core_seconds": round(time.process_time() - begun, 1),
    }
