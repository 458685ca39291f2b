"""The table of probes: which signals of a residual stream each preset measures, and how."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from normlab.diagnosis.probing.observe import PARAMETERS, Probe, Site
from normlab.diagnosis.reading.structure import Structure
from normlab.errors import UserError
from normlab.trace.tensors import Tap

PRESETS: Final = ("cheap", "standard", "full")
"""From the least to the most that is measured; each includes the one before."""

_CHEAP: Final = (("after", "rms"), ("grad", "l2"))
_STANDARD: Final = (*_CHEAP, ("before", "rms"), ("branch", "rms"), ("grad_after", "rms"), ("weight", "l2"))
_FULL: Final = (
    *_STANDARD,
    ("after", "max_abs"),
    ("after", "fraction_nonfinite"),
    ("after", "similarity"),
    ("grad_branch", "rms"),
    ("inside", "max_abs"),
    ("inside", "fraction_zero"),
)
MEASURED: Final = dict(zip(PRESETS, (_CHEAP, _STANDARD, _FULL), strict=True))
"""Signal and statistic of each preset, the same in every trainer and for ``observe``."""


def require_preset(name: str) -> None:
    """Raise UserError, naming the presets, unless this is one."""
    if name not in PRESETS:
        raise UserError(f"there is no preset {name!r}; there are {', '.join(PRESETS)}")


@dataclass(frozen=True)
class SublayerSite:
    """Where the signals of a sublayer are seen, whether a structure was read or is known."""

    stack: str
    index: int
    before: Tap
    branch: Tap
    after: Tap
    modules: tuple[str, ...]
    """The modules that run in the sublayer, which hold its parameters."""

    def probes(self, signal: str, statistic: str) -> Iterator[Probe]:
        """Yield the probes of one signal; ``observe`` cannot see updates, so that they have none."""
        place = Site(self.stack, self.index, signal)
        name = signal.removeprefix("grad_")
        if name in ("before", "branch", "after"):
            tap: Tap = getattr(self, name)
            every = tap.place not in ((), (0,))  # places of the tensor that a probe measures first
            side = signal.replace(name, tap.side)
            yield Probe(tap.module, side, statistic, every_tensor=every, site=place)
        elif signal == "inside":
            inner = place._replace(signal="")
            yield from (Probe(module, "output", statistic, site=inner) for module in self.modules)
        elif signal in PARAMETERS and self.modules:
            yield Probe(self.modules[0], signal, statistic, together=self.modules, site=place)


def preset_probes(sites: Iterable[SublayerSite], preset: str) -> list[Probe]:
    """Return the probes of a preset at these sublayers. Raises UserError for an unknown preset."""
    require_preset(preset)
    found = [p for site in sites for signal, how in MEASURED[preset] for p in site.probes(signal, how)]
    return list(dict.fromkeys(found))


def stream_probes(structure: Structure, preset: str, *, prefix: str = "") -> list[Probe]:
    """Return the probes of a preset for a structure that ``read_structure`` returned.

    ``prefix`` is the path of the module that was read within the one that is observed, with its point.
    Raises UserError for an unknown preset.
    """
    return preset_probes(_sites(structure, prefix), preset)


def weight_probes(blocks: Mapping[str, Sequence[Sequence[str]]]) -> list[Probe]:
    """Return probes of the weights of blocks and of their gradients, which need no forward pass.

    ``blocks`` maps each container to lists of the paths of modules, one list per block, first its own.
    """
    return [
        Probe(modules[0], signal, "l2", together=tuple(modules), site=Site(container, None, signal))
        for container, those in blocks.items()
        for modules in those
        for signal in PARAMETERS
    ]


def _sites(structure: Structure, prefix: str) -> Iterator[SublayerSite]:
    for stack, view in structure.sublayers:
        seen = (view.before, view.branch, view.after)
        before, branch, after = (replace(tap, module=prefix + tap.module) for tap in seen)
        modules = tuple(prefix + path for path in view.modules)
        yield SublayerSite(f"{prefix}{stack}".rstrip("."), view.index, before, branch, after, modules)
