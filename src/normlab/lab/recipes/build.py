"""From a recipe to its model in one call, and to its full explanation: equations, sources, sizes."""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from normlab.base.io import flag_name
from normlab.base.model_config import ModelConfig, derive
from normlab.lab.config import Config
from normlab.lab.formulas import readable
from normlab.lab.recipes import grammar
from normlab.lab.recipes.baselines import baseline_of
from normlab.lab.tasks.task import build_model
from normlab.nn import Branch, Decoder, Placement, ProfiledPlacement, Sublayer, TokenModel
from normlab.nn.init import profile_

DECODER: Final[dict[str, Any]] = {"encoder_layers": 0, "decoder_layers": 4, "dropout": 0.0}
"""The default sizes of a model."""
ROWS, POSITIONS = 8, 32
"""Shape of the random tokens for placements whose initialisation needs data."""
CITATION = re.compile(
    r"[A-Z][\w'-]+(?: and [A-Z][\w'-]+| et al\.| Team)? \d{4}[^()]*\((?:arXiv [\d.]+|[A-Z]{3,} \d{4})\)"
)
"""``Wang et al. 2022, Figure 2 (arXiv 2203.00555)``, or a conference with its year in the brackets; an older
source may come before one on arXiv.
"""


def build(recipe: str, vocab_size: int, *, seed: int = 1, force: bool = False, **sizes: Any) -> TokenModel:
    """Build an initialised model from a recipe: a decoder of 4 layers of width 256, unless ``sizes`` differ.

    ``sizes`` are fields of ``ModelConfig``: dim, ffn_dim, heads, encoder_layers, decoder_layers, dropout and
    so on. A model with only an encoder is a BERT; one with both stacks translates. A decoder maps ids `[B,
    T]` to logits `[B, T, V]`. Placements whose initialisation reads data (Admin) read random tokens; call
    ``normlab.nn.init.profile_`` to let them read yours.

    Raises UserError for a recipe or a size that does not exist, and, without ``force``, for a combination
    that its source does not define.

    >>> model = normlab.build("pre+rmsnorm+rope", 1000, dim=64, heads=4, decoder_layers=2)
    >>> model(torch.randint(1000, (8, 16))).shape
    torch.Size([8, 16, 1000])
    """
    base = Config(model=ModelConfig(**{**DECODER, **sizes}))
    config = grammar.resolve(recipe, base, force=force, kept=list(sizes)).model
    kind: Any = grammar.MODELS.get((bool(config.encoder_layers), bool(config.decoder_layers)), Decoder)
    model = build_model(kind, config, vocab_size, seed)
    if next(model.parameters()).is_meta:
        return model
    generator = torch.Generator("cpu").manual_seed(derive(seed, "profile"))

    def tokens() -> Tensor:
        return torch.randint(vocab_size, (ROWS, min(POSITIONS, config.max_positions)), generator=generator)

    def run() -> Tensor:
        inputs = [tokens() for layers in (config.encoder_layers, config.decoder_layers) if layers]
        return model.hidden(*inputs)

    profile_(model, run)
    return model


def explain(config: Config) -> dict[str, str]:
    """Return labelled texts: equation and source of every choice except plain ones, the placement's factors
    on the initialisation of each matrix, and the number of parameters.
    """
    model = grammar.empty_model(config.model, config.data.vocab_size)
    texts = {"in short": grammar.describe(config)}
    if baseline := baseline_of(config.recipe):
        texts["baseline"] = f"{baseline.name}: {_text(baseline)} Beside its parts: {baseline.numbers()}."
    plain: list[str] = []
    for axis in (grammar.PLACEMENT, *grammar.AXES):
        chosen = grammar.not_plain(axis, config)
        if axis.name == "norm" and not grammar.uses_norm(config.model):
            texts["norm"] = "not used"
        elif chosen:
            for stack, name in chosen.items():
                texts[f"{axis.name} {stack}".strip()] = _part(axis, name)
        else:
            plain.append(axis.form.format(axis.plain))
    steps = config.optim.warmup_steps
    texts["warm-up"] = f"{steps} steps: {_text(grammar.WARM_UP['warmup'])}" if steps else "none"
    texts["plain choices"] = ", ".join(plain)
    texts["initialisation"] = "; ".join(_initialisation(model))
    texts["parameters"] = _parameters(config, model)
    if config.forced:
        texts["forced"] = config.forced
    return texts


