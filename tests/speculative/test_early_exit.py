"""A draft of the model's own layers: it computes what those layers compute and owns nothing."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_models import (
    ATOL,
    PROMPT,
    assert_reader_holds,
    fresh_logits,
    scaled,
    small_model,
)

from lecture_util.model.attention import rope_frequencies, rope_table
from lecture_util.model.config import Config
from lecture_util.model.generate import generate, generate_naive
from lecture_util.model.kv_cache import NoCache
from lecture_util.model.sampling import GREEDY, Sampling, probabilities
from lecture_util.model.transformer import Transformer
from lecture_util.speculative.draft_model import ModelDrafter, early_exit
from lecture_util.speculative.target import Reader, Table
from lecture_util.speculative.verify import Chance

DEEP = Config(D=24, F=40, K=2, G=3, H=6, L=5, V=23, max_context=64)
MODEL = small_model(3, DEEP)
WARM = Sampling(temperature=0.8, top_k=5)


@torch.inference_mode()
def through(model, layers, tokens):
    """The definition: embedding, these blocks one after the other, norm, head."""
    tokens_BT = torch.tensor([tokens])
    positions_BT = torch.arange(len(tokens))[None]
    rope = rope_table(rope_frequencies(model.rope_config), positions_BT)
    x_BTD = model.embed(tokens_BT)
    for layer in layers:
        x_BTD = model.blocks[layer](x_BTD, rope, NoCache())
    return model.head(model.norm(x_BTD))[0]


subsets = st.sets(st.integers(0, DEEP.L - 1), min_size=1).map(sorted)


@given(subsets, st.lists(st.integers(0, DEEP.V - 1), min_size=1, max_size=9))
def test_it_computes_what_its_layers_compute(layers, tokens):
    small = early_exit(MODEL, layers)
    with torch.inference_mode():
        logits_TV = small(torch.tensor([tokens]))[0]
    torch.testing.assert_close(logits_TV, through(MODEL, layers, tokens), atol=0, rtol=0)


@pytest.mark.parametrize("layers", [1, 3, 5])
def test_a_number_keeps_so_many_of_the_first(layers):
    assert torch.equal(
        fresh_logits(early_exit(MODEL, layers), PROMPT), through(MODEL, range(layers), PROMPT)[-1]
    )


def test_all_layers_are_the_model_itself():
    assert generate(early_exit(MODEL, DEEP.L), [PROMPT], 8) == generate(MODEL, [PROMPT], 8)


def test_weights_are_shared_not_copied():
    small = early_exit(MODEL, [1, 3])
    own = {weight.data_ptr() for weight in MODEL.parameters()}
    assert {weight.data_ptr() for weight in small.parameters()} < own
    assert not any(weight.is_meta for weight in small.parameters())
    model = small_model(3, DEEP)
    small, tokens = early_exit(model, [1, 3]), torch.tensor([PROMPT])
    before = small(tokens)
    with torch.no_grad():
        model.blocks[3].down.weight.mul_(2)
    assert not torch.equal(small(tokens), before)


def test_the_model_stays_as_it_was():
    model = small_model(3, DEEP)
    before, state = fresh_logits(model, PROMPT), copy.deepcopy(model.state_dict())
    early_exit(model, [2, 4])
    assert [block.layer for block in model.blocks] == [0, 1, 2, 3, 4]
    assert model.config.L == len(model.blocks) == 5
    assert torch.equal(fresh_logits(model, PROMPT), before)
    assert all(torch.equal(model.state_dict()[name], held) for name, held in state.items())
    assert generate(model, [PROMPT], 6) == [generate_naive(model, PROMPT, 6)]


def test_its_cache_has_as_many_layers_as_it_has():
    small = early_exit(MODEL, [1, 4])
    assert [block.layer for block in small.blocks] == [0, 1] and small.config.L == 2
    reader = Reader(small, 16)
    assert reader.cache.k_LBSKH.shape[0] == 2
    reader(PROMPT)
    assert_reader_holds(reader, PROMPT)
    assert generate(small, [PROMPT], 9) == [generate_naive(small, PROMPT, 9)]


def test_layers_can_be_left_out_again():
    twice = early_exit(early_exit(MODEL, [0, 2, 4]), [0, 2])
    assert torch.equal(fresh_logits(twice, PROMPT), through(MODEL, [0, 4], PROMPT)[-1])


def test_tied_weights_stay_tied():
    tied = Transformer.random(
        Config(D=24, F=40, K=2, G=3, H=6, L=3, V=23, tied=True), dtype=torch.float64
    )
    small = early_exit(tied, [0, 2])
    assert small.head.weight is small.embed.weight is tied.embed.weight


def test_rotation_of_part_of_a_head_is_kept():
    model = scaled(Transformer.random(DEEP, dtype=torch.float64, rope_width=4), 12.0)

    class Narrow(type(model.blocks[0])):
        """Rotates the first 4 of 6 dimensions, as the model's rope_width says."""

        def attention(self, x_BTD, rope, cache):
            seen.append(rope[0].shape[-1])
            wide = [torch.nn.functional.pad(part, (0, 1), value=float(i == 0))
                    for i, part in enumerate(rope)]  # fmt: skip
            return super().attention(x_BTD, wide, cache)

    seen = []
    for block in model.blocks:
        block.__class__ = Narrow
    fresh_logits(early_exit(model, [1, 2]), PROMPT)
    assert seen == [2, 2]  # pairs of dimensions


