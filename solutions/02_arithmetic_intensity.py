# %% [markdown] slideshow={"slide_type": "slide"}
# # 02 · Arithmetic intensity
#
# Why is it slow to *write* a text and quick to *read* one? The model is the same, and so are its
# weights. One number tells the two apart: how many FLOPs a computation does for each byte that it
# moves. This notebook derives that number for every part of a Transformer, predicts from it which
# parts wait for memory and which for arithmetic, and measures both on the real model.
#
# About 80 minutes with the five exercises. You need notebook 01, or to know what prefill and
# generation are.

# %%
import math

import matplotlib.pyplot as plt
import sympy
import torch
import torch.nn.functional as nnf
from torch import nn

from lecture_util.classroom import check, hint, predict, status, step, use_style
from lecture_util.model import weights
from lecture_util.model.config import PUBLISHED
from lecture_util.roofline import ACCELERATORS, measure, symbols, this_machine
from lecture_util.roofline.accounting import Cost, attention, crossover_batch, matmul, mlp

use_style()

# %% [markdown] slideshow={"slide_type": "subslide"}
# ## The machine, one core at a time
#
# On a CPU we measure with **one thread**. A roofline holds for a core as it does for a whole chip,
# and a core does not wait for its neighbours: on a busy machine, two threads that meet after
# every small product can spend most of their time waiting for each other. On a GPU nothing changes.
#
# Of the two usual formats we take the one in which this machine multiplies faster.

# %%
torch.set_num_threads(1)
torch.set_grad_enabled(False)
on_gpu = torch.cuda.is_available()

# %% tags=["nbval-ignore-output"]
here = this_machine()
dtype = "bf16" if here.flops_per_s.get("bf16", 0) > here.peak("fp32") else "fp32"
width = {"bf16": 2, "fp32": 4}[dtype]
model = weights.load(dtype={"bf16": torch.bfloat16, "fp32": torch.float32}[dtype])
print(f"{here.name}: {here.peak(dtype) / 1e9:,.0f} GFLOP/s in {dtype}, ", end="")
print(f"{here.bandwidth_bytes_per_s / 1e9:.1f} GB/s")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## A question to begin with
#
# The last thing that a model computes for a token is its logits: the vector of width $D$ times the
# matrix of the **LM head**. In SmolLM2 that matrix is $576 \times 49152$, too large for most
# processors' caches.
#
# Eight users' tokens instead of one are eight times the arithmetic. How many times as long does it
# take?

# %% tags=["nbval-ignore-output"]
guess = predict("time for 8 rows / time for 1 row", unit="×")

# %% [markdown] slideshow={"slide_type": "subslide"}
# On a GPU so small a product would be over before the next could be launched, so there we take the
# shape of a larger model, Llama-2-13B's up projection.
#
# We call torch's own product on the layer's matrix, since the machine's peak was measured with torch's
# own too. For few rows in fp32 on a CPU, the layer itself takes another library
# (`lecture_util/model/linear.py`).

# %%
layer = model.head
if on_gpu:
    layer = nn.Linear(5120, 13824, bias=False, dtype=model.dtype, device="cuda")
F_out, D_in = layer.weight.shape


def rows(B):
    return torch.randn(B, D_in, dtype=model.dtype, device=model.device)


# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
one, eight = (measure(nnf.linear, rows(B), layer.weight, repeats=9, warmup=3) for B in (1, 8))
print(f"1 row {one}\n8 rows {eight}")
guess.reveal(eight.best_s / one.best_s)

# %% [markdown] slideshow={"slide_type": "notes"}
# Ask for hands: 8×, about 4×, about 1×? Those who say 8× think of the arithmetic, those who say 1×
# have met a GPU. It depends on the dtype that the notebook chose: with bf16 instructions in the
# processor it comes close to 1, in fp32 it is more. Don't explain yet; the accounting below does. Ask
# again at the end of "Measured here".

# %% [markdown]
# Not eight times: many of those FLOPs came for free. The rest of this notebook says why, how many more
# would be free, and in which part of a Transformer they never are.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## The matmul, step by step
#
# Multiply $X$ ($B \times D$) by $W$ ($D \times F$): $B$ rows of a batch, the model's width $D$, the
# width $F$ of an MLP. All tensors lie in memory, two bytes a number. We keep two accounts.

# %%
B, D, F = symbols("B D F")
flops = bytes_moved = 0

bytes_moved += 2 * B * D  # 1. read X
bytes_moved += 2 * D * F  # 2. read W
flops += 2 * B * D * F  # 3. Y = X @ W: a multiply and an add for each of B*F*D pairs
bytes_moved += 2 * B * F  # 4. write Y

# %%
assert flops == 2 * B * D * F
assert bytes_moved == 2 * B * D + 2 * D * F + 2 * B * F
flops, bytes_moved

# %% [markdown]
# Is that what PyTorch does? Its FLOP counter and the tensors themselves agree, on a small example.
# From here on `lecture_util.roofline.matmul` keeps the accounts: a `Cost` that holds FLOPs, bytes
# read and bytes written, in numbers or in symbols.

# %% slideshow={"slide_type": "subslide"}
from torch.utils.flop_counter import FlopCounterMode

x_BD, w_DF = torch.ones(3, 5, dtype=torch.bfloat16), torch.ones(5, 7, dtype=torch.bfloat16)
with FlopCounterMode(display=False) as counter:
    y_BF = x_BD @ w_DF
counted = Cost(counter.get_total_flops(), x_BD.nbytes + w_DF.nbytes, y_BF.nbytes)
assert counted == matmul(3, 5, 7)
assert (matmul(B, D, F).flops, matmul(B, D, F).bytes) == (flops, bytes_moved)
counted

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Arithmetic intensity** is FLOPs per byte. We want it high: each byte that was fetched should be
# put to use.

