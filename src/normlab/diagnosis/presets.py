"""From a residual stream that was read, or only from the names of its blocks, to the probes that watch it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from normlab.diagnosis.probing.observe import PARAMETERS, Probe
from normlab.diagnosis.programme import PRESETS
from normlab.diagnosis.reading.structure import StackView, Structure
from normlab.diagnosis.reading.taps import Tap
from normlab.errors import UserError

FIRST: Final = ((), (0,))
"""Ways to the tensor that a probe takes first."""
STREAM: Final = {
    "cheap": ("rms",),
    "standard": ("rms",),
    "full": ("rms", "max_abs", "fraction_nonfinite", "similarity"),
}
"""Statistics of the stream after each sublayer, by preset."""
ONLY_STREAM: Final = "cheap"
"""The preset that looks at nothing else."""


def require_preset(name: str) -> None:
    """Raises UserError with those that there are for a preset that there is not."""
    if name not in PRESETS:
        raise UserError(f"there is no preset {name!r}; there are {', '.join(PRESETS)}")


def stream_probes(structure: Structure, preset: str, *, prefix: str = "") -> list[Probe]:
    r""":math:`\mathrm{rms}(x_l)` of the stream after each sublayer; in ``standard`` also of each branch, the
    :math:`\ell_2` norm of the loss's gradient in it, and those of weights and their gradients; in ``full``
    also the stream's largest element, what of it is not finite, and how alike its tokens are.

    ``prefix`` is the path of the module that was read within the one that is observed, with its point.
    Raises UserError for a preset that there is not.
    """
    require_preset(preset)
    found = [probe for stack in structure.stacks for probe in _of_stack(stack, preset, prefix)]
    return list(dict.fromkeys(found))


def weight_probes(containers: Iterable[str]) -> list[Probe]:
    """The norms of weights and their gradients inside containers of blocks, which no forward pass is needed
    for.
    """
    return [
        Probe(f"{name}.*" if name else "*", signal, "l2")
        for name in dict.fromkeys(containers)
        for signal in PARAMETERS
    ]


def _of_stack(stack: StackView, preset: str, prefix: str) -> Iterator[Probe]:
    for view in stack.sublayers:
        for statistic in STREAM[preset]:
            yield _at(view.after, prefix, statistic)
        if preset != ONLY_STREAM:
            yield _at(view.branch, prefix, "rms")
            yield Probe(prefix + view.branch.module, "grad_output", "l2")
    if preset != ONLY_STREAM:
        yield from weight_probes([(prefix + stack.name).rstrip(".")])


def _at(tap: Tap, prefix: str, statistic: str) -> Probe:
    """A probe of what a tap shows; of all tensors there where it may not be the first."""
    return Probe(prefix + tap.module, tap.side, statistic, every_tensor=tap.place not in FIRST)
