"""Follow every way in which the chances can fall, and add up what comes out."""

import math
from collections import defaultdict
from functools import cache

import torch

from lecture_util.model.sampling import Sampling
from lecture_util.speculative.target import Table
from lecture_util.speculative.verify import Chance


class EveryOutcome(Chance):
    """A Chance that goes one way at each fork, as a script tells it, and notes the forks."""

    def __init__(self, script):
        self.script = script
        self.taken = []  # at each fork: which way, of how many
        self.probability = 1.0

    def happens(self, probability):
        yes = min(float(probability), 1.0)
        return self._fork([(True, yes), (False, 1 - yes)])

    def draw(self, p_V):
        return self._fork(list(enumerate(p_V.tolist())))

    def _fork(self, ways):
        ways = [(value, p) for value, p in ways if p > 0]
        place = len(self.taken)
        way = self.script[place] if place < len(self.script) else 0
        self.taken.append((way, len(ways)))
        value, p = ways[way]
        self.probability *= p
        return value


def outcomes(run):
    """(run(chance), its probability), for every way through, depth first."""
    script = []
    while True:
        chance = EveryOutcome(script)
        result = run(chance)
        yield result, chance.probability
        forks = chance.taken
        while forks and forks[-1][0] + 1 == forks[-1][1]:
            forks.pop()
        if not forks:
            return
        script = [way for way, _ in forks[:-1]] + [forks[-1][0] + 1]


def distribution(run):
    """Result -> its probability, added over all ways that lead to it."""
    found = defaultdict(float)
    for result, probability in outcomes(run):
        found[result] += probability
    return dict(found)


def toy_logits(V, seed, spread=1.5):
    """A language model on V <= 4 tokens, in fp64: other logits after every sequence."""

    @cache
    def logits_of(sequence):
        number = int("1" + "".join(map(str, sequence)), 5)
        g = torch.Generator().manual_seed(seed + 1009 * number)
        return spread * torch.randn(V, generator=g, dtype=torch.float64)

    return lambda tokens: logits_of(tuple(tokens))


def toy(V, seed, spread=1.5):
    return Table(toy_logits(V, seed, spread))


def filtered(logits, sampling: Sampling):
    """Temperature, top-k, top-p, written once more without tensors: the oracle."""
    weights = [math.exp(z / sampling.temperature) for z in logits.tolist()]
    order = sorted(range(len(weights)), key=lambda i: -weights[i])[: sampling.top_k]
    total = sum(weights[i] for i in order)
    kept, mass = [], 0.0
    for i in order:
        if mass < (sampling.top_p or 1.0):
            kept.append(i)
        mass += weights[i] / total
    total = sum(weights[i] for i in kept)
    return {i: weights[i] / total for i in sorted(kept)}


def plain(logits_of, prompt, n, sampling, ends=lambda tokens: False):
    """The joint distribution of n sampled tokens (fewer where the text `ends` before), by the chain
    rule: what every exact method has to reproduce."""
    found = {}

    def extend(tokens, probability):
        if len(tokens) == n or (tokens and ends(tokens)):
            found[tokens] = probability
            return
        for token, p in filtered(logits_of([*prompt, *tokens]), sampling).items():
            extend((*tokens, token), probability * p)

    extend((), 1.0)
    return found


def distance(a, b):
    """The largest difference between two distributions."""
    return max(abs(a.get(x, 0.0) - b.get(x, 0.0)) for x in a.keys() | b.keys())
