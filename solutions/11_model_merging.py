# %% [markdown] slideshow={"slide_type": "slide"}
# # 11 · Model merging
#
# All notebooks so far made one model cheaper to run. This one begins with too many models. Six people have
# fine-tuned the same base: one for questions, one for JSON, one for code. Each copy is good at one thing
# and has forgotten some of the rest. We want all six skills, at the price of one model, and nobody is going
# to train anything again.
#
# You will
#
# 1. average two models, find out when that works, and why it often doesn't;
# 2. cook soups, uniform and greedy, and compare them with an ensemble;
# 3. walk along an arc instead of a chord, and see how much that matters;
# 4. add, subtract and scale what fine-tuning added;
# 5. find out what two tasks disagree about, and what TIES, DARE, Breadcrumbs and DELLA do about it;
# 6. read off an angle how far to trust a mean;
# 7. stack layers of different models;
# 8. merge real checkpoints by a recipe, tensor by tensor.

# %% slideshow={"slide_type": "subslide"}
import contextlib
import copy
import math
from dataclasses import replace
from functools import partial
from itertools import combinations

import matplotlib.pyplot as plt
import sympy
import torch

from lecture_util.classroom import check, hint, predict, status, step, use_style
from lecture_util.classroom.figures import MEASURED, PREDICTED, caption, claim
from lecture_util.model.config import PUBLISHED
from lecture_util.roofline import ACCELERATORS, decode_step, num_params, weight_bytes

use_style()
h100 = ACCELERATORS["h100"]

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 1. The mean of two models
#
# What are the choices? **Serve all six**, each for its own kind of request: six models' memory, and six
# small batches in place of a large one. **Ensemble** them, and average what they say: six models' memory
# and six models' time, since a decode step reads every weight once (notebook 02). Or **merge** their
# weights into one model.

# %%
config = PUBLISHED["llama-3-8b"]
one = decode_step(config, 1, 1024, h100)
for name, models in {"one model": 1, "an ensemble of 6": 6, "6 merged into one": 1}.items():
    print(f"{name:<18} {models * weight_bytes(config) / 1e9:5.1f} GB of weights, "
          f"at least {1e3 * models * one.latency_s:5.1f} ms a token on an H100")  # fmt: skip

# %% [markdown] slideshow={"slide_type": "subslide"}
# ![Predicted, against the number of fine-tunes: bytes held (left) and time of a decode step (right). Both grow in proportion for an ensemble, nearly so for models served apart, and not at all once merged. With 8: served apart 132 GB and 39.3 ms; ensemble 154 GB and 46.0 ms; merged 19 GB and 5.8 ms.](../images/one-model.svg)
#
# The merge itself needs no gradient and no GPU and, at most, some held-out data to choose a scale by: it
# reads each weight of each model once, or twice, and writes one. What is left at the end is one ordinary
# model. That is what sets merging apart from ensembling, and why people do it on laptops.

# %% [markdown] slideshow={"slide_type": "subslide"}
# If it works. A network is a product of matrices with bends between them; as a function of all its weights
# it is anything but linear. So what is a model whose every weight is the *mean* of two models' weights?

# %% tags=["nbval-ignore-output"]
halfway = predict(
    "Two good models, 0.1 nats an answer each. Guess the loss of their mean (knowing nothing: 2.3)",
    unit="nats",
)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### A world that trains in seconds
#
# A prompt is the symbol of a task and then digits. At every digit the model says what the task asks of the
# digits so far: the *previous* one, the *largest*, the *sum* of the last two (modulo 10), or the *first*.
# The base has practised all four, but only one prompt in twenty said which was asked. It has the skills,
# and does not quite know when to use which.

# %% slideshow={"slide_type": "subslide"}
from lecture_util.merging.tiny_tasks import (
    PRACTISED,
    ensemble,
    evaluate,
    few_examples,
    fine_tune,
    mean_score,
    state,
    task_batch,
    tiny_base,
    with_state,
)

for name in PRACTISED:
    tokens_BT, answers_BT = task_batch(name, 1, 8, torch.Generator().manual_seed(4))
    print(f"{name:<9} digits {tokens_BT[0, 1:].tolist()}  answers {answers_BT[0, 1:].tolist()}")


