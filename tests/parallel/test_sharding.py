"""A sharded model is the whole model: logits, tokens, and the bytes each rank holds.

The processes are started once for two ranks and once for three; the whole models run here.
"""

import pickle
import tempfile

import pytest
import rank_jobs
import torch
import torch.distributed as dist
from rank_jobs import PROMPTS, STEPS, THREE, TWO, logits_of, served, tiny

from lecture_util.model import weights
from lecture_util.model.config import PUBLISHED, Config
from lecture_util.model.generate import generate, prefill
from lecture_util.parallel import demonstrate as demonstration
from lecture_util.parallel import rank as rank_process
from lecture_util.parallel.processes import run
from lecture_util.parallel.sharding import ShardError, by_rank, shard, shard_config
from lecture_util.parallel.step_time import rank_cache_bytes, rank_weight_bytes, sharded_step
from lecture_util.parallel.traffic import Traffic, forward_traffic

CASES = {2: (TWO, STEPS), 3: (THREE, 4)}  # by number of ranks: models, tokens to generate
ALL = [(M, name) for M, (configs, _) in CASES.items() for name in configs]


@pytest.fixture(scope="module")
def ranks():
    """By number of ranks, what each of them saw."""
    started = {}

    def of(M):
        if M not in started:
            job = {2: rank_jobs.decode_and_refuse, 3: rank_jobs.decode_cases}[M]
            started[M] = run(job, M, *CASES[M], backend="gloo", timeout_s=300)
        return started[M]

    return of


def config_of(M, name):
    return CASES[M][0][name]


@pytest.mark.parametrize(("M", "name"), ALL)
def test_every_rank_has_the_whole_models_logits(ranks, M, name):
    """Norms round to fp32 on the way, so 1e-10 is what is left of fp64's 1e-16."""
    expected, _ = logits_of(tiny(config_of(M, name)))
    assert min(x.std() for x in expected) > 0.5  # logits to tell apart
    for seen in ranks(M):
        for mine, whole in zip(seen[name]["logits"], expected, strict=True):
            torch.testing.assert_close(mine, whole, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("M", "name"), ALL)
def test_every_rank_generates_the_whole_models_tokens(ranks, M, name):
    expected = generate(tiny(config_of(M, name)), PROMPTS, CASES[M][1])
    assert len({tuple(tokens) for tokens in expected}) > 1
    for seen in ranks(M):
        assert seen[name]["tokens"] == expected


def test_the_engine_serves_the_same_texts_with_a_share_of_the_pages_bytes(ranks):
    tokens, whole_bytes = served(tiny(TWO["gqa"]))
    for seen in ranks(2):
        assert seen["served"] == (tokens, whole_bytes // 2)


@pytest.mark.parametrize(("M", "name"), ALL)
def test_a_rank_holds_its_share_of_the_cache(ranks, M, name):
    config = config_of(M, name)
    _, whole_bytes = logits_of(tiny(config))
    for seen in ranks(M):
        if config.K % M == 0:
            assert seen[name]["cache_bytes"] * M == whole_bytes
        else:  # one KV head, and every rank has it
            assert seen[name]["cache_bytes"] == whole_bytes
        assert seen[name]["cache_bytes"] == rank_cache_bytes(config, 3, 16, M, 8)
        assert seen[name]["config"].K == max(1, config.K // M)


@pytest.mark.parametrize(("M", "name"), ALL)
def test_a_rank_holds_the_predicted_bytes_of_weights(ranks, M, name):
    config = config_of(M, name)
    for rank, seen in enumerate(ranks(M)):
        assert seen[name]["weight_bytes"] == rank_weight_bytes(config, M, 8, rank=rank)


@pytest.mark.parametrize(("M", "name"), ALL)
def test_counted_traffic_is_the_predicted(ranks, M, name):
    config = config_of(M, name)
    whole, first, step = (
        forward_traffic(config, 3, 7, M, dtype_bytes=8),
        forward_traffic(config, 3, 7, M, logits_for=1, dtype_bytes=8),
        forward_traffic(config, 3, 1, M, dtype_bytes=8),
    )
    for seen in ranks(M):
        assert seen[name]["traffic"] == (whole, first, step)
        assert step.messages == 2 * config.L + 2


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 4), (torch.bfloat16, 2)])
@pytest.mark.parametrize("M", [2, 3])
def test_bytes_follow_the_dtype(ranks, M, dtype, width):
    config = config_of(M, "gqa")
    for seen in ranks(M):
        assert seen[dtype][2] == forward_traffic(config, 3, 1, M, dtype_bytes=width)


def test_torch_counts_as_many_collectives(ranks):
    for seen in ranks(2):
        assert seen["by torch"] == {"all_reduce": 2 * TWO["gqa"].L + 1, "all_gather_into_tensor": 1}


