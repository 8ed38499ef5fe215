"""Figures of speculation draw what the library computes, and whatever a record comes to hold."""

import itertools

import matplotlib
import matplotlib.pyplot as plt
import pytest
import torch

from lecture_util.classroom import figures
from lecture_util.classroom.figures import (
    cli,
    small_caches,
    speculative_drafts,
    speculative_measured,
    speculative_papers,
    speculative_records,
    speculative_rounds,
    speculative_tree,
)
from lecture_util.model.sampling import Sampling
from lecture_util.speculative.draft import chain
from lecture_util.speculative.verify import verify

matplotlib.use("agg")
REGISTERS = "speculative", (speculative_records, speculative_measured)
RECORDED = ("chen-panels", "drafters-measured", "grounded-tasks", "verification-cost")


@pytest.fixture(autouse=True)
def no_figure_left_open():
    yield
    plt.close("all")


def texts(still: figures.registry.StillFigure) -> str:
    """Every word drawn in a figure."""
    found = still.draw().findobj(match=matplotlib.text.Text)
    return "\n".join(text.get_text() for text in found)


def alt_and_drawn(name: str) -> tuple[str, str]:
    return figures.FIGURES[name].alt, texts(figures.FIGURES[name])


class Fixed:
    """Chances as the figure has them; what is drawn from is remembered."""

    def __init__(self, uniforms):
        self.uniforms = iter(uniforms)

    def happens(self, probability):
        return next(self.uniforms) < probability

    def draw(self, p_V):
        self.drawn_from = p_V
        return int(p_V.argmax())


def test_the_round_drawn_is_what_verify_does():
    V, guesses = 6, list(range(len(speculative_rounds.ROUND)))
    p_MV = torch.full((len(guesses) + 1, V), 1 / V, dtype=torch.float64)
    q_GV = torch.zeros(len(guesses), V, dtype=torch.float64)
    for node, (_, q, p, _) in enumerate(speculative_rounds.ROUND):
        for x_V, value in ((p_MV[node], p), (q_GV[node], q)):
            x_V[:] = (1 - value) / (V - 1)
            x_V[node] = value
    p_MV[2, 5], p_MV[2, 4] = p_MV[2, 5] + 0.1, p_MV[2, 4] - 0.1  # the correction is the likeliest
    chance = Fixed(u for *_, u in speculative_rounds.ROUND)
    path, token = verify(p_MV.log(), chain(guesses, list(q_GV)), Sampling(temperature=1.0), chance)
    assert path == list(range(speculative_rounds.kept_of_round())) == [0, 1]
    assert token == 5
    left_V = (p_MV[2] - q_GV[2]).clamp(min=0)
    torch.testing.assert_close(chance.drawn_from, left_V / left_V.sum())
    alt, drawn = alt_and_drawn("speculative-round")
    for _, q, p, u in speculative_rounds.ROUND[:3]:
        assert f"{q:.2f}" in drawn
        assert f"{p:.2f}" in drawn
        assert f"{u:.2f} {'<' if u < min(1, p / q) else '≥'} {min(1, p / q):.2f}" in drawn
        assert f"{q:.2f}"[1:] in alt
        assert f"{p:.2f}"[1:] in alt
    assert f"{len(path) + 1} tokens" in drawn


def test_what_is_kept_and_the_residual_add_up_to_p_in_the_figure():
    made = speculative_rounds.parts()
    p_V = torch.tensor(speculative_rounds.P, dtype=torch.float64)
    q_V = torch.tensor(speculative_rounds.Q, dtype=torch.float64)
    torch.testing.assert_close(p_V.sum(), q_V.sum())
    torch.testing.assert_close(made["kept"] + made["added"], p_V)
    torch.testing.assert_close(made["kept"] + made["rejected"], q_V)
    torch.testing.assert_close(made["added"].sum(), made["rejected"].sum())
    alt, drawn = alt_and_drawn("the-residual")
    for name in ("kept", "rejected", "residual"):
        mass = made["added" if name == "residual" else name].sum()
        assert f"{name}: {mass:.2f}" in drawn
        assert f"{mass:.2f}"[1:] in alt


