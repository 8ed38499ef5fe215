"""On a card: what is made on a CPU reaches it, and every kind of weights is served in every way."""

import pytest
import together_models as tiny
import torch

from lecture_util.model.text import perplexity
from lecture_util.together.configuration import SCHEDULES, WEIGHTS, Configuration
from lecture_util.together.run import serve
from lecture_util.together.variants import Variants

CARD = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@CARD
@pytest.mark.gpu
@pytest.mark.parametrize("weights", WEIGHTS)
def test_all_weights_are_served_by_all_schedules(weights):
    calibration_BT = torch.randint(0, tiny.TINY.V, (4, 32))  # on the CPU, as a tokenizer leaves it
    variants = Variants(tiny.tiny_model(dtype=torch.float32).to("cuda"), calibration_BT)
    model, work = variants.get(weights), tiny.workload((30, 21, 4), (7, 3, 5))
    for schedule in SCHEDULES:
        slots = 1 if schedule == "single" else 2
        for pages in (False, True) if schedule == "continuous" else (False,):
            c = Configuration(weights, schedule=schedule, slots=slots, pages=pages, prefix=pages)
            outcome = serve(model, c, work)
            assert [len(a.tokens) for a in outcome.answers] == [7, 3, 5]
    assert perplexity(model, calibration_BT.to(model.device)) > 1
