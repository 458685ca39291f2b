"""A process in which nothing that normlab's extras bring can be imported.

``python bare.py measure FOLDER`` runs the instruments on a tiny model: their results go to
``FOLDER/NAME.json``, the pages that they write to ``FOLDER/measured``. ``python bare.py draw FOLDER`` draws
the pages of such results in ``FOLDER/drawn``, and writes down which modules that loads.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

EXTRAS = {
    *("altair", "polars", "vl_convert"),
    *("tokenizers", "safetensors", "sacrebleu", "sacremoses", "sentencepiece"),
    *("num2words", "babel", "pylatexenc"),
    *("transformers", "datasets", "accelerate", "lightning", "ray", "tensorboard"),
}
"""What the extras bring."""


class NoExtras:
    """A finder of modules that refuses what the extras bring."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] in EXTRAS:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def measure(folder: Path) -> None:
    import torch
    from torch import nn

    import normlab
    from normlab.base.io import to_plain
    from trials.tiny import VOCAB, Text, loss_of

    class Decoder(nn.Module):
        """A Transformer without the mask that keeps it from seeing later tokens."""

        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
            self.embed, self.head = nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB)
            self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(self.embed(ids)))

    torch.manual_seed(0)
    model, text = Decoder(), Text(number=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch, pages = text.batches[0], folder / "measured"
    step = {"loss": loss_of, "optimizer": optimizer}

    report = normlab.check(model, batch, **step)
    trials = normlab.trial(normlab.Setup(model, text, **step), steps=16, rates=(1e-3, 1e-2, 1.0))
    diagnosis = normlab.diagnose(model, batch, **step, preset="cheap")
    with normlab.watch(model, optimizer, out=folder, every_steps=2, probes="cheap") as watch:
        for ids in text:
            optimizer.zero_grad()
            loss = loss_of(model, ids)
            watch.loss(loss)
            loss.backward()
            optimizer.step()

    pages.mkdir()
    report.page(pages / "check.html")
    trials.page(pages / "trial.html")
    diagnosis.page(pages / "diagnosis.html")
    watch.page.rename(pages / "watch.html")
    results = {"check": report.to_dict(), "trial": trials.to_dict(), "diagnosis": diagnosis.to_plain()}
    for name, result in results.items():
        (folder / f"{name}.json").write_text(json.dumps(to_plain(result), allow_nan=False), encoding="utf-8")


def draw(folder: Path) -> None:
    before = set(sys.modules)
    write_pages(folder, folder / "drawn")
    loaded = sorted(set(sys.modules) - before)
    (folder / "loaded.json").write_text(json.dumps(loaded), encoding="utf-8")


def write_pages(folder: Path, pages: Path) -> None:
    """Write the pages of the results in a folder."""
    from normlab.report.check import check_page
    from normlab.report.diagnosis import diagnosis_page
    from normlab.report.transfer import transfer_page
    from normlab.report.trial import trial_page
    from normlab.report.watch import write_probes_page

    drawn = {"check": check_page, "trial": trial_page, "diagnosis": diagnosis_page, "transfer": transfer_page}
    for name, page_of in drawn.items():
        page_of(result(folder, name)).write(pages / f"{name}.html")
    write_probes_page(folder / "watch.jsonl", pages / "watch.html")


def result(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))


if __name__ == "__main__":
    sys.meta_path.insert(0, NoExtras())
    {"measure": measure, "draw": draw}[sys.argv[1]](Path(sys.argv[2]))