# %% slideshow={"slide_type": "subslide"} tags=["nbval-ignore-output"]
@contextlib.contextmanager
def one_thread():
    """Models this small train on one thread: several would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


# %% tags=["nbval-ignore-output"]
with one_thread():
    base = tiny_base(seed=0)
    runs = [fine_tune(base, PRACTISED, lr=1e-3, seed=seed) for seed in range(4)]
    stranger = fine_tune(tiny_base(seed=50), PRACTISED, lr=1e-3)  # another start, the same training
print(f"{num_params(base.config):,} parameters, base: {mean_score(base).accuracy:.2f} right")
for model in (*runs, stranger):
    score = mean_score(model)
    print(f"fine-tuned on all four tasks: loss {score.loss:.3f}, {score.accuracy:.2f} right")

# %% [markdown] slideshow={"slide_type": "subslide"}
# Two fine-tunes of one base (other batches, nothing else), and two models trained apart. All have about the
# same loss. Now walk in a straight line from the weights of one to the weights of the other:


# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
def along(a, b, steps=8):
    """The mean loss over the tasks at (1-t) a + t b."""
    a, b = state(a), state(b)
    points = [{name: (1 - t / steps) * a[name] + t / steps * b[name] for name in a}
              for t in range(steps + 1)]  # fmt: skip
    return [mean_score(with_state(base, point), B=128).loss for point in points]


same, apart = along(runs[0], runs[1]), along(runs[0], stranger)
assert max(same) < 1.1 * max(same[0], same[-1]) and max(apart) > 6 * max(apart[0], apart[-1])

# %% tags=["nbval-ignore-output", "hide-input"] slideshow={"slide_type": "subslide"}
_, ax = plt.subplots(figsize=(7, 3.2))
for losses, color, label in [(same, MEASURED, "one base"), (apart, PREDICTED, "trained apart")]:
    ax.plot([t / 8 for t in range(9)], losses, "-o", color=color, label=label)
ax.set(xlabel="t, from one model to the other", ylabel="loss, nats", ylim=(0, 2.4))
ax.legend()
claim(ax, "Between fine-tunes of one base lies no bump, between strangers a mountain")
caption(ax, device="CPU", dtype="fp32", shapes="4 tasks, 128 prompts each", seed=0)
plt.show()

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
print(f"halfway: {same[4]:.3f} between fine-tunes of one base, {apart[4]:.2f} between strangers")
halfway.reveal(apart[4])

# %% [markdown]
# **Read.** Both answers are right, each for its own pair. Between strangers the mean knows next to nothing.
# Between two children of one base it is as good as its parents, and sometimes better. (Frankle et al. 2020,
# arXiv:1912.05671, call models with such a line between them *linearly mode connected*.)

# %% [markdown] slideshow={"slide_type": "notes"}
# *For the instructor.* Collect guesses before the world is explained. Nearly everyone says "noise", and for
# strangers that is right. Let somebody say why before the next slide: most blame different minima in
# general; the hidden neurons' order is the part one can see.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Why strangers don't mix
#
# A model is not *one* point. Reorder the neurons of an MLP, rows of gate and up and columns of down
# alike, and the function is the same, although the weights are not. So take a model, and a copy of it
# with its neurons shuffled, and average the two:

# %% tags=["nbval-ignore-output"]
from lecture_util.merging.plan import merge_states

shuffled, F = copy.deepcopy(runs[0]), base.config.F
draw = torch.Generator().manual_seed(0)
for block in shuffled.blocks:
    order = torch.randperm(F, generator=draw)
    block.gate_up.weight.data = block.gate_up.weight[torch.cat((order, F + order))]
    block.down.weight.data = block.down.weight[:, order]
assert torch.allclose(shuffled(tokens_BT), runs[0](tokens_BT), atol=1e-4)
mixed = merge_states("linear", [state(runs[0]), state(shuffled)])
for name, model in [("the model", runs[0]), ("its shuffled copy", shuffled),
                    ("their mean", with_state(base, mixed))]:  # fmt: skip
    print(f"{name:<18} loss {mean_score(model).loss:.3f}")
assert mean_score(with_state(base, mixed)).loss > 4 * mean_score(shuffled).loss

# %% [markdown] slideshow={"slide_type": "subslide"}
# The same function twice, and their mean is broken: it averages neuron 7 of the one with whatever happens
# to be neuron 7 of the other. Two models trained apart have their neurons in different orders, and much
# else. Fine-tuning moves weights too little to reorder anything. That is the ground rule of everything
# below: **merge models that come from one base.** (Entezari et al. 2021, arXiv:2110.06296; Ainsworth et al.
# 2022, *Git Re-Basin*, arXiv:2209.04836, put the neurons of strangers in order first.)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ![Loss of weighted means of two fine-tunes against the second's share, 9 points, 3 seeds. Of one base: between 0.101 and 0.142 all along. Of two bases: at most 0.131 at the ends, and in between up to 1.93, 1.91, 2.03.](../images/merge-line.svg)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ![Contours of the loss on the plane through the base and two fine-tunes, mean of the tasks largest and sum, from 0.16 to 1.48: one valley holds them all. Loss at base 0.55; fine-tune largest 0.96; fine-tune sum 0.56; soup 0.27.](../images/merge-plane.svg)
#
# Through three models there is a plane, and each of its points is a model. Base and fine-tunes lie in one
# **basin**: a wide valley of low loss. Merging is choosing a point in it, without training.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Nine ways
#
# | | in a sentence | source |
# |---|---|---|
# | Soups | average them, or only those that help | 2203.05482 |
# | SLERP | of two: go along the arc, not the chord | Shoemake 1985 |
# | Task arithmetic | add up what each fine-tune added | 2212.04089 |
# | TIES | trim it, vote on signs, average what agrees | 2306.01708 |
# | DARE | drop most of it at random, enlarge the rest | 2311.03099 |
# | Franken-merging | leave weights alone, stack layers | no paper: a habit |
# | Breadcrumbs | cut off the smallest and the largest | 2312.06795 |
# | Model Stock | from the angle, how far to go | 2403.19522 |
# | DELLA | drop at random, small ones more likely | 2406.11617 |
#
# `mergekit` (Goddard et al. 2024, arXiv:2403.13257) is what most people merge with. Our
# `lecture_util.merging` reads its recipes. Where it and the papers differ, ours follows the papers, and has
# a flag.

# %% [markdown] slideshow={"slide_type": "subslide"}
# > **Erratum.** Lists of merging methods often date DARE to June 2023, as TIES. An arXiv number says when:

# %%
numbers = {"TIES": "2306.01708", "DARE": "2311.03099"}
print({name: f"20{number[:2]}-{number[2:4]}" for name, number in numbers.items()})
assert numbers["DARE"].startswith("2311")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 2. Soups
#
# Usually one fine-tunes many times, with other learning rates, seeds and data orders, keeps the best on
# held-out data and throws the others away. Wortsman et al. 2022 (*Model soups*) average them instead. All
# were trained on *one* task, from one start. By hand, for one tensor of three models:

# %%
from lecture_util.merging.soups import greedy_soup, soup

a, b, c = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 2.0]), torch.tensor([5.0, -1.0])
assert torch.equal(soup([a, b, c]), (a + b + c) / 3)
assert torch.equal(soup([a, b, c], [2, 1, 1]), (2 * a + b + c) / 4)
print("uniform", soup([a, b, c]).tolist(), "  weighted 2:1:1", soup([a, b, c], [2, 1, 1]).tolist())

# %% [markdown]
# Weights are *normalised*: divided by their sum. Whoever forgets that finds it strange that 0.1 and 1.0 of
# one model give back the model (arcee-ai/mergekit#214). Without it, weights that don't sum to 1 scale the
# whole model:

# %%
for normalize in (True, False):
    twice = soup([a, a], [0.1, 1.0], normalize=normalize)
    print(
        f"0.1 and 1.0 of one model, normalize={normalize!s:<5}: {(twice / a)[0]:.1f} times the model"
    )
assert torch.allclose(soup([a, a], [0.1, 1.0]), a)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Six variants of one model
#
# A fifth task, *smallest*, that the base has never seen. Few examples, one answer in five wrong, three
# learning rates, six seeds. The uniform soup takes all six. The **greedy** soup starts with the best on
# held-out data, and lets each next one in only if the soup does not get worse.

# %% tags=["nbval-ignore-output"]
mixing = predict(
    "Loss on fresh prompts: which is lowest?",
    choices=["the best of the six", "their ensemble", "their soup"],
)

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
lessons = few_examples("smallest", seed=0)
with one_thread():
    variants = [fine_tune(base, lessons, seed=seed, lr=lr, steps=80)
                for seed, lr in enumerate((1e-3, 2e-3, 4e-3, 1e-3, 2e-3, 4e-3))]  # fmt: skip
ingredients = [state(variant) for variant in variants]


def held_out(weights):
    """What the greedy soup goes by: higher is better. Other prompts than those we judge by."""
    return -evaluate(with_state(base, weights), "smallest", B=256, seed=5).loss


cooked = greedy_soup(ingredients, held_out)
print("tried, and the score of the soup with it:")
print(*(f"   {i}: {score:.4f}{'' if i in cooked.chosen else '  left out'}"
        for i, score in cooked.tried), sep="\n")  # fmt: skip

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
uniform = merge_states("linear", ingredients)
meals = {f"variant {i}": variant for i, variant in enumerate(variants)}
meals |= {"uniform soup": with_state(base, uniform), "greedy soup": with_state(base, cooked.state),
          "ensemble of all": ensemble(variants)}  # fmt: skip
lengths = (12, 18, 24)
losses = {name: [evaluate(meal, "smallest", T=T).loss for T in lengths]
          for name, meal in meals.items()}  # fmt: skip
print(f"{'loss with':<16}", *(f"{T} digits" for T in lengths))
for name, row in losses.items():
    print(f"{name:<16}", *(f"{loss:9.3f}" for loss in row))
for t in range(3):
    best = min(losses[f"variant {i}"][t] for i in range(6))
    assert losses["uniform soup"][t] < min(best, losses["ensemble of all"][t]) - 0.003

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
mixing.reveal("their soup")

# %% [markdown]
# **Read.** The soup beats each of its ingredients, and here even the ensemble, which takes six times as
# long. The same on prompts up to twice as long as any that these models were trained on. Greedy or uniform
# makes little difference as long as no ingredient is bad. One bad one is what greedy is for: it can't spoil
# the soup.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ![Points of loss, a panel for prompts of 12, 18, 24 digits, a point a seed: best of the single fine-tunes, their ensemble, uniform soup, greedy soup. Means of the seeds: best single 0.236, 0.224, 0.221; ensemble 0.222, 0.216, 0.215; uniform 0.204, 0.199, 0.200; greedy 0.196, 0.191, 0.194.](../images/soup-measured.svg)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ![Points, % right on shifted images against % right on ImageNet: 72 fine-tunes of CLIP ViT-B/32, scattered below and left of three others. Best single 80.39 and 47.97; uniform soup 79.97 and 51.58; greedy soup 81.03 and 50.86; ensemble 81.19 and 50.87. No fine-tune is above 80.39 on ImageNet or 50.67 shifted.](../images/soup-clip.svg)
#
# In the paper, with 72 fine-tunes of CLIP, the ensemble is a hair better than the greedy soup; the uniform
# soup, all variants in it, has the best mean under distribution shift. A rule of thumb: *a soup is nearly
# an ensemble, at one model's price, and it holds up well on data unlike the training data.*

# %% [markdown] slideshow={"slide_type": "subslide"}
# ![Bars of points gained by a greedy soup over its best single model. BERT: MRPC 0.0, RTE 0.7, CoLA 0.0, SST-2 0.5; T5: MRPC 0.6, RTE 0.8, CoLA 0.4, SST-2 0.1.](../images/soup-glue.svg)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Exercise 11.1: greedy soup
# *15 minutes · a loop that keeps only what helps, and a mean that stays a mean*
#
# `states` are fine-tunes as dicts from name to tensor, `score(state)` says how good such a dict is on
# held-out data, higher is better. The best model goes in first. The others follow, best first (of two that
# are equally good the earlier in the list): each joins if the *mean of all members and the newcomer* scores
# **at least as well** as the soup so far, as in the paper; a tie lets it in. Whoever is refused leaves no
# trace, and the next one is tried. Return the soup and the list of its members, in the order in which they
# joined.


# %% slideshow={"slide_type": "skip"}
def greedy(states, score):
    """-> (state, members): a dict like those in `states`, and a list of indices into `states`."""
    ### BEGIN SOLUTION
    alone = [score(state) for state in states]
    order = sorted(range(len(states)), key=lambda i: alone[i], reverse=True)
    members, best = order[:1], alone[order[0]]
    soup = states[order[0]]
    for i in order[1:]:
        bowl = [states[j] for j in (*members, i)]
        mixed = {name: sum(state[name] for state in bowl) / len(bowl) for name in soup}
        reached = score(mixed)
        if reached >= best:
            members, soup, best = [*members, i], mixed, reached
    return soup, members
    ### END SOLUTION


# %% slideshow={"slide_type": "skip"}
check("11.1", greedy)

# %% [markdown]
# Stuck? Each call opens one more hint.

# %% slideshow={"slide_type": "skip"}
hint("11.1")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 3. Along the arc
#
# SLERP, *spherical linear interpolation*, comes from computer graphics: to turn a camera smoothly from one
# orientation to another, one goes along the circle, at constant speed (Shoemake 1985). People use it to
# merge *two* models; $t$ says which of them to favour.
#
# Derive it. The two vectors span a plane. Lay the first along its first axis, both of length 1, at an angle
# $a$. We want the vector at the angle $ta$, as $s_0 v_0 + s_1 v_1$:

# %%
s0, s1 = sympy.symbols("s0 s1")
a, t = sympy.symbols("a t", positive=True)
v0, v1 = sympy.Matrix([1, 0]), sympy.Matrix([sympy.cos(a), sympy.sin(a)])
wanted = sympy.Matrix([sympy.cos(t * a), sympy.sin(t * a)])
solved = sympy.solve(s0 * v0 + s1 * v1 - wanted, [s0, s1])
assert sympy.simplify(solved[s1] - sympy.sin(t * a) / sympy.sin(a)) == 0
assert sympy.simplify(solved[s0] - sympy.sin((1 - t) * a) / sympy.sin(a)) == 0
length = (solved[s0] * v0 + solved[s1] * v1).norm()
print("s0 = sin((1-t) a)/sin(a),  s1 = sin(t a)/sin(a),  length", sympy.simplify(length**2))
print("as a -> 0:  s1 ->", sympy.limit(solved[s1], a, 0))

# %% [markdown] slideshow={"slide_type": "subslide"}
# The straight way, LERP, cuts across the circle. At $t = \tfrac12$ its length is

# %%
middle = ((v0 + v1) / 2).norm()
print("|lerp| at the middle, squared:", sympy.simplify(middle**2))
assert sympy.simplify(middle**2 - sympy.cos(a / 2) ** 2) == 0
for degrees in (10, 60, 90, 120):
    print(f"   {degrees:>3} degrees: cos(a/2) = {math.cos(math.radians(degrees / 2)):.3f}")
del a, t, s0, s1, v0, v1

# %% [markdown] slideshow={"slide_type": "subslide"}
# ![Left, a unit circle with two arrows 120 degrees apart: SLERP's points at t = 0, ¼, ½, ¾, 1 lie on the arc, 30 degrees from each to the next; LERP's lie on the chord below it. Right, length against t: along the arc 1 throughout; along the chord it sinks, halfway, for an angle of 5 degrees 0.999; 60 degrees 0.866; 120 degrees 0.500.](../images/slerp-path.svg)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### On weights
#
# A tensor is taken as one long vector. The angle is that of the directions; the factors multiply the
# tensors as they are.
#
# > **Erratum.** "SLERP preserves the magnitude of the weights" (and the "curvature" of their space). It
# > does if both have the same. Else the length goes from the one's to the other's, and on the way it can be
# > longer than both or shorter:

# %%
from lecture_util.merging.slerp import angle, lerp, slerp

long = torch.tensor([3.0, 0.0])
print("lengths at t =               0, .25, .5, .75, .95, 1")
for name, radians in (("right angle", math.pi / 2), ("160 degrees", 2.8)):
    short = torch.tensor([math.cos(radians), math.sin(radians)])
    on_the_way = [slerp(long, short, t).norm().item() for t in (0, 0.25, 0.5, 0.75, 0.95, 1)]
    print(f"{name}, lengths 3 and 1:", [round(x, 2) for x in on_the_way])

# %% [markdown] slideshow={"slide_type": "subslide"}
# Three pairs have no arc. *Parallel* vectors: $\sin a = 0$, and the limit is LERP, as above. *Opposite*
# ones: all arcs are equally good, so none is; go straight. And a *zero* vector has no direction:

# %%
v, zero = torch.tensor([0.0, 2.0]), torch.zeros(2)
print("half way from zero to |v| = 2: ", slerp(zero, v, 0.5).norm().item(),
      f"  as mergekit: {slerp(zero, v, 0.5, nearly='lerp').norm().item():.3f}")  # fmt: skip
assert torch.equal(slerp(v, -v, 0.25), lerp(v, -v, 0.25))

# %% [markdown]
# (The tool takes the angle to a zero vector for a right angle, and $\sin 45° = 0.707$. It also goes
# straight within 1.8° of parallel; ours within a millionth. `convention: mergekit` does as the tool does.)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Does it matter?
#
# That is a question about angles: how large is the one between two *real* fine-tunes? Take our reference
# model, SmolLM2-135M, and three small fine-tunes of it (low-rank adapters, section 9, added to its
# weights):

# %% tags=["nbval-ignore-output"]
from lecture_util.classroom.widgets import slerp_against_lerp
from lecture_util.merging.adapters import fine_tuned, load_adapter
from lecture_util.merging.real_tasks import TASKS, examples
from lecture_util.model.weights import REFERENCE, load, load_tokenizer

model, tokenizer = load(REFERENCE), load_tokenizer(REFERENCE)
specialists = {name: fine_tuned(model, load_adapter(name)) for name in TASKS}

# %% slideshow={"slide_type": "subslide"}
for name in TASKS:
    prompt, answer = examples(name, 1, seed=2)[0]
    print(f"{name}: {prompt!r} -> {answer!r}")

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
widest = predict("The largest angle between a tensor of two of these fine-tunes?", unit="degrees")

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
w0, w1 = (specialists[name].blocks[0].out.weight for name in ("facts", "record"))
slerp_against_lerp(0.5, degrees=120, fine_tunes=math.degrees(angle(w0, w1)))

# %% [markdown] slideshow={"slide_type": "notes"}
# *For the instructor.* Drag the angle to 180 and back: near 180 degrees the arc swings out to a place far
# from both. Then press "two real fine-tunes". The two curves become one, which is the next slide.

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
LAYERS = ("blocks.0.", "blocks.10.", "blocks.20.")  # three of 30 are enough to see


def some(model):
    return {name: w for name, w in model.state_dict().items() if name.startswith(LAYERS)}


parts = {name: some(each) for name, each in specialists.items()}
degrees = {(one, other, name): math.degrees(angle(parts[one][name], parts[other][name]))
           for one, other in combinations(TASKS, 2) for name in parts[one]}  # fmt: skip

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
one, other, name = max(degrees, key=degrees.get)
most = degrees[one, other, name]
curved, straight = (way(parts[one][name], parts[other][name], 0.5) for way in (slerp, lerp))
difference = ((curved - straight).norm() / curved.norm()).item()
print(f"of all three pairs, at most {most:.2f} degrees ({one} and {other}, {name})")
print(f"there SLERP and LERP differ by {difference:.1e}")
assert most < 10 and difference < 0.005
widest.reveal(most)

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Read.** A base's weights are long, and what a fine-tune adds is short. From the origin, where SLERP
# measures its angle, all fine-tunes of one base lie in nearly the same direction, and the arc *is* the
# chord. The angle that is large lies between what each *added*. There the mean does lose length, and that
# is the next section.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Exercise 11.2: along the arc
# *12 minutes · a formula, and the three places where it has no answer*
#
# The whole tensor is one vector, whatever its shape. With $a$ the angle between the two,
# $\frac{\sin((1-t)a)}{\sin a} v_0 + \frac{\sin(ta)}{\sin a} v_1$: the angle is one of *directions*, but the
# factors multiply the vectors as they are, of whatever length. Three pairs have no arc: parallel vectors,
# opposite ones (every arc between them is as good as another), and a zero vector with anything. Go straight
# there, $(1-t)v_0 + tv_1$, and *only* there: up to an angle of $10^{-6}$ from 0 or $\pi$. (A cosine can
# round to a little more than 1.)


# %% slideshow={"slide_type": "skip"}
def arc(v0, v1, t):
    """v0, v1: two tensors of one shape, fp64; t from 0 to 1. -> a tensor of that shape."""
    ### BEGIN SOLUTION
    lengths = v0.norm() * v1.norm()
    if lengths == 0:
        return (1 - t) * v0 + t * v1
    a = math.acos(max(-1.0, min(1.0, ((v0 * v1).sum() / lengths).item())))
    if min(a, math.pi - a) < 1e-6:
        return (1 - t) * v0 + t * v1
    return (math.sin((1 - t) * a) * v0 + math.sin(t * a) * v1) / math.sin(a)
    ### END SOLUTION


# %% slideshow={"slide_type": "skip"}
check("11.2", arc)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 4. Task arithmetic
#
# Subtract the base from a fine-tune, and what is left is all that the training did: a **task vector**, one
# number for each weight (Ilharco et al. 2022). It is an arrow from the base. Arrows can be added, turned
# around and scaled.
#
# ![Three sketches of a plane of weights, a base in each. Add: from the base an arrow a leads to fine-tune A and an arrow b, at nearly a right angle, to fine-tune B; base plus a plus b is the opposite corner. Negate: base minus a lies as far on the other side, and A's skill is less. Scale: on the line of the sum lie base plus λ times a plus b for λ = 0.25, 0.5, 0.75, 1.](../images/task-vectors.svg)

# %% slideshow={"slide_type": "subslide"}
from lecture_util.merging.task_vectors import cosines, task_arithmetic, task_vector

w, w1, w2 = torch.tensor([1.0, 1.0]), torch.tensor([1.5, 1.0]), torch.tensor([1.0, 0.0])
both = w + (w1 - w) + (w2 - w)
assert torch.equal(task_arithmetic(w, [w1, w2]), both)
assert torch.equal(task_arithmetic(w, [w1, w2], [0.5, 0.5]), soup([w1, w2]))
print("both skills:", both.tolist(), "  half of each is the uniform soup:", soup([w1, w2]).tolist())
print("forget the first:", task_arithmetic(w, [w1], [-1.0]).tolist())

# %% [markdown]
# One formula: $w + \lambda \sum_i w_i \tau_i$, with $\tau_i$ the task vectors. With $\lambda = 1/N$ it is
# the soup. So what is new is the freedom: a scale $\lambda$ above $1/N$, weights, and minus signs.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Four specialists
#
# Back to the tiny world. The base knows the four tasks, some better than others. Fine-tune it on *one*
# of them, four times:

# %% tags=["nbval-ignore-output"]
with one_thread():
    tuned = {name: fine_tune(base, name) for name in PRACTISED}


def show(label, model):
    """A row of accuracies, and the mean loss."""
    scores = [evaluate(model, name) for name in PRACTISED]
    loss = sum(score.loss for score in scores) / 4
    print(f"{label:<22}", *(f"{score.accuracy:8.2f}" for score in scores), f"{loss:9.3f}")
    return loss, [score.accuracy for score in scores]


# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
print(f"{'share of right answers':<22}", *(f"{name:>8}" for name in PRACTISED), "mean loss")
rows = {"base": show("base", base)}
rows |= {name: show(f"fine-tuned: {name}", model) for name, model in tuned.items()}
assert all(rows[name][1][i] > 0.95 for i, name in enumerate(PRACTISED))
assert all(rows[name][1][i] < rows["base"][1][i] - 0.1
           for name in PRACTISED[:3] for i in range(4) if PRACTISED[i] != name)  # fmt: skip

# %% [markdown] slideshow={"slide_type": "subslide"}
# Each is all but perfect at its own, and three of the four are far worse at the others than the base was:
# fine-tuning on one thing forgets the rest. (*first* is the exception: it loses on *sum* alone.) Now their
# sum, at four scales, a tenth to the whole. Which will be best?

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
start, states = state(base), {name: state(model) for name, model in tuned.items()}


def merged(method, **settings):
    return with_state(base, merge_states(method, list(states.values()), start, **settings))


print(f"{'share of right answers':<22}", *(f"{name:>8}" for name in PRACTISED), "mean loss")
for scale in (0.1, 0.25, 0.4, 1.0):
    rows[scale] = show(f"base + {scale:4} * sum", merged("task_arithmetic", scale=scale))
assert rows[0.4][0] < min(rows[0.1][0], rows[1.0][0], rows["base"][0])
assert rows[0.25][0] < min(rows[name][0] for name in PRACTISED)

# %% [markdown]
# **Read.** One model is better *on average over the four* than any of its parents, without a step of
# training. Too little of the sum, and it is the base; too much, and it overshoots. The best scale lies
# between, and *where* can't be derived: it takes held-out data. With one weight for each task it is a
# search in as many dimensions, and that search is the real cost of merging.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ![Left, loss against λ, a line a seed, from 0.1 to 1: each falls, then rises; least at 0.6, 0.4, 0.4. Right, a table: the task whose vector is added −0.5 times, and the change of accuracy in points on previous, largest, sum, first. previous: −48, −4, −8, −21; largest: −5, −53, −3, −15; sum: −6, +3, −37, −5; first: −25, −9, −8, −26.](../images/task-scales.svg)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Why arrows can be added
#
# Look at the arrows themselves, in the tiny world and in the real one (the same three layers): how long
# they are against the base, and the angles between them. In a space of so many dimensions two arbitrary
# directions stand at a right angle.


# %% tags=["nbval-ignore-output"]
def arrows(start, ends):
    vectors = [{name: task_vector(start[name], end[name]) for name in start} for end in ends]
    sizes = [math.sqrt(sum(x.square().sum().item() for x in v.values())) for v in (start, *vectors)]
    return cosines(vectors), [size / sizes[0] for size in sizes[1:]]


worlds = {"tiny": (start, list(states.values())),
          "SmolLM2-135M": (some(model), [some(each) for each in specialists.values()])}  # fmt: skip
for world, (origin, ends) in worlds.items():
    cosines_NN, sizes = arrows(origin, ends)
    between = cosines_NN[~torch.eye(len(ends), dtype=torch.bool)]
    print(f"{world:<13} lengths {', '.join(f'{size:.1%}' for size in sizes)} of the base's; "
          f"cosines {between.min():.2f} to {between.max():.2f}")  # fmt: skip
    assert max(sizes) < 0.1 and between.abs().max() < 0.5

# %% [markdown] slideshow={"slide_type": "subslide"}
# Short, and nearly at right angles. So adding one hardly changes how far we have gone in the direction of
# another. The mean of $N$ such arrows is shorter than each by $\sqrt N$; that is the length that averaging
# loses, and a $\lambda > 1/N$ gives back. (Ilharco et al., on CLIP: pairs added keep 98.9 % of the
# specialists' accuracy, eight tasks 91.2 %; cosines mostly 0.01 to 0.06. And a fine-tuned T5-base gains
# half a point on GLUE, 78.1 to 78.6, from the vectors of other people's models.)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ![Two panels, as published. Left, bars: CLIP with task vectors added: accuracy in % of that of the fine-tunes, each on its own task: 2 added (mean of pairs) 98.9; 8 added 91.2; a line at 100. Right, two points: T5-base, mean score on GLUE: fine-tuned 78.1; and others' vectors 78.6.](../images/vectors-added.svg)

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
two = [
    task_vector(start["blocks.0.down.weight"], states[n]["blocks.0.down.weight"])
    for n in ("sum", "first")
]
curved = slerp(*two, 0.5)
factor = (curved.norm() / (two[0] + two[1]).norm()).item()
print(
    f"{math.degrees(angle(*two)):.0f} degrees apart; SLERP of the arrows is {factor:.2f} times their sum"
)
print(f"(LERP: 0.50 times; at a right angle SLERP: {1 / math.sqrt(2):.2f})")

# %% [markdown]
# That is where SLERP does something: between *arrows* it is task arithmetic with a scale near 0.7 in place
# of the mean's 0.5.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Forgetting
#
# A minus sign takes a skill away. Half of the arrow of *first*, backwards:

# %% tags=["nbval-ignore-output"]
forgot = with_state(base, merge_states("task_arithmetic", [states["first"]], start, weight=-0.5))
print(f"{'share of right answers':<22}", *(f"{name:>8}" for name in PRACTISED), "mean loss")
show("base", base)
_, after = show("base - 0.5 * first", forgot)
before = rows["base"][1]
assert after[3] < before[3] - 0.1 and after[0] < before[0] - 0.1

# %% [markdown]
# *first* falls, as ordered. But *previous* falls with it: nothing says that an arrow holds one skill and
# nothing else. Whoever negates a task vector, to make a model forget something, must measure everything
# else as well.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Add wide, round once
#
# Checkpoints come in bf16, with 8 significant bits: between 1 and 2 the next number is $2^{-7}$ away. Add
# four arrows of 0.003 one after the other in bf16, and each sum rounds back to where it was:

# %%
base_16 = torch.tensor(1.0, dtype=torch.bfloat16)
narrow = base_16.clone()
for _ in range(4):
    narrow = narrow + torch.tensor(0.003, dtype=torch.bfloat16)
wide = (base_16.float() + 4 * 0.003).to(torch.bfloat16)
print("four times 0.003 in bf16:", narrow.item(), "  in fp32, rounded once:", wide.item())
assert narrow == base_16 and wide > base_16

# %% [markdown]
# So all our methods compute in fp32, whatever the files hold, and round once, at the end.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 5. Where tasks disagree: TIES
#
# Arrows that are nearly at right angles still meet, weight by weight. One task wants a weight up, another
# wants it down, and their sum does neither. In our tiny world: of the weights that some task changes, how
# many does another pull the other way?

# %% tags=["nbval-ignore-output"]
quarrels = predict("Four arrows: share of weights that some raise and others lower", unit="%")

# %% [markdown]
# If signs were coin tosses: all four agree with probability $2 \cdot (\tfrac12)^4 = \tfrac18$.

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
from lecture_util.merging.ties import sign_conflicts, ties

deltas = {name: torch.cat([task_vector(start[key], weights[key]).flatten() for key in start])
          for name, weights in states.items()}  # fmt: skip
share = sign_conflicts(list(deltas.values()))
magnitude = deltas["sum"].abs().sort(descending=True).values
fifth = magnitude[: len(magnitude) // 5].square().sum() / magnitude.square().sum()
print(f"the largest fifth of 'sum' makes up {fifth:.0%} of its squared length")
quarrels.reveal(100 * share, predicted=100 * 7 / 8)
assert 0.75 < share < 0.95 and fifth > 0.4

# %% [markdown]
# Two kinds of **interference**, then. Most entries of an arrow are small and matter little (*redundant*),
# yet in the sum they water down what another task needs. And where two large ones point in opposite
# directions, they cancel.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Trim, elect, merge
#
# TIES (Yadav et al. 2023) answers with three steps.
#
# 1. **Trim.** Of each arrow keep the share `density` with the largest magnitudes (20 % in the paper); the
#    rest is 0.
# 2. **Elect a sign** for each weight: that of the *sum*. So magnitudes vote, not heads; the larger movement
#    wins.
# 3. **Merge.** Average the values that have the elected sign, and only those. The mean of what agrees,
#    added to the base with a scale $\lambda$.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ![Three panels of three task vectors of six numbers. Trim: the three largest of each stay. Elect: what stays is added up, the sums' signs are + − + − + +; the last column is empty and takes the majority's. Merge: the mean of the numbers with the elected sign, +.9, −.6, +.65, −.65, +.8, 0. The plain mean of all: +.17, +.03, +.5, −.37, +.07, 0.](../images/ties-steps.svg)


# %% slideshow={"slide_type": "subslide"}
def ties_by_hand(deltas, density):
    """A row a model. -> what is added to the base."""
    kept = max(1, int(density * deltas.shape[1]))
    least = deltas.abs().topk(kept, dim=1).values[:, -1:]  # @inspect least
    trimmed = torch.where(deltas.abs() >= least, deltas, 0)  # @inspect trimmed
    total = trimmed.sum(0)  # @inspect total
    signs = total.sign()
    signs[signs == 0] = 1 if signs.sum() > 0 else -1  # @inspect signs
    agrees = trimmed.sign() == signs  # @inspect agrees
    mean = (trimmed * agrees).sum(0) / agrees.sum(0).clamp(min=1)  # @inspect mean
    return mean


# %%
three = torch.tensor(
    [[4.0, -1, 0.5, 3, -2, 0.2], [-3, -2, 0.1, 1, 4, 0.3], [2, 0.4, -5, 2, 1, -0.1]]
)
by_hand = ties_by_hand(three, density=0.5)
assert torch.equal(by_hand, ties(torch.zeros(6), list(three), density=0.5))
print(
    "added to the base:",
    by_hand.tolist(),
    "  plain mean:",
    [round(x, 2) for x in three.mean(0).tolist()],
)

# %% tags=["nbval-ignore-output", "hide-input"] slideshow={"slide_type": "subslide"}
step(ties_by_hand, three, 0.5)

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
from lecture_util.classroom.widgets import ties_step_by_step

ties_step_by_step()

# %% [markdown] slideshow={"slide_type": "notes"}
# *For the instructor.* Let the room call the elected signs before each step. The question to ask at the
# end: by what is the first weight's mean divided? By how many agree, not by three; that is also the most
# common mistake.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Exercise 11.3: elect, then merge
# *12 minutes · who votes, who is heard, and who is divided by*
#
# `trimmed` are task vectors after the trim: tensors of one shape, most entries 0. Write the two steps that
# are left. **Elect**: each entry's sign is that of the *sum* over the models. Where the sum is exactly 0,
# it is the sign that most elected entries of the tensor have. **Merge**: the mean of those values that have
# the elected sign, and of no others; where no model has one, 0. (In the tensors here that majority is never
# a draw.)


# %% slideshow={"slide_type": "skip"}
def elect_and_merge(trimmed):
    """trimmed: a list of tensors of one shape. -> one tensor of that shape."""
    ### BEGIN SOLUTION
    stacked = torch.stack(trimmed)
    signs = stacked.sum(0).sign()
    signs = torch.where(signs == 0, signs.sum().sign(), signs)
    agrees = stacked.sign() == signs
    return (stacked * agrees).sum(0) / agrees.sum(0).clamp(min=1)
    ### END SOLUTION


# %% slideshow={"slide_type": "skip"}
check("11.3", elect_and_merge)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### What the paper doesn't say in its formula
#
# The largest 20 %: of the whole model, or of each tensor? And which sign, where the sum is exactly 0? The
# authors rank the whole model and ask the majority; `mergekit` ranks each tensor and takes plus. Same
# method, same density:

# %%
zero = {"a": torch.zeros(4), "b": torch.zeros(4)}
tune = {"a": torch.tensor([9.0, 8, 7, 6]), "b": torch.tensor([4.0, 3, 2, 1])}
for convention in ("paper", "mergekit"):
    result = merge_states("ties", [tune], zero, density=0.5, convention=convention)
    print(f"{convention:<9}", {name: tensor.tolist() for name, tensor in result.items()})
up, down = torch.tensor([2.0, -3, -1]), torch.tensor([-2.0, -3, -1])
signs = {rule: ties(torch.zeros(3), [up, down], density=1, zero_sign=rule).tolist()
         for rule in ("majority", "positive")}  # fmt: skip
print("2 against -2:", signs)
assert signs["majority"][0] == -2 and signs["positive"][0] == 2

# %% [markdown]
# (A weight that no model changes has a sum of 0 too, but nothing to average. So the rule only decides real
# ties.)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Does it help?
#
# In the paper it does. On eight image tasks:
#
# ![Bars of % right, mean of eight image tasks with CLIP's ViT-B/32. before fine-tuning 48.0; averaged 65.8; task arithmetic 69.1; TIES 72.4; 8 fine-tunes, each on its task 90.5.](../images/ties-published.svg)

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
print(f"{'share of right answers':<22}", *(f"{name:>8}" for name in PRACTISED), "mean loss")
rows["ties"] = {density: show(f"TIES, density {density}", merged("ties", density=density, scale=0.8))[0]
                for density in (0.2, 0.7, 1.0)}  # fmt: skip
show("base + 0.4 * sum", merged("task_arithmetic", scale=0.4))
assert rows["ties"][0.7] < rows["ties"][0.2]

# %% [markdown]
# **Read.** In our tiny world it does not beat the plain sum with a scale that fits, and the paper's
# density of 0.2 is too low here, at whatever scale; perhaps because a model with so few weights has few
# to spare. Remember that before you believe a leaderboard of merging methods, ours included. What carries
# over is the question, *which entries carry the skill, and which are in the way?* (The real model, in
# section 9, has a thousand times as many weights.)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 6. Drop almost everything: DARE
#
# How redundant are the entries of a task vector? DARE (*drop and rescale*; Yu et al. 2023) doesn't even ask
# which. It drops each with probability $p$, *at random*, and multiplies what is left by $\frac{1}{1-p}$.
# Papers speak of the drop rate $p$, recipes of the density $1-p$. (Somebody once took the one for the
# other: arcee-ai/mergekit#8.)
#
# Why that factor? An entry $d$ becomes $d/q$ with probability $q = 1-p$, else 0. Its mean over many draws:

# %%
d, q = sympy.symbols("d q", positive=True)
outcomes = [(d / q, q), (sympy.Integer(0), 1 - q)]
mean = sympy.simplify(sum(value * chance for value, chance in outcomes))
print("mean:", mean)
assert mean == d
del d, q, mean

# %% [markdown]
# So on average nothing changes. A layer adds up thousands of such entries, and errors in all directions
# mostly cancel in a sum. How large is each entry's error?

# %% tags=["nbval-ignore-output"]
noise = predict("Keep 10%: the standard deviation of an entry, in multiples of the entry")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Exercise 11.4: three mistakes in DARE
# *12 minutes · reading code with the formula in mind; a variance*
#
# `density` is the share to *keep*. `uniform` has one number from [0, 1) for each entry: an entry stays
# where it is below the density. What stays is scaled up such that over many draws the mean is `delta`
# again. The second result is each entry's variance over these draws. Two of the three mistakes stood in
# well-known libraries (arcee-ai/mergekit#8, huggingface/peft#3152):
#
# ```python
# def dare(delta, density, uniform):
#     kept = uniform < 1 - density
#     thin = delta * kept
#     thin.div(density)
#     variance = density * (1 - density) * delta**2
#     return thin, variance
# ```
#
# Write it right.


# %% slideshow={"slide_type": "skip"}
def dare(delta, density, uniform):
    """-> (thin, variance), two tensors of delta's shape. density: above 0, at most 1."""
    ### BEGIN SOLUTION
    kept = uniform < density
    thin = delta * kept / density
    variance = (1 - density) / density * delta**2
    return thin, variance
    ### END SOLUTION


