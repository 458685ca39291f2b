"""Judge cases: what ``normlab.check`` says of each, in a process of its own."""

from __future__ import annotations

import multiprocessing
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection

from .case import Case

Failure = tuple[str, str, str]
"""Property, module and evidence."""
BUDGET_S = 600.0
"""Holds every property also on a busy machine; a budget changes no verdict."""
WARM_UP = "parallel"
"""A small case with all that a user has, for what is imported when it is first used."""
VERDICTS = ("FIRST", "later", "flagged", "MISS", "ok", "BAD", "ERROR")
"""Of a fault: the first failure is right, a later one is, none is, or there is none. Of a sound step: no
failure, or some. Of either: its check raises.
"""


@dataclass(frozen=True)
class Row:
    """What a check says of one case."""

    name: str
    faulty: bool
    verdict: str
    seconds: float
    failures: Sequence[Failure] = ()
    notes: Sequence[Failure] = ()
    untestable: dict[str, str] = field(default_factory=dict)
    error: str = ""


def verdict(case: Case, failures: Sequence[Failure]) -> str:
    """Return the word for these failures of a case."""
    if not case.faulty:
        return "BAD" if failures else "ok"
    right = [case.accepts(name, module) for name, module, _ in failures]
    if not right:
        return "MISS"
    return "FIRST" if right[0] else "later" if any(right) else "flagged"


def examine(case: Case) -> Row:
    """Check one case in this process."""
    import normlab

    begun = time.perf_counter()
    try:
        arguments = case.build()
        begun = time.perf_counter()
        report = normlab.check(**arguments, budget_s=BUDGET_S)
    except Exception as error:  # the other cases are still worth their time
        seconds = time.perf_counter() - begun
        return Row(case.name, case.faulty, "ERROR", seconds, error=f"{type(error).__name__}: {error}")
    return Row(
        name=case.name,
        faulty=case.faulty,
        verdict=verdict(case, failures := [(f.property, f.module, f.evidence) for f in report.failures]),
        seconds=time.perf_counter() - begun,
        failures=failures,
        notes=[(n.property, n.module, n.evidence) for n in report.notes],
        untestable=dict(report.untestable),
    )


def judge(name: str, *, always_holds: str = "") -> Row:
    """Judge a case of the corpus, with the test of one property replaced by one that always holds."""
    from normlab.checks.property import PROPERTIES

    from .collected import CASES

    if always_holds:
        tested = PROPERTIES.pop(always_holds)
        PROPERTIES[always_holds] = replace(tested, test=lambda step: ())
    return examine(CASES[name])


# -------------------------------------------------------------------------------------------------- processes
#
# A check in a new process takes as long to import torch's optimizers, their compiler and a model of
# transformers as to check it several times. So a judge is a process that has imported all this, and each case
# is judged in a fork of it: nothing that a case leaves behind reaches the next.

Fork = multiprocessing.get_context("fork")


def serve(requests: Connection) -> None:
    """Judge each case that is asked for in a fork of this process, until nobody asks any more."""
    import torch

    from .collected import CASES

    torch.set_num_threads(1)  # a fork has no threads but its own
    warnings.simplefilter("ignore")
    examine(CASES[WARM_UP])
    while True:
        try:
            name, always_holds = requests.recv()
        except EOFError:
            return
        receiver, sender = Fork.Pipe(duplex=False)
        process = Fork.Process(target=answer, args=(sender, name, always_holds))
        process.start()
        sender.close()
        try:
            row = receiver.recv()
        except EOFError:  # it died without an answer
            process.join()
            row = Row(name, CASES[name].faulty, "ERROR", 0.0, error=f"it ended with {process.exitcode}")
        process.join()
        requests.send(row)


def answer(sender: Connection, name: str, always_holds: str) -> None:
    """Send what is said of a case."""
    sender.send(judge(name, always_holds=always_holds))


class Judge:
    """A process that judges cases one after the other, each in a fork of it."""

    def __init__(self):
        spawn = multiprocessing.get_context("spawn")
        self.connection, other = spawn.Pipe()
        self.process = spawn.Process(target=serve, args=(other,))
        self.process.start()
        other.close()

    def __call__(self, name: str, always_holds: str = "") -> Row:
        """Return what a check says of a case, whose one property may be made to hold always."""
        self.connection.send((name, always_holds))
        return self.connection.recv()

    def close(self) -> None:
        self.connection.close()
        self.process.join()

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
