# %% [markdown] slideshow={"slide_type": "slide"}
# # 07 · Pruning and distillation
#
# Notebook 06 kept every weight and made each one smaller. This one keeps the numbers as they are and
# throws parts of the model away: whole layers, heads, neurons. Then it lets the original model teach
# what is left. The lecture says it in one line: *rip out parts of an expensive model, then fix it up.*
#
# You will
#
# 1. derive what each kind of part costs, in weights and in cache, and so what cutting it saves;
# 2. measure what each part is worth, with a few windows of text and no gradient;
# 3. cut a quarter of a real model's layers, and check that an ordinary checkpoint is left;
# 4. predict its memory and speed, and measure them;
# 5. repair it by distillation, here and now, and find out which of the repair's ingredients matter.

# %% slideshow={"slide_type": "subslide"}
from dataclasses import replace

import matplotlib.pyplot as plt
import sympy
import torch

from lecture_util.classroom import check, hint, predict, status, step, use_style
from lecture_util.model.text import english_split, perplexity, windows
from lecture_util.model.weights import REFERENCE, load, load_tokenizer
from lecture_util.roofline import ACCELERATORS, decode_step, format_bytes, num_params, this_machine

use_style()
model, tokenizer = load(REFERENCE), load_tokenizer(REFERENCE)
config, h100 = model.config, ACCELERATORS["h100"]

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Two texts, and never mix them
#
# Whatever we choose, we choose by text that is not what we score on. Choosing the layers to drop *is*
# training, if only a little: with the scored text in hand we would find the layers that matter least
# for that very text. So everything below looks at `study_S`, and is judged on windows of `held_BT`, which
# share no run of 16 tokens with it.

# %%
study_S, held_BT = english_split(tokenizer)
draw = torch.Generator().manual_seed(0)
sample_BT = windows(study_S, 8, 128, draw).to(model.device)  # to measure importance on
score_BT = held_BT[:12].to(model.device)  # to judge by
print("calibration", tuple(sample_BT.shape), "  scored", tuple(score_BT.shape))

# %% tags=["nbval-ignore-output"]
whole = perplexity(model, score_BT)
print(f"perplexity of the whole model on the scored windows: {whole:.1f}")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 1. Rip out a quarter of the layers?
#
# Our model has 30 layers. Take 8 out, and nothing else: no repair, no other change. Put a number on
# both sides of the bargain before we look.

# %% tags=["nbval-ignore-output"]
lost_share = predict("Which share of the weights goes with 8 of 30 layers?", unit="%")

# %% tags=["nbval-ignore-output"]
quarter = predict("Perplexity without those 8 layers, if we choose them well?")

# %% [markdown]
# Once you have guessed, the first answer, and what it means for a decode step. The step waits for
# memory (notebook 03), so its time is the bytes of weights and cache over the bandwidth:

# %% slideshow={"slide_type": "subslide"}
fewer = replace(config, L=config.L - 8)
saved = 1 - num_params(fewer) / num_params(config)
print(f"weights: {num_params(config):,} -> {num_params(fewer):,}, {saved:.1%} less")
for B, S in [(1, 1024), (64, 1024), (64, 8192)]:
    before, after = (decode_step(shape, B, S, h100) for shape in (config, fewer))
    share = after.memory_bytes / before.memory_bytes
    print(f"B={B:<3} S={S:<5} a step reads {1 - share:.1%} less: {1 / share:.2f} times as fast")
assert f"{saved:.1%}" == "21.1%"

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
lost_share.reveal(100 * saved)

# %% [markdown]
# Not 8/30 = 26.7%: the embedding, a fifth of this small model, stays whole. The cache does shrink by
# 26.7%, so the more of it a step reads, the nearer the saving comes to that. The second guess has to
# wait until section 4.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### The loop
#
# ![Five steps from left to right, joined by arrows. A trained model, drawn as a stack of eight layers. Importance: a bar a layer, from a few samples, forward passes only. Rank: the bars sorted. Trim: the three shortest are gone, five layers stay. Distil: the trained model teaches the small one its probabilities. An arrow leads back from distil to importance.](../images/pruning-loop.svg)
#
# This is Minitron's loop (Muralidharan et al. 2024, arXiv:2407.14679), and the order of this notebook.

# %% [markdown] slideshow={"slide_type": "notes"}
# *For the instructor.* Collect guesses of the perplexity on the board and leave them there. Most rooms say either "ruined"
# or "hardly different". Both are wrong in an interesting way: it nearly triples, and half a minute of
# training takes back more than half.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 2. What can be cut?
#
# We cut *structures*: whole rows and columns, so that what is left is a smaller dense model, for the
# same kernels, without any mask. (Zeroing single weights would save nothing in a dense format: a step
# still reads the zeros.)
#
# ![Left, a stack of 30 layers, some marked. Right, one layer: 9 query heads over 3 KV heads, one whole group marked; a row of MLP neurons, some marked; the residual stream's channels, which run through every layer, some marked. A table of parameters saved in SmolLM2-135M: a layer 3,540,096; a group in one layer 294,912; a neuron there 1,728; a channel 233,533.](../images/what-can-be-cut.svg)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### The algebra of a cut
#
# Five letters of the config can shrink. The number of parameters is a straight line in each, so its
# derivative *is* what one of them saves:

# %%
from lecture_util.model.config import Config
from lecture_util.roofline import kv_bytes_per_token

letters = {name: sympy.Symbol(name, positive=True) for name in "DFKGHLV"}
shape = Config(**letters, tied=True)
ours = {letter: getattr(config, name) for name, letter in letters.items()}
params, a_token = num_params(shape), kv_bytes_per_token(shape)
for name in "LKGFD":
    per_one = sympy.factor(sympy.diff(params, letters[name]))
    cached = sympy.diff(a_token, letters[name])
    number = int(per_one.subs(ours))
    print(f"{name}: {cached!s:>5} bytes cached, parameters {number:>9,} = {per_one}")

# %% slideshow={"slide_type": "subslide"}
from lecture_util.classroom.figures.pruning import savings

layer, group, neuron, channel = (sympy.diff(params, letters[x]).subs(ours) for x in "LKFD")
assert savings() == {
    "layer": layer, "group of heads": group / config.L,
    "neuron": neuron / config.L, "channel": channel,
}  # fmt: skip
print("the figure's numbers follow")

# %% [markdown]
# Read the cache first. A token leaves $2KH$ numbers of two bytes in each of $L$ layers, so **only layers and
# KV heads shrink the cache**. Neurons and channels make the weights fewer, and nothing else. Where a
# server's memory is full of caches, that decides.
#
# A second thing: a layer, a group and a neuron can be chosen layer by layer, but a channel is one
# channel in *every* matrix that touches the residual stream, the embedding included.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Exercise 7.1: shallow or narrow?
# *12 minutes · deriving sizes: what a layer has, what a neuron has, and which of them caches*
#
# Two students of the same size. The *shallow* one loses `drop` layers. The *narrow* one keeps all $L$,
# and loses so many neurons in every layer that it has exactly as many parameters. Return
#
# - the narrow student's `F` (not rounded: whatever the algebra says),
# - the bytes that a token leaves in the shallow student's cache, in 16 bits,
# - and those in the narrow student's.
#
# Count norms too: two a layer, $D$ each. The config has no biases, and its embedding is tied.


