import gc
import time

import pytest

from lecture_util.roofline import Timing, format_bytes, format_seconds, measure, stopwatch


def test_measure_runs_warmups_and_repeats_with_the_arguments():
    calls = []
    timing = measure(calls.append, "x", repeats=4, warmup=2)
    assert calls == ["x"] * 6
    assert len(timing.samples_s) == 4
    assert all(sample > 0 for sample in timing.samples_s)
    low, high = timing.spread
    assert timing.best_s <= low <= timing.median_s <= high <= max(timing.samples_s)


def test_longer_work_takes_longer():
    assert measure(time.sleep, 0.02, repeats=1).best_s >= 0.02


def test_no_garbage_is_collected_while_timing_and_it_is_after():
    seen = []
    measure(lambda: seen.append(gc.isenabled()), repeats=2, warmup=0)
    assert seen == [False, False] and gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        measure(lambda: 1 / 0, warmup=0)
    assert gc.isenabled()
    gc.disable()
    try:
        measure(int)
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"repeats": 0}, "repeats is 0: expected a whole number, at least 1"),
        ({"repeats": 2.5}, "repeats is 2.5"),
        ({"warmup": -1}, "warmup is -1: expected a whole number, at least 0"),
    ],
)
def test_bad_counts_are_named(kwargs, message):
    with pytest.raises(ValueError, match=message):
        measure(int, **kwargs)


def test_a_result_in_place_of_a_function_is_named():
    with pytest.raises(TypeError, match=r"fn is a float.*measure\(f, x\)"):
        measure(1.5)


def test_timing_statistics_and_text():
    timing = Timing((0.0119, 0.0123, 0.0130, 0.0110, 0.0300))
    assert timing.median_s == 0.0123
    assert timing.best_s == 0.0110
    assert timing.spread == (0.0119, 0.0130)
    assert str(timing) == "12.3 ms [11.9, 13.0], 5 runs"
    assert str(Timing((2.0,))) == "2.00 s [2.00, 2.00], 1 run"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"), (2.5e-10, "0.250 ns"), (8.02e-3, "8.02 ms"), (0.0238, "23.8 ms"),
        (9.996e-4, "1.00 ms"), (9.994e-4, "999 µs"), (0.9999, "1.00 s"), (71.87, "71.9 s"),
        (4000, "4000 s"),
    ],
)  # fmt: skip
def test_seconds_to_three_figures(seconds, text):
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("num_bytes", "binary", "text"),
    [
        (0, False, "0 B"), (512, False, "512 B"), (23_040, False, "23.04 kB"),
        (26_870_589_440, False, "26.87 GB"), (240_778_772_480, False, "240.8 GB"),
        (999_999_999, False, "1.000 GB"), (26_870_589_440, True, "25.03 GiB"),
        (2**20, True, "1.000 MiB"), (3e12, False, "3.000 TB"),
    ],
)  # fmt: skip
def test_bytes_to_four_figures(num_bytes, binary, text):
    assert format_bytes(num_bytes, binary=binary) == text


def test_stopwatch_runs_within_the_block_and_stands_still_after():
    with stopwatch() as watch:
        time.sleep(0.01)
        first = watch.seconds
    stopped = watch.seconds
    assert 0.01 <= first <= stopped
    time.sleep(0.005)
    assert watch.seconds == stopped
