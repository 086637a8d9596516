"""Text for people: tables, and text of files without what could garble a terminal."""

from collections.abc import Collection, Sequence


def table(header: Sequence[str], rows: Collection[Sequence[object]]) -> str:
    """A table as text in aligned columns: text to the left, numbers to the right."""
    cells = [[_cell(value) for value in row] for row in rows]
    numeric = [all(not isinstance(row[i], str) for row in rows) for i in range(len(header))]
    widths = [max(len(row[i]) for row in [list(header), *cells]) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        return "  ".join(cell.rjust(w) if right else cell.ljust(w) for cell, w, right in zip(row, widths, numeric, strict=True)).rstrip()

    return "\n".join([line(header), *(line(row) for row in cells)])


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else printable(str(value))


def printable(text: str) -> str:
    """Text of a file, with characters that could garble a terminal escaped."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
