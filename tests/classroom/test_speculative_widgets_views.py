"""The widgets of 08 show what speculation did: fates, counts, masks and speed-ups recomputed."""

import copy
import html
import itertools
import re
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lecture_util.classroom.widgets import (
    curves,
    rounds,
    speedup_explorer,
    token_ribbon,
    tree_unfolding,
    two_symbol_explorer,
)
from lecture_util.classroom.widgets.rounds import marked, told, visible
from lecture_util.model.config import Config
from lecture_util.model.sampling import Sampling
from lecture_util.model.transformer import Transformer
from lecture_util.speculative.draft import Draft, chain
from lecture_util.speculative.ngram import NgramDrafter
from lecture_util.speculative.speculate import Round, speculate, stream_speculative
from lecture_util.speculative.target import Table
from lecture_util.speculative.verify import Chance

matplotlib.use("agg")
PNG = b"\x89PNG"
TREE = Draft([5, 6, 5, 7, 8, 9, 4], [-1, -1, 0, 0, 1, 2, 3])
CORRECTED = Round(TREE, [0, 3], [5, 7, 1], "correction")
BONUS = Round(chain([4, 5]), [0, 1], [4, 5, 6], "bonus")
PLAIN = Round(Draft(), [], [9], "plain")
ENDED = Round(chain([4, 2, 7]), [0, 1], [4, 2], "guess")
ALL = [PLAIN, CORRECTED, BONUS, ENDED]
EXAMPLE = {
    "prompt": "Once",
    "rounds": [
        {"guesses": [" a", " a"], "parents": [-1, 0], "accepted": [0], "tokens": [" a", " b"],
         "last": "correction"},
        {"guesses": [], "parents": [], "accepted": [], "tokens": ["<|im_end|>"], "last": "plain"},
    ],
}  # fmt: skip


class Words:
    """A tokenizer of a few awkward words."""

    words = ("\n", "**", "`x`", "<|im_end|>", " the", "    ", "\ufffd", "", "$a$", "&")

    def decode(self, tokens):
        return "".join(self.words[token] for token in tokens)


def changed(round: int, **values) -> dict:
    example = copy.deepcopy(EXAMPLE)
    example["rounds"][round] |= values
    return example


def cells(explorer) -> list[list[list[tuple[str, str]]]]:
    """Each round's table as rows of (what it is, its words); ("", "") where there is none."""
    found = []
    for table in re.findall(r"<table.*?</table>", explorer.steps.picture.value):
        rows = []
        for row in re.findall(r"<tr>(.*?)</tr>", table):
            parts = re.findall(r"<td(.*?)>(.*?)</td>", row)
            rows.append(
                [((re.findall(r'title="(.*?)"', look) or [""])[0],
                  html.unescape(re.sub(r"<.*?>", "", words))) for look, words in parts]
            )  # fmt: skip
        found.append(rows)
    return found


# --- tokens and their words


@pytest.mark.parametrize(
    ("text", "shown"),
    [(" the", "␣the"), ("\n\n", "↵↵"), ("\t", "⇥"), (" " * 12, "␣×12"), ("", "∅"),
     ("\x00a", "⟨0⟩a"), ("<|im_end|>", "<|im_end|>"), ("\u00a0", "⟨A0⟩"), ("né", "né")],
)  # fmt: skip
def test_what_can_t_be_seen_is_shown_as_a_sign(text, shown):
    assert visible(text) == shown


@given(st.text(max_size=40))
def test_no_token_is_read_as_markup(text):
    words = marked(visible(text), 400)
    assert not re.search(r"[<>*`\n]", words)
    assert html.unescape(words) == visible(text)


def test_half_a_character_is_shown_as_its_number():
    assert told([Round(Draft(), [], [6], "plain")], Words())[0].tokens == ("⟨6⟩",)


