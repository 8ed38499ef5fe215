# %% [markdown] slideshow={"slide_type": "slide"}
# # 05 · Beyond attention
#
# Notebook 04 made the cache smaller. It still grows: every token that is read leaves something behind,
# and every later token reads it again. What if the memory did not grow at all? Then a model would
# have to decide what to keep. And what if it did not write one token after the other? Two ideas, and
# both have a price that can be measured.
#
# You will
#
# 1. run one state space in two ways, step by step and all at once;
# 2. let the input choose what is remembered: Mamba;
# 3. take the softmax out of attention, and find that it has become a state;
# 4. measure decode steps whose time does not depend on the context;
# 5. train four small models and see what each forgets;
# 6. uncover text in any order with a diffusion model, and count what that costs.

# %% slideshow={"slide_type": "subslide"}
import math

import matplotlib.pyplot as plt
import torch

from lecture_util.classroom import check, explore, hint, predict, status, step, use_style
from lecture_util.model.config import PUBLISHED, Config
from lecture_util.roofline import ACCELERATORS, format_bytes, this_machine

use_style()
llama, h100 = PUBLISHED["llama-3-8b"], ACCELERATORS["h100"]

# %% tags=["nbval-ignore-output"]
machine = this_machine()
bandwidth = machine.bandwidth_bytes_per_s
print(f"{machine.name}: {bandwidth / 1e9:.1f} GB/s")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 1. What if the memory did not grow?
#
# Llama-3-8B is a thrifty model: 8 KV heads for 32 query heads. Give it a book of a million tokens
# (2^20; suppose its positions reached so far), and ask for one more.

# %% tags=["nbval-ignore-output"]
book = predict(
    "One token after a million, B=1: how many GB of keys and values are read?", unit="GB"
)

# %%
from lecture_util.alternatives.layouts import HYBRIDS, memory_bytes

million = 2**20
cache = memory_bytes(HYBRIDS["attention"], million)
print("keys and values, 32 layers", format_bytes(cache.kv))
print(f"reading them on an H100    {1e3 * cache.kv / h100.bandwidth_bytes_per_s:.0f} ms a token")
print("and an H100 holds         ", format_bytes(h100.memory_bytes))

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
book.reveal(predicted=cache.kv / 1e9)

# %% [markdown]
# That is *one* sequence, and it does not fit. Now a layer of another kind, from Jamba: Mamba, with
# 8,192 channels of 16 numbers in fp32, and the last 3 inputs of a small convolution.

# %%
mamba = memory_bytes(HYBRIDS["mamba"], million)
assert mamba.total == 32 * (4 * 8192 * 16 + 2 * 3 * 8192)
assert mamba.total == memory_bytes(HYBRIDS["mamba"], 10).total
print("32 Mamba layers, after 10 tokens or a million:", format_bytes(mamba.total))
print(f"{cache.total / mamba.total:,.0f} times less")

# %% [markdown]
# Such a step reads its state *and* writes a new one, so its traffic is twice that; still nothing beside
# the weights. But be suspicious: can a memory of one size be as good as one that keeps everything? Keep
# the question; section 7 trains models to answer it.

# %% [markdown] slideshow={"slide_type": "notes"}
# *For the instructor.* Before anything else, ask: "You may keep 18 MB of a book. What do you keep?"
# Answers fall into the four kinds of this notebook: the last page (a window), a summary (a state), what
# seemed important when you read it (selection), or nothing, and you look at the book again
# (attention). Come back to these answers in section 5.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 2. A state space: one system, two ways to run it
#
# The oldest memory of fixed size comes from control theory: a state $x$ that decays and takes in the
# input $u$. In steps of one token, and for one number of state,
#
# $$x_t = \bar a\, x_{t-1} + \bar b\, u_t, \qquad y_t = c\, x_t .$$
#
# Unroll it, and the state disappears:
#
# $$y_t = c\bar b\,u_t + c\bar a\bar b\,u_{t-1} + c\bar a^2\bar b\,u_{t-2} + \dots
# = \sum_s K_{t-s}\, u_s, \qquad K_i = c\,\bar a^i\,\bar b .$$
#
# The first form generates: one step a token, constant memory. The second is a *convolution* with a
# kernel known in advance, so all tokens are computed at once: that is how one trains.

# %% slideshow={"slide_type": "subslide"}
T = 6
u_T = torch.tensor([1.0, 0, 0, 2, 0, -1])
a_Z, b_Z, c_Z = torch.tensor([0.9, -0.5]), torch.tensor([1.0, 1.0]), torch.tensor([2.0, 1.0])

x_Z, steps = torch.zeros(2), []
for u in u_T:
    x_Z = a_Z * x_Z + b_Z * u  # two numbers, whatever came before
    steps.append(c_Z @ x_Z)

kernel_T = torch.stack([c_Z @ (a_Z**i * b_Z) for i in range(T)])
at_once = [sum(kernel_T[t - s] * u_T[s] for s in range(t + 1)) for t in range(T)]
assert torch.allclose(torch.stack(steps), torch.stack(at_once))
print("kernel", [round(k.item(), 3) for k in kernel_T])
print("output", [round(y.item(), 3) for y in steps])

# %% [markdown] slideshow={"slide_type": "subslide"}
# ![Left: the continuous system x' = -Ax + Bu, y = Cx, with HiPPO's A at Z=3, rows 1 0 0, 1 2 0, 1 3 3. A step of size delta turns it into x_t = Abar x_(t-1) + Bbar u_t. From there two branches: a recurrence that carries one state from token to token, to generate; and a convolution with a kernel, drawn as bars, to train. Both give the same y.](../images/s4-two-forms.svg)

# %% [markdown]
# **S4** (Gu et al. 2021) starts from a continuous system $x' = Ax + Bu$ and a step size $\Delta$, as if
# the input held still for a time $\Delta$ (*zero-order hold*): $\bar A = e^{\Delta A}$ and
# $\bar B = A^{-1}(e^{\Delta A} - 1)B$. Later work found that a *diagonal* complex $A$ does as well
# (S4D, Gu et al. 2022), and then each state is a number for itself, as above.

# %% slideshow={"slide_type": "subslide"}
from lecture_util.alternatives.s4 import S4D, hippo_legs

torch.manual_seed(0)
system = S4D(D=3, Z=4).double()  # 3 channels, 4 complex states each
u_BTD = torch.randn(2, 37, 3, dtype=torch.float64)
with torch.no_grad():
    in_steps, state_BDZ = system.recurrence(u_BTD)
    convolved, same_BDZ = system.convolution(u_BTD)  # by FFT
    start, half = system.convolution(u_BTD[:, :20])
    rest, _ = system.recurrence(u_BTD[:, 20:], half)  # prefill, then generate
assert torch.allclose(in_steps, convolved) and torch.allclose(state_BDZ, same_BDZ)
assert torch.allclose(in_steps, torch.cat((start, rest), dim=1))
print("state", tuple(state_BDZ.shape), "of", state_BDZ.dtype, "after 37 tokens")

# %% [markdown]
# > **Erratum.** HiPPO's matrix is often shown as $[[1,0,0],[1,2,0],[1,3,3]]$ beside $x' = Ax + Bu$. With
# > these signs the state would explode: the eigenvalues are 1, 2, 3. The system is $x' = -Ax + Bu$.

