"""Setups from Hugging Face configurations: a freshly drawn model, and a batch that fits its head."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from normlab.errors import UserError
from normlab.setups.function import draw_seed
from normlab.setups.named import NamedSetup
from normlab.setups.setup import Declaration, Setup
from normlab.trace.restore import same_random_state

ROWS: Final = 4
POSITIONS: Final = 24
"""Tokens in a row; fewer if the model has fewer positions."""
IGNORED: Final = -100
"""The label that Hugging Face's losses ignore."""
COPIES: Final = 8
"""How many float32 copies of a model's parameters are in memory while a check runs."""
Batch = dict[str, Tensor]


def setup_from_folder(folder: Path, *, seed: int, trust_remote_code: bool = False) -> NamedSetup:
    """Build the model that ``config.json`` in a folder describes, with weights drawn from a seed.

    Nothing is downloaded and no weights are read. Raises UserError for a folder without a configuration, for
    one that names code of its own (``auto_map``) unless that is trusted, for an architecture without a loss,
    and for a model that does not fit in memory.
    """
    try:
        import transformers
    except ImportError as error:
        raise UserError("hf: needs transformers; type: pip install 'normlab[hf]'") from error
    content = _read(folder)
    if _names_code(content) and not trust_remote_code:
        raise UserError(
            f"{folder}/config.json names code of its own (auto_map), which would be run; read it first, then "
            "type --trust-remote-code"
        )
    try:
        config = transformers.AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=trust_remote_code
        )
    except Exception as error:
        raise UserError(f"transformers cannot read {folder}/config.json: {_line(error)}") from error
    build, head = _builder(transformers, config, trusted=trust_remote_code)
    _require_memory(build, folder)
    with same_random_state(seed):
        try:
            model = build()
        except Exception as error:
            raise UserError(f"no model can be built from {folder}/config.json: {_line(error)}") from error
        batch = HEADS[head](config, torch.Generator().manual_seed(seed))
    declare = Declaration(
        tied=True if getattr(config, "tie_word_embeddings", None) else None,
        pad_id=_id(config, "pad_token_id"),
        eos_id=_id(config, "eos_token_id"),
        init="class",
        trained=False,
    )

    def make() -> nn.Module:
        torch.manual_seed(draw_seed())
        return build()

    facts = {"configuration": str(folder), "weights": f"drawn from seed {seed}"}
    setup = Setup(model, batch, declare=declare, make=make)
    return NamedSetup(f"{type(model).__name__} of {folder}", setup, facts)


def _read(folder: Path) -> Mapping[str, Any]:
    file = folder / "config.json"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{file} cannot be read: {_line(error)}; name a folder that holds a config.json"
        ) from error
    if not isinstance(content, dict):
        raise UserError(f"{file} holds {type(content).__name__}, and must hold an object")
    return content


def _names_code(value: Any) -> bool:
    """Whether a configuration, or one inside it, names code outside the library."""
    if isinstance(value, Mapping):
        return "auto_map" in value or any(map(_names_code, value.values()))
    return isinstance(value, list) and any(map(_names_code, value))


def _builder(library: Any, config: Any, *, trusted: bool) -> tuple[Callable[[], nn.Module], str]:
    """Return a function that draws the model, and the kind of its head: its architecture's, or the first kind
    that its type has.
    """
    architecture = next(iter(config.architectures or ()), "")
    ends = {"LMHeadModel": "CausalLM", **{f"For{head}": head for head in HEADS}}
    kind = next((head for end, head in ends.items() if architecture.endswith(end)), "")
    for head in [kind] if kind else [] if architecture else list(HEADS):
        auto = getattr(library, f"AutoModelFor{_AUTO.get(head, head)}")
        remote = f"AutoModelFor{_AUTO.get(head, head)}" in (getattr(config, "auto_map", None) or {})
        if type(config) in auto._model_mapping or remote:
            return partial(auto.from_config, config, trust_remote_code=trusted), head
    one = getattr(library, architecture, None)
    if kind and isinstance(one, type) and issubclass(one, library.PreTrainedModel):
        return partial(one, config), kind
    raise UserError(
        f"{architecture or type(config).__name__} has no head for which a batch can be made; name one in "
        f'"architectures" of config.json, that ends in For{", For".join(HEADS)}, or write a function setup()'
    )


