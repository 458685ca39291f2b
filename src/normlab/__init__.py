"""Where should a Transformer's normalisation sit? Build, diagnose, train and compare the answers.

Names are imported when they are first used: ``import normlab`` needs neither torch nor half a second.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from normlab.checks.check import check
    from normlab.checks.report import Report
    from normlab.comparison.compare import compare
    from normlab.comparison.plan import plan
    from normlab.comparison.request import CompareRequest
    from normlab.config.config import Config
    from normlab.diagnosis import Diagnosis, diagnose, read_structure
    from normlab.report.check import write_check_page
    from normlab.report.compare import write_compare_page
    from normlab.report.diagnosis import write_diagnosis
    from normlab.report.flight import write_probes_page
    from normlab.report.trial import write_trial_page
    from normlab.runs import RunFolder, Runs
    from normlab.tasks.scores import score
    from normlab.trace.record import record
    from normlab.trace.setup import Setup
    from normlab.trace.trace import Trace
    from normlab.training.recipes.grammar import resolve
    from normlab.training.recipes.plugins import load_plugins
    from normlab.training.train import train
    from normlab.training.translate import translate
    from normlab.trials.trial import trial
    from normlab.trials.trials import Trials
    from normlab.watching.watch import watch

__version__ = "0.1.0"

_HOME = {
    "CompareRequest": "normlab.comparison.request",
    "Config": "normlab.config.config",
    "Diagnosis": "normlab.diagnosis",
    "RunFolder": "normlab.runs",
    "Report": "normlab.checks.report",
    "Runs": "normlab.runs",
    "Setup": "normlab.trace.setup",
    "Trace": "normlab.trace.trace",
    "Trials": "normlab.trials.trials",
    "check": "normlab.checks.check",
    "compare": "normlab.comparison.compare",
    "diagnose": "normlab.diagnosis",
    "load_plugins": "normlab.training.recipes.plugins",
    "plan": "normlab.comparison.plan",
    "read_structure": "normlab.diagnosis",
    "record": "normlab.trace.record",
    "resolve": "normlab.training.recipes.grammar",
    "score": "normlab.tasks.scores",
    "train": "normlab.training.train",
    "translate": "normlab.training.translate",
    "trial": "normlab.trials.trial",
    "watch": "normlab.watching.watch",
    "write_check_page": "normlab.report.check",
    "write_compare_page": "normlab.report.compare",
    "write_diagnosis": "normlab.report.diagnosis",
    "write_probes_page": "normlab.report.flight",
    "write_trial_page": "normlab.report.trial",
}

__all__ = sorted([*_HOME, "__version__"])


def __getattr__(name: str) -> object:
    """Import a public name from its home (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"normlab has no {name!r}; it has {', '.join(sorted(_HOME))}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