# %%
intensity = (flops / bytes_moved).simplify()
intensity

# %% [markdown]
# It looks nicer upside down. The reciprocals of the three sizes add up, so the *smallest* of them
# decides:
#
# $$\frac{1}{\text{intensity}} = \frac1B + \frac1D + \frac1F$$

# %%
assert sympy.simplify(1 / intensity - (1 / B + 1 / D + 1 / F)) == 0

# %% [markdown]
# In generation the batch is the smallest by far. Let $D$ and $F$ grow in step, as multiples $c$ of
# $B$, without end:

# %%
c = symbols("c")[0]
limit = intensity.subs({D: c * B, F: c * B}).limit(c, sympy.oo).simplify()
assert limit == B
limit

# %% [markdown] slideshow={"slide_type": "subslide"}
# **A matmul does about B FLOPs a byte.** $W$ is read once, and each of the $B$ rows uses it.

# %% [markdown] slideshow={"slide_type": "slide"}
# ### Step through it
#
# The same derivation as one function. `step` runs it once and lets you walk it, line by line, with
# the values that `# @inspect` asks for beside it: arrow keys or buttons, *into* `matmul` if you like.
# Then type `8` for $B$ and run again: what becomes of the limit?


# %% tags=["hide-input"]
def matmul_intensity(B, D, F):
    """From a matmul's accounts to its intensity when D and F are large."""
    cost = matmul(B, D, F)  # @inspect cost
    intensity = (cost.flops / cost.bytes).simplify()  # @inspect intensity
    c = symbols("c")[0]
    wide = intensity.subs({D: c * B, F: c * B})  # @inspect wide
    intensity = wide.limit(c, sympy.oo)  # @inspect intensity
    return intensity


# %% tags=["nbval-ignore-output", "hide-input"] slideshow={"slide_type": "subslide"}
step(matmul_intensity, B, D, F)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Exercise 2.1: a matmul with quantized weights
# *8 minutes · counting bytes by what they hold*
#
# Weights are often stored in fewer bits than the activations they meet. Write the intensity of
# $X W$ when each number of $W$ takes `weight_bytes`, and each number of $X$ and of the result
# takes `activation_bytes`. (The weights are widened on the chip, which moves nothing.)


# %%
def quantized_intensity(B, D, F, weight_bytes, activation_bytes):
    """FLOPs per byte of X_BD @ W_DF."""
    ### BEGIN SOLUTION
    bytes_moved = activation_bytes * (B * D + B * F) + weight_bytes * D * F
    return 2 * B * D * F / bytes_moved
    ### END SOLUTION


# %%
check("2.1", quantized_intensity)

# %%
hint("2.1")

# %% [markdown]
# Try it with $B=1$ and int8 weights: the intensity nearly doubles, to just under 2. So half as many rows will do to
# keep the arithmetic busy, and a matmul that waits for memory takes half the time. Notebook 06 is
# about that half.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## The accelerator's own intensity
#
# A chip has two peaks, FLOPs per second and bytes per second. Their quotient is the intensity at
# which both are used up at the same time, the **ridge**. For an H100, with 989 TFLOP/s in bf16 and
# 3.35 TB/s:

# %%
flops_per_s, bandwidth_bytes_per_s = 989e12, 3.35e12
ridge = flops_per_s / bandwidth_bytes_per_s
assert round(ridge) == 295
print(f"{ridge:.1f} FLOPs per byte")

# %% [markdown]
# Sources round differently: the lecture uses 989 TFLOP/s, as torchtitan does; our table has 989.5, half
# of the data sheet's 1,979 with 2:4 sparsity. It makes no difference that anyone will see.

# %%
h100 = ACCELERATORS["h100"]
assert round(h100.ridge()) == 295
print(f"{h100.ridge():.1f} with {h100.peak() / 1e12} TFLOP/s")

# %% [markdown]
# Other accelerators, by the data sheet and dense. The T4 has no bf16, so it is listed in fp16.

# %% slideshow={"slide_type": "subslide"} tags=["hide-input", "nbval-ignore-output"]
from lecture_util.classroom.figures import bars, caption

table = {
    a.name: a.ridge("bf16" if "bf16" in a.flops_per_s else "fp16") for a in ACCELERATORS.values()
}
table[f"{here.name}, {dtype}"] = here.ridge(dtype)
ax = bars(
    list(table), list(table.values()), "ridge, FLOPs per byte", highlight=list(table)[-1],
    title="Accelerators want about 150 to 400 FLOPs for each byte",
    source="torchtitan, Lightning and stas00/ml-engineering; last bar measured here",
)  # fmt: skip
plt.show()

# %% [markdown] slideshow={"slide_type": "subslide"}
# A ridge is no mark of quality. It says what a chip needs to be fed: the H200 computes as fast as
# the H100 and reads faster, so its ridge is *lower*, and more work runs at its full speed.

# %%
h200 = ACCELERATORS["h200"]
assert h200.peak() == h100.peak() and h200.ridge() < h100.ridge()
print(f"H100 {h100.ridge():.0f}, H200 {h200.ridge():.0f}")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Compute-limited or memory-limited
#
# If reading and computing overlap perfectly, the slower of the two sets the time:
#
# $$t \;\ge\; \max\left(\frac{\text{FLOPs}}{\text{FLOP/s}},\; \frac{\text{bytes}}{\text{bytes/s}}\right)$$
#
# - intensity **above** the ridge: **compute-limited**. Good, the expensive units are busy.
# - intensity **below** the ridge: **memory-limited**. They wait.
#
# That is the **roofline**. Plotted as FLOP/s against intensity it is a slope, then a flat roof.