def _require_memory(build: Callable[[], nn.Module], folder: Path) -> None:
    try:
        with torch.device("meta"):
            parameters = sum(p.numel() for p in build().parameters())
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except Exception:  # some models cannot be built without numbers
        return
    if (needed := 4 * COPIES * parameters) > free:
        raise UserError(
            f"the model of {folder} has {parameters:,} parameters: a check needs about {needed / 2**30:.0f} "
            f"GiB of memory, and {free / 2**30:.0f} are free; lower num_hidden_layers, the width or the "
            "vocabulary in a copy of its configuration"
        )


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _id(config: Any, name: str) -> int | None:
    value = getattr(config, name, None)
    value = value[0] if isinstance(value, (list, tuple)) and value else value
    return value if isinstance(value, int) and value >= 0 else None


def _text(config: Any, generator: torch.Generator) -> Batch:
    """Ids of ``ROWS`` rows of different lengths, padded on the right, with the mask of the padding."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    vocabulary = int(text.vocab_size)
    longest = [
        getattr(text, n, None) for n in ("max_position_embeddings", "n_positions", "max_source_positions")
    ]
    width = min([POSITIONS, *(n - 2 for n in longest if isinstance(n, int) and n > 4)])
    pad = _id(text, "pad_token_id")
    special = {
        _id(text, f"{n}_token_id") for n in ("pad", "bos", "eos", "decoder_start", "sep", "cls", "mask")
    }
    words = torch.tensor([i for i in range(min(vocabulary, 1000)) if i not in special] or [0])
    ids = words[torch.randint(len(words), (ROWS, width), generator=generator)]
    lengths = torch.tensor([width, width - width // 4, width, width - width // 2])
    real = torch.arange(width) < lengths[:, None]
    if pad is None:
        return {"input_ids": ids}
    return {"input_ids": ids.masked_fill(~real, pad), "attention_mask": real.long()}


def _real(batch: Batch) -> Tensor:
    return batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()


def _causal(config: Any, generator: torch.Generator) -> Batch:
    batch = _text(config, generator)
    return {**batch, "labels": batch["input_ids"].masked_fill(~_real(batch), IGNORED)}


def _masked(config: Any, generator: torch.Generator) -> Batch:
    """Make every fifth token a target; the mask token, or another word, replaces it in the input."""
    batch = _text(config, generator)
    ids, pick = batch["input_ids"], torch.arange(batch["input_ids"].shape[1]) % 5 == 1
    pick = pick & _real(batch)
    mask = _id(config, "mask_token_id")
    shown = ids.masked_fill(pick, mask) if mask is not None else torch.where(pick, ids.roll(1, 1), ids)
    return {**batch, "input_ids": shown, "labels": ids.masked_fill(~pick, IGNORED)}


def _pairs(config: Any, generator: torch.Generator) -> Batch:
    source, target = _text(config, generator), _text(config, generator)
    labels = target["input_ids"].masked_fill(~_real(target), IGNORED).flip(0)
    return {**source, "labels": labels[:, : labels.shape[1] - 4].contiguous()}


def _classes(config: Any) -> Tensor:
    return torch.arange(ROWS) % config.num_labels


def _sequences(config: Any, generator: torch.Generator) -> Batch:
    return {**_text(config, generator), "labels": _classes(config)}


def _each_token(config: Any, generator: torch.Generator) -> Batch:
    batch = _text(config, generator)
    labels = torch.randint(config.num_labels, batch["input_ids"].shape, generator=generator)
    return {**batch, "labels": labels.masked_fill(~_real(batch), IGNORED)}


def _answers(config: Any, generator: torch.Generator) -> Batch:
    batch = _text(config, generator)
    start = torch.arange(ROWS) % 3 + 1
    return {**batch, "start_positions": start, "end_positions": start + 2}


def _images(config: Any, generator: torch.Generator) -> Batch:
    size = getattr(config, "image_size", None) or 64
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    pixels = torch.randn(ROWS, getattr(config, "num_channels", 3), height, width, generator=generator)
    return {"pixel_values": pixels, "labels": _classes(config)}


HEADS: Final[dict[str, Callable[[Any, torch.Generator], Batch]]] = {
    "CausalLM": _causal,
    "ConditionalGeneration": _pairs,
    "MaskedLM": _masked,
    "SequenceClassification": _sequences,
    "TokenClassification": _each_token,
    "QuestionAnswering": _answers,
    "ImageClassification": _images,
}
"""Functions that make a batch, by the end of an architecture's name."""
_AUTO: Final = {"ConditionalGeneration": "Seq2SeqLM"}
