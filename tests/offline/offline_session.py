"""Pytest plugin: a session in which anything tried to reach another machine fails.

tests/conftest.py loads it; a run of nbval takes it with `-p offline_session`. It guards this
process and, through the environment, every process that the session starts.
"""

import os
import tempfile
from pathlib import Path

import pytest

HERE = Path(__file__).parent
LOG = pytest.StashKey[Path]()


def pytest_configure(config: pytest.Config) -> None:
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(HERE) not in path:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), *path]))
    if _is_worker(config):  # of pytest-xdist: the run that started it reads the log
        config.stash[LOG] = Path(os.environ["LECTURE_OFFLINE_LOG"])
    else:
        handle, name = tempfile.mkstemp(prefix="offline-", suffix=".log")
        os.close(handle)
        config.stash[LOG] = Path(name)
        # A run inside a run keeps a log of its own, and its exit status tells the outer one.
        os.environ["LECTURE_OFFLINE_LOG"] = name
    exec(compile((HERE / "sitecustomize.py").read_text(), "sitecustomize.py", "exec"), {})


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.stash[LOG].read_text():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    if attempts := config.stash[LOG].read_text():
        terminalreporter.section("offline guard", red=True, bold=True)
        terminalreporter.write_line("the run fails, since it tried to reach another machine:")
        terminalreporter.write(attempts)


def pytest_unconfigure(config: pytest.Config) -> None:
    if not _is_worker(config):
        config.stash[LOG].unlink(missing_ok=True)


def _is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")
