# %% [markdown] slideshow={"slide_type": "slide"}
# # 01 · The inference workload
#
# **Inference**: the model is fixed, prompts come in, responses go out. Nothing is learned. So the one
# question left is what a response costs, and that is the question of the whole course.
#
# This notebook says what is measured and why it matters, measures it on a real model, and reviews
# the Transformer far enough to predict what we measured: its shapes, its parameters, its FLOPs.

# %%
import torch
import torch.nn.functional as nnf

from lecture_util.classroom import check, explore, hint, predict, status, use_style

use_style()

# %% [markdown] slideshow={"slide_type": "subslide"}
# ## Where we are going
#
# | | question | notebooks |
# |---|---|---|
# | understand the workload | what limits it? | 01, 02, 03 |
# | shortcuts that may cost quality | can we store less, compute less? | 04 smaller caches, 05 other architectures, 06 fewer bits, 07 fewer weights |
# | shortcuts that are checked | can we guess, and lose nothing? | 08 speculative sampling |
# | live traffic | how do many users share one model? | 09 continuous batching, 10 paged attention |
# | beyond one model | can models be combined? | 11 merging, 12 all together |
#
# The third row rests on one fact that we measure below: checking tokens is cheaper than making them.

# %% [markdown] slideshow={"slide_type": "notes"}
# Speaker: ask who has served a model, and what they looked at first. If somebody says "utilization",
# keep that for the section on scoring against generating, where we measure it. With little time,
# skip the review of the block: its shapes are in one figure, and students can read it alone.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Where inference shows up
#
# - **Use**: chat, code completion, batch jobs over a pile of documents.
# - **Evaluation**: to score how well a model follows instructions, it must first respond.
# - **Test-time compute**: a model that thinks before it answers makes many tokens nobody reads.
# - **Training by reinforcement**: responses are sampled, then scored; the sampling is inference.
#
# So even a team that only trains runs inference, and a faster sampler shortens its training.
#
# Training is paid once. Inference is paid again with every request.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ![Bars on a logarithmic axis. Words a day: OpenAI about 100 billion in February 2024, all people about 100 trillion, a thousand times more. Lines of code a day: almost 1 billion accepted in Cursor in April 2025, a few billion written in the whole world.](../images/scale-of-inference.svg)
#
# Sources: Sam Altman, 9 Feb 2024 (x.com/sama/status/1756089361609981993); Aman Sanger, 28 Apr 2025
# (x.com/amanrsanger/status/1916968123535880684). The first counts *words*, though it is often quoted
# as tokens. Both are statements of the companies, not audited figures.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## From words a day to GPUs
#
# How many GPUs do 100 billion words a day need? Predict before you read on: ten, a thousand, a
# hundred thousand?

# %% tags=["nbval-ignore-output"]
gpus = predict("H100s for 100 billion words a day, Llama-2-13B, 64 requests at a time", unit="GPUs")

# %% [markdown]
# Three steps: words to tokens (about 4/3 tokens an English word, our assumption), a day to seconds,
# tokens per second to GPUs. What one GPU delivers comes from a bound that notebook 03 derives:
# every step reads all weights and all caches once.

# %% slideshow={"slide_type": "subslide"}
from lecture_util.model.config import PUBLISHED
from lecture_util.roofline import ACCELERATORS, decode_step


def gpus_needed(words_per_day, tokens_per_word, model, accelerator, B, busy=1.0):
    step = decode_step(PUBLISHED[model], B, 1024, ACCELERATORS[accelerator])
    tokens_per_s = words_per_day * tokens_per_word / 86_400
    return tokens_per_s, tokens_per_s / (step.throughput_tokens_per_s * busy), step.fits


tokens_per_s, alone, _ = gpus_needed(100e9, 4 / 3, "llama-2-13b", "h100", B=1)
tokens_per_s, needed, fits = gpus_needed(100e9, 4 / 3, "llama-2-13b", "h100", B=64)
print(f"{tokens_per_s:,.0f} tokens/s")
print(f"at least {alone:,.0f} H100s at B=1 and {needed:,.0f} at B=64, {alone / needed:.0f} x fewer")

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
gpus.reveal(predicted=needed)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ![Three numbers: 100 billion words a day, times 4/3 tokens a word over 86,400 seconds is 1.54 million tokens a second. Below, bars: H100s needed if each ran Llama-2-13B at its memory bound with 1,024 tokens of context: 12,400 at batch 1, about 574 at batch 64.](../images/words-to-gpus.svg)
#
# The same words, the same model, the same chip: the batch alone changes the bill by the factor printed above.
# That is what efficiency is worth here, and why it gets a course. Which model served those words is
# not public; Llama-2-13B stands in for it.

# %% [markdown] slideshow={"slide_type": "subslide"}
# Move the assumptions. *Busy* is the share of the day a GPU has work: people sleep, traffic has peaks.

# %% tags=["nbval-ignore-output"]
from lecture_util.classroom.figures import bars


def draw(billion_words_a_day, tokens_per_word, model, accelerator, busy):
    batches, args = [1, 8, 64], (billion_words_a_day * 1e9, tokens_per_word, model, accelerator)
    rows = [gpus_needed(*args, B, busy) for B in batches]
    labels = [
        f"B = {B}" + ("" if fits else " (does not fit)")
        for B, (_, _, fits) in zip(batches, rows, strict=True)
    ]
    title = f"{rows[0][0]:,.0f} tokens/s: lower bound on {accelerator.upper()}s needed"
    return bars(labels, [n for _, n, _ in rows], "GPUs", title=title, log=True).figure


