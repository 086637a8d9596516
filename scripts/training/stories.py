"""Stories with a cause and an end. Each plot tells one in words that vary, and knows the answers to questions about it."""

from dataclasses import dataclass

from .dice import Dice
from .document import Document, Question
from .words import ANIMALS, COLOURS, FOODS, LOOKS, PEOPLE, PLACES, THINGS, Person, Place, a


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


@dataclass(frozen=True)
class Told:
    """What a plot makes: sentences between opening and ending, and questions."""

    sentences: list[str]
    questions: list[Question]


def cast(d: Dice) -> Cast:
    hero, friend = d.some(PEOPLE, 2)
    place, other = d.some(PLACES, 2)
    look = d.pick(COLOURS) if d.chance(0.7) else d.pick(LOOKS)
    return Cast(hero, friend, place, other, d.pick(THINGS), look, d.pick(ANIMALS), d.pick(FOODS))


def opening(d: Dice, c: Cast) -> list[str]:
    """Who it is about; half of the stories begin once upon a time."""
    h = c.hero
    trait = d.pick(("little", "kind", "brave", "clever", "quiet", "curious", "funny", "young"))
    likes = d.pick(("to play", "to read", "to sing", "to run", "to draw", "to climb", "to swim", "to dance", "to cook", "to count"))
    home = d.pick(("a small house", "a little village", "an old house", "a house with a red door", "a white house"))
    first = d.pick(
        (
            f"Once upon a time there was a {trait} {h.kind} named {h.name}.",
            f"Once upon a time, a {trait} {h.kind} named {h.name} lived in {home}.",
            f"Once upon a time, there was a {h.kind} named {h.name} who loved {likes}.",
            f"Once upon a time there lived a {trait} {h.kind}. {h.he.title()} was called {h.name}.",
            f"There was once a {trait} {h.kind} named {h.name}.",
            f"{h.name} was a {trait} {h.kind} who lived in {home}.",
            f"{h.name} was a {h.kind} who loved {likes}.",
        )
    )
    more = (
        f"{h.he.title()} loved {likes}.",
        f"{h.he.title()} lived with {h.his} {d.pick(('mother', 'father', 'grandmother', 'grandfather', 'family'))}.",
        f"{h.his.title()} best friend was {c.friend.name}.",
    )
    return [first, d.pick(more)] if d.chance(0.4) else [first]


def one_day(d: Dice) -> str:
    return d.pick(
        ("One day,", "One morning,", "One sunny day,", "One cold day,", "One evening,", "One summer day,", "On a rainy day,", "Yesterday,")
    )


def ending(d: Dice, c: Cast, happy: str) -> list[str]:
    h, f = c.hero, c.friend
    last = d.pick(
        (
            f"From that day on, {h.name} and {f.name} were good friends.",
            f"Then {h.name} and {f.name} went home together.",
            f"That night, {h.name} slept very well.",
            f"{h.name} went home with a big smile.",
            f"{h.name} told {h.his} {d.pick(('mother', 'father', 'grandmother', 'family'))} all about it.",
            f"{h.name} never forgot that day.",
            "It was a good day.",
            "The end.",
        )
    )
    return [happy, last] if d.chance(0.8) else [happy]


def lost_and_found(d: Dice, c: Cast) -> Told:
    h, f, it = c.hero, c.friend, c.thing
    corner = d.pick(c.place.corners)
    owned = f"{c.look} {it}"
    sentences = [
        d.pick((f"{h.he.title()} had {a(owned)}.", f"{h.his.title()} favorite thing was {a(owned)}.")),
        f"{one_day(d)} {h.name} took the {it} to {c.place.the}.",
        d.pick((f"But then {h.he} lost it.", f"While {h.he} was playing, {h.he} lost it.", f"{h.he.title()} ran and jumped, and lost it.")),
        d.pick((f"{h.name} was very sad because the {it} was gone.", f"{h.name} began to cry because {h.he} had lost the {it}.")),
        d.pick(
            (
                f'{f.name} said, "Do not cry. I will help you."',
                f'"I will help you look," said {f.name}.',
                f'"Let us look for it together," said {f.name}.',
            )
        ),
        d.pick(
            (
                f"They looked and looked. At last {f.name} found the {it} {corner}.",
                f"They looked everywhere, and {f.name} found the {it} {corner}.",
                f"Soon {f.name} saw the {it} {corner}.",
            )
        ),
        d.pick((f'"Thank you!" said {h.name}.', f'"You are a good friend," said {h.name}.', f"{h.name} gave {f.name} a big hug.")),
    ]
    questions = [
        Question("who", f"Who lost the {it}?", h.name),
        Question("who", f"Who found the {it}?", f.name),
        Question("where", f"Where was the {it}?", corner),
        Question("why", f"Why was {h.name} sad?", f"because {h.he} lost the {it}"),
        Question("where", f"Where did {h.name} take the {it}?", f"to {c.place.the}"),
    ]
    if c.look in COLOURS:
        questions.append(Question("colour", f"What color was the {it}?", c.look))
    return Told(sentences, questions)


