"""The Mamba layer against transformers' mixer, any split of a prompt, padding, and its bytes."""

from functools import partial

import numpy as np
import pytest
import sympy
import torch

from lecture_util.alternatives.mamba import (
    MambaBlock,
    causal_conv,
    mamba_decode_cost,
    mamba_state_bytes,
    prefill_unequal,
)
from lecture_util.alternatives.state import States
from lecture_util.model.config import Config
from lecture_util.model.generate import PromptError, generate, generate_naive
from lecture_util.model.kv_cache import NoCache
from lecture_util.model.recall import recall_task
from lecture_util.model.shapes import ShapeError, TensorMismatch
from lecture_util.model.train import train
from lecture_util.model.transformer import Transformer

CONFIG = Config(D=20, F=8, K=1, G=1, H=6, L=3, V=13, max_context=64)


def shaken(module, seed=0, size=0.3):
    """Every weight moved away from round numbers, biases too: a bias of zero would hide a lot."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in module.parameters():
            weight += size * torch.randn(weight.shape, generator=generator).to(weight.dtype)
    return module.requires_grad_(False)


def new_block(dtype=torch.float64, **shape):
    torch.manual_seed(0)
    return shaken(MambaBlock(CONFIG, 0, **shape).to(dtype))


def new_model(dtype=torch.float64, **shape):
    torch.manual_seed(0)
    return shaken(Transformer(CONFIG, block=partial(MambaBlock, **shape)).to(dtype).eval())


def features(B=2, T=7, dtype=torch.float64):
    return torch.randn(B, T, CONFIG.D, dtype=dtype, generator=torch.Generator().manual_seed(T))


def tokens(B=2, T=11):
    return torch.randint(0, CONFIG.V, (B, T), generator=torch.Generator().manual_seed(T))


def transformers_mixer(block, Z, W, expand):
    """Its MambaMixer, holding our block's weights."""
    from transformers import MambaConfig
    from transformers.models.mamba.modeling_mamba import MambaMixer

    R = block.dt.in_features
    hf = MambaConfig(
        hidden_size=CONFIG.D, state_size=Z, conv_kernel=W, expand=expand, num_hidden_layers=1
    )
    assert hf.time_step_rank == R
    mixer = MambaMixer(hf, 0).eval().requires_grad_(False)
    ours = {
        "in_proj.weight": block.u_gate.weight,
        "conv1d.weight": block.conv_EW[:, None],
        "conv1d.bias": block.conv_bias_E,
        "x_proj.weight": block.dt_B_C.weight,
        "dt_proj.weight": block.dt.weight,
        "dt_proj.bias": block.dt_bias_E,
        "A_log": block.A_log_EZ,
        "D": block.skip_E,
        "out_proj.weight": block.out.weight,
    }
    mixer.load_state_dict(ours)  # strict: all of its weights, and none beside them
    return mixer


@pytest.mark.parametrize("T", [1, 2, 3, 5, 17])
@pytest.mark.parametrize(("Z", "W", "expand"), [(16, 4, 2), (5, 3, 1), (8, 2, 3)])
def test_the_layer_computes_what_transformers_computes(T, Z, W, expand):
    block = new_block(torch.float32, Z=Z, W=W, expand=expand)
    x_BTD = features(T=T, dtype=torch.float32)
    expected_BTD = transformers_mixer(block, Z, W, expand)(x_BTD)
    ours_BTD, _ = block.mix(x_BTD)
    torch.testing.assert_close(ours_BTD, expected_BTD, rtol=1e-5, atol=2e-5)


def test_the_bias_of_the_step_size_is_added_once():
    block = new_block(torch.float32)
    block.dt_bias_E += 1.5
    x_BTD = features(dtype=torch.float32)
    expected_BTD = transformers_mixer(block, 16, 4, 2)(x_BTD)
    torch.testing.assert_close(block.mix(x_BTD)[0], expected_BTD, rtol=1e-5, atol=5e-5)
    for wrong in (0, 2):  # none at all, or twice
        strange = new_block(torch.float32)
        strange.dt_bias_E.copy_(wrong * block.dt_bias_E)
        assert (strange.mix(x_BTD)[0] - expected_BTD).abs().max() > 0.01


