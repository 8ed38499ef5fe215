"""The widgets of 04 and 05 show what an independent count, loop or network gives."""

import itertools

import matplotlib
import numpy as np
import pytest
import torch

from lecture_util.alternatives.selective import selective_scan
from lecture_util.classroom.widgets import cache_calculator, mask_viewer, memory_stepper
from lecture_util.classroom.widgets.masks import DILATION, LAYOUTS
from lecture_util.classroom.widgets.memories import NAMES, SHARPNESS, Pairs
from lecture_util.kv_reduction.layout import Layout
from lecture_util.model.config import PUBLISHED
from lecture_util.roofline import ACCELERATORS, decode_step, format_seconds

matplotlib.use("agg")
PNG = b"\x89PNG"
CACHE, WINDOW, LINEAR, SSM = NAMES


def move(explorer, **values):
    """Set controls one after another; the text then, which holds no error."""
    for name, value in values.items():
        explorer.controls[name].value = value
    assert "Error" not in explorer.text.value, explorer.text.value
    return explorer.text.value


def column(explorer, place: int) -> dict[str, str]:
    """What the calculator's table shows of MHA (0) or of the choice (1)."""
    return {row: cells[place].get_text() for row, cells in explorer.cells.items()}


# --- cache_calculator


@pytest.mark.parametrize(
    ("chosen", "numbers"),
    [
        ({}, 2 * 40 * 128 * 40),
        ({"K": 8}, 2 * 8 * 128 * 40),
        ({"K": 1}, 2 * 128 * 40),
        ({"cached": "an MLA latent", "C": 512, "R": 64}, 576 * 40),
        ({"cached": "an MLA latent", "C": 128, "R": 32}, 160 * 40),
        ({"K": 1, "share": 2}, 2 * 128 * 20),
        ({"K": 8, "share": 3}, 2 * 8 * 128 * 14),
        ({"L": 7}, 2 * 40 * 128 * 7),
    ],
)
def test_bytes_a_token_are_two_for_each_number_cached(chosen, numbers):
    explorer = cache_calculator(**chosen)
    assert f"<b>{2 * numbers:,} bytes a token" in explorer.text.value
    assert explorer.chosen.held_bytes == 2 * numbers * 4096
    assert column(explorer, 1)["bytes a token"] == f"{2 * numbers:,}"


