import datetime
import itertools
import os
import subprocess
import sys

import pytest
from num2words import num2words

from cases import each
from normlab.lab.data import builtin
from normlab.lab.data.builtin import HELD_OUT, LARGEST, TOPICS, generate, parse

LANGUAGES = ("en", "de", "fr", "vi")


@pytest.mark.slow
@each("kind", [*TOPICS, "mixed"])
@each(("source", "target"), list(itertools.permutations(LANGUAGES, 2)))
def test_every_kind_in_every_direction(kind, source, target):
    splits = generate(f"{kind}-{source}-{target}", pairs=50, seed=3)
    assert [len(pairs) for pairs in (splits.train, splits.dev, splits.test)] == [50, HELD_OUT, HELD_OUT]
    for pairs in (splits.train, splits.dev, splits.test):
        assert len(pairs.source) == len(pairs.target)
        for line in (*pairs.source, *pairs.target):
            assert line.strip() == line
            assert line
            assert not any(character.isdigit() or character in "\n\r\t" for character in line), line


def test_held_out_text_is_disjoint_and_without_repeats():
    splits = generate("amounts-en-de", pairs=5000, seed=0)
    train, dev, test = (set(pairs.source) for pairs in (splits.train, splits.dev, splits.test))
    assert len(dev) == len(test) == HELD_OUT
    assert not dev & test
    assert not train & (dev | test)


def test_seeds_and_sizes():
    small, large = (generate("mixed-en-de", pairs=pairs, seed=1) for pairs in (10, 300))
    assert small.dev == large.dev
    assert small.test == large.test
    assert small.train.source == large.train.source[:10]
    other = generate("mixed-en-de", pairs=10, seed=2)
    assert other.train != small.train
    assert not set(other.test.source) & set(small.test.source[:50])


def test_the_same_in_another_process_whatever_its_hash_seed():
    program = (
        "import hashlib; from normlab.lab.data.builtin import generate;"
        "print(hashlib.sha256(repr(generate('mixed-de-fr', pairs=100, seed=5)).encode()).hexdigest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1


@each("language", list(TOPICS["numbers"].write))
def test_numbers_are_those_of_num2words(language):
    write = TOPICS["numbers"].write[language]
    for n in [*range(130), 999, 1000, 1001, 80_000, 200_000, *range(3, LARGEST, 98_765), LARGEST]:
        assert write(n) == num2words(n, lang=language)


def test_dates():
    day = datetime.date(1987, 4, 1)
    assert {language: write(day) for language, write in TOPICS["dates"].write.items()} == {
        "en": "Wednesday, April first, nineteen eighty-seven",
        "de": "Mittwoch, der erste April neunzehnhundertsiebenundachtzig",
        "fr": "mercredi premier avril mille neuf cent quatre-vingt-sept",
        "vi": "Thứ Tư ngày một tháng tư năm một nghìn chín trăm tám mươi bảy",
    }


@pytest.mark.parametrize(
    ("hour", "minute", "expected"),
    [
        (0, 5, ("twelve oh-five AM", "null Uhr fünf", "zéro heure cinq", "không giờ năm phút")),
        (1, 1, ("one oh-one AM", "ein Uhr eins", "une heure une", "một giờ một phút")),
        (12, 0, ("twelve PM", "zwölf Uhr", "douze heures", "mười hai giờ")),
        (
            21,
            31,
            (
                "nine thirty-one PM",
                "einundzwanzig Uhr einunddreißig",
                "vingt et une heures trente et une",
                "hai mươi mốt giờ ba mươi mốt phút",
            ),
        ),
    ],
)
def test_times(hour, minute, expected):
    time = builtin._Time(weekday=5, day=21, hour=hour, minute=minute)
    english, german, french, vietnamese = expected
    assert {language: write(time) for language, write in TOPICS["times"].write.items()} == {
        "en": f"Saturday the twenty-first at {english}",
        "de": f"Samstag, der einundzwanzigste, um {german}",
        "fr": f"samedi vingt et un à {french}",
        "vi": f"{vietnamese} Thứ Bảy ngày hai mươi mốt",
    }


def test_amounts():
    assert {language: write((21_302, "USD")) for language, write in TOPICS["amounts"].write.items()} == {
        "en": "twenty-one thousand, three hundred and two US dollars",
        "de": "einundzwanzigtausenddreihundertzwei US-Dollar",
        "fr": "vingt et un mille trois cent deux dollars des États-Unis",
        "vi": "hai mươi mốt nghìn ba trăm lẻ hai đô la Mỹ",
    }


@each(
    ("name", "message"),
    [
        ("sonnets-en-de", "a kind of numbers, dates, times, amounts, mixed"),
        ("numbers", "its name is <kind>-<source>-<target>"),
        ("dates-en-nl", "dates .*'nl'; pass one of en, de, fr, vi"),
        ("mixed-xx-de", "language 'xx'; pass one of en, de, fr, vi"),
        ("numbers-en-en", "are one language"),
    ],
)
def test_unknown_names_are_refused_with_what_there_is(name, message):
    with pytest.raises(ValueError, match=message):
        parse(name)


def test_no_pairs_are_refused():
    with pytest.raises(ValueError, match="1 or more"):
        generate("numbers-en-de", pairs=0, seed=0)