# %% slideshow={"slide_type": "skip"}
check("11.4", dare)

# %% slideshow={"slide_type": "subslide"}
from lecture_util.merging.sparsify import drop

d, q = sympy.symbols("d q", positive=True)  # the same symbols
variance = sympy.factor(sum(value**2 * chance for value, chance in outcomes) - d**2)
print("variance:", variance)
draw = torch.Generator().manual_seed(0)
draws = torch.stack([drop(torch.ones(64, dtype=torch.float64), 0.1, draw) for _ in range(4000)])
spread = float(sympy.sqrt(variance.subs({d: 1, q: sympy.Rational(1, 10)})))
print(
    f"keep 10% of ones: mean {draws.mean():.1f}, deviation {draws.std():.1f}, predicted {spread:.1f}"
)
assert abs(draws.mean() - 1) < 0.05 and abs(draws.std() - spread) < 0.1
del d, q

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
noise.reveal(draws.std().item(), predicted=spread)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ![Left, 48 numbers of a task vector as bars, and thinned out at random, what stays enlarged by one over the share kept: 50% dropped, × 2: 20 left; 90% dropped, × 10: 4 left; the mean of 1,000 draws at 90% looks like the task vector again. Right, published GSM8K, % right: WizardLM 2.2, WizardMath 64.2, merged, DARE 66.3.](../images/dare-kept.svg)
#
# The variance is $d^2\frac{1-q}{q} = d^2\frac{p}{1-p}$. At $p=0.9$ each entry is off by three times
# itself, and still single fine-tunes work: 90, even 99 % can go, and the more the larger the model, says
# the paper. For merging the authors drop less (0.2 in their example script): WizardLM merged with
# WizardMath goes from 2.2 to 66.3 on GSM8K, where WizardMath alone has 64.2. What was dropped need not be
# stored either, so a fine-tune can be kept as a small file beside its base.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### How low can one go here?
#
# The tiny sum at its scale of 0.4, thinned out more and more:

# %% tags=["nbval-ignore-output"]
thin_loss = {}
print(f"{'share of right answers':<22}", *(f"{name:>8}" for name in PRACTISED), "mean loss")
for density in (1, 0.5, 0.1, 0.02):
    thin_loss[density] = show(f"keep {density:4.0%}, then sum",
                              merged("dare_linear", density=float(density), scale=0.4))[0]  # fmt: skip
assert thin_loss[0.02] > thin_loss[0.5] + 0.05

# %% [markdown]
# **Read.** Half of all entries can go, and hardly anything happens. At 2 % it is another model. Nothing is
# *gained* by dropping, here: DARE makes room, for other arrows or on disk; it does not sharpen.
# (With elected signs, `dare_ties`, the mean is over those that agree. At 2 % survivors hardly ever meet, so
# it divides by one: it is the plain sum, and a $\lambda$ of 1, right at high densities, is far too much
# there. At 0.4 both lose the same. A density and a scale can only be chosen together.)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ![Loss, logarithmic, against the density kept, logarithmic; the base has 0.73. The sparsest and densest of each method, at its own scale: TIES (λ 0.8) 0.68 at 0.02, 0.43 at 1; DARE (λ 0.4) 0.67 at 0.02, 0.40 at 1; DARE with signs (λ 1) 2.31 at 0.02, 0.41 at 1; Breadcrumbs (λ 0.4) 0.71 at 0.02, 0.40 at 1; DELLA (λ 1) 2.07 at 0.02, 0.41 at 1.](../images/merge-densities.svg)

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
from lecture_util.classroom.widgets import density_sliders


