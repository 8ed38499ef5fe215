"""The course's pictures: one style, the plots notebooks share, and the still figures.

style                type, colours, the line of conditions below a plot
plots                roofline, predicted against measured, bars
registry             the list of still figures
diagram              boxes, arrows and brackets on a plain canvas
workload             inference's scale, timeline, a step's bytes, the method    notebooks 00, 01, 03
transformer          one block with every edge's axes                           notebook 01
decoder_only         what a decoder-only model leaves out                       notebook 01
cache                naive against cached generation, and the cache as a tensor notebook 03
kv_reduction         KV heads: sharing, step time, quality; MLA's bytes         notebook 04
mla_tables           DeepSeek-V2's comparisons of MQA, GQA, MHA and MLA         notebook 04
cla                  layers that read a lower layer's keys and values           notebook 04
kv_layers            masks, a hybrid stack, every technique's cache by context  notebook 04
small_caches         what small models of each kind learned, as recorded        notebook 04
alternatives         S4, associative recall, four kinds of memory               notebook 05
hybrids              Jamba's block, memory by context, BASED's state and window notebook 05
diffusion            passes, noise to words, Mercury's speeds                   notebook 05
number_formats       bits and numbers of each format, NF4's levels              notebook 06
quantization         absmax and zero point, what shares a scale                 notebook 06
llm_int8             outlier columns apart, by model size, on BLOOM             notebook 06
quantized_runs       bits against perplexity, what AWQ saves; recorded          notebook 06
pruning              the loop, what can be cut, Minitron's scores               notebook 07
pruning_maps         layers, heads and neurons that matter; recorded            notebook 07
pruning_runs         layers kept, repair, what to cut; recorded                 notebook 07
speculative_rounds   one round of guesses, and the residual                     notebook 08
speculative_trace    a text made in rounds, each guess coloured                 notebook 08
speculative_drafts   four ways to draft                                         notebook 08
speculative_tree     a tree of guesses, its mask and positions                  notebook 08
speculative_papers   Leviathan's and Chen's speed-ups                           notebook 08
speculative_records  the cost of checking, Chen's panels; recorded              notebook 08
speculative_measured each draft, and tasks that repeat; recorded                notebook 08
serving              static and continuous batches, flat runs, chunks        notebook 09
serving_runs         schedulers, load, the token budget; recorded            notebook 09
paging               rented rows, pages and tables, a context in parts       notebook 10
page_sharing         shared pages, copy-on-write, names of pages             notebook 10
paging_runs          where the memory is, other engines; recorded            notebook 10
merging_papers       soups, TIES, vectors added, as published                notebook 11
merging_geometry     SLERP's arc, task vectors, Model Stock's ratio          notebook 11
merging_steps        TIES step by step, what DARE keeps                      notebook 11
merging_thinning     which entries breadcrumbs, DARE, TIES and DELLA keep    notebook 11
merging_models       Goliath's layers, the price of N fine-tunes             notebook 11
merging_runs         scales, densities; recorded                             notebook 11
merging_landscape    a line and a plane between models, soups; recorded      notebook 11
merging_tables       every merge on every task, the thin shell; recorded     notebook 11
merging_costs        memory and time, stacked layers; recorded               notebook 11
together_runs        the table, and its frontier; recorded                   notebook 12
together_errors      how far off each prediction was; recorded               notebook 12
combining            what multiplies, competes, excludes                     notebook 12
speculation_batch    what guesses gain as the batch grows                    notebook 12
tensor_parallel      one block cut over two ranks                            notebook 12
course_map           the course along the path of a request                  the README
answers              every picture of the lecture and the slides, and which figure answers it
records              registering what waits for a recorded run
cli                  `make figures`: draw all, or check that none is out of date
"""

from lecture_util.classroom.figures import (  # noqa: F401  register
    alternatives,
    cache,
    cla,
    combining,
    course_map,
    decoder_only,
    diffusion,
    hybrids,
    kv_layers,
    kv_reduction,
    llm_int8,
    merging_costs,
    merging_geometry,
    merging_landscape,
    merging_models,
    merging_papers,
    merging_runs,
    merging_steps,
    merging_tables,
    merging_thinning,
    mla_tables,
    number_formats,
    page_sharing,
    paging,
    paging_runs,
    pruning,
    pruning_maps,
    pruning_runs,
    quantization,
    quantized_runs,
    serving,
    serving_runs,
    small_caches,
    speculation_batch,
    speculative_drafts,
    speculative_measured,
    speculative_papers,
    speculative_records,
    speculative_rounds,
    speculative_trace,
    speculative_tree,
    tensor_parallel,
    together_errors,
    together_runs,
    transformer,
    workload,
)
from lecture_util.classroom.figures.cli import main
from lecture_util.classroom.figures.plots import bars, label_points, predicted_vs_measured, roofline
from lecture_util.classroom.figures.registry import FIGURES, figure
from lecture_util.classroom.figures.style import (
    ACCENT,
    CACHE,
    GUESS,
    INK,
    MEASURED,
    MUTED,
    PALETTE,
    PREDICTED,
    WEIGHTS,
    caption,
    claim,
    number,
    tint,
    use_style,
)

__all__ = [
    "ACCENT",
    "CACHE",
    "FIGURES",
    "GUESS",
    "INK",
    "MEASURED",
    "MUTED",
    "PALETTE",
    "PREDICTED",
    "WEIGHTS",
    "bars",
    "caption",
    "claim",
    "figure",
    "label_points",
    "main",
    "number",
    "predicted_vs_measured",
    "roofline",
    "tint",
    "use_style",
]
