"""A run's language model as a folder of Hugging Face's, with the difference measured.

A family says which parts it has; a recipe fits where each of its parts is among them. What the weights mean
is read from the modules, not from their names.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from normlab.config.config import Config
from normlab.config.model import ModelConfig
from normlab.data.tokenizer import BOS, EOS, PAD, SPECIALS, UNK
from normlab.data.vocabulary import load
from normlab.errors import UserError
from normlab.nn import Attention, Decoder, FeedForward, Placement
from normlab.nn.model import evaluating
from normlab.runs.folder import RunFolder
from normlab.tasks.language_model import LanguageModel
from normlab.tasks.task import build_model
from normlab.training.checkpoint import load_checkpoint
from normlab.training.recipes.grammar import require_known
from normlab.training.weights import weights_of

BOUND: Final = 1e-5
"""The largest difference of logits in float32 that is allowed, relative to the largest logit."""
ROWS: Final = 4
POSITIONS: Final = 64
"""Random tokens of a row on which logits are compared."""
SIZES: Final = (
    *("dim", "ffn_dim", "heads", "kv_heads", "head_dim", "encoder_layers", "decoder_layers", "max_positions"),
    *("rope_theta", "base_dim", "base_layers", "logit_cap", "qk_norm_len"),
)
WEIGHTS_ALONE: Final = (
    *("scheme", "dropout", "attention_dropout", "ffn_dropout", "embedding", "embedding_scale"),
    *("encoder_placement", "separate_source"),
)
"""Parts whose choice changes the weights, or training alone: the exported model is the same."""
RMS: Final = ("rmsnorm", "rmsnorm1p", "rmsnorm_nogain")
GATED: Final = {"swiglu": "silu", "geglu": "gelu_pytorch_tanh"}
Weights = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Family:
    """A class of Hugging Face's: the parts that it has, its configuration, and its weights by name."""

    kind: str
    """Its ``model_type``."""
    parts: Mapping[str, Sequence[str]]
    """For each part of a model that the family restricts, the names that it has; first the usual one."""
    configuration: Callable[[ModelConfig, Decoder], Mapping[str, Any]]
    """What of its configuration is not common to all families."""
    weights: Callable[[Decoder, int], Weights]
    """Given the model and the number of its positions."""
    has_kv_heads: bool = True

    def misfits(self, config: ModelConfig) -> list[str]:
        """Why a model does not fit, one reason for each part; none where it does."""
        config = Placement.registry[config.decoder_placement].complete(config)
        reasons = []
        for declared in fields(config):
            name, value = declared.name, getattr(config, declared.name)
            usual = (declared.metadata.get("introduced", declared.default),)
            allowed = tuple(self.parts.get(name, usual))
            if name not in (*SIZES, *WEIGHTS_ALONE) and value not in allowed:
                reasons.append(f"{name} is {value}, and {self.kind} has {' or '.join(map(str, allowed))}")
        if not self.has_kv_heads and config.kv_heads not in (0, config.heads):
            reasons.append(f"kv_heads is {config.kv_heads}, and {self.kind} has as many as heads")
        return reasons


def layers_of(model: Decoder) -> list[tuple[Any, Attention, Any, FeedForward]]:
    """Placement and branch of the attention and of the feed-forward of every layer."""
    every = list(model.decoder)
    pairs = zip(every[::2], every[1::2], strict=True)
    return [(a.place, cast("Attention", a.f), b.place, cast("FeedForward", b.f)) for a, b in pairs]


def input_table(model: Decoder) -> Tensor:
    """The embedding of each token as it enters the model, `[V, D]`."""
    return model.embedding(torch.arange(len(model.embedding.weight))[None])[0]


def output_matrix(model: Decoder) -> Tensor:
    """The matrix that makes logits, `[V, D]`."""
    return model.embedding.logits(
        torch.eye(model.embedding.weight.shape[1], dtype=model.embedding.weight.dtype)
    ).T


def is_tied(model: Decoder) -> bool:
    """Whether one matrix serves both."""
    return torch.equal(input_table(model), output_matrix(model))


def gain(norm: nn.Module) -> Tensor:
    """The gain of an RMSNorm of any kind, `[D]`."""
    own: Any = norm
    plain = own.fold() if hasattr(own, "fold") else own
    return plain.weight.to(next(iter(own.parameters()), plain.weight).dtype)


def attention_rows(f: Attention) -> tuple[list[Tensor], list[Tensor]]:
    """The matrices of queries, keys and values, and their biases, if there are any."""
    own = f.matrices()
    matrices = [own[name] for name in ("query", "key", "value")]
    bias = f.qkv.bias
    return matrices, [] if bias is None else list(
        bias[: sum(map(len, matrices))].split([*map(len, matrices)])
    )


