"""Translating with a run's best checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from normlab.data.tokenizer import Tokenizer
from normlab.run.checkpoint import load_checkpoint
from normlab.run.devices import autocast, prepare_process
from normlab.spec.config import DecodeConfig
from normlab.store.folder import RunFolder
from normlab.tasks.build import build_seq2seq
from normlab.tasks.translation import Candidate, Translation, n_best_lines


def translate(
    run: Path,
    lines: Sequence[str],
    decode: DecodeConfig | None = None,
    *,
    prefixes: Sequence[str] | None = None,
) -> list[str]:
    """Translate raw lines with the best checkpoint of a run folder, by its own tokenizer and search.

    ``prefixes``: what each translation begins with. Raises ValueError for a run of another task, and for a
    prefix that cannot be produced.
    """
    found = n_best(run, lines, 1, decode, prefixes=prefixes)
    return [candidates[0].text for candidates in found]


def n_best(
    run: Path,
    lines: Sequence[str],
    count: int,
    decode: DecodeConfig | None = None,
    *,
    prefixes: Sequence[str] | None = None,
) -> list[list[Candidate]]:
    """``count`` translations of each line with their scores: the best, best first, or as many draws.

    Raises ValueError as ``translate``, and for more than the search's beams.
    """
    folder = RunFolder(run)
    config = folder.config()
    if config.task != Translation.name:
        raise ValueError(
            f"the run {folder.path.name} is of the task {config.task} and translates nothing; name a run of "
            f"{Translation.name}, `normlab runs` lists them"
        )
    device = prepare_process(config.machine)
    tokenizer = Tokenizer.load(folder.tokenizer)
    model = build_seq2seq(config.model, tokenizer.vocab_size, config.seeds.init).to(device)
    load_checkpoint(folder.best, model)
    allowed = None
    if config.data.target_vocab_mask:
        allowed = torch.from_numpy(np.load(folder.target_types, allow_pickle=False)).to(device)
    with autocast(device, config.train.precision):
        return n_best_lines(
            model,
            tokenizer,
            lines,
            decode or config.decode,
            count=count,
            prefixes=prefixes,
            allowed=allowed,
        )
