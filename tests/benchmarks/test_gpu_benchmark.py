"""benchmarks/gpu.py: all of it at small sizes, and what it does when a part of it fails."""

import ast
import json
import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import gpu  # noqa: E402
import gpu_readme  # noqa: E402
import serving_gpu  # noqa: E402
from sections import Report, Section, Skip, supervise  # noqa: E402
from turns import Wrong  # noqa: E402

from lecture_util.model.config import PUBLISHED  # noqa: E402
from lecture_util.roofline.hardware import ACCELERATORS  # noqa: E402
from lecture_util.serving.graphs import DecodeGraphs  # noqa: E402

KERNELS = ("int4_linear", "paged_attention", "selective_scan")
WAYS = ["plain launches", "CUDA graphs"]


@pytest.fixture(scope="module")
def dry(tmp_path_factory):
    """One dry run, in which importing bitsandbytes is an error: exit status, record."""
    folder = tmp_path_factory.mktemp("gpu")
    trap = folder / "bitsandbytes" / "__init__.py"
    trap.parent.mkdir()
    trap.write_text("raise AssertionError('bitsandbytes was imported')\n")
    kept = gpu_readme.load(gpu_readme.RECORD)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder), prepend=":")
        patch.setattr(gpu_readme, "refresh", lambda: pytest.fail("it wrote to the README"))
        status = gpu.main(["--dry", "--out", str(folder / "gpu.json")])
    assert gpu_readme.load(gpu_readme.RECORD) == kept
    return status, json.loads((folder / "gpu.json").read_text())


def test_a_dry_run_measures_every_section(dry):
    status, record = dry
    pytest.importorskip("triton", reason="Triton comes for Linux on x86-64")
    found = {name: (s["status"], s["reason"]) for name, s in record["sections"].items()}
    assert found == dict.fromkeys(gpu.SECTIONS, ("measured", None))
    assert status == 0 and record["dry"] and len(record["date"]) == 10
    assert record["versions"]["torch"] == torch.__version__ and record["card"] != "unknown"


def test_kernels_are_right_and_set_against_the_peaks_of_the_same_run(dry):
    pytest.importorskip("triton", reason="Triton comes for Linux on x86-64")
    sections = dry[1]["sections"]
    bandwidth = sections["peaks"]["rows"][-1]["bandwidth_bytes_per_s"]
    for name in KERNELS:
        rows = sections[name]["rows"]
        assert any("Triton" in row["way"] for row in rows)
        for row in rows:
            assert row["error"] < 1
            assert row["bytes_per_s"] == pytest.approx(row["bytes"] / row["median_s"])
            assert row["share_of_copy"] == pytest.approx(row["bytes_per_s"] / bandwidth)
            assert row["roofline"] >= row["share_of_copy"] > 0


def test_steps_of_both_shapes_are_set_against_the_prediction(dry):
    for shape in ("llama-2-13b", "llama-3-8b"):
        rows = dry[1]["sections"][shape]["rows"]
        assert [(r["B"], r["way"]) for r in rows] == [(B, way) for B in (1, 3) for way in WAYS]
        for row in rows:
            assert row["error"] < 1e-4
            assert row["ratio"] == pytest.approx(row["median_s"] / row["predicted_s"])


def test_the_engine_serves_the_same_with_and_without_graphs(dry):
    plain, graphs = dry[1]["sections"]["engine"]["rows"]
    assert [plain["way"], graphs["way"]] == WAYS
    assert graphs["new_tokens"] == plain["new_tokens"] > 0 and plain["tokens_per_s"] > 0
    assert graphs["same_texts"] == graphs["requests"] == 5


def test_every_test_marked_gpu_is_found(dry):
    rows = dry[1]["sections"]["tests"]["rows"]
    files = {row["test"].partition("::")[0] for row in rows}
    assert files == {str(p.relative_to(ROOT)) for p in gpu.files_with_gpu_tests()}
    assert {row["outcome"] for row in rows} == {"skipped"}  # a dry run hides a GPU
    assert all("CUDA" in row["reason"] or "GPU" in row["reason"] for row in rows)


