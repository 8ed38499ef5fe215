"""Merge checkpoint folders by a recipe: `python -m lecture_util merge recipe.yml out/`.

All models are looked at before anything is written; the result appears whole or not at all. Every
tensor is merged in fp32 and cast once, to the recipe's dtype or else the base's.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..model.checkpoint import new_folder
from .checkpoint import FolderWriter, Spec, copy_beside
from .conventions import NAMED
from .job import Job
from .methods import METHODS, method
from .plan import merged
from .recipe import Recipe, read_recipe
from .tensors import all_finite
from .vocabulary import add_tokens


def merge(
    recipe: Recipe, out: str | Path, *, progress: bool = True, shard_bytes: float = 5e9
) -> Path:
    """Merge as the recipe says into the new folder `out`, which transformers loads.

    Raises: RecipeError, KeyError, ShapeError where recipe and models don't fit, before anything
            is written; ValueError for NaN or whole numbers that differ; WeightsError for a damaged
            checkpoint or a full disk; FileExistsError if `out` exists. None leaves anything.
    """
    job = Job(recipe)
    how = method(recipe.merge_method)
    with new_folder(out) as partial:
        results = merged(
            how, job.pieces, job.read, recipe.convention, seed=recipe.seed, progress=progress
        )
        writer = FolderWriter(partial, job.specs, shard_bytes=shard_bytes)
        writer.write(_cast(results, job.specs))
        (partial / "config.json").write_text(json.dumps(job.config, indent=2) + "\n")
        copy_beside(job.tokenizer_folder, partial)
        if job.alignment is not None and job.alignment.new:
            add_tokens(job.tokenizer_folder, partial, job.alignment.vocab, job.alignment.new)
        if recipe.text:
            text = _made_with(job) + recipe.text
            (partial / "merge_recipe.yml").write_text(text, encoding="utf-8")
    return Path(out)


def _made_with(job: Job) -> str:
    """Comments for the top of the recipe: what its text alone does not tell any more."""
    recipe = job.recipe
    names = [name for name, known in NAMED.items() if known == recipe.convention]
    flags = names[0] if names else json.dumps(dataclasses.asdict(recipe.convention))
    lines = [f"seed: {recipe.seed}", f"convention: {flags}"]
    places = {name: folder.path for name, folder in job.folders.items()}
    if recipe.tokenizer_source not in (None, "base", "union"):
        places[recipe.tokenizer_source] = job.tokenizer_folder
    lines += [f"{json.dumps(name)}: {json.dumps(str(p.resolve()))}" for name, p in places.items()]
    return "".join(f"# {line}\n" for line in ["This merge was made with", *lines])


def _cast(
    results: Iterator[tuple[str, Tensor]], specs: Sequence[Spec]
) -> Iterator[tuple[str, Tensor]]:
    for (name, tensor), spec in zip(results, specs, strict=True):
        tensor = tensor.to(spec.dtype)
        if tensor.is_floating_point() and not all_finite(tensor):
            narrow = spec.dtype == torch.float16
            raise ValueError(
                f"the merged {name} is too large for {spec.dtype}: look at the recipe's weights"
                f"{', or choose bfloat16 or float32 as its dtype' * narrow}"
            )
        yield name, tensor


EXAMPLE = """\
merge_method: ties
base_model: base/
models:
  - {model: german/, parameters: {weight: 0.6, density: 0.3}}
  - {model: poems/, parameters: {density: [0.2, 0.4]}}
dtype: bfloat16
"""


def _epilog() -> str:
    about = [f"  {name:18}{how.about}" for name, how in METHODS.items()]
    example = [f"  {line}" for line in EXAMPLE.splitlines()]
    return "\n".join(["methods:", *about, "", "a recipe:", *example])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lecture_util merge",
        description="Merge checkpoints by a recipe in mergekit's YAML into a new folder.",
        epilog=_epilog(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", type=Path, help="the YAML file")
    parser.add_argument("out", type=Path, help="the folder to make; it must not exist")
    parser.add_argument("--convention", choices=("paper", "mergekit"), help="over the recipe's")
    parser.add_argument("--seed", type=int, help="of random methods, over the recipe's")
    parser.add_argument("--shard-gb", type=float, default=5.0, help="size of a file (default 5)")
    args = parser.parse_args(argv)
    try:
        with _stoppable():
            recipe = read_recipe(args.recipe)
            recipe = recipe.replaced(convention=args.convention, seed=args.seed)
            merge(recipe, args.out, shard_bytes=args.shard_gb * 1e9)
        print(f"merged {len(recipe.models)} models into {args.out}")
        return 0
    except _Stopped as stop:
        message, status = "stopped; nothing was written", stop.status
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        message = error.args[0] if isinstance(error, KeyError) and error.args else error
        message, status = " ".join(str(message).split()), 1
    print(f"merge: {message}", file=sys.stderr)
    return status


class _Stopped(BaseException):
    """By Ctrl-C, or by SIGTERM or SIGHUP, which would end Python before it can clean up."""

    def __init__(self, status: int) -> None:
        self.status = status


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """Turn the signals into an exception, where signals may be handled at all."""

    def stop(number: int, _) -> None:
        raise _Stopped(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [signal.SIGINT, signal.SIGTERM]
    hangup = getattr(signal, "SIGHUP", None)  # Windows has none; under nohup it stays ignored
    if hangup is not None and signal.getsignal(hangup) != signal.SIG_IGN:
        numbers.append(hangup)
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
