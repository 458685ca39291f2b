"""What to type next after a first mistake: a word that is no source, a script that ends early or raises."""

from __future__ import annotations

import ast
import shlex
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Final

from normlab.base.files import read_json
from normlab.base.libraries import is_library
from normlab.errors import UserError
from normlab.lab.runs.folder import RunFolder, Runs, find_run

NOTEBOOKS: Final = ".ipynb"
MOST_NAMES: Final = 4
"""How many files a sentence names at most."""


def require_script(name: str, *, is_module: bool, command: str) -> None:
    """Raise UserError, with what to type, for a script or a module that cannot be one."""
    if is_module:
        if "/" in name or name.endswith(".py"):
            module = name.removesuffix(".py").strip("./").replace("/", ".")
            raise UserError(f"-m takes the name of a module, as in normlab {command} -m {module}")
        return
    file = Path(name)
    if file.is_file():
        return
    if file.is_dir():
        raise UserError(f"{name} is a folder{_scripts_in(file, command)}")
    folder = file.parent
    if not folder.is_dir():
        raise UserError(f"there is no file {name}: its folder is missing; name your training script")
    close = get_close_matches(file.name, [other.name for other in folder.glob("*.py")], 1)
    nearest = f", did you mean {folder / close[0]}?" if close else f" in {folder.resolve()}"
    raise UserError(f"there is no file {name}{nearest}; name your training script, as in train.py")


def refuse_what_is_no_source(name: str, command: str) -> None:
    """Raise UserError, with what to type, for a word that names neither a script, nor a function, nor a run.

    The word has no colon and does not end in .py. If nothing more is known of it, this returns.
    """
    file = Path(name)
    if file.suffix == NOTEBOOKS:
        raise UserError(
            f"{name} is a notebook; in it, train under `with normlab.capture() as captured:` and then call "
            "normlab.check(captured.setup), or make a script of it: jupyter nbconvert --to script "
            f"{_typed(name)}"
        )
    if Path(f"{name}.py").is_file():
        raise UserError(f"{name} is not a file; type: normlab {command} {_typed(name)}.py")
    if file.is_file():
        raise UserError(f"{name} is not a training script: its name must end in .py, as in train.py")
    if _is_of_hugging_face(file / "config.json"):
        raise UserError(
            f"{name} holds a configuration of Hugging Face's; type: normlab check hf:{_typed(name)}"
        )
    if file.is_dir() and not (file / "config.json").is_file():
        raise UserError(f"{name} is a folder{_scripts_in(file, command)}")


def _is_of_hugging_face(file: Path) -> bool:
    content: object = None
    with suppress(OSError, UserError):
        content = read_json(file)
    return isinstance(content, dict) and not {"model_type", "architectures"}.isdisjoint(content)


def find_named_run(name: str, root: Path, command: str) -> RunFolder:
    """Find a run by its folder or by the beginning of its id.

    Raises UserError, with what to type, for a word that names none.
    """
    refuse_what_is_no_source(name, command)
    try:
        return find_run(name, root)
    except FileNotFoundError as error:
        if not any(Runs(root)):
            raise UserError(
                f"{name} is not a file here, and there is no run in {root} either; type a script, as in "
                f"normlab {command} train.py, or just normlab {command} to see what else there is"
            ) from error
        raise


def _scripts_in(folder: Path, command: str) -> str:
    """Say what to type for a script in a folder: the one called train.py if there is one."""
    files = sorted(folder.glob("*.py"), key=lambda file: (file.name != "train.py", file.name))
    if not files:
        return " without a script; name a file, as in train.py"
    names = ", ".join(file.name for file in files[:MOST_NAMES])
    return f" with {names}; name a file, as in normlab {command} {_typed(str(files[0]))}"


def for_script_without_step(name: str, command: str) -> str:
    """What to type instead, for a script that made no training step: a function in it, if it has one."""
    functions = _functions_that_return_setups(Path(name))
    if functions:
        source = f"{name}:{functions[0]}"
        return (
            f"; it defines {functions[0]}(), and to take what that returns, type: normlab {command} {source}"
        )
    return (
        "; or write a function setup() in it that returns normlab.Setup(model, batches, loss=…, "
        f"optimizer=…), and type: normlab {command} {name}:setup"
    )


def _functions_that_return_setups(file: Path) -> list[str]:
    """The functions of a file that are called setup or that make a Setup, as its text shows."""
    tree = ast.Module([], [])
    with suppress(OSError, SyntaxError, ValueError):  # what cannot be read has none
        tree = ast.parse(file.read_bytes())
    names = []
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
            continue
        calls = [call.func for call in ast.walk(node) if isinstance(call, ast.Call)]
        makes = any(ast.unparse(function).split(".")[-1] == "Setup" for function in calls)
        if node.name == "setup" or makes:
            names.append(node.name)
    return names


def for_cause(cause: BaseException | None) -> str:
    """What to do about what a user's file raised, as far as that is known; empty otherwise."""
    if isinstance(cause, SyntaxError):
        return f"; it must be Python {sys.version_info.major}.{sys.version_info.minor}"
    if cause is None or all(map(is_library, _files_of(cause))):
        return ""
    if isinstance(cause, ModuleNotFoundError) and cause.name:
        return _for_missing_module(cause.name)
    if isinstance(cause, FileNotFoundError) and cause.filename:
        return _for_missing_file(Path(str(cause.filename)))
    if _wants_gpu(cause):
        return (
            "; there is no GPU here: take the device that there is, as in device = 'cuda' if "
            "torch.cuda.is_available() else 'cpu', or name the CPU by the script's own option after --"
        )
    return ""


def _for_missing_module(name: str) -> str:
    top = name.partition(".")[0]
    if Path(top).is_dir() or Path(f"{top}.py").is_file():
        return f"; {top} is in the current folder: type PYTHONPATH=. before the command"
    python = shlex.quote(sys.executable)
    return f"; install it where normlab is, as in {python} -m pip install {top}"


def _for_missing_file(path: Path) -> str:
    if path.is_absolute():
        return ""
    return f"; it is looked for in {Path.cwd()}: go to the folder in which the script usually runs"


def _wants_gpu(cause: BaseException) -> bool:
    """Whether torch was asked for a GPU that is not there."""
    import torch

    return _files_of(cause)[-1] == torch.cuda.__file__ and not torch.cuda.is_available()


def _files_of(cause: BaseException) -> list[str]:
    """The files of the code that raised an exception, outermost first."""
    return [frame.filename for frame in traceback.extract_tb(cause.__traceback__)]


def for_options(words: Sequence[str], command: str) -> str:
    """What to type if an option that was refused is the script's own."""
    script = next((word for word in words if word.endswith(".py")), "train.py")
    if "-m" in words[:-1]:
        script = f"-m {words[words.index('-m') + 1]}"
    return f"normlab: what is for your script stands after --, as in: normlab {command} {script} -- --lr 3e-4"


def for_command(word: str) -> str:
    """What to type if a script stands where a command should; empty if it is none."""
    if word.endswith(".py") or word.partition(":")[0].endswith(".py") or word.startswith("hf:"):
        return f"{word} is not a command; to test one training step of it, type: normlab check {_typed(word)}"
    return ""


def _typed(word: str) -> str:
    return shlex.quote(word)
