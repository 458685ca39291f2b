"""Keep a script that is only looked at from changing the user's files.

Three rules hold, also for what the script has registered with ``atexit``:

1. What it saves is not written. A checkpoint of weights that nobody trained would replace one that somebody
   did. So the functions of torch and of libraries that save are patched (``SAVERS``), those of modules that
   are imported later as soon as they are.
2. What is there when it begins stays as it is, see ``files``.
3. Anything else that it writes, such as a cache or a log of its own, is written.
"""

from __future__ import annotations

import atexit
import io
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any, Final

from normlab.base.libraries import is_library
from normlab.private_torch import JIT_SAVERS
from normlab.setups.callers import calling_line
from normlab.setups.files import KeptFiles, path_from_here, place_of
from normlab.trace.patching import replace

LIGHTNING: Final = ("lightning.pytorch", "pytorch_lightning")
SAVERS: Final[Mapping[str, Sequence[str]]] = {
    # through these go the weights that most libraries save
    "torch": ("save",),
    "torch.serialization": ("save",),
    "torch.jit": ("save",),
    **JIT_SAVERS,
    "torch.export": ("save",),
    "torch.distributed.checkpoint": ("save", "async_save"),
    "torch.distributed.checkpoint.state_dict_saver": ("save", "async_save"),
    "safetensors.torch": ("serialize_file",),
    "safetensors.numpy": ("serialize_file",),
    # these write text beside the weights, and remove older checkpoints
    "transformers.trainer": (
        "Trainer._save_checkpoint",
        "Trainer.save_model",
        "Trainer.save_state",
        "Trainer.save_metrics",
    ),
    "transformers.configuration_utils": ("PreTrainedConfig.save_pretrained",),
    "transformers.modeling_utils": ("PreTrainedModel.save_pretrained",),
    "transformers.processing_utils": ("ProcessorMixin.save_pretrained",),
    "transformers.tokenization_utils_base": ("PreTrainedTokenizerBase.save_pretrained",),
    "peft.peft_model": ("PeftModel.save_pretrained",),
    "diffusers.models.modeling_utils": ("ModelMixin.save_pretrained",),
    "diffusers.pipelines.pipeline_utils": ("DiffusionPipeline.save_pretrained",),
    "accelerate.accelerator": ("Accelerator.save_state", "Accelerator.save_model"),
    **{f"{package}.trainer.trainer": ("Trainer.save_checkpoint",) for package in LIGHTNING},
    # trackers that no environment variable holds back
    **{f"{package}.loggers.csv_logs": ("CSVLogger.save",) for package in LIGHTNING},
    **{f"{package}.loggers.tensorboard": ("TensorBoardLogger.save",) for package in LIGHTNING},
    # and what would be seen by others
    "huggingface_hub.hf_api": ("HfApi.upload_file", "HfApi.upload_folder"),
}
"""Functions that save, by module; they return None in place of saving."""
EVENT_WRITERS: Final = ("tensorboard.summary.writer.event_file_writer", "tensorboardX.event_file_writer")
"""Modules with an ``EventFileWriter``, through which goes all that TensorBoard is shown."""
DATABASES: Final = ("sqlite3", "sqlite3.dbapi2")
"""Modules with ``connect``, which opens a file by code that is not Python's."""
TEXTS_OF_NUMPY: Final = "numpy.lib._datasource"
"""A module with an ``open`` that keeps Python's as it was when it was first used."""

LISTED: Final = 5
"""How many of the things that were withheld a report names; it counts the others."""


