"""A pytest plugin: ``pytest --normlab train.py`` makes a test of each property of a training step.

pytest imports this file in every project that has normlab installed, so it imports nothing of normlab's, and
no torch, until a source is named or the fixture is used.
"""

from __future__ import annotations

import contextlib
import shlex
import warnings
from collections.abc import Callable, Collection, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from normlab.checks.property import Violation
    from normlab.checks.report import Report

ROOT: Final = "normlab"
"""What the ids of all these tests begin with, their marker, and the option of pytest's configuration."""
SOURCES: Final = pytest.StashKey[list[tuple[str, str]]]()
"""Each source, as it is typed, with the folder in which it is run."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the command line's options, and those of pytest's configuration."""
    group = parser.getgroup(ROOT, "properties of a training step")
    group.addoption(
        "--normlab",
        action="append",
        default=[],
        metavar="SOURCE",
        help="a training script, FILE.py:function or module:function that returns normlab.Setup, "
        "hf:FOLDER or hf:ORG/NAME: one test for each property of its training step (may be given "
        "several times)",
    )
    group.addoption(
        "--normlab-args",
        default="",
        metavar="ARGS",
        help="arguments of the scripts, as in --normlab-args='--batch_size 8'",
    )
    parser.addini(ROOT, "sources to check, as --normlab, if the command line names nothing", type="linelist")
    knows_floats = int(pytest.__version__.partition(".")[0]) >= 9
    number = "float" if knows_floats else "string"
    parser.addini("normlab_budget", "seconds to spend on each source (60)", type=number, default=60.0)


def pytest_configure(config: pytest.Config) -> None:
    """Find the sources. A worker of xdist, whose arguments are not those that were typed, is told them."""
    config.addinivalue_line("markers", f"{ROOT}: a property of a training step, which --normlab names")
    if hasattr(config, "workerinput"):
        config.stash[SOURCES] = [(text, folder) for text, folder in config.workerinput.get(ROOT, [])]
        return
    named = [(text, str(config.invocation_params.dir)) for text in config.getoption("normlab")]
    if not named and config.args_source is not config.ArgsSource.ARGS:
        named = [(text, str(config.rootpath)) for text in config.getini(ROOT)]
    config.stash[SOURCES] = list(dict.fromkeys(named))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker of xdist the sources."""
    node.workerinput[ROOT] = node.config.stash[SOURCES]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Send all tests of a source to one worker of xdist, so that each source is checked once."""
    if config.getoption("dist") not in ("load", "loadgroup", "worksteal") or not config.stash[SOURCES]:
        return None
    from xdist.scheduler import LoadGroupScheduling

    class BySource(LoadGroupScheduling):
        def _split_scope(self, nodeid: str) -> str:
            own = nodeid.startswith(f"{ROOT}::")
            return nodeid.rpartition("::")[0] if own else super()._split_scope(nodeid)

    return BySource(config, log)