def test_training_mode_is_the_models():
    assert not early_exit(MODEL, 2).training
    training = small_model(3, DEEP).train()
    assert early_exit(training, 2).training


@pytest.mark.parametrize("layers", [0, -1, 6, [], [5], [-1, 0], [1, 1], [2, 1]])
def test_layers_that_are_not_there_are_refused(layers):
    with pytest.raises(ValueError, match="keep at least one of the 5 layers"):
        early_exit(MODEL, layers)


@pytest.mark.parametrize("layers", [1.5, [0.5], "12", None])
def test_layers_that_are_no_numbers_are_refused(layers):
    with pytest.raises(TypeError):
        early_exit(MODEL, layers)


# The drafter


def test_greedy_guesses_are_the_small_models_own_continuation():
    small = early_exit(MODEL, [0, 3])
    draft = ModelDrafter(Reader(small, 32), 4).propose(PROMPT, 9, Chance())
    assert draft.is_chain and draft.tokens == generate_naive(small, PROMPT, 4)
    assert list(draft.q) == [None] * 4  # chosen, not drawn: a one-hot q (A1.2)


def test_what_is_handed_on_is_the_tensor_that_was_drawn_from():
    """A1.4: the very object, so no second softmax in another precision."""
    drawn = []

    class Watched(Chance):
        def draw(self, p_V):
            drawn.append(p_V)
            return super().draw(p_V)

    small = early_exit(MODEL, [0, 3])
    chance = Watched(torch.Generator().manual_seed(0))
    draft = ModelDrafter(Reader(small, 32), 3, WARM).propose(PROMPT, 9, chance)
    assert len(drawn) == 3 and all(a is b for a, b in zip(drawn, draft.q, strict=True))
    for i, q_V in enumerate(draft.q):
        wanted_V = probabilities(fresh_logits(small, PROMPT + draft.tokens[:i]), WARM)
        torch.testing.assert_close(q_V, wanted_V, atol=ATOL, rtol=0)


@pytest.mark.parametrize("room", range(6))
def test_it_guesses_gamma_tokens_or_as_many_as_there_is_room_for(room):
    drafter = ModelDrafter(Reader(early_exit(MODEL, 2), 32), 3)
    assert len(drafter.propose(PROMPT, room, Chance())) == min(3, room)


@pytest.mark.parametrize("sampling", [GREEDY, WARM])
def test_a_table_drafts_as_well_as_a_reader(sampling):
    small = early_exit(MODEL, [0, 3])
    table = Table(lambda tokens: fresh_logits(small, tokens))
    drafts = [
        ModelDrafter(model, 3, sampling).propose(
            PROMPT, 9, Chance(torch.Generator().manual_seed(1))
        )
        for model in (table, Reader(small, 32))
    ]
    assert drafts[0].tokens == drafts[1].tokens


@pytest.mark.parametrize("gamma", [0, -1, 1.5, True, None])
def test_a_gamma_that_is_no_number_of_guesses_is_refused(gamma):
    with pytest.raises(ValueError, match="gamma="):
        ModelDrafter(Reader(MODEL, 8), gamma)
