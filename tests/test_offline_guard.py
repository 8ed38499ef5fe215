"""The offline guard, in a run of one process and in one of several."""

import subprocess
import sys

import pytest

HIDDEN = """
import socket

def test_hides_what_it_does():
    try:
        socket.create_connection(("192.0.2.1", 80), timeout=1)
    except OSError:
        pass

def test_is_local():
    socket.create_server(("127.0.0.1", 0)).close()
"""


@pytest.mark.parametrize("processes", [[], ["-n", "2", "--dist", "worksteal"]], ids=["one", "two"])
@pytest.mark.parametrize(("which", "code"), [("hides", 1), ("local", 0)])
def test_a_test_that_reaches_outside_fails_the_run_even_if_it_hides_it(
    tmp_path, processes, which, code
):
    (tmp_path / "test_hidden.py").write_text(HIDDEN)
    command = [sys.executable, "-m", "pytest", "-p", "offline_session", "-k", which, *processes]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert "1 passed" in done.stdout, done.stdout + done.stderr
    assert done.returncode == code
    assert ("tried to reach another machine" in done.stdout) == bool(code)
