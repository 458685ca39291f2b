"""Packed documents are read off positions and numbers."""

from __future__ import annotations

import pytest
import torch

from normlab.trace.facts import Unknown
from normlab.trace.facts.documents import restarts

from .reader import facts, ids

PACKED = torch.tensor([[0] * 5 + [1] * 7] * 4)
RESTARTING = torch.cat([torch.arange(5), torch.arange(7)]).expand(4, 12)


@pytest.mark.parametrize(
    ("name", "entry"), [("positions", RESTARTING), ("documents", PACKED), ("documents", PACKED + 3)]
)
def test_documents_are_read_off_positions_and_numbers(name, entry):
    assert torch.equal(facts({"ids": ids(), name: entry.clone()}).documents, PACKED)


def test_segments_that_are_looked_up_are_no_documents():
    with pytest.raises(Unknown):
        _ = facts({"ids": ids(), "segments": PACKED.clone()}).documents


def test_documents_may_be_declared():
    assert torch.equal(facts(ids(), documents=PACKED).documents, PACKED)
    with pytest.raises(Unknown, match="no entry"):
        _ = facts(ids(), documents="doc").documents


def test_positions_that_end_in_padding_do_not_restart():
    positions = torch.tensor([[0, 1, 2, 3, 0, 0]])
    assert restarts(positions) is None
    assert restarts(torch.arange(6)[None]) is None