# %% tags=["hide-input", "nbval-ignore-output"] slideshow={"slide_type": "subslide"}
from ipywidgets import SelectionSlider

explore(
    draw,
    billion_words_a_day=SelectionSlider(options=[1, 10, 100, 1000], value=100),
    tokens_per_word=(1.0, 2.0, 0.1),
    model=["llama-2-13b", "llama-3-8b", "llama-2-7b", "smollm2-1.7b"],
    accelerator=["h100", "a100", "h200", "b200", "mi300x"],
    busy=(0.1, 1.0, 0.1),
)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Three metrics
#
# ![A timeline of three requests served as one batch. A wide prefill block is followed by narrow decode steps, each giving one token per request. Time to first token spans prefill and the first token; latency spans one decode step; throughput is the B tokens of a step divided by its latency.](../images/request-timeline.svg)
#
# - **Time to first token (TTFT)**: how long a user waits before anything appears. Seconds.
# - **Latency**: how far apart tokens then appear. Seconds per token.
# - **Throughput**: how many tokens the machine makes, for all users together. Tokens per second.
#
# Who is watching decides: a chat needs the first two, an overnight batch job only the third.

# %% [markdown]
# Now on the real model, SmolLM2-135M-Instruct, in fp32.

# %% slideshow={"slide_type": "subslide"}
from lecture_util.model import generate
from lecture_util.model.tokenizer import chat, encode
from lecture_util.model.weights import load, load_tokenizer
from lecture_util.roofline import forward, measure, stopwatch, this_machine

model, tokenizer = load(), load_tokenizer()
config = model.config
prompt = chat(tokenizer, "Why is the sky blue? Answer in two sentences.")
print(config)
print(len(prompt), "tokens of prompt")

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Predict.** A token needs each weight to be read once, so the latency is at least bytes over
# bandwidth (notebook 00). The first token needs one pass over the whole prompt: at least its bytes
# over bandwidth, and at least its FLOPs over the peak. `forward(...)` counts both.

# %% tags=["nbval-ignore-output"]
machine = this_machine()
prefill_cost = forward(config, 1, len(prompt), len(prompt), logits_for=1, dtype_bytes=4)
decode_cost = forward(config, 1, 1, len(prompt) + 1, dtype_bytes=4)
ttft_bound_s, latency_bound_s = (c.time_s(machine, "fp32") for c in (prefill_cost, decode_cost))
print(f"TTFT    at least {ttft_bound_s * 1e3:.0f} ms")
print(f"latency at least {latency_bound_s * 1e3:.0f} ms")

# %% [markdown]
# **Measure.** `stream` yields each token when it is made, `decode` one token for each row of a batch.
# We note the clock at every step; it starts with the request, so the prefill is in the first time.


# %%
def times_of(steps):
    """Seconds from the request to each step of a generation, fp64."""
    with stopwatch() as watch:
        return torch.tensor([watch.seconds for _ in steps], dtype=torch.float64)


# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
times_of(generate.stream(model, prompt, 2))  # warm up
times_s = times_of(generate.stream(model, prompt, 24))
gaps_s = times_s.diff()
latency_s = float(gaps_s.median())
print(f"TTFT        {times_s[0] * 1e3:6.1f} ms      {times_s[0] / ttft_bound_s:.1f} x the bound")
print(f"latency     {latency_s * 1e3:6.1f} ms      {latency_s / latency_bound_s:.1f} x the bound")
print(f"throughput  {len(times_s) / times_s[-1]:6.1f} tokens/s")

# %% [markdown]
# TTFT is the prefill and little else, up to noise. Here is the prefill alone:

# %% tags=["nbval-ignore-output"]
print("prefill", measure(generate.prefill, model, [prompt], len(prompt) + 1, repeats=5))

# %% tags=["hide-input", "nbval-ignore-output"] slideshow={"slide_type": "subslide"}
import matplotlib.pyplot as plt

from lecture_util.classroom.figures import MEASURED, PREDICTED, caption, claim

_, ax = plt.subplots(figsize=(7.5, 3.2))
ax.bar(range(1, 25), [float(t) * 1e3 for t in (times_s[0], *gaps_s)], color=MEASURED)
ax.plot([1.5, 24.5], [latency_bound_s * 1e3] * 2, "--", color=PREDICTED, label="latency, bound")
ax.plot([0.5, 1.5], [ttft_bound_s * 1e3] * 2, "--", color=PREDICTED)
ax.set(xlabel="token", ylabel="wait, ms")
ax.legend()
claim(ax, f"The first token takes {times_s[0] / latency_s:.1f} x as long as each later one")
caption(ax, device=machine.name, dtype="fp32", shapes=f"B=1, {len(prompt)} tokens of prompt")
plt.show()

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Read.** A bound is met from above, and the ratio tells what it leaves out: kernels that don't reach
# the peaks, and hundreds of small operations between the large products. If you have a GPU, expect the
# second to matter more for a model this small, and TTFT and latency to come closer together.
#
# Latency and throughput are not one number and its inverse. Serve eight requests in one batch:

# %% tags=["nbval-ignore-output"]
for B in (1, 8):
    step_s = times_of(generate.decode(model, [prompt] * B, 12)).diff().median()
    print(f"B={B}: latency {step_s * 1e3:5.1f} ms, throughput {B / step_s:5.0f} tokens/s")

