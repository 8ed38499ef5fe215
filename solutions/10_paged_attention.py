# %% [markdown] slideshow={"slide_type": "slide"}
# # 10 · Paged attention
#
# Notebook 09 learnt to fill a batch. How far it can be filled is a matter of memory: every sequence in it
# needs room for its keys and values, and nobody knows for how many. So 09's engine rented each of them a
# row of the longest length there is. This notebook looks at what that costs, and then does what operating
# systems have done since the sixties: it hands memory out in small *pages*.
#
# You will
#
# 1. see where the memory goes, predict what pages save, and measure both on one trace;
# 2. attend to keys that lie scattered over a pool, and get the same numbers;
# 3. run a block allocator: count, share, copy on write, give back;
# 4. find a prompt's beginning again that somebody else has already paid for;
# 5. take a sequence's memory away in mid-sentence, without changing a word of it;
# 6. count what a kernel reads, and what launching it costs;
# 7. drive the engine: stream, cancel, fail, and compare with others.

# %% slideshow={"slide_type": "subslide"}
import torch

from lecture_util.classroom import check, hint, predict, status, step, use_style
from lecture_util.model.config import PUBLISHED
from lecture_util.model.generate import generate
from lecture_util.model.tokenizer import encode
from lecture_util.model.weights import REFERENCE, load, load_tokenizer
from lecture_util.roofline import ACCELERATORS, kv_bytes_per_token, stopwatch
from lecture_util.serving import Engine, Params, Policy, Request

use_style()
model, tokenizer = load(REFERENCE), load_tokenizer(REFERENCE)
config, h100 = model.config, ACCELERATORS["h100"]

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 1. Where does the memory go?
#
# A cache as large as the GPU allows, cut into rows; a row is as long as a text may ever get. A sequence
# rents one when it is admitted and gives it back when it ends. Meanwhile tokens come one by one. Prompts of
# 128 tokens and answers of 64 in the middle, both with a long tail, at most 512 each:

# %% tags=["nbval-ignore-output"]
rented = predict("Of the memory in rented rows of 1,024 tokens, how much holds a token?", unit="%")

# %% slideshow={"slide_type": "subslide"}
from lecture_util.serving.simulate import simulator
from lecture_util.serving.slots import Slots
from lecture_util.serving.trace import Lengths, make_trace

ROOM = 8192  # tokens that the cache has room for
trace = make_trace(150, rate_per_s=None, prompt_tokens=Lengths(128, 0.8, 4, 512),
                   new_tokens=Lengths(64, 1.0, 1, 512), seed=0)  # fmt: skip


def on_paper(memory, look):
    """Serve the trace without a model; look at the memory after each forward, while others wait."""
    loop, seen = simulator(memory, Policy(slots=256, token_budget=2048)), []
    for request in trace:
        loop.submit(request)
    while loop.scheduler.waiting:
        loop.step()
        seen.append(look(memory))
    return seen, max(i.running for i in loop.iterations)


