# %% [markdown] slideshow={"slide_type": "slide"}
# # 08 · Speculative sampling
#
# Notebooks 06 and 07 made the model cheaper to read. This one leaves every weight as it is, and makes one
# reading yield more than one token. A decode step fetches the whole model to make a single token, and the
# chip mostly waits (notebook 03). So let something cheap *guess* the next few tokens, and let the model
# check all guesses in one pass. In the lecture's words: checking is faster than generation.
#
# You will
#
# 1. measure what a pass over several tokens costs, against a pass over one;
# 2. run a round by hand: guess, check, keep, correct;
# 3. prove that the text that comes out is *exactly* the model's own, and test the proof on every path;
# 4. predict tokens a round, speed-up and the best number of guesses, and measure them;
# 5. guess in four ways: with a smaller model, from the prompt's own words, with heads, from features;
# 6. take back what was wrong: caches, end tokens, budgets;
# 7. see why two exact methods can print two different texts in 16 bits.

# %% slideshow={"slide_type": "subslide"}
import copy

import matplotlib.pyplot as plt
import sympy
import torch

from lecture_util.classroom import check, hint, predict, status, step, use_style
from lecture_util.model.config import PUBLISHED, Config
from lecture_util.model.generate import generate
from lecture_util.model.sampling import Sampling, probabilities
from lecture_util.model.tokenizer import chat
from lecture_util.model.weights import REFERENCE, load, load_tokenizer
from lecture_util.roofline import ACCELERATORS, forward, measure, num_params

use_style()
model, tokenizer = load(REFERENCE), load_tokenizer(REFERENCE)
config, h100, END = model.config, ACCELERATORS["h100"], tokenizer.eos_token_id

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 1. Is checking faster than making?
#
# To make eight tokens, a model runs eight times, and reads all its weights each time. To *check* eight
# tokens that somebody hands it, it runs once: as in prefill, all eight go through every layer together.
# Llama-2-13B on an H100, one sequence, 256 tokens in the cache:

# %% tags=["nbval-ignore-output"]
eight = predict("A forward over 8 tokens takes how many times as long as over 1?", unit="times")

# %% slideshow={"slide_type": "subslide"}
llama, lengths = PUBLISHED["llama-2-13b"], (1, 2, 4, 8, 16, 32)


def forward_ms(B, T, S=256):
    """The roofline's lower bound: T new tokens in each of B sequences that have S cached."""
    return 1e3 * forward(llama, B, T, S + T, causal=True).time_s(h100)


print("over T tokens       T=", *(f"{T:>5}" for T in lengths))
for B in (1, 32, 128):
    times = [forward_ms(B, T) / forward_ms(B, 1) for T in lengths]
    print(f"B={B:<3} {forward_ms(B, 1):6.2f} ms, times", *(f"{x:5.2f}" for x in times))
assert forward_ms(1, 8) < 1.01 * forward_ms(1, 1) and forward_ms(128, 8) > 1.3 * forward_ms(128, 1)

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
eight.reveal(predicted=forward_ms(1, 8) / forward_ms(1, 1))

# %% [markdown]
# **Read.** At $B=1$ eight tokens cost what one costs: the weights are read once either way, and the
# arithmetic is far from the limit. A guess that turns out right is a token for nothing. With 128 sequences
# the batch has nearly used it up (notebook 02): after a few guesses every further one is paid for.
# Speculation is for *small* batches: for one impatient reader, more than for a full server. (With long
# caches it lasts longer: they are read once for all guesses, too.)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Measured here
#
# A CPU has less arithmetic to spare than an H100 for each byte it reads, so its ratio is worse. How much
# worse decides all that follows, so measure it first: our 135 M model, 256 tokens in the cache, in both
# formats.

# %%
from lecture_util.model.kv_cache import KVCache

some_1T = torch.randint(config.V, (1, 300), generator=torch.Generator().manual_seed(0))
some_1T = some_1T.to(model.device)


@torch.inference_mode()
def checker(subject, T, S=256):
    """A forward over T tokens behind S cached ones, to be called again and again."""
    cache = KVCache(subject.config, 1, S + T, subject.dtype, subject.device)
    subject.features(some_1T[:, :S], cache)

    @torch.inference_mode()
    def one_check():
        cache.truncate(S)
        subject(some_1T[:, S : S + T], cache)

    return one_check


# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
here = predict("fp32, on this machine: 9 tokens take how many times as long as 1?", unit="times")

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
half = load(REFERENCE, dtype=torch.bfloat16)
cost_s = {}
for name, subject in {"fp32": model, "bf16": half}.items():
    for T in (1, 2, 3, 5, 9):
        cost_s[name, T] = measure(checker(subject, T), repeats=4).best_s
    ratios = " ".join(f"{T}: {cost_s[name, T] / cost_s[name, 1]:4.2f}" for T in (2, 3, 5, 9))
    print(f"{name}: one token {1e3 * cost_s[name, 1]:5.1f} ms; as many times as long over {ratios}")

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
here.reveal(cost_s["fp32", 9] / cost_s["fp32", 1])

# %% [markdown]
# More than 1, so guesses are not free here; less than 9, so there is something to win. From now on this
# ratio has a letter: checking $n$ tokens costs $v(n)$ forwards over one. Where it stops to pay, as
# recorded, over more tokens and larger batches:

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
from lecture_util.classroom.figures.small_caches import recorded

record = recorded("speculative")
print(f"{record['date']}, {record['machine']['hardware']}")
for dtype, batches in record["verify_cost"].items():
    for B, entry in batches.items():
        one, at = entry["ms"][0], dict(zip(entry["T"], entry["ms"], strict=True))
        print(f"{dtype:<8} B={B:<2} one token {one:6.1f} ms; 9 tokens {at[9] / one:4.2f} times as long, "
              f"so a round must yield more than {at[9] / one:4.2f} tokens to pay")  # fmt: skip

# %% [markdown] slideshow={"slide_type": "subslide"}
# ![Time of one forward over T tokens, over that of one token, both logarithmic, with a diagonal for T separate forwards. At T = 5, 9, 17, 33. fp32: B=1 1.69, 2.13, 2.15, 2.79; B=8 1.45, 2.07, 2.96, 5.49; B=32 2.48, 4.04, 6.84, 12.69. bf16: B=1 1.40, 1.68, 2.29, 3.33; B=8 2.25, 3.51, 5.64, 10.46; B=32 3.21, 5.52, 10.04, 18.90.](../images/verification-cost.svg)

# %% [markdown] slideshow={"slide_type": "notes"}
# *For the instructor.* Let the room guess the ratio for the H100 before the table. Those who remember
# notebook 02 say one, the others say eight. Then ask: who pays, if everything is read once? (Arithmetic,
# which was idle.) And when does that end? (When the batch keeps it busy.) The row B=128 is the answer to
# "why doesn't every server do this?"

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 2. One round, by hand
#
# We begin greedily: the model always takes its likeliest token, so a guess is simply right or wrong. Who
# guesses? For now the cheapest guesser there is: it looks the last words up in what was already said. Where
# an answer repeats its input, what followed them there follows again. So we ask for something of that kind:

# %% tags=["nbval-ignore-output"]
from lecture_util.speculative.prompts import BEES

question = f"Correct the grammar of this text.\n\n{BEES}"
prompt = chat(tokenizer, question)
(plain,) = generate(model, [prompt], 48, eos=END)
print(f"{len(prompt)} tokens of prompt\n{question}\n")
print(tokenizer.decode(plain))

# %% [markdown] slideshow={"slide_type": "subslide"}
# One forward over the sequence and the guesses gives a row of logits after each of them. Row 0 says what
# the model wants after the sequence, row 1 what it wants after the first guess, *if that guess was right*,
# and so on:

# %%
from lecture_util.speculative.ngram import lookup


@torch.inference_mode()
def one_round(sequence, guesses):
    """Keep the guesses that are the model's own choice; then comes one token of its own."""
    tokens_1T = torch.tensor([[*sequence, *guesses]], device=model.device)
    choices = model(tokens_1T)[0, len(sequence) - 1 :].argmax(-1).tolist()
    kept = 0
    while kept < len(guesses) and guesses[kept] == choices[kept]:
        kept += 1
    return [*guesses[:kept], choices[kept]]


# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
def words(tokens):
    return "|".join(tokenizer.decode([token]) for token in tokens).replace("\n", "\\n")


by_hand = []
for number in range(6):
    guesses = lookup([*prompt, *by_hand], longest=3, k=6)
    gained = one_round([*prompt, *by_hand], guesses)
    by_hand += gained
    print(f"{number}  guessed {words(guesses) or '(nothing)'}\n   gained  {words(gained)}")
assert by_hand == plain[: len(by_hand)] and len(by_hand) > number + 1
print(f"{number + 1} forwards, {len(by_hand)} tokens: the same as plain greedy")

