"""The table of tensor types: gguf-py's, and one more."""

import gguf
import pytest

from bitnet_np.base.tensor_types import BY_NUMBER, I2_S

BOTH_KNOW = [kind for kind in gguf.GGML_QUANT_SIZES if kind in BY_NUMBER]


@pytest.mark.parametrize("kind", BOTH_KNOW, ids=lambda kind: kind.name)
def test_the_type_table_is_that_of_gguf(kind: gguf.GGMLQuantizationType) -> None:
    known = BY_NUMBER[kind]
    assert (known.name, known.block, known.block_bytes, known.trailer) == (kind.name, *gguf.GGML_QUANT_SIZES[kind], 0)


def test_the_type_table_knows_every_type_of_gguf_and_one_more() -> None:
    theirs = {int(kind) for kind in gguf.GGML_QUANT_SIZES}
    assert theirs <= BY_NUMBER.keys()
    assert I2_S.number not in theirs
    assert all(number == I2_S.number or number > max(theirs) for number in BY_NUMBER.keys() - theirs)  # later ones came after this gguf
    assert all(number == known.number for number, known in BY_NUMBER.items())
