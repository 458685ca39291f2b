"""The training to come, as it is declared: what a model is compared with before its first step."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final, Literal, TypedDict, get_args

from normlab.diagnosis.table import Row
from normlab.errors import UserError, nearest
from normlab.store.files import read_json

Depth = Literal["none", "total", "layer"]
FORM: Final = (
    "an entry has a role or a glob of paths for its name, and std, value or zeros, and depth: "
    '[ffn_out] with std = 0.02 and depth = "total"'
)


NUMBERS: Final = ("max_grad_norm", "warmup_steps", "truncated_at")


@dataclass(frozen=True)
class Start:
    """The declared initialisation of the parameters of a role, or of paths that a glob matches."""

    std: float | None = None
    """Standard deviation."""
    value: float | None = None
    """The one value of all entries, such as 1 for gains."""
    depth: Depth = "none"
    """``total``: the deviation is divided by the square root of twice the number of layers of the stack;
    ``layer``: of twice the layer's number, from 1.
    """

    def expected(self, layer: int | None, layers: int) -> tuple[float, float] | None:
        """Return the root mean square and the deviation of a parameter in a layer, or None."""
        if self.value is not None:
            return abs(self.value), 0.0
        if self.std is None:
            return None
        number = {"none": None, "total": layers, "layer": None if layer is None else layer + 1}[self.depth]
        std = self.std / math.sqrt(2 * number) if number else self.std
        return std, std


class Plan(TypedDict, total=False):
    """The training to come, where it is more than an optimiser and its learning rate."""

    max_grad_norm: float
    """The global norm to which gradients are clipped."""
    warmup_steps: int
    """Steps over which the learning rate rises to its peak."""
    declared: Mapping[str, Start]
    """The initialisation that was meant, by role, glob of paths or both; the last entry that fits decides."""
    truncated_at: float
    """Magnitude of the largest declared entry, in deviations."""
    tied: bool
    """Whether embedding and output matrix are one parameter."""
    baseline: Sequence[Row]
    """The table ``weights`` of another diagnosis, with which this model's is compared."""


def declared_for(declared: Mapping[str, Start], path: str, role: str, *, matrix: bool) -> Start | None:
    """Return the last entry for a parameter: of its role, of a glob that its path matches, or of both, as
    ``value in *.c_attn.weight``. A role is that of matrices, ``norm`` that of gains: biases are declared by a
    glob.
    """
    named = role if matrix or (role == "norm" and not path.endswith("bias")) else None
    fitting = list[Start]()
    for name, start in declared.items():
        of_role, _, where = name.rpartition(" in ")
        if where == named or (of_role in ("", named) and fnmatchcase(path, where)):
            fitting.append(start)
    return fitting[-1] if fitting else None


def read_plan(path: Path) -> Plan:
    """Read a declaration in TOML: the fields of ``Plan``, and a table for each role or glob.

    Raises UserError for a file that cannot be read, and for an entry that says nothing or something else.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{path} cannot be read as TOML: {error}; {FORM}") from error
    plan: dict[str, Any] = {}
    starts = {name: value for name, value in content.items() if isinstance(value, dict)}
    for name, value in content.items():
        if name in starts:
            continue
        if name not in NUMBERS and name != "tied":
            known = nearest(name, (*NUMBERS, "tied"))
            raise UserError(f"{path} has {name!r}, which declares nothing{known}; {FORM}")
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0
        if not (isinstance(value, bool) if name == "tied" else number):
            wanted = "true or false" if name == "tied" else "a number from 0 on"
            raise UserError(f"{name} in {path} is {value!r}; give {wanted}")
        plan[name] = value
    return Plan(**plan, declared={name: _start(path, name, given) for name, given in starts.items()})


def _start(path: Path, name: str, given: Mapping[str, Any]) -> Start:
    known = {"std", "value", "depth"}
    for key, value in given.items():
        if key not in known:
            raise UserError(f"[{name}] in {path} has {key!r}{nearest(key, sorted(known))}; {FORM}")
        if key == "depth" and value not in get_args(Depth):
            raise UserError(f"depth of [{name}] in {path} is {value!r}; it is {', '.join(get_args(Depth))}")
        if key != "depth" and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise UserError(f"{key} of [{name}] in {path} is {value!r}; give a number")
    if "std" not in given and "value" not in given:
        raise UserError(f"[{name}] in {path} says neither std nor value; {FORM}")
    return Start(**given)


def read_baseline(path: Path) -> Sequence[Row]:
    """Read the table of weights from the JSON of a diagnosis. Raises UserError where it has none."""
    content = read_json(path)
    rows = content.get("tables", {}).get("weights") if isinstance(content, dict) else None
    if not rows:
        raise UserError(
            f"{path} holds no table of weights; give the JSON that normlab preflight writes beside its page"
        )
    return rows