# %% [markdown] slideshow={"slide_type": "subslide"}
# Three things to see in it.
#
# - A round *never yields nothing*. If the first guess is wrong, its row still says what is right: the
#   **correction**, the token that a plain step would have made.
# - If all guesses are right, the last row gives one token more: the **bonus**.
# - After the first wrong guess nothing counts. Those rows answer a question that didn't come up.
#
# ![After The cat sat the draft guesses on, the, red, roof, with q .80, .60, .50, .40. One forward of the target gives each its p: .90, .45, .10, .30. Accepted with probability p/q, at most 1: on and the are, red is not (.20 against a drawn .57), roof is never looked at. The target's own token follows, mat, drawn from the residual: three tokens for one forward.](../images/speculative-round.svg)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### The loop of the library
#
# `stream_speculative` does the same with a cache, so that a round reads only the newest token and the
# guesses. What was wrong has to leave the cache again (section 6). A drafter *proposes*; everything else is
# the loop's:

# %% tags=["nbval-ignore-output"]
from lecture_util.roofline import stopwatch
from lecture_util.speculative.ngram import NgramDrafter
from lecture_util.speculative.speculate import Tally, stream_speculative

seconds = {}
with stopwatch(model.device) as seconds["plain"]:
    generate(model, [prompt], 48, eos=END)
with stopwatch(model.device) as seconds["n-gram"]:
    rounds = list(stream_speculative(
        model, lambda reader: NgramDrafter(k=8, banned=END), prompt, 48, eos=END,
    ))  # fmt: skip
tally = Tally()
for r in rounds:
    tally.add(r)
assert [token for r in rounds for token in r.tokens] == plain
faster = seconds["plain"].seconds / seconds["n-gram"].seconds
print(f"{tally.tokens} tokens in {tally.rounds} rounds: {tally.tokens_per_round:.2f} a round, "
      f"{faster:.2f} times as fast as plain, prompt included")  # fmt: skip

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
from lecture_util.classroom.widgets import token_ribbon

token_ribbon({"n-gram": rounds}, tokenizer)

# %% [markdown]
# Runs of accepted guesses, and a correction wherever the answer departs from the text. (It mends some of
# the grammar and overlooks the rest: a small model. Faster or not, it is the *same* small model.)

# %% [markdown] slideshow={"slide_type": "subslide"}
# The same loop on a text small enough to read whole. A line is a forward, and each one ends with a word of
# the target's own, whatever became of the guesses:
#
# ![A grid, a row for each of 6 forwards, a column for each of 16 words of the answer. In a row stand the words guessed, looked up in the question, and below them what came of them. Of 15 guesses 10 are kept, green; the others are struck through, orange; a row ends with one word of the target's own, purple. So 16 words take 6 forwards, and are the words the target alone would have written.](../images/speculative-trace.svg)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Exercise 8.1: look the last words up
# *15 minutes · a draft without a model: longest match, the suffix itself, budget and end token*
#
# Write the guesser. `tokens` is all that was said so far. Find the longest run of at most `longest` tokens
# at its end that also stands somewhere earlier, take the *latest* earlier place, and guess what followed it
# there. (The earlier run may overlap with the last, but is not the last itself.) Three limits:
#
# - no more than `k` guesses;
# - the text may grow by `room` tokens in all, and each round ends with a token of the target's own;
# - a guess ends before the end token `eos`. If nothing is left of it then, guess nothing.


# %% slideshow={"slide_type": "skip"}
def look_up(tokens, longest, k, room, eos):
    """A list of guesses, perhaps empty. All numbers are at least 1."""
    ### BEGIN SOLUTION
    k = min(k, room - 1)
    for n in range(min(longest, len(tokens) - 1), 0, -1):
        for start in range(len(tokens) - n - 1, -1, -1):
            if tokens[start : start + n] == tokens[-n:]:
                guesses = tokens[start + n : start + n + k]
                return guesses[: guesses.index(eos)] if eos in guesses else guesses
    return []
    ### END SOLUTION


# %% slideshow={"slide_type": "skip"}
check("8.1", look_up)

# %% [markdown]
# Stuck? Each call opens one more hint.

# %% slideshow={"slide_type": "skip"}
hint("8.1")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 3. Exact?
#
# Greedy was easy: a guess is right or wrong. At a temperature above 0 the model has no one right token, it
# has a distribution $p$. The guess $x$ was drawn from the draft's distribution $q$. When should we accept
# it, so that what comes out is distributed as $p$, not nearly, but *exactly*?
#
# (Letters: $p$ is the target's and $q$ the draft's, as in Leviathan et al. The lecture and Chen et al. name
# them the other way round.)
#
# A first idea: draw a token from $p$ as well, and accept the guess if the two agree. That is exact (why?),
# but accepts only with probability $\sum_x p(x)\,q(x)$: of two fair coins, which agree perfectly, half the
# time.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### The rule
#
# Accept $x$ with probability $\min\left(1, \frac{p(x)}{q(x)}\right)$. If it was rejected, draw from the
# **residual** instead: what $p$ has more than $q$, normalised,
#
# $$r(x) = \frac{\max(p(x) - q(x),\, 0)}{\sum_y \max(p(y) - q(y),\, 0)}.$$
#
# It is rejection sampling with a twist. Rejection sampling would throw away and draw again until something
# fits; here the second draw always fits, since it comes from just what is missing.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ![Three panels of bars over five words. Target p .40, .25, .20, .10, .05 beside draft q .20, .45, .10, .10, .15. The draft's bars split: the smaller of p and q is kept, .70 in all; what stands above p is rejected, .30. The target's bars rebuilt: the same kept parts, and on top the residual, .20 on mat and .10 on rug: as much as was rejected.](../images/the-residual.svg)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Two symbols, step by step
#
# A and B; the target likes A with 0.6, the draft with 0.9. The draft says A too often, so some of its A's
# have to become B's. Step through it, then change the arguments: what happens if the draft likes A too
# *little*?

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
from lecture_util.speculative.expected import two_symbols

step(two_symbols, 0.6, 0.9)

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
from lecture_util.classroom.widgets import two_symbol_explorer

two_symbol_explorer()

# %% [markdown] slideshow={"slide_type": "subslide"}
# > **Note.** The lecture proves exactness by this example: one token, two symbols, a draft that likes A too
# > much. That is correct, and it is not yet what we use: a vocabulary of 49,152, drafts of several tokens,
# > and a bonus. (Stanford CS336, spring 2025, lecture 10.)
#
# **Any vocabulary.** $x$ comes out in one of two ways: drawn and accepted, or after a rejection.
#
# $$P(x) = q(x)\min\left(1, \tfrac{p(x)}{q(x)}\right) + (1-\alpha)\, r(x), \qquad \alpha = \sum_y \min(p(y), q(y))$$
#
# The first term is $\min(p(x), q(x))$. And $\alpha$ is how likely *any* guess is accepted. Since $\sum_y
# \max(p(y)-q(y), 0) = 1 - \alpha$, the second term is $\max(p(x)-q(x), 0)$. Their sum is $p(x)$.

# %% slideshow={"slide_type": "subslide"}
from lecture_util.speculative.verify import agreement, residual

draw = torch.Generator().manual_seed(0)
for V in (2, 7, 1000):
    p_V, q_V = torch.randn(2, V, generator=draw, dtype=torch.float64).softmax(-1)
    alpha = agreement(p_V, q_V)
    assert torch.allclose((p_V - q_V).clamp(min=0).sum(), 1 - alpha)
    P_V = q_V * (p_V / q_V).clamp(max=1) + (1 - alpha) * residual(p_V, q_V)
    assert torch.allclose(P_V, p_V, rtol=0, atol=1e-15)
    print(f"V={V:<5} accepted {alpha:.2f}; if both must draw the same, {(p_V * q_V).sum():.2f}")

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Several guesses.** Guess 2 was drawn by a draft that had seen guess 1, and is judged by the target's
# distribution after guess 1. It counts only if guess 1 was accepted, that is if it *is* the text. So each
# token, given those before it, follows $p$. A guess after a rejected one is thrown away unseen.
#
# **The bonus.** If all guesses were accepted, the target's last row is the distribution of the next token,
# and nobody has guessed at it. Draw from $p$ as it is.
#
# **A chosen guess.** A look-up draws nothing: it is certain of its guess. Then $q$ is 1 at $x$ and 0
# elsewhere, so the rule says: accept with probability $p(x)$, else draw from $p$ without $x$. Greedy is the
# same rule again, with a $p$ that is all on one token.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Test the proof: every path
#
# A program can differ from its proof. So we test it: not with samples, which show a few percent at best,
# but with *all* that can happen. Every chance in the library goes through an object of class `Chance`. In
# its place we put one that goes down each path in turn, and knows how likely it is:

# %% slideshow={"slide_type": "subslide"}
from lecture_util.speculative.verify import Chance


