"""Plots of two friends: what they lose, give, make, share and quarrel about."""

from ..dice import Dice
from ..document import Question
from ..words import COLOURS, a
from .cast import Cast, Plot, one_day


def lost_and_found(d: Dice, c: Cast) -> Plot:
    h, f, it = c.hero, c.friend, c.thing
    corner = d.pick(c.place.corners)
    owned = f"{c.look} {it}"
    yield d.one(f"{h.he.title()} had {a(owned)}.", f"{h.his.title()} favorite thing was {a(owned)}.")
    yield f"{one_day(d)} {h.name} took the {it} to {c.place.the}."
    yield d.one(f"But then {h.he} lost it.", f"While {h.he} was playing, {h.he} lost it.", f"{h.he.title()} ran and jumped, and lost it.")
    yield d.one(f"{h.name} was very sad because the {it} was gone.", f"{h.name} began to cry because {h.he} had lost the {it}.")
    yield d.one(
        f'{f.name} said, "Do not cry. I will help you."',
        f'"I will help you look," said {f.name}.',
        f'"Let us look for it together," said {f.name}.',
    )
    yield d.one(
        f"They looked and looked. At last {f.name} found the {it} {corner}.",
        f"They looked everywhere, and {f.name} found the {it} {corner}.",
        f"Soon {f.name} saw the {it} {corner}.",
    )
    yield d.one(f'"Thank you!" said {h.name}.', f'"You are a good friend," said {h.name}.', f"{h.name} gave {f.name} a big hug.")
    yield Question("who", f"Who lost the {it}?", h.name)
    yield Question("who", f"Who found the {it}?", f.name)
    yield Question("where", f"Where was the {it}?", corner)
    yield Question("why", f"Why was {h.name} sad?", f"because {h.he} lost the {it}")
    yield Question("where", f"Where did {h.name} take the {it}?", f"to {c.place.the}")
    if c.look in COLOURS:
        yield Question("colour", f"What color was the {it}?", c.look)


def gift(d: Dice, c: Cast) -> Plot:
    h, f, owned = c.hero, c.friend, f"{c.look} {c.thing}"
    yield d.one(f"{one_day(d)} it was {h.name}'s birthday.", f"It was {h.name}'s birthday.")
    yield d.one(f"{h.he.title()} wanted {a(c.thing)} very much.", f'"I wish I had {a(c.thing)}," said {h.name}.')
    yield f"{f.name} went to {c.place.the} and {d.one('bought', 'made', 'found')} {a(owned)}."
    yield d.one(f"{f.name} gave it to {h.name}.", f'"This is for you," said {f.name} and gave it to {h.name}.')
    yield d.one(f"{h.name} was so happy that {h.he} jumped for joy.", f'"It is just what I wanted!" said {h.name}.')
    yield f"They {d.one('ate', 'shared', 'baked')} {d.one('a cake', 'a pie', 'some cookies', 'some bread and jam')} together."
    yield Question("what", f"What did {h.name} want?", a(c.thing))
    yield Question("who", f"Who gave {h.name} a gift?", f.name)
    yield Question("who", "Whose birthday was it?", h.name)
    yield Question("where", f"Where did {f.name} go?", f"to {c.place.the}")
    if c.look in COLOURS:
        yield Question("colour", f"What color was the {c.thing}?", c.look)


def hurt(d: Dice, c: Cast) -> Plot:
    h, f = c.hero, c.friend
    did, part = d.one(("climbed a tree", "arm"), ("ran too fast", "knee"), ("jumped from a wall", "foot"), ("rode a horse", "leg"))
    yield f"{one_day(d)} {h.name} and {f.name} were {c.place.where}."
    yield f"{h.name} {did}."
    yield d.one(f'"Be careful!" said {f.name}, but it was too late.', f'{f.name} said, "Stop!"')
    yield f"{h.name} fell and hurt {h.his} {part}."
    yield d.one(f'"It hurts!" cried {h.name}.', f"{h.name} began to cry.")
    yield d.one(
        f"{f.name} washed the {part} and gave {h.him} some {c.food}.",
        f"{f.name} took {h.his} hand and brought {h.him} home.",
        f"{f.name} ran to get {d.one('help', 'a doctor', 'some water')}.",
    )
    yield Question("who", f"Who hurt {h.his} {part}?", h.name)
    yield Question("who", f"Who helped {h.name}?", f.name)
    yield Question("what", f"What did {h.name} hurt?", f"{h.his} {part}")
    yield Question("why", f"Why did {h.name} fall?", f"because {h.he} {did}")
    yield Question("where", "Where were they?", c.place.where)


