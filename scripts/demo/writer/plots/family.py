"""Plots of one alone, or with family and strangers."""

from ..dice import Dice
from ..document import Question
from ..words import a
from .cast import Cast, Plot, one_day


def magic(d: Dice, c: Cast) -> Plot:
    h = c.hero
    tool = d.one("stone", "ring", "lamp", "feather", "shell", "wand")
    wish, came = d.one(
        ("to fly", "flew over the houses like a bird"),
        ("to be tall", "grew as tall as a tree"),
        ("to talk with animals", "could talk with every bird"),
        ("for a big cake", "saw a big cake on the table"),
        ("for snow", "saw snow falling from the sky"),
        ("to be strong", "was as strong as a bear"),
    )
    yield f"{one_day(d)} {h.name} found a magic {tool} {c.place.where}."
    yield d.one(f'"You have one wish," said the {tool}.', f'The {tool} said, "I can give you one wish."')
    yield d.one(f"{h.name} thought for a long time. Then {h.he} wished {wish}.", f"{h.name} closed {h.his} eyes and wished {wish}.")
    yield f"Suddenly {h.name} {came}!"
    yield d.one(f'"It is magic!" cried {h.name}.', f"{h.name} could not believe {h.his} eyes.", "It was the best day ever.")
    yield d.one(f"In the evening the magic was gone, but {h.he} was not sad.", f"{h.he.title()} kept the {tool} in a safe place.")
    yield Question("what", f"What did {h.name} find?", f"a magic {tool}")
    yield Question("what", f"What did {h.name} wish?", wish)
    yield Question("where", f"Where was the {tool}?", c.place.where)
    yield Question("who", f"Who found the {tool}?", h.name)


def truth(d: Dice, c: Cast) -> Plot:
    h = c.hero
    parent = d.one("mother", "father", "grandmother", "grandfather", "teacher")
    broken = d.one("cup", "window", "plate", "lamp", "clock", "mirror", "pot")
    how = d.one("ran in the house", "played with a ball", "jumped on the bed", "did not look")
    yield f"{one_day(d)} {h.name} {how} and broke {a(broken)}."
    yield d.one(f"{h.name} was afraid to tell {h.his} {parent}.", f'"Oh no! What will my {parent} say?" thought {h.name}.')
    yield d.one(f"First {h.he} hid the pieces under the bed.", f"{h.he.title()} wanted to hide, but {h.he} did not.")
    yield d.one(f'Then {h.he} said, "I am sorry. I broke the {broken}."', f"But then {h.name} told the truth.")
    kind = d.one(f"{h.his.title()} {parent} was not angry.", f'"I am glad that you told the truth," said {h.his} {parent}.')
    yield kind
    yield d.one("They cleaned the floor together.", f"{h.his.title()} {parent} gave {h.him} a hug.")
    yield Question("what", f"What did {h.name} break?", a(broken))
    yield Question("who", f"Who broke the {broken}?", h.name)
    yield Question("why", f"Why did the {broken} break?", f"because {h.name} {how}")
    yield Question("who", "Who was not angry?" if "not angry" in kind else "Who was glad?", f"{h.his} {parent}")


def sleepless(d: Dice, c: Cast) -> Plot:
    h = c.hero
    reason = d.one("the wind was loud", "the moon was so bright", "it was too hot", "a dog barked outside", "it was dark")
    parent = d.one("mother", "father", "grandmother", "grandfather")
    help_ = d.one("sang a soft song", "told a story", "brought warm milk", "closed the window", "lit a small lamp")
    yield d.one(f"It was night, and {h.name} was in bed.", f"One night {h.name} lay in {h.his} bed.")
    yield d.one(f"{h.he.title()} could not sleep because {reason}.", f"Because {reason}, {h.he} could not sleep.")
    yield d.one(f"{h.name} counted sheep, but it did not help.", f"{h.he.title()} thought about {c.place.the}.", "The clock said ten.")
    yield d.one(f"Then {h.his} {parent} came in.", f'"Why are you awake?" asked {h.his} {parent}.')
    yield f"{h.his.title()} {parent} {help_}."
    yield d.one(f"Soon {h.name} fell asleep.", f'"Good night," said {h.name} and fell asleep.')
    yield Question("why", f"Why could {h.name} not sleep?", f"because {reason}")
    yield Question("who", f"Who helped {h.name}?", f"{h.his} {parent}")
    yield Question("what", f"What did {h.his} {parent} do?", help_)
    yield Question("who", "Who could not sleep?", h.name)


def good_deed(d: Dice, c: Cast) -> Plot:
    h = c.hero
    old = d.one("an old woman", "an old man", "a farmer", "a baker", "a king", "a queen", "a sailor")
    the = "the " + old.split(" ", 1)[1]
    trouble, did = d.one(
        ("had a heavy bag", "carried the bag"),
        ("had lost a key", "found the key"),
        ("had a broken cart", "mended the cart"),
        ("could not open the gate", "opened the gate"),
        ("was very tired", "brought a chair"),
    )
    owned = f"{c.look} {c.thing}"
    yield f"{one_day(d)} {h.name} met {old} {c.place.where}."
    yield d.one(f"{the.capitalize()} {trouble}.", f"{h.name} saw that {the} {trouble}.")
    yield d.one(f'"Can I help you?" asked {h.name}.', f'"I will help you," said {h.name}.')
    yield f"{h.name} {did}."
    yield d.one(f'"You are very kind," said {the}.', f'"Thank you, {h.name}," said {the}.')
    yield f"{the.capitalize()} gave {h.him} {a(owned)}."
    yield Question("who", f"Who did {h.name} meet?", old)
    yield Question("what", f"What did {h.name} get?", a(owned))
    yield Question("what", f"What did {h.name} do?", f"{h.he} {did}")
    yield Question("where", f"Where did {h.name} meet {the}?", c.place.where)
    yield Question("why", f"Why did {the} need help?", f"because {the} {trouble}")