# %% slideshow={"slide_type": "skip"}
def shallow_or_narrow(config, drop):
    """-> (F of the narrow student, bytes a token of the shallow one, of the narrow one)."""
    ### BEGIN SOLUTION
    c = config
    layer = 2 * c.D * c.N * c.H + 2 * c.D * c.K * c.H + 3 * c.D * c.F + 2 * c.D
    neuron = 3 * c.D
    a_layer_caches = 2 * 2 * c.K * c.H
    F_new = c.F - drop * layer / (neuron * c.L)
    return F_new, a_layer_caches * (c.L - drop), a_layer_caches * c.L
    ### END SOLUTION


# %% slideshow={"slide_type": "skip"}
check("7.1", shallow_or_narrow)

# %% [markdown]
# Stuck? Each call opens one more hint.

# %% slideshow={"slide_type": "skip"}
hint("7.1")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 3. What is each part worth?
#
# The surest way: take each part out, and see what the text then costs. For 30 layers that is 30 runs;
# for 46,080 neurons it is out of the question. So we look at what *flows*. Run a few windows through
# the model once, and score each part by what it hands on. No gradients, no labels.
#
# For a **layer**, the question is how far it turns the residual stream. If $x$ goes in and $y$ comes out,
#
# $$\text{block influence} = 1 - \operatorname{mean}_{\text{tokens}} \frac{x \cdot y}{\lVert x\rVert\,\lVert y\rVert}$$
#
# (Men et al. 2024, *ShortGPT*, arXiv:2403.03853). A layer with $y = x$ scores 0, and can go unnoticed. One that
# only makes $x$ longer also scores 0: the next reader, behind an RMSNorm, sees no difference. But what later layers
# *add* then weighs less, and that the score does not see.

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
matters = predict(
    "Which layers turn the stream most?",
    choices=["the first and the last", "those in the middle", "all about the same"],
)

# %% tags=["nbval-ignore-output"]
from lecture_util.pruning.importance import block_influence

influence_L = block_influence(model, sample_BT).cpu()
order = influence_L.argsort().tolist()  # the least important first
print("least:", order[:8], "  most:", order[:-4:-1])
assert order[0] == 25 and {13, 14, 26} < set(order[:8])
assert set(order[-3:]) == {0, 1, 29} and influence_L[0] > 0.8

# %% tags=["nbval-ignore-output"]
matters.reveal("the first and the last")

# %% tags=["nbval-ignore-output", "hide-input"] slideshow={"slide_type": "subslide"}
from lecture_util.classroom.figures import MEASURED, PREDICTED, caption, claim
from lecture_util.classroom.figures.plots import plain_log_ticks

_, ax = plt.subplots(figsize=(7, 3.3))
colors = [MEASURED if layer in order[:8] else PREDICTED for layer in range(config.L)]
ax.bar(range(config.L), influence_L, color=colors)
ax.set(yscale="log", ylim=(0.01, 1.5), xlabel="layer", ylabel="block influence")
plain_log_ticks(ax.yaxis)
claim(ax, "Those in the middle hardly turn the stream")
caption(ax, device=str(model.device), dtype="fp32",
        shapes="8 windows of 128 tokens; red: the 8 of least influence")  # fmt: skip
plt.show()

# %% [markdown]
# The first layer turns a token's embedding into something else entirely, and the last prepares it for
# the head. Between them most layers add small corrections.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Does it tell what we want to know?
#
# Block influence is a guess at something that we can also measure: leave one layer out, and score. Four
# of them, two that the guess calls important and two that it doesn't. (From here on, where differences are
# large, a third of the windows do: `few_BT`. Other pages, another perplexity: each table says what *whole* has.)

# %% tags=["nbval-ignore-output"]
from lecture_util.pruning.importance import without

few_BT = score_BT[:4]  # enough where the differences are large
alone = {layer: perplexity(without(model, [layer]), few_BT) for layer in (0, 1, 11, 25)}
whole_few = perplexity(model, few_BT)
print(f"whole: {whole_few:.1f}")
for layer, value in alone.items():
    print(f"without {layer:>2}: {value:>9,.1f}   influence {influence_L[layer]:.3f}")
assert alone[0] > 10 * alone[1] > 50 * alone[25] and alone[11] > 2 * alone[25]

# %% [markdown]
# Without layer 0 nothing works, without layer 25 little is missed: the guess is right at both ends. But
# layer 11, which turns the stream about as much as its neighbours, is missed badly. What does it do?

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### What a mean hides
#
# We look at the stream before and after layer 11, and its companion layer 2, and ask the first token and
# the others separately: how long is the vector, and how far does the layer turn it?

# %% tags=["nbval-ignore-output"]
from lecture_util.model.observe import observe, run

streams = {}
with observe(model, ["blocks.2", "blocks.11"], lambda name, x, y: streams.update({name: (x, y)})):
    run(model, sample_BT[:1])
for name, (x_BTD, y_BTD) in streams.items():
    turn_T = 1 - torch.cosine_similarity(x_BTD[0], y_BTD[0], dim=-1)
    times = [h[0].norm(dim=-1)[0] / h[0].norm(dim=-1)[1:].median() for h in (x_BTD, y_BTD)]
    print(f"{name:<9} turns the first token {turn_T[0]:.3f}, the others {turn_T[1:].mean():.3f}; "
          f"length {times[0]:.1f} -> {times[1]:.1f} times")  # fmt: skip
assert turn_T[0] > 10 * turn_T[1:].mean() and times[1] > 30 * times[0]

# %% [markdown] slideshow={"slide_type": "subslide"}
# Layer 11 works on one token. Let it work on *no other*: all but the first pass through unchanged.

# %% tags=["nbval-ignore-output"]
first_only = model.blocks[11].register_forward_hook(
    lambda block, args, y_BTD: torch.cat((y_BTD[:, :1], args[0][:, 1:]), dim=1)
)
try:
    on_first = perplexity(model, few_BT)
finally:
    first_only.remove()
print(f"whole {whole_few:.1f}, layer 11 for the first token only {on_first:.1f}, "
      f"without layer 11 {alone[11]:.1f}")  # fmt: skip
assert whole_few < on_first < 0.4 * alone[11]

# %% [markdown]
# That is the riddle solved. Layers 2 and 11 build the **attention sink**: a first token so long, and in such a
# direction, that heads with nothing to say can look there. Every later layer counts on it. Block
# influence is a mean over the window's tokens, so a turn of one among 128 hardly shows: *a mean over
# tokens hides a layer that works on one token.*
#
# All thirty, measured on more windows (of the study text: they are to choose by, not a score). In
# the second map find 2 and 11, besides the first layers and the last:

# %% [markdown] slideshow={"slide_type": "subslide"}
# ![Four maps, a row a layer. Influence: layers 0, 29 and 1 highest, 25, 14, 26, 13 lowest. Perplexity without a layer: 21.8 with all, from 24.4 up, 63,000 at most. Heads: the best of a layer has at most 2.2 times the median. Neurons: in most layers nine tenths are alike, the best has 4 to 260 times the median.](../images/importance-maps.svg)

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
from lecture_util.classroom.figures.small_caches import recorded