def test_windows_and_sharing_hold_what_a_count_of_layers_gives():
    explorer = cache_calculator(K=8, W=1024)
    for S, every, share in itertools.product((512, 4096, 32768), (0, 1, 4, 6), (1, 2)):
        move(explorer, S=S, every=every, share=share)
        is_global = [every > 0 and (layer + 1) % every == 0 for layer in range(40)]
        caches = {kind: -(-is_global.count(kind) // share) for kind in (True, False)}
        tokens = caches[True] * S + caches[False] * min(S, 1023)
        assert explorer.chosen.held_bytes == 2 * 2 * 8 * 128 * tokens


@pytest.mark.parametrize("model", ["llama-2-13b", "llama-3-8b", "smollm2-135m"])
@pytest.mark.parametrize("accelerator", ["h100", "t4"])  # a T4 computes in fp16, not bf16
def test_a_memory_bound_step_is_the_roofline_s(model, accelerator):
    explorer = cache_calculator(model=model, accelerator=accelerator, B=4, S=1024)
    config, machine = PUBLISHED[model], ACCELERATORS[accelerator]
    step = decode_step(config, 4, 1024, machine)
    if not step.fits:
        assert "not fit" in explorer.text.value
        return
    assert "memory-bound" in explorer.text.value
    assert column(explorer, 1)["step of B"] == format_seconds(step.latency_s)
    most = int(column(explorer, 1)["sequences that fit"].replace(",", ""))
    assert decode_step(config, most, 1024, machine).fits
    assert not decode_step(config, most + 1, 1024, machine).fits


def test_mha_beside_it_is_the_same_model_with_a_kv_head_a_query():
    explorer = cache_calculator(model="llama-3-8b", S=8192)
    assert explorer.baseline.held_bytes == 4 * explorer.chosen.held_bytes
    assert "4 times less than MHA" in explorer.text.value
    assert "as much as MHA" in move(explorer, K=32)
    latent = {
        "cached": "an MLA latent",
        "C": 1024,
        "R": 128,
    }  # 1,152 numbers: 9 heads of 64, K and V
    assert "as much as MHA" in move(explorer, model="smollm2-135m", **latent)


def test_a_large_batch_of_small_caches_is_compute_bound():
    explorer = cache_calculator(model="llama-3-8b", K=1, S=128, B=1024)
    assert "compute-bound" in explorer.text.value


def test_what_does_not_fit_is_said_in_words():
    explorer = cache_calculator()
    assert "B = 64 does not fit" in move(explorer, B=64)
    assert column(explorer, 1)["step of B"] == "–"
    assert "does not fit" not in move(explorer, K=8)
    assert "The weights alone do not fit" in move(explorer, model="llama-3-70b")
    assert column(explorer, 1)["sequences that fit"] == "0"
    assert "One sequence does not fit" in move(cache_calculator(accelerator="a100"), S=131072)


def test_another_model_brings_its_own_heads_and_layers():
    explorer = cache_calculator()
    for model in [*reversed(PUBLISHED), *PUBLISHED]:
        move(explorer, model=model)
        config, options = PUBLISHED[model], [K for _, K in explorer.controls["K"].options]
        assert options == [K for K in range(1, config.N + 1) if config.N % K == 0]
        assert explorer.values["K"] == config.K
        assert explorer.values["L"] == config.L


def test_controls_that_say_nothing_now_are_greyed():
    explorer = cache_calculator()

    def greyed():
        return {name for name, control in explorer.controls.items() if control.disabled}

    assert greyed() == {"C", "R", "every"}
    move(explorer, W=1024)
    assert greyed() == {"C", "R"}
    move(explorer, cached="an MLA latent")
    assert greyed() == {"K", "W", "share", "every"}


def test_moves_draw_the_axes_once_for_a_model():
    explorer = cache_calculator()
    pictures = {bytes(explorer.image.value)}
    for value in ({"S": 8192}, {"K": 8}, {"L": 20}, {"W": 512}, {"B": 16}, {"dtype": "int8"}):
        move(explorer, **value)
        pictures.add(bytes(explorer.image.value))
    assert len(pictures) == 7
    assert explorer.canvas.still_draws == 1
    print(f"{1e3 * explorer.redraw_s:.0f} ms for a move")


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"K": 7}, r"K is 7: choose from 1, 2, 4, 5, 8, 10, 20, 40"),
        ({"W": 1000}, r"W is 1000: choose from 0, 128"),
        ({"heads": 8}, r"'heads' is no control: choose from model"),
        ({"model": "gpt-5"}, "gpt-5"),
        ({"accelerator": "abacus"}, "abacus"),
    ],
)
def test_a_start_that_a_control_does_not_offer_is_named(chosen, message):
    with pytest.raises(ValueError, match=message):
        cache_calculator(**chosen)


# --- mask_viewer

STACKS = [
    ("full", 1), ("full", 2), ("window", 1), ("window", 2), ("window", 3), ("hybrid", 1),
    ("hybrid", 2), ("dilated window", 1), ("dilated window", 2), ("window + first tokens", 2),
]  # fmt: skip
T, L, W, EVERY = 13, 5, 4, 3


def stack_of(name: str, share: int):
    return LAYOUTS[name](T, L, W, EVERY, share)


def sees(name: str, layer: int, query: int, key: int) -> bool:
    """Whether a query may look at a key, told pair by pair."""
    if key > query or (name == "full") or (name == "hybrid" and (layer + 1) % EVERY == 0):
        return key <= query
    if name == "dilated window":
        return (query - key) in [DILATION * i for i in range(W)]
    return query - key < W or (name == "window + first tokens" and key < 2)


@pytest.mark.parametrize(("name", "share"), STACKS)
def test_masks_are_as_told_pair_by_pair(name, share):
    told = [[[sees(name, i, t, s) for s in range(T)] for t in range(T)] for i in range(L)]
    assert np.array_equal([stack_of(name, share).sees(i) for i in range(L)], told)


@pytest.mark.parametrize(("name", "share"), STACKS)
def test_the_cache_keeps_the_keys_that_some_later_query_sees(name, share):
    stack = stack_of(name, share)
    for layer in range(L):
        for now in range(T):
            later = range(now + 1, now + 4 * T)
            needed = [s <= now and any(sees(name, layer, t, s) for t in later) for s in range(T)]
            assert stack.kept(layer, now).tolist() == needed


@pytest.mark.parametrize(("name", "share"), STACKS)
def test_the_reach_is_what_moves_an_output_of_a_network(name, share):
    """Each layer adds the mean of what the keys it reads were made of; one token is nudged."""
    stack = stack_of(name, share)
    inputs = [np.eye(T)]  # inputs[i][t, s]: how token s moves position t of layer i's input
    for i in range(L):
        mask = stack.sees(i)
        inputs.append(inputs[i] + mask / mask.sum(1, keepdims=True) @ inputs[stack.reads[i]])
    for layer in range(L):
        for position in range(T):
            reached = stack.reach(layer, position)[0]
            assert reached.tolist() == (inputs[layer + 1][position] > 0).tolist()


