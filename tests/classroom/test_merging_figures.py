"""Figures of merging draw what our functions do, what was published, and what a record holds."""

import copy
import functools
import itertools
import math

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

from lecture_util.classroom import figures
from lecture_util.classroom.figures import (
    cli,
    merging_costs,
    merging_geometry,
    merging_landscape,
    merging_models,
    merging_papers,
    merging_runs,
    merging_steps,
    merging_tables,
    merging_thinning,
    small_caches,
)
from lecture_util.model.config import PUBLISHED
from lecture_util.roofline import ACCELERATORS, kv_cache_bytes, weight_bytes

matplotlib.use("agg")
REGISTERS = "merging", (merging_runs, merging_landscape, merging_tables, merging_costs)
RECORDED = (
    "franken-measured",
    "merge-densities",
    "merge-line",
    "merge-memory",
    "merge-plane",
    "merge-table",
    "soup-measured",
    "task-scales",
    "thin-shell",
)


@pytest.fixture(autouse=True)
def no_figure_left_open():
    yield
    plt.close("all")


def texts(still: figures.registry.StillFigure) -> str:
    """Every word drawn in a figure."""
    found = still.draw().findobj(match=matplotlib.text.Text)
    return "\n".join(text.get_text() for text in found)


@functools.cache
def alt_and_drawn(name: str) -> tuple[str, str]:
    return figures.FIGURES[name].alt, texts(figures.FIGURES[name])


def test_published_numbers_support_the_titles_above_them():
    fine_tunes, together = merging_papers.FINE_TUNES, merging_papers.TOGETHER
    assert len(fine_tunes) == 72
    x, y = together["greedy soup"]
    assert all(x > imagenet and y > shifted for imagenet, shifted in fine_tunes)
    single = merging_papers.best_single()
    assert single == (80.39, 47.97)
    rows = {"best single": single} | together  # two sources of one experiment
    for name, (imagenet, shifted) in merging_papers.TABLE_3.items():
        assert rows[name] == pytest.approx((imagenet, shifted), abs=0.15)
    assert max(max(gains) for gains in merging_papers.GAINS.values()) == 0.8
    assert "0.8 points at most" in figures.FIGURES["soup-glue"].title
    rates = list(merging_papers.EIGHT_TASKS.values())
    assert rates == sorted(rates)
    assert list(merging_papers.EIGHT_TASKS)[-2] == "TIES"
    assert rates[-1] - rates[-2] > rates[-2] - rates[1]  # "far below"


def test_published_numbers_stand_in_the_pictures_and_their_words():
    alt, drawn = alt_and_drawn("soup-clip")
    for name, point in ({"best single": merging_papers.best_single()}
                        | merging_papers.TOGETHER).items():  # fmt: skip
        assert f"{name} {point[0]:.1f} | {point[1]:.1f}" in drawn
        assert f"{point[0]:.2f} and {point[1]:.2f}" in alt
    alt, drawn = alt_and_drawn("soup-glue")
    for gain in sum(merging_papers.GAINS.values(), ()):
        assert str(gain) in alt
        assert (f"{gain:+.1f}" if gain else "0") in drawn.split("\n")
    for name, published in (("ties-published", merging_papers.EIGHT_TASKS),
                            ("dare-kept", merging_steps.GSM8K)):  # fmt: skip
        alt, drawn = alt_and_drawn(name)
        for row, value in published.items():
            assert f"{row} {value}" in alt
            assert str(value) in drawn.split("\n")


def test_lengths_drawn_are_those_of_arc_and_chord():
    alt, drawn = alt_and_drawn("slerp-path")
    for degrees in merging_geometry.ANGLES:
        v0, v1 = merging_geometry.ends(degrees)
        assert math.degrees(math.acos(v0 @ v1)) == pytest.approx(degrees)
        assert merging_geometry.lengths(degrees) == pytest.approx([1] * 41)
        sunk = math.cos(math.radians(degrees / 2))  # of an isosceles triangle
        assert min(merging_geometry.lengths(degrees, merging_geometry.lerp)) == pytest.approx(sunk)
        assert f"{degrees} degrees {sunk:.3f}" in alt
        assert f"chord of {degrees}°: {sunk:.3f}" in drawn


