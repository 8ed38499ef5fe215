"""Interactive pictures: `explore` for any function, and the explorers of notebooks 02 and 03.

explore     controls above a picture and a text, in widgets that survive a slide deck
explorers   roofline_explorer (notebook 02) and latency_explorer (notebook 03)
"""

from lecture_util.classroom.widgets.explore import Explorer, explore
from lecture_util.classroom.widgets.explorers import latency_explorer, roofline_explorer

__all__ = ["Explorer", "explore", "latency_explorer", "roofline_explorer"]
