"""The page of a watched training, by its sections."""

from __future__ import annotations

from normlab.report.page import Columns, Row, Text
from normlab.report.watch import MODULES, module_sections


def rows_of(modules: int, statistic: str) -> list[Row]:
    """One step's rows of so many modules."""
    return [
        {
            "step": 1,
            "module": f"blocks.{i}",
            "signal": "grad",
            "statistic": statistic,
            "value": 1.0,
            "index": None,
        }
        for i in range(modules)
    ]


def test_what_too_many_modules_have_is_named_in_place_of_its_chart():
    (section,) = module_sections([*rows_of(3, "rms"), *rows_of(MODULES + 1, "max_abs")])
    assert [type(block) for block in section.blocks] == [Columns, Text]
    assert section.blocks[1].text.endswith("grad, max abs.")


def test_a_page_of_too_many_modules_alone_has_the_sentence_alone():
    (section,) = module_sections(rows_of(MODULES + 1, "rms"))
    assert [type(block) for block in section.blocks] == [Text]
    assert not section.marks
