"""Text and JSON files that are never seen half written."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

from normlab.spec.serialise import to_plain


def read_json(path: Path) -> Any:
    """Raises ValueError with line and column where the file is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise ValueError(f"{path} is not JSON: {error.msg} in {place}; mend or delete it") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: byte {error.start}; mend or delete it") from error


def write_json_atomic(path: Path, content: Any) -> None:
    """Dataclasses, dicts, lists and scalars; numbers that are not finite become "nan", "inf" and "-inf"."""
    text = json.dumps(to_plain(content), ensure_ascii=False, indent=1, allow_nan=False)
    write_text_atomic(path, text + "\n")


def write_text_atomic(path: Path, text: str) -> None:
    """Write beside the file, sync, rename: a reader sees the old text or the new one, never a part."""
    new = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        with new.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