def hide_and_seek(d: Dice, c: Cast) -> Plot:
    h, f = c.hero, c.friend
    wrong, right = d.some(c.place.corners, 2)
    yield f"{one_day(d)} {h.name} and {f.name} played hide and seek {c.place.where}."
    yield f"{f.name} hid {right}."
    yield f"{h.name} {d.one('closed', 'shut')} {h.his} eyes and counted to {d.one('ten', 'twenty')}."
    yield d.one(f"First {h.he} looked {wrong}, but {f.name} was not there.", f"{h.he.title()} looked {wrong}. No one was there.")
    yield f"Then {h.he} looked {right}."
    yield d.one(f'"I found you!" said {h.name}.', f'"There you are, {f.name}!" said {h.name}.')
    yield Question("where", f"Where did {f.name} hide?", right)
    yield Question("who", f"Who found {f.name}?", h.name)
    yield Question("who", "Who hid?", f.name)
    yield Question("where", f"Where did {h.name} look first?", wrong)
    yield Question("where", "Where did they play?", c.place.where)


def sharing(d: Dice, c: Cast) -> Plot:
    h, f, food = c.hero, c.friend, c.food
    yield f"{one_day(d)} {h.name} made some {food} in the kitchen."
    yield f"{h.he.title()} put it in a basket and went to {c.place.the}."
    yield f"There {h.he} met {f.name}."
    yield d.one(f"{f.name} was hungry because {f.he} had no food.", f'"I am hungry," said {f.name}. "I have no food."')
    yield d.one(f"So {h.name} shared the {food} with {f.him}.", f'"You can have half of my {food}," said {h.name}.')
    yield d.one(f'"It is so good," said {f.name}.', f"They sat down and ate the {food}.")
    yield Question("what", f"What did {h.name} make?", f"some {food}")
    yield Question("who", "Who was hungry?", f.name)
    yield Question("why", f"Why was {f.name} hungry?", f"because {f.he} had no food")
    yield Question("where", f"Where did {h.name} meet {f.name}?", c.place.where)
    yield Question("who", f"Who made the {food}?", h.name)


def practice(d: Dice, c: Cast) -> Plot:
    h, f = c.hero, c.friend
    skill = d.one("swim", "sing", "read", "ride a bike", "play the drum", "draw a horse", "climb a tree", "bake bread", "count to twenty")
    yield d.one(f"{h.name} wanted to {skill}, but {h.he} could not.", f"{h.name} did not know how to {skill}.")
    yield d.one(f'"It is too hard," said {h.name}.', f'"I will never learn it," said {h.name}.', f"{h.he.title()} tried and tried.")
    yield d.one(f'"Do not give up," said {f.name}.', f'{f.name} said, "I will help you. Try every day."')
    yield f"So {h.name} tried every day {c.place.where}."
    yield d.one(f"After a week {h.he} could {skill}.", f"And one morning {h.he} could {skill}!")
    yield d.one(f'"Look at me!" cried {h.name}.', f"{f.name} clapped and was proud of {h.him}.")
    yield Question("what", f"What did {h.name} learn?", f"to {skill}")
    yield Question("who", f"Who helped {h.name}?", f.name)
    yield Question("where", f"Where did {h.name} try?", c.place.where)
    yield Question("who", f"Who can {skill} now?", h.name)


def seed(d: Dice, c: Cast) -> Plot:
    h, f = c.hero, c.friend
    plant = d.one("a tall flower", "an apple tree", "a big pumpkin", "a rose", "a pear tree", "a green bush", "a bean plant")
    yield f"{one_day(d)} {f.name} gave {h.name} a small seed."
    yield d.one(f"{h.name} put it in the ground {c.place.where}.", f"{h.name} went to {c.place.the} and put the seed in the ground.")
    yield d.one(f"Every day {h.he} gave it water.", f"{h.he.title()} watered it every morning.")
    yield d.one("The sun was warm, and the rain was soft.", f'"When will it grow?" asked {h.name}. "Be patient," said {f.name}.')
    yield f"{d.one('At last', 'In spring', 'After many weeks')} {plant} grew there."
    yield d.one(f"{h.name} showed it to {f.name}.", f'"It is beautiful!" said {f.name}.')
    yield Question("who", f"Who gave {h.name} a seed?", f.name)
    yield Question("what", "What grew from the seed?", plant)
    yield Question("where", "Where was the seed?", c.place.where)
    yield Question("what", f"What did {f.name} give {h.name}?", "a small seed")


