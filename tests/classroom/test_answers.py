"""Every picture of the lecture and its slides has an answer, and the index says which."""

import re
from dataclasses import replace

import pytest

from lecture_util.classroom import figures
from lecture_util.classroom.figures import answers, cli, merging_papers, speculative_trace

# Every image(...) of the lecture, in its order; read off its source.
NAMES = """
    openai-100b-tokens.png cursor-1b-lines.png transformer-diagram.png naive-inference-1400.webp
    cached-inference-1400.webp gmqa.png gqa-speed.png gqa-accuracy.png mla-schema.png
    mla-accuracy.png mla-accuracy2.png cla-diagram.png cla-results.png longformer-attention.png
    figure1-2-1.png s4-summary.png based-associative-recall.png jamba-architecture.png
    based-attention.png diffusion-lm.png K2zvhtaTsz5ehDFoWx6KQHOqCyk.jpg
    1709770809-twitter-post-20.png quant-freeze.png Mixed-int8.gif llm-int8-bloom.png
    awq-schema.png pruning-kd-loop.png pruning-kd.png speculative-sampling-algorithm.png
    speculative-sampling-results.png speculative-sampling-stats.png medusa-eagle.png
    cb_02_diagram-static-batching.png paged-attention-fragmentation.png
    paged-attention-blocks.png paged-attention-logical.png paged-attention-sharing.png
    paged-attention-parallel.png
"""
IMAGES = NAMES.split()
PICTURED_SLIDES = {2, 3, 4, 5, 8, 9, 10, *range(13, 22)}  # the others hold text and code only


def test_the_list_holds_every_image_of_the_lecture_in_its_order():
    assert len(IMAGES) == 38
    assert [picture.file for picture in answers.LECTURE] == IMAGES


def test_the_list_holds_every_slide_with_a_picture_in_their_order():
    slides = [picture.slide for picture in answers.SLIDES]
    assert slides == sorted(slides)
    assert set(slides) == PICTURED_SLIDES
    assert not any(picture.file for picture in answers.SLIDES)


def test_every_picture_is_answered_and_every_answer_is_to_a_picture():
    assert answers.gaps(figures.FIGURES.values()) == []


def test_gaps_names_what_is_missing_unknown_or_twice():
    stills = list(figures.FIGURES.values())
    without = [still for still in stills if still.name != "transformer-block"]
    assert answers.gaps(without) == ["no figure answers 'transformer-diagram'"]
    strange = [*stills, replace(stills[0], name="x", answers=("gqa-sped",))]
    assert answers.gaps(strange) == ["x answers 'gqa-sped', which is no picture of the list"]
    twice = [*answers.PICTURES, answers.PICTURES[0]]
    assert answers.gaps(stills, twice) == ["'openai-100b-tokens' is there twice"]


@pytest.mark.parametrize("picture", answers.PICTURES, ids=lambda picture: picture.name)
def test_the_index_goes_from_a_picture_to_figures_that_exist(picture):
    name = f"`{picture.file}`" if picture.file else f"slide {picture.slide}"
    lines = (cli.IMAGES / "README.md").read_text(encoding="utf-8").splitlines()
    (line,) = [line for line in lines if line.startswith(f"| {name} | {picture.shows} |")]
    linked = re.findall(r"\]\(([\w-]+\.svg)\)", line)
    assert linked
    assert all((cli.IMAGES / path).is_file() for path in linked)


@pytest.mark.parametrize("still", figures.FIGURES.values(), ids=list(figures.FIGURES))
def test_each_figure_is_shown_in_its_notebook_with_its_alt_text(still):
    (path,) = (cli.IMAGES.parent / "solutions").glob(f"{still.notebook}_*.py")
    assert still.markdown in path.read_text(encoding="utf-8")


def test_the_coloured_rounds_write_the_answer_in_as_many_forwards_as_the_title_says():
    made, words = speculative_trace.rounds(), speculative_trace.VOCABULARY
    assert [words[token] for r in made for token in r.tokens] == speculative_trace.WANTED
    text = list(speculative_trace.ASKED)
    for r in made:
        guesses, new = [words[token] for token in r.draft.tokens], [words[t] for t in r.tokens]
        kept = next((k for k, pair in enumerate(zip(guesses, new, strict=False))
                     if pair[0] != pair[1]), min(len(guesses), len(new)))  # fmt: skip
        assert len(r.accepted) == kept == len(new) - 1  # and one word of the target's own
        assert not guesses or " ".join(guesses) in " ".join(text)  # looked up, not invented
        text += new
    title = figures.FIGURES["speculative-trace"].title
    assert title.startswith(f"{len(speculative_trace.WANTED)} words in {len(made)} forwards")
    assert len(made) < len(speculative_trace.WANTED)


def test_added_vectors_support_their_title():
    pair, eight = merging_papers.CLIP_KEPT.values()
    assert eight < pair < 100
    assert pair > 98  # "almost freely"
    before, after = merging_papers.T5_GLUE.values()
    assert before < after