# %% slideshow={"slide_type": "subslide"}
A_ZZ, _ = hippo_legs(3, normalised=False)
print(A_ZZ.int().tolist())
as_shown, as_meant = torch.matrix_exp(10 * A_ZZ), torch.matrix_exp(-10 * A_ZZ)
assert as_shown.abs().max() > 1e12 and as_meant.abs().max() < 1e-3
print("after ten units of time, as shown: beyond 10^12 of what it was; with the minus: below 10^-3")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Exercise 5.1: discretise, then run
# *10 minutes · from a continuous system to a recurrence*
#
# One channel with `Z` real states: $x_z' = a_z x_z + b_z u$, $y = \sum_z c_z x_z$, all $a_z < 0$.
# Discretise with step `delta` by zero-order hold, start from $x = 0$, and return `y_T` for the inputs
# `u_T`. The input of a step counts in that step's output.


# %% slideshow={"slide_type": "skip"}
def run_ssm(a_Z, b_Z, c_Z, delta, u_T):
    """Outputs y_T of a diagonal state space, step by step."""
    ### BEGIN SOLUTION
    decay_Z = torch.exp(delta * a_Z)
    taken_Z = (decay_Z - 1) / a_Z * b_Z
    x_Z, y = torch.zeros_like(a_Z), []
    for u in u_T:
        x_Z = decay_Z * x_Z + taken_Z * u
        y.append((c_Z * x_Z).sum())
    return torch.stack(y)
    ### END SOLUTION


# %% slideshow={"slide_type": "skip"}
check("5.1", run_ssm)

# %% [markdown]
# Stuck? Each call opens one more hint.

# %% slideshow={"slide_type": "skip"}
hint("5.1")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 3. Selection: the input chooses
#
# In S4 every token decays the memory by the same $\bar A$ and enters it by the same $\bar B$: a comma as
# much as a name. **Mamba** (Gu & Dao 2023) computes $\Delta_t$, $B_t$ and $C_t$ from the token itself.
# With $\Delta$ it decides how much time passes:
#
# - $\Delta_t \to 0$: $e^{\Delta A} \to 1$ and nothing enters. The token is passed by.
# - $\Delta_t$ large: $e^{\Delta A} \to 0$. What was is forgotten, and the token takes its place.
#
# A single number of memory, $A = -1$, $B = 1$. A 7 comes, five fillers, then a 3 and a filler:

# %% slideshow={"slide_type": "subslide"}
from lecture_util.alternatives.selective import selective_scan

u_BTE = torch.tensor([7.0, 1, 1, 1, 1, 1, 3, 1])[None, :, None]
one = torch.ones(1, 8, 1)


def kept(delta_BTE):
    """What the one number of state holds after each token."""
    y_BTE, _ = selective_scan(u_BTE, delta_BTE, -torch.ones(1, 1), one, one, torch.zeros(1))
    return [round(y, 1) for y in y_BTE.flatten().tolist()]


print("the same step always ", kept(torch.full((1, 8, 1), 0.5)))
chosen = torch.tensor([1.0, 0, 0, 0, 0, 0, 6, 0])[None, :, None]
print("fillers passed by    ", kept(chosen))
assert kept(chosen)[:6] == [7.0] * 6

# %% [markdown] slideshow={"slide_type": "subslide"}
# The fixed step mixes the 7 away within a few tokens. The chosen one holds it as long as it takes, and
# lets it go when the next number comes (the 3 enters as $\Delta B u = 18$: large steps also shout).
#
# **The price.** The weight of token $s$ in output $t$ is now $C_t\, e^{(\Delta_{s+1} + \dots + \Delta_t)A}
# \Delta_s B_s$: it depends on the tokens between, not on the distance $t - s$ alone. No kernel can be
# known in advance. A convolution is linear in its input; a selective scan is not:


# %%
def selected(u_BTE):
    """Step size, B and C from the input itself, as Mamba has them."""
    delta_BTE = torch.nn.functional.softplus(u_BTE)
    return selective_scan(u_BTE, delta_BTE, -torch.ones(1, 1), u_BTE, u_BTE, torch.zeros(1))[0]


with torch.no_grad():
    doubled, twice = system.convolution(2 * u_BTD)[0], 2 * system.convolution(u_BTD)[0]
print("S4:        twice the input is twice the output:", torch.allclose(doubled, twice))
print("selective: twice the input is twice the output:",
      torch.allclose(selected(2 * u_BTE), 2 * selected(u_BTE)))  # fmt: skip

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### A step, line by line
#
# $E$ channels of $Z$ states each. Note the two rules of discretisation: $\bar A = e^{\Delta A}$ exactly,
# but $\bar B = \Delta B$, one Euler step, where zero-order hold would have $(e^{\Delta A} - 1)/A \cdot B$.
# Mamba takes the simpler; the two agree to first order in $\Delta$.

# %% tags=["nbval-ignore-output", "hide-input"] slideshow={"slide_type": "subslide"}
from lecture_util.alternatives.selective import selective_step

torch.manual_seed(0)
u_BE, delta_BE = torch.randn(1, 2), torch.tensor([[0.1, 2.0]])
A_EZ, B_BZ, C_BZ = -torch.tensor([[1.0, 2, 3], [1, 2, 3]]), torch.ones(1, 3), torch.ones(1, 3)
step(selective_step, u_BE, delta_BE, A_EZ, B_BZ, C_BZ, torch.ones(2), torch.ones(1, 2, 3))

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Parallel again
#
# One step is $h \mapsto a h + b$. Two in a row are again of this form, so the order of gathering is free:
# the scan is *associative*. Chunks can be walked at the same time and tied together afterwards.
#
# $$a_2(a_1 h + b_1) + b_2 = (a_2 a_1)\, h + (a_2 b_1 + b_2)$$

# %% slideshow={"slide_type": "subslide"}
from lecture_util.alternatives.selective import chunked_selective_scan

B, T, E, Z = 2, 23, 5, 3
u, B_BTZ, C_BTZ = (torch.randn(B, T, n, dtype=torch.float64) for n in (E, Z, Z))
delta = torch.rand(B, T, E, dtype=torch.float64)
A_EZ, D_E = -torch.rand(E, Z, dtype=torch.float64), torch.randn(E, dtype=torch.float64)
y_BTE, last_BEZ = selective_scan(u, delta, A_EZ, B_BTZ, C_BTZ, D_E)

state_BEZ, y = torch.zeros(B, E, Z, dtype=torch.float64), []
for t in range(T):
    now = (x[:, t] for x in (B_BTZ, C_BTZ))
    y_BE, state_BEZ = selective_step(u[:, t], delta[:, t], A_EZ, *now, D_E, state_BEZ)
    y.append(y_BE)
for chunk in (1, 4, 23, 50):
    chunks = chunked_selective_scan(u, delta, A_EZ, B_BTZ, C_BTZ, D_E, chunk=chunk)
    assert torch.allclose(chunks[0], y_BTE) and torch.allclose(chunks[1], last_BEZ)
assert torch.allclose(torch.stack(y, 1), y_BTE) and torch.allclose(state_BEZ, last_BEZ)
print("steps, scan and chunks agree in fp64")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### A Mamba layer
#
# Around the scan: a projection to $E = 2D$ channels and as many gates; a causal convolution over the
# last 4 inputs, so that a token sees its neighbours; then $\Delta = \text{softplus}(\dots + \text{bias})$,
# $B$ and $C$ from what comes out; and the way back. It replaces attention *and* MLP.
#
# A layer thus carries **two** states: $E \times Z$ numbers of the scan, in fp32, since what a step rounds
# away never comes back; and the last 3 inputs of the convolution *before* it, zeros at the start. If
# both are right, it can't matter where a text is cut:

# %% slideshow={"slide_type": "subslide"}
from lecture_util.alternatives.mamba import MambaBlock

small = Config(D=32, F=64, K=2, G=1, H=16, L=2, V=64)
torch.manual_seed(0)
layer = MambaBlock(small, layer=0).double().requires_grad_(False)
x_BTD = torch.randn(2, 10, 32, dtype=torch.float64)
whole_BTD, _ = layer.mix(x_BTD)
for cuts in ([10], [1] * 10, [2, 1, 7], [9, 1]):
    state, parts = None, []
    for chunk_BTD in x_BTD.split(cuts, dim=1):
        out_BTD, state = layer.mix(chunk_BTD, state)
        parts.append(out_BTD)
    assert torch.allclose(torch.cat(parts, 1), whole_BTD)
    print("same outputs for the cuts", cuts, "states", [tuple(part.shape) for part in state])

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Padding
#
# A KV cache likes padding on the right: truncate, and it is gone. A state cannot give back what it has
# taken in. So prompts of unequal length are padded on the *left*, where the state is still empty. And
# even zeros do harm: the convolution has a bias, which makes something of nothing. They must be masked
# before the convolution **and** before the scan:

# %%
layer.conv_bias_E.fill_(0.3)  # a trained layer has one
alone_BTD, _ = layer.mix(x_BTD[:, 3:])
padded_BTD = torch.cat((torch.zeros_like(x_BTD[:, :3]), x_BTD[:, 3:]), dim=1)
mask_BT = (torch.arange(10) >= 3).expand(2, -1)
masked_BTD, _ = layer.mix(padded_BTD, mask_BT=mask_BT)
careless_BTD, _ = layer.mix(padded_BTD)
assert torch.allclose(masked_BTD[:, 3:], alone_BTD)
assert not torch.allclose(careless_BTD[:, 3:], alone_BTD)
print("masked: as if alone.  Zeros without a mask: not so")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Exercise 5.2: three mistakes in a Mamba step
# *12 minutes · finding the mistake*
#
# This step runs, and its output looks reasonable. It has three mistakes, each of which has stood in
# somebody's code:
#
# ```python
# def broken_step(u_BE, dt_BE, dt_bias_E, A_log_EZ, B_BZ, C_BZ, state_BEZ):
#     dt_BE = dt_BE + dt_bias_E
#     delta_BE = torch.nn.functional.softplus(dt_BE + dt_bias_E)
#     decay_BEZ = torch.exp(delta_BE[..., None] * A_log_EZ.exp())
#     state_BEZ *= decay_BEZ
#     state_BEZ += (delta_BE * u_BE)[..., None] * B_BZ[:, None]
#     return (state_BEZ * C_BZ[:, None]).sum(-1), state_BEZ
# ```
#
# `A_log_EZ` holds the logarithm of $-A$. Whoever passed `state_BEZ` may want to continue from it a second
# time. Repair all three, and return `y_BE` and the new state.


# %% slideshow={"slide_type": "skip"}
def mamba_step(u_BE, dt_BE, dt_bias_E, A_log_EZ, B_BZ, C_BZ, state_BEZ):
    """One token: (y_BE, the new state_BEZ)."""
    ### BEGIN SOLUTION
    delta_BE = torch.nn.functional.softplus(dt_BE + dt_bias_E)
    decay_BEZ = torch.exp(-delta_BE[..., None] * A_log_EZ.exp())
    state_BEZ = decay_BEZ * state_BEZ + (delta_BE * u_BE)[..., None] * B_BZ[:, None]
    return (state_BEZ * C_BZ[:, None]).sum(-1), state_BEZ
    ### END SOLUTION


# %% slideshow={"slide_type": "skip"}
check("5.2", mamba_step)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 4. Linear attention: a softmax less
#
# The other road starts from attention itself. Token $t$ weighs token $s$ by $e^{q_t\cdot k_s}$. To do so
# it needs every $k_s$, because the exponential ties $q$ and $k$ together. Put something there that
# factors, $\phi(q_t)\cdot\phi(k_s)$, and the query moves out of the sum (Katharopoulos et al. 2020):
#
# $$\text{out}_t = \frac{\sum_{s\le t} \big(\phi(q_t)\cdot\phi(k_s)\big)\, v_s}{\sum_{s\le t}\phi(q_t)\cdot\phi(k_s)}
# = \frac{\phi(q_t) \cdot \overbrace{\textstyle\sum_{s\le t} \phi(k_s)\, v_s^\top}^{\text{state, } M\times H}}
# {\phi(q_t)\cdot \underbrace{\textstyle\sum_{s\le t}\phi(k_s)}_{\text{normaliser, } M}}$$
#
# Two sums that grow in value, never in size. It is $(QK^\top)V = Q(K^\top V)$, and a causal mask.

# %% slideshow={"slide_type": "subslide"}
from lecture_util.alternatives.linear_attention import elu_features

T, H = 7, 4
torch.manual_seed(1)
q_TM, k_TM = elu_features(torch.randn(2, T, 3))
v_TH = torch.randn(T, H)

weights_TS = (q_TM @ k_TM.T).tril()  # every query against every key
quadratic_TH = weights_TS @ v_TH / weights_TS.sum(-1, keepdim=True)

kv_MH, sum_M, rows = torch.zeros(3, H), torch.zeros(3), []
for q_M, k_M, v_H in zip(q_TM, k_TM, v_TH, strict=True):
    kv_MH, sum_M = kv_MH + torch.outer(k_M, v_H), sum_M + k_M
    rows.append(q_M @ kv_MH / (q_M @ sum_M))
assert torch.allclose(torch.stack(rows), quadratic_TH, atol=1e-6)
print("state", tuple(kv_MH.shape), "and normaliser", tuple(sum_M.shape), "after", T, "tokens")

# %% [markdown]
# Three forms of one function: *parallel* (the definition, quadratic in $T$), *recurrent* (decoding), and
# *chunked* (the definition within a chunk, the state for all before: training and prefill).

# %% slideshow={"slide_type": "subslide"}
from lecture_util.alternatives.linear_attention import chunked, parallel, recurrent

q, k = (elu_features(torch.randn(2, 29, 3, 5, dtype=torch.float64)) for _ in range(2))
v = torch.randn(2, 29, 3, 4, dtype=torch.float64)  # B=2, T=29, N=3 heads
definition = parallel(q, k, v)
token_by_token, (kv_BNMH, sum_BNM) = recurrent(q, k, v)
assert torch.allclose(token_by_token, definition)
for size in (1, 8, 29, 64):
    out, state = chunked(q, k, v, chunk=size)
    assert torch.allclose(out, definition) and torch.allclose(state[0], kv_BNMH)
print("parallel, recurrent and chunked agree in fp64")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Which features?
#
# The exponential has no finite $\phi$. But its Taylor series has, up to any order: with $1$, the entries
# of $x$ and all their products, $\phi(q)\cdot\phi(k) = 1 + s + s^2/2$, where $s = q\cdot k/\sqrt d$ is
# attention's own score. That is the choice of **BASED** (Arora et al. 2024):

