"""What a loss asks for, read from its gradient at the logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from diagnosis.studies.test_preflight import TEXT, VOCAB, Gpt, Labelled
from normlab.diagnosis import diagnose
from normlab.diagnosis.reading.batches import lengths
from normlab.diagnosis.reading.subject import Subject
from normlab.diagnosis.studies.targets import targets


def entropy(model, batch, **options):
    return F.cross_entropy(model(**batch).flatten(0, 1), batch["labels"].flatten(), **options)


def measured(ids, labels, **options):
    batch = {"ids": ids, "labels": labels}
    subject = Subject.of(Labelled(), batch, lambda model, given: entropy(model, given, **options))
    return targets(subject).rows[0]


@pytest.mark.parametrize(("offset", "found"), [(1, None), (0, "shifted_labels"), (2, "shifted_labels")])
def test_labels_that_are_not_the_next_tokens_are_named(offset, found):
    ids, labels = TEXT[:, :-2], TEXT[:, offset : TEXT.shape[1] - 2 + offset]
    row = measured(ids, labels)
    assert row[f"offset_{offset}"] == 1.0
    assert (row["counted"], row["positions"]) == (ids.numel(), ids.numel())
    assert row["weight"] == pytest.approx(1.0, rel=1e-4)
    batch = {"ids": ids, "labels": labels}
    cause = diagnose(Labelled(), batch, loss=entropy, lr=1e-3, preset="preflight").cause
    assert (cause.name if cause else None) == found
    assert cause is None or cause.numbers["offset"] == offset


def test_a_sum_is_as_many_times_heavier_as_there_are_tokens():
    row = measured(TEXT[:, :-1], TEXT[:, 1:], reduction="sum")
    assert row["weight"] == pytest.approx(row["counted"], rel=1e-4)
    batch = {"ids": TEXT[:, :-1], "labels": TEXT[:, 1:]}
    found = diagnose(
        Labelled(), batch, loss=lambda m, b: entropy(m, b, reduction="sum"), lr=1e-3, preset="preflight"
    )
    assert found.cause is not None
    assert found.cause.name == "summed_loss"


def test_label_smoothing_and_ignored_positions_leave_the_targets_as_they_are():
    labels = TEXT[:, 1:].clone()
    labels[0, :5] = -100
    row = measured(TEXT[:, :-1], labels, label_smoothing=0.1)
    assert row["offset_1"] == 1.0
    assert row["counted"] == labels.numel() - 5


def test_padding_that_is_counted_is_a_warning_and_padding_that_is_ignored_is_none():
    text = TEXT.clone().clamp(min=1)
    text[0, -4:] = 0
    shares = {}
    for name, options in (("counted", {}), ("ignored", {"ignore_index": 0})):
        shares[name] = measured(text[:, :-1], text[:, 1:], **options)["padding"]
    assert shares == {"counted": pytest.approx(3 / text[:, 1:].numel()), "ignored": 0.0}


def test_a_loss_without_logits_of_tokens_has_no_targets():
    batch = {"ids": TEXT[:, :-1], "labels": TEXT[:, 1:]}
    squared = Subject.of(Gpt(), (TEXT,), lambda model, _: model(TEXT).mean())
    assert targets(squared).rows[0]["offset_1"] is not None
    hidden = Subject.of(Labelled(), batch, lambda model, given: model(**given)[:, 0].square().mean())
    assert all((targets(hidden).rows[0][f"offset_{k}"] or 0.0) < 0.9 for k in (0, 1, 2))


def test_padding_is_what_rows_end_with_and_hold_nowhere_else():
    rows = torch.tensor([[5, 6, 7, 0, 0], [5, 6, 7, 8, 0], [9, 5, 6, 7, 8]])
    padding, sizes = lengths(rows)
    assert padding == 0
    assert sizes.tolist() == [3, 4, 5]
    inside = torch.tensor([[5, 0, 7, 0, 0], [5, 6, 7, 8, 9]])
    assert lengths(inside)[0] is None
    assert lengths(torch.tensor([[4, 4, 4, 4]]))[0] is None


@pytest.mark.parametrize(("smoothing", "found"), [(0.0, None), (0.1, None), (0.9, "smoothed_targets")])
def test_the_weight_of_a_target_is_read_whatever_the_weight_of_the_loss(smoothing, found):
    options = {"label_smoothing": smoothing, "reduction": "sum"}
    row = measured(TEXT[:, :-1], TEXT[:, 1:], **options)
    assert row["confidence"] == pytest.approx(1 - smoothing + smoothing / VOCAB, abs=1e-3)
    assert row["alone"] == 0.0
    options["reduction"] = "mean"
    batch = {"ids": TEXT[:, :-1], "labels": TEXT[:, 1:]}
    cause = diagnose(
        Labelled(), batch, loss=lambda m, b: entropy(m, b, **options), lr=1e-3, preset="preflight"
    ).cause
    assert (cause.name if cause else None) == found


def test_logits_that_are_taken_for_log_probabilities_are_named():
    def likelihood(model, batch):
        return F.nll_loss(model(**batch).flatten(0, 1), batch["labels"].flatten())

    batch = {"ids": TEXT[:, :-1], "labels": TEXT[:, 1:]}
    found = diagnose(Labelled(), batch, loss=likelihood, lr=1e-3, preset="preflight")
    assert found.cause is not None
    assert (found.cause.name, found.cause.severity) == ("unnormalised_loss", "problem")


def test_the_confidence_of_a_loss_that_is_no_cross_entropy_is_not_known():
    batch = {"ids": TEXT[:, :-1], "labels": TEXT[:, 1:]}
    squared = Subject.of(Labelled(), batch, lambda model, given: model(**given).square().mean())
    row = targets(squared).rows[0]
    assert row["confidence"] is None
    assert row["alone"] == 0.0


def masked(share_kept):
    """A text whose every seventh token is masked, and labels of these and of a share of the others."""
    ids = TEXT[:, :-1].clone()
    hidden = torch.arange(ids.numel()).view_as(ids) % 7 == 0
    kept = torch.rand(ids.shape, generator=torch.Generator().manual_seed(0)) < share_kept
    labels = ids.masked_fill(~hidden & ~kept, -100)
    return {"ids": ids.masked_fill(hidden, 3), "labels": labels}


@pytest.mark.parametrize(("share_kept", "found"), [(0.0, False), (0.1, False), (1.0, True)])
def test_a_loss_that_is_for_copying_is_named_where_words_are_masked_too(share_kept, found):
    batch = masked(share_kept)
    named = diagnose(Labelled(), batch, loss=entropy, lr=1e-3, preset="preflight").findings
    assert ("shifted_labels" in [f.name for f in named]) == found


@pytest.mark.parametrize("causal", [True, False])
def test_a_causal_model_of_masked_words_is_named(causal):
    model = Labelled()
    for one in model.gpt.layers:
        one.attention.causal = causal
    named = [f.name for f in diagnose(model, masked(0.0), loss=entropy, lr=1e-3, preset="preflight").findings]
    assert ("one_sided" in named) == causal
    assert "causal_leak" not in named


class Configuration:
    eos_token_id = 2


class Masked(Labelled):
    """Takes a mask, which a causal model that is padded on the right does not need."""

    def forward(self, ids, labels, attention_mask):
        return super().forward(ids, labels)


@pytest.mark.parametrize(("ignored", "found"), [(-100, False), (2, True)])
def test_an_end_of_text_that_no_position_is_asked_for_is_a_warning(ignored, found):
    text = TEXT.clone().clamp(min=3)
    text[0, -5:] = text[1, -3:] = 2
    model = Masked()
    model.config = Configuration()
    mask = torch.ones(text[:, :-1].shape, dtype=torch.int64)
    mask[0, -3:] = mask[1, -1:] = 0
    batch = {"ids": text[:, :-1], "labels": text[:, 1:], "attention_mask": mask}
    row = targets(Subject.of(model, batch, lambda m, b: entropy(m, b, ignore_index=ignored))).rows[0]
    assert row["ends"] == (0 if found else 8)
    named = diagnose(
        model, batch, loss=lambda m, b: entropy(m, b, ignore_index=ignored), lr=1e-3, preset="preflight"
    )
    assert ("no_end" in [f.name for f in named.findings]) == found


def test_a_causal_model_that_answers_at_the_end_is_sound():
    ids = TEXT[:, :-1].clone()
    ids[:, -4:] = 3  # asked for what stands before
    labels = torch.full_like(ids, -100)
    labels[:, -4:] = ids[:, :4]
    named = diagnose(Labelled(), {"ids": ids, "labels": labels}, loss=entropy, lr=1e-3, preset="preflight")
    assert "one_sided" not in [f.name for f in named.findings]


def test_a_loss_of_each_class_by_itself_has_no_confidence():
    def binary(model, batch):
        hot = F.one_hot(batch["labels"], VOCAB).float()
        return F.binary_cross_entropy_with_logits(model(**batch), hot)

    batch = {"ids": TEXT[:, :-1], "labels": TEXT[:, 1:]}
    assert targets(Subject.of(Labelled(), batch, binary)).rows[0]["confidence"] is None


class LossAlone(Gpt):
    """Puts out its loss alone, of logits that it takes for log-probabilities or not."""

    def __init__(self, loss):
        super().__init__()
        self.loss = loss

    def forward(self, ids, labels):
        return self.loss(super().forward(ids).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize(("loss", "found"), [(F.cross_entropy, None), (F.nll_loss, "unnormalised_loss")])
def test_the_loss_of_a_model_that_puts_out_nothing_else_is_looked_into(loss, found):
    batch = {"ids": TEXT[:, :-1], "labels": TEXT[:, 1:]}
    diagnosis = diagnose(LossAlone(loss), batch, lr=1e-3, preset="preflight")
    assert diagnosis.tables["targets"].rows[0]["offset_1"] == 1.0
    assert (diagnosis.cause.name if diagnosis.cause else None) == found
