"""Setups from Hugging Face configurations: a freshly drawn model, and a batch that fits its head."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from normlab.base.files import read_json
from normlab.base.memory import available_bytes
from normlab.errors import UserError, in_one_line
from normlab.setups.function import draw_seed
from normlab.setups.hub import CONFIGURATION, folder_of
from normlab.setups.named import NamedSetup
from normlab.setups.setup import Declaration, Setup
from normlab.setups.shrink import LARGE, Build, count_parameters, shrunk, within_reason
from normlab.setups.sizes import entries
from normlab.trace.patching import in_mode
from normlab.trace.restore import same_random_state
from normlab.trace.tensors import refusal

ROWS: Final = 4
POSITIONS: Final = 24
"""Tokens in a row; fewer if the model has fewer positions."""
IGNORED: Final = -100
"""The label that Hugging Face's losses ignore."""
COPIES: Final = 8
"""How many float32 copies of a model's parameters are in memory while a check runs."""
OWN_SETUP: Final = (
    "write a function setup() that returns normlab.Setup(model, batch, loss=…) in a file such as "
    "my_setup.py, and type: normlab check my_setup.py:setup"
)
"""What to do with a model that reads another batch than the one that is made for its head."""
Batch = dict[str, Tensor]


def setup_from_configuration(
    source: str | Path, *, seed: int, trust_remote_code: bool = False, shrink: bool | None = None
) -> NamedSetup:
    """Build the model that a ``config.json`` describes, with weights drawn from a seed.

    ``source`` is a folder, or the name of a model on the Hub or in its local cache. No weights are read. A
    model of more than ``LARGE`` parameters is replaced by a smaller one of the same architecture, unless
    ``shrink`` is False; with True, any model is.

    Raises UserError if there is no configuration, for one that names code of its own (``auto_map``, kernels)
    unless that is trusted, for an architecture without a loss, for a model that cannot be shrunk, and for one
    that does not fit in memory.
    """
    configuration = _Configuration.of(str(source), trusted=trust_remote_code)
    config, build, head, facts = _model_of(configuration, shrink=shrink)
    with same_random_state(seed):
        try:
            model = build(config)
        except Exception as error:
            raise UserError(f"no model can be built from {source}: {in_one_line(error)}") from error
        batch = HEADS[head](config, torch.Generator().manual_seed(seed))
        _require_text(model, batch, head)
        _require_pass(model, batch)
        if head == "CausalLM" and _asks_at_first_position(model, batch):
            batch["labels"] = functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)
    head_over_words: Any = getattr(model, "get_output_embeddings", lambda: None)()
    # A default of the library declares nothing, and a classifier has no head over words that could be tied.
    is_tied = configuration.content.get("tie_word_embeddings") is True and head_over_words is not None
    declare = Declaration(
        tied=is_tied or None,
        pad_id=_id(config, "pad_token_id"),
        eos_id=_id(config, "eos_token_id"),
        init="class",
        trained=False,
    )

    def make() -> nn.Module:
        torch.manual_seed(draw_seed())
        return build(config)

    setup = Setup(model, batch, declare=declare, make=make)
    facts = {"configuration": str(source), "weights": f"drawn from seed {seed}", **facts}
    return NamedSetup(f"{type(model).__name__} of {source}", setup, facts)


@dataclass(frozen=True)
class _Configuration:
    """A configuration as it was read, and where it comes from."""

    library: Any
    """The package transformers."""
    source: str
    folder: Path
    content: Mapping[str, Any]
    trusted: bool

    @classmethod
    def of(cls, source: str, *, trusted: bool) -> _Configuration:
        """Find a configuration and read it."""
        try:
            import transformers
        except ImportError as error:
            raise UserError("hf: needs transformers; type: pip install 'normlab[hf]'") from error
        folder = folder_of(source)
        content = _read(folder)
        if not trusted:
            _refuse_code(content, f"config.json of {source}")
        return cls(transformers, source, folder, content, trusted)

    def config(self) -> Any:
        """Return it as an object of transformers. Code that is trusted is found by the source's own name."""
        return self._loaded(self.source if self.trusted else str(self.folder), trusted=self.trusted)

    def with_content(self, content: Mapping[str, Any]) -> Any:
        """Return an object of transformers with other content; code of its own is not looked for."""
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, CONFIGURATION).write_text(json.dumps(content))
            return self._loaded(folder, trusted=False)

    def _loaded(self, place: str, *, trusted: bool) -> Any:
        read = self.library.AutoConfig.from_pretrained
        try:
            return read(place, local_files_only=not trusted, trust_remote_code=trusted)
        except Exception as error:
            raise UserError(
                f"transformers cannot read config.json of {self.source}: {in_one_line(error)}"
            ) from error


