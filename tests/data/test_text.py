import gzip
import lzma

import pytest

from normlab.data.text import read_lines, read_parallel

LINES = ["Ein Café.", "", "two\u2028lines\x0cin\x85one", "last"]


@pytest.mark.parametrize(
    ("name", "opener"), [("a.txt", open), ("a.de", open), ("a.gz", gzip.open), ("a.xz", lzma.open)]
)
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("last", [True, False])
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
    with pytest.raises(ValueError, match=r"a\.de, line 2: byte 0xf6 is not UTF-8"):
        read_lines(tmp_path / "a.de")


@pytest.mark.parametrize("name", ["a.gz", "a.xz"])
@pytest.mark.parametrize("content", [b"no archive", None])
def test_broken_archives_are_named(tmp_path, name, content):
    if content is None:  # cut off in the middle
        pack = gzip.compress if name == "a.gz" else lzma.compress
        content = pack(bytes(range(256)) * 9)[:-20]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{name} cannot be unpacked"):
        read_lines(tmp_path / name)


def test_missing_files_and_folders(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no text file"):
        read_lines(tmp_path / "none.xz")
    with pytest.raises(ValueError, match="is a folder"):
        read_lines(tmp_path)


def test_parallel_text_must_be_parallel(tmp_path):
    source, target, empty = tmp_path / "a.de", tmp_path / "a.en", tmp_path / "a.fr"
    source.write_text("eins\nzwei\n")
    target.write_text("one\n")
    empty.write_text("")
    assert read_parallel(source, source) == (["eins", "zwei"], ["eins", "zwei"])
    with pytest.raises(ValueError, match=r"a\.de has 2 lines but .*a\.en has 1"):
        read_parallel(source, target)
    with pytest.raises(ValueError, match=r"a\.fr is empty"):
        read_parallel(source, empty)
