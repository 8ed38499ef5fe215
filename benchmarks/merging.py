"""Merging: against mergekit, how much memory it takes, and which method does what.

    LECTURE_MERGEKIT=ENVIRONMENT python benchmarks/merging.py [section ...] [--again] [--small]

Sections, with their minutes on two cores: agreement 6, peers 12, memory 2, trials 4, real 10. Each
is written to benchmarks/results/merging.json when it is done, and a second run goes on where the
first was stopped; --again measures anew. --small goes through it all with tiny models, to see that
it works, and writes no record. Only peers and memory need a quiet machine.

LECTURE_MERGEKIT names a Python environment of its own with mergekit 0.1.5 in it. Both sides are
subprocesses that get the same recipe and the same folders, with `--convention mergekit` for ours.
Copies of the reference model in fp32 are made for it in a temporary folder: up to 5 GB at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from merging_trials import real, trials

from lecture_util.merging.checkpoint import EMBED, HEAD, Folder, FolderWriter, Spec, copy_beside
from lecture_util.merging.plan import merge_states
from lecture_util.model import weights
from lecture_util.model.checkpoint import save_folder
from lecture_util.model.config import Config
from lecture_util.model.transformer import Transformer
from lecture_util.roofline.hardware import processor

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "benchmarks" / "results" / "merging.json"
TINY = Config(D=64, F=96, K=2, G=2, H=16, L=4, V=300, max_context=64, tied=True)
NEAR = 1e-6  # largest difference that is rounding
DENSITY, GAMMA = 0.5, 0.01
SHARED = {"density": DENSITY, "weight": 0.3}
PER_MODEL = {  # method: settings of each fine-tune
    "task_arithmetic": {"weight": 0.4},
    "ties": SHARED,
    "breadcrumbs": SHARED | {"gamma": GAMMA},
    "breadcrumbs_ties": SHARED | {"gamma": GAMMA},
    "dare_linear": SHARED,
    "dare_ties": SHARED,
    "della": SHARED | {"epsilon": 0.15},
    "della_linear": SHARED | {"epsilon": 0.15},
    "model_stock": {},
}
EXACT = ("linear", "slerp", "task_arithmetic", "ties", "breadcrumbs", "breadcrumbs_ties")
EXACT += ("model_stock", "passthrough")
RANDOM = ("dare_linear", "dare_ties", "della", "della_linear")
WATCH = """
import json, os, sys, time
start = time.perf_counter()
pid = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ)
_, status, used = os.wait4(pid, 0)
seconds = time.perf_counter() - start
print(json.dumps([os.waitstatus_to_exitcode(status), seconds, used.ru_maxrss * 1024]))
"""  # a process of its own: a big parent's memory would count as its child's


@dataclass
class Bench:
    """Where copies lie and how many threads both sides get."""

    folder: Path
    threads: int
    small: bool = False
    rounds: int = 3
    stop: list[str] = field(default_factory=list)

    def source(self) -> Folder:
        """What is copied: the reference model, or a tiny one."""
        if not self.small:
            return Folder(weights.locate("smollm2-135m"))
        path = self.folder / "source"
        return Folder(path if path.exists() else save_folder(Transformer.random(TINY), path))

    def ours(self, recipe: Path, out: Path, *more: str) -> tuple[float, int]:
        command = [sys.executable, "-m", "lecture_util", "merge", str(recipe), str(out), *more]
        return self.run([*command, "--convention", "mergekit"])

    def theirs(self, recipe: Path, out: Path) -> tuple[float, int]:
        return self.run([str(mergekit()), str(recipe), str(out)])

    def run(self, command: Sequence[str]) -> tuple[float, int]:
        """Seconds and peak bytes of a process."""
        environment = os.environ | {
            "OMP_NUM_THREADS": str(self.threads), "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"
        }  # fmt: skip
        log = self.folder / "log.txt"
        with log.open("w") as file:
            done = subprocess.run(
                [sys.executable, "-S", "-c", WATCH, *command], env=environment, cwd=ROOT,
                stdout=subprocess.PIPE, stderr=file, text=True, check=True,
            )  # fmt: skip
        *_, last = done.stdout.splitlines()
        code, seconds, peak = json.loads(last)
        if code:
            raise SystemExit(f"{' '.join(command)} failed:\n{log.read_text()[-2000:]}")
        return seconds, peak


def mergekit() -> Path:
    path = Path(os.environ.get("LECTURE_MERGEKIT", ".")).absolute() / "bin" / "mergekit-yaml"
    if not path.is_file():
        raise SystemExit(
            "no mergekit: make an environment (python -m venv E; E/bin/pip install "
            "mergekit==0.1.5) and set LECTURE_MERGEKIT=E"
        )
    return path


# Models and recipes

Change = Callable[[Tensor, torch.Generator], Tensor]


def gaussian(weight: Tensor, generator: torch.Generator) -> Tensor:
    """The weight, a little off everywhere."""
    return weight + 1e-3 * torch.randn(weight.shape, generator=generator)


def banded(weight: Tensor, generator: torch.Generator) -> Tensor:
    """Off by magnitudes in four bands with gaps between them, exactly where ranks are cut.

    No two entries on different sides of a cut come near each other, so that every way of ranking
    keeps the same ones: the largest share GAMMA, what DENSITY needs beyond, GAMMA again, the rest.
    """
    n = weight.numel()
    top, kept = int(GAMMA * n), max(1, int(DENSITY * n))
    counts = torch.tensor([top, kept - top, top, n - kept - top])
    lows = torch.tensor([1.6e-3, 1.0e-3, 6e-4, 1e-4]).repeat_interleave(counts)
    magnitude = lows + 2e-4 * torch.rand(n, generator=generator)
    sign = torch.randint(0, 2, (n,), generator=generator) * 2 - 1
    place = torch.randperm(n, generator=generator)
    return weight + torch.empty(n).scatter_(0, place, magnitude * sign).view(weight.shape)


def make_copies(bench: Bench, count: int, change: Change) -> None:
    """The folders base (fp32) and m0, m1 ... (fp32, changed)."""
    source = bench.source()
    names = stored(source)
    specs = [Spec(name, source.shape(name), torch.float32) for name in names]
    for i in range(-1, count):
        path = bench.folder / ("base" if i < 0 else f"m{i}")
        path.mkdir()
        generator = torch.Generator().manual_seed(i + 1)
        tensors = (
            (name, source[name].float() if i < 0 else change(source[name].float(), generator))
            for name in names
        )
        FolderWriter(path, specs).write(tensors)
        config = dict(source.config) | {"dtype": "float32"}
        config.pop("torch_dtype", None)
        (path / "config.json").write_text(json.dumps(config))
        copy_beside(source.path, path)


def stored(folder: Folder) -> list[str]:
    """Names of its tensors, without a head that is the embedding."""
    return [name for name in folder if not (folder.tied and name == HEAD)]


@contextmanager
def copies(bench: Bench, count: int, change: Change) -> Iterator[None]:
    make_copies(bench, count, change)
    try:
        yield
    finally:
        for path in [bench.folder / "base", *bench.folder.glob("m[0-9]")]:
            shutil.rmtree(path)


def recipe(bench: Bench, method: str, count: int = 3) -> Path:
    """Written to a file, as JSON, which is YAML."""
    place = {name: str(bench.folder / name) for name in ("base", *(f"m{i}" for i in range(count)))}
    raw: dict = {"merge_method": method, "dtype": "float32"}
    depth = bench.source().num_layers
    if method == "slerp":
        t = [{"filter": "self_attn", "value": [0, 0.5, 0.3, 0.7, 1]}, {"value": 0.5}]
        models = [{"model": place["m0"]}, {"model": place["m1"]}]
        raw |= {"base_model": place["m0"], "models": models, "parameters": {"t": t}}
    elif method == "passthrough":
        # Both ends are m0's. Where they come from two tied models, ours unties the head and takes
        # it from the last; mergekit 0.1.5 leaves it tied to the first one's embedding.
        third = depth // 3
        ranges = [("m0", [0, 2 * third]), ("m1", [third, 2 * third]), ("m0", [2 * third, depth])]
        raw["slices"] = [
            {"sources": [{"model": place[name], "layer_range": layers}]} for name, layers in ranges
        ]
    else:
        shares = {"linear": [{"weight": w} for w in (0.2, 0.5, 1.0)]}
        given = shares.get(method) or [PER_MODEL[method]] * count
        raw["models"] = [{"model": place[f"m{i}"], "parameters": p} for i, p in enumerate(given)]
        raw |= {} if method == "linear" else {"base_model": place["base"]}
    path = bench.folder / f"{method}.yml"
    path.write_text(json.dumps(raw))
    return path


# Differences


def compare(bench: Bench, method: str) -> dict:
    """Our result against theirs, entry by entry; how many differ, and how many of those tie."""
    ours, theirs = Folder(bench.folder / "ours"), Folder(bench.folder / "theirs")
    if strange := set(ours) ^ set(theirs):
        raise SystemExit(f"{method}: only one of the results has {min(strange)}")
    found = {"max_difference": 0.0, "elsewhere": 0.0, "entries": 0, "beyond": 0, "ties": 0}
    if ours.tied != theirs.tied:
        raise SystemExit(f"{method}: only one of the results has a head of its own")
    for name in stored(theirs):
        apart = (ours[name].double() - theirs[name].double()).abs().flatten()
        far = (apart > NEAR).nonzero().flatten()
        tied = at_the_edge(bench, method, name, far) if len(far) else torch.zeros(0).bool()
        found["max_difference"] = max(found["max_difference"], apart.max().item())
        found["entries"] += len(apart)
        found["beyond"] += len(far)
        found["ties"] += int(tied.sum())
        apart[far[tied]] = 0
        found["elsewhere"] = max(found["elsewhere"], apart.max().item())
    return found


def at_the_edge(bench: Bench, method: str, name: str, entries: Tensor) -> Tensor:
    """Which of these entries have in some model just the magnitude at which ranks are cut."""
    tied = torch.zeros(len(entries), dtype=torch.bool)
    if method not in ("ties", "breadcrumbs", "breadcrumbs_ties"):
        return tied
    base = Folder(bench.folder / "base")[name]
    for i in range(3):
        magnitude = (Folder(bench.folder / f"m{i}")[name] - base).abs().flatten()
        n, kept = len(magnitude), int(DENSITY * len(magnitude))
        top = int(GAMMA * n) if method != "ties" else 0
        cuts = [n - kept - top, n - top]  # kept are the ranks between, counted from the least
        cuts = [cut for cut in cuts if 0 < cut < n]
        edges = np.partition(magnitude.numpy(), cuts)[cuts]
        tied |= torch.isin(magnitude[entries], torch.from_numpy(edges))
    return tied


# Sections


def agreement(bench: Bench) -> dict:
    """All methods against mergekit where the answer is unique: entry by entry, or in the mean."""
    exact = []
    with copies(bench, 3, banded):
        for method in ("ties",) if bench.small else EXACT:
            path = recipe(bench, method)
            bench.ours(path, bench.folder / "ours")
            bench.theirs(path, bench.folder / "theirs")
            found = compare(bench, method)
            _remove_results(bench)
            exact.append({"method": method} | {k: found[k] for k in ("max_difference", "entries")})
            print(f"  {method:18} {found['max_difference']:.1e} in {found['entries']}", flush=True)
            if found["max_difference"] > NEAR:
                bench.stop.append(f"{method}: {found['beyond']} entries differ from mergekit's")
    drawn = [in_the_mean(bench, method) for method in (("della",) if bench.small else RANDOM)]
    return {"agreement": {"exact": exact, "random": drawn}}


def in_the_mean(bench: Bench, method: str) -> dict:
    """A random method: thousands of draws in one merge.

    All rows of a table are one row, in every model, so each row of the result is a draw, and its
    mean over rows estimates the expectation. z is the difference of the two means in standard
    errors, one for each column: spread like a normal distribution if the expectations are equal.
    """
    rows = 500 if bench.small else 20_000
    config = Config(D=64, F=96, K=2, G=2, H=16, L=1, V=rows, max_context=64, tied=True)
    model, generator = Transformer.random(config), torch.Generator().manual_seed(7)
    start = torch.randn(64, generator=generator) * 0.05
    for name in ("base", "m0", "m1", "m2"):
        row = start if name == "base" else gaussian(start, generator)
        with torch.no_grad():
            model.embed.weight.copy_(row.expand(rows, -1))
        save_folder(model, bench.folder / name)
    path = recipe(bench, method)
    bench.ours(path, bench.folder / "ours", "--seed", "1")
    bench.theirs(path, bench.folder / "theirs")
    base, *tuned = (Folder(bench.folder / name)[EMBED] for name in ("base", "m0", "m1", "m2"))
    ours, theirs = (Folder(bench.folder / name)[EMBED] for name in ("ours", "theirs"))
    given = dict(PER_MODEL[method])
    papers = merge_states(
        method, [{EMBED: each} for each in tuned], {EMBED: base}, seed=1, **given
    )[EMBED]
    z, other = _z(ours, theirs), _z(papers, theirs)
    for name in ("base", "m0", "m1", "m2"):
        shutil.rmtree(bench.folder / name)
    _remove_results(bench)
    found = {
        "method": method, "draws": rows, "columns": len(z), "worst_z": z.abs().max().item(),
        "mean_square_z": z.square().mean().item(), "spread_ratio": _spread_ratio(ours, theirs),
        "worst_z_by_paper": other.abs().max().item(),
    }  # fmt: skip
    print(f"  {method:18} worst z {found['worst_z']:.1f} of {len(z)}, by the paper's convention "
          f"{found['worst_z_by_paper']:.0f}", flush=True)  # fmt: skip
    if found["worst_z"] > 6:
        bench.stop.append(f"{method}: the means differ by {found['worst_z']:.1f} standard errors")
    return found


def _z(ours: Tensor, theirs: Tensor) -> Tensor:
    means = [each.double().mean(0) for each in (ours, theirs)]
    error = sum(each.double().var(0) / len(each) for each in (ours, theirs)).sqrt()
    return (means[0] - means[1]) / error


def _spread_ratio(ours: Tensor, theirs: Tensor) -> float:
    """Standard deviation of our draws by theirs, the mean over columns."""
    return (ours.double().std(0) / theirs.double().std(0)).mean().item()


def peers(bench: Bench) -> dict:
    """Time and memory of both, in turns, on Gaussian copies; ties at the trim's edge counted."""
    rows = []
    with copies(bench, 3, gaussian):
        for method in ("ties",) if bench.small else EXACT:
            path, runs = recipe(bench, method), {"ours": [], "theirs": []}
            for _ in range(bench.rounds):
                _remove_results(bench)
                for side in runs:
                    runs[side].append(getattr(bench, side)(path, bench.folder / side))
            found = compare(bench, method)
            _remove_results(bench)
            row = {"method": method, "rounds": bench.rounds}
            for key, side in (("ours", "ours"), ("mergekit", "theirs")):
                row[f"{key}_s"] = float(np.median([seconds for seconds, _ in runs[side]]))
                row[f"{key}_bytes"] = max(peak for _, peak in runs[side])
            rows.append(row | found)
            print(
                f"  {method:18} ours {row['ours_s']:6.1f} s {row['ours_bytes'] / 1e9:5.2f} GB, "
                f"mergekit {row['mergekit_s']:6.1f} s {row['mergekit_bytes'] / 1e9:5.2f} GB, "
                f"{found['beyond']} entries differ, {found['ties']} of them ties", flush=True,
            )  # fmt: skip
            if found["beyond"] != found["ties"]:
                bench.stop.append(f"{method} differs from mergekit where nothing ties")
    return {"peers": rows}


