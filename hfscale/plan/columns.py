"""Format rows of text as aligned columns."""

from collections.abc import Collection, Sequence


def aligned(
    rows: Sequence[Sequence[str]],
    left: Collection[int] = (0,),
    ruled: bool = False,
) -> list[str]:
    """Return a line per row. Columns in ``left`` are aligned left, all other columns right. ``ruled`` adds a line of
    dashes below the first row.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            c.ljust(w) if i in left else c.rjust(w)
            for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return (
        [
            lines[0],
            "-" * (sum(widths) + 2 * (len(widths) - 1)),
            *lines[1:],
        ]
        if ruled
        else lines
    )