# %%
from lecture_util.alternatives.linear_attention import taylor_features

x = torch.tensor([1.0, 0, 0, 0])
print("score s    exp(s)   taylor")
for s in (-3, -1, 0, 1, 3):
    q, k = 2 * s * x, x  # q·k / sqrt(4) = s
    taylor = float(taylor_features(q) @ taylor_features(k))
    assert abs(taylor - (1 + s + s * s / 2)) < 1e-5
    print(f"{s:>7} {math.exp(s):>9.2f} {taylor:>8.2f}")
print("width 16:", taylor_features(torch.zeros(16)).numel(), "features")

# %% [markdown] slideshow={"slide_type": "subslide"}
# Three things to see. Near $s = 0$ it is the exponential. At $s=3$ it is not half of it: a linear state can't
# point as sharply as a softmax can. At $s = -3$ it *rises* again: a key that points away is taken for
# a relative. What it never does is vanish: $1 + s + s^2/2 = \tfrac12\big(1 + (1+s)^2\big) \ge \tfrac12$,
# so the normaliser is safe to divide by.
#
# And it has a size. For a query and key of 16 entries $1 + 16 + 256 = 273$ features, of which the state
# holds $H$ numbers each, in fp32:

# %%
state_bytes = 4 * 273 * (64 + 1)  # one head, H = 64, with its normaliser
token_bytes = 2 * 2 * 64  # one token's key and value, in 16 bits
print(
    f"state {state_bytes:,} bytes, as many as {state_bytes / token_bytes:.0f} tokens of a KV cache"
)

# %% [markdown] slideshow={"slide_type": "subslide"}
# What is it bad at? At the near: "the token right before this one" wants a sharp comparison. That is
# what a window does exactly, and cheaply. BASED has both, a short window for the near and a Taylor
# state for the far:
#
# ![Three causal masks: a window of 4 exact; linear attention over all the past, approximate; BASED, both. Right: predicted bytes a head against window W. The window's keys and values grow with W; the state of 273 Taylor features stays at 70,980 bytes, as much as 277 exact tokens; BASED is their sum.](../images/based-tradeoff.svg)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Exercise 5.3: a step of linear attention
# *12 minutes · the state, its normaliser, and no writing in place*
#
# One decode step for `N` heads. `q_BNM` and `k_BNM` have gone through $\phi$ already. Take the token
# into both sums, then read: a token sees itself. Return `out_BNH, kv_BNMH, sum_BNM`, the last two new;
# the tensors that came in stay as they were, so that speculative sampling (notebook 08) can go back.


# %% slideshow={"slide_type": "skip"}
def linear_attention_step(q_BNM, k_BNM, v_BNH, kv_BNMH, sum_BNM):
    """One token through the state: (out_BNH, new kv_BNMH, new sum_BNM)."""
    ### BEGIN SOLUTION
    kv_BNMH = kv_BNMH + k_BNM[..., :, None] * v_BNH[..., None, :]
    sum_BNM = sum_BNM + k_BNM
    read_BNH = torch.einsum("bnm,bnmh->bnh", q_BNM, kv_BNMH)
    return read_BNH / (q_BNM * sum_BNM).sum(-1, keepdim=True), kv_BNMH, sum_BNM
    ### END SOLUTION


# %% slideshow={"slide_type": "skip"}
check("5.3", linear_attention_step)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 5. Four memories, side by side
#
# ![A table: four memories after 3, 6 and 9 tokens. A KV cache has 3, 6, then 9 cells. A window of W=4 keeps the last 3 and has let go of the others. A state is one box of the same size, into which all tokens so far are mixed. A masked canvas has 9 cells from the start, of which 3, 6, then all are filled, in any order.](../images/four-memories.svg)
#
# Three of them read text; the fourth writes it, and waits for section 9.

# %% [markdown] slideshow={"slide_type": "subslide"}
# Press *Play*: a key and a value come at each step. Then choose a pair that is long gone, and ask for
# its value.

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
from lecture_util.classroom.widgets import memory_stepper

memory_stepper()

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Read** the curves below the memories. The cache returns what went in, always, and grows. The window
# is perfect and then knows nothing. The linear state fades slowly and evenly: every pair is in it, under
# all the others. The state space forgets the old for the new.
#
# Why does a sum of pairs blur? Read key $k_1$ from $\sum_s k_s v_s^\top$ and you get
# $v_1 + \sum_{s>1} (k_1\cdot k_s)\, v_s$: all others come along, each by as much as its key resembles
# yours. In $M$ dimensions at most $M$ keys can be mutually orthogonal. Up to there a linear state *can*
# be exact; beyond, it can't:

# %%
M = 16
for pairs in (8, 16, 17, 64):
    orthonormal, _ = torch.linalg.qr(torch.randn(M, M, dtype=torch.float64))
    extra = torch.nn.functional.normalize(torch.randn(pairs, M, dtype=torch.float64), dim=-1)
    keys_SM = torch.cat((orthonormal, extra))[:pairs]
    values_SH = torch.randn(pairs, 4, dtype=torch.float64)
    kv_MH = keys_SM.T @ values_SH
    exact = torch.allclose(keys_SM @ kv_MH, values_SH)
    print(f"{pairs:>3} pairs in {M} features: all read back exactly: {exact}")
    assert exact == (pairs <= M)

# %% [markdown]
# > **Erratum.** "The state is $O(1)$" is true in the length of the *text*. In the number of things to be
# > kept apart it is not: a state that must hold $P$ pairs needs a size that grows with $P$.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 6. Decode time and memory, measured
#
# Three small models with random weights, of one width and depth. Their weights' values don't change how
# long a step takes, nor does what stands in the cache, so we fill it with noise instead of reading
# thousands of tokens first.

# %%
from lecture_util.alternatives.linear_attention import LinearAttentionBlock
from lecture_util.alternatives.state import States
from lecture_util.model.kv_cache import KVCache
from lecture_util.model.transformer import Block, Transformer

shape = Config(D=256, F=512, K=4, G=1, H=64, L=2, V=64, max_context=16_384)
kinds = {"attention": Block, "Mamba": MambaBlock, "linear attention": LinearAttentionBlock}
device = "cuda" if torch.cuda.is_available() else "cpu"
nets = {kind: Transformer.random(shape, block=block).to(device) for kind, block in kinds.items()}
rows = 8  # sequences in the batch


# %% slideshow={"slide_type": "subslide"}
def decoder_at(kind, S):
    """A function that decodes one token after S others, and the memory it works on."""
    net, token_B1 = nets[kind], torch.zeros(rows, 1, dtype=torch.long, device=device)
    if kind == "attention":
        cache = KVCache(shape, rows, S + 1, device=device)
        cache.k_LBSKH.normal_(), cache.v_LBSKH.normal_()
        cache.lengths = [S] * rows
        return lambda: (net(token_B1, cache), cache.truncate(S)), cache
    cache = States(shape, rows, S + 1, device=device)
    net(token_B1, cache)  # a state exists from the first token on, and keeps its size
    cache.length = S
    before = cache.snapshot()
    return lambda: (net(token_B1, cache), cache.restore(before)), cache


# %% [markdown] slideshow={"slide_type": "subslide"}
# **Bytes first.** The formula of `layouts` against the tensors held, at three lengths:

# %%
from lecture_util.alternatives.layouts import layout_of

with torch.inference_mode():
    for kind, net in nets.items():
        held = []
        for S in (1, 100, 2000):
            _, cache = decoder_at(kind, S - 1)  # room for S tokens
            formula = memory_bytes(layout_of(net), S, rows, dtype_bytes=4).total
            assert cache.nbytes == formula
            held.append(format_bytes(cache.nbytes))
        print(f"{kind:<17}", *(f"{text:>9}" for text in held))

# %% tags=["nbval-ignore-output"]
growth = predict(
    "From 1,024 to 8,192 tokens: attention's step takes how many times as long?", unit="times"
)

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
from lecture_util.roofline import measure

contexts = [1024, 2048, 4096, 8192]
times_ms, least_ms = {}, {}
with torch.inference_mode():
    for kind, net in nets.items():
        weights = sum(p.nbytes for p in net.parameters()) - net.embed.weight.nbytes
        moved = [memory_bytes(layout_of(net), S, rows, 4) for S in contexts]
        least_ms[kind] = [1e3 * (weights + m.kv + 2 * m.state) / bandwidth for m in moved]
        times_ms[kind] = [
            1e3 * measure(decoder_at(kind, S)[0], repeats=15, warmup=2).best_s for S in contexts
        ]
        print(f"{kind:<17}", *(f"{ms:7.2f} ms" for ms in times_ms[kind]))

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
eightfold = {kind: ms[-1] / ms[0] for kind, ms in times_ms.items()}
for kind, ratio in eightfold.items():
    print(f"{kind:<17} 8K takes {ratio:.2f} times as long as 1K")
growth.reveal(
    eightfold["attention"], predicted=least_ms["attention"][-1] / least_ms["attention"][0]
)

# %% tags=["nbval-ignore-output", "hide-input"] slideshow={"slide_type": "subslide"}
from lecture_util.classroom.figures import ACCENT, CACHE, GUESS, MUTED, caption, claim
from lecture_util.classroom.figures.plots import plain_log_ticks

_, ax = plt.subplots(figsize=(7, 3.6))
for (kind, ms), color, mark in zip(times_ms.items(), (CACHE, GUESS, ACCENT), "osd", strict=True):
    ax.plot(contexts, ms, f"-{mark}", color=color, label=kind)
    ax.plot(contexts, least_ms[kind], "--", color=color, lw=1.2)
ax.plot([], [], "--", color=MUTED, label="at least, by bytes")
ax.set(xlabel="tokens so far", ylabel="ms a step", xscale="log", yscale="log")
ax.set_ylim(top=8 * max(times_ms["attention"]))
plain_log_ticks(ax.yaxis)
ax.set_xticks(contexts, [f"{S:,}" for S in contexts])
ax.minorticks_off()
ax.legend(loc="upper left", fontsize=10)
claim(ax, "Attention's step grows with the context, a state's does not")
made = f"B={rows}, D=256, L=2, random weights; best of 15"
caption(ax, device=machine.name, dtype="fp32", shapes=made)
plt.show()

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Read.** Attention grows at least as fast as its bytes: eight times the context is seven times as much to
# read, weights included. Where the ratio is larger still, the processor's own cache holds the shortest
# contexts, whose points then lie below their bound. The others have no $S$ in their cost, and their ratio is 1 within what the clock can tell. Where a line lies
# above its dashed bound, small operations and Python take their share; on a GPU all three may look flat,
# since launches take longer than these reads. (Best of fifteen, because one interruption would be larger
# than the effect.)
#
# Linear attention costs more than Mamba here, since its state is larger: 273 features for each of 64
# numbers of a head, read and written.
#
# Published, against Transformers of their size: 60 times faster generation (S4, abstract of
# arXiv:2111.00396) and 5 times the throughput (Mamba, abstract of arXiv:2312.00752).

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Exercise 5.4: from which context on?
# *10 minutes · deriving a crossing*
#
# A hybrid has one attention layer in every `every` layers; the others hold a state of `state_bytes`
# each. An attention layer keeps `K` heads of width `H`, in numbers of `dtype_bytes`. From how many
# tokens on do the keys and values take *more* than the states? Return the smallest such whole number.
#
# Guess first, for Jamba: 1 in 8, $K=8$, $H=128$, 16 bits, and 573,440 bytes a Mamba layer.


# %% slideshow={"slide_type": "skip"}
def crossing_context(K, H, state_bytes, every, dtype_bytes=2):
    """The smallest S at which attention's cache outweighs the states of its neighbours."""
    ### BEGIN SOLUTION
    per_token = 2 * K * H * dtype_bytes
    return (every - 1) * state_bytes // per_token + 1
    ### END SOLUTION


# %% slideshow={"slide_type": "skip"}
check("5.4", crossing_context)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 7. What does it forget?
#
# Flat time, flat memory: why doesn't everybody use it? Because language keeps asking for things said
# before, by name. In its purest form:
#
# ![A row of 16 tokens from our own task: four pairs of a letter and a digit, each pair in its colour, then the same letters in another order. After each repeated letter a dashed box holds the digit to be predicted. An arc leads from each repeated letter back to its pair.](../images/associative-recall.svg)
#
# A model must tie each key to the token after it, keep eight such pairs, and find one by its key.

# %% [markdown] slideshow={"slide_type": "subslide"}
# Four models of two layers and about 80,000 weights, trained alike, here and now: 300 steps of 64
# sequences each.
#
# | model | layers | remembers |
# |---|---|---|
# | attention | attention twice | everything |
# | window | windows of 4 twice | the last 3 tokens, exactly |
# | linear | linear attention twice, 21 Taylor features | everything, blurred |
# | window + linear | one of each | both |

# %% tags=["nbval-ignore-output"]
winner = predict("Which memory of fixed size will recall best?",
                 choices=["window", "linear", "window + linear"])  # fmt: skip

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
from lecture_util.alternatives.recall_models import RECALL_MODELS, learn_recall

threads = torch.get_num_threads()
torch.set_num_threads(1)  # so small that a second core would mostly wait for the first
learned = {kind: learn_recall(kind, seed=0, steps=300) for kind in RECALL_MODELS}
torch.set_num_threads(threads)
recall = {kind: outcome.accuracy for kind, outcome in learned.items()}
for kind, accuracy in recall.items():
    print(f"{kind:<16} {accuracy:5.2f}")

# %% slideshow={"slide_type": "subslide"}
assert recall["attention"] > 0.9
assert max(recall["window"], recall["linear"]) < 0.25
assert recall["window + linear"] > recall["linear"] + 0.2
print(
    "attention solves it; a window or a small linear state alone does not; both together do better"
)

# %% tags=["nbval-ignore-output"]
winner.reveal("window + linear")

# %% tags=["nbval-ignore-output", "hide-input"] slideshow={"slide_type": "subslide"}
_, ax = plt.subplots(figsize=(7, 3.4))
for kind, accuracy in recall.items():
    held = memory_bytes(layout_of(learned[kind].model), 32, dtype_bytes=4).total
    ax.plot(held, accuracy, "o", ms=10, color=CACHE if kind == "attention" else ACCENT)
    ax.annotate(kind, (held, accuracy), (0, 12 if accuracy < 0.9 else -24), textcoords="offset points",
                ha="center")  # fmt: skip
