"""For all tests: nothing reaches another machine, and subprocesses import this tree.

Spread over workers, the long ones go first.
"""

import os
import sys
from itertools import groupby
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
OFFLINE = ROOT / "tests" / "offline"

sys.path.insert(0, str(OFFLINE))
os.environ["PYTHONPATH"] = os.pathsep.join(
    dict.fromkeys(
        [str(OFFLINE), str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    )
)
os.environ["HF_HUB_OFFLINE"] = "1"  # read once, when huggingface_hub is first imported
pytest_plugins = ["offline_session"]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Over several workers, long tests first: none is left alone with one at the end.

    pytest-xdist hands each worker a stretch of the list, and one that has done its own takes half
    of another's rest (`--dist worksteal`). So files with slow tests go to the stretches' fronts.
    """
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers == 1:
        return
    slow, rest = [], []
    for path, group in groupby(items, lambda item: item.path):
        tests = list(group)
        marked = [item for item in tests if item.get_closest_marker("slow")]
        if path.name == "test_notebooks.py":  # ten minutes in one file, with nothing in common
            slow += [[item] for item in marked]
            rest += [item for item in tests if item not in marked]
        elif marked:
            slow.append(tests)
        else:
            rest += tests
    slow.sort(key=len)  # a notebook is one test
    stretches = [[item for tests in slow[i::workers] for item in tests] for i in range(workers)]
    for i, stretch in enumerate(stretches):
        left = sum(map(len, stretches[i:])) + len(rest)
        fill = max(0, left // (workers - i) - len(stretch))
        stretch += rest[:fill]
        del rest[:fill]
    items[:] = sum(stretches, rest)