class EveryOutcome(Chance):
    def paths(self, run):
        """(what run(chance) returned, how likely that path is), for every path there is."""
        self.ahead = [[]]  # beginnings of paths that were not walked yet
        while self.ahead:
            self.known, self.path, self.weight = self.ahead.pop(), [], 1.0
            yield tuple(run(self)), self.weight

    def draw(self, p_V):
        options = [i for i, p in enumerate(p_V.tolist()) if p > 0]
        if len(self.path) == len(self.known):  # new ground: take the first, note the others
            self.known = [*self.path, options[0]]
            self.ahead += [[*self.path, other] for other in options[1:]]
        self.path.append(self.known[len(self.path)])
        self.weight *= float(p_V[self.path[-1]])
        return self.path[-1]

    def happens(self, probability):
        yes = min(1.0, probability)
        return self.draw(torch.tensor([1 - yes, yes], dtype=torch.float64)) == 1


# %% [markdown] slideshow={"slide_type": "subslide"}
# Four symbols; what follows depends on the last one; two guesses a round, three tokens. Temperature and
# top-k are on, so that guesses must be judged by the distributions that are really drawn from.

# %%
from lecture_util.speculative.draft import chain
from lecture_util.speculative.draft_model import ModelDrafter
from lecture_util.speculative.speculate import speculate
from lecture_util.speculative.target import Table
from lecture_util.speculative.verify import verify

V = 4
target_VV, other_VV = torch.randn(2, V, V, generator=draw, dtype=torch.float64)
draft_VV = target_VV + other_VV  # a little like the target
warm = Sampling(temperature=0.8, top_k=3)


def joint(run, n=3):
    """How likely each text of n tokens is, over every path; and how many paths there are."""
    found, every = torch.zeros((V,) * n, dtype=torch.float64), EveryOutcome()
    paths = 0
    for text, weight in every.paths(run):
        found[text] += weight
        paths += 1
    return found, paths


# %% slideshow={"slide_type": "subslide"}
def plain_run(chance, n=3):
    text = [0]
    for _ in range(n):
        text.append(chance.draw(probabilities(target_VV[text[-1]], warm)))
    return text[1:]


def speculative_run(drafter=ModelDrafter, rule=verify):
    """A run of three tokens, to be given a chance."""

    def run(chance):
        target, small = (
            Table(lambda text: target_VV[text[-1]]),
            Table(lambda text: draft_VV[text[-1]]),
        )
        guesser = drafter(small, 2, warm)
        rounds = speculate(target, guesser, [0], 3, sampling=warm, chance=chance, verify=rule)
        return [token for r in rounds for token in r.tokens]

    return run


# %% slideshow={"slide_type": "subslide"}
wanted, few = joint(plain_run)
got, many = joint(speculative_run())
print(f"{int((wanted > 0).sum())} texts are possible; {few} paths plainly, {many} speculatively")
print("largest difference below 1e-12:", bool((got - wanted).abs().max() < 1e-12))
assert (got - wanted).abs().max() < 1e-12 and abs(got.sum() - 1) < 1e-12

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### And would the test notice?
#
# A test that nothing fails shows nothing. Two mistakes that have really been made: accept whatever is
# guessed, and let the draft propose its *favourite* token but judge it by its softmax, as if drawn. Both
# produce fluent text. The distance is half the sum of absolute differences: the share of texts that come
# out wrongly.


# %% slideshow={"slide_type": "subslide"}
def accepts_all(logits_MV, guesses, sampling, chance):
    return list(range(len(guesses))), chance.draw(probabilities(logits_MV[-1], sampling))


class Favourites(ModelDrafter):
    def propose(self, tokens, room, chance):
        guesses, q = [], []
        for _ in range(min(self.gamma, room)):
            q.append(probabilities(self.model([*tokens, *guesses])[0], self.sampling))
            guesses.append(int(q[-1].argmax()))
        return chain(guesses, q)


wrong = {
    "right": speculative_run(),
    "everything accepted": speculative_run(rule=accepts_all),
    "favourite, judged as drawn": speculative_run(Favourites),
}
for name, run in wrong.items():
    distance = 0.5 * float((joint(run)[0] - wanted).abs().sum())
    print(f"{name:<27} {distance:.3f}")
    assert (distance < 1e-12) == (name == "right")

# %% [markdown] slideshow={"slide_type": "subslide"}
# > **Is there a better exact rule?** For one guess, no: no rule accepts more than $\sum_x \min(p(x),
# > q(x))$. For several there is. Where $p > q$ the rule accepts for certain, and what the ratio has above 1
# > is lost. *Block verification* (Sun et al. 2024, arXiv:2403.10444) lets it make up for the guesses
# > before. Every path again:

# %% slideshow={"slide_type": "subslide"}
from lecture_util.speculative.block import verify_block


def first_round(rule):
    def run(chance):
        target, small = (
            Table(lambda text: target_VV[text[-1]]),
            Table(lambda text: draft_VV[text[-1]]),
        )
        guesser = ModelDrafter(small, 2, warm)
        rounds = speculate(target, guesser, [0], 3, sampling=warm, chance=chance, verify=rule)
        return next(rounds).tokens

    return run


for name, rule in {"guess by guess": verify, "as a block": verify_block}.items():
    exact = (joint(speculative_run(rule=rule))[0] - wanted).abs().max() < 1e-12
    tokens_a_round = sum(
        weight * len(made) for made, weight in EveryOutcome().paths(first_round(rule))
    )
    print(f"{name:<15} exact: {bool(exact)}, {tokens_a_round:.4f} tokens a round")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### On the real model
#
# Every path cannot be walked with 49,152 symbols. But one step can be drawn many times. The target is our
# model, the draft the same model without eight of its layers (those that notebook 07 found least
# important). Kept are the likeliest few continuations of a sentence; 3,000 speculative steps, each with a
# fresh guess:

# %%
from lecture_util.model.tokenizer import encode
from lecture_util.speculative.draft_model import early_exit

GONE = {25, 14, 17, 13, 26, 15, 16, 3}  # notebook 07: the least important first
shallow = early_exit(model, [layer for layer in range(config.L) if layer not in GONE])
opening_1T = torch.tensor([encode(tokenizer, "Once upon a time, there was a")], device=model.device)
with torch.inference_mode():
    p_logits_V, q_logits_V = (m(opening_1T)[0, -1].double().cpu() for m in (model, shallow))
names = (p_logits_V.softmax(-1) + q_logits_V.softmax(-1)).topk(8).indices
p_logits_V, q_logits_V = p_logits_V[names], q_logits_V[names]
print(f"{shallow.config.L} of {config.L} layers, sharing all weights;", len(names), "continuations")

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
normal, chance = Sampling(temperature=1.0), Chance(torch.Generator().manual_seed(1))
p_V, q_V = (probabilities(x, normal) for x in (p_logits_V, q_logits_V))
rows_MV, counts_V, accepted = torch.stack((p_logits_V, p_logits_V)), torch.zeros(8), 0
for _ in range(3000):
    x = chance.draw(q_V)
    path, after = verify(rows_MV, chain([x], [q_V]), normal, chance)
    counts_V[x if path else after] += 1  # the first token only
    accepted += len(path)
shares_V = counts_V / counts_V.sum()
print(f"accepted {accepted / 3000:.3f}, predicted {agreement(p_V, q_V):.3f}")
print(f"distance to p {0.5 * (shares_V - p_V).abs().sum():.3f}, "
      f"of the draft {0.5 * (q_V - p_V).abs().sum():.3f}")  # fmt: skip
assert (shares_V - p_V).abs().max() < 0.04 and abs(accepted / 3000 - agreement(p_V, q_V)) < 0.04

# %% tags=["nbval-ignore-output", "hide-input"] slideshow={"slide_type": "subslide"}
from lecture_util.classroom.figures import MEASURED, PREDICTED, caption, claim

_, ax = plt.subplots(figsize=(7, 3.0))
places = torch.arange(8)
ax.bar(places - 0.27, q_V, 0.26, color="0.75", label="draft, q")
ax.bar(places, shares_V, 0.26, color=MEASURED, label="speculative, drawn")
ax.bar(places + 0.27, p_V, 0.26, fill=False, edgecolor=PREDICTED, ls="--", label="target, p")
ax.set_xticks(places, [tokenizer.decode([int(i)]).strip() for i in names])
ax.set_ylabel("probability")
ax.legend(frameon=False)
claim(ax, "What comes out follows the target, whatever the draft likes")
caption(ax, device=str(model.device), dtype="fp32", shapes="3,000 draws, 8 continuations")
plt.show()

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Exercise 8.2: accept, or draw from what is left
# *12 minutes · the rule that makes speculation exact, drawn and chosen guesses alike*
#
# Return two things: the probability with which the guess `x` is accepted, and the distribution that the
# token is drawn from if it was rejected. `q_V` is None for a guess that was chosen, not drawn. Where $p$
# and $q$ agree nothing is rejected and nothing is left; return `p_V` then, not NaN.


# %% slideshow={"slide_type": "skip"}
def judge(p_V, q_V, x):
    """-> (probability of accepting x, distribution after a rejection)."""
    ### BEGIN SOLUTION
    if q_V is None:
        q_V = torch.zeros_like(p_V)
        q_V[x] = 1
    left_V = (p_V - q_V).clamp(min=0)
    total = left_V.sum()
    return min(1.0, float(p_V[x] / q_V[x])), left_V / total if total > 0 else p_V
    ### END SOLUTION


