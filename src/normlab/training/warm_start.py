"""A start from another run's weights."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn

from normlab.errors import UserError
from normlab.spec.config import Config
from normlab.store.folder import RunFolder, find_run, write_json_atomic
from normlab.tasks.task import Prepared
from normlab.training.checkpoint import load_weights
from normlab.training.weights import checkpoint_of, tested

_DIGITS = 16


@dataclass(frozen=True)
class Taken:
    """What a run took from another one's weights, by the names of parameters."""

    run: str
    """The other run's id."""
    weights: str
    """Which of its weights: ``average`` or ``best``."""
    digest: str
    taken: tuple[str, ...]
    other_shape: tuple[str, ...]
    """In both, of different shapes: they start anew."""
    not_there: tuple[str, ...]
    """The other run does not have them: they start anew."""
    left_over: tuple[str, ...]
    """This run does not have them."""

    def sentence(self) -> str:
        """How much was taken, and what was not."""
        names = {
            "of another shape": self.other_shape,
            "not in that run": self.not_there,
            "not in this run": self.left_over,
        }
        missed = [f"{words}: {', '.join(found)}" for words, found in names.items() if found]
        count = len(self.taken)
        return (
            f"starts from the {self.weights} weights of {self.run}: {count} tensor{'s' * (count != 1)} taken"
            + "".join(f"; {one}" for one in missed)
        )


def with_start(config: Config, root: Path) -> Config:
    """The configuration with the digest of the weights that ``train.init_from`` names, which enters the run
    id.

    A digest that the configuration has already is kept: ``fill`` checks it. Raises FileNotFoundError for a
    run that is not there or has no weights yet.
    """
    train = config.train
    if not train.init_from or train.init_digest:
        return config
    source = find_run(train.init_from, root)
    start = replace(train, init_from=str(source.path), init_digest=digest(_weights(source)))
    return replace(config, train=start)


def fill(model: nn.Module, config: Config, corpus: Prepared) -> Taken:
    """Give a new model the weights of ``train.init_from`` whose names and shapes are its own.

    Raises UserError where the tokenizers differ, where nothing matches, and where the weights are no longer
    those of ``train.init_digest``; FileNotFoundError where they are gone.
    """
    folder = RunFolder(config.train.init_from)
    _require_same_tokenizer(folder, corpus)
    given = _weights(folder)
    found = digest(given)
    if found != config.train.init_digest:
        raise UserError(
            f"the weights of {folder.path} have the digest {found}, and this run starts from "
            f"{config.train.init_digest}; bring those back, or start another run from what is there: "
            f"--init-from {folder.path}"
        )
    own = {name: p.detach() for name, p in model.named_parameters()}
    both = [name for name in own if name in given]
    taken = [name for name in both if own[name].shape == given[name].shape]
    if not taken:
        raise UserError(
            f"no tensor of {folder.path} has both the name and the shape of one of this model's, so nothing "
            f"would be taken; give the sizes of that run ({folder.path / 'config.json'}), or leave out "
            "--init-from"
        )
    for name in taken:
        own[name].copy_(given[name])
    return Taken(
        run=folder.path.resolve().name,
        weights=tested(folder),
        digest=found,
        taken=tuple(taken),
        other_shape=tuple(name for name in both if name not in taken),
        not_there=tuple(name for name in own if name not in given),
        left_over=tuple(name for name in given if name not in own),
    )


def write(folder: RunFolder, taken: Taken) -> None:
    """Note in the run's folder what it began with."""
    write_json_atomic(folder.start, {**asdict(taken), "sentence": taken.sentence()})


def digest(weights: Mapping[str, Tensor]) -> str:
    """First 16 hex digits of the SHA-256 of names, shapes, kinds and contents, in the order of the names."""
    sha = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].contiguous()
        sha.update(f"{name} {list(tensor.shape)} {tensor.dtype}\0".encode())
        sha.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()[:_DIGITS]


def _weights(folder: RunFolder) -> dict[str, Tensor]:
    return load_weights(checkpoint_of(folder), run=folder.id())


def _require_same_tokenizer(folder: RunFolder, corpus: Prepared) -> None:
    """Raise UserError unless the other run's pieces have the same numbers."""
    with TemporaryDirectory() as scratch:
        own = Path(scratch) / folder.tokenizer.name
        corpus.tokenizer.save(own)
        if own.read_bytes() == folder.tokenizer.read_bytes():
            return
    raise UserError(
        f"{folder.path} was trained with another tokenizer, so its embeddings are of other pieces; type "
        f"--tokenizer {folder.tokenizer}, or leave out --init-from"
    )
