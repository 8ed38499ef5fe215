"""The stepper without a browser: what is recorded, where a walk goes, and that all of it ends."""

import functools
import math
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import sympy
import torch
from hypothesis import given
from hypothesis import strategies as st
from IPython.core.interactiveshell import InteractiveShell

from lecture_util.classroom.live import Stepper, directives, step
from lecture_util.classroom.live.recording import Limits
from lecture_util.classroom.live.snapshot import LONGEST, number, snapshot
from lecture_util.classroom.live.trace import record
from lecture_util.classroom.live.walk import Walk
from lecture_util.model.attention import attention_by_hand
from lecture_util.roofline import accounting
from lecture_util.roofline.symbolic import symbols

ROOT = Path(__file__).resolve().parents[2]


def loop(n):
    total = 0
    for i in range(n):
        total += i  # @inspect total
    return total


def quotient(n):
    x = 1  # @inspect x
    y = x / n  # @inspect y
    return y


def rescued(n):
    try:
        return quotient(n)
    except ZeroDivisionError:
        return math.inf


def fib(n):
    if n < 2:
        return n
    return fib(n - 1) + fib(n - 2)


def forever(n):
    return forever(n + 1)


def squares(n):
    for i in range(n):
        yield i * i  # @inspect i


def endless():
    n = 0
    while True:
        yield n
        n += 1


def spin():
    while True:
        pass


def grow(xs):
    xs.append(4)  # @inspect xs
    xs.append(5)  # @inspect xs
    return xs


def lines(recording, kind="line"):
    """Each step's statement as written, without what the comments ask for."""
    text = {f: s.text().split("\n") for f, s in recording.sources.items()}
    return [
        text[recording.calls[s.call].filename][s.span[0] - 1].strip()
        for s in recording.steps
        if s.kind == kind
    ]


def values(recording, name):
    """What a name was, each time it changed."""
    return [s.values[name].value.text for s in recording.steps if name in s.changed]


# What is recorded


def test_a_value_appears_after_its_line_has_run_and_only_changes_are_marked():
    recording = record(loop, (3,))
    assert values(recording, "total") == ["0", "1", "3"]
    assert lines(recording)[:4] == [
        "total = 0", "for i in range(n):", "total += i", "for i in range(n):",
    ]  # fmt: skip
    assert "total" not in recording.steps[3].values
    assert recording.steps[-1].outcome.text == "3"


def test_a_loop_of_a_million_ends_with_its_first_steps_and_its_result():
    tracemalloc.start()
    recording = record(loop, (10**6,), limits=Limits(grace_s=300))  # however slow the machine is
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(recording.steps) == 20_000
    assert "after 20,000 steps" in recording.note
    assert "returned 499,999,500,000" in recording.note
    assert peak < 40e6


def test_what_does_not_end_is_stopped_and_says_so():
    recording = record(spin, (), limits=Limits(steps=100, grace_s=0.2))
    assert recording.note == "The walk ends here, after 100 steps; it was stopped 0.2 s later."
    slow = record(time_goes_by, (), limits=Limits(seconds=0.1, grace_s=0.1))
    assert "after 0.1 s; it was stopped" in slow.note


def time_goes_by():
    while True:
        time.sleep(0.01)


def test_an_exception_ends_the_walk_at_its_line():
    recording = record(quotient, (0,))
    last = recording.steps[-1]
    assert (last.kind, last.outcome.text) == ("raise", "ZeroDivisionError: division by zero")
    assert lines(recording, "raise") == ["y = x / n"]
    assert last.values["x"].value.text == "1"


def test_of_an_exception_on_its_way_out_the_place_it_came_from_is_last():
    recording = record(lambda: quotient(0))
    assert lines(recording, "raise") == ["y = x / n"]
    assert recording.calls[recording.steps[-1].call].name == "quotient"


def test_a_caught_exception_is_a_step_on_the_way():
    recording = record(rescued, (0,))
    assert lines(recording, "raise") == ["y = x / n", "return quotient(n)"]
    assert recording.steps[-1].outcome.text == "inf"