record = recorded("pruning")
two_L = [
    torch.tensor(record["importance"][name]["scores_L"])
    for name in ("block influence", "perplexity without")
]
ranks_2L = torch.stack([scores_L.argsort().argsort().double() for scores_L in two_L])
least = [set(scores_L.argsort()[:8].tolist()) for scores_L in two_L]
print(f"rank correlation of the two scores: {torch.corrcoef(ranks_2L)[0, 1]:.2f}")
print(f"the 8 least important: {len(least[0] & least[1])} in common, {sorted(least[0] & least[1])}")
worst = (ranks_2L[1] - ranks_2L[0]).argmax()
print(f"most underrated: layer {worst}, number {ranks_2L[0, worst] + 1:.0f} of 30 by influence, "
      f"{ranks_2L[1, worst] + 1:.0f} by measurement")  # fmt: skip

# %% [markdown]
# A good guess, then, for the price of one pass instead of thirty. And even the measurement is of layers
# *one at a time*: two that do the same work are both dispensable, but not together. Whether all that care
# chooses a better eight, section 4 will show.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Exercise 7.2: how far a layer turns the stream
# *10 minutes · which axis a cosine is over, and what is averaged when*
#
# Write the score of one layer, from the stream that enters it and the stream that leaves it.
#
# A warning from the real model: in its middle layers the first token's vector is far longer than all
# others. Whatever you sum before you divide will be about that one token.


# %% slideshow={"slide_type": "skip"}
def influence(x_BTD, y_BTD):
    """1 - mean cosine of each token's vector before and after. Shapes: two (B, T, D) -> scalar."""
    ### BEGIN SOLUTION
    dot_BT = (x_BTD * y_BTD).sum(-1)
    lengths_BT = x_BTD.norm(dim=-1) * y_BTD.norm(dim=-1)
    return 1 - (dot_BT / lengths_BT).mean()
    ### END SOLUTION


# %% slideshow={"slide_type": "skip"}
check("7.2", influence)

# %% [markdown] slideshow={"slide_type": "skip"}
# How long is that first vector? We look between two layers, half-way up:

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "skip"}
seen = {}
with observe(model, ["blocks.15"], lambda name, x, y: seen.update({name: y})):
    run(model, sample_BT[:1])
length_T = seen["blocks.15"][0].norm(dim=-1)
print(f"first token {length_T[0] / length_T[1:].median():.0f} times as long as the median one")
assert length_T[0] > 20 * length_T[1:].max()

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Heads, neurons, channels
#
# Minitron scores the smaller parts by the *size* of what they hand on:
#
# | part | what it hands on | its size |
# |---|---|---|
# | query head | its mix of values, to the output projection | norm over $H$ |
# | neuron | $\operatorname{silu}(g)\,u$, to `down` | absolute value |
# | channel | its value behind each norm, all $2L$ added up | absolute value |
#
# That gives a number for every token. To make it one for every part: the **mean over the positions** of a
# window, then the **root of the sum of squares over windows**. By hand, for the heads of a tiny model:

# %% slideshow={"slide_type": "subslide"}
from lecture_util.model.transformer import Transformer
from lecture_util.pruning.importance import head_importance

tiny = Config(D=12, F=20, K=2, G=3, H=4, L=3, V=50, tied=True)
small = Transformer.random(tiny, seed=0, dtype=torch.float64)
tokens_BT = torch.randint(50, (2, 7), generator=draw)

with observe(small, ["blocks.0.out"], lambda name, x, y: seen.update({name: x})):
    run(small, tokens_BT)
mixed_BTNH = seen["blocks.0.out"].unflatten(-1, (tiny.N, tiny.H))
size_BTN = mixed_BTNH.norm(dim=-1)
by_hand_N = size_BTN.mean(dim=1).square().sum(dim=0).sqrt()
assert torch.allclose(by_hand_N, head_importance(small, tokens_BT)[0])
print("by hand equals the library, for", tiny.N, "heads")

# %% [markdown] slideshow={"slide_type": "subslide"}
# Now all four on the real model. Click a cell of the map: the text says what else goes with it, and how
# many weights that frees.

# %%
from lecture_util.classroom.widgets import importance_map
from lecture_util.pruning.importance import channel_importance, neuron_importance

heads_LN = head_importance(model, sample_BT).cpu()
neurons_LF = neuron_importance(model, sample_BT).cpu()
channels_D = channel_importance(model, sample_BT).cpu()
maps = {"heads": heads_LN, "neurons": neurons_LF, "channels": channels_D, "layers": influence_L}
for name, scores in maps.items():
    print(name, tuple(scores.shape))

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
importance_map(maps, config)

# %% [markdown] slideshow={"slide_type": "notes"}
# *For the instructor.* Pick the same neuron rank in an early and in a late layer, with "rank in the map" and "rank in its layer". Scores
# of different layers are in different units: a late layer's numbers are larger because its stream is. And
# a config has one F, one K and one G for all layers. So the cuts below keep equally many in each, and rank within.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 4. Trim
#
# ### Layers
#
# The residual stream makes this easy. A layer reads the stream and *adds* to it, so taking a layer out
# leaves a stream that lacks one addition; everything still fits.

# %% slideshow={"slide_type": "subslide"}
import copy

from lecture_util.pruning.prune import drop_layers

silent = copy.deepcopy(small)  # layer 1 stays, and adds nothing
silent.blocks[1].out.weight.zero_()
silent.blocks[1].down.weight.zero_()
dropped = drop_layers(small, [1])
assert torch.allclose(dropped(tokens_BT), silent(tokens_BT))
print(f"{dropped.config.L} layers and a silent third: the same logits")
assert num_params(dropped.config) == sum(p.numel() for p in dropped.parameters())

# %% [markdown]
# Look once more at your guess, then at the real model: two, five and eight layers gone, the
# least important first.

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
cut = {}
print(f"layers   weights   perplexity\n30       {num_params(config) / 1e6:5.1f} M   {whole:8.1f}")
for drop in (2, 5, 8):
    shallow = drop_layers(model, order[:drop])
    cut[drop] = perplexity(shallow, score_BT)
    size = num_params(shallow.config) / 1e6
    print(f"{shallow.config.L:<8} {size:5.1f} M   {cut[drop]:8.1f}   gone: {sorted(order[:drop])}")
assert whole < cut[2] < cut[5] < cut[8] < 6 * whole

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
quarter.reveal(cut[8])

# %% [markdown]
# Worse, by much, and yet far from noise: a model that knows nothing scores 49,152, the size of its
# vocabulary. Three quarters of the layers still read and write the same stream, and still mean the same by
# its directions.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Would more care have chosen better?
#
# Eight layers, chosen in five ways, as recorded: with one pass; by leaving each out, thirty passes; with
# one pass anew after every layer that goes; and two ways that look at nothing.

# %% tags=["nbval-ignore-output"]
orders = {name: entry["perplexity"] for name, entry in record["orders"].items()}
for name, value in sorted(orders.items(), key=lambda pair: pair[1]):
    print(f"{name:<34} {value:>13,.1f}")
once = orders["block influence, measured once"]
assert 0.95 < orders["perplexity without, measured once"] / once < 1.05
assert orders["block influence, measured after each"] > 1.05 * once
assert orders["every third from the second"] > 50 * once
assert orders["the last but one"] > 100 * config.V

# %% [markdown]
# Thirty measured passes chose no better than one, and measuring anew after each layer chose a little worse:
# each step takes what is least *now*, and never looks ahead. Choosing by position, though, is ruin. Eight in
# a row before the last leave thousands of times *worse* than a model that knows nothing: it is sure, and wrong.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Neurons
#
# A neuron of the MLP is a row of gate, a row of up and a column of down. It touches nothing else, so
# taking it out is *exactly* as if its output were zero:

