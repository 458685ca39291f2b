"""Translate with a run's weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from normlab.config.config import Config, DecodeConfig
from normlab.config.io import validated
from normlab.config.units import count
from normlab.data.vocabulary import load
from normlab.errors import UserError
from normlab.nn import Seq2Seq
from normlab.runs.folder import RunFolder
from normlab.tasks.task import build_model
from normlab.tasks.translation import Candidate, Translation, n_best_lines
from normlab.training.checkpoint import load_checkpoint
from normlab.training.devices import autocast, prepare_process
from normlab.training.weights import checkpoint_of


@validated
def translate(
    run: Path,
    lines: Sequence[str],
    decode: DecodeConfig | None = None,
    *,
    prefixes: Sequence[str] | None = None,
    weights: str | int = "",
    threads: int | None = None,
) -> list[str]:
    """Translate raw lines with a run's weights, using its own tokenizer and search.

    Each translation begins with its line's prefix. ``weights`` is a name in ``training.weights``, by default
    the tested ones; ``threads`` is 0 for all cores, by default the run's number. Raises FileNotFoundError for
    missing weights, and UserError for a run of another task and a prefix that cannot be produced.

    >>> len(normlab.translate(run, ["zwei", "drei"]))
    2
    """
    translations = n_best(run, lines, 1, decode, prefixes=prefixes, weights=weights, threads=threads)
    return [candidates[0].text for candidates in translations]


@validated
def n_best(
    run: Path,
    lines: Sequence[str],
    count: int,
    decode: DecodeConfig | None = None,
    *,
    prefixes: Sequence[str] | None = None,
    weights: str | int = "",
    threads: int | None = None,
) -> list[list[Candidate]]:
    """Return ``count`` translations of each line with their scores: the best ones, best first, or draws.

    Raises UserError as ``translate`` does, and for more translations than the search has beams.
    """
    folder = RunFolder(run)
    config = translation_of(folder)
    threads = config.machine.threads if threads is None else threads
    device = prepare_process(replace(config.machine, threads=threads))
    tokenizer = load(folder.tokenizer)
    model = build_model(Seq2Seq, config.model, tokenizer.vocab_size, config.seeds.init).to(device)
    checkpoint = checkpoint_of(folder, weights)
    load_checkpoint(checkpoint, model, run=folder.id())
    _require_finite(model, checkpoint)
    allowed = None
    if config.data.target_vocab_mask:
        allowed = _target_vocab(folder.target_vocab, tokenizer.vocab_size).to(device)
    with autocast(device, config.train.precision):
        return n_best_lines(
            model, tokenizer, lines, decode or config.decode, count=count, prefixes=prefixes, allowed=allowed
        )


def translation_of(folder: RunFolder) -> Config:
    """Return a run's configuration. Raises UserError if it was not trained to translate."""
    config = folder.config()
    if config.task != Translation.name:
        raise UserError(
            f"the run {folder.path.name} was trained on the task {config.task}, not on {Translation.name}; "
            "`normlab run list` names the task of each run, and `normlab run sample` continues text with a "
            "language model"
        )
    return config


def _require_finite(model: nn.Module, checkpoint: Path) -> None:
    for name, weights in model.named_parameters():
        if bad := int((~weights.detach().isfinite()).sum()):
            raise UserError(
                f"nothing can be translated with {checkpoint}: {count(bad, 'value')} of {name} "
                f"{'is' if bad == 1 else 'are'} infinite or not a number; choose other weights with "
                "--weights or --step, or another run"
            )


def _target_vocab(path: Path, entries: int) -> Tensor:
    """Read the mask `[V]` of the vocabulary entries that a target may contain."""
    why, types = f"it is not an array of {entries} truth values", None
    try:
        types = np.load(path, allow_pickle=False)
    except FileNotFoundError:
        why = "it is missing"
    except (ValueError, EOFError) as error:
        why = str(error)
    if isinstance(types, np.ndarray) and types.dtype == bool and types.shape == (entries,):
        if types.any():
            return torch.from_numpy(types)
        why = "it rules out every entry"
    raise UserError(f"{path} is damaged ({why}); bring back the file that the model was trained with")
