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
from normlab.tasks.translation import Translation, translate_lines


def translate(run: Path, lines: Sequence[str], decode: DecodeConfig | None = None) -> list[str]:
    """Translate raw lines with the best checkpoint of a run folder, by its own tokenizer and search.

    Raises ValueError for a run of another task.
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
        return translate_lines(model, tokenizer, lines, decode or config.decode, allowed=allowed)
