"""All of it together: one model, one machine, one table.

The one room beneath the classroom that may import every part: it combines them.

configuration  what is switched on, and what excludes what
workload       who asks what, and when
student        the pruned model, repaired by the adapter that comes with the course
variants       the model that a configuration runs, and the bytes it holds
run            answer a workload with a configuration: seconds, bytes, tokens
costs          how long forwards take: by two peaks, or by a few that were timed
predict        the same answer on paper, before it is run
table          configurations in rows, predicted beside measured
scenarios      a chat service, a batch job, a laptop: budgets, and what meets them
"""

from .configuration import Configuration, Incompatible, conflicts
from .predict import Prediction, predict
from .run import Outcome, serve
from .variants import Variants
from .workload import Workload

__all__ = [
    "Configuration",
    "Incompatible",
    "Outcome",
    "Prediction",
    "Variants",
    "Workload",
    "conflicts",
    "predict",
    "serve",
]
