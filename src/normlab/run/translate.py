"""Translating with a run's best checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from normlab.data.prepare import Corpus
from normlab.data.tokenizer import Tokenizer
from normlab.nn import Seq2Seq
from normlab.run.checkpoint import load_checkpoint
from normlab.run.devices import autocast, prepare_process
from normlab.spec.config import Config, DecodeConfig
from normlab.store.folder import RunFolder, write_json_atomic, write_text_atomic
from normlab.tasks.build import build_seq2seq
from normlab.tasks.scores import score
from normlab.tasks.translation import allowed_types, translate_lines


def score_test(config: Config, corpus: Corpus, folder: RunFolder, model: Seq2Seq) -> None:
    """Translate the test text by beam search with the best weights, and score it: translations and
    scores.json.
    """
    load_checkpoint(folder.best, model)
    device = next(model.parameters()).device
    allowed = allowed_types(config, corpus.target_types, device)
    with autocast(device, config.train.precision):
        hypotheses = translate_lines(
            model, corpus.tokenizer, corpus.test_text.source, config.decode, allowed=allowed
        )
    write_text_atomic(folder.translations, "".join(f"{line}\n" for line in hypotheses))
    write_json_atomic(folder.scores, vars(score(hypotheses, corpus.test_text.target)))


def translate(run: Path, lines: Sequence[str], decode: DecodeConfig | None = None) -> list[str]:
    """Translate raw lines with the best checkpoint of a run folder, by its own tokenizer and search."""
    folder = RunFolder(run)
    config = folder.config()
    device = prepare_process(config.machine)
    tokenizer = Tokenizer.load(folder.tokenizer)
    model = build_seq2seq(config.model, tokenizer.vocab_size, config.seeds.init).to(device)
    load_checkpoint(folder.best, model)
    allowed = None
    if config.data.target_vocab_mask:
        allowed = torch.from_numpy(np.load(folder.target_types, allow_pickle=False)).to(device)
    with autocast(device, config.train.precision):
        return translate_lines(model, tokenizer, lines, decode or config.decode, allowed=allowed)