def test_the_mask_and_positions_drawn_are_those_of_the_tree():
    draft, paths = speculative_tree.tree()
    mask, positions = speculative_tree.read_as()
    known = len(speculative_tree.SEQUENCE)
    for row, path in enumerate([(), *paths]):
        assert positions[row] == known - 1 + len(path)
        for column, other in enumerate(paths):  # an ancestor's path begins this one
            assert mask[row][known + column] == (path[: len(other)] == other)
        assert all(mask[row][:known])
    assert [draft.parents[node] for node in speculative_tree.ACCEPTED] == [-1, 0]
    alt, drawn = alt_and_drawn("draft-tree-mask")
    assert f"positions are {', '.join(map(str, positions[1:]))}" in alt
    slots = [known + node for node in speculative_tree.ACCEPTED]
    assert f"slots {slots[0]} and {slots[1]} become {known} and {known + 1}" in drawn


def test_four_ways_name_the_same_two_tokens():
    alt, drawn = alt_and_drawn("four-ways-to-draft")
    assert drawn.count("t₅") == 3 + 1  # three panels and the title
    guesses = drawn.split().count("fox"), drawn.split().count("ran")
    assert guesses == (2, 2)  # in the text, and copied
    assert speculative_drafts.TEXT[-2:] == speculative_drafts.TEXT[:2]
    assert all(name in alt for name in ("Small model", "N-gram", "Medusa", "EAGLE"))


def test_leviathans_table_stands_beside_the_formula():
    alt, drawn = alt_and_drawn("leviathan")
    for name, gamma, alpha, times in speculative_papers.TABLE_2:
        tokens = (1 - alpha ** (gamma + 1)) / (1 - alpha)
        assert f"{times}× ({tokens:.2f})" in alt
        assert f"{name}, γ={gamma}" in drawn
        assert f"{times}×" in drawn
    cost = speculative_papers.COST
    for alpha in (0.5, 0.7, 0.9):
        speeds = [(1 - alpha ** (g + 1)) / (1 - alpha) / (1 + g * cost) for g in range(33)]
        best = speeds.index(max(speeds))
        assert 0 < best < 15  # "there is a best number", and it is in view
        assert f"γ={best} for α={alpha}" in alt
        assert f"γ={best}: {speeds[best]:.1f}×" in drawn


def test_chens_speed_ups_are_those_of_the_printed_times():
    alt, drawn = alt_and_drawn("chen-results")
    for row in speculative_papers.TABLE_1:
        times = speculative_papers.BASELINE_MS / row.ms
        assert 1.8 < times < 2.5  # "about twice"
        assert f"{times:.2f}× as fast" in drawn
        assert f"{times:.2f} times" in alt
        before, after = (float(score.rstrip("%")) for score in (row.before, row.after))
        assert abs(after / before - 1) < 0.05  # "about the same scores"
        assert (f"{times:.2f}" == f"{row.printed:.2f}") == (row.name != "XSum, nucleus")
    assert "prints 1.92×, its times give 1.88×" in drawn.replace("\n", " ")


def test_chens_third_panel_follows_from_the_other_two():
    kept, loop, total = speculative_records.chen_curves()
    assert dict(total["HumanEval"])[4] == pytest.approx(128 * 22.8 / (1 + 4 * 0.80))
    assert dict(total["XSum"])[0] == pytest.approx(128 * 14.1)
    for points in kept.values():
        assert all(a > b for (_, a), (_, b) in itertools.pairwise(points))  # "a smaller share"
    assert all(a < b for (_, a), (_, b) in itertools.pairwise(loop[""]))  # "takes longer"


