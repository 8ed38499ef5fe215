from functools import partial

import pytest
import sympy
import torch
from sympy import symbols

from lecture_util.alternatives.based import WindowBlock, based_block
from lecture_util.alternatives.layouts import (
    CONTEXTS,
    HYBRIDS,
    Attention,
    Hybrid,
    Linear,
    Mamba,
    Window,
    attention_layers,
    hybrid_block,
    layout_of,
    memory_bytes,
    memory_table,
)
from lecture_util.alternatives.linear_attention import LinearAttentionBlock, softmax_features
from lecture_util.alternatives.mamba import MambaBlock
from lecture_util.alternatives.state import States
from lecture_util.model.config import PUBLISHED, Config
from lecture_util.model.transformer import Block, Transformer
from lecture_util.roofline import kv_cache_bytes

GIB = 2**30
MAKERS = {
    "A": Block,
    "m": partial(MambaBlock, Z=3, W=4),
    "l": partial(LinearAttentionBlock, width=3),
    "w": partial(WindowBlock, W=5),
}
STACKS = ["lllllllA", "mmmmAmmm", "wlwlwlwl", "AAAAAAAA", "mmmmmmmm", "AwmlAwml"]


def model(kinds, dtype=torch.float32):
    config = Config(D=12, F=16, K=2, G=3, H=4, L=len(kinds), V=19, max_context=64)
    torch.manual_seed(0)
    net = Transformer(config, block=hybrid_block(kinds, MAKERS))
    return net.to(dtype).eval().requires_grad_(False)