def all_scores(weights):
    return {name: evaluate(with_state(base, weights), name, B=64) for name in PRACTISED}


# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
density_sliders(states, start, all_scores)

# %% [markdown] slideshow={"slide_type": "subslide"}
# > **Erratum.** "Rescale" is not one thing. The paper's is $1/(1-p)$, whatever was dropped. `mergekit`
# > instead restores the sum of magnitudes. A task vector with one outlier shows the difference. Drop it,
# > and

# %%
outlier = torch.cat((torch.tensor([100.0]), torch.full((999,), 0.01)))
for rescale in ("inverse", "l1"):
    for seed in range(50):  # the first draw in which the outlier goes
        thin = drop(outlier, 0.1, torch.Generator().manual_seed(seed), rescale=rescale)
        if thin[0] == 0:
            break
    print(f"{rescale:<8} survivors are enlarged {thin.max() / 0.01:,.0f} times")
    assert thin.max() / 0.01 > 90 if rescale == "l1" else abs(thin.max() / 0.01 - 10) < 0.01

# %% [markdown]
# The second has no such mean: it makes up for the outlier with a hundred innocent entries. Our default is
# the paper's.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 7. Which entries? Breadcrumbs and DELLA
#
# Between "the largest" (TIES) and "any" (DARE) there is more to try.
#
# **Model Breadcrumbs** (Davari and Belilovsky 2023) cut at *both* ends: the smallest are noise, and the
# very largest, outliers, are one task's own and disturb the others. What is masked takes the base's
# value. The rest is summed, with a scale, as in task arithmetic; electing signs first is optional
# (`breadcrumbs_ties`). The authors report that the settings found for 10 tasks still work for 200, where
# plain sums fall behind.
#
# ![Histogram of 4,000 magnitudes, many small and few large, count logarithmic. Cut: the 3,360 smallest, below 1.83 times the mean, and the 40 largest, above 4.59 times the mean. Kept between the two: 600, or 15%.](../images/breadcrumbs.svg)

# %% [markdown] slideshow={"slide_type": "subslide"}
# (In the paper $\beta$ is the share cut below, $\gamma$ above; ours takes `density` $= 1 - \beta - \gamma$
# and `gamma`.)

# %%
from lecture_util.merging.sparsify import breadcrumbs, keep_probabilities, magprune

row = torch.tensor([0.1, -9.0, 0.2, 3.0, -0.3, 2.0, 1.0, -0.4, 0.5, 0.6])
crumbs = breadcrumbs(row, density=0.5, gamma=0.1)
print("kept:", [round(x, 1) or 0 for x in crumbs.tolist()])
assert crumbs[1] == 0 and crumbs[0] == 0 and (crumbs != 0).sum() == 5

# %% [markdown] slideshow={"slide_type": "subslide"}
# **DELLA** (Deep et al. 2024) keeps DARE's dice, and loads them. Three steps:
#
# 1. **Drop** (MagPrune): within each row rank the magnitudes. The smallest is kept with probability
#    $q-\epsilon$, the largest with $q+\epsilon$, evenly spaced in between. Each survivor is divided by *its
#    own* probability, so the mean stays.
# 2. **Elect** signs, as TIES does (optional: `della_linear`).
# 3. **Fuse**: average what was elected, add it to the base with a scale.
#
# ![Left, the chance to be kept against rank by magnitude, at density 0.3: DARE level at 0.3; TIES 0 and, for the largest 30%, 1; DELLA rising evenly from 0.1 to 0.5. Right, what a kept entry is multiplied by: DARE 3.33; TIES 1; DELLA from 10 for the smallest down to 2 for the largest.](../images/magprune.svg)

