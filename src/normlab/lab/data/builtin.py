"""The built-in corpus: numbers, dates, times and amounts written out by num2words and Babel, then translated.

It is real language, endless and seeded: small models can learn it, and can fail to learn it.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from functools import cache, lru_cache, partial
from random import Random
from typing import Any, NamedTuple

from normlab.base.model_config import derive
from normlab.errors import UserError
from normlab.lab.data.text import Pairs

HELD_OUT = 500
"""Number of pairs in the dev text and in the test text."""
LARGEST = 10_000_000
"""The largest number that is written out."""
CURRENCIES = ("EUR", "USD", "CHF", "JPY", "AUD", "CAD", "MXN", "KRW", "VND", "CNY")
"""Currencies whose names agree with "one" and "twenty-one" in the languages below."""


@dataclass(frozen=True)
class Splits:
    """Train, dev and test text."""

    train: Pairs
    dev: Pairs
    test: Pairs


@lru_cache(maxsize=1)  # a worker trains many configurations on one corpus
def generate(name: str, *, pairs: int, seed: int) -> Splits:
    """Generate ``pairs`` training pairs and 500 pairs each of dev and test of the corpus
    ``<kinds>-<source>-<target>``.

    No source in dev or test occurs twice or in training, and both are the same for any ``pairs``. Training
    text may repeat itself. With the same versions of num2words and Babel, the same arguments give the same
    text everywhere. Raises UserError for an unknown kind or language, with those that exist.
    """
    kinds, source, target = parse(name)
    if pairs < 1:
        raise UserError(f"{pairs} training pairs were asked for; pass 1 or more")
    target_of: dict[str, str] = {}
    rng = Random(derive(seed, f"{name} held out"))
    while len(target_of) < 2 * HELD_OUT:
        target_of.setdefault(*_pair(rng, kinds, source, target))
    train: list[tuple[str, str]] = []
    rng = Random(derive(seed, f"{name} train"))
    while len(train) < pairs:
        pair = _pair(rng, kinds, source, target)
        if pair[0] not in target_of:
            train.append(pair)
    held_out = list(target_of.items())
    return Splits(_unzip(train), _unzip(held_out[:HELD_OUT]), _unzip(held_out[HELD_OUT:]))


def parse(name: str) -> tuple[tuple[str, ...], str, str]:
    """Return kinds, source and target language of a corpus name."""
    parts = name.split("-")
    known = (*TOPICS, "mixed")
    if len(parts) != 3 or parts[0] not in known:
        raise UserError(
            f"there is no built-in corpus {name!r}; its name is <kind>-<source>-<target> with a kind of "
            f"{', '.join(known)}, for example mixed-en-de"
        )
    kind, source, target = parts
    kinds = tuple(TOPICS) if kind == "mixed" else (kind,)
    first, *others = kinds
    languages = [lang for lang in TOPICS[first].write if all(lang in TOPICS[other].write for other in others)]
    for language in (source, target):
        if language not in languages:
            raise UserError(
                f"the built-in corpus {kind} has no language {language!r}; pass one of {', '.join(languages)}"
            )
    if source == target:
        raise UserError(f"source and target of {name!r} are one language; pass two of {', '.join(languages)}")
    return kinds, source, target


def _pair(rng: Random, kinds: tuple[str, ...], source: str, target: str) -> tuple[str, str]:
    kind = TOPICS[kinds[_below(rng, len(kinds))]]
    value = kind.draw(rng)
    return kind.write[source](value), kind.write[target](value)


def _below(rng: Random, limit: int) -> int:
    """Draw below ``limit``. Only ``random()`` is guaranteed to give the same values in every Python."""
    return int(rng.random() * limit)


def _unzip(pairs: list[tuple[str, str]]) -> Pairs:
    return Pairs([source for source, _ in pairs], [target for _, target in pairs])


@cache
def _converter(language: str) -> Any:
    from num2words import CONVERTER_CLASSES

    converter: Any = copy.copy(CONVERTER_CLASSES[language])
    if hasattr(converter, "cards"):
        # Words are looked up from 10**600 downwards; without the unused ones this is ten times as fast.
        words = converter.cards.items()
        converter.cards = type(converter.cards)((n, word) for n, word in words if n <= LARGEST)
    return converter


def _cardinal(n: int, language: str) -> str:
    return _converter(language).to_cardinal(n)


@cache
def _locale(language: str) -> Any:
    from babel import Locale

    return Locale(language)


def _weekday(weekday: int, language: str) -> str:
    return _locale(language).days["format"]["wide"][weekday]


def _month(month: int, language: str) -> str:
    return _locale(language).months["format"]["wide"][month]


def _draw_date(rng: Random) -> date:
    first, last = date(1800, 1, 1).toordinal(), date(2099, 12, 31).toordinal()
    return date.fromordinal(first + _below(rng, last - first + 1))


def _date_en(day: date) -> str:
    weekday, month, number = _weekday(day.weekday(), "en"), _month(day.month, "en"), _converter("en")
    return f"{weekday}, {month} {number.to_ordinal(day.day)}, {number.to_year(day.year)}"


def _date_de(day: date) -> str:
    weekday, month, number = _weekday(day.weekday(), "de"), _month(day.month, "de"), _converter("de")
    return f"{weekday}, der {number.to_ordinal(day.day)} {month} {number.to_year(day.year)}"


def _date_fr(day: date) -> str:
    weekday, month = _weekday(day.weekday(), "fr"), _month(day.month, "fr")
    return f"{weekday} {_day_fr(day.day)} {month} {_converter('fr').to_year(day.year)}"


def _day_fr(day: int) -> str:
    return _converter("fr").to_ordinal(1) if day == 1 else _cardinal(day, "fr")


def _date_vi(day: date) -> str:
    weekday, number = _weekday(day.weekday(), "vi"), _cardinal(day.day, "vi")
    month = "tư" if day.month == 4 else _cardinal(day.month, "vi")
    return f"{weekday} ngày {number} tháng {month} năm {_cardinal(day.year, 'vi')}"


class _Time(NamedTuple):
    """An appointment: a weekday (from Monday = 0), a day of the month, hour and minute."""

    weekday: int
    day: int
    hour: int
    minute: int


def _draw_time(rng: Random) -> _Time:
    return _Time(_below(rng, 7), 1 + _below(rng, 31), _below(rng, 24), _below(rng, 60))


def _time_en(time: _Time) -> str:
    half = _locale("en").periods["am" if time.hour < 12 else "pm"]
    clock = [_cardinal(time.hour % 12 or 12, "en"), half]
    if time.minute:
        clock.insert(1, ("oh-" if time.minute < 10 else "") + _cardinal(time.minute, "en"))
    day = _converter("en").to_ordinal(time.day)
    return f"{_weekday(time.weekday, 'en')} the {day} at {' '.join(clock)}"


def _time_de(time: _Time) -> str:
    hour = "ein" if time.hour == 1 else _cardinal(time.hour, "de")
    minute = f" {_cardinal(time.minute, 'de')}" if time.minute else ""
    day = _converter("de").to_ordinal(time.day)
    return f"{_weekday(time.weekday, 'de')}, der {day}, um {hour} Uhr{minute}"


def _time_fr(time: _Time) -> str:
    def feminine(n: int) -> str:
        return re.sub("un$", "une", _cardinal(n, "fr"))

    hours = "heure" if time.hour < 2 else "heures"
    minute = f" {feminine(time.minute)}" if time.minute else ""
    return f"{_weekday(time.weekday, 'fr')} {_day_fr(time.day)} à {feminine(time.hour)} {hours}{minute}"


def _time_vi(time: _Time) -> str:
    minute = f"{_cardinal(time.minute, 'vi')} phút " if time.minute else ""
    weekday, day = _weekday(time.weekday, "vi"), _cardinal(time.day, "vi")
    return f"{_cardinal(time.hour, 'vi')} giờ {minute}{weekday} ngày {day}"


def _draw_amount(rng: Random) -> tuple[int, str]:
    """Draw an amount up to hundreds of thousands, of at least 2: the currency is in the plural."""
    limit = 10 ** (2 + _below(rng, 5))
    return 2 + _below(rng, limit - 2), CURRENCIES[_below(rng, len(CURRENCIES))]


@cache
def _currency(code: str, language: str) -> str:
    from babel.numbers import get_currency_name

    return get_currency_name(code, count=5, locale=language)


def _amount(amount: tuple[int, str], language: str) -> str:
    return f"{_cardinal(amount[0], language)} {_currency(amount[1], language)}"


@dataclass(frozen=True)
class _Kind:
    """One kind of sentence: a function that draws a value, and for each language one that writes it."""

    draw: Callable[[Random], Any]
    write: dict[str, Callable[[Any], str]]


def _in_languages(write: Callable[..., str], languages: str) -> dict[str, Callable[[Any], str]]:
    return {language: partial(write, language=language) for language in languages.split()}


TOPICS = {
    "numbers": _Kind(lambda r: _below(r, LARGEST + 1), _in_languages(_cardinal, "en de fr vi es it nl pt")),
    "dates": _Kind(_draw_date, {"en": _date_en, "de": _date_de, "fr": _date_fr, "vi": _date_vi}),
    "times": _Kind(_draw_time, {"en": _time_en, "de": _time_de, "fr": _time_fr, "vi": _time_vi}),
    "amounts": _Kind(_draw_amount, _in_languages(_amount, "en de fr vi")),
}
"""``mixed`` draws from all of them."""