def test_guesses_were_tried_in_turn_until_one_was_accepted():
    a, r, u = rounds.ACCEPTED, rounds.REJECTED, rounds.UNTRIED
    fates = {id(one): told(one)[0].fates for one in ALL}
    assert fates[id(CORRECTED)] == [a, u, r, a, u, u, r]
    assert fates[id(BONUS)] == [a, a]
    assert fates[id(ENDED)] == [a, a, u]
    first = Round(chain([1, 2]), [], [3], "correction")
    assert told(first)[0].fates == [r, u]


class Listening(Chance):
    """Counts the questions that verification asks."""

    asked = 0

    def happens(self, probability):
        self.asked += 1
        return super().happens(probability)


class Guesser:
    """Random trees of distinct guesses."""

    def __init__(self, seed):
        self.random = np.random.default_rng(seed)

    def propose(self, tokens, room, chance):
        n = self.random.integers(0, 7)
        parents = [int(self.random.integers(-1, node)) for node in range(n)]
        return Draft([int(x) for x in self.random.permutation(7)[:n]], parents)

    def settle(self, tokens):
        pass


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 999))
def test_as_many_guesses_are_told_as_compared_as_verification_compared(seed):
    table = Table(lambda tokens: torch.arange(7.0) * 0.1 * len(tokens) % 1)
    chance = Listening(torch.Generator().manual_seed(seed))
    for one in speculate(table, Guesser(seed), [1], 12, sampling=Sampling(1.0), chance=chance):
        (shown,) = told(one)
        if one.last != "guess":
            assert sum(fate != rounds.UNTRIED for fate in shown.fates) == chance.asked
        assert [n for n, fate in enumerate(shown.fates) if fate == rounds.ACCEPTED] == sorted(
            one.accepted
        )
        chance.asked = 0


# --- token_ribbon


def test_each_token_says_what_it_is_and_guesses_stand_below_their_place():
    explorer = token_ribbon(ALL)
    a, r, u = rounds.ACCEPTED, rounds.REJECTED, rounds.UNTRIED
    none = ("", "")
    assert cells(explorer) == [
        [[("plain", "9")]],
        [
            [(a, "5"), (a, "7"), ("correction", "1")],
            [(a, "5"), (a, "7"), (u, "9")],
            [(u, "6"), (r, "5"), (r, "4")],
            [none, (u, "8"), none],
        ],
        [[(a, "4"), (a, "5"), ("bonus", "6")], [(a, "4"), (a, "5"), none]],
        [[(a, "4"), (a, "2"), none], [(a, "4"), (a, "2"), (u, "7")]],
    ]


def test_the_answer_can_be_read_from_the_ribbon_of_a_live_run():
    model = Transformer.random(Config(D=8, F=12, K=1, G=1, H=8, L=1, V=6), seed=0)
    live = list(stream_speculative(model, lambda reader: NgramDrafter(), [1, 2, 1], 30))
    explorer = token_ribbon(iter(live))
    told_tokens = [
        int(words) for table in cells(explorer) for kind, words in table[0] if kind
    ]  # fmt: skip
    assert told_tokens == [token for one in live for token in one.tokens]
    assert len(told_tokens) == 30
    tried = sum(len(one.accepted) + (one.last == "correction") for one in live)
    kept = sum(len(one.accepted) for one in live)
    assert f"{len(live)} rounds, 30 tokens: <b>{30 / len(live):.2f} tokens a round" in (
        explorer.text.value
    )
    assert f"α = {kept / tried:.2f} ({kept} of {tried} tried)" in explorer.text.value


def test_rounds_are_stepped_on_and_back_and_end_at_the_ends():
    explorer = token_ribbon(ALL, at=0)
    assert "Before the first round" in explorer.text.value
    assert cells(explorer) == []
    on = explorer.steps.buttons[1]
    for shown in (1, 2, 3, 4, 4):
        on.click()
        assert len(cells(explorer)) == shown
        assert explorer.steps.picture.value.count("data-now") == 1
    assert "the text ends inside the draft" in explorer.text.value
    explorer.steps.keys.moves = -2  # as the arrow keys set it
    assert explorer.values == {"round": 2}
    assert "<b>2 of 7 guesses accepted</b>, then a correction, 1" in explorer.text.value
    explorer.steps.keys.moves = -9
    assert explorer.values == {"round": 0}


