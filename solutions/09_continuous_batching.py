# %% [markdown] slideshow={"slide_type": "slide"}
# # 09 · Continuous batching
#
# A decode step reads every weight once, whoever shares it (notebook 03). So sixteen users together cost
# little more than one alone, *if there are sixteen*. But users come when they like, and their answers end
# when they end. Nobody knows in advance how many will be there in a moment, or for how long.
#
# So far somebody handed us a batch. Now we ask: **who should be in it?**
#
# You will
#
# 1. make traffic, and measure what users feel and what owners pay;
# 2. predict how much of a static batch is empty seats, and count it;
# 3. change the batch after *every* forward, and watch it;
# 4. lay texts of unequal length end to end, through the same Transformer;
# 5. serve real requests on the real model: other batches, the same tokens;
# 6. keep long prompts from stopping everybody else;
# 7. decide who may come in, and who has to wait;
# 8. let a formula stand in for the model, and find the load at which the queue explodes.

# %% slideshow={"slide_type": "subslide"}
import matplotlib.pyplot as plt
import numpy as np
import sympy
import torch

from lecture_util.classroom import check, hint, predict, status, step, use_style
from lecture_util.model.config import PUBLISHED, Config
from lecture_util.model.generate import generate
from lecture_util.model.tokenizer import encode
from lecture_util.model.transformer import Transformer
from lecture_util.model.weights import REFERENCE, load, load_tokenizer
from lecture_util.roofline import ACCELERATORS, num_params, stopwatch

use_style()
model, tokenizer = load(REFERENCE), load_tokenizer(REFERENCE)
h100 = ACCELERATORS["h100"]

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 1. Traffic
#
# Users don't know of each other. If each moment is as likely as any other to bring one, arrivals form a
# **Poisson process**: the gaps between them are exponential. That sounds even, and isn't. Say two a second
# come on average:

# %% tags=["nbval-ignore-output"]
quiet_guess = predict("Out of 100 seconds, in how many does nobody come?", unit="seconds")

# %% slideshow={"slide_type": "subslide"}
from lecture_util.serving.trace import Lengths, make_trace, poisson_arrivals

arrivals_s = poisson_arrivals(2.0, 2000, np.random.default_rng(0))
in_each_second = np.bincount(np.array(arrivals_s, int))
quiet = 100 * np.mean(in_each_second == 0)
print(f"{len(in_each_second)} seconds; nobody came in {quiet:.1f} of 100, "
      f"predicted {100 * np.exp(-2):.1f}")  # fmt: skip
print(f"in the busiest second {in_each_second.max()} came")

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
quiet_guess.reveal(quiet, predicted=100 * np.exp(-2))

# %% [markdown]
# A second may bring nobody, and the next one eight. Whoever builds for the average builds for a second that
# hardly ever comes.

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Lengths** are uneven too. Most answers are short, a few are very long: a *long tail*. We draw them from
# a log-normal distribution, with half of them below the median. What ends a text is the model's own end
# token, and no scheduler can know it. In our traces a hidden `stop` takes its place:

# %%
trace = make_trace(400, rate_per_s=None, prompt_tokens=Lengths(48), new_tokens=Lengths(32), seed=0)
wanted = [request.params.stop.count for request in trace]
print("answers of the first ten:", wanted[:10])
p50, p90, p99 = np.percentile(wanted, (50, 90, 99))
print(f"half have up to {p50:.0f} tokens, 1 in 10 over {p90:.0f}, 1 in 100 over {p99:.0f}")
print(f"the mean is {np.mean(wanted):.0f}; each may ask for {trace[0].params.max_new_tokens}")

# %% tags=["nbval-ignore-output", "hide-input"] slideshow={"slide_type": "subslide"}
from lecture_util.classroom.figures import ACCENT, MEASURED, PREDICTED, caption, claim

_, (top, bottom) = plt.subplots(2, figsize=(7.5, 3.9), height_ratios=[1, 2.4])
top.eventplot(arrivals_s[:60], colors=PREDICTED, linewidths=1.4)
top.set(yticks=[], xlabel="seconds", xlim=(0, arrivals_s[60]))
bottom.fill_between(range(400), sorted(wanted), step="mid", color=MEASURED, lw=0)
bottom.axhline(np.mean(wanted), ls="--", color=ACCENT, label="mean")
bottom.set(ylabel="new tokens", xticks=[], xlabel="answers, the shortest first")
bottom.legend(frameon=False)
claim(top, "Users come in bursts, and a few want very much")
caption(bottom, shapes="60 arrivals at 2 a second; 400 lengths, median 32, spread 1", seed=0)
plt.show()

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### What users feel, what owners pay
#
# | | | who cares |
# |---|---|---|
# | **TTFT** | time to first token: arrival to the first word, waiting included | the user, staring at an empty screen |
# | **TPOT** | time per output token after the first: the pace of the text | the user, reading |
# | **throughput** | tokens a second, of all users together | the owner, who pays by the hour |
#
# A mean hides the user who waits longest, so servers are judged by **percentiles**: *p99* is what 1 in 100
# requests exceeds. Is that rare? A page that makes 20 requests is as slow as its slowest:

# %%
print(f"one of 20 requests is beyond the p99 in {1 - 0.99**20:.0%} of all pages")

# %% [markdown] slideshow={"slide_type": "notes"}
# *For the instructor.* Ask who has written "average latency" in a report. Then ask what the average of
# "nine of ten answer at once, the tenth hangs" is, and whom it describes. TTFT and TPOT pull in different
# directions from section 6 on; it pays to have everybody agree on the two words now.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 2. The static batch
#
# The obvious way, and for years the usual one: collect a batch, pad it, generate until *all* are done, take
# the next batch. Here are eight requests, A to H, and four slots. `StaticScheduler` decides who computes
# what; `simulator` lets it run without a model, and counts each forward as 1:

# %%
from lecture_util.serving.request import EndsAfter, Params, Request
from lecture_util.serving.scheduler import Policy, Scheduler
from lecture_util.serving.simulate import simulator
from lecture_util.serving.slots import Slots
from lecture_util.serving.static_batching import StaticScheduler


def ask(prompt, new, at=0.0, user="", most=100):
    """A request for up to `most` tokens. It is over after `new`, and only its `stop` knows."""
    return Request([1] * prompt, Params(most, stop=EndsAfter(new)), at, user)


eight = [ask(2, new) for new in (4, 2, 6, 3, 5, 3, 4, 2)]
static = simulator(Slots(4, 128), Policy(slots=4), scheduler=StaticScheduler)
static.serve(eight)
print(len(static.iterations), "forwards for", sum(r.params.stop.count for r in eight), "tokens")


# %% slideshow={"slide_type": "subslide"}
def chart(loop):
    """A line for each slot, a column for each forward."""
    rows = [["."] * len(loop.iterations) for _ in range(loop.scheduler.policy.slots)]
    for t, iteration in enumerate(loop.iterations):
        for part in iteration.parts:
            name = "ABCDEFGH"[part.number]
            shown = {"prefill": name, "decode": name.lower(), "padding": "×"}[part.kind]
            rows[part.slot][t] = shown
    return "\n".join(f"slot {i}   {' '.join(row)}" for i, row in enumerate(rows))


