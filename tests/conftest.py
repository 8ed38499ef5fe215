"""For all tests: nothing reaches another machine, and subprocesses import this tree."""

import os
import sys
from pathlib import Path

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
