"""Check a Transformer before you spend GPU hours on it; train and compare recipes honestly.

Names are imported when they are first used: ``import normlab`` needs neither torch nor half a second.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from normlab import nn
    from normlab.checks.check import check
    from normlab.diagnosis import Finding, diagnose, read_structure
    from normlab.errors import UserError
    from normlab.judging.judge import judge
    from normlab.judging.sequential import Judge
    from normlab.lab.comparison.compare import compare
    from normlab.lab.comparison.plan import plan
    from normlab.lab.comparison.result import CompareRequest
    from normlab.lab.config import Config
    from normlab.lab.recipes.build import build
    from normlab.lab.recipes.grammar import resolve
    from normlab.lab.recipes.plugins import load_plugins
    from normlab.lab.runs import RunFolder, Runs
    from normlab.lab.sized import sized
    from normlab.lab.tasks.scores import score
    from normlab.lab.training.fold import fold
    from normlab.lab.training.train import train
    from normlab.lab.training.translate import translate
    from normlab.scaling.transfer import transfer
    from normlab.setups.capture import capture
    from normlab.setups.setup import Setup
    from normlab.trace.record import record
    from normlab.trace.trace import Trace
    from normlab.trials.trial import trial
    from normlab.watching.watch import watch

__version__ = "0.1.0"

_HOME = {
    "nn": "normlab.nn",
    "check": "normlab.checks.check",
    "diagnose": "normlab.diagnosis",
    "trial": "normlab.trials.trial",
    "transfer": "normlab.scaling.transfer",
    "watch": "normlab.watching.watch",
    "judge": "normlab.judging.judge",
    "Judge": "normlab.judging.sequential",
    "Setup": "normlab.setups.setup",
    "capture": "normlab.setups.capture",
    "Trace": "normlab.trace.trace",
    "record": "normlab.trace.record",
    "read_structure": "normlab.diagnosis",
    "Finding": "normlab.diagnosis",
    "build": "normlab.lab.recipes.build",
    "resolve": "normlab.lab.recipes.grammar",
    "Config": "normlab.lab.config",
    "train": "normlab.lab.training.train",
    "compare": "normlab.lab.comparison.compare",
    "CompareRequest": "normlab.lab.comparison.result",
    "plan": "normlab.lab.comparison.plan",
    "Runs": "normlab.lab.runs",
    "RunFolder": "normlab.lab.runs",
    "translate": "normlab.lab.training.translate",
    "score": "normlab.lab.tasks.scores",
    "fold": "normlab.lab.training.fold",
    "sized": "normlab.lab.sized",
    "load_plugins": "normlab.lab.recipes.plugins",
    "UserError": "normlab.errors",
}
"""Each public name, with the module that defines it."""

__all__ = sorted([*_HOME, "__version__"])


def __getattr__(name: str) -> object:
    """Import a public name from its home (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"normlab has no {name!r}; it has {', '.join(sorted(_HOME))}")
    try:
        home = import_module(_HOME[name])
    except ModuleNotFoundError as error:
        from normlab.base.extras import extra_for, what_to_install
        from normlab.errors import UserError

        if extra := extra_for(error):
            raise UserError(what_to_install(f"normlab.{name}", extra)) from error
        raise
    return home if _HOME[name] == f"normlab.{name}" else getattr(home, name)


def __dir__() -> list[str]:
    return sorted(__all__)