def test_another_drafter_starts_with_its_whole_answer():
    explorer = token_ribbon({"first": ALL, "second": EXAMPLE})
    explorer.controls["drafter"].value = "second"
    assert explorer.values == {"drafter": "second", "round": 2}
    assert explorer.round.max == explorer.steps.play.max == 2
    assert cells(explorer)[0][0] == [(rounds.ACCEPTED, "␣a"), ("correction", "␣b")]
    explorer.controls["drafter"].value = "first"
    assert explorer.values["round"] == explorer.round.max == 4


def test_awkward_tokens_are_shown_and_no_markup():
    every = [Round(Draft(), [], [token], "plain") for token in range(10)]
    explorer = token_ribbon(every, Words())
    words = [table[0][0][1] for table in cells(explorer)]
    assert words == ["↵", "**", "`x`", "<|im_end|>", "␣the", "␣×4", "⟨6⟩", "∅", "$a$", "&"]
    explorer.round.value = 2
    assert "<code>" not in explorer.text.value
    assert html.unescape(explorer.text.value).count("**") == 1


def test_many_alternatives_are_counted():
    draft = Draft(range(9), [-1] * 9)
    table = cells(token_ribbon([Round(draft, [8], [8, 3], "bonus")]))[0]
    assert table[1][0] == (rounds.ACCEPTED, "8")  # the accepted one comes first
    assert [row[0][1] for row in table[1:]] == ["8", "0", "1", "2", "3", "+4 more"]


def test_without_rounds_the_recorded_examples_are_shown(monkeypatch):
    monkeypatch.setattr(rounds, "recorded", lambda name: {"examples": {"eagle": EXAMPLE}})
    assert len(cells(token_ribbon())) == 2
    monkeypatch.setattr(rounds, "recorded", lambda name: {})
    with pytest.raises(ValueError, match=r"no examples: run that section of benchmarks/spec"):
        token_ribbon()


@pytest.mark.parametrize(
    ("what", "error", "message"),
    [
        ([], ValueError, "no rounds: let the model"),
        ({}, ValueError, "an empty dict"),
        ({"EAGLE": []}, ValueError, "no rounds of 'EAGLE'"),
        ("text", TypeError, "rounds are 'text'"),
        (7, TypeError, "rounds are 7"),
        ([PLAIN, 3], TypeError, "round 2 is 3: expected a Round"),
        (TREE, ValueError, "was not verified has no tokens"),
        ([Round(TREE, [3], [7, 1], "correction")], ValueError, r"round 1 accepts \[3\] of 7"),
        ([Round(TREE, [0], [5, 7, 1], "bonus")], ValueError, "gains 3 tokens"),
        ([Round(TREE, [0], [5, 7], "wish")], ValueError, "the last a 'wish'"),
        (changed(0, accepted=[5]), ValueError, r"round 1 is not .*accepted is \[5\] of 2"),
        (changed(0, parents=[0, 0]), ValueError, "round 1 is not .*node 0 follows node 0"),
        (changed(1, tokens=7), ValueError, "round 2 is not as benchmarks"),
        ({"rounds": [{"guesses": []}]}, ValueError, "KeyError: 'tokens'"),
    ],
)
def test_what_are_no_rounds_is_refused(what, error, message):
    with pytest.raises(error, match=message):
        token_ribbon(what)


@pytest.mark.parametrize("at", [-1, 5, 1.0, True])
def test_a_round_that_is_not_there_is_refused(at):
    with pytest.raises(ValueError, match="expected a round, 0 to 4"):
        token_ribbon(ALL, at=at)