# %%
from lecture_util.pruning.prune import keep_neurons

keep = [sorted(torch.randperm(tiny.F, generator=draw)[:13].tolist()) for _ in range(tiny.L)]
zeroed = copy.deepcopy(small)
for block, row in zip(zeroed.blocks, keep, strict=True):
    gone = [f for f in range(tiny.F) if f not in row]
    block.down.weight[:, gone] = 0
narrower = keep_neurons(small, keep)
assert torch.allclose(narrower(tokens_BT), zeroed(tokens_BT))
print(f"F = {narrower.config.F}: the logits of the model whose other neurons are silent")

# %% [markdown]
# Which rows and columns those are is the next exercise. Now the narrow student of exercise 7.1: as many
# parameters as without 8 layers, taken from the MLPs by importance. (`width_for` rounds F to a multiple
# of 8, which kernels like.)

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
from lecture_util.pruning.plan import plan_by_importance, width_for
from lecture_util.pruning.prune import prune

target = width_for(config, num_params(shallow.config))
narrow = prune(model, plan_by_importance(config, target, neurons_LF=neurons_LF))
chance_LF = torch.rand(neurons_LF.shape, generator=torch.Generator().manual_seed(0))
blind = prune(model, plan_by_importance(config, target, neurons_LF=chance_LF))
print(f"F {config.F} -> {target.F}, {num_params(target) / 1e6:.1f} M parameters")
scored = {"shallow": shallow, "narrow": narrow, "narrow, neurons at random": blind}
scored = {name: perplexity(student, few_BT) for name, student in scored.items()}
print(f"{'whole, on these 4 windows':<26} {whole_few:8,.1f}")
for name, value in scored.items():
    print(f"{name:<26} {value:8,.1f}")
del blind
assert scored["narrow"] < scored["shallow"] < 0.2 * scored["narrow, neurons at random"]

# %% [markdown]
# Two things to read. *Importance works*: the same number of neurons at random ruins the model. And at
# one size, before any repair, *narrow beats shallow*. Section 8 asks what is left of that afterwards, and
# section 5 what it does for speed.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Exercise 7.3: cut neurons out
# *12 minutes · which rows and which columns one neuron owns*
#
# Our MLP keeps gate and up in one matrix, `gate_up_MD`: first gate's $F$ rows, then up's $F$ rows. `down_DF`
# has $D$ rows and $F$ columns, and computes `down_DF @ (silu(gate) * up)`. Keep the neurons of the list
# `keep`, which rises, and drop the rest. Don't change what you are given.


# %% slideshow={"slide_type": "skip"}
def cut_neurons(gate_up_MD, down_DF, keep):
    """Shapes: (2F, D), (D, F) -> (2n, D), (D, n), with n = len(keep)."""
    ### BEGIN SOLUTION
    F = down_DF.shape[1]
    rows = keep + [F + f for f in keep]
    return gate_up_MD[rows], down_DF[:, keep]
    ### END SOLUTION


# %% slideshow={"slide_type": "skip"}
check("7.3", cut_neurons)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Heads, which come in groups
#
# Here GQA gets in the way, twice. Query heads share a KV head, $G$ of them. So a KV head can only go
# together with the $G$ that read it: those would be left to read keys that they never learned to read.
# And a config says *one* $G$ for all, so query heads can only go if equally many go from every group.
# The library refuses anything else:

# %%
from lecture_util.pruning.prune import keep_kv_groups, keep_query_heads

try:
    keep_query_heads(model, [[0, 1, 2, 3, 6]] * config.L)
except ValueError as error:
    print(error)
fewer_groups = keep_kv_groups(small, [[0], [1], [1]])
fewer_heads = keep_query_heads(small, [[0, 1, 3, 4]] * tiny.L)
for student in (small, fewer_groups, fewer_heads):
    c = student.config
    print(f"K={c.K} G={c.G}: {kv_bytes_per_token(c)} bytes of cache a token")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### A score that misleads
#
# Take three of the nine query heads out of every layer, in either of the two ways: one whole group, or one
# head of every group. Each time by importance, and at random. Which of the four will do
# best, and which worst?

# %% tags=["nbval-ignore-output"]
chance_LN = torch.rand(heads_LN.shape, generator=torch.Generator().manual_seed(0))
lost = {}
print(f"{'whole':<29} {whole_few:>9,.1f}")
targets = {"a whole group": replace(config, K=2), "one of each": replace(config, G=2)}
for kind, target in targets.items():
    for how, scores in [("by importance", heads_LN), ("at random", chance_LN)]:
        student = prune(model, plan_by_importance(config, target, heads_LN=scores))
        lost[kind, how] = perplexity(student, few_BT)
        print(f"{kind:<14} {how:<14} {lost[kind, how]:>9,.1f}")
assert lost["a whole group", "by importance"] < 0.05 * lost["a whole group", "at random"]
assert lost["one of each", "by importance"] > 3 * lost["a whole group", "by importance"]
assert lost["one of each", "by importance"] > 0.7 * lost["one of each", "at random"]

# %% [markdown] slideshow={"slide_type": "subslide"}
# Among whole groups the score is worth everything. Within a group it is worth nothing: no better than
# chance, as far as one draw of chance tells. Is the score bad, or the question? We ask it freely: the
# three least heads of each layer, *wherever* they are. No config can say that, so they are silenced, not cut:

# %% tags=["nbval-ignore-output"]
free = copy.deepcopy(model)
for block, scores_N in zip(free.blocks, heads_LN, strict=True):
    out_DNH = block.out.weight.unflatten(1, (config.N, config.H))  # a view
    out_DNH[:, scores_N.argsort()[:3]] = 0
lost["any three", "by importance"] = perplexity(free, few_BT)
print(f"any three      by importance  {lost['any three', 'by importance']:>9,.1f}")
assert lost["any three", "by importance"] < 0.5 * lost["one of each", "by importance"]
assert lost["any three", "by importance"] > 1.1 * lost["a whole group", "by importance"]
del free

# %% [markdown]
# Both. The constraint: some groups matter in all their heads, and "one of each" must take one from those
# too. And the score: left free to choose any three, it chooses *worse* than when it had to take whole
# groups, so within a group the size of a head's output does not tell which one to spare. Scores rank what
# may go, and no more: once a cut is made, *measure* it.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Exercise 7.4: heads that go together
# *12 minutes · finding the mistake, where every shape is right*
#
# A colleague cuts KV heads out of one layer. The rows of `qkv_MD` are $N$ heads of q, $K$ of k and $K$ of v, $H$
# rows each; the columns of `out_DX` are the $N$ heads, $H$ each. Every shape comes out right, the
# checkpoint loads, and the model talks nonsense:
#
# ```python
# def keep_groups(qkv_MD, out_DX, K, G, keep):
#     H = out_DX.shape[1] // (K * G)
#     q_NHD, k_KHD, v_KHD = qkv_MD.unflatten(0, (-1, H)).split([K * G, K, K])
#     heads = [n for n in range(K * G) if n % K in keep]
#     qkv_MHD = torch.cat((q_NHD[heads], k_KHD[keep], v_KHD[keep]))
#     out_DMH = out_DX.unflatten(1, (-1, H))[:, heads]
#     return qkv_MHD.flatten(0, 1), out_DMH.flatten(1)
# ```
#
# Find the line, and write the function right.


