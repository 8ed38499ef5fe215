# %% [markdown] slideshow={"slide_type": "slide"}
# # 03 · The KV cache, latency and throughput
#
# To write one more token, a decoder looks back at every token before it. Done plainly, it computes
# all of them again, every time. In this notebook we stop doing that, and then pay for it: the work
# we save turns into memory that has to be stored and read. From that one trade follow the size of a
# batch, the latency of a token and the throughput of a machine.
#
# You will
#
# 1. generate with and without a cache, and predict the difference before you see it;
# 2. build a cache yourself that plugs into the real model;
# 3. count its bytes, by formula and by tensor;
# 4. turn bytes into latency and throughput, for Llama-2-13B on an H100 and for your own machine;
# 5. decide between a large and a small batch, and between copies and shards of a model.

# %% slideshow={"slide_type": "subslide"}
import matplotlib.pyplot as plt
import sympy
import torch
from IPython.display import display

from lecture_util.classroom import check, explore, hint, predict, status, step, use_style
from lecture_util.model.weights import load, load_tokenizer

use_style()
model, tokenizer = load(), load_tokenizer()
config = model.config

# %% [markdown]
# Every prediction about *your* machine needs its two peaks, as in notebook 02: bytes per second and
# FLOP per second.

# %% tags=["nbval-ignore-output"]
from lecture_util.roofline import this_machine

machine = this_machine()
bandwidth, peak = machine.bandwidth_bytes_per_s, machine.peak("fp32")
print(f"{machine.name}: {bandwidth / 1e9:.1f} GB/s, {peak / 1e9:,.0f} GFLOP/s in fp32")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 1. Generating without a cache
#
# The plainest way to generate: give the model the text so far, take the most likely next token,
# append it, and start over with the longer text. Each step runs the *whole* sequence through the
# model.
#
# ![Two grids with one row per step and one column per position. Left, naive: every step processes the whole prefix, so the filled cells form a triangle, 60 in all. Right, cached: the first step fills the prompt's 4 cells, each later step computes one new cell and only reads the earlier ones from the cache, 11 in all.](../images/naive-and-cached-generation.svg)
#
# ### Predict: tokens through the model
#
# A prompt of $P$ tokens, $n$ new ones. Step $t = 0, \dots, n-1$ runs $P + t$ tokens. SymPy adds them
# up; and if a cache keeps what was computed, each token needs to pass once only. The last new token
# never passes: nobody asks what follows it.

# %% slideshow={"slide_type": "subslide"}
P, n, t = sympy.symbols("P n t", positive=True)
naive_tokens = sympy.expand(sympy.summation(P + t, (t, 0, n - 1)))
cached_tokens = P + n - 1
print("naive ", naive_tokens)
print("cached", cached_tokens)

# %% [markdown]
# The figure counts cells for $P = 4$, $n = 8$. So can we:

# %%
figure_case = {P: 4, n: 8}
assert naive_tokens.subs(figure_case) == sum(4 + step for step in range(8)) == 60
assert cached_tokens.subs(figure_case) == 11
fewer = (naive_tokens / cached_tokens).subs({P: 100, n: 1000})
print(f"P = 100, n = 1,000: {float(fewer):.0f} times fewer tokens")

# %% [markdown]
# The ratio grows with the length of the answer, as about $n/2$ where the answer is much longer than
# the prompt.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Predict: FLOPs
#
# Tokens are not FLOPs yet, since a token that looks further back costs more. Call $M$ the weights in
# the linear layers of all blocks, and $A = N H L$ the width of all attention. A pass over $t$ tokens
# multiplies each token with each weight, and each token with the tokens before it:
#
# $$\underbrace{2 M t}_{\text{linear layers}} \;+\; \underbrace{2 A\, t\,(t+1)}_{\text{causal attention}}
# \;+\; \underbrace{2 D V}_{\text{head, last position}}$$
#
# We hold it against the library's accounting, which a test holds against torch's FLOP counter. One
# function serves for symbols here and for numbers below:


# %%
from lecture_util.roofline import forward_flops, symbolic_config


def linear_weights(c):
    """Weights that multiply every token: attention's four matrices and the MLP's three."""
    return c.L * (2 * c.D * c.N * c.H + 2 * c.D * c.K * c.H + 3 * c.D * c.F)


shape = symbolic_config()
scores = 2 * shape.N * shape.H * shape.L * t * (t + 1)
pass_flops = 2 * linear_weights(shape) * t + scores + 2 * shape.D * shape.V
library_flops = forward_flops(shape, 1, t, t, causal=True, logits_for=1)
assert sympy.expand(pass_flops - library_flops) == 0

# %% [markdown] slideshow={"slide_type": "subslide"}
# Now generate $n$ tokens from a prompt of one. Naively, passes of length $1, 2, \dots, n$ add up. With
# a cache, step $t$ passes one token that looks at $t$ positions. We leave the head out: both pay it
# once a step.

# %%
M, A = sympy.symbols("M A", positive=True)
naive_flops = sympy.summation(2 * M * t + 2 * A * t * (t + 1), (t, 1, n))
cached_flops = sympy.summation(2 * M + 4 * A * t, (t, 1, n))
for flops in (naive_flops, cached_flops):
    display(sympy.collect(sympy.expand(flops), n))

# %% [markdown] slideshow={"slide_type": "subslide"}
# So naive generation is $O(n^3)$ and cached generation $O(n^2)$: the cache takes away one power of
# $n$, in the linear layers ($n^2 \to n$) and in attention ($n^3 \to n^2$).
#
# ### How much of that is cubic?
#
# An $O$ says what wins *in the end*. When is the end? For one pass, where attention's $2At^2$ passes
# $2Mt$; for naive generation, where the cubic term $\tfrac23 A n^3$ passes the quadratic $M n^2$:

# %%
crossing = sympy.solve(sympy.Eq(M * n**2, sympy.Rational(2, 3) * A * n**3), n)
print("attention wins in a pass from t =", sympy.solve(sympy.Eq(M * t, A * t**2), t)[0])
print("cubic term wins from n =", crossing[0])

# %% slideshow={"slide_type": "subslide"}
from lecture_util.model.config import PUBLISHED

print("shape          pass from  generation from  context")
within_pass, within_generation = [], []
for name, c in PUBLISHED.items():
    t_pass = linear_weights(c) / (c.N * c.H * c.L)
    within_pass += [name] if c.max_context > t_pass else []
    within_generation += [name] if c.max_context > 1.5 * t_pass else []
    print(f"{name:<14} {t_pass:>9,.0f} {1.5 * t_pass:>16,.0f} {c.max_context:>8,}")
assert within_pass == ["smollm2-135m", "qwen2.5-0.5b"]
assert within_generation == ["qwen2.5-0.5b"]

# %% [markdown] slideshow={"slide_type": "subslide"}
# > **Erratum.** One often reads that a forward pass is $O(T^2)$, so that generating $T$ tokens naively
# > is $O(T^3)$. True as a limit. But up to the full context in the table, the $O(T)$ work of the linear
# > layers dominates a pass in eight of the ten shapes, and the $T^2$ term dominates naive generation in
# > nine. For Llama-2-13B the crossings are at 61,952 and 92,928 tokens.
#
# (Mistral-7B's 4,096 is its window; up to there its attention is full attention.)

# %% [markdown] slideshow={"slide_type": "notes"}
# *For the instructor.* Ask: "which is larger in a 13B model at 4,000 tokens, the linear layers or attention?" Most people
# say attention. Let them find the crossing in the table. The three powers of n are worth writing on
# the board: tokens times tokens for passes, and once more for the scores.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 2. Naive against cached, measured
#
# A step at length $t$, both ways. Naively, $t$ tokens go through the model. With a cache, one token
# does, and reads what the others left.