# %% slideshow={"slide_type": "skip"}
check("8.2", judge)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Exercise 8.3: a round that is not exact
# *15 minutes · finding mistakes that no shape and no single example shows*
#
# A colleague writes a whole round. `q_KV` has the draft's distributions for $K$ guesses, `p_MV` the
# target's, $K+1$ rows. To keep it simple no row depends on the guesses before it. `chance.draw(p_V)` draws
# a token, `chance.uniform()` a number from 0 to 1.
#
# ```python
# def one_round(p_MV, q_KV, chance):
#     guesses = [int(q_V.argmax()) for q_V in q_KV]
#     u = chance.uniform()
#     for k, x in enumerate(guesses):
#         left_V = (p_MV[k] - q_KV[k]).clamp(min=0)
#         if u >= p_MV[k, x] / q_KV[k, x]:
#             return [*guesses[:k], chance.draw(left_V / left_V.sum())]
#     return [*guesses, chance.draw(left_V / left_V.sum())]
# ```
#
# The text reads well. Three lines are wrong. Write the round right; the check goes down every path.


# %% slideshow={"slide_type": "skip"}
def exact_round(p_MV, q_KV, chance):
    """The tokens of one round, 1 to K + 1 of them, as a list."""
    ### BEGIN SOLUTION
    guesses = [chance.draw(q_V) for q_V in q_KV]
    for k, x in enumerate(guesses):
        if chance.uniform() >= p_MV[k, x] / q_KV[k, x]:
            left_V = (p_MV[k] - q_KV[k]).clamp(min=0)
            return [*guesses[:k], chance.draw(left_V / left_V.sum())]
    return [*guesses, chance.draw(p_MV[-1])]
    ### END SOLUTION


# %% slideshow={"slide_type": "skip"}
check("8.3", exact_round)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 4. How many tokens, how fast?
#
# Say a guess is accepted with probability $\alpha$, each one alike and independent of the others. A draft
# of $\gamma$ guesses:

# %% tags=["nbval-ignore-output"]
tokens_guess = predict("Four guesses, each right 8 times in 10: tokens a round?", unit="tokens")

# %% [markdown] slideshow={"slide_type": "subslide"}
# Guess $k$ is kept if it and all before it were accepted: $\alpha^k$. And every round adds one token of the
# target's own. So the expected number is $1 + \alpha + \dots + \alpha^\gamma$, a geometric series:

# %%
from lecture_util.speculative.expected import best_gamma, expected_tokens, speedup, tokens_formula

alpha, gamma, tokens = tokens_formula()
for g in range(7):
    series = sum(alpha**k for k in range(g + 1))
    assert sympy.cancel(series - tokens.subs(gamma, g)) == 0
print(tokens, " at 0.8 and 4:", round(float(tokens.subs({alpha: 0.8, gamma: 4})), 4))
print("as gamma grows:", sympy.limit(tokens.subs(alpha, sympy.Rational(4, 5)), gamma, sympy.oo))
assert abs(expected_tokens(0.8, 4) - 3.3616) < 1e-12

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
tokens_guess.reveal(predicted=expected_tokens(0.8, 4))

# %% [markdown]
# Not $1 + 4 \cdot 0.8 = 4.2$: what comes after a rejection is lost. And however many guesses you make, no
# more than $1/(1-\alpha)$ tokens come of it, 5 here. Does the loop do what the formula says? Two fixed
# distributions with $\alpha = 0.8$, so that every guess really is alike:

# %% slideshow={"slide_type": "subslide"}
fixed_p, fixed_q = torch.tensor([0.5, 0.3, 0.2]).log(), torch.tensor([0.3, 0.3, 0.4]).log()
print("alpha =", round(float(agreement(fixed_p.softmax(-1), fixed_q.softmax(-1))), 6))
for g in (1, 4, 8):
    chance, tally = Chance(torch.Generator().manual_seed(g)), Tally()
    small = ModelDrafter(Table(lambda text: fixed_q), g, normal)
    for r in speculate(
        Table(lambda text: fixed_p), small, [0], 1000, sampling=normal, chance=chance
    ):
        tally.add(r)
    off = tally.tokens_per_round / expected_tokens(0.8, g) - 1
    print(f"{g} guesses: predicted {expected_tokens(0.8, g):.2f} tokens a round, measured within 8%:",
          abs(off) < 0.08)  # fmt: skip

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### From tokens to speed
#
# A round costs $\gamma$ forwards of the draft, each $c$ times as much as one of the target, and one check
# of $\gamma+1$ tokens, which costs $v(\gamma+1)$. A plain step costs 1 and makes 1 token. So
#
# $$\text{speed-up} = \frac{1-\alpha^{\gamma+1}}{(1-\alpha)\,(\gamma c + v(\gamma+1))}$$
#
# Leviathan et al. have $v = 1$: on their accelerator at batch 1, as in our first table, checking is free.
# Then more agreement is always better, and of guesses there is a best number, which $\alpha$
# and $c$ decide:

# %%
for alpha_, c in [(0.6, 0.02), (0.8, 0.02), (0.8, 0.1), (0.8, 0.5), (0.8, 1.0)]:
    best = best_gamma(alpha_, c)
    print(
        f"alpha {alpha_}, c {c:<4}: best {best:>2} guesses, {speedup(alpha_, best, c):.2f} times as fast"
    )

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Read.** The last row: a draft as expensive as the target never pays, even if it is right. Drafting with
# the model itself is no trick.
#
# ![Left, speed-up against α: formulas for γ = 3, 5, 7 rise ever steeper. Measured with T5-XXL (in brackets the formula's tokens a round): γ=7, α=0.75, 3.4× (3.60); γ=7, α=0.62, 2.6× (2.57); γ=5, α=0.65, 3.1× (2.64); γ=5, α=0.53, 2.3× (2.08); γ=3, α=0.55, 2.2× (2.02); γ=3, α=0.56, 1.7× (2.05). Right, predicted against γ if a guess costs 0.05 forwards: best at γ=3 for α=0.5, γ=6 for α=0.7, γ=13 for α=0.9.](../images/leviathan.svg)

# %% slideshow={"slide_type": "subslide"}
published = [("EnDe, small, T=0", 7, 0.75, 3.4), ("CNN/DM, small, T=0", 5, 0.65, 3.1),
             ("CNN/DM, small, T=1", 5, 0.53, 2.3), ("CNN/DM, base, T=1", 3, 0.55, 2.2),
             ("CNN/DM, large, T=1", 3, 0.56, 1.7)]  # fmt: skip
print("Leviathan et al. 2022, table 2, T5-XXL: task, T5 that drafts, temperature")
for name, g, a, times in published:
    made = expected_tokens(a, g)
    print(f"{name:<18} gamma {g}, alpha {a}: {made:.2f} tokens a round, {times} times as fast")

# %% [markdown]
# At one temperature, T=1, the larger drafts cost far more than T5-small and are hardly right more often. And
# look at the second row: it is *faster* than its tokens account for, even if guesses and checks were free.
# So $\alpha$ and time were not measured on the same terms, or the guesses are not alike. A formula predicts;
# it takes a clock to know.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Which pairs?
#
# The lecture's examples: a draft of 8 B parameters for a target of 70 B, or 1 B for 8 B. At batch 1 the
# cost of a forward is the bytes it reads, so $c$ is about the ratio of parameters. Suppose that it is right
# 8 times in 10:

# %%
for name, c in {"8 B for 70 B": 8 / 70, "1 B for 8 B": 1 / 8}.items():
    best = best_gamma(0.8, c)
    print(
        f"{name}: c = {c:.2f}, best {best} guesses, at most {speedup(0.8, best, c):.2f} times as fast"
    )

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### What Chen et al. measured
#
# ![Milliseconds a token as published: 14.1 without speculation. With it: XSum, nucleus 7.52 ms, 1.88 times as fast, score 0.112 before and 0.114 after; XSum, greedy 7.00 ms, 2.01 times as fast, score 0.157 before and 0.156 after; HumanEval 5.73 ms, 2.46 times as fast, score 45.1% before and 47.0% after.](../images/chen-results.svg)

# %% [markdown] slideshow={"slide_type": "subslide"}
# > **Erratum.** "Acceptance rate" means two things. Leviathan's $\alpha$ is of *one guess*, given that it
# > is reached. Chen's plot shows the share of all $K$ guesses that were *kept*, which falls with $K$ even
# > where $\alpha$ doesn't. To compare, solve one for the other. (Chen et al.'s 0.80 is read off their
# > plot.)

# %%
K, share = 4, 0.80  # HumanEval, four guesses
a = sympy.Symbol("a", positive=True)
kept = sympy.Poly(sum(a**k for k in range(1, K + 1)) - K * share)
(solved,) = (root for root in kept.nroots() if root.is_real and root > 0)
print(f"kept {share:.2f} of {K} means alpha = {float(solved):.2f}")
print(f"tokens a round: {1 + K * share:.1f} = {expected_tokens(float(solved), K):.1f}")
assert float(solved) > share + 0.1

