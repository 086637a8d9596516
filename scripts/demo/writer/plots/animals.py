"""Plots of animals that need help, are met, run, steal and come to stay."""

from ..dice import Dice
from ..document import Question
from ..words import a
from .cast import Cast, Scene, one_day


def hungry_animal(d: Dice, c: Cast) -> Scene:
    h, animal, food = c.hero, c.animal, c.food
    need, gift, then = d.one(
        ("hungry", f"some {food}", "ate it all"),
        ("thirsty", "some water", "drank it all"),
        ("cold", "a warm blanket", "felt warm again"),
        ("tired", "a soft bed", "slept all day"),
        ("lost", "a map", "found the way home"),
    )
    size = d.one("small", "big", "little", "young", "old", "gray", "white", "brown", "black")
    sentences = [
        f"{one_day(d)} {h.name} {d.one('went', 'walked', 'ran')} to {c.place.the}.",
        d.one(f"There {h.he} saw {a(size)} {animal}.", f"{h.he.title()} met {a(size)} {animal} there."),
        d.one(f"The {animal} was very {need}.", f'"I am so {need}," said the {animal}.', f"The {animal} was sad because it was {need}."),
        d.one(f"So {h.name} gave it {gift}.", f"{h.name} wanted to help, so {h.he} gave the {animal} {gift}."),
        f"The {animal} {then} and was happy.",
    ]
    if d.chance(0.5):
        sentences.append(d.one(f'"Thank you, {h.name}," said the {animal}.', f"The {animal} followed {h.name} home."))
    questions = [
        Question("who", f"Who helped the {animal}?", h.name),
        Question("what", f"What did {h.name} give the {animal}?", gift),
        Question("where", f"Where did {h.name} see the {animal}?", c.place.where),
        Question("why", f"Why did the {animal} need help?", f"because it was {need}"),
        Question("what", f"What animal did {h.name} meet?", a(animal)),
    ]
    return Scene(sentences, questions)


def talking_animal(d: Dice, c: Cast) -> Scene:
    h, animal = c.hero, c.animal
    wish, trick = d.one(
        ("to fly", "jumped from a hill"),
        ("to sing", "opened its mouth wide"),
        ("to swim", "jumped into the water"),
        ("to dance", "stood on two legs"),
        ("to read", "looked at a book all day"),
    )
    sentences = [
        f"{one_day(d)} {h.name} met {a(animal)} {c.place.where}.",
        d.one(f'"I want {wish}," said the {animal}.', f'The {animal} said, "I wish I knew how {wish}."'),
        d.one(f'"I can teach you," said {h.name}.', f'"Do not be sad. I will show you how," said {h.name}.'),
        f"The {animal} {trick}, but it did not work.",
        d.one(f'"Try again," said {h.name}.', f"{h.name} did not laugh. They tried again and again."),
        f"{d.one('At last', 'After many days', 'In the end')} the {animal} learned {wish}.",
    ]
    questions = [
        Question("what", f"What did the {animal} want?", wish),
        Question("who", f"Who taught the {animal}?", h.name),
        Question("where", f"Where did {h.name} meet the {animal}?", c.place.where),
        Question("what", f"What did the {animal} learn?", wish),
    ]
    return Scene(sentences, questions)


def race(d: Dice, c: Cast) -> Scene:
    fast = c.animal
    slow = d.pick([kind for kind in ("turtle", "snail", "duck", "hen", "frog") if kind != fast])
    reason = d.one("slept under a tree", "stopped to eat", "played with a friend", "looked at the clouds")
    sentences = [
        f"{one_day(d)} {c.hero.name} {d.one('saw', 'watched')} a race {c.place.where}. {a(fast).capitalize()} ran against {a(slow)}.",
        d.one(f'"I am faster than you," said the {fast}.', f'The {fast} said, "You are too slow!"'),
        d.one(f"The {slow} said nothing and went on and on.", f'"We will see," said the {slow}.'),
        f"But the {fast} {reason}.",
        d.one(f"So the {slow} won the race.", f"When the {fast} came, the {slow} was already there."),
        d.one(f'"Well done!" said {c.hero.name} to the {slow}.', f"{c.hero.name} clapped {c.hero.his} hands."),
    ]
    questions = [
        Question("who", "Who won the race?", f"the {slow}"),
        Question("why", f"Why did the {fast} lose?", f"because it {reason}"),
        Question("where", "Where was the race?", c.place.where),
        Question(
            "who",
            "Who was too slow?" if "too slow" in sentences[1] else f"Who ran against the {slow}?",
            f"the {slow if 'too slow' in sentences[1] else fast}",
        ),
    ]
    return Scene(sentences, questions)