# %% slideshow={"slide_type": "skip"}
def keep_groups(qkv_MD, out_DX, K, G, keep):
    """Keep the KV heads in `keep` and the query heads that read them. -> (qkv, out), both smaller."""
    ### BEGIN SOLUTION
    H = out_DX.shape[1] // (K * G)
    q_NHD, k_KHD, v_KHD = qkv_MD.unflatten(0, (-1, H)).split([K * G, K, K])
    heads = [n for n in range(K * G) if n // G in keep]
    qkv_MHD = torch.cat((q_NHD[heads], k_KHD[keep], v_KHD[keep]))
    return qkv_MHD.flatten(0, 1), out_DX.unflatten(1, (-1, H))[:, heads].flatten(1)
    ### END SOLUTION


# %% slideshow={"slide_type": "skip"}
check("7.4", keep_groups)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Channels, and a norm that notices
#
# Channels of the residual stream go through everything: the embedding, every norm, the input side of
# `qkv` and `gate_up`, the output side of `out` and `down`, the head. One place cannot be cut: RMSNorm
# divides by the root *mean* of squares, a mean over $D$. If the $D-n$ channels that go were small, the sum of
# squares stays and the mean grows by $D/n$: everything behind the norm comes out too small, by
# $\sqrt{n/D}$. That factor can go into the norm's gain. It is exact where the channels were zero:

# %%
from lecture_util.pruning.prune import keep_channels

zeroed = copy.deepcopy(small)
zeroed.embed.weight[:, 9:] = 0  # tied: the head as well
for block in zeroed.blocks:
    block.out.weight[9:] = 0
    block.down.weight[9:] = 0
for rescale in (True, False):
    student = keep_channels(zeroed, range(9), rescale=rescale)
    same = torch.allclose(student(tokens_BT), zeroed(tokens_BT))
    print(f"D {tiny.D} -> {student.config.D}, rescale={rescale}: the same logits? {same}")

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
best = channels_D.argsort(descending=True)[: config.D - 64].tolist()
print(f"D = 576, whole        : {whole_few:7.1f}")
for rescale in (True, False):
    student = keep_channels(model, best, rescale=rescale)
    print(f"D = 512, rescale={rescale!s:<5}: {perplexity(student, few_BT):7.1f}")

# %% [markdown]
# Without the factor, the training that follows would have to find it first.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### What is left is an ordinary checkpoint
#
# No mask, no new code, no special kernel: fewer and smaller tensors, and a config that says so. So whoever
# reads the original's format reads this one. We save the 22-layer model and let transformers open it:

# %% tags=["nbval-ignore-output"]
import json
import tempfile
from pathlib import Path

from transformers import AutoModelForCausalLM

from lecture_util.model.checkpoint import save_folder

with tempfile.TemporaryDirectory() as scratch:
    folder = save_folder(shallow, Path(scratch) / "shallow", tokenizer)
    written = json.loads((folder / "config.json").read_text())
    theirs = AutoModelForCausalLM.from_pretrained(folder)

# %% slideshow={"slide_type": "subslide"}
tokens_1T = score_BT[:1, :16]
with torch.no_grad():
    theirs_BTV = theirs.to(model.device)(tokens_1T).logits
    ours_BTV = shallow(tokens_1T)
print(written["architectures"], written["num_hidden_layers"], "layers")
print("the same logits in transformers:", torch.allclose(ours_BTV, theirs_BTV, atol=2e-3))
del theirs

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 5. Smaller and faster: predicted, then measured
#
# At batch 1 a decode step reads all weights and a little cache. Prediction: as many times as fast as there
# are fewer bytes to read. The shallow and the narrow student have the same number of parameters, so the
# prediction is the same for both. What will the clock say?

# %% tags=["nbval-ignore-output"]
faster = predict("22 of 30 layers: how many times as fast is a step, here?", unit="times")

# %% slideshow={"slide_type": "subslide"}
from lecture_util.model.kv_cache import KVCache
from lecture_util.roofline import kv_cache_bytes, measure, weight_bytes

S = 128


def read_bytes(c):
    return weight_bytes(c, 4) + kv_cache_bytes(c, 1, S, 4)  # fp32, as the model is here


@torch.inference_mode()
def decoder(subject):
    """A decode step of one sequence that has S tokens in its cache, to be called again and again."""
    cache = KVCache(subject.config, 1, S + 1, subject.dtype, subject.device)
    subject.features(sample_BT[:1], cache)

    @torch.inference_mode()
    def one_step():
        cache.truncate(S)
        subject(sample_BT[:1, :1], cache)

    return one_step


# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
subjects = {"whole": model, "shallow": shallow, "narrow": narrow}
decoders = {name: decoder(subject) for name, subject in subjects.items()}
best_s = dict.fromkeys(subjects, float("inf"))
for _ in range(5):  # in turns, so that whatever else the machine does meets all three
    for name, one_step in decoders.items():
        best_s[name] = min(best_s[name], measure(one_step, repeats=3).best_s)

bandwidth, ratios = this_machine().bandwidth_bytes_per_s, {}
for name, subject in subjects.items():
    least_ms = 1e3 * read_bytes(subject.config) / bandwidth
    ratios[name] = best_s["whole"] / best_s[name]
    predicted = read_bytes(config) / read_bytes(subject.config)
    print(f"{name:<8} {format_bytes(read_bytes(subject.config)):>9}, at least {least_ms:5.1f} ms, "
          f"measured {1e3 * best_s[name]:5.1f}; times as fast: predicted {predicted:.2f}, "
          f"measured {ratios[name]:.2f}")  # fmt: skip

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
faster.reveal(ratios["shallow"], predicted=read_bytes(config) / read_bytes(shallow.config))

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Read.** Both students read the same bytes, to half a percent, so by the roofline they tie. If the narrow one falls behind on
# your machine, it is by its operations: a layer takes all of its own along when it goes, each with a price in
# Python and in launches, while the narrow student still makes every one, on smaller matrices. The larger
# the matrices, the less that counts, and the more the bytes do.

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "skip"}
gap = read_bytes(narrow.config) / read_bytes(shallow.config)
entry = record["layers"]["22"]
print(f"narrow reads {gap:.4f} times what shallow reads; recorded in CPU time, 22 layers: "
      f"predicted {entry['predicted_times_as_fast']:.2f}, measured {entry['times_as_fast']:.2f}")  # fmt: skip
assert 1 < gap < 1.01 and abs(entry["times_as_fast"] / entry["predicted_times_as_fast"] - 1) < 0.1

# %% [markdown]
# Every depth from 30 to 18, as recorded on one machine. Move the slider, and watch the three curves and
# which layers are gone:

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
from lecture_util.classroom.widgets import layers_kept

layers_kept(kept=22)

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
by_depth = record["layers"]
for depth in ("23", "22", "21", "20"):
    print(f"{depth} layers, as cut: {by_depth[depth]['perplexity']:6.1f}")
assert by_depth["22"]["perplexity"] < by_depth["23"]["perplexity"]
assert by_depth["20"]["perplexity"] > 2 * by_depth["21"]["perplexity"]