# %% [markdown]
# Compare the two columns. Up to noise, no user's latency improves, and all users together gain
# throughput. Notebook 03 is about this trade.

# %% [markdown]
# ### Exercise 1.1: three metrics from a server's log
# *10 minutes · telling what a user feels from what a server delivers*
#
# A server's log is a list of requests, each `(arrival_s, token_times_s)` on one common clock. Return
# three numbers: the **mean TTFT** over requests; the **mean latency**, first averaged within each
# request, then over requests; and the **throughput** of the server from the first arrival to the
# last token. Every request has at least two tokens.


# %% slideshow={"slide_type": "subslide"}
def metrics(log):
    """(mean TTFT in s, mean latency in s/token, throughput in tokens/s)."""
    ### BEGIN SOLUTION
    n = len(log)
    ttft_s = sum(times[0] - arrival for arrival, times in log) / n
    latency_s = sum((times[-1] - times[0]) / (len(times) - 1) for _, times in log) / n
    first, last = min(a for a, _ in log), max(times[-1] for _, times in log)
    return ttft_s, latency_s, sum(len(times) for _, times in log) / (last - first)
    ### END SOLUTION


# %%
check("1.1", metrics)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Training sees all tokens, inference makes them one by one
#
# A decoder-only model (no encoder, no cross-attention; Vaswani et al. 2017 had both) predicts the
# next token at *every* position of its input. In training all tokens are known, so one pass scores
# them all. A causal mask makes that honest: no position sees what comes after it.

# %% [markdown] slideshow={"slide_type": "subslide"}
# At prediction time one stack does it all: it reads the prompt in one pass, **prefill**, and then its own
# words, one a pass, **decode**.
#
# ![Left, the Transformer of 2017: an encoder of self-attention and MLP reads the source; a decoder of causal self-attention, cross-attention to the encoder and MLP reads the answer so far and gives the next token. Right, decoder-only: one stack of causal self-attention and MLP. Five words of prompt enter at once, prefill; each new word goes back in by itself, decode, until an end token or the longest length allowed.](../images/decoder-only.svg)

# %%
import pydoc_data.topics

text = "\n".join(pydoc_data.topics.topics[k] for k in ("assert", "break", "while", "if"))
tokens = torch.tensor([encode(tokenizer, text)[:64]], device=model.device)
with torch.inference_mode():
    logits_BTV = model(tokens)
    prefix_BTV = model(tokens[:, :20])
print(tuple(logits_BTV.shape), "one distribution for each of 64 positions")
print("a prefix alone gives the same:", torch.allclose(logits_BTV[:, :20], prefix_BTV, atol=1e-3))

# %% [markdown] slideshow={"slide_type": "subslide"}
# In generation the next input *is* the last output. It doesn't exist before its step is done, so the
# T steps can't run side by side. A response ends at an end-of-sequence token or at a limit:

# %%
eos = tokenizer.eos_token_id
short = chat(tokenizer, "What is the capital of France?")
free = generate.generate(model, [short], 40, eos=[eos])[0]
cut = generate.generate(model, [short], 4, eos=[eos])[0]
print("ended by itself:", free[-1] == eos, " ended by the limit:", len(cut) == 4 and eos not in cut)

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Predict.** Scoring 64 tokens and generating 64 tokens multiply the same weights by the same number
# of token vectors: the linear layers' FLOPs are *equal*. How much longer does generating take?

# %% tags=["nbval-ignore-output"]
ratio = predict("time to generate 64 tokens over time to score 64 tokens", unit="x")

# %% [markdown]
# FLOPs say 1. Bytes say 64, since generating reads the weights once a token, and scoring once in all.
# Each pass takes at least the longer of the two times, so the bounds' ratio lies between.

# %% tags=["nbval-ignore-output"]
lengths = [4, 16, 64]
score_bound_s = [forward(config, 1, T, T, dtype_bytes=4).time_s(machine, "fp32") for T in lengths]
generate_bound_s = [
    sum(forward(config, 1, 1, S, dtype_bytes=4).time_s(machine, "fp32") for S in range(1, T + 1))
    for T in lengths
]
for T, score_s, gen_s in zip(lengths, score_bound_s, generate_bound_s, strict=True):
    print(f"T={T:3}: score {score_s:.3f} s, generate {gen_s:.3f} s, ratio {gen_s / score_s:.1f}")

# %% [markdown]
# **Measure.**

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
score, made = [], []
for T in lengths:
    with torch.inference_mode():
        score.append(measure(model, tokens[:, :T], repeats=5))
    made.append(measure(generate.generate, model, [tokens[0, :1].tolist()], T, repeats=3, warmup=0))
ratios = [m.median_s / s.median_s for s, m in zip(score, made, strict=True)]
print("generate / score:", [round(r, 1) for r in ratios])

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
ratio.reveal(measured=ratios[-1], predicted=generate_bound_s[-1] / score_bound_s[-1])
print(f"scoring took {score[-1].median_s / score_bound_s[-1]:.1f} x its bound")
print(f"generating took {made[-1].median_s / generate_bound_s[-1]:.1f} x its bound")