# %% slideshow={"slide_type": "subslide"}
seen, most = on_paper(Slots(ROOM // 1024, 1024), lambda memory: memory.held())
share = sum(stored for stored, _ in seen) / sum(lent for _, lent in seen)
print(f"at most {most} sequences at once; {share:.0%} of the rented memory holds a token")

# %% tags=["nbval-ignore-output"]
rented.reveal(100 * share)

# %% [markdown] slideshow={"slide_type": "subslide"}
# (No model ran: the scheduler of notebook 09 never sees a tensor, so its bookkeeping can be tried alone,
# one forward after the other.) The memory is full with eight users, and three quarters of it are empty. Why not rent
# just as much as is needed?
#
# ### A memory allocator, by hand
#
# Give each sequence one stretch as long as somebody thinks it will get, and put it into the first gap that
# is large enough. That is an *allocator*, "first fit". A memory of 24 tokens; a dot is free:

# %% slideshow={"slide_type": "subslide"}
SIZE = 24


def first_fit(stretches, need):
    """The lowest gap of at least `need` tokens, or None. stretches: name -> (start, length)."""
    start = 0
    for begin, length in sorted(stretches.values()):
        if begin - start >= need:
            return start
        start = begin + length
    return start if SIZE - start >= need else None


def picture(stretches):
    cells = ["."] * SIZE
    for name, (start, length) in stretches.items():
        cells[start : start + length] = name * length
    return "".join(cells)


# %% slideshow={"slide_type": "subslide"}
stretches = {}
for name, need in [("A", 8), ("B", 5), ("C", 7), ("B", 0), ("D", 3), ("E", 5)]:
    where = first_fit(stretches, need) if need else None
    if need and where is not None:
        stretches[name] = (where, need)
    elif not need:
        del stretches[name]  # it has ended
    happened = f"{name} wants {need}" if need else f"{name} has ended"
    print(f"{happened:<12} {picture(stretches)}" + ("  no gap!" if need and where is None else ""))
free = picture(stretches).count(".")
assert free >= 5 and first_fit(stretches, 5) is None

# %%
from lecture_util.serving.contiguous import Regions

regions = Regions(SIZE)
regions.regions = dict(enumerate(stretches.values()))
assert all(regions.first_fit(n) == first_fit(stretches, n) for n in range(1, SIZE))
print(f"{free} tokens are free, but not in one place; the library's allocator agrees")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Three ways to lose memory
#
# - **Internal** fragmentation: rented for tokens that never come, because the text ends earlier.
# - **Reserved**: rented for tokens that do come, but later. Until then nobody else may use the place.
# - **External** fragmentation: free, in gaps between stretches, each too small for whoever waits.
#
# ![Two bars to scale. A rents 2,048 places: 7 of its prompt, 2 generated, 2 for tokens still to come, 2,037 that will never be used. B rents 512: 3, 1, 1 and 507. What holds a token is a sliver at each left edge, enlarged below. In all 13 of 2,560 places are in use, 0.5%. In pages of 16 the same two need 2 pages: 13 of 32 places in use.](../images/paged-fragmentation.svg)

# %% [markdown] slideshow={"slide_type": "subslide"}
# How long a stretch should be, somebody has to guess. Kwon et al. tried three guessers. *Max* takes all
# that a request may ask for. *Pow2* guesses the answer's length within a factor of 2, upwards. *Oracle* can
# see the future, and rents exactly what a text will need.

# %% tags=["nbval-ignore-output"]
oracle = predict("With the oracle, how much of all the memory holds a token?", unit="%")

# %% slideshow={"slide_type": "subslide"}
PARTS = ("stored", "reserved", "internal", "external")
PAPER = {"max": (20.4, 13.3, 57.3, 8.9), "pow2": (26.8, 17.9, 13.6, 41.6),
         "oracle": (38.2, 25.2, 0, 36.6)}  # fmt: skip
ours = {}
print("% of all memory", *(f"{part:>9}" for part in PARTS), "  at once   Kwon et al. 2023")
for reserve, paper in PAPER.items():
    seen, most = on_paper(Regions(ROOM, reserve), lambda memory: memory.waste())
    sums = [sum(getattr(waste, part) for waste in seen) for part in PARTS]
    ours[reserve] = [100 * s / sum(sums) for s in sums]
    print(f"{reserve:<15}", *(f"{x:9.0f}" for x in ours[reserve]), f"{most:9}  ", *paper)

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
oracle.reveal(ours["oracle"][0])

# %% [markdown]
# **Read.** Their texts and limits are not ours, so the percentages differ; the order is the same. *Max* loses
# most to texts that end early. But even the oracle, which no server has, wastes more than two fifths: a text
# that will have 300 tokens occupies 300 from its first. And exact lengths leave gaps of all sizes. (Kwon et
# al. 2023, arXiv:2309.06180, figure 2: the first column is confirmed, the others rest on one transcription
# and add up.)

# %% [markdown] slideshow={"slide_type": "subslide"}
# > **Erratum.** In the paper's own drawing (its figure 3) request A was to have 2,048 places and B 512.
# > Count what is drawn for A, though (above we left one unused place out):

# %%
A_slots = {"prompt": 7, "generated": 1, "current": 1, "reserved": 2, "never used": 2038}
B_slots = {"prompt": 3, "current": 1, "reserved": 1, "never used": 507}
print("A:", sum(A_slots.values()), " B:", sum(B_slots.values()))
assert sum(A_slots.values()) == 2049 and sum(B_slots.values()) == 512

# %% [markdown] slideshow={"slide_type": "notes"}
# *For the instructor.* Collect guesses for the rows first: most say half. Then the oracle: most say 100 %,
# and it is worth a minute to let somebody find out why not. The strip of 24 places is the whole of external
# fragmentation; let the room place E before you run the cell.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### One demand too many
#
# All three come from one demand: that a sequence lies in *one piece*, rented *ahead*. Drop it. Cut the
# memory into **pages** of $P$ tokens, all alike, and rent one whenever the last is full. Then nothing is
# reserved beyond a page, gaps are always usable, and lost is only the rest of each sequence's last page.
# How much is that? A text of $S$ tokens has $\lceil S/P \rceil$ pages; average over $S$:

# %%
for P in (1, 4, 16, 64):
    unused = [-S % P for S in range(1, 8 * P + 1)]
    average = sum(unused) / len(unused)
    print(f"P={P:<3} {average:4.1f} places unused on average; (P-1)/2 = {(P - 1) / 2}")
    assert average == (P - 1) / 2

# %% [markdown] slideshow={"slide_type": "subslide"}
# So about $(P-1)/2$ places a sequence, however long it is. With 16 tokens a page:

# %% tags=["nbval-ignore-output"]
paged_waste = predict("Sequences of some 200 tokens in pages of 16: how much is unused?", unit="%")

# %% slideshow={"slide_type": "subslide"}
from lecture_util.serving.blocks import Blocks
from lecture_util.serving.paging import Pages

waste = {}
for P in (4, 16, 64, 256):
    memory = Pages(Blocks(ROOM // P, P, prefix_caching=False))
    seen, most = on_paper(memory, lambda memory: (*memory.held(), len(memory.tables)))
    stored, lent, texts = (sum(column) for column in zip(*seen, strict=True))
    waste[P] = 1 - stored / lent
    unused = (P - 1) / 2
    print(f"P={P:<3} predicted {unused / (stored / texts + unused):5.1%} of what is lent, measured "
          f"{waste[P]:5.1%}; {lent / len(seen) / ROOM:.0%} of the memory lent, {most:>2} at once")  # fmt: skip
assert waste[16] < 0.04

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
paged_waste.reveal(100 * waste[16], predicted=100 * 7.5 / 207.5)

# %% [markdown]
# **Read.** Below 4 % at 16, as the vLLM authors report of theirs; and several times as many sequences at
# once in the same memory as in rows. Smaller pages waste less, but make longer tables and shorter runs to
# read. 16 is what Kwon et al. settle on (section 7.2), and our default.

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
from lecture_util.classroom.widgets import waste_explorer

waste_explorer()

# %% [markdown] slideshow={"slide_type": "subslide"}
# The same on another trace: the one that `benchmarks/serving.py` served with the real model.
#
# ![Stacked bars of where the memory for keys and values is: holding a token, kept for one to come, never to be used, lent to nobody. Holding a token, ours: rows, max 35%, rows, pow2 53%, rows, oracle 61%, pages of 1 95%, pages of 4 94%, pages of 8 94%, pages of 16 92%, pages of 32 89%, pages of 64 84%, pages of 128 75%. In the vLLM paper: Orca (Max) 20.4%, Orca (Pow2) 26.8%, Orca (Oracle) 38.2%, vLLM 96.3%.](../images/memory-waste.svg)

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
from lecture_util.classroom.figures.small_caches import recorded

record = recorded("serving")
memory_run = record["memory"]
rows, pages = memory_run["contiguous_running"], memory_run["paged_running"]
print(f"{record['date']}, {record['hardware']}; {memory_run['bytes'] / 1e6:,.0f} MB of cache:")
print(f"{rows['mean']:.0f} sequences at once in rows, {pages['mean']:.0f} in pages on average "
      f"({rows['most']} and {pages['most']} at most)")  # fmt: skip

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Exercise 10.1: what a page size wastes
# *10 minutes · counting a share over a sequence's whole life*
#
# `lives` lists sequences as pairs `(first, last)`: after its prompt a sequence holds `first` tokens, after
# each further forward one more, until it holds `last`, its final forward; then it is gone. It holds just
# the pages that its tokens need, of `P` tokens each. Of all the places lent, over all sequences and
# forwards, which share holds no token?


# %% slideshow={"slide_type": "skip"}
def page_waste(lives, P):
    """A number from 0 to 1."""
    ### BEGIN SOLUTION
    stored = lent = 0
    for first, last in lives:
        for S in range(first, last + 1):
            stored += S
            lent += -(-S // P) * P
    return 1 - stored / lent
    ### END SOLUTION


# %% slideshow={"slide_type": "skip"}
check("10.1", page_waste)

# %% [markdown]
# Stuck? Each call opens one more hint.

# %% slideshow={"slide_type": "skip"}
hint("10.1")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 2. Pages
#
# Operating systems met the same problem with programs, whose size nobody knows either. Their answer: let a
# program believe that its memory is one piece, and keep a small **table** of where each piece really lies.
#
# Here a program is a sequence, and a byte is a token's keys and values. (The vLLM paper says *block* where
# we say *page*, and so do its names: a sequence's list of pages is its **block table**, and whoever hands
# them out the **block allocator**.)
#
# ![Left, text A as it reads, 9 words on its pages 0, 1, 2, and text B, 6 words on its pages 0 and 1; each page has 4 places. In the middle their tables: A 7, 1, 3 and B 5, 2. Right, the pool of 8 pages in memory: 7, 1 and 3 hold A's words, 5 and 2 hold B's, 0, 4 and 6 are free. Only a text's last page has empty places.](../images/paged-blocks.svg)

# %% [markdown] slideshow={"slide_type": "subslide"}
# With words in place of tensors: a pool of 8 pages of 4, and two texts in it. Their tables:

# %%
P, pool = 4, [["·"] * 4 for _ in range(8)]
texts = {"A": "the cat sat on the mat and then slept", "B": "once upon a time there was"}
tables = {"A": [7, 1, 3], "B": [5, 2]}
for name, text in texts.items():
    for s, word in enumerate(text.split()):
        page, slot = tables[name][s // P], s % P
        pool[page][slot] = word
for page, words in enumerate(pool):
    print(page, *(f"{word:<6}" for word in words))

# %% [markdown] slideshow={"slide_type": "subslide"}
# Token $s$ of a sequence is in page number $\lfloor s/P \rfloor$ of its table, slot $s \bmod P$. Its
# **place** in the pool, all pages end to end, is table$[s\, // P] \cdot P + s\, \% P$. To read a text in
# order, look up place after place:

# %%
flat = [word for page in pool for word in page]


def place(table, s):
    return table[s // P] * P + s % P


read = " ".join(flat[place(tables["A"], s)] for s in range(len(texts["A"].split())))
print(read)
assert read == texts["A"]
print(f"a page of 16 tokens of our model: {16 * kv_bytes_per_token(config, 4):,} bytes in fp32")

# %% [markdown]
# The sequence sees no difference. And the table costs nothing: one number a page, against the keys and
# values of 16 tokens in all layers.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Attention through a table
#
# Now with keys and values, `k_MPKH`: $M$ pages of $P$ tokens. As in a real pool, the places that nobody has
# written hold anything at all. We fill them with NaN, the worst that can be there. The new token's key is
# already in its place when its query looks around.

# %%
from lecture_util.model.attention import attend

draw = torch.Generator().manual_seed(0)
S, M, N, K, H = 9, 8, 4, 2, 8
k_SKH, v_SKH = torch.randn(2, S, K, H, generator=draw, dtype=torch.float64)
q_NH = torch.randn(N, H, generator=draw, dtype=torch.float64)
k_MPKH, v_MPKH = torch.full((2, M, P, K, H), float("nan"), dtype=torch.float64)
for s in range(S):  # write through the table
    k_MPKH[tables["A"][s // P], s % P] = k_SKH[s]
    v_MPKH[tables["A"][s // P], s % P] = v_SKH[s]


# %% slideshow={"slide_type": "subslide"}
def attend_through_table(q_NH, k_MPKH, v_MPKH, table, length):
    """Bring the pages together in the table's order, cut off what is not ours, attend as ever."""
    P = k_MPKH.shape[1]
    pages = table[: -(-length // P)]  # @inspect pages
    k_SKH = k_MPKH[pages].flatten(0, 1)[:length]  # @inspect k_SKH
    v_SKH = v_MPKH[pages].flatten(0, 1)[:length]  # @inspect v_SKH
    out_NH = attend(q_NH[None, None], k_SKH[None], v_SKH[None])[0, 0]  # @inspect out_NH
    return out_NH


paged_NH = attend_through_table(q_NH, k_MPKH, v_MPKH, tables["A"], S)
contiguous_NH = attend(q_NH[None, None], k_SKH[None], v_SKH[None])[0, 0]
assert torch.allclose(paged_NH, contiguous_NH, rtol=0, atol=1e-14)
print("the same, up to the last bits, whatever lies in the unused places")

# %% tags=["nbval-ignore-output", "hide-input"] slideshow={"slide_type": "subslide"}
step(attend_through_table, q_NH, k_MPKH, v_MPKH, tables["A"], S)

# %% [markdown] slideshow={"slide_type": "subslide"}
# The library's `paged_attention` does that for a whole batch: tables `tables_BJ`, as wide as the longest
# (past its own pages a row of the table holds anything), and lengths `lengths_B`. A length of 0 is a row
# that only fills the batch; it gets zeros.

# %%
from lecture_util.kernels.paged_attention import paged_attention

tables_BJ, lengths_B = torch.tensor([[7, 1, 3], [5, 2, 0], [6, 6, 6]]), torch.tensor([9, 6, 0])
for s in range(6):
    k_MPKH[tables["B"][s // P], s % P], v_MPKH[tables["B"][s // P], s % P] = k_SKH[s], v_SKH[s]
q_BNH = q_NH.expand(3, N, H)
out_BNH = paged_attention(q_BNH, k_MPKH, v_MPKH, tables_BJ, lengths_B)
for b, length in enumerate([9, 6]):
    wanted_NH = attend(q_NH[None, None], k_SKH[None, :length], v_SKH[None, :length])[0, 0]
    assert torch.allclose(out_BNH[b], wanted_NH, rtol=0, atol=1e-14)
print(tuple(out_BNH.shape), "row 2 is zero:", bool((out_BNH[2] == 0).all()))

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Exercise 10.2: where a token goes
# *6 minutes · translating positions to places*
#
# The next `count` tokens of a sequence stand at positions `start`, `start` + 1, ... Return the list of
# their places in the pool (all pages end to end). `table` has all the pages that it takes.


# %% slideshow={"slide_type": "skip"}
def places(table, start, count, P):
    """A list of `count` whole numbers."""
    ### BEGIN SOLUTION
    return [table[s // P] * P + s % P for s in range(start, start + count)]
    ### END SOLUTION


# %% slideshow={"slide_type": "skip"}
check("10.2", places)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Exercise 10.3: attention in pages
# *15 minutes · reading in order, grouped heads, and what a mask cannot hide*
#
# One sequence, one new token, written out: scores, softmax, average. Query head $n$ reads KV head
# $\lfloor n / G \rfloor$, $G = N/K$; scores are divided by $\sqrt{H}$. Places past `length` hold anything,
# NaN included. Don't use `paged_attention` or `attend`.


# %% slideshow={"slide_type": "skip"}
def attend_pages(q_NH, k_MPKH, v_MPKH, table, length):
    """-> out_NH. table: a list of pages, at least as many as the length needs."""
    ### BEGIN SOLUTION
    G = q_NH.shape[0] // k_MPKH.shape[2]
    k_SKH, v_SKH = (pool[table].flatten(0, 1)[:length] for pool in (k_MPKH, v_MPKH))
    q_KGH = q_NH.unflatten(0, (-1, G))
    scores_KGS = torch.einsum("kgh,skh->kgs", q_KGH, k_SKH) / q_NH.shape[1] ** 0.5
    return torch.einsum("kgs,skh->kgh", scores_KGS.softmax(-1), v_SKH).flatten(0, 1)
    ### END SOLUTION


# %% slideshow={"slide_type": "skip"}
check("10.3", attend_pages)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 3. The block allocator
#
# Who keeps the tables? A bookkeeper that never touches a tensor. It knows three things: which pages are
# free, how many tables hold each page, and each sequence's table. Pages are all alike, so there is nothing
# to search: any free page will do.

# %%
blocks = Blocks(num_pages=8, page_size=4, prefix_caching=False)
table = blocks.begin()
for token in range(9):
    before = len(table.pages)
    blocks.append(table, [token])
    new = f"takes page {table.pages[-1]}" if len(table.pages) > before else ""
    print(f"{len(table)} tokens, pages {table.pages!s:<10} {blocks.available} to be had  {new}")

# %% [markdown] slideshow={"slide_type": "subslide"}
# > **Erratum, of sorts.** Readers of small engines keep reporting this line as a bug: *a new page is needed
# > when* `len(seq) % P == 1`. Surely when it is 0, when the last page is full? It depends on when one asks.
# > Such engines append the token that was just sampled first, and then ask for its place: `len` counts a
# > token that has no place yet. (GeeeekExplorer/nano-vllm#65; the patch proposed there would have broken
# > prompts of exactly one page.)

# %%
for length_with_it in range(1, 14):
    without = length_with_it - 1
    needs_page = blocks.pages_for(length_with_it) > blocks.pages_for(without)
    assert needs_page == (length_with_it % 4 == 1) == (without % 4 == 0)
print("len % P == 1, the new token counted, is len % P == 0 without it")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Sharing, and copy on write
#
# Two texts that begin alike can hold the *same* pages: a key depends on the tokens before it only, and
# those are the same. That happens whenever one prompt is to be answered several times. `fork` copies a
# table and counts each of its pages once more; no key moves.
#
# ![Three requests begin with the same system prompt of 8 words, two pages of 4. Their tables are 0, 1, 2, 3 and 0, 1, 4 and 0, 1, 5, 6: pages 0 and 1 are the same for all and have a count of 3, the others a count of 1. So 7 pages are held instead of 11, and of the second and third request only what follows the prompt is computed.](../images/paged-sharing.svg)

# %% [markdown] slideshow={"slide_type": "subslide"}
# Then one of the two writes its next token. If the last page is not full, that token's place is on a page
# that both hold. Writing there would put words into the other's mouth. So: look at the count; if it is
# above 1, take a fresh page, copy the old one into it, count the old one once less, and write to the copy.
# That is **copy on write**.
#
# ![Two samples, A1 and A2, of one prompt of 7 words in pages of 4. Forked, both tables are 7, 1 and both pages have a count of 2. A1 writes a word: page 1, shared, is copied to page 3; A1's table becomes 7, 3, and page 1's count falls to 1. A2 writes a word: page 1 is its own now, nothing is copied. Page 7 stays shared throughout.](../images/copy-on-write.svg)

# %% slideshow={"slide_type": "subslide"}
blocks = Blocks(num_pages=8, page_size=4, prefix_caching=False)
a = blocks.begin()
blocks.append(a, [10, 11, 12, 13, 14, 15])  # one page full, one half full
b = blocks.fork(a)


def show(event, copies=()):
    counts = [n for n in blocks.counts if n]
    print(f"{event:<16} A {a.pages}  B {b.pages}  counts {blocks.counts[:4]}"
          + "".join(f"  copy page {x} to {y}" for x, y in copies))  # fmt: skip
    assert sum(counts) == len(a.pages) + len(b.pages)


show("fork")
show("B writes", blocks.append(b, [20]))
show("A writes", blocks.append(a, [30]))
blocks.release(a)
show("A has ended")
blocks.release(b)
show("B has ended")
assert blocks.available == 8

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Read.** The full page stays shared to the end, at count 2. The open one is copied once: by then A has
# the old one for itself again, and writes without a copy. A page is free when its count reaches 0, so who
# ends first does not matter. The allocator only *says* what to copy; the cache does it, before the next
# token is written.

# %% [markdown] slideshow={"slide_type": "subslide"}
# Alive: begin a text, fork it, write to either, free one, and watch the counts. Here a word is a token.

# %% tags=["nbval-ignore-output"]
from lecture_util.classroom.widgets import block_table_explorer

block_table_explorer(events=("begin the cat sat on the mat", "fork A"))

# %% [markdown] slideshow={"slide_type": "notes"}
# *For the instructor.* Before each click, let the room say the counts. Write to B (a copy), then to A (no
# copy: why?). Then free A and ask which pages come back: only those that nobody else holds. Keep *evict*
# and *look up* for the next section.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Several answers to one prompt
#
# This is what forks are for. Ask for four samples, and the prompt is computed once and stored once. Each
# sample draws with a seed of its own, so it says what it would have said alone:

# %% slideshow={"slide_type": "subslide"}
from lecture_util.model.sampling import Sampling
from lecture_util.serving.clock import VirtualClock
from lecture_util.serving.paging import PagedCache


def new_engine(pages=64, slots=8, page_size=16, clock=None, **options):
    cache = PagedCache(config, pages, page_size, model.dtype, model.device, **options)
    policy = Policy(slots=slots, token_budget=128)
    return Engine(model, cache, policy, VirtualClock() if clock is None else clock)


story = encode(tokenizer, "Once upon a time, in a village at the foot of a mountain, there lived a young "
               "beekeeper whose bees made honey that nobody could describe. One morning")  # fmt: skip
warm = dict(max_new_tokens=12, sampling=Sampling(temperature=0.8))


def most_pages(engine, *requests):
    """Serve requests; their completions, and how many different pages were lent at most."""
    numbers, lent = [engine.submit(prompt, params) for prompt, params in requests], []
    while engine.loop.busy:
        engine.step()
        lent.append(engine.cache.memory.held()[1] // engine.cache.page_size)
    return [c for number in numbers for c in engine.result(number)], max(lent)


# %% slideshow={"slide_type": "subslide"}
four = [(story, Params(**warm, seed=7 + i)) for i in range(4)]
samples, shared = most_pages(new_engine(), (story, Params(**warm, seed=7, samples=4)))
alone, apart = most_pages(new_engine(prefix_caching=False), *four)
same = [s.tokens for s in samples] == [x.tokens for x in alone]
print("each is the text of its seed, alone:", same)
print(f"a prompt of {len(story)} tokens, four answers: {shared} pages shared, {apart} apart")

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
for sample in samples:
    print("...", tokenizer.decode(sample.tokens).replace("\n", " "))

# %% tags=["nbval-ignore-output"]
run = record["samples"]
print(f"recorded: {run['samples']} samples of a prompt of {run['prompt_tokens']} tokens: "
      f"{run['bytes_shared'] / 1e6:.1f} MB shared, {run['bytes_apart'] / 1e6:.1f} MB apart, "
      f"{run['bytes_apart'] / run['bytes_shared']:.1f} times less")  # fmt: skip

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Exercise 10.4: an allocator that loses pages
# *15 minutes · finding mistakes in reference counting*
#
# `append` makes room for one more token of a sequence that has `length` tokens, the new one not counted.
# `table` is its list of pages, `pool.free` the free pages, taken from its end, `pool.counts[page]` how many
# tables hold a page, `pool.copies` a list of (from, to) for the cache. Three lines' worth is wrong:
#
# ```python
# def append(pool, table, length, P):
#     if length % P == 1:
#         page = pool.free.pop()
#         table.append(page)
#     elif pool.counts[table[-1]] > 1:
#         page = pool.free.pop()
#         pool.copies.append((table[-1], page))
#         pool.counts[page] = 1
#         table[-1] = page
# ```
#
# Write it right. It changes `pool` and `table` in place, and returns nothing.


# %% slideshow={"slide_type": "skip"}
def append(pool, table, length, P):
    """Room for one more token."""
    ### BEGIN SOLUTION
    if length % P == 0:
        page = pool.free.pop()
        pool.counts[page] = 1
        table.append(page)
    elif pool.counts[table[-1]] > 1:
        old, page = table[-1], pool.free.pop()
        pool.copies.append((old, page))
        pool.counts[old] -= 1
        pool.counts[page] = 1
        table[-1] = page
    ### END SOLUTION


# %% slideshow={"slide_type": "skip"}
check("10.4", append)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Exercise 10.5: pages for a family
# *8 minutes · predicting what sharing saves*
#
# `samples` answers to one prompt of `prompt` tokens, each of which has `new` tokens in the cache by now.
# They were forked after the prompt, and pages have `P` tokens. How many different pages do they hold?
# (Begin with `new` = 0, then 1.)


# %% slideshow={"slide_type": "skip"}
def family_pages(prompt, new, samples, P):
    """A whole number."""
    ### BEGIN SOLUTION
    if new == 0:
        return -(-prompt // P)
    full = prompt // P
    return full + samples * (-(-(prompt + new) // P) - full)
    ### END SOLUTION


# %% slideshow={"slide_type": "skip"}
check("10.5", family_pages)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 4. Somebody has computed this before
#
# Samples share because we said so. But most sharing on a server is not announced: a thousand users send the
# same page of instructions, each with a question of their own, and a chat sends all its history again with
# every turn. All these tokens have been computed. Their pages are perhaps still there. How to find them?

# %% [markdown] slideshow={"slide_type": "subslide"}
# By what they hold. But *not by that alone*: the keys of a page depend on every token before it. The same
# four words on page 2 of another text have other keys. So a page's name must say its tokens *and* what came
# before. A **chain** does: each name is a hash of the page's tokens and the name of the page before.
#
# ![Three prompts as chains of pages of 4 words; each full page's name is a hash of its words and of the name before it. The second prompt begins like the first: its first page has the same name and is found, its second differs and is computed. The third has the same second page as the first but another first page: both its names differ, nothing is found.](../images/prefix-chain.svg)

# %% slideshow={"slide_type": "subslide"}
import hashlib


def page_names(tokens, P, space=()):
    """A name for each full page, that of the page before hashed in."""
    name, names = hashlib.sha256(repr(("space", *space)).encode()).digest(), []
    for end in range(P, len(tokens) + 1, P):
        name = hashlib.sha256(name + repr(tuple(tokens[end - P : end])).encode()).digest()
        names.append(name)
    return names


words = ["be", "quick", "be", "brief", "be", "kind", "be", "brief", "or", "be", "quiet"]
for j, name in enumerate(page_names(words, 2)):
    print(j, words[2 * j : 2 * j + 2], name.hex()[:8])

# %% [markdown]
# The pages *be brief* appear twice, with two names. And each name depends on all words before: change the
# first, and all change.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Never trust a hash
#
# Two different texts can have the same hash. With Python's own it takes no luck at all:

# %%
print("hash((-1,)) == hash((-2,)):", hash((-1,)) == hash((-2,)))
assert hash((-1,)) == hash((-2,))

# %% [markdown]
# (In CPython -1 is the error code of hashing, so the hash of -1 is -2.) A collision hands one user the keys
# of *somebody else's text*: wrong answers at best, and a leak at worst. vLLM went from `hash` to a random
# seed and then to SHA-256 for that reason (vllm-project/vllm#12621, #15297). Ours goes one step further: a hash only points at
# candidates, and then the tokens are *compared*, back to the beginning. With the worst hash there is, one
# that calls everything the same, nothing goes wrong:

# %% slideshow={"slide_type": "subslide"}
careless = Blocks(num_pages=8, page_size=2, digest=lambda before, tokens: b"same")
first = careless.begin()
careless.append(first, [-1, 5, 6, 7])
careless.commit(first)  # they are computed: others may find them
for prompt in ([-1, 5, 9], [-2, 5, 9], [6, 7, 9]):
    table = careless.begin(prompt)
    print(prompt, "finds pages", table.pages)
    careless.release(table)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Four rules
#
# 1. **Full pages only.** An open page is still being written to, and has no name yet.
# 2. **Up to the first miss.** What follows a page that is not there cannot be there either.
# 3. **One token is left over.** The cache has keys, no logits. To get the next token's, at least the last
#    token must run.
# 4. **Each in its space.** With another adapter the same words have other keys; and one user's hits tell
#    another, by their speed, what was asked before. A space (an adapter, a salt) begins a chain of its own.

# %% slideshow={"slide_type": "subslide"}
shelf = Blocks(num_pages=8, page_size=4)
first = shelf.begin()
shelf.append(first, list(range(10)))  # two full pages, and an open one
shelf.commit(first)


def finds(prompt, space=()):
    table = shelf.begin(prompt, space)
    found = len(table)
    shelf.release(table)
    return found


print("the same 10, and 2 more:  ", finds([*range(10), 98, 99]))
print("its first 8, and no more: ", finds(list(range(8))))
print("another token in front:   ", finds([99, *range(1, 12)]))
print("the second page in front: ", finds([4, 5, 6, 7, 98]))
print("another adapter:          ", finds([*range(10), 98], ("adapter", "french")))

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### When nobody holds it
#
# A page whose count reaches 0 need not be wiped. It is free, *and* it still knows its text: **idle**. A hit
# revives it; a new page takes it only when no blank one is left, the least recently used first (LRU). And
# `release` gives pages back from the last to the first, so that a beginning, which others may share,
# outlives its end:

# %%
shelf.release(first)
print("free", sorted(shelf.free), " idle, the next victim first", list(shelf.idle))
other = shelf.begin()
shelf.append(other, list(range(100, 126)))  # seven pages: one must be taken from the shelf
print("a text of 7 pages came; found of the old one:", finds([*range(10), 98]), "tokens")
shelf.release(other)
assert shelf.available == 8

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### On the real model
#
# An assistant's instructions, and two questions. The clock counts tokens computed, so that it runs alike on
# every machine:

# %%
RULES = (
    "You answer the telephone of a beekeepers' club. Be short and friendly. Meetings are on the first "
    "Monday of the month at seven in the evening. Honey is sold on Saturdays from nine to noon at the "
    "market. Beginners' courses start in March and cost forty euros. Swarms are collected for free. If "
    "you do not know an answer, say so, and give the number of the secretary. Question: "
)
rules = encode(tokenizer, RULES)
asked = ["When do you meet?", "What does the course for beginners cost?"]
prompts = [[*rules, *encode(tokenizer, question)] for question in asked]


def tokens_computed(work):
    return sum(w.count for w in work)


# %% slideshow={"slide_type": "subslide"}
finding = new_engine(clock=VirtualClock(tokens_computed))
plain = [generate(model, [prompt], 8)[0] for prompt in prompts]
for prompt, wanted in zip(prompts, plain, strict=True):
    (answer,) = finding.generate([prompt], Params(max_new_tokens=8))
    assert answer.tokens == wanted
    print(f"{len(prompt)} tokens of prompt, {answer.found} found; first token after computing "
          f"{answer.ttft_s:.0f}; text as ever: {answer.tokens == wanted}")  # fmt: skip

# %% [markdown] slideshow={"slide_type": "subslide"}
# In seconds, with longer instructions. Prefill is bound by compute, so predict with tokens computed:

# %% tags=["nbval-ignore-output"]
sooner = predict("256 tokens of rules, found, and 12 of a question: how much sooner?", unit="times")

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
from lecture_util.serving.clock import WallClock

long_rules = (rules * 3)[:256]
clocked = new_engine(clock=WallClock())
waits = []
for question in asked:
    prompt = [*long_rules, *encode(tokenizer, question * 3)[:12]]
    (answer,) = clocked.generate([prompt], Params(max_new_tokens=1))
    waits.append((answer.ttft_s, len(prompt) - answer.found))
(cold_s, cold), (hit_s, hit) = waits
print(f"cold {1e3 * cold_s:.0f} ms for {cold} tokens, hit {1e3 * hit_s:.0f} ms for {hit}")
assert cold > len(long_rules) and hit <= 12  # the second time no rule was computed

# %% tags=["nbval-ignore-output"]
sooner.reveal(cold_s / hit_s, predicted=cold / hit)

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Read.** Much, and less than the tokens say: a forward over a dozen tokens is no longer bound by compute,
# it has to read the weights like any other (notebook 02). As recorded with a shared prompt of 512:

# %% tags=["nbval-ignore-output"]
run = record["prefix"]
print(f"{run['shared_tokens']} tokens shared: first token after {run['cold_ttft_s']:.2f} s, found after "
      f"{run['hit_ttft_s']:.2f} s: {run['cold_ttft_s'] / run['hit_ttft_s']:.1f} times sooner")  # fmt: skip

# %% [markdown] slideshow={"slide_type": "subslide"}
# Put texts on the shelf yourself: *begin* looks a prefix up; free a text, and its full pages stay idle
# until they are evicted.

# %% tags=["nbval-ignore-output"]
block_table_explorer(events=("begin the cat sat on the mat and slept", "free A",
                             "begin the cat sat on a wall"))  # fmt: skip

# %% [markdown] slideshow={"slide_type": "notes"}
# *For the instructor.* "Why not simply look the page's tokens up?" is the question to wait for. Ask for two
# texts in which the same four words mean different things; their keys differ for the same reason. In the
# explorer, free a text, look it up (a hit), write others until it is evicted, and look it up again. Which of
# its pages went first, and why is that the right one?

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Exercise 10.6: how much is found?
# *12 minutes · chains, full pages, and the token that must run*
#
# `texts` are computed and still there: a list of `(space, tokens)`, with a space as a word. A `prompt`
# comes in a `space`. How many of its tokens need not be computed? Pages have `P` tokens; a token is any
# whole number, as in *Never trust a hash*.


# %% slideshow={"slide_type": "skip"}
def tokens_found(texts, space, prompt, P):
    """A whole number, a multiple of P."""
    ### BEGIN SOLUTION
    most = 0
    for other, tokens in texts:
        if other != space:
            continue
        found = 0
        while found + P < len(prompt) and found + P <= len(tokens):
            if tokens[found : found + P] != prompt[found : found + P]:
                break
            found += P
        most = max(most, found)
    return most
    ### END SOLUTION


# %% slideshow={"slide_type": "skip"}
check("10.6", tokens_found)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 5. No page left
#
# Pages are rented one by one, so a promise is missing: nobody guarantees that the *next* one will be there.
# An engine that admits as many sequences as fit today may find, some forwards later, that all of them need
# a page and there is none. The rows of notebook 09 never had that problem. They had paid for it in advance.
#
# The way out is **preemption**: put the *newest* sequence back into the queue, take all its pages, and go
# on with the others. When there is room again, compute its prompt *and the tokens it has already said* in
# one go, as a longer prompt. Its next token is the one it would have said anyway.

# %% slideshow={"slide_type": "subslide"}
crowd = make_trace(6, rate_per_s=None, prompt_tokens=Lengths(14, 0.4, 4, 24),
                   new_tokens=Lengths(14, 0.4, 8, 24), tokens=rules, seed=3)  # fmt: skip
needed = [len(r.prompt) + r.params.stop.count - 1 for r in crowd]
tight = new_engine(pages=12, page_size=4, prefix_caching=False)
served = tight.serve(crowd)
print(f"room for {12 * 4} tokens; the six will have {sum(needed)}")
print("preempted", [c.preemptions for c in served], "times")

# %%
for request, completion in zip(crowd, served, strict=True):
    (wanted,) = generate(model, [request.prompt], request.params.stop.count)
    assert completion.tokens == wanted
assert tight.cache.blocks.available == 12
print("every text is what the model says alone, and all pages are back")

# %% [markdown] slideshow={"slide_type": "subslide"}
# Three safeguards make it end. The newest goes first, so the oldest always gets on, finishes, and makes room.
# And whoever was put back does not come straight in again in the same forward, or they would push each other
# out for ever. And a request that could not be held even alone is refused when it comes.

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
from lecture_util.classroom.widgets import engine_stepper

engine_stepper(new_engine(pages=12, page_size=4, prefix_caching=False), crowd, tokenizer, at=8)

# %% [markdown] slideshow={"slide_type": "notes"}
# *For the instructor.* Step the engine until a sequence loses its slot. Ask what was lost: its pages, not
# its words. Then find the forward in which it comes back, with all its words as one prompt, and compare the
# next token with what the room expects.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Compute again, or carry away?
#
# The alternative is to *swap*: copy its pages to the host's memory, and back later. Recomputing costs about
# 2 FLOPs a parameter and token, swapping the token's bytes twice over the link. Which is cheaper?

# %% tags=["nbval-ignore-output"]
which = predict("A sequence of 1,000 tokens, Llama-2-13B on an H100. Cheaper is",
                choices=["compute again", "swap out and in"])  # fmt: skip

# %% slideshow={"slide_type": "subslide"}
from lecture_util.roofline import forward_flops

LINK = 25e9  # bytes/s to the host and back: our assumption, for a PCIe link
S, cheaper = 1000, {}
for name in ("llama-2-13b", "llama-3-8b"):
    shape = PUBLISHED[name]
    again_s = forward_flops(shape, 1, S, S, causal=True) / h100.peak("bf16")
    swap_s = 2 * S * kv_bytes_per_token(shape, 2) / LINK
    cheaper[name] = "compute again" if again_s < swap_s else "swap out and in"
    print(f"{name:<12} again {1e3 * again_s:5.1f} ms, swap {1e3 * swap_s:5.1f} ms: {cheaper[name]}")

# %% tags=["nbval-ignore-output"]
which.reveal(cheaper["llama-2-13b"])

# %% [markdown]
# **Read.** For the model without grouped heads recomputing wins; for one with eight KV heads for its 32
# swapping does, and not by much. (The peak rate flatters the one, a link without delay the other.) Whoever
# shrinks the cache (notebook 04) makes it easier to carry. Recomputing needs no second memory and no second
# code path, and with a prefix cache part of it is found again. (Kwon et al. weigh both, section 4.5.) Ours
# recomputes.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 6. What a kernel makes of it
#
# Section 2's attention *gathers*: it reads the pages, writes the keys down in order, and reads them again to
# attend. A decode step waits for bytes (notebook 03), so that shows. Llama-3-8B, 8,192 tokens, 16 bits:

# %%
wide = PUBLISHED["llama-3-8b"]
S = 8192
cached = S * kv_bytes_per_token(wide, 2)
for name, passes in {"gather, then attend": 3, "read where it lies": 1}.items():
    least_ms = 1e3 * passes * cached / h100.bandwidth_bytes_per_s
    print(f"{name:<20} {passes * cached / 1e9:.2f} GB, {least_ms:.2f} ms at best")

# %% [markdown] slideshow={"slide_type": "subslide"}
# A kernel that follows the table itself reads each key once, and writes no copy. Ours is in Triton, one
# program for each sequence and KV head, with all $G$ query heads that share it. Here it looks up where its
# next keys lie, and fetches them:

# %%
from pathlib import Path

from lecture_util import kernels

source = Path(kernels.__file__).with_name("paged_attention_triton.py").read_text(encoding="utf-8")
lines = source.splitlines()
first = next(i for i, line in enumerate(lines) if "mask_s = s < end" in line)
print("\n".join(line[8:] for line in lines[first : first + 7]))

# %% [markdown] slideshow={"slide_type": "subslide"}
# Three things in it are easy to get wrong; the first and the last are bugs that others have had.
#
# - **The mask is on the load**, not only on the scores, and it ends at the length, not at the page. A weight
#   of 0 times a stale NaN is NaN. (pytorch/pytorch#159247: wrong results where the number of keys is no
#   multiple of a block.)
# - **64-bit offsets.** `page * stride` counts numbers from the pool's beginning, and pools are large:

# %%
per_page = 16 * wide.K * wide.H
page = 2**31 // per_page
in_32_bits = torch.tensor(page, dtype=torch.int32) * torch.tensor(per_page, dtype=torch.int32)
print(f"page {page:,} begins at number {page * per_page:,}; in 32 bits at {int(in_32_bits):,}")
print(f"keys of one layer alone then take {2 * page * per_page / 1e9:.1f} GB")
assert int(in_32_bits) < 0

# %% [markdown]
# - **All strides are honoured.** A table may be a slice of a wider one, a pool a layer of a larger one.
#   (xLLM-AI/xllm#932: a kernel took a slice of a table for a table in one piece.)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### One long text, and an idle GPU
#
# A program for each sequence and KV head: with one sequence and 8 heads that is 8 programs, on a GPU of
# 132 processors (an H100). So a long context is cut into *splits*, each with a program of its own, and their results
# are put together. But a softmax needs the sum over *all* positions. How can parts be averaged?
#
# ![Above, one worker walks along all 16 blocks of a context's keys and values, one after the other: 16 turns, while the other workers idle. Below, the context is split into 4 parts, a worker each: 4 turns. Each leaves an average and the logarithm of its sum of weights; from these a last step merges the parts into exactly the attention over the whole.](../images/split-context.svg)

# %% [markdown] slideshow={"slide_type": "subslide"}
# Let each split leave two things: its own average of the values, and the logarithm of its sum of weights,
# $\ell_i = \log \sum_s e^{x_s}$. Then the whole is the average of the averages, weighted by $e^{\ell_i}$:

# %%
scores_S = torch.randn(11, generator=draw, dtype=torch.float64)
values_SH = torch.randn(11, 8, generator=draw, dtype=torch.float64)
parts, sizes = [], []
for begin, end in [(0, 4), (4, 8), (8, 11)]:
    x = scores_S[begin:end]
    parts.append(x.softmax(0) @ values_SH[begin:end])
    sizes.append(x.logsumexp(0))
merged_H = torch.stack(sizes).softmax(0) @ torch.stack(parts)
assert torch.allclose(merged_H, scores_S.softmax(0) @ values_SH, rtol=0, atol=1e-14)
print("three splits, merged, are one softmax over all")

# %% [markdown]
# That is *Flash-Decoding* (Dao et al. 2023). It reads no byte less; it lets the whole GPU read. The split
# count may not depend on the lengths, if the launch is to be recorded once for all, below.

# %% [markdown] slideshow={"slide_type": "subslide"}
# Tests run the kernel in Triton's interpreter, with NaN in every unused place. On a GPU, a share of the copy
# bandwidth, and against `scaled_dot_product_attention` on keys that lie side by side:

# %% tags=["nbval-ignore-output"]
from functools import partial

from lecture_util.kernels.paged_attention import paged_attention_fused
from lecture_util.roofline import measure, this_machine


def paged_bandwidth(S, B=8, K=8, G=4, H=128, P=16):
    pages = -(-S // P)
    k, v = torch.randn(2, B * pages, P, K, H, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(B, K * G, H, device="cuda", dtype=torch.bfloat16)
    tables = torch.randperm(B * pages, device="cuda").view(B, pages)
    lengths = torch.full((B,), S, device="cuda")
    often = dict(repeats=20, warmup=5)
    ours = measure(paged_attention_fused, q, k, v, tables, lengths, **often).best_s
    k_BKSH, v_BKSH = (x.view(B, pages * P, K, H).transpose(1, 2).contiguous() for x in (k, v))
    sdpa = partial(torch.nn.functional.scaled_dot_product_attention, enable_gqa=True)
    dense = measure(sdpa, q[:, :, None], k_BKSH, v_BKSH, **often).best_s
    return (k.nbytes + v.nbytes) / ours, dense / ours


# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
if torch.cuda.is_available():
    machine = this_machine()
    for S in (1024, 4096, 16384, 65536):
        rate, against_dense = paged_bandwidth(S)
        print(f"S={S:<6} {rate / 1e12:.2f} TB/s, {rate / machine.bandwidth_bytes_per_s:.0%} of a copy's; "
              f"{against_dense:.2f} times as fast as SDPA on contiguous keys")  # fmt: skip
else:
    print("not measured here: no CUDA device")

# %% [markdown]
# (The vLLM paper reports its own first kernel as 20 to 26 % *slower* than one for contiguous keys, and the
# engine as faster by far: the memory saved is worth more than that. One transcription.)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Hundreds of launches a token
#
# Norms, products, rotations, additions: in each layer a decode step runs dozens of operations, and each is
# at least one kernel that Python launches through torch. How many in all?

# %% tags=["nbval-ignore-output"]
launched = predict("Operations that torch runs for one decode step, 30 layers", unit="operations")

# %% slideshow={"slide_type": "subslide"}
from torch.utils._python_dispatch import TorchDispatchMode

from lecture_util.model.kv_cache import KVCache


class CountsOperations(TorchDispatchMode):
    """Counts what would be a kernel on a GPU: all that is not just another view of a tensor."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += not function.is_view
        return function(*args, **(kwargs or {}))


cache = KVCache(config, 1, 64, model.dtype, model.device)
with torch.no_grad(), CountsOperations() as counter:
    model(torch.tensor([[1]], device=model.device), cache)
assert counter.count > 10 * config.L

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
from lecture_util.roofline import weight_bytes

LAUNCH_S = 5e-6  # our assumption: Python, torch and the driver need some microseconds a launch
launch_ms = 1e3 * counter.count * LAUNCH_S
read_ms = 1e3 * weight_bytes(config, 2) / h100.bandwidth_bytes_per_s
print(f"{counter.count} operations: {launch_ms:.1f} ms to launch, {read_ms:.2f} ms to read weights")
launched.reveal(counter.count)

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Read.** A small model on a large GPU spends its time being *told* what to do. A **CUDA graph** records all launches
# of a step once, with every address, and repeats them at one call. The price: nothing may change but what
# lies in the recorded buffers. Pages help here: wherever a sequence's keys are, it is only numbers in a
# table. The batch size, though, is baked in. So there is a graph for 1, 2, 4, 8, ... rows, and a batch is
# filled up to the next one with rows of length 0:

# %%
from lecture_util.serving.graphs import buckets

for slots in (6, 16):
    sizes = buckets(slots)
    rows = [next(b for b in sizes if b >= n) for n in range(1, slots + 1)]
    empty = sum(rows) - sum(range(1, slots + 1))
    print(f"{slots:>2} slots: graphs for {sizes}; {empty / sum(rows):.0%} of rows are nobody's")

# %% [markdown]
# Those rows cost next to nothing, as long as a step waits for the weights. What they write goes to a page
# that is never lent, and their attention is 0, not garbage. (xLLM-AI/xllm#1939: only the real rows were
# described to the kernel, and those that fill up the batch read what happened to be there.)

# %% slideshow={"slide_type": "subslide"} tags=["nbval-ignore-output"]
if torch.cuda.is_available():
    speeds = {}
    for name in ("plain", "graphs"):
        cache = PagedCache(config, 256, 16, model.dtype, model.device)
        engine = Engine(model, cache, Policy(slots=8), graphs=name == "graphs")
        engine.generate([story] * 8, Params(max_new_tokens=8))
        with stopwatch(model.device) as watch:
            engine.generate([story] * 8, Params(max_new_tokens=64))
        speeds[name] = 8 * 64 / watch.seconds
    print(", ".join(f"{name} {speed:,.0f} tokens/s" for name, speed in speeds.items()))
else:
    print("not measured here: no CUDA device")

# %% [markdown]
# What further engines do is more of the same: fewer trips to memory (norms, rotations and the write to the
# cache fused into one kernel), and fewer interruptions (sampling on the GPU, the next step planned while
# this one runs).

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 7. The engine
#
# Everything of notebooks 09 and 10 behind one face. Many prompts at once:

# %%
engine = new_engine()
openings = ["The capital of Italy is", "Honey is made by", "To be, or not to be,"]
prompts = [encode(tokenizer, text) for text in openings]
answers = engine.generate(prompts, Params(max_new_tokens=10))
for prompt, answer in zip(prompts, answers, strict=True):
    assert answer.tokens == generate(model, [prompt], 10)[0]
print([answer.reason for answer in answers], "and the texts are those of generate")

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
for opening, answer in zip(openings, answers, strict=True):
    print(f"{opening}|{tokenizer.decode(answer.tokens)}".replace("\n", " "))

# %% [markdown] slideshow={"slide_type": "subslide"}
# One at a time, as it comes. Leaving the loop cancels the request; others move on meanwhile, and its pages
# are back at once:

# %%
background = engine.submit(prompts[2], Params(max_new_tokens=12))
told = []
for token in engine.stream(prompts[0], Params(max_new_tokens=100)):
    told.append(token)
    if len(told) == 6:
        break  # we have heard enough
while engine.loop.busy:
    engine.step()
(other,) = engine.result(background)
print("heard", len(told), "tokens, the same:", told == answers[0].tokens[:6])
print("meanwhile the other:", other.reason, len(other.tokens), "tokens")
assert engine.cache.blocks.available == engine.cache.blocks.num_pages

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### When things go wrong
#
# A server's worst request must be harmless to the others. A stop rule that raises, an empty prompt, a wish
# for more than the whole pool; and between them, honest ones:


# %%
def broken(new_tokens):
    if len(new_tokens) == 3:
        raise RuntimeError("a bug in somebody's stop rule")
    return False


requests = [
    Request(prompts[0], Params(max_new_tokens=10)),
    Request(prompts[1], Params(max_new_tokens=10, stop=broken)),
    Request([], Params(max_new_tokens=10)),
    Request(prompts[1], Params(max_new_tokens=5000)),
    Request(prompts[2], Params(max_new_tokens=10)),
]

# %% slideshow={"slide_type": "subslide"}
import warnings

with warnings.catch_warnings(record=True) as warned:  # `serve` says so when it has refused anybody
    warnings.simplefilter("always")
    done = engine.serve(requests)
print(*(f"warning: {str(warning.message)[:70]}..." for warning in warned), sep="\n")
for completion in done:
    error = completion.error
    print(f"{completion.reason:<7} {len(completion.tokens):>2} tokens",
          f"{type(error).__name__}: {str(error)[:60]}" if error else "")  # fmt: skip
assert done[0].tokens == answers[0].tokens and done[4].tokens == answers[2].tokens
assert engine.cache.blocks.available == engine.cache.blocks.num_pages
print("the honest ones said what they always say; all pages are back")

# %% slideshow={"slide_type": "subslide"}
stats = engine.stats
print(f"{stats.requests} requests, {stats.new_tokens} tokens in {stats.iterations} forwards, "
      f"at most {stats.most_running} at once")  # fmt: skip
print(f"first token after {stats.ttft.p50:.0f} forward (p50), one every {stats.tpot.p50:.0f}; "
      f"{stats.waste:.0%} of the lent memory unused")  # fmt: skip

# %% [markdown]
# (Short texts, so the last page weighs more: 7.5 places beside a dozen tokens.)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### All of it, measured
#
# The reference model under a long-tailed trace, on one machine. First with as many slots for everybody,
# whatever memory that takes: static batching, then notebook 09's engine with rows, then pages.

# %% tags=["nbval-ignore-output"]
print(f"{record['date']}, {record['hardware']}")


def table_of(rows):
    print(f"{'':<26} tokens/s  TTFT p50  TPOT p50  most at once  memory used  preempted")
    for row in rows:
        print(f"{row['name']:<26} {row['tokens_per_s']:8.1f} {row['ttft']['p50']:8.1f}s "
              f"{1e3 * row['tpot']['p50']:7.0f}ms {row['most_running']:13} {row['memory_use']:12.0%} "
              f"{row['preemptions']:10}")  # fmt: skip


table_of(record["scheduling"])

# %% [markdown] slideshow={"slide_type": "subslide"}
# **Read.** With equally many sequences in the batch, pages bring no speed: following a table is not faster
# than following a row. What they bring is room: of what they lend, nearly all is used. So now the same
# *bytes* for both, and as many sequences as fit:

# %% tags=["nbval-ignore-output"]
print(f"{memory_run['bytes'] / 1e6:,.0f} MB of cache")
table_of([memory_run["contiguous"], memory_run["paged"]])

# %% [markdown]
# Several times as many sequences at once, so the queue is shorter, and the first token comes sooner. A
# single text goes more slowly: it shares each forward with more others, and on a CPU a larger batch is not
# free (notebook 03). On a GPU, far from its ridge, it nearly is.

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
for requests in dict.fromkeys(row["requests"] for row in record["peers"]):
    rates = {
        row["name"]: row["tokens_per_s"] for row in record["peers"] if row["requests"] == requests
    }
    print(f"{requests}:")
    for name, rate in rates.items():
        print(
            f"   {name:<40} {rate:6.1f} tokens/s; the engine {rates['engine'] / rate:.2f} times that"
        )

# %% [markdown] slideshow={"slide_type": "subslide"}
# ![Bars of tokens a second, our engine and transformers' own ways. 16 short requests: engine 203; generate_batch 132; generate, batches of 8 126; generate, batches of 16 201. long-tailed: engine 109; generate_batch 51.9; generate, batches of 8 20.5; generate, batches of 16 21.5; generate, batches of 32 24.4.](../images/engine-peers.svg)
#
# `generate_batch` is transformers' own continuous batching, with pages like ours; `generate` its static
# batches, each run to its longest text. The same weights, the same requests. The 16 short ones are all there
# at once and equally long: one static batch takes them all, nobody in it ends early and nobody stands
# outside. It loses nothing, so the engine, which keeps its books besides, can at best equal it. What there is
# to win comes with the long tail. The vLLM paper reports 2 to 4
# times the throughput of FasterTransformer and Orca at the same latency (arXiv:2309.06180), on GPUs.

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Against the real one
#
# vLLM is built on this idea. If you have a server of it (or any with the OpenAI interface), name it in
# `LECTURE_ENGINE_URL`, and the same requests go to both:

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "subslide"}
import os

from lecture_util.serving.client import RemoteEngine, RemoteError
from lecture_util.serving.metrics import Percentiles

if "LECTURE_ENGINE_URL" in os.environ:
    both = make_trace(24, rate_per_s=None, prompt_tokens=Lengths(32, 0.5, 4, 64), tokens=rules)
    try:
        servers = {"ours": new_engine(256, clock=WallClock()), "theirs": RemoteEngine()}
        for name, server in servers.items():
            with stopwatch(model.device) as watch:
                done = server.serve(both)
            tokens = sum(len(c.token_times_s) for c in done)
            failed = sum(c.reason == "failed" for c in done)
            print(f"{name:<7} {tokens / watch.seconds:8,.0f} tokens/s, first token after "
                  f"{Percentiles.of(c.ttft_s for c in done).p50} s (p50), {failed} failed")  # fmt: skip
    except (RemoteError, ValueError) as error:
        print(f"not measured here: {error}")
else:
    print("not measured here. Start one elsewhere: vllm serve HuggingFaceTB/SmolLM2-135M-Instruct")
    print("then, before Jupyter starts: export LECTURE_ENGINE_URL=http://that-machine:8000")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## What to remember
#
# - Contiguous caches waste most of their memory: on tokens that never come, on tokens still to come, and on
#   gaps. Even perfect foresight only helps with the first.
# - In pages of $P$ tokens a sequence wastes about $(P-1)/2$ places, whatever its length. A table of page
#   numbers is all it takes, and attention through it gives the same numbers.
# - Pages are counted. What is counted can be shared: between samples, between users with the same
#   beginning. Whoever writes to a shared page copies it first.
# - A page's name must tell all that came before it. A hash finds candidates; only tokens prove them.
# - Renting as you go means that memory can run out in mid-sentence. Put the newest back and compute it
#   again: its text does not change.

# %% tags=["nbval-ignore-output"]
status("10")

# %% [markdown] slideshow={"slide_type": "subslide"}
# ## Papers and sources
#
# - Stanford CS336, spring 2025, lecture 10, *Inference*: the order, and the pictures of memory.
# - Kwon et al. 2023, *Efficient Memory Management for Large Language Model Serving with PagedAttention*,
#   arXiv:2309.06180; the vLLM authors' post of June 2023 (waste under 4 %).
# - Yu et al. 2022, *Orca: A Distributed Serving System for Transformer-Based Generative Models*, OSDI 22:
#   whose allocation the three guessers stand for.
# - Dao, Haziza, Massa, Sizov 2023, *Flash-Decoding for long-context inference*,
#   crfm.stanford.edu/2023/10/12/flashdecoding.html.
# - PyTorch's notes on CUDA semantics, section *CUDA Graphs*.
# - vllm-project/vllm#12621, #15297: hashes that collide. vllm-project/vllm#44701: an adapter and a salt of
#   one name. GeeeekExplorer/nano-vllm#65: a new page when `len % P == 1`. pytorch/pytorch#159247,
#   xLLM-AI/xllm#932, #1939: a last block that isn't full, a table's strides, rows that only fill up.