# %%
from lecture_util.classroom.figures import caption, claim, predicted_vs_measured
from lecture_util.model.kv_cache import KVCache

sentence = "The sea is never still: it breathes in and out with the moon. "
words = (tokenizer.encode(sentence) * 40)[:512]
tokens_BT = torch.tensor([words], device=model.device)


def naive_step(t):
    return model.head(model.features(tokens_BT[:, :t])[:, -1])


# %% slideshow={"slide_type": "subslide"}
def decode_stepper(B, S):
    """A function that runs one decode step of B sequences with S cached positions each."""
    cache = KVCache(config, B, S + 1, model.dtype, model.device)
    cache.lengths = [S] * B  # its contents don't change how long a step takes
    tokens_B1 = tokens_BT[:, :1].expand(B, 1)

    def step():
        logits_BTV = model(tokens_B1, cache)
        cache.truncate(S)
        return logits_BTV

    return step


# %% [markdown]
# **Predict.** Put a number on it before you read on: when 256 tokens stand there already, how many
# times longer does a naive step take than a cached one, on this machine?

# %% tags=["nbval-ignore-output"]
slower = predict("A naive step at 256 tokens takes how many times a cached step?", unit="times")

# %% [markdown]
# 256 times the FLOPs is a tempting answer. But the cached step does not wait for its FLOPs: it reads
# all weights to do very little with them. Notebook 02's roofline, the longer of computing and reading,
# predicts both:

# %% slideshow={"slide_type": "subslide"}
from lecture_util.roofline import forward, measure

WIDTH = 4  # bytes of an fp32 number
lengths = [16, 32, 64, 128, 256]
naive_costs = [
    forward(config, 1, t, t, causal=True, logits_for=1, dtype_bytes=WIDTH) for t in lengths
]
cached_costs = [forward(config, 1, 1, t, dtype_bytes=WIDTH) for t in lengths]
for t, a, b in zip(lengths, naive_costs, cached_costs, strict=True):
    print(f"t={t:<4} naive {a.flops / 1e9:6.2f} GFLOP, cached {b.flops / 1e9:5.3f} GFLOP")

# %% tags=["nbval-ignore-output"]
naive_predicted = [cost.time_s(machine, "fp32") for cost in naive_costs]
cached_predicted = [cost.time_s(machine, "fp32") for cost in cached_costs]
print("naive  waits for", [cost.bound(machine, "fp32") for cost in naive_costs])
print("cached waits for", [cost.bound(machine, "fp32") for cost in cached_costs])
print(f"predicted at 256: {naive_predicted[-1] / cached_predicted[-1]:.1f} times")

# %% [markdown]
# **Measure.**

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
with torch.inference_mode():
    naive_runs = [measure(naive_step, t, repeats=3) for t in lengths]
    cached_runs = [measure(decode_stepper(1, t - 1), repeats=7) for t in lengths]
for t, a, b in zip(lengths, naive_runs, cached_runs, strict=True):
    print(f"t={t:<4} naive {a}   cached {b}")

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
ratios = [a.median_s / b.median_s for a, b in zip(naive_runs, cached_runs, strict=True)]
slower.reveal(ratios[-1], predicted=naive_predicted[-1] / cached_predicted[-1])

# %% tags=["hide-input", "nbval-ignore-output"] slideshow={"slide_type": "subslide"}
ax = None
for name, runs, predicted in [
    ("naive", naive_runs, naive_predicted),
    ("cached", cached_runs, cached_predicted),
]:
    times, least = [1e3 * run.median_s for run in runs], [1e3 * s for s in predicted]
    spread = tuple([1e3 * run.spread[i] for run in runs] for i in (0, 1))
    ax = predicted_vs_measured(lengths, least, times, spread, "tokens so far", "ms a token", ax=ax)
    at = -2 if name == "naive" else -1
    ax.annotate(name, (lengths[at], times[at]), (0, 12), textcoords="offset points",
                ha="right", weight="bold")  # fmt: skip
ax.set(yscale="linear", ylim=(0, None))
ax.legend(*[part[:2] for part in ax.get_legend_handles_labels()], loc="upper left")
claim(ax, "A naive token costs more the longer the text")
caption(ax, device=machine.name, dtype="fp32", shapes="SmolLM2-135M, B=1")
plt.show()

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Read.** Two different laws, one for each curve.
#
# - *Naive* rises with length once there are enough tokens to keep the arithmetic units busy: it waits
#   for computing, and the time follows $2Mt$. Where it lies above its prediction at short lengths, the
#   small matrices don't reach the peak that large square ones do. It may lie below, and step up past 32
#   tokens: on a CPU the model multiplies up to 32 rows through oneDNN (`lecture_util/model/linear.py`),
#   while the peak was measured with torch's own choice. Past 32 tokens, below means that the peak was
#   measured while something else was running.
# - *Cached* is flat: the same weights are read whatever the length, and one more position of cache
#   is little beside them. Its FLOPs fell by a factor of the length, its time by much less, since it now
#   waits for memory. That is the trade this notebook is about.
# - On a GPU with this small model, both curves may be flat at these lengths: launching the operations
#   takes longer than either.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Does the cache change what is said?
#
# It must not. Both ways compute the same function, and greedy decoding has no chance in it:

# %%
from lecture_util.model.generate import generate, generate_naive

prompt = tokenizer.encode("The three primary colours are")
plain, cached = generate_naive(model, prompt, 12), generate(model, [prompt], 12)[0]
assert plain == cached
print(tokenizer.decode(prompt + cached))

# %% [markdown] slideshow={"slide_type": "subslide"}
# See it happen: each way runs alone, the time of every token is noted, and then both are replayed
# side by side. Press *Start*.

# %% tags=["nbval-ignore-output", "hide-input"]
from lecture_util.classroom.widgets import race
from lecture_util.model.tokenizer import chat

question = chat(tokenizer, "Why is the sea salty, and why are most lakes not? Explain briefly.")
race(model, tokenizer, question, max_new_tokens=48)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Exercise 3.1: a chat of many turns
# *10 minutes · counting tokens through the model, off-by-ones included*
#
# A conversation has `turns` turns. In each, the user writes `user` tokens and the model answers with
# `reply` tokens. How many tokens pass through the model in all,
#
# - **dropped**: if the cache lives for one turn, so that each turn first encodes the whole history
#   and the new message, and then decodes with a cache;
# - **kept**: if the cache lives as long as the chat?
#
# Return both, as `(dropped, kept)`. Within a turn the last token of a reply isn't fed back, as in
# `cached_tokens` above. All counts are at least 1; a loop will do, a closed form is nicer.


# %% slideshow={"slide_type": "skip"}
def chat_tokens(turns, user, reply):
    """Tokens through the model in a chat: (cache dropped after each turn, cache kept)."""
    ### BEGIN SOLUTION
    dropped = (user + reply) * turns * (turns + 1) // 2 - turns
    kept = turns * (user + reply) - 1
    return dropped, kept
    ### END SOLUTION


# %% slideshow={"slide_type": "skip"}
check("3.1", chat_tokens)

# %% [markdown]
# Stuck? Each call opens one more hint.

# %% slideshow={"slide_type": "skip"}
hint("3.1")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 3. What can be kept, and why
#
# Which of the numbers inside the model may we keep from one step to the next? Take one attention
# layer with random tensors: 6 positions, $N=4$ query heads over $K=2$ KV heads.
#
# **Only the last row is new.** The output of the last position needs its own query, and *all* keys
# and values:

# %%
from lecture_util.model.attention import attention_by_hand

