"""What is known of a model's residual stream: its stacks, their sublayers, and the tensors of each."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final, NamedTuple

from normlab.diagnosis.sums import Factor
from normlab.trace.tensors import Tap


class Placement(NamedTuple):
    """A placement of norms that has a name."""

    title: str
    norm_read: bool
    """Whether the branch reads the stream through a norm."""
    norm_branch: bool
    """Whether the branch ends in a norm."""
    norm_write: bool
    """Whether there is a norm on the sum."""
    reference: str


PLACEMENTS: Final = {
    "post": Placement("Post-LN", False, False, True, "Xiong et al. 2020, Table 1 (arXiv 2002.04745)"),
    "pre": Placement("Pre-LN", True, False, False, "Xiong et al. 2020, Table 1 (arXiv 2002.04745)"),
    "sandwich": Placement(
        "Sandwich-LN", True, True, False, "Ding et al. 2021, Section 2.4 (arXiv 2105.13290)"
    ),
}
"""What ``SublayerView.placement`` may be, if no factor and no third term is in the sum."""
OTHER: Final = "other"


@dataclass(frozen=True)
class SublayerView:
    r"""A branch and its two places in the stream, :math:`t = a \odot s + c \odot y`: s is ``before``, y
    ``branch``, t ``total``; ``after`` is t, or the norm of t.

    ``role`` is ``self_attention``, ``cross_attention``, ``ffn`` or ``branch``; ``index`` counts sublayers and
    ``layer`` layers of the stack. ``norm_read`` is the path of the norm through which the branch reads s,
    ``norm_branch`` of the one that outputs y, ``norm_write`` of the one on t. ``beside`` is what t also
    adds: the other branch of a parallel layer, or an older state of the stream. In training, y is what is
    added if the dropout on it is a module, and what goes into the dropout if it is a function.
    """

    index: int
    layer: int
    role: str
    before: Tap
    branch: Tap
    total: Tap
    after: Tap
    norm_read: str | None
    norm_branch: str | None
    norm_write: str | None
    shortcut: Factor
    """a: one number, or one per channel."""
    scale: Factor
    """c."""
    beside: tuple[Tap, ...]
    placement: str
    """One of ``PLACEMENTS``, or ``other``. ``post``: after = norm(before + branch); ``pre``: before + branch,
    where the branch reads norm(before); ``sandwich``: a ``pre`` whose branch ends in a norm.
    """
    relation: str
    """The equation that these tensors satisfy, in words."""
    modules: tuple[str, ...] = ()
    """Paths of the modules that run in the sublayer, in order."""

    @property
    def taps(self) -> tuple[Tap, ...]:
        return self.before, self.branch, self.total, self.after, *self.beside

    @property
    def norms(self) -> tuple[str, ...]:
        return tuple(path for path in (self.norm_read, self.norm_branch, self.norm_write) if path is not None)


@dataclass(frozen=True)
class StackView:
    """The sublayers in one container of blocks, in the order of the stream, and the norm after the last."""

    name: str
    sublayers: tuple[SublayerView, ...]
    final_norm: str | None


@dataclass(frozen=True)
class Structure:
    """The stacks of a model in order, and a sentence for each container of blocks without a stream."""

    stacks: tuple[StackView, ...]
    unread: tuple[str, ...]

    @property
    def sublayers(self) -> list[tuple[str, SublayerView]]:
        return [(stack.name, view) for stack in self.stacks for view in stack.sublayers]

    def __str__(self) -> str:
        lines: list[str] = []
        for stack in self.stacks:
            layers = stack.sublayers[-1].layer + 1
            lines.append(f"{stack.name}: {layers} layers, {len(stack.sublayers)} sublayers")
            kinds = Counter((view.role, view.placement, view.relation) for view in stack.sublayers)
            for (role, placement, relation), count in kinds.items():
                lines.append(f"  {count} x {role}: {placement}, {relation}")
        return "\n".join([*lines, *self.unread])