def test_a_tokenizer_without_decode_is_refused():
    with pytest.raises(TypeError, match="pass one with decode"):
        token_ribbon(ALL, str)


# --- tree_unfolding


def drawn(explorer):
    """The SVG's parts: it is well-formed."""
    root = ElementTree.fromstring(explorer.steps.picture.value)
    return [(one.tag, dict(one.attrib), "".join(one.itertext())) for one in root.iter()]


def mask_cells(explorer, M):
    """fill of each cell of the mask, row by row."""
    fills = [a["fill"] for tag, a, _ in drawn(explorer) if tag == "rect" and a["stroke"] == "#CCC"]
    assert len(fills) == M * (M + 1)
    return np.array(fills).reshape(M, M + 1)


def boxes(explorer):
    return [a for tag, a, _ in drawn(explorer) if tag == "rect" and "rx" in a]


def test_a_node_a_step_then_the_accepted_path_then_the_target_s_own():
    explorer = tree_unfolding(CORRECTED, at=0)
    assert explorer.step.max == 7 + 2 + 1
    count = []
    for step in range(11):
        explorer.step.value = step
        count.append(len(boxes(explorer)) - 1)  # but the sequence
    assert count == [0, 1, 2, 3, 4, 5, 6, 7, 7, 7, 8]
    green = [box for box in boxes(explorer) if box["stroke"] == "#009E73"]
    assert len(green) == 2
    assert "<b>3 tokens from one forward</b> over 8" in explorer.text.value


def test_boxes_and_their_columns_follow_the_draft():
    explorer = tree_unfolding(TREE)
    assert explorer.step.max == 7  # nobody verified it
    left = [float(box["x"]) for box in boxes(explorer)[1:]]
    columns = sorted(set(left))
    assert [columns.index(x) + 1 for x in left] == TREE.depths
    spans = [(float(b["x"]), float(b["y"]), float(b["height"])) for b in boxes(explorer)]
    for (x, y, height), (x2, y2, _) in itertools.combinations(spans, 2):
        assert x != x2 or abs(y - y2) > height  # none hides another


def test_the_mask_shows_ancestors_and_itself_row_by_row():
    explorer = tree_unfolding(TREE, at=0)
    for step in range(8):
        explorer.step.value = step
        fills = mask_cells(explorer, 7)
        for node in range(7):
            sees = {node}
            while node in sees or TREE.parents[min(sees)] != -1:
                parent = TREE.parents[min(sees)]
                if parent == -1:
                    break
                sees.add(parent)
            for column in range(8):
                fill = fills[node, column]
                if node >= step:
                    assert fill == "#F2F2F2"
                elif column == 0 or column - 1 in sees:
                    assert fill == ("#0072B2" if node == step - 1 else "#9CC8E0")
                else:
                    assert fill == "#FFFFFF"


def test_the_text_counts_what_a_guess_sees_and_what_is_hidden():
    explorer = tree_unfolding(TREE, at=7)
    assert "It sees the sequence, 0, 3, itself; 4 earlier guesses of other branches are" in (
        explorer.text.value
    )
    explorer.step.value = 3
    assert "sees the sequence, 0, itself; 1 earlier guess of other branches is hidden" in (
        explorer.text.value
    )


def test_notes_are_ranks_or_what_was_drawn_or_what_is_given():
    def notes(explorer):
        ends = [t for tag, a, t in drawn(explorer) if tag == "text" and a["text-anchor"] == "end"]
        return [text for text in ends if text]

    assert notes(tree_unfolding(TREE))[:7] == ["#1", "#2", "#1", "#2", "#1", "#1", "#1"]
    q_V = torch.tensor([0.1, 0.2, 0.3, 0.4])
    explorer = tree_unfolding(chain([3, 2], [q_V, q_V]))
    assert notes(explorer)[:2] == ["0.40", "0.30"]
    assert "its whole path: <b>0.120</b>" in explorer.text.value
    given = torch.tensor([0.5, 0.4, 0.3, 0.2, 0.1, 0.6, 0.7])
    explorer = tree_unfolding(TREE, probabilities=given)
    assert notes(explorer)[5:7] == ["0.60", "0.70"]
    assert f"<b>{0.5 * 0.2 * 0.7:.3f}</b>" in explorer.text.value


