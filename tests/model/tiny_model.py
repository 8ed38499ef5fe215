"""A Transformer small enough to compare with anything."""

from lecture_util.model.config import Config
from lecture_util.model.transformer import Transformer

TINY = Config(D=48, F=80, K=2, G=3, H=8, L=3, V=97, max_context=64)


def tiny_model(**options):
    return Transformer.random(TINY, seed=1, **options)
