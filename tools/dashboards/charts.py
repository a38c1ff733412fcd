"""The parts of a dashboard, and their conversion to Grafana's JSON by Grafana's typed SDK.

A chart is data: queries, a unit and a way to draw them. All panels are built here, so they look alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from grafana_foundation_sdk.builders import barchart, common, stat, timeseries
from grafana_foundation_sdk.builders.dashboard import Dashboard
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.models.common import LegendDisplayMode, StackingMode, TooltipDisplayMode, VizOrientation
from grafana_foundation_sdk.models.dashboard import DataSourceRef, DataTransformerConfig, DynamicConfigValue
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from hackkv.timing import Stage

DATA_SOURCE = DataSourceRef("prometheus", "prometheus")
"""The data source of all charts. Its uid is set in deploy/grafana/provisioning."""

COLOURS = {
    Stage.ROUTER_QUEUE: "#8e8ea0",
    Stage.PREFILL_QUEUE: "#c9b458",
    Stage.PREFILL: "#e58f2a",
    Stage.SWAP_WAIT: "#a3352c",
    Stage.TRANSFER: "#c44e9b",
    Stage.DECODE_QUEUE: "#7aa6d8",
    Stage.DECODE: "#2f6fb5",
    Stage.STREAM: "#4d9e6a",
}
"""A stage has the same colour everywhere."""


class Draw(Enum):
    """How a chart's queries are drawn."""

    LINES = auto()
    STACKED = auto()
    """Lines on top of each other, for parts of a whole."""
    NUMBERS = auto()
    """The latest value of each query."""
    BARS_BY_CODEC = auto()
    """One bar per codec, made of its stages, over the whole range of the dashboard."""


@dataclass(frozen=True, slots=True)
class Query:
    """PromQL, and a legend with {{labels}}."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Chart:
    """One panel. `unit` is Grafana's name of it; `width` of 24 is a whole row."""

    title: str
    about: str
    unit: str
    queries: tuple[Query, ...]
    draw: Draw = Draw.LINES
    width: int = 12


@dataclass(frozen=True, slots=True)
class Board:
    """One dashboard; `name` is its file and the end of its uid."""

    name: str
    title: str
    charts: tuple[Chart, ...]

    def build(self) -> Any:
        """The dashboard in Grafana's own model."""
        board = Dashboard(self.title).uid(f"hackkv-{self.name}").tags(["hackkv"])
        board = board.refresh("10s").time("now-30m", "now").timezone("browser").editable()
        for chart in self.charts:
            board = board.with_panel(_panel(chart))
        return board.build()


def _panel(chart: Chart) -> Any:
    panel = _DRAWINGS[chart.draw]()
    panel = panel.title(chart.title).description(chart.about).unit(chart.unit).span(chart.width)
    panel = panel.height(4 if chart.draw is Draw.NUMBERS else 9).datasource(DATA_SOURCE).min(0)
    if any("stage" in query.expr for query in chart.queries):
        for stage, colour in COLOURS.items():
            fixed = DynamicConfigValue("color", {"mode": "fixed", "fixedColor": colour})
            panel = panel.override_by_name(str(stage), [fixed])
    for number, query in enumerate(chart.queries):
        target = Dataquery().datasource(DATA_SOURCE).expr(query.expr).legend_format(query.legend)
        target = target.ref_id(chr(ord("A") + number))
        if chart.draw is Draw.BARS_BY_CODEC:
            target = target.instant().format(PromQueryFormat.TABLE)
        panel = panel.with_target(target)
    return panel


def _lines(stacking: StackingMode, fill: float) -> Any:
    tooltip = common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI)
    panel = timeseries.Panel().line_width(1).fill_opacity(fill).legend(_legend()).tooltip(tooltip)
    return panel.stacking(common.StackingConfig().mode(stacking))


def _legend() -> common.VizLegendOptions:
    return common.VizLegendOptions().display_mode(LegendDisplayMode.LIST).show_legend(True)


def _bars_by_codec() -> Any:
    matrix = {"rowField": "codec", "columnField": "stage", "valueField": "Value"}
    order = {name: place for place, name in enumerate(("codec\\stage", *map(str, Stage)))}
    panel = barchart.Panel().stacking(StackingMode.NORMAL).orientation(VizOrientation.HORIZONTAL)
    panel = panel.x_field("codec\\stage").fill_opacity(85).legend(_legend())
    panel = panel.with_transformation(DataTransformerConfig("groupingToMatrix", options=matrix))
    return panel.with_transformation(DataTransformerConfig("organize", options={"indexByName": order}))


_DRAWINGS = {
    Draw.LINES: lambda: _lines(StackingMode.NONE, 8),
    Draw.STACKED: lambda: _lines(StackingMode.NORMAL, 70),
    Draw.NUMBERS: stat.Panel,
    Draw.BARS_BY_CODEC: _bars_by_codec,
}