def test_rounds_without_a_guess_are_left_out_and_another_round_starts_at_its_sequence():
    explorer = tree_unfolding([PLAIN, CORRECTED, BONUS, PLAIN, ENDED])
    assert explorer.controls["round"].max == 3
    explorer.controls["round"].value = 2
    assert explorer.values == {"round": 2, "step": 0}
    assert explorer.step.max == explorer.steps.play.max == 2 + 2 + 1
    explorer.step.value = 5
    assert "as a bonus the target's own token" in explorer.text.value
    explorer.controls["round"].value = 3
    assert explorer.step.max == 3 + 2  # no token of the target's own
    explorer.step.value = 5
    assert "agrees to guess 1" in explorer.text.value


@pytest.mark.parametrize("parents", [[-1] * 32, [*range(-1, 15)], [-1, *[0] * 31]])
def test_the_largest_drafts_are_drawn_apart(parents):
    explorer = tree_unfolding(Draft(range(len(parents)), parents), Wordy())
    spans = [tuple(float(b[k]) for k in ("x", "y", "width", "height")) for b in boxes(explorer)]
    assert all(width > 0 and height > 6 for _, _, width, height in spans)
    for (x, y, width, height), (x2, y2, width2, _) in itertools.combinations(spans, 2):
        apart = x + width < x2 or x2 + width2 < x or abs(y - y2) >= height
        assert apart
    assert all(0 <= x and x + w <= 800 and 20 < y and y + h <= 400 for x, y, w, h in spans)


class Wordy:
    def decode(self, tokens):
        return "supercalifragilistic"


def test_a_tree_of_a_recorded_example_unfolds():
    explorer = tree_unfolding(EXAMPLE)
    assert "␣b" in explorer.text.value
    assert "controls" not in explorer.text.value
    assert list(explorer.controls) == ["step"]  # the second round has no guess


@pytest.mark.parametrize(
    ("drafts", "more", "message"),
    [
        ([PLAIN], {}, "no round has a draft"),
        (Draft(range(33), [-1] * 33), {}, "has 33 guesses, 1 deep, but .* room for 32, 16 deep"),
        (chain(range(17)), {}, "17 deep"),
        (TREE, {"probabilities": [0.5]}, r"are for \[1\] guesses but the drafts have \[7\]"),
        (TREE, {"probabilities": [1.5] * 7}, "hold 1.5: expected 0 to 1"),
        (TREE, {"probabilities": [float("nan")] * 7}, "hold nan: expected 0 to 1"),
        ([TREE, BONUS], {"probabilities": [0.5] * 7}, r"for \[7\] guesses but .* \[7, 2\]"),
        (TREE, {"at": 8}, "expected a step, 0 to 7"),
    ],
)
def test_what_can_t_unfold_is_refused(drafts, more, message):
    with pytest.raises(ValueError, match=message):
        tree_unfolding(drafts, **more)


def test_several_drafters_at_once_can_t_unfold():
    with pytest.raises(TypeError, match="a dict of EAGLE: pass the rounds of one drafter"):
        tree_unfolding({"EAGLE": [BONUS]})


# --- speedup_explorer

