"""Interactive pictures: `explore` for any function, the explorers, and the race.

explore       controls above a picture and a text, in widgets that survive a slide deck
names         what a screen reader says of a slider
canvas        a picture redrawn fast: what stands still is drawn once
choices       accelerators, batches and contexts to choose from
layers        one layer: its cost, and how fast this machine computes it
roofline      roofline_explorer (notebook 02)
latency       latency_explorer (notebook 03)
runs          a model's run, recorded: what it said, and when each token came
calculator    cache_calculator (notebook 04)
masks         what each layer of a small stack sees, keeps and reaches
viewer        mask_viewer (notebook 04)
memories      four memories of the same pairs, computed
memory        memory_stepper (notebook 05)
rounding      a tensor on a grid of few levels, and what that cost
quantizing    quantization_explorer (notebook 06), and its picture beside it
bytes_of      one group of weights as stored; bytes_html, the same as tables
inspector     weight_inspector (notebook 06)
records       what was recorded of models with fewer layers
kept          layers_kept (notebook 07)
cells         an importance map as rows and columns of cells
heat          a map of cells to pick from, by click or arrow keys
importance    importance_map (notebook 07)
rounds        rounds of speculative sampling, with words for their tokens
stepping      buttons and arrow keys that move a slider one step
ribbon        token_ribbon (notebook 08)
tree_svg      a draft's tree and its mask, drawn
unfolding     tree_unfolding (notebook 08)
curves        measured speed-ups, and what verifying costs
speedups      speedup_explorer (notebook 08)
two_symbols   two_symbol_explorer (notebook 08)
drawing       boxes, words and colours of the pictures of serving
schedules     one trace served twice on paper, static and continuous
gantt         slots over time, drawn
schedule      schedule_explorer (notebook 09)
snapshots     a serving loop, written down forward by forward
forwards      one forward of a server as HTML
engine_steps  engine_stepper (notebooks 09 and 10)
page_story    a block allocator played with by hand, and undo
page_svg      block tables and physical pages, drawn
block_tables  block_table_explorer (notebook 10)
waste         waste_explorer (notebook 10)
arcs          two vectors in the plane, the arc and the chord between them
slerping      slerp_against_lerp (notebook 11)
ties_work     TIES on three small vectors, computed; ties_svg, the same drawn
ties_steps    ties_step_by_step (notebook 11)
merges        merges of small models, made at once, scored and remembered
densities     density_sliders (notebook 11); density_picture, its bars and curve
configurator  configurator (notebook 12); configured, its bars
race          with and without a cache, side by side (notebooks 01 and 03)
"""

from lecture_util.classroom.widgets.block_tables import (
    BlockTableExplorer,
    block_table_explorer,
)
from lecture_util.classroom.widgets.calculator import CacheCalculator, cache_calculator
from lecture_util.classroom.widgets.configurator import Configurator, configurator
from lecture_util.classroom.widgets.densities import DensitySliders, density_sliders
from lecture_util.classroom.widgets.engine_steps import EngineStepper, engine_stepper
from lecture_util.classroom.widgets.explore import Explorer, explore
from lecture_util.classroom.widgets.importance import ImportanceMap, Pick, importance_map
from lecture_util.classroom.widgets.inspector import WeightInspector, weight_inspector
from lecture_util.classroom.widgets.kept import layers_kept
from lecture_util.classroom.widgets.latency import latency_explorer
from lecture_util.classroom.widgets.memory import memory_stepper
from lecture_util.classroom.widgets.quantizing import (
    QuantizationExplorer,
    quantization_explorer,
)
from lecture_util.classroom.widgets.race import Race, race
from lecture_util.classroom.widgets.ribbon import TokenRibbon, token_ribbon
from lecture_util.classroom.widgets.roofline import RooflineExplorer, roofline_explorer
from lecture_util.classroom.widgets.schedule import ScheduleExplorer, schedule_explorer
from lecture_util.classroom.widgets.slerping import SlerpExplorer, slerp_against_lerp
from lecture_util.classroom.widgets.speedups import speedup_explorer
from lecture_util.classroom.widgets.ties_steps import TiesStepper, ties_step_by_step
from lecture_util.classroom.widgets.two_symbols import two_symbol_explorer
from lecture_util.classroom.widgets.unfolding import TreeUnfolding, tree_unfolding
from lecture_util.classroom.widgets.viewer import mask_viewer
from lecture_util.classroom.widgets.waste import WasteExplorer, waste_explorer

__all__ = [
    "BlockTableExplorer",
    "CacheCalculator",
    "Configurator",
    "DensitySliders",
    "EngineStepper",
    "Explorer",
    "ImportanceMap",
    "Pick",
    "QuantizationExplorer",
    "Race",
    "RooflineExplorer",
    "ScheduleExplorer",
    "SlerpExplorer",
    "TiesStepper",
    "TokenRibbon",
    "TreeUnfolding",
    "WasteExplorer",
    "WeightInspector",
    "block_table_explorer",
    "cache_calculator",
    "configurator",
    "density_sliders",
    "engine_stepper",
    "explore",
    "importance_map",
    "latency_explorer",
    "layers_kept",
    "mask_viewer",
    "memory_stepper",
    "quantization_explorer",
    "race",
    "roofline_explorer",
    "schedule_explorer",
    "slerp_against_lerp",
    "speedup_explorer",
    "ties_step_by_step",
    "token_ribbon",
    "tree_unfolding",
    "two_symbol_explorer",
    "waste_explorer",
    "weight_inspector",
]
