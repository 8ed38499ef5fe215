import math

import pytest
import torch
from layered_models import LAYOUTS, SMALL, small_model, tokens
from transformers.masking_utils import sliding_window_causal_mask_function

from lecture_util.kv_reduction.layout import Layer, Layout


def reads(layout):
    return [layer.reads for layer in layout.layers]


def windows(layout):
    return [layer.window for layer in layout.layers]


def test_layouts_are_what_their_names_say():
    assert Layout.full(2).layers == (Layer(None, 0), Layer(None, 1))
    assert Layout.windowed(2, 5).layers == (Layer(5, 0), Layer(5, 1))
    assert reads(Layout.cross_layer(5, 2)) == [0, 0, 2, 2, 4]
    assert reads(Layout.cross_layer(7, 3)) == [0, 0, 0, 3, 3, 3, 6]
    assert windows(Layout.hybrid(7, 4, every=3)) == [4, 4, None, 4, 4, None, 4]
    assert Layout.hybrid(7, 4, every=3).num_caches == 7


def test_layers_share_within_their_kind_even_across_one_of_the_other():
    layout = Layout.hybrid(12, 4, every=6, share=2)
    assert windows(layout) == [4, 4, 4, 4, 4, None] * 2
    assert reads(layout) == [0, 0, 2, 2, 4, 5, 4, 7, 7, 9, 9, 5]
    assert layout.producers == (0, 2, 4, 5, 7, 9)
    assert [layout.last_reader(i) for i in layout.producers] == [1, 3, 6, 11, 8, 10]


def test_the_1_in_6_recipe_halves_the_caches_of_both_kinds():
    layout = Layout.character_ai(24)
    assert windows(layout) == [1024] * 5 + [None] + [1024] * 5 + [None] + windows(layout)[:12]
    assert layout.num_caches == 12
    assert sum(layout.layers[i].window is None for i in layout.producers) == 2


def test_only_a_stack_that_hides_and_shares_nothing_is_full():
    assert Layout.full(3).is_full
    assert not any(Layout.is_full.fget(x) for name, x in LAYOUTS.items() if name != "full")


@pytest.mark.parametrize("W", [1, 2, 3, 8, 11, 50])
def test_a_window_has_w_keys_itself_included_as_in_transformers(W):
    """transformers#39408, zml#763: a bound that leaves itself out gives W + 1. #29623."""
    mask_TS = Layout.windowed(1, W).mask_TS(0, 11)
    assert mask_TS.sum(-1).tolist() == [min(W, p + 1) for p in range(11)]
    theirs = sliding_window_causal_mask_function(W)
    q_11, kv_11 = torch.meshgrid(torch.arange(11), torch.arange(11), indexing="ij")
    assert torch.equal(mask_TS, theirs(0, 0, q_11, kv_11))


@pytest.mark.parametrize("W", [1, 2, 3, 5])
def test_windows_reach_w_minus_1_further_with_each_layer(W):
    layout = Layout.windowed(6, W)
    assert [layout.receptive_field(layer=i) for i in range(6)] == [
        1 + (i + 1) * (W - 1) for i in range(6)
    ]
    assert layout.receptive_field(4) == min(4, 1 + 6 * (W - 1))


def test_a_consumer_reaches_no_further_than_its_producers_keys():
    assert Layout.hybrid(6, 5, every=7, share=2).receptive_field() == 1 + 3 * 4
    assert Layout.hybrid(6, 5, every=3).receptive_field() == math.inf
    assert Layout.hybrid(6, 5, every=3).receptive_field(layer=1) == 9
    assert Layout.hybrid(6, 5, every=3).receptive_field(100) == 100


@pytest.mark.parametrize("name", LAYOUTS)
def test_outputs_depend_on_exactly_the_receptive_field(name):
    """The gradient of the last output by every token's embedding: nonzero within, 0.0 beyond."""
    layout = LAYOUTS[name]
    model, T = small_model(layout), 45
    seen = {}

    def embedding(module, args, output):
        seen["x_BTD"] = output.detach().requires_grad_()
        return seen["x_BTD"]

    model.embed.register_forward_hook(embedding)
    model(tokens(1, T))[0, -1].square().sum().backward()
    size_T = seen["x_BTD"].grad[0].abs().sum(-1)
    field = layout.receptive_field(T)
    assert (size_T[T - field :] > 0).all()
    assert size_T[: T - field].tolist() == [0.0] * (T - field)
    assert field < T or any(layer.window is None for layer in layout.layers)


def test_a_changed_token_is_felt_up_to_the_receptive_field_and_no_further():
    layout = Layout.windowed(6, 3)
    model, tokens_BT = small_model(layout), tokens(1, 30)
    changed_BT = tokens_BT.clone()
    changed_BT[0, 5] = (changed_BT[0, 5] + 1) % SMALL.V
    difference_T = (model(tokens_BT) - model(changed_BT))[0].abs().amax(-1)
    felt = difference_T.nonzero().flatten().tolist()
    assert felt == list(range(5, 5 + layout.receptive_field()))
    assert layout.receptive_field() == 1 + 6 * 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Layout(()), "no layers"),
        (lambda: Layout((Layer(None, 1), Layer(None, 1))), "layer 0 reads the keys of layer 1"),
        (lambda: Layout((Layer(None, -1),)), "layer 0 reads the keys of layer -1"),
        (lambda: Layout((Layer(None, 0), Layer(None, 0), Layer(None, 1))),
         "layer 2 reads layer 1, which has no keys of its own: read its producer, 0"),
        (lambda: Layout((Layer(4, 0), Layer(None, 0))), "window None but layer 0.* has 4"),
        (lambda: Layout((Layer(0, 0),)), "window=0: expected a whole number, at least 1"),
        (lambda: Layout.windowed(3, 2.0), "window=2.0"),
        (lambda: Layout.windowed(3, None), "window=None"),
        (lambda: Layout.windowed(0, 2), "L=0"),
        (lambda: Layout.hybrid(6, 3, every=0), "every=0"),
        (lambda: Layout.cross_layer(6, share=True), "share=True"),
        (lambda: Layout.full(3).receptive_field(layer=3), "layer 3 of 3: expected 0 to 2"),
    ],
)  # fmt: skip
def test_bad_layouts_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_list_of_layers_will_do_and_anything_else_is_named():
    assert Layout([Layer(None, 0)]) == Layout.full(1)
    assert hash(Layout([Layer(None, 0)])) == hash(Layout.full(1))
    with pytest.raises(TypeError, match="expected Layer"):
        Layout((None,))
    with pytest.raises(ValueError, match="S=-3"):
        Layout.full(2).receptive_field(-3)