# %% [markdown] slideshow={"slide_type": "subslide"}
# ![Two rows of three panels against K guesses: share kept, ms a loop, ms for 128 tokens. Chen, read off: HumanEval kept 0.945 to 0.68, XSum 0.875 to 0.455, loop 14.1 to 28.5 ms. Ours, n-gram: kept 0.93 to 0.80, best 1,410 ms at K=7; early exit: kept 0.60 to 0.14, best 4,310 ms at K=0.](../images/chen-panels.svg)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Predict ours
#
# The draft is the model without 8 of its 30 layers. It shares the target's weights, so it costs no memory.
# What does it bring? We need three numbers: $\alpha$, $c$ and $v$. First $\alpha$, on the answer from
# above, at temperature 1 and greedily:

# %% tags=["nbval-ignore-output"]
with torch.inference_mode():
    text_1T = torch.tensor([[*prompt, *plain]], device=model.device)
    p_TV, q_TV = (m(text_1T)[0, len(prompt) - 1 : -1].softmax(-1) for m in (model, shallow))
alpha_sampled = float(agreement(p_TV, q_TV).mean())
alpha_greedy = float((p_TV.argmax(-1) == q_TV.argmax(-1)).float().mean())
c = measure(checker(shallow, 1), repeats=4).best_s / cost_s["fp32", 1]
print(f"alpha {alpha_sampled:.2f} sampled, {alpha_greedy:.2f} greedy; a guess costs c = {c:.2f}")

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
pays = predict("Early exit, 2 guesses a round: how many times as fast?", unit="times")

# %% tags=["nbval-ignore-output"]
v_3 = cost_s["fp32", 3] / cost_s["fp32", 1]
predicted = speedup(alpha_greedy, 2, c, v_3)
plan = best_gamma(alpha_greedy, c, lambda n: 1 + (n - 1) * (v_3 - 1) / 2, most=8)
print(f"predicted {predicted:.2f} times as fast; best are {plan} guesses: "
      f"{speedup(alpha_greedy, plan, c, 1 + plan * (v_3 - 1) / 2):.2f}")  # fmt: skip

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
from lecture_util.speculative.speculate import generate_speculative
from lecture_util.speculative.target import Reader

short, tally = 20, Tally()
with stopwatch(model.device) as plainly:
    generate(model, [prompt], short, eos=END)
with stopwatch(model.device) as guessing:
    made = generate_speculative(model, lambda reader: ModelDrafter(Reader(shallow, 256), 2),
                                prompt, short, eos=END, tally=tally)  # fmt: skip
assert made == plain[:short]

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
measured = plainly.seconds / guessing.seconds
print(
    f"{tally.tokens_per_round:.2f} tokens a round; {measured:.2f} times as fast (prompt included)"
)
pays.reveal(measured, predicted=predicted)

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Read.** The same answer, and nothing to win: it is slower. A draft that costs about three quarters of its
# target uses up what it saves, however well it guesses. On a machine where checking isn't free either, the
# best number of guesses is *none*. The record has other depths (and other prompts, so another $\alpha$), and
# for each the best of several numbers of guesses:

# %% tags=["nbval-ignore-output"]
for entry in record["early_exits"]:
    gains = {int(g): row["speedup"] for g, row in entry["gamma"].items()}
    best = max(gains, key=gains.get)
    print(f"{entry['layers']} layers: alpha {entry['alpha_greedy']:.2f} greedy, {entry['alpha_sampled']:.2f} "
          f"sampled; c {entry['c']:.2f}; best measured {gains[best]:.2f} with {best}, "
          f"predicted there {entry['gamma'][str(best)]['predicted']:.2f}")  # fmt: skip

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
from lecture_util.classroom.widgets import speedup_explorer

speedup_explorer()

# %% [markdown] slideshow={"slide_type": "notes"}
# *For the instructor.* Put the explorer at alpha 0.8 and 4 guesses, then move c from 0 to 1 and ask when it
# stops to pay. Then the other way: at c = 0.05, change what verification costs from flat to this machine's.
# The same draft that was worth three times is worth little. Everyone's first question, why not always 16
# guesses, answers itself.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Exercise 8.4: how many guesses?
# *10 minutes · predicting a speed-up from acceptance and two costs*
#
# `v` is a function: `v(n)` is what a forward of the target over $n$ tokens costs, and `v(1)` is 1. Return
# the best number of guesses, from 0 to `most`, and the speed-up that it should bring.


# %% slideshow={"slide_type": "skip"}
def plan_guesses(alpha, c, v, most):
    """-> (gamma, speed-up)."""

    ### BEGIN SOLUTION
    def gain(gamma):
        return sum(alpha**k for k in range(gamma + 1)) / (gamma * c + v(gamma + 1))

    best = max(range(most + 1), key=gain)
    return best, gain(best)
    ### END SOLUTION


# %% slideshow={"slide_type": "skip"}
check("8.4", plan_guesses)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 5. Four ways to guess
#
# So a draft should be right, and cost next to nothing. The slides list a smaller model off the shelf,
# n-grams of the prompt, and a small model trained on top of the large one, which is frozen or trained
# along. The lecture adds one that reads the large model's features. Four ways to guess, then:
#
# ![Four panels; tokens t1 to t3 are known. Small model: reads t1, t2, t3, gives t4, reads it, gives t5. N-gram: the last two tokens stood earlier in the text, and what followed there is copied. Medusa: from the target's feature f2 its own head gave t3, head 1 gives t4 and head 2 t5, at once. EAGLE: one layer reads f1 with t2 and f2 with t3, gives a feature for t4; that with t4 gives one for t5.](../images/four-ways-to-draft.svg)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### A smaller model
#
# Off the shelf, of the same family: it must share the *tokenizer*, or its tokens mean something else. Best
# if it was distilled from the target. The SmolLM2 family has 1.7 B and 135 M: $c$ by bytes is below a
# tenth. That takes a GPU and a download:

# %% tags=["nbval-ignore-output"]
if torch.cuda.is_available():
    from lecture_util.model.checkpoint import WeightsError

    try:
        large = load("smollm2-1.7b", dtype=torch.bfloat16)
        pair, tally = chat(tokenizer, "Why is the sea salty?"), Tally()
        with stopwatch(large.device) as plainly:
            wanted_text = generate(large, [pair], 128, eos=END)[0]
        with stopwatch(large.device) as guessing:
            generate_speculative(large, lambda reader: ModelDrafter(Reader(half, 512), 4), pair, 128,
                                 eos=END, tally=tally)  # fmt: skip
        print(f"c by bytes {num_params(config) / num_params(large.config):.2f}; "
              f"{tally.tokens_per_round:.2f} tokens a round, alpha {tally.acceptance:.2f}, "
              f"{plainly.seconds / guessing.seconds:.2f} times as fast")  # fmt: skip
        del large
    except WeightsError as error:
        print(f"not measured here: {error}")
else:
    print("not measured here: no GPU")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### The prompt's own words
#
# Section 2's look-up: $c = 0$, and no training. How often it is right depends on the *task*. As recorded
# (decoding only, without the prompt), in tasks whose answer repeats the input, ours beside transformers'
# prompt lookup, each against its own plain decoding, on the same weights and prompts:

# %% tags=["nbval-ignore-output", "hide-input"] slideshow={"slide_type": "subslide"}
print(
    "tokens/s                plain  n-gram  faster  predicted   transformers: plain  lookup  faster"
)
for row in record["grounded"]:
    print(f"{row['task']:<12} {row['dtype']:<9} {row['plain']:6.1f} {row['ngram']:7.1f} "
          f"{row['ngram'] / row['plain']:6.2f}x {row['ngram_predicted']:8.2f}x {row['hf_plain']:20.1f} "
          f"{row['hf_lookup']:7.1f} {row['hf_lookup'] / row['hf_plain']:6.2f}x")  # fmt: skip

# %% [markdown] slideshow={"slide_type": "subslide"}
# ![Tokens a second on tasks whose answer repeats the prompt: our plain decoding, our n-gram drafts, transformers' prompt lookup. fp32: copy 31, 114, 111; rewrite 31, 69, 61; extract 30, 53, 41; code edit 30, 52, 43; summarize 31, 44, 36. bf16: copy 28, 146, 127; rewrite 27, 78, 67; extract 29, 56, 41; code edit 28, 57, 48; summarize 28, 42, 34.](../images/grounded-tasks.svg)

# %% [markdown] slideshow={"slide_type": "subslide"}
# The original README reports 2 to 4 times on such tasks (Saxena 2023), on a GPU. Where nothing is repeated
# the look-up finds little. Guessing from a single token costs a little even so, and our drafter wants at
# least two in a row.
#
# ### A peer, on the same weights
#
# transformers calls it *assisted generation*. Two options, the same prompt, and the same tokens as ours:

# %% tags=["nbval-ignore-output"]
import transformers

from lecture_util.model.weights import locate