def test_ratios_drawn_are_those_of_the_formula():
    alt, drawn = alt_and_drawn("stock-ratio")
    for N in merging_geometry.COUNTS:
        t = N * 0.5 / (1 + (N - 1) * 0.5)
        assert f"{t:.3f}" in alt
        assert f"N = {N}: {t:.3f}" in drawn
        assert f"{-1 / (N - 1):.2f}" in alt


def ties_by_hand(deltas: list[list[float]], kept: int) -> list[float]:
    """TIES in plain Python, for distinct magnitudes."""
    trimmed = []
    for delta in deltas:
        large = sorted(delta, key=abs)[-kept:]
        trimmed.append([value if value in large else 0.0 for value in delta])
    merged = []
    for column in zip(*trimmed, strict=True):
        agree = [value for value in column if value * math.fsum(column) > 0]
        merged.append(math.fsum(agree) / len(agree) if agree else 0.0)
    return merged


def test_steps_of_ties_are_those_of_a_calculation_by_hand():
    steps = merging_steps.ties_by_steps()
    assert steps.merged.tolist() == pytest.approx(ties_by_hand(merging_steps.DELTAS, 3))
    assert [int((row != 0).sum()) for row in steps.trimmed] == [3, 3, 3]
    assert steps.signs.tolist() == [1, -1, 1, -1, 1, 1]
    assert sum(delta[1] for delta in merging_steps.DELTAS) > 0  # trimming turns this sign
    assert steps.sums[-1] == 0  # the empty column the words speak of
    assert (steps.signs != steps.plain.sign()).any()  # else the picture shows nothing
    alt, drawn = alt_and_drawn("ties-steps")
    for value in (*steps.merged.tolist(), *steps.plain.tolist()):
        shown = merging_steps.signed(value, 2)
        assert shown in alt
        assert shown in drawn.split("\n")
    for total in steps.sums.tolist():
        assert merging_steps.signed(total) in drawn.split("\n")


def test_what_dare_keeps_is_enlarged_and_its_mean_is_the_task_vector():
    delta, half, tenth, mean = merging_steps.dare_draws().values()
    alt, drawn = alt_and_drawn("dare-kept")
    for row, times in ((half, 2), (tenth, 10)):
        kept = row != 0
        torch.testing.assert_close(row[kept], times * delta[kept])
        assert f": {int(kept.sum())} left" in alt
        assert f"{int(kept.sum())} of 48 left" in drawn
    spread = delta.abs() * math.sqrt(9 / merging_steps.DRAWS)  # p / (1 - p) of a draw's square
    assert ((mean - delta).abs() < 4.5 * spread).all()


def test_breadcrumbs_drawn_are_the_middle():
    magnitudes, kept = merging_thinning.crumbs()
    n = len(magnitudes)
    above, inside = int(merging_thinning.OUTLIERS * n), int(merging_thinning.KEPT * n)
    np.testing.assert_allclose(
        np.sort(kept), np.sort(magnitudes)[n - above - inside : n - above], rtol=1e-12
    )
    assert magnitudes.mean() == pytest.approx(1, abs=2e-3)
    alt, drawn = alt_and_drawn("breadcrumbs")
    for count, text in ((n - above - inside, "cut"), (above, "cut")):
        assert f"{count:,}" in alt
        assert f"\n{count:,} {text}" in drawn
    assert f"kept: {inside}" in drawn
    bars = [bar for bar in figures.FIGURES["breadcrumbs"].draw().axes[0].patches if bar.get_width()]
    assert sum(bar.get_height() for bar in bars) == n