def memory(bench: Bench) -> dict:
    """Peak memory of our TIES by the number of models; and before it has read anything."""
    rows, counts = [], (2,) if bench.small else (2, 3, 4, 6)
    _, floor = bench.run([sys.executable, "-m", "lecture_util", "merge", "--help"])
    with copies(bench, counts[-1], gaussian):
        base = Folder(bench.folder / "base")
        largest = max(Spec(name, base.shape(name), torch.float32).nbytes for name in base)
        for count in counts:
            seconds, peak = bench.ours(recipe(bench, "ties", count), bench.folder / "ours")
            _remove_results(bench)
            rows.append({"models": count, "bytes": peak})
            print(f"  {count} models: {peak / 1e9:.2f} GB, {seconds:.1f} s", flush=True)
    return {"memory": rows, "memory_floor": floor, "largest_tensor_bytes": largest}


def _remove_results(bench: Bench) -> None:
    for side in ("ours", "theirs"):
        shutil.rmtree(bench.folder / side, ignore_errors=True)


SECTIONS: dict[str, Callable[[Bench], dict]] = {
    "agreement": agreement,
    "peers": peers,
    "memory": memory,
    "trials": lambda bench: trials(bench.small),
    "real": lambda bench: real(bench.small),
}


def read(path: Path = RECORD) -> dict:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def rounded(value):
    """Five significant figures: no more is known, and the file stays readable."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: rounded(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(v) for v in value]
    return value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []], default=[])
    parser.add_argument("--again", action="store_true", help="measure what is recorded already")
    parser.add_argument("--small", action="store_true", help="tiny models; needs --out")
    parser.add_argument("--out", type=Path, default=None, help="another record")
    parser.add_argument("--scratch", type=Path, default=None, help="where to put copies")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of both sides")
    parser.add_argument("--rounds", type=int, default=3, help="of each side, in turns, in peers")
    args = parser.parse_args()
    if args.small and args.out is None:
        raise SystemExit("--small measures nothing worth keeping: name a file with --out")
    path = args.out or RECORD
    for name in args.sections or SECTIONS:
        if name in read(path) and not args.again:
            continue
        print(name, flush=True)
        if name in ("agreement", "peers"):
            mergekit()  # rather than after the copies are made
        with tempfile.TemporaryDirectory(prefix="merging-", dir=args.scratch) as folder:
            bench = Bench(Path(folder), args.threads, args.small, 1 if args.small else args.rounds)
            measured = SECTIONS[name](bench)
        if bench.stop:
            raise SystemExit(f"not recorded: {'; '.join(bench.stop)}")
        record = read(path) | {
            "date": date.today().isoformat(),
            "hardware": f"{processor()}, {args.threads} threads",
            "versions": {"torch": torch.__version__, "python": platform.python_version()},
        }  # fmt: skip
        record |= rounded(measured)
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