print(chart(static))

# %% [markdown]
# A capital is the forward over the prompt, which gives the first token; a small letter is a decode step.
# `×` is a row whose text is over: it is computed all the same, because the tensor has that many rows. B is
# done after two forwards, and its seat stays taken until C is done, after six. Meanwhile E, F, G and H
# stand outside. (Prompts would be padded to the longest of them, too; here all are alike.)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### How many seats are empty?
#
# A batch runs as long as its longest text. So the useful share of its rows is
#
# $$\frac{\text{mean length}}{\text{mean of the longest of } B}.$$
#
# Say lengths are exponential with mean 1. While $B$ texts run, the first of them ends after $1/B$ on
# average; then $B-1$ are left, and the next ends after another $1/(B-1)$, because an exponential doesn't
# remember how long it has run. The last ends after $1/B + \dots + 1/2 + 1 = H_B$, a harmonic number.

# %% slideshow={"slide_type": "subslide"}
x = sympy.symbols("x", positive=True)
for B in (1, 2, 4, 8):
    longer_than_x = 1 - (1 - sympy.exp(-x)) ** B  # the longest of B is longer than x
    longest = sympy.integrate(sympy.expand(longer_than_x), (x, 0, sympy.oo))
    assert longest == sympy.harmonic(B)
    print(f"B={B}: the longest is {longest} means on average, {float(1 / longest):.0%} is useful")

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
useful_guess = predict("Static batches of 16, our trace: useful rows?", unit="%")

# %% slideshow={"slide_type": "subslide"}
from lecture_util.serving.metrics import stats

SLOTS = 16
batches = simulator(Slots(SLOTS, 1024), Policy(slots=SLOTS), scheduler=StaticScheduler)
batch_run = stats(batches.serve(trace), batches.iterations, SLOTS)
print(f"{batch_run.iterations} forwards, {batch_run.padding:.1%} of the rows padding")
print(f"{batch_run.tokens_per_s:.2f} tokens a forward from {SLOTS} slots")

# %% tags=["nbval-ignore-output"]
useful_guess.reveal(100 * (1 - batch_run.padding), predicted=100 / float(sympy.harmonic(SLOTS)))

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Read.** Worse than predicted, since our lengths have a longer tail than exponential ones: the longest of
# 16 is *still* longer. Of 16 rows, fewer than five bring a token. And a larger batch, which we wanted for
# its cheap rows, makes it worse: $1/H_B$ falls with $B$. Static batching takes back a good part of what
# batching gives.
#
# > **Note.** A padded row costs hardly any *time*: the weights are read anyway. What it costs is the *seat*.
# > The loss is the user outside who could have had it.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Exercise 9.1: empty seats
# *10 minutes · predicting what a better scheduler can win, from lengths alone*
#
# Answers of `lengths` tokens, all there from the start, are served in static batches of `slots`, in the
# order given; the last batch may be smaller. A text of $n$ tokens needs $n$ forwards. Return
#
# - the share of all computed rows that is padding;
# - a bound on how many times as fast *any* scheduler with as many slots could be. (It can do no better than
#   to keep all slots busy; and the longest text takes as long as it takes. Whether a schedule gets there is
#   another question: some lengths would need a text to pause and move.)


