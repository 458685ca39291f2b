"""Presets: what is measured along a residual stream, from a little to everything."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from normlab.diagnosis.probes import PARAMETERS, Probe, StreamSignal
from normlab.diagnosis.structure import Structure
from normlab.errors import UserError
from normlab.trace.tensors import Tap

PRESETS: Final = ("cheap", "standard", "full")
"""From least to most measured; each includes the one before."""

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
"""Signals and statistics of each preset, the same in every trainer and for ``observe``."""


def require_preset(name: str) -> None:
    """Raise UserError, naming the presets, unless this is one."""
    if name not in PRESETS:
        raise UserError(f"there is no preset {name!r}; there are {', '.join(PRESETS)}")


@dataclass(frozen=True)
class SublayerSite:
    """Where the signals of a sublayer, or of another group of modules, which has no taps, are seen."""

    stack: str
    index: int | None
    modules: tuple[str, ...]
    """The modules that run in the sublayer, which hold its parameters."""
    taps: Mapping[str, Tap] = field(default_factory=dict)
    """``before``, ``branch`` and ``after``."""
    role: str | None = None
    layer: int | None = None

    @property
    def module(self) -> str:
        return self.modules[0] if self.modules else ""

    def probes(self, signal: str, statistic: str) -> Iterator[Probe]:
        """Yield the probes of one signal; updates have none, since ``observe`` cannot see them."""
        stream = StreamSignal(self.stack, self.index, signal)
        tensor = signal.removeprefix("grad_")
        if tensor in self.taps:
            tap = self.taps[tensor]
            # what a sublayer calls `grad_after`, the module at its tap calls `grad_output`, or `grad_input`
            of_module = signal.replace(tensor, tap.side)
            every = tap.place not in ((), (0,))  # places of the tensor that a probe measures first
            yield Probe(tap.module, of_module, statistic, every_tensor=every, stream=stream)
        elif signal == "inside":
            for module in self.modules:
                yield Probe(module, "output", statistic, stream=stream._replace(name=""))
        elif signal in PARAMETERS and self.modules:
            yield Probe(self.module, signal, statistic, together=self.modules, stream=stream)


def preset_probes(sites: Iterable[SublayerSite], preset: str) -> list[Probe]:
    """Return the probes of a preset at these sublayers. Raises UserError for an unknown preset."""
    require_preset(preset)
    probes: dict[Probe, None] = {}  # an ordered set
    for site in sites:
        for signal, statistic in MEASURED[preset]:
            probes |= dict.fromkeys(site.probes(signal, statistic))
    return list(probes)


def stream_sites(structure: Structure, prefix: str = "") -> list[SublayerSite]:
    """Return the sublayers of a structure that ``read_structure`` returned.

    ``prefix`` is the path of the module that was read within the observed one, including the final dot.
    """
    sites: list[SublayerSite] = []
    for stack, view in structure.sublayers:
        inner = {"before": view.before, "branch": view.branch, "after": view.after}
        taps = {name: replace(tap, module=prefix + tap.module) for name, tap in inner.items()}
        modules = tuple(prefix + path for path in view.modules)
        path = f"{prefix}{stack}".rstrip(".")
        sites.append(SublayerSite(path, view.index, modules, taps, view.role, view.layer))
    return sites
