"""What tables of docs/ say of an error, in one line that ends with a whole word."""


def note(text: str, most: int = 160) -> str:
    """``text`` in one line of a table's cell: of more than ``most`` characters the words that fit, and dots."""
    line = " ".join(text.replace("|", "/").split())
    if len(line) <= most:
        return line
    kept = line[: most - 3]
    return f"{kept.rpartition(' ')[0] or kept[:-1]} ..."