@pytest.hookimpl(tryfirst=True)  # before -k and -m look at the tests
def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Add a test for each property of each source."""
    for text, folder in config.stash[SOURCES]:
        step = TrainingStep.from_parent(
            session, name=text, nodeid=f"{ROOT}::{text}", path=_file(text, folder), folder=folder
        )
        tests: list[pytest.Item | pytest.Collector] = []
        for test in step.collect():
            items.append(test)
            tests.append(test)
        report = pytest.CollectReport(step.nodeid, "passed", None, tests)
        config.hook.pytest_collectreport(report=report)  # which counts them


@pytest.hookimpl(hookwrapper=True)  # which pytest 7 knows, too
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, None]:
    """Show a failure, and a mistake of the user's, as sentences without a traceback; let a skipped property
    name its source as the place, and not this file.
    """
    report: pytest.TestReport = (yield).get_result()
    if isinstance(item, Property) and call.excinfo is not None:
        from normlab.errors import UserError

        if call.excinfo.errisinstance((PropertyFails, TooLittleJudged, UserError)):
            report.longrepr = str(call.excinfo.value)
        elif report.skipped and isinstance(report.longrepr, tuple):
            report.longrepr = (str(item.path), 1, report.longrepr[2])


class TrainingStep(pytest.Collector):
    """One source; it is checked once, when the first of its tests runs."""

    def __init__(self, *, folder: str, **node: Any) -> None:
        super().__init__(**node)
        self.folder = folder
        self.outcome: Report | Exception | None = None

    def collect(self) -> Iterator[Property]:
        """Yield a test for each property. Their names are known without a check."""
        from normlab.checks.property import ORDER, PROPERTIES

        for name in dict.fromkeys((*ORDER, *PROPERTIES)):
            test = Property.from_parent(self, name=name, step=self)
            test.add_marker(ROOT)
            yield test

    def checked(self) -> Report:
        """The report. If the source cannot be checked, its first test says why; the others are skipped."""
        if isinstance(self.outcome, Exception):
            pytest.skip(f"{self.name} could not be checked")
        if self.outcome is None:
            try:
                self.outcome = self._check()
            except Exception as error:
                self.outcome = error
                raise
        return self.outcome

    def _check(self) -> Report:
        from normlab.checks.allowed import allowed_here
        from normlab.checks.check import check
        from normlab.testing import setup_from_source

        arguments = shlex.split(self.config.getoption("normlab_args"))
        with contextlib.chdir(self.folder), warnings.catch_warnings():
            warnings.simplefilter("default")  # those of a script are no failures, whatever holds in the tests
            with setup_from_source(self.name, arguments) as setup:
                return check(
                    setup,
                    budget_s=float(self.config.getini("normlab_budget")),
                    allow=allowed_here(self.config.rootpath),
                )


class Property(pytest.Item):
    """The test of one property."""

    def __init__(self, *, step: TrainingStep, **node: Any) -> None:
        super().__init__(**node)
        self.step = step

    def setup(self) -> None:
        """Check the source, if that was not done; what cannot be checked is an error, and no failure."""
        self.step.checked()

    def runtest(self) -> None:
        """Raise PropertyFails if the property fails; skip what was not judged, with the reason."""
        report = self.step.checked()
        if failures := list(_failures(report, self.name)):
            said = "\n".join(failures)
            if self.name in report.allowed:
                pytest.xfail(f"allowed: {said}")
            raise PropertyFails(said)
        if self.name not in report.holds:
            reason = f"{self.name}: {report.untestable.get(self.name, 'not tested')}"
            first = next(iter(report.unjudged or report.untestable), "")
            if report.verdict == "undecided" and self.name == first:  # the others are skipped
                raise TooLittleJudged(f"{report.shortfall}; {reason}")
            pytest.skip(reason)

    def reportinfo(self) -> tuple[Path, None, str]:
        """Where it is, and what it is called."""
        return self.path, None, f"{self.name} of {self.step.name}"


class PropertyFails(Exception):
    """A property that fails, with its evidence and what to do."""


class TooLittleJudged(Exception):
    """Nothing fails, but less than half of the properties that apply could be judged."""


@pytest.fixture
def normlab_check() -> Callable[..., Report]:
    """A function that takes what ``normlab.check`` takes, and fails the test with the report if a property
    fails that ``allow`` does not name, or if too little could be judged. It returns the report.
    """

    def checked(model: Any, batch: Any = None, *, allow: Collection[str] = (), **given: Any) -> Report:
        __tracebackhide__ = True
        from normlab.checks.check import check

        report = check(model, batch, allow=allow, **given)
        if report.verdict != "holds":
            pytest.fail(str(report))
        return report

    return checked


def _failures(report: Report, name: str) -> Iterator[str]:
    """Yield what is said of each failure of a property, be it a cause or a consequence."""
    for cause in report.failures:
        if cause.property == name:
            yield _sentence(cause)
        for one in cause.follows:
            if one.property == name:
                yield f"{_sentence(one)}\n    explained by {cause.property} at {cause.module or 'the model'}"


def _sentence(failure: Violation) -> str:
    advice = f"\n    → {failure.advice}" if failure.advice else ""
    return f"✗ {failure}{advice}"


def _file(text: str, folder: str) -> Path:
    """The place of a source's tests that pytest names: its file or folder; of a module, where it is run."""
    script = text.split(" -- ")[0]
    name = script.removeprefix("hf:") if script.startswith("hf:") else script.partition(":")[0]
    file = Path(folder, name)
    return file if file.exists() else Path(folder)