def imported(path):
    """The packages that a file imports as it is loaded; of its neighbours, what those import."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module]
        for name in names:
            neighbour = path.with_name(f"{name}.py")
            found |= imported(neighbour) if neighbour.is_file() else {name.split(".")[0]}
    return found


def test_files_with_gpu_tests_can_be_collected_on_a_bare_gpu_machine():
    """No hypothesis there, no SciPy, no bitsandbytes."""
    allowed = set(sys.stdlib_module_names) | {"torch", "pytest", "numpy", "lecture_util"}
    paths = gpu.files_with_gpu_tests()
    assert len(paths) >= 8
    for path in [*paths, ROOT / "tests" / "conftest.py"]:
        assert imported(path) <= allowed, path


# A section that fails.


def section(name, code, share=1.0):
    """Code that finds the path of its result in `path`, and `say` to write it."""
    start = (
        "import json, os, signal, sys, time; path = sys.argv[1];"
        "say = lambda **found: open(path, 'w').write(json.dumps(found));"
    )
    return Section(name, share, (sys.executable, "-c", start + code))


GOOD = "say(status='measured', reason=None, rows=[{'x': 1}])"


def test_a_section_that_fails_leaves_the_others(tmp_path):
    told = []
    found = supervise(
        [
            section("says why", "say(status='failed', reason='no luck', rows=[]); sys.exit(1)"),
            section("dies", "os.kill(os.getpid(), signal.SIGSEGV)"),
            section("says nothing", "sys.exit(3)"),
            section("is cut", "say(status='failed', reason=None, rows=[{'x': 2}]); sys.exit(1)"),
            section("good", GOOD),
        ],
        60, tmp_path, tell=told.append,
    )  # fmt: skip
    assert {name: (s["status"], s["reason"]) for name, s in found.items()} == {
        "says why": ("failed", "no luck"),
        "dies": ("failed", "it died of signal 11, SIGSEGV"),
        "says nothing": ("failed", "it ended with status 3 before it could say why"),
        "is cut": ("failed", "it ended with status 1 before it could say why"),
        "good": ("measured", None),
    }
    assert found["is cut"]["rows"] == [{"x": 2}] and found["good"]["rows"] == [{"x": 1}]
    assert len(told) == 10 and told[0].startswith("[1/5] says why: at most ")


def test_a_section_that_outstays_its_share_is_ended_with_all_it_started(tmp_path):
    left = tmp_path / "left"
    child = f"import time; time.sleep(3); open({str(left)!r}, 'w')"
    found = supervise(
        [
            section(
                "hangs",
                "import subprocess; say(status='failed', reason=None, rows=[{'x': 1}]);"
                f"subprocess.run([sys.executable, '-c', {child!r}])",
            ),
            section("good", GOOD, share=20),
        ],
        42, tmp_path,
    )  # fmt: skip
    assert found["hangs"]["status"] == "failed" and found["hangs"]["rows"] == [{"x": 1}]
    assert found["hangs"]["reason"] == "it took more than its 2 s; what it found is kept"
    assert found["good"]["status"] == "measured"
    time.sleep(2)  # by now what it started would have written
    assert not left.exists()


def test_what_one_leaves_over_the_later_ones_may_use(tmp_path):
    told = []
    supervise([section("a", GOOD, 3), section("b", GOOD, 1)], 400, tmp_path, tell=told.append)
    first, second = (int(line.split()[-2]) for line in told[::2])
    assert first == 300 and 300 < second <= 400


def test_a_report_says_how_its_work_ended(tmp_path, capsys):
    def finds(add):
        add({"x": 1})

    def skips(add):
        raise Skip("no\n  Triton")

    def fails(add):
        add({"x": 1})
        raise ValueError("two\nlines")

    def leaves(add):
        sys.exit("not here")

    ends = {}
    for work in (finds, skips, fails, leaves):
        report = Report(tmp_path / f"{work.__name__}.json")
        status = report.run(work)
        found = json.loads(report.path.read_text())
        ends[work.__name__] = (status, found["status"], found["reason"], len(found["rows"]))
    assert ends == {
        "finds": (0, "measured", None, 1),
        "skips": (0, "skipped", "no Triton", 0),
        "fails": (1, "failed", "ValueError: two lines", 1),
        "leaves": (1, "failed", "not here", 0),
    }
    assert "Traceback" in capsys.readouterr().err


def test_a_failed_section_is_recorded_and_the_exit_status_says_so(monkeypatch, tmp_path, capsys):
    found = {"status": "failed", "reason": "no luck", "rows": [], "seconds": 1.0}
    good = found | {"status": "measured", "reason": None, "rows": [{"name": "a card"}]}
    monkeypatch.setattr(gpu, "supervise", lambda *args: {"peaks": good, "engine": found})
    status = gpu.main(["--dry", "--only", "peaks", "engine", "--out", str(tmp_path / "x.json")])
    assert status == 1 and capsys.readouterr().err == "failed: engine\n"
    record = json.loads((tmp_path / "x.json").read_text())
    assert record["card"] == "a card" and record["sections"]["engine"]["reason"] == "no luck"
    assert list(tmp_path.iterdir()) == [tmp_path / "x.json"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_how_to_try_it(tmp_path):
    with pytest.raises(SystemExit, match="no CUDA GPU here: make gpu DRY=1"):
        gpu.main(["--out", str(tmp_path / "x.json")])


def test_shares_are_all_named_and_make_ten_minutes_at_most():
    assert list(gpu.SHARES) == list(gpu.SECTIONS)
    assert gpu.BUDGET_S <= 600 and sum(gpu.SHARES.values()) == gpu.BUDGET_S


# Decode steps.


def test_a_graph_that_computes_something_else_is_not_timed(monkeypatch):
    step = DecodeGraphs.step
    monkeypatch.setattr(DecodeGraphs, "step", lambda self, B: step(self, B).roll(1, -1))
    config = serving_gpu.small(PUBLISHED["llama-3-8b"])
    model = serving_gpu.random_model(config, "cpu", torch.float32)
    with pytest.raises(Wrong, match="the graphs compute something else at B=3"):
        list(serving_gpu.steps(model, [3], 19, 1, None))


def test_a_shape_that_does_not_fit_the_card_is_left_out_with_the_reason():
    llama = PUBLISHED["llama-2-13b"]
    assert serving_gpu.needed(llama, 16, 1024, 80e9) is None
    reason = serving_gpu.needed(llama, 64, 1024, 80e9)
    assert reason == "80 GB of weights and cache, of 80 that there are"
    assert serving_gpu.needed(llama, 1, 1024, 24e9).startswith("27 GB")


def test_the_steps_context_counts_the_new_token():
    model = serving_gpu.random_model(
        serving_gpu.small(PUBLISHED["llama-2-13b"]), "cpu", torch.float32
    )
    cache, work = serving_gpu.filled(model, 2, 33)
    assert [(w.start, w.count, w.draws) for w in work] == [(32, 1, True)] * 2
    assert cache.blocks.available == 0 and cache.blocks.num_pages == 2 * 3
    assert cache.k_LMPKH.abs().amin() > 0


@pytest.mark.parametrize(
    ("name", "memory_bytes", "key"),
    [
        ("NVIDIA H200", 150.7e9, "h200"),
        ("NVIDIA H100 80GB HBM3", 85e9, "h100"),
        ("NVIDIA H100 PCIe", 85e9, None),
        ("NVIDIA H100 NVL", 100e9, None),
        ("NVIDIA A100-SXM4-80GB", 85e9, "a100"),
        ("NVIDIA A100-SXM4-40GB", 42e9, None),
        ("NVIDIA A100 80GB PCIe", 85e9, None),
        ("NVIDIA GeForce RTX 4090", 25.3e9, "rtx4090"),
        ("NVIDIA GeForce RTX 4090 D", 25.3e9, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 17e9, None),
        ("NVIDIA L4", 23.6e9, "l4"),
        ("NVIDIA L40S", 47.8e9, None),
        ("Tesla T4", 15.6e9, "t4"),
        ("this CPU, 2 threads", 24e9, None),
    ],
)
def test_a_card_finds_its_data_sheet_or_none(name, memory_bytes, key):
    assert serving_gpu.datasheet(name, memory_bytes) is (ACCELERATORS[key] if key else None)


# The README.


def test_the_readme_says_what_the_record_says():
    text = gpu_readme.README.read_text(encoding="utf-8")
    assert gpu_readme.replaced(text, gpu_readme.block(gpu_readme.load(gpu_readme.RECORD))) == text


def test_without_a_record_the_block_says_so(dry):
    assert gpu_readme.block(None) == "These are not measured on a GPU yet."
    assert gpu_readme.block(dry[1]) == gpu_readme.UNMEASURED  # a dry run measures nothing


def record():
    """Of a card that never was."""
    timing = {"median_s": 2e-4, "bytes_per_s": 2.5e12, "share_of_copy": 0.625, "roofline": 0.75}
    step = {"B": 16, "S": 1024, "predicted_s": 8e-3, "ratio": 1.25, "datasheet_ratio": 1.5}
    step |= {"median_s": 1e-2, "way": "CUDA graphs"}
    load = {"requests": 256, "slots": 64, "way": "CUDA graphs", "tokens_per_s": 3456.7}
    sheet = {"bandwidth_bytes_per_s": 5e12, "flops_per_s": {"bf16": 1e15}}
    peaks = {"bandwidth_bytes_per_s": 4e12, "flops_per_s": {"bf16": 8e14}, "datasheet": sheet}
    int4 = {"way": "int4, Triton", "layer": "gate_up", "F": 28672, "D": 4096, "B": 1} | timing
    paged = {"way": "pages, Triton", "B": 32, "S": 8192, "P": 16} | timing
    scan = {"way": "Triton", "B": 64, "T": 1, "E": 5120, "Z": 16} | timing
    found = {
        "peaks": [{"name": "CARD"}, peaks],
        "int4_linear": [int4],
        "paged_attention": [paged, {"B": 32, "S": 9999, "skipped": "900 GB in 3 layouts"}],
        "selective_scan": [scan],
        "llama-2-13b": [],
        "llama-3-8b": [step | {"way": "plain launches", "median_s": 3e-2}, step],
        "engine": [load | {"ttft_p50_s": 1.5, "tpot_p50_s": 0.02}],
        "tests": [{"outcome": o} for o in ("passed", "passed", "skipped")],
    }
    sections = {k: {"status": "measured", "reason": None, "rows": v} for k, v in found.items()}
    sections["llama-2-13b"] |= {"status": "failed", "reason": "OutOfMemoryError: too much"}
    versions = {"torch": "2.11.0", "triton": "3.6.0", "python": "3.12.3"}
    return {
        "date": "2030-01-02", "card": "CARD", "versions": versions, "dry": False,
        "sections": sections,
    }  # fmt: skip


def test_the_block_shows_every_part_and_what_failed():
    lines = gpu_readme.block(record()).splitlines()
    for line in (
        "CARD, 2030-01-02; torch 2.11.0, Triton 3.6.0, Python 3.12.3.",
        "Measured in that run: a copy moves 4,000 GB/s (80% of the data sheet), a bf16 matmul runs "
        "at 800 TFLOP/s (80%).",
        "Of the tests marked gpu 2 passed, 0 failed and 1 were skipped.",
        "| int4 product, 28672 × 4096, B=1 | 200.0 | 2,500 | 62% | 75% |",
        "| paged attention, B=32, S=8,192, pages of 16 | 200.0 | 2,500 | 62% | 75% |",
        "| selective scan, E=5120, Z=16, B=64, T=1 | 200.0 | 2,500 | 62% | 75% |",
        "| llama-3-8b, B=16, S=1,024 | 8.00 | 30.00 | 10.00 | 1.25 | 1.50 |",
        "| 256 requests, 64 slots, CUDA graphs | 3,457 | 1.50 | 20.0 |",
        "- llama-2-13b: failed, OutOfMemoryError: too much",
        "- paged_attention, B=32, S=9,999: left out, 900 GB in 3 layouts",
    ):
        assert line in lines
    tables = [line for line in lines if line.startswith("|")]
    assert {line.count("|") for line in tables} == {5, 6, 7}


def test_a_block_of_a_run_of_which_all_failed_still_says_so():
    broken = record()
    for found in broken["sections"].values():
        found |= {"status": "failed", "reason": "no driver", "rows": []}
    text = gpu_readme.block(broken)
    assert text.count("failed, no driver") == 8 and "|" not in text


def test_the_block_is_written_between_its_marks_and_nowhere_else(tmp_path):
    readme, source = tmp_path / "README.md", tmp_path / "gpu.json"
    readme.write_text("before\n<!-- gpu:begin -->\nold\n<!-- gpu:end -->\nafter\n")
    source.write_text(json.dumps(record()))
    for _ in range(2):  # a second time changes nothing
        assert gpu_readme.refresh(readme, source) == 0
        text = readme.read_text()
        assert text.startswith("before\n<!-- gpu:begin -->\nCARD, 2030")
        assert text.endswith("\n<!-- gpu:end -->\nafter\n") and "old" not in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", "gpu.json"]


@pytest.mark.parametrize("text", ["", "<!-- gpu:begin -->", "<!-- gpu:end --><!-- gpu:begin -->"])
def test_a_readme_without_the_marks_is_left_alone(text):
    with pytest.raises(ValueError, match="each of them once, in the README"):
        gpu_readme.replaced(text, "new")
