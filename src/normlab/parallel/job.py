"""What one process is asked to do, and what it leaves behind for the one that asked."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from normlab.errors import UserError

Role = Literal["rank", "serial", "again"]
"""One of several ranks; the script in one process, recorded; the same once more, with given gradients."""
Named: TypeAlias = dict[str, Tensor]
"""Tensors by the names of the parameters that they belong to."""


@dataclass(frozen=True)
class Job:
    """A run of the user's script in a process of its own."""

    role: Role
    script: str
    arguments: Sequence[str]
    is_module: bool
    folder: str
    """Where the processes of one check leave their results."""
    seed: int
    is_double: bool
    """Whether floating numbers are float64 unless the script asks for others."""
    rank: int = 0
    ranks: int = 1

    @property
    def name(self) -> str:
        """What its files are called."""
        return f"rank-{self.rank}" if self.role == "rank" else self.role

    @property
    def result(self) -> Path:
        """Where its result is saved."""
        return Path(self.folder) / f"{self.name}.pt"

    @property
    def error(self) -> Path:
        """Where a sentence is written if there is no result."""
        return Path(self.folder) / f"{self.name}.error"

    @property
    def output(self) -> Path:
        """Where what the script prints is written."""
        return Path(self.folder) / f"{self.name}.txt"

    def write(self) -> Path:
        """Write the job to a file that ``read`` reads, and return its path."""
        path = Path(self.folder) / f"{self.name}.json"
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")
        return path

    @classmethod
    def read(cls, path: str) -> Job:
        """Return the job that a file describes."""
        return cls(**json.loads(Path(path).read_text(encoding="utf-8")))


def save(result: Mapping[str, Any], path: Path) -> None:
    """Save a result, whole or not at all."""
    partial = path.with_suffix(".partial")
    torch.save(dict(result), partial)
    partial.replace(path)


def load(path: Path) -> dict[str, Any]:
    """Return a result that was saved."""
    return torch.load(path, weights_only=True, map_location="cpu")


@dataclass(frozen=True)
class Step:
    """The first step of an optimizer in one process, by the names of parameters; all tensors are whole."""

    before: Named
    """The weights before it."""
    backward: Named
    """The gradients when the last backward pass before it ended."""
    at_step: Named
    """The gradients that the optimizer gets."""
    after: Named
    """The weights after it."""
    ties: Mapping[str, str]
    """Names of parameters that are the same as one before them, each with the name of that."""
    norms: Sequence[float] = ()
    """What ``clip_grad_norm_`` took for the norm of all gradients, in each of its calls."""
    rates: Mapping[str, float] = field(default_factory=dict)
    """The learning rate of each parameter."""

    @property
    def update(self) -> Named:
        """What the step changed."""
        return {name: x - self.before[name] for name, x in self.after.items()}


@dataclass(frozen=True)
class RankStep:
    """What one rank did in its step."""

    rank: int
    step: Step
    batches: Sequence[Named]
    """The batch of each of its micro-batches."""
    inputs: Sequence[Tensor]
    """The tensors of data that its model took, even if they are only a part of the batch."""
    tensors: Sequence[Sequence[int]]
    """Groups of ranks among which the tensors of a model are split, as this one knows them."""
    contexts: Sequence[Sequence[int]]
    """Groups of ranks among which the sequences of a batch are split."""
    kinds: Sequence[str]
    """How the script is parallel."""
    unseen: str = ""
    """Why nothing is known of its batch."""

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> RankStep:
        """Return what was saved."""
        fields: dict[str, Any] = {**saved, "step": Step(**saved["step"])}
        return cls(**fields)


@dataclass(frozen=True)
class SerialStep:
    """The same step in one process: what the union of the batches of all ranks gives."""

    gradients: Named
    """The gradients of the loss of the union of all batches, at the weights of the ranks."""
    ties: Mapping[str, str]
    passes: int
    """How many backward passes the script makes in one step."""
    dtype: str
    title: str
    union: str
    """What the union is, in words."""
    is_of_parts: bool = False
    """Whether the union puts together parts of sequences, of which each rank read its own."""
    cannot: str = ""
    """Why there are no gradients."""
    facts: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> SerialStep:
        """Return what was saved."""
        return cls(**saved)


def require_result(job: Job) -> dict[str, Any]:
    """Return the result of a job. Raises UserError if there is none, though its process ended well."""
    if not job.result.is_file():
        raise UserError(f"{job.script} ended as {job.name} without a step of an optimizer")
    return load(job.result)