# %% [markdown]
# The curve need not rise with every layer that goes: with 23 it is *worse* than with 22. And the one big step,
# from 21 to 20, is where layer 2 goes, one of the two that build the attention sink.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ![Left, perplexity against layers kept, logarithmic: all 30, 19.6; 26 layers 31.2, repaired 24.6; 22 layers 58.1, repaired 29.8. Right, decoding speed over the whole model's: with 18 layers 1.53 times measured, 1.46 predicted from the bytes read.](../images/layers-kept.svg)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 6. Repair: the original teaches what is left
#
# We could train the student on text again. But a text shows *one* next token at each position, and the
# original has an opinion about all 49,152:

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
from lecture_util.model.tokenizer import encode


@torch.no_grad()
def next_words(subject, prompt, count=4):
    """The likeliest next tokens and their probabilities."""
    prompt_1T = torch.tensor([encode(tokenizer, prompt)], device=subject.device)
    best = subject(prompt_1T)[0, -1].softmax(-1).topk(count)
    words = [tokenizer.decode([token]) for token in best.indices.tolist()]
    return dict(zip(words, best.values.tolist(), strict=True))


def say(subject, prompt):
    return "  ".join(f"{word!r} {p:.2f}" for word, p in next_words(subject, prompt).items())


missing = "When the file does not exist, an exception is"
print(missing, "...")
for name in ("whole", "shallow"):
    print(f"{name:<8} {say(subjects[name], missing)}")

# %% [markdown]
# Exceptions are thrown or raised: the teacher says so, and how likely it thinks either. A text would name
# one of them. The student has lost the idea.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Forward KL
#
# Let $p$ be the teacher's distribution at a position and $q$ the student's. Distillation minimises
#
# $$\mathrm{KL}(p\,\Vert\,q) = \sum_{v} p_v\,(\log p_v - \log q_v),$$
#
# summed over the vocabulary, averaged over positions. *Forward*: $p$ leads. Wherever the teacher sees a
# chance, the student has to see one. (The other direction would let the student pick one of the
# teacher's answers and forget the rest.) A hand case to hold on to: $p = (.5, .5)$, $q = (.9, .1)$.

# %%
from lecture_util.pruning.distill import kl_loss

p, q = torch.tensor([0.5, 0.5]), torch.tensor([0.9, 0.1])
forward = float((p * (p.log() - q.log())).sum())
backward = float((q * (q.log() - p.log())).sum())
assert abs(float(kl_loss(q.log()[None], p.log()[None])) - forward) < 1e-6
print(f"forward {forward:.4f}, the other direction {backward:.4f}")
assert f"{forward:.4f}" == "0.5108"

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### What the text knows less of
#
# How does this differ from training on text, whose loss is the cross-entropy with *one* token? Both
# gradients are short. With respect to the student's logits, cross-entropy gives $q - e_v$, where $e_v$ is 1 at
# the text's token; KL gives $q - p$. Draw $v$ from the teacher, and the first is the second **on average**:

# %%
student_V, teacher_V = torch.randn(2, 6, generator=draw, dtype=torch.float64)
student_V.requires_grad_(True)
p_V = teacher_V.softmax(-1)
(kl_grad_V,) = torch.autograd.grad(kl_loss(student_V[None], teacher_V[None]), student_V)
text_grads_VV = torch.stack([
    torch.autograd.grad(-student_V.log_softmax(-1)[v], student_V)[0] for v in range(6)
])  # fmt: skip
assert torch.allclose(kl_grad_V, (student_V.softmax(-1) - p_V).detach())
assert torch.allclose(p_V @ text_grads_VV, kl_grad_V)
print("KL's gradient = that of cross-entropy, averaged over what the teacher might have said")

# %% [markdown]
# So one position with the teacher says what very many texts *by the teacher* would say, without the noise
# of drawing them. (A text by somebody else says something else. Section 7 will run into that.) The price:
# the teacher runs too, 2 more FLOPs a weight and token beside the student's 6.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Temperature, and its square
#
# Dividing both logits by $T > 1$ softens both distributions, so that the teacher's many small probabilities
# count for more (Hinton et al. 2015, arXiv:1503.02531). But it also makes the gradient smaller. By how
# much? Two tokens are enough, with logit differences $a$ of the student and $b$ of the teacher:

# %%
a, b, T = sympy.symbols("a b T", positive=True)
q_, p_ = 1 / (1 + sympy.exp(-a / T)), 1 / (1 + sympy.exp(-b / T))
divergence = p_ * sympy.log(p_ / q_) + (1 - p_) * sympy.log((1 - p_) / (1 - q_))
gradient = (q_ - p_) / T
numbers = {a: 2, b: sympy.Rational(1, 2), T: 3}
assert abs((sympy.diff(divergence, a) - gradient).subs(numbers).evalf()) < 1e-12
print("for large T, T times the gradient tends to  ", sympy.limit(T * gradient, T, sympy.oo))
print("for large T, T^2 times the gradient tends to", sympy.limit(T**2 * gradient, T, sympy.oo))

# %% [markdown]
# For large $T$ the gradient falls with $1/T^2$: one $T$ from the chain rule, one because $q$ and $p$ move
# together. So the loss is multiplied by $T^2$. With plain SGD a change of temperature is then not also a
# change of learning rate. AdamW, as here, hardly cares about a constant factor; there $T^2$ keeps the
# balance where KL is *mixed* with cross-entropy or hidden states. In the limit, distillation matches
# logits: $(a-b)/4$.

# %% [markdown] slideshow={"slide_type": "subslide"}
# Watch it line by line: change T and run again.

# %% tags=["nbval-ignore-output"]
student_logits = torch.tensor([[2.0, 0.5, -1.0]])
teacher_logits = torch.tensor([[0.5, 1.0, -2.0]])
step(kl_loss, student_logits, teacher_logits, 2.0)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Exercise 7.5: four ways to get KL wrong
# *12 minutes · direction, logarithm, reduction and temperature of a divergence in torch*
#
# This loss trains without any error, and not what it should. Four things are wrong with it:
#
# ```python
# def distillation_loss(student_logits, teacher_logits, T):
#     student = (student_logits / T).softmax(-1)
#     teacher = (teacher_logits / T).softmax(-1)
#     return nnf.kl_div(teacher, student)
# ```
#
# Write it right: forward KL, summed over the vocabulary, mean over all positions of any shape
# `(..., V)`, times $T^2$. (`torch.nn.functional.kl_div(input, target)` computes
# `target * (log(target) - input)`: look at what each argument has to be.)


# %% slideshow={"slide_type": "skip"}
def distillation_loss(student_logits, teacher_logits, T):
    """Forward KL(teacher || student) at temperature T. Shapes: two (..., V) -> scalar."""
    ### BEGIN SOLUTION
    log_q = (student_logits / T).log_softmax(-1).flatten(0, -2)
    p = (teacher_logits / T).softmax(-1).flatten(0, -2)
    return torch.nn.functional.kl_div(log_q, p, reduction="batchmean") * T**2
    ### END SOLUTION


# %% slideshow={"slide_type": "skip"}
check("7.5", distillation_loss)

# %% [markdown] slideshow={"slide_type": "slide"}
# ### The repair, live
#
# The 22-layer student, the whole model as its teacher, AdamW on all of the student's weights. On a CPU we
# have half a minute, so: 8 steps of 4 × 64 tokens, some 2,000 tokens in all, four pages of text. **Predict**
# what that can do.

# %% tags=["nbval-ignore-output"]
repaired = predict("Perplexity after these few steps, on windows never trained on?")

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
from lecture_util.pruning.distill import distill

