"""A group's bytes and one value's bits as HTML tables, which a screen reader reads cell by cell."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lecture_util.classroom.figures import style
from lecture_util.classroom.widgets.bytes_of import INT4, INT8, NF4, ZERO_POINT, Group
from lecture_util.quantization.formats import FORMATS, bit_string, decode, encode

LINE = 24  # values side by side
SHOWN = ("fp16", "bf16", "e4m3")  # formats that the value itself is put into
NAMES = {format.dtype: name for name, format in FORMATS.items()}
FIELDS = (style.ACCENT, style.CACHE, style.WEIGHTS)  # sign, exponent, mantissa
MONO = "font-family:'DejaVu Sans Mono',Menlo,Consolas,monospace"
TABLE = "border-collapse:collapse;line-height:1.4"
CELL = "border:1px solid #BBB;padding:0 2px;text-align:center;min-width:2.9em"
HEAD = "text-align:right;padding:0 6px 0 0;white-space:nowrap"
CHOSEN = f"outline:3px solid {style.MEASURED};outline-offset:-2px;font-weight:bold"
BOX = (
    "display:inline-block;width:1.05em;border:1px solid #888;margin-right:-1px;"
    f"text-align:center;line-height:1.2;color:{style.INK};{MONO}"
)


def strip(g: Group, chosen: int) -> str:
    """Values, codes and bytes in lines of 24, the chosen value marked in each."""
    power, per_byte, rows = _power(g.values), 8 // g.bits, []
    unit = f"value·10{_superscript(power)}" if power else "value"
    for start in range(0, len(g.values), LINE):
        places = range(start, min(start + LINE, len(g.values)))
        held = range(start // per_byte, -(-places.stop // per_byte))
        lines = {
            unit: [_cell(f"{g.values[i] * 10**power:.1f}", i == chosen, fill=_tint(g, i))
                   for i in places],
            "code": [_cell(f"{g.codes[i]}", i == chosen) for i in places],
            "byte": [_cell(f"{g.data[i]:02X}", i == chosen // per_byte, per_byte) for i in held],
        }  # fmt: skip
        for title, cells in lines.items():
            head = f'<th scope="row" style="{HEAD}">{title}</th>'
            rows.append(f"<tr>{head}{''.join(cells)}</tr>")
        rows.append('<tr style="height:5px"></tr>')
    return f'<table style="{TABLE};font-size:13px;{MONO}">{"".join(rows)}</table>'


def bits(g: Group, chosen: int) -> str:
    """The chosen value's byte, the scale and the value itself in small formats, bit by bit."""
    x, scale = float(g.values[chosen]), NAMES[g.scale.dtype]
    rows = [
        _byte(g, chosen),
        (f"{'absmax' if g.stored == NF4 else 'scale'} in {scale}",
         _fields(int(encode(g.scale, scale)), scale), f"{float(g.scale):.6g}"),
    ]  # fmt: skip
    if g.zero is not None:
        rows.append(("zero", _boxes(f"{g.zero:08b}"), f"code {g.zero} means 0.0"))
    for name in SHOWN:
        code = int(encode(x, name))
        back = float(decode(code, name))
        words = f"{back:.6g}, off by {back - x:+.1e}"
        rows.append((f"the value in {name}", _fields(code, name), words))
    cell = "padding:1px 10px 1px 0;white-space:nowrap"
    body = "".join(
        f'<tr><th scope="row" style="text-align:left;font-weight:normal;{cell}">{title}</th>'
        f'<td style="{cell}">{boxes}</td><td style="{cell}">{words}</td></tr>'
        for title, boxes, words in rows
    )
    return f'<table style="{TABLE};font-size:15px">{body}</table>'


def _byte(g: Group, chosen: int) -> tuple[str, str, str]:
    """The byte that holds the chosen code, whose bits are coloured."""
    byte, code = g.data[chosen * g.bits // 8], int(g.codes[chosen])
    octet, half = f"{byte:08b}", f"{int(g.halves[chosen]):0{g.bits}b}"
    filled = _rgb(style.tint(FIELDS[2], 0.6))
    if g.stored == INT8:
        words = f"0x{byte:02X}: code {code} in two's complement"
        return "its byte", _boxes(octet[:4], filled) + _boxes(octet[4:], filled), words
    low = chosen % 2
    boxes = "".join(
        _boxes(part, filled if place == low else "white")
        for place, part in enumerate((octet[:4], octet[4:]))
    )
    means = {
        INT4: f"{int(g.halves[chosen])} = code {code} + 8",
        ZERO_POINT: f"code {code}, {code - (g.zero or 0):+d} from zero",
        NF4: f"level {code}, {float(g.levels[code] / (g.scale or 1)):+.4f}",
    }[g.stored]
    where = "second, in the low half" if low else "first, in the high half"
    return "its byte: two codes", boxes, f"0x{byte:02X}, {where}: {half} = {means}"


def _power(values: Tensor) -> int:
    """The power of ten that gives the largest value two digits before the point, or three."""
    largest = float(values.abs().max())
    return 0 if 10 <= largest < 1000 or not largest else 1 - int(f"{largest:e}".split("e")[1])


def _superscript(number: int) -> str:
    return f"{number}".translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _tint(g: Group, i: int) -> str:
    """A value's background: how large it is in the group, orange below zero, purple above."""
    share = float(g.values[i] / (g.values.abs().max() or 1))
    return _rgb(style.tint(style.CACHE if share < 0 else style.ACCENT, 0.75 * abs(share)))


def _rgb(color: Sequence[float]) -> str:
    return "#" + "".join(f"{round(255 * channel):02X}" for channel in color)


def _cell(text: str, chosen: bool, span: int = 1, fill: str = "white") -> str:
    mark = f";{CHOSEN}" if chosen else ""
    wide = f' colspan="{span}"' if span > 1 else ""
    return f'<td{wide} style="{CELL};background:{fill};color:{style.INK}{mark}">{text}</td>'


def _boxes(digits: str, fill: str = "white") -> str:
    inside = "".join(f'<span style="{BOX};background:{fill}">{bit}</span>' for bit in digits)
    return f'<span style="margin-right:5px">{inside}</span>'


def _fields(code: int, format: str) -> str:
    """The bits of a floating-point code, coloured by field."""
    parts = bit_string(code, format).split(" ")
    fills = [_rgb(style.tint(color, 0.6)) for color in FIELDS]
    return "".join(_boxes(part, fill) for part, fill in zip(parts, fills, strict=True))