ax.axhline(1 / 8, color=MUTED, ls=":", lw=1.2)
ax.text(
    58_000, 1 / 8 + 0.02, "one of the 8 values seen, guessed", color=MUTED, fontsize=10, ha="right"
)
ax.set(xlabel="bytes held after 32 tokens", ylabel="values recalled", xscale="log", ylim=(0, 1.1),
       xlim=(1800, 60_000))  # fmt: skip
ax.set_xticks([3000, 10_000, 30_000], ["3,000", "10,000", "30,000"])
ax.minorticks_off()
claim(ax, "A window ties, a state carries: together they recall")
caption(ax, device=machine.name, dtype="fp32", shapes="8 pairs, D=64, L=2, 300 steps", seed=0)
plt.show()

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### How they fail
#
# The failures differ. A wrong guess may still be one of the eight values of this very sequence:

# %%
from lecture_util.model.recall import recall_batch

fresh_BT, _ = recall_batch(64, 8, 64, torch.Generator().manual_seed(5))
values_BP, seen = fresh_BT[:, 1:16:2], {}
for kind in ("window", "linear"):
    guesses_BP = learned[kind].model(fresh_BT)[:, 16::2].argmax(-1)
    among = (guesses_BP[..., None] == values_BP[:, None]).any(-1)
    seen[kind] = among.float().mean().item()
assert seen["linear"] > 0.9 and seen["window"] < 0.6
print("guesses among the values seen: linear nearly all, window only some")

# %% [markdown]
# - The *window* gets about 1 in 32: values are one of 32 tokens, and it has not seen which. No training
#   can help: what it needs is out of its reach.
# - The *linear* state gets about 1 in 8. It knows *which* values there were, and not whose they are. To
#   tie a value to the key right before it wants a sharp look at the neighbour, and 21 features are blunt.
# - *Both*: the window ties the pair, the state carries it. Less memory than the two linear layers.
# - Only *attention*'s memory grows. At these 32 tokens it is 5 times the hybrid's, at 32,000 it
#   would be 5,000 times.

# %% [markdown] slideshow={"slide_type": "subslide"}
# > **Erratum.** "Linear models can't recall" is too strong. It is a matter of size: with 73 features
# > instead of 21, `learn_recall("linear", width=8, steps=400)` reached 0.86 with seed 0 on our machine.
# > Try it; then give it more pairs.

# %% [markdown] slideshow={"slide_type": "notes"}
# *For the instructor.* While the bars run, let the room say what each model will get *wrong*, not only
# how often. The two levels, 1/32 and 1/8, are the best part: a wrong answer shows what was remembered.
# The ordering held for seeds 0, 1 and 2 (window + linear: 0.75, 0.55, 0.76 after 300 steps).

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### At scale
#
# It is a trade-off, and the state's size is the dial. The papers' benchmarks with text move the same dial at
# sizes that we cannot train here, so we leave their numbers to them (arXiv:2402.18668).

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 8. Hybrids: a little attention
#
# So keep *some* attention, and let the rest be cheap. **Jamba** (Lieber et al. 2024): one layer in eight
# attends. 52B weights, 12B active.
#
# ![A stack of eight layers, bottom up: Mamba, Mamba with experts, Mamba, Mamba with experts, attention, Mamba with experts, Mamba, Mamba with experts; four such blocks make the model. Beside it bars of the KV cache at 256K tokens by formula: Jamba 4 GiB, Llama-3.1-8B 32 GiB.](../images/jamba-block.svg)

# %% slideshow={"slide_type": "subslide"}
from lecture_util.alternatives.layouts import CONTEXTS, memory_table

for name, hybrid in HYBRIDS.items():
    print(f"{name:<11}{hybrid.kinds[:40]}{'...' if len(hybrid.kinds) > 40 else ''}")
print("\nbytes of one sequence", *(f"{S // 1024:>8}K" for S in CONTEXTS))
table = memory_table()
for name, row in table.items():
    print(f"{name:<21}", *(f"{format_bytes(memory.total):>9}" for memory in row.values()))
assert table["jamba"][2**18].kv == 4 * 2**30 and table["attention"][2**18].kv == 32 * 2**30
level = memory_bytes(HYBRIDS["minimax-01"], 7168)
assert level.kv == level.state

# %% [markdown]
# (`A` attention, `m` Mamba, `l` linear attention, `w` window. Attention is Llama-3.1-8B; the last two
# rows are shapes we made up for comparison: all the states, none of the cache.)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ![Predicted memory of one sequence against context, 4K to 1M tokens, both logarithmic. Llama-3.1-8B, attention in all 32 layers, rises in a straight line. MiniMax-01, 10 attention layers of 80, starts almost level with it, held up by its states, and ends at a third. Jamba, 4 of 32, ends at an eighth. 32 Mamba layers stay flat.](../images/memory-by-context.svg)

# %% [markdown]
# **Read.** A hybrid's memory still grows: it has bent the line down, not flattened it. Jamba's is an
# eighth of Llama's. **MiniMax-01** (456B weights, 45.9B active, 7 linear layers to 1 with softmax;
# arXiv:2501.08313) has 70 states of $64 \times 128 \times 128$ numbers, which weigh more than its cache
# until 7,168 tokens. (fp32 states are our assumption.)
#
# One layer that sees everything is where an exact look-up can happen, as in notebook 04's hybrids; the
# other seven need not pay for it.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 9. Not one after the other: diffusion
#
# All models so far write from left to right, one pass a token. A *masked diffusion* model starts with a
# page of masks and uncovers several tokens a pass, in any order:
#
# ![Three grids, one row a forward pass, one column a position, 12 tokens. Autoregression: 12 passes, one token each from left to right, 12 positions computed. Masked diffusion in 4 passes: three tokens each, anywhere, 48 positions. In blocks of 4 with 2 passes each: 6 passes, 72 positions.](../images/diffusion-passes.svg)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Training: hide and ask
#
# Draw how much to hide, $t \in (0, 1]$; replace each token by a mask with probability $t$; ask for the
# hidden ones, weighing by $1/t$. No causal mask: every token sees every token. The weighted loss is an
# upper bound on the text's cost in nats (LLaDA, Nie et al. 2025; MDLM, Sahoo et al. 2024).

# %%
from lecture_util.alternatives.diffusion import hide
from lecture_util.alternatives.small_models import load_small, split_text, text_of

writer = load_small("diffusion")  # 4 layers, D=128; a token is a byte
_, held_BT = split_text()  # windows of 64 bytes it was not trained on
sample_BT = held_BT[3:4]
for t in (0.2, 0.5, 0.9):
    noisy_BT, _, _ = hide(
        sample_BT, torch.tensor([t]), writer.mask_id, torch.Generator().manual_seed(0)
    )
    print(f"t={t}", text_of(noisy_BT[0]))

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Sampling: uncover the surest
#
# In a pass the model proposes a word for *every* hidden position. Those it is surest of stay; the rest is
# hidden again. Move the slider through the passes (*new* tokens are marked). The model is a toy, trained
# for minutes on Python's reference: watch the order, not the prose.

# %% tags=["hide-input"]
import html

from lecture_util.alternatives.denoise import denoise


