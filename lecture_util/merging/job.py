"""A recipe with its models open: which tensors the result has, and what each is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..model.checkpoint import WeightsError, read_json
from .checkpoint import EMBED, HEAD, VOCABULARY, Folder, Spec
from .fits import (
    by_name,
    check_architectures,
    check_filters,
    check_sources,
    check_tensor,
    check_types,
)
from .layers import inside, is_embedding, outside, restacked
from .methods import method, settings
from .plan import Piece, Place
from .recipe import Recipe, Slice, Source
from .schema import RecipeError
from .tensors import all_finite, wide
from .vocabulary import Alignment, check_same_tokens


@dataclass(frozen=True)
class Job:
    """A recipe with its models open: every tensor of the result planned, every mismatch found."""

    recipe: Recipe

    def __post_init__(self) -> None:
        check_sources(self.recipe)
        check_architectures(self.folders)
        if self.alignment is None:
            check_same_tokens(list(self.folders.values()))
        for piece in self.pieces:
            places = piece.sources if piece.base is None else (piece.base, *piece.sources)
            named = [(self._folder(place), place[1]) for place in places]
            check_tensor(piece.name, named, self._aligned(piece.name))
        check_filters(self.recipe, self.folders, [piece.name for piece in self.pieces])

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
        return self.folders[self.order[0]]

    @cached_property
    def alignment(self) -> Alignment | None:
        """None to leave rows as they are."""
        from ..model.weights import locate

        recipe = self.recipe
        if (source := recipe.tokenizer_source) is None and recipe.pad_to_multiple_of is None:
            return None
        source = source if source in ("base", "union") else locate(source or self.order[0])
        return Alignment(list(self.folders.values()), source, recipe.pad_to_multiple_of or 1)

    @property
    def tokenizer_folder(self) -> Path:
        return self.first.path if self.alignment is None else self.alignment.home

    # Reading

    def read(self, model: int, name: str) -> Tensor:
        """A tensor of a model: its rows aligned, and wide if it decides the result's dtype.

        Raises: ValueError for NaN or infinity, naming model and tensor.
        """
        if self._aligned(name):
            base = self.recipe.base_model
            index = None if base is None else self.order.index(base)
            tensor = self.alignment.read(model, name, base=index)
        else:
            if self.alignment is not None:
                self.alignment.forget()
            tensor = self._folder((model, name))[name]
        if (model, name) not in self._seen:
            if tensor.is_floating_point() and not all_finite(tensor):
                raise ValueError(f"{name} of {self.order[model]} holds NaN or infinity")
            self._seen.add((model, name))
        leads = (model, name) in self._leading and self.recipe.dtype is not None
        return wide(tensor) if leads and tensor.is_floating_point() else tensor

    @cached_property
    def _seen(self) -> set[Place]:
        return set()

    @cached_property
    def _leading(self) -> set[Place]:
        return {_leader(piece) for piece in self.pieces}

    def _aligned(self, name: str) -> bool:
        return self.alignment is not None and name in VOCABULARY

    def _folder(self, place: Place) -> Folder:
        return self.folders[self.order[place[0]]]

    # What the result looks like

    @cached_property
    def tied(self) -> bool:
        """Whether the result's head is its embedding: all models' are, and both come from one.

        Where they come from two, it is by the convention `two_ends`: "tied" leaves out the last.
        """
        ends = [self.recipe.slices[0].sources, self.recipe.slices[-1].sources]
        same = [source.model for source in ends[0]] == [source.model for source in ends[1]]
        same = same or self.recipe.convention.two_ends == "tied"
        return same and all(folder.tied for folder in self.folders.values())

    @cached_property
    def config(self) -> dict[str, Any]:
        """The first model's, with what the merge changes."""
        config = dict(self.first.config)
        leaders = [part.sources[0] for part in self.recipe.slices]
        if leaders[0].layers:
            layers = [(self.folders[s.model], i) for s in leaders for i in range(*s.layers)]
            config = restacked(config, layers)
        config["tie_word_embeddings"] = self.tied
        if self.recipe.dtype:
            config.pop("torch_dtype", None)
            config["dtype"] = self.recipe.dtype
        if self.alignment is not None:
            config["vocab_size"] = self.alignment.num_rows
            theirs = read_json(self.tokenizer_folder / "config.json")
            config |= {key: theirs[key] for key in theirs if key.endswith("_token_id")}
        return config

    @cached_property
    def specs(self) -> list[Spec]:
        return [Spec(piece.name, self._shape(piece), self._dtype(piece)) for piece in self.pieces]

    def _shape(self, piece: Piece) -> tuple[int, ...]:
        place = piece.sources[0]
        shape = self._folder(place).shape(place[1])
        return (self.alignment.num_rows, *shape[1:]) if self._aligned(place[1]) else shape

    def _dtype(self, piece: Piece) -> torch.dtype:
        place = _leader(piece)
        stored = self._folder(place).dtype(place[1])
        floats = self.recipe.dtype and stored.is_floating_point
        return getattr(torch, self.recipe.dtype) if floats else stored

    # The plan

    @cached_property
    def pieces(self) -> list[Piece]:
        """What lies before the layers is the first slice's, what lies after them the last's."""
        first, last = self.recipe.slices[0], self.recipe.slices[-1]
        before = [name for name in self._outside(first) if is_embedding(name)]
        after = [name for name in self._outside(last) if not is_embedding(name)]
        if self.tied:
            after = [name for name in after if name != HEAD]
        elif EMBED in before and HEAD not in after:
            raise WeightsError(f"{last.sources[0].model} has no {HEAD}, and is not tied")
        pieces = [self._piece(name, [name] * len(first.sources), first, 0) for name in before]
        depth = 0
        for part in self.recipe.slices:
            steps = list(zip(*self._ranges(part), strict=True))
            for step, numbers in enumerate(steps):
                t = step / (len(steps) - 1) if len(steps) > 1 else 1.0
                folders = [self.folders[source.model] for source in part.sources]
                check_types(self.recipe, self.folders, part, numbers, depth)
                found = zip(folders, numbers, strict=True)
                for stem, rest in dict.fromkeys(x for f, n in found for x in inside(f, n)):
                    names = [f"{stem}{number}{rest}" for number in numbers]
                    pieces.append(self._piece(f"{stem}{depth}{rest}", names, part, t))
                depth += 1
        return pieces + [self._piece(name, [name] * len(last.sources), last, 0) for name in after]

    def _outside(self, part: Slice) -> list[str]:
        """Names that any source has: one that another lacks is found out by the checks."""
        folders = [self.folders[source.model] for source in part.sources]
        return list(dict.fromkeys(name for folder in folders for name in outside(folder)))

    def _ranges(self, part: Slice) -> list[range]:
        """Each source's layers."""
        ranges = [self._layers(source) for source in part.sources]
        depths = {s.model: len(each) for s, each in zip(part.sources, ranges, strict=True)}
        if method(self.recipe.merge_method).base and not part.sources[0].layers:
            depths[self.recipe.base_model] = self.folders[self.recipe.base_model].num_layers
        if len(set(depths.values())) > 1:
            listed = ", ".join(f"{depth} in {model}" for model, depth in depths.items())
            raise RecipeError(
                f"the models differ in layers ({listed}): merge models of one depth, or pick "
                "layers with slices"
            )
        return ranges

    def _layers(self, source: Source) -> range:
        depth = self.folders[source.model].num_layers
        start, stop = source.layers or (0, depth)
        if stop > depth:
            raise RecipeError(
                f"layer_range [{start}, {stop}] of {source.model}: it has {depth} layers, so at "
                f"most [{min(start, depth - 1)}, {depth}] (the end is not included)"
            )
        return range(start, stop)

    def _piece(self, out: str, names: Sequence[str], part: Slice, t: float) -> Piece:
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
        try:
            full = settings(recipe.merge_method, given, len(places), recipe.convention)
        except ValueError as error:
            said = by_name(str(error), [source.model for source, _ in places])
            raise RecipeError(f"{said} (for {out})") from error
        return Piece(out, tuple(place for _, place in places), base, full)


def _leader(piece: Piece) -> Place:
    """Whose dtype the result has."""
    return piece.base or piece.sources[0]