# %% tags=["hide-input", "nbval-ignore-output"] slideshow={"slide_type": "subslide"}
_, ax = plt.subplots()
runs = ((generate_bound_s, made, "o", "generate"), (score_bound_s, score, "s", "score"))
for bound_s, timings, marker, label in runs:
    ax.plot(lengths, bound_s, "--", color=PREDICTED)
    ax.plot(lengths, [t.median_s for t in timings], f"-{marker}", color=MEASURED, label=label)
    low, high = zip(*(t.spread for t in timings), strict=True)
    ax.fill_between(lengths, low, high, color=MEASURED, alpha=0.2)
ax.set(xscale="log", yscale="log", xlabel="tokens T", ylabel="seconds")
ax.set_xticks(lengths, [str(T) for T in lengths])
ax.minorticks_off()
ax.legend()
claim(ax, "Scoring T tokens at once costs far less than making them one by one")
caption(ax, device=machine.name, dtype="fp32", shapes="B=1; dashed: bounds")
plt.show()

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Read.** The measured ratio differs from the bounds' as far as the two factors printed above differ.
# The likely causes: products with one row reach less of the bandwidth than a plain copy, and each
# step pays its small operations again. We haven't separated the two here; notebook 02 looks at the
# first. The FLOPs are the same either way; what differs is how often the weights travel. So the
# arithmetic units idle while generating. Their use, as a share of the measured peak:

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
flops = forward(config, 1, 64, 64).flops
shares = [flops / t.median_s / machine.peak("fp32") for t in (score[-1], made[-1])]
labels = ["scoring 64 at once", "generating 64"]
bars(
    labels,
    [100 * s for s in shares],
    "% of this machine's fp32 peak",
    title="Scoring at once uses the arithmetic units far better",
)
plt.show()

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Checking is cheaper than generating
#
# Suppose somebody hands us a response and claims that greedy decoding gives it. To check, we don't
# have to generate: one pass over prompt and response gives the most likely next token everywhere.

# %%
claimed = generate.generate(model, [prompt], 24)[0]
with torch.inference_mode():
    best = model(torch.tensor([prompt + claimed], device=model.device)).argmax(-1)[0].tolist()
print("the model would have written every token:", best[len(prompt) - 1 : -1] == claimed)
forged = [*claimed[:10], claimed[10] + 1, *claimed[11:]]
with torch.inference_mode():
    best = model(torch.tensor([prompt + forged], device=model.device)).argmax(-1)[0].tolist()
agrees = [b == f for b, f in zip(best[len(prompt) - 1 :], forged, strict=False)]
print("first token of a forged one that it would not have written:", agrees.index(False))

# %% [markdown]
# One pass, whatever the response's length. Only for greedy decoding is checking a comparison of
# tokens; with sampling it takes the probabilities, which the same pass gives. If a small model guesses and the large one checks, several
# tokens may come out of one reading of the large model's weights: that is **speculative sampling**,
# notebook 08.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Exercise 1.2: how much cheaper is checking than generating?
# *12 minutes · a bound from two times, each the larger of two*
#
# Count only weights, `dtype_bytes` each, on a machine of `peak` FLOP/s and `bandwidth` bytes/s. A pass
# over T tokens does 2 FLOPs a weight and token and reads each weight once; it takes the longer of the
# two times. Return the time of T passes over one token, divided by that of one pass over T tokens.
# Assume that a pass over one token waits for memory.


# %%
def checking_speedup(T, peak, bandwidth, dtype_bytes):
    """Generating T tokens over checking T tokens, both at their bounds."""
    ### BEGIN SOLUTION
    balanced_tokens = peak / bandwidth * dtype_bytes / 2
    return min(T, balanced_tokens)
    ### END SOLUTION


# %%
check("1.2", checking_speedup)

# %%
hint("1.2")

# %% [markdown] slideshow={"slide_type": "notes"}
# Speaker: stop here and let the room argue about 1 against 64 before the reveal. Both camps are right
# about their own resource; "which resource is scarce?" is the question of notebook 02.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## The Transformer, through our module
#
# To predict more than the weights' bytes we need the shapes. Letters are axes, in this course always:
# B sequences, T positions now, S positions attended to, D model width, F MLP width, N query heads, K
# KV heads, G = N/K queries per KV head, H head width, L layers, V vocabulary.
#
# ![Two rows of boxes. Attention: x of axes B T D goes through a norm into Wq, Wk and Wv, giving q with axes B T K G H and k, v with axes B S K H, which the cache keeps; scores have axes B K G T S; the mixed values B T N H go through Wo back to B T D and are added to x. MLP: a norm, Wgate and Wup give B T F, their gated product goes through Wdown back to B T D and is added. Beside it the sizes of SmolLM2-135M.](../images/transformer-block.svg)

# %% [markdown] slideshow={"slide_type": "subslide"}
# Trace them: a hook on each part of the first block prints what comes out, for B=2 and T=5.

# %%
block = model.blocks[0]


def trace(name):
    return lambda module, inputs, output: print(f"{name:15} {tuple(output.shape)}")


hooks = [part.register_forward_hook(trace(name)) for name, part in block.named_children()]
with torch.inference_mode():
    x_BTD = model.embed(tokens[:, :10].reshape(2, 5))
    model(tokens[:, :10].reshape(2, 5))
for hook in hooks:
    hook.remove()