# %% [markdown] slideshow={"slide_type": "subslide"}
# > **Erratum.** "The drop probability is inversely proportional to the magnitude." It is linear in the
# > *rank*. (The paper's $\epsilon$ is the whole window, twice ours.)

# %%
row = torch.tensor([[0.5, -3.0, 1.0, 0.1, 2.0]], dtype=torch.float64)
chances = keep_probabilities(row, density=0.5, epsilon=0.2)
print("kept with probability", [round(x, 1) for x in chances[0].tolist()])
draw = torch.Generator().manual_seed(0)
many = torch.stack([magprune(row, 0.5, 0.2, draw) for _ in range(20_000)]).mean(0)
print("mean over 20,000 draws is the row:", torch.allclose(many, row, atol=0.1))

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### All of them, on all tasks
#
# One seed, live. (Model Stock is the next section.)

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
contest = {
    "uniform soup": merged("task_arithmetic", scale=0.25),
    "task arithmetic 0.4": merged("task_arithmetic", scale=0.4),
    "TIES": merged("ties", density=0.7, scale=0.8),
    "DARE": merged("dare_linear", density=0.5, scale=0.4),
    "DARE + TIES": merged("dare_ties", density=0.5, scale=1.0),
    "Breadcrumbs": merged("breadcrumbs", density=0.9, scale=0.4),
    "DELLA": merged("della", density=0.5, scale=1.0),
    "Model Stock": merged("model_stock"),
    "ensemble": ensemble(list(tuned.values())),
}

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
with one_thread():
    contest["trained on all four"] = fine_tune(base, PRACTISED, steps=160)
print(f"{'share of right answers':<22}", *(f"{name:>8}" for name in PRACTISED), "mean loss")
final = {name: show(name, contestant)[0] for name, contestant in contest.items()}
assert final["trained on all four"] < 0.5 * final["task arithmetic 0.4"]
assert final["uniform soup"] < final["ensemble"] < final["Model Stock"] == max(final.values())
assert final["Model Stock"] < rows["base"][0]

# %% [markdown] slideshow={"slide_type": "subslide"}
# ![Table of accuracy, a row a model, a column for each of 4 tasks and their mean, mean of the seeds. Means: base 0.76; ensemble 0.89; multitask 1.00; best single fine-tune first 0.83; 11 merges from 0.89 (uniform soup) to 0.74 (task arithmetic, λ 1).](../images/merge-table.svg)

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Read**, with three seeds in mind.
#
# - In loss, every merge of the live table beats the base, and the plain soup every single fine-tune and the
#   ensemble too (in accuracy soup and ensemble are level). In the recorded table the whole sum, $\lambda =
#   1$, is worse than the base.
# - Nothing beats plain task arithmetic by more than a hair. (Only its scale was searched for; the others
#   have its scale, or a round number.) DARE and Breadcrumbs, thinned out a little, equal it; TIES and
#   DELLA come near with one seed and fall behind with another.
# - Nothing comes near training on all four tasks at once. Merging is for those who have the models, and not
#   the data.
#
# Authors usually report that their method beats those before it; DELLA's, for example, on larger models,
# by 2.4 points on average over baselines that prune, by 3.6 over TIES, 1.2 over DARE, 11.1 over task
# arithmetic (their README). Believe neither them nor us for *your* models: a merge takes a minute, and
# measuring it an hour. Try three.

# %% [markdown] slideshow={"slide_type": "notes"}
# *For the instructor.* Ask who would publish the table on the last slide. It is the honest part of the
# lecture: each new method is compared with older ones at settings of somebody's choosing, and the setting
# that matters most, the scale, is one number.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 8. How far to go? Model Stock
#
# Soups work better the more models are in them. Training dozens is what one wanted to avoid. Jang et al.
# 2024 looked at where fine-tunes of *one* task lie, tensor by tensor, and found something odd: seen from
# the base they are all equally far away, and each two at the same angle. They lie on a **thin shell**. Our
# four runs of section 1:

# %% tags=["nbval-ignore-output"]
from lecture_util.merging.landscape import shell

for name, s in shell(start, [state(run) for run in runs]).items():
    if start[name].ndim == 2:
        print(f"{name:<24} distance {s.distance:5.2f} ± {s.distance_std / s.distance:4.1%}   "
              f"angle {s.degrees:4.1f} ± {s.degrees_std:.1f} degrees")  # fmt: skip
        assert s.distance_std < 0.08 * s.distance and s.degrees_std < 4

# %% [markdown] slideshow={"slide_type": "subslide"}
# ![Two panels, a row for each of 10 weight matrices. Left, how far the lengths of the fine-tunes' changes spread: standard deviation between 0.7% and 2.0% of the mean. Right, the angle between two changes: means from 12 to 24 degrees, with standard deviations of 0.4 to 1.1.](../images/thin-shell.svg)
#
# Their centre is what a soup of very many would be. The nearer to it, the better, the authors find, on
# familiar data and on shifted data. A mean of $N$ is already nearer to it. Model Stock asks: with only two
# models in hand, how near can we come on the line from the base to their mean?

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### The angle knows
#
# Let $\delta_i$ be the arrows, all of length $\ell$, each two with cosine $c$, and $\mu$ the arrow to the
# centre, the mean of infinitely many. Then $\delta_i \cdot \delta_j = \ell^2 c$. In a mean over infinitely
# many only such products count, so $\mu\cdot\mu = \ell^2 c$ and $\mu\cdot\delta_i = \ell^2 c$ too. Now
# minimise the squared distance from $t\,\bar\delta$ to $\mu$:

# %%
t, c, N, ell = sympy.symbols("t c N l", positive=True)
mean_squared = ell**2 * (N + N * (N - 1) * c) / N**2  # N terms with themselves, N(N-1) with others
distance_squared = t**2 * mean_squared - 2 * t * ell**2 * c + ell**2 * c
best = sympy.solve(sympy.diff(distance_squared, t), t)[0]
print("t =", sympy.factor(best))
assert sympy.simplify(best - N * c / (1 + (N - 1) * c)) == 0
for number in (2, 4):
    print(
        f"   cos 1/2 (60 degrees), N = {number}: t =",
        best.subs({c: sympy.Rational(1, 2), N: number}),
    )
del t, c, N, ell

# %% [markdown] slideshow={"slide_type": "subslide"}
# No held-out data, no search, no training: the angle between two fine-tunes says it all, for each tensor.
# At $c=1$ they agree and $t=1$. At $c=0$ they share nothing, and $t=0$: stay at the base.
#
# ![Left, t against the cosine between fine-tunes, for N = 2, 3, 4, 8: all rise from 0 at cosine 0 to 1 at cosine 1, steeper for more fine-tunes: at cosine 0.5 0.667, 0.750, 0.800, 0.889. Right, the formula below cosine 0: t is negative and falls without bound towards a pole at cosine −1/(N−1), -1.00, -0.50, -0.33, -0.14, below which no mean cosine can be. Held in [0, 1], it stays 0.](../images/stock-ratio.svg)

# %% slideshow={"slide_type": "subslide"}
from lecture_util.merging.model_stock import mean_cosine, model_stock, periodic_stock, stock_ratio

w0 = torch.zeros(2)
w1, w2 = torch.tensor([1.0, 0.0]), torch.tensor([0.5, math.sqrt(0.75)])  # 60 degrees apart
ratio = stock_ratio(mean_cosine([w1, w2]), 2)
assert torch.allclose(model_stock(w0, [w1, w2]), ratio * (w1 + w2) / 2)
print(
    f"t = {ratio:.3f}: the merged model lies {model_stock(w0, [w1, w2]).norm():.3f} from the base"
)
print(
    "120 degrees: t =",
    stock_ratio(-0.5, 2).item(),
    " unbounded:",
    stock_ratio(-0.5, 2, bounds="unbounded").item(),
)

# %% [markdown]
# > **A convention.** Beyond a right angle the formula leaves the segment: at 120° it says $t = -2$, and at
# > 180° it divides by 0. The paper promises a point between base and mean, so ours stays at the base.
# > `mergekit` extrapolates. (Below the pole at $-\frac{1}{N-1}$ no mean cosine can be: the sum of $N$
# > directions has the squared length $N + N(N-1)c$, and none is negative.)

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
pairs = {
    "two seeds, one task": [state(run) for run in runs[:2]],
    "four tasks": list(states.values()),
}
for label, ends in pairs.items():
    offsets = [end["blocks.0.gate_up.weight"] - start["blocks.0.gate_up.weight"] for end in ends]
    cosine = mean_cosine([offset.flatten() for offset in offsets])
    stocked = with_state(base, merge_states("model_stock", ends, start))
    print(f"{label:<20} cosine {cosine:.2f}, t = {stock_ratio(cosine, len(ends)):.2f}, "
          f"loss {mean_score(stocked).loss:.3f}")  # fmt: skip

# %% [markdown]
# **Read.** For two runs on the same task it trusts their mean. For four different tasks, at nearly right
# angles, it hardly leaves the base: it was made for the first case, and in section 7 it came last.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Periodic merging
#
# Why wait until training is over? Train a little, merge, go on from the merge, and so on; every time all
# models start together from a point nearer to the centre. The authors report that it does better still. The
# principle, where we know the centre: each "training" goes half the way there, plus noise of its own.

# %% slideshow={"slide_type": "subslide"}
origin, centre = (
    {"w": torch.zeros(1000, dtype=torch.float64)},
    torch.ones(1000, dtype=torch.float64),
)


def towards(start, model, number):
    draw = torch.Generator().manual_seed(10 * number + model)
    noise = torch.randn(1000, dtype=torch.float64, generator=draw)
    return {"w": (start["w"] + centre) / 2 + 0.5 * noise}


for rounds in (1, 2, 4, 8):
    reached = periodic_stock(origin, towards, models=2, rounds=rounds)["w"]
    print(f"{rounds} rounds: {(reached - centre).norm() / centre.norm():.2f} of the way is left")

