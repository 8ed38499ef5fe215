# %% [markdown] slideshow={"slide_type": "slide"}
# # 00 · Start here
#
# A language model writes one token at a time, and for each token it reads all of its weights from
# memory. That one sentence explains most of what makes inference slow, and most of what makes it
# fast again. This course takes it apart: thirteen notebooks, each one a lecture, a laboratory and a
# test at once.
#
# You need to know PyTorch. You don't need to have profiled anything before, and you don't need a
# GPU: everything here runs a real language model on the machine in front of you.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## The way of a token
#
# ![Four steps, three notebooks each. A question comes: 00 start here, 09 continuous batching, 10 paged attention. A forward runs: 01 the workload, 02 arithmetic intensity, 08 speculative sampling. It reads the weights: 06 quantization, 07 pruning and distillation, 11 merging. It reads the past: 03 the KV cache, 04 a smaller one, 05 beyond attention. Then the next token goes round again. Below, across all steps: 12 all of it together.](../images/course-map.svg)

# %%
import os

import torch

from lecture_util.classroom import check, explore, hint, predict, status, use_style

use_style()

# %% [markdown] slideshow={"slide_type": "slide"}
# ## How we work: predict, measure, read
#
# ![Three boxes joined by arrows: predict, derive a formula and put a number on it; measure, run it on your machine; read, divide one by the other and name what explains the gap. An arrow leads back from read to predict.](../images/predict-measure-read.svg)
#
# 1. **Predict.** Before a cell runs, put a number on what it will show. A number from a formula is
#    best, a guess is fine, and a wrong guess is where you learn most.
# 2. **Measure.** Then run it, here, on the real model.
# 3. **Read.** Divide one by the other. A ratio near 1 means the formula knows what matters. Any
#    other ratio has a cause, and the cause is the lesson.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## What this machine can do
#
# Two peaks bound everything that follows: how many **bytes per second** move between memory and the
# processor, and how many **floating-point operations per second** (FLOP/s) it can do. We measure
# both: a large copy for the first, large matrix products for the second.

# %% tags=["nbval-ignore-output"]
from lecture_util.roofline.hardware import this_machine

machine = this_machine()
print(machine.name)
print(f"memory     {machine.memory_bytes / 1e9:.0f} GB")
print(f"bandwidth  {machine.bandwidth_bytes_per_s / 1e9:.1f} GB/s")
for dtype, rate in machine.flops_per_s.items():
    print(f"{dtype}       {rate / 1e12:.3g} TFLOP/s")

# %% [markdown]
# `python -m lecture_util doctor` says the same from a terminal, checks versions, and tells you how to
# mend what is missing.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## The model
#
# We use **SmolLM2-135M-Instruct**, small enough for a laptop and large enough to answer in
# sentences. It came with the course's requirements, so nothing is downloaded now. Its package holds
# weights rounded to 4 bits (Q4_1; the embedding to 8, Q8_0), loaded as bf16 values: it is not bit for
# bit the published model, and notebook 06 says what this changes. Its forward pass is
# ours, about a hundred lines that we read together in notebook 01; the tokenizer is Hugging Face's.

# %%
from lecture_util.model.weights import load, load_tokenizer

model, tokenizer = load(), load_tokenizer()
num_params = sum(p.numel() for p in model.parameters())
print(
    f"{num_params:,} parameters, {model.config.L} layers, {model.config.V:,} tokens to choose from"
)

# %% [markdown]
# Ask it something. `chat` wraps your words in the template that the model was trained on, `stream`
# yields tokens as they are made, and `stream_text` turns them into whole characters. Watch the
# rhythm in which the words arrive: a short wait, then a steady beat. Notebook 01 gives both a name.

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
from lecture_util.model.generate import stream
from lecture_util.model.tokenizer import chat, stream_text

prompt = chat(tokenizer, "Why do people like the sea? Answer in two sentences.")
for piece in stream_text(tokenizer, stream(model, prompt, 60, eos=[tokenizer.eos_token_id])):
    print(piece, end="", flush=True)

# %% [markdown]
# Tokens are whole numbers, and greedy decoding always takes the most likely next one. So an answer
# is reproducible, and a test can hold us to it: this cell's output is compared every time the
# notebook is checked.

# %%
from lecture_util.model.generate import generate

question = chat(tokenizer, "What is the capital of France?")
answer = generate(model, [question], 16, eos=[tokenizer.eos_token_id])[0]
print(answer)
print(tokenizer.decode(answer, skip_special_tokens=True))

# %% [markdown] slideshow={"slide_type": "slide"}
# ## A first prediction
#
# How many tokens per second can this model make here, for one user? Put a number in the box before
# you go on.

# %% tags=["nbval-ignore-output"]
guess = predict("tokens per second for one user, fp32", unit="tok/s")
guess

# %% [markdown]
# Now the formula. To make one token, every weight must travel from memory to the processor once.
# Each is a 32-bit number, four bytes. So a step takes *at least* bytes over bandwidth:
#
# $$t_\text{step} \;\ge\; \frac{4 \cdot \text{parameters}}{\text{bandwidth}}
# \qquad\Longrightarrow\qquad
# \text{tokens per second} \;\le\; \frac{\text{bandwidth}}{4 \cdot \text{parameters}}$$

# %% tags=["nbval-ignore-output"]
weight_bytes = 4 * num_params
most_tokens_per_s = machine.bandwidth_bytes_per_s / weight_bytes
print(f"{weight_bytes / 1e6:.0f} MB per token, so at most {most_tokens_per_s:.0f} tokens/s here")

# %% [markdown]
# And the measurement: the time of a step, several times over, with the prompt already in the cache.

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
from lecture_util.model.generate import prefill
from lecture_util.roofline.timing import measure