def uncovered(model, passes, order, block=None):
    """All states of one run as HTML: the prompt grey, new tokens marked."""
    run = denoise(model, held_BT[3:4, :32], 32, passes, order=order, block=block,
                  generator=torch.Generator().manual_seed(0))  # fmt: skip
    for now in run:
        letters = [html.escape(text_of(token[None])) for token in now.tokens_BT[0]]
        letters = [letter.replace("*", "&#42;") for letter in letters]  # not the mark for bold
        new = now.revealed_BT[0].tolist()
        shown = "".join(
            f"<mark>{c}</mark>" if new[i] else c for i, c in enumerate(letters[32:], 32)
        )
        given = f'<span style="color:#777">{"".join(letters[:32])}</span>'
        yield f'<pre style="font-size:1.1em">{given}{shown}</pre>'


# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
orders = {"surest first": "confidence", "any order": "random"}
runs = {
    (name, block, passes): list(uncovered(writer, passes, order, block))
    for name, order in orders.items() for block in (32, 8) for passes in (4, 8, 32)
}  # fmt: skip


def show_pass(order, block, passes, seen):
    states = runs[order, block, passes]
    at = min(seen, len(states) - 1)
    return f"after **{at}** of {len(states) - 1} passes{states[at]}"


explore(show_pass, order=list(orders), block=[32, 8], passes=[4, 8, 32], seen=(0, 32, 1))

# %% [markdown] slideshow={"slide_type": "subslide"}
# `block=8` uncovers eight positions at a time, from left to right: half-way back to autoregression. Within
# a block nothing can be cached, since an uncovered token changes every other token's view. Finished blocks
# could be, if they were trained not to look ahead.
#
# ### Exercise 5.5: which tokens to uncover
# *12 minutes · one pass of a masked diffusion sampler*
#
# `tokens_T` holds some masks (`mask_id`); `logits_TV` are the model's, over the `V = mask_id` words. Fill
# in `count` of the masked positions: those whose likeliest word is the most *probable*. All else stays as
# it is, known tokens above all. Return the new `tokens_T`.


# %% slideshow={"slide_type": "skip"}
def uncover(tokens_T, logits_TV, count, mask_id):
    """The tokens after one pass: `count` more of them are known."""
    ### BEGIN SOLUTION
    chance_T, word_T = logits_TV.softmax(-1).max(-1)
    chance_T = chance_T.masked_fill(tokens_T != mask_id, -1.0)
    chosen = chance_T.topk(count).indices
    filled_T = tokens_T.clone()
    filled_T[chosen] = word_T[chosen]
    return filled_T
    ### END SOLUTION


# %% slideshow={"slide_type": "skip"}
check("5.5", uncover)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### What do fewer passes cost?
#
# Something, even with a perfect model. Tokens of one pass are drawn *without knowing of each other*. Take
# a world with two texts, "New York" and "Los Angeles", equally likely. Both words masked, a perfect model
# says: first word New or Los, half and half; second word York or Angeles, half and half. All true, each
# for itself. Exactly, for one pass and for two:

# %%
from lecture_util.alternatives.denoise import parallel_joint

world = torch.tensor([[0.5, 0.0], [0.0, 0.5]])  # [New, Los] x [York, Angeles]
for counts in ([1, 1], [2]):
    drawn = parallel_joint(world, counts)
    nonsense = (drawn[0, 1] + drawn[1, 0]).item()
    print(
        f"{len(counts)} pass{'es' if len(counts) > 1 else ''}: {drawn.tolist()}  nonsense {nonsense:.0%}"
    )
assert torch.equal(parallel_joint(world, [1, 1]), world)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### How fast is it, then?
#
# "A pass uncovers many tokens" is half of the story. A pass of an autoregressive model with a cache
# computes *one* position; a pass of a diffusion model computes *all*. So it trades passes for work.
# Roofline, for a model of Llama-3-8B's shape on an H100: a prompt of 256, then 256 new tokens.

# %% slideshow={"slide_type": "subslide"}
from lecture_util.roofline import forward

P = n = 256


def tokens_per_s(B, passes=None):
    """At best: autoregression with a cache, or so many diffusion passes over everything."""
    if passes:
        return B * n / (passes * forward(llama, B, P + n, P + n).time_s(h100))
    seconds = forward(llama, B, P, P, causal=True, logits_for=1).time_s(h100)
    return B * n / (seconds + sum(forward(llama, B, 1, P + i).time_s(h100) for i in range(1, n)))


print("   B    autoregression   16 passes   64 passes   256 passes")
for B in (1, 4, 16, 64, 256):
    rates = [tokens_per_s(B), *(tokens_per_s(B, passes) for passes in (16, 64, 256))]
    print(f"{B:>4} {rates[0]:>14,.0f} {rates[1]:>13,.0f} {rates[2]:>11,.0f} {rates[3]:>12,.0f}")

# %% slideshow={"slide_type": "subslide"}
assert tokens_per_s(1, 16) > 5 * tokens_per_s(1) and tokens_per_s(256, 16) < tokens_per_s(256) / 5
assert forward(llama, 1, P + n, P + n).bound(h100) == "compute"
print("one sequence: diffusion is ahead.  A full batch: far behind")

# %% [markdown]
# **Read.** For one user a decode step waits for memory, and a pass over 512 positions costs not much
# more: 16 passes instead of 256 steps win nine-fold. Already such a pass waits for *computing*, so a
# larger batch gains nothing, while autoregression shares its reads and overtakes. Diffusion buys
# **latency with work**. And with as many passes as tokens it loses to a cache at any batch.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Quality against passes, recorded
#
# `benchmarks/train_diffusion.py` has this toy continue 64 held-out texts with different numbers of passes,
# drawn at temperature 1, and lets SmolLM2-135M judge them: how many bits does a byte of it cost a reader?
# The twin is autoregressive, of the same size, and trained on as many windows of the same text.

# %% tags=["hide-input"]
import json
from pathlib import Path

import lecture_util

record = Path(lecture_util.__file__).parents[1] / "benchmarks/results/diffusion.json"
recorded = json.loads(record.read_text(encoding="utf-8"))
judged = [row for row in recorded["writing"] if row["temperature"] == 1.0]
truth, phrase = recorded["writing"][:2]  # what the text really says; one phrase over and over
bits = {
    way: {row["passes"]: row["smollm2_bits_per_byte"] for row in judged if row["way"] == way}
    for way in ("random", "confidence", "autoregressive")
}
assert all(bits[way][1] > bits[way][32] + 0.5 for way in ("random", "confidence"))
assert bits["autoregressive"][32] < min(bits["confidence"].values())

# %% tags=["hide-input", "nbval-ignore-output"] slideshow={"slide_type": "subslide"}
_, ax = plt.subplots(figsize=(7, 3.4))
for way, color, name in (("random", ACCENT, "any order"), ("confidence", GUESS, "surest first")):
    ax.plot(list(bits[way]), list(bits[way].values()), "-o", color=color, label=name)
ax.plot(32, bits["autoregressive"][32], "s", color=CACHE, ms=9, label="its autoregressive twin")
ax.axhline(truth["smollm2_bits_per_byte"], color=MUTED, ls=":", label="the true text")
ax.set(xlabel="forward passes for 32 bytes", ylabel="bits a byte", xscale="log", ylim=(0, None))
ax.set_xticks([1, 2, 4, 8, 16, 32], ["1", "2", "4", "8", "16", "32"])
ax.minorticks_off()
ax.legend(fontsize=10)
claim(ax, "More passes, more predictable text")
caption(ax, device=recorded["machine"]["processor"], shapes="temperature 1, judged by SmolLM2-135M",
        source=f"diffusion.json, {recorded['date']}")  # fmt: skip
