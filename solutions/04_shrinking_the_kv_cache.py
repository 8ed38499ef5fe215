# %% [markdown] slideshow={"slide_type": "slide"}
# # 04 · Shrinking the KV cache
#
# Notebook 03 ended with two facts. A decode step waits for memory, and once the batch is large most of
# what it reads is cache. So everything now hangs on one number: the bytes that a token leaves behind.
# This notebook makes that number smaller, in four ways, and asks each time what it costs.
#
# You will
#
# 1. see why tokens per second are inversely proportional to the cache, once a card is full;
# 2. share keys among heads (GQA, MQA), and average a real model's heads to feel what it does;
# 3. compress them to a latent (MLA), and find out why rotary positions get in the way;
# 4. share them among layers (CLA), and forget them (windows), and combine all of it;
# 5. measure every variant here: bytes, step time, and what small models can still learn.

# %% slideshow={"slide_type": "subslide"}
import matplotlib.pyplot as plt
import sympy
import torch
from IPython.display import display

from lecture_util.classroom import check, hint, predict, status, step, use_style
from lecture_util.model.config import PUBLISHED
from lecture_util.model.weights import load, load_tokenizer
from lecture_util.roofline import ACCELERATORS, decode_step, format_bytes, this_machine

use_style()
model, tokenizer = load(), load_tokenizer()
llama, h100 = PUBLISHED["llama-2-13b"], ACCELERATORS["h100"]

# %% tags=["nbval-ignore-output"]
machine = this_machine()
bandwidth = machine.bandwidth_bytes_per_s
print(
    f"{machine.name}: {bandwidth / 1e9:.1f} GB/s, {machine.peak('fp32') / 1e9:,.0f} GFLOP/s in fp32"
)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 1. What limits the batch?
#
# Llama-2-13B in 16 bits, 1,024 tokens a sequence, one H100 with 80 GB. 64 sequences fit, 65 don't.
# What stands in the way?

# %% tags=["nbval-ignore-output"]
limit = predict("What fills the card at B = 64?", choices=["weights", "caches", "half and half"])

# %%
from lecture_util.roofline import kv_bytes_per_token, weight_bytes

