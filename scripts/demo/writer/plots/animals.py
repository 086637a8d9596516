"""Plots of animals that need help, are met, run, steal and come to stay."""

from ..dice import Dice
from ..document import Question
from ..words import a
from .cast import Cast, Plot, one_day


def hungry_animal(d: Dice, c: Cast) -> Plot:
    h, animal, food = c.hero, c.animal, c.food
    need, gift, then = d.one(
        ("hungry", f"some {food}", "ate it all"),
        ("thirsty", "some water", "drank it all"),
        ("cold", "a warm blanket", "felt warm again"),
        ("tired", "a soft bed", "slept all day"),
        ("lost", "a map", "found the way home"),
    )
    size = d.one("small", "big", "little", "young", "old", "gray", "white", "brown", "black")
    yield f"{one_day(d)} {h.name} {d.one('went', 'walked', 'ran')} to {c.place.the}."
    yield d.one(f"There {h.he} saw {a(size)} {animal}.", f"{h.he.title()} met {a(size)} {animal} there.")
    yield d.one(f"The {animal} was very {need}.", f'"I am so {need}," said the {animal}.', f"The {animal} was sad because it was {need}.")
    yield d.one(f"So {h.name} gave it {gift}.", f"{h.name} wanted to help, so {h.he} gave the {animal} {gift}.")
    yield f"The {animal} {then} and was happy."
    if d.chance(0.5):
        yield d.one(f'"Thank you, {h.name}," said the {animal}.', f"The {animal} followed {h.name} home.")
    yield Question("who", f"Who helped the {animal}?", h.name)
    yield Question("what", f"What did {h.name} give the {animal}?", gift)
    yield Question("where", f"Where did {h.name} see the {animal}?", c.place.where)
    yield Question("why", f"Why did the {animal} need help?", f"because it was {need}")
    yield Question("what", f"What animal did {h.name} meet?", a(animal))


def talking_animal(d: Dice, c: Cast) -> Plot:
    h, animal = c.hero, c.animal
    wish, trick = d.one(
        ("to fly", "jumped from a hill"),
        ("to sing", "opened its mouth wide"),
        ("to swim", "jumped into the water"),
        ("to dance", "stood on two legs"),
        ("to read", "looked at a book all day"),
    )
    yield f"{one_day(d)} {h.name} met {a(animal)} {c.place.where}."
    yield d.one(f'"I want {wish}," said the {animal}.', f'The {animal} said, "I wish I knew how {wish}."')
    yield d.one(f'"I can teach you," said {h.name}.', f'"Do not be sad. I will show you how," said {h.name}.')
    yield f"The {animal} {trick}, but it did not work."
    yield d.one(f'"Try again," said {h.name}.', f"{h.name} did not laugh. They tried again and again.")
    yield f"{d.one('At last', 'After many days', 'In the end')} the {animal} learned {wish}."
    yield Question("what", f"What did the {animal} want?", wish)
    yield Question("who", f"Who taught the {animal}?", h.name)
    yield Question("where", f"Where did {h.name} meet the {animal}?", c.place.where)
    yield Question("what", f"What did the {animal} learn?", wish)


def race(d: Dice, c: Cast) -> Plot:
    fast = c.animal
    slow = d.pick([kind for kind in ("turtle", "snail", "duck", "hen", "frog") if kind != fast])
    reason = d.one("slept under a tree", "stopped to eat", "played with a friend", "looked at the clouds")
    yield f"{one_day(d)} {c.hero.name} {d.one('saw', 'watched')} a race {c.place.where}. {a(fast).capitalize()} ran against {a(slow)}."
    boast = d.one(f'"I am faster than you," said the {fast}.', f'The {fast} said, "You are too slow!"')
    yield boast
    yield d.one(f"The {slow} said nothing and went on and on.", f'"We will see," said the {slow}.')
    yield f"But the {fast} {reason}."
    yield d.one(f"So the {slow} won the race.", f"When the {fast} came, the {slow} was already there.")
    yield d.one(f'"Well done!" said {c.hero.name} to the {slow}.', f"{c.hero.name} clapped {c.hero.his} hands.")
    yield Question("who", "Who won the race?", f"the {slow}")
    yield Question("why", f"Why did the {fast} lose?", f"because it {reason}")
    yield Question("where", "Where was the race?", c.place.where)
    if "too slow" in boast:
        yield Question("who", "Who was too slow?", f"the {slow}")
    else:
        yield Question("who", f"Who ran against the {slow}?", f"the {fast}")


