"""The family of errors, and values as messages show them."""

from bitnet_np.base.errors import CapacityError, ContextLimitError, MaskError, ShapeError, SlotError, shown


def test_some_errors_are_also_more_general_ones():
    assert issubclass(ContextLimitError, CapacityError)
    assert issubclass(MaskError, ShapeError)
    assert issubclass(SlotError, IndexError)


def test_values_are_shown_short_and_without_what_garbles_a_terminal():
    assert shown("attn_q") == "'attn_q'"
    assert shown(1.5) == "1.5"
    assert shown("\x1b[2J\n") == r"'\x1b[2J\n'"
    assert shown("a" * 78) == f"'{'a' * 78}'"
    assert shown("a" * 79) == f"'{'a' * 76}..."
    assert len(shown(list(range(10**5)))) == 80
    deep = []
    for _ in range(200_000):
        deep = [deep]
    assert shown(deep) == "a list that nests too deep"
