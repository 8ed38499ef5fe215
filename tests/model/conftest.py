"""The reference model, loaded once a session, and small random ones."""

import pytest
import torch
from tiny_model import tiny_model

from lecture_util.model.weights import load, load_tokenizer, locate


@pytest.fixture(scope="session")
def model():
    return load("smollm2-135m", device="cpu")


@pytest.fixture(scope="session")
def tokenizer():
    return load_tokenizer("smollm2-135m")


@pytest.fixture(scope="session")
def peer():
    """The same weights in transformers: the oracle."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(locate("smollm2-135m"), dtype=torch.float32).eval()


@pytest.fixture
def tiny():
    return tiny_model(dtype=torch.float64)


@pytest.fixture(scope="session")
def text_tokens(tokenizer):
    """English that ships with Python, as tokens."""
    from pydoc_data.topics import topics

    return tokenizer.encode("\n".join(topics.values())[:20_000], add_special_tokens=False)