def test_padding_is_masked_as_transformers_masks_it():
    block = new_block(torch.float32)
    x_BTD = features(B=3, T=9, dtype=torch.float32)
    mask_BT = torch.arange(9) >= torch.tensor([[0], [3], [8]])
    expected_BTD = transformers_mixer(block, 16, 4, 2)(x_BTD, attention_mask=mask_BT.long())
    ours_BTD, _ = block.mix(x_BTD, mask_BT=mask_BT)
    torch.testing.assert_close(ours_BTD, expected_BTD, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("split", range(1, 11))
def test_a_prompt_in_two_parts_gives_the_logits_of_one(split):
    model, tokens_BT = new_model(), tokens()
    states = States(CONFIG, 2, 11)
    parts = [model(part, states) for part in tokens_BT.split([split, 11 - split], dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), model(tokens_BT), rtol=0, atol=1e-10)


@pytest.mark.parametrize("sizes", [[1] * 11, [2, 1, 1, 7], [1, 2, 3, 5], [4, 3, 1, 1, 1, 1]])
def test_chunks_shorter_than_the_convolution_make_no_difference(sizes):
    model, tokens_BT = new_model(), tokens()
    states = States(CONFIG, 2, 11)
    parts = [model(part, states) for part in tokens_BT.split(sizes, dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), model(tokens_BT), rtol=0, atol=1e-10)


@pytest.mark.parametrize("W", [1, 2, 4, 7])
def test_any_width_of_the_convolution_steps_as_it_scans(W):
    model, tokens_BT = new_model(W=W, Z=3), tokens(T=5)  # W=7 sees more than there is
    states = States(CONFIG, 2, 5)
    parts = [model(part, states) for part in tokens_BT.split(1, dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), model(tokens_BT), rtol=0, atol=1e-10)


@pytest.mark.parametrize("T", [1, 2, 3, 9])
def test_the_convolution_equals_numpys(T):
    u_BTE = features(T=T)
    weight_EW, bias_E = features(1, 4)[0].T, features(1, 1)[0, 0]
    out_BTE, tail_BTE = causal_conv(u_BTE, weight_EW, bias_E)
    for b in range(2):
        for e in range(CONFIG.D):
            # numpy turns its kernel round, so that its first number meets the newest input
            expected = np.convolve(u_BTE[b, :, e].numpy(), weight_EW[e].flip(0).numpy())[:T]
            np.testing.assert_allclose(out_BTE[b, :, e], expected + float(bias_E[e]), atol=1e-13)
    padded_BTE = torch.nn.functional.pad(u_BTE, (0, 0, 3, 0))
    assert torch.equal(tail_BTE, padded_BTE[:, -3:])  # inputs as they came, zeros on their left


@pytest.mark.parametrize("T", [1, 2, 6])
def test_two_continuations_of_one_prefix_do_not_disturb_each_other(T):
    block = new_block()
    _, prefix = block.mix(features(T=5))
    kept = [part.clone() for part in prefix]
    once_BTD, _ = block.mix(features(T=T), prefix)
    block.mix(features(T=3), prefix)
    again_BTD, _ = block.mix(features(T=T), prefix)
    assert torch.equal(once_BTD, again_BTD)
    assert all(torch.equal(part, old) for part, old in zip(prefix, kept, strict=True))


def test_a_rejected_draft_is_rolled_back():
    model, tokens_BT = new_model(), tokens()
    states = States(CONFIG, 2, 11)
    model(tokens_BT[:, :6], states)
    before = states.snapshot()
    model((tokens_BT[:, 6:9] + 1) % CONFIG.V, states)
    states.restore(before)
    logits_BTV = model(tokens_BT[:, 6:], states)
    torch.testing.assert_close(logits_BTV, model(tokens_BT)[:, 6:], rtol=0, atol=1e-10)


def test_a_padded_batch_equals_its_rows_alone():
    model = new_model()
    prompts = [[3], [1, 2, 3, 4, 5, 6, 7], [9, 8], [5, 5, 5, 5]]
    states, logits_BV = prefill_unequal(model, prompts)
    next_BT = tokens(B=4, T=3)
    after_BTV = model(next_BT, states)
    for row, prompt in enumerate(prompts):
        alone_TV = model(torch.tensor([prompt + next_BT[row].tolist()]))[0, len(prompt) - 1 :]
        torch.testing.assert_close(logits_BV[row], alone_TV[0], rtol=0, atol=1e-10)
        torch.testing.assert_close(after_BTV[row], alone_TV[1:], rtol=0, atol=1e-10)
    assert states.lengths == [10] * 4


def test_padding_must_be_zeroed_both_times():
    """Garbage under the mask reaches the state before the convolution; its bias does after."""
    block = new_block()
    x_BTD = features(T=8)
    x_BTD[0, :5] = torch.nan
    mask_BT = torch.arange(8) >= torch.tensor([[5], [0]])
    masked_BTD, (tail_BTE, state_BEZ) = block.mix(x_BTD, mask_BT=mask_BT)
    alone_BTD, (alone_tail_BTE, alone_BEZ) = block.mix(x_BTD[:1, 5:])
    torch.testing.assert_close(masked_BTD[0, 5:], alone_BTD[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(state_BEZ[0], alone_BEZ[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(tail_BTE[0], alone_tail_BTE[0], rtol=0, atol=1e-12)
    _, (tail_BTE, state_BEZ) = block.mix(x_BTD[:1, :5], mask_BT=mask_BT[:1, :5])
    assert not tail_BTE.any()
    assert not state_BEZ.any()


def test_it_generates_as_the_naive_loop_does():
    model = new_model()
    prompt = [1, 2, 3, 4, 5]
    expected = generate_naive(model, prompt, 9)
    assert generate(model, [prompt, prompt], 9, new_cache=States) == [expected] * 2


@pytest.mark.parametrize("T", [1, 5, 41])
@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_the_states_have_the_bytes_of_the_formula_at_any_context(T, dtype, width):
    model = new_model(dtype, Z=5, W=3, expand=3)
    states = States(CONFIG, 2, T, dtype)
    model(tokens(T=T), states)
    formula = mamba_state_bytes(CONFIG, 2, width, Z=5, W=3, expand=3)
    assert states.nbytes == formula == 3 * 2 * (60 * 5 * 4 + 2 * 60 * width)
    held = {part.untyped_storage() for state in states.states.values() for part in state}
    assert sum(storage.nbytes() for storage in held) == formula  # views would keep whole chunks


def test_a_model_in_bf16_keeps_its_state_in_fp32():
    model, exact = new_model(torch.bfloat16), new_model(torch.bfloat16).double()
    states, exact_states = States(CONFIG, 2, 40), States(CONFIG, 2, 40)
    tokens_BT = tokens(T=40)
    model(tokens_BT, states)
    exact(tokens_BT, exact_states)
    tail_BTE, state_BEZ = states.states[0]
    assert (tail_BTE.dtype, state_BEZ.dtype) == (torch.bfloat16, torch.float32)
    assert exact_states.states[0][1].dtype == torch.float64
    error = (state_BEZ - exact_states.states[0][1]).norm() / exact_states.states[0][1].norm()
    assert error < 8 * torch.finfo(torch.bfloat16).eps  # that of its inputs, not 40 times that


def test_the_cost_of_a_step_counts_every_weight_and_both_ways_of_the_state():
    block = new_block(torch.bfloat16)
    weights = CONFIG.L * sum(weight.nbytes for weight in block.parameters())
    cost = mamba_decode_cost(CONFIG, B=7)
    states = mamba_state_bytes(CONFIG, B=7)
    assert cost.bytes_read == weights + states
    assert cost.bytes_written == states
    flops = 0
    for linear in (block.u_gate, block.dt_B_C, block.dt, block.out):
        flops += 2 * linear.weight.numel()
    flops += 2 * block.conv_EW.numel() + 6 * block.A_log_EZ.numel()
    assert cost.flops == CONFIG.L * 7 * flops


def test_the_formulas_take_symbols():
    B, Z = sympy.symbols("B Z", positive=True, integer=True)
    numbers = {B: 5, Z: 8}
    size = mamba_state_bytes(CONFIG, B, Z=Z)
    assert size.subs(numbers) == mamba_state_bytes(CONFIG, 5, Z=8)
    cost = mamba_decode_cost(CONFIG, B, Z=Z)
    assert cost.bytes.subs(numbers) == mamba_decode_cost(CONFIG, 5, Z=8).bytes


def test_it_starts_where_the_paper_starts():
    torch.manual_seed(0)
    block = MambaBlock(CONFIG, 0)
    step_E = torch.nn.functional.softplus(block.dt_bias_E)
    assert 0.9e-3 < step_E.min() < step_E.max() < 0.101
    torch.testing.assert_close(block.A_log_EZ.exp()[7], torch.arange(1.0, 17))
    assert block.dt.in_features == 2  # D/16, rounded up


def test_it_learns():
    torch.manual_seed(0)
    model = Transformer(CONFIG, block=partial(MambaBlock, Z=4))
    losses = train(model, recall_task(num_pairs=1, V=12, B=16), 60, lr=1e-2, progress=False)
    assert sum(losses[-10:]) / 10 < 0.6 * losses[0]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda b: MambaBlock(CONFIG, 0, W=0), ValueError, "W=0"),
        (lambda b: MambaBlock(CONFIG, 0, Z=2.5), ValueError, "Z=2.5"),
        (lambda b: b.mix(features(), mask_BT=torch.ones(2, 7)), TypeError, "expected bool"),
        (lambda b: b.mix(features(), mask_BT=torch.ones(2, 6).bool()), ShapeError, "T=6"),
        (
            lambda b: b.mix(features(T=2), mask_BT=torch.tensor([[True, False]] * 2)),
            ValueError,
            "pad on the left",
        ),
        (
            lambda b: b.mix(features(), (torch.zeros(2, 2, 40), torch.zeros(2, 40, 16))),
            ShapeError,
            r"expected \(2, 3, 40\)",
        ),
        (
            lambda b: b.mix(
                features(), (features()[:, :3].repeat(1, 1, 2), torch.zeros(2, 40, 16))
            ),
            TensorMismatch,
            r"expected torch\.float64",
        ),
    ],
)
def test_what_does_not_fit_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call(new_block())


def test_unequal_prompts_need_a_stack_of_mamba_and_tokens():
    with pytest.raises(TypeError, match="the stack has a Block"):
        prefill_unequal(Transformer.random(CONFIG), [[1], [1, 2]])
    with pytest.raises(PromptError, match="prompt 1 is empty"):
        prefill_unequal(new_model(), [[1], []])


def test_without_a_cache_nothing_is_kept():
    block, x_BTD = new_block(), features()
    out_BTD = block(x_BTD, None, NoCache())
    assert torch.equal(out_BTD, block(x_BTD, None, NoCache()))