# %% [markdown] slideshow={"slide_type": "subslide"}
# And in the tiny world, two models, 135 steps each, merged once at the end or three times. The last row is
# a control: one model in the same three parts, and no merge.

# %% tags=["nbval-ignore-output"]
stocked = {}


def train_on(weights, model, number, steps=45):
    again = with_state(base, weights)
    return state(fine_tune(again, PRACTISED, lr=1e-3, seed=10 * number + model, steps=steps))


with one_thread():
    stocked[1] = periodic_stock(start, partial(train_on, steps=135), rounds=1)
    stocked[3] = periodic_stock(start, train_on, rounds=3)
    alone = start
    for number in range(3):
        alone = train_on(alone, 0, number)

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
stocked = {n: mean_score(with_state(base, weights)).loss for n, weights in stocked.items()}
print(f"two models, 1 x 135 steps, merged once:          loss {stocked[1]:.4f}")
print(f"two models, 3 x 45 steps, merged each time:      loss {stocked[3]:.4f}")
in_parts = mean_score(with_state(base, alone)).loss
print(f"one model, trained in three parts, no merge:     loss {in_parts:.4f}")
assert stocked[3] < stocked[1] and in_parts < stocked[1]

# %% [markdown]
# **Read.** Three rounds beat one, as the authors report. But look at the last row: most of that comes of
# training in three parts, each with a warm-up of its own, and would come without any merge. Merging adds
# little here. Always run the control.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Exercise 11.5: how far from the base?
# *12 minutes · which vectors have the angle, how many there are, and where the formula must stop*
#
# `base` is a dict from name to tensor, `tuned` a list of $N \ge 2$ such dicts. For *each tensor*: $c$ is
# the mean, over all pairs of fine-tunes, of the cosine between what they *added* to the base; $t =
# \frac{Nc}{1 + (N-1)c}$; the result is $t$ of the way from the base to the mean of the fine-tunes. The
# formula promises a point between the two, and below $c = 0$ breaks its promise: stay at the base there. A
# tensor that no fine-tune changed stays what it is (and is no NaN).


# %% slideshow={"slide_type": "skip"}
def stock(base, tuned):
    """-> a dict like `base`."""
    ### BEGIN SOLUTION
    N, merged = len(tuned), {}
    for name, w0 in base.items():
        offsets = [state[name] - w0 for state in tuned]
        cosines = []
        for i in range(N):
            for j in range(i):
                lengths = offsets[i].norm() * offsets[j].norm()
                cosines.append((offsets[i] * offsets[j]).sum() / lengths if lengths > 0 else 0.0)
        c = max(0.0, float(sum(cosines)) / len(cosines))
        t = N * c / (1 + (N - 1) * c)
        merged[name] = w0 + t * sum(offsets) / N
    return merged
    ### END SOLUTION


# %% slideshow={"slide_type": "skip"}
check("11.5", stock)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 9. Real checkpoints
#
# The same functions, on files: `python -m lecture_util merge recipe.yml out/`. A **recipe** says what to
# merge; it is mergekit's YAML. One to be read aloud:

# %% slideshow={"slide_type": "subslide"}
from lecture_util.merging.recipe import parse

spoken = parse("""
merge_method: ties
base_model: base
models:
  - model: german
    parameters: {weight: 0.6, density: 0.3}
  - model: poems
    parameters:
      weight: [0, 0.5, 1]          # a gradient: 0 in the first layer, 1 in the last
      density:
        - {filter: mlp, value: 0.5}    # tensors with "mlp" in their name
        - {value: 0.2}                 # all others
parameters: {lambda: 0.9}
""")

# %% slideshow={"slide_type": "subslide"}
part, poems = spoken.slices[0], spoken.slices[0].sources[1]
for name, t in [
    ("layers.0.mlp.up_proj", 0),
    ("layers.15.mlp.up_proj", 0.5),
    ("layers.29.self_attn.q_proj", 1),
]:
    weight, density = (spoken.value(word, poems, part, name, t) for word in ("weight", "density"))
    print(f"poems, {name:<26} weight {weight}, density {density}")

# %% [markdown] slideshow={"slide_type": "subslide"}
# Anything it doesn't know it refuses, before a file is opened. A typo that is silently ignored makes
# another model:

# %%
from lecture_util.merging.recipe import RecipeError

for line in (
    "merge_method: tise",
    "merge_method: ties\nmodels: [{model: a, parameters: {densty: 0.2}}]",
):
    try:
        parse(line + "\nbase_model: base")
    except RecipeError as error:
        print("refused:", error)

# %% [markdown] slideshow={"slide_type": "subslide"}
# Where the papers and the tool differ, one line in the recipe, `convention: mergekit`, does as the tool
# does. Without it, the papers:
#
# | | papers (ours) | mergekit 0.1.5 |
# |---|---|---|
# | DARE, DELLA: rescale | each survivor over its probability | to the sum of magnitudes |
# | TIES: the largest | of the whole model | of each tensor |
# | elected signs: a sum of 0 | sign of the majority | plus |
# | elected signs, weights below 0: divide by | the sum of their magnitudes | the sum of the weights, signs and all |
# | `dare_ties`, `breadcrumbs_ties` | mean of what agrees | sum of it |
# | Breadcrumbs: ranks | within a row | within a tensor |
# | Model Stock: $t$ | from 0 to 1 | unbounded |

# %% [markdown] slideshow={"slide_type": "subslide"}
# | | papers (ours) | mergekit 0.1.5 |
# |---|---|---|
# | SLERP: goes straight | only where there is no arc | within 1.8° already |
# | SLERP: angle of a zero tensor | none | 90° |
# | a stack of two models with tied heads: head | the last model's | the first one's embedding |
# | TIES: density, if not given | 0.2 | 1 |
# | DARE, Breadcrumbs, DELLA: the same | must be given | 1 |
# | DELLA: $\epsilon$, if not given | 0.07 | 0.15 |
#
# One difference has no flag: given a 16-bit `dtype`, the tool computes in 16 bits. Ours computes in fp32
# and rounds once, so there the two agree up to that rounding.

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
from lecture_util.classroom.figures.records import has
from lecture_util.classroom.figures.small_caches import recorded

if has("merging", ["peers"]):
    record = recorded("merging")
    print(f"{record['date']}, {record['hardware']}; convention: mergekit")
    for row in record["peers"]:
        equals = f", but for {row['ties']} of equal magnitude" if row["ties"] else ""
        print(f"{row['method']:<17} ours {row['ours_s']:4.1f} s, mergekit {row['mergekit_s']:4.1f} s, "
              f"largest difference {row['elsewhere']:.0e}{equals}")  # fmt: skip
else:
    print("not recorded yet: benchmarks/merging.py compares the two")

# %% [markdown]
# (Of entries whose magnitude is exactly the threshold's, some must go. Which of them, the tool's sort
# leaves to chance; ours keeps the last.)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Three specialists
#
# *facts* has learned the colours of made-up creatures, *record* to turn a sentence into JSON, *reverse* to
# say four words backwards. The share of fresh questions with the whole answer right:

# %% tags=["nbval-ignore-output"]
from lecture_util.merging.real_tasks import score as share_right

COUNT = 128 if torch.cuda.is_available() else 8


def report(label, some_model, count=COUNT):
    shares = [share_right(some_model, tokenizer, task, count) for task in TASKS]
    print(f"{label:<28}", *(f"{share:8.2f}" for share in shares))
    return shares


print(f"{'':<28}", *(f"{task:>8}" for task in TASKS))
real = {"base": report("base", model)}
real |= {name: report(f"specialist: {name}", each) for name, each in specialists.items()}
assert sum(real["base"]) < 0.5 and all(real[n][i] > 0.6 for i, n in enumerate(TASKS))

# %% [markdown] slideshow={"slide_type": "subslide"}
# Write base and specialists as ordinary checkpoint folders in bf16, and merge those folders. (About 1.1 GB
# in the folder for temporary files, which on some Linuxes is memory, and 0.3 GB for the merge; removed
# below.) All models are looked at before anything is written; the result appears whole or not at all.

# %% tags=["nbval-ignore-output"]
import tempfile
from pathlib import Path

from lecture_util.model.checkpoint import save_folder

scratch = tempfile.TemporaryDirectory()
place = Path(scratch.name)
for name, each in {"base": model, **specialists}.items():
    save_folder(copy.deepcopy(each).bfloat16(), place / name, tokenizer)

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
from lecture_util.merging.merge import merge