def tokens(B, T, seed=0):
    return torch.randint(19, (B, T), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kinds", STACKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("B", "S"), [(1, 1), (2, 3), (3, 4), (2, 5), (1, 17), (2, 40)])
def test_the_formula_gives_the_bytes_that_a_running_stack_holds(kinds, dtype, B, S):
    net = model(kinds, dtype)
    layers = attention_layers(net)
    assert layers == [i for i, kind in enumerate(kinds) if kind == "A"]
    states = States(net.config, B, S, dtype, attention_layers=layers)
    for part in tokens(B, S).split([1, S - 1] if S > 1 else [1], 1):
        net(part, states)
    memory = memory_bytes(layout_of(net), S, B, dtype.itemsize)
    assert memory.total == states.nbytes
    assert memory.kv == (states.kv.nbytes if states.kv else 0)
    assert layout_of(net).kinds == kinds


@pytest.mark.parametrize("kinds", STACKS)
@pytest.mark.parametrize("chunks", [[11], [1] * 11, [1, 3, 7], [6, 1, 1, 3]])
def test_a_hybrid_stack_gives_the_same_logits_with_its_cache_and_without(kinds, chunks):
    net, tokens_BT = model(kinds, torch.float64), tokens(2, 11)
    states = States(net.config, 2, 11, torch.float64, attention_layers=attention_layers(net))
    got = torch.cat([net(part, states) for part in tokens_BT.split(chunks, 1)], 1)
    torch.testing.assert_close(got, net(tokens_BT), atol=1e-9, rtol=0)


@pytest.mark.parametrize("kinds", ["lllllllA", "mmmmAmmm"])
def test_one_in_eight_grows_an_eighth_as_fast_as_attention_alone(kinds):
    one, full = layout_of(model(kinds)), layout_of(model("AAAAAAAA"))
    grown = [memory_bytes(h, 999).total - memory_bytes(h, 333).total for h in (one, full)]
    assert 8 * grown[0] == grown[1]


def test_jamba_keeps_4_gib_of_keys_and_values_at_256k_and_llama_32():
    S = 256 * 1024
    assert memory_bytes(HYBRIDS["jamba"], S).kv == 4 * GIB
    assert memory_bytes(HYBRIDS["attention"], S).kv == 32 * GIB
    llama = PUBLISHED["llama-3-8b"]
    for context in CONTEXTS:
        assert memory_bytes(HYBRIDS["attention"], context).total == kv_cache_bytes(
            llama, 1, context
        )


def test_the_hybrids_have_the_published_order_of_layers():
    assert HYBRIDS["jamba"].kinds == "mmmmAmmm" * 4
    assert HYBRIDS["minimax-01"].kinds == "lllllllA" * 10
    assert HYBRIDS["attention"].kinds == "A" * 32
    assert HYBRIDS["based"].kinds == "wl" * 16
    assert HYBRIDS["mamba"].kinds == "m" * 32


def test_jambas_layers_are_those_of_its_configuration_in_transformers():
    from transformers import JambaConfig

    hf, layers = JambaConfig(), HYBRIDS["jamba"].layers
    want = ["A" if kind == "attention" else "m" for kind in hf.layers_block_type]
    assert HYBRIDS["jamba"].kinds == "".join(want)
    head = hf.hidden_size // hf.num_attention_heads
    assert layers[4] == Attention(hf.num_key_value_heads, head)
    expanded = hf.mamba_expand * hf.hidden_size
    assert layers[0] == Mamba(expanded, hf.mamba_d_state, hf.mamba_d_conv)


def test_stacks_without_attention_hold_the_same_at_4k_and_at_1m_tokens():
    table = memory_table()
    assert list(table) == list(HYBRIDS)
    assert list(table["jamba"]) == [4096, 16384, 65536, 262144, 1048576] == list(CONTEXTS)
    for name in ("based", "mamba"):
        assert len(set(table[name].values())) == 1
        assert table[name][4096].kv == 0
    for name in ("attention", "jamba", "minimax-01"):
        assert table[name][1048576].kv == 256 * table[name][4096].kv
        assert table[name][1048576].state == table[name][4096].state


def test_the_sums_by_hand():
    assert memory_bytes(Hybrid((Attention(2, 4),)), 10, 3, 2).kv == 3 * 2 * 10 * 2 * 4 * 2
    assert memory_bytes(Hybrid((Window(2, 4, W=6),)), 10, 3, 2).state == 3 * 2 * 5 * 2 * 4 * 2
    assert memory_bytes(Hybrid((Window(2, 4, W=6),)), 3, 1, 2).state == 2 * 3 * 2 * 4 * 2
    assert memory_bytes(Hybrid((Window(2, 4, W=1),)), 3).total == 0
    assert memory_bytes(Hybrid((Linear(5, 7, 4),)), 10, 3, 2).state == 3 * 5 * 7 * (4 + 1) * 4
    assert memory_bytes(Hybrid((Linear(5, 7, 4, False),)), 10, 3, 2).state == 3 * 5 * 7 * 4 * 4
    assert memory_bytes(Hybrid((Mamba(6, 3, 4),)), 10, 1, 2).state == 6 * 3 * 4 + 3 * 6 * 2


def test_symbols_give_the_algebra():
    S, B, W, K, H = symbols("S B W K H", positive=True, integer=True)
    memory = memory_bytes(Hybrid((Attention(K, H), Window(K, H, W))), S, B)
    assert sympy.expand(memory.kv - 4 * B * S * K * H) == 0
    for length, held in ((3, 3), (7, 7), (8, 7), (100, 7)):
        assert memory.state.subs({S: length, W: 8}) == 4 * B * K * H * held


def test_features_of_any_kind_are_counted():
    config = Config(D=12, F=16, K=2, G=3, H=4, L=1, V=19)
    softmax = partial(LinearAttentionBlock, width=9, features=softmax_features)
    assert layout_of(Transformer(config, block=softmax)).layers == (Linear(6, 9, 4),)
    net = Transformer(config, block=partial(based_block, W=3))
    assert layout_of(net).layers == (Window(2, 4, 3),)


def test_kinds_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="kinds='xA' has 'x': makers has only A, m, l, w"):
        hybrid_block("xA", MAKERS)
    config = Config(D=12, F=16, K=2, G=3, H=4, L=3, V=19)
    with pytest.raises(ValueError, match="has 2 layers but the config L=3"):
        Transformer(config, block=hybrid_block("lA", MAKERS))

    class Unknown(Block):
        pass

    with pytest.raises(TypeError, match="Unknown: not a layer whose memory is known"):
        layout_of(Transformer(config, block=Unknown))
    with pytest.raises(ValueError, match="dtype_bytes is 0"):
        memory_bytes(HYBRIDS["jamba"], 1, dtype_bytes=0)
    for S in (-1, 2.5):
        with pytest.raises(ValueError, match="expected a whole number"):
            memory_bytes(HYBRIDS["jamba"], S)