# %% slideshow={"slide_type": "subslide"} tags=["hide-input"]
from lecture_util.classroom.figures import PREDICTED, label_points, roofline

ax = roofline(
    h100, "bf16", title="Up projection of Llama-2-13B on an H100: the batch climbs the slope"
)
points = []
for batch in (1, 8, 64, 321, 2048):
    cost = matmul(batch, 5120, 13824)
    points.append((f"B={batch}", cost.intensity, cost.flops / cost.time_s(h100)))
ax.plot(*zip(*[p[1:] for p in points], strict=True), "s", color=PREDICTED, ms=9)
label_points(ax, points)
caption(ax, device="H100 SXM, predicted", dtype="bf16", shapes="D=5120, F=13824")
plt.show()

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### The extreme: B = 1
#
# One row is a matrix-vector product. It reads a $D \times F$ matrix to do $2DF$ FLOPs: one FLOP a
# byte, and a bit less. How long does it take on an H100, and what share of the peak does it reach?

# %%
cost = matmul(1, 5120, 13824)
compute_s, memory_s = cost.compute_s(h100), cost.memory_s(h100)
print(f"intensity {cost.intensity:.4f}, {cost.bound(h100)}-limited")
print(f"computing {compute_s * 1e6:.2f} µs, reading and writing {memory_s * 1e6:.1f} µs")
print(f"{compute_s / memory_s:.2%} of the peak FLOP/s")

# %% [markdown]
# **This is what happens in generation**: one new token a sequence. For one user, an H100 spends more
# than 99% of its arithmetic on waiting. That is what the slides mean by *low usage of the
# accelerator*, and by *idle compute resources* that speculative decoding will put to work
# (notebook 08).

# %% [markdown] slideshow={"slide_type": "slide"}
# ## How large a batch?
#
# "Compute-limited iff $B > 295$", it is often said. Put the finite sizes in and see.

# %%
for batch in (295, 296, 320, 321):
    cost = matmul(batch, 5120, 13824)
    print(f"B={batch}: {cost.intensity:.1f} FLOPs per byte, {cost.bound(h100)}-limited")

# %% [markdown]
# > **Erratum.** $B > 295$ is the limit for $D, F \to \infty$. At Llama-2-13B's sizes, $D=5120$ and
# > $F=13824$, the product becomes compute-limited from $B = 321$ on.
#
# Set the intensity equal to the ridge $R$ and solve for $B$. `crossover_batch` has the solution:

# %%
R = symbols("R")[0]
solution = sympy.solve(sympy.Eq(intensity, R), B)[0]
assert sympy.simplify(solution - crossover_batch(D, F, R)) == 0
assert sympy.simplify(1 / solution - (1 / R - 1 / D - 1 / F)) == 0
solution

# %% slideshow={"slide_type": "subslide"}
for peak in (989e12, 989.5e12):
    exact = crossover_batch(5120, 13824, peak / 3.35e12)
    assert math.ceil(exact) == 321
    print(f"{peak / 1e12} TFLOP/s: {exact:.1f}, so B ≥ {math.ceil(exact)}")

# %% [markdown] slideshow={"slide_type": "subslide"}
# The smaller the model, the larger the batch it needs, until no batch is enough: $1/B$ would have to
# be negative. SmolLM2's query projection is one of those.

# %%
shapes = {
    "Llama-2-70B, up": (8192, 28672),
    "Llama-2-13B, up": (5120, 13824),
    "SmolLM2-135M, up": (576, 1536),
    "SmolLM2-135M, query": (576, 576),
}
for name, (d, f) in shapes.items():
    exact = crossover_batch(d, f, h100.ridge())
    enough = f"B ≥ {math.ceil(exact)}" if exact < math.inf else "no batch is enough"
    print(f"{name:20} {d} × {f}: {enough}")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Exercise 2.2: find the mistake
# *8 minutes · asking when a limit holds*
#
# A colleague's scheduler decides with this function whether one more row would still be free:
#
# ```python
# def compute_limited(B, D, F, ridge):
#     return B > ridge
# ```
#
# Write it so that it is right for every shape: `True` if the 16-bit matmul's intensity is at least
# the ridge, else `False`.


# %%
def compute_limited(B, D, F, ridge):
    """Whether X_BD @ W_DF reaches the ridge."""
    ### BEGIN SOLUTION
    intensity = 1 / (1 / B + 1 / D + 1 / F)
    return intensity >= ridge
    ### END SOLUTION


# %%
check("2.2", compute_limited)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Measured here
#
# **Predict.** Each batch has an intensity, and the roofline gives it a time. **Measure** the same
# product. We take the fastest of several runs: what the machine does when nothing interrupts.

# %% tags=["nbval-ignore-output"]
batches = [2**k for k in range(12 if on_gpu else 9)]
costs = [matmul(batch, D_in, F_out, width) for batch in batches]
times = [measure(nnf.linear, rows(batch), layer.weight, repeats=5) for batch in batches]

print("  B  FLOPs/byte  predicted  measured  ratio")
for batch, cost, time in zip(batches, costs, times, strict=True):
    best, bound = time.best_s * 1e3, cost.time_s(here, dtype) * 1e3
    print(f"{batch:4} {cost.intensity:9.2f} {bound:8.2f} ms {best:6.2f} ms {best / bound:6.2f}")

