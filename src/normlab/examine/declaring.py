"""A recipe as a declaration: the standard deviations that it gives to the matrices of any model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from normlab.diagnosis import Structure, read_structure
from normlab.diagnosis.plan import Plan, Start, read_plan
from normlab.diagnosis.probing.passes import forward_pass
from normlab.diagnosis.reading.parameters import Owner
from normlab.diagnosis.reading.subject import Subject
from normlab.diagnosis.studies.weights import weights
from normlab.diagnosis.table import Row
from normlab.errors import UserError
from normlab.nn import Branch, TokenModel
from normlab.nn.site import DECODER_LAYER, ENCODER_LAYER
from normlab.nn.sublayer import Sublayer
from normlab.recipes.grammar import KINDS, resolve
from normlab.spec.config import Config, ModelConfig
from normlab.tasks.build import build_model
from normlab.trace.tensors import unwrap
from normlab.trace.trace import output_loss

FILE: Final = "declare the deviations by role in a TOML file instead, as in --declared init.toml"


def declared_by(given: str, model: nn.Module, batch: Any, structure: Structure | None = None) -> Plan:
    """Read a declaration: a TOML file, see ``read_plan``, or a recipe, see ``declared_starts``.

    Raises UserError for a name that is neither.
    """
    if given.endswith(".toml") or Path(given).is_file():
        return read_plan(Path(given))
    return Plan(declared=declared_starts(given, model, batch, structure=structure))


def declared_starts(
    recipe: str, model: nn.Module, batch: Any, *, structure: Structure | None = None
) -> dict[str, Start]:
    """Return the standard deviations of a model's matrices, were it initialised as a recipe, under
    ``role in path``: the argument ``declared`` of ``normlab.diagnose``.

    The recipe is built with the layers, the widths and the vocabulary of the model. Raises UserError for a
    recipe that does not exist, and where these sizes cannot be read.
    """
    try:
        resolve(recipe, Config())
    except UserError as error:
        raise UserError(
            f"{recipe!r} declares nothing: it is neither a file nor a recipe that is defined: {error}"
        ) from error
    subject = Subject(unwrap(model), batch, output_loss, structure or read_structure(model, batch))
    with torch.enable_grad():
        forward = forward_pass(subject)
    read = _Sizes(subject.structure, tuple(weights(subject, forward=forward)), forward.owned)
    config = resolve(recipe, replace(Config(), model=read.config)).model
    kind = KINDS[bool(config.encoder_layers), bool(config.decoder_layers)]
    deviations = _deviations(build_model(kind, config, read.vocabulary, 0))
    found = {
        f"{row['role']} in {row['parameter']}": Start(std=deviations[key])
        for row in read.matrices
        if (key := read.place(row)) in deviations
    }
    embedding = f"embedding in {read.embedding['parameter']}"
    return found | {embedding: Start(std=deviations["", 0, "embedding"])}


def _deviations(model: TokenModel) -> dict[tuple[str, int, str], float]:
    """Return the standard deviations of a model of ours by stack, index of the sublayer, and role."""
    found = {
        (m.site.stack, m.site.index, name): _std(weight)
        for m in model.modules()
        if isinstance(m, Sublayer) and isinstance(f := m.f, Branch)
        for name, weight in f.matrices().items()
    }
    return found | {("", 0, "embedding"): _std(model.embedding.vectors())}


def _std(x: Tensor) -> float:
    return x.detach().double().std(correction=0).item()


@dataclass(frozen=True)
class _Sizes:
    """The sizes of any model, from its residual streams and the shapes of its matrices."""

    structure: Structure
    rows: tuple[Row, ...]
    """The table of its weights."""
    owned: Mapping[str, Owner]

    @cached_property
    def matrices(self) -> list[Row]:
        """The matrices of the sublayers."""
        return [r for r in self.rows if "×" in str(r["shape"]) and not r["tied"] and r["stack"] is not None]

    @cached_property
    def stacks(self) -> dict[str, str]:
        """Our name of each stack: one alone is a decoder without an encoder."""
        names = ["decoder"] if len(self.structure.stacks) == 1 else ["encoder", "decoder"]
        wanted = {"encoder": ENCODER_LAYER, "decoder": DECODER_LAYER if len(names) == 2 else ENCODER_LAYER}
        stacks = dict(zip((s.name for s in self.structure.stacks), names, strict=False))
        for stack in self.structure.stacks:
            layers = stack.sublayers[-1].layer + 1
            if stack.name not in stacks or len(stack.sublayers) != layers * len(wanted[stacks[stack.name]]):
                raise UserError(
                    f"the {len(stack.sublayers)} sublayers in {layers} layers of {stack.name!r} are not "
                    f"those of an encoder, a decoder or both; {FILE}"
                )
        return stacks

    @cached_property
    def embedding(self) -> Row:
        """The largest table of embeddings."""
        tables = [r for r in self.rows if r["role"] == "embedding" and "×" in str(r["shape"])]
        if not tables:
            raise UserError(f"the model has no embedding matrix, whose rows are the vocabulary; {FILE}")
        return max(tables, key=lambda row: max(_shape(row)))

    @property
    def vocabulary(self) -> int:
        return max(_shape(self.embedding))

    @property
    def config(self) -> ModelConfig:
        """The widths and the layers. As many heads as of keys and values are one, which changes no shape."""
        dim = min(_shape(self.embedding))
        query, key = (self._width(role, dim) for role in ("query", "key"))
        layers = {self.stacks[s.name]: s.sublayers[-1].layer + 1 for s in self.structure.stacks}
        return replace(
            Config().model,
            dim=dim,
            ffn_dim=self._width("ffn_out", dim),
            heads=query // key if query % key == 0 else 1,
            kv_heads=1,
            encoder_layers=layers.get("encoder", 0),
            decoder_layers=layers.get("decoder", 0),
        )

    def _width(self, role: str, dim: int) -> int:
        """Return the one width that the matrices of a role map the stream to, or from."""
        shapes = [_shape(row) for row in self.matrices if row["role"] == role]
        widths = {shape[shape[0] == dim] for shape in shapes if len(shape) == 2 and dim in shape}
        if len(widths) != 1 or len(shapes) < sum(s.sublayers[-1].layer + 1 for s in self.structure.stacks):
            raise UserError(
                f"the model shows no {role} matrices of one width beside the stream's {dim}, but "
                f"{', '.join(sorted({'×'.join(map(str, s)) for s in shapes})) or 'none'}; {FILE}"
            )
        return widths.pop()

    def place(self, row: Row) -> tuple[str, int | None, str]:
        """Return the stack, the index of the sublayer and the role of a matrix."""
        owner = self.owned[str(row["parameter"])]
        return self.stacks.get(owner.stack or "", ""), owner.index, str(row["role"])


def _shape(row: Row) -> tuple[int, ...]:
    return tuple(int(n) for n in str(row["shape"]).split("×"))