RECORD = {
    "verify_cost": {"float32": {"1": {"T": [1, 3, 9, 33], "ms": [20, 30, 60, 100]}}},
    "early_exits": [
        {"layers": 22, "gamma": {"2": {"tokens_per_round": 1.9, "speedup": 0.8},
                                 "4": {"tokens_per_round": 2.3, "speedup": 0.7}}}
    ],
    "drafters": {
        "ngram": {"bfloat16": {"tokens_per_round": 2.0, "speedup": 1.5, "setting": {"k": 8}}},
        "early_exit": {"float32": {"tokens_per_round": 9, "speedup": 9, "setting": {"gamma": 4}}},
    },
}  # fmt: skip


def simulated(alpha, gamma, n=200_000):
    """Tokens a round when each guess is accepted with probability alpha, independently."""
    happens = np.random.default_rng(0).random((n, gamma)) < alpha
    return 1 + np.cumprod(happens, axis=1).sum(1).mean()


@pytest.mark.parametrize(("alpha", "gamma"), [(0.8, 4), (0.3, 7), (1.0, 16), (0.0, 5), (0.9, 0)])
def test_expected_tokens_are_what_independent_guesses_give(alpha, gamma):
    explorer = speedup_explorer([], alpha=alpha, gamma=gamma)
    shown = float(re.search(r"([\d.]+) tokens a round", explorer.text.value)[1])
    assert shown == pytest.approx(simulated(alpha, gamma), abs=0.03)
    assert explorer.draw.here.get_ydata()[0] == pytest.approx(shown, abs=0.006)
    assert bytes(explorer.image.value[:4]) == PNG


def test_the_star_stands_on_the_highest_gain():
    explorer = speedup_explorer(RECORD)
    picture = explorer.draw
    for alpha, c, cost in itertools.product(
        (0.2, 0.6, 0.9, 1.0), (0, 0.1, 0.5), explorer.controls["costs"].options
    ):
        explorer.controls["alpha"].value, explorer.controls["c"].value = alpha, c
        explorer.controls["costs"].value = cost
        assert "Error" not in explorer.text.value
        gains = picture.gain.get_ydata()
        assert (picture.star.get_xdata()[0], picture.star.get_ydata()[0]) == pytest.approx(
            (np.argmax(gains), max(gains))
        )
        assert ("No γ pays" in explorer.text.value) == (np.argmax(gains) == 0)


def test_verifying_costs_what_was_measured_and_no_further():
    explorer = speedup_explorer([], costs={"here": {1: 40.0, 5: 60.0, 3: 44.0}}, c=0.5, alpha=0.5)
    explorer.controls["costs"].value = "here"
    gains = explorer.draw.gain.get_ydata()
    costs = np.array([1, 0.5 * (1 + 1.1), 1.1, 0.5 * (1.1 + 1.5), 1.5])
    tokens = np.array([1, 1.5, 1.75, 1.875, 1.9375])
    assert gains == pytest.approx(tokens / (costs + 0.5 * np.arange(5)))
    explorer.controls["gamma"].value = 5
    assert "verifying was measured up to 5 tokens only" in explorer.text.value
    assert len(explorer.draw.gain_here.get_xdata()) == 0
    assert len(explorer.draw.here.get_xdata()) == 1


def test_points_and_costs_come_from_the_record(monkeypatch):
    explorer = speedup_explorer(RECORD)
    lines = {
        line.get_label(): line.get_xydata().tolist()
        for line in explorer.draw.speed.lines
        if line.get_label() in ("22 layers", "ngram bf16")
    }
    assert lines == {"22 layers": [[2, 0.8], [4, 0.7]], "ngram bf16": [[8, 1.5]]}
    assert "measured: float32, batch 1" in explorer.controls["costs"].options
    monkeypatch.setattr(curves, "recorded", lambda name: RECORD)
    assert len(speedup_explorer().draw.points) == 3
    assert len(speedup_explorer([]).draw.points) == 0


def test_without_a_record_only_the_prediction_is_drawn(monkeypatch):
    def missing(name):
        raise FileNotFoundError

    monkeypatch.setattr(curves, "recorded", missing)
    explorer = speedup_explorer()
    assert explorer.draw.points == []
    assert list(explorer.controls["costs"].options) == [curves.FLAT]


