# %% [markdown] slideshow={"slide_type": "slide"}
# # 12 · Putting it together
#
# Each notebook so far ended with a factor. A cache, a batch, fewer bits, fewer layers, good guesses, a
# better schedule: each made the same small model several times as fast, or several times as small, and each
# was measured alone. What do they come to *together*?
#
# Multiply them up, and you get a number that nobody has ever measured. This notebook switches them on in
# turn: one model, one machine, one table, every row predicted and then run.
#
# You will
#
# 1. ask twelve questions of one model in every way that the course knows;
# 2. find out what goes together and what does not, and for which reason;
# 3. predict bytes exactly, seconds nearly, and read what the difference says;
# 4. cut a model in two, run it in two processes, and count what the halves say to each other;
# 5. sell three configurations to three customers, and have each measured.

# %% slideshow={"slide_type": "subslide"}
from lecture_util.classroom import check, hint, predict, status, use_style
from lecture_util.together.configuration import Configuration, Incompatible
from lecture_util.together.scenarios import SERVER, trial

use_style()
bench = trial()  # the reference model, its variants when asked for, and text to judge them by
variants, tokenizer = bench.variants, bench.tokenizer
model, config = variants.model, variants.model.config

# %% [markdown] slideshow={"slide_type": "subslide"}
# Before anything else, a guess, to be opened in section 4. Naive generation (notebook 03) is the start.
# Then everything that goes together: cache, continuous batching of 12, shared pages, 4 bits, fewer layers.

# %% tags=["nbval-ignore-output"]
total = predict("All together, on a small server: how many times naive's speed?", unit="times")

# %% [markdown] slideshow={"slide_type": "notes"}
# *For the instructor.* Collect the guesses for the total before section 1, and have somebody multiply the
# course's factors on the board as the room recalls them; leave that number standing. When the table is up,
# ask for the cause of each line before you read it out. Four answers exist: less computed (cache, shared
# beginnings), fewer bytes a forward (bits, layers), fewer forwards (guesses), one reading for many (a batch).

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 1. One workload, four scales
#
# To compare, everybody must answer the same. A garden club has put its notes into the system prompt, and
# its members ask about them:

# %%
from lecture_util.together.workload import SYSTEM, assistant

workload = assistant(tokenizer)
print(SYSTEM[:226], "...")

# %% slideshow={"slide_type": "subslide"}
columns = zip(*workload.prompts, strict=False)
shared = next(n for n, column in enumerate(columns) if len(set(column)) > 1)
lengths = [len(prompt) for prompt in workload.prompts]
print(f"{len(workload)} requests of {min(lengths)} to {max(lengths)} tokens; "
      f"the first {shared} are the same in all")  # fmt: skip
print("new tokens:", workload.new_tokens, "=", sum(workload.new_tokens))

# %% [markdown] slideshow={"slide_type": "subslide"}
# Three things to be won are built into it. All prompts begin alike (notebook 10), answers quote their notes
# (08), and their lengths differ (09). All are asked at once. A workload without them is just as honest, and
# gives another table: whoever quotes a speed-up owes you the workload.
#
# Each way of answering is put on four scales:
#
# - **tokens a second**, over the whole run;
# - **time to first token**: the median, waiting included;
# - **bytes**: weights, and the most cache that was lent at once;
# - **perplexity** on English that nothing here was calibrated or trained on.
#
# The last is for what *changes* the model: fewer bits, fewer layers. What only *arranges* the work must not
# change a single token. So there is a fifth column, *same tokens*: the share of each answer before it first
# differs from the naive one.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 2. What goes with what
#
# A `Configuration` says what is switched on. Its default is a plain cached loop:

# %%
print(Configuration())
print(Configuration("int4", draft="ngram"))
print(Configuration("int8", schedule="continuous", slots=12, pages=True, prefix=True))

# %% [markdown] slideshow={"slide_type": "subslide"}
# Not everything can be switched on together. Some wishes:

# %% slideshow={"slide_type": "subslide"}
from textwrap import fill

wishes = [
    dict(cache=False, draft="ngram"),
    dict(draft="ngram", schedule="continuous", slots=4),
    dict(draft="eagle", student=True),
    dict(schedule="static", slots=4, pages=True),
    dict(schedule="continuous", slots=4, prefix=True),
]
for wish in wishes:
    try:
        Configuration(**wish)
    except Incompatible as reason:
        print(wish, fill(f"no: {reason}", 96, subsequent_indent="    "), sep="\n")

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Read.** Three kinds of *no*. Some are logic: what is verified on top of a cache needs a cache. One is
# caution: EAGLE's head was trained on the features of the whole model, and its loader takes no other. (It
# could do no harm but waste time: verification keeps every text exact. Do you expect it to guess as well on
# the student? `EagleDrafter` takes any reader: try.) And one is economy: guesses in a batch. That one *can*
# be built, and the large engines have; our loop verifies one text, and section 7 computes when it would pay.
#
# How many wishes are left?

# %%
from itertools import product

from lecture_util.together.configuration import DRAFTS, SCHEDULES, WEIGHTS


def sensible(weights, student, cache, schedule, pages, prefix, draft):
    slots = 1 if schedule == "single" else 12
    try:
        Configuration(weights, student, cache, schedule, slots, pages, prefix, draft)
    except Incompatible:
        return False
    return True


switch = (False, True)
wishes = list(product(WEIGHTS, switch, switch, SCHEDULES, switch, switch, (None, *DRAFTS)))
print(f"{sum(sensible(*wish) for wish in wishes)} of {len(wishes)} combinations make sense")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 3. Bytes, on paper
#
# Memory is the part that a formula knows exactly. Of weights: so many bytes for a number in the blocks'
# linear layers, so many in the rest (the embedding, which is also the head), and the scales. Predicted from
# shapes alone, held against what the tensors hold:

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
from lecture_util.together.variants import BYTES, held_bytes, predicted_bytes

kinds = [(weights, False) for weights in WEIGHTS] + [("fp32", True), ("int8", True)]
made = {kind: variants.get(*kind) for kind in kinds}  # rounds and prunes, some seconds
print("made", *(f"{'student ' * student}{weights}" for weights, student in made), sep=", ")

# %% slideshow={"slide_type": "subslide"}
for (weights, student), variant in made.items():
    linear, rest = BYTES[weights]
    predicted_size, size = predicted_bytes(variant.config, weights), held_bytes(variant)
    assert predicted_size == size
    name = "student " * student + weights
    print(f"{name:<13} {linear:6.4g} and {rest} bytes a number: {size / 1e6:6.1f} MB, as predicted")