@pytest.mark.parametrize(("name", "share"), STACKS[:7])
def test_the_reach_agrees_with_the_layout_s_formula(name, share):
    every = {"full": 1, "window": L + 1, "hybrid": EVERY}[name]
    layout, stack = Layout.hybrid(L, W, every, share), stack_of(name, share)
    for layer in range(L):
        assert stack.reach(layer, T - 1)[0].sum() == layout.receptive_field(T, layer)


def test_mask_viewer_says_what_it_shows():
    explorer = mask_viewer("window", T=24, L=6, W=4)
    text = move(explorer, layer=2, position=19)
    assert "query 19 sees <b>4 of 20</b> keys" in text
    assert "its cache keeps <b>3</b> for later ones, 17 are dropped" in text
    assert "depends on <b>10 tokens</b>, back to position 10" in text  # 1 + 3 layers * (4-1)
    text = move(explorer, share=2, layer=3)
    assert "layer 2's cache keeps" in text
    assert "depends on <b>7 tokens</b>" in text  # two producers below it, not four layers
    assert "Caches in the stack: 3 for 6 layers" in text
    text = move(explorer, share=1, layout="dilated window")
    assert "sees <b>4 of 20</b>" in text
    assert "keeps <b>6</b>" in text  # every second key, but the skipped ones are needed next
    assert explorer.image.tooltip.startswith("Layer 3, 4 keys, every 2nd: query 19 sees 4 of 20")


def test_mask_viewer_s_picture_follows_every_control_and_is_drawn_once():
    explorer = mask_viewer()
    pictures = {bytes(explorer.image.value)}
    for value in ({"position": 12}, {"layer": 3}, {"W": 3}, {"share": 2}, {"layout": "full"}):
        move(explorer, **value)
        pictures.add(bytes(explorer.image.value))
    assert len(pictures) == 6
    assert explorer.draw.canvas.still_draws == 1
    print(f"{1e3 * explorer.redraw_s:.0f} ms for a move")


@pytest.mark.parametrize(
    "sizes", [{"T": 4, "L": 1, "W": 1}, {"T": 32, "L": 12, "W": 32, "share": 4}]
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_mask_viewer_draws_at_its_smallest_and_largest(layout, sizes):
    explorer = mask_viewer(layout, **sizes)
    assert bytes(explorer.image.value).startswith(PNG)
    move(explorer, position=0, layer=0)
    assert "depends on <b>1 token" in explorer.text.value


@pytest.mark.parametrize(
    ("chosen", "message"),
    [({"T": 3}, "T is 3"), ({"W": 0}, "W is 0"), ({"L": 13}, "L is 13"),
     ({"share": 1.5}, "share is 1.5"), ({"layout": "lacework"}, "lacework")],
)  # fmt: skip
def test_mask_viewer_names_what_it_cannot_show(chosen, message):
    with pytest.raises(ValueError, match=message):
        mask_viewer(**chosen)


# --- memory_stepper

PAIRS = Pairs(T=11, H=5, W=4, seed=3, runs=3)


def test_the_ssm_s_state_is_the_selective_scan_s():
    k, v, delta = map(torch.from_numpy, (PAIRS.k_XTH, PAIRS.v_XTH, PAIRS.delta_XT))
    E, Z = v.shape[-1], k.shape[-1]
    A_EZ, D_E = -torch.ones(E, Z).double(), torch.zeros(E).double()
    for t in (1, 7, 11):
        now = [x[:, :t] for x in (v, delta[..., None].expand_as(v), k)]
        state_BEZ = selective_scan(now[0], now[1], A_EZ, now[2], k[:, :t], D_E)[1]
        assert np.allclose(PAIRS.ssm_TXHH[t - 1], state_BEZ, atol=1e-6)


def test_linear_attention_reads_the_sum_of_values_by_likeness_of_keys():
    read_XtH = PAIRS.read(9)[LINEAR]
    scores = np.einsum("xqh,xsh->xqs", PAIRS.k_XTH[:, :9], PAIRS.k_XTH[:, :9])
    assert np.allclose(read_XtH, scores @ PAIRS.v_XTH[:, :9])


@pytest.mark.parametrize(("name", "held"), [(CACHE, slice(0, 9)), (WINDOW, slice(6, 9))])
def test_cache_and_window_read_as_torch_attends(name, held):
    q, k, v = (torch.from_numpy(x) for x in (PAIRS.k_XTH[:, :9], PAIRS.k_XTH, PAIRS.v_XTH))
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k[:, held], v[:, held], scale=SHARPNESS
    )
    assert np.allclose(PAIRS.read(9)[name], out)


