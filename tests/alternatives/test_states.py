from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lecture_util.alternatives.based import WindowBlock
from lecture_util.alternatives.layouts import hybrid_block
from lecture_util.alternatives.linear_attention import LinearAttentionBlock
from lecture_util.alternatives.state import States, keep_state, state_of
from lecture_util.model.config import Config
from lecture_util.model.generate import generate, generate_naive
from lecture_util.model.kv_cache import CacheFull, NoCache
from lecture_util.model.shapes import ShapeError
from lecture_util.model.transformer import Block, Transformer

CONFIG = Config(D=12, F=16, K=2, G=2, H=6, L=4, V=19, max_context=64)
MAKERS = {
    "A": Block,
    "w": partial(WindowBlock, W=3),
    "l": partial(LinearAttentionBlock, width=2),
}


def model(kinds="wlAl"):
    torch.manual_seed(0)
    net = Transformer(CONFIG, block=hybrid_block(kinds, MAKERS))
    return net.double().eval().requires_grad_(False)


MIXED, FIXED = model(), model("wlwl")


def new_states(B=2, capacity=40, **options):
    return States(CONFIG, B, capacity, torch.float64, **{"attention_layers": [2], **options})


def tokens(B, T, seed=0):
    return torch.randint(19, (B, T), generator=torch.Generator().manual_seed(seed))


def check(got, want, atol=1e-10):
    torch.testing.assert_close(got, want, atol=atol, rtol=0)


@given(
    steps=st.lists(
        st.one_of(st.integers(1, 5), st.sampled_from(["snapshot", "restore"])), max_size=10
    ),
    mixed=st.booleans(),
)
@settings(max_examples=40)
def test_going_on_and_back_in_any_order_gives_the_logits_of_a_fresh_pass(steps, mixed):
    net = MIXED if mixed else FIXED
    states = new_states(capacity=60, attention_layers=[2] if mixed else [])
    path = tokens(2, 2)
    net(path, states)
    point, at = states.snapshot(), path
    for number, step in enumerate(steps):
        if step == "snapshot":
            point, at = states.snapshot(), path
        elif step == "restore":
            states.restore(point)
            path = at
        else:
            new = tokens(2, step, seed=number + 1)
            path = torch.cat((path, new), 1)
            check(net(new, states), net(path)[:, -step:])
        assert states.lengths == [path.shape[1]] * 2


def test_a_snapshot_whose_keys_were_overwritten_is_refused():
    """The states are kept with a snapshot, the keys are not: a later branch writes over them."""
    states = new_states()
    MIXED(tokens(2, 5), states)
    early = states.snapshot()
    MIXED(tokens(2, 3, seed=1), states)
    late = states.snapshot()
    states.restore(late)
    states.restore(early)
    MIXED(tokens(2, 6, seed=2), states)
    with pytest.raises(ValueError, match="a rollback to 5 since let the attention layers' later"):
        states.restore(late)
    assert states.lengths == [11, 11]
    states.restore(early)
    again = tokens(2, 4, seed=3)
    check(MIXED(again, states), MIXED(torch.cat((tokens(2, 5), again), 1))[:, 5:])
    fresh = states.snapshot()
    states.restore(fresh)


def test_without_attention_layers_any_snapshot_can_be_gone_to_back_and_forth():
    states = new_states(attention_layers=())
    FIXED(tokens(2, 5), states)
    early = states.snapshot()
    FIXED(tokens(2, 3, seed=1), states)
    late = states.snapshot()
    states.restore(early)
    FIXED(tokens(2, 6, seed=2), states)
    states.restore(late)
    path = torch.cat((tokens(2, 5), tokens(2, 3, seed=1), tokens(2, 2, seed=3)), 1)
    check(FIXED(path[:, 8:], states), FIXED(path)[:, 8:])


def test_a_pass_that_breaks_off_halfway_leaves_no_trace(monkeypatch):
    states, prompt, new = new_states(), tokens(2, 5), tokens(2, 3, seed=1)
    MIXED(prompt, states)
    before = {layer: [part.clone() for part in state] for layer, state in states.states.items()}

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(MIXED.blocks[3], "mlp", stop)
        MIXED(new, states)
    assert states.lengths == [5, 5]
    for layer, state in states.states.items():
        for part, copy in zip(state, before[layer], strict=True):
            assert torch.equal(part, copy)
    states.positions(torch.Size((2, 1)), torch.device("cpu"))  # the next pass begins
    assert not states.new_states
    check(MIXED(new, states), MIXED(torch.cat((prompt, new), 1))[:, 5:])


