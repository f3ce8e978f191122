"""Colours for light and dark that hold without colour vision, and how charts wear them.

Every model of a chart carries both of its coats as a tag; the page's script puts on
the one that fits.  Runs differ in dash as well as in colour, verdicts in shape.
"""

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from bokeh.models import Legend, Model
    from bokeh.plotting import figure

__all__ = [
    "ALARM", "DASHES", "HEAT", "INK", "RUNS", "coat", "figure_of", "soft",
]  # fmt: skip

# (light, dark): after Okabe and Ito, each dark or bright enough for its ground.
RUNS = (
    ("#0062a3", "#5bb4f0"),
    ("#c24e00", "#ff9f55"),
    ("#007a5a", "#42d3a8"),
    ("#97407f", "#eaa0d4"),
    ("#876500", "#f2c94f"),
    ("#4a5663", "#b6c2ce"),
    ("#007382", "#5fd6e3"),
    ("#8a3b3b", "#f0a0a0"),
)
DASHES = ("solid", "dashed", "dotted", "dotdash", "dashdot")
ALARM = ("#b3261e", "#ff8f84")
INK = ("#5b6672", "#9aa6b2")
LINE = ("#e1e5ea", "#2a333d")
_PALE = ("#eef5fc", "#b7d4ee", "#6aa6d8", "#2069ac", "#08305f")
_DEEP = ("#122334", "#1b4468", "#2d72ad", "#6db3ea", "#dcf0ff")


AnyModel = TypeVar("AnyModel", bound="Model")


def _blended(stops: tuple[str, ...], count: int = 41) -> list[str]:
    """Make a smooth palette of a few colours."""
    rgb = [[int(stop[i : i + 2], 16) for i in (1, 3, 5)] for stop in stops]
    made = []
    for k in range(count):
        place = k * (len(rgb) - 1) / (count - 1)
        below = min(int(place), len(rgb) - 2)
        share = place - below
        pairs = zip(rgb[below], rgb[below + 1], strict=True)
        mixed = [round(a + share * (b - a)) for a, b in pairs]
        made.append("#{:02x}{:02x}{:02x}".format(*mixed))
    return made


HEAT = (_blended(_PALE), _blended(_DEEP))


def coat(model: AnyModel, **colours: tuple[Any, Any]) -> AnyModel:
    """Put the light coat on, and note both: `line_color=(light, dark)`."""
    light = {name: pair[0] for name, pair in colours.items()}
    dark = {name: pair[1] for name, pair in colours.items()}
    model.update(**light)
    model.tags = [*model.tags, {"light": light, "dark": dark}]
    return model


def figure_of(title: str, height: int = 260, **options: Any) -> "figure":
    """Make an empty chart: transparent, as wide as the page, with zoom and hover."""
    from bokeh import plotting  # noqa: PLC0415 - a large import
    from bokeh.models import NumeralTickFormatter  # noqa: PLC0415

    made = plotting.figure(
        height=height,
        sizing_mode="stretch_width",
        tools="xbox_zoom,xpan,xwheel_zoom,reset",
        active_drag="xbox_zoom",
        active_scroll=None,
        toolbar_location="above",
        background_fill_alpha=0.0,
        border_fill_alpha=0.0,
        outline_line_color=None,
        min_border_left=56,
        min_border_right=12,
        name=title,
        **options,
    )
    made.toolbar.logo = None
    made.toolbar.autohide = True
    for axis in made.axis:
        coat(
            axis,
            axis_line_color=LINE,
            major_tick_line_color=LINE,
            major_label_text_color=INK,
            axis_label_text_color=INK,
        )
        axis.minor_tick_line_color = None
        axis.major_label_text_font_size = "12px"
        axis.axis_label_text_font_size = "12px"
        axis.axis_label_text_font_style = "normal"
    for grid in made.grid:
        coat(grid, grid_line_color=LINE)
    made.xgrid.visible = False
    made.xaxis.formatter = NumeralTickFormatter(format="0,0")
    return made


def soft(legend: "Legend") -> None:
    """Let a legend lie on the chart without hiding it."""
    coat(legend, label_text_color=INK, background_fill_color=("#ffffff", "#171d24"))
    legend.background_fill_alpha = 0.75
    legend.border_line_color = None
    legend.label_text_font_size = "12px"
    legend.click_policy = "hide"
    legend.location = "left"
    legend.margin = 4
    legend.padding = 4