def hungry_animal(d: Dice, c: Cast) -> Told:
    h, animal, food = c.hero, c.animal, c.food
    need, gift, then = d.pick(
        (
            ("hungry", f"some {food}", "ate it all"),
            ("thirsty", "some water", "drank it all"),
            ("cold", "a warm blanket", "felt warm again"),
            ("tired", "a soft bed", "slept all day"),
            ("lost", "a map", "found the way home"),
        )
    )
    size = d.pick(("small", "big", "little", "young", "old", "gray", "white", "brown", "black"))
    sentences = [
        f"{one_day(d)} {h.name} {d.pick(('went', 'walked', 'ran'))} to {c.place.the}.",
        d.pick((f"There {h.he} saw {a(size)} {animal}.", f"{h.he.title()} met {a(size)} {animal} there.")),
        d.pick((f"The {animal} was very {need}.", f'"I am so {need}," said the {animal}.', f"The {animal} was sad because it was {need}.")),
        d.pick((f"So {h.name} gave it {gift}.", f"{h.name} wanted to help, so {h.he} gave the {animal} {gift}.")),
        f"The {animal} {then} and was happy.",
    ]
    if d.chance(0.5):
        sentences.append(d.pick((f'"Thank you, {h.name}," said the {animal}.', f"The {animal} followed {h.name} home.")))
    questions = [
        Question("who", f"Who helped the {animal}?", h.name),
        Question("what", f"What did {h.name} give the {animal}?", gift),
        Question("where", f"Where did {h.name} see the {animal}?", c.place.where),
        Question("why", f"Why did the {animal} need help?", f"because it was {need}"),
        Question("what", f"What animal did {h.name} meet?", a(animal)),
    ]
    return Told(sentences, questions)


def weather(d: Dice, c: Cast) -> Told:
    h, f = c.hero, c.friend
    came, wet, reason, inside = d.pick(
        (
            ("it began to rain", "wet", "it was raining", "read a book by the fire"),
            ("it began to snow", "cold", "it was snowing", "drank hot milk"),
            ("a strong wind came", "cold", "the wind was strong", "told stories"),
            ("the sun was too hot", "hot", "it was too hot", "sat in the shade"),
            ("it grew dark", "afraid", "it was dark", "lit a candle"),
        )
    )
    sentences = [
        f"{one_day(d)} {h.name} and {f.name} wanted to play {c.place.where}.",
        d.pick((f"But {came}, and {h.name} was {wet}.", f"But soon {came}. {h.name} was {wet}.")),
        f'"Let us go {d.pick(("home", "inside", "to my house"))}," said {f.name}.',
        d.pick((f"They went home because {reason}.", f"Because {reason}, they ran home.")),
        d.pick((f"At home they {inside}.", f"There they {inside} and laughed.")),
    ]
    questions = [
        Question("why", "Why did they go home?", f"because {reason}"),
        Question("who", f"Who was with {h.name}?", f.name),
        Question("where", "Where did they want to play?", c.place.where),
        Question("what", "What did they do at home?", f"they {inside}"),
    ]
    return Told(sentences, questions)


def gift(d: Dice, c: Cast) -> Told:
    h, f, owned = c.hero, c.friend, f"{c.look} {c.thing}"
    sentences = [
        d.pick((f"{one_day(d)} it was {h.name}'s birthday.", f"It was {h.name}'s birthday.")),
        d.pick((f"{h.he.title()} wanted {a(c.thing)} very much.", f'"I wish I had {a(c.thing)}," said {h.name}.')),
        f"{f.name} went to {c.place.the} and {d.pick(('bought', 'made', 'found'))} {a(owned)}.",
        d.pick((f"{f.name} gave it to {h.name}.", f'"This is for you," said {f.name} and gave it to {h.name}.')),
        d.pick((f"{h.name} was so happy that {h.he} jumped for joy.", f'"It is just what I wanted!" said {h.name}.')),
        f"They {d.pick(('ate', 'shared', 'baked'))} {d.pick(('a cake', 'a pie', 'some cookies', 'some bread and jam'))} together.",
    ]
    questions = [
        Question("what", f"What did {h.name} want?", a(c.thing)),
        Question("who", f"Who gave {h.name} a gift?", f.name),
        Question("who", "Whose birthday was it?", h.name),
        Question("where", f"Where did {f.name} go?", f"to {c.place.the}"),
    ]
    if c.look in COLOURS:
        questions.append(Question("colour", f"What color was the {c.thing}?", c.look))
    return Told(sentences, questions)


