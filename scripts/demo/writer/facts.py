"""Common knowledge: questions without a story, always with the same answer."""

from .dice import Dice
from .document import Document, Question

_SAYS = {
    "cat": "meow", "dog": "woof", "cow": "moo", "sheep": "baa", "duck": "quack", "pig": "oink", "frog": "croak", "owl": "hoot",
    "bee": "buzz", "mouse": "squeak", "lion": "roar", "horse": "neigh",
}  # fmt: skip
_COLOURS = {
    "the sky": "blue", "grass": "green", "snow": "white", "the sun": "yellow", "blood": "red", "coal": "black", "a carrot": "orange",
    "a lemon": "yellow", "a leaf": "green", "milk": "white", "chocolate": "brown", "a pig": "pink",
}  # fmt: skip
_OPPOSITES = {
    "big": "small", "hot": "cold", "day": "night", "happy": "sad", "old": "new", "fast": "slow", "up": "down", "open": "closed",
    "wet": "dry", "loud": "quiet", "tall": "short", "full": "empty", "hard": "soft", "good": "bad", "left": "right", "first": "last",
}  # fmt: skip
_BABIES = {
    "cat": "kitten", "dog": "puppy", "cow": "calf", "sheep": "lamb", "duck": "duckling", "hen": "chick", "horse": "foal", "bear": "cub",
}  # fmt: skip
_LEGS = {"cat": "4", "hen": "2", "bee": "6", "horse": "4", "spider": "8", "duck": "2", "dog": "4", "boy": "2"}
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_LIVES = {"fish": "in the water", "bird": "in a nest", "bear": "in a cave", "bee": "in a hive", "horse": "in a stable", "fox": "in a den"}
_USES = {
    "a key": "to open a door", "a pencil": "to write", "a spoon": "to eat soup", "a bed": "to sleep", "a lamp": "to see in the dark",
    "a coat": "to keep warm", "a book": "to read", "a boat": "to cross the water", "a clock": "to tell the time", "a cup": "to drink",
}  # fmt: skip
_WHY = {
    "Why do we sleep?": "because we are tired", "Why do we eat?": "because we are hungry", "Why do we drink?": "because we are thirsty",
    "Why does ice melt?": "because it is warm", "Why do we wear a coat?": "because it is cold", "Why do we cry?": "because we are sad",
    "Why do we laugh?": "because we are happy", "Why is the night dark?": "because the sun is gone",
}  # fmt: skip


def _questions() -> dict[str, str]:
    known = {f"What does a {animal} say?": sound for animal, sound in _SAYS.items()}
    known |= {f"What color is {thing}?": colour for thing, colour in _COLOURS.items()}
    known |= {f"What is the opposite of {word}?": other for word, other in (*_OPPOSITES.items(), *((b, a) for a, b in _OPPOSITES.items()))}
    known |= {f"What is a baby {animal} called?": f"a {baby}" for animal, baby in _BABIES.items()}
    known |= {f"How many legs does a {animal} have?": legs for animal, legs in _LEGS.items()}
    known |= {f"What day comes after {day}?": _DAYS[(i + 1) % 7] for i, day in enumerate(_DAYS)}
    known |= {f"What day comes before {day}?": _DAYS[i - 1] for i, day in enumerate(_DAYS)}
    known |= {f"Where does a {animal} live?": place for animal, place in _LIVES.items()}
    known |= {f"What is {thing} for?": use for thing, use in _USES.items()}
    return known | _WHY


QUESTIONS = tuple(Question("fact", text, answer) for text, answer in _questions().items())


def facts(d: Dice) -> Document:
    return Document("fact", "", tuple(d.some(QUESTIONS, d.number(1, 4))), ())
