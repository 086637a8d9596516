"""Random damage to the bytes of a file."""

from hypothesis import strategies as st

EDITS = st.lists(
    st.tuples(st.sampled_from(["flip", "set", "cut", "insert"]), st.floats(0, 1), st.binary(min_size=1, max_size=9)), min_size=1, max_size=4
)


def damaged(raw, edits, within=None):
    """The bytes after these edits, each at a part of their number, or of the first `within`."""
    raw = bytearray(raw)
    for what, where, new in edits:
        at = int(where * min(len(raw), within or len(raw)))
        if what == "flip":
            raw[at : at + 1] = bytes(b ^ new[0] for b in raw[at : at + 1])
        elif what == "set":
            raw[at : at + len(new)] = new
        elif what == "cut":
            del raw[at : at + new[0]]
        else:
            raw[at:at] = new
    return bytes(raw)
