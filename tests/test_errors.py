"""A mistake is answered by a sentence; an error of normlab is never passed off as one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import normlab
from normlab.cli import errors
from normlab.cli.main import main
from normlab.cli.recipes import RecipesCommand
from normlab.errors import UserError

SRC = Path(normlab.__file__).parent

PARSERS = {
    "lab/data/corpus.py": "json",
    "lab/data/files.py": "numpy.load",
    "lab/data/foreign.py": "base64 and int read a line of a file of tiktoken",
    "lab/data/sources.py": "datasets raises ValueError for an unknown name or split",
    "setups/named.py": "ast.parse of a script's file",
    "cli/check.py": "float",
    "cli/advice.py": "json, and ast.parse of what may be no Python",
    "judging/command.py": "shlex",
    "judging/logs.py": "float",
    "judging/sequential.py": "float",
    "judging/table.py": "float",
    "setups/function.py": "inspect.signature raises ValueError for what has none",
    "lab/training/ray.py": "ray.init raises ValueError for an address",
    "base/files.py": "tomllib",
    "base/io.py": "json",
    "base/rows.py": "json",
    "papers/experiments.py": "json",
    "lab/training/translate.py": "numpy.load",
    **dict.fromkeys(
        [f"trace/{name}.py" for name in ("kept", "reach", "rebinding")],
        "the content of an empty cell of a closure",
    ),
    "trials/change.py": "ast.literal_eval",
    "scaling/sweep.py": "float",
}
"""Files that catch ValueError, each around one call of the parser named here."""

OTHERS_CODE = {
    "cli/compare.py": "the results of a comparison never hang on its page; it warns with what to type",
    "cli/main.py": "shows the traceback",
    "cli/papers.py": "shows the traceback; the artefacts that follow are measured all the same",
    "lab/data/tokenizer.py": "the library tokenizers raises no narrower one",
    "diagnosis/diagnose.py": "the study's note names class and message; the model is anybody's",
    "diagnosis/norms.py": "a block of a foreign model is called with one tensor",
    "diagnosis/recording.py": "runs a foreign model",
    "diagnosis/subject.py": "runs a foreign loss",
    **dict.fromkeys(
        ("setups/huggingface.py", "setups/shrink.py"), "builds a model that a configuration describes"
    ),
    "setups/hub.py": "the network, the Hub or the disk may raise anything; the cache is asked then",
    "setups/process.py": "settings of torch that another version may refuse to read or to write",
    **dict.fromkeys(
        [f"setups/{name}.py" for name in ("flow", "micro_batch_flow", "torch_functions")],
        "calls a function of the script's again, with other values",
    ),
    "parallel/process.py": "runs the user's own script; what it raises is written for the parent process",
    "parallel/roles.py": "the script's own functions may insist on a number of rows",
    "lab/training/own_runs.py": "trains the user's own setup; the run says what it raised",
    "setups/function.py": "runs the user's own file",
    "setups/script.py": "runs the user's own script",
    "setups/window.py": "the script's own functions may insist on a number of rows",
    "lab/training/worker.py": "writes the traceback to the run's log and answers with class and message",
    **dict.fromkeys(
        (
            *(f"checks/{name}.py" for name in ("check", "gradients", "loss", "optimizers", "step")),
            *(
                f"trace/{name}.py"
                for name in (
                    "awake",
                    "changes",
                    "comparison",
                    "copies",
                    "description",
                    "estimates",
                    "gradients",
                    "starts",
                    "facts/readings",
                    "facts/stacks",
                    "model_copies",
                    "optimizers",
                    "parts",
                    "passes",
                    "preparation",
                    "rates",
                    "rebinding",
                    "step_under_test",
                    "updates",
                    "whole_step",
                    "tensors",
                    "trail",
                    "low_precision",
                    "rearranged",
                )
            ),
        ),
        "runs a step that is anybody's, changed in one thing; what it raises makes a property untestable",
    ),
    "trace/kept.py": "what an object raises as it is put back is raised when all others are",
    "trace/reach.py": "asks objects of anybody's classes for attributes, which they may compute",
    "trace/record.py": "a measurement's failure goes to who records, or is raised",
    "setups/setup.py": "asks whether torch takes an object for numbers",
    "lab/recipes/plugins.py": "imports a module named by the user",
    **dict.fromkeys(("scaling/one_model.py", "trials/training.py"), "runs a step that is anybody's"),
    "scaling/coordinates.py": "looks at a model that is anybody's, which its trials do not need",
    "lab/training/devices.py": "a compiler that is missing or broken may raise anything; the error says what",
    "watching/observation.py": "a training elsewhere does not end by a model that cannot be read",
    "watching/recorder.py": "the recorder's own failure does not end a training; it is reported",
    "watching/watcher.py": "a training elsewhere does not end by the watch, which warns",
}
"""Files that catch every exception without raising it again, and the reason."""


def names(kind: ast.expr | None) -> set[str]:
    """The exceptions that a handler names; one without any catches all."""
    if kind is None:
        return {"BaseException"}
    return {ast.unparse(item) for item in (kind.elts if isinstance(kind, ast.Tuple) else [kind])}


def handlers(path: Path) -> Iterator[tuple[set[str], list[ast.stmt]]]:
    """The exceptions that each handler of a file catches for good, and the code that it guards."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Try):
            for handler in node.handlers:
                last = handler.body[-1]
                if not (isinstance(last, ast.Raise) and last.exc is None):
                    yield names(handler.type), node.body
        elif isinstance(node, ast.With):
            for item in node.items:
                if isinstance(item.context_expr, ast.Call) and ast.unparse(item.context_expr.func).endswith(
                    "suppress"
                ):
                    yield {ast.unparse(kind) for kind in item.context_expr.args}, node.body


