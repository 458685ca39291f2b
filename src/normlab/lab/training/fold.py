"""Rewrite a run's model as a plainer one in a run folder of its own, and measure the difference."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn

from normlab.base.files import write_json_atomic
from normlab.base.io import validated
from normlab.errors import UserError
from normlab.lab.config import Config, ModelConfig
from normlab.lab.recipes.grammar import AXES, DEFAULTS, own_code, stack_placements
from normlab.lab.recipes.plugins import imported
from normlab.lab.runs.folder import RunFolder
from normlab.lab.training.checkpoint import load_checkpoint, save_checkpoint, weights_state
from normlab.lab.training.devices import prepare_process
from normlab.lab.training.trainer import load_task
from normlab.lab.training.weights import digest, weights_of
from normlab.nn import (
    Attention,
    Branch,
    Embedding,
    Norm,
    Placement,
    Plain,
    PositionEncoding,
    Seq2Seq,
    Stack,
    Sublayer,
    TokenModel,
    UntiedEmbedding,
)
from normlab.nn.embedding import build_embedding
from normlab.nn.model import SourceInput
from normlab.trace.tensors import Side, arguments_of, forward_hooks

BOUND: Final = 1e-5
"""The largest allowed difference of logits in float32, relative to the largest logit."""
BATCHES: Final = 8
"""Number of dev batches whose logits are compared."""
FOLDED: Final = "fold.json"
"""The file of a folded run's folder that holds a ``FoldResult``."""


@dataclass(frozen=True)
class FoldResult:
    """A run's model before and after it was rewritten."""

    run: str
    weights: str
    """The weights that were rewritten, such as ``the best weights on dev, after step 1,200``."""
    before: str
    """The recipe of the run."""
    after: str
    """The recipe of the plain model."""
    kept: tuple[str, ...]
    """A sentence for each part that is not plain and stays as it is, with the reason."""
    float32: float
    """The largest absolute difference of two logits, computed in float32."""
    float64: float
    """The same in float64."""
    largest_logit: float
    """The largest absolute logit of the run, to which the bound is relative."""
    batches: int
    """Number of dev batches that were compared."""
    outputs: int
    """Number of dev examples that both models answered greedily; 0 for a task without outputs."""
    equal_outputs: int
    """Number of those with the same output."""
    parameters_before: int
    parameters_after: int
    positions: int | None
    """The longest input of the plain model in tokens, if it is limited."""


