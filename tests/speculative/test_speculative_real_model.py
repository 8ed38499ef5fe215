"""The reference model: greedy tokens are those of plain decoding with every draft, and samples have
the model's own distribution, which variants known to be wrong have not."""

import itertools

import pytest
import torch
from scipy.stats import chisquare

from lecture_util.model.generate import generate, stream
from lecture_util.model.sampling import GREEDY, Sampling, probabilities
from lecture_util.model.tokenizer import chat, stream_text
from lecture_util.model.weights import load, load_tokenizer
from lecture_util.speculative.draft import NOTHING, ROOT, Draft
from lecture_util.speculative.draft_model import ModelDrafter, early_exit
from lecture_util.speculative.eagle import EagleDrafter
from lecture_util.speculative.medusa import MedusaDrafter
from lecture_util.speculative.ngram import NgramDrafter
from lecture_util.speculative.prompts import held_prompts
from lecture_util.speculative.speculate import Tally, speculate, stream_speculative
from lecture_util.speculative.target import Reader, Table
from lecture_util.speculative.trained import (
    eagle_drafter,
    load_eagle,
    load_medusa,
    medusa_drafter,
)
from lecture_util.speculative.verify import Chance, residual, verify
from lecture_util.speculative.vocabulary import DraftVocabulary

pytestmark = pytest.mark.slow

EOS, NEW, TIE = 2, 12, 1e-3
DROPPED = (25, 14, 17, 13)
GAMMAS = {"early exit": 3, "n-gram": 4, "medusa": 3, "eagle": 3}
NAMES = list(GAMMAS)


@pytest.fixture(scope="module")
def model():
    return load("smollm2-135m", device="cpu")


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("smollm2-135m")


@pytest.fixture(scope="module")
def prompts(tokenizer):
    return [chat(tokenizer, prompt) for prompt in held_prompts()]


@pytest.fixture(scope="module")
def plain(model, prompts):
    """Greedy decoding, one token at a time, all prompts in one batch."""
    return generate(model, prompts, NEW, eos=EOS)


@pytest.fixture(scope="module")
def small(model):
    return early_exit(model, [i for i in range(model.config.L) if i not in DROPPED])


@pytest.fixture(scope="module")
def readers(model, prompts):
    """One a prompt, for all tests: a reader goes back to the prompt by itself."""
    return [Reader(model, len(prompt) + NEW + 16) for prompt in prompts]


@pytest.fixture(scope="module")
def small_readers(small, prompts):
    return [Reader(small, len(prompt) + NEW + 16) for prompt in prompts]


@pytest.fixture(scope="module")
def rounds_of(model, prompts, readers, small_readers):
    """(drafter's name, number of the prompt, budget, ...) -> the rounds."""
    medusa, eagle = medusa_drafter(model), eagle_drafter(model)

    def new_drafter(name, i):
        return {
            "early exit": lambda: ModelDrafter(small_readers[i], GAMMAS[name]),
            "n-gram": lambda: NgramDrafter(k=GAMMAS[name], banned=EOS),
            "medusa": lambda: medusa(readers[i]),
            "eagle": lambda: eagle(readers[i]),
        }[name]()

    def run(name, i, budget=NEW, eos=EOS):
        return list(speculate(readers[i], new_drafter(name, i), prompts[i], budget, eos=eos))

    return run


def text_of(rounds):
    return [token for r in rounds for token in r.tokens]


def until(tokens, eos):
    return tokens[: tokens.index(eos) + 1] if eos in tokens else tokens


@torch.inference_mode()
def assert_same_but_for_ties(model, prompt, said, wanted):
    """Up to the first difference, where the two best logits must be all but equal."""
    first = next((i for i, (a, b) in enumerate(zip(said, wanted, strict=False)) if a != b), None)
    if first is None:
        assert said == wanted
        return
    logits_V = model(torch.tensor([prompt + wanted[:first]]))[0, -1]
    best, second = logits_V.topk(2).values.tolist()
    assert best - second < TIE
    assert {said[first], wanted[first]} == set(logits_V.topk(2).indices.tolist())


# Greedy


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_are_plain_greedy_tokens_on_every_prompt(
    name, model, prompts, plain, rounds_of
):
    assert len(prompts) == 20
    tally, inside = Tally(), []
    for i, prompt in enumerate(prompts):
        rounds, said = rounds_of(name, i), []
        assert_same_but_for_ties(model, prompt, text_of(rounds), plain[i])
        for r in rounds:
            tally.add(r)
            if r.accepted and r.tokens[0] not in said:
                inside.append((i, r.tokens[0]))
            said += r.tokens
    assert tally.accepted > 0  # else nothing was tested
    for i, eos in inside[::8]:  # now an accepted guess is the end, whatever was guessed after it
        rounds = rounds_of(name, i, eos=eos)
        assert_same_but_for_ties(model, prompts[i], text_of(rounds), until(plain[i], eos))
        assert rounds[-1].last == "guess"