def test_collectives_called_by_hand_are_counted_too(ranks):
    nbytes = {"all_reduce": 5 * 4, "all_gather": 2 * 3 * 4, "broadcast": 2 * 8}
    for seen in ranks(2):
        assert seen["by hand"] == Traffic(dict.fromkeys(nbytes, 1), nbytes)


def test_the_demonstration_reports_what_the_ranks_saw(ranks, monkeypatch):
    config, B, prompt, steps, dtype = rank_jobs.DEMONSTRATION

    def ran(job, M, *arguments, timeout_s):
        assert (job, M, arguments) == (demonstration.decode_both, 2, rank_jobs.DEMONSTRATION)
        return [seen["demonstrated"] for seen in ranks(M)]

    monkeypatch.setattr(demonstration, "run", ran)
    d = demonstration.demonstrate(2, config, B=B, prompt=prompt, steps=steps, dtype=dtype)
    assert d.same_tokens and d.logits_gap < 1e-10 < d.largest_logit
    assert d.weight_bytes == d.predicted_weight_bytes
    assert d.cache_bytes == [d.predicted_cache_bytes] * 2 == [d.whole_cache_bytes // 2] * 2
    assert d.traffic == [d.predicted_traffic] * 2
    assert d.whole_step_s > 0 and d.step_s > 0 and d.link.latency_s > 0
    assert "messages 6 a step (5 all-reduce, 1 all-gather), predicted 6" in str(d)


def run_here(job, M, *arguments, timeout_s):
    """Be the one rank of one."""
    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder:
        job = pickle.dumps((job, arguments))
        result = rank_process._result(job, 0, M, "gloo", folder, timeout_s, threads)
        dist.destroy_process_group()
    return [pickle.loads(result)]


def test_one_rank_demonstrates_that_nothing_is_sent(monkeypatch):
    config, B, prompt, steps, dtype = rank_jobs.DEMONSTRATION
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # so that it is as before, afterwards
    monkeypatch.setattr(demonstration, "run", run_here)
    d = demonstration.demonstrate(1, config, B=B, prompt=prompt, steps=steps, dtype=dtype)
    assert d.traffic == [d.predicted_traffic] == [Traffic()]
    assert d.weight_bytes == [d.whole_weight_bytes] and d.same_tokens
    assert "messages 0 a step, predicted 0; 0 bytes, predicted 0" in str(d)
    step = sharded_step(config, B, 9, 1e10, 1, d.link)
    assert step.latency_s == step.memory_s > 0


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"M": 3}, ShardError, "K=4 KV heads cannot be dealt to M=3"),
        ({"config": None}, TypeError, "config=None: expected a Config"),
        ({"B": 0}, ValueError, "B is 0"),
        ({"prompt": 0}, ValueError, "prompt is 0"),
        ({"steps": 0}, ValueError, "steps is 0: .*at least 2"),
        ({"steps": 1}, ValueError, "steps is 1"),
        ({"steps": 4090}, ValueError, "prompt=12 tokens and steps=4090 are more than .* 4096"),
        ({"dtype": "fp32"}, TypeError, "dtype is 'fp32'"),
        ({"dtype": torch.int64}, TypeError, "dtype is torch.int64"),
    ],
)
def test_a_demonstration_that_cannot_work_starts_nothing(monkeypatch, options, error, words):
    monkeypatch.delattr(demonstration, "run")
    with pytest.raises(error, match=words):
        demonstration.demonstrate(**options)


def test_results_come_by_rank_and_threads_are_divided(ranks):
    for M in (2, 3):
        assert [seen["rank"] for seen in ranks(M)] == list(range(M))
        assert len({seen["pid"] for seen in ranks(M)}) == M
        assert {seen["threads"] for seen in ranks(M)} == {max(1, torch.get_num_threads() // M)}


def test_our_linears_other_operator_is_not_in_the_way(ranks):
    for seen in ranks(2):
        assert seen["oneDNN"] < 2e-4  # fp32, logits up to 30


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        ("K", "ShardError", "K=3 KV heads cannot be dealt to M=2 ranks"),
        ("block", "TypeError", "layer 0 is a OtherBlock"),
        ("layer", "TypeError", "layer 1 has a NoLinear as down"),
        ("device", "ValueError", "the model is on meta but the mesh is of cpu"),
        ("twice", "ValueError", "sharded already"),
        ("no model", "TypeError", "expected a Transformer"),
    ],
)
def test_what_cannot_be_sharded_is_refused_and_left_alone(ranks, kind, error, words):
    for seen in ranks(2):
        name, said, unchanged = seen["refusals"][kind]
        assert name == error and words in said and unchanged