draw = torch.Generator().manual_seed(0)
q_BTNH = torch.randn(1, 6, 4, 8, generator=draw)
k_BSKH, v_BSKH = torch.randn(2, 1, 6, 2, 8, generator=draw)
whole_BTNH = attention_by_hand(q_BTNH, k_BSKH, v_BSKH)
last_BTNH = attention_by_hand(q_BTNH[:, -1:], k_BSKH, v_BSKH)
assert torch.allclose(whole_BTNH[:, -1:], last_BTNH, atol=1e-6)
print("old queries needed: none; old keys and values needed:", tuple(k_BSKH.shape))

# %% [markdown]
# So queries are used once and forgotten. Keys and values are used by every later token: they are what
# is worth keeping.
#
# **And they never change.** A causal mask lets position $s$ see positions up to $s$ only. So in every
# layer its input, and with it its key and value, are the same whether or not more tokens follow. On
# the real model, after 5 tokens and after 9:

# %% slideshow={"slide_type": "subslide"}
short, long = (KVCache(config, 1, 9, model.dtype, model.device) for _ in range(2))
with torch.inference_mode():
    model(tokens_BT[:, :5], short)
    model(tokens_BT[:, :9], long)
difference = (short.k_LBSKH[:, :, :5] - long.k_LBSKH[:, :, :5]).abs().max().item()
assert difference < 1e-3
print("keys of the first 5 positions agree in all", config.L, "layers")

# %% [markdown]
# In a model that looks both ways, such as BERT, each new token would change every earlier key in
# every layer but the first. Nothing could be kept.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### A cache in twelve lines
#
# Our Transformer never asks how keys are stored. Each layer hands its new `q`, `k`, `v` to
# `cache.attend` and takes back the mixed values; `positions` says where the new tokens stand, and
# `extend` that all layers have seen them. So a class with these three methods *is* a cache. The
# simplest one joins the new keys to the old:


# %%
class GrowingCache:
    """Keys and values of all tokens so far, in tensors that grow."""

    def __init__(self):
        self.kv, self.length = {}, 0

    def positions(self, shape, device):
        return self.length + torch.arange(shape[1], device=device).expand(shape)

    def attend(self, layer, q_BTNH, k_BTKH, v_BTKH):
        old = self.kv.get(layer, (k_BTKH[:, :0], v_BTKH[:, :0]))
        new = zip(old, (k_BTKH, v_BTKH), strict=True)
        self.kv[layer] = tuple(torch.cat(pair, dim=1) for pair in new)
        return attention_by_hand(q_BTNH, *self.kv[layer])

    def extend(self, T):
        self.length += T


# %% [markdown] slideshow={"slide_type": "subslide"}
# If it is right, then it cannot matter where we cut a text: in one go, token by token, or anyhow. The
# last position's logits must agree with those of the uncached model, for our class and for the
# library's `KVCache`:


# %%
@torch.inference_mode()
def logits_after(cache, cuts):
    for chunk_BT in tokens_BT[:, : sum(cuts)].split(cuts, dim=1):
        logits_BTV = model(chunk_BT, cache)
    return logits_BTV[:, -1]


# %%
with torch.inference_mode():
    no_cache_BV = model(tokens_BT[:, :12])[:, -1]
for cuts in ([12], [1] * 12, [11, 1], [5, 1, 1, 5], [7, 5], [2, 9, 1]):
    for cache in (GrowingCache(), KVCache(config, 1, 12, model.dtype, model.device)):
        gap = (logits_after(cache, cuts) - no_cache_BV).abs().max().item()
        assert gap < 1e-2, (type(cache).__name__, cuts, gap)
    print("same logits for the split", cuts)

# %% [markdown] slideshow={"slide_type": "subslide"}
# Splits matter in practice. `[11, 1]` is prefill and one step of generation; `[2, 9, 1]` is a second
# question in a chat; `[5, 1, 1, 5]` is what speculative sampling does in notebook 08, checking five
# guesses at once.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Two stages of inference
#
# With a cache, generation falls into two stages that behave quite differently:
#
# 1. **Prefill.** All prompt tokens at once, in parallel as in training; they fill the cache and give
#    the first new token. Large matrix products: it waits for computing.
# 2. **Generation**, or *decode*. One token a step, each depending on the one before. The same weights
#    are read for a single token: it waits for memory.
#
# The whole loop by hand:

# %%
cache, text = GrowingCache(), list(prompt)
with torch.inference_mode():
    logits_BTV = model(torch.tensor([text], device=model.device), cache)  # prefill
    for _ in range(12):
        text.append(int(logits_BTV[0, -1].argmax()))
        logits_BTV = model(torch.tensor([text[-1:]], device=model.device), cache)  # decode
assert text == prompt + generate(model, [prompt], 12)[0]
print(tokenizer.decode(text))

# %% [markdown] slideshow={"slide_type": "subslide"}
# This is also why the first token takes longer than the others: nothing is cached yet, so its step is
# the prefill of the whole prompt. (Our loop runs one step too many, for a thirteenth token that nobody
# reads. The library's doesn't.)
#
# ### From growing to preallocated
#
# `torch.cat` reads the old cache and writes it again, in every layer and at every step. `KVCache`
# instead allocates one slab for the longest text it may hold, and a step writes one slot. That costs
# no copying, but it occupies its full size from the start, used or not. Notebook 10 gets both.

# %% [markdown]
# ### Exercise 3.2: append, then attend
# *15 minutes · the cache as two tensors and a length*
#
# Write one decode step of one layer, for a batch whose rows have *different* lengths. Row `b` holds
# `lengths_B[b]` tokens in slots `0 … lengths_B[b] - 1`; the slots beyond hold leftovers from an
# earlier request. Store the new key and value of each row in its next slot, then attend from the new
# token to all it may see, itself included. Query head `n` reads KV head `n // G`, with `N = K*G`.
#
# Return `out_BNH` and the two updated caches. Shapes: `q_BNH`, `k_BKH` and `v_BKH` are the new token's,
# `k_BSKH` and `v_BSKH` the cache, `lengths_B` whole numbers.