def synthetic(speed: float = 1.0, drafts: int = 2) -> dict:
    """A record in the schema of benchmarks/speculative.py, by formula: nothing was measured."""
    T = [1, 2, 3, 5, 9, 17, 33]
    names, dtypes = ("ngram", "early_exit", "medusa", "eagle"), ("float32", "bfloat16")
    tasks = ("copy", "rewrite", "extract", "code edit", "summarize")

    def chen(alpha: float) -> list[dict]:
        rows = []
        for gamma in range(8):
            accepted, loop_ms = sum(alpha**k for k in range(1, gamma + 1)), 30.0 + 5 * gamma
            share = accepted / gamma if gamma else 1.0
            rows.append({"gamma": gamma, "accepted_share": share, "loop_ms": loop_ms,
                         "ms_per_128_tokens": 128 * loop_ms / (1 + accepted),
                         "dtype": "bfloat16"})  # fmt: skip
        return rows

    def drafter(k: int, plain_ms: float) -> dict:
        tokens, draft_ms = 1.3 + 0.3 * k, (0.2, 60.0, 3.0, 9.0)[k] / speed
        profile = {"draft_ms": draft_ms, "target_ms": 1.2 * plain_ms / speed, "verify_ms": 0.3,
                   "other_ms": 1.0}  # fmt: skip
        round_ms = sum(profile.values())
        return {"tokens": 1000, "rounds": 500, "tokens_per_round": tokens, "profile": profile,
                "tokens_per_s": 1e3 * tokens / round_ms, "plain_tokens_per_s": 1e3 / plain_ms,
                "speedup": tokens * plain_ms / round_ms,
                "predicted": tokens * plain_ms / (draft_ms + profile["target_ms"])}  # fmt: skip

    return {
        "date": "2020-02-02",
        "machine": {"hardware": "Processor of no machine, 2 threads"},
        "verify_cost": {
            dtype: {str(B): {"T": T, "ms": [30.0 * B**0.5 * t ** (0.3 + 0.018 * B) for t in T]}
                    for B in (1, 8, 32)}
            for dtype in dtypes
        },
        "chen": {name: chen(0.8 - 0.13 * k) for k, name in enumerate(names[:drafts])},
        "drafters": {
            name: {dtype: drafter(k, 30.0 + 3 * j) for j, dtype in enumerate(dtypes)}
            for k, name in enumerate(names)
        },
        "grounded": [
            {"task": task, "dtype": dtype, "tokens": 128, "plain": 30.0, "hf_plain": 22.0,
             "ngram": 30.0 * speed * (1 + 0.5 * k), "hf_lookup": 22.0 * speed * (1.1 + 0.4 * k)}
            for k, task in enumerate(tasks) for dtype in dtypes
        ],
    }  # fmt: skip


def test_recorded_figures_wait_for_their_sections(registered):
    assert registered(None) == {}
    run = synthetic()
    assert sorted(registered({key: run[key] for key in ("date", "machine", "grounded")})) == [
        "grounded-tasks"
    ]
    del run["drafters"]["eagle"]["bfloat16"]
    del run["verify_cost"]["float32"]["32"]
    assert sorted(registered(run)) == ["chen-panels", "grounded-tasks"]
    assert tuple(sorted(registered(synthetic()))) == RECORDED


@pytest.mark.parametrize(("speed", "drafts"), [(1.0, 2), (0.5, 3), (3.0, 1)])
def test_recorded_figures_draw_whatever_was_measured(registered, tmp_path, speed, drafts):
    for name, still in registered(synthetic(speed, drafts)).items():
        assert 80 < len(still.alt) < 500, still.alt
        assert still.alt.endswith(".")
        cli.render(still, tmp_path / f"{name}.svg")
        assert (tmp_path / f"{name}.svg").stat().st_size < cli.MAX_BYTES
        drawn = texts(still)
        assert still.title in drawn
        assert "2020-02-02, Processor of no machine, 2 threads" in drawn.replace("\n", " ")


def test_numbers_of_recorded_figures_are_the_record_s(registered):
    run = synthetic(0.5)
    found = registered(run)
    drawn = texts(found["drafters-measured"])
    for name, entries in run["drafters"].items():
        for entry in entries.values():
            assert f"{entry['speedup']:.2f}×" in drawn, name
            assert f"{entry['tokens_per_round']:.2f}" in drawn
            assert (
                f"{entry['speedup']:.2f}× ({entry['predicted']:.2f})"
                in found["drafters-measured"].alt
            )
    drawn = texts(found["verification-cost"])
    for entries in run["verify_cost"].values():
        for B, entry in entries.items():
            assert f"B={B}: {entry['ms'][-1] / entry['ms'][0]:.1f}" in drawn
    drawn = texts(found["chen-panels"])
    assert "(not α)" in drawn
    for entries in run["chen"].values():
        best = min(entries, key=lambda entry: entry["ms_per_128_tokens"])
        assert f"{best['ms_per_128_tokens']:,.0f}, K={best['gamma']}" in drawn