# %% [markdown]
# (The student is notebook 07's idea carried through: six of 30 layers left out, and a thin adapter, trained
# by distillation and merged as in notebook 11, that repairs some of the damage.)
#
# 4 bits are not an eighth of 32: each group of 64 has its scale and its minimum, and the embedding stays in
# bf16. It is a fifth of this small model's numbers.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### The cache: rows, pages, shared pages
#
# 12 slots. In **rows** each slot has room for the longest prompt and the longest answer. In **pages** of 16 a
# text holds what it has, rounded up. And the pages of the common beginning are held **once**:

# %%
from lecture_util.roofline import kv_bytes_per_token

token_bytes = kv_bytes_per_token(config, 4)  # keys and values in fp32
slots, page = 12, 16
ends = [p + n for p, n in zip(lengths, workload.new_tokens, strict=True)]
in_rows = slots * (max(lengths) + max(workload.new_tokens)) * token_bytes
in_pages = sum(-(-S // page) * page for S in ends) * token_bytes
once = shared // page
in_shared = (once + sum(-(-S // page) - once for S in ends)) * page * token_bytes
for name, size in [("rows", in_rows), ("pages", in_pages), ("shared", in_shared)]:
    print(f"{name:<7} {size / 1e6:6.1f} MB, {size / in_rows:4.0%}")

# %% [markdown]
# The last two count every text at its full length at once: an upper bound. Who ends early gives pages back,
# so the schedule below holds a little less.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Exercise 12.1: the bytes of a configuration
# *10 minutes · deriving what a configuration holds, from shapes alone*
#
# Several texts are held at once. Return the bytes of weights and cache.
#
# - Weights: `linear_bytes` for each number in the blocks' linear layers (`"attention"` and `"mlp"` of
#   `params_by_part(config)`), scales included, and `rest_bytes` for each of all others.
# - Cache: a key and a value of width $KH$ in each layer for each token, `cache_bytes` a number.
# - It is lent in whole pages of `page` tokens. All texts begin with the same `shared` tokens, and every one
#   goes on after them. A page can be shared only if *all* of it is the same in all texts; every other page
#   is each text's own.
# - `lengths` are the texts' tokens, the shared ones included. All texts are held at the same time.

# %% slideshow={"slide_type": "skip"}
from lecture_util.roofline.accounting import params_by_part


def memory_of(config, lengths, shared, page, linear_bytes, rest_bytes, cache_bytes):
    """Bytes of weights and of all pages lent to texts of these lengths. Widths: bytes a number."""
    ### BEGIN SOLUTION
    parts = params_by_part(config)
    linear = parts["attention"] + parts["mlp"]
    weights = linear_bytes * linear + rest_bytes * (sum(parts.values()) - linear)
    once = shared // page
    pages = once + sum(-(-n // page) - once for n in lengths)
    return weights + pages * page * 2 * config.L * config.K * config.H * cache_bytes
    ### END SOLUTION


# %% slideshow={"slide_type": "skip"}
check("12.1", memory_of)

# %% [markdown]
# Stuck? Each call opens one more hint.

# %% slideshow={"slide_type": "skip"}
hint("12.1")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 4. Seconds, on paper
#
# A forward takes the longer of computing and reading (notebook 02), and some time just to be started. For a
# machine that is made up, so that everybody gets the same numbers:

# %%
overhead_s = 1e-3
peaks = ", ".join(f"{rate / 1e12:g} in {name}" for name, rate in SERVER.flops_per_s.items())
print(f"{SERVER.name}, TFLOP/s: {peaks}")
print(f"{SERVER.bandwidth_bytes_per_s / 1e9:g} GB/s, and {1e3 * overhead_s:g} ms a forward besides")

# %% [markdown] slideshow={"slide_type": "subslide"}
# One decode step with 200 tokens in the cache, by hand: all weights are read, 201 tokens of cache as well, and
# one is written. The library's `PeakStep` says the same of any forward:

# %%
from lecture_util.roofline import forward_flops
from lecture_util.together.costs import PeakStep
from lecture_util.together.run import Piece

compute_s = forward_flops(config, 1, 1, 201) / SERVER.flops_per_s["fp32"]
memory_s = (predicted_bytes(config, "fp32") + 202 * token_bytes) / SERVER.bandwidth_bytes_per_s
by_hand = overhead_s + max(compute_s, memory_s)
step_time = PeakStep(config, "fp32", SERVER, overhead_s)
assert abs(step_time([Piece(start=200, count=1)]) / by_hand - 1) < 1e-9
print(f"computing {1e3 * compute_s:.2f} ms, reading {1e3 * memory_s:.2f}: {1e3 * by_hand:.2f} ms")

# %% [markdown] slideshow={"slide_type": "subslide"}
# So far one forward. Which forwards a configuration needs, the schedulers of notebooks 09 and 10 know without
# a model: they run on paper, over all twelve requests, and the formula charges each forward. Only one thing
# can't be known from shapes: what an n-gram guesses right. So we let it guess on *four other questions*:

# %% slideshow={"slide_type": "subslide"}
from lecture_util.serving.clock import VirtualClock
from lecture_util.together.run import serve

questions = assistant(tokenizer, 4, start=12, scale=0.5)
clock = VirtualClock(lambda pieces: step_time(pieces))
tried = serve(model, Configuration(draft="ngram"), questions, clock)
tally = tried.tally
gain, guesses = tally.tokens_per_round, tally.drafted / tally.rounds
print(f"{tried.new_tokens} tokens in {tried.forwards} forwards: {gain:.2f} tokens a round, "
      f"{guesses:.2f} guesses")  # fmt: skip

# %% [markdown]
# The model really ran here, and its texts are real. Only the seconds were charged by formula: a *virtual
# clock*, as in notebook 09. That is how a notebook can print times that are the same on your machine.

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
best = predict(
    "One technique on top of the cache, on this server: which makes the most tokens a second?",
    choices=["bf16 weights", "int8 weights", "4-bit weights", "pruned student", "n-gram drafts",
             "a batch of 12", "continuous batching"],
)  # fmt: skip

# %% slideshow={"slide_type": "subslide"}
from dataclasses import replace

from lecture_util.together.costs import from_peaks
from lecture_util.together.predict import predict as on_paper
from lecture_util.together.table import ROWS

shapes = {False: config, True: made["fp32", True].config}


def charged(c, machine=SERVER):
    """A configuration on paper, on a machine that need not be here."""
    costs = from_peaks(shapes[c.student], c.weights, machine, overhead_s)
    costs = replace(costs, tokens_per_round={"ngram": gain}, drafted={"ngram": guesses})
    return on_paper(shapes[c.student], c, workload, costs)


paper = {label: charged(c) for label, c in ROWS if c.draft in (None, "ngram")}

# %% slideshow={"slide_type": "subslide"}
naive = paper["naive"]
print(f"{'':<29} tokens/s  times  first token  memory")
for label, row in paper.items():
    print(f"{label:<29} {row.tokens_per_s:8.0f} {row.tokens_per_s / naive.tokens_per_s:6.1f} "
          f"{row.ttft_s:11.2f}s {row.memory_bytes / 1e6:5.0f}MB")  # fmt: skip

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
best.reveal(predicted=max(best.choices, key=lambda label: paper[label].tokens_per_s))

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Read**, each step with its cause:
#
# - The **cache** saves computing. This machine has much of it beside its bandwidth, so re-reading a short
#   text costs less than you may remember from notebook 03; on a laptop (below) it is worth more.
# - **Fewer bits, fewer layers**: fewer bytes a forward, as many forwards.
# - **Guesses**: fewer forwards, as many bytes in each.
# - A **batch**: the same forwards serve many, so that weights are read once for all. The first token comes
#   sooner as well, since nobody queues behind eleven others.
# - **Pages** alone bring no speed, as notebook 10 said; they bring room. **Sharing** them brings both: most
#   of each prompt is computed once, and lies there once.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Do the factors multiply?

# %%
rate = {label: row.tokens_per_s for label, row in paper.items()}
factors = {
    "cache": rate["KV cache"] / rate["naive"],
    "batch, shared pages": rate["+ prefix sharing"] / rate["KV cache"],
    "4 bits": rate["4-bit weights"] / rate["KV cache"],
    "student": rate["pruned student"] / rate["KV cache"],
}
multiplied = 1.0
for name, factor in factors.items():
    multiplied *= factor
    print(f"{name:<20} {factor:5.2f}   so far {multiplied:6.1f}")
together = rate["server, 4-bit student"] / rate["naive"]
print(f"all of them, as the schedule has it: {together:.1f}")
assert together < multiplied

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
total.reveal(predicted=together)

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Read.** On this server they come to less than their product. Each factor was measured where the weights
# were nearly all that a step reads. Once a batch shares them, weights are a smaller part of a step; caches,
# computing and the start of a forward are the rest, and no bits saved on weights shrink those. We come back
# to it in section 7. The same list on a laptop, which computes a fifth as much and reads half as fast:

# %% slideshow={"slide_type": "subslide"}
from lecture_util.together.scenarios import LAPTOP

chosen = ["KV cache", "4-bit weights", "n-gram drafts", "4-bit, n-gram drafts", "+ prefix sharing",
          "server, 4-bit student"]  # fmt: skip
rows = dict(ROWS)
first = {m.name: charged(rows["naive"], m).tokens_per_s for m in (SERVER, LAPTOP)}
for label in chosen:
    times = (charged(rows[label], m).tokens_per_s / first[m.name] for m in (SERVER, LAPTOP))
    print(f"{label:<24}", *(f"{x:6.1f} times on {m}" for x, m in zip(times, first, strict=True)))

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 5. Seconds, here
#
# Now this machine, with its own clock: two questions, answers cut short, so that it takes seconds and not minutes. The
# prediction is no longer from a data sheet. A handful of forwards of the fp32 model are timed, a line is fitted
# through them (notebook 09's `FittedStep`), and for other weights it is scaled by *bytes*:

# %% [markdown] slideshow={"slide_type": "notes"}
# *For the instructor.* Let the room rank the rows before you show the table, then look only at the signs of
# "off". Whoever says "4 bits must be four times as fast" should explain the row. If the class has GPUs, ask
# which of the five causes vanish there (the copy, mostly the unpacking) and which new one appears (launches).

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
from lecture_util.serving.simulate import FittedStep
from lecture_util.together.costs import Costs, time_forwards

# each as (sequences, new tokens, tokens held before)
FORWARDS = ((1, 1, 64), (1, 1, 210), (1, 4, 210), (2, 1, 210), (1, 96, 0), (1, 210, 0))
step_here = FittedStep.fit(time_forwards(model, FORWARDS, repeats=2))
print(f"a token after 210: {1e3 * step_here([Piece(210, 1)]):.0f} ms; "
      f"two at once: {1e3 * step_here([Piece(210, 1)] * 2):.0f} ms; "
      f"a prompt of 210: {1e3 * step_here([Piece(0, 210)]):.0f} ms")  # fmt: skip

# %% slideshow={"slide_type": "subslide"}
small = assistant(tokenizer, 2, start=3, scale=0.125)
busy = dict(schedule="continuous", slots=2, pages=True, prefix=True)
LIVE = (
    ("naive", Configuration(cache=False)),
    ("KV cache", Configuration()),
    ("n-gram drafts", Configuration(draft="ngram")),
    ("pages, shared", Configuration(**busy)),
    ("int8 weights", Configuration("int8")),
    ("4-bit weights", Configuration("int4")),
    ("int8 student, pages, shared", Configuration("int8", True, **busy)),
)
print(f"{len(small)} questions, {small.new_tokens} new tokens, {len(LIVE)} ways to answer")

# %% slideshow={"slide_type": "subslide"}
measured_here = Costs(step_here, step_here, {}, {"ngram": gain}, {"ngram": guesses})


def by_bytes(c):
    """This machine's fp32 forwards, as much shorter as fewer bytes are read."""
    shape = shapes[c.student]
    share = predicted_bytes(shape, c.weights) / predicted_bytes(config, "fp32")
    return on_paper(shape, c, small, measured_here.scaled(share))


# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
outcomes = {label: serve(variants(c), c, small) for label, c in LIVE}

# %% [markdown]
# What must not depend on the machine, first. Bytes as predicted; and in fp32, whatever only arranges the
# work says the same words:

# %% slideshow={"slide_type": "subslide"}
for label, c in LIVE:
    outcome = outcomes[label]
    assert outcome.weight_bytes + outcome.cache_bytes == by_bytes(c).memory_bytes
    if c.weights == "fp32" and not c.student:
        assert outcome.same_tokens(outcomes["naive"]) == 1
        print(f"{label:<15} the same {outcome.new_tokens} tokens, in {outcome.forwards:>2} forwards, "
              f"{outcome.cache_bytes / 1e6:4.1f} MB of cache")  # fmt: skip

# %% [markdown] slideshow={"slide_type": "subslide"}
# And the quality of what does change the model. If two changes each do their own damage, perplexities should
# multiply: what the student alone does, times what 8 bits alone do.

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
quality = {}
for weights, student in [kind for kind in made if kind[0] != "bf16"]:
    quality[weights, student] = bench.perplexity(Configuration(weights, student))
base = quality["fp32", False]


def damage(c):
    return quality[c.weights, False] * quality["fp32", c.student] / base


for (weights, student), score in quality.items():
    name = "student " * student + weights
    print(f"{name:<13} {score:6.2f}, predicted {damage(Configuration(weights, student)):6.2f}")
print("(for one change alone the prediction is the measurement)")

# %%
assert base < quality["int8", False] < quality["int4", False] and base < quality["fp32", True]
assert abs(damage(Configuration("int8", True)) / quality["int8", True] - 1) < 0.05
print("int8 costs a little, 4 bits and fewer layers more; two changes nearly multiply")

# %% [markdown] slideshow={"slide_type": "subslide"}
# Now the seconds. *Limit*: by two peaks that were measured here. *Predicted*: from the few timed forwards,
# scaled by bytes.

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
from IPython.display import Markdown

from lecture_util.roofline import this_machine
from lecture_util.together.table import Row, markdown


def row_of(label, c):
    peaks = from_peaks(shapes[c.student], c.weights, this_machine(str(model.device)))
    peaks = replace(peaks, tokens_per_round={"ngram": gain}, drafted={"ngram": guesses})
    limit, outcome = on_paper(shapes[c.student], c, small, peaks), outcomes[label]
    scores = damage(c), quality[c.weights, c.student]
    same = outcome.same_tokens(outcomes["naive"])
    return Row(label, c, limit, by_bytes(c), outcome, scores, same)


live = [row_of(label, c) for label, c in LIVE]

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
Markdown(markdown(row.record() for row in live))

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Read** the columns *off*, in this order:
#
# - The *KV cache* row is what was timed, in other words; if even this one is far off, something else is
#   running on your machine.
# - *8 and 4 bits*: the prediction counts bytes, and is too good, most of all for the *first token*. Reading a
#   prompt waits for computing (notebook 02), and fewer bytes don't help there. On the contrary: a CPU
#   multiplies no 4-bit numbers but unpacks them first, and 8 bits need their activations rounded. On paper
#   bits are bytes; in a kernel they are work (notebook 06).
# - *Memory* of the 4-bit row: on a CPU torch's operator keeps a second copy in an order that it likes. Our
#   formula knows the format, not the operator.
# - *Pages, shared*: our engine attends to each text in its own call, a cost that a cache in rows hasn't.
# - *n-gram drafts*: their gain was learnt on four other questions. One of these two asks for a text word for
#   word, so they guess better here.
#
# On a GPU so small a model waits for its *launches* (notebook 10): there fewer bytes change little, and the
# scaled predictions are far off.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 6. The one table
#
# Twelve questions, answers in full, 21 ways to give them, all on one machine: `make table` records it
# (`benchmarks/together.py`), on yours too.

# %% tags=["nbval-ignore-output"]
from lecture_util.classroom.figures.small_caches import recorded

record = recorded("together")
recorded_rows = {row["label"]: row for row in record["rows"]}
plain, drafted, pruned = (recorded_rows[x] for x in ("KV cache", "EAGLE's head", "4-bit student"))
print(f"{record['date']}, {record['hardware']}: {record['workload']['requests']} requests, "
      f"perplexity of {record['workload']['windows']} windows, {plain['perplexity']:.1f} to begin with")  # fmt: skip
eagle = predict("EAGLE's head on a CPU, over the plain cache's tokens a second", unit="times")
worse = predict("Perplexity of the pruned student in 4 bits")

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
eagle.reveal(drafted["tokens_per_s"] / plain["tokens_per_s"],
             predicted=drafted["predicted_tokens_per_s"] / plain["predicted_tokens_per_s"])  # fmt: skip
worse.reveal(pruned["perplexity"], predicted=pruned["predicted_perplexity"])

# %% [markdown] slideshow={"slide_type": "subslide"}
# ![21 rows on a logarithmic axis of tokens a second, each with a hollow point (predicted), a full one (measured) and a tick (the limit by two peaks), in three groups. naive 3.96, KV cache 25.8. The fastest of each group: each alone: a batch of 12 46.3; a server: + prefix sharing 82.3; together: server, 4-bit student 130.](../images/ladder.svg)

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "skip"}
Markdown(markdown(record["rows"]))

# %% [markdown] slideshow={"slide_type": "subslide"}
# ![21 points: memory against tokens a second, both logarithmic, coloured by perplexity. On the frontier, from little memory to much: 4-bit student, 157 MB, 37.3 a second, perplexity 26.4; 4-bit student, n-gram drafts, 157 MB, 41.7 a second, perplexity 26.4; server, 4-bit student, 166 MB, 130 a second, perplexity 26.4.](../images/speed-memory.svg)

# %% [markdown] slideshow={"slide_type": "subslide"}
# How good were the predictions? By scale, the usual error and the worst:
#
# ![Three panels, a dot for each of 21 rows: predicted over measured, 1 is right. tokens a second 0.87 to 1.14, half within 5.0 percent; time to first token 0.74 to 1.20, half within 5.1 percent; memory 0.67 to 1.00, half within 0.0 percent.](../images/prediction-errors.svg)

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
for scale in ("tokens_per_s", "ttft_s", "memory_bytes", "perplexity"):
    off = {
        label: row[f"predicted_{scale}"] / row[scale] - 1 for label, row in recorded_rows.items()
    }
    if scale == "perplexity":  # for one change alone the prediction is the measurement
        off = {label: x for label, x in off.items() if "4-bit student" in label}
    ordered = sorted(off, key=lambda label: abs(off[label]))
    usual, last = ordered[len(ordered) // 2], ordered[-1]
    print(f"{scale:<13} usually {abs(off[usual]):4.0%} off, at most {off[last]:+.0%} ({last})")

# %% [markdown]
# **Read.** Bytes are told, but for the copies that an operator keeps for itself. Seconds are told roughly, and
# each miss has a cause that you can name by now: a run that something else on the machine disturbed, a draft
# that guesses better or worse on other questions, an attention that loops over texts, a kernel that unpacks. The *limit* by two peaks is not reached by anything.
# It tells what could still be won, and where: a row far below its limit waits for something else than its
# bytes.

# %% [markdown] slideshow={"slide_type": "subslide"}
# And the product of section 4, with the recorded factors:

# %% tags=["nbval-ignore-output"]
took = {label: row["tokens_per_s"] for label, row in recorded_rows.items()}
pairs = [("KV cache", "naive"), ("+ prefix sharing", "KV cache"), ("4-bit weights", "KV cache"),
         ("pruned student", "KV cache")]  # fmt: skip
product_of_all = 1.0
for label, over in pairs:
    product_of_all *= took[label] / took[over]
    print(
        f"{label:<17} over {over:<9} {took[label] / took[over]:5.2f}   so far {product_of_all:5.1f}"
    )
print(f"measured together: {took['server, 4-bit student'] / took['naive']:.1f}")

# %% [markdown]
# More or less than the product? On the server of section 4 it was less. Here each factor is smaller, above all
# that of 4 bits, which alone had prompts to read that bits don't help with. Once the beginning is shared there
# is less of that, and 4 bits show. The same two causes, in other proportions: the next section sorts them.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 7. What combines, and what does not
#
# Ask of two techniques *what they spend and what they save*:
#
# 1. They cut **different factors** of one product: they multiply. Fewer layers make every forward shorter,
#    prompts and answers alike, and whatever else is switched on still finds the same share to save.
# 2. One shrinks **the part that the other cuts**: the second finds less to do. 4 bits and guesses both
#    shorten the writing of answers, and neither helps with the prompts.
# 3. One removes **what hid the other**: together they are more than the product. Who shares a prefix computes
#    less of each prompt, and then it shows again that 4 bits are read faster.
# 4. They **spend the same** idle resource: they compete.
# 5. One **changes what the other was made for**: they exclude each other.
#
# ![A triangle of 7 techniques by 7: 4-bit weights, student, batching, pages, shared prefix, n-gram drafts, EAGLE's head. The student multiplies with all but EAGLE's head, which excludes it; 4 bits gain less in a batch (0.69 of the product) and with drafts, more with a shared prefix (1.31); pages change no speed; prefix, pages and batching need one another; drafts exclude batches, pages, prefixes and each other.](../images/what-combines.svg)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Why products promise too much
#
# A step of $B$ texts that waits for memory reads weights, $W$ bytes, and $B$ caches of $c$. Narrower weights
# make $w$ of $W$. Multiply the two factors, each measured alone, and compare with what really happens:

# %%
import sympy

W, w, c, B = sympy.symbols("W w c B", positive=True)


def tokens_per_byte(weights, texts):
    return texts / (weights + texts * c)


before = tokens_per_byte(W, 1)
alone = (tokens_per_byte(w, 1) / before) * (tokens_per_byte(W, B) / before)
both = tokens_per_byte(w, B) / before
excess = c * (B - 1) * (W - w) / ((W + B * c) * (w + c))
assert sympy.simplify(alone / both - 1 - excess) == 0
print("product / truth - 1 =", excess)

# %% [markdown]
# Every factor in it is positive. So while steps wait for memory the product of these two *always* promises too much, unless
# there is no cache ($c = 0$) or no batch ($B = 1$). And computing sets another limit.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Exercise 12.2: speed-ups do not multiply
# *8 minutes · finding what a product of factors leaves out*
#
# A colleague knows two factors, one of narrower weights and one of a batch, and multiplies them:
#
# ```python
# def times_as_fast(num_weights, width, B, cache_bytes, flops, flops_per_s, bytes_per_s):
#     def step_s(width, B):
#         return (num_weights * width + cache_bytes) / bytes_per_s
#
#     narrower = step_s(2, 1) / step_s(width, 1)
#     batched = B * step_s(2, 1) / step_s(2, B)
#     return narrower * batched
# ```

# %% [markdown] slideshow={"slide_type": "subslide"}
# Three things are wrong with it. Mend it: how many times as many tokens a second are made with `width` bytes a
# weight and `B` texts, as with 2 bytes and one text?
#
# - A step takes the longer of computing and reading (both by this machine's peaks). It reads all weights
#   once, and each text's own cache.
# - Computing stays in 16 bits: narrower weights are read faster, and multiplied no faster. The cache keeps
#   its 16 bits, too.
# - `num_weights` numbers; `cache_bytes` and `flops`: of *one* text's step; `flops_per_s`, `bytes_per_s`: the
#   peaks.
# - A step of B texts makes B tokens.


# %% slideshow={"slide_type": "skip"}
def times_as_fast(num_weights, width, B, cache_bytes, flops, flops_per_s, bytes_per_s):
    """Tokens a second with `width` bytes a weight and B texts, over those with 2 and one."""

    ### BEGIN SOLUTION
    def step_s(width, B):
        compute_s = B * flops / flops_per_s
        memory_s = (num_weights * width + B * cache_bytes) / bytes_per_s
        return max(compute_s, memory_s)

    return B * step_s(2, 1) / step_s(width, B)
    ### END SOLUTION


# %% slideshow={"slide_type": "skip"}
check("12.2", times_as_fast)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Guesses and a batch want the same thing
#
# A decode step of one text reads all weights and computes next to nothing with them: its arithmetic units
# are idle. Speculation fills them with $\gamma$ guesses, a batch with $B$ texts. While a step of
# $B(\gamma + 1)$ tokens still waits for memory, guesses are free:
#
# $$ \frac{B\,(\gamma+1)\,f}{P} \;\le\; \frac{W + B\,c}{b} $$
#
# ($f$ FLOPs a token, $P$ FLOP/s, $b$ bytes/s.) Up to which batch?

# %%
gamma, f, P, b = sympy.symbols("gamma f P b", positive=True)
(last,) = sympy.solve(sympy.Eq(B * (gamma + 1) * f / P, (W + B * c) / b), B)
assert sympy.simplify(last - P * W / ((gamma + 1) * b * f - P * c)) == 0
print("free up to B = P W / ((gamma + 1) b f - P c), if that is above 0; else always")

# %% slideshow={"slide_type": "subslide"}
from lecture_util.model.config import PUBLISHED
from lecture_util.roofline import ACCELERATORS, weight_bytes

llama, h100 = PUBLISHED["llama-3-8b"], ACCELERATORS["h100"]
free_up_to = sympy.lambdify((W, c, gamma, f, P, b), last)
print("Llama-3-8B in 16 bits on an H100, 4 guesses a text:")
for S in (1, 1024, 4096, 8192, 16384):
    one = S * kv_bytes_per_token(llama), 4, forward_flops(llama, 1, 1, S)
    largest = free_up_to(weight_bytes(llama), *one, h100.peak(), h100.bandwidth_bytes_per_s)
    until = f"free up to {largest:.0f} texts" if largest > 0 else "always free"
    print(f"{S:>9,} tokens held: {until}")

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Read.** With short texts the two compete: with 4 guesses each, some sixty texts fill the machine. From
# there guesses are no longer free, though right ones still pay for a while (the picture), and in the end each
# costs a token that somebody else would have had. With long ones a step reads mostly *caches*,
# one for each text, however many guesses it brings along. Then no batch ever fills the arithmetic units, and
# guesses stay free. So the rule "speculation is for small batches" is a rule for short contexts.
#
# ![Gain of guesses against batch size, logarithmic, for Llama-3-8B on an H100, 8 in 10 guesses right. Left, 128 tokens each: 1 guess gains 1.80 times and pays to B = 378, 2 gain 2.44 to 328, 4 gain 3.36 to 254, 8 gain 4.33 to 168; then below 1. Right, 4 guesses: with 128 tokens each they stop paying; with 512, 1,024 and 4,096 memory is full before.](../images/speculation-batch.svg)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Exercise 12.3: when a batch has spent what speculation needs
# *12 minutes · predicting where two techniques compete for one resource*
#
# `B` texts decode together, and each could be given `gamma` guesses that cost nothing to make (n-grams). A
# guess is right with probability `alpha` if all before it were; a round ends with one token of the model's
# own, as in notebook 08.
#
# - A forward takes the longer of computing (`flops` for each token read, over `flops_per_s`) and reading: the
#   weights once, each text's cache once, however many tokens of that text the forward reads (over
#   `bytes_per_s`). The cache does not grow in this exercise.
# - A plain step reads one token a text; a round reads `gamma + 1`.
# - Return `(gains, last)`: `gains[B - 1]` is how many times as many tokens a second the rounds give as plain
#   steps *of the same B*, for B from 1 to `most`; and the largest of these B with a gain above 1, or 0 if
#   there is none. $0 \le$ `alpha` $< 1$ and `gamma` $\ge 1$.


# %% slideshow={"slide_type": "skip"}
def speculation_gains(
    alpha, gamma, weight_bytes, cache_bytes, flops, flops_per_s, bytes_per_s, most
):
    """([gain with B = 1, 2, ..., most], the largest B that gains).

    cache_bytes: of one text; flops: of one token.
    """

    ### BEGIN SOLUTION
    def forward_s(B, tokens):
        memory_s = (weight_bytes + B * cache_bytes) / bytes_per_s
        return max(B * tokens * flops / flops_per_s, memory_s)

    tokens = sum(alpha**k for k in range(gamma + 1))
    gains = [tokens * forward_s(B, 1) / forward_s(B, gamma + 1) for B in range(1, most + 1)]
    return gains, max((B for B, gain in enumerate(gains, 1) if gain > 1), default=0)
    ### END SOLUTION


# %% slideshow={"slide_type": "skip"}
check("12.3", speculation_gains)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 8. Past one machine
#
# Notebook 03 had two ways to use $M$ devices: **copies**, each with its own users, and **shards**, each with a
# part of every layer. For shards it counted the reading and left out the talking. Now we do it.
#
# Cut a block so that as little as possible must be said. The first of two products is cut by its *columns*:
# each shard makes its own heads, its own part of the MLP, from the whole input, and needs nobody. The second
# is cut by *rows*: each shard multiplies what it has, and the results must be **added up**. Two sums a block.
# Keys and values of a shard's heads stay with it, so the cache is cut as well.
#
# ![Two lanes, a rank each, for a block of Llama-3-8B. Both have x whole. Columns of qkv give each rank 16 query heads and 4 of 8 KV heads, whose cache it keeps; it attends alone and multiplies by its rows of out. An all-reduce adds both parts. Columns of gate_up give each 7,168 of 14,336 channels, rows of down another part; a second all-reduce adds. 2 messages a block, 65 with the embedding's.](../images/tensor-parallel.svg)

# %% [markdown] slideshow={"slide_type": "subslide"}
# A cut in two, on numbers that fit on the screen. $A$ by columns, $B$ by rows; the sum is exact:

# %%
import torch

torch.manual_seed(0)
x_BD, A_DF, B_FD = (torch.randint(-3, 4, shape).double() for shape in [(2, 4), (4, 6), (6, 4)])
whole = torch.relu(x_BD @ A_DF) @ B_FD
parts = [torch.relu(x_BD @ A_DF[:, cut]) @ B_FD[cut] for cut in (slice(0, 3), slice(3, 6))]
assert torch.equal(parts[0] + parts[1], whole)
print("one half says", parts[0][0].int().tolist(), "and the other", parts[1][0].int().tolist())
print("their sum is", whole[0].int().tolist(), "and nothing was said in between")

# %% [markdown]
# (In between is a relu, which sees each column alone. A norm over all columns would need another message.)

# %% [markdown] slideshow={"slide_type": "subslide"}
# Now really: two processes, each with half of a small model, that send each other messages with
# `torch.distributed` (gloo on a CPU, NCCL between GPUs). `lecture_util.parallel` cuts the very same
# `Transformer`, by torch's own parallel API. The processes start Python and torch afresh; it takes a while.

# %% tags=["nbval-ignore-output"]
from lecture_util.parallel.demonstrate import demonstrate

halves = demonstrate(M=2)
print(halves)

# %% slideshow={"slide_type": "subslide"}
assert halves.same_tokens and halves.logits_gap < 1e-4 * halves.largest_logit
assert halves.weight_bytes == halves.predicted_weight_bytes
assert set(halves.cache_bytes) == {halves.predicted_cache_bytes}
assert all(traffic == halves.predicted_traffic for traffic in halves.traffic)
seen = halves.traffic[0]
print(f"the same tokens; {halves.weight_bytes[0]:,} of {halves.whole_weight_bytes:,} bytes")
print(f"{seen.messages} messages a step, {seen.payload_bytes:,} bytes in them")

# %% [markdown]
# Was it faster? The last line of the cell before says so, and proves little either way: both halves read
# through the same memory, and wait for each other whenever somebody else has the core. What is real here are
# the tokens, the bytes and the messages. Compare a message's time with a step's, though, and remember it.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Exercise 12.4: what shards have to say to one another
# *10 minutes · deriving traffic from shapes*
#
# `M` shards (two or more) run one forward: `T` new tokens of each of `B` texts (a decode step has `T = 1`),
# activations of `width` bytes a number.
#
# - Embedding table, attention heads, MLP and output head are sharded, each over all M. So x_BTD has to be
#   summed over the shards, by an all-reduce, after the embedding and in every layer after attention and after
#   the MLP.
# - At the end each text's *last* token goes through the head. A shard has V/M of its logits (M divides V),
#   and an all-gather puts all V together on every shard.
# - Messages go around a ring. An all-reduce of n bytes makes each shard send 2(M-1)/M·n, an all-gather that
#   *results* in n bytes (M-1)/M·n.
# - Return `(messages, sent_bytes)`: how many collectives there are, and the bytes that one shard sends in all
#   of them.


# %% slideshow={"slide_type": "skip"}
def exchanged(config, B, T, M, width):
    """(collectives of one forward, bytes that each of M shards sends in them)."""
    ### BEGIN SOLUTION
    all_reduces = 2 * config.L + 1
    summed = all_reduces * B * T * config.D * width
    gathered = B * config.V * width
    return all_reduces + 1, (2 * summed + gathered) * (M - 1) / M
    ### END SOLUTION


# %% slideshow={"slide_type": "skip"}
check("12.4", exchanged)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### A 13B model on eight H100s
#
# The step-time model of notebook 03, with the waiting in it. A short message takes some 40 µs from call to
# result between eight GPUs of one machine, called from torch (a published measurement, named in `LINKS`).
# One user, 1,024 tokens of cache:

# %% [markdown] slideshow={"slide_type": "notes"}
# *For the instructor.* Before the table, ask for the speed-up of eight GPUs over one. Eight, say some; those
# who remember 03 say less. Then ask which of the three columns a faster link would help (almost nothing, it is
# latency), and what a batch of 64 would change (the reading grows, the waiting does not: shards get better).

# %%
from lecture_util.parallel.step_time import LINKS, sharded_step

print(LINKS["nvlink4"].name)
print(" M   reading   waiting   sending  together")
for M in (1, 2, 4, 8):
    s = sharded_step(PUBLISHED["llama-2-13b"], 1, 1024, h100, M)
    spent = (s.memory_s, s.waiting_s, s.sending_s, s.latency_s)
    said = f"  {s.traffic.messages} messages" * (M > 1)
    print(f"{M:2}", *(f"{1e3 * x:6.2f} ms" for x in spent), said)

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Read.** Bytes are no problem: all that is sent in a step, the link carries in microseconds. *Waiting* is:
# dozens of messages, each needed before the next product can start. How many there are doesn't depend on $M$
# (and each is taken here to last as long as between eight), while reading falls; eight GPUs make one user's tokens about twice as fast. So engines shorten the
# messages: kernels of their own for small all-reduces, and CUDA graphs, so that no Python stands in between.
# And why at all? Because a model that doesn't fit has no other choice, and because the latency of one user is
# what no number of copies improves.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 9. Every switch at once
#
# The whole notebook as a panel: switch techniques on and off, choose model and machine. What is excluded is
# greyed out, with its reason. Start where section 4 ended, and ask what the next switch will do *before* you
# press it.

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
from lecture_util.classroom.widgets import configurator

configurator()

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 10. Three customers
#
# Enough of tables; somebody wants to buy. Three customers, each with a machine (round numbers, made up) and
# with limits to their patience:

# %% slideshow={"slide_type": "subslide"}
from lecture_util.together.scenarios import SCENARIOS

for name, s in SCENARIOS.items():
    print(fill(f"{name}: {s.story}", 96))
    first = f", first token within {1e3 * s.ttft_s:.0f} ms" if s.ttft_s else ""
    print(f"    {s.machine.name}; at most {s.memory_bytes / 1e6:.0f} MB, at least {s.tokens_per_s:.0f} "
          f"tokens/s{first}, perplexity at most {s.perplexity:g}")  # fmt: skip

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Exercise 12.5: three customers
# *20 minutes · choosing what goes together, for somebody*
#
# Return for each name, `"chat"`, `"batch"` and `"laptop"`, the `Configuration` that you would sell. Predict
# before you try: which budget is the tight one, and what relieves it without breaking another?
#
# - The check *runs* your choice: the real model, the real texts; only the seconds come from the customer's
#   machine by its two peaks. It takes a quarter of a minute, and stops at the first customer who is not
#   content.
# - `trial()("chat", Configuration("int8"))` in a cell of your own gives the verdict with all its numbers:
#   `.outcome.tokens_per_s`, `.ttft_s`, `.weight_bytes`, `.cache_bytes`, `.perplexity` and `.broken`.
# - Only eight texts come: 16 slots are enough for anybody.
# - More than one answer can be right.


# %% slideshow={"slide_type": "skip"}
def choose(name):
    """The configuration for "chat", "batch" or "laptop"."""
    ### BEGIN SOLUTION
    if name == "chat":  # begin at once, in little cache: shared pages; 8 bits for the quality
        return Configuration("int8", schedule="continuous", slots=8, pages=True, prefix=True)
    if name == "batch":  # few bytes and all eight in a forward; 4 bits are good enough here
        return Configuration("int4", schedule="continuous", slots=8)
    return Configuration("int8", draft="ngram")  # one text: computing is idle, and edits repeat
    ### END SOLUTION


# %% slideshow={"slide_type": "skip"}
check("12.5", choose)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 11. The lecture, in our words
#
# Thirteen notebooks followed one lecture. Its argument, in a dozen sentences:
#
# - Inference is where a model's life is spent: in use, in evaluation, and inside training by reinforcement
#   ([01](01_the_inference_workload.ipynb)).
# - It differs from training: tokens come one after another, so little is computed for each byte that is
#   read. Reading a prompt waits for arithmetic, writing an answer waits for **memory**
#   ([02](02_arithmetic_intensity.ipynb)).
# - A cache trades computing for memory. Latency is bytes over bandwidth, and a larger batch buys throughput
#   with it ([03](03_kv_cache_latency_throughput.ipynb)).

# %% [markdown] slideshow={"slide_type": "subslide"}
# - So read **less**. A smaller cache: fewer KV heads, a latent, shared layers, a window
#   ([04](04_shrinking_the_kv_cache.ipynb)); fewer bits ([06](06_quantization.ipynb)); fewer weights, repaired by
#   distillation ([07](07_pruning_and_distillation.ipynb)). These cost quality, and that is to be measured.
# - Or read **less often**: guess ahead and let the model check many tokens at once, and lose nothing at all
#   ([08](08_speculative_sampling.ipynb)).
# - Real traffic is ragged: schedule each forward anew ([09](09_continuous_batching.ipynb)), and lend memory in
#   pages, shared where texts agree ([10](10_paged_attention.ipynb)). Both are old ideas of operating systems,
#   as speculation is one of processors.
# - The slides add that fine-tuned models can be merged, so that one serves for several
#   ([11](11_model_merging.ipynb)).

# %% [markdown] slideshow={"slide_type": "subslide"}
# And its open question. All of the above tunes an architecture that was designed to be *trained* fast. A
# state that does not grow ([05](05_beyond_attention.ipynb)) needs no pages; a model that fills in many tokens
# at once has no "one after another" to speculate about. The lecture's bet is that there is more to win in new
# architectures than in the tuning of an old one. Nothing in our table contradicts it: its largest factors
# came from not computing again, and from sharing one reading among many. Both are there because of what *this*
# architecture has to keep and to read, and an architecture decides that first.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 12. Where to go next
#
# Four engines that do this for a living, and the names under which they have what you have built here:
#
# | | vLLM | SGLang | TensorRT-LLM | llama.cpp |
# |---|---|---|---|---|
# | continuous batching (09) | so called | so called | *in-flight batching* | so called |
# | pages (10) | *PagedAttention* | *token attention* | paged KV cache | |
# | shared beginnings (10) | *prefix caching*, by hashes | *RadixAttention*, a tree | block reuse | prompt cache |
# | prompts in pieces (09) | chunked prefill | chunked prefill | chunked prefill | |
# | guesses (08) | n-grams, drafts, EAGLE | n-grams, drafts, EAGLE | n-grams, EAGLE, MTP | n-grams, drafts, EAGLE |
# | fewer bits (06) | AWQ, GPTQ, INT8, FP8 | AWQ, GPTQ, FP8 | FP8, FP4 | *GGUF*: 1.5 to 8 bits |
# | launches (10) | CUDA graphs | CUDA graphs | CUDA graphs | |
# | shards (here) | tensor parallel | tensor parallel | tensor parallel | `--split-mode` |

# %% [markdown] slideshow={"slide_type": "subslide"}
# (An empty field: nothing that we looked for and found in its documentation, not "it can't". Versions move;
# these are the words of 2025 and 2026.) llama.cpp is at home where there is no large GPU: on CPUs, on Apple's
# Metal, on CPU and GPU together for a model that is too large for one of them.
#
# Read them with a question, not from the top. A first file each, whose ideas you know:
#
# - [vLLM](https://docs.vllm.ai): `vllm/v1/core/kv_cache_manager.py` and `vllm/v1/core/sched/scheduler.py`: our
#   `serving/blocks.py` and `serving/scheduler.py`. Its design page
#   [*Automatic Prefix Caching*](https://docs.vllm.ai/en/latest/design/prefix_caching/) hashes a block with all
#   that comes before it, as we do.
# - [SGLang](https://docs.sglang.io): `python/sglang/srt/mem_cache/` keeps a radix tree where we keep a table of
#   hashes. Which finds more? (Zheng et al. 2023, arXiv:2312.07104.)
# - [TensorRT-LLM](https://nvidia.github.io/TensorRT-LLM/): `tensorrt_llm/_torch/pyexecutor/`, among it
#   `cuda_graph_runner.py`, which fills a batch up to a size that was recorded, as our `serving/graphs.py`.
# - [llama.cpp](https://github.com/ggml-org/llama.cpp): `tools/quantize/README.md` lists its formats with bits a
#   weight and speed. Predict the speeds from the bits before you look.
#
# And measure: `LECTURE_ENGINE_URL` of notebook 10 puts your engine beside any of them that speaks the OpenAI
# interface.

# %% [markdown] slideshow={"slide_type": "subslide"}
# One more page before you go: [CORRECTIONS.md](../CORRECTIONS.md) lists every claim that this course found
# stated otherwise, often in excellent places, each with the cell that computes it. If yours isn't there yet,
# you know how to settle it: derive it, put a number on it, measure, read the ratio.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## What to remember
#
# - A speed-up is less computed, fewer bytes a forward, fewer forwards a token, or more texts a forward. Ask which.
# - Factors multiply where they cut different things. Where they cut the same sum, or spend the same idle
#   resource, their product promises too much; where one removes what hid the other, too little.
# - Bytes can be predicted exactly, seconds nearly. What is off has a cause with a name.
# - What arranges the work must not change a token; what changes the model must show its perplexity.
# - Shards cost messages, and messages cost waiting: copies for throughput, shards for what doesn't fit and
#   for the latency of one.

# %% tags=["nbval-ignore-output"]
status("12")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ## Papers and sources
#
# - Stanford CS336, spring 2025, lecture 10, *Inference*: the order of the course, and the summary that
#   section 11 retells.
# - Pope et al. 2022, *Efficiently Scaling Transformer Inference*, arXiv:2211.05102: how to shard, and what it
#   costs.
# - Shoeybi et al. 2019, *Megatron-LM*, arXiv:1909.08053: columns first, then rows, one sum for two products.
# - Latency of small all-reduces: stas00/ml-engineering, `network/benchmarks/results/all-reduce-8xH200.md`.
# - Engines, as their documentation had it: docs.vllm.ai (*Speculative Decoding*, *Automatic Prefix Caching*)
#   and vllm-project/vllm, `README.md`; docs.sglang.io (*Speculative Decoding*, *CUDA Graph*) and sgl-project/sglang,
#   `README.md`; nvidia.github.io/TensorRT-LLM (*Overview*; *Paged Attention, IFB, and Request Scheduling*;
#   `DecodeCudaGraphConfig`); ggml-org/llama.cpp, `README.md`, `tools/server/README.md`,
#   `tools/quantize/README.md`.
# - Kwon et al. 2023, arXiv:2309.06180 (PagedAttention); Zheng et al. 2023, arXiv:2312.07104 (RadixAttention).