def lost_way(d: Dice, c: Cast) -> Plot:
    h, animal = c.hero, c.animal
    reason = d.one("it was dark", "there was fog", "the path was gone", "the trees were so tall", "the snow was so deep")
    yield f"{one_day(d)} {h.name} {d.one('walked', 'went')} too far from home."
    yield d.one(f"{h.he.title()} could not find the way because {reason}.", f"Because {reason}, {h.he} was lost.")
    yield d.one(f'"Help!" cried {h.name}.', f"{h.name} sat down and cried.", f"{h.name} was alone and afraid.")
    yield d.one(f"Then {a(animal)} came by.", f"{a(animal).capitalize()} heard {h.him}.")
    yield d.one(f'"Follow me," said the {animal}. "I know the way."', f"The {animal} knew the way and went with {h.him}.")
    yield f"Soon they saw {c.place.the}, and {h.name} was {d.one('safe', 'home', 'near home')}."
    yield Question("why", f"Why was {h.name} lost?", f"because {reason}")
    yield Question("who", f"Who helped {h.name}?", a(animal))
    yield Question("who", "Who was lost?", h.name)
    yield Question("what", "What did they see?", c.place.the)


def new_pet(d: Dice, c: Cast) -> Plot:
    h, animal = c.hero, c.animal
    giver = d.one("mother", "father", "grandmother", "grandfather", "uncle", "aunt")
    pet = d.one("Spot", "Snowy", "Bubbles", "Fluffy", "Patch", "Ginger", "Shadow", "Button")
    sleeps = d.one("in a basket", "on a pillow", "next to the fire", "under the bed", "in a wooden box")
    yield f"{one_day(d)} {h.his} {giver} came home from {c.place.the} with a little {animal}."
    yield d.one(f"{h.name} named it {pet}.", f'"I will call it {pet}," said {h.name}.')
    yield d.one(f"{pet} liked {c.food} very much.", f"{h.name} gave {pet} some {c.food}.")
    yield d.one("They played together all day.", f"{pet} followed {h.name} everywhere.")
    yield f"At night {pet} slept {sleeps}."
    yield Question("what", f"What was the name of the {animal}?", pet)
    yield Question("where", f"Where did {pet} sleep?", sleeps)
    yield Question("what", f"What animal was {pet}?", a(animal))
    yield Question("who", f"Who brought the {animal}?", f"{h.his} {giver}")
    yield Question("what", f"What did {pet} eat?", f"some {c.food}")


def thief(d: Dice, c: Cast) -> Plot:
    h, animal = c.hero, c.animal
    corner = d.pick(c.place.corners)
    reason = d.one("its babies were hungry", "it had nothing to eat", "it was very hungry", "the winter was cold")
    yield f"{one_day(d)} {h.name} had some {c.food}."
    yield d.one(f"When {h.he} looked away, {a(animal)} took it.", f"{a(animal).capitalize()} came and took the {c.food}.")
    yield d.one(f'"Stop! That is my {c.food}!" cried {h.name}.', f"{h.name} ran after the {animal}.")
    yield f"{h.he.title()} found the {animal} {c.place.where} {corner}."
    yield d.one(f'"I am sorry," said the {animal}. "I took it because {reason}."', f"The {animal} took it because {reason}.")
    yield d.one(f"So {h.name} let it keep the {c.food}.", f'"You can have it," said {h.name}.')
    yield Question("who", f"Who took the {c.food}?", a(animal))
    yield Question("why", f"Why did the {animal} take it?", f"because {reason}")
    yield Question("where", f"Where was the {animal}?", f"{c.place.where} {corner}")
    yield Question("who", f"Who had some {c.food}?", h.name)


def strange_noise(d: Dice, c: Cast) -> Plot:
    h, animal = c.hero, c.animal
    corner = d.pick(c.place.corners)
    noise = d.one("a strange noise", "a loud noise", "a soft noise", "a scary sound")
    yield f"{one_day(d)} {h.name} was alone {c.place.where}."
    yield d.one(f"Then {h.he} heard {noise}.", f"Suddenly {h.he} heard {noise} {corner}.")
    yield d.one(f'"Who is there?" asked {h.name}.', f'"Is it a monster?" thought {h.name}.', f"{h.name} wanted to run away.")
    yield d.one(f"{h.name} was afraid because {h.he} heard {noise}.", f"{h.he.title()} was very afraid.")
    yield d.one(f"But {h.he} was brave and looked {corner}.", f"Slowly {h.he} went to look {corner}.")
    yield d.one(f"It was only {a(animal)}!", f"There sat {a(animal)}.", f"What a surprise: it was just {a(animal)}!")
    last = d.one(f"{h.name} laughed and laughed.", f"The {animal} was afraid, too.", f'"Hello, little {animal}," said {h.name}.')
    yield last
    yield Question("what", "What made the noise?", a(animal))
    yield Question("where", f"Where was the {animal}?", corner)
    yield Question("who", "Who was afraid?" if "was afraid, too" not in last else "Who heard the noise?", h.name)
    yield Question("where", f"Where was {h.name}?", c.place.where)
    yield Question("what", f"What did {h.name} hear?", noise)
