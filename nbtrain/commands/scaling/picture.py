"""A scaling report as an SVG picture: the speed-up, and what was lost against the ideal. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...ui.board import axes, theme
from .efficiency import Size

WIDTH, HEIGHT = 520, 236
_LEFT, _TOP, _FLOOR = 40, 24, 180

_PARTS = {
    "efficiency": ("speed-up", theme.BLUE),
    "data": ("data", theme.AMBER),
    "communication": ("communication", theme.GREEN),
    "imbalance": ("imbalance", theme.RED),
    "slower": ("slower compute", theme.GREY),
}
"""The label and the colour of each share of a step."""


@dataclass(frozen=True)
class ScalingPicture:
    """A picture that a notebook draws and `save` writes."""

    svg: str

    def _repr_svg_(self) -> str:
        return self.svg

    def save(self, path: str | Path) -> None:
        """Write the picture as an SVG file."""
        Path(path).write_text(self.svg, encoding="utf-8")


def legend(sizes: Sequence[Size]) -> dict[str, tuple[str, str]]:
    """Return the label and the colour of each share; shares that are unknown for a size are one."""
    unknown = {name for size in sizes for name, share in size.lost.items() if share is None}
    known = {name: label for name, label in _PARTS.items() if name not in unknown}
    return known | ({"slower": ("not separated", theme.GREY)} if unknown else {})


def svg(sizes: Sequence[Size]) -> str:
    """Draw a bar up to the ideal speed-up of each size: its speed-up, and on top what was lost.

    A share below 0 (a gain) is not drawn, the table has it.
    """
    bars = [_bar(size, size.ranks / sizes[0].ranks) for size in sizes]
    top = max(*(sum(bar.values()) for bar in bars), *(size.high or 0.0 for size in sizes))
    axis = axes.of_values(0.0, top, 4)

    def height(speedup: float) -> float:
        return (_FLOOR - _TOP) * axis.place(speedup)

    crowded = " (* more ranks than cores)" if any(size.shares_cores for size in sizes) else ""
    drawn = [_text(0, 12, f"speed-up, up to the ideal{crowded}", "start")]
    for tick, label in zip(axis.ticks, axis.labels, strict=True):
        y = _FLOOR - height(tick)
        drawn.append(f'<path d="M{_LEFT} {y:.1f}H{WIDTH}" stroke="#888" stroke-opacity=".28"/>')
        drawn.append(_text(_LEFT - 6, y + 4, label, "end"))
    each = (WIDTH - _LEFT) / len(sizes)
    for i, (size, bar) in enumerate(zip(sizes, bars, strict=True)):
        x, y = _LEFT + each * (i + 0.2), float(_FLOOR)
        for name, share in bar.items():
            y -= height(share)
            drawn.append(_rectangle(x, y, each * 0.6, height(share), _PARTS[name][1]))
        middle, low, high = x + each * 0.3, height(size.low or 0.0), height(size.high or 0.0)
        spread = f'd="M{middle:.1f} {_FLOOR - low:.1f}v{low - high:.1f}"'
        drawn.append(f'<path {spread} stroke="#111" stroke-width="2"/>')
        drawn.append(_text(middle, _FLOOR + 16, f"{size.ranks}{' *' * size.shares_cores}"))
    drawn.append(_text((_LEFT + WIDTH) / 2, _FLOOR + 32, "ranks"))
    x = float(_LEFT)
    for label, colour in legend(sizes).values():
        drawn.append(_rectangle(x, HEIGHT - 13, 9, 9, colour))
        drawn.append(_text(x + 13, HEIGHT - 4, label, "start"))
        x += 30 + 6.2 * len(label)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="system-ui,sans-serif" font-size="11" fill="{theme.GREY}">'
        f"{''.join(drawn)}</svg>"
    )


def _bar(size: Size, ideal: float) -> dict[str, float]:
    """Return the parts of the ideal speed-up, those that were lost by what they were lost to."""
    shares = {"efficiency": size.efficiency, **size.lost}
    return {name: ideal * max(0.0, share or 0.0) for name, share in shares.items()}


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


def _rectangle(x: float, y: float, width: float, height: float, colour: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>'
    )
