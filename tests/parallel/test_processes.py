"""M processes: results by rank, the first failure by name, and nobody left behind."""

import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest
import rank_failures

import lecture_util.parallel.demonstrate  # noqa: F401, named below
from lecture_util import parallel
from lecture_util.parallel import processes
from lecture_util.parallel.processes import RankError, run


def assert_nobody_left(pids):
    """None of the processes that noted their number is alive, or a zombie."""
    assert pids, "no process noted that it was started"
    for pid in pids:
        assert not psutil.pid_exists(pid)
    assert not multiprocessing.active_children()


def noted(folder):
    return [int(path.name) for path in folder.iterdir()]


def test_an_exception_names_its_rank_and_shows_its_traceback(tmp_path):
    start, words = time.monotonic(), r"rank 1 of 2 failed of KeyError: 'a fault of rank one'"
    with pytest.raises(RankError, match=words) as e:
        run(rank_failures.raise_on_one, 2, str(tmp_path), backend="gloo", timeout_s=100)
    assert time.monotonic() - start < 90  # it did not wait for the time to be up
    assert e.value.rank == 1
    assert "in raise_on_one" in str(e.value) and "rank one was here" in str(e.value)
    assert_nobody_left(noted(tmp_path))


def test_a_dead_rank_is_named_and_not_the_one_that_missed_it(tmp_path):
    start = time.monotonic()
    with pytest.raises(
        RankError, match=r"rank 1 of 2 died without an answer \(SIGKILL\): .*memory"
    ):
        run(rank_failures.die_on_one, 2, str(tmp_path), backend="gloo", timeout_s=100)
    assert time.monotonic() - start < 90  # it did not wait for the time to be up
    assert_nobody_left(noted(tmp_path))


def test_when_time_is_up_each_rank_says_where_it_stood(tmp_path):
    """Be it still importing torch, on a slow machine, or waiting for the other."""
    with pytest.raises(TimeoutError, match=r"no answer of rank 0, 1 of 2 in time") as e:
        run(rank_failures.never_meet, 2, str(tmp_path), backend="gloo", timeout_s=3)
    assert "rank 0 stood here:" in str(e.value) and "rank 1 stood here:" in str(e.value)
    assert str(e.value).count("most recent call first") >= 2
    assert not multiprocessing.active_children()
    for pid in noted(tmp_path):
        assert not psutil.pid_exists(pid)


def test_a_result_that_cannot_be_sent_back_is_an_error_of_its_rank(tmp_path):
    with pytest.raises(RankError, match=r"rank 0 of 1 failed of .*pickle"):
        run(rank_failures.unsendable, 1, str(tmp_path), backend="gloo", timeout_s=60)


CALLER = """
import sys, rank_failures
from lecture_util.parallel import run
run(rank_failures.never_meet, 2, sys.argv[1], backend="gloo", timeout_s=500)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_ranks_die_with_a_caller_that_is_killed(tmp_path, number):
    """As soon as they run. Only SIGKILL leaves their folder behind."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    paths = os.pathsep.join([os.path.dirname(__file__), os.environ["PYTHONPATH"]])
    environment = os.environ | {"TMPDIR": str(temporary), "PYTHONPATH": paths}
    arguments = [sys.executable, "-c", CALLER, str(tmp_path)]
    with subprocess.Popen(arguments, env=environment) as caller:
        wait_until(lambda: len(list(temporary.glob("ranks-*/*.log"))) == 2)
        ranks = psutil.Process(caller.pid).children()
        caller.send_signal(number)
        assert caller.wait(100) == -number
    assert len(ranks) >= 2
    wait_until(lambda: all(is_gone(rank) for rank in ranks))
    assert bool(list(temporary.iterdir())) == (number == signal.SIGKILL)


def wait_until(come, timeout_s=100):
    until = time.monotonic() + timeout_s
    while not come():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.01)


