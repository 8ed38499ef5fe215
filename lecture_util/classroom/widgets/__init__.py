"""Interactive pictures: `explore` for any function, the explorers, and the race.

explore     controls above a picture and a text, in widgets that survive a slide deck
names       what a screen reader says of a slider
canvas      a picture redrawn fast: what stands still is drawn once
choices     accelerators, batches and contexts to choose from
layers      one layer: its cost, and how fast this machine computes it
roofline    roofline_explorer (notebook 02)
latency     latency_explorer (notebook 03)
runs        a model's run, recorded: what it said, and when each token came
calculator  cache_calculator (notebook 04)
masks       what each layer of a small stack sees, keeps and reaches
viewer      mask_viewer (notebook 04)
memories    four memories of the same pairs, computed
memory      memory_stepper (notebook 05)
race        with and without a cache, side by side (notebooks 01 and 03)
"""

from lecture_util.classroom.widgets.calculator import CacheCalculator, cache_calculator
from lecture_util.classroom.widgets.explore import Explorer, explore
from lecture_util.classroom.widgets.latency import latency_explorer
from lecture_util.classroom.widgets.memory import memory_stepper
from lecture_util.classroom.widgets.race import Race, race
from lecture_util.classroom.widgets.roofline import RooflineExplorer, roofline_explorer
from lecture_util.classroom.widgets.viewer import mask_viewer

__all__ = [
    "CacheCalculator",
    "Explorer",
    "Race",
    "RooflineExplorer",
    "cache_calculator",
    "explore",
    "latency_explorer",
    "mask_viewer",
    "memory_stepper",
    "race",
    "roofline_explorer",
]