on_gpu = torch.cuda.is_available()
budget = dict(steps=120, B=8, T=128) if on_gpu else dict(steps=8, B=4, T=64)
student = copy.deepcopy(shallow)
losses = distill(student, model, study_S, lr=2e-4, label="repairing", **budget)
after = perplexity(student, score_BT)
tokens = budget["B"] * budget["T"] * len(losses)
print(f"whole {whole:.1f}, cut {cut[8]:.1f}, after {tokens:,} tokens {after:.1f}")
assert after < 0.8 * cut[8]

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
repaired.reveal(after)

# %% [markdown]
# A large part of what eight layers took along is back. The layers that are left know most of what they
# need, and have to find a way around the gaps. (Not all of it is repair. These pages also teach the book
# that they are from: section 7 takes the two apart.)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Repaired for what?
#
# Our text is Python's reference, and the windows that we score are pages of the same book. So ask about
# Python, and about something else:

# %% tags=["nbval-ignore-output"]
france = "The capital of France is"
stages = {"whole": model, "cut": shallow, "repaired": student}
for prompt in (missing, france):
    print(prompt, "...")
    for name, subject in stages.items():
        print(f"    {name:<9} {say(subject, prompt)}")


# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "skip"}
@torch.no_grad()
def chance(subject, prompt, word):
    prompt_1T = torch.tensor([encode(tokenizer, prompt)], device=subject.device)
    (token,) = encode(tokenizer, word)
    return float(subject(prompt_1T)[0, -1].softmax(-1)[token])


paris = {name: chance(subject, france, " Paris") for name, subject in stages.items()}
raised = {name: chance(subject, missing, " raised") for name, subject in stages.items()}
assert raised["cut"] < 0.5 * raised["repaired"]
assert on_gpu or paris["repaired"] < 0.7 * paris["cut"] < paris["whole"]

# %% [markdown] slideshow={"slide_type": "subslide"}
# One prompt of each kind is a story, not a score, but mind it. Exceptions are raised again. And Paris, which
# the cut had hardly touched, has suffered from the *repair*. A student is repaired for the text that it is
# repaired on, and a score on the same kind of text does not show the rest. So repair on text as broad as
# what the model is for, and score on something else, too.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### The longer run
#
# On a GPU the cell above runs 120 steps. For everyone else, the curve as `benchmarks/pruning.py`
# recorded it, and what the recipes of the next section reach on one budget.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ![Left, perplexity of 22 of 30 layers against steps of distillation: 58.1 as cut, 26.3 after 40, 24.6 after 120; the whole model has 19.6. Right, after one shorter budget each: teacher's probabilities (KL) 29.8; the same, softened: T = 2 31.4; KL and the text's tokens 24.4; KL and hidden states 29.7; the text's tokens only 25.5; KL, dropping 4 and 4 33; KL, from fresh weights 1,020; the whole model, trained on the text alike, 14.2.](../images/recovery-curve.svg)

# %% [markdown] slideshow={"slide_type": "notes"}
# *For the instructor.* While the progress bar runs, ask what the first steps can be fixing. (The scale of the stream before the head; a
# handful of directions that the missing layers always added.) The curve's shape is the answer: steep,
# then slow.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 7. Two recipes, and some seasoning
#
# The lecture names two ways to a fast model. *From scratch*: define the architecture, train it. *Distil*:
# define the architecture, **initialise it from the original**, repair it. The difference is not only the
# teacher, it is where the student starts. So we compare on one budget, of a
# few thousand tokens (fresh weights get a higher learning rate, as training from scratch does):
#
# - the cut student, taught by the teacher's probabilities (KL), at $T=1$ and $T=2$;
# - the cut student, taught by the text alone (cross-entropy), and by half of each;
# - KL and *hidden states*: the student's layers should also hand on what the teacher's hand on there;
# - KL, but dropping 4 layers, repairing, and dropping 4 more (*iterative*, the loop's way back);
# - the same shape with **fresh weights**, and the same teacher.

# %% tags=["nbval-ignore-output"]
seasoning = predict(
    "Which choice matters most?",
    choices=["the weights to start from", "KL or text", "temperature", "hidden states"],
)

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
recipes = record.get("recipes", {})
teacher = record["recovery"]["whole"]["perplexity"]
print(f"{record['date']}, {record['hardware']}; the whole model: {teacher:.1f}")
for name, entry in sorted(recipes.items(), key=lambda pair: pair[1]["after"]):
    steps, B, T, lr = (entry["options"][key] for key in ("steps", "B", "T", "lr"))
    print(f"{name:<26} {entry['after']:8,.1f} after {steps} steps of {B} x {T} tokens, lr {lr:g}")

# %% tags=["nbval-ignore-output"]
seasoning.reveal("the weights to start from")

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Read.** Every student that starts from the trained weights is well on its way back, whatever the recipe.
# The one with fresh weights is in another world, even at a five times higher learning rate. Of course: on
# so few tokens nothing can be learned from scratch. On *this* budget the start matters most; what a long
# one would say, this table can't.
#
# Among the others, temperature and hidden states make a few percent, which one seed can't tell from nothing.
# Two rounds did *worse* than one: half of their steps repair a model that is then cut again. But the text
# alone, and half of each, are ahead by far more than that.

# %% slideshow={"slide_type": "skip"}
ends = {name: entry["after"] for name, entry in recipes.items()}
assert ends["fresh weights, KL"] > 3 * max(ends[name] for name in ends if "fresh" not in name)
assert ends["cross-entropy of the text"] < 0.95 * ends["KL, T=1"]
assert ends["KL and cross-entropy"] < 0.95 * ends["KL, T=1"] < ends["two rounds of 4"]
assert recipes["fresh weights, KL"]["options"]["lr"] == 5 * recipes["KL, T=1"]["options"]["lr"]

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "skip"}
# what the teacher costs: section 6 said 2 FLOPs a weight of its own beside the student's 6
with_s, without_s = (recipes[x]["cpu_s_per_step"] for x in ("KL, T=1", "cross-entropy of the text"))
own, the_teacher = 6 * num_params(shallow.config), 2 * num_params(config)
print(f"a step with the teacher: {with_s / without_s:.2f} times the CPU time of one without, "
      f"predicted {(own + the_teacher) / own:.2f}")  # fmt: skip

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### The text beats the teacher?
#
# One thing in the table should disturb you. Trained on the text alone, with no teacher, the student scores
# *better* than with one. Before we send the teacher home, a control: what does the same text do where
# there is nothing to repair? The **whole** model, three steps, the text alone (and Paris again):

# %% tags=["nbval-ignore-output"]
control = copy.deepcopy(model)
distill(control, model, study_S, 3, B=2, T=64, lr=2e-4, text=1.0, label="control")
studied = perplexity(control, score_BT)
print(f"the whole model {whole:.1f}, after three steps on the text {studied:.1f}")
for name, subject in (("before", model), ("after", control)):
    print(f"    {name:<7} {chance(subject, france, ' Paris'):.2f} for Paris")
assert studied < 0.95 * whole
del control

# %% [markdown] slideshow={"slide_type": "subslide"}
# And as long as the students above, from the record: the whole model on the budget of all the recipes.

