import pickle

import pytest
import torch

from lecture_util.roofline import ACCELERATORS, Accelerator, this_machine

RIDGES = {
    "a100": 153,
    "h100": 295,
    "h200": 206,
    "b200": 281,
    "t4": 203,
    "mi300x": 247,
    "l4": 403,
    "rtx4090": 164,
}


def test_ridge_points_as_published():
    dtype = {"t4": "fp16"}
    ridges = {key: round(a.ridge(dtype.get(key, "bf16"))) for key, a in ACCELERATORS.items()}
    assert ridges == RIDGES


def test_every_accelerator_is_sourced_and_not_measured():
    for accelerator in ACCELERATORS.values():
        assert "read at the source" in accelerator.source or "transcription" in accelerator.source
        assert not accelerator.measured
        assert accelerator.memory_bytes >= 16e9


def test_a_t4_names_the_dtypes_it_has():
    with pytest.raises(ValueError, match=r"NVIDIA T4 has no 'bf16' peak, only fp16"):
        ACCELERATORS["t4"].ridge("bf16")


def test_an_accelerator_is_a_value():
    h100 = ACCELERATORS["h100"]
    assert pickle.loads(pickle.dumps(h100)) == h100
    assert len({h100, h100}) == 1


def test_this_machine_is_measured_once_and_leaves_the_random_state():
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    machine = this_machine("cpu")
    assert torch.equal(torch.random.get_rng_state(), before)
    assert isinstance(machine, Accelerator) and machine.measured
    assert machine.flops_per_s.keys() <= {"fp32", "bf16", "fp16"}
    assert machine.flops_per_s["fp32"] > 0
    assert machine.bandwidth_bytes_per_s > 0
    assert machine.memory_bytes > 2**28
    assert machine.ridge("fp32") > 0
    assert this_machine(torch.device("cpu")) is machine


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_is_measured_and_its_memory_given_back():
    held = torch.cuda.memory_reserved()
    machine = this_machine("cuda")
    assert torch.cuda.memory_reserved() <= held + 2**27  # the matmul library keeps its workspace
    assert machine is this_machine(torch.device("cuda", torch.cuda.current_device()))
    assert machine.bandwidth_bytes_per_s > 0 and machine.ridge("fp32") > 0
    assert machine.memory_bytes == torch.cuda.get_device_properties(0).total_memory


def test_devices_that_cannot_be_measured():
    with pytest.raises(ValueError, match="'cpu' or 'cuda'"):
        this_machine("meta")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="no CUDA GPU here: pass 'cpu'"):
            this_machine("cuda")
