"""Merge checkpoint folders by a recipe: `python -m lecture_util merge recipe.yml out/`.

All models are looked at before anything is written; the result appears whole or not at all. Every
tensor is merged in fp32 and cast once, to the recipe's dtype or else the base's.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..model.checkpoint import WeightsError, new_folder
from ..model.shapes import ShapeError
from .checkpoint import EMBED, HEAD, Folder, FolderWriter, Spec, copy_beside
from .methods import method, settings
from .plan import Piece, check_models, merged
from .recipe import Recipe, RecipeError, Slice, Source, read_recipe
from .vocabulary import add_tokens, align, read_vocab, union

LAYER = re.compile(r"^(.*\b(?:layers|h|blocks?)\.)(\d+)(\..+)$")
VOCABULARY = (EMBED, HEAD)  # whose rows are tokens


def merge(
    recipe: Recipe, out: str | Path, *, progress: bool = True, shard_bytes: float = 5e9
) -> Path:
    """Merge as the recipe says into the new folder `out`, which transformers loads.

    Raises: RecipeError, KeyError, ShapeError, ValueError where recipe and models don't fit, before
            anything is written; WeightsError for a damaged checkpoint or a full disk;
            FileExistsError if `out` exists. Nothing partial is left by any of them.
    """
    job = Job(recipe)
    how = method(recipe.merge_method)
    specs = job.specs
    with new_folder(out) as partial:
        results = merged(
            how, job.pieces, job.read, recipe.convention, seed=recipe.seed, progress=progress
        )
        FolderWriter(partial, specs, shard_bytes=shard_bytes).write(_finite(results))
        (partial / "config.json").write_text(json.dumps(job.config, indent=2) + "\n")
        copy_beside(job.tokenizer_folder, partial)
        if job.new_tokens:
            numbers = [job.vocab[token] for token in job.new_tokens]
            add_tokens(job.tokenizer_folder, partial, job.new_tokens, numbers)
        if recipe.text:
            (partial / "merge_recipe.yml").write_text(recipe.text)
    return Path(out)


def _finite(results: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in results:
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise ValueError(
                f"the merged {name} holds NaN or infinity: look for it in that tensor of each "
                "model, and at the recipe's weights"
            )
        yield name, tensor


@dataclass(frozen=True)
class Job:
    """A recipe with its models open: every tensor of the result planned, every mismatch found."""

    recipe: Recipe

    def __post_init__(self) -> None:
        self._check_models()
        self._check_names()
        for piece in self.pieces:
            self._check(piece)

    @cached_property
    def folders(self) -> dict[str, Folder]:
        from ..model.weights import locate

        return {name: Folder(locate(name)) for name in self.recipe.models}

    @cached_property
    def order(self) -> list[str]:
        return list(self.folders)

    @cached_property
    def first(self) -> Folder:
        """Whose config and tokenizer the result gets: the base, else the first model."""
        return next(iter(self.folders.values()))

    def read(self, model: int, name: str) -> Tensor:
        """A tensor of a model, its vocabulary aligned if the recipe wants that."""
        if self.vocab is None or name not in VOCABULARY:
            self._aligned.clear()
            return self.folders[self.order[model]][name]
        if name not in self._aligned:  # one tensor a model, until another is read
            self._aligned.clear()
            holders = [i for i, each in enumerate(self.order) if name in self.folders[each]]
            base = self.order.index(self.recipe.base_model) if self.recipe.base_model else None
            tables = align(
                [self.folders[self.order[i]][name] for i in holders],
                [self.vocabs[i] for i in holders],
                self.vocab,
                base=base if base in holders else None,
                num_rows=self.num_rows,
            )
            self._aligned[name] = dict(zip(holders, tables, strict=True))
        return self._aligned[name][model]

    @cached_property
    def _aligned(self) -> dict[str, dict[int, Tensor]]:
        return {}

    # What the result looks like

    @cached_property
    def tied(self) -> bool:
        """Whether the result's head is its embedding: all models' are, and both come from one."""
        ends = [self.recipe.slices[0].sources, self.recipe.slices[-1].sources]
        same = [source.model for source in ends[0]] == [source.model for source in ends[1]]
        return same and all(folder.tied for folder in self.folders.values())

    @cached_property
    def config(self) -> dict[str, Any]:
        """The first model's, with what the merge changes; lists of one entry a layer follow."""
        config, depth = dict(self.first.config), self.first.config.get("num_hidden_layers")
        layers = [
            (source.model, index)
            for part in self.recipe.slices
            for source in part.sources[:1]
            if source.layers
            for index in range(*source.layers)
        ]
        if layers:
            config["num_hidden_layers"] = len(layers)
            for key, value in self.first.config.items():
                if isinstance(value, list) and len(value) == depth:
                    config[key] = [self.folders[model].config[key][i] for model, i in layers]
        config["tie_word_embeddings"] = self.tied
        if self.recipe.dtype:
            config.pop("torch_dtype", None)
            config["dtype"] = self.recipe.dtype
        if self.vocab is not None:
            config["vocab_size"] = self.num_rows
        return config

    @cached_property
    def specs(self) -> list[Spec]:
        return [Spec(piece.name, self._shape(piece), self._dtype(piece)) for piece in self.pieces]

    def _shape(self, piece: Piece) -> tuple[int, ...]:
        model, name = piece.sources[0]
        shape = self.folders[self.order[model]].shape(name)
        aligned = self.vocab is not None and name in VOCABULARY
        return (self.num_rows, *shape[1:]) if aligned else shape

    def _dtype(self, piece: Piece) -> torch.dtype:
        model, name = piece.base or piece.sources[0]
        stored = self.folders[self.order[model]].dtype(name)
        floats = self.recipe.dtype and stored.is_floating_point
        return getattr(torch, self.recipe.dtype) if floats else stored

    # Vocabularies

    @cached_property
    def vocabs(self) -> list[dict[str, int]]:
        return [read_vocab(folder.path) for folder in self.folders.values()]

    @cached_property
    def tokenizer_folder(self) -> Path:
        from ..model.weights import locate

        wanted = self.recipe.tokenizer_source
        return self.first.path if wanted in (None, "base", "union") else locate(wanted)

    @cached_property
    def vocab(self) -> dict[str, int] | None:
        """Token to row in the result; None to leave rows as they are."""
        wanted = self.recipe.tokenizer_source
        if wanted is None and self.recipe.pad_to_multiple_of is None:
            return None
        return union(self.vocabs) if wanted == "union" else read_vocab(self.tokenizer_folder)

    @cached_property
    def new_tokens(self) -> list[str]:
        if self.recipe.tokenizer_source != "union":
            return []
        return [token for token in self.vocab if token not in self.vocabs[0]]

    @cached_property
    def num_rows(self) -> int:
        """As many as the tokens need, and never fewer than the tokenizer's own model has."""
        owner = next((f for f in self.folders.values() if f.path == self.tokenizer_folder), None)
        own = 0 if owner is None else owner.shape(EMBED)[0]
        rows, pad = max(own, max(self.vocab.values()) + 1), self.recipe.pad_to_multiple_of or 1
        return -(-rows // pad) * pad

    # The plan

    @cached_property
    def pieces(self) -> list[Piece]:
        """What lies before the layers is the first slice's, what lies after them the last's."""
        outside = [n for n in self.folders[self._leader(0).model] if not LAYER.match(n)]
        before = [n for n in outside if _is_embedding(n)]
        first, last = self.recipe.slices[0], self.recipe.slices[-1]
        pieces = [self._piece(name, [name] * len(first.sources), first, 0) for name in before]
        depth = 0
        for part in self.recipe.slices:
            ranges = [self._layers(source) for source in part.sources]
            if len({len(each) for each in ranges}) > 1:
                raise RecipeError(
                    f"the models have {', '.join(str(len(each)) for each in ranges)} layers: "
                    "merge models of one depth, or pick layers with slices"
                )
            for step, numbers in enumerate(zip(*ranges, strict=True)):
                t = step / (len(ranges[0]) - 1) if len(ranges[0]) > 1 else 1.0
                for stem, rest in self._layer_names(part.sources[0], numbers[0]):
                    names = [f"{stem}{number}{rest}" for number in numbers]
                    pieces.append(self._piece(f"{stem}{depth}{rest}", names, part, t))
                depth += 1
        outside = [n for n in self.folders[self._leader(-1).model] if not LAYER.match(n)]
        after = [n for n in outside if not _is_embedding(n) and not (n == HEAD and self.tied)]
        if not self.tied and HEAD not in after and EMBED in before:
            raise WeightsError(f"{self._leader(-1).model} has no {HEAD}, and is not tied")
        return pieces + [self._piece(name, [name] * len(last.sources), last, 0) for name in after]

    def _leader(self, part: int) -> Source:
        """The source whose tensors' names a slice goes by."""
        return self.recipe.slices[part].sources[0]

    def _layers(self, source: Source) -> range:
        depth = self.folders[source.model].num_layers
        start, stop = source.layers or (0, depth)
        if stop > depth:
            raise RecipeError(
                f"layer_range [{start}, {stop}] of {source.model}: it has {depth} layers, so at "
                f"most [{start}, {depth}] (the end is not included)"
            )
        return range(start, stop)

    def _layer_names(self, source: Source, number: int) -> list[tuple[str, str]]:
        found = [LAYER.match(name) for name in self.folders[source.model]]
        return [(m[1], m[3]) for m in found if m and int(m[2]) == number]

    def _piece(self, out: str, names: list[str], part: Slice, t: float) -> Piece:
        recipe, how = self.recipe, method(self.recipe.merge_method)
        places = [
            (source, (self.order.index(source.model), name))
            for source, name in zip(part.sources, names, strict=True)
        ]
        base = None
        if how.base:
            mine = [place for source, place in places if source.model == recipe.base_model]
            base = mine[0] if mine else (self.order.index(recipe.base_model), out)
            places = [(s, place) for s, place in places if s.model != recipe.base_model]
        given: dict[str, Any] = {}
        for word, parameter in how.parameters.items():
            if parameter.per_model:
                given[word] = [recipe.value(word, s, part, name, t) for s, (_, name) in places]
            else:
                given[word] = recipe.value(word, None, part, out, t)
        full = settings(recipe.merge_method, given, len(places), recipe.convention)
        return Piece(out, tuple(place for _, place in places), base, full)

    # What does not fit

    def _check_models(self) -> None:
        name, base = self.recipe.merge_method, self.recipe.base_model
        how = method(name)
        for part in self.recipe.slices:
            listed = [source.model for source in part.sources]
            if doubled := [model for model in listed if listed.count(model) > 1 and how.base]:
                raise RecipeError(f"{doubled[0]} is listed twice in one merge: give it one weight")
            others = [model for model in listed if not how.base or model != base]
            check_models(name, len(others), base is not None)
            if how.base and part.sources[0].layers and base not in listed:
                raise RecipeError(f"a slice needs layers of the base model too: list {base} in it")
            if not how.base and base is not None and base not in listed:
                raise RecipeError(
                    f"{name} has no use for base_model {base}: list it among the models if it is "
                    "to be averaged, else leave it out"
                )
        kinds = {n: tuple(f.config.get("architectures") or ()) for n, f in self.folders.items()}
        for model, kind in kinds.items():
            if kind != kinds[self.order[0]]:
                raise RecipeError(
                    f"{model} is a {', '.join(kind)} but {self.order[0]} a "
                    f"{', '.join(kinds[self.order[0]])}: merge models of one architecture"
                )

    def _check_names(self) -> None:
        """One set of names in all models, whatever the number of layers, the head aside."""
        kinds = [{LAYER.sub(r"\1N\3", name) for name in f} - {HEAD} for f in self.folders.values()]
        for model, names in zip(self.order, kinds, strict=True):
            if strange := sorted(names ^ kinds[0]):
                has, lacks = self.order[0], model
                if strange[0] not in kinds[0]:
                    has, lacks = lacks, has
                raise KeyError(
                    f"{has} holds {strange[0]}, which {lacks} lacks: merge models of one "
                    "architecture"
                )

    def _check(self, piece: Piece) -> None:
        """Each tensor in every model, of one shape."""
        places = piece.sources if piece.base is None else (piece.base, *piece.sources)
        shapes = {}
        for model, name in places:
            folder = self.folders[self.order[model]]
            if name not in folder:
                raise KeyError(f"{folder.path} lacks {name}: merge models of one architecture")
            folder.dtype(name)
            shape = folder.shape(name)
            aligned = self.vocab is not None and name in VOCABULARY
            shapes[folder.path.name] = shape[1:] if aligned else shape
        if len(set(shapes.values())) > 1:
            rows = piece.name in VOCABULARY and len({shape[1:] for shape in shapes.values()}) == 1
            remedy = (
                "align their tokens with tokenizer_source: base or union"
                if rows
                else ("merge models of one shape")
            )
            listed = ", ".join(f"{shape} in {name}" for name, shape in shapes.items())
            raise ShapeError(f"{piece.name} is {listed}: {remedy}")


def _is_embedding(name: str) -> bool:
    return "embed" in name or name.endswith(("wte.weight", "wpe.weight"))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lecture_util merge",
        description="Merge checkpoints by a recipe in mergekit's YAML into a new folder.",
    )
    parser.add_argument("recipe", type=Path, help="the YAML file")
    parser.add_argument("out", type=Path, help="the folder to make; it must not exist")
    parser.add_argument("--convention", choices=("paper", "mergekit"), help="over the recipe's")
    parser.add_argument("--seed", type=int, help="of random methods, over the recipe's")
    parser.add_argument("--shard-gb", type=float, default=5.0, help="size of a file (default 5)")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a kill cleans up too
    try:
        recipe = read_recipe(args.recipe)
        recipe = recipe.replaced(convention=args.convention, seed=args.seed)
        merge(recipe, args.out, shard_bytes=args.shard_gb * 1e9)
    except KeyboardInterrupt:
        print("stopped; nothing was written", file=sys.stderr)
        return 130
    except (OSError, ValueError, KeyError, TypeError) as error:
        message = error.args[0] if isinstance(error, KeyError) and error.args else error
        print(f"merge: {message}", file=sys.stderr)
        return 1
    print(f"merged {len(recipe.models)} models into {args.out}")
    return 0
