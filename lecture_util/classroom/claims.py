"""The claims that the course corrects, in the order of the notebooks: `CORRECTIONS.md` in data.

`said` is what one hears or reads, in our words; `right` holds the figures that a cell computes.
"""

from __future__ import annotations

from dataclasses import dataclass

LECTURE = "the lecture"
SLIDES = "the slides"
BOTH = "the lecture, the slides"


@dataclass(frozen=True)
class Evidence:
    """A code cell: its notebook, words that only it holds, and words of the note beside it.

    note   a piece of the notebook's *Erratum* that belongs to it; "" where it has none of its own
    """

    notebook: str
    cell: str
    note: str = ""


@dataclass(frozen=True)
class Correction:
    """One claim.

    by        who says so                     figures   what `right` states and a cell shows
    said      what is often said              evidence  the cells, the deciding one first
    right     what is right                   lecture   its number in the list of the lecture's
    """

    title: str
    by: str
    said: str
    right: str
    figures: tuple[str, ...]
    evidence: tuple[Evidence, ...]
    lecture: int = 0


CORRECTIONS = (
    Correction(
        title="What a forward pass costs",
        by=LECTURE,
        said="A forward pass costs 6 FLOPs a token and parameter.",
        right="2, and attention's 4·T·S·N·H a layer. The backward pass costs twice the forward's, "
        "so that 2 + 4 = 6 is training; inference has no backward pass.",
        figures=("2 + 4 = 6",),
        evidence=(
            Evidence("01", "assert backward_count == 2 * forward_count", "6 FLOPs per token"),
            Evidence("01", "assert measured == linear + attention_flops"),
        ),
        lecture=10,
    ),
    Correction(
        title="A pass is O(T²), naive generation O(T³)",
        by=LECTURE,
        said="One pass over T tokens is O(T²), so T tokens without a cache are O(T³).",
        right="As a limit. At the lengths of most prompts the linear layers' O(T) dominates: "
        "causal attention is 0.8% of a pass of Llama-2-13B at 512 tokens, and half at 61,952; and "
        "up to 92,928 naive generation's T² term is the larger one.",
        figures=("0.8%", "61,952", "92,928"),
        evidence=(
            Evidence("03", "within_pass, within_generation = [], []", "a forward pass is $O(T^2)$"),
            Evidence("01", "forward_flops(llama, 1, T, T, causal=True)", '"A pass is O(T²)"'),
        ),
        lecture=14,
    ),
    Correction(
        title="From which batch on a product is compute-limited",
        by=LECTURE,
        said="On an H100 a product is compute-limited from a batch of 296 on (B > 295).",
        right="That is the limit for D and F without end. At Llama-2-13B's 5120 and 13824 it is "
        "still memory-limited at B=320, and compute-limited from 321.",
        figures=("5120", "13824", "B=320", "321"),
        evidence=(
            Evidence("02", "for batch in (295, 296, 320, 321):", "$B > 295$ is the limit"),
            Evidence("02", "assert sympy.simplify(solution - crossover_batch(D, F, R)) == 0"),
        ),
        lecture=5,
    ),
    Correction(
        title="The shape of x in the MLP's gate",
        by=LECTURE,
        said="The gate is computed as G = X Wgate with an X of B×T×F.",
        right="X is B×T×D, and G is B×T×F. In a small case, D=5 and F=7, an input of width 7 is "
        "refused. The down projection is the one that reads width F.",
        figures=("D=5", "F=7"),
        evidence=(
            Evidence("02", "assert g_BTF.shape == (2, 3, 7)", "$x$ has shape"),
        ),
        lecture=11,
    ),
    Correction(
        title="The bytes of an MLP",
        by=LECTURE,
        said="The MLP's products move 4BTD + 4BTF + 6DF bytes.",
        right="That counts writing U and G, and not reading them back for the down projection. "
        "Unfused it is `4*B*D*T + 8*B*F*T + 6*D*F`; fused, the terms with F·T vanish: "
        "`4*B*D*T + 6*D*F`. For small B·T the intensity is B·T in each case.",
        figures=("4*B*D*T + 8*B*F*T + 6*D*F", "4*B*D*T + 6*D*F"),
        evidence=(
            Evidence("02", 'for fusion in ("unfused", "write_only", "fused"):', "never read them"),
        ),
        lecture=6,
    ),
    Correction(
        title="Attention's intensity in generation",
        by=LECTURE,
        said="In generation attention does at most 1 FLOP a byte, and that can't be improved.",
        right="So it is for multi-head attention. With G queries a KV head it tends to G, and with "
        "DeepSeek-V2's latent, absorbed, to 242. What stays true: batching doesn't help.",
        figures=("242",),
        evidence=(
            Evidence("02", "assert sympy.limit(in_generation, S, sympy.oo) == G",
                     "intensity in generation is at most 1, and that"),
            Evidence("04", "assert sympy.limit(grouped, S, sympy.oo) == G_",
                     "intensity is at most 1, and nothing"),
            Evidence("04", 'assert f"{float(v2):.0f}" == "242"'),
        ),
        lecture=4,
    ),
    Correction(
        title="The intensity of prefill attention",
        by=LECTURE,
        said="Attention in prefill does S/2 FLOPs a byte.",
        right="A causal mask needs half of the scores for the same bytes, so about S/4: on an H100 "
        "multi-head attention is compute-limited from 1181 tokens, not 591. And tiles of queries "
        "read K and V again, which bounds it further.",
        figures=("1181", "591"),
        evidence=(
            Evidence("02", "assert attention(1, 1181, 1181, 40, 40, 128, causal=True)",
                     "Prefill attention does S/2"),
            Evidence("02", "assert sympy.simplify(causal.intensity - (S + 1) / 4) == 0"),
            Evidence("02", "assert sympy.limit(flops / bytes_moved, S, sympy.oo) == tile"),
        ),
        lecture=14,
    ),
    Correction(
        title="The size of the KV cache",
        by=SLIDES,
        said="The cache takes 2·2·batch·length·layers·embedding bytes.",
        right="With multi-head attention and 16 bits: 819,200 bytes a token for Llama-2-13B. With "
        "grouped queries the width is K·H: Llama-3-70B keeps 327,680 bytes a token, where the "
        "formula says 2,621,440.",
        figures=("819,200", "327,680", "2,621,440"),
        evidence=(
            Evidence("03", "assert often_said / right == c.G", "`2·2·batch·seq·layers·embedding`"),
        ),
        lecture=16,
    ),
    Correction(
        title="A theoretical maximum of latency",
        by=LECTURE,
        said="The time in which a step's bytes can be read is a theoretical *maximum* latency.",
        right="It is a *minimum*, and the throughput that follows a maximum: Llama-2-13B on an "
        "H100, 64 sequences of 1,024 tokens, takes at least 23.80 ms and gives at most 2,689 "
        "tokens a second.",
        figures=("23.80", "2,689"),
        evidence=(
            Evidence("03", "assert smaller.latency_s < bound.latency_s",
                     "theoretical *maximum* latency"),
        ),
        lecture=3,
    ),
    Correction(
        title="Less memory, and latency",
        by=LECTURE,
        said="Less memory means higher latency and throughput.",
        right="*Lower* latency, and higher throughput. In the same step with half the cache: 15.78 "
        "ms instead of 23.80, 4,055 tokens a second instead of 2,689.",
        figures=("15.78", "23.80", "4,055", "2,689"),
        evidence=(
            Evidence("03", "assert smaller.latency_s < bound.latency_s",
                     "less memory means *lower* latency"),
        ),
        lecture=2,
    ),
    Correction(
        title="What a decode step reads",
        by=LECTURE,
        said="A decode step reads all weights.",
        right="Of the input embedding it reads a row a sequence: at B=1 Llama-2-13B reads 26.54 "
        "GB, 1.2% less than it holds. Embeddings tied to the head are read whole, as the head.",
        figures=("26.54", "1.2%"),
        evidence=(
            Evidence("03", "whole_embedding=False", "counts one table too many"),
        ),
        lecture=13,
    ),
    Correction(
        title="GQA and latency",
        by="retellings of the lecture's three rows",
        said="Grouped queries (K from 40 to 8) make latency worse and throughput better.",
        right="Both get better: 23.80 → 9.97 ms at B=64, for Llama-2-13B's shape on an H100. What "
        "costs latency is the larger batch that now fits: 19.59 ms at B=256, 13,068 tokens a "
        "second; still less than before.",
        figures=("23.80", "9.97", "19.59", "13,068"),
        evidence=(
            Evidence("04", 'assert seen[40, 64] == ("23.80", "2,689")', "often told as one story"),
            Evidence("04", "assert float(seen[8, 64][0]) < float(seen[8, 256][0])"),
        ),
        lecture=1,
    ),
    Correction(
        title="What of GQA's gain is the cache's",
        by=LECTURE,
        said="The gain of grouped queries is the smaller cache's.",
        right="Nearly all of it. W_K and W_V shrink too, 13.0B → 11.3B parameters. At equal "
        "parameters the step takes 10.98 ms, not 9.97, and gives 5,831 tokens a second.",
        figures=("13.0B", "11.3B", "10.98", "5,831"),
        evidence=(
            Evidence("04", 'f"{64e3 / equal_ms:,.0f}") == ("10.98", "5,831")',
                     "The gain is the KV cache's"),
        ),
        lecture=7,
    ),
    Correction(
        title="By how much MLA shrinks the cache",
        by=LECTURE,
        said="MLA makes 512 (+ 64) numbers of 16,384.",
        right="The latent serves for keys *and* values, so it stands for 32,768 numbers a token "
        "and layer: they become 576, 57 times fewer.",
        figures=("32,768", "576", "57"),
        evidence=(
            Evidence("04", "assert heads_kept == 32_768", "MLA shrinks 16,384"),
        ),
        lecture=12,
    ),
    Correction(
        title="The sign of HiPPO's matrix",
        by="a picture in the lecture, and others",
        said="S4 is x' = Ax + Bu with A = [[1, 0, 0], [1, 2, 0], [1, 3, 3]].",
        right="With these signs the state would explode, beyond 10^12 of what it was after ten "
        "units of time. The system is x' = −Ax + Bu; it decays, below 10^-3.",
        figures=("10^12", "10^-3"),
        evidence=(
            Evidence("05", "assert as_shown.abs().max() > 1e12", "HiPPO's matrix"),
        ),
    ),
    Correction(
        title="A state of constant size",
        by=LECTURE,
        said="A recurrent state replaces the cache's O(T) by O(1).",
        right="In the length of the text, yes. In what is to be kept apart, no: 16 features give "
        "back 16 pairs exactly, and not 17.",
        figures=("16 pairs", "17"),
        evidence=(
            Evidence("05", "assert exact == (pairs <= M)", '"The state is $O(1)$"'),
        ),
    ),
    Correction(
        title="Linear attention and recall",
        by="widely",
        said="Linear models can't recall.",
        right="It is a matter of size. A linear state of 16 features reads back 16 pairs without "
        "error, if their keys are orthogonal. The small model of that notebook has trouble because "
        "its state is small and its keys are learned.",
        figures=("16 pairs",),
        evidence=(
            Evidence("05", "assert exact == (pairs <= M)", "Linear models can't recall"),
        ),
    ),
    Correction(
        title="The range of fp8 e4m3",
        by=LECTURE,
        said="fp8 e4m3 on an H100 spans −240 to 240.",
        right="±448 (torch's `float8_e4m3fn`); ±240 is the variant *fnuz* of other chips.",
        figures=("448", "240"),
        evidence=(
            Evidence("06", 'assert FORMATS["e4m3"].max == 448', "spans [-240, 240]"),
        ),
        lecture=8,
    ),
    Correction(
        title="0.3 in int8",
        by="Hugging Face's post on LLM.int8(), 2022",
        said="0.3 becomes the code 38, and 0.2992 on the way back: an error of 0.008.",
        right="An error of 0.0008. Half a step, the worst that can happen, is 0.0039.",
        figures=("0.0008", "0.0039"),
        evidence=(
            Evidence("06", "assert code == 38", "calls that an error of 0.008"),
        ),
    ),
    Correction(
        title="What LLM.int8() costs in speed",
        by="the lecture, after Hugging Face's post",
        said="LLM.int8() is 15 to 23% slower than fp16.",
        right="The rows printed there give 18% and 29%, and compare 8 GPUs with 4, and 14 with 5. "
        "In GPU-seconds a token costs 0.59 and 0.46 of what it did.",
        figures=("18%", "29%", "0.59", "0.46"),
        evidence=(
            Evidence("06", "GPU-seconds a token", "15–23% slower"),
        ),
    ),
    Correction(
        title="What AWQ does, and int3's memory",
        by=LECTURE,
        said="AWQ keeps 0.1 to 1% of the weights in high precision; int3 takes 4 times less memory "
        "than fp16, and is 3.2 times as fast.",
        right="That was the experiment which led to it. AWQ *scales* the channels that meet large "
        "activations, and rounds all weights. int3 is 5.3 times smaller and int4 4.0; in groups of "
        "128, with scales and zeros, 5.0 and 3.8. The speed was measured with 4 bits.",
        figures=("5.3", "4.0", "5.0", "3.8"),
        evidence=(
            Evidence("06", 'assert f"{16 / 3:.1f}" == "5.3"', "AWQ keeps 0.1 to 1%"),
        ),
        lecture=9,
    ),
    Correction(
        title="Minitron's 9%",
        by="a picture of the paper, shown in the lecture",
        said="The pruned 8B is 9% better than one trained from scratch, on 40 times fewer tokens.",
        right="9.1 *points* of MMLU, which is 17% more. And 40 times leaves the teacher out: with "
        "its 8 trillion tokens it is 8.1e+12 in all.",
        figures=("9.1", "17%", "40", "8.1e+12"),
        evidence=(
            Evidence("07", "small_mmlu, scratch_mmlu = 63.8, 54.7", "9% better"),
        ),
    ),
    Correction(
        title="Why speculative sampling is exact",
        by=LECTURE,
        said="Speculative sampling is exact: see one token and two symbols.",
        right="The example is right, and it is one case. For any vocabulary kept guesses and "
        "residual add up to p; a test walks every path of several guesses and a bonus, 135 of "
        "them, and finds plain sampling's probabilities within 1e-12. A round brings "
        "(1−α^(γ+1))/(1−α) tokens, 3.3616 at α = 0.8 and γ = 4.",
        figures=("135", "1e-12", "3.3616"),
        evidence=(
            Evidence("08", "assert torch.allclose(P_V, p_V, rtol=0, atol=1e-15)"),
            Evidence("08", "assert (got - wanted).abs().max() < 1e-12 and abs(got.sum() - 1)"),
            Evidence("08", "assert abs(expected_tokens(0.8, 4) - 3.3616) < 1e-12"),
        ),
        lecture=15,
    ),
    Correction(
        title="Two acceptance rates",
        by="readers of two papers",
        said="Acceptance rates of different papers can be set side by side.",
        right="Leviathan's α is of one guess that is reached; Chen's is the share kept of all K, "
        "which falls with K. Of four guesses 0.80 kept means α = 0.91.",
        figures=("0.80", "0.91"),
        evidence=(
            Evidence("08", "assert float(solved) > share + 0.1", '"Acceptance rate" means two'),
        ),
    ),
    Correction(
        title="The places in the picture of fragmentation",
        by="the vLLM paper's figure 3",
        said="Request A rents 2,048 places, B 512.",
        right="What is drawn for A adds up to 2,049; B's to 512.",
        figures=("2,049", "512"),
        evidence=(
            Evidence("10", "assert sum(A_slots.values()) == 2049", "the paper's own drawing"),
        ),
    ),
    Correction(
        title="When a new page is needed",
        by="readers of small engines",
        said="`len(seq) % P == 1` is a bug; a page is full at 0.",
        right="Both are right, of different moments: `len % P == 1`, the new token counted, is "
        "`len % P == 0` without it.",
        figures=("len % P == 1", "len % P == 0"),
        evidence=(
            Evidence("10", "assert needs_page == (length_with_it % 4 == 1)", "Erratum, of sorts"),
        ),
    ),
    Correction(
        title="When DARE appeared",
        by=SLIDES,
        said="DARE is of June 2023, as TIES is.",
        right="Its number, 2311.03099, says November; TIES is 2306.01708.",
        figures=("2311.03099", "2306.01708"),
        evidence=(
            Evidence("11", 'assert numbers["DARE"].startswith("2311")', "date DARE to June 2023"),
        ),
    ),
    Correction(
        title="SLERP and the length of weights",
        by=SLIDES,
        said="SLERP preserves the magnitude of the weights.",
        right="If both have the same. Between lengths 3 and 1, 160 degrees apart, it goes by way "
        "of 6.13 and 0.47.",
        figures=("160 degrees", "6.13", "0.47"),
        evidence=(
            Evidence("11", "lengths at t =", "SLERP preserves the magnitude"),
        ),
    ),
    Correction(
        title="DARE's rescaling",
        by="readers of papers and tools",
        said="What DARE leaves is rescaled, and there is one way to do it.",
        right="By 1/(1−p), says the paper, whatever was dropped; mergekit restores the sum of "
        "magnitudes instead. If a lone outlier goes, at 90% dropped, that is 10 times against 110.",
        figures=("10 times", "110"),
        evidence=(
            Evidence("11", "survivors are enlarged", '"Rescale" is not one thing'),
        ),
    ),
    Correction(
        title="DELLA's probabilities",
        by=SLIDES,
        said="The chance to be dropped is inversely proportional to the magnitude.",
        right="It is linear in the *rank*: magnitudes 0.5, 3, 1, 0.1 and 2 are kept with "
        "probabilities [0.4, 0.7, 0.5, 0.3, 0.6].",
        figures=("[0.4, 0.7, 0.5, 0.3, 0.6]",),
        evidence=(
            Evidence("11", "chances = keep_probabilities(row, density=0.5, epsilon=0.2)",
                     "inversely proportional to the magnitude"),
        ),
    ),
    Correction(
        title="Stacking layers of different models",
        by=SLIDES,
        said="Franken-merging can combine different architectures.",
        right="The layers must share one stream of one width, and its directions. One of another "
        "width doesn't run: `RuntimeError`.",
        figures=("RuntimeError",),
        evidence=(
            Evidence("11", "a layer of another width ran", "can combine different architectures"),
        ),
    ),
)  # fmt: skip
