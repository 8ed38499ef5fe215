"""Every picture of the lecture and of its slides, in their order: which figure of ours answers it.

A figure names in `answers` the pictures whose place it takes; this list says what those pictures
are. Together they give the second table of `images/README.md`, seen from the lecture's side.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lecture_util.classroom.figures.registry import FIGURES, StillFigure


@dataclass(frozen=True)
class Picture:
    """A picture that others drew.

    name   what a figure's `answers` call it       shows    what is to be seen, in our words
    file   its file in the lecture's image(...)    slide    its slide, where it is of the slides
    """

    name: str
    shows: str
    file: str = ""
    slide: int = 0


LECTURE = (
    Picture("openai-100b-tokens", "a post: words that OpenAI generates a day",
            "openai-100b-tokens.png"),
    Picture("cursor-1b-lines", "a post: lines of code accepted in Cursor a day",
            "cursor-1b-lines.png"),
    Picture("transformer-diagram", "one block, each edge labelled with its axes",
            "transformer-diagram.png"),
    Picture("naive-inference", "without a cache the whole prefix is computed again at every step",
            "naive-inference-1400.webp"),
    Picture("cached-inference", "with one: prefill fills it, each step adds an entry",
            "cached-inference-1400.webp"),
    Picture("gmqa", "query heads over many, some and one KV head", "gmqa.png"),
    Picture("gqa-speed", "time against the number of KV groups", "gqa-speed.png"),
    Picture("gqa-accuracy", "scores and times of MHA, GQA and MQA", "gqa-accuracy.png"),
    Picture("mla-schema", "what MHA, GQA, MQA and MLA cache", "mla-schema.png"),
    Picture("mla-accuracy", "scores of MQA, GQA and MHA, a table", "mla-accuracy.png"),
    Picture("mla-accuracy2", "scores and cache of MHA and MLA, a table", "mla-accuracy2.png"),
    Picture("cla-diagram", "two layers, the upper reads the lower's keys and values",
            "cla-diagram.png"),
    Picture("cla-results", "perplexity against bytes of cache, with and without sharing",
            "cla-results.png"),
    Picture("longformer-attention", "full, window, dilated and global masks",
            "longformer-attention.png"),
    Picture("character.ai figure", "a stack of local and global layers that share caches",
            "figure1-2-1.png"),
    Picture("s4-summary", "a state space: continuous, as a recurrence, as a convolution",
            "s4-summary.png"),
    Picture("based-associative-recall", "pairs, then the same keys in another order",
            "based-associative-recall.png"),
    Picture("jamba-architecture", "a block of eight layers, one of them attention",
            "jamba-architecture.png"),
    Picture("based-attention", "window, linear and both: masks, time, recall against the window",
            "based-attention.png"),
    Picture("diffusion-lm", "noise, step by step, into vectors and words", "diffusion-lm.png"),
    Picture("Mercury picture", "speeds and scores of code models",
            "K2zvhtaTsz5ehDFoWx6KQHOqCyk.jpg"),
    Picture("fp8 picture", "number formats and what they hold", "1709770809-twitter-post-20.png"),
    Picture("quant-freeze", "a vector through absmax to int8 and back", "quant-freeze.png"),
    Picture("Mixed-int8", "outlier columns multiplied apart in fp16", "Mixed-int8.gif"),
    Picture("llm-int8-bloom", "BLOOM-176B's scores in int8 and bf16", "llm-int8-bloom.png"),
    Picture("awq-schema", "all rounded, 1% kept in fp16, or scaled and all rounded",
            "awq-schema.png"),
    Picture("pruning-kd-loop", "the loop of ranking, trimming and distilling",
            "pruning-kd-loop.png"),
    Picture("pruning-kd", "MMLU against training tokens", "pruning-kd.png"),
    Picture("speculative-sampling-algorithm", "the algorithm, step by step",
            "speculative-sampling-algorithm.png"),
    Picture("speculative-sampling-results", "scores and ms a token, a table",
            "speculative-sampling-results.png"),
    Picture("speculative-sampling-stats", "against K: acceptance, time of a loop, of 128 tokens",
            "speculative-sampling-stats.png"),
    Picture("medusa-eagle", "four ways to draft two tokens", "medusa-eagle.png"),
    Picture("static batching", "four sequences of a batch, all held until the longest ends",
            "cb_02_diagram-static-batching.png"),
    Picture("paged-fragmentation", "rows rented for two requests, mostly never used",
            "paged-attention-fragmentation.png"),
    Picture("paged-blocks", "a text's blocks, and where they lie", "paged-attention-blocks.png"),
    Picture("paged-logical", "two requests' blocks in one pool", "paged-attention-logical.png"),
    Picture("paged-sharing", "requests that share the blocks of one prefix",
            "paged-attention-sharing.png"),
    Picture("paged-parallel", "a shared block is copied when it is written to",
            "paged-attention-parallel.png"),
)  # fmt: skip

SLIDES = (
    Picture("Decoder-only inference (slides)",
            "the encoder-decoder Transformer, and where prompt and tokens enter", slide=2),
    Picture("KV cache (slides)", "a decoder's steps with the keys and values it keeps", slide=3),
    Picture("Static and continuous batching (slides)",
            "the same requests in a batch that waits and in one that refills", slide=4),
    Picture("Speculative decoding, coloured (slides)",
            "a text, a line a forward: accepted, rejected and corrected words", slide=5),
    Picture("Speculative decoding, T5-XXL (slides)", "speed-up, α and γ, a table", slide=5),
    Picture("n-grams (slides)", "guesses looked up in the prompt", slide=8),
    Picture("Medusa, heads and tree (slides)", "further heads on the model, and their tree",
            slide=9),
    Picture("Medusa-1 and -2 (slides)", "how much faster the trained heads make it", slide=9),
    Picture("What is model merging? (slides)", "several models become one", slide=10),
    Picture("Model soups, CLIP (slides)", "fine-tunes and soups, two accuracies", slide=13),
    Picture("Model soups, BERT and T5 on GLUE (slides)", "gains of soups, a table", slide=13),
    Picture("SLERP against LERP (slides)", "an arc and a straight line between rotations",
            slide=14),
    Picture("SLERP, the formula (slides)", "two vectors, the angle between them, and a part of it",
            slide=14),
    Picture("Task arithmetic (slides)", "vectors from the base, added and reversed", slide=15),
    Picture("Task vectors in pairs, T5-base (slides)", "scores with others' vectors added",
            slide=15),
    Picture("Task vectors added, CLIP (slides)", "accuracy against the number of vectors added",
            slide=15),
    Picture("TIES (slides)", "trim, elect a sign, merge", slide=16),
    Picture("TIES, results (slides)", "merges compared, a table", slide=16),
    Picture("DARE (slides)", "most of the changes dropped, the rest enlarged", slide=17),
    Picture("DARE, results (slides)", "merges of three 13B models", slide=17),
    Picture("Franken-merging, Goliath (slides)", "ranges of layers of two models, by turns",
            slide=18),
    Picture("Model breadcrumbs (slides)", "a task direction without its small and large entries",
            slide=19),
    Picture("Model breadcrumbs, results (slides)", "T5-base merged with six others", slide=19),
    Picture("Model stock, thin shell (slides)", "fine-tunes on a sphere around a centre",
            slide=20),
    Picture("Model stock, the centre (slides)", "towards the centre, from few fine-tunes",
            slide=20),
    Picture("DELLA (slides)", "the chance to be dropped, by magnitude", slide=21),
    Picture("DELLA, results (slides)", "merges of three 13B models", slide=21),
)  # fmt: skip

PICTURES = LECTURE + SLIDES


def answering(picture: Picture) -> list[StillFigure]:
    """Our figures that name this picture, in the order of the notebooks."""
    found = (still for still in FIGURES.values() if picture.name in still.answers)
    return sorted(found, key=lambda still: (still.notebook, still.name))


def gaps(figures: Iterable[StillFigure], pictures: Iterable[Picture] = PICTURES) -> list[str]:
    """What is amiss between the two lists: pictures without an answer, answers to no picture."""
    given = {answer: still.name for still in figures for answer in still.answers}
    names = [picture.name for picture in pictures]
    return [
        *(f"no figure answers {name!r}" for name in names if name not in given),
        *(
            f"{figure} answers {answer!r}, which is no picture of the list"
            for answer, figure in given.items()
            if answer not in names
        ),
        *(f"{name!r} is there twice" for name in sorted({n for n in names if names.count(n) > 1})),
    ]


def table() -> list[str]:
    """The lines of the index that go from each picture to its answers."""
    lines = [
        "## The lecture's pictures, and the slides'",
        "",
        "In their order: each `image(...)` of the lecture by its file, then the pictures of the",
        "slides by their number. What a slide shows was inferred from its words.",
        "",
        "| Picture | Shows | Our answer | Notebook |",
        "|---|---|---|---|",
    ]
    for picture in PICTURES:
        name = f"`{picture.file}`" if picture.file else f"slide {picture.slide}"
        found = answering(picture)
        figures = ", ".join(f"[{still.name}]({still.name}.svg)" for still in found)
        notebooks = ", ".join(sorted({still.notebook for still in found}))
        lines.append(f"| {name} | {picture.shows} | {figures} | {notebooks} |")
    return lines