def test_recursion_shows_its_depth():
    recording = record(fib, (3,))
    assert [c.caller for c in recording.calls] == [None, 0, 1, 1, 0]
    walk = Walk(recording)
    deepest = 0
    while walk.move("forward"):
        deepest = max(deepest, walk.depth)
    assert deepest == 3
    assert walk.step.outcome.text == "2"


def test_recursion_without_end_stops_where_the_stack_did():
    recording = record(forever, (0,))
    assert recording.steps[-1].outcome.text.startswith("RecursionError")
    assert sys.gettrace() is None


def test_a_generator_is_walked_as_it_is_used():
    recording = record(squares, (3,))
    assert [s.outcome.text for s in recording.steps if s.kind == "yield"] == ["0", "1", "4"]
    assert values(recording, "i") == ["0", "1", "2"]
    used = record(lambda: sum(squares(3)))
    assert len([c for c in used.calls if c.name == "squares"]) == 1
    assert used.steps[-1].outcome.text == "5"
    unending = record(endless, (), limits=Limits(steps=50))
    assert "its first values were taken" in unending.note


def test_an_earlier_step_still_shows_an_argument_as_it_was():
    given = [1, 2, 3]
    stepper = step(grow, given)
    assert values(stepper.walk.recording, "xs") == ["[1, 2, 3]", "[1, 2, 3, 4]", "[1, 2, 3, 4, 5]"]
    assert given == [1, 2, 3]
    stepper.run()
    assert stepper.walk.steps[0].values["xs"].value.text == "[1, 2, 3]"


def test_a_large_tensor_is_summarised_and_not_kept():
    def hold(n):
        x = torch.zeros(n, 1 << 20)  # @inspect x
        x[0, 0] = 7.0
        return n

    recording = record(hold, (64,))  # 268 MB
    shown = recording.steps[-1].values["x"].value
    assert shown.text.startswith("[64, 1048576] fp32 on cpu: min 0, mean")
    assert "sampled" in shown.text
    assert recording.snapshot_bytes < 10_000
    assert record(grow, ([torch.zeros(2)],)).snapshot_bytes < 10_000


def test_a_limit_on_the_memory_of_values_ends_the_walk():
    def many(n):
        for i in range(n):
            x = str(i) * 100  # @inspect x
        return x

    recording = record(many, (100_000,), limits=Limits(snapshot_bytes=100_000))
    assert "MB of values" in recording.note
    assert recording.snapshot_bytes < 110_000


def test_library_code_and_comprehensions_are_not_stepped_into():
    def doubled(xs):
        ys = [
            number(float(x))
            for x in sorted(xs, key=abs)
            if x > 0
        ]  # @inspect ys  # fmt: skip
        return ys

    recording = record(doubled, ([3, 1, 2],))
    assert [c.name for c in recording.calls] == ["doubled"]
    assert lines(recording) == ["ys = [", "return ys"]
    assert values(recording, "ys") == ["['1', '2', '3']"]


def test_methods_closures_classes_partials_and_modules_have_a_code_to_show():
    class Counter:
        def __init__(self, start):
            self.n = start  # @inspect self.n

        def __call__(self, by):
            self.n += by  # @inspect self.n
            return self.n

        def twice(self, by):
            return self(self(by))

    class Double(torch.nn.Module):
        def forward(self, x):
            y = 2 * x  # @inspect y
            return y

    @functools.wraps(loop)
    def wrapped(n):
        return loop(n)

    assert values(record(Counter, (5,)), "self.n") == ["5"]
    assert values(record(Counter(1), (2,)), "self.n") == ["3"]
    assert record(Counter(1).twice, (1,)).steps[-1].outcome.text == "4"
    assert values(record(functools.partial(loop, 2)), "total") == ["0", "1"]
    assert values(record(wrapped, (2,)), "total") == ["0", "1"]
    assert values(record(Double(), (torch.ones(2),)), "y") == ["[2] fp32 on cpu: 2 2"]
    with pytest.raises(TypeError, match="len has no Python source"):
        step(len, [])
    with pytest.raises(TypeError, match="missing a required argument: 'n'"):
        step(loop)