weights, each = weight_bytes(llama), 1024 * kv_bytes_per_token(llama)
largest = int((h100.memory_bytes - weights) // each)
print("weights     ", format_bytes(weights))
print("one sequence", format_bytes(each))
print(largest, "of them", format_bytes(largest * each), "and 65 do not fit")
assert largest == 64

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
limit.reveal("caches")

# %% [markdown]
# ### A full card takes 24 ms
#
# Fill the card with whatever fits. A step reads the weights and all caches, so it reads the whole
# memory, once: $80\,\text{GB} / 3.35\,\text{TB/s} \approx 24$ ms, whatever the model and however small
# the caches. What changes is how many tokens come out of those 24 ms, one for each sequence:

# %%
M, W, C, rate = sympy.symbols("M W C rate", positive=True)  # memory, weights, one cache, bytes/s
batch = (M - W) / C  # as many as fit
step_s = sympy.simplify((W + batch * C) / rate)
tokens_per_s = sympy.factor(batch / step_s)
print("step:", step_s, "   tokens a second:", tokens_per_s)
print(f"full H100: {1e3 * h100.memory_bytes / h100.bandwidth_bytes_per_s:.1f} ms a step")

# %% [markdown]
# **Halve the cache, and a full card gives twice the tokens at the same latency.** Or keep the batch,
# and the latency falls. That is what the rest of this notebook is for.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Four factors
#
# $$\text{bytes} = 2 \cdot \text{bytes a number} \cdot B \cdot S \cdot L \cdot K \cdot H$$
#
# $B$ is what we want more of. Each of the others can shrink:
#
# | factor | read as | technique | section |
# |---|---|---|---|
# | $K$ | heads that keep keys and values | GQA, MQA: query heads share | 2 |
# | $2KH$ | numbers kept of a token and layer | MLA: a latent instead | 3 |
# | $L$ | layers that keep any | CLA: layers share | 4 |
# | $S$ | tokens kept | windows: forget what is far | 5 |
# | all | | hybrids: some layers so, some so | 6 |
#
# (And the bytes a number takes: quantization, notebook 06.) None is free: each takes something from
# the model. So each section ends with a result on quality, and section 8 is about nothing else.

# %% [markdown] slideshow={"slide_type": "notes"}
# *For the instructor.* Let the room find the four factors before showing the table: write the formula, ask "which of
# these would you cut, and what would the model lose?" The 24 ms is worth a pause. It separates what a
# smaller cache does (more tokens out of the same 24 ms) from what a larger batch does.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 2. Fewer KV heads: GQA and MQA
#
# ![Three panels with 8 query heads each. Multi-head: 8 KV heads, one a query head. Grouped: 4 KV heads, each read by 2 neighbouring query heads. Multi-query: 1 KV head read by all 8. The numbers cached a token and layer, 2KH, fall from 1,024 to 512 to 128 at H=64.](../images/kv-head-sharing.svg)
#
# *Multi-head* attention (MHA) has $K = N$. *Grouped-query* attention (GQA) lets $G = N/K$ query heads
# share one KV head. *Multi-query* (MQA) is $K = 1$. They need no three implementations: $K$ and $G$ are
# two numbers in a config, and every attention in this course takes both.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Which query head reads which KV head?
#
# Neighbours share. With $K=2$, $G=3$ the six query heads read KV heads 0 0 0 1 1 1. A loop makes it
# exact:

# %%
from lecture_util.model.attention import attend

K, G, H = 2, 3, 4
draw = torch.Generator().manual_seed(0)
q_BTNH = torch.randn(1, 1, K * G, H, generator=draw, dtype=torch.float64)
k_BSKH, v_BSKH = torch.randn(2, 1, 5, K, H, generator=draw, dtype=torch.float64)


def one_head(n, k):
    """Query head n over the keys and values of KV head k."""
    scores_S = k_BSKH[0, :, k] @ q_BTNH[0, 0, n] / H**0.5
    return scores_S.softmax(-1) @ v_BSKH[0, :, k]


# %% slideshow={"slide_type": "subslide"}
neighbours = torch.arange(K).repeat_interleave(G).tolist()
tiled = torch.arange(K).repeat(G).tolist()
assert neighbours == [n // G for n in range(K * G)] and tiled == [n % K for n in range(K * G)]

out_NH = attend(q_BTNH, k_BSKH, v_BSKH)[0, 0]
for name, heads in [("repeat_interleave", neighbours), ("repeat (tile)    ", tiled)]:
    ours_NH = torch.stack([one_head(n, k) for n, k in enumerate(heads)])
    print(name, heads, "equals the library:", torch.allclose(ours_NH, out_NH))

# %% [markdown]
# Both run, and both give tensors of the right shape. Only $n // G$ is what checkpoints were trained
# with; tiling the heads is a bug that more than one project has shipped and that no shape check finds.
#
# Note also what `attend` does *not* do: it never copies a KV head $G$ times. That would read $G$ times
# the bytes, and give away all that GQA gains.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Predict: Llama-2-13B with 8 KV heads
#
# What does one KV head cost, in all 40 layers? Its $W_K$ and $W_V$ are weights, its keys and values
# are cache. A step reads both, so the step's bytes are a straight line in $K$:

# %%
from lecture_util.roofline import symbols

B, S, heads = symbols("B S K")
head_weights = 2 * 2 * llama.L * llama.D * llama.H  # W_K and W_V of one head, in 16 bits
head_cache = 2 * 2 * llama.L * llama.H * S  # and what it keeps of S tokens
rest = weight_bytes(llama) - llama.K * head_weights
step_bytes = rest + heads * (head_weights + B * head_cache)
for k, b in [(40, 64), (8, 64), (8, 256), (1, 256)]:
    library = decode_step(llama.with_kv_heads(k), b, 1024, h100)
    assert step_bytes.subs({heads: k, B: b, S: 1024}) == library.memory_bytes
display(step_bytes)

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
longer = predict(
    "K from 40 to 8 at B = 64: a step takes ...", choices=["longer", "as long", "less time"]
)

# %% [markdown]
# Once you have chosen:

# %%
seen = {}
for k, b in [(40, 64), (8, 64), (8, 256)]:
    best = decode_step(llama.with_kv_heads(k), b, 1024, h100)
    ms, tokens = 1e3 * best.latency_s, best.throughput_tokens_per_s
    seen[k, b] = f"{ms:.2f}", f"{tokens:,.0f}"
    print(f"K={k:<3} B={b:<4} {ms:6.2f} ms {tokens:7,.0f} tok/s, fits: {best.fits}")
assert seen[40, 64] == ("23.80", "2,689")
assert seen[8, 64] == ("9.97", "6,417") and seen[8, 256] == ("19.59", "13,068")

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
longer.reveal("less time")

# %% [markdown]
# > **Erratum.** The last two rows are often told as one story: "with GQA latency gets worse, but
# > throughput better". GQA alone makes *both* better, 23.80 → 9.97 ms at the same batch. What makes
# > latency worse again is the larger batch, which fits only now. And even at $B=256$ a step takes less
# > time than it did before GQA at 64.

# %% slideshow={"slide_type": "skip"}
assert float(seen[8, 64][0]) < float(seen[8, 256][0]) < float(seen[40, 64][0])

# %% [markdown] slideshow={"slide_type": "subslide"}
# ![Predicted decode step time against KV heads K on logarithmic axes, Llama-2-13B shape, 1,024 tokens, H100, one dashed line a batch size. Every line rises with K. At B=64 the step takes 23.8 ms with K=40 and 9.97 ms with K=8; at B=256 and K=8, 19.6 ms. Hollow points do not fit in 80 GB.](../images/gqa-step-time.svg)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### What of it is the cache's?
#
# $W_K$ and $W_V$ shrink with $K$, and with them the model. To compare at an equal number of parameters,
# give the saved weights back, to the MLP say:

# %%
from lecture_util.roofline import kv_cache_bytes, num_params

gqa = llama.with_kv_heads(8)
as_many = weight_bytes(llama) + kv_cache_bytes(gqa, 64, 1024)  # MHA's weights, GQA's cache
equal_ms = 1e3 * as_many / h100.bandwidth_bytes_per_s
print(f"parameters: {num_params(llama) / 1e9:.1f}B -> {num_params(gqa) / 1e9:.1f}B")
print(f"equal parameters, B=64: {equal_ms:.2f} ms, {64e3 / equal_ms:,.0f} tok/s")
fewer_ms = 1e3 * (weight_bytes(llama) - weight_bytes(gqa)) / h100.bandwidth_bytes_per_s
print(f"reading fewer weights saves {fewer_ms:.2f} ms of the 13.8")
assert (f"{equal_ms:.2f}", f"{64e3 / equal_ms:,.0f}") == ("10.98", "5,831")

# %% [markdown]
# > **Erratum.** "The gain is the KV cache's" is nearly right. Of the 13.8 ms saved, one comes from
# > 1.7 billion weights that are simply gone. A fair comparison keeps the size: 10.98 ms, not 9.97.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Intensity
#
# How much does attention compute for a byte it reads? One new token, $G$ queries on each key:

# %%
from lecture_util.roofline import attention

N, K_, G_, H_ = symbols("N K G H")
mha = attention(B, S, 1, N, N, H_).intensity
grouped = attention(B, S, 1, K_ * G_, K_, H_).intensity
print("MHA:", mha, "  GQA:", sympy.factor(grouped))
assert sympy.limit(mha, S, sympy.oo) == 1
assert sympy.limit(grouped, S, sympy.oo) == G_

# %% [markdown]
# $B$ is gone: each sequence brings its own keys, so a larger batch helps nothing here. $G$ stays: a key
# that is on the chip serves $G$ queries.
#
# > **Erratum.** "In generation attention's intensity is at most 1, and nothing can be done" is true of
# > MHA only. With $G$ queries a KV head it tends to $G$: 5 for our 13B with $K=8$, 8 for Llama-3-70B,
# > and in section 3 it will come close to the H100's ridge of 295.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Measured here
#
# Attention alone, one step, 32 query heads of width 64 over a long cache. We shrink $K$ from 32 to 1.
# The FLOPs stay as they are; the bytes fall in proportion. **Predict** with the roofline, then measure:

# %%
from lecture_util.roofline import measure

on_gpu = torch.cuda.is_available()
B_, S_, N_, H2, dtype = (32, 16384, 32, 64, "bf16") if on_gpu else (1, 8192, 32, 64, "fp32")
width, kind = (2, torch.bfloat16) if on_gpu else (4, torch.float32)
kv_heads = [1, 2, 4, 8, 16, 32]
q_BTNH = torch.randn(B_, 1, N_, H2, device=model.device, dtype=kind)
costs = [attention(B_, S_, 1, N_, k, H2, dtype_bytes=width) for k in kv_heads]

# %% tags=["nbval-ignore-output"]
head_times = []
with torch.inference_mode():
    for k, cost in zip(kv_heads, costs, strict=True):
        k_BSKH, v_BSKH = torch.randn(2, B_, S_, k, H2, device=model.device, dtype=kind)
        head_times.append(measure(attend, q_BTNH, k_BSKH, v_BSKH, repeats=9, warmup=2))
        least = 1e3 * cost.time_s(machine, dtype)
        print(f"K={k:<3} {format_bytes(cost.bytes):>9}, at least {least:6.2f} ms: {head_times[-1]}")

# %% tags=["nbval-ignore-output", "hide-input"] slideshow={"slide_type": "subslide"}
from lecture_util.classroom.figures import caption, claim, predicted_vs_measured

times_ms = [1e3 * run.best_s for run in head_times]
spread = times_ms, [1e3 * run.median_s for run in head_times]  # from the best run to the middle one
_, ax = plt.subplots(figsize=(6.5, 3.2))
predicted_vs_measured(kv_heads, [1e3 * cost.time_s(machine, dtype) for cost in costs], times_ms,
                      spread, "KV heads K, of 32 query heads", "attention, ms", ax=ax)  # fmt: skip
claim(ax, f"32 KV heads to 1: {times_ms[-1] / times_ms[0]:.0f} times faster")
caption(ax, device=machine.name, dtype=dtype,
        shapes=f"B={B_}, S={S_:,}, N={N_}, H={H2}; best of 9 runs, shaded to the median")  # fmt: skip
plt.show()

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Read.** At large $K$ the time is nearly proportional to $K$: it waits for memory, as predicted. At
# small $K$ two things may bend the curve. It *flattens*, where it begins to wait for computing: the
# FLOPs are the same for every $K$, and 32 queries a key no longer come for nothing. Or it dips *below*
# the prediction, where the whole cache fits into the processor's own (K = 1 here is
# 4 MB on a CPU), so that memory isn't asked at all.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### What does it cost in quality?
#
# ![Four points, seconds a sample against average score. T5-XXL with multi-head attention: 1.51 s, 47.2. Multi-query: 0.24 s, 46.6. Eight groups: 0.28 s, 47.1. T5-Large with multi-head attention: 0.37 s, 46.0.](../images/gqa-quality-time.svg)
#
# (Ainslie et al. 2023, arXiv:2305.13245, Table 1.) Eight groups keep nearly all the quality and nearly
# all the speed; Llama-3, Mistral 7B and many others since have $K = 8$. But these models were not simply
# cut: their heads were averaged, and then *trained further* with 5% of the pre-training compute.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### And without the training?
#
# Let us average our model's heads: SmolLM2-135M has $K=3$; each layer's three keys and three values
# become one. `pool_kv_heads` makes such a model, a third of the cache. Its perplexity on 512 tokens of
# English is about 17. **Predict** what becomes of it, and write your number down.

# %% tags=["nbval-ignore-output"]
from lecture_util.kv_reduction.gqa import pool_kv_heads
from lecture_util.model.text import english, perplexity

text_BT = torch.tensor([tokenizer.encode(english()[:4000])[:512]], device=model.device)
pooled = pool_kv_heads(model, 1)
before, after = perplexity(model, text_BT), perplexity(pooled, text_BT)
print(f"perplexity {before:.1f} -> {after:,.0f}; guessing among all tokens: {model.config.V:,}")
assert after > 50 * before
assert 3 * kv_bytes_per_token(pooled.config) == kv_bytes_per_token(model.config)

# %% [markdown]
# Destroyed. Why is averaging so bad, when the paper finds it the best way to *begin*? Because heads are
# not noisy copies of one another. Look at how alike two KV heads' key projections are, as vectors:

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
c = model.config
alike = []
for block in model.blocks:
    k_KM = block.qkv.weight[c.N * c.H : (c.N + c.K) * c.H].float().reshape(c.K, -1)
    cosine_KK = torch.nn.functional.cosine_similarity(k_KM[:, None], k_KM[None], dim=-1)
    alike += cosine_KK[~torch.eye(c.K, dtype=torch.bool, device=model.device)].tolist()
print(f"cosine of two heads' key projections: {min(alike):.2f} to {max(alike):.2f}")

# %% [markdown]
# Nearly at right angles. The mean of three such vectors is short, and points nowhere in particular.
# What survives is a start from which training recovers faster than from scratch. **Conversion saves
# pre-training, not training**: count on that 5%. Section 8 shows what heads cost when a model is
# trained with few from the beginning.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Exercise 4.1: average the heads
# *10 minutes · grouping by reshape, and which heads are neighbours*
#
# A checkpoint's key projection is a matrix of $K \cdot H$ rows and $D$ columns: head 0's $H$ rows, then
# head 1's, and so on. Turn it into one of `K_new` heads, each the mean of the heads that its queries
# used to read. `K_new` divides `K`. Keep the dtype.
#
# (What if `K_new` is `K`? Then nothing may change.)


# %% slideshow={"slide_type": "skip"}
def pool_projection(w_MD, K, K_new):
    """Average groups of KV heads. Shapes: (K*H, D) -> (K_new*H, D)."""
    ### BEGIN SOLUTION
    H = len(w_MD) // K
    grouped = w_MD.reshape(K_new, K // K_new, H, -1)
    return grouped.mean(1).reshape(K_new * H, -1)
    ### END SOLUTION


# %% slideshow={"slide_type": "skip"}
check("4.1", pool_projection)

# %% [markdown]
# Stuck? Each call opens one more hint.

# %% slideshow={"slide_type": "skip"}
hint("4.1")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Exercise 4.2: at most 1?
# *10 minutes · finding the mistake*
#
# A colleague computes the arithmetic intensity of attention in a decode step and concludes that it
# "can never exceed 1 FLOP a byte":
#
# ```python
# def decode_intensity(S, N, K, H):
#     flops = 4 * S * N * H                    # scores, and the mix of values
#     keys_and_values = 2 * S * N * H          # read once each
#     query_and_output = 2 * N * H
#     return flops / (2 * (keys_and_values + query_and_output))
# ```
#
# One line is wrong for the model of section 2. Repair it, and let the function work in any number
# format: `width` is the bytes of a number.


# %% slideshow={"slide_type": "skip"}
def decode_intensity(S, N, K, H, width=2):
    """FLOPs a byte of one query token a sequence, N heads over S positions of K KV heads."""
    ### BEGIN SOLUTION
    flops = 4 * S * N * H
    return flops / (width * (2 * S * K * H + 2 * N * H))
    ### END SOLUTION


# %% slideshow={"slide_type": "skip"}
check("4.2", decode_intensity)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 3. A latent instead of keys and values: MLA
#
# GQA shares keys that were made in full. Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434)
# keeps all $N$ heads different, and stores none of them. Each token leaves *one* vector $c$ of width
# $C$, from which every head's key and value can be made again by a matrix:
#
# $$c = W_{D}\,x, \qquad k_n = W_{K,n}\,c, \qquad v_n = W_{V,n}\,c$$
#
# In other words: the $2 N H$ numbers that MHA keeps are confined to a subspace of dimension $C$, keys
# and values *jointly*, and only the coordinates in it are stored.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ![Bars to scale, 2,048 numbers a row, for 128 heads of width 128. Multi-head attention fills 16 rows, 8 of keys and 8 of values: 32,768 numbers. GQA with 8 KV heads fills one row, 2,048. MLA: a latent of 512 and a RoPE key of 64, 576 in all, 57 times fewer than MHA. MQA: 256.](../images/mla-cached-numbers.svg)
#
# > **Erratum.** "MLA shrinks 16,384 to 512 (+64)" compares a latent that serves for keys *and* values
# > with the keys alone. MHA with DeepSeek-V2's 128 heads of 128 keeps 32,768 numbers a token and layer;
# > MLA keeps 576.

# %%
heads_kept, latent_kept = 2 * 128 * 128, 512 + 64
assert heads_kept == 32_768 and f"{heads_kept / latent_kept:.0f}" == "57"
print(f"{heads_kept:,} -> {latent_kept}: {heads_kept / latent_kept:.1f} times fewer")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Absorbing
#
# At first sight nothing is won: to attend, every step would have to expand all $S$ latents into $N$
# keys. But a score is a product of three things, and products may be bracketed as we like:
#
# $$q_n \cdot (W_{K,n}\, c) \;=\; (W_{K,n}^\top q_n) \cdot c$$
#
# Take the *query* to the latent's side, once, instead of taking $S$ latents to the keys' side. The
# matrix is absorbed into the query. Small tensors, from a real layer of our library in fp64:

# %%
from lecture_util.kv_reduction.latent_cache import MLA
from lecture_util.kv_reduction.mla import MLABlock
from lecture_util.model.config import Config

tiny = Config(D=24, F=32, K=3, G=1, H=8, L=2, V=50)
shape = MLA(C=6, R=4, nope=8, v=8)  # latent, rotated part, key without position, value
torch.manual_seed(0)
block = MLABlock(tiny, 0, shape).double().requires_grad_(False)
expand_NMC = block.expand.weight.unflatten(0, (tiny.N, -1))
key_NJC, value_NUC = expand_NMC.split((shape.nope, shape.v), dim=1)  # J = 8, U = 8

# %% slideshow={"slide_type": "subslide"}
S_ = 7
draw = torch.Generator().manual_seed(1)
c_SC = torch.randn(S_, shape.C, generator=draw, dtype=torch.float64)
q_NJ = torch.randn(tiny.N, shape.nope, generator=draw, dtype=torch.float64)

k_SNJ = torch.einsum("njc,sc->snj", key_NJC, c_SC)  # expanded: S x N x J numbers
expanded_NS = torch.einsum("nj,snj->ns", q_NJ, k_SNJ)

q_NC = torch.einsum("nj,njc->nc", q_NJ, key_NJC)  # absorbed: N x C numbers, whatever S
absorbed_NS = q_NC @ c_SC.T
assert torch.allclose(expanded_NS, absorbed_NS)
print("keys expanded:", k_SNJ.numel(), "numbers; queries absorbed:", q_NC.numel())

# %% [markdown]
# The other end goes the same way: mix the latents first, $\bar c_n = \sum_s w_{n,s}\, c_s$, and expand
# what was mixed, $W_{V,n}\,\bar c_n$: one vector a head, not $S$.
#
# Seen from the cache, all $N$ heads now attend over *one* KV head of width $C$. In decode MLA **is** an
# MQA, with wide queries, whose single key also serves as its value.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Why rotary positions get in the way
#
# RoPE turns a key by its position, after it was made: $k_s = R_s\,W_K\, c_s$. A query at $t$ is turned
# by $R_t$, and a score depends on the distance, $R_s^\top R_t = R_{t-s}$:
#
# $$(R_t\,q) \cdot (R_s\,W_K\,c_s) \;=\; (W_K^\top\, R_{t-s}\, q) \cdot c_s$$
#
# The rotation stands *between* $W_K$ and $q$, and differs for each $s$. So there is no one absorbed
# query; there is one for every distance. We try the obvious wrong thing, and the right one:

# %%
from dataclasses import replace

from lecture_util.model.attention import apply_rope, rope_frequencies, rope_table

frequencies = rope_frequencies(replace(tiny, H=shape.nope))
turn = rope_table(frequencies, torch.arange(S_))  # by 0, 1, ..., S-1
back = rope_table(frequencies, S_ - 1 - torch.arange(S_))  # by the distance from the last

rotated_SNJ = apply_rope(k_SNJ, turn)
query_NJ = apply_rope(q_NJ[None], [part[-1:] for part in turn])[0]
wanted_NS = torch.einsum("nj,snj->ns", query_NJ, rotated_SNJ)

# %% slideshow={"slide_type": "subslide"}
one_query_NS = torch.einsum("nj,njc,sc->ns", query_NJ, key_NJC, c_SC)  # forgets the keys' turns
by_distance_SNJ = apply_rope(q_NJ.expand(S_, -1, -1), back)
q_SNC = torch.einsum("snj,njc->snc", by_distance_SNJ, key_NJC)  # one for each distance
right_NS = torch.einsum("snc,sc->ns", q_SNC, c_SC)

print("one absorbed query: right?", torch.allclose(one_query_NS, wanted_NS, atol=1e-5))
print("one a distance:     right?", torch.allclose(right_NS, wanted_NS, atol=1e-5))
assert not torch.allclose(one_query_NS, wanted_NS, atol=0.1)
print(f"queries to absorb: {q_SNC.numel()} numbers, keys to expand: {k_SNJ.numel()}")

# %% [markdown]
# Correct with one query for each distance, but then there is as much to make as if we expanded the
# keys. Rotating and compressing do not commute.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### The way out: positions in dimensions of their own
#
# Split each key in two. $J$ dimensions carry content and are never rotated, so they absorb. $R$ more
# dimensions carry the position: they are rotated, they are *not* made from the latent, and all heads
# share them, so that they cost $R$ numbers a token and not $N R$. A score adds up:
#
# $$\text{score} = \frac{\;\overbrace{(W_{K,n}^\top\, q_n^{J}) \cdot c_s}^{\text{content}} \;+\;
# \overbrace{q_n^{R} \cdot k_s^{R}}^{\text{position, rotated}}\;}{\sqrt{J + R}}$$
#
# Kept of each token: $c_s$ and $k_s^R$, which is $C + R$ numbers. Mind the scale: it belongs to a head's
# key, $J+R$ wide, although the vectors in the cache are $C+R$ wide. torch would take the latter.

# %%
latent_SX = torch.randn(S_, shape.latent_width, generator=draw, dtype=torch.float64)  # X = C + R
q_NR = torch.randn(tiny.N, shape.R, generator=draw, dtype=torch.float64)  # rotated already

absorbed_NX = torch.cat((q_NC, q_NR), dim=-1)
scores_NS = absorbed_NX @ latent_SX.T / (shape.nope + shape.R) ** 0.5
mixed_NC = scores_NS.softmax(-1) @ latent_SX[:, : shape.C]
by_hand_NU = torch.einsum("nuc,nc->nu", value_NUC, mixed_NC)

# %% slideshow={"slide_type": "subslide"}
for name, mode in [("naive", block.naive), ("absorbed", block.absorbed)]:
    out_NU = mode(q_NJ[None, None], q_NR[None, None], latent_SX[None], None)[0, 0]
    assert torch.allclose(out_NU, by_hand_NU)
    print(f"by hand equals the library's {name} mode")

# %% [markdown]
# ### The cache
#
# And in a whole model: a `LatentCache` holds one tensor. Prefill, then token by token, in either mode,
# gives the logits of an uncached pass:

# %%
from lecture_util.kv_reduction.mla import mla, set_mode

small = mla(tiny, shape).double().requires_grad_(False)
tokens_BT = torch.randint(50, (2, 11), generator=draw)
cache = shape.new_cache(tiny, 2, 11, torch.float64)
print("held:", tuple(cache.latent_LBSX.shape), "and nothing else: L, B, S, C + R")
assert cache.nbytes == 8 * 2 * 2 * 11 * (shape.C + shape.R)

# %% slideshow={"slide_type": "subslide"}
whole_BTV = small(tokens_BT)
for mode in ("naive", "absorbed"):
    set_mode(small, mode)
    cache.truncate(0)
    parts = [small(part, cache) for part in tokens_BT.split([4, 1, 1, 5], dim=1)]
    assert torch.allclose(torch.cat(parts, dim=1), whole_BTV)
    print(f"{mode}: cached in pieces equals uncached")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Intensity, once more
#
# Absorbed, $N$ queries share one key that is also the value. A query, key and head cost $C+R$
# multiply-adds for the score and $C$ for the mix; a key is $C+R$ numbers. In 16 bits:

# %%
from lecture_util.kv_reduction.latent_cache import DEEPSEEK_V2
from lecture_util.kv_reduction.mla_cost import mla_decode_cost

free = MLA(*sympy.symbols("C R J U", positive=True))
in_the_limit = sympy.limit(mla_decode_cost(B, S, N, free).intensity, S, sympy.oo)
display(sympy.factor(in_the_limit))
assert sympy.simplify(in_the_limit - N * (2 * free.C + free.R) / (free.C + free.R)) == 0

# %% slideshow={"slide_type": "subslide"}
v2 = sympy.limit(mla_decode_cost(1, S, 128, DEEPSEEK_V2).intensity, S, sympy.oo)
print(f"DeepSeek-V2, 128 heads, 512 + 64: {float(v2):.1f} FLOPs a byte")
for name in ("h100", "h200"):
    print(f"ridge of the {name.upper()}: {ACCELERATORS[name].ridge():.0f}")
assert f"{float(v2):.0f}" == "242"

# %% [markdown]
# MHA 1, GQA-8 a handful, MLA 242: close to the H100's ridge, and *past* the H200's. Here attention in
# decode at last waits for computing, and a still smaller cache would win no time.

# %% [markdown] slideshow={"slide_type": "subslide"}
# Absorbing is for few queries. It makes every score wider ($2C + R$ instead of $J + R + U$), which
# prefill, with its many queries, would pay for each. There it is cheaper to expand once. The library
# takes the mode with fewer FLOPs; for DeepSeek-V2's widths:

# %%
from lecture_util.kv_reduction.mla_cost import mla_cost

print("T new tokens   expand every key   absorb")
for t in (1, 16, 128, 256, 4096):
    naive, absorbed = (
        mla_cost(1, 8192, t, 128, DEEPSEEK_V2, absorbed=flag).flops for flag in (False, True)
    )
    better = "absorb" if absorbed < naive else "expand"
    print(f"{t:<12} {naive / 1e9:>10,.0f} GFLOP {absorbed / 1e9:>10,.0f} GFLOP   {better}")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### What does it cost in quality?
#
# ![Dots on four lines, scores of a dense 7B model with MQA, GQA-8 and MHA. BBH 33.2, 35.6, 37.0; MMLU 37.9, 41.2, 45.2; C-Eval 30.0, 37.7, 42.9; CMMLU 34.6, 38.4, 43.5. The order is the same on all four; no variance is reported.](../images/mla-table-8.svg)
#
# First, trained from scratch, fewer KV heads do cost something (DeepSeek-V2, Table 8).

# %% [markdown] slideshow={"slide_type": "subslide"}
# ![Two panels of dots, MHA against MLA. Small mixture of experts, 110.6K against 15.6K numbers cached a token: BBH 37.9, 39.0; MMLU 48.7, 50.0; C-Eval 51.6, 50.9, a loss; CMMLU 52.3, 53.4. Large, 860.2K against 34.6K: 46.6, 50.7; 57.5, 59.0; 57.9, 59.2; 60.7, 62.5. No variance is reported.](../images/mla-table-9.svg)
#
# Second, MLA does as well as MHA or better (Table 9), at a fraction of the cache.

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Read the tables with care.** Three ratios are easily mixed up:

# %%
large_mha, large_mla = 860.2e3 / 60, 34.6e3 / 60  # numbers a token in each of 60 layers
print(
    f"Table 9, large: {large_mha:,.0f} -> {large_mla:,.0f} numbers, {large_mha / large_mla:.0f} x"
)
print(f"V2's own 128 heads: 32,768 -> 576 numbers, {32_768 / 576:.0f} x")

v2_bits, dense_bits = 60 * 576 * 6, 95 * 2 * 8 * 128 * 16  # 6-bit MLA; 67B, GQA-8, 16 bits
print(f"the abstract's 93.3%: {1 - v2_bits / dense_bits:.1%}, or {dense_bits / v2_bits:.1f} x")
print(f"of it MLA's own: {95 * 2048 / (60 * 576):.1f} x")
assert f"{1 - v2_bits / dense_bits:.1%}" == "93.3%"

# %% [markdown]
# The famous 93.3% includes 6-bit quantization of the cache, and its baseline already used GQA. MLA lost
# one of the eight comparisons; the two models of a pair do not have quite the same number of activated
# parameters; and no variance is reported. Evidence for "no worse", then, rather than for "better".

# %% [markdown] slideshow={"slide_type": "notes"}
# *For the instructor.* The bracket is the whole section: q·(Wc) = (Wᵀq)·c. Then ask what a rotation by position does to it,
# before showing the cell. If time is short, skip the cost table and keep the RoPE cell: the decoupled part
# is what people forget when they write MLA from memory.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Exercise 4.3: absorb a query
# *12 minutes · which widths meet where, and the scale*
#
# One token's query comes in two parts: `q_NJ`, without position, and `q_NR`, rotated already. The cache
# holds rows `latent_SX`: first the latent of width $C$, then the shared rotated key of width $R$. `w_NJC`
# makes each head's $J$-wide key from a latent.
#
# Return `(q_NX, scale)` such that `scale * q_NX @ latent_SX.T` are the scores, ready for the softmax,
# without a single key being expanded.


# %% slideshow={"slide_type": "skip"}
def absorb(q_NJ, q_NR, w_NJC):
    """-> (q_NX, scale): queries in the latent's space, X = C + R, and what scores are times."""
    ### BEGIN SOLUTION
    q_NC = torch.einsum("nj,njc->nc", q_NJ, w_NJC)
    scale = (q_NJ.shape[-1] + q_NR.shape[-1]) ** -0.5
    return torch.cat((q_NC, q_NR), dim=-1), scale
    ### END SOLUTION


# %% slideshow={"slide_type": "skip"}
check("4.3", absorb)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 4. Fewer layers that keep anything: CLA
#
# GQA lets heads share. Cross-layer attention (Brandon et al. 2024, arXiv:2405.12981) lets *layers*
# share: a **producer** projects keys and values and keeps them, as always; the layers above it, its
# **consumers**, project queries only, and look up their producer's keys.
#
# ![Four layers, bottom up. Layers 0 and 2 are producers: Wq, Wk and Wv, with a cache that their attention reads. Layers 1 and 3 are consumers: only Wq; an arrow leads from the cache of the layer below to their attention. So 4 layers hold 2 caches.](../images/cla-layers.svg)

# %% [markdown] slideshow={"slide_type": "subslide"}
# A `Layout` says for each layer whose keys it reads and how far it sees. CLA2, two layers to a cache:

# %%
from lecture_util.kv_reduction.cla import build
from lecture_util.kv_reduction.layout import Layout

four = replace(tiny, L=4)
pairs = Layout.cross_layer(four.L, share=2)
for i, layer in enumerate(pairs.layers):
    print(f"layer {i} reads the keys of layer {layer.reads}")
torch.manual_seed(0)
shared = build(four, pairs).double().requires_grad_(False)
print([type(block).__name__ for block in shared.blocks])

# %% [markdown]
# Cached must equal uncached, in any split, and after taking tokens back. A consumer that wrote into the
# cache, or that looked before its producer had written, would fail here:

# %% slideshow={"slide_type": "subslide"}
whole_BTV = shared(tokens_BT)
cache = shared.new_cache(four, 2, 11, torch.float64)
parts = [shared(part, cache) for part in tokens_BT.split([4, 1, 6], dim=1)]
assert torch.allclose(torch.cat(parts, dim=1), whole_BTV)
cache.truncate(5)
assert torch.allclose(shared(tokens_BT[:, 5:], cache), whole_BTV[:, 5:])
print(
    "caches for", four.L, "layers:", len(cache.stores), "- equal to uncached, also after rollback"
)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Held is not read
#
# The cache is half as large. So at the same batch, how much shorter is the part of a step that reads
# it?

# %% tags=["nbval-ignore-output"]
sharing = predict(
    "CLA2 halves the bytes held. The bytes of cache a step reads ...",
    choices=["halve too", "fall by a quarter", "stay the same"],
)

# %% slideshow={"slide_type": "subslide"}
from lecture_util.kv_reduction.sizes import cache_bytes, comparison, read_bytes

full, cla2 = Layout.full(llama.L), Layout.cross_layer(llama.L)
for name, layout in [("GQA-8       ", full), ("GQA-8 + CLA2", cla2)]:
    held, read = (f(gqa, layout, 64, 1024) for f in (cache_bytes, read_bytes))
    print(f"{name} held {format_bytes(held):>8}, read in a step {format_bytes(read):>8}")
assert 2 * cache_bytes(gqa, cla2, 64, 1024) == cache_bytes(gqa, full, 64, 1024)
assert read_bytes(gqa, cla2, 64, 1024) == read_bytes(gqa, full, 64, 1024)

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
sharing.reveal("stay the same")

# %% [markdown]
# Layer 1 runs long after layer 0 is done with those keys: in between lie an MLP's weights and far more
# cache than a chip holds. So each consumer fetches its producer's keys from memory again. CLA makes
# *room*: for more sequences, or longer ones. A step gets shorter only by the consumers' missing key and
# value matrices, a few per cent. GQA, MLA and windows
# do both. Section 1's "half the cache, twice the tokens" assumed that what is held is what is read:

# %%
for row in comparison(llama, 4096, h100):
    if row.technique in ("GQA-8", "CLA2 on GQA-8"):
        ms = 1e3 * row.latency_s
        print(
            f"{row.technique:<14} at most B={row.B:<4} {ms:5.1f} ms {row.tokens_per_s:6,.0f} tok/s"
        )

# %% [markdown]
# Twice the sequences, but with them a step of 41 ms: throughput rises by a sixth only.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### What does it cost in quality?
#
# ![Perplexity of 1B models against bytes of cache a token, logarithmic. Unshared: MHA 163,840 bytes, 13.15; GQA4 40,960, 13.36; MQA 10,240, 13.54; 64-wide heads 5,120, 13.81; 32 wide 2,560, 14.37. Pairs of layers sharing lie below: 10,240, 13.51; 5,120, 13.60; 2,560, 13.89. Four sharing: 2,560, 13.95.](../images/cla-quality-bytes.svg)
#
# (CLA, Table 1, with our bytes.) The fair question is not whether CLA2 is as good as the model it was
# made from; it isn't. It is whether there is a *better way to have so few bytes*. Against narrower heads,
# sharing scores a little better at every size (no variance is reported). And it goes on where sharing among heads ends: below MQA's 10,240 bytes
# there are no heads left to share.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 5. Fewer tokens: windows
#
# A layer with a window of $W$ lets each query see its last $W$ tokens, **itself included**, and forgets
# the rest. Past $W$ tokens its cache stops growing.
#
# ![Four grids, queries down, keys across, nothing above the diagonal. Full: the last of 12 queries reads 12 keys. Window of 4: a band of 4. Dilated: 4 keys, every second one, reaching back 7 positions. Window and 2 global columns: 6 keys. Kept between steps: all, 3, 6 and 5.](../images/attention-masks.svg)
#
# (Masks after Beltagy et al. 2020, arXiv:2004.05150, seen causally; windows in every layer: Jiang et al.
# 2023, Mistral 7B, arXiv:2310.06825, $W = 4096$.)

# %% [markdown] slideshow={"slide_type": "subslide"}
# Try them. On the left one layer's mask, and what its cache still holds; on the right what an output
# depends on, layer by layer. Move *layer* from 0 up: every window sees 4 keys, and yet the reach grows.
# Then choose *hybrid*.

# %% tags=["nbval-ignore-output", "hide-input"] slideshow={"slide_type": "subslide"}
from lecture_util.classroom.widgets import mask_viewer

mask_viewer("window", W=4)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### A ring
#
# When a token arrives, its query needs the $W-1$ keys before it and its own, which it brings along. So
# between steps $W-1$ are enough. Position $p$ goes to slot $p \bmod (W-1)$, where it overwrites exactly
# the key that has just fallen out of sight. Walk through it; the ring is shown at every step:


# %%
def decode_through_a_ring(W, steps):
    """One token at a time: what it sees, and what the ring then holds."""
    ring = [None] * (W - 1)  # slot -> position
    for position in range(steps):
        past = [p for p in ring if p is not None]
        sees = [*sorted(past), position]  # @inspect sees
        ring[position % (W - 1)] = position  # @inspect ring
        assert sees == list(range(max(0, position - W + 1), position + 1))
    return ring


# %% tags=["nbval-ignore-output", "hide-input"] slideshow={"slide_type": "subslide"}
step(decode_through_a_ring, 4, 9)

# %% [markdown]
# The library's ring holds the same positions, in the same slots. We write down which position each slot
# of a real model's first layer has, by comparing its keys with those of a cache that forgets nothing:

# %% slideshow={"slide_type": "subslide"}
torch.manual_seed(0)
windowed = build(tiny, Layout.windowed(tiny.L, W=4)).double().requires_grad_(False)
ring_cache = windowed.new_cache(tiny, 1, 20, torch.float64)
keeps_all = build(tiny, Layout.full(tiny.L)).double()
keeps_all.load_state_dict(windowed.state_dict())
slab_cache = keeps_all.new_cache(tiny, 1, 20, torch.float64)
line_1T = torch.randint(50, (1, 9), generator=draw)
with torch.inference_mode():
    for token_11 in line_1T.split(1, dim=1):
        windowed(token_11, ring_cache)
        keeps_all(token_11, slab_cache)
ring_RKH, slab_SKH = ring_cache.stores[0].k_BSKH[0], slab_cache.stores[0].k_BSKH[0]
held = [int((slab_SKH - key_KH).abs().sum((1, 2)).argmin()) for key_KH in ring_RKH]
print("slots hold positions", held)
assert held == decode_through_a_ring(4, 9)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### A prompt longer than the window
#
# Here a ring is easily got wrong. A prompt of 9 tokens comes in one piece, with $W = 4$. If it were first
# written to the ring, only the last 3 would be left, and the queries of the first tokens would find
# their own past overwritten by the future. So a step attends over *the ring and all its own tokens*,
# and only then drops what is out of sight. Any split gives the same:

# %%
whole_BTV = windowed(line_1T)
for cuts in ([9], [1] * 9, [7, 2], [2, 7], [3, 5, 1]):
    cache = windowed.new_cache(tiny, 1, 9, torch.float64)
    parts = [windowed(part, cache) for part in line_1T.split(cuts, dim=1)]
    assert torch.allclose(torch.cat(parts, dim=1), whole_BTV)
    print("same logits for the split", cuts, "holding", cache.stores[0].R, "tokens")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Taking tokens back
#
# Speculative sampling (notebook 08) runs a few guessed tokens through the model and takes back those
# that were wrong. A slab just shortens its length. A ring can't: the guesses have overwritten keys that
# are in sight again once they are gone. So a ring gets `slack`: so many slots more. Within it rollback
# is exact, beyond it the cache *refuses*, rather than answering wrongly:

# %%
cache = windowed.new_cache(tiny, 1, 9, torch.float64, slack=2)
windowed(line_1T, cache)
cache.truncate(7)
assert torch.allclose(windowed(line_1T[:, 7:], cache), whole_BTV[:, 7:])
print("2 of 9 taken back and run again: same logits")
try:
    cache.truncate(6)
except ValueError as refused:
    print("3 of 9:", refused)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### How far does it see?
#
# A window of 6 in each of 4 layers. The top layer's query sees 6 outputs of the layer below, the oldest
# of which saw 6 below itself, and so on: each layer adds $W-1$. The *receptive field* is
# $1 + L\,(W-1)$ tokens, 21 here. Is it so? Replace one token after another, and see whether the last
# position notices:


# %%
@torch.inference_mode()
def influence(L, W, T=32):
    """How much the last position's features change if token j is replaced, for every j."""
    torch.manual_seed(0)
    stack = build(replace(tiny, L=L), Layout.windowed(L, W)).double()
    tokens_TT = torch.randint(50, (1, T)).expand(T, T).clone()
    plain_D = stack.features(tokens_TT[:1])[0, -1]
    tokens_TT.diagonal().add_(1).remainder_(50)  # row j: token j is another
    return (stack.features(tokens_TT)[:, -1] - plain_D).abs().amax(-1)


# %%
W_ = 6
reach = {L_: influence(L_, W_).flip(0) for L_ in (1, 2, 4)}
for L_, change_T in reach.items():
    noticed, field = int((change_T > 1e-13).sum()), 1 + L_ * (W_ - 1)
    assert noticed == field == Layout.windowed(L_, W_).receptive_field(32)
    print(f"{L_} layers of W={W_}: {noticed} tokens matter")

# %% tags=["hide-input", "nbval-ignore-output"] slideshow={"slide_type": "subslide"}
_, ax = plt.subplots(figsize=(6.5, 3.2))
for L_, change_T in reach.items():
    seen_T = change_T[change_T > 1e-13]
    ax.plot(range(len(seen_T)), seen_T, "o-", label=f"{L_} layer{'s' * (L_ > 1)}")
    ax.axvline(len(seen_T) - 0.5, color=ax.lines[-1].get_color(), lw=1, ls=":")
ax.set(yscale="log", xlabel="tokens before the last", ylabel="change of the output")
ax.legend(loc="upper right")
ax.set_xticks(range(0, 21, 5))
claim(ax, "Windows reach far, but faintly")
caption(ax, dtype="fp64", shapes=f"D=24, W={W_}, random weights", seed=0)
plt.show()

# %% [markdown]
# The reach grows with depth, so a stack of windows can use far more than $W$ tokens. But look at the
# scale: what comes through several layers arrives faintly, mixed with everything on the way. And past
# the edge there is nothing. A question about the first page cannot be answered from a cache that no
# longer has it. Hence the next section.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Exercise 4.4: what does the ring hold?
# *12 minutes · slots, chunks longer than the ring, slack*
#
# A windowed layer keeps the last $R = W - 1 + \text{slack}$ tokens; position $p$ is in slot $p \bmod R$. Tokens
# come in chunks, such as a prompt of 7 and then single ones: `chunks = [7, 1, 1]`. A chunk may be
# longer than the ring.
#
# Return a list of length $R$: the position that each slot holds after the last chunk, `None` for slots
# never written. ($W = 1$ without slack keeps nothing: an empty list.)


# %% slideshow={"slide_type": "skip"}
def ring_contents(W, slack, chunks):
    """The position in each slot of a ring of W - 1 + slack, once all chunks have passed."""
    ### BEGIN SOLUTION
    R, length = W - 1 + slack, sum(chunks)
    ring = [None] * R
    for position in range(max(0, length - R), length):
        ring[position % R] = position
    return ring
    ### END SOLUTION


# %% slideshow={"slide_type": "skip"}
check("4.4", ring_contents)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Exercise 4.5: how deep, how wide?
# *8 minutes · deriving from the receptive field, off-by-ones included*
#
# A stack of windows is to read documents of `S` tokens. Return two whole numbers:
#
# - the fewest layers of window `W` ($W \ge 2$) with which the last token's output *can* depend on the
#   first token;
# - the smallest window with which `L` layers can.


# %% slideshow={"slide_type": "skip"}
def deep_or_wide(S, W, L):
    """(layers needed at window W, window needed at L layers) for the last token to reach the first."""
    ### BEGIN SOLUTION
    layers = -(-(S - 1) // (W - 1))  # S <= 1 + L * (W - 1), rounded up
    window = 1 + -(-(S - 1) // L)
    return layers, window
    ### END SOLUTION


# %% slideshow={"slide_type": "skip"}
check("4.5", deep_or_wide)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 6. Hybrids: a few layers that see everything
#
# Most layers do with a window; a few must be able to look back. So make one layer in $n$ *global*. With
# every 6th global, the cache grows at a sixth of the rate, and any token can still be reached.
#
# ![Twelve layers, bottom up: layers 5 and 11 see everything, the others a window of 1,024; pairs of one kind share a cache, so 12 layers hold 6. Right: predicted cache against context at the shape of Llama-3-8B, for GQA-8, then MQA, then windows in 5 layers of 6, then sharing; only the windows bend the line.](../images/hybrid-stack.svg)

# %% [markdown] slideshow={"slide_type": "subslide"}
# Character.AI's recipe (June 2024) puts three ideas together: multi-query attention in every layer,
# windows of 1,024 in five layers of six, and keys shared between neighbours of a kind. (Gemma 3 has 5
# local layers to 1 global as well.) As a layout, at Llama-2-13B's 40 layers:

# %%
recipe = Layout.character_ai(40)
kinds = ["window" if layer.window else "global" for layer in recipe.layers]
print("global layers:", [i for i, kind in enumerate(kinds) if kind == "global"])
print("layer 11 reads the keys of layer", recipe.layers[11].reads)
print(f"{recipe.num_caches} caches for {recipe.L} layers, {kinds.count('window')} of them windowed")
mqa = llama.with_kv_heads(1)
for context in (1024, 8192, 65536):
    plain = cache_bytes(llama, Layout.full(40), 1, context)
    small_cache = cache_bytes(mqa, recipe, 1, context)
    print(f"S={context:<6} {plain / small_cache:6,.0f} times smaller than MHA's cache")

# %% [markdown]
# Their post says over 20 times in all. Against plain MHA at this shape it is more, since MQA alone
# makes 40 of it.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### All of them side by side
#
# Llama-2-13B's shape, 4,096 tokens a sequence, one H100 filled to its 80 GB. Bytes a token are the whole
# cache over $S$; the last column is at best: the longer of reading and computing, nothing else.

# %%
print(f"{'technique':<31} bytes/token  max B     step  tokens/s  waits for")
rows = comparison(llama, 4096, h100)
for row in rows:
    print(
        f"{row.technique:<31} {row.bytes_per_token:>11,.0f} {row.max_batch:>6,} "
        f"{1e3 * row.latency_s:>5.1f} ms {row.tokens_per_s:>9,.0f}  {row.bound}"
    )

# %% [markdown] slideshow={"slide_type": "subslide"}
# Read it by pairs. MHA → GQA-8: five times the sequences at the same 24 ms. The same for MLA, which keeps more
# than MQA and less than three KV heads. CLA: twice the sequences, longer steps. The two
# windows are MHA's, with all its KV heads: compare them with the first row, not with GQA's. The last row holds so
# many sequences that it waits for computing: from there on a smaller cache makes room for nothing but
# longer contexts.

# %% slideshow={"slide_type": "skip"}
by_name = {row.technique: row for row in rows}
assert by_name["MQA"].bytes_per_token < by_name["MLA 512+64"].bytes_per_token
assert by_name["MLA 512+64"].bytes_per_token < 3 * by_name["MQA"].bytes_per_token
assert by_name["character.ai"].bound == "compute"
assert 5 < by_name["GQA-8"].max_batch / by_name["MHA"].max_batch < 5.5

# %% [markdown] slideshow={"slide_type": "subslide"}
# ![Predicted cache of one sequence against context, 1K to 1M tokens, both logarithmic, at the shape of Llama-2-13B. MHA, GQA-8, GQA-8 with layers sharing in pairs, MLA and MQA are parallel rising lines. Windows of 4,096 in every layer stay flat from there; the recipe with 1 global layer in 6 grows, but slowly.](../images/cache-by-technique.svg)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Your own
#
# Find a setting that serves 1,024 users at 8,192 tokens each on one H100. Then one that keeps 131,072
# tokens of one user in under 1 GB. Which controls change the *step* of $B$, and which only what fits?

# %% tags=["nbval-ignore-output", "hide-input"] slideshow={"slide_type": "subslide"}
from lecture_util.classroom.widgets import cache_calculator

cache_calculator(K=8, S=1024, B=64)

# %% [markdown] slideshow={"slide_type": "notes"}
# *For the instructor.* Ask for a prediction before each slider. Good moves: K 40 → 8 (both columns move); share 1 → 2
# (the batch doubles, the step at that batch gets longer); W at S = 1,024 (nothing happens: the window is
# as long as the context) and then S = 16,384.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Exercise 4.6: size a hybrid
# *15 minutes · deriving a cache from a recipe*
#
# A stack of `config.L` layers: layers $n-1, 2n-1, \dots$ (with $n$ = `every`) are global, the others see
# windows of `W`. Among the global layers, and separately among the windowed ones, each run of `share`
# neighbours uses one set of keys; a last run may be shorter. Between steps a window keeps at most
# $W-1$ tokens. Keys and values are in 16 bits.
#
# Return `(bytes, batch)`: the cache of one sequence of `S` tokens, and how many such sequences fit into
# `memory_bytes` beside weights of `weights` bytes (0 if none).


# %% slideshow={"slide_type": "skip"}
def size_hybrid(config, W, every, share, S, memory_bytes, weights):
    """(bytes of one sequence's cache, largest batch that fits)."""
    ### BEGIN SOLUTION
    num_global = config.L // every
    num_windowed = config.L - num_global
    tokens = -(-num_global // share) * S + -(-num_windowed // share) * min(S, W - 1)
    num_bytes = 2 * 2 * config.K * config.H * tokens
    return num_bytes, max(0, int((memory_bytes - weights) // num_bytes))
    ### END SOLUTION


# %% slideshow={"slide_type": "skip"}
check("4.6", size_hybrid)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 7. Every variant, measured here
#
# One small shape for all, 16 query heads of 64 in 4 layers, with random weights, since time does not
# depend on their values. First the bytes: what the formulas say and what the tensors hold, at three
# lengths. Not about; exactly.

# %% slideshow={"slide_type": "subslide"}
from functools import partial

from lecture_util.kv_reduction.mla import mla_layers
from lecture_util.kv_reduction.sizes import (
    layout_weight_bytes,
    mla_cache_bytes,
    mla_weight_bytes,
)
from lecture_util.model.transformer import Transformer

bench = Config(D=512, F=1024, K=16, G=1, H=64, L=4, V=512, max_context=16384)
L = bench.L
plans = {
    "MHA": (16, Layout.full(L)),
    "GQA, K=4": (4, Layout.full(L)),
    "MQA": (1, Layout.full(L)),
    "CLA2, K=4": (4, Layout.cross_layer(L)),
    "window 512": (16, Layout.windowed(L, 512)),
    "1 of 4 global": (16, Layout.hybrid(L, 512, every=4)),
}
latent = MLA(C=128, R=32, nope=64, v=64)


# %% slideshow={"slide_type": "subslide"}
def layered(k, layout):
    """A model, what makes its cache, and by formula: bytes held, bytes read in a step."""
    c = bench.with_kv_heads(k)
    stack = build(c, layout).to(model.device).requires_grad_(False)
    weights = layout_weight_bytes(c, layout, 4)
    held = partial(cache_bytes, c, layout, dtype_bytes=4)
    return stack, stack.new_cache, held, lambda B, S: weights + read_bytes(c, layout, B, S, 4)


variants = {name: layered(*plan) for name, plan in plans.items()}
stack = Transformer.random(bench, **mla_layers(latent)).to(model.device)
weights = mla_weight_bytes(bench, latent.C, latent.R, dtype_bytes=4)
held = partial(mla_cache_bytes, bench, latent.C, latent.R, dtype_bytes=4)
variants["MLA 128+32"] = stack, latent.new_cache, held, lambda B, S: weights + held(B, S)

# %% slideshow={"slide_type": "subslide"}
print("bytes held at        512      2,048      8,192")
for name, (stack, new_cache, held, *_) in variants.items():
    sizes = []
    for S_ in (512, 2048, 8192):
        cache = new_cache(stack.config, 1, S_, torch.float32, "meta")
        assert cache.nbytes == held(1, S_), name
        sizes.append(cache.nbytes)
    print(f"{name:<13}", *(f"{size:>10,}" for size in sizes))

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### A step against the context
#
# Now time. **Predict**: weights and what is read of the cache, over this machine's copy bandwidth. How
# much longer will a step at 8,192 tokens be than one at 1,024: with MHA, and with windows of 512? (We
# take the best of a few runs: the prediction is a bound, and bounds are met when nothing interrupts.)

# %% tags=["nbval-ignore-output"]
slope = predict("MHA: a step at 8,192 takes how many times one at 1,024?", unit="times")

# %% slideshow={"slide_type": "subslide"}
contexts = [512, 1024, 2048, 4096, 8192]
users = 32 if on_gpu and machine.memory_bytes > 30e9 else 1  # a large GPU needs more to read
token_B1 = torch.zeros(users, 1, dtype=torch.long, device=model.device)


@torch.inference_mode()
def step_times(stack, new_cache, at=contexts, repeats=7):
    """A decode step at each context."""
    cache = new_cache(stack.config, users, max(at), stack.dtype, stack.device)

    def one_step(S):
        cache.lengths = [S - 1] * users  # what it holds doesn't change how long a step takes
        return stack(token_B1, cache)

    return [measure(one_step, S, repeats=repeats, warmup=2) for S in at]


# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
runs = {name: step_times(stack, new_cache) for name, (stack, new_cache, *_) in variants.items()}
print("best of 7\nms a step at  " + "".join(f"{S_:>8,}" for S_ in contexts) + "   8K : 1K")
for name, timings in runs.items():
    times = [1e3 * run.best_s for run in timings]
    row = "".join(f"{ms:8.2f}" for ms in times)
    print(f"{name:<14}{row} {times[-1] / times[1]:9.2f}")

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
mha_read = partial(variants["MHA"][3], users)
slope.reveal(
    runs["MHA"][-1].best_s / runs["MHA"][1].best_s, predicted=mha_read(8192) / mha_read(1024)
)

# %% tags=["nbval-ignore-output", "hide-input"] slideshow={"slide_type": "subslide"}
from lecture_util.classroom.figures import PALETTE
from lecture_util.classroom.figures.plots import plain_log_ticks

_, ax = plt.subplots(figsize=(7, 3.7))
for name, color in zip([name for name in runs if name != "MQA"], PALETTE, strict=False):
    measured_ms = [1e3 * run.best_s for run in runs[name]]
    least_ms = [1e3 * variants[name][3](users, S_) / bandwidth for S_ in contexts]
    ax.plot(contexts, least_ms, "--", color=color, lw=1.4)
    ax.plot(contexts, measured_ms, "-o", color=color, ms=5, label=name)
ax.set(xscale="log", yscale="log", xlabel="context, tokens", ylabel="ms a step")
ax.set_xticks(contexts, [f"{S_:,}" for S_ in contexts])
ax.minorticks_off()
plain_log_ticks(ax.yaxis)
ax.legend(fontsize=10, ncol=2)
claim(ax, "Only windows stay flat")
caption(ax, device=machine.name, dtype="fp32",
        shapes=f"4 layers, 16 heads of 64, B={users}; best of 7; dashed: bytes over bandwidth")  # fmt: skip
plt.show()

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Read.** Four things to look for:
#
# - *Slopes.* MHA's step grows with the context, GQA's by less, the window's not at all past 512. The
#   hybrid has one global layer in four, and about a quarter of MHA's slope.
# - *CLA2 beside GQA.* It holds half the bytes and attends to all of them. If its line lies on GQA's, they
#   were read from memory twice. If it lies below, the consumer found its producer's keys still in the
#   processor's own cache: this model is small enough for that, a 13B model at B = 64 is not.
# - *Above the dashes.* Some sixty small operations a step, each started by Python, cost the same in all
#   variants, and show where there is little to read. A ring first puts its keys side by side, which
#   moves them twice more. MLA has the most operations, and its absorbed queries are wide.
# - *Below the dashes.* Weights and caches of this size partly stay on the chip from one step to the next.
#   If all lines are below, the bandwidth was measured while something else was running.

# %% [markdown] slideshow={"slide_type": "subslide"}
# And what absorbing is worth: the same MLA model, the same cache, a step in either mode. Naive, it
# expands every latent into 16 keys and 16 values, for a single query:

# %% tags=["nbval-ignore-output"]
stack, new_cache, *_ = variants["MLA 128+32"]
for mode in ("naive", "absorbed"):
    set_mode(stack, mode)
    for S_, run in zip((1024, 8192), step_times(stack, new_cache, (1024, 8192), 3), strict=True):
        print(f"{mode:<9} S={S_:<5} {run}")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 8. What small models still learn
#
# Speed can be computed; quality has to be tried. Here is a task that asks for nothing but memory:
# *associative recall*. Pairs of key and value, then the keys again in another order: after each key
# comes its value. Small models of two layers, from scratch, a few hundred steps.

# %%
from lecture_util.model.recall import recall_accuracy, recall_batch, recall_task

tokens_BT, targets_BT = recall_batch(1, 4, 64, torch.Generator().manual_seed(0))
print("tokens ", tokens_BT[0].tolist())
print("targets", [t if t >= 0 else "." for t in targets_BT[0].tolist()])

# %% [markdown] slideshow={"slide_type": "subslide"}
# Three models, 8 pairs (32 tokens) to remember. Which of them can learn it?
#
# - **windows**: both layers see 8 tokens;
# - **hybrid**: the lower layer sees 8 tokens, the upper one all;
# - **CLA2**: both layers see everything, and share one set of keys, made by the lower one.

# %% tags=["nbval-ignore-output"]
able = predict(
    "Which of the three solve it?",
    choices=["only the hybrid", "hybrid and CLA2", "all three"],
)

# %% slideshow={"slide_type": "subslide"}
from lecture_util.model.train import train

two = Config(D=64, F=128, K=1, G=1, H=64, L=2, V=64, max_context=256)
contenders = {
    "windows": Layout.windowed(2, 8),
    "hybrid": Layout.hybrid(2, 8, every=2),
    "CLA2": Layout.cross_layer(2),
}

# %% tags=["nbval-ignore-output"]
accuracy, threads = {}, torch.get_num_threads()
torch.set_num_threads(1)  # so small that a second core would mostly wait for the first
for name, layout in contenders.items():
    torch.manual_seed(0)
    learner = build(two, layout)
    train(learner, recall_task(B=48), steps=300, label=name)
    accuracy[name] = recall_accuracy(learner, recall_task())
    print(f"{name:<8} {accuracy[name]:6.1%} of the values recalled")
torch.set_num_threads(threads)

# %% slideshow={"slide_type": "subslide"}
assert accuracy["hybrid"] > 0.9
assert accuracy["windows"] < 0.4 and accuracy["CLA2"] < 0.4
print("the hybrid recalls, windows alone and two layers on one set of keys do not")

# %% tags=["nbval-ignore-output"]
able.reveal("only the hybrid")

# %% [markdown]
# - **Windows** fail for lack of reach. A key is up to 31 tokens from where it is asked for, and two windows
#   of 8 reach 15: more than half of the pairs are gone when they are asked for, and no training brings
#   them back. The rest could be learned, and so far is only in part.
# - The **hybrid** needs *one* layer that sees everything. The lower layer only has to note, at each value,
#   which key stood before it: a window of 2 would do.
# - **CLA2** sees everything and fails all the same, in two layers. The lookup takes two steps: first mark
#   each value with the key before it, then search for these marks. But the second layer searches in the
#   *first* layer's keys, which were made before any mark was there. A consumer sees no deeper than its
#   producer. It guesses among the eight values that it has seen, one in eight. Give it a third layer with keys of its own, above the marks, and it can be learned.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### The full curves
#
# One task, one seed and a minute of training say little. `benchmarks/small_caches.py` trains a model of
# three layers of every kind on one budget, on recall with three seeds and on English text, byte by byte,
# with two. What it recorded comes with the course:

# %%
import json
import pathlib

import lecture_util

record = pathlib.Path(lecture_util.__file__).parents[1] / "benchmarks/results/small_caches.json"
recorded = json.loads(record.read_text(encoding="utf-8"))
print(f"{recorded['date']}, {recorded['hardware']}; {recorded['shape']}")

# %% slideshow={"slide_type": "subslide"} tags=["hide-input"]
print("                   numbers held,   steps until 90% are   nats a byte")
print("                     128 tokens    recalled, by seed")
for name, entry in recorded["variants"].items():
    steps = entry["recall"]["steps"]
    first = [sum(share < 0.9 for share in curve) for curve in entry["recall"]["accuracy"]]
    at = [steps[i] if i < len(steps) else "-" for i in first]
    nats = [curve[-1] for curve in entry["text"]["nats"]]
    print(f"{name:<18} {entry['numbers_held']['128']:>13,} {'  '.join(map(str, at)):>21} "
          f"{min(nats):>7.2f} to {max(nats):.2f}")  # fmt: skip

# %% [markdown] slideshow={"slide_type": "subslide"}
# ![Left, pairs recalled against training steps for seven small models: every kind with a layer that sees everything passes 0.97 within 400 steps, windows of 4 stay near 0.06. Right, nats a byte on English against numbers held: on this short budget windows (1.40) and the stacks with 1 global layer in 3 (1.39, 1.40) lie below MHA, MQA (1.45), MLA and CLA2 (1.49).](../images/small-caches.svg)

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Read.** The two tasks rank them differently, and that is the lesson.
#
# - *Recall* is solved by every stack in which some layer with keys of its own sees everything, however
#   small its cache. Fewer heads, a latent and shared keys take longer to learn it; the hybrids, which
#   have little else to look at, do not. On the way all stop near 0.15: that is guessing among the eight
#   values in sight. Windows of 4 see too few of them even for that; one in 32 would be guessing blindly.
# - *Text* ranks them otherwise: windows end *ahead* of MHA. On so short a run most of what can be learned
#   of bytes is in the last few of them, and a window points there from the first step. MQA is level
#   with MHA; MLA and CLA2 end a little behind, in both seeds, though CLA2's own two differ by more than
#   that. Ahead of all is the hybrid with 1 layer in 3 global: it has both.
#
# Had we looked at the loss on text only, we would have thrown the global layers out. A cache has to be
# judged by what it is for: ask for something far back.

# %% slideshow={"slide_type": "skip"}
ends = {
    name: (min(curve[-1] for curve in entry["recall"]["accuracy"]), entry["text"]["nats"])
    for name, entry in recorded["variants"].items()
}
windows_recall, windows_nats = ends.pop("window 4")
assert windows_recall < 0.1 and min(recall for recall, _ in ends.values()) > 0.95
best_mha, worst_mha = sorted(curve[-1] for curve in ends["MHA"][1])
assert max(curve[-1] for curve in windows_nats) < best_mha
assert all(curve[-1] > worst_mha for name in ("CLA2", "MLA 32+32") for curve in ends[name][1])

# %% [markdown] slideshow={"slide_type": "slide"}
# ## What to remember
#
# - A full card takes the same time a step whatever fills it: tokens a second go with 1 over the cache.
# - GQA shares keys among heads, $K$ for $N$: bytes, step time and a few weights all fall; attention's
#   intensity rises to $G$. Averaging a trained model's heads wrecks it until it is trained again.
# - MLA keeps $C + R$ numbers and absorbs the expansion into the query; a rotation would stand in
#   between, so positions get dimensions of their own. It is the one that nears the ridge.
# - CLA halves what is *held*, not what is *read*. Windows bound both, and lose what is far; $1+L(W-1)$
#   is all they reach.
# - A few global layers give the reach back: hybrids grow slowly and still recall.

# %% tags=["nbval-ignore-output"]
status("04")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ## Papers and sources
#
# - Stanford CS336, spring 2025, lecture 10, *Inference*: the order of this notebook, and Llama-2-13B
#   with $K = 8$.
# - Shazeer 2019, *Fast Transformer Decoding: One Write-Head is All You Need*, arXiv:1911.02150 (MQA).
# - Ainslie et al. 2023, *GQA*, arXiv:2305.13245: groups, mean-pooling and uptraining, Table 1.
# - DeepSeek-AI 2024, *DeepSeek-V2*, arXiv:2405.04434: MLA, its sizes, Tables 8 and 9.
# - Brandon et al. 2024, *Reducing Transformer Key-Value Cache Size with Cross-Layer Attention*,
#   arXiv:2405.12981: CLA, Table 1.
# - Beltagy et al. 2020, *Longformer*, arXiv:2004.05150; Child et al. 2019, *Sparse Transformers*,
#   arXiv:1904.10509; Jiang et al. 2023, *Mistral 7B*, arXiv:2310.06825: windows.
# - Character.AI 2024, *Optimizing AI Inference at Character.AI*: the recipe of section 6.
# - Su et al. 2021, *RoFormer*, arXiv:2104.09864 (RoPE). Arora et al. 2024, *Based*, arXiv:2402.18668
#   (associative recall).
# - Shapes: Lightning-AI/litgpt, `litgpt/config.py`. Accelerators: stas00/ml-engineering,
#   `compute/accelerator/README.md`; pytorch/torchtitan.
