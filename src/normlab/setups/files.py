"""Keep files that were there before a recording as they are, whatever recorded code does to them in Python.

To recorded code such a file is read-only, and it can go on as if it were not: what it writes goes to a copy,
which it then also reads. Two layers see to that.

The functions of Python that open, change, remove and rename files are patched, and redirect to the copy or
do nothing. What gets past them, such as a function that was imported by name before the recording, is seen by
an audit hook: Python raises an audit event before it opens or changes any path. A hook cannot redirect, so it
refuses, by the error that code expects of a read-only file. Code that is not Python's raises no events.
"""

from __future__ import annotations

import builtins
import filecmp
import io
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from normlab.trace.patching import replace

WRITES: Final = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_TRUNC | os.O_CREAT
"""Flags of ``os.open`` by which a file may be changed or made."""
ATTRIBUTES: Final = ("chmod", "chown", "lchown", "lchmod", "chflags", "utime", "setxattr", "removexattr")
"""Functions of ``os`` that change what is known of a file rather than its contents; few systems have all."""


class KeptFileError(PermissionError):
    """Recorded code was about to change a file that was there, in a way that cannot be redirected."""


class KeptFiles:
    """The files that were there, and what recorded code has in their place.

    ``note`` is told what was not done, in words, and returns its line in a report; ``forget`` takes such a
    line back.
    """

    def __init__(self, note: Callable[[str], str], forget: Callable[[str], None]) -> None:
        self._note, self._forget = note, forget
        self.made: set[str] = set()
        """The paths of files and folders that recorded code made. What is in a folder that it made is its
        own, too.
        """
        self.unsaved: set[str] = set()
        """The paths of files that were not saved, which code may want to rename or remove."""
        self._copies: dict[str, str] = {}
        """By the path of a file that was there, where recorded code's version of it lies. Nothing lies there
        if it has removed the file.
        """
        self._lines: dict[str, str] = {}
        """By the same path, the line of the report that names the file."""
        self._removed: set[str] = set()
        """The folders, and links to them, that recorded code believes it has removed."""
        self._folder = ""
        self._bystanders: frozenset[int] = frozenset()
        """Threads that ran before: what they write is not recorded code's."""

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep the files that are there as they are inside this block."""
        others = {thread.ident for thread in threading.enumerate() if thread.ident is not None}
        self._bystanders = frozenset(others - {threading.get_ident()})
        with ExitStack() as stack:
            self._folder = stack.enter_context(TemporaryDirectory(ignore_cleanup_errors=True))
            self._folder = os.path.realpath(self._folder)
            self.made.add(self._folder)
            stack.callback(self._end)
            self._patch(stack)
            stack.enter_context(_watched_by(self))
            yield

    @property
    def is_active(self) -> bool:
        """Whether what runs now is recorded code."""
        return _watching is self and threading.get_ident() not in self._bystanders

    def _end(self) -> None:
        """Forget the copies, and the lines of files whose copies are unchanged after all, such as a lock that
        was not used.
        """
        for path, copy in self._copies.items():
            if os.path.isfile(copy) and os.path.isfile(path) and filecmp.cmp(path, copy, shallow=False):
                self._forget(self._lines[path])
        for path in self.unsaved & self.made:  # opened by the script, and then not saved to
            if os.path.isfile(path) and not os.path.getsize(path):
                os.remove(path)
        self._copies.clear()
        self._lines.clear()
        self._removed.clear()

    # ------------------------------------------------------------------------------------------- questions

    def keeps(self, place: str) -> bool:
        """Return whether something is at this place that recorded code did not make."""
        if not os.path.lexists(place):
            return False
        while place not in self.made:
            above = os.path.dirname(place)
            if above == place:
                return True
            place = above
        return False

    def keeps_contents(self, place: str) -> bool:
        """Return whether a file is at this place whose contents stay. Devices and pipes have none."""
        return os.path.isfile(place) and self.keeps(place)

    # ---------------------------------------------------------------------------------------- redirections

    def redirected(self, path: Any, *, writes: bool, empty: bool, folder: int | None = None) -> Any:
        """Return the path to open: that of the copy if there is one, or if a file that was there is about to
        be written to. The copy is not filled if it will be ``empty`` anyway.
        """
        if not self.is_active or not (writes or self._copies):
            return path
        place = place_of(path, folder)
        if writes and place not in self._copies and self.keeps_contents(place):
            self._copy(place, empty=empty)
        return self._copies.get(place, path)

    def _copy(self, place: str, *, empty: bool) -> str:
        """Have recorded code go on with a copy of a file that was there. Return the path of the copy."""
        self._lines[place] = self._note(path_from_here(place))
        copy = os.path.join(self._folder, str(len(self._copies)))
        if empty:
            Path(copy).touch()
        else:
            shutil.copyfile(place, copy)
        self._copies[place] = copy  # from now on its path leads there
        return copy

    def _make_removed(self, place: str) -> None:
        """Have recorded code find no file in place of one that was there."""
        copy = self._copies.get(place) or self._copy(place, empty=True)
        if os.path.exists(copy):
            os.remove(copy)

    def _patch(self, stack: ExitStack) -> None:
        """Patch Python's functions of files until a stack is closed."""
        for module in (builtins, io):
            replace(stack, module, "open", self.open_instead_of(vars(module)["open"]))
        patches = {
            "open": self._open_by_flags,
            "truncate": self._truncate,
            "remove": self._remove_by,
            "unlink": self._remove_by,
            "rename": self._rename_by,
            "replace": self._rename_by,
            "rmdir": self._remove_folder_by,
            "mkdir": self._make_folder,
            "link": self._link,
            "symlink": self._link_by_name,
            **dict.fromkeys(ATTRIBUTES, self._change_attributes),
        }
        for name, patch in patches.items():
            if name in vars(os):
                replace(stack, os, name, patch(vars(os)[name]))
        replace(stack, shutil, "rmtree", self._remove_tree(shutil.rmtree))

    def open_instead_of(self, open_: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that opens files as ``open`` does, and gives copies of those that stay."""

        @wraps(open_)
        def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            writes = any(letter in mode for letter in "wa+")  # "x" is refused where a file is
            file = self.redirected(file, writes=writes, empty="w" in mode)
            return open_(file, mode, *args, **kwargs)

        return opened

    def _open_by_flags(self, open_: Callable[..., int]) -> Callable[..., int]:
        @wraps(open_)
        def opened(path: Any, flags: int, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> int:
            writes = bool(flags & WRITES) and not flags & os.O_EXCL
            path = self.redirected(path, writes=writes, empty=bool(flags & os.O_TRUNC), folder=dir_fd)
            return open_(path, flags, *args, dir_fd=dir_fd, **kwargs)

        return opened

    def _truncate(self, truncate: Callable[..., None]) -> Callable[..., None]:
        @wraps(truncate)
        def truncated(path: Any, length: int) -> None:
            truncate(self.redirected(path, writes=True, empty=False), length)

        return truncated

    def _remove_by(self, remove: Callable[..., None]) -> Callable[..., None]:
        @wraps(remove)
        def removed(path: Any, *, dir_fd: int | None = None) -> None:
            place = place_of(path, dir_fd, follow=False)
            was_not_saved = place in self.unsaved and not os.path.lexists(place)
            if self.is_active and self.keeps(place) and os.path.isfile(place):
                self._make_removed(place)
            elif self.is_active and (was_not_saved or self.keeps(place)):
                self._note(f"{remove.__name__} of {path_from_here(place)}")
                if os.path.islink(place):
                    self._removed.add(place)
            else:
                remove(path, dir_fd=dir_fd)

        return removed

    def _rename_by(self, rename: Callable[..., None]) -> Callable[..., None]:
        @wraps(rename)
        def renamed(
            src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
        ) -> None:
            if not self.is_active:
                rename(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
                return
            source = place_of(src, src_dir_fd, follow=False)
            target = place_of(dst, dst_dir_fd, follow=False)
            if source in self.unsaved:
                self.unsaved.add(target)
                self._note(path_from_here(target))
                return
            moved = self._copies.get(source, source)
            if self.keeps(moved):  # a large checkpoint, perhaps, which is not copied to be moved
                self._note(f"{rename.__name__} of {path_from_here(source)}")
                self._removed.add(source)
            elif self.keeps(target) and os.path.isfile(moved):
                rename(moved, self._copies.get(target) or self._copy(target, empty=True))
            elif self.keeps(target):
                self._note(f"{rename.__name__} to {path_from_here(target)}")
            else:
                rename(moved, target)

        return renamed

    def _remove_folder_by(self, remove: Callable[..., None]) -> Callable[..., None]:
        @wraps(remove)
        def removed(path: Any, *, dir_fd: int | None = None) -> None:
            place = place_of(path, dir_fd, follow=False)
            if not self.is_active or not self.keeps(place) or not _is_empty_folder(place):
                remove(path, dir_fd=dir_fd)  # which refuses to remove what is no empty folder
                return
            self._note(f"{remove.__name__} of {path_from_here(place)}")
            self._removed.add(place)

        return removed

    def _remove_tree(self, remove: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(remove)
        def removed(path: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> Any:
            place = place_of(path, dir_fd, follow=False)
            if not self.is_active or not self.keeps(place):
                return remove(path, *args, dir_fd=dir_fd, **kwargs)
            self._note(f"{remove.__name__} of {path_from_here(place)}")
            self._removed.add(place)
            return None

        return removed

    def _make_folder(self, make: Callable[..., None]) -> Callable[..., None]:
        @wraps(make)
        def made(path: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> None:
            place = place_of(path, dir_fd, follow=False)
            if self.is_active and place in self._removed:
                self._removed.remove(place)
                return
            make(path, *args, dir_fd=dir_fd, **kwargs)

        return made

    def _link(self, link: Callable[..., None]) -> Callable[..., None]:
        """Make a copy in place of a hard link to a file that was there: what is written through the link
        would change that file.
        """

        @wraps(link)
        def linked(src: Any, dst: Any, **kwargs: Any) -> None:
            source = place_of(src, kwargs.get("src_dir_fd"))
            if not self.is_active or not self.keeps(source):
                link(src, dst, **kwargs)
                return
            target = place_of(dst, kwargs.get("dst_dir_fd"), follow=False)
            with open(source, "rb") as old, open(target, "xb") as new:
                shutil.copyfileobj(old, new)

        return linked

    def _link_by_name(self, link: Callable[..., None]) -> Callable[..., None]:
        """Do not make a link again that recorded code believes it has removed: it is still there."""

        @wraps(link)
        def linked(src: Any, dst: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> None:
            place = place_of(dst, dir_fd, follow=False)
            if not self.is_active or not self._is_believed_removed(place):
                link(src, dst, *args, dir_fd=dir_fd, **kwargs)
                return
            self._note(f"{link.__name__} at {path_from_here(place)}")
            self._removed.discard(place)

        return linked

    def _is_believed_removed(self, place: str) -> bool:
        """Return whether something is at this place that recorded code believes it has removed."""
        copy = self._copies.get(place)
        return place in self._removed or (copy is not None and not os.path.exists(copy))

    def _change_attributes(self, change: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(change)
        def changed(path: Any, *args: Any, **kwargs: Any) -> Any:
            place = place_of(path, kwargs.get("dir_fd"), follow=kwargs.get("follow_symlinks", True))
            if not self.is_active or not self.keeps(place):
                return change(path, *args, **kwargs)
            if place in self._copies:  # the copy is recorded code's own, whatever its attributes are
                return None
            self._note(f"{change.__name__} of {path_from_here(place)}")
            return None

        return changed

    # -------------------------------------------------------------------------------------- what is refused

    # These are called by the audit hook, with the arguments of the event; -1 stands for no folder.

    def _refuse(self, verb: str, place: str) -> None:
        line = self._note(f"{verb} {path_from_here(place)}")
        raise KeptFileError(
            f"the script may not {line}: this was there before, and stays as it is while the script is only "
            "looked at; let it write by open() or os.open(), which give it a copy"
        )

    def see_opened(self, path: Any, mode: Any, flags: int) -> None:
        """Refuse to open a file for writing that was there; remember a new one."""
        place = place_of(path) if flags & WRITES else ""
        if not place:
            return
        if not os.path.lexists(place):
            self.made.add(place)
        elif flags & WRITES != os.O_CREAT and not flags & os.O_EXCL and self.keeps_contents(place):
            self._refuse("write to", place)

    def see_database(self, path: Any) -> None:
        """Refuse to open a database that was there; remember a new one."""
        self.see_opened(path, None, os.O_RDWR | os.O_CREAT)

    def see_written(self, path: Any, *_: Any) -> None:
        """Refuse to write to a file that was there."""
        place = place_of(path)
        if self.keeps_contents(place):
            self._refuse("write to", place)

    def see_changed(self, path: Any, *_: Any) -> None:
        """Refuse to change the attributes of a file that was there."""
        place = place_of(path)
        if self.keeps(place):
            self._refuse("change", place)

    def see_removed(self, path: Any, folder: int = -1) -> None:
        """Refuse to remove what was there."""
        place = place_of(path, folder, follow=False)
        if self.keeps(place):
            self._refuse("remove", place)
        self.made.discard(place)

    def see_renamed(self, path: Any, target: Any, folder: int = -1, target_folder: int = -1) -> None:
        """Refuse to rename what was there, and to replace it."""
        source, new = place_of(path, folder, follow=False), place_of(target, target_folder, follow=False)
        if self.keeps(source):
            self._refuse("rename", source)
        if self.keeps(new):
            self._refuse("replace", new)
        self.made.discard(source)
        self.made.add(new)

    def see_made(self, path: Any, *more: Any) -> None:
        """Remember a new folder or a new link."""
        place = place_of(path, more[-1] if more else -1, follow=False)
        if not os.path.lexists(place):
            self.made.add(place)

    def see_linked(self, path: Any, target: Any, folder: int = -1, target_folder: int = -1) -> None:
        """Refuse another name for a file that was there, through which it could be changed."""
        source = place_of(path, folder)
        if self.keeps(source):
            self._refuse("link to", source)
        self.see_made(target, target_folder)


# ------------------------------------------------------------------------------------------- the audit hook

SEEN: Final[dict[str, Callable[..., None]]] = {
    "open": KeptFiles.see_opened,
    "os.truncate": KeptFiles.see_written,
    "sqlite3.connect": KeptFiles.see_database,
    **dict.fromkeys([f"os.{name}" for name in ATTRIBUTES], KeptFiles.see_changed),
    "os.remove": KeptFiles.see_removed,
    "os.rmdir": KeptFiles.see_removed,
    "os.rename": KeptFiles.see_renamed,
    "os.link": KeptFiles.see_linked,
    "os.mkdir": KeptFiles.see_made,
    "os.symlink": lambda files, _, path, folder=-1: files.see_made(path, folder),
}
"""What is done at an audit event, by its name."""

_watching: KeptFiles | None = None
"""What the audit hook asks now."""
_has_hook: bool = False
"""Whether the hook was added to Python, which is done once: nothing removes it."""


@contextmanager
def _watched_by(files: KeptFiles) -> Iterator[None]:
    """Have audit events go to ``files`` inside this block."""
    global _watching, _has_hook
    if not _has_hook:
        sys.addaudithook(_see)
        _has_hook = True
    before, _watching = _watching, files
    try:
        yield
    finally:
        _watching = before


def _see(event: str, arguments: tuple[Any, ...]) -> None:
    """Have the files that are watched see an event. Outside of recordings it returns at once, as Python
    calls it for every event until the process ends.
    """
    if _watching is None:
        return
    see = SEEN.get(event)
    if see is not None and _watching.is_active:
        see(_watching, *arguments)


# -------------------------------------------------------------------------------------------------- places


def place_of(path: Any, folder: int | None = None, *, follow: bool = True) -> str:
    """Return the absolute path, with links resolved; "" for what is no path, such as an open file's number.

    The path may begin in a ``folder`` that is open. The last link is followed only if ``follow``.
    """
    if not isinstance(path, (str, bytes, os.PathLike)):
        return ""
    name = os.fsdecode(path)
    if folder is not None and folder != -1:
        name = os.path.join(_path_of_open_folder(folder), name)
    if follow:
        return os.path.realpath(name)
    above, last = os.path.split(os.path.abspath(name))
    return os.path.join(os.path.realpath(above), last)


def _path_of_open_folder(folder: int) -> str:
    if os.path.isdir("/proc/self/fd"):
        return os.readlink(f"/proc/self/fd/{folder}")
    import fcntl  # which only Unix has; on macOS it knows the path

    get_path: int = vars(fcntl)["F_GETPATH"]
    return os.fsdecode(fcntl.fcntl(folder, get_path, bytes(1024)).rstrip(b"\0"))


def path_from_here(path: Any) -> str:
    """Return a path as a report shows it: relative to the current folder, if it lies in there."""
    return os.fsdecode(path).removeprefix(f"{Path.cwd()}{os.sep}")


def _is_empty_folder(place: str) -> bool:
    return os.path.isdir(place) and not os.listdir(place)