transformers.logging.set_verbosity_error()  # it deprecates what it passes to itself
transformers.utils.logging.disable_progress_bar()
theirs = transformers.AutoModelForCausalLM.from_pretrained(locate(REFERENCE), dtype=torch.float32)
theirs = theirs.to(model.device)
assistant = copy.deepcopy(theirs)
assistant.model.layers = torch.nn.ModuleList(
    layer for i, layer in enumerate(assistant.model.layers) if i not in GONE
)
for place, layer in enumerate(assistant.model.layers):
    layer.self_attn.layer_idx = place
assistant.config.num_hidden_layers = len(assistant.model.layers)

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
prompt_1T = torch.tensor([prompt], device=model.device)
options = {"plain": {}, "prompt lookup": {"prompt_lookup_num_tokens": 8},
           "assistant": {"assistant_model": assistant}}  # fmt: skip
for name, option in options.items():
    with stopwatch(model.device) as watch:
        out_1T = theirs.generate(prompt_1T, attention_mask=torch.ones_like(prompt_1T), do_sample=False,
                                 max_new_tokens=short, pad_token_id=END, **option)  # fmt: skip
    same = out_1T[0, len(prompt) :].tolist() == plain[:short]
    print(f"{name:<14} {watch.seconds:5.2f} s, the same tokens as ours: {same}")
    assert same
del theirs, assistant

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Medusa: heads
#
# The model's last feature $x$ holds more than the next token: it has begun to think of the one after. So
# add *heads* that read the same feature, and let head $k$ guess the token $k$ after the next. One small
# matrix each, all in one go; the model, with its own head $W_{\text{out}}$, stays frozen:
#
# $$\text{head}_k(x) = W_{\text{out}}\left(x + \operatorname{SiLU}(W_k x + b_k)\right)$$
#
# With $W_k = 0$ and $b_k = 0$ a head is the model's own: it starts from guessing the *next* token, and
# learns to look further.

# %%
from lecture_util.speculative.medusa import MedusaHeads

fresh = MedusaHeads(config.D, heads=3).to(model.device)
with torch.inference_mode():
    x_TD = model.features(prompt_1T)[0, -4:]
    own_TV, fresh_TKV = model.head(x_TD), model.head(fresh(x_TD))
assert all(torch.allclose(fresh_TKV[:, k], own_TV, atol=1e-4) for k in range(3))
print(
    "three fresh heads:",
    f"{sum(w.numel() for w in fresh.parameters()):,} weights, all as the model's own",
)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Training them
#
# The teacher is the model's own text: questions are put to it, and its answers are what the heads learn
# to foresee. Loss of head $k$: the cross-entropy of its token, the $k$-th after the next, times
# $0.8^{k-1}$. Ours were trained so by `benchmarks/train_drafts.py`, and come with the course. How often
# is each right, on prompts with other topics?

# %% tags=["nbval-ignore-output"]
from lecture_util.speculative.trained import load_medusa

heads, draft_vocabulary, accuracy_KR = load_medusa(model)
for k, ranks in enumerate(accuracy_KR.tolist(), start=1):
    print(f"head {k}: the likeliest right {ranks[0]:.2f}, the second {ranks[1]:.2f}, "
          f"the third {ranks[2]:.2f}; any of {len(ranks)}: {sum(ranks):.2f}")  # fmt: skip
first_K = accuracy_KR[:, 0]
assert (first_K[1:] < first_K[:-1]).all()

# %% [markdown] slideshow={"slide_type": "subslide"}
# That is **Medusa-1**: the model is frozen, so plain decoding stays what it was. (The paper's heads for a 7
# B model took five hours on one A100, for 60,000 samples.) **Medusa-2** trains the model along with its
# heads. To the heads' loss, small at first, the usual loss of the next token is added,
#
# $$\mathcal L = \mathcal L_{\text{next}} + \lambda_0 \sum_k 0.8^{k-1}\, \mathcal L_k,$$
#
# so that the features learn to look ahead and the model keeps its language. The heads warm up alone and
# with a higher learning rate, or their random guesses would spoil the model. It guesses better, but it is
# *another* model: exactness then means exact to that one.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### A tree of guesses
#
# Head 2 doesn't know what head 1 said. Its second choice may go with head 1's first. So instead of one
# chain, take several combinations, and check them *all in one forward*. They share beginnings, so they form
# a tree. Which combinations? If heads were right independently, a node is worth the product along its path;
# take the best nodes, one after the other:

# %% tags=["nbval-ignore-output"]
from lecture_util.speculative.medusa import best_tree

seen = {row["size"]: row["tokens_per_round"] for row in record["trees"]["medusa"]}
for size in (1, 3, 6, 12):
    tree = best_tree(accuracy_KR, size)
    worth = sum(
        float(torch.stack([accuracy_KR[k, r] for k, r in enumerate(node)]).prod()) for node in tree
    )
    print(f"{size:>2} guesses: {1 + worth:.2f} tokens a round expected, {seen[size]:.2f} recorded; "
          f"depths {[sum(len(node) == d for node in tree) for d in (1, 2, 3)]}")  # fmt: skip

# %% [markdown]
# Fewer, as recorded: heads are not independent, and those are other prompts. A larger tree accepts more, and
# costs more to check. What it may cost is $v$ again: on a GPU, where 64 tokens are as cheap as one, Medusa's
# trees have about that many nodes. Here a few are all that pays.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### One forward for a tree
#
# Two changes make a forward read a tree instead of a chain. Each guess sees the sequence, its *own*
# ancestors, and itself, but none of the alternatives; and its *position* is its depth, so two guesses of
# one token stand at one position.
#
# ![Left, a tree after The cat sat on the: warm, then mat and a full stop, or and; old, then mat. Right, the mask of that forward: seven rows, the newest token and six guesses; eleven columns. All see the five words; of the guesses each sees itself and those it follows. Slots run from 5 to 10, positions are 5, 5, 6, 6, 6, 7. Accepted: guesses 0 and 2, then kept in slots 5 and 6.](../images/draft-tree-mask.svg)

# %% slideshow={"slide_type": "subslide"}
from lecture_util.model.transformer import Transformer
from lecture_util.speculative.draft import ROOT, Draft
from lecture_util.speculative.target import tree_mask

tiny = Config(D=24, F=40, K=2, G=2, H=6, L=3, V=11, max_context=256)
toy = Transformer.random(tiny, seed=0, dtype=torch.float64)
tree = Draft([4, 7, 1, 4, 9], [ROOT, ROOT, 0, 0, 1])  # 4 then 1 or 4; 7 then 9
print(tree_mask(tree).int().tolist(), "depths", tree.depths)

sequence = [3, 1, 4, 1, 5]
rows_MV = Reader(toy, 32)(sequence, tree)  # one forward: row 0 after the sequence, then each node
for node in range(len(tree)):
    alone = [*sequence, *(tree.tokens[i] for i in tree.path(node))]
    assert torch.allclose(rows_MV[node + 1], toy(torch.tensor([alone]))[0, -1])
print("each row as if its path had been read alone")

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
from lecture_util.classroom.widgets import tree_unfolding
from lecture_util.speculative.prompts import held_prompts
from lecture_util.speculative.trained import eagle_drafter, medusa_drafter

asked = chat(tokenizer, held_prompts(3)[2])
medusa_rounds = list(stream_speculative(model, medusa_drafter(model, 6), asked, 24, eos=END))
nodes = sorted(best_tree(accuracy_KR, 6), key=len)  # as the drafter orders them
chances = [float(accuracy_KR[len(node) - 1, node[-1]]) for node in nodes]

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
tree_unfolding(medusa_rounds[1:4], tokenizer, probabilities=[chances] * 3)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Several guesses for one token, exactly
#
# Alternatives are tried in turn. If the first is rejected, what the target still wants is the residual, so
# the second is judged by *that*, and so on. Once a guess was accepted, the next distribution is the
# target's own row, *fresh*: what was rejected beside it doesn't matter any more. (An implementation once
# drew the bonus from the adjusted one: SafeAILab/EAGLE#47.)
#
# The same test as before, every path, now with trees of chosen guesses:


# %%
class Alternatives:
    """The draft's two favourites for the next token, and one guess after each of them."""

    def propose(self, tokens, room, chance):
        a, b = draft_VV[tokens[-1]].topk(2).indices.tolist()
        after = [int(draft_VV[x].argmax()) for x in (a, b)]
        return Draft([a, b, *after], [ROOT, ROOT, 0, 1])

    def settle(self, tokens):
        pass


trees, paths = joint(speculative_run(lambda *_: Alternatives()))
print("exact with alternatives:", bool((trees - wanted).abs().max() < 1e-12))
assert (trees - wanted).abs().max() < 1e-12

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Typical acceptance, which is not
#
# Medusa also proposes another rule: accept whatever the target finds *plausible*, that is above a
# threshold, which is lower where the target is unsure. No ratio, no residual: more is accepted. And the
# text is no longer a sample from the model; it leans to what the draft likes. Often that is fine. But say
# it: it is **lossy**. (Four symbols, an arbitrary toy, chosen guesses: below is a hard case.)

# %%
from lecture_util.speculative.typical import verify_typical