cache, logits = prefill(model, [prompt], capacity=256)
token = logits.argmax(-1, keepdim=True)
with torch.inference_mode():
    step = measure(model, token, cache, repeats=15, warmup=3)
print(step)

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
slow, fast = (1 / t for t in reversed(step.spread))
guess.reveal(1 / step.median_s, predicted=most_tokens_per_s, low=slow, high=fast)

# %% [markdown] slideshow={"slide_type": "notes"}
# Collect three or four guesses from the room before revealing. Most people guess from experience
# with chat services and land far too high or far too low; the point is that a one-line formula lands
# within a small factor on a machine that nobody has looked at before.

# %% [markdown]
# The formula is a bound, so the measurement should lie below it. Likely causes: reading weights at less
# than the full copy rate, and the hundreds of small operations between the large products. Notebooks 02
# and 03 examine them, and 03 shows where the formula starts to fail.
# On a GPU the gap is wider for so small a model: launching the operations takes longer than reading
# the weights.
#
# Move the sliders: the same formula for other models and machines. No measurement is shown here,
# only the bound.

# %% tags=["hide-input", "nbval-ignore-output"] slideshow={"slide_type": "subslide"}
from lecture_util.classroom.figures import bars
from lecture_util.model.config import PUBLISHED
from lecture_util.roofline.accounting import weight_bytes as bytes_of
from lecture_util.roofline.hardware import ACCELERATORS


def bound(model="llama-3-8b", bytes_per_weight=2.0):
    size = bytes_of(PUBLISHED[model], bytes_per_weight)
    rates = [a.bandwidth_bytes_per_s / size for a in ACCELERATORS.values()]
    title = f"{model}, {size / 1e9:.1f} GB of weights: upper bound on tokens/s for one user"
    return bars(list(ACCELERATORS), rates, "tokens/s", title=title, source="data sheets").figure


explore(bound, model=list(PUBLISHED), bytes_per_weight=[0.5, 1.0, 2.0, 4.0])

# %% [markdown] slideshow={"slide_type": "slide"}
# ## How exercises work
#
# An exercise is a function with a hole in it. Fill the hole, run the cell, then run the `check` cell
# below it. It prints one line:
#
# | line | meaning |
# |---|---|
# | `✓ 0.1 …` | correct; the number of checks that passed |
# | `○ 0.1 …` | you haven't tried yet |
# | `✗ 0.1 …` | not yet: what is wrong with *this* answer |
#
# A check never stops the notebook, so *Run All* always works. Inputs are drawn afresh from
# `LECTURE_SEED`, so an answer that only fits one example doesn't last. The notebooks come with the
# ✓ lines that you are aiming for; running a check replaces its line with yours.

# %% [markdown]
# ### Exercise 0.1: a bound on tokens per second
# *3 minutes · turning a sentence into a formula*
#
# Write the bound for any model and machine: `num_params` weights of `bytes_per_weight` bytes each,
# read once per token, over `bandwidth_bytes_per_s`. Return tokens per second.


# %% slideshow={"slide_type": "subslide"}
def tokens_per_second(num_params, bytes_per_weight, bandwidth_bytes_per_s):
    """At most this many tokens a second for one user."""
    ### BEGIN SOLUTION
    return bandwidth_bytes_per_s / (num_params * bytes_per_weight)
    ### END SOLUTION


# %%
check("0.1", tokens_per_second)

# %% [markdown]
# Stuck? `hint` opens one hint at a time, from a nudge to nearly the answer.

# %%
hint("0.1")

# %% [markdown]
# `status` shows where you stand, here or in the whole course.

# %% tags=["nbval-ignore-output"]
status("00")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ## How grading works
#
# Every notebook is a test: as handed out, it stores the ✓ line of each check, and `pytest --nbval` compares
# what comes out with what is stored, so that exactly the unsolved exercises fail. Once you have saved your
# own lines, that comparison is with yourself. So grade your work from a terminal with
#
# ```
# python -m lecture_util grade notebooks/00_start_here.ipynb
# ```
#
# which runs your answers afresh and reads what the checks say. Instructors give it a whole folder of
# submissions, and a seed of their choosing:

# %% tags=["nbval-ignore-output"]
print(
    "the seed of this run's checks:",
    os.environ.get("LECTURE_SEED", "0, since LECTURE_SEED is not set"),
)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## The road
#
# | | | |
# |---|---|---|
# | 01 | the inference workload | what is measured, and why its cost dominates |
# | 02 | arithmetic intensity | why generating is slow: FLOPs, bytes and the roofline |
# | 03 | the KV cache, latency and throughput | the one trick that everyone uses, and what it costs |
# | 04–05 | smaller caches, other architectures | attend to less, or replace attention |
# | 06–07 | quantization, pruning and distillation | fewer bits, fewer weights |
# | 08 | speculative sampling | guess ahead, check in parallel, lose nothing |
# | 09–10 | continuous batching, paged attention | serve many users at once |
# | 11 | model merging | combine models without training |
# | 12 | putting it together | one model, one machine, one table |
#
# All thirteen are here.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## What to remember
#
# - One token costs one read of all weights; bytes over bandwidth bounds the speed.
# - Predict first, then measure, then read the ratio.
# - A bound is not an estimate: the measurement falls short of it, and the gap has causes.
# - Exercises answer at once; *Run All* always works.
# - Everything printed here was computed on this machine or has its source beside it.
#
# ## Sources
#
# The course follows the lecture *Inference* (Stanford CS336, spring 2025, lecture 10) and the slides
# *Deep Dive: Optimizing LLM Inference* (Julien Simon). SmolLM2: Ben Allal et al. 2025,
# arXiv:2502.02737. Bandwidths: the sources named in `lecture_util/roofline/hardware.py`.
