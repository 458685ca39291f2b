import json
import math
import os
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest

from normlab.base import files
from normlab.base.files import read_json, write_json_atomic, write_text_atomic


@dataclass(frozen=True)
class Point:
    x: float
    y: tuple[int, ...]


def test_text_is_replaced_as_given_and_nothing_is_left_beside_it(tmp_path):
    path = tmp_path / "a.txt"
    write_text_atomic(path, "old")
    write_text_atomic(path, "zwölf\n\u2028\r\n")
    assert path.read_bytes() == "zwölf\n\u2028\r\n".encode()
    assert list(tmp_path.iterdir()) == [path]


def test_flat_json_has_the_innermost_objects_on_a_line_each(tmp_path):
    content = {"rows": [{"a": "{\n }"}, {"a": "x\n y", "b": [1, 2]}], "n": 3}
    write_json_atomic(tmp_path / "a.json", content, flat=True)
    text = (tmp_path / "a.json").read_text()
    assert read_json(tmp_path / "a.json") == content
    assert '  { "a": "x\\n y", "b": [ 1, 2 ] }' in text.splitlines()
    assert ' "n": 3\n' in text


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    write_text_atomic(path, "old")

    def full(descriptor):
        raise error

    error = OSError("no space left on device")
    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match=str(error)) as raised:
        write_text_atomic(path, "new")
    assert raised.value is error
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_text_is_on_disk_before_it_takes_the_files_place(tmp_path, monkeypatch):
    calls = []
    fsync, rename = os.fsync, Path.replace
    monkeypatch.setattr(files.os, "fsync", lambda fd: calls.append("fsync") or fsync(fd))
    monkeypatch.setattr(Path, "replace", lambda a, b: calls.append("rename") or rename(a, b))
    write_text_atomic(tmp_path / "a.txt", "new")
    assert calls == ["fsync", "rename", "fsync"], "text, name, folder"


def test_readers_never_see_a_part_and_writers_do_not_disturb_each_other(tmp_path):
    path = tmp_path / "a.txt"
    texts = {letter * 200_000 for letter in "ab"}
    write_text_atomic(path, "a" * 200_000)

    def write(text):
        for _ in range(20):
            write_text_atomic(path, text)

    writers = [threading.Thread(target=write, args=(text,)) for text in texts]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert path.read_text() in texts
    for writer in writers:
        writer.join()
    assert list(tmp_path.iterdir()) == [path]


def test_json_is_strict_and_takes_dataclasses(tmp_path):
    path = tmp_path / "a.json"
    write_json_atomic(path, {"point": Point(math.nan, (1, 2)), "low": -math.inf})
    strict = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert strict == {"point": {"x": "nan", "y": [1, 2]}, "low": "-inf"}
    assert read_json(path) == strict


@pytest.mark.parametrize(
    ("content", "message"),
    [(b'{"a": 1,\n}', "JSON: .* line 2, column 1"), (b'{"a": "\xff"}', "UTF-8 .*byte 7")],
)
def test_damaged_json_is_named(tmp_path, content, message):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ValueError, match=rf"a\.json .*{message}"):
        read_json(tmp_path / "a.json")
