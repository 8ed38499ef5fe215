"""Tests that need a package skip where it is missing. So one test must see that it is not.

LECTURE_WITHOUT names, with commas between them, packages that a machine does without on purpose.
"""

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REQUIREMENTS = Path(__file__).parents[1] / "requirements.txt"
WITHOUT = {name.strip() for name in os.environ.get("LECTURE_WITHOUT", "").split(",")}


def wanted() -> dict[str, bool]:
    """Name -> whether it is asked for on every platform."""
    lines = (line.split("#")[0].strip() for line in REQUIREMENTS.read_text("utf-8").splitlines())
    names = ((re.match(r"[A-Za-z0-9_.-]+", line)[0], line) for line in lines if line)
    return {name: ";" not in line for name, line in names}


def test_the_list_is_read():
    names = wanted()
    assert {"torch", "bitsandbytes", "hypothesis", "scipy"} <= {
        n for n, on_all in names.items() if on_all
    }
    assert names["triton"] is False


@pytest.mark.parametrize("name", [name for name, everywhere in wanted().items() if everywhere])
def test_what_is_required_is_installed(name):
    if name in WITHOUT:
        pytest.skip(f"LECTURE_WITHOUT names {name}")
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pytest.fail(f"{name} is in requirements.txt but not here: tests that need it would skip")


NEVER = """
import importlib, pkgutil, sys, lecture_util
for _, name, _ in pkgutil.walk_packages(lecture_util.__path__, "lecture_util."):
    if "classroom" in name or name.endswith(("__main__", "_triton", ".interpreted")):
        continue
    importlib.import_module(name)
sys.exit("bitsandbytes" in sys.modules)
"""


def test_no_part_imports_bitsandbytes_as_it_is_loaded():
    done = subprocess.run([sys.executable, "-c", NEVER], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr[-2000:]