def _model_of(
    configuration: _Configuration, *, shrink: bool | None
) -> tuple[Any, Build, str, dict[str, str]]:
    """Return the configuration of the model that is checked, a function that builds it, the kind of its head,
    and what was done to the configuration.
    """
    content, asked = within_reason(configuration.content)
    config = configuration.with_content(content) if asked else configuration.config()
    build, head = _builder(configuration.library, config, trusted=configuration.trusted)
    try:
        parameters = count_parameters(build, config, asked)
    except Exception as error:
        raise UserError(f"no model can be built from {configuration.source}: {in_one_line(error)}") from error
    if shrink or (shrink is None and parameters > LARGE):
        smaller = shrunk(config, build, asked)
        return smaller.config, build, head, {"shrunk": f"from {parameters:,} {smaller}"}
    _require_memory(parameters, configuration.source)
    return configuration.config() if asked else config, build, head, {}


def _read(folder: Path) -> Mapping[str, Any]:
    file = folder / CONFIGURATION
    try:
        content = read_json(file)
    except UserError as error:
        raise UserError(f"{error}; or name a folder that holds another config.json") from error
    except OSError as error:
        raise UserError(
            f"{file} cannot be read: {in_one_line(error)}; name a folder that holds a config.json"
        ) from error
    if not isinstance(content, dict):
        raise UserError(f"{file} holds {type(content).__name__}, and must hold an object")
    return content


def _refuse_code(content: Mapping[str, Any], what: str) -> None:
    """Raise UserError for a configuration that names code outside the library."""
    if _names_code(content):
        raise UserError(
            f"{what} names code of its own (auto_map), which would be run; read it first, then type "
            "--trust-remote-code"
        )
    for path, value in entries(content):
        if any(str(part).endswith("_implementation") for part in path) and "/" in str(value):
            raise UserError(
                f"{what} names code of {value} ({'.'.join(map(str, path))}), which would be downloaded and "
                "run; leave that entry out, or read the code first and type --trust-remote-code"
            )


def _names_code(value: Any) -> bool:
    """Whether a configuration, or one inside it, names code outside the library."""
    if isinstance(value, Mapping):
        return "auto_map" in value or any(map(_names_code, value.values()))
    return isinstance(value, list) and any(map(_names_code, value))


def _builder(library: Any, config: Any, *, trusted: bool) -> tuple[Build, str]:
    """Return a function that draws the model of a configuration, and the kind of its head: that of its
    architecture, or the first that its type has.
    """
    architecture = next(iter(config.architectures or ()), "")
    kind = _head_of_class(library, config, architecture)
    heads = [kind] if kind else list[str]()
    if not architecture:
        heads = _usual_heads(config)
    for head in heads:
        is_in_its_own_code = _auto(head) in (getattr(config, "auto_map", None) or {})
        auto = getattr(library, _auto(head))
        if type(config) in auto._model_mapping or is_in_its_own_code:
            return partial(auto.from_config, trust_remote_code=trusted), _read_head(config, head)
    cls = getattr(library, architecture, None)
    if kind and isinstance(cls, type) and issubclass(cls, library.PreTrainedModel):
        return cls, _read_head(config, kind)
    raise UserError(
        f"{architecture or type(config).__name__} has no head for which a batch can be made; name one in "
        f'"architectures" of config.json, that ends in For{", For".join(HEADS)}, or write a function setup()'
    )


def _usual_heads(config: Any) -> list[str]:
    """Return the kinds of heads for a configuration that names no architecture, the usual one first.

    A type may have heads of several kinds, and which one it was made for is said by what it is: an encoder
    with a decoder translates, and a type that can predict masked words does so unless it is made a decoder.
    """
    usual = ["ConditionalGeneration"] if config.is_encoder_decoder else []
    if not getattr(config, "is_decoder", False):
        usual.append("MaskedLM")
    return [*usual, *(head for head in HEADS if head not in usual)]