for name, rule in {"lossless": verify, "typical": verify_typical}.items():
    typical, _ = joint(speculative_run(lambda *_: Alternatives(), rule))
    print(
        f"{name:<9} distance to the target's texts {0.5 * float((typical - wanted).abs().sum()):.3f}"
    )
    assert (name == "lossless") == bool((typical - wanted).abs().max() < 1e-12)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### EAGLE: features
#
# Medusa's heads guess far ahead from one old feature. EAGLE goes on step by step instead, like a small
# model, but one level up: it continues the target's *features*. One layer of the target's own kind reads
# the feature of position $t$ and predicts the feature of $t+1$; the model's own head turns that into
# guesses.
#
# One catch. A feature says which tokens are *likely* next, not which one was drawn. So the layer gets that
# too, the token **shifted by one**: feature of $t$, embedding of token $t+1$. Only then can it know where
# the text is going.

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
eagle_rounds = list(stream_speculative(model, eagle_drafter(model), asked, 24, eos=END))
tree_unfolding(eagle_rounds[1:4], tokenizer)

# %% [markdown] slideshow={"slide_type": "subslide"}
# Its tree is grown where the layer is surest: EAGLE-2's idea. Where it is sure, a chain; where it isn't,
# alternatives.
#
# ### A draft need not know every word
#
# The output head of our small model is a large part of it. A draft that runs all of it for each guess
# spends its time on tokens that hardly ever come. So ours guess only among the frequent ones. What they
# can't say, verification corrects:

# %% tags=["nbval-ignore-output"]
U, head_size = len(draft_vocabulary.ids_U), config.V * config.D
answer = torch.tensor(plain, device=model.device)
known = (draft_vocabulary.place_V[answer] >= 0).float().mean()
print(f"{U:,} of {config.V:,} tokens; the head has {head_size / num_params(config):.0%} of all weights, "
      f"the draft's reads {U / config.V:.0%} of that; of the answer in section 2 it can say {known:.0%}")  # fmt: skip

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### All four, on one question
#
# Greedy, in fp32, on a question that none of the heads was trained on. The text is the same every time.
# What differs is the number of forwards:

# %% tags=["nbval-ignore-output"]
drafters = {
    "n-gram": lambda reader: NgramDrafter(banned=END),
    "early exit": lambda reader: ModelDrafter(Reader(shallow, 256), 2),
    "Medusa": medusa_drafter(model, 4),
    "EAGLE": eagle_drafter(model),
}
(asked_plain,), live = generate(model, [asked], 32, eos=END), {}
for name, drafter in drafters.items():
    tally = Tally()
    live[name] = list(stream_speculative(model, drafter, asked, 32, eos=END))
    for r in live[name]:
        tally.add(r)
    assert [token for r in live[name] for token in r.tokens] == asked_plain
    print(f"{name:<11} {tally.rounds:>2} rounds, {tally.tokens_per_round:.2f} tokens a round, "
          f"{tally.drafted} guesses read")  # fmt: skip

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
token_ribbon(live, tokenizer)

# %% [markdown] slideshow={"slide_type": "notes"}
# *For the instructor.* Choose the drafters in the menu one after the other, at the same round. The n-gram
# line is nearly all plain. Ask which of the trained two is cleverer about what it just said (EAGLE: it has
# seen the token; Medusa's second head has not). Then ask why nobody's text differs.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Exercise 8.5: a tree in one forward
# *12 minutes · who may see whom, and at which position*
#
# `before` tokens are in the cache. $M$ guesses follow, and `parents` says which guess each one comes after:
# -1 for the sequence itself, and parents come first. Return `mask_MS`, bool, with $S$ = `before` + $M$
# columns, True where guess $m$ may look; and `positions_M`, integers, counted from 0 at the sequence's
# first token.


# %% slideshow={"slide_type": "skip"}
def tree_in_one_forward(parents, before):
    """-> (mask_MS, positions_M)."""
    ### BEGIN SOLUTION
    M = len(parents)
    mask_MS = torch.zeros(M, before + M, dtype=torch.bool)
    positions = []
    for m, parent in enumerate(parents):
        mask_MS[m, :before] = True
        if parent >= 0:
            mask_MS[m] |= mask_MS[parent]
        mask_MS[m, before + m] = True
        positions.append(positions[parent] + 1 if parent >= 0 else before)
    return mask_MS, torch.tensor(positions)
    ### END SOLUTION


# %% slideshow={"slide_type": "skip"}
check("8.5", tree_in_one_forward)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 6. Taking back
#
# Most bugs in speculative decoding are not in the mathematics. They are in what is left over after a round.
#
# **Caches.** The forward that checks a draft writes keys and values of *all* guesses. Those of rejected
# ones must go, or every later token sees words that were never said. Exactly those: who clears the cache
# after each round pays for the prompt again and again.

# %% slideshow={"slide_type": "subslide"}
toy_draft, sharp = early_exit(toy, [0, 2]), Sampling(temperature=0.1)
reader, small = Reader(toy, 128), ModelDrafter(Reader(toy_draft, 128), 3, sharp)
chance, text, seen = Chance(torch.Generator().manual_seed(0)), [3, 1, 4], {}
for r in speculate(reader, small, text, 100, sampling=sharp, chance=chance):
    text = [*text, *r.tokens]
    if len(r.draft) == 3:
        seen[len(r.accepted)] = (len(reader) - len(text), len(small.model) - len(text))
for accepted, (target_is, draft_is) in sorted(seen.items()):
    print(f"{accepted} of 3 accepted: target holds n{target_is}, draft n{draft_is}")
fresh_V = toy(torch.tensor([text]))[0, -1]
assert torch.allclose(reader(text)[0], fresh_V) and torch.allclose(
    small.model(text)[0], toy_draft(torch.tensor([text]))[0, -1]
)
print("logits after all that: those of a fresh forward")

# %% [markdown] slideshow={"slide_type": "subslide"}
# With $n$ tokens in the sequence the target holds $n-1$: the newest came out of its last forward, and was
# never put in. The draft holds as many, with one exception. If *all* its guesses were accepted, it never
# read its own last one, so it is one more behind, and reads two tokens at the next round. Forget that
# **catch-up**, and the draft goes on with a hole in its memory. Nothing breaks: verification corrects
# everything. Only acceptance falls, and nobody knows why.

# %% [markdown] slideshow={"slide_type": "subslide"}
# **End tokens.** A guessed end is provisional: if it is rejected, the text goes on. If it is accepted, the
# text ends *there*, whatever guesses after it would also have been accepted. A target that follows a script
# shows all cases; 2 is the end token:

# %% slideshow={"slide_type": "subslide"}
script = [5, 1, 4, 2, 3, 6, 2, 8]


class Says:
    """A drafter that always guesses the same."""

    def __init__(self, *guesses):
        self.guesses = guesses

    def propose(self, tokens, room, chance):
        return chain(self.guesses)

    def settle(self, tokens):
        pass


follows = Table(lambda text: torch.eye(9)[script[len(text) - 1]])  # text[0] is the prompt
for guesses in [(5, 2), (5, 1, 4, 2, 3), (7,), ()]:
    rounds = list(speculate(follows, Says(*guesses), [0], 8, eos=2))
    made = [token for r in rounds for token in r.tokens]
    print(f"guessing {guesses!s:<16} {made}, first round ends with a {rounds[0].last}")
    assert made == [5, 1, 4, 2]

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Budgets.** A round yields up to $\gamma + 1$ tokens. If only $b$ are still wanted, guess at most $b -
# 1$. The loop cuts longer drafts, so that every budget gives exactly what plain decoding gives:

# %%
for budget in (0, 1, 3, 4):
    rounds = list(speculate(follows, Says(5, 1, 4), [0], budget))
    made = [token for r in rounds for token in r.tokens]
    print(f"budget {budget}: {made}, drafts of {[len(r.draft) for r in rounds]}")
    assert made == script[:budget]

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Exercise 8.6: what the caches keep
# *8 minutes · rollback, and the token that the draft never read*
#
# A sequence of `n` tokens; target and draft have both read all but the newest. The draft makes `gamma`
# guesses one after the other, the target checks them in one forward, `accepted` of them are accepted, and
# one token of the target's own follows. Return
#
# - how many tokens the target's cache may keep,
# - how many the draft's may keep,
# - how many tokens the draft reads in its first forward of the next round.


# %% slideshow={"slide_type": "skip"}
def what_caches_keep(n, gamma, accepted):
    """-> (target, draft, tokens that the draft reads next)."""
    ### BEGIN SOLUTION
    target = n + accepted
    draft = n + min(accepted, gamma - 1)
    return target, draft, n + accepted + 1 - draft
    ### END SOLUTION


# %% slideshow={"slide_type": "skip"}
check("8.6", what_caches_keep)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 7. Two exact methods, two texts
#
# Greedy speculation gives *the same tokens*: we asserted it, in fp32. Run it in bf16, and sooner or later
# some text will differ from plain greedy decoding. A bug?

# %% tags=["nbval-ignore-output"]
differs = predict(
    "The same bf16 model reads the same tokens, one by one or nine at a time. Its logits are",
    choices=["equal to the last bit", "nearly equal", "quite different"],
)


