"""M processes: results by rank, the first failure by name, and nobody left behind."""

import multiprocessing
import sys
import time

import psutil
import pytest
import rank_failures

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
        ((rank_failures.note, 999), {"backend": "nccl"}, ValueError, "M=999, but torch sees"),
    ],
)
def test_calls_that_cannot_work_start_nothing(nothing_starts, arguments, options, error, words):
    with pytest.raises(error, match=words):
        run(*arguments, **options)