# %% [markdown]
# `qkv` is one matrix for q, k and v, of width (N + 2K)·H; `gate_up` is one for gate and up, of width
# 2F. The products are the figure's, only fewer and larger. Now part by part, each on small tensors.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### RMSNorm
#
# Divide a vector by its root mean square, then scale each entry by a learned weight
# (Zhang & Sennrich 2019, arXiv:1910.07467). No mean is subtracted, no bias added.

# %%
norm = block.norm_attention
with torch.inference_mode():
    mean_square = x_BTD.pow(2).mean(-1, keepdim=True)
    by_hand_BTD = x_BTD / (mean_square + norm.eps).sqrt() * norm.weight
    assert torch.allclose(by_hand_BTD, norm(x_BTD), atol=1e-5)
    n_BTD = norm(x_BTD)
print("RMSNorm by hand equals the module's")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Rotary position embedding (RoPE)
#
# A query at position p is turned by the angle p·f in each pair of its dimensions, a key at s by s·f
# (Su et al. 2021, arXiv:2104.09864). Derive what their product then depends on:

# %%
import sympy

p, s, f, q1, q2, k1, k2 = sympy.symbols("p s f q1 q2 k1 k2", real=True)


def turned(angle, x, y):
    return sympy.Matrix([[sympy.cos(angle), -sympy.sin(angle)],
                         [sympy.sin(angle), sympy.cos(angle)]]) * sympy.Matrix([x, y])  # fmt: skip


score_ps = turned(p * f, q1, q2).dot(turned(s * f, k1, k2))
moved = score_ps.subs({p: p + 7, s: s + 7}, simultaneous=True)
print("the same 7 positions later:", sympy.simplify(score_ps - moved) == 0)

# %% [markdown]
# Only the distance p − s matters. The library's function does this for all H/2 pairs at once:

# %% slideshow={"slide_type": "subslide"}
from lecture_util.model.attention import apply_rope, rope_frequencies, rope_table

frequencies = rope_frequencies(config)
table = rope_table(frequencies, torch.tensor([3]))
x = torch.randn(1, 1, config.H, generator=torch.Generator().manual_seed(0))
angle = 3 * frequencies
first, second = x.chunk(2, dim=-1)
by_hand = torch.cat((first * angle.cos() - second * angle.sin(),
                     second * angle.cos() + first * angle.sin()), dim=-1)  # fmt: skip
assert torch.allclose(by_hand, apply_rope(x, table), atol=1e-6)
print("RoPE by hand equals apply_rope")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Grouped queries by reshape
#
# N query heads share K KV heads: query head n reads KV head n // G (Ainslie et al. 2023,
# arXiv:2305.13245). No key is copied: the axis N is read as K × G, and einsum does the rest.

# %%
N, K, G, H = config.N, config.K, config.G, config.H
positions_BT = torch.arange(5, device=model.device).expand(2, 5)
rope = rope_table(rope_frequencies(config, model.device), positions_BT)
with torch.inference_mode():
    qkv_BTMH = block.qkv(n_BTD).unflatten(-1, (N + 2 * K, H))
    q_BTNH, k_BTKH, v_BTKH = qkv_BTMH.split((N, K, K), dim=-2)
    q_BTNH, k_BTKH = apply_rope(q_BTNH, rope), apply_rope(k_BTKH, rope)
    q_BTKGH = q_BTNH.unflatten(-2, (K, G))
print("q", tuple(q_BTNH.shape), "->", tuple(q_BTKGH.shape), " k, v", tuple(k_BTKH.shape))
assert torch.equal(q_BTKGH[:, :, 1, 2], q_BTNH[:, :, 1 * G + 2])

# %% [markdown]
# Score, mask, softmax, average: attention in four lines, equal to the library's fused one.

# %% slideshow={"slide_type": "subslide"}
from lecture_util.model.attention import attend

with torch.inference_mode():
    scores_BKGTS = torch.einsum("btkgh,bskh->bkgts", q_BTKGH, k_BTKH) / H**0.5
    hidden_TS = torch.ones(5, 5, device=model.device).triu(1).bool()
    weights_BKGTS = scores_BKGTS.masked_fill(hidden_TS, -torch.inf).softmax(-1)
    mixed_BTNH = torch.einsum("bkgts,bskh->btkgh", weights_BKGTS, v_BTKH).flatten(2, 3)
    assert torch.allclose(mixed_BTNH, attend(q_BTNH, k_BTKH, v_BTKH), atol=1e-4)
print("scores", tuple(scores_BKGTS.shape), " mixed", tuple(mixed_BTNH.shape))

# %% [markdown] slideshow={"slide_type": "subslide"}
# The library has the same lines as `attention_by_hand`. Step through them and watch the scores lose
# their future to the mask, and the rows of weights add up to one.

# %% tags=["nbval-ignore-output", "hide-input"]
from lecture_util.classroom import step
from lecture_util.model.attention import attention_by_hand

step(attention_by_hand, q_BTNH, k_BTKH, v_BTKH)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### The gated MLP, and the block
#
# Two matrices widen D to F; one of the results, through SiLU, gates the other; a third matrix
# narrows it again. Both halves of the block add to what came in.

# %%
from lecture_util.model.kv_cache import NoCache

with torch.inference_mode():
    y_BTD = x_BTD + block.out(mixed_BTNH.flatten(-2))
    gate_BTF, up_BTF = block.gate_up(block.norm_mlp(y_BTD)).chunk(2, dim=-1)
    z_BTD = y_BTD + block.down(nnf.silu(gate_BTF) * up_BTF)
    assert torch.allclose(z_BTD, block(x_BTD, rope, NoCache()), atol=1e-3)