# %% tags=["nbval-ignore-output"]
studied = record["recovery"]["whole, cross-entropy of the text"]
assert studied["options"] == recipes["cross-entropy of the text"]["options"]
three = ("cross-entropy of the text", "KL and cross-entropy", "KL, T=1")
for name, entry in {"whole": studied, **{name: recipes[name] for name in three}}.items():
    start, end = entry["before"], entry["after"]
    print(f"{name:<26} {start:5.1f} -> {end:5.1f}   {end / teacher:.2f} of the teacher's")
assert studied["after"] < 0.85 * teacher < 0.85 * ends["KL and cross-entropy"]

# %% [markdown] slideshow={"slide_type": "subslide"}
# No layer was missing, and the score fell all the same. What the text teaches is *the book*: how Python's
# reference is worded and laid out. The windows that we score are of that book, so learning it looks like
# repair, and a score *below the teacher's* is possible. KL can't gain that way: the teacher never read the
# book so closely, and holds the student to what the teacher would say. Two aims, then: to be good at this
# text, train on it; to be what the original was, follow the original, and measure that: by KL on held-out
# windows, and on other text. A mix is a choice between the two.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Hidden states: which should match which?
#
# The student has 22 layers, the teacher 30. A kept layer's output need not match what the *same* layer put
# out in the teacher: the next kept layer reads it, and expects what its own predecessor left. So each kept
# layer answers for the gap behind it:

# %%
from lecture_util.pruning.distill import counterparts

print("kept 0, 1, 4 of six: they should hand on what layers", counterparts([0, 1, 4], 6), "do")

# %% [markdown]
# And *how* match? By a cosine, again: in a mean squared error the first token, so much longer than all
# others, would be nearly the whole loss. A student of another $D$ has no such states to compare; then
# logits are all there is, or a learned projection.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Exercise 7.6: which layers are left?
# *8 minutes · indices that shift when something before them goes*
#
# `iterative` drops layers in rounds, and measures anew in each: so the second round's indices count the
# layers of the model as it *then* is. To match hidden states, or to draw the picture of what is gone, one
# needs the teacher's numbers. `rounds` is a list of lists, each of indices in the model at the start of that
# round. Return the teacher's indices of the layers that are left, in order.


# %% slideshow={"slide_type": "skip"}
def layers_left(L, rounds):
    """layers_left(6, [[1, 2], [1]]) is [0, 4, 5]."""
    ### BEGIN SOLUTION
    left = list(range(L))
    for gone in rounds:
        left = [layer for i, layer in enumerate(left) if i not in gone]
    return left
    ### END SOLUTION


# %% slideshow={"slide_type": "skip"}
check("7.6", layers_left)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 8. Depth or width?
#
# Back to the two students of one size. The picture has, on the left, eight layers chosen in five ways; on
# the right, as many parameters taken from layers, from neurons and from channels, before and after the same
# short repair.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ![Left, perplexity without 8 layers, as cut, by how they are chosen: least influence 58.1; least influence, measured after each 63.9; least harm alone 58; every third 5,750; 8 before the last 2.35e+08. Right, as many parameters less, perplexity as cut and after a short repair: 8 layers 58.1 and 29.8; neurons 33.4 and 25.2; channels 109 and 35.9.](../images/what-to-cut.svg)

# %% tags=["nbval-ignore-output", "hide-input"] slideshow={"slide_type": "subslide"}
print("as many parameters less   as cut   repaired   times as fast   bytes of cache a token")
for name, entry in record.get("width", {}).items():
    c = replace(config, **entry["shape"])
    print(f"{name:<25} {entry['before']:>7.1f} {entry['after']:>10.1f} {entry['times_as_fast']:>13.2f}"
          f" {kv_bytes_per_token(c):>19,}")  # fmt: skip
three = [record.get("width", {}).get(name) for name in ("neurons", "layers", "channels")]
if all(three):
    for when in ("before", "after"):
        first, second, third = (entry[when] for entry in three)
        assert 1.1 * first < second < third / 1.1
else:
    print("rows that are missing: not recorded yet")

# %% [markdown]
# **Read.** There is no best cut, there is one for what you are short of. Neurons are the gentlest, before the
# repair and after it, though it brings the three much closer. Layers alone take their keys and values along,
# so they help where the cache is what fills memory. Channels are the hardest to lose: each of them is in
# every matrix. And which eight layers go matters as much as how many parameters: eight in a row before the last leave a model that is sure, and wrong (section 4).

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### What Minitron found
#
# ![MMLU against training tokens, logarithmic. Minitron 8B, 94 billion tokens, 63.8; Minitron 4B, 94 billion, 58.6; Nemotron-3 8B, about 3.8 trillion, 54.7; Llama-3 8B, about 15 trillion, 65.3. A dashed line from Nemotron-3 8B to Minitron 8B: 40 times fewer, 9.1 points more. The 8 trillion tokens of their teacher are not counted.](../images/minitron-mmlu.svg)

# %% [markdown] slideshow={"slide_type": "subslide"}
# NVIDIA cut a model of 15 billion parameters to 8 and to 4 billion, and distilled on 94 billion tokens
# (arXiv:2407.14679; scores as the paper and model cards give them).
#
# > **Erratum.** The label in the paper's plot, 9% better than the same size from scratch, is 9.1 *points* of
# > MMLU, which is 17% more. And "40 times fewer tokens" leaves out the teacher, trained on 8 trillion. Distilling is cheap for whoever has
# > the large model already, and wants several small ones.

# %%
small_mmlu, scratch_mmlu = 63.8, 54.7  # Minitron 8B, Nemotron-3 8B
print(f"{small_mmlu - scratch_mmlu:.1f} points, {small_mmlu / scratch_mmlu - 1:.0%} more")
print(f"tokens: {3.8e12 / 94e9:.0f} times fewer; with the teacher's: {94e9 + 8e12:.1e} in all")
assert f"{small_mmlu - scratch_mmlu:.1f}" == "9.1" and f"{3.8e12 / 94e9:.0f}" == "40"

# %% [markdown] slideshow={"slide_type": "slide"}
# ## What to remember
#
# - Cut structures, not single weights: what is left is an ordinary, smaller checkpoint that runs
#   everywhere. Only layers and KV groups shrink the cache.
# - Importance needs a few windows and no gradient. It ranks; what a cut costs has to be measured, on text
#   that chose nothing.
# - First and last layers matter most, and those that build the attention sink, which no mean shows. A KV
#   head goes with its query heads or not at all.
# - Repair by forward KL on the original's probabilities: the student stays near the original. The text
#   also teaches its own domain, and a mix did best on ours. Which you want depends on what it is for.
# - The trained weights are what the student starts from, and most of why a repair is short.

# %% tags=["nbval-ignore-output"]
status("07")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ## Papers and sources
#
# - Stanford CS336, spring 2025, lecture 10, *Inference*: the idea, and the two recipes.
# - Muralidharan et al. 2024, *Compact Language Models via Pruning and Knowledge Distillation* (Minitron),
#   arXiv:2407.14679: importance by forward passes, the loop, the scores.
# - Men et al. 2024, *ShortGPT: Layers in Large Language Models are More Redundant Than You Expect*,
#   arXiv:2403.03853: block influence.
# - Hinton, Vinyals, Dean 2015, *Distilling the Knowledge in a Neural Network*, arXiv:1503.02531:
#   temperature and its square.
# - NVIDIA/Model-Optimizer#690: why KV heads go with their query heads. microsoft/ProDA#20,
#   neuralmagic/sparseml#592: KL without its logarithm, and with the wrong mean.