def _head_of_class(library: Any, config: Any, architecture: str) -> str:
    """Return the kind of head that a class has, as the end of its name says, or else the automatic class that
    builds it; nothing if neither tells, or if automatic classes of several kinds do.
    """
    for head in HEADS:
        if architecture.endswith(f"For{head}"):
            return head
    built = {head: getattr(library, _auto(head))._model_mapping.get(type(config), None) for head in HEADS}
    heads = [head for head, cls in built.items() if getattr(cls, "__name__", "") == architecture]
    if not heads and architecture.endswith("LMHeadModel"):
        return "CausalLM"
    return heads[0] if len(heads) == 1 else ""


def _auto(head: str) -> str:
    """Return the name of transformers' automatic class for a kind of head."""
    return f"AutoModelFor{_AUTO.get(head, head)}"


def _read_head(config: Any, head: str) -> str:
    """Return the kind of head by which a batch is made: without an encoder, a model that is conditioned on
    images or sounds continues a text.
    """
    is_decoder = head == "ConditionalGeneration" and not config.is_encoder_decoder
    return "CausalLM" if is_decoder else head


def _asks_at_first_position(model: nn.Module, batch: Batch) -> bool:
    """Return whether a loss depends on the label at the first position. A class that shifts its labels itself
    leaves that one out; any other expects labels that are shifted already, to the tokens that follow.
    """
    labels = batch["labels"].clone()
    labels[:, 1:] = IGNORED
    try:
        with in_mode(model, training=False), torch.no_grad():
            loss, with_others = (model(**{**batch, "labels": x}).loss for x in (labels, labels.roll(1, 0)))
        return bool(loss.isfinite() and loss != with_others)
    except Exception:  # the check says so, in its own words
        return False


def _require_text(model: nn.Module, batch: Batch, head: str) -> None:
    """Raise UserError for a model whose encoder reads something else than text."""
    name = getattr(model, "main_input_name", "input_ids")
    if head == "ConditionalGeneration" and name not in batch:
        raise UserError(
            f"{type(model).__name__} reads {name}, for which no batch can be made; write a function setup()"
        )


def _require_pass(model: nn.Module, batch: Batch) -> None:
    """Raise UserError, with what to type, for a model that raises on its batch.

    The check would raise as well, but it cannot know that this batch was made up here and that the user's own
    would do.
    """
    try:
        with in_mode(model, training=False), torch.no_grad():
            model(**batch)
    except Exception as error:
        sentence = refusal(type(model).__name__, batch, error)
        raise UserError(f"{sentence}; {OWN_SETUP}") from error


def _require_memory(parameters: int, source: str) -> None:
    free = available_bytes()
    if (needed := 4 * COPIES * parameters) > free:
        raise UserError(
            f"the model of {source} has {parameters:,} parameters: a check needs about {needed / 2**30:.0f} "
            f"GiB of memory, and {free / 2**30:.0f} are free; type --shrink, or lower num_hidden_layers, the "
            "width or the vocabulary in a copy of its configuration"
        )


def _id(config: Any, name: str) -> int | None:
    value = getattr(config, name, None)
    value = value[0] if isinstance(value, (list, tuple)) and value else value
    return value if isinstance(value, int) and value >= 0 else None


def _text(config: Any, generator: torch.Generator) -> Batch:
    """Return ids of ``ROWS`` texts of different lengths, each with its end, padded on the right, with the
    mask of the padding; without a padding token, the ids of texts of one length alone.
    """
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
    end = _id(text, "eos_token_id")
    if pad is None:
        return {"input_ids": ids}
    if end is not None:
        ids[torch.arange(ROWS), lengths - 1] = end
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
    labels = labels[:, : labels.shape[1] - 4].contiguous()
    if hasattr(config, "decoder_start_token_id"):
        return {**source, "labels": labels}
    # the class cannot know what a decoder reads first, and shifts no labels
    pad = _id(config, "pad_token_id") or 0
    read = functional.pad(labels, (1, -1), value=pad)
    return {**source, "decoder_input_ids": read.masked_fill(read == IGNORED, pad), "labels": labels}


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