print("the block by hand equals model.blocks[0]")

# %% [markdown]
# Last, the head turns D numbers into V logits. In this model it is **tied**: the same matrix as the
# embedding, once looked up by row, once multiplied.

# %%
print("head and embedding are one tensor:", model.head.weight is model.embed.weight)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Exercise 1.3: give every query head its own KV head
# *10 minutes · which query heads share a KV head*
#
# An engine without grouped queries expects as many KV heads as query heads. Turn a key projection's
# weight of K·H rows and D columns into one of K·G·H rows, so that every query head finds its own copy
# of the KV head it used to read. Results must not change; only memory is wasted.


# %%
def widen(weight, K, G):
    """(K*H, D) -> (K*G*H, D)."""
    ### BEGIN SOLUTION
    return weight.unflatten(0, (K, -1)).repeat_interleave(G, dim=0).flatten(0, 1)
    ### END SOLUTION


# %%
check("1.3", widen)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Counting parameters
#
# **Predict** from the figure: each layer has q and out of D·N·H each, k and v of D·K·H each, three MLP
# matrices of D·F, two norms of D. Around them an embedding of V·D, a last norm, and a head of V·D
# unless tied. The library says it in symbols:

# %%
from lecture_util.roofline import num_params, params_by_part, symbolic_config

for part, formula in params_by_part(symbolic_config()).items():
    print(f"{part:10} {sympy.expand(formula)}")

# %% [markdown]
# **Measure**: add up the sizes of the tensors that are there.

# %%
counted = sum(weight.numel() for weight in model.parameters())
print(f"by formula {num_params(config):,}")
print(f"by tensors {counted:,}")
assert counted == num_params(config)

# %% [markdown] slideshow={"slide_type": "subslide"}
# The same formula on published shapes (source: Lightning-AI/litgpt, `litgpt/config.py`):

# %%
for name, shape in PUBLISHED.items():
    parts = params_by_part(shape)
    total = num_params(shape)
    mlp, table = parts["mlp"] / total, (parts["embedding"] + parts["head"]) / total
    print(f"{name:14} {total / 1e9:7.3f} B   MLP {mlp:4.0%}   embedding and head {table:4.0%}")

# %% [markdown]
# Most weights are the MLPs'. In a small model with a large vocabulary the embedding weighs a lot; in
# a large one it hardly counts. Norms are negligible everywhere, so most formulas leave them out.

# %% [markdown]
# ### Exercise 1.4: a parameter count with three mistakes
# *10 minutes · reading a count off the block's matrices*
#
# This count is off by a lot, for our model and for others. Find its three mistakes, and write it
# correctly, norms included.


# %% slideshow={"slide_type": "subslide"}
def colleagues_count(config):
    c = config
    attention = 2 * c.D * c.N * c.H + 2 * c.D * c.N * c.H  # q and out, k and v
    mlp = 2 * c.D * c.F  # up and down
    norms = 2 * c.D
    return c.L * (attention + mlp + norms) + 2 * c.V * c.D + c.D  # embedding and head, last norm


print(f"{colleagues_count(config):,} instead of {num_params(config):,}")


# %%
def corrected_count(config):
    """Parameters of the model, norms included; config.tied says whether the head is tied."""
    c = config
    ### BEGIN SOLUTION
    attention = 2 * c.D * c.N * c.H + 2 * c.D * c.K * c.H
    mlp = 3 * c.D * c.F
    norms = 2 * c.D
    tables = 1 if c.tied else 2
    return c.L * (attention + mlp + norms) + tables * c.V * c.D + c.D
    ### END SOLUTION


# %%
check("1.4", corrected_count)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Four simplifications, and where they fail
#
# Formulas get shorter with F = 4D, D = N·H, N = K·G and S = T. The first two are facts about some
# models, the third is a definition, the last one about a moment:

# %%
print(f"{'':14} {'F/D':>5} {'NH/D':>5} {'N/K':>4}")
for name, c in PUBLISHED.items():
    print(f"{name:14} {c.F / c.D:5.2f} {c.N * c.H / c.D:5.2f} {c.N // c.K:4}")
print(f"{'DeepSeek-V2':14} {'':>5} {128 * 128 / 5120:5.2f}      (MLA: no KV heads to count)")

# %% [markdown] slideshow={"slide_type": "subslide"}
# - **F = 4D** holds for one of these, SmolLM2-1.7B. It comes from MLPs with two matrices: 2·D·4D = 8D².
#   A gated MLP of that size has 3·D·F = 8D², so F = 8/3·D: Llama-2-7B and 13B and the two smaller
#   SmolLM2 are near it. The others spend more on their MLPs.
# - **D = N·H** holds for all of these and fails for DeepSeek-V2 (D 5120, 128 heads; 16,384 = N·H as
#   in the lecture; arXiv:2405.04434). Pruned models break it too (notebook 07).
# - **N = K·G** is how G is defined. G = 1 is multi-head attention, K = 1 multi-query attention.
# - **S = T** is true of a prefill and of training. In decode T = 1 and S is everything so far: the
#   whole difference between the two phases.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## FLOPs: 2 per parameter and token
#
# A weight meets each token once: one multiplication, one addition. Count them in a small product:

# %%
from lecture_util.roofline import matmul

