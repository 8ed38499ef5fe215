"""importance_map (notebook 07): pick a head, a neuron, a channel; see what would go with it."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lecture_util.classroom.figures import style
from lecture_util.classroom.widgets.cells import Cells
from lecture_util.classroom.widgets.choices import menu
from lecture_util.classroom.widgets.explore import Explorer
from lecture_util.classroom.widgets.heat import COLORED, MAP, HeatMap
from lecture_util.model.config import Config

OnPick = Callable[["Pick"], str | None]


@dataclass(frozen=True)
class Pick:
    """The cell that was picked: columns start:stop of a map. Rank 1 is the least important.

    layer is None where the map has no layers. value is the cell's mean. with_it: in words.
    """

    map: str
    layer: int | None
    start: int
    stop: int
    value: float
    rank: int
    of: int
    rank_in_layer: int
    of_in_layer: int
    with_it: str


class ImportanceMap(Explorer):
    """The explorer; `picked` is the last Pick, None before the first."""

    def __init__(
        self, maps: dict[str, Cells], config: Config | None, on_pick: OnPick | None
    ) -> None:
        self.maps, self.config, self.on_pick = maps, config, on_pick
        self.picked: Pick | None = None
        self.answer = ""
        self.heat = HeatMap()
        self._shown = None
        first = next(iter(maps))
        controls = {
            "map": menu("map", list(maps), first),
            "colors": menu("colours", list(COLORED), MAP),
        }
        super().__init__(self._draw, controls, [self.heat], columns=2)
        self.heat.observe(self._picked, names="cell")

    def pick(self, row: int, column: int) -> Pick:
        """Pick a cell of the map that is shown.

        Raises: ValueError if there is no such cell.
        """
        cells = self.maps[self.values["map"]]
        rows, columns = cells.values_RC.shape
        if not _there(cells, row, column):
            raise ValueError(f"no cell ({row}, {column}): the map has {rows} rows of {columns}")
        self.heat.cell = [row, column]
        return self.picked

    def _picked(self, _change: object) -> None:
        self.answer = ""
        cells = self.maps[self.values["map"]]
        if self.heat.cell and not _there(cells, *self.heat.cell):
            self.heat.cell = []  # a click on a map that has just made way for another
            return
        if self.heat.cell:
            self.picked = self._pick_at(*self.heat.cell)
            self.answer = _asked(self.on_pick, self.picked)
        self.redraw()

    def _draw(self, map: str, colors: str) -> str:
        cells = self.maps[map]
        if self._shown != (map, colors):
            before, self._shown = self._shown, (map, colors)
            if before and before[0] != map:
                self.heat.cell = []
            self.heat.show(cells, colors)
        if not self.heat.cell:
            self.heat.outline = []
            return "Click a cell, or press Tab and walk with the arrow keys."
        self.heat.outline = self._group(cells, *self.heat.cell)
        return f"{_words(self.picked)}{self.answer}"

    def _pick_at(self, row: int, column: int) -> Pick:
        name = self.values["map"]
        cells = self.maps[name]
        layer = None if cells.folded else row
        ranks = cells.rank_RC, cells.rank_in_row_RC[row] if layer is not None else cells.rank_RC
        many, in_layer = (int((rank > 0).sum()) for rank in ranks)
        start, stop = cells.start(row, column), cells.stop(row, column)
        return Pick(
            name, layer, start, stop, float(cells.values_RC[row, column]),
            int(cells.rank_RC[row, column]), many, int(cells.rank_in_row_RC[row, column]), in_layer,
            self._with_it(cells, row, column),
        )  # fmt: skip

    def _group(self, cells: Cells, row: int, column: int) -> list[int]:
        """Where the KV group of the picked head lies; empty where there is none."""
        config = self.config
        heads = "head" in cells.name and not cells.folded and cells.span == 1
        if not heads or config is None or cells.columns != config.N:
            return []
        first = column // config.G * config.G
        return [row, first, first + config.G]

    def _with_it(self, cells: Cells, row: int, column: int) -> str:
        config, name = self.config, cells.name.lower()
        number = cells.stop(row, column) - cells.start(row, column)
        if group := self._group(cells, row, column):
            return _kv_group(cells, config, *group)
        rules = {"head": _head, "neuron": _neuron, "channel": _channel, "layer": _layer}
        rule = next((rule for word, rule in rules.items() if word in name), None)
        if rule is None:
            return ""
        words, freed = rule(config, number)
        return f"{words}: {freed:,} weights" if config else words


def _there(cells: Cells, row: int, column: int) -> bool:
    rows, columns = cells.values_RC.shape
    inside = 0 <= row < rows and 0 <= column < columns
    return inside and not math.isnan(cells.values_RC[row, column])


def _kv_group(cells: Cells, config: Config, layer: int, start: int, stop: int) -> str:
    sums = cells.values_RC[layer].reshape(-1, config.G).sum(1)
    group = start // config.G
    rank = int((sums < sums[group]).sum() + (sums[:group] == sums[group]).sum()) + 1
    heads = f"query heads {start} to {stop - 1}" if config.G > 1 else f"query head {start}"
    freed = config.H * (2 * config.D * (config.G + 1) + config.qkv_bias * (config.G + 2))
    return (
        f"KV head {group} with its {heads} (together {style.number(sums[group])}, rank {rank} of "
        f"{len(sums)} groups in the layer): {freed:,} weights, and {2 * config.H} numbers a token "
        "of the layer's cache"
    )


def _head(config: Config | None, number: int) -> tuple[str, int]:
    freed = number * config.H * (2 * config.D + config.qkv_bias) if config else 0
    return "its rows of q in qkv and its columns of out; no KV head unless its group goes", freed


def _neuron(config: Config | None, number: int) -> tuple[str, int]:
    freed = 3 * config.D * number if config else 0
    words = ("row of gate, a row of up and a column of down", "rows of gate and of up, columns of "
             "down")  # fmt: skip
    return f"a {words[0]}" if number == 1 else f"{number} {words[1]}", freed


def _channel(config: Config | None, number: int) -> tuple[str, int]:
    freed = 0
    if config:
        layer = 2 * (config.N + config.K) * config.H + 3 * config.F + 2
        freed = number * (config.L * layer + (1 if config.tied else 2) * config.V + 1)
    return (
        "in every layer, columns of what reads the stream (qkv, gate and up), rows of what writes "
        "it (out, down) and the norms' weights; and of the embedding and the head"
    ), freed


def _layer(config: Config | None, number: int) -> tuple[str, int]:
    freed = 0
    if config:
        D, F, N, K, H = config.D, config.F, config.N, config.K, config.H
        bias = config.qkv_bias * (N + 2 * K) * H
        freed = number * (2 * (N + K) * H * D + bias + 3 * D * F + 2 * D)
    return "its attention, its MLP, its two norms and its cache", freed


def _asked(on_pick: OnPick | None, pick: Pick) -> str:
    """What on_pick answers, as it is shown; its error, if it raises one."""
    if on_pick is None:
        return ""
    try:
        answer = on_pick(pick)
    except Exception as error:  # a reader's function: shown, not lost in a log
        message = html.escape(f"on_pick: {type(error).__name__}: {error}")
        return f'<br><span style="color:#B00020"><b>{message}</b></span>'
    return "" if answer is None else f"<br>{answer}"


def _words(pick: Pick) -> str:
    which = (
        f"{pick.start:,}" if pick.stop == pick.start + 1 else f"{pick.start:,}–{pick.stop - 1:,}"
    )
    where = f"Layer {pick.layer}, {pick.map}" if pick.layer is not None else pick.map.capitalize()
    ranks = f"rank {pick.rank:,} of {pick.of:,} from the least up"
    if pick.layer is not None and pick.of_in_layer > 1:
        ranks += f", {pick.rank_in_layer} of {pick.of_in_layer} in its layer"
    goes = f"<br>With it goes: {pick.with_it}." if pick.with_it else ""
    mean = "mean " if pick.stop > pick.start + 1 else ""
    return f"{where} <b>{which}: {mean}{style.number(pick.value)}</b>, {ranks}.{goes}"


def importance_map(
    importance: Any, config: Config | None = None, on_pick: OnPick | None = None
) -> ImportanceMap:
    """Heat maps of importance; a click or the arrow keys pick a cell (notebook 07).

    importance: a tensor (L, columns) or (columns,), or a dict of name to such tensors. Of a name
                with head, neuron, channel or layer in it, the text says what goes with a cell;
                with the model's config also how many weights that frees.
    on_pick:    called with each Pick; the text it returns is shown below. `.picked` is the last.

    Example: `importance_map({"heads": heads_LN, "channels": channels_D}, model.config)`
    Raises:  ValueError naming the map that has no numbers, NaN, or more than two axes.
    """
    maps = importance if isinstance(importance, Mapping) else {"importance": importance}
    if not maps:
        raise ValueError("importance is an empty dict: pass at least one map, name to tensor")
    if config is not None and not isinstance(config, Config):
        raise TypeError(f"config is a {type(config).__name__}: pass model.config, or leave it out")
    if on_pick is not None and not callable(on_pick):
        raise TypeError(f"on_pick={on_pick!r} is not a function: pass one that takes a Pick")
    cells = {str(name): Cells.of(str(name), values) for name, values in maps.items()}
    return ImportanceMap(cells, config, on_pick)