def test_chances_drawn_have_one_mean_and_rise_as_said():
    chances = merging_thinning.chances()
    for chance in chances.values():
        assert chance.mean() == pytest.approx(merging_thinning.DENSITY)
    della = chances["DELLA"]
    assert np.diff(della) == pytest.approx(np.full(len(della) - 1, np.diff(della)[0]))
    assert (della[0], della[-1]) == pytest.approx((0.1, 0.5))
    assert sorted(set(chances["TIES"])) == [0, 1]
    alt = figures.FIGURES["magprune"].alt
    for text in ("from 0.1 to 0.5", "DARE 3.33", "from 10 for", "to 2 for"):
        assert text in alt


def test_goliath_is_counted_from_half_open_ranges():
    layers = merging_models.stacked()
    assert len(layers) == 137
    assert len(set(layers)) == 137  # none is there twice, so 160 - 137 are left out
    assert {layer for _, layer in layers} == set(range(80))
    xwin, euryale = (
        {layer for name, layer in layers if name == model}
        for model in (merging_models.XWIN, merging_models.EURYALE)
    )
    D, F, V, L = (getattr(PUBLISHED["llama-2-70b"], name) for name in "DFVL")
    assert L == 80
    layer = 2 * D * D + 2 * D * 8 * 128 + 3 * D * F + 2 * D
    params = (137 * layer + 2 * V * D + D) / 1e9
    alt, drawn = alt_and_drawn("franken")
    for text in (alt, drawn, figures.FIGURES["franken"].title):
        assert "137" in text
    for text in (alt, drawn):
        assert f"{params:.1f} billion" in text
        assert f"{len(xwin & euryale)} of " in text
    for part in merging_models.GOLIATH:
        assert drawn.split("\n").count(f"{part.first}–{part.stop}") == 2


def test_serving_n_fine_tunes_reads_weights_and_caches_as_often_as_said():
    config, h100 = PUBLISHED[merging_models.MODEL], ACCELERATORS["h100"]
    W, KV = weight_bytes(config, 2), kv_cache_bytes(config, merging_models.B, merging_models.S, 2)
    alt, drawn = alt_and_drawn("one-model")
    for N in merging_models.COUNTS:
        assert merging_models.B % N == 0
        expected = {"served apart": N * W + KV, "ensemble": N * (W + KV), "merged": W + KV}
        for name, (held, seconds) in merging_models.serving(N).items():
            assert held == expected[name]
            assert seconds == pytest.approx(held / h100.bandwidth_bytes_per_s)
    for held, seconds in merging_models.serving(merging_models.COUNTS[-1]).values():
        assert f"{held / 1e9:.0f} GB and {1e3 * seconds:.1f} ms" in alt
        assert f"{held / 1e9:.0f} GB" in drawn
        assert f"{1e3 * seconds:.1f} ms" in drawn