def is_gone(process):
    """Or dead, and nobody asked after it."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize(
    ("begun", "words"),
    [
        ((), "none had begun, as imports take their time: allow more with timeout_s"),
        ((1,), "does every rank make the same calls in the same order?"),
    ],
)
def test_a_timeout_tells_slow_imports_from_ranks_that_wait(tmp_path, begun, words):
    for rank in begun:
        processes.begun(tmp_path, rank).touch()
    pipes = [multiprocessing.Pipe(duplex=False) for _ in range(2)]
    with pytest.raises(TimeoutError) as e:
        processes._collect([(None, ours) for ours, _ in pipes], tmp_path, time.time() - 9)
    assert f"no answer of rank 0, 1 of 2 in time: {words}" in str(e.value)
    assert str(e.value).count("not running yet") == 2


@pytest.mark.parametrize(("ran", "hint"), [(False, True), (True, False)])
def test_the_main_guard_is_advised_only_to_a_rank_that_never_ran(tmp_path, ran, hint):
    if ran:
        processes.log_of(tmp_path, 1).touch()
    died = SimpleNamespace(join=lambda seconds: None, exitcode=3)
    said = processes._obituary(1, 2, died, tmp_path)
    assert "rank 1 of 2 died without an answer (exit code 3)" in said
    assert ("__main__" in said) == hint


def test_a_rank_is_told_not_to_start_others(monkeypatch, nothing_starts):
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)
    with pytest.raises(RuntimeError, match="called within a rank"):
        run(rank_failures.note, 2)


def test_the_package_hands_on_its_functions_and_modules_keep_their_names():
    assert [getattr(parallel, name).__name__ for name in parallel.__all__] == parallel.__all__
    assert callable(parallel.demonstrate.demonstrate)
    with pytest.raises(AttributeError, match="has no attribute 'split'"):
        parallel.split  # noqa: B018


def test_a_new_rank_need_not_wait_for_torch_before_it_can_die_with_its_parent():
    code = "import sys, lecture_util.parallel.rank; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


@pytest.fixture
def nothing_starts(monkeypatch):
    def start(*args, **kwargs):
        raise AssertionError("a process was started")

    monkeypatch.setattr(multiprocessing, "get_context", start)


def test_a_function_of_a_notebook_is_refused_with_what_to_do(monkeypatch, nothing_starts):
    main = type(sys)("__main__")
    exec("def cell(mesh): pass", main.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", main)
    with pytest.raises(TypeError, match=r"cell was defined in a notebook .*put it in a module"):
        run(main.cell, 2)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "words"),
    [
        ((lambda mesh: 1, 2), {}, TypeError, "no lambda"),
        ((rank_failures.note, 2, lambda: 1), {}, TypeError, "arguments cannot be sent"),
        ((rank_failures.note, 0), {}, ValueError, "M=0 processes"),
        ((rank_failures.note, 2.0), {}, ValueError, "M=2.0 processes"),
        ((rank_failures.note, 2), {"timeout_s": 0}, ValueError, "timeout_s=0"),
        ((rank_failures.note, 2), {"backend": "mpi"}, ValueError, "backend='mpi'"),
        ((rank_failures.note, 2), {"timeout_s": math.nan}, ValueError, "timeout_s=nan"),
        ((rank_failures.note, 2), {"timeout_s": math.inf}, ValueError, "at most a day"),
        ((rank_failures.note, 2), {"timeout_s": 1e12}, ValueError, "at most a day"),
        ((rank_failures.note, 2), {"timeout_s": "3"}, ValueError, "timeout_s='3'"),
        ((rank_failures.note, 999), {"backend": "nccl"}, ValueError, "M=999, but torch sees"),
        (
            (rank_failures.note, 9999),
            {"backend": "gloo"},
            ValueError,
            "M=9999 processes on .* at most",
        ),
        ((None, 2), {}, TypeError, "fn=None is not callable"),
        (("fns.ok", 2), {}, TypeError, "fn='fns.ok' is not callable"),
    ],
)
def test_calls_that_cannot_work_start_nothing(nothing_starts, arguments, options, error, words):
    with pytest.raises(error, match=words):
        run(*arguments, **options)