def test_a_window_holds_one_less_than_it_sees():
    assert [len(PAIRS.kept(t)) for t in range(1, 7)] == [1, 2, 3, 3, 3, 3]
    assert PAIRS.kept(9).tolist() == [6, 7, 8]
    assert Pairs(W=1).kept(9).tolist() == []


def test_a_state_never_grows_and_a_cache_always_does():
    pairs = Pairs()
    bytes_of = {name: [pairs.nbytes(t)[name] for t in (1, 7, 8, 48)] for name in NAMES}
    assert bytes_of[CACHE] == [64, 448, 512, 3072]
    assert bytes_of[WINDOW] == [64, 448, 448, 448]
    assert bytes_of[LINEAR] == bytes_of[SSM] == [1024] * 4


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_first_pair_stays_sharp_in_a_cache_leaves_a_window_and_blurs_in_a_state(seed):
    recall = {name: levels[:, 0] for name, levels in Pairs(seed=seed).recall.items()}
    assert recall[CACHE].min() > 0.98
    assert recall[WINDOW][:7].min() > 0.98
    assert abs(recall[WINDOW][7:]).max() < 0.25
    assert 0.35 < recall[LINEAR][-1] < 0.7 < 0.8 < recall[LINEAR][4] < recall[LINEAR][0]
    assert recall[SSM][-1] < 0.25 < recall[LINEAR][-1]
    assert (recall[LINEAR][8:] > recall[SSM][8:]).all()


def test_what_is_drawn_is_what_is_held():
    explorer = memory_stepper(T=20, W=4, seed=5)
    pairs, images = explorer.draw.pairs, explorer.draw.images
    move(explorer, t=6, pair=2)
    both = np.concatenate([pairs.k_XTH[0], pairs.v_XTH[0]], axis=-1).T
    cache = np.ma.filled(images[CACHE].get_array(), np.nan)
    assert np.allclose(cache[:, :6], both[:, :6])
    assert np.isnan(cache[:, 6:]).all()
    assert np.allclose(images[WINDOW].get_array(), both[:, [3, 4, 5]])  # 3 % 3 = 0 took 0's slot
    move(explorer, t=7)
    assert np.allclose(images[WINDOW].get_array(), both[:, [6, 4, 5]])
    assert explorer.draw.newest[WINDOW].get_x() == 0
    assert not explorer.draw.asked[WINDOW].get_visible()
    assert explorer.draw.asked[CACHE].get_x() == 1
    assert np.allclose(images[LINEAR].get_array(), pairs.linear_TXHH[6, 0])


def test_memory_stepper_says_what_it_shows():
    explorer = memory_stepper()
    assert "After 1 token, in bytes: KV cache <b>64</b>" in explorer.text.value
    text = move(explorer, t=20)
    assert "KV cache <b>1,280</b>, window <b>448</b>" in text
    assert "KV cache 1.00" in text
    assert "which has let go of it" in text
    assert "Token 30 is yet to come" in move(explorer, pair=30)
    assert "Token 30 is yet to come." in explorer.image.tooltip
    assert "let go" not in move(explorer, t=36)


def test_memory_stepper_draws_its_axes_once():
    explorer = memory_stepper()
    pictures = set()
    for t in (1, 2, 9, 48):
        move(explorer, t=t)
        pictures.add(bytes(explorer.image.value))
    assert len(pictures) == 4
    assert explorer.draw.canvas.still_draws == 1
    print(f"{1e3 * explorer.redraw_s:.0f} ms for a step")


@pytest.mark.parametrize(("T", "W"), [(2, 1), (2, 13), (17, 2), (48, 13)])
def test_memory_stepper_steps_through_short_and_long(T, W):
    explorer = memory_stepper(T=T, W=W)
    for t in range(1, T + 1, 5):
        move(explorer, t=t, pair=T)
    assert bytes(explorer.image.value).startswith(PNG)


@pytest.mark.parametrize("sizes", [{"T": 1}, {"T": 49}, {"W": 0}, {"W": 14}, {"T": 3.5}])
def test_memory_stepper_names_what_it_has_no_room_for(sizes):
    name, value = next(iter(sizes.items()))
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        memory_stepper(**sizes)


# --- the explorers' rows


def test_a_calculator_s_controls_stand_side_by_side_and_an_explorer_s_below_each_other():
    tracks = [
        explorer.children[0].children[0].layout.grid_template_columns
        for explorer in (cache_calculator(), mask_viewer())
    ]
    assert tracks[0] == "repeat(auto-fit, minmax(max(19em, 29%), 1fr))"
    assert tracks[1] == "repeat(auto-fit, minmax(max(19em, 46%), 1fr))"