def test_a_function_of_a_notebook_cell_is_stepped_and_its_neighbours_too():
    shell = InteractiveShell.instance()
    shell.run_cell("def helper(n):\n    m = n + 1  # @inspect m\n    return m\n")
    shell.run_cell("def cell(n):\n    return helper(n)\n")
    recording = record(shell.user_ns["cell"], (1,))
    InteractiveShell.clear_instance()
    assert [c.name for c in recording.calls] == ["cell", "helper"]
    assert values(recording, "m") == ["2"]


def test_printing_is_kept_with_the_step_it_came_from(capsys):
    def speak():
        print("one")
        print("two")

    recording = record(speak)
    assert recording.printed == "one\ntwo\n"
    assert [s.printed for s in recording.steps] == [0, 0, 4, 8]
    assert capsys.readouterr().out == ""


# Directives


def source(tmp_path, text):
    path = tmp_path / "source.py"
    path.write_text(text)
    return directives.read(str(path))


def test_directives_are_read_from_comments_and_left_out_of_what_is_shown(tmp_path):
    text = (
        "def f(a):  # @inspect a\n"
        '    """First.\n\n    More.\n    """\n'
        '    s = "# @inspect no"  # why  @inspect s, g(a, b), c.d  @clear a\n'
        "    g(1,\n      2)  # @stepover\n"
        "    if s:  # @hide\n        h()\n"
        "    # @inspect k\n"
        "    return s\n"
    )
    found = source(tmp_path, text)
    asked = {line: [item.name for item in items] for line, items in found.inspect.items()}
    assert asked == {1: ["a"], 6: ["s", "g(a, b)", "c.d"], 10: ["k"]}
    assert (found.clear, found.stepover, found.hidden) == ({6: ["a"]}, {7}, {9, 10, 11})
    assert found.shown(found.function(1)) == [1, 2, 6, 7, 8, 12]
    assert found.text().split("\n")[5] == '    s = "# @inspect no"  # why'
    assert found.statement(8) == (7, 8)


def test_text_that_is_not_python_still_has_lines(tmp_path):
    assert source(tmp_path, "def f(:\n  x  # @inspect x\n").lines
    assert source(tmp_path, "x = 1  # @inspect )(\n").inspect[1][0].code is None


def test_clear_stepover_and_hide_do_what_they_say():
    def taught(n):
        a = n + 1  # @inspect a, missing, n.nothing
        b = loop(a)  # @stepover @inspect b  # noqa: F841
        c = 5  # @hide
        d = c  # @clear a  @inspect d
        return d

    recording = record(taught, (1,))
    assert [c.name for c in recording.calls] == ["taught"]
    assert "c = 5" not in lines(recording)
    shown = recording.steps[-1].values
    assert set(shown) == {"n", "n.nothing", "b", "d"}
    assert shown["n.nothing"].value.text.startswith("AttributeError")


# Walking


def teach(n):
    a = helper(n)  # @inspect a
    b = marked(a)  # @inspect b
    return a + b


def helper(n):
    return n + 1


def marked(n):
    m = 2 * n  # @inspect m
    return m


def names(walk):
    return walk.calls[walk.step.call].name, walk.step.kind, walk.step.span[0] - LINE


LINE = teach.__code__.co_firstlineno


def test_forward_enters_what_teaches_into_enters_all_over_nothing():
    walk = Walk(record(teach, (1,)))
    walk.move("forward")
    assert names(walk) == ("teach", "line", 1)
    walk.move("forward")  # helper carries no directive
    assert names(walk) == ("teach", "line", 2)
    walk.move("back")
    walk.move("into")
    assert names(walk)[:2] == ("helper", "call")
    walk.move("out")
    assert names(walk) == ("teach", "line", 2)
    walk.move("forward")
    assert names(walk)[:2] == ("marked", "call")
    walk.move("back")
    assert names(walk) == ("teach", "line", 2)
    walk.move("over")
    assert names(walk) == ("teach", "line", 3)
    assert walk.step.changed == {"b"}


def test_start_end_lines_and_history():
    walk = Walk(record(loop, (4,)))
    assert walk.move("end")
    assert not walk.move("forward")
    assert [shown.value.text for shown in walk.history("total")] == ["0", "1", "3", "6"]
    assert walk.move("start")
    assert not walk.move("back")
    body = loop.__code__.co_firstlineno + 3
    assert walk.to_line(body)
    assert walk.to_line(body)
    assert walk.step.values["total"].value.text == "0"
    assert not walk.to_line(body + 100)