def test_a_move_redraws_only_what_moves():
    explorer = speedup_explorer([("n-gram", 8, 2.0, 1.5)])
    explorer.controls["alpha"].value = 0.3
    explorer.controls["gamma"].value = 9
    assert explorer.draw.canvas.still_draws == 1


@pytest.mark.parametrize(
    ("points", "more", "message"),
    [
        ([("n-gram", 8)], {}, r"point \('n-gram', 8\): expected \(name"),
        ([("n-gram", 8, 2.0, float("nan"))], {}, "finite numbers"),
        ([("n-gram", -1, 2.0, 1.0)], {}, "gamma from 0 up"),
        ([("n-gram", 10**7, 2.0, 1.0)], {}, "gamma from 0 up to 1024"),
        ([3], {}, "point 3"),
        ({"early_exits": [{}]}, {}, "not as benchmarks/speculative.py writes it, KeyError"),
        ([], {"alpha": 1.2}, "alpha is 1.2: expected 0 to 1"),
        ([], {"gamma": 17}, "gamma is 17: expected 0 to 16"),
        ([], {"gamma": 2.0}, "gamma is 2.0"),
        ([], {"c": -1}, "c is -1"),
        ([], {"costs": {"here": {2: 3.0, 4: 5.0}}}, r"known for \[2, 4\] tokens: expected 1"),
        ([], {"costs": {"here": {1: 0.0, 4: 5.0}}}, "times above 0"),
        ([], {"costs": {"here": "fast"}}, "cost 'here' is 'fast'"),
    ],
)
def test_what_can_t_be_drawn_is_refused(points, more, message):
    with pytest.raises(ValueError, match=message):
        speedup_explorer(points, **more)


@pytest.mark.parametrize(("points", "more"), [("n-gram", {}), (3, {}), ([], {"costs": 3})])
def test_points_and_costs_of_the_wrong_kind_are_refused(points, more):
    with pytest.raises(TypeError, match="pass a"):
        speedup_explorer(points, **more)


# --- two_symbol_explorer


def test_kept_and_redrawn_stack_up_to_p_whatever_q_is():
    explorer = two_symbol_explorer()
    for p, q in itertools.product((0, 0.2, 0.5, 0.73, 1), (0, 0.3, 0.5, 0.9, 1)):
        explorer.controls["p_A"].value, explorer.controls["q_A"].value = p, q
        text = explorer.text.value
        assert "Error" not in text
        bars = explorer.draw.bars
        tops = [bar.get_y() + bar.get_height() for bar in bars["drawn from the residual", 2]]
        assert tops == pytest.approx([p, 1 - p])
        drafted = [bar.get_y() + bar.get_height() for bar in bars["rejected", 0]]
        assert drafted == pytest.approx([q, 1 - q])
        again = sum(bar.get_height() for bar in bars["drawn from the residual", 1])
        assert again == pytest.approx(sum(bar.get_height() for bar in bars["rejected", 0]))
        assert f"Σ min(p, q) = {min(p, q) + min(1 - p, 1 - q):.2f}" in text
        assert f"P(A) = <b>{p:.2f}</b>, P(B) = <b>{1 - p:.2f}</b>" in text
    assert explorer.draw.canvas.still_draws == 1


def test_a_symbol_that_the_draft_never_draws_is_said_so():
    text = two_symbol_explorer(0.4, 0).text.value
    assert "A never drawn, B 60%" in text
    assert "residual A 100%, B 0%" in text
    assert "nothing is rejected" in two_symbol_explorer(0.4, 0.4).text.value


@pytest.mark.parametrize("value", [-0.1, 1.01, float("nan"), "half", True])
@pytest.mark.parametrize("name", ["p_A", "q_A"])
def test_what_is_no_probability_is_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} is .*expected a probability"):
        two_symbol_explorer(**{name: value})