def test_prompts_of_one_task_are_taken_together(registered):
    run = synthetic()
    more = run["grounded"][0] | {"tokens": 384, "ngram": 90.0}
    run["grounded"].append(more)
    registered(run)
    rates = speculative_measured._by_task(run)["copy", "float32"]
    assert rates["ngram"] == pytest.approx(512 / (128 / 30 + 384 / 90))
    assert rates["plain"] == pytest.approx(30)


def test_labels_at_the_ends_of_lines_never_touch():
    fig, ax = plt.subplots()
    ax.set(xlim=(0, 1), ylim=(0, 1))
    labels = [(1, y, f"line {y}", "black") for y in (0.5, 0.501, 0.2, 0.51, 0.9)]
    speculative_records.ends(ax, labels)
    fig.canvas.draw()
    boxes = [text.get_window_extent() for text in ax.texts]
    assert len(boxes) == len(labels)
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))


def checking_is_cheap_alone(run: dict) -> bool:
    over = {}
    for dtype, entries in run["verify_cost"].items():
        for B, entry in entries.items():
            over[dtype, B] = entry["ms"][entry["T"].index(9)] / entry["ms"][0]
    cheap = all(over[dtype, "1"] < 9 / 2 for dtype in run["verify_cost"])
    return cheap and all(
        max(over[dtype, "1"], over[dtype, "8"]) < over[dtype, "32"] for dtype in run["verify_cost"]
    )


def fewer_kept_and_longer(run: dict) -> bool:
    kept, loop, _ = speculative_records.our_curves(run)
    falls = all(points[0][1] > points[-1][1] for points in kept.values())
    return falls and all(points[0][1] < points[-1][1] for points in loop.values())


def more_tokens_than_speed(run: dict) -> bool:
    entries = [entry for by_dtype in run["drafters"].values() for entry in by_dtype.values()]
    for entry in entries:  # the parts drawn are the whole of a round
        round_ms = 1e3 * entry["tokens_per_round"] / entry["tokens_per_s"]
        if not 0.75 < sum(entry["profile"].values()) / round_ms < 1.25:
            return False
    return all(entry["speedup"] < entry["tokens_per_round"] for entry in entries)


def looking_up_pays(run: dict) -> bool:
    gains = {"float32": [], "bfloat16": []}
    for (task, dtype), rates in speculative_measured._by_task(run).items():
        if task != "summarize":  # its answer says the prompt's words anew
            gains[dtype].append(rates["ngram"] / rates["plain"])
    fp32, bf16 = (sum(found) / len(found) for found in gains.values())
    return fp32 > 1 and bf16 > 1.5


HOLDS = {
    "verification-cost": checking_is_cheap_alone,
    "chen-panels": fewer_kept_and_longer,
    "drafters-measured": more_tokens_than_speed,
    "grounded-tasks": looking_up_pays,
}


@pytest.mark.parametrize("name", HOLDS)
def test_the_record_supports_the_titles_above_it(name):
    if name not in figures.FIGURES:
        pytest.skip("benchmarks/speculative.py has not been run, or not to its end")
    assert HOLDS[name](small_caches.recorded("speculative"))


def test_titles_can_be_found_unsupported():
    run = synthetic(1.1)
    assert all(holds(run) for holds in HOLDS.values())
    slow, flat = synthetic(0.8), synthetic(1.1)
    assert not looking_up_pays(slow)
    for entry in flat["chen"]["ngram"]:
        entry["loop_ms"] = 30.0
    assert not fewer_kept_and_longer(flat)
    flat["verify_cost"]["float32"]["32"] = flat["verify_cost"]["float32"]["1"]
    assert not checking_is_cheap_alone(flat)
    flat["drafters"]["eagle"]["float32"]["profile"]["target_ms"] *= 2
    assert not more_tokens_than_speed(flat)
