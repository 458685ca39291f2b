"""Ways in which a file can be broken, drawn from a seed: a bad disk, another program, a hasty editor."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from random import Random
from typing import Any, Final

DEEP: Final = 3000
"""More lists inside one another than Python's stack holds."""
VALUES: Final = (
    *("null", "true", "0", "-1", "1.5", "-0.5", "1e308", "1e-320", "NaN", "Infinity", "-Infinity"),
    *(str(10**30), str(10**400), "1" * 5000, '""', '"x"', '"nan"', '"-inf"', '"1"', '"' + "x" * 5000 + '"'),
    *('"\\ud800"', '"\\u0000"', '"\\u2028"', "[]", "{}", "[[1]]", '["x", null]', '{"a": {}}'),
    "[" * DEEP + "]" * DEEP,
)
"""JSON in place of a value."""
TOML_VALUES: Final = (
    *("true", "0", "-1", "1.5", "1e308", "nan", "inf", "-inf", str(10**30), "1" * 5000, "1e400", '""', '"x"'),
    *('"\\u0000"', '"\\u2028"', "[]", "{}", "[[1]]", '["x"]', "{a = {}}", "1979-05-27", "07:32:00", '"a'),
    "[" * DEEP + "]" * DEEP,
    '"' + "x" * 5000 + '"',
)
CELLS: Final = (
    *("", " ", "x", "-1", "1e308", "1e400", "nan", "inf", "-inf", str(10**400), "\u2028", '"', '"a\nb"'),
    *("1,5", "\t", ",", "x" * 200_000, "\0", "ß"),
)
PLACE: Final = "\ue000"
"""A character that no file here holds: where a value is to be put as text."""


def of_bytes(content: bytes, draw: Random) -> bytes:
    """The bytes of any file: some are others, missing, or in another encoding."""
    return draw.choice(_BYTES)(content, draw)


def of_json(content: bytes, draw: Random) -> bytes:
    """One value, key or element of a JSON document is another, is gone, or is there twice."""
    return _changed(json.loads(content), draw).encode("utf-8", "surrogatepass")


def of_rows(content: bytes, draw: Random) -> bytes:
    """One row of JSON lines has something else in it, is gone, or is in another place."""
    rows = content.splitlines()
    place = draw.randrange(len(rows))
    row = rows[place]
    change = draw.choice(("inside", "inside", "inside", "gone", "twice", "moved", "other"))
    if change == "inside":
        rows[place] = of_json(row, draw)
    elif change == "other":
        rows[place] = draw.choice(VALUES).encode()
    elif change == "twice":
        rows.insert(place, row)
    else:
        del rows[place]
    if change == "moved":
        rows.insert(draw.randrange(len(rows) + 1), row)
    return b"".join(row + b"\n" for row in rows)


def of_toml(content: bytes, draw: Random) -> bytes:
    """One line of a TOML file has another value, is gone, is there twice, or is a table of another name."""
    lines = content.decode().splitlines()
    place = draw.choice([number for number, line in enumerate(lines) if line.strip()])
    name, equals, _ = lines[place].partition("=")
    change = draw.choice(("value", "value", "value", "gone", "twice", "name"))
    if change == "value":
        lines[place] = f"{name if equals else 'more '}= {draw.choice(TOML_VALUES)}"
    elif change == "name":
        lines[place] = lines[place].replace(name.strip("[] "), draw.choice(("x", '"\\u2028"', "a.b.c", "id")))
    elif change == "twice":
        lines.insert(place, lines[place])
    else:
        del lines[place]
    return "".join(f"{line}\n" for line in lines).encode()


def of_table(content: bytes, draw: Random) -> bytes:
    """One cell of a table is another, or a row is gone or there twice."""
    lines = content.decode().splitlines()
    place = draw.randrange(len(lines))
    separator = max("\t;,", key=lines[0].count)
    change = draw.choice(("cell", "cell", "cell", "gone", "twice"))
    if change == "cell":
        cells = lines[place].split(separator)
        cells[draw.randrange(len(cells))] = draw.choice(CELLS)
        lines[place] = separator.join(cells)
    elif change == "twice":
        lines.insert(place, lines[place])
    else:
        del lines[place]
    return "".join(f"{line}\n" for line in lines).encode()


def of_header(content: bytes, draw: Random) -> bytes:
    """A number or a word at the beginning of a file of numbers is another: its shape, its type, its size."""
    head, rest = content[:400], content[400:]
    words = list(re.finditer(rb"[A-Za-z_]{2,}|\d+", head))
    if not words or draw.random() < 0.4:
        place = draw.randrange(min(len(content), 24))
        return content[:place] + bytes([draw.randrange(256)]) + content[place + 1 :]
    word = draw.choice(words)
    other = draw.choice((b"0", b"9" * len(word[0]), b"7", b"-1", b"F64", b"BF16", b"U8", b"x" * len(word[0])))
    return head[: word.start()] + other.ljust(len(word[0])) + head[word.end() :] + rest


# -------------------------------------------------------------------------------------------- inside JSON


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in a document, with each of its keys or positions."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from _places(value[key])


def _changed(document: Any, draw: Random) -> str:
    places = list(_places(document))
    if not places:
        return draw.choice(VALUES)
    container, key = draw.choice(places)
    change = draw.choice(("value", "value", "value", "gone", "renamed", "twice", "swapped"))
    if change == "gone":
        del container[key]
    elif change == "renamed" and isinstance(container, dict):
        container[draw.choice(("x", "", "\u2028", f"{key}s"))] = container.pop(key)
    elif change == "twice" and isinstance(container, list):
        container.insert(key, container[key])
    elif change == "swapped":
        other, its_key = draw.choice(places)
        container[key] = json.loads(json.dumps(other[its_key]))
    else:
        container[key] = PLACE
        text = json.dumps(document, ensure_ascii=False)
        return text.replace(f'"{PLACE}"', draw.choice(VALUES))
    return json.dumps(document, ensure_ascii=False)


# ---------------------------------------------------------------------------------------------- bytes


def _bit(content: bytes, draw: Random) -> bytes:
    place = draw.randrange(len(content))
    return content[:place] + bytes([content[place] ^ 1 << draw.randrange(8)]) + content[place + 1 :]


def _cut(content: bytes, draw: Random) -> bytes:
    return content[: draw.randrange(len(content))]


def _garbage(content: bytes, draw: Random) -> bytes:
    place = draw.randrange(len(content))
    return content[:place] + draw.randbytes(20) + content[place + 20 :]


def _zeros(content: bytes, draw: Random) -> bytes:
    """The rest was never written, as after a power cut."""
    place = draw.randrange(len(content))
    return content[:place] + bytes(len(content) - place)


def _utf16(content: bytes, draw: Random) -> bytes:
    return content.decode("latin-1").encode("utf-16")


def _latin(content: bytes, draw: Random) -> bytes:
    place = draw.randrange(len(content))
    return content[:place] + "grün".encode("latin-1") + content[place:]


def _other(content: bytes, draw: Random) -> bytes:
    return draw.choice((b"", b"\n", b"\0", b"[" * 100_000, b"{}", b"[]", b"null", b"\xef\xbb\xbf" + content))


_BYTES: Final[tuple[Callable[[bytes, Random], bytes], ...]] = (
    *(_bit, _bit, _cut, _cut, _garbage, _zeros, _utf16, _latin),
    _other,
)