@validated
def fold(
    folder: RunFolder, out: Path, *, weights: str | int = "", max_positions: int | None = None
) -> FoldResult:
    """Write the plainest equal model of a finished run as a run folder, and return what was measured.

    ``weights`` names weights as in ``training.weights.checkpoint_of``, by default the tested ones. A factor
    on the embeddings turns their positions into a table of ``max_positions``, by default the configuration's.

    Nothing is written unless the logits differ by at most ``BOUND`` times the largest. Raises UserError for a
    run that is not done or has nothing to fold, for a larger difference, and for a folder that exists.

    >>> normlab.fold(normlab.RunFolder(admin), Path("plain")).after
    'post+untied+learned+constant'
    """
    if out.exists():
        raise UserError(f"--out is {out}, which exists; name another folder, or move that one away")
    plain, config, result = _fold(folder, weights, max_positions)
    if not result.float32 <= BOUND * result.largest_logit:
        raise UserError(
            f"the logits of {folder.path} and of its plain form differ by {result.float32:.2g} in float32 "
            f"({result.float64:.2g} in float64), and at most {BOUND:.0e} of the largest logit, "
            f"{result.largest_logit:.3g}, is allowed; nothing was written; use the run as it is"
        )
    new = out.with_name(f"{out.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    state = weights_state(plain, weights_of(folder, weights).step)
    train = replace(config.train, init_from=str(out.absolute()), init_digest=digest(state["model"]))
    config = replace(config, train=train)
    written = RunFolder.create(new, config, folder.task_metrics(), imported())
    for own in (folder.tokenizer, folder.target_vocab):
        shutil.copyfile(own, new / own.name)
    save_checkpoint(written.best, state, run=written.id())
    written.set_status(folder.status())
    write_json_atomic(new / FOLDED, result)
    new.rename(out)
    return result


def measure_fold(folder: RunFolder, *, max_positions: int | None = None) -> FoldResult:
    """Rewrite the model of a finished run as ``fold`` does and measure the differences, but write nothing.

    Raises UserError for a run that is not done or has nothing to fold.
    """
    return _fold(folder, "", max_positions)[2]


def _fold(
    folder: RunFolder, weights: str | int, max_positions: int | None
) -> tuple[nn.Module, Config, FoldResult]:
    """Return the plain model in float32 as its configuration builds it, that configuration, and the fold."""
    config = folder.config()
    _require_done(folder, config)
    chosen = weights_of(folder, weights)
    task = load_task(config, folder.path.parent, prepare_process(replace(config.machine, device="cpu")))
    model: Any = task.build().eval()
    load_checkpoint(chosen.path, model, run=folder.id())
    asked = config.model
    if max_positions is not None:
        if (longest := model.position_encoding.longest) is not None:
            raise UserError(
                f"--max-positions is {max_positions}, and the run has learned {longest}; leave it out"
            )
        asked = replace(asked, max_positions=max_positions)
    rewritten = rewrite(model, asked)
    if not rewritten.changed:
        why = "; ".join(rewritten.kept) or "its recipe is a plain one already"
        raise UserError(f"there is nothing to fold in {folder.path}, {config.recipe}: {why}; use it as it is")
    plain = replace(config, model=rewritten.config, forced="")
    plain = replace(plain, recipe=recipe_of(plain), own_code=own_code(plain))
    task.check_text(plain, task.corpus)
    built: Any = type(task)(plain, task.corpus, task.device).build().eval()
    built.load_state_dict(rewritten.model.state_dict())
    calls = _calls_of(model, lambda: task.dev_scores(model), BATCHES)
    model.eval()
    float32, _ = _largest_difference(model, built, calls)
    float64, largest = _largest_difference(deepcopy(model).double(), rewritten.model, calls)
    outputs = [task.dev_outputs(one) for one in (model, built)]
    result = FoldResult(
        run=folder.path.name,
        weights=chosen.description,
        before=config.recipe,
        after=plain.recipe,
        kept=rewritten.kept,
        float32=float32,
        float64=float64,
        largest_logit=largest,
        batches=len(calls),
        outputs=len(outputs[0]),
        equal_outputs=sum(a == b for a, b in zip(*outputs, strict=True)),
        parameters_before=sum(p.numel() for p in model.parameters()),
        parameters_after=sum(p.numel() for p in built.parameters()),
        positions=built.position_encoding.longest,
    )
    return built, plain, result


def _require_done(folder: RunFolder, config: Config) -> None:
    status = folder.status()
    if status.state != "done":
        raise UserError(
            f"the run {folder.path} is {status.state} at step {status.step:,} of {config.train.steps:,}, and "
            "only a finished one is folded; train it on: normlab train "
            f"--config {folder.path / 'config.json'} --out {folder.path.parent}"
        )


class _EnoughCallsError(Exception):
    """Ends a run of the model when all the calls that were wanted have been seen."""


def _calls_of(model: nn.Module, run: Callable[[], object], most: int) -> list[Mapping[str, Any]]:
    """Return the arguments of a model's first calls, at most ``most``, while a function runs."""
    calls: list[Mapping[str, Any]] = []

    def see(_: str, side: Side, values: Any) -> None:
        if side != "input":
            return
        if len(calls) == most:
            raise _EnoughCallsError
        calls.append(arguments_of(model, values))

    with suppress(_EnoughCallsError), forward_hooks({"": model}, see):
        run()
    return calls


@torch.no_grad()
def _largest_difference(
    model: nn.Module, other: nn.Module, calls: Sequence[Mapping[str, Any]]
) -> tuple[float, float]:
    """Return the largest absolute difference of two models' outputs, and the model's largest output."""
    pairs = [
        (a, b) for call in calls for a, b in zip(_outputs(model, call), _outputs(other, call), strict=True)
    ]
    difference = max(float((a - b).abs().max()) for a, b in pairs)
    return difference, max(float(a.abs().max()) for a, _ in pairs)


def _outputs(model: nn.Module, call: Mapping[str, Any]) -> tuple[Tensor, ...]:
    output = model(**call)
    return output if isinstance(output, tuple) else (output,)


def recipe_of(config: Config) -> str:
    """Return a recipe that resolves to a configuration's choices."""
    heads = list(dict.fromkeys(stack_placements(config.model).values()))
    head = heads[0] if len(heads) == 1 else "enc:{}/dec:{}".format(*heads)
    parts = [axis.of(config) for axis in AXES if axis.of(config) != axis.of(DEFAULTS)]
    return "+".join([head, *parts, *["warmup"] * bool(config.optim.warmup_steps)])


Part = TypeVar("Part", bound=nn.Module)
Found = TypeVar("Found")
STACKS = ("encoder", "decoder")


@dataclass(frozen=True)
class _Rewritten:
    """A model that computes the same as another, in float64."""

    model: TokenModel
    config: ModelConfig
    kept: tuple[str, ...]
    """A sentence for each part that is not plain and stays as it is, with the reason."""
    changed: bool
    """Whether anything has changed except the name of the init scheme, which no longer matters."""


@torch.no_grad()
def rewrite(model: TokenModel, config: ModelConfig) -> _Rewritten:
    """Return the plainest equal model, computed in float64, in evaluation mode.

    The given model stays as it is. Raises UserError if no single config can describe both of its stacks.
    """
    model, kept = deepcopy(model).double().eval(), list[str]()
    _fold_parts(model, kept)
    before = len(kept)
    model, _ = _attempt(model, _fold_heads, kept)
    heads_folded = len(kept) == before
    placements, first = dict[str, str](), dict[str, Tensor]()
    for name in STACKS:
        if hasattr(model, name):
            stack, found = _attempt(getattr(model, name), _fold_stack, kept)
            setattr(model, name, stack)
            if found is not None:
                placements[name], first[name] = found
    plain = _plain_config(config, placements, heads_folded=heads_folded)
    if any((factor != 1).any() for factor in first.values()):
        plain = _fold_inputs(model, plain, first)
    changed = replace(plain, scheme=config.scheme) != config
    return _Rewritten(model, replace(plain, scheme=ModelConfig().scheme), tuple(dict.fromkeys(kept)), changed)


def _attempt(part: Part, fold: Callable[[Part], Found], kept: list[str]) -> tuple[Part, Found | None]:
    """Return a folded copy and what ``fold`` returned; if no exact form exists, the part as it is and None,
    adding the reason to ``kept``.
    """
    folded = deepcopy(part)
    try:
        return folded, fold(folded)
    except UserError as error:
        kept.append(str(error))
        return part, None


def _fold_parts(model: nn.Module, kept: list[str]) -> None:
    """Replace every norm, embedding and linear map that has a plain form by that form."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            fold = getattr(child, "fold", None)
            if callable(fold) and isinstance(child, (Norm, Embedding, nn.Linear)):
                setattr(parent, name, fold())
    norms = [module for module in model.modules() if isinstance(module, Norm) and module.no_fold]
    kept += [f"{norm.name} stays as it is: {norm.no_fold}" for norm in norms]


def _fold_heads(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, Attention):
            module.fold_heads_()


def _fold_stack(stack: Stack) -> tuple[str, Tensor]:
    """Fold every sublayer in place; return the placement, and the factor `[D]` on the stack's input.

    Raises UserError, perhaps halfway, if no exact form exists.
    """
    placement, first, norm = "", torch.ones(()), None
    for sublayer in stack:
        plain = sublayer.place.fold()
        stream = _fold_sublayer(sublayer, plain)
        if sublayer.site.index == 0:
            first = stream
        elif (stream != 1).any():
            if not isinstance(norm, Norm):
                raise UserError(f"{placement} stays as it is: {type(norm).__name__} takes no factor over")
            norm.scale_(stream)
        placement, norm = plain.placement, plain.norm
    return placement, first


def _fold_sublayer(sublayer: Sublayer, plain: Plain) -> Tensor:
    """Give a sublayer its plain placement and fold the factors into its branch; return the stream's."""
    dim, name, f = sublayer.site.dim, sublayer.place.name, sublayer.f
    stream, branch, read = (
        torch.as_tensor(factor, dtype=torch.float64).detach().expand(dim).clone()
        for factor in (plain.stream, plain.branch, plain.read)
    )
    if not isinstance(f, Branch):
        raise UserError(
            f"{name} stays as it is: a branch of class {type(f).__name__} has no reader and writer"
        )
    if (stream == 0).any():
        raise UserError(
            f"{name} stays as it is: a factor on its stream is 0, and nothing can be divided by it"
        )
    f.reader.weight.mul_(read / stream)
    f.writer.weight.mul_(branch[:, None])
    if f.writer.bias is not None:
        f.writer.bias.mul_(branch)
    place = Placement.registry[plain.placement](sublayer.site)
    for child, _ in list(place.named_children()):
        setattr(place, child, getattr(sublayer.place, child))
    sublayer.place = place
    return stream


def _plain_config(config: ModelConfig, placements: Mapping[str, str], *, heads_folded: bool) -> ModelConfig:
    """Return the rewritten model's config, except its embeddings. Raises UserError if there is none."""
    was = {stack: Placement.registry[name] for stack, name in stack_placements(config).items()}
    now = {stack: Placement.registry[placements.get(stack, place.name)] for stack, place in was.items()}
    completed = {stack: place.complete(config) for stack, place in was.items()}
    chosen: dict[str, Any] = {f"{stack}_placement": place.name for stack, place in now.items()}
    for axis in AXES:
        if axis.section != "model":
            continue
        if not axis.of_branch:
            chosen[axis.field] = _plain_name(axis.names, getattr(config, axis.field))
            continue
        choices = {stack: getattr(completed[stack], axis.field) for stack in was}
        if axis.field != "head_gain" or heads_folded:
            choices = {stack: _plain_name(axis.names, name) for stack, name in choices.items()}
        own = {stack: getattr(place, axis.field) for stack, place in now.items()}
        if choices != own and len(set(choices.values())) > 1:
            raise UserError(
                f"the plain encoder has the {axis.name} {choices['encoder']!r} and the decoder "
                f"{choices['decoder']!r}, and a config has one for both; use the run as it is"
            )
        chosen[axis.field] = "" if choices == own else choices[next(iter(was))]
    return replace(config, **chosen)


def _plain_name(names: Mapping[str, object], name: str) -> str:
    return str(getattr(names[name], "plain", name))


def _fold_inputs(model: TokenModel, config: ModelConfig, first: Mapping[str, Tensor]) -> ModelConfig:
    vocabulary, dim = model.embedding.weight.shape
    zeros = model.embedding.weight.new_zeros(1, config.max_positions, dim)
    added = bool(model.position_encoding(zeros).any())
    config = replace(
        config,
        embedding=UntiedEmbedding.name,
        position_encoding="learned" if added else config.position_encoding,
        separate_source=isinstance(model, Seq2Seq),
    )
    own: dict[str, Any] = {"decoder": model, "encoder": getattr(model, "source", None) or model}
    tables = {
        stack: [factor * own[stack].embedding.vectors(), factor * own[stack].position_encoding(zeros)[0]]
        for stack, factor in {**dict.fromkeys(STACKS, torch.ones(())), **first}.items()
    }
    output = model.embedding.logits(torch.eye(dim, dtype=zeros.dtype)).T.contiguous()
    main = "decoder" if hasattr(model, "decoder") else "encoder"
    model.embedding = build_embedding(UntiedEmbedding, config, vocabulary)
    model.embedding.output = nn.Parameter(output)
    model.position_encoding = PositionEncoding.registry[config.position_encoding](config)
    inputs: dict[str, Any] = {main: model}
    if isinstance(model, Seq2Seq):
        model.source = SourceInput(config, vocabulary)
        inputs["encoder"] = model.source
    elif (segments := getattr(model, "segments", None)) is not None:
        segments.mul_(first[main])
    for stack, part in inputs.items():
        vectors, positions = tables[stack]
        part.embedding.weight = nn.Parameter(vectors)
        if added:
            part.position_encoding.weight = nn.Parameter(positions)
    return config
