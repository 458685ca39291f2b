"""The full explanation of a recipe: equations, initialisation, sources, sizes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from normlab.config.config import Config
from normlab.config.tex import readable
from normlab.nn import Branch, Placement, Sublayer, TokenModel
from normlab.training.recipes.grammar import (
    AXES,
    PLACEMENT,
    WARM_UP,
    Axis,
    by_stack,
    describe,
    not_plain,
    paragraphs,
    unfilled,
    uses_norm,
)


def explain(config: Config) -> dict[str, str]:
    """Return labelled texts: equation and source of every choice that is not the plain one, the placement's
    factors on the initialisation of each matrix, and the number of parameters.
    """
    model = unfilled(config.model, config.data.vocab_size)
    said = {"in short": describe(config)}
    plain: list[str] = []
    for axis in (PLACEMENT, *AXES):
        chosen = by_stack(axis, config) if axis is PLACEMENT else not_plain(axis, config)
        if axis.name == "norm" and not uses_norm(config.model):
            said["norm"] = "not used"
        elif chosen:
            said |= {f"{axis.name} {stack}".strip(): _part(axis, name) for stack, name in chosen.items()}
        else:
            plain.append(axis.form.format(axis.plain))
    steps = config.optim.warmup_steps
    said["warm-up"] = f"{steps} steps: {_text(WARM_UP['warmup'])}" if steps else "none"
    said["plain choices"] = ", ".join(plain)
    said["initialisation"] = "; ".join(_initialisation(model))
    said["parameters"] = _parameters(config, model)
    if config.forced:
        said["forced"] = config.forced
    return said


def _part(axis: Axis, name: str) -> str:
    claim = ""
    if axis is PLACEMENT and Placement.registry[name].deep:
        claim = " Its source claims that very deep models train with it."
    return f"{name}: {_text(axis.names[name])}{claim}"


def _text(source: object) -> str:
    return readable(" ".join(paragraphs(source)))


def _initialisation(model: TokenModel) -> Iterator[str]:
    """Yield the factors on the scheme's standard deviations by stack, and whether data are needed."""
    sublayers = [module for module in model.modules() if isinstance(module, Sublayer)]
    scaled = [f"{stack} {', '.join(names)} × {factor:.3g}" for (stack, factor), names in gains(model).items()]
    yield from scaled or ["every matrix as in the scheme"]
    embeddings = min(s.place.embedding_gain(s.site) for s in sublayers)
    classifier = min(s.place.classifier_gain(s.site) for s in sublayers)
    if embeddings != 1:
        yield f"embeddings × {embeddings:.3g}"
    if classifier != 1:
        yield f"classifier × {classifier:.3g}"
    if any(s.place.profiled for s in sublayers):
        yield "profiled on one batch before the first step"


def gains(model: TokenModel) -> dict[tuple[str, float], list[str]]:
    """Return the matrices whose initial standard deviation has a factor other than 1, by stack and factor.

    A matrix that has another factor in another branch of the stack is named with its branch.
    """
    roles: dict[tuple[str, str], dict[float, dict[str, None]]] = defaultdict(lambda: defaultdict(dict))
    for sublayer in model.modules():
        if isinstance(sublayer, Sublayer) and isinstance(sublayer.f, Branch):
            site = sublayer.site
            for matrix in sublayer.f.matrices():
                roles[site.stack, matrix][sublayer.place.gain(site, matrix)][site.role] = None
    found: dict[tuple[str, float], list[str]] = defaultdict(list)
    for (stack, matrix), by_factor in roles.items():
        for factor, where in by_factor.items():
            if factor != 1:
                of = f" of {' and '.join(where)}" if len(by_factor) > 1 else ""
                found[stack, factor].append(matrix + of)
    return dict(found)


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