B, D, F = 2, 3, 4
count = 0
for _b in range(B):
    for _f in range(F):
        for _d in range(D):
            count += 2  # one multiply, one add
assert count == matmul(B, D, F).flops == 2 * B * D * F
print(count, "FLOPs for", D * F, "weights and", B, "tokens:", count // (D * F * B), "each")

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Predict** a pass over T = 64 tokens of the real model: 2 × 64 × parameters, norms left out. The tied
# matrix is multiplied once, as the head; as an embedding it is only looked up, which costs no FLOPs.
#
# **Measure** with torch's counter. It counts the operations that it knows, and whether fused attention
# is one of them depends on the device. So we hand the model a cache that attends by hand, in plain
# products: the Transformer doesn't ask how its cache attends.


# %%
class ByHand(NoCache):
    def attend(self, layer, q_BTNH, k_BTKH, v_BTKH):
        return attention_by_hand(q_BTNH, k_BTKH, v_BTKH)


# %%
from torch.utils.flop_counter import FlopCounterMode

with torch.inference_mode(), FlopCounterMode(display=False) as counter:
    model(tokens, ByHand())
measured, linear = counter.get_total_flops(), 2 * 64 * num_params(config, norms=False)
print(f"measured {measured:,}; 2 x tokens x parameters {linear:,}")
print(f"ratio {measured / linear:.4f}")

# %% [markdown]
# **Read.** Close to 1, and what is left over is attention's: 4·T·S·N·H in each layer, two products of
# queries with keys and of weights with values. With it the formula is exact:

# %% slideshow={"slide_type": "subslide"}
from lecture_util.roofline import forward_flops

attention_flops = 4 * 64 * 64 * config.N * config.H * config.L
assert measured == linear + attention_flops == forward_flops(config, 1, 64, 64)
print("exact:", measured == forward_flops(config, 1, 64, 64))

# %% [markdown]
# And the same pass through the fused kernel, as this device's counter sees it. A tool that reports
# fewer FLOPs hasn't found a faster model:

# %% tags=["nbval-ignore-output"]
with torch.inference_mode(), FlopCounterMode(display=False) as counter:
    model(tokens)
print(f"{model.device.type}: fused {counter.get_total_flops():,}, by hand {measured:,}")

# %% [markdown] slideshow={"slide_type": "subslide"}
# > **Erratum.** One often reads 6 FLOPs per token and parameter for "a forward pass". Six is forward
# > *plus backward*: the backward pass makes two products for each of the forward's, one for the
# > inputs' gradient and one for the weights'. Inference has no backward pass: 2.

# %%
from lecture_util.model.config import Config
from lecture_util.model.transformer import Transformer

tiny = Transformer.random(Config(D=48, F=80, K=2, G=3, H=8, L=2, V=101)).requires_grad_(True)
with FlopCounterMode(display=False) as forward_counter:
    logits = tiny(torch.arange(10)[None], ByHand())
with FlopCounterMode(display=False) as backward_counter:
    logits.logsumexp(-1).sum().backward()
forward_count, backward_count = (
    counter.get_total_flops() for counter in (forward_counter, backward_counter)
)
assert backward_count == 2 * forward_count
print("backward / forward:", backward_count // forward_count, " so 2 + 4 = 6 with training")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### The O(T) beside the parameters
#
# The lecture writes a pass as 6·(B·T)·(parameters + O(T)). With the right factor it is
# 2·(B·T)·(parameters + something that grows with T). In symbols, per token, with S = T:

# %%
from lecture_util.roofline import symbols

T, S = symbols("T S")
c = symbolic_config()
per_token = sympy.expand(forward_flops(c, 1, T, T) / T)
grows = sympy.expand(per_token - per_token.subs(T, 0))
print("2 x", grows / 2)
weights_only = num_params(c, norms=False) - c.V * c.D  # the untied embedding is looked up
assert sympy.expand(per_token.subs(T, 0) - 2 * weights_only) == 0

# %% [markdown]
# Put numbers in. Beside it, how far "2 × parameters" is off for an untied model: its input embedding is
# looked up, so it costs no FLOPs.

# %%
print(f"{config.N * config.H * config.L * 2:,} x T beside {num_params(config, norms=False):,}")
llama = PUBLISHED["llama-2-13b"]
share = llama.V * llama.D / num_params(llama)
print(f"Llama-2-13B: {share:.1%} of the parameters are an embedding that is only looked up")

# %% tags=["hide-input", "nbval-ignore-output"] slideshow={"slide_type": "subslide"}
contexts = [2**k for k in range(6, 18)]
_, ax = plt.subplots()
for name in ("smollm2-135m", "llama-3-8b", "llama-2-13b"):
    shape = PUBLISHED[name]
    per_position = 4 * shape.N * shape.H * shape.L
    shares = [per_position * S / forward_flops(shape, 1, 1, S) for S in contexts]
    ax.plot(contexts, [100 * share for share in shares], "--", label=name)
ax.axhline(50, color="#666666", lw=1)
ax.set(xscale="log", xlabel="context S", ylabel="attention, % of a token's FLOPs", ylim=(0, 100))
ax.legend()
claim(ax, "Attention is a small share of the FLOPs until contexts get long")
caption(ax, shapes="one new token, matrix products only", source="formula; shapes: litgpt")
plt.show()

# %% [markdown] slideshow={"slide_type": "subslide"}
# > **Erratum.** "A pass is O(T²)" is true as T grows without end, and misleads at the lengths most
# > prompts have: the linear layers' O(T) dominates. And a causal mask needs only half of the T²
# > scores, if the kernel skips the others.

# %%
for T in (64, 512, 4096, 32768):
    full = forward_flops(llama, 1, T, T)
    causal = forward_flops(llama, 1, T, T, causal=True)
    linear = full - 4 * T * T * llama.N * llama.H * llama.L
    print(f"T={T:6}: attention {1 - linear / full:6.1%} of all, causal {1 - linear / causal:6.1%}")

# %% [markdown]
# ### Exercise 1.5: the context at which attention costs as much as the weights
# *12 minutes · setting two costs equal*
#
# One new token attends to S positions. At which S are attention's FLOPs (all layers) equal to those
# of all matrices it is multiplied with (all layers, and the LM head)? Return S as a number, from the
# config. It need not be whole.


# %% slideshow={"slide_type": "subslide"}
def balanced_context(config):
    """The S at which attention and weights cost a token the same FLOPs."""
    c = config
    ### BEGIN SOLUTION
    block = 2 * c.D * c.N * c.H + 2 * c.D * c.K * c.H + 3 * c.D * c.F
    return (c.L * block + c.V * c.D) / (2 * c.N * c.H * c.L)
    ### END SOLUTION


# %%
check("1.5", balanced_context)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Back to the bill
#
# Now the opening claim has a number. Training costs about 6 FLOPs per parameter and token, serving 2.
# So serving has cost as many FLOPs as training once **three times the training tokens** were served:

# %%
trained_tokens = 15e12  # Llama 3: ≈ 15T, read off a plot in arXiv:2407.14679 (Minitron)
served_a_day = 100e9 * 4 / 3  # Altman's words, at 4/3 tokens a word
print(f"{3 * trained_tokens / served_a_day:.0f} days, were both about one model")

# %% [markdown]
# They are not about one model, so take it as a scale, not as anybody's bill. And the FLOPs flatter serving: as
# measured above, generating uses far less of the hardware than a pass over many tokens does.

# %% [markdown]
# ### Exercise 1.6: when serving has cost as much as training
# *8 minutes · 2 FLOPs against 6, and what utilization does to both*
#
# Count accelerator time, not FLOPs. Training reaches the share `train_utilization` of the peak, serving
# `serve_utilization`. After how many days of `served_a_day` tokens has serving taken as much
# accelerator time as training on `trained_tokens` did?


# %% slideshow={"slide_type": "subslide"}
def break_even_days(trained_tokens, served_a_day, train_utilization, serve_utilization):
    """Days until serving has taken as much accelerator time as training."""
    ### BEGIN SOLUTION
    training = 6 * trained_tokens / train_utilization
    serving_a_day = 2 * served_a_day / serve_utilization
    return training / serving_a_day
    ### END SOLUTION


# %%
check("1.6", break_even_days)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Who serves models, and with what
#
# Whoever has a product or a platform pays for inference:
#
# - **closed models** are served by their makers, such as OpenAI, Anthropic and Google;
# - **open-weight models** can be served by anyone, and companies such as Together, Fireworks and
#   DeepInfra compete on price and speed for the same weights. There, efficiency *is* the product.
#
# Open-source packages:
#
# | package | from | |
# |---|---|---|
# | vLLM | UC Berkeley | PagedAttention, notebook 10; arXiv:2309.06180 |
# | TensorRT-LLM | NVIDIA | for NVIDIA GPUs; nvidia.github.io/TensorRT-LLM/overview.html |
# | Text Generation Inference (TGI) | Hugging Face | in maintenance mode, its documentation says, and points to vLLM and SGLang; huggingface.co/docs/text-generation-inference |
#
# The lecture writes "Tensor-RT": TensorRT is NVIDIA's general inference library, TensorRT-LLM the one
# for language models.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## What to remember
#
# - Inference is paid per request, training once: serving three times the training tokens costs as many
#   FLOPs again.
# - TTFT and latency are what a user feels; throughput is what the owner of the machine gets.
# - Training and prefill see all tokens at once; generation makes them one by one and leaves the
#   arithmetic units idle. So checking is cheaper than generating.
# - A forward pass costs 2 FLOPs per parameter and token, plus 4·S·N·H per layer and token for attention.
# - Count with the model's own shapes: F = 4D is the exception, and K is often less than N.

# %% tags=["nbval-ignore-output"]
status("01")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ## Papers and sources
#
# - *Inference*, Stanford CS336, spring 2025, lecture 10: order and claims of this notebook.
# - Julien Simon, *Deep Dive: Optimizing LLM Inference* (slides, CC BY-NC 4.0): prefill and generation.
# - *How to Scale Your Model*, jax-ml.github.io/scaling-book/transformers: the block, its axes.
# - Vaswani et al. 2017, arXiv:1706.03762; Zhang & Sennrich 2019, arXiv:1910.07467; Su et al. 2021,
#   arXiv:2104.09864; Ainslie et al. 2023, arXiv:2305.13245; Kwon et al. 2023, arXiv:2309.06180.
# - Leviathan et al. 2022, arXiv:2211.17192, and Chen et al. 2023, arXiv:2302.01318: checking is cheap.
# - Shapes: Lightning-AI/litgpt `litgpt/config.py`. H100 and others: `lecture_util/roofline/hardware.py`.
