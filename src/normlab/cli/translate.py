"""``normlab run translate``, ``sample`` and ``score``: text with a run's weights, and scores of any text."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes, Positional, arg

from normlab.base.files import write_output
from normlab.base.io import Count, Size, flag_name
from normlab.base.units import printable
from normlab.cli import errors
from normlab.cli.options import RunFlags, Switch, flags_of
from normlab.errors import UserError
from normlab.lab.config import DecodeConfig
from normlab.lab.runs.folder import named_output

DecodeFlags: Any = flags_of(DecodeConfig, optional=True)


@dataclass(frozen=True, kw_only=True)
class TranslateCommand(RunFlags):
    """Translate files, or standard input, with the weights of a run.

    By default with the run's own search settings and the weights that were tested: the average of the last
    checkpoints if the run has one, otherwise the best.
    """

    files: Annotated[Positional[tuple[str, ...]], arg(metavar="FILE")] = ()
    """Text files with one sentence per line; none or -: standard input."""
    step: int | None = None
    """For a run with --keep-checkpoints: use the weights after this step."""
    threads: int | None = None
    """Threads; 0: all cores. By default as many as the run had."""
    output: str = "-"
    """File for the translations; -: standard output."""
    n_best: int | None = None
    """Print this many translations per line: line number, score and text, separated by tabs."""
    typed: Annotated[FlagCreatePairsOff[OmitArgPrefixes[DecodeFlags]], arg(name="")] = DecodeFlags()
    prefix: str = ""
    """Text with which every translation begins."""

    def decode(self, of_run: DecodeConfig) -> DecodeConfig:
        """The run's own decoding with what was typed; typing a beam means searching."""
        typed = {
            name: value
            for name, value in vars(self.typed).items()
            if value is not None and value is not False  # as flags that were not typed; 0 may have been
        }
        if "beam" in typed and "sample" not in typed:
            of_run = of_run.searching()
        decode = replace(of_run, **typed)
        if decode.sample and "beam" in typed:
            raise UserError(
                f"--beam is {decode.beam}, but outputs are sampled, which needs no beam; leave out --beam, "
                f"and for several samples of each line type --n-best {decode.beam}"
            )
        for name in ("length_penalty", "length_penalty_formula"):
            if name in typed and decode.sample:
                flag = flag_name(name)
                raise UserError(
                    f"{flag} is {typed[name]} and weighs what a search finds, but outputs are sampled; leave "
                    f"it out, or search: --beam 5 {flag} {typed[name]} without --sample"
                )
        return decode

    def _weights(self) -> str | int:
        if self.step is not None and self.weights:
            raise UserError(
                f"--step is {self.step} and --weights {self.weights}, and both name weights; leave one out"
            )
        return self.weights or "" if self.step is None else self.step

    def _require_place(self) -> None:
        """Raise an error before any work is done if the output file cannot be written."""
        place = Path(self.output)
        if self.output == "-":
            return
        named_output(place, _files_of(self.files or ("-",)))
        if place.is_dir():
            raise UserError(f"--output is {self.output!r}, a folder; name a file, or - for standard output")
        if not place.parent.is_dir():
            raise FileNotFoundError(
                f"--output is in {place.parent}, which is not a folder; type: mkdir -p {place.parent}"
            )

    def run(self) -> None:
        from normlab.lab.training.translate import n_best, translate, translation_of
        from normlab.lab.training.weights import weights_of

        self._require_place()
        folder = self.folder()
        decode = self.decode(translation_of(folder).decode)
        lines = [line for name in self.files or ("-",) for line in _lines_of(name)]
        weights = weights_of(folder, self._weights())
        errors.write(f"translating with {weights.description}")
        how: dict[str, Any] = {
            "prefixes": [self.prefix] * len(lines),
            "weights": weights.name,
            "threads": self.threads,
        }
        if self.n_best is None:
            written = translate(folder.path, lines, decode, **how)
        else:
            written = list[str]()
            candidates_of_lines = n_best(folder.path, lines, self.n_best, decode, **how)
            for number, candidates in enumerate(candidates_of_lines, start=1):
                written += [f"{number}\t{c.score:z.4f}\t{c.text}" for c in candidates]
        text = "".join(f"{line}\n" for line in written)
        if self.output == "-":
            sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
        else:
            write_output(Path(self.output), text)


@dataclass(frozen=True, kw_only=True)
class SampleCommand(RunFlags):
    """Continue a text with the weights of a language model.

    By default with the weights that were tested, and each token drawn from the model's own distribution.
    """

    text: Annotated[Positional[str], arg(metavar="TEXT")] = ""
    """How the text begins; -: standard input."""
    tokens: Size = 100
    """Number of tokens to add."""
    samples: Size = 1
    """Number of continuations, each with a seed of its own."""
    temperature: float = 1.0
    """Below 1, samples are closer to the likeliest continuation; 0 gives that one."""
    top_k: int = 0
    """Number of likeliest tokens to draw from: 1 for the likeliest alone, 0 for all."""
    top_p: float = 1.0
    """Draw from the fewest likeliest tokens that together have this probability."""
    seed: int = 1
    """Seed of the samples."""
    window: Count = 0
    """Number of earlier tokens that each token sees; 0: as many as in training."""

    def run(self) -> None:
        from normlab.lab.training.translate import sample

        beginning = sys.stdin.read() if self.text == "-" else self.text
        decode = DecodeConfig(
            sample=True,
            temperature=self.temperature or 1.0,
            top_k=self.top_k if self.temperature else 1,
            top_p=self.top_p,
            sample_seed=self.seed,
        )
        how: dict[str, Any] = {"tokens": self.tokens, "samples": self.samples, "window": self.window}
        continuations = sample(self.folder(), beginning, decode, weights=self.weights or "", **how)
        text = "\n---\n".join(f"{beginning}{continuation}" for continuation in continuations)
        print(printable(text) if sys.stdout.isatty() else text)


@dataclass(frozen=True)
class ScoreCommand:
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
        from normlab.lab.tasks.scores import against, score

        names = (self.hypotheses, self.references, self.against)
        if names.count("-") > 1:
            raise UserError("- is standard input, which can be read only once; give the other texts as files")
        hypotheses, references = _lines_of(self.hypotheses), _lines_of(self.references)
        scores = score(hypotheses, references, tokenised=self.tokenised, target_lang=self.target_lang)
        lines = [
            f"{name:<20} {value:.2f}" if isinstance(value, float) else f"{name:<20} {value}"
            for name, value in vars(scores).items()
        ]
        if self.against:
            baseline = _lines_of(self.against)
            difference = against(hypotheses, baseline, references, target_lang=self.target_lang)
            lines.append(f"minus {self.against}: {difference}")
        print("\n".join(lines))


def _files_of(names: Sequence[str]) -> list[Path]:
    """Return the files that ``_lines_of`` reads for these names."""
    from normlab.lab.data.sources import file_of, open_lines

    texts = [open_lines("/dev/stdin" if name == "-" else name) for name in names]
    return [path for path in map(file_of, texts) if path is not None]


def _lines_of(name: str) -> list[str]:
    """Return the lines of a file or a column (see ``data.sources``); - is standard input."""
    from normlab.lab.data.sources import open_lines

    return list(open_lines("/dev/stdin" if name == "-" else name))
