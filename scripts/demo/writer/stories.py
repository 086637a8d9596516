"""Stories with a beginning, a cause and an end, and reports of who went where."""

from . import words
from .dice import Dice
from .document import Document, Question
from .plots import OUTDOORS, PLOTS
from .plots.cast import Cast, cast
from .words import HEROES, PLACES, a


def opening(d: Dice, c: Cast) -> list[str]:
    """One or two sentences about the hero. Half of the stories begin once upon a time."""
    h = c.hero
    trait = d.one("little", "kind", "brave", "clever", "quiet", "curious", "funny", "young")
    likes = d.one("to play", "to read", "to sing", "to run", "to draw", "to climb", "to swim", "to dance", "to cook", "to count")
    home = d.one("a small house", "a little village", "an old house", "a house with a red door", "a white house")
    first = d.one(
        f"Once upon a time there was a {trait} {h.kind} named {h.name}.",
        f"Once upon a time, a {trait} {h.kind} named {h.name} lived in {home}.",
        f"Once upon a time, there was a {h.kind} named {h.name} who loved {likes}.",
        f"Once upon a time there lived a {trait} {h.kind}. {h.he.title()} was called {h.name}.",
        f"There was once a {trait} {h.kind} named {h.name}.",
        f"{h.name} was a {trait} {h.kind} who lived in {home}.",
        f"{h.name} was a {h.kind} who loved {likes}.",
    )
    more = (
        f"{h.he.title()} loved {likes}.",
        f"{h.he.title()} lived with {h.his} {d.one('mother', 'father', 'grandmother', 'grandfather', 'family')}.",
        f"{h.his.title()} best friend was {c.friend.name}.",
    )
    return [first, d.pick(more)] if d.chance(0.4) else [first]


def ending(d: Dice, c: Cast, happy: str) -> list[str]:
    h, f = c.hero, c.friend
    last = d.one(
        f"From that day on, {h.name} and {f.name} were good friends.",
        f"Then {h.name} and {f.name} went home together.",
        f"That night, {h.name} slept very well.",
        f"{h.name} went home with a big smile.",
        f"{h.name} told {h.his} {d.one('mother', 'father', 'grandmother', 'family')} all about it.",
        f"{h.name} never forgot that day.",
        "It was a good day.",
        "The end.",
    )
    return [happy, last] if d.chance(0.8) else [happy]


def story(d: Dice) -> Document:
    plot = d.pick(PLOTS)
    c = cast(d, words.OUTDOORS if plot in OUTDOORS else PLACES)
    parts = list(plot(d, c))
    told = " ".join(part for part in parts if isinstance(part, str))
    asked = [part for part in parts if isinstance(part, Question)]
    happy = d.one(
        f"{c.hero.name} was very happy.",
        f"{c.hero.name} and {c.friend.name} smiled.",
        f"{c.hero.name} was happy again." if "sad" in told else f"{c.hero.name} was proud and happy.",
        "They all laughed." if c.friend.name in told else f"{c.hero.name} laughed.",
    )
    text = " ".join([*opening(d, c), told, *ending(d, c, happy)])
    questions = d.some(asked, d.number(1, 3)) if d.chance(0.7) else []
    return Document("story", text, tuple(questions), (f"{c.hero.name}, {c.place.name}",))


def moves_story(d: Dice) -> Document:
    """A report of who went where, without a plot."""
    c = cast(d)
    people, places = [c.hero, c.friend], [c.place, *d.some([p for p in PLACES if p != c.place], 2)]
    people.append(d.pick([p for p in HEROES if p not in people]))
    verbs = ("went", "walked", "ran", "hurried")
    sentences = [f"{p.name} {d.pick(verbs)} to {where.the}." for p, where in zip(people, places, strict=True)]
    carried = people[d.number(0, 2)]
    sentences.append(f"{carried.name} {d.one('took', 'found', 'picked up')} {a(c.thing)} there.")
    spots = dict(zip((p.name for p in people), places, strict=True))
    questions = [Question("who", f"Who has the {c.thing}?", carried.name)]
    questions += [Question("where", f"Where is {p.name}?", spots[p.name].where) for p in people]
    questions += [Question("who", f"Who is {spots[p.name].where}?", p.name) for p in people]
    asked = d.some(questions, d.number(1, 3))
    return Document("moves", " ".join(sentences), tuple(asked), (f"{c.hero.name}, {c.place.name}",))
