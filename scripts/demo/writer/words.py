"""The small world of the stories: its people, places and things."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Person:
    name: str
    kind: str  # girl or boy
    he: str
    him: str
    his: str


@dataclass(frozen=True)
class Place:
    """A place, the word for being there, and corners of it where things are hidden."""

    name: str
    at: str
    corners: tuple[str, ...]

    @property
    def the(self) -> str:
        return f"the {self.name}"

    @property
    def where(self) -> str:
        return f"{self.at} the {self.name}"


# fmt: off
_GIRLS = ("Anna", "Lily", "Mia", "Emma", "Lucy", "Sara", "Rosa", "Ella", "Nora", "Ruby", "Clara", "Alice", "Maya", "Jane", "Kate", "Zoe",
          "Ivy", "Amy", "Lena", "Eva")
_BOYS = ("Tom", "Ben", "Max", "Sam", "Leo", "Jack", "Tim", "Finn", "Oscar", "Paul", "Noah", "Hugo", "Adam", "Peter", "Dan", "Luke",
         "Theo", "Joe", "Carl", "Otto")
# fmt: on
PEOPLE = tuple([Person(name, "girl", "she", "her", "her") for name in _GIRLS] + [Person(name, "boy", "he", "him", "his") for name in _BOYS])

_HE = {"Pip": "mouse", "Bruno": "bear", "Rex": "dog", "Bobo": "rabbit", "Hoot": "owl"}
_SHE = {"Molly": "hen", "Luna": "cat", "Daisy": "cow", "Coco": "duck", "Foxy": "fox"}
_ANIMAL_HEROES = ("Pip", "Bruno", "Molly", "Luna", "Rex", "Daisy", "Coco", "Bobo", "Foxy", "Hoot")
HEROES = PEOPLE + tuple(
    Person(name, _HE[name], "he", "him", "his") if name in _HE else Person(name, _SHE[name], "she", "her", "her") for name in _ANIMAL_HEROES
)
"""Who stories are about; sums are about people."""

PLACES = (
    Place("park", "in", ("under a bench", "behind a tree", "near the pond")),
    Place("garden", "in", ("under a rose bush", "behind the shed", "between the flowers")),
    Place("forest", "in", ("under a tall tree", "behind a rock", "next to the path")),
    Place("beach", "at", ("in the sand", "behind a rock", "under a shell")),
    Place("farm", "at", ("in the barn", "behind the fence", "under the hay")),
    Place("school", "at", ("under a desk", "on a shelf", "behind the door")),
    Place("market", "at", ("under a table", "behind a basket", "next to a cart")),
    Place("library", "in", ("on a shelf", "under a chair", "behind a pile of books")),
    Place("river", "by", ("under the bridge", "behind a rock", "in the tall grass")),
    Place("hill", "on", ("in the tall grass", "behind a bush", "under a tree")),
    Place("village", "in", ("behind the well", "under a cart", "next to a gate")),
    Place("lake", "by", ("in an old boat", "behind a rock", "in the mud")),
    Place("playground", "at", ("under the slide", "behind the swings", "in the sand")),
    Place("zoo", "at", ("under a bench", "next to the gate", "behind a sign")),
    Place("castle", "in", ("behind a door", "under the stairs", "in a tower")),
    Place("bakery", "in", ("under a table", "behind a sack of flour", "on a shelf")),
    Place("station", "at", ("under a bench", "behind a door", "next to a clock")),
    Place("meadow", "in", ("between the flowers", "in the tall grass", "under a bush")),
    Place("kitchen", "in", ("under the table", "behind a pot", "on a shelf")),
    Place("attic", "in", ("in an old box", "under a blanket", "behind a mirror")),
    Place("barn", "in", ("under the hay", "behind a cow", "in a bucket")),
    Place("island", "on", ("under a palm tree", "in the sand", "in a dark cave")),
    Place("mountain", "on", ("in a dark cave", "behind a rock", "under the snow")),
    Place("harbor", "at", ("behind a boat", "under a net", "in a barrel")),
)
_INDOORS = ("school", "library", "castle", "bakery", "station", "kitchen", "attic", "barn")
OUTDOORS = tuple(place for place in PLACES if place.name not in _INDOORS)

COLOURS = ("red", "blue", "green", "yellow", "white", "black", "brown", "orange", "purple", "pink")
LOOKS = ("small", "big", "old", "new", "shiny", "pretty")
# fmt: off
THINGS = ("ball", "kite", "doll", "boat", "drum", "book", "hat", "scarf", "key", "ring", "cup", "bell", "spoon", "lamp", "whistle",
          "basket", "shovel", "flag", "coat", "pencil", "clock", "mirror", "bag", "map", "horn", "pot")
ANIMALS = ("cat", "dog", "rabbit", "fox", "bird", "duck", "hen", "mouse", "frog", "horse", "cow", "sheep", "goat", "bear", "owl",
           "squirrel", "turtle", "pig", "bee", "snail", "crow", "wolf")
# fmt: on
FOODS = ("bread", "soup", "cake", "cheese", "honey", "rice", "pie", "jam", "fish", "corn", "butter", "salad")
_ODD = {"berry": "berries", "leaf": "leaves"}
_ONE = ("apple", "pear", "coin", "shell", "stone", "egg", "nut", "flower", "berry", "cookie", "button", "feather", "marble", "leaf")
COUNTED = tuple((one, _ODD.get(one, one + "s")) for one in (*_ONE, "carrot", "candle"))  # one, many


def a(noun: str) -> str:
    """The noun with its article."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def count(n: int, counted: tuple[str, str]) -> str:
    """1 leaf, 2 leaves."""
    return f"{n} {counted[n != 1]}"
