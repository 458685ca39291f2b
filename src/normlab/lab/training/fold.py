"""Fold a run: write its model, rewritten as a plainer one, as a run folder, and measure the difference."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

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
from normlab.lab.training.rewrite import rewrite
from normlab.lab.training.trainer import load_task
from normlab.lab.training.weights import digest, weights_of
from normlab.nn import TokenModel
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
    folded = _fold(folder, weights, max_positions)
    result = folded.result
    if not result.float32 <= BOUND * result.largest_logit:  # also true of NaN
        raise UserError(
            f"the logits of {folder.path} and of its plain form differ by {result.float32:.2g} in float32 "
            f"({result.float64:.2g} in float64), and at most {BOUND:.0e} of the largest logit, "
            f"{result.largest_logit:.3g}, is allowed; nothing was written; use the run as it is"
        )
    _write(folded, folder, out, weights_of(folder, weights).step)
    return result


def _write(folded: _Folded, folder: RunFolder, out: Path, step: int) -> None:
    """Write a plain model as a run folder, under another name until it is complete."""
    new = out.with_name(f"{out.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    state = weights_state(folded.model, step)
    # Its weights come from no training of this recipe: naming them gives it a run id of its own.
    train = replace(folded.config.train, init_from=str(out.absolute()), init_digest=digest(state["model"]))
    written = RunFolder.create(new, replace(folded.config, train=train), folder.task_metrics(), imported())
    for file in (folder.tokenizer, folder.target_vocab):
        shutil.copyfile(file, new / file.name)
    save_checkpoint(written.best, state, run=written.id())
    written.set_status(folder.status())
    write_json_atomic(new / FOLDED, folded.result)
    new.rename(out)


def measure_fold(folder: RunFolder, *, max_positions: int | None = None) -> FoldResult:
    """Rewrite the model of a finished run as ``fold`` does and measure the differences, but write nothing.

    Raises UserError for a run that is not done or has nothing to fold.
    """
    return _fold(folder, "", max_positions).result


@dataclass(frozen=True)
class _Folded:
    """The plain model in float32, as its configuration builds it."""

    model: nn.Module
    config: Config
    result: FoldResult


def _fold(folder: RunFolder, weights: str | int, max_positions: int | None) -> _Folded:
    config = folder.config()
    _require_done(folder, config)
    chosen = weights_of(folder, weights)
    task = load_task(config, folder.path.parent, prepare_process(replace(config.machine, device="cpu")))
    model: Any = task.build().eval()
    load_checkpoint(chosen.path, model, run=folder.id())
    rewritten = rewrite(model, _with_positions(config.model, model, max_positions))
    if not rewritten.changed:
        why = "; ".join(rewritten.kept) or "its recipe is a plain one already"
        raise UserError(f"there is nothing to fold in {folder.path}, {config.recipe}: {why}; use it as it is")
    plain_config = replace(config, model=rewritten.config, forced="")
    plain_config = replace(plain_config, recipe=recipe_of(plain_config), own_code=own_code(plain_config))
    task.check_text(plain_config, task.corpus)
    plain: Any = type(task)(plain_config, task.corpus, task.device).build().eval()
    plain.load_state_dict(rewritten.model.state_dict())
    calls = _calls_of(model, lambda: task.dev_scores(model), BATCHES)
    model.eval()
    float32, _ = _largest_difference(model, plain, calls)
    float64, largest_logit = _largest_difference(deepcopy(model).double(), rewritten.model, calls)
    outputs = list(zip(task.dev_outputs(model), task.dev_outputs(plain), strict=True))
    result = FoldResult(
        run=folder.path.name,
        weights=chosen.description,
        before=config.recipe,
        after=plain_config.recipe,
        kept=rewritten.kept,
        float32=float32,
        float64=float64,
        largest_logit=largest_logit,
        batches=len(calls),
        outputs=len(outputs),
        equal_outputs=sum(before == after for before, after in outputs),
        parameters_before=sum(p.numel() for p in model.parameters()),
        parameters_after=sum(p.numel() for p in plain.parameters()),
        positions=plain.position_encoding.longest,
    )
    return _Folded(plain, plain_config, result)


def _with_positions(config: ModelConfig, model: TokenModel, max_positions: int | None) -> ModelConfig:
    """Return the config with ``max_positions``, if given. Raises UserError if the model learned its own."""
    if max_positions is None:
        return config
    longest = model.position_encoding.longest
    if longest is not None:
        raise UserError(
            f"--max-positions is {max_positions}, and the run has learned {longest}; leave it out"
        )
    return replace(config, max_positions=max_positions)


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
    differences: list[Tensor] = []
    sizes: list[Tensor] = []
    for call in calls:
        for a, b in zip(_outputs(model, call), _outputs(other, call), strict=True):
            differences.append((a - b).abs().max())
            sizes.append(a.abs().max())
    # torch's maximum of numbers with a NaN is NaN; Python's depends on their order.
    return float(torch.stack(differences).max()), float(torch.stack(sizes).max())


def _outputs(model: nn.Module, call: Mapping[str, Any]) -> tuple[Tensor, ...]:
    output = model(**call)
    return output if isinstance(output, tuple) else (output,)


def recipe_of(config: Config) -> str:
    """Return a recipe that resolves to a configuration's choices."""
    heads = list(dict.fromkeys(stack_placements(config.model).values()))
    head = heads[0] if len(heads) == 1 else "enc:{}/dec:{}".format(*heads)
    parts = [axis.of(config) for axis in AXES if axis.of(config) != axis.of(DEFAULTS)]
    return "+".join([head, *parts, *["warmup"] * bool(config.optim.warmup_steps)])
