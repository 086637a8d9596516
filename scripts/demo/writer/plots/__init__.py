"""The plots of stories. Each varies its words, and knows the answers to questions about it."""

from .animals import hungry_animal, lost_way, new_pet, race, strange_noise, talking_animal, thief
from .family import good_deed, magic, sleepless, truth
from .friends import built_again, gift, hide_and_seek, hurt, lost_and_found, practice, quarrel, seed, sharing, treasure, weather

_OF_FRIENDS = (lost_and_found, gift, hurt, hide_and_seek, sharing, practice, seed, treasure, built_again, quarrel, weather)
_OF_ANIMALS = (hungry_animal, talking_animal, race, lost_way, new_pet, thief, strange_noise)
PLOTS = (*_OF_FRIENDS, *_OF_ANIMALS, magic, truth, sleepless, good_deed)
OUTDOORS = (weather, hurt, race, seed, lost_way)
"""The plots that would be odd in a kitchen."""