# %% slideshow={"slide_type": "subslide"} tags=["nbval-ignore-output"]
measured_points = [
    (f"B={batch}", cost.intensity, cost.flops / time.best_s)
    for batch, cost, time in zip(batches, costs, times, strict=True)
]
ax = roofline(here, dtype, measured_points, title="More rows, more FLOP/s, until the roof is near")
caption(ax, device=here.name, dtype=dtype, shapes=f"D={D_in}, F={F_out}; fastest of 5")
plt.show()

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Read.** The shape is the roofline's: a slope, a knee near the ridge, a roof. The points should lie
# below it, usually furthest at the knee. (One above it says that a peak was measured too low, perhaps
# while something else was running.) Two causes can be told apart.
#
# 1. At $B=1$ reading is nearly all. One over the ratio there is the share of the copy bandwidth that
#    this kernel gets out of one core (on a GPU, its launch included).
# 2. At the knee the roofline takes the *larger* of two times, as if reading and computing overlapped
#    perfectly. Try the opposite, no overlap at all: their sum. To compare only that, both columns take
#    the measured time of $B=1$, $t_1$, for reading.

# %% slideshow={"slide_type": "subslide"} tags=["nbval-ignore-output"]
t1 = times[0].best_s
print("  B  measured / max(t1, compute)  measured / (t1 + compute)")
for batch, cost, time in zip(batches, costs, times, strict=True):
    compute_s = cost.compute_s(here, dtype)
    larger, total = time.best_s / max(t1, compute_s), time.best_s / (t1 + compute_s)
    print(f"{batch:4}{larger:29.2f}{total:27.2f}")

# %% [markdown]
# A column that stays near 1 is the better account of the two, though no proof. If it is the second,
# reading and computing seem to take turns, as they tend to on a CPU core. A GPU is built to overlap the
# two, so run this there and compare. If *both* columns are well above 1, something else takes the time:
# a kernel that was not made for so many rows, or another program on this machine. Well below 1, several
# rows read faster than one did: theirs is another kernel, or $t_1$ was disturbed.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### A benchmark that lies
#
# Why the LM head, and not one of the model's smaller matrices? Because a processor's **caches** keep
# what was used last. Time one layer's MLP thirty times over, then all thirty layers in turn: the same
# FLOPs and, says the formula, the same bytes.

# %% tags=["nbval-ignore-output"]
x_BTD = torch.randn(1, 1, model.config.D, dtype=model.dtype, device=model.device)
blocks = model.blocks
same = measure(lambda: [blocks[0].mlp(x_BTD) for _ in blocks], repeats=9)
turn = measure(lambda: [block.mlp(x_BTD) for block in blocks], repeats=9)
moved = (mlp(1, 1, model.config.D, model.config.F, dtype_bytes=width) * len(blocks)).bytes
for name, time in (("one layer, again and again", same), ("all layers in turn", turn)):
    print(f"{name:28} {moved / time.best_s / 1e9:6.1f} GB/s")
print(f"{'a large copy':28} {here.bandwidth_bytes_per_s / 1e9:6.1f} GB/s")

# %% [markdown]
# Where the first number is above the second, its bytes came from a cache and it is no memory bandwidth,
# whether or not it beats the copy. A decode step visits every layer once, so the second is what
# generation gets. (On a GPU both are small: launching so many small operations takes longer than
# reading. Here we call the model's own layers, since that is what a decode step does.) **Measure with more data than the caches
# hold**, or the roofline you plot is the cache's.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Two stages of inference
#
# **Prefill** encodes the prompt: all its positions at once, as in training. **Generation** then makes
# one token at a time, each of which attends to all before it; their keys and values wait in the **KV
# cache**, an $H$-vector for every sequence, position, layer and KV head, so that nothing is encoded
# twice. (Why that matters, and what it costs, is notebook 03.)
#
# $S$ is how many positions are attended to, $T$ how many are processed now. Prefill is $T=S$,
# generation $T=1$. A Transformer has two kinds of layers, and we keep accounts for both.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## The MLP, step by step
#
# $y = \big(\mathrm{SiLU}(x W_\text{gate}) \odot x W_\text{up}\big)\, W_\text{down}$, matrix products
# only. (The lecture writes GeLU; Llama's gate is SiLU. It costs no product either way.)
#
# > **Erratum.** $x$ has shape $B \times T \times D$. It is sometimes written as
# > $B \times T \times F$ in the gate's step; the down projection is the one that reads width $F$.

# %% slideshow={"slide_type": "skip"}
x_BTD, gate_DF = torch.zeros(2, 3, 5), torch.zeros(5, 7)  # D=5, F=7
g_BTF = x_BTD @ gate_DF
assert g_BTF.shape == (2, 3, 7)
try:
    g_BTF @ gate_DF
except RuntimeError:
    print("the gate takes width D=5 and gives F=7; an input of width F=7 is refused")
else:
    raise AssertionError("a product of width 7 with a matrix of 5 rows ran")

# %%
S, T = symbols("S T")
flops = bytes_moved = 0

bytes_moved += 2 * B * T * D  # 1. read x_BTD
bytes_moved += 3 * 2 * D * F  # 2. read up_DF, gate_DF, down_FD
flops += 2 * B * T * D * F  # 3. u_BTF = x_BTD @ up_DF
bytes_moved += 2 * B * T * F  # 4. write u_BTF
flops += 2 * B * T * D * F  # 5. g_BTF = x_BTD @ gate_DF
bytes_moved += 2 * B * T * F  # 6. write g_BTF
flops += 2 * B * T * D * F  # 7. y_BTD = (SiLU(g_BTF) * u_BTF) @ down_FD
bytes_moved += 2 * B * T * D  # 8. write y_BTD

# %% slideshow={"slide_type": "subslide"}
assert flops == 6 * B * T * D * F
assert bytes_moved == 4 * B * T * D + 4 * B * T * F + 6 * D * F
intensity = (flops / bytes_moved).simplify()
limit = intensity.subs({D: c * B * T, F: c * B * T}).limit(c, sympy.oo).simplify()
assert limit == B * T
intensity, limit

