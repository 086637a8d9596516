"""Sums: bare ones, and small tales of things that become more or fewer. All numbers are from 1 to 20."""

from .dice import Dice
from .document import Document, Question
from .words import COUNTED, PEOPLE, PLACES, count

LARGEST = 10  # of what is added


def _combination(x: int, y: int) -> str:
    """The combination of x and y. Adding them in either order and taking either from their sum are the same one."""
    return f"{min(x, y)} + {max(x, y)}"


def bare(d: Dice) -> Document:
    """A few sums of numbers, each on a line as question and answer."""
    questions = []
    for _ in range(d.number(2, 8)):
        x, y = d.number(1, LARGEST), d.number(1, LARGEST)
        text, answer = (f"{x} + {y} = ?", x + y) if d.chance(0.6) else (f"{x + y} - {x} = ?", y)
        questions.append(Question("bare sum", text, str(answer), _combination(x, y)))
    return Document("bare sum", "", tuple(questions), tuple(question.combination for question in questions))


def tale(d: Dice) -> Document:
    """A sum as a small tale, in the question itself or before it."""
    p, f = d.some(PEOPLE, 2)
    things, place = d.pick(COUNTED), d.pick(PLACES)
    x, y = d.number(1, LARGEST), d.number(1, LARGEST)
    many = things[1]
    if d.chance(0.55):
        had, answer = x, x + y
        event = d.one(
            f"{p.name} had {count(x, things)} and found {y} more.",
            f"{p.name} had {count(x, things)}. {f.name} gave {p.him} {y} more.",
            f"{p.name} had {count(x, things)} and bought {y} more.",
            f"{p.name} had {count(x, things)}. Then {p.he} found {y} more {place.where}.",
        )
    else:
        had, answer = x + y, x
        event = d.one(
            f"{p.name} had {count(had, things)} and lost {y}.",
            f"{p.name} had {count(had, things)} and gave {y} to {f.name}.",
            f"{p.name} had {count(had, things)}. {f.name} took {y}.",
            f"{p.name} had {count(had, things)}. Then {p.he} lost {y} {place.where}.",
        )
    ask = d.one(f"How many {many} does {p.name} have now?", f"How many {many}?", f"How many {many} has {p.name} got?")
    question = Question("sum", ask, str(answer))
    if d.chance(0.7):
        return Document("sum", "", (Question("sum", f"{event} {ask}", str(answer)),), (_combination(x, y),))
    more = (Question("who", f"Who had {count(had, things)}?", p.name),) if d.chance(0.5) else ()
    return Document("sum", event, (question, *more), (_combination(x, y),))


def counting(d: Dice) -> Document:
    """Questions about the order of the numbers."""
    first = d.number(1, 12)
    n = d.number(4, 8)
    if d.chance(0.5):
        numbers = range(first, first + n)
        return Document("counting", "Count up: " + ", ".join(map(str, numbers)), (), ())
    numbers = range(first + n, first, -1)
    return Document("counting", "Count down: " + ", ".join(map(str, numbers)), (), ())