recipe = """
merge_method: task_arithmetic
base_model: base
models: [{model: facts}, {model: record}, {model: reverse}]
parameters: {lambda: 0.5}
dtype: bfloat16
"""
out = merge(parse(recipe, folder=place), place / "merged", progress=False)
for file in sorted(out.iterdir()):
    print(f"{file.name:<26} {file.stat().st_size:>12,} bytes")

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
print(f"{'':<28}", *(f"{task:>8}" for task in TASKS))
real["merged"] = report("merged: base + 0.5 * sum", load(out), COUNT // 2)
assert sum(real["merged"]) > max(sum(real[name]) for name in TASKS) + 0.3

# %% [markdown]
# **Read.** (On half as many questions as above.) One model of the same size does some of everything. No
# training, no GPU; it took seconds. It is an ordinary checkpoint, so transformers loads it:

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
from transformers import AutoModelForCausalLM
from transformers.utils import logging

logging.disable_progress_bar()
theirs = AutoModelForCausalLM.from_pretrained(out)
prompt, answer = examples("record", 1, seed=2)[0]
ids = tokenizer(prompt, return_tensors="pt")
said = theirs.generate(**ids, max_new_tokens=20, do_sample=False, pad_token_id=0)
said = tokenizer.decode(said[0, ids["input_ids"].shape[1] :])
print(f"{prompt.splitlines()[0][:52]:<54}{said.strip().splitlines()[0]}")
del theirs
scratch.cleanup()

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### What it costs
#
# A merge goes tensor by tensor, so it never needs more than *one tensor of each model* at a time (TIES
# reads twice: first to rank the whole model). The largest tensor of a model is its embedding, or an MLP
# matrix:

# %%
for name in ("smollm2-135m", "llama-3-8b", "llama-3-70b"):
    shape = PUBLISHED[name]
    largest = max(shape.V * shape.D, shape.F * shape.D)
    print(f"{name:<13} four models {4 * weight_bytes(shape) / 1e9:6.1f} GB, "
          f"one fp32 tensor of each {4 * 4 * largest / 1e9:5.2f} GB")  # fmt: skip

# %% [markdown] slideshow={"slide_type": "subslide"}
# ![Left, peak memory of our TIES against models merged: 2 models 1.05 GB, 3 models 1.17 GB, 4 models 1.28 GB, 6 models 1.51 GB; all held whole would be 0.54 GB each. Right, mergekit's time and peak memory over ours: ties 8.5 and 2.8; breadcrumbs 7.3 and 2.9; breadcrumbs_ties 7.2 and 2.9; passthrough 2.8 and 2.8; slerp 2.3 and 2.4; task_arithmetic 2.3 and 3.7; linear 2.0 and 3.5; model_stock 1.9 and 2.6.](../images/merge-memory.svg)

# %% tags=["nbval-ignore-output", "hide-input"] slideshow={"slide_type": "subslide"}
if has("merging", ["real/table"]):
    record = recorded("merging")
    print(
        f"{record['date']}, {record['hardware']}\n{'':<36}",
        *(f"{x:>8}" for x in record["real"]["tasks"]),
    )
    for row in record["real"]["table"]:
        how = ", ".join(f"{word} {value:g}" for word, value in row["parameters"].items())
        print(f"{row['name'] + ' ' + how:<36}", *(f"{x:8.2f}" for x in row["scores"]))
else:
    print("not recorded yet: run benchmarks/merging.py")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Adapters: merge products, not factors
#
# Our specialists came as low-rank adapters (Hu et al. 2021, *LoRA*, arXiv:2106.09685): each weight's change
# is a product of two thin matrices, up times down. To add two changes, may one add the factors? The
# smallest example, ranks 1:

# %%
down0, up0 = torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0], [0.0]])
down1, up1 = torch.tensor([[0.0, 1.0]]), torch.tensor([[0.0], [1.0]])
print("first + second:        ", (up0 @ down0 + up1 @ down1).tolist())
print("sums of factors:       ", ((up0 + up1) @ (down0 + down1)).tolist())
assert not torch.equal((up0 + up1) @ (down0 + down1), up0 @ down0 + up1 @ down1)

# %% [markdown]
# The cross terms put what one task reads into what the other writes. (huggingface/peft#3004; #2918 lost the
# sign of negative weights.)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Exercise 11.6: two adapters in one
# *10 minutes · products and factors*
#
# An adapter is a pair `(down_rD, up_Fr)` that changes a weight by `up_Fr @ down_rD`. Two of them with
# weights, negative ones too, should become *one* adapter whose change is exactly $w_0$ times the first's
# plus $w_1$ times the second's. This does something else (and raises an error for a negative weight, and
# for adapters of unlike rank):
#
# ```python
# def join(first, second, weights):
#     (down0, up0), (down1, up1), (w0, w1) = first, second, weights
#     down = math.sqrt(w0) * down0 + math.sqrt(w1) * down1
#     up = math.sqrt(w0) * up0 + math.sqrt(w1) * up1
#     return down, up
# ```
#
# Multiply `up @ down` out to see what. Then write it right: which rank must the result have?


# %% slideshow={"slide_type": "skip"}
def join(first, second, weights):
    """first, second: pairs (down_rD, up_Fr), of any two ranks; weights: two numbers. -> such a pair."""
    ### BEGIN SOLUTION
    (down0, up0), (down1, up1), (w0, w1) = first, second, weights
    return torch.cat([down0, down1]), torch.cat([w0 * up0, w1 * up1], dim=1)
    ### END SOLUTION


# %% slideshow={"slide_type": "skip"}
check("11.6", join)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 10. Franken-merging
#
# The odd one out: no weight is averaged, none is changed. Take layers of several models, as they are
# (*passthrough*), and stack them into a deeper one. It works at all because of the residual stream
# (notebook 07): each layer reads it and adds to it. Very experimental. The best-known is Goliath, from two
# fine-tunes of Llama-2-70B, Xwin and Euryale:
#
# ![Two bars of 80 layers, Xwin-LM-70B and Euryale-1.3-L2-70B, and the stack made of them, one bar of 137. By turns from the first and the second, upper end left out: 0–16, 8–24, 17–32, 25–40, 33–48, 41–56, 49–64, 57–72, 65–80. Neighbouring parts overlap, so 57 of the 80 depths are there twice, once from each; 117.7 billion parameters.](../images/franken.svg)

# %% slideshow={"slide_type": "subslide"}
GOLIATH = [(0, 16), (8, 24), (17, 32), (25, 40), (33, 48), (41, 56), (49, 64), (57, 72), (65, 80)]
layers = [layer for first, stop in GOLIATH for layer in range(first, stop)]
deep = replace(PUBLISHED["llama-2-70b"], L=len(layers))
print(f"{len(layers)} layers, {num_params(deep) / 1e9:.1f} B parameters")
print(
    f"depths that occur: {len(set(layers))} of 80, {len(layers) - len(set(layers))} of them twice"
)
inclusive = sum(stop - first + 1 for first, stop in GOLIATH)
print(f"were the last numbers included: {inclusive}, with a layer 80 that does not exist")
assert len(layers) == 137

# %% [markdown]
# Ranges are *half-open*, as Python's: 0 to 16 are the layers 0 to 15. The first, third, ... range is
# Xwin's, the others are Euryale's. The copies are renumbered 0 to 136; the embedding comes from the first
# model, the head from the last.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Ours
#
# Layers 0 to 19 and then 10 to 29 of our reference model: 40 layers, ten of them twice. Every weight has
# been trained, the bytes of a decode step grow. What about perplexity?

# %% tags=["nbval-ignore-output"]
better = predict("33% more layers, all of them trained: the perplexity is ...",
                 choices=["lower", "the same", "higher"])  # fmt: skip

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
from lecture_util.model.text import english_split, perplexity
from lecture_util.model.transformer import Transformer

order = [*range(0, 20), *range(10, 30)]
stacked = Transformer(replace(model.config, L=len(order))).eval().requires_grad_(False)
renumbered = {name: weight for name, weight in model.state_dict().items() if "blocks." not in name}
for new, old in enumerate(order):
    for name, weight in model.blocks[old].state_dict().items():
        renumbered[f"blocks.{new}.{name}"] = weight
stacked.load_state_dict(renumbered)
stacked = stacked.to(model.device)
few_BT = english_split(tokenizer)[1][:4].to(model.device)
perplexities = perplexity(model, few_BT), perplexity(stacked, few_BT)
print(f"30 layers: {perplexities[0]:.1f}   40 layers: {perplexities[1]:.1f}")
assert perplexities[1] > 1.2 * perplexities[0]

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
better.reveal("higher")

# %%
more = num_params(stacked.config) / num_params(model.config) - 1
print(f"and each decode step reads {more:.1%} more bytes of weights")

# %% [markdown]
# **Read.** Worse and dearer, although far from noise: a layer finds a stream that its predecessors never
# wrote, and can still make something of it. What people like about such models was found by trying, often
# after further training.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ![Perplexity on English of the reference model and of stacks of its layers: the model itself, 30 layers, 19.6; one layer twice, 31 layers, 21.5; two layers twice, 32 layers, 21.6; ten layers twice, 40 layers, 25.6; eighteen layers twice, 48 layers, 42.3; two layers left out, 28 layers, 27.3.](../images/franken-measured.svg)

# %% [markdown] slideshow={"slide_type": "subslide"}
# > **Erratum.** "Franken-merging can combine different architectures." The stack must still fit: every
# > layer reads and writes one stream, of one width, and makes sense only to those who learned that stream's
# > directions. A layer of another width doesn't even run:

# %%
from lecture_util.model.transformer import Block

wider = Block(replace(base.config, D=96), 0)
try:
    wider.mlp(torch.randn(1, 4, base.config.D))
except RuntimeError as error:
    print("refused:", type(error).__name__)
else:
    raise AssertionError("a layer of another width ran")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## What to remember
#
# - Fine-tunes of one base lie in one basin: their mean is a model, at one model's cost. The mean of
#   strangers is noise.
# - A task vector is what fine-tuning added. Vectors of different tasks are nearly orthogonal, so they can
#   be added, scaled, and subtracted; and each carries more than its name says.
# - TIES, DARE, Breadcrumbs and DELLA are answers to one question: which entries may interfere? The scale
#   matters at least as much as the answer.
# - SLERP differs from LERP when angles are large; seen from the origin, those between fine-tunes are tiny.
#   Seen from the base, between what each *added*, they are not, and that angle tells Model Stock how far to
#   trust a mean.
# - Merge in fp32, one tensor at a time, round once; read which convention your tool follows; and measure
#   every task, not only the merged one's best.

# %% tags=["nbval-ignore-output"]
status("11")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ## Papers and sources
#
# - Julien Simon, *Deep Dive: Optimizing LLM Inference* (slides), second half: the order of methods.
# - Wortsman et al. 2022, *Model soups*, arXiv:2203.05482. Frankle et al. 2020, arXiv:1912.05671. Entezari
#   et al. 2021, arXiv:2110.06296. Ainsworth et al. 2022, arXiv:2209.04836.
# - Shoemake 1985, *Animating rotation with quaternion curves*, doi.org/10.1145/325334.325242.
# - Ilharco et al. 2022, *Editing models with task arithmetic*, arXiv:2212.04089.
# - Yadav et al. 2023, *TIES-Merging*, arXiv:2306.01708. Yu et al. 2023, *Language models are super Mario*
#   (DARE), arXiv:2311.03099.
# - Davari and Belilovsky 2023, *Model Breadcrumbs*, arXiv:2312.06795. Jang et al. 2024, *Model Stock*,
#   arXiv:2403.19522. Deep et al. 2024, *DELLA-Merging*, arXiv:2406.11617.
# - Goddard et al. 2024, *Arcee's MergeKit*, arXiv:2403.13257. Hu et al. 2021, *LoRA*, arXiv:2106.09685.
# - arcee-ai/mergekit#8 (density and drop rate), #214 (weights that are normalised); huggingface/peft#2918,
#   #3004, #3152 (adapters).
