from itertools import combinations
from typing import Any

import numpy as np
import polars as pl
import pytest

from cases import each
from normlab.report.charts.drawing import rows
from normlab.report.charts.theme import DASHES, INK, PALETTE, Mode, colour, dash, theme

# How colours are seen: Machado, Oliveira and Fernandes 2009, severity 1.0, on linear RGB.
SIGHT = {
    "normal": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
}


def linear(hex_colour: str) -> np.ndarray:
    c = np.array([int(hex_colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def oklab(rgb: np.ndarray) -> np.ndarray:
    to_lms = [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
    to_lab = [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
    return np.array(to_lab) @ np.cbrt(np.array(to_lms) @ rgb)


def contrast(a: str, b: str) -> float:
    dark, light = sorted(float(linear(c) @ [0.2126, 0.7152, 0.0722]) for c in (a, b))
    return (light + 0.05) / (dark + 0.05)


@each("mode", ["light", "dark"])
@each("sight", SIGHT)
def test_colours_stay_apart_for_everyone(mode: Mode, sight: str) -> None:
    seen = [oklab(np.clip(SIGHT[sight] @ linear(c), 0, 1)) for c in PALETTE[mode]]
    assert min(float(np.linalg.norm(a - b)) for a, b in combinations(seen, 2)) > 0.08


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_colours_stand_out_from_the_paper(mode: Mode) -> None:
    paper, ink, faint, _, alarm = INK[mode]
    assert min(contrast(c, paper) for c in PALETTE[mode]) >= 3
    assert min(contrast(c, paper) for c in (ink, faint, alarm)) >= 4.5


def test_no_two_of_many_recipes_look_alike() -> None:
    number = len(PALETTE["light"]) * len(DASHES)
    assert len({(colour(i), dash(i)) for i in range(number)}) == number


def test_neighbours_differ_in_black_and_white() -> None:
    assert all(dash(i) != dash(i + 1) for i in range(20) if (i + 1) % len(PALETTE["light"]))


def without_colours(setting: Any) -> Any:
    """A theme, or a part of one, with the same word in place of each colour."""
    match setting:
        case dict():
            return {name: without_colours(part) for name, part in setting.items()}
        case list():
            return [without_colours(part) for part in setting]
        case str() if setting.startswith("#"):
            return "a colour"
    return setting


def test_modes_differ_in_colours_only() -> None:
    light, dark = theme("light"), theme("dark")
    assert without_colours(light) == without_colours(dark)
    assert light["background"] != dark["background"]
    assert light["range"] != dark["range"]
    assert light["axis"] != dark["axis"]


def test_charts_have_no_legend_on_a_page_that_has_its_own() -> None:
    assert theme(legend=False)["legend"]["disable"]
    assert not theme(legend=True)["legend"]["disable"]


def test_rows_are_short() -> None:
    frame = pl.DataFrame({"x": [1 / 3, None], "n": [7, 8], "s": ["a", "b"]})
    data = rows(frame).to_dict()
    assert data["values"] == "x,n,s\n0.33333,7,a\n,8,b\n"
    assert data["format"] == {"type": "csv", "parse": {"x": "number", "n": "number", "s": "string"}}