class Withheld:
    """What a script would have changed, and what withholds it."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        """What it would have changed, in order: ``ckpt.pt in train.py:80``."""
        self.active = False
        """Whether the script is running, and what it saves is withheld."""
        self.files = KeptFiles(self.note, self.forget)

    def note(self, what: str) -> str:
        """Add something that was not done, once, and return its line."""
        line = f"{what} in {calling_line()}".removesuffix(" in ")
        if line not in self.lines:
            self.lines.append(line)
        return line

    def forget(self, line: str) -> None:
        """Take back a line that ``note`` returned."""
        if line in self.lines:
            self.lines.remove(line)

    @contextmanager
    def withholding(self) -> Iterator[None]:
        """Withhold inside this block what a script saves, and keep the files that are there as they are."""
        with ExitStack() as stack:
            stack.callback(setattr, sys, "dont_write_bytecode", sys.dont_write_bytecode)
            sys.dont_write_bytecode = True  # nor a __pycache__ beside the script
            stack.enter_context(self.files.kept())
            stack.callback(setattr, self, "active", False)
            self.active = True
            savers = _Savers(self, stack)
            stack.callback(sys.meta_path.remove, savers)
            sys.meta_path.insert(0, savers)
            for name, module in list(sys.modules.items()):
                if name in savers.patches and isinstance(module, ModuleType):
                    savers.patch(module)
            replace(stack, atexit, "register", self._register_instead_of(atexit.register))
            yield

    def _register_instead_of(self, register: Callable[..., Any]) -> Callable[..., Any]:
        """Withhold also what is saved when the process ends, by functions that the script itself registers.
        Those that libraries register run as they are: what they clean up is theirs.
        """

        @wraps(register)
        def registered(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
            is_of_script = not is_library(sys._getframe(1).f_code.co_filename)
            is_withheld = self.active and is_of_script
            register(_AtExit(function, self) if is_withheld else function, *args, **kwargs)
            return function

        return registered

    @property
    def facts(self) -> dict[str, str]:
        """The facts for a report; none if nothing was withheld."""
        if not self.lines:
            return {}
        more = len(self.lines) - LISTED
        return {"withheld": ", ".join(self.lines[:LISTED]) + (f" and {more} more" if more > 0 else "")}


@contextmanager
def saving_withheld() -> Iterator[Withheld]:
    """Withhold inside this block what a script saves, and keep the files that are there as they are."""
    withheld = Withheld()
    with withheld.withholding():
        yield withheld


class _AtExit:
    """A function that a script has registered with ``atexit``, called with saving withheld. It equals the
    function itself, so ``atexit.unregister`` finds it.
    """

    def __init__(self, function: Callable[..., Any], withheld: Withheld) -> None:
        self._function, self._withheld = function, withheld

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._withheld.withholding():
            return self._function(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return self is other or bool(self._function == other)

    def __hash__(self) -> int:
        return hash(self._function)


# ----------------------------------------------------------------------------------------- what is saved


class _Savers(MetaPathFinder):
    """Patches modules that save: those that are imported already, and others once they are imported."""

    def __init__(self, withheld: Withheld, stack: ExitStack) -> None:
        self._withheld, self._stack = withheld, stack
        """The stack puts back what is patched when it is closed."""
        self.patches: dict[str, Callable[[ModuleType], None]] = {
            **dict.fromkeys(SAVERS, self._patch_savers),
            **dict.fromkeys(EVENT_WRITERS, self._patch_event_writer),
            **dict.fromkeys(DATABASES, self._patch_database),
            TEXTS_OF_NUMPY: self._patch_open,
        }
        """What patches a module, by its name."""

    def patch(self, module: ModuleType) -> None:
        """Patch a module that was imported."""
        self.patches[module.__name__](module)

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        """Find a module as the other finders do; if it saves, it is patched once it has been executed."""
        if fullname not in self.patches:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            self._patch_when_executed(spec.loader)
        return spec

    def _patch_when_executed(self, loader: Any) -> None:
        """Let a loader patch its module once it has executed it."""
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module  # this function, which hides the loader's own
            execute(module)
            if self._withheld.active:
                self.patch(module)

        loader.exec_module = exec_module

    def _patch_savers(self, module: ModuleType) -> None:
        """Patch the functions and methods of ``SAVERS`` in a module; one that it lacks, as in another
        version of a library, is passed over.
        """
        for place in SAVERS[module.__name__]:
            *owners, name = place.split(".")
            owner: Any = module
            for part in owners:
                owner = getattr(owner, part, None)
            if owner is not None and name in vars(owner):
                replace(self._stack, owner, name, self._instead_of(vars(owner)[name], place))

    def _instead_of(self, save: Callable[..., Any], place: str) -> Callable[..., Any]:
        """Return what notes that something would have been saved, in place of saving it."""
        withheld = self._withheld

        @wraps(save)
        def noted(*args: Any, **kwargs: Any) -> Any:
            arguments = [*args, *kwargs.values()]
            is_to_memory = any(isinstance(value, io.BytesIO) for value in arguments)
            if not withheld.active or is_to_memory:
                return save(*args, **kwargs)
            path = _target(arguments)
            withheld.note(path_from_here(path) or place)
            if path:
                withheld.files.unsaved.add(place_of(path))
            return None

        return noted

    def _patch_event_writer(self, module: ModuleType) -> None:
        """Let new writers of event files write nothing, ever, and those that exist nothing for now."""
        kind, withheld = module.EventFileWriter, self._withheld
        begin = kind.__init__

        @wraps(begin)
        def begun(writer: Any, logdir: Any, *args: Any, **kwargs: Any) -> None:
            if not withheld.active:
                begin(writer, logdir, *args, **kwargs)
                return
            withheld.note(f"event files in {path_from_here(logdir)}")
            writer._logdir = logdir  # what get_logdir() returns
            for name in ("add_event", "flush", "close", "reopen"):
                setattr(writer, name, lambda *_: None)

        replace(self._stack, kind, "__init__", begun)
        replace(self._stack, kind, "add_event", lambda *_: None)

    def _patch_database(self, module: ModuleType) -> None:
        """Let a script read and write a copy of a database that was there."""
        connect, files = module.connect, self._withheld.files

        @wraps(connect)
        def connected(database: Any, *args: Any, **kwargs: Any) -> Any:
            return connect(files.redirected(database, writes=True, empty=False), *args, **kwargs)

        replace(self._stack, module, "connect", connected)

    def _patch_open(self, module: ModuleType) -> None:
        replace(self._stack, module, "open", self._withheld.files.open_instead_of(vars(module)["open"]))


def _target(arguments: Sequence[Any]) -> str:
    """Return the path among the arguments of a function that saves, or that of an open file; "" if none is
    there.
    """
    for value in arguments:
        path = getattr(value, "name", None) if hasattr(value, "write") else value
        if isinstance(path, (str, os.PathLike)):
            return os.fsdecode(path)
    return ""
