"""What tests of recorded figures share."""

import importlib
import json

import pytest

from lecture_util.classroom.figures import registry, small_caches


@pytest.fixture
def registered(request, tmp_path, monkeypatch):
    """The recorded figures that a given record registers, apart from those of the course.

    The test's file says REGISTERS = (the record's name, the modules that draw from it).
    """
    record, modules = request.module.REGISTERS
    monkeypatch.setattr(small_caches, "RESULTS", tmp_path)
    monkeypatch.setattr(registry, "FIGURES", found := {})

    def register(run: dict | None) -> dict:
        found.clear()
        small_caches.recorded.cache_clear()
        if run is not None:
            (tmp_path / f"{record}.json").write_text(json.dumps(run))
        for module in modules:
            importlib.reload(module)
        return found

    yield register
    small_caches.recorded.cache_clear()
