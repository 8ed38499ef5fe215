"""The benchmark goes through its sections on tiny models, and says so where mergekit disagrees.

In mergekit's place stands a program that copies our result, so no other environment is needed.
"""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

from lecture_util.merging.checkpoint import FolderWriter, Spec
from lecture_util.model.config import Config
from lecture_util.model.transformer import Transformer

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "merging.py"
STAND_IN = """#!{python} -SE
import pathlib, shutil, struct, sys
recipe, out = map(pathlib.Path, sys.argv[1:])
shutil.copytree(recipe.parent / "ours", out)
with open(out / "model.safetensors", "r+b") as file:
    file.seek(-4, 2)
    (number,) = struct.unpack("<f", file.read())
    file.seek(-4, 2)
    file.write(struct.pack("<f", number + {fault}))
"""


def benchmark(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, arguments)])
    return runpy.run_path(str(SCRIPT), run_name="__main__")


@pytest.fixture
def mergekit(monkeypatch, tmp_path):
    """Make an environment whose mergekit gives our result, its last number off by `fault`."""

    def environment(fault=0.0):
        program = tmp_path / "environment" / "bin" / "mergekit-yaml"
        program.parent.mkdir(parents=True)
        program.write_text(STAND_IN.format(python=sys.executable, fault=fault))
        program.chmod(0o755)
        monkeypatch.setenv("LECTURE_MERGEKIT", str(tmp_path / "environment"))

    return environment


@pytest.fixture(scope="module")
def bench():
    return runpy.run_path(str(SCRIPT))


def test_all_sections_but_the_real_models_write_their_part(monkeypatch, tmp_path, mergekit):
    mergekit()
    out = tmp_path / "record.json"
    benchmark(monkeypatch, "agreement", "peers", "memory", "--small", "--out", out)
    record = json.loads(out.read_text())
    (row,) = record["agreement"]["exact"]
    assert row["method"] == "ties" and row["max_difference"] == 0
    (row,) = record["agreement"]["random"]
    assert row["method"] == "della" and row["worst_z"] == 0 and row["worst_z_by_paper"] > 6
    for row in record["peers"]:
        assert row["beyond"] == row["ties"] == row["max_difference"] == 0 < row["entries"]
        assert min(row["ours_s"], row["mergekit_s"], row["ours_bytes"], row["mergekit_bytes"]) > 0
    assert [row["models"] for row in record["memory"]] == [2]
    assert all(row["bytes"] > record["memory_floor"] / 2 for row in record["memory"])
    assert record["largest_tensor_bytes"] == 300 * 64 * 4


def test_what_is_recorded_is_not_measured_again(monkeypatch, tmp_path):
    out = tmp_path / "record.json"
    out.write_text('{"memory": "as it was"}')
    benchmark(monkeypatch, "memory", "--small", "--out", out)
    assert json.loads(out.read_text()) == {"memory": "as it was"}


@pytest.mark.parametrize(
    ("section", "message"),
    [("agreement", "ties: 1 entries differ"), ("peers", "differs from mergekit where nothing")],
)
def test_a_disagreement_is_not_recorded(monkeypatch, tmp_path, mergekit, section, message):
    mergekit(fault=1e-5)
    out = tmp_path / "record.json"
    with pytest.raises(SystemExit, match=f"not recorded: .*{message}"):
        benchmark(monkeypatch, section, "--small", "--out", out)
    assert not out.exists()


def test_without_mergekit_it_says_what_to_set(monkeypatch, tmp_path):
    monkeypatch.setenv("LECTURE_MERGEKIT", str(tmp_path))
    with pytest.raises(SystemExit, match="set LECTURE_MERGEKIT=E"):
        benchmark(monkeypatch, "peers", "--small", "--out", tmp_path / "record.json")


def test_a_small_run_does_not_overwrite_the_record(monkeypatch):
    with pytest.raises(SystemExit, match="name a file with --out"):
        benchmark(monkeypatch, "--small")


def test_trials_have_a_score_for_every_method_task_and_seed(monkeypatch, tmp_path):
    out = tmp_path / "record.json"
    benchmark(monkeypatch, "trials", "--small", "--out", out)
    found = json.loads(out.read_text())["trials"]
    seeds, tasks = len(found["seeds"]), len(found["tasks"])
    for row in found["table"]:
        assert [len(scores) for scores in row["accuracy"]] == [tasks] * seeds, row["name"]
    by_name = {(row["name"], str(row["parameters"])): row for row in found["table"]}
    assert len(by_name) == len(found["table"])
    soup = by_name["uniform soup", "{}"]["loss"][0]
    # a soup of four is task arithmetic at a quarter
    (quarter,) = [row["loss"][0] for row in found["scales"] if row["scale"] == 0.25]
    assert quarter == pytest.approx(sum(soup) / tasks, rel=1e-3)
    plane = found["plane"]
    assert [len(row) for row in plane["loss"]] == [len(plane["x"])] * len(plane["y"])
    assert plane["points"]["base"] == [0, 0] and plane["points"]["soup"][1] > 0
    for which in ("same", "apart"):
        assert [len(line) for line in found["line"][which]] == [len(found["line"]["alphas"])]


def test_banded_copies_have_a_gap_at_every_cut(bench):
    """The cuts of TIES and of both Breadcrumbs, at sizes that divide and that don't."""
    for n in (1, 2, 3, 7, 64, 101, 1000, 4099):
        g = torch.Generator().manual_seed(n)
        base = torch.randn(n, generator=g) * 0.1
        magnitude = (bench["banded"](base, g) - base).abs().sort(descending=True).values
        for cut in (max(1, n // 2), int(0.01 * n), int(0.01 * n) + n // 2):
            if 0 < cut < n:
                assert magnitude[cut - 1] - magnitude[cut] > 1e-4, (n, cut)


def test_ties_at_the_edge_are_told_from_other_entries(bench, tmp_path):
    start = torch.zeros(10)
    change = torch.tensor([9.0, -8, 7, 6, 5, -5, 4, 3, 2, 1]) / 8
    for name in ("base", "m0", "m1", "m2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        weight = start + change if name == "m0" else start + change.sort().values.clone()
        weight = start if name == "base" else weight
        FolderWriter(tmp_path / name, [Spec("w", (10,), torch.float32)]).write(
            iter([("w", weight)])
        )
    tied = bench["at_the_edge"](
        bench["Bench"](tmp_path, 1), "ties", "w", torch.tensor([0, 4, 5, 9])
    )
    # half of m0 is kept: one of its two entries of 5/8; the others' cut is another's
    assert tied[1] and tied[2] and not tied[3]


def test_layers_are_stacked_anew_without_copying(bench):
    from merging_trials import stacked  # the script has put its folder on the path

    model = Transformer.random(Config(D=16, F=24, K=2, G=1, H=8, L=3, V=32, max_context=16))
    tokens_BT = torch.arange(10).view(2, 5)
    same = stacked(model, [0, 1, 2])
    assert torch.equal(same(tokens_BT), model(tokens_BT))
    twice = stacked(model, [0, 2, 2])
    x_BTD = {}
    model.blocks[0].register_forward_hook(lambda m, i, out: x_BTD.update(first=out))
    model.blocks[2].register_forward_hook(lambda m, i, out: x_BTD.update(last=out))
    logits = twice(tokens_BT)
    assert len(twice.blocks) == twice.config.L == 3 and len(model.blocks) == 3
    assert twice.blocks[1] is twice.blocks[2] is model.blocks[2]
    assert torch.equal(logits, model.head(model.norm(x_BTD["last"])))
