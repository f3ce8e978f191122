"""What the pictures of the documents are drawn with."""

from pathlib import Path

__all__ = ["HEIGHT", "WIDTH", "label", "shape", "write"]

WIDTH = 760
HEIGHT = 330


def shape(kind: str, points: list[tuple[float, float]], style: str) -> str:
    """Write one line or area."""
    places = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
    return f'<{kind} points="{places}" {style}/>'


def label(a: float, b: float, text: str, anchor: str, colour: str = "#666") -> str:
    """Write one text."""
    return (
        f'<text x="{a:.1f}" y="{b:.1f}" text-anchor="{anchor}" fill="{colour}">'
        f"{text}</text>"
    )


def write(path: Path, parts: list[str]) -> None:
    """Write the file."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="13" role="img">'
        '<rect width="100%" height="100%" fill="#fff"/>'
    )
    path.write_text("\n".join([head, *parts, "</svg>", ""]))