def strange_noise(d: Dice, c: Cast) -> Told:
    h, animal = c.hero, c.animal
    corner = d.pick(c.place.corners)
    noise = d.pick(("a strange noise", "a loud noise", "a soft noise", "a scary sound"))
    sentences = [
        f"{one_day(d)} {h.name} was alone {c.place.where}.",
        d.pick((f"Then {h.he} heard {noise}.", f"Suddenly {h.he} heard {noise} {corner}.")),
        d.pick((f'"Who is there?" asked {h.name}.', f'"Is it a monster?" thought {h.name}.', f"{h.name} wanted to run away.")),
        d.pick((f"{h.name} was afraid because {h.he} heard {noise}.", f"{h.he.title()} was very afraid.")),
        d.pick(
            (f"But {h.he} was brave and looked {corner}.", f"Slowly {h.he} went to look {corner}."),
        ),
        d.pick((f"It was only {a(animal)}!", f"There sat {a(animal)}.", f"What a surprise: it was just {a(animal)}!")),
        d.pick((f"{h.name} laughed and laughed.", f"The {animal} was afraid, too.", f'"Hello, little {animal}," said {h.name}.')),
    ]
    questions = [
        Question("what", "What made the noise?", a(animal)),
        Question("where", f"Where was the {animal}?", corner),
        Question("who", "Who was afraid?" if "was afraid, too" not in sentences[-1] else "Who heard the noise?", h.name),
        Question("where", f"Where was {h.name}?", c.place.where),
        Question("what", f"What did {h.name} hear?", noise),
    ]
    return Told(sentences, questions)


def hurt(d: Dice, c: Cast) -> Told:
    h, f = c.hero, c.friend
    did, part = d.pick((("climbed a tree", "arm"), ("ran too fast", "knee"), ("jumped from a wall", "foot"), ("rode a horse", "leg")))
    sentences = [
        f"{one_day(d)} {h.name} and {f.name} were {c.place.where}.",
        f"{h.name} {did}.",
        d.pick((f'"Be careful!" said {f.name}, but it was too late.', f'{f.name} said, "Stop!"')),
        f"{h.name} fell and hurt {h.his} {part}.",
        d.pick((f'"It hurts!" cried {h.name}.', f"{h.name} began to cry.")),
        d.pick(
            (
                f"{f.name} washed the {part} and gave {h.him} some {c.food}.",
                f"{f.name} took {h.his} hand and brought {h.him} home.",
                f"{f.name} ran to get {d.pick(('help', 'a doctor', 'some water'))}.",
            )
        ),
    ]
    questions = [
        Question("who", f"Who hurt {h.his} {part}?", h.name),
        Question("who", f"Who helped {h.name}?", f.name),
        Question("what", f"What did {h.name} hurt?", f"{h.his} {part}"),
        Question("why", f"Why did {h.name} fall?", f"because {h.he} {did}"),
        Question("where", "Where were they?", c.place.where),
    ]
    return Told(sentences, questions)


def hide_and_seek(d: Dice, c: Cast) -> Told:
    h, f = c.hero, c.friend
    wrong, right = d.some(c.place.corners, 2)
    sentences = [
        f"{one_day(d)} {h.name} and {f.name} played hide and seek {c.place.where}.",
        f"{f.name} hid {right}.",
        f"{h.name} {d.pick(('closed', 'shut'))} {h.his} eyes and counted to {d.pick(('ten', 'twenty'))}.",
        d.pick((f"First {h.he} looked {wrong}, but {f.name} was not there.", f"{h.he.title()} looked {wrong}. No one was there.")),
        f"Then {h.he} looked {right}.",
        d.pick((f'"I found you!" said {h.name}.', f'"There you are, {f.name}!" said {h.name}.')),
    ]
    questions = [
        Question("where", f"Where did {f.name} hide?", right),
        Question("who", f"Who found {f.name}?", h.name),
        Question("who", "Who hid?", f.name),
        Question("where", f"Where did {h.name} look first?", wrong),
        Question("where", "Where did they play?", c.place.where),
    ]
    return Told(sentences, questions)


