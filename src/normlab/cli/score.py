"""``normlab score``: translations of any origin against references."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tyro.conf import Positional, arg

from normlab.cli.common import Switch, lines_of
from normlab.errors import UserError


@dataclass(frozen=True)
class Score:
    """Score translations against references with sacreBLEU: BLEU, chrF and tokenised BLEU."""

    hypotheses: Annotated[Positional[str], arg(metavar="TRANSLATIONS")]
    """File with one translation per line; -: standard input."""
    references: Annotated[Positional[str], arg(metavar="REFERENCES")]
    """File with one reference per line."""
    tokenised: Switch = False
    """The text is already split into tokens by spaces (by Moses, say): tokenised BLEU takes it as it is."""
    target_lang: str = ""
    """Language of the text, such as zh: sacreBLEU has its own tokenizers for zh, ja and ko."""
    against: str = ""
    """Other translations of the same text, as a baseline for sacreBLEU's paired tests of BLEU."""

    def run(self) -> None:
        from normlab.tasks.scores import against, score

        given = (self.hypotheses, self.references, self.against)
        if given.count("-") > 1:
            raise UserError("- is standard input, which is read once; give the other texts as files")
        hypotheses, references = lines_of(self.hypotheses), lines_of(self.references)
        scores = score(hypotheses, references, tokenised=self.tokenised, target_lang=self.target_lang)
        said = [
            f"{name:<20} {value:.2f}" if isinstance(value, float) else f"{name:<20} {value}"
            for name, value in vars(scores).items()
        ]
        if self.against:
            baseline = lines_of(self.against)
            found = against(hypotheses, baseline, references, target_lang=self.target_lang)
            said.append(f"minus {self.against}: {found}")
        print("\n".join(said))