@given(st.lists(st.sampled_from(["start", "back", "forward", "over", "into", "out", "end"])))
def test_no_sequence_of_moves_leaves_the_recording(moves):
    walk = Walk(RECORDED)
    for move in moves:
        before = walk.at
        moved = walk.move(move)
        assert 0 <= walk.at < len(walk.steps)
        assert moved == (walk.at != before)
        assert move != "back" or walk.at <= before
        assert walk.count >= 1


RECORDED = record(teach, (1,))


# Pictures


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (123456789, "123,456,789"), (10**30, "about 10^30"), (0.1 + 0.2, "0.3"),
        (1234.5678, "1,234.57"), (-0.0, "0"),
        (2.6867e10, "26,867,000,000"), (1e-9, "1e-09"), (math.nan, "nan"), (-math.inf, "-inf"),
        (True, "True"), (None, "None"), ("a\nb", "'a\\nb'"), ([], "[]"), ((1,), "(1,)"),
        ({"a": [1, 2]}, "{'a': [1, 2]}"), (list(range(100)), "[0, 1, 2, 3, 4, 5, … 94 more]"),
        (torch.nn.Linear, "Linear"), (set(), "empty set"),
        (torch.tensor(2.5), "[] fp32 on cpu: 2.5"),
        (torch.empty(0, 3), "[0, 3] fp32 on cpu"),
        (torch.zeros(2, 3, device="meta"), "[2, 3] fp32 on meta"),
        (np.arange(12).reshape(3, 4), "[3, 4] int64: min 0, mean 5.5, max 11"),
        (torch.tensor([1.0, math.nan, math.inf] * 4),
         "[12] fp32 on cpu: min 1, mean 1, max 1, 4 NaN, 4 infinite"),
    ],
    ids=str,
)  # fmt: skip
def test_values_are_said_in_a_line(value, text):
    assert snapshot(value).text == text


def test_long_values_stay_small():
    long = ["x" * 10**6, list(range(10**6)), {i: i for i in range(10**5)}, torch.rand(512, 512)]
    for value in long:
        assert len(snapshot(value).text) <= LONGEST
        assert snapshot(value).nbytes < 8_000


def test_mathematics_is_typeset_and_endless_mathematics_is_not():
    B, D = symbols("B D")
    shown = snapshot(2 * B * D / (B + D))
    assert "<math" in shown.html and "<mfrac>" in shown.html
    assert shown.text == "2*B*D/(B + D)"
    assert snapshot(sympy.expand((B + D + 1) ** 40)).text == "Add too long to show"


def test_a_value_that_cannot_be_shown_does_not_stop_the_walk():
    class Odd:
        def __repr__(self):
            raise RuntimeError("half made")

    assert snapshot(Odd()).text == "<Odd: not shown, RuntimeError>"


def test_text_is_shown_and_never_run():
    assert "<script>" not in snapshot("<script>alert(1)</script>").html
    stepper = step(lambda x: x, "<img src=x>")
    assert "<img" not in str(stepper.picture["outcome"])


# The widget


def intensity(B, D):
    cost = accounting.matmul(B, D, D)
    rate = cost.intensity  # @inspect rate
    return rate.limit(D, sympy.oo) if hasattr(rate, "limit") else rate


def test_an_argument_is_edited_and_the_run_repeated_where_it_stood():
    B, D = symbols("B D")
    stepper = step(intensity, B, D)
    stepper.move("end")
    assert stepper.walk.step.outcome.text == "B"
    assert stepper.run({"B": "8"})
    assert stepper.walk.step.outcome.text == "8"
    assert stepper.run({"B": "2*B"})
    assert stepper.walk.step.outcome.text == "2*B"
    assert stepper.run({"B": "B"})
    assert stepper.arguments.items[0].value is B


