"""The people and things of a story, and the sentences that a plot makes of them."""

from collections.abc import Iterator
from dataclasses import dataclass

from ..dice import Dice
from ..document import Question
from ..words import ANIMALS, COLOURS, FOODS, HEROES, LOOKS, PLACES, THINGS, Person, Place


@dataclass(frozen=True)
class Cast:
    hero: Person
    friend: Person
    place: Place
    other: Place
    thing: str
    look: str
    animal: str
    food: str


Plot = Iterator[str | Question]
"""What a plot yields: sentences between opening and ending, and questions."""


def cast(d: Dice, places: tuple[Place, ...] = PLACES) -> Cast:
    hero, friend = d.some(HEROES, 2)
    place, other = d.some(places, 2)
    look = d.pick(COLOURS) if d.chance(0.7) else d.pick(LOOKS)
    animal = d.pick([kind for kind in ANIMALS if kind not in (hero.kind, friend.kind)])
    return Cast(hero, friend, place, other, d.pick(THINGS), look, animal, d.pick(FOODS))


def one_day(d: Dice) -> str:
    return d.one(
        "One day,", "One morning,", "One sunny day,", "One cold day,", "One evening,", "One summer day,", "On a rainy day,", "Yesterday,"
    )