plt.show()

# %% [markdown]
# **Read.** Each halving of the passes costs. Uncovering the surest first helps, as it postpones what
# depends on others. But is it *better*, or only more predictable? Ask what the judge pays for one phrase
# repeated over and over, and how many of the texts' runs of four bytes are different ones:

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
print(f"one phrase, repeated: {phrase['smollm2_bits_per_byte']:.2f} bits a byte")
for row in [truth, *judged]:
    if row["way"] in ("held-out text", "random", "confidence", "autoregressive"):
        passes = f"{row['passes'] or '':>3}"
        variety = f"{row['distinct_4_bytes']:.2f} distinct"
        print(f"{row['way']:<15} {passes} {row['smollm2_bits_per_byte']:6.2f} bits {variety}")
assert phrase["smollm2_bits_per_byte"] < min(bits["confidence"].values())

# %% [markdown] slideshow={"slide_type": "subslide"}
# The repeated phrase beats every text of the toy's. And "surest first" becomes more uniform with every
# pass, while "any order" stays more varied than real text: part of the steeper curve is caution, not
# quality, and part of the flat one is noise. A single
# number for the quality of text can nearly always be won by saying less.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### The other diffusion: noise on vectors
#
# **Diffusion-LM** (Li et al. 2022) does it as for images: Gaussian noise on the words' *vectors*, taken
# away little by little, and rounding to the nearest word at the end. Every position moves in every
# step. It gives smooth control (a gradient can steer all of a text at once), but words are not smooth, and
# MDLM and LLaDA mask instead.
#
# ![Four planes with the vectors of five words as labelled points. From left to right, at times 1, 0.5, 0.1 and 0, six dots, one a position, move from random noise onto the words' vectors. Below each plane the words nearest to the dots: by time 0 they read the cat sat on the mat.](../images/diffusion-lm.svg)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### In products
#
# ![Bars of tokens a second as Inception Labs reports them, with HumanEval scores: Mercury Coder Mini 1,109 (88.0) and Small 737 (90.0) on H100; Gemini 2.0 Flash-Lite 201 (90.0), Claude 3.5 Haiku 61 (86.0), GPT-4o mini 59 (88.0), on hardware that is not known.](../images/mercury-speeds.svg)
#
# Read with care: Mercury's numbers are its makers', on H100s (arXiv:2506.17298); those of the others come
# from services whose hardware and batch sizes are not known. An open diffusion model says otherwise:
# LLaDA's own README calls its sampling still slower than autoregressive
# models'. Both can be true: see the table of batch sizes and passes above.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 10. The selective scan as a kernel
#
# In torch, each step of the scan reads and writes several tensors of $B \times E \times Z$, from and to
# memory: decay, what is taken in, the state. None of them is needed outside. A kernel keeps the state in
# *registers*, walks through the tokens, and moves only what must move:

# %%
from lecture_util import kernels

text = Path(kernels.__file__).with_name("selective_scan_triton.py").read_text(encoding="utf-8")
lines = text.splitlines()
first = next(i for i, line in enumerate(lines) if "for _ in range(T)" in line)
print("\n".join(lines[first : first + 9]))

# %% [markdown]
# A program takes one sequence and 32 of its channels. `state_ez` is loaded before the loop, stays on the
# chip, and is stored after it. Count the bytes for a prefill of 2,048 tokens, $E = 8192$, $Z = 16$, in
# 16 bits, and for one step:


# %% slideshow={"slide_type": "subslide"}
def scan_bytes(T, E=8192, Z=16, width=2):
    """(in torch, in the kernel), of one sequence: inputs and outputs, and what the state moves."""
    once = T * width * (3 * E + 2 * Z)  # u, delta and y; B and C
    state = 4 * E * Z  # as large as A, and as each of the products on the way
    # moved a token: 2 for delta*A, 2 for its exponential, 1 for delta*B*u, 3 for decay times state,
    # 3 for their sum, 1 to read it for y
    in_torch = once + T * state * 12
    return in_torch, once + 3 * state  # A and the old state in, the new one out


for T in (2048, 1):
    in_torch, fused = scan_bytes(T)
    print(f"T={T:<5} {format_bytes(in_torch):>9} in torch, {format_bytes(fused):>9} in the kernel: "
          f"{in_torch / fused:.0f} times less")  # fmt: skip

# %% [markdown]
# The FLOPs are the same; nothing else in the kernel is clever. The reference that it is tested against is
# the `selective_scan` of section 3 (on machines without a GPU in Triton's interpreter). On a GPU:

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
from lecture_util.kernels.selective_scan import selective_scan_fused

if torch.cuda.is_available():
    B, T, E, Z = 4, 1024, 2048, 16
    wide, states = (B, T, E), (B, T, Z)
    given = [torch.randn(wide), torch.rand(wide), -torch.rand(E, Z), torch.randn(states),
             torch.randn(states), torch.randn(E)]  # fmt: skip
    given = [x.cuda() for x in given]
    y, state = selective_scan_fused(*given)
    reference, _ = selective_scan(*given)
    torch.testing.assert_close(y, reference, rtol=1e-3, atol=1e-3)
    print("torch ", measure(selective_scan, *given, repeats=3))
    print("kernel", measure(selective_scan_fused, *given, repeats=9, warmup=2))
else:
    print("not measured here: no CUDA device")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## What to remember
#
# - A state replaces the cache: constant memory and time a token. A fixed linear one is also a
#   convolution; a selective one gives that up and is still an associative scan.
# - Linear attention is attention whose weight factors: carry $\sum\phi(k)v^\top$ *and* $\sum\phi(k)$.
# - What fits into a state is limited by its size: windows are exact and short, states long and blurred,
#   and a hybrid of both recalls better. For the rest, keep one layer in eight with full attention.
# - States can't be cut: pad on the left, mask before convolution and scan, never write in place.
# - Diffusion trades forward passes for work: lower latency for one user, less throughput for many; and
#   tokens of one pass don't know of each other.

# %% tags=["nbval-ignore-output"]
status("05")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ## Papers and sources
#
# - Stanford CS336, spring 2025, lecture 10, *Inference*: the order of topics.
# - Gu et al. 2021, *Efficiently Modeling Long Sequences with Structured State Spaces* (S4),
#   arXiv:2111.00396; Gu et al. 2022 (S4D), arXiv:2206.11893; Gu et al. 2020 (HiPPO), arXiv:2008.07669.
# - Gu & Dao 2023, *Mamba*, arXiv:2312.00752. Lieber et al. 2024, *Jamba*, arXiv:2403.19887.
# - Katharopoulos et al. 2020, *Transformers are RNNs*, arXiv:2006.16236.
# - Arora et al. 2024, *Simple linear attention language models balance the recall-throughput tradeoff*
#   (BASED), arXiv:2402.18668. MiniMax 2025, *MiniMax-01*, arXiv:2501.08313.
# - Li et al. 2022, *Diffusion-LM*, arXiv:2205.14217. Sahoo et al. 2024 (MDLM), arXiv:2406.07524. Nie et
#   al. 2025 (LLaDA), arXiv:2502.09992. Inception Labs 2025, *Mercury*, arXiv:2506.17298.