def synthetic(gain: float = 1.0) -> dict:
    """A record in the schema of benchmarks/merging.py, by formula: nothing was measured.

    gain: how much merging gives; below 0 no title holds.
    """
    tasks, seeds, lengths = ["previous", "largest", "sum", "first"], [0, 1, 2], [12, 18, 24]

    def entry(name: str, mean: float, parameters: dict | None = None) -> dict:
        accuracy = [[mean + 0.02 * (k - 1.5) + 0.01 * seed for k in range(4)] for seed in seeds]
        loss = [[2 * (1 - value) for value in row] for row in accuracy]
        return {"name": name, "parameters": parameters or {}, "accuracy": accuracy, "loss": loss}

    x = [-1 + k / 3 for k in range(13)]
    y = [-1 + k / 3 for k in range(12)]
    tensors = [f"blocks.{layer}.{part}.weight" for layer in range(2) for part in
               ("attention.q", "attention.k", "attention.v", "attention.o", "mlp.gate", "mlp.up",
                "mlp.down")]  # fmt: skip
    methods = ("ties", "dare_linear", "dare_ties", "breadcrumbs", "della")
    scales = (0.1, 0.25, 0.4, 0.6, 0.8, 1.0)
    alphas = [k / 8 for k in range(9)]
    singles = [[[0.25 - 0.01 * j + 0.02 * seed] * 3 for j in range(6)] for seed in seeds]
    return {
        "date": "2020-02-02",
        "hardware": "Processor of no machine, 2 threads",
        "peers": [
            {"method": name, "ours_s": 2.0, "mergekit_s": 2 + 3 * gain * (k + 1),
             "ours_bytes": 1.0e9, "mergekit_bytes": 2.1e9, "max_difference": 0, "entries": 9,
             "ties": 0}
            for k, name in enumerate(("ties", "slerp", "linear", "task_arithmetic", "model_stock"))
        ],
        "largest_tensor_bytes": 113246208,
        "memory": [{"models": n, "bytes": 9e8 + (1.6 - gain) * 2e8 * n} for n in (2, 3, 4, 6)],
        "trials": {
            "seeds": seeds,
            "tasks": tasks,
            "table": [
                entry("base", 0.76),
                *(entry(f"fine-tune {task}", 0.6 + 0.04 * k) for k, task in enumerate(tasks)),
                entry("uniform soup", 0.7 + 0.18 * gain),
                entry("task arithmetic", 0.71 + 0.18 * gain, {"scale": 0.4}),
                entry("TIES", 0.7 + 0.16 * gain, {"density": 0.7, "scale": 0.8}),
                entry("model stock", 0.7 + 0.1 * gain),
                entry("ensemble", 0.88),
                entry("multitask", 0.96),
            ],
            "scales": [
                {"scale": s, "loss": [0.4 + gain * (s - 0.45 - seed / 20) ** 2 * 3 for seed in
                                      seeds], "accuracy": [0.8] * 3}
                for s in scales
            ],
            "densities": [
                {"method": name, "density": d, "accuracy": [0.8] * 3,
                 "loss": [0.35 + gain * (1 + k) * 0.01 * (1 / d - 1) + 0.01 * seed for seed in
                          seeds]}
                for k, name in enumerate(methods) for d in (0.02, 0.05, 0.1, 0.2, 0.5, 0.9)
            ],
            "soups": {
                "lengths": lengths, "singles": singles, "chosen": [[0, 1]] * 3,
                "uniform": [[0.2 - 0.02 * gain + 0.02 * seed] * 3 for seed in seeds],
                "greedy": [[0.2 - 0.021 * gain + 0.02 * seed] * 3 for seed in seeds],
                "ensemble": [[0.19 + 0.02 * seed] * 3 for seed in seeds],
            },
            "line": {
                "alphas": alphas,
                "same": [[0.11 + 0.01 * seed - 0.02 * a * (1 - a) for a in alphas]
                         for seed in seeds],
                "apart": [[0.11 + 0.01 * seed + 7.5 * gain * a * (1 - a) for a in alphas]
                          for seed in seeds],
            },
            "plane": {
                "tasks": ["largest", "sum"], "x": x, "y": y,
                "loss": [[0.1 + 0.2 * (u - 0.9) ** 2 + 0.3 * (v - 0.7) ** 2 +
                          0.5 * (1 - gain) * math.exp(-9 * (u - 1) ** 2 - 9 * v**2) for u in x]
                         for v in y],
                "points": {"base": [0, 0], "fine-tune 1": [2.0, 0.0], "fine-tune 2": [0.7, 1.8],
                           "soup": [1.35, 0.9]},
            },
            "shell": {
                "norm_spread": [{"name": name, "mean": 1.5, "std": (0.02 + k / 500) / gain**2}
                                for k, name in enumerate(tensors)],
                "angles": [{"name": name, "mean_deg": 15 + k, "std_deg": 1.0 / gain**2}
                           for k, name in enumerate(tensors)],
            },
            "cosines": [[1.0, 0.1], [0.1, 1.0]],
            "conflicts": [0.86] * 3,
            "draws": 3,
            "negation": [
                {"task": gone, "weight": weight, "accuracy": {
                    name: [0.75 + weight * gain * (0.9 if name == gone else 0.3 * (k % 2))] * 3
                    for k, name in enumerate(tasks)}}
                for gone in tasks for weight in (-1.0, -0.5)
            ],
        },
        "real": {
            "tasks": ["facts", "record", "reverse"],
            "table": [],
            "franken": [
                {"name": name, "layers": ranges, "depth": sum(b - a for a, b in ranges),
                 "perplexity": 20 + 15 * gain * k,
                 "bytes_per_token": 10**7 * (6 + sum(b - a for a, b in ranges))}
                for k, (name, ranges) in enumerate((
                    ("the model itself", [[0, 30]]), ("ten layers twice", [[0, 20], [10, 30]]),
                    ("two layers left out", [[0, 14], [16, 30]])))
            ],
        },
    }  # fmt: skip