# %% slideshow={"slide_type": "skip"}
def empty_seats(lengths, slots):
    """-> (share of rows that is padding, bound on how many times as fast)."""
    ### BEGIN SOLUTION
    batches = [lengths[i : i + slots] for i in range(0, len(lengths), slots)]
    forwards = sum(max(batch) for batch in batches)
    rows = sum(len(batch) * max(batch) for batch in batches)
    fewest = max(-(-sum(lengths) // slots), max(lengths))
    return 1 - sum(lengths) / rows, forwards / fewest
    ### END SOLUTION


# %% slideshow={"slide_type": "skip"}
check("9.1", empty_seats)

# %% [markdown]
# Stuck? Each call opens one more hint.

# %% slideshow={"slide_type": "skip"}
hint("9.1")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 3. Decide anew after every forward
#
# Orca (Yu et al. 2022) asks the scheduler not once a batch, but once a forward: **iteration-level
# scheduling**, better known as continuous batching. Whoever ended leaves, whoever fits joins. That is all
# of it; step through it:


# %%
def serve(lengths, slots):
    """Continuous batching without a model: how many forwards until all are done."""
    waiting, running, forwards = list(enumerate(lengths)), {}, 0
    while waiting or running:
        while waiting and len(running) < slots:
            number, left = waiting.pop(0)
            running[number] = left  # @inspect running
        forwards += 1  # @inspect forwards
        running = {n: left - 1 for n, left in running.items() if left > 1}  # @inspect running
    return forwards


assert serve([4, 2, 6, 3, 5, 3, 4, 2], 4) == 8

# %% tags=["nbval-ignore-output", "hide-input"] slideshow={"slide_type": "subslide"}
step(serve, [4, 2, 6, 3, 5, 3, 4, 2], 4)

# %% [markdown] slideshow={"slide_type": "subslide"}
# `Scheduler` is that loop's first half, written out for a real server. Its `plan` says who computes how
# many tokens in the next forward; a model, or a formula, does it. The same eight requests:

# %%
continuous = simulator(Slots(4, 128), Policy(slots=4), scheduler=Scheduler)
completions = continuous.serve(eight)
print(chart(continuous))
print(len(continuous.iterations), "forwards instead of", len(static.iterations))
print("E's first token comes in forward", int(completions[4].ttft_s))
assert len(continuous.iterations) == 8 and not any(
    part.kind == "padding" for i in continuous.iterations for part in i.parts
)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ![Two grids, rows are 4 slots, columns are forwards. Eight requests want 4, 2, 6, 3, 5, 3, 4 and 2 tokens. Static: B ends after 2 forwards, C after 6; until then the other rows are padding, and E to H wait; 11 forwards, 15 of 44 rows for nothing, E's first token in forward 7. Continuous: E takes B's slot at once, in forward 3; 8 forwards, no padding.](../images/static-batching.svg)

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
from lecture_util.classroom.widgets import schedule_explorer

schedule_explorer()

# %% [markdown] slideshow={"slide_type": "subslide"}
# Move the arrival rate up, and the two fall apart: at low load a static batch is small and over soon, and
# there is little to win. Then set the spread to 0. Texts of one length end together, and if all come at
# once, the two schedules are the same. Continuous batching lives on *unevenness*.

# %% [markdown] slideshow={"slide_type": "subslide"}
# On our trace of 400 requests:

# %% tags=["nbval-ignore-output"]
gain_guess = predict("Continuous: how many times as many tokens a forward?", unit="times")

# %%
refilled = simulator(Slots(SLOTS, 1024), Policy(slots=SLOTS), scheduler=Scheduler)
refilled_run = stats(refilled.serve(trace), refilled.iterations, SLOTS)
for name, run in {"static": batch_run, "continuous": refilled_run}.items():
    print(f"{name:<11} {run.iterations:>5} forwards, {run.tokens_per_s:5.2f} tokens a forward, "
          f"slots at work {run.slot_use:.0%}")  # fmt: skip
gain = refilled_run.tokens_per_s / batch_run.tokens_per_s

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
gain_guess.reveal(gain, predicted=float(sympy.harmonic(SLOTS)))

# %% [markdown]
# The prediction is $H_{16}$: static batches use $1/H_{16}$ of their seats, a full house all of them. The
# house isn't quite full: prompts share the forwards' budget of tokens (section 6), and at the end of the
# trace only the longest texts are left.

# %% [markdown] slideshow={"slide_type": "notes"}
# *For the instructor.* A bus against a taxi rank. The static batch is a bus that leaves when it is full and
# stops nowhere until everybody has arrived. Ask what one must know to do better: not when a text will end,
# only *that* it has. That is why nobody needs to predict lengths.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Exercise 9.2: a scheduler
# *15 minutes · iteration-level scheduling, with arrivals*
#
# Write one that knows when requests come. Request $i$ arrives at `arrivals[i]` (never decreasing, not
# always whole) and needs `lengths[i]` forwards. Forward $t$ begins at time $t$ and takes 1; whoever has
# arrived by its beginning may be in it, first come first served, `slots` at most. Who is done leaves at
# once.
#
# Return a list for forwards 0, 1, ... until all are done: the numbers of the requests in each, ascending. A
# forward for nobody is `[]`.


# %% slideshow={"slide_type": "skip"}
def who_is_in(arrivals, lengths, slots):
    """A list of request numbers for every forward."""
    ### BEGIN SOLUTION
    forwards, left, coming = [], {}, list(range(len(lengths)))
    while coming or left:
        while coming and len(left) < slots and arrivals[coming[0]] <= len(forwards):
            number = coming.pop(0)
            left[number] = lengths[number]
        forwards.append(sorted(left))
        left = {number: n - 1 for number, n in left.items() if n > 1}
    return forwards
    ### END SOLUTION


# %% slideshow={"slide_type": "skip"}
check("9.2", who_is_in)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 4. Texts of unequal length in one forward
#
# A batch is a tensor `B, T`: all rows equally long. Now three texts share a forward that bring 3, 9 and 5
# new tokens. Padded to the longest, 27 rows are computed for 17 tokens. Is there no other way?
#
# Look at what a layer does to its input. A linear layer, a norm, an MLP treat every *row* by itself; they
# don't care whose it is. So lay the rows end to end:

# %%
draw = torch.Generator().manual_seed(0)
D, F = 8, 12
texts = [torch.randn(n, D, generator=draw, dtype=torch.float64) for n in (3, 9, 5)]
w_DF = torch.randn(D, F, generator=draw, dtype=torch.float64)

flat_TD = torch.cat(texts)
out_TF = flat_TD @ w_DF  # the weight is read once
for own, part in zip(texts, out_TF.split([3, 9, 5]), strict=True):
    assert torch.allclose(part, own @ w_DF)
print([tuple(own.shape) for own in texts], "->", tuple(flat_TD.shape), "->", tuple(out_TF.shape))

# %% [markdown] slideshow={"slide_type": "subslide"}
# Only attention mixes rows, and it must not mix texts. So split the run there, attend in each text alone,
# and join again. Orca calls it **selective batching**: batch what can be batched.

# %%
from lecture_util.model.attention import attend

qkv_TD = flat_TD.view(1, 17, 2, 4)  # two heads; queries, keys and values alike, for short
parts = [attend(p, p, p) for p in qkv_TD.split([3, 9, 5], dim=1)]
selective_TNH = torch.cat(parts, dim=1)[0]

whose_T = torch.arange(3).repeat_interleave(torch.tensor([3, 9, 5]))
mask_1TT = (whose_T[:, None] == whose_T) & torch.ones(17, 17, dtype=torch.bool).tril()
masked_TNH = attend(qkv_TD, qkv_TD, qkv_TD, mask_1TT[None])[0]
assert torch.allclose(selective_TNH, masked_TNH)
print("scores: one by one", 3**2 + 9**2 + 5**2, "| padded", 3 * 9**2, "| masked run", 17**2)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ![Three texts of 3, 9 and 5 tokens, shapes [3, D], [9, D] and [5, D], are laid end to end as one run [17, D]; each token keeps its position, counted from 0 in its own text. Norms and linear layers take the whole run and read each weight once. Attention splits it into three, each over its own keys and values, and joins the results to [17, D] for the layers after it.](../images/selective-batching.svg)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### The Transformer doesn't change
#
# In this course a cache is a thing that attends (notebook 03). So the split belongs into the cache, and the
# model sees a batch of one row, the flat run `1, T`. The cache must be told who is in it. `load` takes the
# scheduler's work and notes for every token
#
# - its **position** in its own text, which RoPE needs;
# - its **place** in the pool of keys and values: where to write;
# - how far it may look.
#
# `SlotCache` is the simplest pool: a row of `capacity` places for each slot.

# %% slideshow={"slide_type": "subslide"}
from lecture_util.serving.request import Running
from lecture_util.serving.slots import SlotCache

tiny = Config(D=16, F=24, K=1, G=2, H=8, L=2, V=50, max_context=64)
toy = Transformer.random(tiny, seed=0, dtype=torch.float64)
cache = SlotCache(tiny, rows=3, capacity=20, dtype=torch.float64)
scheduler = Scheduler(cache.memory, Policy(slots=3))
prompts = [torch.randint(50, (n,), generator=draw).tolist() for n in (3, 9, 5)]
for i, prompt in enumerate(prompts):
    scheduler.add(Running(i, Request(prompt), i, 0, prompt, arrival_s=0.0))
work = scheduler.plan()
cache.load(work)
print("positions", *cache.frame.positions_1T[0].tolist())
print("places   ", *cache.frame.places_T.tolist())

# %%
flat_1T = torch.tensor([[token for w in work for token in w.sequence.tokens]])
with torch.inference_mode():
    x_1TD = toy.features(flat_1T, cache)
    for prompt, own_TD in zip(prompts, x_1TD[0].split([3, 9, 5]), strict=True):
        assert torch.allclose(own_TD, toy.features(torch.tensor([prompt]))[0])
print("run", tuple(flat_1T.shape), "-> features", tuple(x_1TD.shape), "as each text alone")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Decoding beside prompts
#
# The same run may hold anything: one token each from those who decode, and a piece of somebody's prompt.
# That is the whole server. `Engine` ties scheduler, cache and model together, and `step` is one forward.
# We let A and B in, and C two forwards later:

# %% slideshow={"slide_type": "subslide"}
from lecture_util.serving import Engine
from lecture_util.serving.clock import VirtualClock

pool = SlotCache(tiny, rows=3, capacity=20, dtype=torch.float64)
engine = Engine(toy, pool, Policy(slots=3, token_budget=10), VirtualClock())
numbers = [engine.submit(prompt, Params(4)) for prompt in prompts[:2]]
for t in range(6):
    if t == 2:
        numbers.append(engine.submit(prompts[2], Params(4)))
    engine.step()
    parts = engine.loop.iterations[-1].parts
    print(f"forward {t}: ", ", ".join(
        f"{'ABC'[p.number]} {p.kind} {p.start}..{p.start + p.count - 1}" for p in parts
    ))  # fmt: skip
while engine.loop.busy:
    engine.step()

# %% [markdown] slideshow={"slide_type": "subslide"}
# B's prompt did not fit into the first forward: 10 tokens were allowed, so it came in two pieces (section 6
# says why). In forward 2, C's whole prompt runs beside two decode steps, and every weight is read once for
# all three. And the texts?

# %%
for number, prompt in zip(numbers, prompts, strict=True):
    (done,), (alone,) = engine.result(number), generate(toy, [prompt], 4)
    assert done.tokens == alone
print("each as if it had been alone")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Exercise 9.3: where everything goes
# *12 minutes · finding three mistakes that gave fluent nonsense in real engines*
#
# Each piece of a flat run is `(length, computed, count, row)`: a text of `length` tokens known so far, of
# which `computed` are in the cache, computes its next `count` in this forward; it owns the places from
# `row * capacity` on. Return three lists: positions and places, a number for each token, and for each piece
# how many tokens its *last* token sees, itself included. A colleague wrote
#
# ```python
# def flat_run(pieces, capacity):
#     positions, places, sees = [], [], []
#     for length, computed, count, row in pieces:
#         first = length if count == 1 else computed
#         positions += range(first, first + count)
#         places += [row * capacity + i for i in range(count)]
#         sees.append(length)
#     return positions, places, sees
# ```
#
# Three lines are wrong. (Two of the mistakes are on record: GeeeekExplorer/nano-vllm#67 and #213.)


# %% slideshow={"slide_type": "skip"}
def flat_run(pieces, capacity):
    """-> (positions, places, sees)."""
    ### BEGIN SOLUTION
    positions, places, sees = [], [], []
    for _length, computed, count, row in pieces:
        end = computed + count
        positions += range(computed, end)
        places += [row * capacity + position for position in range(computed, end)]
        sees.append(end)
    return positions, places, sees
    ### END SOLUTION


# %% slideshow={"slide_type": "skip"}
check("9.3", flat_run)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 5. Real requests, the real model
#
# Twenty requests for our 135 M model: prompts cut from a little text, answers with a long tail. Three ways
# to serve them: one after the other, in static batches of 6, and continuously in 6 slots.

# %%
STORY = """A small shop sells tea. In the morning nobody comes, and then six people come at once. One of
them wants a cup and leaves. One of them asks for the history of tea, from the beginning, and sits down. The
shop has six chairs. Should the others wait outside until the history is over? The owner thinks about it
for a while, and decides that whoever stands up may be followed by whoever waits at the door."""

story = encode(tokenizer, STORY)
requests = make_trace(
    20, rate_per_s=None, tokens=story, seed=4,
    prompt_tokens=Lengths(12, 0.6, 4, 40), new_tokens=Lengths(8, 1.0, 2, 32),
)  # fmt: skip
news = [request.params.stop.count for request in requests]
print("prompts", *(len(request.prompt) for request in requests))
print("answers", *news)

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
same_guess = predict(
    "Every request shares forwards with others, other ones each time. Its tokens are",
    choices=["always the same", "the same for most requests", "different"],
)

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
from lecture_util.serving.static_batching import static_server

with stopwatch(model.device) as one_by_one:
    alone = [generate(model, [r.prompt], n)[0] for r, n in zip(requests, news, strict=True)]
loops = {
    "static": static_server(model, 6, capacity=72),
    "continuous": Engine(model, SlotCache(model.config, 6, 72, model.dtype, model.device),
                         Policy(slots=6, token_budget=64)).loop,
}  # fmt: skip
served = {name: loop.serve(requests, progress=True) for name, loop in loops.items()}
live = {name: stats(served[name], loop.iterations, 6) for name, loop in loops.items()}
print(f"{'one by one':<11} {sum(news) / one_by_one.seconds:6.1f} tokens/s")
for name, run in live.items():
    print(f"{name:<11} {run.tokens_per_s:6.1f} tokens/s; first token after {run.ttft.p50:.2f} s (p50), "
          f"{run.ttft.p90:.2f} s (p90); then {1e3 * run.tpot.p50:.0f} ms a token")  # fmt: skip

# %% slideshow={"slide_type": "subslide"}
for name, run in live.items():
    same = sum(done.tokens == own for done, own in zip(served[name], alone, strict=True))
    print(f"{name:<11} {run.iterations:>3} forwards, {run.padding:4.0%} padding, "
          f"{same} of {len(requests)} token-identical to one by one")  # fmt: skip
    assert same == len(requests)
assert live["continuous"].iterations < 0.7 * live["static"].iterations

# %% tags=["nbval-ignore-output"]
same_guess.reveal("always the same")

# %% [markdown]
# It *has* to be so: no row of a linear layer sees another, and attention was kept apart. (To the last bit
# it isn't: a sum over a larger tile may be added in another order. In fp32 that changes no choice but a
# near-tie, notebook 08.) So a schedule may change *when* a token comes, never *which*.

# %% [markdown] slideshow={"slide_type": "subslide"}
# > **Often said:** continuous batching makes each answer come faster. Its *decode steps* are no faster: more
# > rows share each, and pieces of prompts run beside them. What shrinks is the wait outside. On our trace,
# > with the roofline's time for Llama-2-13B on an H100 in place of the clock:

# %%
from lecture_util.serving.simulate import RooflineStep

llama_step = RooflineStep(PUBLISHED["llama-2-13b"], h100)
pace = {}
for name, kind in {"static": StaticScheduler, "continuous": Scheduler}.items():
    loop = simulator(Slots(SLOTS, 1024), Policy(slots=SLOTS), llama_step, kind)
    pace[name] = stats(loop.serve(trace[:100]), loop.iterations, SLOTS)
    print(f"{name:<11} waits outside {pace[name].queue.p50:5.2f} s, "
          f"then {1e3 * pace[name].tpot.p50:.2f} ms a token (p50)")  # fmt: skip
assert pace["continuous"].tpot.p50 >= pace["static"].tpot.p50
assert pace["continuous"].queue.p50 < 0.5 * pace["static"].queue.p50

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Any order, any seed
#
# Now let the requests come one by one, into three slots, with forwards of at most 16 tokens. `VirtualClock`
# counts a forward as one second, so that arrivals mean the same on every machine. And let six of them
# *sample*: each request draws from a generator of its own, seeded by its own seed.

# %% slideshow={"slide_type": "subslide"}
from dataclasses import replace

from lecture_util.model.sampling import Sampling

arriving = [replace(r, arrival_s=t / 0.3) for t, r in enumerate(requests[:10])]
three = SlotCache(model.config, 3, 72, model.dtype, model.device)
narrow = Engine(model, three, Policy(slots=3, token_budget=16), VirtualClock())
same = [done.tokens for done in narrow.serve(arriving)] == alone[:10]
print("arriving one by one, the same tokens:", same)

warm = [Params(8, Sampling(temperature=0.8), seed=seed) for seed in range(6)]
starts = [request.prompt for request in requests[:6]]
together = narrow.generate(starts, warm)
single = [narrow.generate([start], params)[0] for start, params in zip(starts, warm, strict=True)]
drawn = [done.tokens for done in together] == [done.tokens for done in single]
print("sampled together and alone, the same tokens:", drawn)
assert same and drawn

# %% [markdown]
# Here is the engine itself, on the real model, one forward a click: the flat run above, the slots below.

# %% tags=["nbval-ignore-output", "hide-input"] slideshow={"slide_type": "subslide"}
from lecture_util.classroom.widgets import engine_stepper

watched = Engine(model, SlotCache(model.config, 3, 72, model.dtype, model.device),
                 Policy(slots=3, token_budget=16), VirtualClock())  # fmt: skip
engine_stepper(watched, arriving[:6], tokenizer, at=4)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### The same at full length
#
# As recorded, with longer prompts and answers, and 16 slots:

# %% tags=["nbval-ignore-output"]
from lecture_util.classroom.figures.small_caches import recorded

record = recorded("serving")
print(f"{record['date']}, {record['hardware']}")
print("                            tokens/s  padding  TTFT p50    p99    TPOT p50    p99")
for row in record["scheduling"]:
    print(f"{row['name']:<26} {row['tokens_per_s']:9.1f} {row['padding']:8.0%} {row['ttft']['p50']:7.1f} s "
          f"{row['ttft']['p99']:6.1f} s {1e3 * row['tpot']['p50']:6.0f} ms {1e3 * row['tpot']['p99']:5.0f} ms")  # fmt: skip
by_name = {row["name"]: row for row in record["scheduling"]}
times = by_name["continuous, paged"]["tokens_per_s"] / by_name["static"]["tokens_per_s"]
print(f"continuous over static: {times:.2f} times the tokens a second")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ![Bars: tokens a second, time to first token (90%), time a token after it (90%). static 27, 128 s, 139 ms; continuous, contiguous 65, 27.9 s, 237 ms; continuous, whole prompts 71, 25.8 s, 224 ms; continuous, paged 66, 28.9 s, 230 ms.](../images/scheduling-measured.svg)

# %% [markdown]
# **Read.** More than twice the tokens a second, and a first token several times sooner. But look at TPOT: a
# *slower* pace than in the static batch, and in the chunked runs a far slower one for the unlucky (p99). A
# decode step used to have the forward to itself. Now it shares it with somebody's prompt.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 6. Prompts against decoding
#
# A newcomer's prompt is computed in one forward, if we let it. A decode step waits for memory; a prompt of
# thousands of tokens waits for arithmetic, and *everybody in that forward waits with it*. Eight users are
# reading, their texts grow by a token every 8 ms: Llama-2-13B on an H100, on the roofline. Then somebody
# pastes 4,000 tokens.

# %% tags=["nbval-ignore-output"]
pause_guess = predict("How long do the eight wait for their next token?", unit="ms")

# %% slideshow={"slide_type": "subslide"}
readers = [ask(100, 100) for _ in range(8)]
paste = ask(4000, 10, at=0.3)


def disturbed(budget, chunked=True):
    """In ms: a reader's usual pause between two tokens, the longest, and the newcomer's TTFT."""
    policy = Policy(slots=9, token_budget=budget, chunked=chunked)
    loop = simulator(Slots(9, 4100), policy, llama_step)
    reader, *_, newcomer = loop.serve([*readers, paste])
    pauses = 1e3 * np.diff(reader.token_times_s)
    return np.median(pauses), pauses.max(), 1e3 * newcomer.ttft_s


usual, whole_pause, whole_ttft = disturbed(4096, chunked=False)
arithmetic = 1e3 * 2 * num_params(PUBLISHED["llama-2-13b"]) * 4000 / h100.peak("bf16")
print(f"usually {usual:.1f} ms; once {whole_pause:.0f} ms")
print(f"2 FLOPs a parameter and token, at the H100's peak: {arithmetic:.0f} ms")

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
pause_guess.reveal(whole_pause, predicted=arithmetic)

# %% [markdown] slideshow={"slide_type": "subslide"}
# All eight texts stop at once, for as long as 14 of their tokens take. On a busy server somebody pastes
# something every second. The remedy (Agrawal et al. 2024, *Sarathi-Serve*): nothing forces us to compute a
# prompt in one piece. Give every forward a **token budget**. Decoding comes first, one token each; what is
# left of the budget goes to the next *chunk* of a prompt. Only the last chunk yields a token.
#
# ![Two timelines by formula: A, B and C decode on an H100, and D brings 6,000 tokens. Computed whole, D's prompt is one long forward, and nobody gets a token for 94.2 ms; D's own first token comes after 97.1 ms. In chunks, at most 512 tokens a forward in all, no pause is longer than 8.67 ms, and D's first token comes after 97.8 ms.](../images/chunked-prefill.svg)

# %% slideshow={"slide_type": "subslide"}
print("budget      longest pause   newcomer's first token after")
print(f"whole       {whole_pause:9.1f} ms {whole_ttft:12.0f} ms")
for budget in (2048, 512, 256, 128, 32):
    _, pause, ttft = disturbed(budget)
    print(f"{budget:<11} {pause:9.1f} ms {ttft:12.0f} ms")

# %% [markdown]
# **Read** it from above. Down to 512 tokens the pauses shrink and the newcomer hardly notices: so large a
# forward still keeps the arithmetic busy. At 256, just below the ridge (notebook 02: 295 on an H100), the
# newcomer waits a quarter longer. Further down, forwards take as long as a decode step whatever is in them:
# they wait for the weights. There each halving of the budget doubles the newcomer's wait and wins nothing.
# A good budget sits *near the ridge*. The readers still pay a little in pace: until the prompt is computed,
# each of their steps shares its forward with a chunk, so one long pause has become many slow tokens.

# %% [markdown] slideshow={"slide_type": "subslide"}
# A CPU's ridge is far lower than an H100's: every token of a prompt takes time, and no budget is free. With
# long prompts among running texts, from our record of this model:

# %% tags=["nbval-ignore-output"]
print("budget        tokens/s   longest pause (p99)   TTFT p50    TPOT p50")
for row in record["budgets"]:
    name = f"{row['token_budget']}" if row["chunked"] else "whole"
    print(f"{name:<12} {row['tokens_per_s']:9.1f} {row['pause_max']:8.2f} s ({row['pause_p99']:.2f}) "
          f"{row['ttft']['p50']:13.2f} s {1e3 * row['tpot']['p50']:8.0f} ms")  # fmt: skip

# %% [markdown]
# **Read.** A small budget makes the longest pause short and the first wait long: here the budget is a
# choice between two users, not a gift to one. Nor is the readers' mean pace (TPOT) safe: small chunks are
# many, and each of them slows a decode step. Tokens a second don't tell the rows apart: the server keeps up
# with the arrivals, so it can only make what is asked of it. And the largest budget rarely binds, since
# hardly any prompt is that long; its row is nearly that of whole prompts.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ![Points, one a token budget of a forward: the pause between two tokens that 99% stay below against the time to first token that 90% stay below. 32: 98.8 ms, 2.62 s; 64: 137 ms, 1.28 s; 128: 182 ms, 0.699 s; 256: 270 ms, 0.55 s; 512: 341 ms, 0.475 s; whole prompts: 330 ms, 0.493 s.](../images/token-budgets.svg)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Or let them collect at the door
#
# A server without chunks can at least interrupt less often: admit only when enough people wait. Hugging
# Face's TGI calls the knob **waiting-to-served ratio**: at 1.2, it stops the readers only when 1.2 times as
# many wait as read. (A limit of forwards keeps a lone newcomer from waiting for ever.)

# %%
busy = make_trace(60, rate_per_s=10, seed=1, prompt_tokens=Lengths(512, 0.6, most=2048),
                  new_tokens=Lengths(64, most=512))  # fmt: skip
for ratio in (0, 0.5, 1.2):
    policy = Policy(16, 2560, chunked=False, waiting_served_ratio=ratio, max_waiting_steps=40)
    loop = simulator(Slots(16, 4096), policy, llama_step)
    run = stats(loop.serve(busy), loop.iterations, 16)
    kinds = [{part.kind for part in i.parts} for i in loop.iterations]
    print(f"ratio {ratio:<4} {kinds.count({'prefill', 'decode'}):>3} interruptions, first token "
          f"{1e3 * run.ttft.p50:4.0f} ms, then {1e3 * run.tpot.p50:.1f} ms a token (p50)")  # fmt: skip

# %% [markdown]
# Fewer interruptions, and all who wait pay for it. It moves the pain from readers to newcomers; chunks make
# most of it disappear. That is why today's engines chunk.

# %% [markdown] slideshow={"slide_type": "notes"}
# *For the instructor.* Before the table of budgets, ask for the worst possible budget. "Huge" is wrong only
# for readers; "tiny" is wrong for the newcomer *and* wins the readers nothing. Then ask at which number the
# column on the left stops falling. Those who remember the ridge of notebook 02 can say it beforehand.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Exercise 9.4: choose the budget
# *12 minutes · from a target for the pace to a token budget, and what the newcomer pays*
#
# A forward over $n$ tokens takes `fixed_us + n * token_us` microseconds (all numbers are whole).
# `decoding` users read, and no pause in their texts may be longer than `target_us`. A newcomer's prompt
# has `prompt` tokens. Return
#
# - the largest token budget of a forward that keeps the target (the readers' tokens count in it);
# - in how many forwards the prompt is computed with it;
# - after how many microseconds its first token is there, if its first chunk begins at 0. The last chunk is
#   as long as what is left.
#
# The target always leaves room for at least one token of the prompt.


# %% slideshow={"slide_type": "skip"}
def choose_budget(fixed_us, token_us, decoding, prompt, target_us):
    """-> (budget, forwards, TTFT in microseconds)."""
    ### BEGIN SOLUTION
    budget = (target_us - fixed_us) // token_us
    forwards = -(-prompt // (budget - decoding))
    return budget, forwards, forwards * (fixed_us + decoding * token_us) + prompt * token_us
    ### END SOLUTION


# %% slideshow={"slide_type": "skip"}
check("9.4", choose_budget)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 7. Who may come in?
#
# A slot is not only a row in a forward. It is *memory*: keys and values of every token so far (notebook
# 03). How much will a newcomer need? Its answer's length isn't known. There are two honest policies:
#
# - **reserve for the worst case.** A text of up to 512 tokens rents a row of 512. Nothing can go wrong, and
#   most of the row stays empty;
# - **admit, and take back.** Lend what is needed now. When the memory is full and everybody needs one token
#   more, put somebody back into the queue: **preemption**.
#
# The same bytes, both ways, on a trace whose texts may have 512 tokens:

# %% slideshow={"slide_type": "subslide"}
from lecture_util.serving.blocks import Blocks
from lecture_util.serving.paging import Pages

shorts = make_trace(60, rate_per_s=None, prompt_tokens=Lengths(24, 0.8, most=128),
                    new_tokens=Lengths(32, most=384))  # fmt: skip
rooms = {"4 rows of 512": Slots(4, 512),
         "128 pages of 16": Pages(Blocks(128, 16, prefix_caching=False))}  # fmt: skip
for name, memory in rooms.items():
    loop = simulator(memory, Policy(slots=getattr(memory, "rows", len(shorts))))
    run = stats(loop.serve(shorts), loop.iterations)
    at_once = np.mean([i.running for i in loop.iterations])
    print(f"{name:<16} {run.iterations} forwards, {at_once:.1f} texts at once, {run.most_running} at most; "
          f"{run.memory_use:.0%} of the lent room used, {run.preemptions} preempted")  # fmt: skip

# %% [markdown]
# The same memory, and more than three times as many texts in it on average; so the same work is done in
# less than a third of the forwards. How pages do that is notebook 10. Here we need one thing from it: memory
# may run out *in the middle of a text*, and then somebody is put back.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Put back
#
# Four texts of up to 20 tokens, and room for 32. The **newest** goes back: it has the least to lose, and the
# oldest is sure to get to its end, so the server always moves. Its keys are thrown away. When it comes in
# again, its prompt *and the tokens it already has* are computed together, as one prompt:

# %%
scarce = Pages(Blocks(8, 4, prefix_caching=False))
loop = simulator(scarce, Policy(slots=4, token_budget=32))
completions = loop.serve([ask(6, 14, most=14) for _ in range(4)])
print(chart(loop))
print("put back, A to D:", *(done.preemptions for done in completions))
back = [p.count for i in loop.iterations for p in i.parts if p.kind == "prefill" and p.number > 0]
print("computed as prompts by B, C and D:", back)

# %% [markdown]
# A capital in the middle of a row is somebody who came back. Nothing is lost but time: the text goes on
# where it was, and the keys are the same as before. Two rules keep this from going round in circles. Who
# was put back stands *first* in the queue. And in a forward in which somebody was put back, nobody is
# admitted; or the victim would be its own successor.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### In which order?
#
# First come, first served is not the only choice. In many queues the shortest job goes first, which lowers
# the mean wait. But while short ones keep coming, a long one waits for ever: **starvation**. `patience` lets
# whoever has watched so many forwards go first. Short prompts in a steady stream, and one long one. Answers
# are as long as they like, whatever the prompt; and the stream is an *overload*: it brings more than two
# slots can serve, so there is always a queue to choose from.


# %% slideshow={"slide_type": "subslide"}
def crowd(seed):
    """100 requests, lengths of prompt and answer drawn apart; then the one with the long prompt."""
    draws = np.random.default_rng(seed)
    asked, answered = (
        Lengths(10, 0.8, most=40).draw(draws, 100),
        Lengths(5, most=40).draw(draws, 100),
    )
    pairs = enumerate(zip(asked, answered, strict=True))
    return [*(ask(int(p), int(n), at=0.4 * i) for i, (p, n) in pairs), ask(60, 5, at=5.0)]


for order, patience in (("arrival", None), ("shortest", None), ("shortest", 30)):
    policy = Policy(slots=2, token_budget=64, order=order, patience=patience)
    runs = [simulator(Slots(2, 200), policy).serve(crowd(seed)) for seed in (0, 1)]
    long = " and ".join(f"{done[-1].queue_s:.0f}" for done in runs)
    everybody = " and ".join(f"{np.mean([c.queue_s for c in done]):.0f}" for done in runs)
    print(f"{order:<9} patience {patience!s:<5} the long one waits {long:>11} forwards, "
          f"all wait {everybody} on average")  # fmt: skip

# %% [markdown]
# (Two crowds, so two numbers each.) The long one pays, and who wins? One crowd waits a little less on average,
# the other a little more: that is luck. What keeps a slot busy is the *answer*, and here, as so often, a short
# prompt may want a long one. The length that would be worth sorting by isn't known.

# %% [markdown] slideshow={"slide_type": "subslide"}
# **A noisy neighbour.** One user's script sends 60 requests at once; another asks a question now and then.
# First come, first served makes the second one wait for the script. The *fair* order keeps a counter of
# tokens served to each user, and admits the one who has had the fewest (as in VTC, Sheng et al. 2024):

# %%
script = [ask(20, 10, user="script") for _ in range(60)]
person = [ask(20, 10, at=10.0 * i, user="person") for i in range(6)]
for order in ("arrival", "fair"):
    loop = simulator(Slots(4, 200), Policy(slots=4, token_budget=64, order=order))
    done = loop.serve([*script, *person])
    waits = {user: np.median([c.queue_s for c in done if c.user == user])
             for user in ("script", "person")}  # fmt: skip
    print(f"{order:<8} {len(loop.iterations)} forwards; half of the script's requests wait "
          f"{waits['script']:.0f}, of the person's {waits['person']:.0f}")  # fmt: skip

# %% [markdown]
# As many forwards as before; the person is served at once, and the script's requests wait a little longer.
# Fairness between users costs no throughput: it only says whose turn it is.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Exercise 9.5: an admission that goes wrong
# *15 minutes · finding four mistakes in a rule that decides who keeps memory*
#
# One forward's bookkeeping, memory counted in tokens. `running` (oldest first) and `waiting` (next first)
# are lists of `(number, tokens)`. Everybody running needs room for one token more; if there isn't, some are
# put back to the front of the queue. Then whoever waits may come in, if all its tokens fit. Return the
# numbers running, the numbers waiting, and the tokens that are free.
#
# A colleague's version follows. It has four mistakes:
#
# - who is put back,
# - who comes in right after,
# - what a refused one leaves behind,
# - and who may pass it in the queue.
#
# Write the rule right.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ```python
# def plan_memory(running, waiting, room, slots):
#     running, waiting = list(running), list(waiting)
#     free = room - sum(tokens for _, tokens in running)
#     while free < len(running):
#         number, tokens = running.pop(0)
#         waiting.insert(0, (number, tokens))
#         free += tokens
#     free -= len(running)
#     for number, tokens in list(waiting):
#         if len(running) == slots:
#             break
#         free -= tokens
#         if free < 0:
#             continue
#         waiting.remove((number, tokens))
#         running.append((number, tokens))
#     return [n for n, _ in running], [n for n, _ in waiting], free
# ```


# %% slideshow={"slide_type": "skip"}
def plan_memory(running, waiting, room, slots):
    """-> (numbers running, numbers waiting, tokens free)."""
    ### BEGIN SOLUTION
    running, waiting = list(running), list(waiting)
    free, before = room - sum(tokens for _, tokens in running), len(running)
    while free < len(running):
        waiting.insert(0, running.pop())
        free += waiting[0][1]
    free -= len(running)
    if len(running) == before:
        while waiting and len(running) < slots and waiting[0][1] <= free:
            running.append(waiting.pop(0))
            free -= running[-1][1]
    return [n for n, _ in running], [n for n, _ in waiting], free
    ### END SOLUTION


# %% slideshow={"slide_type": "skip"}
check("9.5", plan_memory)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 8. A server on paper
#
# All through this notebook the scheduler has been the real one, and often there was no model behind it. It
# never sees a tensor, so it cannot tell. Put in the model's place a formula for a forward's seconds, and
# you can try a policy on a machine you don't have. If the formula is right. So hold it against the real run
# first: from every second forward of section 5 we fit a forward's time as a sum of five terms (a constant;
# tokens; tokens beyond 16; tokens attended to; scores), and predict the others.

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
from lecture_util.serving.simulate import FittedStep

forwards = [i for loop in loops.values() for i in loop.iterations]
fitted = FittedStep.fit(forwards[::2])
errors = [abs(fitted(i.parts) / i.seconds - 1) for i in forwards[1::2]]
print(f"off by {np.median(errors):.0%} (median) on {len(errors)} forwards that it hasn't seen")
paper = simulator(Slots(6, 72), Policy(slots=6, token_budget=64), fitted)
paper_run = stats(paper.serve(requests), paper.iterations, 6)
print(f"the run: {paper_run.seconds:.2f} s on paper, {live['continuous'].seconds:.2f} s measured")
check_on = record["simulator"]
print(f"as recorded: {check_on['step_error_p50']:.0%} a forward (median); tokens a second")
for row in check_on["rows"]:
    print(f"  {row['name']:<26} {row['simulated_tokens_per_s']:6.1f} on paper, "
          f"{row['measured_tokens_per_s']:6.1f} measured")  # fmt: skip

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### How much load can it take?
#
# Start with the smallest server: one slot. That is the queue at a counter, and it was understood long
# before there were computers. Let $S$ be how long a request is served, $\lambda$ how many come per unit of
# time, and $\rho = \lambda\,\mathrm{E}[S]$ the share of time the counter is busy. Then (Pollaczek and
# Khinchine) the mean wait is
#
# $$W = \frac{\rho}{1-\rho} \cdot \frac{\mathrm{E}[S^2]}{2\,\mathrm{E}[S]}.$$
#
# Two factors, two lessons. $1/(1-\rho)$: a counter that is nearly always busy has nearly infinite queues.
# $\mathrm{E}[S^2]$: a long tail makes *everybody* wait, at the same load.

# %% tags=["nbval-ignore-output"]
wait_guess = predict("From load 0.5 to 0.9, waits grow", unit="times")


# %% slideshow={"slide_type": "subslide"}
def waits(gaps, lengths):
    """The counter's own rule: who comes `gap` later finds what is left of the wait and service."""
    queue = [0.0]
    for gap, length in zip(gaps[1:], lengths, strict=False):
        queue.append(max(0.0, queue[-1] + length - gap))
    return np.array(queue)


def counter(rho, spread, count, rng=None):
    rng = np.random.default_rng(0) if rng is None else rng
    lengths = np.array(Lengths(8, spread, most=100).draw(rng, count))
    return np.diff(poisson_arrivals(rho / lengths.mean(), count, rng), prepend=0), lengths


gaps, lengths = counter(0.8, 1.0, 60)
one_slot = simulator(Slots(1, 128), Policy(slots=1))
queue = [done.queue_s for done in one_slot.serve(
    ask(1, int(n), at) for n, at in zip(lengths, gaps.cumsum(), strict=True))]  # fmt: skip
print("our scheduler with one slot keeps the rule:", np.allclose(queue, waits(gaps, lengths)))

# %% slideshow={"slide_type": "subslide"}
mean_wait = {}
for spread, name in ((0.0, "all alike"), (1.0, "long tail")):
    for rho in (0.5, 0.8, 0.9):
        gaps, lengths = counter(rho, spread, 200_000)
        S = lengths.astype(float)
        formula = rho / (1 - rho) * (S**2).mean() / (2 * S.mean())
        mean_wait[name, rho] = waits(gaps, lengths).mean()
        print(f"{name}, load {rho}: predicted {formula / S.mean():5.2f} services, "
              f"counted {mean_wait[name, rho] / S.mean():5.2f}")  # fmt: skip

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
wait_guess.reveal(mean_wait["long tail", 0.9] / mean_wait["long tail", 0.5], predicted=9.0)

# %% [markdown]
# Nearly twice the load, nine times the wait. And a counter with a long tail is worse than one without by
# the same factor at every load. A server with many slots is kinder, since a long text blocks one of them
# and not all, but it has the same wall. Where does it stand?

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Llama-3-8B on an H100
#
# 16 slots, prompts around 256 tokens, answers around 64, with long tails. The roofline gives each forward's
# time, a lower bound. More and more users come:

# %%
llama3_step = RooflineStep(PUBLISHED["llama-3-8b"], h100)


def under_load(rate, kind, count=200):
    traffic = make_trace(count, rate_per_s=rate, prompt_tokens=Lengths(256, most=2048),
                         new_tokens=Lengths(64, most=512), seed=0)  # fmt: skip
    loop = simulator(Slots(16, 2560), Policy(slots=16, token_budget=512), llama3_step, kind)
    return stats(loop.serve(traffic), loop.iterations, 16)


curve = {("static", r): under_load(r, StaticScheduler) for r in (4, 8, 16)}
curve |= {("continuous", r): under_load(r, Scheduler) for r in (4, 16, 32, 64)}

# %% slideshow={"slide_type": "subslide"}
print("            users/s   tokens/s   slots at work   TTFT p50      p90    TPOT p50")
for (name, rate), run in curve.items():
    print(f"{name:<11} {rate:7} {run.tokens_per_s:10.0f} {run.slot_use:12.0%} {run.ttft.p50:13.3f} s "
          f"{run.ttft.p90:6.2f} s {1e3 * run.tpot.p50:6.2f} ms")  # fmt: skip
assert curve["continuous", 16].ttft.p50 < 0.05 * curve["static", 16].ttft.p50

# %% [markdown]
# **Read.** The static server meets its wall between 8 and 16 users a second: twice the users bring few more
# tokens, and more than half of its slots still have nothing to do. Long before that, at 4, its users wait
# many times as long as the others', because whoever comes a moment too late waits for a whole batch. The
# continuous one doesn't notice 16 users a second. Between 32 and 64 it meets a wall of its own. Beyond a
# wall the queue grows for as long as you test: there TTFT says how many requests we sent, and nothing about
# the server. And look at the last column: at every load the *pace* is nearly the same. Overload shows in
# TTFT, not in TPOT.

# %% [markdown] slideshow={"slide_type": "notes"}
# *For the instructor.* Cover the table below its first row of each server and let the room guess at which
# rate each will break. Then ask which column a monitoring page should show. Tokens a second rises to a
# plateau and looks best when it is too late; slots at work looks like there was room; TPOT hardly moves.
# Only TTFT at p90 tells.

# %% [markdown] slideshow={"slide_type": "subslide"}
# The reference model's own curve, with the step time fitted to its recorded run:
#
# ![Time to first token that 90% stay below, against requests a second: static, simulated, from 11.2 s at 0.1 a second to 1,330 s at 2; continuous, simulated, from 0.725 s at 0.1 a second to 210 s at 2.](../images/load-curve.svg)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### What is reported
#
# | | against | times the throughput |
# |---|---|---|
# | Orca (Yu et al. 2022), GPT-3 175B | FasterTransformer, at equal latency | up to 36.9 |
# | Anyscale's benchmark (blog, 2023) | naive static batching | 8, and 23 with vLLM |
#
# At full load our $H_B$ explains a factor of 3 to 4. Where does the rest come from? "At equal latency" reads
# two curves like those above *sideways*: how many users can each server take before the wait is longer than
# some limit? The stricter the limit, the larger the ratio:

# %%
limit_s = curve["static", 4].ttft.p50
keep = {name: max(r for (n, r), run in curve.items() if n == name and run.ttft.p50 <= limit_s)
        for name in ("static", "continuous")}  # fmt: skip
print(f"of the rates we tried, half begin within {limit_s:.2f} s up to {keep['static']} users a second "
      f"(static) and {keep['continuous']} (continuous)")  # fmt: skip
assert keep == {"static": 4, "continuous": 32}

# %% [markdown]
# Eight times, from the same two schedulers, both below their walls. It depends on the limit: ask for a tenth
# of it, and the static server can't keep it even at 4 users a second, while the other one still does at 32.
# And vLLM also fits more texts into the same memory: that is the next notebook. Ask of every such number:
# *at which load, against which batch, with which tail, under which limit?*

# %% [markdown] slideshow={"slide_type": "slide"}
# ## What to remember
#
# - A static batch waits for its longest text: with exponential lengths it uses $1/H_B$ of its seats. The
#   larger the batch, the worse.
# - Iteration-level scheduling decides anew after every forward. It needs to know *that* a text has ended,
#   never when it will.
# - Selective batching: linear layers take one flat run, attention keeps texts apart. So who shares the
#   forward changes when a token comes, never which.
# - A prompt stops all who decode. Chunks under a token budget near the ridge make the pause small, and cost
#   the newcomer little.
# - Admit by memory, put back the newest, let nobody starve. And leave room: waits grow as $1/(1-\rho)$, and
#   with the tail.

# %% tags=["nbval-ignore-output"]
status("09")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ## Papers and sources
#
# - Stanford CS336, spring 2025, lecture 10, *Inference*; Julien Simon, *Deep Dive: Optimizing LLM
#   Inference*: the problem, the two ideas, the waiting-to-served ratio.
# - Yu et al. 2022, *Orca: A Distributed Serving System for Transformer-Based Generative Models*, OSDI 22:
#   iteration-level scheduling, selective batching.
# - Agrawal et al. 2024, *Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve*,
#   arXiv:2403.02310: chunked prefill beside decoding.
# - Sheng et al. 2024, *Fairness in Serving Large Language Models*, arXiv:2401.00588: counters of tokens.
# - Kwon et al. 2023, arXiv:2309.06180: preemption by recomputing; the subject of notebook 10.
# - Anyscale 2023, *How continuous batching enables 23x throughput in LLM inference* (blog).
# - GeeeekExplorer/nano-vllm#67: a decode position one too far; #213: a chunk that sees the whole text.
#   neuralmagic/vllm#92: a refused request keeps its blocks.