def test_two_continuations_of_one_prefix_do_not_disturb_each_other():
    first, second = new_states(attention_layers=()), new_states(attention_layers=())
    FIXED(tokens(2, 6), first)
    second.restore(first.snapshot())
    one, other = tokens(2, 3, seed=1), tokens(2, 3, seed=2)
    for t in range(3):  # in turns
        got = FIXED(one[:, t : t + 1], first), FIXED(other[:, t : t + 1], second)
    check(got[0][:, 0], FIXED(torch.cat((tokens(2, 6), one), 1))[:, -1])
    check(got[1][:, 0], FIXED(torch.cat((tokens(2, 6), other), 1))[:, -1])


@pytest.mark.parametrize(("kinds", "layers"), [("wlAl", [2]), ("wlwl", []), ("AAAA", range(4))])
def test_generation_with_states_equals_the_naive_loop(kinds, layers):
    net, prompts = model(kinds), tokens(2, 7).tolist()
    got = generate(net, prompts, 9, new_cache=partial(States, attention_layers=list(layers)))
    assert got == [generate_naive(net, prompt, 9) for prompt in prompts]


def test_prompts_of_unequal_length_are_refused_with_the_remedy():
    new_cache = partial(States, attention_layers=[2])
    with pytest.raises(ValueError, match=r"cannot be cut.*prompts of one length"):
        generate(MIXED, [[1, 2, 3], [4]], 2, new_cache=new_cache)


def test_truncating_to_the_lengths_held_changes_nothing_and_less_is_refused():
    states = new_states()
    MIXED(tokens(2, 5), states)
    states.truncate(5)
    states.truncate([5, 5])
    for lengths in (4, [5, 4], [5], 6):
        with pytest.raises(ValueError, match=r"Take snapshot\(\) beforehand"):
            states.truncate(lengths)
    assert states.lengths == [5, 5]


def test_attention_layers_hold_slots_and_the_others_only_their_state():
    states = new_states(capacity=11)
    assert states.nbytes == 2 * 2 * 11 * 2 * 6 * 8  # k and v, B, slots, K, H, fp64
    MIXED(tokens(2, 5), states)
    assert sorted(states.states) == [0, 1, 3]
    window, linear = 2 * 2 * 2 * 2 * 6 * 8, 2 * 4 * 7 * (6 + 1) * 8  # W-1 = 2; M = 1 + 2 + 4
    assert states.nbytes == 2 * 2 * 11 * 2 * 6 * 8 + window + 2 * linear


def test_a_step_without_room_is_refused_and_nothing_is_changed():
    states = new_states(capacity=6)
    MIXED(tokens(2, 5), states)
    with pytest.raises(CacheFull, match="2 new tokens after 5 need 7 slots"):
        MIXED(tokens(2, 2), states)
    check(MIXED(tokens(2, 1), states), MIXED(torch.cat((tokens(2, 5), tokens(2, 1)), 1))[:, 5:])


@pytest.mark.parametrize("layers", [[4], [-1], [1, 1]])
def test_layers_that_do_not_exist_or_come_twice_are_refused(layers):
    with pytest.raises(ValueError, match=r"expected different layers of 0\.\.3"):
        new_states(attention_layers=layers)


def test_an_attention_layer_without_slots_is_told_how_to_get_them():
    with pytest.raises(ValueError, match=r"layer 2 attends but has no slots.*\[0, 2\]"):
        MIXED(tokens(2, 3), new_states(attention_layers=[0]))


def test_another_batch_is_refused():
    with pytest.raises(ShapeError, match="tokens have B=3 rows but the states have 2"):
        MIXED(tokens(3, 2), new_states())


def test_without_states_layers_start_afresh_and_keep_nothing():
    cache = NoCache()
    keep_state(cache, 0, (torch.ones(1),))
    assert state_of(cache, 0) is None
    assert state_of(new_states(), 0) is None
    check(MIXED(tokens(2, 5), cache), MIXED(tokens(2, 5)))


def test_a_cache_that_would_lose_the_state_is_refused():
    from lecture_util.alternatives.linear_attention import LinearAttentionBlock
    from lecture_util.model.config import Config
    from lecture_util.model.generate import generate, generate_naive
    from lecture_util.model.transformer import Transformer

    config = Config(D=32, F=64, K=2, G=1, H=16, L=2, V=64)
    model = Transformer.random(config, block=LinearAttentionBlock)
    with pytest.raises(TypeError, match="new_cache=States"):
        generate(model, [[1, 2, 3]], 8)
    out = generate(model, [[1, 2, 3]], 8, new_cache=States)
    assert out == [generate_naive(model, [1, 2, 3], 8)]