def test_the_errors_say_which_m_would_do():
    real = PUBLISHED["smollm2-135m"]
    with pytest.raises(ShardError, match=r"K=3 .* M=2 .*multiple of K.* for M = 1, 3$"):
        shard_config(real, 2)
    with pytest.raises(ShardError, match=r"N=40 query heads are no multiple of M=80"):
        shard_config(PUBLISHED["llama-2-13b"], 80)
    with pytest.raises(ShardError, match=r"F=1536 channels of the MLP are no multiple of M=9"):
        shard_config(real, 9)
    with pytest.raises(ShardError, match=r"V=4 rows .* leave the last of M=3 ranks .* M = 1$"):
        shard_config(Config(D=8, F=3, K=3, G=1, H=2, L=1, V=4), 3)
    with pytest.raises(ShardError, match="M=0 ranks"):
        shard_config(real, 0)
    with pytest.raises(TypeError, match=r"config=None: expected a Config"):
        shard_config(None, 2)


def test_what_is_no_model_or_no_mesh_is_named():
    with pytest.raises(TypeError, match="model=None: expected a Transformer"):
        shard(None, None)
    with pytest.raises(TypeError, match="mesh=None: expected a DeviceMesh"):
        shard(tiny(TWO["gqa"]), None)


def test_a_shards_config_has_its_own_heads_and_channels():
    llama = PUBLISHED["llama-3-70b"]
    for M in (1, 2, 4, 8, 16, 64):
        mine = shard_config(llama, M)
        assert (mine.K, mine.N, mine.F) == (max(1, 8 // M), 64 // M, 28672 // M)
        assert (mine.D, mine.V, mine.L) == (llama.D, llama.V, llama.L)


def test_rows_go_to_the_rank_whose_heads_they_make():
    """q of 4 heads, k and v of 2, one row a head, for 2 ranks; then one KV head for both."""
    rows = torch.arange(8)[:, None]
    assert by_rank(rows, (4, 2, 2), 2).flatten().tolist() == [0, 1, 4, 6, 2, 3, 5, 7]
    rows = torch.arange(6)
    assert by_rank(rows, (4, 1, 1), 2).tolist() == [0, 1, 4, 5, 2, 3, 4, 5]
    rows = torch.arange(16)  # two rows a head; four ranks, two KV heads
    assert by_rank(rows, (4, 2, 2), 4).tolist() == [
        *(0, 1, 8, 9, 12, 13), *(2, 3, 8, 9, 12, 13),
        *(4, 5, 10, 11, 14, 15), *(6, 7, 10, 11, 14, 15),
    ]  # fmt: skip


def test_rows_and_heads_that_cannot_be_dealt_are_named():
    with pytest.raises(ShardError, match=r"9 rows are no multiple of the 8 heads \(4, 2, 2\)"):
        by_rank(torch.arange(9), (4, 2, 2), 2)
    with pytest.raises(ShardError, match="a part with 3 heads cannot be dealt to M=2 ranks"):
        by_rank(torch.arange(10), (4, 3, 3), 2)


@pytest.mark.slow
def test_smollm2_on_three_ranks_says_what_it_says_alone():
    model, config = weights.load("smollm2-135m"), PUBLISHED["smollm2-135m"]
    prompts = [[504, 3575, 282, 4649, 314], [42, 7]]
    cache, logits_BV = prefill(model, prompts, 40)
    with torch.inference_mode():
        step_BTV = model(logits_BV.argmax(-1, keepdim=True), cache)
    tokens = generate(model, prompts, 6)
    for rank, seen in enumerate(
        run(rank_jobs.real_model, 3, prompts, 6, backend="gloo", timeout_s=300)
    ):
        for mine, whole in zip(seen["logits"], (logits_BV, step_BTV[:, -1]), strict=True):
            torch.testing.assert_close(mine, whole, rtol=0, atol=1e-3)  # fp32, logits up to 30
        assert seen["tokens"] == tokens
        assert seen["weight_bytes"] == rank_weight_bytes(config, 3, 4, rank=rank)
        assert seen["cache_bytes"] * 3 == cache.nbytes
        assert seen["traffic"] == forward_traffic(config, 2, 1, 3, dtype_bytes=4)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_over_nccl_have_the_whole_models_logits():
    config = Config(D=64, F=36, K=2, G=3, H=16, L=3, V=23, max_context=96)
    for whole, mine, tokens, traffic in run(rank_jobs.on_gpus, 2, backend="nccl"):
        torch.testing.assert_close(mine, whole, rtol=1e-4, atol=1e-3)
        assert [len(row) for row in tokens] == [24] * len(PROMPTS)
        assert traffic == forward_traffic(config, 2, 1, 2, dtype_bytes=4)
