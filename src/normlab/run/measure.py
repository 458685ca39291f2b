"""How long a run takes on this machine, measured on a few of its real steps."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace

import torch
from torch import nn

from normlab.data.prepare import Corpus
from normlab.optim import build_optimiser
from normlab.run.devices import autocast, prepare_process
from normlab.spec.config import Config
from normlab.tasks.translation import Translation

_SEARCHED_SENTENCES = 200
"""About one batch of the search at full size: fewer sentences would each seem dearer than they are."""


@dataclass(frozen=True)
class Seconds:
    """Seconds of one optimiser step, of one validation (likelihood and greedy BLEU), and of a whole run."""

    step: float
    validation: float
    run: float


def measure(config: Config, corpus: Corpus, *, steps: int = 5) -> Seconds:
    """Median over ``steps`` steps after two that are not counted, on ``machine.threads`` threads.

    A validation is its real likelihood and a greedy search of some of its sentences, scaled to all of them;
    the final search takes as long for each of its sentences and beams. A rough figure: other runs at the same
    time make it longer, and a model that has learnt to end its sentences searches faster.
    """
    device = prepare_process(config.machine)
    few = min(config.train.dev_bleu_sentences, len(corpus.dev_text), _SEARCHED_SENTENCES)
    task = Translation(replace(config, train=replace(config.train, dev_bleu_sentences=few)), corpus, device)
    model = task.build()
    optimiser = build_optimiser(model.parameters(), config.optim)
    taken = []
    for index in range(steps + 2):
        start = time.perf_counter()
        for i in range(config.train.accumulation):
            batch = task.batch(index * config.train.accumulation + i)
            with autocast(device, config.train.precision):
                sums = task.loss(model, batch)
            (sums.loss / batch.tokens).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - start)
    step = statistics.median(taken[2:])
    start = time.perf_counter()
    model.eval()
    with autocast(device, config.train.precision):
        task.dev_nll(model)
        likelihood = time.perf_counter() - start
        task.dev_bleu(model)
    sentence = (time.perf_counter() - start - likelihood) / few
    searched = min(config.train.dev_bleu_sentences, len(corpus.dev_text))
    validation = likelihood + searched * sentence
    validations = -(-config.train.steps // config.train.validate_every_steps)
    final = len(corpus.test_text) * config.decode.beam * sentence
    return Seconds(step, validation, step * config.train.steps + validations * validation + final)