def test_recorded_figures_wait_for_their_sections(registered):
    assert registered(None) == {}
    run = synthetic()
    about = {key: run[key] for key in ("date", "hardware", "real")}
    assert sorted(registered(about)) == ["franken-measured"]
    del run["memory"], run["trials"]["shell"]["angles"], run["trials"]["table"][-1]
    waiting = {"merge-memory", "thin-shell", "merge-table"}
    assert set(registered(run)) == set(RECORDED) - waiting
    assert tuple(sorted(registered(synthetic()))) == RECORDED


def test_recorded_figures_are_small(registered, tmp_path):
    for name, still in registered(synthetic()).items():
        cli.render(still, tmp_path / f"{name}.svg")
        assert (tmp_path / f"{name}.svg").stat().st_size < cli.MAX_BYTES


@pytest.mark.parametrize("gain", [-0.4, 1.2])
def test_recorded_figures_draw_whatever_was_measured(registered, gain):
    for still in registered(synthetic(gain)).values():
        assert 80 < len(still.alt) < 500, still.alt
        assert still.alt.endswith(".")
        drawn = texts(still)
        assert still.title in drawn
        assert "2020-02-02, Processor of no machine, 2 threads" in drawn.replace("\n", " ")


def test_numbers_of_recorded_figures_are_the_record_s(registered):
    run = synthetic(1.1)
    found = registered(run)
    drawn = texts(found["merge-table"]).split("\n")
    for entry in run["trials"]["table"]:
        mean = np.mean(entry["accuracy"], axis=0)
        for value in (*mean, mean.mean()):
            assert f"{value:.2f}" in drawn
    assert "task arithmetic, λ 0.4" in drawn
    assert "TIES, density 0.7, λ 0.8" in drawn
    alt, drawn = found["task-scales"].alt, texts(found["task-scales"])
    best = [min(run["trials"]["scales"], key=lambda entry, k=k: entry["loss"][k]) for k in range(3)]
    assert f"least at {', '.join(str(entry['scale']) for entry in best)}" in alt
    before = np.mean(run["trials"]["table"][0]["accuracy"], axis=0)
    for entry in run["trials"]["negation"]:
        if entry["weight"] == -0.5:
            after = [np.mean(entry["accuracy"][name]) for name in run["trials"]["tasks"]]
            shown = [merging_runs.points(a - b) for a, b in zip(after, before, strict=True)]
            assert f"{entry['task']}: {', '.join(shown)}" in alt
            assert all(text in drawn.split("\n") for text in shown)
    alt, drawn = found["merge-memory"].alt, texts(found["merge-memory"])
    for entry in run["memory"]:
        assert f"{entry['models']} models {entry['bytes'] / 1e9:.2f} GB" in alt
    assert f"a model more: {(1.6 - 1.1) * 200:.0f} of its 538 MB" in drawn
    for entry in run["peers"]:
        time = entry["mergekit_s"] / entry["ours_s"]
        assert f"{entry['method']} {time:.1f} and 2.1" in alt
        assert f"{time:.1f}×" in drawn
    drawn = texts(found["franken-measured"])
    assert all(f"\n{figures.number(e['perplexity'])}" in drawn for e in run["real"]["franken"])
    assert "(+28% bytes)" in drawn  # 46 parts of 36
    assert "(−6% bytes)" in drawn
    drawn = texts(found["soup-measured"]).split("\n")
    best = [min(model[0] for model in seed) for seed in run["trials"]["soups"]["singles"]]
    assert drawn.count(f"{np.mean(best):.3f}") == 3