def treasure(d: Dice, c: Cast) -> Plot:
    h, f = c.hero, c.friend
    corner = d.pick(c.place.corners)
    inside = d.one("gold coins", "old letters", "sweet cookies", "shiny stones", "toys", "books", "silver spoons")
    yield f"{one_day(d)} {h.name} and {f.name} found an old map {c.other.where}."
    yield d.one(f"The map showed the way to {c.place.the}.", f'"Look, it shows {c.place.the}," said {h.name}.')
    yield d.one("They walked and walked.", "It was a long way.", "They crossed a bridge and climbed over a wall.")
    yield f"There, {corner}, {d.one('was', 'stood', 'they saw')} a box."
    yield d.one(f"{h.name} opened it. It was full of {inside}!", f"The box was full of {inside}.")
    yield d.one(f"{h.name} and {f.name} shared the {inside}.", f'"We are rich!" cried {f.name}.')
    yield Question("what", "What was in the box?", inside)
    yield Question("where", "Where was the box?", corner)
    yield Question("where", "Where did they find the map?", c.other.where)
    yield Question("who", f"Who was with {h.name}?", f.name)
    yield Question("where", "Where did they go?", f"to {c.place.the}")


def built_again(d: Dice, c: Cast) -> Plot:
    h, f = c.hero, c.friend
    work, where, enemy, broke = d.one(
        ("a sand castle", "at the beach", "a big wave", "came and washed it away"),
        ("a snowman", "in the garden", "the hot sun", "melted it"),
        ("a tower of stones", "by the river", "a cow", "came and knocked it down"),
        ("a house of sticks", "in the forest", "the strong wind", "came and blew it down"),
        ("a kite", "on the hill", "a sharp branch", "made a hole in it"),
        ("a little boat", "by the lake", "a big fish", "came and turned it over"),
    )
    yield f"{one_day(d)} {h.name} and {f.name} made {work} {where}."
    yield d.one("It was big and beautiful.", "It took all morning.", f"{h.name} was very proud of it.")
    yield f"But then {enemy} {broke}."
    yield d.one(f"{h.name} was angry.", f"{h.name} was so sad that {h.he} cried.", f'"Oh no!" cried {h.name}.')
    yield d.one(f'"We can make it again," said {f.name}.', f'{f.name} said, "Let us try once more."')
    yield d.one("The new one was even better.", "They worked together, and soon it was done.")
    yield Question("what", "What did they make?", work)
    yield Question("what", f"What {broke}?", enemy)
    yield Question("where", "Where were they?", where)
    yield Question("who", f"Who helped {h.name}?", f.name)


def quarrel(d: Dice, c: Cast) -> Plot:
    h, f, it = c.hero, c.friend, c.thing
    yield f"{one_day(d)} {h.name} and {f.name} saw {a(f'{c.look} {it}')} {c.place.where}."
    yield d.one(f'"It is mine!" said {h.name}. "No, it is mine!" said {f.name}.', f"Both of them wanted the {it}.")
    yield d.one(f"{h.name} pulled, and {f.name} pulled, too.", "They were angry and did not talk.", f"{f.name} would not let go.")
    regret = d.one(f"Then {h.name} was sorry.", f"After a while, {h.name} felt bad.")
    yield regret
    yield d.one(f'"You can have it first," said {h.name}.', f'"Let us share the {it}," said {h.name}.')
    yield d.one(f"So they played with the {it} together.", f'"Thank you," said {f.name}. "You are kind."')
    yield Question("what", "What did both want?", f"the {it}")
    yield Question("who", "Who was sorry?" if "sorry" in regret else "Who felt bad?", h.name)
    yield Question("where", f"Where did they see the {it}?", c.place.where)
    yield Question("why", "Why were they angry?", f"because both wanted the {it}")
    if c.look in COLOURS:
        yield Question("colour", f"What color was the {it}?", c.look)


def weather(d: Dice, c: Cast) -> Plot:
    h, f = c.hero, c.friend
    came, wet, reason, inside = d.one(
        ("it began to rain", "wet", "it was raining", "read a book by the fire"),
        ("it began to snow", "cold", "it was snowing", "drank hot milk"),
        ("a strong wind came", "cold", "the wind was strong", "told stories"),
        ("the sun was too hot", "hot", "it was too hot", "sat by the open window"),
        ("it grew dark", "afraid", "it was dark", "lit a candle"),
    )
    yield f"{one_day(d)} {h.name} and {f.name} wanted to play {c.place.where}."
    yield d.one(f"But {came}, and {h.name} was {wet}.", f"But soon {came}. {h.name} was {wet}.")
    yield f'"Let us go {d.one("home", "inside", "to my house")}," said {f.name}.'
    yield d.one(f"They went home because {reason}.", f"Because {reason}, they ran home.")
    yield d.one(f"At home they {inside}.", f"There they {inside} and laughed.")
    yield Question("why", "Why did they go home?", f"because {reason}")
    yield Question("who", f"Who was with {h.name}?", f.name)
    yield Question("where", "Where did they want to play?", c.place.where)
    yield Question("what", "What did they do at home?", f"they {inside}")