# %% slideshow={"slide_type": "skip"}
def decode_attention(q_BNH, k_BKH, v_BKH, k_BSKH, v_BSKH, lengths_B):
    """One new token a row: store it, attend from it. -> out_BNH, k_BSKH, v_BSKH."""
    ### BEGIN SOLUTION
    (B, N, H), (S, K) = q_BNH.shape, k_BSKH.shape[1:3]
    rows_B = torch.arange(B)
    k_BSKH[rows_B, lengths_B] = k_BKH
    v_BSKH[rows_B, lengths_B] = v_BKH
    q_BKGH = q_BNH.unflatten(1, (K, N // K))
    scores_BKGS = torch.einsum("bkgh,bskh->bkgs", q_BKGH, k_BSKH) / H**0.5
    hidden_BS = torch.arange(S) > lengths_B[:, None]
    weights_BKGS = scores_BKGS.masked_fill(hidden_BS[:, None, None], -torch.inf).softmax(-1)
    out_BKGH = torch.einsum("bkgs,bskh->bkgh", weights_BKGS, v_BSKH)
    return out_BKGH.flatten(1, 2), k_BSKH, v_BSKH
    ### END SOLUTION


# %% slideshow={"slide_type": "skip"}
check("3.2", decode_attention)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 4. What remembering costs
#
# The cache lives where the weights live, in the accelerator's memory (HBM on a data-centre GPU). These
# are activations, the only ones that outlive their step. For every sequence, token, layer and KV head
# we keep one vector of width $H$ as key and one as value:
#
# $$\text{bytes} = \underbrace{2}_{\text{key, value}} \cdot \underbrace{2}_{\text{bytes, 16 bits}} \cdot
# \; B \cdot S \cdot L \cdot K \cdot H$$

# %% [markdown] slideshow={"slide_type": "subslide"}
# ![Left: two stacks of L slabs, keys and values; each slab has the axes S and K times H, and there is one such pair for each of B sequences. The size is 2 x L x B x S x K x H numbers of 2 bytes. Right: two squares to scale, one token of SmolLM2-135M leaves 23,040 bytes, of Llama-2-13B 819,200 bytes, about 36 times as many.](../images/kv-cache-tensor.svg)
#
# The tensors themselves agree:

# %% slideshow={"slide_type": "subslide"}
from lecture_util.roofline import kv_bytes_per_token, kv_cache_bytes

cache = KVCache(PUBLISHED["smollm2-135m"], B=4, capacity=100, dtype=torch.bfloat16)
vector = cache.k_LBSKH[29, 3, 99, 2]  # layer, sequence, token, KV head
print("one of its vectors has shape", tuple(vector.shape))
assert cache.nbytes == 2 * 2 * 4 * 100 * 30 * 3 * 64
assert cache.nbytes == kv_cache_bytes(PUBLISHED["smollm2-135m"], B=4, S=100)
print(f"{cache.nbytes:,} bytes, {cache.nbytes // 400:,} a token")

# %% [markdown]
# How long must one sequence be until its cache is as large as all the weights? In 16 bits:

# %% slideshow={"slide_type": "subslide"}
from lecture_util.roofline import format_bytes, weight_bytes

print("shape          weights    a token      as large as the weights at")
for name, c in PUBLISHED.items():
    w, each = weight_bytes(c), kv_bytes_per_token(c)
    print(f"{name:<14} {format_bytes(w):>9} {each:>9,} B {w // each:>13,} tokens")

# %% [markdown] slideshow={"slide_type": "subslide"}
# With Llama-2-7B 6.3 full contexts of 4,096 tokens, or a few dozen conversations of 700, weigh about as
# much as the model. That is what "gigabytes" means when a slide says it. Shapes: Lightning-AI/litgpt, `litgpt/config.py`.
#
# ### A formula with an assumption in it
#
# > **Erratum.** The cache's size is often given as `2·2·batch·seq·layers·embedding`, in bytes. That
# > is true for multi-head attention in 16 bits, where $K H = N H = D$. With grouped-query attention
# > only $K$ heads are stored, so the embedding width must become $K\cdot H$.

# %% slideshow={"slide_type": "subslide"}
print("shape            formula with D    with K*H   too large by")
for name, c in PUBLISHED.items():
    often_said, right = 2 * 2 * c.L * c.D, kv_bytes_per_token(c)
    assert often_said / right == c.G  # since D = N*H = G*K*H in all of these
    print(f"{name:<14} {often_said:>14,} B {right:>9,} B {often_said // right:>8} x")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Exercise 3.3: repair the cache formula
# *8 minutes · finding the mistake*
#
# A capacity planner was written from that formula:
#
# ```python
# def planned_cache_bytes(config, B, S, dtype_bytes=2):
#     return 2 * 2 * B * S * config.L * config.D
# ```
#
# It is wrong in two ways for a model such as Llama-3-8B whose cache is kept in 8 bits. Write it
# correctly, for any `config` and any width in bytes. Careful: not every family keeps $D = N H$.


# %% slideshow={"slide_type": "skip"}
def planned_cache_bytes(config, B, S, dtype_bytes=2):
    """Bytes of B caches of S positions each."""
    ### BEGIN SOLUTION
    return 2 * dtype_bytes * B * S * config.L * config.K * config.H
    ### END SOLUTION


# %% slideshow={"slide_type": "skip"}
check("3.3", planned_cache_bytes)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 5. The step-time model
#
# A decode step waits for memory, so its time is the time to read what it needs: all weights, and the
# caches of all sequences. We keep the weights in bf16. Training would need more (fp32 copies,
# gradients, the optimizer's state); serving needs none of it, but it does need the cache. One
# assumption: computing and reading overlap perfectly, and nothing else takes time.
#
# Derived in SymPy, line by line:

# %%
from lecture_util.roofline import symbols

B, S, D, F, N, K, H, L, V, memory_bandwidth = symbols("B S D F N K H L V memory_bandwidth")

weights_block = 2 * D * N * H + 2 * D * K * H + 3 * D * F  # q and out, k and v, the MLP's three
norms = (2 * L + 1) * D
num_weights = 2 * V * D + L * weights_block + norms  # embedding and head, blocks, norms
cache_bytes = 2 * 2 * S * L * K * H  # one sequence
memory = 2 * num_weights + B * cache_bytes  # @inspect memory
latency = memory / memory_bandwidth  # @inspect latency
throughput = B / latency  # @inspect throughput

# %% [markdown]
# A step gives one token to *each* of $B$ sequences, so throughput is $B$ over latency. The library's
# `decode_step` is the same algebra:

# %% slideshow={"slide_type": "subslide"}
from lecture_util.roofline import decode_step, num_params

library = decode_step(shape, B, S, memory_bandwidth)
by_hand = {N: shape.N}  # the library's N is K*G
assert sympy.simplify(memory.subs(by_hand) - library.memory_bytes) == 0
assert sympy.simplify(latency.subs(by_hand) - library.latency_s) == 0
assert sympy.simplify(throughput.subs(by_hand) - library.throughput_tokens_per_s) == 0
display(latency)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Llama-2-13B on an H100
#
# Substituting the shape leaves a formula in $B$ alone. (Shape: litgpt's `config.py`; 3.35 TB/s and
# 80 GB: stas00/ml-engineering. The norms' gains, often left out, are 0.003% of the bytes.)

# %%
llama = PUBLISHED["llama-2-13b"]
sizes = {D: 5120, F: 13824, N: 40, K: 40, H: 128, L: 40, V: 32000, S: 1024}
sizes[memory_bandwidth] = sympy.Float(3.35e12)
latency_of_B = latency.subs(sizes)
assert num_weights.subs(sizes) == num_params(llama) == 13_015_864_320
print("bytes ", memory.subs(sizes))
print("ms    ", sympy.N(1e3 * latency_of_B.expand(), 4))

# %% [markdown]
# **Predict** before you run the next cell: from one sequence to 64, what happens to latency, and what
# to throughput? And from 64 to 256?

# %% slideshow={"slide_type": "subslide"}
from lecture_util.roofline import ACCELERATORS

h100 = ACCELERATORS["h100"]
seen = {}
for batch in (1, 64, 256):
    best = decode_step(llama, batch, 1024, h100)
    gb, ms = f"{best.memory_bytes / 1e9:.4g}", f"{1e3 * best.latency_s:.2f}"
    rate = f"{best.throughput_tokens_per_s:,.{1 if batch == 1 else 0}f}"
    seen[batch] = gb, ms, rate
    print(f"B={batch:<4}{gb:>6} GB {ms:>6} ms {rate:>6} tok/s, fits: {best.fits}")

# %% slideshow={"slide_type": "skip"}
assert seen[1] == ("26.87", "8.02", "124.7")
assert seen[64] == ("79.72", "23.80", "2,689")
assert seen[256] == ("240.8", "71.87", "3,562")

# %% [markdown] slideshow={"slide_type": "subslide"}
# Step through `decode_step` yourself, and ask it what the room asks: what if $B$ were 8?

# %% tags=["nbval-ignore-output", "hide-input"]
step(decode_step, llama, 64, 1024, h100)
for few, many in [(1, 64), (64, 256)]:
    ms = [float(seen[batch][1]) for batch in (few, many)]
    print(f"B={few} -> {many}: latency x {ms[1] / ms[0]:.1f}, "
          f"throughput x {many / few * ms[0] / ms[1]:.1f}")  # fmt: skip

# %% [markdown] slideshow={"slide_type": "subslide"}
# At $B = 64$ a user waits three times as long for a token, and the machine makes 21.6 times as many. At
# $B = 256$ it doesn't fit into 80 GB any more; and if it did, latency would triple again for only a
# third more throughput.
#
# ![Stacked bars of the bytes one decode step reads, Llama-2-13B in bf16 with 1,024 tokens a sequence. Weights are 26 GB at every batch size; the KV cache grows from 0.8 GB at B=1 to 54 GB at 64 and 215 GB at 256. A line marks the 80 GB of an H100, just above the bar of B=64.](../images/bytes-per-decode-step.svg)
#
# > **Erratum.** These times are sometimes called a "theoretical *maximum* latency". Reading the bytes
# > takes at least this long, so it is a *minimum* latency and, by the same token, a maximum
# > throughput. For the same reason less memory means *lower* latency, though the opposite is sometimes
# > said, and higher throughput.

# %% slideshow={"slide_type": "subslide"}
bound = decode_step(llama, 64, 1024, h100)
for reached in (1.0, 0.9, 0.5):  # of the bandwidth; more than all of it nobody reaches
    latency_s = bound.memory_bytes / (reached * h100.bandwidth_bytes_per_s)
    assert latency_s >= bound.latency_s and 64 / latency_s <= bound.throughput_tokens_per_s
smaller = decode_step(llama, 64, 512, h100)  # half the context, so half the cache
assert smaller.latency_s < bound.latency_s
assert smaller.throughput_tokens_per_s > bound.throughput_tokens_per_s
for name, step_ in (("1,024 tokens", bound), ("512 tokens", smaller)):
    print(f"{name}: at least {1e3 * step_.latency_s:.2f} ms, "
          f"at most {step_.throughput_tokens_per_s:,.0f} tok/s")  # fmt: skip
print(f"B=64 leaves {(h100.memory_bytes - bound.memory_bytes) / 1e9:.1f} GB of 80 free")

# %% [markdown]
# `fits` counts weights and caches only, nothing for activations. On paper $B = 64$ fits; in practice
# nobody would run so close.
#
# One more correction. How much does a step really read?

# %%
for batch in (1, 64, 256):
    exact = decode_step(llama, batch, 1024, h100, whole_embedding=False)
    share = 1 - exact.bytes_read / exact.memory_bytes
    print(f"B={batch:<4}{exact.bytes_read / 1e9:8.2f} GB read, {100 * share:.1f}% less than held")
    assert batch > 1 or f"{100 * share:.1f}" == "1.2"

# %% [markdown]
# > **Erratum.** "A decode step reads all weights" counts one table too many. Of the *input* embedding
# > a step looks up $B$ rows of 32,000: at $B=1$ it reads 1.2% less than it holds. If the embedding is
# > tied to the head, as in SmolLM2, it is read whole after all, as the head. The figures above keep the
# > simpler count.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Exercise 3.4: two batch sizes that matter
# *8 minutes · solving the memory equation for B*
#
# For a model, a length and an accelerator's memory, return two whole numbers:
#
# - the largest batch whose weights and caches fit into `memory_bytes` together (0 if none does);
# - the smallest batch whose caches weigh *more* than the weights.
#
# `weight_bytes(config, dtype_bytes)` and `kv_bytes_per_token(config, dtype_bytes)` are at hand.


# %% slideshow={"slide_type": "skip"}
def batch_limits(config, S, memory_bytes, dtype_bytes=2):
    """(largest batch that fits, smallest batch whose caches outweigh the weights)."""
    ### BEGIN SOLUTION
    weights = weight_bytes(config, dtype_bytes)
    each = S * kv_bytes_per_token(config, dtype_bytes)
    return max(0, int((memory_bytes - weights) // each)), weights // each + 1
    ### END SOLUTION


# %% slideshow={"slide_type": "skip"}
check("3.4", batch_limits)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 6. Diminishing returns
#
# How far does throughput grow? With $W$ bytes of weights and $C$ bytes of cache a sequence,
# throughput is $B \cdot \text{bandwidth} / (W + B C)$. SymPy takes the limit:

# %%
W, C = symbols("W C")
rate = B * memory_bandwidth / (W + B * C)
ceiling = sympy.limit(rate, B, sympy.oo)
half = sympy.solve(sympy.Eq(rate, ceiling / 2), B)[0]
print("ceiling:", ceiling, "  half of it at B =", half)
assert sympy.simplify(rate - ceiling * B / (B + half)) == 0

# %% [markdown]
# A hyperbola, $\text{ceiling} \cdot B/(B + B_{1/2})$. While $B \ll W/C$, doubling the batch doubles the
# throughput for almost no latency: all share one read of the weights. Once $B \gg W/C$, doubling the
# batch doubles the latency for almost no throughput: everybody brings their own cache.

# %% slideshow={"slide_type": "subslide"}
values = {W: weight_bytes(llama), C: kv_cache_bytes(llama, 1, 1024), memory_bandwidth: 3.35e12}
print(
    f"ceiling {float(ceiling.subs(values)):,.0f} tokens/s, half at B = {float(half.subs(values)):.1f}"
)
for batch in (1, 16, 64, 256):
    reached = batch / (batch + float(half.subs(values)))
    print(f"B={batch:<4} reaches {100 * reached:.0f}% of it")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### The trade-off as a curve
#
# Smaller batches: better latency, worse throughput. Larger batches: the other way round. Each point is
# a batch size; where you may stand depends on what your users will wait for.

# %%
batches = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
steps = [decode_step(llama, batch, 1024, h100) for batch in batches]
x, y = [1e3 * s.latency_s for s in steps], [s.throughput_tokens_per_s for s in steps]
fitting = sum(s.fits for s in steps)
print("largest of these that fits: B =", batches[fitting - 1])

# %% slideshow={"slide_type": "subslide"} tags=["hide-input"]
from lecture_util.classroom.figures import INK, MUTED, PREDICTED, label_points

_, ax = plt.subplots(figsize=(7, 3.5))
ax.plot(x, y, "o:", color=MUTED, label="does not fit into 80 GB")
ax.plot(x[:fitting], y[:fitting], "o--", color=PREDICTED, label="fits")
ax.axhline(float(ceiling.subs(values)), color=INK, lw=1, ls=(0, (5, 3)))
ax.annotate("ceiling", (x[-1], float(ceiling.subs(values))), (0, 5), ha="right",
            textcoords="offset points")  # fmt: skip
ax.set(xlabel="latency of a step, ms", ylabel="throughput, tokens/s", ylim=(0, 4_500))
label_points(ax, [(f"B={b}", x[i], y[i]) for i, b in enumerate(batches) if b in (1, 16, 64, 256)])
claim(ax, "Throughput saturates while latency keeps growing")
ax.legend(loc="lower right")
caption(ax, device="H100 SXM, at best", dtype="bf16", shapes="Llama-2-13B, S=1,024")
plt.show()

# %% [markdown] slideshow={"slide_type": "subslide"}
# Move the sliders: another model, another machine, longer contexts, fewer bits. Find a setting where
# a larger batch is nearly free, and one where it is nearly useless.

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
from lecture_util.classroom.widgets import latency_explorer

latency_explorer()

# %% [markdown] slideshow={"slide_type": "notes"}
# *For the instructor.* Three settings worth showing. Llama-2-13B, S = 128: throughput is nearly
# proportional to B up to about 32. S = 16,384: the curve bends at once, B = 2 already reads as much
# cache as weights. Llama-3-8B at the same S: eight KV heads instead of forty, and the bend moves right;
# that is notebook 04. Then int4: the weights fit everywhere, and the cache shrinks with them here,
# because the explorer uses one dtype for both.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Is it really memory that it waits for?
#
# We assumed so. The roofline can say: the time to compute the same step, beside the time to read it.
# The cache grows with the batch just as the FLOPs do, so at this context no batch is large enough to
# wait for computing. (`forward` counts the input embedding's rows exactly, hence 7.92 and not 8.02 ms.)

# %%
for batch in (1, 64, 256, 4096):
    cost = forward(llama, batch, 1, 1024)
    compute_ms, memory_ms = 1e3 * cost.compute_s(h100), 1e3 * cost.memory_s(h100)
    print(f"B={batch:<5} compute {compute_ms:7.2f} ms, memory {memory_ms:8.2f} ms")
    assert cost.bound(h100) == "memory"

# %% [markdown]
# With multi-head attention and a thousand tokens of context, more users never make this step wait for
# arithmetic. What helps is a smaller cache, and that is notebook 04.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Exercise 3.5: another machine, another dtype
# *10 minutes · predicting a latency from shapes and a data sheet*
#
# First guess: at $B = 64$, $S = 1024$, how much faster does Llama-2-13B decode if its *weights* are
# stored in 4 bits and its cache stays in 16? Four times? Then write the model that answers it, for
# any machine: weights of `weight_width` bytes each, cache entries of `cache_width` bytes. Return the
# least latency in milliseconds. `num_params(config)` counts the weights; use the simple count, in which
# all of them are read.


# %% slideshow={"slide_type": "skip"}
def mixed_latency_ms(config, B, S, accelerator, weight_width, cache_width):
    """Least latency of a decode step in ms, weights and cache in different widths."""
    ### BEGIN SOLUTION
    weights = num_params(config) * weight_width
    caches = B * S * kv_bytes_per_token(config, cache_width)
    return 1e3 * (weights + caches) / accelerator.bandwidth_bytes_per_s
    ### END SOLUTION


# %% slideshow={"slide_type": "skip"}
check("3.5", mixed_latency_ms)

# %% [markdown]
# The answer to the guess. At $B = 64$ most bytes are cache, and the cache stays as it is:

# %%
for batch in (1, 64):
    caches = kv_cache_bytes(llama, batch, 1024)
    before, after = weight_bytes(llama) + caches, weight_bytes(llama, 0.5) + caches
    print(f"B={batch:<3} {before / 1e9:.2f} GB -> {after / 1e9:.2f} GB, {caches / 1e9:.2f} of it cache: "
          f"{before / after:.2f} times faster")  # fmt: skip

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 7. Your machine: predicted against measured
#
# The same model for SmolLM2-135M in fp32, here. **Predict**: 128 positions in every cache, batches of
# 1 to 32, the bandwidth that was measured at the top.

# %% tags=["nbval-ignore-output"]
own_batches, context = [1, 2, 4, 8, 16, 32], 128
memory_s = [
    decode_step(config, b, context, machine, dtype_bytes=WIDTH).latency_s for b in own_batches
]
own_costs = [forward(config, b, 1, context, dtype_bytes=WIDTH) for b in own_batches]
roofline_s = [cost.time_s(machine, "fp32") for cost in own_costs]
for b, s, cost in zip(own_batches, roofline_s, own_costs, strict=True):
    print(f"B={b:<3} at least {1e3 * s:5.1f} ms, waiting for {cost.bound(machine, 'fp32')}")

# %% [markdown]
# This CPU or GPU has a ridge of its own. Where its peak is low for its bandwidth, a batch of 16 or 32
# already waits for computing, unlike on an H100. **Measure:**

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
with torch.inference_mode():
    own_runs = [measure(decode_stepper(b, context - 1), repeats=5) for b in own_batches]
for b, run, least in zip(own_batches, own_runs, roofline_s, strict=True):
    print(
        f"B={b:<3} {run!s:<32} {run.median_s / least:.2f} x predicted, {b / run.median_s:5.0f} tok/s"
    )

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
own_ms = [1e3 * run.median_s for run in own_runs]
spread = tuple([1e3 * run.spread[i] for run in own_runs] for i in (0, 1))
ax = predicted_vs_measured(own_batches, [1e3 * s for s in roofline_s], own_ms, spread,
                           "B, sequences", "ms a step")  # fmt: skip
ax.plot(own_batches, [1e3 * s for s in memory_s], ":", color=PREDICTED, label="memory time alone")
ax.set(yscale="linear", ylim=(0, 1.15 * max(own_ms)))
ax.legend(loc="upper left")
claim(ax, f"{own_batches[-1]} sequences cost {own_ms[-1] / own_ms[0]:.1f} times one")
caption(ax, device=machine.name, dtype="fp32", shapes=f"SmolLM2-135M, S={context}")
plt.show()

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Read.** The measurement should lie above the bound. Three causes can be told apart by measuring each.
#
# *Cause 1: everything that isn't a large matrix.* A model with the same number of layers and widths of
# almost nothing has hardly any bytes to read and hardly any FLOPs. What remains is Python, and the
# launching of some hundred small operations:

# %% tags=["nbval-ignore-output"]
from lecture_util.model.config import Config
from lecture_util.model.transformer import Transformer

hollow = Transformer.random(Config(D=8, F=8, K=1, G=1, H=8, L=config.L, V=8)).to(model.device)
token_B1 = torch.zeros(1, 1, dtype=torch.long, device=model.device)
with torch.inference_mode():
    overhead = measure(hollow, token_B1, repeats=9, warmup=2)
share = overhead.median_s / own_runs[0].median_s
print(f"{config.L} layers of nothing: {overhead}; {100 * share:.0f}% of a step at B = 1")

# %% [markdown]
# *Cause 2: the kernel.* For one sequence a linear layer is a matrix times a vector, for more it is a
# matrix times a matrix, and the two are different routines, at different fractions of the copy
# bandwidth. The LM head alone, a single matrix too large for any cache on the chip:

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
head_bytes = model.head.weight.nbytes
with torch.inference_mode():
    for b in own_batches:
        x_BD = torch.randn(b, config.D, device=model.device)
        run = measure(model.head, x_BD, repeats=7, warmup=2)
        reached = head_bytes / run.median_s / bandwidth
        print(f"B={b:<3} {1e3 * run.median_s:6.2f} ms, weights at {reached:4.0%} of copy bandwidth")

# %% [markdown]
# If a jump from $B=1$ to $B=2$ shows here as well, then it is the routine: a matrix product usually
# begins by rearranging the weights into blocks, which a product with one vector has no need of.
#
# *Cause 3: computing.* What is left grows with $B$. A straight line through the larger batches splits a
# step into a part that is paid once and a part that each sequence adds:

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
import numpy as np

each, once = np.polyfit(own_batches[1:], [run.median_s for run in own_runs[1:]], 1)
flops_each = own_costs[1].flops / own_batches[1]
print(f"once a step   {1e3 * once:6.1f} ms   (reading the weights: {1e3 * memory_s[0]:.1f} ms)")
print(f"each sequence {1e3 * each:6.2f} ms   (computing at peak: {1e3 * flops_each / peak:.2f} ms)")

# %% [markdown]
# Where "each sequence" is near its computing time, the larger batches wait for arithmetic: more
# sequences per step stop being nearly free. Far above it, products of so few rows don't reach the peak.
# It may also lie below: on a CPU up to 32 rows go through oneDNN (`lecture_util/model/linear.py`), while
# the peak was measured with torch's own choice, MKL where it has it. And the line is biased: smaller
# batches wait partly for memory, which flattens it and raises "once". On a GPU both parts nearly vanish
# behind cause 1, and the curve is flat: this model is too small to fill it.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### A 13B shape on a GPU
#
# With a CUDA device the prediction can be tried at the size it is about: Llama-2-13B's shape with
# random weights, since time doesn't depend on their values.

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "skip"}
from dataclasses import replace


def llama_shape_on_gpu():
    """Llama-2-13B's shape with random bf16 weights, or 4 layers of it where memory is short."""
    cut = llama if weight_bytes(llama) < machine.memory_bytes / 2 else replace(llama, L=4)
    with torch.device("meta"):
        big = Transformer(cut)
    big = big.to(torch.bfloat16).to_empty(device="cuda").requires_grad_(False)
    for weight in big.parameters():
        weight.normal_(0, 0.02)
    return big


def time_step(big, B, S=1024):
    expected = decode_step(big.config, B, S, machine)
    if expected.memory_bytes > 0.9 * machine.memory_bytes:
        return "does not fit"
    cache = KVCache(big.config, B, S + 12, big.dtype, big.device)
    cache.lengths = [S - 1] * B
    run = measure(big, tokens_BT[:, :1].expand(B, 1), cache, repeats=7, warmup=3)
    return f"{run}; predicted {1e3 * expected.latency_s:.2f} ms"


# %% tags=["nbval-ignore-output"]
if torch.cuda.is_available():
    with torch.inference_mode():
        big = llama_shape_on_gpu()
        for b in (1, 16, 64):
            print(f"{big.config.L} layers, B={b:<3} {time_step(big, b)}")
    del big
else:
    print("not measured here: no CUDA device")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 8. Time to first token
#
# The user's first wait is the prefill. Its cost is the other extreme: many tokens share one read of
# the weights, so it waits for computing. Predicted for Llama-2-13B on an H100, one prompt:

# %%
from lecture_util.roofline import prefill as prefill_time

for length in (16, 128, 1024, 4096):
    p = prefill_time(llama, 1, length, h100)
    waits = p.cost.bound(h100)
    steps = p.ttft_s / decode_step(llama, 1, length, h100).latency_s
    print(
        f"S={length:<5} at least {1e3 * p.ttft_s:6.1f} ms, waiting for {waits}: {steps:.1f} steps"
    )

# %% [markdown]
# The last column says to how many decode steps that is equal. A prompt of 1,024 tokens takes as long as
# three or four, and leaves 1,024 positions in the cache. From there on the wait is proportional to the prompt's length, and a little more: the
# scores of attention grow with its square.
#
# **Measure** it here, as a user sees it: from the call to the first token out of `stream`.

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
from lecture_util.model.generate import stream

prompt_lengths = [8, 32, 128, 256]
ttft_predicted = [prefill_time(config, 1, s, machine, dtype="fp32").ttft_s for s in prompt_lengths]
ttft_runs = [
    measure(lambda s=s: next(stream(model, words[:s], 2)), repeats=3) for s in prompt_lengths
]
for s, run, least in zip(prompt_lengths, ttft_runs, ttft_predicted, strict=True):
    print(f"S={s:<4} {run!s:<30} predicted {1e3 * least:6.1f} ms, ratio {run.median_s / least:.2f}")

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
spread = tuple([1e3 * run.spread[i] for run in ttft_runs] for i in (0, 1))
measured_ms = [1e3 * run.median_s for run in ttft_runs]
_, ax = plt.subplots(figsize=(7, 3.5))
predicted_vs_measured(prompt_lengths, [1e3 * s for s in ttft_predicted], measured_ms, spread,
                      "tokens in the prompt", "time to first token, ms", ax=ax)  # fmt: skip
claim(ax, "The first wait grows with the prompt")
caption(ax, device=machine.name, dtype="fp32", shapes="SmolLM2-135M, B=1")
plt.show()

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Read.** Short prompts wait for the weights, as a decode step does, and so they cost nearly the same
# whatever their length. Past the ridge the line turns up. A ratio that falls as the prompt grows
# tells that larger matrices are computed at a better rate.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Small batches in prefill, large ones in generation
#
# $B$ prompts wait. Prefilling one takes $\tau$. Together they take $B\tau$, because a prefill waits for
# computing and there is $B$ times as much of it; and everybody waits for all. One after the other, the
# $i$-th waits $i\,\tau$:

# %%
tau, i = sympy.symbols("tau i", positive=True)
together = B * tau
one_by_one = sympy.summation(i * tau, (i, 1, B)) / B
print("mean TTFT one by one:", sympy.factor(one_by_one))
print("together over one by one:", sympy.limit(together / one_by_one, B, sympy.oo), "in the limit")

# %% [markdown]
# In this model no request is later than it would have been in the batch, and the mean wait is
# $(B+1)/2B$ of the batch's: half for many prompts, 0.625 for four. In generation it is the reverse: a batch of steps costs little more than one. Hence the rule: **small batches for
# prefill, for the sake of TTFT; large batches for generation, for throughput.** Measured, for four
# prompts of 64 tokens:

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
from lecture_util.model.generate import prefill

batch_of = {b: [words[:64]] * b for b in (1, 4)}
tau_s = {b: measure(prefill, model, batch_of[b], 65, repeats=2).median_s for b in (1, 4)}
print(f"together: everybody waits    {1e3 * tau_s[4]:5.0f} ms")
print(
    f"one by one: the mean wait is {1e3 * tau_s[1] * 2.5:5.0f} ms, the longest {4e3 * tau_s[1]:.0f} ms"
)

# %% [markdown]
# Where four together take well under four times one, prompts of 64 tokens don't fill the machine yet,
# and batching short prompts pays after all. The rule is about prompts past the ridge.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 9. Prompts of unequal length
#
# A batch is a rectangle, prompts are not. We pad on the *right*, run the rectangle once, and then tell
# the cache how long each row really is. On a causal model nothing else is needed:
#
# - a real token never sees padding, which stands to its right;
# - positions count from 0 in every row, as they would alone;
# - what the padding left in the cache lies beyond the row's length, where no query looks, and the next
#   tokens overwrite it.

# %%
questions = ["Name a colour.", "What do bees make, and what do they make it from?", "Why?"]
prompts = [tokenizer.encode(question) for question in questions]
cache, logits_BV = prefill(model, prompts, capacity=40)
print("true lengths", cache.lengths, "in a rectangle of", len(prompts), "x", max(cache.lengths))
wasted = 1 - sum(cache.lengths) / (len(prompts) * max(cache.lengths))
print(f"{100 * wasted:.0f}% of the prefill was spent on padding")

# %% [markdown]
# Each row continues as it would alone:

# %%
together = generate(model, prompts, 8)
alone = [generate(model, [p], 8)[0] for p in prompts]
assert together == alone
print("rows equal to one at a time:", [a == b for a, b in zip(together, alone, strict=True)])

# %% [markdown] slideshow={"slide_type": "subslide"}
# And to show that leftovers are never looked at, we overwrite all of them with a thousand:


# %%
@torch.inference_mode()
def next_logits(spoil):
    cache, logits_BV = prefill(model, prompts, capacity=40)
    for row, length in enumerate(cache.lengths):
        if spoil:
            cache.k_LBSKH[:, row, length:] = cache.v_LBSKH[:, row, length:] = 1e3
    return model(logits_BV.argmax(-1, keepdim=True), cache)


gap = (next_logits(spoil=True) - next_logits(spoil=False)).abs().max().item()
assert gap < 1e-2
print("spoiled leftovers change nothing:", gap < 1e-2)

# %% [markdown]
# Correct, but wasteful: the rectangle is as wide as the longest prompt. Notebook 09 runs prompts of
# any length as one flat row of tokens, and lets new requests in at every step.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 10. More devices: copies or shards
#
# **Copies** are easy. $M$ devices each hold the whole model and serve their own batch: latency stays
# as it is, throughput is $M$ times as high. Each device must hold everything, and reads all weights.
#
# **Sharding** splits the weights, and the cache by KV heads, over $M$ devices. Each reads its share of
# every step, so the group behaves like one device with $M$ times the memory and $M$ times the
# bandwidth. Latency falls to $1/M$ *at best*: in each layer the devices wait for each other twice, to
# add up what attention and the MLP computed in parts. That time we leave out for now. Section "Past one
# machine" of [notebook 12](12_putting_it_together.ipynb) really cuts a model in two, runs the halves in two
# processes, and counts what they say to each other.

# %%
from dataclasses import replace


def group_of(accelerator, M):
    """M devices that share every step perfectly, as one."""
    return replace(
        accelerator,
        bandwidth_bytes_per_s=M * accelerator.bandwidth_bytes_per_s,
        memory_bytes=M * accelerator.memory_bytes,
    )


# %% slideshow={"slide_type": "subslide"} tags=["hide-input"]
def two_plans(c, each, M, S=1024):
    """M copies that serve `each` sequences apiece; M shards that serve all of them."""
    copy, shards = decode_step(c, each, S, h100), decode_step(c, M * each, S, group_of(h100, M))
    for name, plan, rate in [
        ("copies", copy, M * copy.throughput_tokens_per_s),
        ("shards", shards, shards.throughput_tokens_per_s),
    ]:
        fits = "" if plan.fits else ", does not fit"
        print(f"  {M} {name}: {1e3 * plan.latency_s:6.2f} ms, {rate:8,.0f} tok/s{fits}")


for name, each in [("llama-2-13b", 16), ("llama-2-70b", 16)]:
    print(f"{name}, {each} sequences for each H100")
    for devices in (2, 4, 8):
        two_plans(PUBLISHED[name], each, devices)

# %% [markdown] slideshow={"slide_type": "subslide"}
# Copies: latency the same, throughput times $M$. Shards at the same load: latency falls, and throughput
# rises even more, since the weights are read once for the group and not once for each device. A 70B
# model in 16 bits doesn't fit on one H100 at all: for it sharding is not a choice.
#
# Three limits: $M$ beyond the number of KV heads ($K = 8$ in the 70B model) would store some heads
# twice; the waiting between devices doesn't shrink with $M$; and `fits` counts weights and caches only.

# %% [markdown]
# ### Exercise 3.6: copies or shards?
# *15 minutes · comparing two plans at equal load*
#
# `B` sequences of `S` positions are to be served in 16 bits on `M` devices, `M` dividing `B`.
#
# - **Copies**: each device holds all weights and the caches of `B // M` sequences.
# - **Sharding**: each device holds `1/M` of the weights and `1/M` of all `B` caches. The devices wait
#   for each other twice a layer, `sync_s` seconds each time.
#
# Return the two latencies in seconds, `(copies_s, sharded_s)`: the bytes on a device over its bandwidth,
# and for sharding the waiting on top. Where a device would hold more than `accelerator.memory_bytes`,
# the latency is `math.inf`. `weight_bytes(config)` and `kv_bytes_per_token(config)` are in 16 bits.

# %% slideshow={"slide_type": "skip"}
import math


def copies_or_shards(config, B, S, accelerator, M, sync_s):
    """(latency of M copies, latency of M shards), in seconds; math.inf if it doesn't fit."""
    ### BEGIN SOLUTION
    weights, each = weight_bytes(config), S * kv_bytes_per_token(config)
    bandwidth, room = accelerator.bandwidth_bytes_per_s, accelerator.memory_bytes
    copy, shard = weights + B // M * each, (weights + B * each) / M
    copies_s = copy / bandwidth if copy <= room else math.inf
    sharded_s = shard / bandwidth + 2 * config.L * sync_s if shard <= room else math.inf
    return copies_s, sharded_s
    ### END SOLUTION


# %% slideshow={"slide_type": "skip"}
check("3.6", copies_or_shards)

# %% [markdown]
# What decides it? Subtract one latency from the other: the caches cancel, and the batch with them.

# %% slideshow={"slide_type": "subslide"}
num_devices, sync = sympy.symbols("M t_sync", positive=True)
copies_latency = (W + B / num_devices * C) / memory_bandwidth
sharded_latency = (W + B * C) / num_devices / memory_bandwidth + 2 * L * sync
gain = sympy.factor(sympy.simplify(copies_latency - sharded_latency + 2 * L * sync))
print("sharding gains", gain, "and loses", 2 * L * sync)

# %%
break_even = weight_bytes(llama) * (1 - 1 / 8) / h100.bandwidth_bytes_per_s / (2 * llama.L)
print(
    f"Llama-2-13B on 8 H100s: sharding is faster while a wait takes under {1e6 * break_even:.0f} µs"
)

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
from lecture_util.classroom.figures import bars


def draw_plans(model="llama-2-13b", devices=8, sequences_each=16, wait_us=10):
    c, total = PUBLISHED[model], devices * sequences_each
    copies = decode_step(c, sequences_each, 1024, h100)
    shards = decode_step(c, total, 1024, group_of(h100, devices))
    waiting_s = 2 * c.L * wait_us * 1e-6 if devices > 1 else 0
    labels = [f"{devices} copies", f"{devices} shards"]
    labels = [
        f"{x}{'' if s.fits else ', no room'}" for x, s in zip(labels, (copies, shards), strict=True)
    ]
    times_ms = [1e3 * copies.latency_s, 1e3 * (shards.latency_s + waiting_s)]
    title = f"{model}: {total} sequences on {devices} H100s"
    return bars(labels, times_ms, "ms a token, at least", title=title).figure


# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
shapes = ["smollm2-1.7b", "llama-2-7b", "llama-2-13b", "llama-2-70b"]
load = {"devices": [1, 2, 4, 8], "sequences_each": [1, 4, 16, 64]}
explore(draw_plans, model=shapes, **load, wait_us=(0, 60, 5))

# %% [markdown]
# So sharding pays where reading the weights takes long beside the waiting: for large models and fast
# links. For a small model the waiting is all there is, and copies win.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## What to remember
#
# - Keys and values of earlier tokens never change in a causal model: keep them, and a step passes one
#   token and not all.
# - The cache takes $2 \cdot \text{bytes} \cdot L \cdot K \cdot H$ for each token of each sequence: KV
#   heads, not the model's width.
# - A decode step takes at least (weights + $B$ · cache) / bandwidth; throughput is $B$ over that.
# - Batching is nearly free up to $B = W/C$, and nearly useless far beyond it.
# - Prefill waits for computing, generation for memory: small batches for the first, large ones for the
#   second. Copies multiply throughput; shards cut latency, less the waiting.

# %% tags=["nbval-ignore-output"]
status("03")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ## Papers and sources
#
# - Stanford CS336, spring 2025, lecture 10, *Inference*: the order of this notebook, the step-time
#   model, and Llama-2-13B at B = 1, 64, 256.
# - Julien Simon, *Deep Dive: Optimizing LLM Inference* (slides, CC BY-NC 4.0): the KV cache and its
#   size.
# - Austin et al. 2025, *How to Scale Your Model*, chapters on Transformers and inference,
#   jax-ml.github.io/scaling-book.
# - Shazeer 2019, *Fast Transformer Decoding: One Write-Head is All You Need*, arXiv:1911.02150:
#   incremental decoding waits for memory.
# - Pope et al. 2022, *Efficiently Scaling Transformer Inference*, arXiv:2211.05102: latency, throughput
#   and how to shard.
# - Vaswani et al. 2017, *Attention Is All You Need*, arXiv:1706.03762.
# - Shapes: Lightning-AI/litgpt, `litgpt/config.py`. Bandwidth and memory of accelerators:
#   stas00/ml-engineering, `compute/accelerator/README.md`.