def sharing(d: Dice, c: Cast) -> Told:
    h, f, food = c.hero, c.friend, c.food
    sentences = [
        f"{one_day(d)} {h.name} made some {food} in the kitchen.",
        f"{h.he.title()} put it in a basket and went to {c.place.the}.",
        f"There {h.he} met {f.name}.",
        d.pick((f"{f.name} was hungry because {f.he} had no food.", f'"I am hungry," said {f.name}. "I have no food."')),
        d.pick((f"So {h.name} shared the {food} with {f.him}.", f'"You can have half of my {food}," said {h.name}.')),
        d.pick((f'"It is so good," said {f.name}.', f"They sat down and ate the {food}.")),
    ]
    questions = [
        Question("what", f"What did {h.name} make?", f"some {food}"),
        Question("who", "Who was hungry?", f.name),
        Question("why", f"Why was {f.name} hungry?", f"because {f.he} had no food"),
        Question("where", f"Where did {h.name} meet {f.name}?", c.place.where),
        Question("who", f"Who made the {food}?", h.name),
    ]
    return Told(sentences, questions)


def talking_animal(d: Dice, c: Cast) -> Told:
    h, animal = c.hero, c.animal
    wish, trick = d.pick(
        (
            ("to fly", "jumped from a hill"),
            ("to sing", "opened its mouth wide"),
            ("to swim", "jumped into the water"),
            ("to dance", "stood on two legs"),
            ("to read", "looked at a book all day"),
        )
    )
    sentences = [
        f"{one_day(d)} {h.name} met {a(animal)} {c.place.where}.",
        d.pick((f'"I want {wish}," said the {animal}.', f'The {animal} said, "I wish I knew how {wish}."')),
        d.pick((f'"I can teach you," said {h.name}.', f'"Do not be sad. I will show you how," said {h.name}.')),
        f"The {animal} {trick}, but it did not work.",
        d.pick((f'"Try again," said {h.name}.', f"{h.name} did not laugh. They tried again and again.")),
        f"{d.pick(('At last', 'After many days', 'In the end'))} the {animal} learned {wish}.",
    ]
    questions = [
        Question("what", f"What did the {animal} want?", wish),
        Question("who", f"Who taught the {animal}?", h.name),
        Question("where", f"Where did {h.name} meet the {animal}?", c.place.where),
        Question("what", f"What did the {animal} learn?", wish),
    ]
    return Told(sentences, questions)


def moves(d: Dice, c: Cast) -> Told:
    """Who went where, told without a plot."""
    people, places = [c.hero, c.friend], [c.place, *d.some([p for p in PLACES if p != c.place], 2)]
    other = d.pick([p for p in PEOPLE if p not in people])
    people.append(other)
    verbs = ("went", "walked", "ran", "hurried")
    sentences = [f"{p.name} {d.pick(verbs)} to {where.the}." for p, where in zip(people, places, strict=True)]
    carrier = d.number(0, 2)
    carried = people[carrier]
    sentences.append(f"{carried.name} {d.pick(('took', 'found', 'picked up'))} {a(c.thing)} there.")
    spots = dict(zip((p.name for p in people), places, strict=True))
    questions = [Question("who", f"Who has the {c.thing}?", carried.name)]
    questions += [Question("where", f"Where is {p.name}?", spots[p.name].where) for p in people]
    questions += [Question("who", f"Who is {spots[p.name].where}?", p.name) for p in people]
    return Told(sentences, questions)


PLOTS = (lost_and_found, hungry_animal, weather, gift, strange_noise, hurt, hide_and_seek, sharing, talking_animal)


def story(d: Dice) -> Document:
    c = cast(d)
    told = d.pick(PLOTS)(d, c)
    happy = d.pick(
        (
            f"{c.hero.name} was very happy.",
            f"{c.hero.name} and {c.friend.name} smiled.",
            f"Now {c.hero.name} was not sad any more." if "sad" in " ".join(told.sentences) else f"{c.hero.name} was proud and happy.",
            "They all laughed." if c.friend.name in " ".join(told.sentences) else f"{c.hero.name} laughed.",
        )
    )
    text = " ".join([*opening(d, c), *told.sentences, *ending(d, c, happy)])
    asked = d.some(told.questions, d.number(1, 3)) if d.chance(0.7) else []
    return Document("story", text, tuple(asked), (f"{c.hero.name}, {c.place.name}",))


def moves_story(d: Dice) -> Document:
    c = cast(d)
    told = moves(d, c)
    return Document("moves", " ".join(told.sentences), tuple(d.some(told.questions, d.number(1, 3))), (f"{c.hero.name}, {c.place.name}",))
