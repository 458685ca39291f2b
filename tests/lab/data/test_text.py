import gzip
import lzma
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import each
from normlab.lab.data import text as module
from normlab.lab.data.text import TextFile, read_lines

LINES = ["Ein Café.", "", "two\u2028lines\x0cin\x85one", "last"]


@each(("name", "opener"), [("a.txt", open), ("a.de", open), ("a.gz", gzip.open), ("a.xz", lzma.open)])
@each("end", ["\n", "\r\n"])
@each("last", [True, False])
def test_reads_every_form(tmp_path, name, opener, end, last):
    with opener(tmp_path / name, "wb") as stream:
        stream.write((end.join(LINES) + (end if last else "")).encode())
    assert read_lines(tmp_path / name) == LINES


def test_byte_order_mark_is_dropped_at_the_start_only(tmp_path):
    (tmp_path / "a").write_bytes("\ufeffa\n\ufeffb\n".encode())
    assert read_lines(tmp_path / "a") == ["a", "\ufeffb"]


def test_an_empty_line_at_the_end_is_a_line(tmp_path):
    (tmp_path / "a").write_bytes(b"a\n\n")
    assert read_lines(tmp_path / "a") == ["a", ""]
    (tmp_path / "a").write_bytes(b"")
    assert read_lines(tmp_path / "a") == []


def test_other_encodings_are_refused_with_file_and_line(tmp_path):
    (tmp_path / "a.de").write_bytes(b"gut\nsch\xf6n\n")
    with pytest.raises(ValueError, match=r"a\.de, line 2: .*0xf6"):
        read_lines(tmp_path / "a.de")
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR")
    with pytest.raises(ValueError, match=r"a\.png .*UTF-8"):
        read_lines(tmp_path / "a.png")


@pytest.mark.parametrize("name", ["a.gz", "a.xz"])
@pytest.mark.parametrize("content", [b"no archive", None])
def test_broken_archives_are_named(tmp_path, name, content):
    if content is None:  # cut off in the middle
        pack = gzip.compress if name == "a.gz" else lzma.compress
        content = pack(bytes(range(128)) * 9)[:-20]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(name)):
        read_lines(tmp_path / name)


def test_missing_files_and_folders(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.xz"):
        read_lines(tmp_path / "none.xz")
    with pytest.raises(ValueError, match="folder"):
        read_lines(tmp_path)


def lines_at_once(path):
    """The lines of a file, found with all of it in memory."""
    content = path.read_bytes()
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"line {line}: byte 0x{content[error.start]:02x} is not UTF-8") from error
    lines = text.removeprefix("\ufeff").split("\n")
    if lines[-1] == "":
        lines.pop()
    return [line.rstrip("\r") for line in lines]


PIECES = [*(c.encode() for c in "a\n\n\r é中\ufeff"), b"\xe4", b"\xf0\x9f"]


@pytest.mark.slow
@settings(max_examples=150)
@given(st.lists(st.sampled_from(PIECES), max_size=12), st.sampled_from(["", ".gz", ".xz"]))
def test_reading_line_by_line_changes_nothing(tmp_path_factory, pieces, ending):
    folder = tmp_path_factory.getbasetemp()
    plain, packed = folder / "whole", folder / f"packed{ending}"
    plain.write_bytes(b"".join(pieces))
    with module._OPENERS.get(ending, open)(packed, "wb") as stream:
        stream.write(b"".join(pieces))
    try:
        expected = lines_at_once(plain)
    except ValueError as error:
        with pytest.raises(ValueError, match=re.escape(str(error))):
            read_lines(packed)
    else:
        assert read_lines(packed) == expected


def test_a_text_is_read_from_its_beginning_each_time_and_no_further_than_asked(tmp_path):
    (tmp_path / "a").write_bytes(b"one\ntwo\n" + b"x" * 2**22 + b"\n\xff\n")
    text = TextFile(tmp_path / "a")
    assert text.name == str(tmp_path / "a")
    for _ in range(2):
        lines = iter(text)
        assert [next(lines), next(lines)] == ["one", "two"]
        assert set(next(lines)) == {"x"}
        with pytest.raises(ValueError, match=r"line 4: .*0xff"):
            next(lines)
