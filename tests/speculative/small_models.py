"""Small fp64 models, drafters told what to guess, and fresh forwards to compare with.

Norms and rotations compute in fp32 whatever the model's dtype, so equal means to within ATOL.
"""

import copy

import torch

from lecture_util.model.config import Config
from lecture_util.model.generate import generate_naive
from lecture_util.model.transformer import Transformer
from lecture_util.speculative.draft import NOTHING, Draft, chain
from lecture_util.speculative.draft_model import ModelDrafter, early_exit
from lecture_util.speculative.eagle import EagleDrafter, EagleHead
from lecture_util.speculative.medusa import MedusaDrafter, MedusaHeads
from lecture_util.speculative.ngram import NgramDrafter
from lecture_util.speculative.target import Reader
from lecture_util.speculative.vocabulary import DraftVocabulary

SMALL = Config(D=24, F=40, K=2, G=3, H=6, L=3, V=23, max_context=64)
ATOL = 1e-5
PROMPT = [3, 0, 17, 5, 3, 0]


def scaled(module, factor):
    """Random weights of 0.02 make near-uniform models that hardly look back; larger ones don't."""
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if "norm" not in name:
                weight *= factor
    return module


def small_model(seed=10, config=SMALL):
    return scaled(Transformer.random(config, seed=seed, dtype=torch.float64), 12.0)


def whole_vocabulary(model):
    return DraftVocabulary(model.head, torch.arange(model.config.V))


def small_medusa(model, heads=3, seed=0):
    torch.manual_seed(seed)
    module = MedusaHeads(model.config.D, heads).to(torch.float64)
    with torch.no_grad():
        module.linear.weight.normal_(0, 0.3)
    return module.requires_grad_(False)


def small_eagle(model, seed=0):
    torch.manual_seed(seed)
    return EagleHead(model.config).to(torch.float64).eval().requires_grad_(False)


MEDUSA_TREE = [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (2,)]


def drafters(model, sampling):
    """Every way to draft, by name, as `generate_speculative` takes it."""
    vocabulary = whole_vocabulary(model)
    heads, head = small_medusa(model), small_eagle(model)

    def small_reader():
        return Reader(early_exit(model, [0, 2]), 64)

    return {
        "early exit": lambda reader: ModelDrafter(small_reader(), 3, sampling),
        "itself": lambda reader: ModelDrafter(Reader(model, 64), 3, sampling),
        "n-gram": lambda reader: NgramDrafter(shortest=1, longest=2, k=3),
        "medusa": lambda reader: MedusaDrafter(reader, heads, vocabulary, MEDUSA_TREE),
        "eagle": lambda reader: EagleDrafter(reader, head, vocabulary, depth=3, width=3, size=7),
        "none": lambda reader: Told(lambda tokens, room: NOTHING),
        "right": lambda reader: Foreseeing(model, [3]),
        "mixed": lambda reader: Foreseeing(model, [3, 0, 1, 3, 2]),
    }


class Told:
    """A drafter that asks a function; the loop's other side of every test."""

    def __init__(self, guess):
        self.guess = guess

    def propose(self, tokens, room, chance):
        return self.guess(list(tokens), room)

    def settle(self, tokens):
        pass


class Foreseeing(Told):
    """`gamma` guesses of which exactly the first few are what greedy decoding will say.

    accepted: how many, round after round; None for a round without a draft.
    """

    def __init__(self, model, accepted, gamma=3):
        self.model, self.accepted, self.gamma, self.rounds = model, accepted, gamma, 0
        super().__init__(self._guess)

    def _guess(self, tokens, room):
        k = self.accepted[self.rounds % len(self.accepted)]
        self.rounds += 1
        if k is None:
            return NOTHING
        said = generate_naive(self.model, tokens, self.gamma)
        V = self.model.config.V
        return chain([t if i < k else (t + 1) % V for i, t in enumerate(said)]).cut(room)


@torch.inference_mode()
def fresh_features(model, tokens):
    return model.features(torch.tensor([tokens]))[0]


@torch.inference_mode()
def fresh_logits(model, tokens):
    return model(torch.tensor([tokens]))[0, -1]


def tree_logits(model, tokens, draft):
    """Each node by itself: a fresh forward over the sequence and the guesses that lead to it."""
    paths = [[], *([draft.tokens[i] for i in draft.path(node)] for node in range(len(draft)))]
    return torch.stack([fresh_logits(model, [*tokens, *path]) for path in paths])


def assert_reader_holds(reader, tokens):
    """Cache, features and the next logits are those of a reader that read just these tokens."""
    n = len(tokens)
    assert reader.tokens == list(tokens)
    assert len(reader) == reader.cache.lengths[0] == n
    if n:
        other = Reader(reader.model, reader.cache.capacity)
        other(tokens)
        for mine, fresh in ((reader.cache.k_LBSKH, other.cache.k_LBSKH),
                            (reader.cache.v_LBSKH, other.cache.v_LBSKH)):  # fmt: skip
            torch.testing.assert_close(mine[:, :, :n], fresh[:, :, :n], atol=ATOL, rtol=ATOL)
        torch.testing.assert_close(
            reader.features_SD[:n], fresh_features(reader.model, tokens), atol=ATOL, rtol=ATOL
        )
    with torch.inference_mode():  # on a copy: to look must not change what is looked at
        logits_V = reader.model(torch.tensor([[7]]), copy.deepcopy(reader.cache))[0, -1]
    torch.testing.assert_close(
        logits_V, fresh_logits(reader.model, [*tokens, 7]), atol=ATOL, rtol=ATOL
    )


def random_tree(choose, V, most=9):
    """A tree whose nodes' parents and tokens come from choose(low, high), inclusive."""
    parents, tokens, taken = [], [], set()
    for node in range(choose(0, most)):
        parent, token = choose(-1, node - 1), choose(0, V - 1)
        while (parent, token) in taken:
            token = (token + 1) % V
        taken.add((parent, token))
        parents.append(parent)
        tokens.append(token)
    return Draft(tokens, parents)
