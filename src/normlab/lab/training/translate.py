"""Translate, and continue text, with a run's weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from normlab.base.io import Count, Size, validated
from normlab.base.model_config import derive
from normlab.base.units import count
from normlab.errors import UserError
from normlab.lab.config import Config, DecodeConfig
from normlab.lab.data.tokenizer import EOS, Tokenizer
from normlab.lab.data.vocabulary import load
from normlab.lab.runs.folder import RunFolder
from normlab.lab.tasks.language_model import LanguageModel
from normlab.lab.tasks.search import Candidate, n_best_lines
from normlab.lab.tasks.task import build_model, choice_of
from normlab.lab.tasks.translation import Translation
from normlab.lab.training.checkpoint import load_checkpoint
from normlab.lab.training.devices import in_precision, prepare_process
from normlab.lab.training.weights import Weights, weights_of
from normlab.nn import Decoder, Seq2Seq, TokenModel
from normlab.nn.decode import generate
from normlab.nn.model import evaluating

Model = TypeVar("Model", bound=TokenModel)


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

    Each translation begins with its line's prefix. ``weights`` names weights as in
    ``training.weights.checkpoint_of``, by default the tested ones; ``threads`` is 0 for all cores, by default
    the run's number. Raises FileNotFoundError for missing weights, and UserError for a run of another task
    and a prefix that cannot be produced.

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
    model, tokenizer, chosen = model_of(Seq2Seq, folder, weights)
    model.to(device)
    _require_finite(model, chosen.path)
    allowed = None
    if config.data.target_vocab_mask:
        allowed = _target_vocab(folder.target_vocab, tokenizer.vocab_size).to(device)
    with in_precision(device, config.train.precision):
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
        bad = int((~weights.detach().isfinite()).sum())
        if bad:
            raise UserError(
                f"nothing can be translated with {checkpoint}: {count(bad, 'value')} of {name} "
                f"{'is' if bad == 1 else 'are'} infinite or not a number; choose other weights with "
                "--weights or --step, or another run"
            )


def _target_vocab(path: Path, entries: int) -> Tensor:
    """Read the mask `[V]` of the vocabulary entries that a target may contain."""
    try:
        mask = np.load(path, allow_pickle=False)
    except FileNotFoundError:
        raise _damaged(path, "it is missing") from None
    except (ValueError, EOFError) as error:
        raise _damaged(path, str(error)) from error
    if not isinstance(mask, np.ndarray) or mask.dtype != bool or mask.shape != (entries,):
        raise _damaged(path, f"it is not an array of {entries} truth values")
    if not mask.any():
        raise _damaged(path, "it rules out every entry")
    return torch.from_numpy(mask)


def _damaged(path: Path, why: str) -> UserError:
    return UserError(f"{path} is damaged ({why}); bring back the file that the model was trained with")


@validated
def sample(
    folder: RunFolder,
    text: str,
    decode: DecodeConfig,
    *,
    tokens: Size = 100,
    samples: Size = 1,
    window: Count = 0,
    weights: str | int = "",
) -> list[str]:
    """Continue a text by ``tokens`` tokens, ``samples`` times, with a run's weights.

    Temperature, truncation and seed are those of ``decode``; ``top_k=1`` takes the likeliest token. Each
    token sees the ``window`` tokens before it, by default as many as in training. Raises UserError for a run
    of another task, and for a window longer than the model's positions.
    """
    config = folder.config()
    if config.task != LanguageModel.name:
        raise UserError(
            f"the run {folder.path.name} was trained on the task {config.task}, but only a language model "
            "continues text; name the run of one: `normlab run list` lists all runs"
        )
    device = prepare_process(config.machine)
    model, tokenizer, _ = model_of(Decoder, folder, weights)
    window = window or config.data.block_len
    longest = model.position_encoding.longest
    if longest is not None and window > longest:
        raise UserError(
            f"--window is {window}, and the model has {longest} positions; type at most {longest}"
        )
    seeds = [derive(decode.sample_seed, "sample", i) for i in range(samples)]
    prompt = prompt_of(tokenizer, text)
    with evaluating(model.to(device)):
        drawn = generate(model, prompt, seeds, choice_of(decode), count=tokens, window=window)
    return [text_of(tokenizer, row) for row in drawn.tolist()]


def model_of(
    kind: type[Model], folder: RunFolder, weights: str | int = ""
) -> tuple[Model, Tokenizer, Weights]:
    """Return a run's model with the given weights, its tokenizer, and which weights they are."""
    config = folder.config()
    tokenizer = load(folder.tokenizer)
    chosen = weights_of(folder, weights)
    model = build_model(kind, config.model, tokenizer.vocab_size, config.seeds.init).eval()
    load_checkpoint(chosen.path, model, run=folder.id())
    return model, tokenizer, chosen


def prompt_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the tokens of a text as in the training text, after an EOS.

    A tokenizer that takes text verbatim has tokens for the ends of lines; with any other, an EOS ends each
    line but the last, which the model continues.
    """
    *ended, last = tokenizer.encode([text] if tokenizer.verbatim else text.split("\n"))
    ids = [EOS]
    for line in ended:
        ids += [*line, EOS]
    return ids + last


def text_of(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Return the text of tokens; an EOS ends a line or, if the tokenizer is verbatim, the text."""
    lines: list[list[int]] = [[]]
    for token in ids:
        if token == EOS:
            lines.append([])
        else:
            lines[-1].append(token)
    return "\n".join(tokenizer.decode(lines[:1] if tokenizer.verbatim else lines))