# %% slideshow={"slide_type": "subslide"}
@torch.inference_mode()
def read_in_blocks(subject, tokens, T):
    """The logits that choose each of `tokens`, read T at a time behind the prompt."""
    cache = KVCache(subject.config, 1, len(prompt) + len(tokens), subject.dtype, subject.device)
    subject.features(prompt_1T[:, :-1], cache)
    read = torch.tensor([[prompt[-1], *tokens[:-1]]], device=subject.device)
    return torch.cat([subject(block, cache)[0].float() for block in read.split(T, dim=1)])


# %% tags=["nbval-ignore-output"]
for name, subject in {"fp32": model, "bf16": half}.items():
    one_TV, nine_TV = (read_in_blocks(subject, plain, T) for T in (1, 9))
    off = float((one_TV - nine_TV).abs().max())
    best_T2 = one_TV.topk(2).values
    gap = float((best_T2[:, 0] - best_T2[:, 1]).min())
    changed = int((one_TV.argmax(-1) != nine_TV.argmax(-1)).sum())
    print(f"{name}: logits differ by up to {off:.2g}; the closest two best are {gap:.2g} apart; "
          f"{changed} of {len(plain)} choices change")  # fmt: skip
    assert name == "bf16" or off < 5e-3

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
differs.reveal("nearly equal")

# %% [markdown]
# A matrix product over nine rows runs through another kernel than one over a single row: it adds the same
# numbers in another *order*, and rounds in other places. In fp32 that is the sixth digit or so. In bf16,
# which has not quite three, it reaches the logits. Where the two best tokens are closer than that, a
# **near-tie**, the choice flips, and from there the texts go apart. Neither is wrong; the model had no
# opinion. As recorded, with the gap at the place where they part:

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
ties = record["bf16_ties"]
parted = [row for row in ties if row["bf16_first_difference"] is not None]
for row in parted[:6]:
    print(f"{row['drafter']:<11} from token {row['bf16_first_difference']:>3}, gap {row['top2_gap']:.3f}: "
          f"{row['prompt'][:50]}")  # fmt: skip
print(f"{len(parted)} of {len(ties)} texts part in bf16, "
      f"{sum(not row['fp32_same'] for row in ties)} in fp32")  # fmt: skip

# %% [markdown]
# So test in fp32 or fp64, where equal means equal, and in 16 bits allow a difference only where the gap is
# small. "Greedy speculation changes my output" is a frequent report (SafeAILab/EAGLE#75), and rounding a
# frequent answer.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 8. All of it, measured
#
# Every drafter on held-out prompts, predicted and measured, on one machine.

# %% tags=["nbval-ignore-output"]
table = record["drafters"]
print(f"{record['date']}, {record['machine']['hardware']}")
print("                    tokens a round  alpha   tokens/s (plain)   faster  predicted")
for name, by_dtype in table.items():
    for dtype, row in by_dtype.items():
        print(f"{name:<11} {dtype:<9} {row['tokens_per_round']:11.2f} {row['acceptance']:8.2f} "
              f"{row['tokens_per_s']:9.1f} ({row['plain_tokens_per_s']:5.1f}) {row['speedup']:10.2f} "
              f"{row['predicted']:9.2f}")  # fmt: skip
best = max(((n, d) for n in table for d in table[n]), key=lambda nd: table[nd[0]][nd[1]]["speedup"])
print(f"the fastest: {best[0]} in {best[1]}, {table[best[0]][best[1]]['speedup']:.2f} times plain")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ![Bars of tokens a round, bars of where a round's time goes, and speed-up measured (predicted in brackets) over plain decoding: n-gram fp32 1.14 tokens, 1.03× (1.05); n-gram bf16 1.13 tokens, 1.08× (1.08); early exit fp32 1.91 tokens, 0.62× (0.71); early exit bf16 1.92 tokens, 0.63× (0.67); Medusa fp32 1.59 tokens, 0.87× (0.93); Medusa bf16 1.60 tokens, 1.15× (1.11); EAGLE fp32 1.84 tokens, 0.95× (1.02); EAGLE bf16 1.87 tokens, 1.25× (1.22).](../images/drafters-measured.svg)

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
print("a round, in plain steps:          tokens   for  target  + draft  + the rest")
for name, by_dtype in table.items():
    for dtype, row in by_dtype.items():
        step_ms = 1e3 / row["plain_tokens_per_s"]
        parts = {part: ms / step_ms for part, ms in row["profile"].items()}
        rest = parts["verify_ms"] + parts["other_ms"]
        print(f"{name:<11} {dtype:<9} {row['tokens_per_round']:18.2f} {parts['target_ms']:13.2f} "
              f"{parts['draft_ms']:8.2f} {rest:11.2f}")  # fmt: skip

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
for name, rows in record["trees"].items():
    top = max(rows, key=lambda row: row["speedup"])
    print(f"{name}: of {len(rows)} trees the fastest has {top['size']} guesses, {top['tokens_per_round']:.2f} "
          f"tokens a round, {top['speedup']:.2f} times plain; the largest, {rows[-1]['size']}, "
          f"{rows[-1]['tokens_per_round']:.2f} and {rows[-1]['speedup']:.2f}")  # fmt: skip
peer = record["hf_assisted"]
print(f"transformers with the early exit as its assistant, {peer['dtype']}: "
      f"{peer['tokens_per_s'] / peer['plain_tokens_per_s']:.2f} times its plain")  # fmt: skip

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Read** it with the three letters. $\alpha$, and how often there is a guess at all, say how many tokens a
# round brings; $v$ is the column "target", $\gamma c$ the column "draft". What a drafter wins is the first
# number over the sum of the others: few tokens, dear checking or dear guessing hold it back. ("Predicted" is
# the tokens a round, measured, over the measured costs of draft and check.)

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
token_ribbon()

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### What the papers report
#
# | | model | times as fast |
# |---|---|---|
# | Leviathan et al. 2022, arXiv:2211.17192 | T5-XXL 11 B, draft T5-small | 2.3 to 3.4 |
# | Chen et al. 2023, arXiv:2302.01318 | 70 B (Chinchilla), draft 4 B | 1.9 to 2.5 |
# | Medusa, arXiv:2401.10774 | Vicuna | over 2.2 (Medusa-1), 2.3 to 3.6 (Medusa-2, in one version of the abstract) |
# | EAGLE, arXiv:2401.15077 | LLaMA2-Chat 70B | 2.7 to 3.5 |
#
# All on GPUs and at batch 1, where $v$ is nearly 1. At a larger batch it isn't, and the gain shrinks:
# EAGLE's 3.01 at batch 1 is 2.40 at batch 4.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## What to remember
#
# - A decode step waits for the weights, so checking a few guesses costs little more than making one token.
#   That holds while the batch is small.
# - Accept with probability $\min(1, p/q)$, else draw from the residual; after a full draft take the bonus
#   from $p$. The output is exactly the target's, whoever guessed.
# - Tokens a round: $(1-\alpha^{\gamma+1})/(1-\alpha)$. Speed: that over $\gamma c + v$. A good draft is
#   cheap first and right second.
# - Look-ups cost nothing and win where answers repeat inputs; heads and features must be trained, and win
#   elsewhere if checking is cheap. Trees try alternatives in one forward.
# - Roll back exactly what was rejected, mind the token the draft never read, and compare texts in fp32:
#   near-ties are not bugs.

# %% tags=["nbval-ignore-output"]
status("08")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ## Papers and sources
#
# - Stanford CS336, spring 2025, lecture 10, *Inference*; Julien Simon, *Deep Dive: Optimizing LLM
#   Inference*: the order, and the four ways.
# - Leviathan et al. 2022, *Fast Inference from Transformers via Speculative Decoding*, arXiv:2211.17192;
#   Chen et al. 2023, *Accelerating Large Language Model Decoding with Speculative Sampling*,
#   arXiv:2302.01318: the rule, the proof, expected tokens.
# - Saxena 2023, *Prompt Lookup Decoding*, github.com/apoorvumang/prompt-lookup-decoding.
# - Cai et al. 2024, *Medusa*, arXiv:2401.10774: heads, tree attention, typical acceptance.
# - Sun et al. 2024, *Block Verification Accelerates Speculative Decoding*, arXiv:2403.10444.
# - Miao et al. 2023, *SpecInfer*, arXiv:2305.09781: trees, and several guesses for one token.
# - Li et al. 2024, *EAGLE*, arXiv:2401.15077, and *EAGLE-2*, arXiv:2406.16858. Zhang et al. 2023, *Draft &
#   Verify*, arXiv:2309.08168: skipped layers. Zhao et al. 2025, *FR-Spec*, arXiv:2502.14856: a smaller
#   vocabulary for drafts.
# - SafeAILab/EAGLE#47: the bonus and rejected siblings. SafeAILab/EAGLE#75: rounding.
#   jaymody/speculative-sampling#3: a favourite judged as drawn. huggingface/transformers#31301: guesses
#   after the end token.
