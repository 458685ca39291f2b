import numpy as np

from normlab.lab.data.text import FEWEST_DOCUMENTS, document_sizes, lines_as_units


def test_blank_lines_separate_documents():
    lines = ["", *["two words", "é", " ", ""] * FEWEST_DOCUMENTS]
    sizes = document_sizes(lines_as_units(lines))
    assert sizes.shape == (FEWEST_DOCUMENTS, 3)
    assert sizes[1].tolist() == [4, 3 + 2 + 1 + 1, 10 + 3 + 2 + 1]
    assert sizes[0].tolist() == [5, 8, 17], "the blank line before it is the first one's"
    assert sizes.sum(axis=0)[2] == len("\n".join([*lines, ""]).encode())


def test_without_enough_of_them_a_document_is_a_line():
    lines = ["one", "", "two two", "three"]
    assert document_sizes(lines_as_units(lines)).tolist() == [[2, 3, 5], [1, 3, 8], [1, 2, 6]]
    assert np.array_equal(document_sizes(lines_as_units(["a"] * 30)), np.tile([1, 2, 2], (30, 1)))
