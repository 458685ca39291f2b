"""``normlab run translate``: flags to a decoding, and what is written; the search is a stand-in."""

import os
import re

import pytest

from cases import each
from normlab.cli.main import main
from normlab.lab.config import Config, DecodeConfig
from normlab.lab.runs import RunFolder
from normlab.lab.tasks.search import Candidate
from normlab.lab.training import translate as module
from normlab.lab.training.checkpoint import save_checkpoint


def made(path, config):
    """A run's folder with a checkpoint that holds nothing but its step."""
    folder = RunFolder.create(path, config)
    save_checkpoint(folder.best, {"progress": {"step": 1}}, run=folder.id())
    return folder


@pytest.fixture
def run(tmp_path):
    return made(tmp_path / "runs" / "abc123", Config(recipe="pre"))


@pytest.fixture
def standard_input(tmp_path):
    """Put bytes where standard input comes from."""
    saved = os.dup(0)

    def put(content):
        (tmp_path / "stdin").write_bytes(content)
        given = os.open(tmp_path / "stdin", os.O_RDONLY)
        os.dup2(given, 0)
        os.close(given)

    yield put
    os.dup2(saved, 0)
    os.close(saved)


class Reversing:
    """Stands in for both functions; its translations are the lines turned round, after their prefixes."""

    def __init__(self) -> None:
        self.decode = None

    def translate(self, folder, lines, decode, *, prefixes, weights, threads):
        self.weights, self.threads = weights, threads
        return [found[0].text for found in self.n_best(folder, lines, 1, decode, prefixes=prefixes)]

    def n_best(self, folder, lines, count, decode, *, prefixes, weights="best", threads=None):
        self.decode = decode
        return [
            [Candidate(begin + line[::-1] * (k + 1), -0.5 * k) for k in range(count)]
            for line, begin in zip(lines, prefixes, strict=True)
        ]


@pytest.fixture(autouse=True)
def reverse(monkeypatch):
    stand_in = Reversing()
    monkeypatch.setattr(module, "translate", stand_in.translate)
    monkeypatch.setattr(module, "n_best", stand_in.n_best)
    return stand_in


def test_standard_input_to_standard_output(run, reverse, standard_input, capsys):
    standard_input("één\r\ntwee\n".encode())
    assert main(["run", "translate", "abc", "--runs", str(run.path.parent), "--beam", "2"]) == 0
    assert capsys.readouterr().out == "néé\neewt\n"
    assert reverse.decode == DecodeConfig(beam=2)
    assert (reverse.weights, reverse.threads) == ("best", None)


def test_threads_are_passed_on(run, reverse, standard_input):
    standard_input(b"ab\n")
    assert main(["run", "translate", str(run.path), "--threads", "3"]) == 0
    assert reverse.threads == 3


