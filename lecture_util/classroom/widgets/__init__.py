"""Interactive pictures: `explore` for any function, the explorers of 02 and 03, and the race.

explore     controls above a picture and a text, in widgets that survive a slide deck
names       what a screen reader says of a slider
canvas      a picture redrawn fast: what stands still is drawn once
choices     accelerators, batches and contexts to choose from
layers      one layer: its cost, and how fast this machine computes it
roofline    roofline_explorer (notebook 02)
latency     latency_explorer (notebook 03)
runs        a model's run, recorded: what it said, and when each token came
race        with and without a cache, side by side (notebooks 01 and 03)
"""

from lecture_util.classroom.widgets.explore import Explorer, explore
from lecture_util.classroom.widgets.latency import latency_explorer
from lecture_util.classroom.widgets.race import Race, race
from lecture_util.classroom.widgets.roofline import RooflineExplorer, roofline_explorer

__all__ = [
    "Explorer",
    "Race",
    "RooflineExplorer",
    "explore",
    "latency_explorer",
    "race",
    "roofline_explorer",
]
