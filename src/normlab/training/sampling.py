"""Continue text with a run's language model."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from normlab.config.config import DecodeConfig
from normlab.config.io import Count, Size, validated
from normlab.config.model import derive
from normlab.data.tokenizer import EOS, Tokenizer
from normlab.data.vocabulary import load
from normlab.errors import UserError
from normlab.nn import Decoder
from normlab.nn.decode import generate
from normlab.nn.model import evaluating
from normlab.runs.folder import RunFolder
from normlab.tasks.language_model import LanguageModel
from normlab.tasks.task import build_model, choice_of
from normlab.training.checkpoint import load_checkpoint
from normlab.training.devices import prepare_process
from normlab.training.weights import Weights, weights_of


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
    model, tokenizer, _ = decoder_of(folder, weights)
    window, longest = window or config.data.block_len, model.position_encoding.longest
    if longest is not None and window > longest:
        raise UserError(
            f"--window is {window}, and the model has {longest} positions; type at most {longest}"
        )
    seeds = [derive(decode.sample_seed, "sample", i) for i in range(samples)]
    prompt = prompt_of(tokenizer, text)
    with evaluating(model.to(device)):
        drawn = generate(model, prompt, seeds, choice_of(decode), count=tokens, window=window)
    return [text_of(tokenizer, row) for row in drawn.tolist()]


def decoder_of(folder: RunFolder, weights: str | int = "") -> tuple[Decoder, Tokenizer, Weights]:
    """Return a run's language model with the given weights, its tokenizer, and which weights they are."""
    config, tokenizer, chosen = folder.config(), load(folder.tokenizer), weights_of(folder, weights)
    model = build_model(Decoder, config.model, tokenizer.vocab_size, config.seeds.init).eval()
    load_checkpoint(chosen.path, model, run=folder.id())
    return model, tokenizer, chosen


def prompt_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the tokens of a text as in the training text, after an EOS.

    A tokenizer that takes text verbatim has tokens for the ends of lines; with any other, an EOS ends each
    line but the last, which the model continues.
    """
    lines = tokenizer.encode([text] if tokenizer.verbatim else text.split("\n"))
    return [EOS, *chain.from_iterable([*line, EOS] for line in lines[:-1]), *lines[-1]]


def text_of(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Return the text of tokens; an EOS ends a line or, if the tokenizer is verbatim, the text."""
    lines: list[list[int]] = [[]]
    for token in ids:
        if token == EOS:
            lines.append([])
        else:
            lines[-1].append(token)
    return "\n".join(tokenizer.decode(lines[:1] if tokenizer.verbatim else lines))