def caught(kinds: set[str]) -> dict[str, list[list[ast.stmt]]]:
    """File to what its handlers of these exceptions guard."""
    found: dict[str, list[list[ast.stmt]]] = {}
    for path in sorted(SRC.rglob("*.py")):
        for kind, guarded in handlers(path):
            if kind & kinds:
                found.setdefault(path.relative_to(SRC).as_posix(), []).append(guarded)
    return found


def test_value_errors_are_caught_around_parsers_alone():
    found = caught({"ValueError"})
    assert found.keys() == PARSERS.keys()
    assert all(len(guarded) == 1 for bodies in found.values() for guarded in bodies)


def test_every_exception_is_caught_around_the_code_of_others_alone():
    assert caught({"Exception", "BaseException"}).keys() == OTHERS_CODE.keys()


@pytest.fixture
def planted(monkeypatch):
    """A command that ends with an exception."""

    def plant(error: Exception) -> None:
        def fail(self: object) -> None:
            raise error

        monkeypatch.setattr(RecipesCommand, "run", fail)

    return plant


@pytest.mark.parametrize("bug", [ValueError("zip() argument 2 is shorter"), ZeroDivisionError("by zero")])
def test_an_error_of_normlab_is_shown_with_its_traceback(planted, capsys, bug):
    planted(bug)
    assert main(["recipes", "--axis", "a b"]) == errors.BUG
    *trace, sentence = capsys.readouterr().err.splitlines()
    assert trace[0] == "Traceback (most recent call last):"
    assert trace[-1] == f"{type(bug).__name__}: {bug}"
    assert "report" in sentence
    assert normlab.__version__ in sentence
    assert "--axis 'a b'" in sentence


@pytest.mark.parametrize("mistake", [UserError("heads is 3"), FileNotFoundError("there is no heads.txt")])
def test_a_mistake_is_a_sentence(planted, capsys, mistake):
    planted(mistake)
    assert main(["recipes"]) == errors.USAGE_ERROR
    assert capsys.readouterr().err == f"normlab: {mistake}\n"


def test_the_report_goes_where_the_package_says(planted, capsys, monkeypatch):
    class Metadata:
        def get_all(self, name):
            assert name == "Project-URL"
            return ["Source, https://example.org", "Issues, https://example.org/issues"]

    monkeypatch.setattr("importlib.metadata.metadata", lambda name: Metadata())
    planted(RuntimeError("lost"))
    assert main(["recipes"]) == errors.BUG
    assert "https://example.org/issues" in capsys.readouterr().err
