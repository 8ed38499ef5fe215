"""What a student sees of an exercise: one line, and what is wrong in it."""

import gc
import importlib
import random
import sys

import numpy as np
import pytest
import sympy
import torch

from lecture_util.classroom import compare
from lecture_util.classroom.checker import Checker
from lecture_util.classroom.exercise import Classroom


@pytest.fixture
def room(tmp_path, monkeypatch):
    """A classroom whose notebook 02 has one module of checkers, written to disk."""
    package = tmp_path / "toy_exercises"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "nb02.py").write_text("LOADED = True\n")
    (package / "nb03.py").write_text("import there_is_no_such_module\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield Classroom("toy_exercises")
    for name in [n for n in sys.modules if n.startswith("toy_exercises")]:
        del sys.modules[name]


@pytest.fixture
def say(room, capsys):
    """Check an answer against a checker; the one line printed."""

    def say(answer, checker, id="2.1"):
        room.exercises.pop(id, None)
        room.exercise(id, title="Toy", minutes=1, trains="")(checker)
        assert room.check(id, answer) is None
        out, err = capsys.readouterr()
        assert err == "" and out.count("\n") == 1
        return out.rstrip("\n")

    return say


def product(answer, c):
    B, D = c.ints(2, low=3, high=99)
    c.close(c.call(answer, B, D), B * D, wrong={"you added": B + D})


def test_a_right_answer_gets_a_tick_and_its_number_of_checks(say):
    assert say(lambda B, D: B * D, product) == "✓ 2.1 Toy: 1 check"


def test_the_stub_is_not_attempted(say):
    def stub(B, D):
        raise NotImplementedError

    assert say(stub, product) == "○ 2.1 Toy: not attempted"
    assert say(..., product) == "○ 2.1 Toy: not attempted"


def test_a_misconception_is_named_and_any_other_error_shows_the_numbers(say, monkeypatch):
    monkeypatch.setenv("LECTURE_SEED", "5")
    assert say(lambda B, D: B + D, product) == "✗ 2.1 Toy: you added"
    B, D = Checker("2.1", "5").ints(2, 3, 99)
    got = say(lambda B, D: B * D + 1, product)
    assert got == f"✗ 2.1 Toy: for B={B}, D={D}: got {B * D + 1}, expected {B * D}"


@pytest.mark.parametrize("seed", ["1", "2", "a word"])
def test_the_tick_does_not_depend_on_the_seed_but_the_inputs_do(say, monkeypatch, seed):
    monkeypatch.setenv("LECTURE_SEED", seed)
    assert say(lambda B, D: B * D, product) == "✓ 2.1 Toy: 1 check"
    B, D = Checker("2.1", "0").ints(2, 3, 99)
    assert say(lambda *_: B * D, product).startswith("✗")


def test_what_an_answer_raises_is_reported_with_its_arguments(say):
    got = say(lambda B, D: B + "x", lambda a, c: c.call(a, 3, 5))
    assert got.startswith("✗ 2.1 Toy: your function raised TypeError: unsupported operand")
    assert got.endswith("when called with B=3, D=5")
    assert "takes 1 positional argument" in say(lambda B: B, product)
    assert "expected a function, got an int" in say(7, product)


@pytest.mark.parametrize("error", [SystemExit, GeneratorExit, RecursionError, BaseException])
def test_nothing_an_answer_raises_leaves_the_check(say, error):
    def answer(B, D):
        raise error

    assert f"raised {error.__name__}" in say(answer, product)


def test_an_interrupt_passes(room):
    def answer(B, D):
        raise KeyboardInterrupt

    room.exercise("2.1", title="Toy", minutes=1, trains="")(product)
    with pytest.raises(KeyboardInterrupt):
        room.check("2.1", answer)


def test_an_error_or_a_value_with_a_broken_text_is_survived(say):
    class Broken(Exception):
        def __str__(self):
            raise RuntimeError

    class Odd:
        def __eq__(self, other):
            raise RuntimeError("no comparing")

        __hash__ = __repr__ = None

    def raises(B, D):
        raise Broken

    assert "raised Broken" in say(raises, product)
    assert say(lambda B, D: Odd(), lambda a, c: c.equal(c.call(a, 1, 2), "x")).startswith("✗")


def test_a_missing_torch_operator_is_an_error_and_not_a_missing_attempt(say):
    def answer(B, D):
        raise NotImplementedError("'addmm' is not implemented for 'Half'")

    assert say(answer, product).startswith("✗ 2.1 Toy: your function raised NotImplementedError")


def test_a_debugging_print_stays_out_of_the_line(say):
    def answer(B, D):
        print("debug")
        print("debug", file=sys.stderr)
        return B * D

    assert say(answer, product) == "✓ 2.1 Toy: 1 check"


def test_a_check_leaves_the_global_generators_as_they_were(say):
    def answer(B, D):
        torch.rand(3), np.random.rand(3), random.random()
        return B * D

    def draw():
        return torch.rand(()).item(), np.random.rand(), random.random()

    def seed():
        torch.manual_seed(1), np.random.seed(1), random.seed(1)

    seed()
    want = draw()
    seed()
    say(answer, product)
    assert draw() == want


def test_an_answer_that_works_in_place_cannot_move_the_goal(say):
    def checker(answer, c):
        x = c.randn(4)
        c.close(c.call(answer, x), x * 2)

    assert say(lambda x: x.mul_(2), checker) == "✓ 2.1 Toy: 1 check"


def test_like_names_a_misconception_only_if_it_explains_every_case(say):
    def checker(answer, c):
        cases = [dict(B=2, D=2), dict(B=3, D=5)]
        c.like(answer, lambda B, D: B * D, cases, wrong={"you added": lambda B, D: B + D})

    assert say(lambda B, D: B * D, checker) == "✓ 2.1 Toy: 2 checks"
    assert say(lambda B, D: B + D, checker) == "✗ 2.1 Toy: you added"
    assert say(lambda B, D: 4, checker) == "✗ 2.1 Toy: for B=3, D=5: got 4, expected 15"


def test_raises_wants_that_error_and_says_what_came(say):
    def checker(answer, c):
        c.expect("K" in c.raises(ValueError, answer, 0), "the message should name K")

    def right(K):
        raise ValueError("K is 0")

    def other(K):
        raise KeyError("K")

    assert say(right, checker) == "✓ 2.1 Toy: 2 checks"
    assert "raised KeyError" in say(other, checker)
    assert "expected ValueError, but it returned 1" in say(lambda K: 1, checker)


x, y = sympy.symbols("x y", positive=True)
t23 = torch.arange(6.0).reshape(2, 3)


@pytest.mark.parametrize(
    ("got", "want"),
    [
        (3, 3.0),
        (sympy.Rational(1, 2), 0.5),
        (np.float64(2.0), 2),
        (torch.tensor(2), 2),
        (float("inf"), float("inf")),
        (True, np.bool_(True)),
        ([1, (2, 3)], [1, [2, 3]]),
        ({"a": [1.0]}, {"a": [1]}),
        ("a", "a"),
        (t23.clone(), t23),
        (torch.tensor([float("nan")]), torch.tensor([float("nan")])),
        ((x + y) ** 2, x**2 + 2 * x * y + y**2),
        (sympy.Symbol("x") / 2, x / 2),
        (sympy.Max(x, y), (x + y + sympy.Abs(x - y)) / 2),
        (10**30, 10**30),
    ],
)
def test_equal_values_are_equal_in_any_writing(got, want):
    assert compare.difference(got, want) is None


@pytest.mark.parametrize(
    ("got", "want", "says"),
    [
        (None, 3, "it returned None: is a `return` missing?"),
        ("3", 3, "it is a str, expected a number"),
        (True, 1, "it is a bool, expected a number"),
        (1, True, "it is an int, expected True or False"),
        (x, 3, "it still holds the symbol x, expected a number"),
        (10**30 + 1, 10**30, f"got {10**30 + 1}, expected {10**30}"),
        (1.0000001, 1.0, "got 1.0000001, expected 1.0"),
        (float("nan"), 1.0, "got nan, expected 1"),
        ([1], [1, 2], "it has 1 items, expected 2"),
        ([1, 3], [1, 2], "item 1: got 3, expected 2"),
        ({}, {"a": 1}, "the key 'a' is missing"),
        ({"a": 1, "b": 1}, {"a": 1}, "the key 'b' should not be there"),
        (np.zeros((2, 3)), t23, "it is a ndarray, expected a tensor of shape (2, 3)"),
        (t23.T, t23, "shape (3, 2), expected (2, 3)"),
        (t23.double(), t23, "dtype torch.float64, expected torch.float32"),
        (t23 * float("nan"), t23, "6 of 6 values are NaN"),
        (t23 + (t23 == 4), t23, "at [1, 1]: got 5, expected 4 (1 of 6 values differ)"),
        (x**2, x, "at x="),
        (x * sympy.Symbol("z"), x, "it holds z, expected only x"),
        ("x", x, "it is a str, expected a SymPy expression"),
    ],
)
def test_a_difference_is_said_in_order_of_type_shape_and_value(got, want, says):
    assert compare.difference(got, want).startswith(says)


def test_a_wrong_formula_is_never_answered_with_the_right_one():
    assert "x" in compare.difference(x + 1, x * y)
    assert "x*y" not in compare.difference(x + 1, x * y)


def test_an_unknown_exercise_is_answered_with_those_there_are(room, capsys):
    room.exercise("2.1", title="Toy", minutes=1, trains="")(product)
    room.exercise("2.10", title="Toy", minutes=1, trains="")(lambda a, c: None)
    room.exercise("2.2", title="Toy", minutes=1, trains="")(lambda a, c: ...)
    for id in ("2.9", "9.1", 2.1):
        room.check(id, product)
    room.check("3.1", product)
    assert capsys.readouterr().out.splitlines() == [
        "✗ 2.9 is not an exercise: notebook 02 has 2.1, 2.2, 2.10",
        "✗ 9.1 is not an exercise: notebook 09 has no exercises",
        "✗ 2.1 is not an exercise: the id is a string such as '2.3'",
        "✗ 3.1: the checkers of notebook 03 do not load: "
        "ModuleNotFoundError(\"No module named 'there_is_no_such_module'\")",
    ]


def test_a_doubled_id_is_refused(room):
    room.exercise("2.1", title="Toy", minutes=1, trains="")(product)
    with pytest.raises(ValueError, match="registered twice"):
        room.exercise("2.1", title="Toy", minutes=1, trains="")(lambda a, c: None)


def test_hints_open_one_at_a_time(room, capsys):
    room.exercise("2.1", title="Toy", minutes=1, trains="", hints=("first", "second"))(product)
    for _ in range(3):
        room.hint("2.1")
    assert capsys.readouterr().out.splitlines() == [
        "2.1 Toy, hint 1 of 2: first",
        "2.1 Toy, hint 2 of 2: second",
        "2.1 Toy: no more hints",
    ]


def test_status_shows_each_exercise_of_the_notebook(room, capsys):
    room.status()
    assert "no exercise was checked yet" in capsys.readouterr().out
    room.exercise("2.1", title="Multiply", minutes=5, trains="")(product)
    room.exercise("2.2", title="Add", minutes=10, trains="")(lambda a, c: None)
    room.check("2.1", lambda B, D: B * D)
    capsys.readouterr()
    room.status()
    want = [
        "notebook 02: 1 of 2 solved",
        "  ✓ 2.1   Multiply   5 min  solved",
        "  · 2.2   Add       10 min  not checked yet",
    ]
    assert capsys.readouterr().out.splitlines() == want
    room.reset()
    room.status("02")
    assert capsys.readouterr().out.splitlines()[0] == "notebook 02: 0 of 2 solved"


def test_the_package_hands_on_functions_even_after_their_modules():
    import lecture_util.classroom as classroom

    module = importlib.import_module("lecture_util.classroom.exercise")
    importlib.import_module("lecture_util.classroom.predict")
    assert classroom.check is module.check
    assert callable(classroom.predict)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = classroom.nothing


def test_numbers_beyond_any_float_are_compared(say):
    line = say(lambda B, D: 10**400, product)
    assert line.startswith("✗") and "got 1000" in line and "Error" not in line
    huge = 10**400
    assert compare.difference(huge, huge + 1, rtol=1e-6) is None
    assert compare.difference(huge, huge + 1) is not None
    assert compare.difference(huge, 2 * huge, rtol=1e-6) is not None
    assert compare.difference(huge, 2.5, rtol=1e-6) is not None


@pytest.mark.filterwarnings("error")
def test_an_async_answer_is_named_and_closed(say):
    async def answer(B, D):
        return B * D

    assert "your function is async" in say(answer, product)
    assert "expected a function, got a coroutine" in say(answer(1, 2), product)
    gc.collect()


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ("2.1", "'2.1' is not a notebook: pass its number, such as status(\"02\")"),
        (2.5, "2.5 is not a notebook"),
        ("99", "there is no notebook 99 with exercises; those that have: 02, 03"),
    ],
)
def test_status_of_no_notebook_says_so(room, capsys, asked, says):
    room.status(asked)
    out = capsys.readouterr().out
    assert out.startswith(says) and out.count("\n") == 1