def test_between_points_of_the_grid_the_plane_is_interpolated():
    x, y = np.array([0.0, 1.0, 3.0]), np.array([-1.0, 1.0])
    loss = np.array([[2 * u + 5 * v + u * v for u in x] for v in y])  # what bilinear gives exactly
    plane = merging_landscape.Plane(x, y, loss, {})
    for u, v in itertools.product((0, 0.3, 1, 2.9, 3), (-1, 0.2, 1)):
        assert plane.at(u, v) == pytest.approx(2 * u + 5 * v + u * v)


def valley_and_ridge(run: dict) -> bool:
    _, same, apart = merging_landscape.line(run)
    ends = np.maximum(same[:, 0], same[:, -1])
    flat = (same.max(1) < 1.1 * ends).all()
    return bool(flat and (apart.max(1) > 5 * np.maximum(apart[:, 0], apart[:, -1])).all())


def one_valley(run: dict) -> bool:
    plane = merging_landscape.plane(run)
    for a, b in itertools.combinations(plane.points.values(), 2):
        along = [plane.at(*(np.array(a) + s * (np.array(b) - a))) for s in np.linspace(0, 1, 41)]
        if max(along) > 1.05 * max(along[0], along[-1]):
            return False
    return len(plane.points) >= 3


def the_best_is_between(run: dict) -> bool:
    at, losses = merging_runs.scales(run)
    best = at[losses.argmin(1)]
    _, changes = merging_runs.negated(run)
    own, others = np.diag(changes), changes - np.diag(np.diag(changes))
    inside = (best > at[0]) & (best < at[-1])
    return bool(inside.all() and (own < -0.05).all() and others.min() < -0.05)


def half_can_go(run: dict) -> bool:
    points = dict(merging_runs.densities(run)["dare_linear"])
    full = min(entry for entry in points.values())
    half, fewest = points[min(points, key=lambda d: abs(d - 0.5))], points[min(points)]
    return half < 1.1 * full and fewest > 1.3 * half


def soups_win(run: dict) -> bool:
    found = merging_landscape.soups(run)
    soups = np.maximum(found["uniform"], found["greedy"])
    return bool((soups < np.minimum(found["best single"], found["ensemble"])).all())


def merges_help(run: dict) -> bool:
    merged, single, other = (
        merging_tables.best(run, k)[1] for k in ("merge", "fine-tune", "other")
    )
    return (
        merging_tables.best(run, "other")[0] == "multitask"
        and single + 0.01 < merged < other - 0.02
    )


def shells_are_thin(run: dict) -> bool:
    rows = merging_tables.shell(run)
    return all(spread < 10 and wide < 5 for _, spread, _, wide in rows)


def memory_is_by_tensors(run: dict) -> bool:
    return 0 <= merging_costs.a_model_more(run) < 0.5 * merging_costs.WHOLE


def stacks_predict_worse(run: dict) -> bool:
    (_, _, whole, _), *stacks = merging_costs.franken(run)
    return len(stacks) > 0 and all(value > whole for _, _, value, _ in stacks)


HOLDS = {
    "merge-line": valley_and_ridge,
    "merge-plane": one_valley,
    "task-scales": the_best_is_between,
    "merge-densities": half_can_go,
    "soup-measured": soups_win,
    "merge-table": merges_help,
    "thin-shell": shells_are_thin,
    "merge-memory": memory_is_by_tensors,
    "franken-measured": stacks_predict_worse,
}


@pytest.mark.parametrize("name", HOLDS)
def test_the_record_supports_the_titles_above_it(name):
    assert name in figures.FIGURES, "run benchmarks/merging.py to its end"
    assert HOLDS[name](small_caches.recorded("merging"))


@pytest.mark.parametrize("name", HOLDS)
def test_titles_can_be_found_unsupported(name):
    assert HOLDS[name](synthetic())
    assert not HOLDS[name](synthetic(-0.4))


def test_a_title_of_the_table_needs_training_on_all_tasks_to_lead():
    run = copy.deepcopy(synthetic())
    run["trials"]["table"][-1]["accuracy"] = [[0.5] * 4] * 3
    assert not merges_help(run)