def test_files_to_a_file(run, reverse, tmp_path, capsys):
    for name, text in (("a", "ab\ncd\n"), ("b", "ef\n")):
        (tmp_path / name).write_text(text)
    files = [str(tmp_path / name) for name in ("a", "b")]
    assert main(["run", "translate", str(run.path), *files, "--output", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out").read_text() == "ba\ndc\nfe\n"
    assert capsys.readouterr().out == ""
    assert reverse.decode == DecodeConfig()


def test_nothing_in_gives_nothing_out(run, standard_input, capsys):
    standard_input(b"")
    assert main(["run", "translate", str(run.path)]) == 0
    assert main(["run", "translate", str(run.path), "--n-best", "3"]) == 0
    assert capsys.readouterr().out == ""


def test_text_that_is_not_utf8_is_a_sentence(run, standard_input, capsys):
    standard_input(b"ab\n\xff")
    assert main(["run", "translate", str(run.path)]) == 2
    assert re.search(r"\bline 2: .*0xff .*UTF-8", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("place", "sentence"),
    [
        ("", "--output is empty; name a place, such as --output . for the current directory"),
        (".", "--output is '.', a folder; name a file, or - for standard output"),
        ("none/out", "--output is in none, which is not a folder; type: mkdir -p none"),
    ],
)
def test_a_place_for_no_file_is_told_before_the_work(run, reverse, standard_input, capsys, place, sentence):
    standard_input(b"ab\n")
    assert main(["run", "translate", str(run.path), "--output", place]) == 2
    assert capsys.readouterr() == ("", f"normlab: {sentence}\n")
    assert reverse.decode is None


def test_the_n_best_have_number_score_and_text(run, standard_input, capsys):
    standard_input(b"ab\ncd\n")
    assert main(["run", "translate", str(run.path), "--n-best", "2", "--prefix", "> "]) == 0
    assert capsys.readouterr().out == (
        "1\t0.0000\t> ba\n1\t-0.5000\t> baba\n2\t0.0000\t> dc\n2\t-0.5000\t> dcdc\n"
    )


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("--length-penalty 0 --min-length 3", DecodeConfig(length_penalty=0.0, min_length=3)),
        ("--length-penalty-formula gnmt", DecodeConfig(length_penalty_formula="gnmt")),
        ("--sample", DecodeConfig(sample=True)),
        (
            "--sample --temperature 0.7 --top-k 10 --top-p 0.9 --sample-seed 4",
            DecodeConfig(sample=True, temperature=0.7, top_k=10, top_p=0.9, sample_seed=4),
        ),
    ],
)
def test_flags_are_the_fields_of_a_decoding(run, reverse, standard_input, typed, expected):
    standard_input(b"ab\n")
    assert main(["run", "translate", str(run.path), *typed.split()]) == 0
    assert reverse.decode == expected


def test_what_is_not_typed_is_the_runs_own(run, reverse, standard_input):
    own = DecodeConfig(sample=True, top_k=5, temperature=0.5)
    run = made(run.path.parent / "drawing", Config(decode=own))
    standard_input(b"ab\n")
    assert main(["run", "translate", str(run.path), "--top-k", "0"]) == 0
    assert reverse.decode == DecodeConfig(sample=True, temperature=0.5)
    assert main(["run", "translate", str(run.path), "--beam", "2"]) == 0
    assert reverse.decode == DecodeConfig(beam=2), "a beam means a search"


IDLE = (
    "top_k is 5, which affects only samples; add --sample (decode.sample in a configuration), or "
    "leave top_k at 0"
)
DRAWN = "and weighs what a search finds, but outputs are sampled; leave it out, or search"
NO_BEAM = (
    "--beam is 4, but outputs are sampled, which needs no beam; leave out --beam, and for several samples of "
    "each line type --n-best 4"
)


@pytest.mark.slow
@each(
    ("typed", "sentence"),
    [
        ("--beam 0", "beam must be at least 1, got 0"),
        ("--length-penalty -1", "length_penalty must be at least 0, got -1.0"),
        ("--length-penalty 1e300", "length_penalty must be below 100, got 1e+300"),
        (
            "--sample --length-penalty 2",
            f"--length-penalty is 2.0 {DRAWN}: --beam 5 --length-penalty 2.0 without --sample",
        ),
        (
            "--sample --length-penalty-formula gnmt",
            (
                f"--length-penalty-formula is gnmt {DRAWN}: "
                "--beam 5 --length-penalty-formula gnmt without --sample"
            ),
        ),
        ("--min-length -2", "min_length must be at least 0, got -2"),
        ("--sample --temperature 0", "temperature must be at least 1e-100, got 0.0"),
        ("--sample --temperature inf", "temperature must be finite, got inf"),
        ("--sample --top-k -1", "top_k must be at least 0, got -1"),
        ("--sample --top-p 0", "top_p must be above 0, got 0.0"),
        ("--sample --top-p 1.5", "top_p must be at most 1, got 1.5"),
        ("--sample --sample-seed -1", "sample_seed must be at least 0, got -1"),
        ("--top-k 5", IDLE),
        ("--sample --beam 4", NO_BEAM),
    ],
)
def test_every_bad_value_gets_a_sentence(run, standard_input, capsys, typed, sentence):
    standard_input(b"ab\n")
    assert main(["run", "translate", str(run.path), *typed.split()]) == 2
    assert capsys.readouterr() == ("", f"normlab: {sentence}\n")
