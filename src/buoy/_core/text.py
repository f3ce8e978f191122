"""Text from a file or a name, made safe for a terminal."""

__all__ = ["printable"]


def printable(text: str) -> str:
    r"""Escape what is not to be seen: control and formatting characters.

    A terminal would obey them: set its title, clear the screen, turn text round.

    Example:
        >>> printable("layer\x1b[2J.\u202eweight")
        'layer\\x1b[2J.\\u202eweight'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "backslashreplace").decode("ascii")