def notes(configs: Sequence[Config], typed: Iterable[str], asked: Config) -> Iterator[str]:
    """Yield a sentence for each choice that was perhaps not meant: a baseline that was published for another
    task, and a typed field that no part of any of these configurations reads, unless its value in ``asked``
    is 0, as of a warm-up that is not wanted.
    """
    for config in configs:
        baseline = baseline_of(config.recipe)
        if baseline is not None and baseline.task != config.task:
            yield (
                f"{config.recipe} was published for the task {baseline.task}, but the task is {config.task}; "
                f"for {baseline.task} type --config {baseline.task}"
            )
    readers: dict[str, list[str]] = defaultdict(list)
    for part in grammar.parts():
        for option in getattr(part.source, "options", ()):
            readers[option].append(part.name)
    read: set[str] = set()
    for config in configs:
        for source in grammar.chosen(config):
            read.update(getattr(source, "options", ()))
    recipes = ", ".join(config.recipe for config in configs)
    values = vars(asked.model) | vars(asked.optim)
    for name in typed:
        if name in readers and name not in read and values.get(name, True):
            yield f"{flag_name(name)} changes nothing in {recipes}; it belongs to {', '.join(readers[name])}"


def summary(part: grammar.RecipePart) -> tuple[str, str]:
    """Return equation and source of a part: the first paragraph of its docstring, and the citation after it.

    A citation reads ``Author YEAR, Section (arXiv id)``; without one, the source is empty.
    """
    equation, rest = paragraphs(part.source)
    citation = CITATION.search(rest)
    return equation.rstrip("."), citation.group() if citation else ""


def paragraphs(source: object) -> tuple[str, str]:
    """Return the first paragraph of a docstring and everything after it, without line breaks."""
    first, _, rest = inspect.cleandoc(source.__doc__ or "").partition("\n\n")
    return " ".join(first.split()), " ".join(rest.split())


def _part(axis: grammar.Axis, name: str) -> str:
    claim = ""
    if axis is grammar.PLACEMENT and Placement.registry[name].deep:
        claim = " Its source claims that very deep models train with it."
    return f"{name}: {_text(axis.names[name])}{claim}"


def _text(source: object) -> str:
    return readable(" ".join(paragraphs(source)))


def _initialisation(model: TokenModel) -> Iterator[str]:
    """Yield the factors on the scheme's standard deviations by stack, and whether data are needed."""
    sublayers = [module for module in model.modules() if isinstance(module, Sublayer)]
    scaled = gains(model)
    for (stack, factor), names in scaled.items():
        yield f"{stack} {', '.join(names)} × {factor:.3g}"
    if not scaled:
        yield "every matrix as in the scheme"
    embeddings = min(s.place.embedding_gain(s.site) for s in sublayers)
    classifier = min(s.place.classifier_gain(s.site) for s in sublayers)
    if embeddings != 1:
        yield f"embeddings × {embeddings:.3g}"
    if classifier != 1:
        yield f"classifier × {classifier:.3g}"
    if any(isinstance(s.place, ProfiledPlacement) for s in sublayers):
        yield "profiled on one batch before the first step"


def gains(model: TokenModel) -> dict[tuple[str, float], list[str]]:
    """Return the matrices whose initial standard deviation has a factor other than 1, by stack and factor.

    A matrix whose factor differs between branches of the stack is named with its branch.
    """
    branches_of: dict[tuple[str, str], dict[float, list[str]]] = {}
    for sublayer in model.modules():
        if not isinstance(sublayer, Sublayer) or not isinstance(sublayer.f, Branch):
            continue
        site = sublayer.site
        for matrix in sublayer.f.matrices():
            by_factor = branches_of.setdefault((site.stack, matrix), {})
            branches = by_factor.setdefault(sublayer.place.gain(site, matrix), [])
            if site.role not in branches:
                branches.append(site.role)
    matrices: dict[tuple[str, float], list[str]] = defaultdict(list)
    for (stack, matrix), by_factor in branches_of.items():
        for factor, branches in by_factor.items():
            if factor == 1:
                continue
            name = f"{matrix} of {' and '.join(branches)}" if len(by_factor) > 1 else matrix
            matrices[stack, factor].append(name)
    return dict(matrices)


def _parameters(config: Config, built: TokenModel) -> str:
    model, vocab = config.model, config.data.vocab_size
    total = sum(p.numel() for p in built.parameters())
    embedding = sum(p.numel() for p in built.embedding.parameters())
    heads = f"{model.heads} heads"
    if model.kv_heads:
        heads += f" ({model.kv_heads} for keys and values)"
    return (
        f"{total:,}, of which {embedding:,} in the embedding of {vocab:,} vocabulary entries; "
        f"{model.encoder_layers}+{model.decoder_layers} layers, width {model.dim}, "
        f"feed-forward {model.ffn_dim}, {heads}"
    )