# %% [markdown] slideshow={"slide_type": "fragment"}
# **An MLP does about B·T FLOPs a byte**: every row of every sequence uses the same three matrices.

# %% [markdown]
# > **Erratum.** These accounts write $u$ and $g$ but never read them back, although step 7 needs
# > both. Unfused, the bytes are $4BTD + 8BTF + 6DF$; if the gate and the up projection are fused with
# > the down projection, $u$ and $g$ stay on the chip and all terms with $BTF$ vanish.
#
# The limit is $B \cdot T$ in each case, since for small $B \cdot T$ the weights are all that counts.

# %% slideshow={"slide_type": "subslide"}
for fusion in ("unfused", "write_only", "fused"):
    cost = mlp(B, T, D, F, fusion=fusion)
    assert cost.flops == flops
    assert cost.intensity.subs({D: c * B * T, F: c * B * T}).limit(c, sympy.oo) == B * T
    print(f"{fusion:10} {cost.bytes}")
assert mlp(B, T, D, F, fusion="write_only").bytes == bytes_moved

# %% [markdown] slideshow={"slide_type": "subslide"}
# Where it does count is a large $B \cdot T$. For Llama-2-13B:

# %%
config = PUBLISHED["llama-2-13b"]
print("       B·T   unfused  write_only  fused")
for rows_now in (1, 64, 512, 4096):
    kinds = ("unfused", "write_only", "fused")
    row = [mlp(rows_now, 1, config.D, config.F, fusion=kind).intensity for kind in kinds]
    print(f"{rows_now:10}" + "".join(f"{value:10.1f}" for value in row))

# %% [markdown]
# Does the MLP know sequences from positions? No: 256 users with a token each, or one prompt of 256
# tokens, are the same 256 rows.

# %%
assert mlp(256, 1, config.D, config.F) == mlp(1, 256, config.D, config.F)
needed = next(n for n in range(1, 1000) if mlp(n, 1, config.D, config.F).bound(h100) == "compute")
print(f"compute-limited on an H100 from B·T = {needed} on")

# %% [markdown] slideshow={"slide_type": "fragment"}
# - **Prefill**: easy. A prompt or two of some hundred tokens and the MLP is compute-limited.
# - **Generation**: $T=1$, so $B$ alone has to do it: hundreds of requests *at the same time*. Having
#   that many, and the memory for their caches, is what serving is about (notebooks 03, 09, 10).

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Attention, step by step
#
# Only the two products with the cache, with the scores kept on the chip as FlashAttention does, and
# first for **multi-head attention**, where $K = N$ and $N \cdot H = D$.

# %%
flops = bytes_moved = 0

bytes_moved += 2 * B * T * D + 2 * B * S * D + 2 * B * S * D  # 1. read Q, K, V
flops += 2 * B * S * T * D  # 2. A = Q @ K.T
flops += 2 * B * S * T * D  # 3. Y = softmax(A) @ V
bytes_moved += 2 * B * T * D  # 4. write Y

# %%
assert flops == 4 * B * S * T * D
assert bytes_moved == 4 * B * S * D + 4 * B * T * D
intensity = (flops / bytes_moved).simplify()
assert intensity == S * T / (S + T)
K, G, H = symbols("K G H")
assert attention(B, S, T, K, K, H).intensity == intensity
intensity

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Prefill**, $T = S$: good, the longer the prompt the better. **Generation**, $T = 1$: bad.

# %%
prefill_intensity = intensity.subs(T, S).simplify()
generate_intensity = intensity.subs(T, 1).simplify()
assert prefill_intensity == S / 2
assert generate_intensity < 1
prefill_intensity, generate_intensity

# %% [markdown] slideshow={"slide_type": "fragment"}
# **There is no B in it.** In the MLP all sequences meet the same weights, which are read once for all.
# In attention every sequence brings its own keys and values: $B$ times the FLOPs, and $B$ times the
# bytes. Batching cannot help.

# %%
assert intensity.free_symbols == {S, T}

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Why batching helps one and not the other: measured
#
# A decode step on the model's real shapes, all layers in turn: once the MLPs, once attention over a
# cache of $S$ positions. We write attention as its two products. It is the same as the library's:


# %%
def decode_attention(q_BKGH, k_BKSH, v_BKSH):
    scores_BKGS = q_BKGH @ k_BKSH.mT / q_BKGH.shape[-1] ** 0.5
    return scores_BKGS.softmax(-1) @ v_BKSH


# %%
from lecture_util.model.attention import attend

