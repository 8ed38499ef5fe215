"""What the pictures of serving are drawn with: SVG boxes and words, a letter and a colour each."""

from __future__ import annotations

import string

from lecture_util.classroom.figures import style
from lecture_util.classroom.widgets.rounds import marked

FONT = "'DejaVu Sans',system-ui,sans-serif"
HUES = (
    style.WEIGHTS,
    style.CACHE,
    style.GUESS,
    style.ACCENT,
    style.PREDICTED,
    style.MEASURED,
    "#8C8C00",
)


def letter(i: int) -> str:
    """A, B, ... Z, A1, B1, ...: what the i-th request is called."""
    return string.ascii_uppercase[i % 26] + (str(i // 26) if i >= 26 else "")


def hue(i: int) -> str:
    """The colour of the i-th request; an edge or a bar in it stands out on white."""
    return HUES[i % len(HUES)]


def pale(i: int, strength: float = 0.35) -> str:
    """The same, so pale that dark words on it are legible."""
    return css(style.tint(hue(i), strength))


def css(color: tuple[float, float, float]) -> str:
    return "#" + "".join(f"{round(255 * channel):02X}" for channel in color)


def svg(label: str, width: float, height: float, *parts: str) -> str:
    return (
        f'<svg role="img" aria-label="{marked(label, 400)}" viewBox="0 0 {width} {height}" '
        f'style="display:block;width:100%;max-height:{height}px;background:white">'
        f"{''.join(parts)}</svg>"
    )


def text(
    x: float,
    y: float,
    words: str,
    size: float = 13,
    *,
    bold: bool = False,
    anchor: str = "start",
    color: str = style.INK,
    most: int = 60,
) -> str:
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:.1f}" font-family="{FONT}"{weight} '
        f'text-anchor="{anchor}" fill="{color}">{marked(words, most)}</text>'
    )


def box(
    x: float,
    y: float,
    width: float,
    height: float,
    fill: str = "none",
    stroke: str = "none",
    line: float = 1.0,
    *,
    dash: str = "",
    title: str = "",
    round: float = 0,
) -> str:
    inside = f"<title>{marked(title, 200)}</title>" if title else ""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{round}" '
        f'fill="{fill}" stroke="{stroke}" stroke-width="{line}"'
        + (f' stroke-dasharray="{dash}"' if dash else "")
        + (f">{inside}</rect>" if inside else "/>")
    )


def hatch(x: float, y: float, width: float, height: float, color: str, gap: float = 7) -> str:
    """Slanted lines inside a box, drawn one by one: a pattern of another slide would be hidden."""
    lines, start = [], -height + gap / 2
    while start < width:
        left, right = max(0.0, start), min(width, start + height)
        lines.append(
            f"M{x + left:.1f} {y + height - (left - start):.1f}"
            f"L{x + right:.1f} {y + height - (right - start):.1f}"
        )
        start += gap
    return f'<path d="{"".join(lines)}" stroke="{color}" stroke-width="1.3" fill="none"/>'


def path(d: str, color: str, line: float = 1.5, *, dash: str = "", fill: str = "none") -> str:
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<path d="{d}" fill="{fill}" stroke="{color}" stroke-width="{line}"{dashed}/>'
