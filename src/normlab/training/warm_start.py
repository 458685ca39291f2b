"""Initial weights from another run."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Size, Tensor

from normlab.config.config import Config
from normlab.errors import UserError
from normlab.runs.folder import RunFolder, find_run, write_json_atomic
from normlab.tasks.task import Prepared, Task
from normlab.trace.tensors import bytes_of
from normlab.training.checkpoint import open_checkpoint
from normlab.training.weights import checkpoint_of, tested


@dataclass(frozen=True)
class InitialWeights:
    """The names of the parameters that a run took over from another run, and of those that differ."""

    run: str
    """The other run's id."""
    weights: str
    """Which of its weights: ``average`` or ``best``."""
    digest: str
    taken: tuple[str, ...]
    other_shape: tuple[str, ...]
    """In both runs with different shapes, so that they are initialised anew."""
    not_there: tuple[str, ...]
    """Not in the other run, so that they are initialised anew."""
    left_over: tuple[str, ...]
    """In the other run alone."""

    def sentence(self) -> str:
        """Say how many tensors were taken over, and which were not."""
        missed = {"of another shape": self.other_shape, "not in that run": self.not_there}
        missed["not in this run"], count = self.left_over, len(self.taken)
        return (
            f"starts from the {self.weights} weights of {self.run}: {count} tensor{'s' * (count != 1)} taken"
            + "".join(f"; {words}: {', '.join(names)}" for words, names in missed.items() if names)
        )


def with_start(config: Config, root: Path) -> Config:
    """Add the digest of the weights that ``train.init_from`` names to a configuration; it enters the run id.
    An empty ``data.tokenizer`` becomes that run's.

    A digest that is there already is kept, for ``initial_weights`` to check. Raises FileNotFoundError for a
    run that does not exist or has no weights yet.
    """
    train = config.train
    if not train.init_from or train.init_digest:
        return config
    source = find_run(train.init_from, root)
    start = replace(train, init_from=str(source.path), init_digest=digest(_weights(source)))
    tokenizer = config.data.tokenizer or str(source.tokenizer)
    return replace(config, train=start, data=replace(config.data, tokenizer=tokenizer))


def initial_weights(
    shapes: Mapping[str, Size], task: Task[Any, Any, Any]
) -> tuple[InitialWeights, dict[str, Tensor]]:
    """The weights of ``train.init_from`` that have the name and shape of one of ``shapes``, and their names.

    Raises UserError where the tokenizers differ, where nothing matches, or something that the task needs does
    not, and where the weights are no longer those of ``train.init_digest``; FileNotFoundError where they are
    gone.
    """
    config = task.config
    folder = RunFolder(config.train.init_from)
    _require_same_tokenizer(folder, task.corpus)
    given = _weights(folder)
    found = digest(given)
    if found != config.train.init_digest:
        raise UserError(
            f"the weights of {folder.path} have the digest {found}, and this run starts from "
            f"{config.train.init_digest}; bring those back, or start another run from what is there: "
            f"--init-from {folder.path}"
        )
    both = [name for name in shapes if name in given]
    taken = {name: given[name] for name in both if shapes[name] == given[name].shape}
    if not taken:
        raise UserError(
            f"no tensor of {folder.path} has both the name and the shape of one of this model's, so nothing "
            f"would be taken; give the sizes of that run ({folder.path / 'config.json'}), or leave out "
            "--init-from"
        )
    about = InitialWeights(
        run=folder.path.resolve().name,
        weights=tested(folder),
        digest=found,
        taken=tuple(taken),
        other_shape=tuple(name for name in both if name not in taken),
        not_there=tuple(name for name in shapes if name not in given),
        left_over=tuple(name for name in given if name not in shapes),
    )
    if task.new_parameters is not None:
        _require_exact(about, task, folder)
    return about, taken


def _require_exact(about: InitialWeights, task: Task[Any, Any, Any], folder: RunFolder) -> None:
    """Raise UserError unless exactly the parameters that the task declares are new and left out."""
    new, dropped = task.new_parameters or (), task.dropped_parameters
    wrong = [f"{name} has another shape there" for name in about.other_shape]
    wrong += [f"{name} is not there" for name in about.not_there if not name.startswith(new)]
    wrong += [f"{name} is there alone" for name in about.left_over if not name.startswith(dropped)]
    if wrong:
        more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise UserError(
            f"{folder.path} has another model than this {task.name}: {wrong[0]}{more}; give the recipe and "
            f"the sizes of that run ({folder.path / 'config.json'})"
        )


def write(folder: RunFolder, found: InitialWeights) -> None:
    """Note in the run's folder which weights it began with."""
    write_json_atomic(folder.start, {**asdict(found), "sentence": found.sentence()})


def digest(weights: Mapping[str, Tensor]) -> str:
    """The first 16 hex digits of the SHA-256 of names, shapes, dtypes and contents, sorted by name."""
    sha = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name]
        sha.update(f"{name} {list(tensor.shape)} {tensor.dtype}\0".encode())
        sha.update(bytes_of(tensor))
    return sha.hexdigest()[:16]


def _weights(folder: RunFolder) -> dict[str, Tensor]:
    return open_checkpoint(checkpoint_of(folder), run=folder.id()).weights()


def _require_same_tokenizer(folder: RunFolder, corpus: Prepared) -> None:
    """Raise UserError unless the other run has the same tokenizer."""
    with TemporaryDirectory() as scratch:
        own = Path(scratch) / folder.tokenizer.name
        corpus.tokenizer.save(own)
        if own.read_bytes() == folder.tokenizer.read_bytes():
            return
    raise UserError(
        f"{folder.path} was trained with another tokenizer, so its embeddings are of other pieces; type "
        f"--tokenizer {folder.tokenizer}, or leave out --init-from"
    )
