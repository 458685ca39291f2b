"""Ids that keep places for an image, and rows that are documents one after another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .tiny import DIM, VOCAB, Decoder, first, report_of

IMAGE = 2
"""The id that keeps the place of a patch."""


class Seeing(Decoder):
    """Puts projected patches in the places of images, in the way that ``way`` says."""

    def __init__(self, way: str):
        super().__init__()
        self.way, self.projector = way, nn.Linear(6, DIM)

    def forward(self, patches: Tensor, ids: Tensor) -> Tensor:
        x, features = self.embed(ids), self.projector(patches).flatten(0, 1)
        places = ids == IMAGE
        if self.way == "scatter":
            x = x.masked_scatter(places[..., None].expand_as(x), features)
        elif self.way == "where":
            numbers = (places.flatten().long().cumsum(0) - 1).clamp(min=0)
            x = torch.where(places[..., None], features[numbers].view_as(x), x)
        else:
            x = x.clone()
            x[places] = features
        if self.way == "assigned across rows":
            x[places] = x[places] + features.roll(3, 0)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def images(*, hidden: bool) -> dict[str, Tensor]:
    """Return texts with three patches in each row, whose labels may be hidden."""
    draw = torch.Generator().manual_seed(3)
    ids = torch.randint(IMAGE + 1, VOCAB, (4, 12), generator=draw)
    ids[:, 1:4] = IMAGE
    labels = ids.masked_fill(ids == IMAGE, -100) if hidden else ids
    return {"patches": torch.randn(4, 3, 6, generator=draw), "ids": ids, "labels": labels}


def answer_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["patches"], batch["ids"])
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)


def seeing(*properties: str, way: str = "scatter", hidden: bool = True, frozen: bool = False) -> Any:
    torch.manual_seed(0)
    model = Seeing(way)
    model.embed.padding_idx = VOCAB - 2  # whose row gets no gradient, though blocks read it
    model.embed.requires_grad_(not frozen)
    batch = images(hidden=hidden)
    declare = {"eos_id": VOCAB - 1}
    return report_of(*properties, model=model, batches=batch, loss=answer_loss, declare=declare)


@pytest.mark.parametrize("way", ["scatter", "where", "assigned"])
@pytest.mark.parametrize("frozen", [False, True])
def test_no_id_is_exchanged_in_whose_place_an_image_lies(way: str, frozen: Any):
    report = seeing("rows", "causality", "targets", way=way, frozen=frozen)
    assert report.holds == ("targets", "rows", "causality")


def test_images_that_go_to_other_rows_are_named():
    assert first(seeing("rows", way="assigned across rows"))[0] == "rows"


@pytest.mark.parametrize("hidden", [True, False])
def test_a_place_of_an_image_is_no_target(hidden: Any):
    report = seeing("counted", hidden=hidden)
    assert [v.property for v in report.failures] == ([] if hidden else ["counted"])


def test_images_that_are_not_held_row_by_row_do_not_change_with_them():
    class Joined(Seeing):
        def forward(self, patches: Tensor, ids: Tensor) -> Tensor:
            return super().forward(patches[None], ids)

    batch = images(hidden=True)
    batch["patches"] = batch["patches"].flatten(0, 1)
    report = report_of("rows", "reduction", model=Joined("scatter"), batches=batch, loss=answer_loss)
    assert not report.failures
    assert set(report.untestable) == {"rows", "reduction"}


@pytest.mark.parametrize("places", [(10, 11), (1, 11)])
def test_a_place_of_an_image_is_no_token_that_a_prediction_might_not_see(places: tuple[int, ...]):
    batch = images(hidden=True)
    batch["ids"][:, 1:4] = IMAGE + 1
    batch["ids"][:, places] = IMAGE
    batch["ids"][:, -1] = IMAGE + 2
    batch["patches"] = batch["patches"][:, : int((batch["ids"][0] == IMAGE).sum())]
    batch["labels"] = batch["ids"].masked_fill(batch["ids"] == IMAGE, -100)
    torch.manual_seed(0)
    report = report_of("reach", model=Seeing("scatter"), batches=batch, loss=answer_loss)
    assert report.holds == ("reach",)


class Flat(nn.Module):
    """Reads documents that lie one after another, each of which sees itself alone."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        lengths = offsets.diff()
        documents = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        seen = (documents[:, None] == documents).to(self.head.weight)
        return self.head((seen / seen.sum(1, keepdim=True)) @ self.embed(ids))


@pytest.mark.parametrize("bounds", [(0, 8, 19, 30), None])
def test_documents_one_after_another_are_one_row(bounds: Any):
    ids = torch.randint(1, VOCAB, (30,), generator=torch.Generator().manual_seed(4))
    batch = {"ids": ids, "labels": ids.roll(-1)}
    if bounds is not None:
        batch["offsets"] = torch.tensor(bounds)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        each = torch.arange(len(batch["ids"]) + 1)  # each is a document of its own
        return F.cross_entropy(model(batch["ids"], batch.get("offsets", each)), batch["labels"])

    report = report_of("rows", model=Flat(), batches=batch, loss=loss)
    assert report.holds == (() if bounds else ("rows",))
    assert not report.failures