generator = torch.Generator().manual_seed(0)
q, k, v = (torch.randn(2, n, 5, 8, generator=generator) for n in (6, 3, 3))  # N=6 over K=3
theirs_BTNH = attend(q[:, :, :1].transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
ours_BKGH = decode_attention(q[:, :, 0].unflatten(1, (3, 2)), k, v)
assert torch.allclose(ours_BKGH.flatten(1, 2), theirs_BTNH[:, 0], atol=1e-6)

# %% [markdown]
# **Predict**: bytes over bandwidth. The MLP's bytes hardly depend on $B$, attention's are
# proportional to it. Which one takes longer at $B=8$? (The MLPs are the model's own layers, with the
# library that they choose: the prediction is from bandwidth alone, so no peak enters it.)

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
from lecture_util.model.transformer import Block

context = 2048
shape, blocks = model.config, list(model.blocks)
if on_gpu:  # a shape that keeps a GPU busy
    shape = PUBLISHED["llama-2-13b"]
    with torch.device("cuda"):
        blocks = [Block(shape, 0).to(model.dtype)]
layers, users = len(blocks), [1, 2, 4, 8]

# %% tags=["nbval-ignore-output"]
attended = (context, 1, shape.N, shape.K, shape.H)
expected = {
    "MLPs": [mlp(B, 1, shape.D, shape.F, dtype_bytes=width) * layers for B in users],
    "attention": [attention(B, *attended, dtype_bytes=width) * layers for B in users],
}
for name, costs in expected.items():
    print(f"{name:9}", ", ".join(f"{k.bytes / 1e6:.0f} MB" for k in costs), "for B =", users)

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
like = {"dtype": model.dtype, "device": model.device}
k_LBKSH = torch.ones(layers, users[-1], shape.K, context, shape.H, **like)
v_LBKSH = torch.ones_like(k_LBKSH)
q_BKGH = torch.ones(users[-1], shape.K, shape.G, shape.H, **like)
x_BTD = torch.ones(users[-1], 1, shape.D, **like)


def mlps(B):
    return [block.mlp(x_BTD[:B]) for block in blocks]


def attentions(B):
    pairs = zip(k_LBKSH, v_LBKSH, strict=True)
    return [decode_attention(q_BKGH[:B], k[:B], v[:B]) for k, v in pairs]


# %% tags=["nbval-ignore-output"]
measured = {
    "MLPs": [measure(mlps, B, repeats=5).best_s for B in users],
    "attention": [measure(attentions, B, repeats=5).best_s for B in users],
}
for name, seconds in measured.items():
    print(f"{name:9} of {users[-1]} sequences: {seconds[-1] / seconds[0]:.1f}× the time of one")

# %% slideshow={"slide_type": "subslide"} tags=["hide-input", "nbval-ignore-output"]
from lecture_util.classroom.figures import CACHE, WEIGHTS

fig, ax = plt.subplots()
for name, color in (("MLPs", WEIGHTS), ("attention", CACHE)):
    bound = [1e3 * k.memory_s(here) / B for k, B in zip(expected[name], users, strict=True)]
    each = [1e3 * seconds / B for seconds, B in zip(measured[name], users, strict=True)]
    ax.plot(users, bound, "--", color=color, label=f"{name}, predicted")
    ax.plot(users, each, "-o", color=color, label=f"{name}, measured")
ax.set_xscale("log", base=2)
ax.set(xticks=users, xticklabels=users, ylim=(0, None))
ax.set(xlabel="B, sequences", ylabel="time per sequence, ms")
ax.set_title("Batching shares the MLPs' weights, not the caches")
ax.legend()
caption(ax, device=here.name, dtype=dtype, shapes=f"S={context}, {layers} layers; fastest of 5")
plt.show()

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Read.** The MLPs' time is spread over all sequences, so each one's share falls. Attention's share
# stays: twice the sequences, twice the time. Where the two lines cross, caches cost as much as
# weights; beyond, the batch is no longer the lever, the cache is (notebook 04).

# %% [markdown] slideshow={"slide_type": "notes"}
# The point to make at the board: both lines come from the same kind of kernel, a batched matmul. What
# differs is who owns the bytes. Ask what a shared system prompt would change: then the caches share
# bytes too, and attention can be batched over the shared part (notebook 10).

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Can attention's intensity be improved?
#
# > **Erratum.** "Attention's intensity in generation is at most 1, and that can't be improved": so
# > it is for multi-head attention only.
#
# In **grouped-query attention** $G$ query heads share one KV head, so each key that was read answers
# $G$ queries. With $N = K \cdot G$ heads:

# %%
grouped = attention(B, S, T, K * G, K, H)
assert grouped.intensity == S * (G * T) / (S + G * T)
in_generation = grouped.intensity.subs(T, 1)
assert sympy.limit(in_generation, S, sympy.oo) == G
in_generation

# %% [markdown]
# It is the old formula with $G \cdot T$ in place of $T$: to a cached key it is all the same whether
# its queries come from more positions or from more heads. For long contexts the intensity tends to
# $G$; at $S=4096$ it is nearly there:

# %% slideshow={"slide_type": "subslide"}
for name in ("llama-2-13b", "smollm2-135m", "llama-3-8b", "llama-3-70b"):
    heads = PUBLISHED[name]
    at_4096 = attention(1, 4096, 1, heads.N, heads.K, heads.H).intensity
    print(f"{name:13} N={heads.N:2} K={heads.K:2} G={heads.G}: {at_4096:.2f} FLOPs per byte")

# %% [markdown]
# Does a machine notice? The same number of query heads over ever fewer KV heads: equal FLOPs, and
# the bytes shrink with $K$.

# %% slideshow={"slide_type": "subslide"} tags=["nbval-ignore-output"]
for kv_heads in sorted({shape.N, 8 if on_gpu else shape.K, 1}, reverse=True):
    kv = [torch.ones(8, kv_heads, context, shape.H, **like) for _ in range(8)]  # 4 layers
    q_grouped = torch.ones(8, kv_heads, shape.N // kv_heads, shape.H, **like)
    time = measure(
        lambda q=q_grouped, kv=kv: [decode_attention(q, *kv[i : i + 2]) for i in (0, 2, 4, 6)],
        repeats=5,
    )
    cost = attention(8, context, 1, shape.N, kv_heads, shape.H, dtype_bytes=width) * 4
    print(f"K={kv_heads:2}: {cost.bytes / 1e6:5.0f} MB, {time.best_s * 1e3:6.2f} ms, ", end="")
    print(f"{cost.flops / time.best_s / 1e9:6.1f} GFLOP/s at {cost.intensity:.2f} FLOPs per byte")

# %% [markdown]
# **Read.** The FLOPs are equal; the time follows the bytes. Not exactly: the softmax and the other work
# on the scores go with the query heads, which stayed, and with $G=1$ the products are matrix-vector
# products, which have kernels of their own.
#
# **Multi-head latent attention** goes further. Written so that queries meet the latent itself
# ("absorbed"), DeepSeek-V2's 128 heads share *one* vector of 512 + 64 numbers a position, which
# serves as key (all 576) and as value (512 of them):

# %% slideshow={"slide_type": "subslide"}
heads, latent, rope_part = 128, 512, 64  # DeepSeek-V2, arXiv:2405.04434
flops_per_key = 2 * heads * (latent + rope_part) + 2 * heads * latent
bytes_per_key = 2 * (latent + rope_part)
assert round(flops_per_key / bytes_per_key) == 242
print(f"{flops_per_key / bytes_per_key:.1f} FLOPs per byte, the H100's ridge is {h100.ridge():.0f}")

# %% [markdown]
# So "impossible to improve" became a design goal. What stays true: **batching** does not improve it.

# %% [markdown]
# ### Exercise 2.3: how many queries must share a KV head
# *10 minutes · solving for the ridge, and seeing when it is out of reach*
#
# How large must $G$ be for attention in generation ($T=1$) to reach a ridge? The intensity is
# $S G / (S + G)$. Return the smallest whole number $G$, or `math.inf` if none is enough.


# %%
def queries_needed(S, ridge):
    """The smallest G at which decode attention over S positions is compute-limited."""
    ### BEGIN SOLUTION
    if ridge >= S:  # the intensity stays below S, whatever G
        return math.inf
    return math.ceil(ridge * S / (S - ridge))
    ### END SOLUTION


# %%
check("2.3", queries_needed)

# %% [markdown]
# Since $G \cdot T$ stands where $G$ does, the same answer says how many query heads *times tokens
# checked at once* are needed when drafted tokens are verified (notebook 08).

# %% [markdown] slideshow={"slide_type": "slide"}
# ## The fine print of prefill
#
# > **Erratum.** "Prefill attention does S/2 FLOPs a byte, and a pass is O(T²)." Three footnotes.
#
# **A causal mask halves the FLOPs.** No query needs a key ahead of it, and a good kernel skips those
# scores. Of $S^2$, $S(S+1)/2$ are left; the bytes stay.

# %%
causal = attention(B, S, S, K, K, H, causal=True)
full = attention(B, S, S, K, K, H)
assert sympy.limit(causal.flops / full.flops, S, sympy.oo) == sympy.Rational(1, 2)
assert sympy.simplify(causal.intensity - (S + 1) / 4) == 0
causal.intensity

# %% [markdown]
# So on an H100, multi-head attention needs a prompt of about four ridges to be compute-limited:

# %%
assert attention(1, 1181, 1181, 40, 40, 128, causal=True).bound(h100) == "compute"
assert attention(1, 1180, 1180, 40, 40, 128, causal=True).bound(h100) == "memory"
print(f"S ≥ {math.ceil(4 * h100.ridge() - 1)} with the mask, {math.ceil(2 * h100.ridge())} without")

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Tiles read K and V again.** On the chip there is room for a tile of $Q$, not for all of it, and
# each tile of queries streams through all keys and values. If every such pass went to memory, the
# intensity would be bounded by the tile, however long the prompt:

# %%
tile = symbols("tile")[0]
flops = 4 * S * S * H
bytes_moved = 2 * S * H + (S / tile) * (4 * S * H) + 2 * S * H  # Q; K and V for each tile; output
assert sympy.limit(flops / bytes_moved, S, sympy.oo) == tile
sympy.simplify(flops / bytes_moved)

# %% [markdown]
# That counts every re-read as memory traffic. Much of it is served by the GPU's L2 cache, so the
# truth lies between this and $S/2$. It is not measured here.

# %% [markdown]
# **The linear layers come first.** Attention's share of a pass grows with $T$; that of the linear
# layers does not, and it starts far ahead. In Llama-2-13B, per token and layer:

# %% slideshow={"slide_type": "subslide"}
linear = 2 * (2 * config.D * config.N * config.H + 2 * config.D * config.K * config.H)
linear += 2 * 3 * config.D * config.F
per_key = 4 * config.N * config.H
assert linear // per_key == 30_976
print(f"linear layers {linear / 1e6:.0f} MFLOP, attention {per_key / 1e6:.4f} MFLOP for each key")
print(f"equal for a token that sees {linear // per_key:,} keys, ", end="")
print(f"or over a causal prompt of {2 * linear // per_key - 1:,} tokens")

# %% [markdown]
# For prompts far shorter than that, a pass over $T$ tokens is O(T), and the $T^2$ is a footnote.

# %% [markdown]
# ### Exercise 2.4: the cost of grouped, causal attention
# *12 minutes · reading a cost off shapes and a mask*
#
# $T$ new positions, the last of $S$, attend with $N$ query heads over $K$ KV heads of width $H$, in
# 16 bits. Each query sees itself and all positions before it; no other score is computed. Count the
# matrix products only (no softmax). Return `(flops, bytes)`: K and V read once, Q read, the output
# written.


# %% slideshow={"slide_type": "subslide"}
def gqa_cost(B, S, T, N, K, H):
    """FLOPs and bytes of causal attention, as a tuple."""
    ### BEGIN SOLUTION
    pairs = T * (S - T) + T * (T + 1) // 2  # each new query sees the S-T before, and its triangle
    flops = 4 * B * N * H * pairs
    bytes_moved = 2 * (2 * B * S * K * H + 2 * B * T * N * H)
    return flops, bytes_moved
    ### END SOLUTION


# %%
check("2.4", gqa_cost)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## The two stages in one picture
#
# Llama-2-13B on an H100, unfused MLP, causal mask, $S = 2048$.


# %%
def layers_at(batch, new, seen=2048):
    """Costs of one layer's MLP and attention."""
    scores = attention(batch, seen, new, config.N, config.K, config.H, causal=True)
    return mlp(batch, new, config.D, config.F), scores


# %% slideshow={"slide_type": "subslide"}
costs = dict(zip(("MLP, prefill", "attention, prefill"), layers_at(1, 2048), strict=True))
costs |= dict(zip(("MLP, decode, B=1", "attention, decode, any B"), layers_at(1, 1), strict=True))
costs["MLP, decode, B=64"] = layers_at(64, 1)[0]
points = [(name, cost.intensity, cost.flops / cost.time_s(h100)) for name, cost in costs.items()]

ax = roofline(h100, "bf16", title="Prefill sits on the roof, generation on the slope")
ax.plot(*zip(*[p[1:] for p in points], strict=True), "s", color=PREDICTED, ms=9)
label_points(ax, points)
caption(ax, device="H100 SXM, predicted", dtype="bf16", shapes="Llama-2-13B, S=2048")
plt.show()

# %% slideshow={"slide_type": "subslide"}
from IPython.display import Markdown

lines = ["| | B | T | MLP | attention |", "|---|---|---|---|---|"]
for stage, batch, new, seen in [
    ("prefill, short", 1, 128, 128), ("prefill", 1, 2048, 2048), ("generation", 1, 1, 2048),
    ("generation", 64, 1, 2048), ("generation", 512, 1, 2048),
]:  # fmt: skip
    cells = [f"{k.intensity:,.1f}, {k.bound(h100)}" for k in layers_at(batch, new, seen)]
    lines.append(f"| {stage} | {batch} | {new} | {' | '.join(cells)} |")
Markdown("\n".join(lines))

# %% [markdown] slideshow={"slide_type": "subslide"}
# The usual summary is "prefill is compute-limited, generation is memory-limited". As a rule of thumb
# it is good. In full:
#
# - **Prefill** is compute-limited once the batch has 326 tokens (MLP) and its prompts some 1,200
#   (causal multi-head attention) on an H100. A short prompt for one user is memory-limited too.
# - **Generation** is memory-limited for batches below 326. In the **MLP** intensity is the batch,
#   so concurrent requests help. In **attention** it is $S G/(S+G)$, at most $G$: no number of requests
#   helps, but sharing keys among queries does.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Exercise 2.5: memory or compute?
# *8 minutes · sorting workloads without a calculator*
#
# Llama-2-13B in bf16 on an H100, ridge 295. What limits each layer? Decide first, then check.
#
# | | layer | B | S | T | |
# |---|---|---|---|---|---|
# | a | MLP | 1 | 2048 | 2048 | one long prompt |
# | b | MLP | 1 | 64 | 64 | one short prompt |
# | c | MLP | 64 | 2048 | 1 | 64 users generate |
# | d | MLP | 512 | 2048 | 1 | 512 users generate |
# | e | MLP | 32 | 2048 | 16 | 32 users, 16 drafted tokens each checked at once |
# | f | attention | 1 | 2048 | 2048 | one long prompt |
# | g | attention | 1 | 256 | 256 | a shorter prompt |
# | h | attention | 512 | 2048 | 1 | 512 users generate |


# %%
def limits():
    """A dict from "a" to "h", each "memory" or "compute"."""
    ### BEGIN SOLUTION
    compute = "adef"
    return {name: "compute" if name in compute else "memory" for name in "abcdefgh"}
    ### END SOLUTION


# %%
check("2.5", limits)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Explore
#
# Move $B$, then $T$, and watch the MLP climb. Switch to attention: now $B$ does nothing; $T$ and $G$
# do. Choose another accelerator and see the ridge move under a point that stays.

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
from lecture_util.classroom.widgets import roofline_explorer

roofline_explorer()

# %% [markdown] slideshow={"slide_type": "subslide"}
# The same on this machine, with the points that we measured. *Measure here* adds one of your own.

# %% tags=["nbval-ignore-output", "hide-input"]
roofline_explorer(model="smollm2-135m", measured=measured_points)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## What to remember
#
# - Intensity is FLOPs per byte, the ridge is FLOP/s per byte/s; below the ridge, memory sets the pace.
# - A matmul's intensity is $1/(1/B + 1/D + 1/F)$: about $B$, always less, and in small models much less.
# - An MLP's is about $B \cdot T$: prompts and concurrent requests both raise it.
# - Attention's is $S G T/(S + G T)$: no $B$ in it. About $S/4$ in causal prefill, at most $G$ in generation.
# - A roofline is a bound. Measure beyond the caches, take the ratio, and name what the gap is made of.

# %% tags=["nbval-ignore-output"]
status("02")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ## Papers and sources
#
# - The lecture: Stanford CS336, *Language Modeling from Scratch*, spring 2025, lecture 10, *Inference*:
#   the review of arithmetic intensity and the intensity of inference.
# - Julien Simon, *Deep Dive: Optimizing LLM Inference*: prefill and generation, usage of the accelerator.
# - Williams, Waterman & Patterson 2009, *Roofline: an insightful visual performance model*, CACM 52(4).
# - Austin et al. 2025, *How to Scale Your Model*, jax-ml.github.io/scaling-book: chapters on rooflines,
#   Transformers and inference.
# - Dao et al. 2022, *FlashAttention*, arXiv:2205.14135. Ainslie et al. 2023, *GQA*, arXiv:2305.13245.
#   DeepSeek-AI 2024, *DeepSeek-V2*, arXiv:2405.04434.
# - Peaks: pytorch/torchtitan, Lightning and stas00/ml-engineering, as named in
#   `lecture_util/roofline/hardware.py`; shapes: Lightning-AI/litgpt `litgpt/config.py`.
#
# Next: notebook 03 turns these intensities into milliseconds and tokens per second.