def lost_way(d: Dice, c: Cast) -> Scene:
    h, animal = c.hero, c.animal
    reason = d.one("it was dark", "there was fog", "the path was gone", "the trees were so tall", "the snow was so deep")
    sentences = [
        f"{one_day(d)} {h.name} {d.one('walked', 'went')} too far from home.",
        d.one(f"{h.he.title()} could not find the way because {reason}.", f"Because {reason}, {h.he} was lost."),
        d.one(f'"Help!" cried {h.name}.', f"{h.name} sat down and cried.", f"{h.name} was alone and afraid."),
        d.one(f"Then {a(animal)} came by.", f"{a(animal).capitalize()} heard {h.him}."),
        d.one(f'"Follow me," said the {animal}. "I know the way."', f"The {animal} knew the way and went with {h.him}."),
        f"Soon they saw {c.place.the}, and {h.name} was {d.one('safe', 'home', 'near home')}.",
    ]
    questions = [
        Question("why", f"Why was {h.name} lost?", f"because {reason}"),
        Question("who", f"Who helped {h.name}?", a(animal)),
        Question("who", "Who was lost?", h.name),
        Question("what", "What did they see?", c.place.the),
    ]
    return Scene(sentences, questions)


def new_pet(d: Dice, c: Cast) -> Scene:
    h, animal = c.hero, c.animal
    giver = d.one("mother", "father", "grandmother", "grandfather", "uncle", "aunt")
    pet = d.one("Spot", "Snowy", "Bubbles", "Fluffy", "Patch", "Ginger", "Shadow", "Button")
    sleeps = d.one("in a basket", "on a pillow", "next to the fire", "under the bed", "in a wooden box")
    sentences = [
        f"{one_day(d)} {h.his} {giver} came home from {c.place.the} with a little {animal}.",
        d.one(f"{h.name} named it {pet}.", f'"I will call it {pet}," said {h.name}.'),
        d.one(f"{pet} liked {c.food} very much.", f"{h.name} gave {pet} some {c.food}."),
        d.one("They played together all day.", f"{pet} followed {h.name} everywhere."),
        f"At night {pet} slept {sleeps}.",
    ]
    questions = [
        Question("what", f"What was the name of the {animal}?", pet),
        Question("where", f"Where did {pet} sleep?", sleeps),
        Question("what", f"What animal was {pet}?", a(animal)),
        Question("who", f"Who brought the {animal}?", f"{h.his} {giver}"),
        Question("what", f"What did {pet} eat?", f"some {c.food}"),
    ]
    return Scene(sentences, questions)


def thief(d: Dice, c: Cast) -> Scene:
    h, animal = c.hero, c.animal
    corner = d.pick(c.place.corners)
    reason = d.one("its babies were hungry", "it had nothing to eat", "it was very hungry", "the winter was cold")
    sentences = [
        f"{one_day(d)} {h.name} had some {c.food}.",
        d.one(f"When {h.he} looked away, {a(animal)} took it.", f"{a(animal).capitalize()} came and took the {c.food}."),
        d.one(f'"Stop! That is my {c.food}!" cried {h.name}.', f"{h.name} ran after the {animal}."),
        f"{h.he.title()} found the {animal} {c.place.where} {corner}.",
        d.one(f'"I am sorry," said the {animal}. "I took it because {reason}."', f"The {animal} took it because {reason}."),
        d.one(f"So {h.name} let it keep the {c.food}.", f'"You can have it," said {h.name}.'),
    ]
    questions = [
        Question("who", f"Who took the {c.food}?", a(animal)),
        Question("why", f"Why did the {animal} take it?", f"because {reason}"),
        Question("where", f"Where was the {animal}?", f"{c.place.where} {corner}"),
        Question("who", f"Who had some {c.food}?", h.name),
    ]
    return Scene(sentences, questions)


def strange_noise(d: Dice, c: Cast) -> Scene:
    h, animal = c.hero, c.animal
    corner = d.pick(c.place.corners)
    noise = d.one("a strange noise", "a loud noise", "a soft noise", "a scary sound")
    sentences = [
        f"{one_day(d)} {h.name} was alone {c.place.where}.",
        d.one(f"Then {h.he} heard {noise}.", f"Suddenly {h.he} heard {noise} {corner}."),
        d.one(f'"Who is there?" asked {h.name}.', f'"Is it a monster?" thought {h.name}.', f"{h.name} wanted to run away."),
        d.one(f"{h.name} was afraid because {h.he} heard {noise}.", f"{h.he.title()} was very afraid."),
        d.one(f"But {h.he} was brave and looked {corner}.", f"Slowly {h.he} went to look {corner}."),
        d.one(f"It was only {a(animal)}!", f"There sat {a(animal)}.", f"What a surprise: it was just {a(animal)}!"),
        d.one(f"{h.name} laughed and laughed.", f"The {animal} was afraid, too.", f'"Hello, little {animal}," said {h.name}.'),
    ]
    questions = [
        Question("what", "What made the noise?", a(animal)),
        Question("where", f"Where was the {animal}?", corner),
        Question("who", "Who was afraid?" if "was afraid, too" not in sentences[-1] else "Who heard the noise?", h.name),
        Question("where", f"Where was {h.name}?", c.place.where),
        Question("what", f"What did {h.name} hear?", noise),
    ]
    return Scene(sentences, questions)