@pytest.mark.parametrize(
    "text", ["", "8 +", "x", "__import__('os')", "B.name", "9**9**9", "1/0", "[1]"]
)
def test_what_cannot_be_read_changes_nothing_and_gets_a_message(text):
    B, D = symbols("B D")
    stepper = step(intensity, B, D)
    before = stepper.picture
    assert not stepper.run({"B": text, "D": "4"})
    assert stepper.boxes[0]["error"]
    assert stepper.picture == before | {"asked": 2}
    assert stepper.arguments.items[1].value == D
    assert stepper.run({"B": "3", "D": "D"})
    assert not stepper.boxes[0]["error"]


def test_boxes_keep_the_kind_of_their_value_and_offer_the_defaults():
    def f(n, x=1.5, yes=True, word="a", *, none=None):
        return n, x, yes, word, none

    stepper = step(f, 1)
    assert [box["name"] for box in stepper.boxes] == ["n", "x", "yes", "word"]
    assert stepper.run({"n": "1_000", "x": "2", "yes": "False", "word": "two words"})
    assert stepper.walk.steps[-1].outcome.text == "(1,000, 2, False, 'two words', None)"
    assert not stepper.run({"yes": "maybe"})


def test_a_run_leaves_its_tensors_to_the_next_as_they_were():
    def double(x, also):
        x *= 2
        return also

    x = torch.ones(2)
    stepper = step(double, x, x)
    stepper.run()
    assert stepper.walk.steps[-1].outcome.text == "[2] fp32 on cpu: 2 2"
    assert x.tolist() == [1, 1]


def test_messages_of_the_front_end_move_the_walk():
    stepper = step(loop, 3)
    for message in ({"do": "forward"}, {"do": "end"}, {"do": "history", "name": "total"}):
        stepper._heard(None, message, [])
    shown = next(v for v in stepper.picture["values"] if v["name"] == "total")
    assert [line for line, _ in shown["history"]] == [loop.__code__.co_firstlineno + 3] * 3
    stepper._heard(None, {"do": "line", "line": 1}, [])
    assert stepper.picture["note"] == "Line 1 isn't reached in this run"
    stepper._heard(None, {"do": "run", "texts": {"n": "2"}}, [])
    assert stepper.walk.steps[-1].outcome.text == "1"


def test_real_functions_of_the_course_are_stepped():
    B, T, D, F = symbols("B T D F")
    recording = record(accounting.mlp, (B, T, D, F))
    assert recording.steps[-1].values["u_and_g"].value.text == "2*B*F*T"
    q, k = torch.rand(1, 2, 4, 8), torch.rand(1, 5, 2, 8)
    recording = record(attention_by_hand, (q, k, k))
    assert recording.steps[-1].outcome.text.startswith("[1, 2, 4, 8] fp32")


def test_no_machine_path_is_shown():
    stepper = step(accounting.mlp, 1, 1, 8, 8)
    assert str(ROOT) not in str((stepper.sources, stepper.picture, stepper.boxes))
    assert stepper.sources[stepper.picture["source"]]["title"].endswith("roofline/accounting.py")


def test_without_a_front_end_it_is_one_line():
    code = (
        "from lecture_util.classroom.live import step\n"
        "from lecture_util.roofline import accounting\n"
        "s = step(accounting.mlp, 1, 1, 8, 8)\n"
        "print(s._repr_mimebundle_()[0]['text/plain'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    line = "step: mlp, 9 steps, 4 values inspected"
    assert (done.stdout.splitlines(), done.stderr) == ([line, line], "")
    assert repr(Stepper(loop, (1,), {})) == "step: loop, 7 steps, 1 value inspected"


def hang():
    while True: pass  # fmt: skip  # noqa: E701


@pytest.mark.parametrize("fn", [hang, lambda: [None for _ in iter(int, 1)], time_goes_by])
def test_a_loop_without_lines_is_stopped_and_nothing_strikes_later(fn):
    recording = record(fn, limits=Limits(seconds=0.2, grace_s=0.2))
    assert recording.note == "The walk ends here, after 0.2 s; it was stopped 0.2 s later."
    before = time.perf_counter()
    while time.perf_counter() < before + 1.2:  # longer than the guard's interval
        pass


def test_arguments_that_do_not_fit_are_answered_with_the_signature():
    for args in [(1,), (1, 2, 3)]:
        with pytest.raises(TypeError, match=r"intensity\(B, D\) with these arguments: .+"):
            step(intensity, *args)
