"""Export a run's language model as a Hugging Face folder, and measure the difference."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing
from torch import Tensor

from normlab.errors import UserError
from normlab.lab.config import Config
from normlab.lab.data.foreign import ForeignTokenizer
from normlab.lab.data.tokenizer import EOS, PAD, UNK, Tokenizer
from normlab.lab.recipes.grammar import require_known
from normlab.lab.runs.folder import RunFolder
from normlab.lab.tasks.language_model import LanguageModel
from normlab.lab.training.families import FAMILIES, TABLES, Family
from normlab.lab.training.translate import model_of
from normlab.nn import Decoder
from normlab.nn.model import evaluating

BOUND: Final = 1e-5
"""The largest allowed difference of logits in float32, relative to the largest logit."""
ROWS: Final = 4
POSITIONS: Final = 64
"""Random tokens in each row on which logits are compared."""


def family_of(config: Config) -> Family:
    """The family that a run fits. Raises UserError, with the reasons, if it fits none."""
    if config.task != LanguageModel.name:
        raise UserError(f"only language models are exported, and the task of the run is {config.task}")
    reasons = {family: family.misfits(config.model) for family in FAMILIES}
    nearest = min(reasons, key=lambda family: len(reasons[family]))
    if reasons[nearest]:
        others = [
            f"\n  {family.kind}: {'; '.join(why)}" for family, why in reasons.items() if family != nearest
        ]
        raise UserError(
            f"no architecture of Hugging Face's matches {config.recipe}; the closest is {nearest.kind}, but "
            f"{'; '.join(reasons[nearest])}. The others:{''.join(others)}\n"
            "docs/export.md lists the parts of each, and what you can do"
        )
    return nearest


@dataclass(frozen=True)
class Exported:
    """What was written, and how far the logits of both models are apart."""

    kind: str
    weights: str
    float32: float
    """The largest absolute difference of two logits, as the folder's model computes them."""
    largest_logit: float
    tokenizer: str
    """Which tokenizer was written, or why none was."""


def export(folder: RunFolder, out: Path, *, weights: str | int = "") -> Exported:
    """Write a run's language model as a folder that ``AutoModelForCausalLM.from_pretrained`` loads.

    Nothing stays unless the logits of the loaded model differ by at most ``BOUND`` times the largest. Raises
    UserError for a recipe that fits no family, for a larger difference, and for a folder that exists.
    """
    if out.exists():
        raise UserError(f"--out is {out}, which exists; name another folder, or move that one away")
    try:
        import transformers
    except ImportError as error:
        raise UserError("run export needs transformers; type: pip install 'normlab[hf]'") from error
    config = folder.config()
    require_known(config)
    family = family_of(config)
    model, tokenizer, chosen = model_of(Decoder, folder, weights)
    new = out.with_name(f"{out.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    backend, rows = entries_of(tokenizer)
    hugging_face(family, config, model, rows).save_pretrained(new)
    described = write_tokenizer(backend, rows, new) if backend else _NO_TOKENIZER
    loaded = transformers.AutoModelForCausalLM.from_pretrained(new, dtype=torch.float32)
    apart, largest = difference(model, loaded, config, rows)
    if not apart <= BOUND * largest:  # also true of NaN
        shutil.rmtree(new)
        raise UserError(
            f"the logits of {folder.path} and of its {family.kind} differ by {apart:.2g}, and at most "
            f"{BOUND:.0e} of the largest logit, {largest:.3g}, is allowed; nothing was written"
        )
    new.rename(out)
    return Exported(family.kind, chosen.description, apart, largest, described)


_NO_TOKENIZER: Final = "none: it is not from the library tokenizers; the run's own file is tokenizer.json"


def entries_of(tokenizer: Tokenizer) -> tuple[Backend | None, Tensor]:
    """Return the library's tokenizer, or None for one of another library, and our entry for each entry of the
    exported model. A tokenizer made by others keeps its own numbering.
    """
    if isinstance(tokenizer, ForeignTokenizer):
        backend, rows = tokenizer.exported()
        return backend, torch.from_numpy(rows).long()
    content = tokenizer.to_json()
    backend = Backend.from_str(content) if "model" in json.loads(content) else None
    return backend, torch.arange(tokenizer.vocab_size)


def _numbers(rows: Tensor) -> tuple[int, int]:
    """The ids of EOS and PAD in the exported model; a tokenizer made by others uses EOS for both."""
    numbers = {int(entry): number for number, entry in enumerate(rows)}
    return numbers[EOS], numbers.get(PAD, numbers[EOS])


@torch.no_grad()
def hugging_face(family: Family, config: Config, model: Decoder, rows: Tensor) -> Any:
    """The family's model with the weights of ours; its entry i is our entry ``rows[i]``."""
    import transformers

    positions = model.position_encoding.longest or max(config.model.max_positions, config.data.block_len)
    weights = family.weights(model, positions)
    for name in TABLES:
        if name in weights:
            weights[name] = weights[name][rows]
    tables = [weights[name] for name in TABLES if name in weights]
    tied = all(torch.equal(table, weights["lm_head.weight"]) for table in tables)
    end, pad = _numbers(rows)
    configuration = transformers.AutoConfig.for_model(
        family.kind,
        vocab_size=len(rows),
        hidden_size=config.model.dim,
        num_hidden_layers=config.model.decoder_layers,
        num_attention_heads=config.model.heads,
        max_position_embeddings=positions,
        tie_word_embeddings=tied,
        pad_token_id=pad,
        bos_token_id=end,  # which stands before a text in training
        eos_token_id=end,
        **family.configuration(config.model, model),
    )
    exported = transformers.AutoModelForCausalLM.from_config(configuration)
    exported.load_state_dict({name: value.detach().clone() for name, value in weights.items()}, strict=True)
    return exported.eval()


@torch.no_grad()
def difference(model: Decoder, other: Any, config: Config, rows: Tensor) -> tuple[float, float]:
    """The largest difference of two logits on random tokens, and the largest logit."""
    generator = torch.Generator().manual_seed(0)
    shape = ROWS, min(POSITIONS, config.data.block_len)
    entries = (rows != PAD).nonzero().flatten()
    ids = entries[torch.randint(len(entries), shape, generator=generator)]
    with evaluating(model):
        ours = model(rows[ids])[..., rows]
    return float((ours - other(ids).logits).abs().max()), float(ours.abs().max())


def write_tokenizer(backend: Backend, rows: Tensor, out: Path) -> str:
    """Write a tokenizer for ``AutoTokenizer``, with an EOS before each text; return a description of it."""
    import transformers

    numbers = _numbers(rows)
    end, pad = (str(backend.id_to_token(i)) for i in numbers)
    backend.post_processor = TemplateProcessing(single=[end, "$A"], special_tokens=[(end, numbers[0])])
    unknown = [backend.id_to_token(int(i)) for i in (rows == UNK).nonzero()]
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=pad,
        unk_token=next(iter(unknown), None),
        bos_token=end,
        eos_token=end,
        clean_up_tokenization_spaces=False,
    )
    fast.save_pretrained(out)
    return f"{len(fast):,} entries; it puts {end} before a text, as in training"