def halved(rows: Tensor, width: int) -> Tensor:
    """Rows `[heads x width, …]` of queries or keys with the first of each plane of rope before all second
    ones: Hugging Face rotates (i, i + width/2), normlab (2i, 2i + 1).
    """
    return rows.unflatten(0, (-1, width // 2, 2)).transpose(1, 2).flatten(0, 2)


# --------------------------------------------------------------------------------------------------- families
def gpt2_configuration(config: ModelConfig, model: Decoder) -> Mapping[str, Any]:
    """What GPT-2's configuration says beside the sizes."""
    end: Any = model.decoder.end
    names = {"gelu_tanh": "gelu_new"}
    return {
        "n_inner": config.ffn_dim,
        "activation_function": names.get(config.activation, config.activation),
        "layer_norm_epsilon": end.eps,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    }


def gpt2_weights(model: Decoder, positions: int) -> Weights:
    """GPT-2's weights: its matrices are transposed, and its biases 0 where the model has none."""
    own: Weights = {"transformer.wte.weight": input_table(model), "lm_head.weight": output_matrix(model)}
    blank = own["lm_head.weight"].new_zeros(1, positions, own["lm_head.weight"].shape[1])
    own["transformer.wpe.weight"] = model.position_encoding(blank)[0]
    for i, (before, attention, between, ffn) in enumerate(layers_of(model)):
        at = f"transformer.h.{i}."
        for name, norm in (("ln_1", before.norm), ("ln_2", between.norm)):
            own |= {f"{at}{name}.weight": norm.weight, f"{at}{name}.bias": norm.bias}
        maps = {"attn.c_attn": attention.qkv, "attn.c_proj": attention.out}
        maps |= {"mlp.c_fc": ffn.inner, "mlp.c_proj": ffn.outer}
        for name, linear in maps.items():
            bias = linear.weight.new_zeros(len(linear.weight)) if linear.bias is None else linear.bias
            own |= {f"{at}{name}.weight": linear.weight.T, f"{at}{name}.bias": bias}
    end: Any = model.decoder.end
    return own | {"transformer.ln_f.weight": end.weight, "transformer.ln_f.bias": end.bias}


def llama_configuration(config: ModelConfig, model: Decoder) -> Mapping[str, Any]:
    """What the configurations of Llama and its descendants say beside the sizes."""
    end: Any = model.decoder.end
    _, first, _, _ = layers_of(model)[0]
    biased = first.out.bias is not None
    return {
        "intermediate_size": config.ffn_dim,
        "num_key_value_heads": first.kv_heads,
        "head_dim": first.width,
        "hidden_act": GATED[config.activation],
        "rms_norm_eps": end.eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": getattr(config, "rope_theta", 10000.0)},
        "attention_bias": biased,
        **({"mlp_bias": True} if biased else {}),
    }


def rotary_weights(model: Decoder, positions: int, *, norms: Sequence[str], normed_queries: bool) -> Weights:
    """The weights that Llama and its descendants share; ``norms`` are the names of a layer's two norms."""
    own: Weights = {"model.embed_tokens.weight": input_table(model), "lm_head.weight": output_matrix(model)}
    for i, (before, attention, between, ffn) in enumerate(layers_of(model)):
        at, width = f"model.layers.{i}.", attention.width
        own |= {f"{at}{n}.weight": gain(p.norm) for n, p in zip(norms, (before, between), strict=True)}
        matrices, biases = attention_rows(attention)
        for name, rows in {"weight": matrices, "bias": biases}.items():
            for letter, row in zip("qkv", rows, strict=False):
                own[f"{at}self_attn.{letter}_proj.{name}"] = row if letter == "v" else halved(row, width)
        if normed_queries:
            norm: Any = attention.qk_norm
            pairs = {"q": norm.query, "k": norm.key}.items()
            own |= {f"{at}self_attn.{n}_norm.weight": halved(gain(m), width) for n, m in pairs}
        maps = {"self_attn.o_proj": (attention.out.weight, attention.out.bias)}
        maps["mlp.down_proj"] = ffn.outer.weight, ffn.outer.bias
        up, gate = ffn.inner.weight.chunk(2)
        biased = (None, None) if ffn.inner.bias is None else ffn.inner.bias.chunk(2)
        maps |= {"mlp.up_proj": (up, biased[0]), "mlp.gate_proj": (gate, biased[1])}
        for name, (matrix, bias) in maps.items():
            own[f"{at}{name}.weight"] = matrix
            own |= {} if bias is None else {f"{at}{name}.bias": bias}
    return own | {"model.norm.weight": gain(model.decoder.end)}


NORMS: Final = ("input_layernorm", "post_attention_layernorm")
OLMO2_NORMS: Final = ("post_attention_layernorm", "post_feedforward_layernorm")
ROTARY: Final[dict[str, Sequence[str]]] = {
    "decoder_placement": ("pre",),
    "norm": RMS,
    "position_encoding": ("rope",),
    "activation": tuple(GATED),
    "qk_norm": ("scaled",),
    "bias": ("nobias",),
    "inner_norm": ("noinnernorm",),
    "head_gain": ("noheadgain",),
}
FAMILIES: Final = (
    Family(
        "gpt2",
        {
            **ROTARY,
            "norm": ("layernorm",),
            "position_encoding": ("learned", "sinusoidal"),
            "activation": ("gelu_tanh", "gelu", "relu", "relu2"),
            "bias": ("bias", "nobias"),
        },
        gpt2_configuration,
        gpt2_weights,
        has_kv_heads=False,
    ),
    Family(
        "llama",
        {**ROTARY, "bias": ("nobias", "bias")},
        llama_configuration,
        partial(rotary_weights, norms=NORMS, normed_queries=False),
    ),
    Family(
        "qwen3",
        {**ROTARY, "qk_norm": ("headnormed",)},
        llama_configuration,
        partial(rotary_weights, norms=NORMS, normed_queries=True),
    ),
    Family(
        "olmo2",
        {**ROTARY, "decoder_placement": ("olmo2",), "qk_norm": ("normed",)},
        llama_configuration,
        partial(rotary_weights, norms=OLMO2_NORMS, normed_queries=True),
    ),
)


def family_of(config: Config) -> Family:
    """The family that a run fits. Raises UserError with the reasons where there is none."""
    if config.task != LanguageModel.name:
        raise UserError(f"the run is of the task {config.task}, and a language model is exported; name one")
    reasons = {family: family.misfits(config.model) for family in FAMILIES}
    nearest = min(reasons, key=lambda family: len(reasons[family]))
    if reasons[nearest]:
        listed = "; ".join(reasons[nearest])
        raise UserError(
            f"{config.recipe} fits no family of Hugging Face's: the nearest is {nearest.kind}, but {listed}. "
            f"There are {', '.join(family.kind for family in FAMILIES)}, see docs/export.md"
        )
    return nearest


# ----------------------------------------------------------------------------------------------------- export
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
    family, chosen = family_of(config), weights_of(folder, weights)
    tokenizer = load(folder.tokenizer)
    model = build_model(Decoder, config.model, tokenizer.vocab_size, config.seeds.init).eval()
    load_checkpoint(chosen.path, model, run=folder.id())
    new = out.with_name(f"{out.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    _hugging_face(family, config, model).save_pretrained(new)
    written = _write_tokenizer(tokenizer.to_json(), new)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(new, dtype=torch.float32)
    apart, largest = difference(model, loaded, config)
    if not apart <= BOUND * largest:
        shutil.rmtree(new)
        raise UserError(
            f"the logits of {folder.path} and of its {family.kind} differ by {apart:.2g}, and at most "
            f"{BOUND:.0e} of the largest logit, {largest:.3g}, is allowed; nothing was written"
        )
    new.rename(out)
    return Exported(family.kind, chosen.description, apart, largest, written)


@torch.no_grad()
def _hugging_face(family: Family, config: Config, model: Decoder) -> Any:
    """The family's model with the weights of ours."""
    import transformers

    positions = model.position_encoding.longest or max(config.model.max_positions, config.data.block_len)
    own = family.weights(model, positions)
    whole = transformers.AutoConfig.for_model(
        family.kind,
        vocab_size=len(model.embedding.weight),
        hidden_size=config.model.dim,
        num_hidden_layers=config.model.decoder_layers,
        num_attention_heads=config.model.heads,
        max_position_embeddings=positions,
        tie_word_embeddings=is_tied(model),
        pad_token_id=PAD,
        bos_token_id=EOS,  # which stands before a text in training
        eos_token_id=EOS,
        **family.configuration(config.model, model),
    )
    made = transformers.AutoModelForCausalLM.from_config(whole)
    made.load_state_dict({name: value.detach().clone() for name, value in own.items()}, strict=True)
    return made.eval()


@torch.no_grad()
def difference(model: Decoder, other: Any, config: Config) -> tuple[float, float]:
    """The largest difference of two logits on random tokens, and the largest logit."""
    draw = torch.Generator().manual_seed(0)
    shape = ROWS, min(POSITIONS, config.data.block_len)
    ids = torch.randint(len(SPECIALS), len(model.embedding.weight), shape, generator=draw)
    with evaluating(model):
        ours = model(ids)
    return float((ours - other(ids).logits).abs().max()), float(ours.abs().max())


def _write_tokenizer(content: str, out: Path) -> str:
    """Write the run's tokenizer, if it is one of the library ``tokenizers``; say which, or why not."""
    import tokenizers
    import transformers

    if "model" not in json.loads(content):
        return "none: it is no tokenizer of the library tokenizers; the run's own file is tokenizer.json"
    backend = tokenizers.Tokenizer.from_str(content)
    names = {i: backend.id_to_token(i) for i in (PAD, UNK, BOS, EOS)}
    start = {"single": [names[EOS], "$A"], "special_tokens": [(names[EOS], EOS)]}
    backend.post_processor = tokenizers.processors.TemplateProcessing(**start)
    whole = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=names[PAD],
        unk_token=names[UNK],
        bos_token=names[EOS],
        eos_token=names[EOS],
        clean_up_tokenization_spaces=False,
    )
    whole.save_pretrained(out)
    return f"{len(whole):,} entries; it puts {names[EOS]} before a text, as in training"