@pytest.mark.parametrize("name", NAMES)
def test_budgets_are_kept_to_the_token(name, model, prompts, plain, rounds_of):
    gamma = GAMMAS[name]
    for i, budget in itertools.product(range(len(prompts)), (0, 1, gamma, gamma + 1)):
        said = text_of(rounds_of(name, i, budget))
        assert len(said) == min(budget, len(plain[i]))
        assert_same_but_for_ties(model, prompts[i], said, plain[i][:budget])


@torch.inference_mode()
@pytest.mark.parametrize("name", NAMES)
def test_logits_after_all_rollbacks_are_those_of_a_fresh_forward(
    name, model, prompts, readers, rounds_of
):
    reader = readers[3]
    tokens = prompts[3] + text_of(rounds_of(name, 3))
    assert reader.tokens == tokens[:-1] and reader.cache.lengths == [len(tokens) - 1]
    fresh_V = model(torch.tensor([tokens]))[0, -1]
    assert (reader(tokens)[0] - fresh_V).abs().max() < 1e-3


@pytest.mark.parametrize("name", ["n-gram", "eagle"])
def test_a_stop_string_ends_the_text_where_it_ends_plain_text(
    name, model, tokenizer, prompts, plain
):
    """Across tokens and rounds, and the rounds after it are never computed."""
    prompt, whole = prompts[1], tokenizer.decode(plain[1], skip_special_tokens=True)
    stop = whole[len(whole) // 2 - 4 : len(whole) // 2 + 4]
    new = eagle_drafter(model) if name == "eagle" else lambda reader: NgramDrafter()
    computed = []

    def tokens():
        for r in stream_speculative(model, new, prompt, NEW):
            computed.extend(r.tokens)
            yield from r.tokens

    said = "".join(stream_text(tokenizer, tokens(), stop=[stop]))
    assert said == "".join(stream_text(tokenizer, stream(model, prompt, NEW), stop=[stop]))
    assert said == whole[: whole.index(stop)]
    assert len(computed) < NEW


# Samples, on a vocabulary of five words, so that whole outputs can be counted

WORDS = [" red", " blue", " green", " yellow", " white"]
TEXT = "red blue green red blue red yellow white red blue green blue red blue"
LENGTH, DRAWS, SEED = 3, 3_000, 0
WARM = Sampling(temperature=1.0)
FILTERED = Sampling(temperature=1.0, top_p=0.8)


class Restricted:
    """The real model on a few words: token i is words[i], and those after `allowed` never come."""

    def __init__(self, reader, ids, allowed):
        self.reader, self.ids, self.allowed = reader, ids, allowed

    def real(self, tokens):
        return [self.ids[token] for token in tokens]

    def __call__(self, tokens, draft=NOTHING):
        real = Draft(self.real(draft.tokens), draft.parents)
        logits_MV = self.reader(self.real(tokens), real)[:, self.ids].double()
        logits_MV[:, self.allowed :] = -torch.inf
        return logits_MV

    def keep(self, path):
        self.reader.keep(path)


class Remembering:
    """A drafter that reads features, asked once for each text: the same text, the same guesses."""

    def __init__(self, drafter, restricted):
        self.drafter, self.restricted, self.known = drafter, restricted, {}

    def propose(self, tokens, room, chance):
        key = (*tokens, room)
        if key not in self.known:
            real, reader = self.restricted.real(tokens), self.restricted.reader
            reader(real[:-1])
            reader.rewind(real[:-1])
            draft = self.drafter.propose(real, room, chance)
            place = {token: i for i, token in enumerate(self.restricted.ids)}
            self.known[key] = Draft([place[token] for token in draft.tokens], draft.parents)
        return self.known[key]

    def settle(self, tokens):
        pass


class Words:
    """The small world: its prompt, its target and draft model as tables, and its drafters."""

    def __init__(self, model, small, tokenizer):
        allowed = [tokenizer.encode(word, add_special_tokens=False) for word in WORDS]
        assert all(len(tokens) == 1 for tokens in allowed)
        real = tokenizer.encode(TEXT, add_special_tokens=False)
        allowed = [token for (token,) in allowed]
        ids = allowed + sorted(set(real) - set(allowed))
        self.V = len(WORDS)
        self.prompt = [ids.index(token) for token in real]
        self.target = Restricted(Reader(model, 64), ids, self.V)
        self.small = Restricted(Reader(small, 64), ids, self.V)
        self.logits = {name: self._all(part) for name, part in self._parts()}
        heads, _, _ = load_medusa(model)
        head, _ = load_eagle(model)
        vocabulary = DraftVocabulary(model.head, torch.tensor(sorted(allowed)))
        features = Restricted(Reader(model, 64), ids, self.V)
        tree = [(0,), (1,), (0, 0), (0, 1), (1, 0)]
        self.medusa = Remembering(MedusaDrafter(features.reader, heads, vocabulary, tree), features)
        self.eagle = Remembering(
            EagleDrafter(features.reader, head, vocabulary, depth=2, width=3, size=6), features
        )

    def _parts(self):
        return ("target", self.target), ("small", self.small)

    def _all(self, restricted):
        """Logits after every text that may come: one forward over the tree of them all."""
        texts = [
            text for n in range(1, LENGTH) for text in itertools.product(range(self.V), repeat=n)
        ]
        place = {(): ROOT} | {text: node for node, text in enumerate(texts)}
        tree = Draft([text[-1] for text in texts], [place[text[:-1]] for text in texts])
        logits_MV = restricted(self.prompt, tree)
        restricted.keep([])
        return {text: logits_MV[node + 1] for text, node in place.items()}

    def table(self, name="target"):
        return Table(lambda tokens: self.logits[name][tuple(tokens[len(self.prompt) :])])

    def drafter(self, name, sampling):
        if name == "draft model":
            return ModelDrafter(self.table("small"), 2, sampling)
        if name == "n-gram":
            return NgramDrafter(longest=2, k=2)
        return self.medusa if name == "medusa" else self.eagle

    def joint(self, sampling, length=LENGTH):
        """Text -> its probability, by the chain rule."""
        p = {text: probabilities(row, sampling) for text, row in self.logits["target"].items()}
        found = {}
        for text in itertools.product(range(self.V), repeat=length):
            steps = [float(p[text[:i]][token]) for i, token in enumerate(text)]
            found[text] = torch.tensor(steps, dtype=torch.float64).prod().item()
        return found

    def outputs(self, drafter, sampling, draws=DRAWS, length=LENGTH, **options):
        """So many outputs, from one generator; options: verify, or another Chance."""
        generator = torch.Generator().manual_seed(SEED)
        new_chance, target = options.pop("chance", Chance), self.table()
        for _ in range(draws):
            rounds = speculate(
                target, drafter, self.prompt, length,
                sampling=sampling, chance=new_chance(generator), **options,
            )  # fmt: skip
            yield tuple(text_of(rounds))


@pytest.fixture(scope="module")
def words(model, small, tokenizer):
    return Words(model, small, tokenizer)


def p_value(outputs, joint):
    """Of a chi-square test of the counts; cells that expect fewer than 5 are taken together."""
    counts = dict.fromkeys(joint, 0)
    n = 0
    for text in outputs:
        if text not in counts or joint[text] == 0:
            return 0.0  # it cannot come at all
        counts[text] += 1
        n += 1
    seen, expected, rest = [], [], [0, 0.0]
    for text in sorted(joint, key=joint.get):
        rest = [rest[0] + counts[text], rest[1] + n * joint[text]]
        if rest[1] >= 5:
            seen.append(rest[0])
            expected.append(rest[1])
            rest = [0, 0.0]
    assert rest == [0, 0.0] and len(seen) > 8
    return chisquare(seen, expected, sum_check=False).pvalue


CASES = [(name, sampling) for name in ("draft model", "n-gram", "medusa", "eagle")
         for sampling in (WARM, FILTERED)]  # fmt: skip


def test_the_words_are_worth_counting(words):
    """Many outputs are likely, and the draft model neither agrees nor disagrees with everything."""
    joint = words.joint(WARM)
    assert sum(joint.values()) == pytest.approx(1, abs=1e-12)
    assert sum(p * DRAWS >= 5 for p in joint.values()) > 20
    p_V, q_V = (probabilities(words.logits[name][()], WARM) for name in ("target", "small"))
    assert 0.2 < torch.minimum(p_V, q_V).sum() < 0.98
    assert sum(p > 0 for p in words.joint(FILTERED).values()) < len(joint)


@pytest.mark.parametrize(("name", "sampling"), CASES)
def test_the_table_is_what_the_model_says_round_after_round(words, name, sampling):
    """The same seed, once through the model's cache and once from the table."""
    drafter = words.drafter(name, sampling)
    for seed in range(2):
        said = []
        for target in (words.target, words.table()):
            chance = Chance(torch.Generator().manual_seed(seed))
            rounds = speculate(
                target, drafter, words.prompt, LENGTH, sampling=sampling, chance=chance
            )
            said.append(text_of(rounds))
        assert said[0] == said[1]


@pytest.mark.parametrize(("name", "sampling"), CASES)
def test_samples_have_the_models_own_distribution(words, name, sampling):
    outputs = words.outputs(words.drafter(name, sampling), sampling)
    assert p_value(outputs, words.joint(sampling)) > 1e-3


def test_plain_samples_have_the_models_own_distribution(words):
    """The test itself, on what it must accept."""
    outputs = words.outputs(Told(lambda tokens, room: NOTHING), WARM)
    assert p_value(outputs, words.joint(WARM)) > 1e-3


class Told:
    def __init__(self, guess):
        self.guess = guess

    def propose(self, tokens, room, chance):
        return self.guess(tokens, room)

    def settle(self, tokens):
        pass


# Known to be wrong


def accept_everything(logits_MV, draft, sampling, chance):
    path, here = [], ROOT
    while draft.children[here]:
        here = draft.children[here][0]
        path.append(here)
    return path, chance.draw(probabilities(logits_MV[here + 1], sampling))


def verified(logits_MV, draft, sampling, chance, correct, fresh=True):
    """`verify` once more, with the place open where a token is drawn after a rejection."""
    p_MV = probabilities(logits_MV, sampling)
    path, here, p_V, rejected = [], ROOT, p_MV[0], False
    while True:
        for node in draft.children[here]:
            x, q_V = draft.tokens[node], draft.q[node]
            if q_V is None:
                q_V = torch.eye(len(p_V), dtype=p_V.dtype)[x]
            if chance.happens(float(p_V[x] / q_V[x])):
                path.append(node)
                if fresh or not rejected or draft.children[node]:
                    p_V = p_MV[node + 1]
                here, rejected = node, False
                break
            p_V, rejected = correct(p_V, q_V), True
        else:
            return path, draw_below_one(p_V, chance) if rejected else chance.draw(p_V)


def draw_below_one(p_V, chance):
    """Walk up the sum until it passes a uniform number; what is missing to 1 goes to the last."""
    u = torch.rand((), dtype=torch.float64, generator=chance.generator)
    return min(int(torch.searchsorted(p_V.cumsum(0), u, right=True)), len(WORDS) - 1)


def residual_as_it_is(logits_MV, draft, sampling, chance):
    return verified(logits_MV, draft, sampling, chance, lambda p, q: (p - q).clamp(min=0))


def nothing_wrong(logits_MV, draft, sampling, chance):
    return verified(logits_MV, draft, sampling, chance, residual)


def bonus_from_what_is_left(logits_MV, draft, sampling, chance):
    """A1.9: at the last depth, a later sibling accepted, and the bonus drawn from its parent's."""
    return verified(logits_MV, draft, sampling, chance, residual, fresh=False)


class SurestGuess(ModelDrafter):
    """A1.2: the likeliest token as the guess, and the softmax as its q."""

    def propose(self, tokens, room, chance):
        class Surest(Chance):
            def draw(self, p_V):
                return int(p_V.argmax())

        return super().propose(tokens, room, Surest())


class OneNumber(Chance):
    """B21: every acceptance of a run compares with the same uniform number."""

    def __init__(self, generator):
        super().__init__(generator)
        self.u = torch.rand((), dtype=torch.float64, generator=generator).item()

    def happens(self, probability):
        return self.u < probability


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("draft model", {"verify": accept_everything}),
        ("n-gram", {"verify": accept_everything}),
        ("medusa", {"verify": accept_everything}),
        ("surest guess", {}),
        ("draft model", {"verify": residual_as_it_is}),
        ("n-gram", {"verify": residual_as_it_is}),
        ("n-gram", {"chance": OneNumber}),
        ("eagle", {"verify": bonus_from_what_is_left}),
        ("medusa", {"verify": bonus_from_what_is_left}),
    ],
)
def test_what_is_known_to_be_wrong_is_found_out(words, name, options):
    """By the very test that the right one passes, with as many draws."""
    if name == "surest guess":
        drafter = SurestGuess(words.table("small"), 2, WARM)
    else:
        drafter = words.drafter(name, WARM)
    outputs = words.outputs(drafter, WARM, **options)
    assert p_value(outputs, words.joint(WARM)) < 1e-6


@pytest.mark.parametrize("name", ["draft model", "eagle"])
def test_the_frame_of_the_wrong_ones_is_right(words, name):
    """With nothing wrong put in it passes: it is the fault that is found out, not the frame."""
    outputs = words.outputs(words.drafter(name, WARM), WARM, verify=nothing_wrong)
    assert p_value(outputs, words.joint(WARM)) > 1e-3


def test_greedy_is_the_likeliest_word_each_time(words):
    (text,) = words.outputs(words.drafter("eagle", GREEDY), GREEDY, draws=1)
    for i, token in enumerate(text):
        assert token == int(words.logits["target"][text[:i]].argmax())


def test_verify_is_what_runs_when_nothing_else_is_put_in(words):
    drafter = words.drafter("draft model", WARM)
    ours, given = (list(words.outputs(drafter, WARM, draws=20, **options))
                   for options in ({}, {"verify": verify}))  # fmt: skip
    assert ours == given
