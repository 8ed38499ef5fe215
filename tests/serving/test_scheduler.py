"""Who computes how much in the next forward, with numbers for tokens and no model."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving_models import assert_all_given_back

from lecture_util.serving.blocks import Blocks
from lecture_util.serving.loop import Loop
from lecture_util.serving.paging import Pages
from lecture_util.serving.request import EndsAfter, Params, Request, Running
from lecture_util.serving.scheduler import Policy, Scheduler
from lecture_util.serving.simulate import Pretend, simulator
from lecture_util.serving.slots import Slots


class Server:
    """A scheduler with sequences of given lengths, stepped by hand."""

    def __init__(self, memory=None, **policy):
        self.memory = Slots(64, 10**6) if memory is None else memory
        self.scheduler = Scheduler(self.memory, Policy(**policy))
        self.all, self.next_token = [], 0

    def add(self, tokens, new=100, user="", arrival_s=0.0, followers=0):
        """A sequence of so many tokens that no other has, or of those given."""
        if isinstance(tokens, int):
            tokens = list(range(self.next_token, self.next_token + tokens))
            self.next_token += len(tokens)
        request = Request(tuple(tokens), Params(new), user=user)
        made = [
            Running(len(self.all) + i, request, len(self.all), i, list(tokens), arrival_s)
            for i in range(1 + followers)
        ]
        made[0].followers = made[1:]
        self.all += made
        self.scheduler.add(made[0])
        return made[0]

    def plan(self):
        return self.scheduler.plan()

    def step(self):
        """Plan, and pretend that it was computed: one token more where one is drawn."""
        work = self.plan()
        for w in work:
            one = w.sequence
            one.computed = w.start + w.count
            self.memory.commit(one)
            if w.draws:
                for each in (one, *self.scheduler.forked(one)):
                    self.next_token += 1
                    each.tokens.append(10**6 + self.next_token)
                    each.token_times_s.append(0.0)
                    if len(each.new_tokens) == each.request.params.max_new_tokens:
                        self.scheduler.leave(each)
        return [(w.sequence.id, w.start, w.count) for w in work]

    @property
    def running(self):
        return [s.id for s in self.scheduler.running]

    @property
    def waiting(self):
        return [s.id for s in self.scheduler.waiting]


def pages(num_pages, page_size=4, **options):
    return Pages(Blocks(num_pages, page_size, **options))


def test_decoding_comes_first_and_prompts_get_the_rest():
    server = Server(slots=3, token_budget=8)
    server.add(5)
    assert server.step() == [(0, 0, 5)]
    server.add(12)
    assert server.step() == [(0, 5, 1), (1, 0, 7)]
    server.add(3)
    # 1 decodes the moment its prompt is computed; the newcomer takes what both leave.
    assert server.step() == [(0, 6, 1), (1, 7, 5), (2, 0, 2)]
    assert server.step() == [(0, 7, 1), (1, 12, 1), (2, 2, 1)]


def test_a_prompt_in_chunks_gives_its_first_token_after_the_last_one():
    """A4 51: 6 tokens as 4 and 2. Tests of the engine show that the texts are equal."""
    server = Server(slots=2, token_budget=4)
    one = server.add(6)
    (w,) = server.plan()
    assert (w.start, w.count, w.draws, w.prefill) == (0, 4, False, True)
    assert server.step() == [(0, 0, 4)] and one.new_tokens == []
    (w,) = server.plan()
    assert (w.start, w.count, w.draws, w.prefill) == (4, 2, True, True)
    assert server.step() == [(0, 4, 2)] and len(one.new_tokens) == 1


@pytest.mark.parametrize("memory", [None, pages(10)], ids=["rows", "pages"])
def test_decode_positions_go_on_where_the_prompt_ends(memory):
    """A4 52 and 57: the first decoded token stands at the prompt's length, then one by one."""
    server = Server(memory, slots=1, token_budget=16)
    one = server.add(6)
    assert [server.step() for _ in range(4)] == [[(0, 0, 6)], [(0, 6, 1)], [(0, 7, 1)], [(0, 8, 1)]]
    assert one.computed == 9 == len(one.tokens) - 1


def test_a_new_page_comes_when_the_token_that_needs_it_does():
    """A4 53: pages of 4, a prompt of 4. The drawn token is in `tokens` before it is computed."""
    memory = pages(10)
    server = Server(memory, slots=1, token_budget=16)
    one = server.add(4)
    held = []
    for _ in range(6):
        server.step()
        held.append((one.computed, len(memory.table(one))))
    assert held == [(4, 1), (5, 2), (6, 2), (7, 2), (8, 2), (9, 3)]


def test_after_a_preemption_only_what_the_cache_has_lost_is_computed():
    """A4 49: 6 tokens in pages of 4; the first page is found again, so 2 are scheduled."""
    memory = pages(10)
    server = Server(memory, slots=1, token_budget=16)
    one = server.add(5)
    server.step()
    assert (len(one.tokens), one.computed) == (6, 5)
    server.scheduler.preempt(one)
    assert memory.held() == (0, 0) and one.computed == 0 and one.slot is None
    (w,) = server.plan()
    assert (w.start, w.count, w.draws, w.prefill) == (4, 2, True, True)
    assert one.found == 4 and one.preemptions == 1


def test_all_of_a_prompt_but_its_last_token_may_be_found():
    """At least one token is computed, or there would be no logits."""
    for length, found in ((8, 4), (9, 8)):
        server = Server(pages(20), slots=2, token_budget=16)
        server.add(range(length))
        server.step()
        server.add(range(length))
        assert server.step()[1] == (1, found, length - found)


def test_who_needs_room_gets_it_after_one_victim():
    """A4 55: the loop over victims ends in `else`, which schedules the candidate."""
    memory = pages(4)
    server = Server(memory, slots=2, token_budget=16)
    server.add(7)
    server.add(7)
    server.step(), server.step()  # each has 8 tokens in 2 pages: full
    assert memory.blocks.available == 0
    assert server.step() == [(0, 8, 1)]  # the older one; the younger was put back
    assert server.running == [0] and server.waiting == [1]
    assert server.scheduler.preempted == 1 and server.all[1].computed == 0


def test_the_newest_is_put_back_first_and_nobody_computes_who_was():
    memory = pages(9)
    server = Server(memory, slots=3, token_budget=64)
    for _ in range(3):
        server.add(11)
    server.step(), server.step()  # 12 tokens each, in 3 pages
    assert server.step() == [(0, 12, 1), (1, 12, 1)]
    assert server.waiting == [2]
    for _ in range(3):
        work = server.step()
        assert [i for i, _, _ in work] == [0, 1]  # no room for 2, and the next page is not due
    assert server.step() == [(0, 16, 1)]  # pages of 2 came free, but both need a fifth
    assert server.waiting == [2, 1]


def test_the_newest_puts_itself_back_when_it_is_the_one_that_lacks_room():
    memory = pages(3)
    server = Server(memory, slots=2, token_budget=16)
    server.add(2)
    server.add(7)
    server.step(), server.step()
    assert memory.blocks.available == 0
    assert server.step() == [(0, 3, 1)]
    assert (server.running, server.waiting) == ([0], [1])
    assert all(w.sequence.slot is not None for w in server.plan())


def test_work_that_was_planned_for_a_victim_is_dropped():
    """A prompt needs the page of a sample that joined behind it and had its turn before it."""
    server = Server(pages(3), slots=3, token_budget=5)
    server.add(3, followers=1)
    server.add(5)
    assert server.step() == [(0, 0, 3), (2, 0, 2)]
    assert server.running == [0, 2, 1]
    # 0 takes the last page for its copy, 1 keeps the original; then 2 lacks a second page.
    assert server.step() == [(0, 3, 1), (2, 2, 3)]
    assert server.waiting == [1]


def test_whoever_was_put_back_comes_before_those_who_never_ran():
    memory = pages(4)
    server = Server(memory, slots=2, token_budget=16, order="shortest")
    server.add(7, new=4)
    server.add(7)
    server.step(), server.step(), server.step()
    assert server.waiting == [1]
    server.add(1)
    server.step()
    server.step()  # the first is over
    assert server.running[0] == 1


def test_an_admission_that_fails_leaves_the_free_count_as_it_was():
    """A4 56: pages taken for a request that then could not be scheduled were kept."""
    memory = pages(5)
    blocks = memory.blocks
    server = Server(memory, slots=3, token_budget=64)
    server.add(range(8), new=3)
    server.step()
    free, counts = blocks.available, list(blocks.counts)
    late = server.add([*range(8), *range(50, 65)], new=3)  # two pages are found, four are missing
    server.scheduler.plan()
    assert memory.begin(late) is None
    assert (blocks.counts[:2], late.computed, late.slot) == ([1, 1], 0, None)
    assert blocks.available == free - 1  # the first one's new page, and no other
    assert set(memory.tables) == {0} and sum(blocks.counts) == sum(counts) + 1


def test_begin_asks_for_room_for_the_next_token_too():
    """Else it would be put back at its first decode; but never for more than it can need."""
    memory = pages(2)
    for tokens, new, fits in ((7, 9, True), (8, 9, False), (8, 1, True)):
        one = Running(0, Request(tuple(range(tokens)), Params(new)), 0, 0, [*range(tokens)], 0.0)
        assert (memory.begin(one) is not None) == fits
        memory.release(one)
        assert memory.blocks.available == 2


def first_admissions(server, steps=200):
    """Ids in the order in which they first compute anything."""
    seen = []
    for _ in range(steps):
        seen += [i for i, _, _ in server.step() if i not in seen]
    return seen


@pytest.mark.parametrize(
    ("order", "expected"),
    [("arrival", [4, 0, 1, 2, 3]), ("shortest", [3, 1, 4, 2, 0]), ("fair", [4, 2, 3, 0, 1])],
)
def test_orders(order, expected):
    server = Server(slots=1, token_budget=64, order=order)
    server.add(30, new=2, user="ann", arrival_s=1.0)
    server.add(3, new=2, user="ann", arrival_s=2.0)
    server.add(20, new=2, user="bob", arrival_s=3.0)
    server.add(2, new=2, user="cy", arrival_s=4.0)
    server.add(4, new=2, user="ann", arrival_s=0.0)
    # fair: ann's first (all at 0), bob and cy, who had nothing yet, then ann again.
    assert first_admissions(server, 12) == expected


@pytest.mark.parametrize("order", ["arrival", "shortest", "fair"])
def test_equals_are_served_in_the_order_of_their_coming(order):
    server = Server(slots=2, token_budget=64, order=order)
    for i in range(7):
        server.add(4, new=3, user="abcdefg"[i])
    assert first_admissions(server, 30) == [*range(7)]


def starved(patience):
    """How many forwards a long prompt waits while short ones keep coming."""
    server = Server(slots=1, token_budget=64, order="shortest", patience=patience)
    server.add(3, new=2)
    long = server.add(30, new=2)
    for step in range(100):
        server.add(3, new=2)
        server.step()
        if long.computed:
            return step
    return None


def test_without_patience_a_long_prompt_starves_and_with_it_does_not():
    assert starved(None) is None
    for patience in (1, 5, 20):
        assert patience <= starved(patience) <= patience + 2


def shares(order):
    """Tokens computed by user, when one of them asks ten times as often."""
    server = Server(slots=2, token_budget=32, order=order)
    for step in range(200):
        server.add(8, new=6, user="noisy", arrival_s=float(step))
        if step % 10 == 0:
            server.add(8, new=6, user="quiet", arrival_s=float(step))
        server.step()
    return server.scheduler.served


def test_a_noisy_neighbour_takes_all_by_arrival_and_its_share_by_fairness():
    by_arrival, fair = shares("arrival"), shares("fair")
    assert by_arrival["quiet"] < 0.15 * by_arrival["noisy"]
    # The quiet one asks for less than half of what two slots can do, and gets all of it.
    asked = 200 // 10 * (8 + 5)
    assert fair["quiet"] > 0.9 * asked
    assert sum(fair.values()) > 0.97 * sum(by_arrival.values())  # nothing is wasted on it


def test_the_counters_are_tokens_computed():
    server = Server(slots=2, token_budget=5)
    server.add(7, new=3, user="ann")
    server.add(2, new=1, user="bob")
    for _ in range(9):
        server.step()
    assert server.scheduler.served == {"ann": 7 + 2, "bob": 2}


def admissions(ratio, most_steps, arrivals=12):
    """Forwards at which somebody was admitted; one more asks before each, and none ends."""
    server = Server(
        slots=16, token_budget=64, waiting_served_ratio=ratio, max_waiting_steps=most_steps
    )
    when = []
    for step in range(arrivals):
        server.add(2)
        before = len(server.running)
        server.step()
        if len(server.running) > before:
            when.append(step)
    return when


def test_waiting_served_ratio_gathers_newcomers():
    assert admissions(0.0, 100) == [*range(12)]
    # Alone at first; then 1 waits for 1, 2 for 2, 4 for 4.
    assert admissions(1.0, 100) == [0, 1, 3, 7]
    assert admissions(50.0, 100) == [0]
    assert admissions(50.0, 4) == [0, 4, 8]


def test_a_whole_prompt_waits_until_it_fits_the_budget_or_runs_alone():
    server = Server(slots=3, token_budget=10, chunked=False)
    server.add(6, new=4)
    server.add(5, new=2)  # 6 + 5 are above 10
    server.add(25, new=2)  # as long as it likes, but then alone
    assert server.step() == [(0, 0, 6)]
    assert server.step() == [(0, 6, 1), (1, 0, 5)]
    assert server.step() == [(0, 7, 1), (1, 5, 1)]
    assert server.step() == [(0, 8, 1)]
    assert server.step() == [(2, 0, 25)]


def test_samples_take_their_slots_together():
    server = Server(slots=4, token_budget=16)
    server.add(3, followers=2)
    server.add(3, followers=1)
    assert server.step() == [(0, 0, 3)]
    assert server.running == [0, 1, 2] and server.waiting == [3]
    assert [s.slot for s in server.all] == [0, 1, 2, None, None]
    assert server.step() == [(0, 3, 1), (1, 3, 1), (2, 3, 1)]


def test_a_prompt_that_is_put_back_gives_back_its_samples_slots_too():
    server = Server(pages(9), slots=3, token_budget=4)
    leader = server.add(9, followers=2)
    server.step()
    assert server.scheduler.free_slots == []
    server.scheduler.preempt(leader)
    assert sorted(server.scheduler.free_slots) == [0, 1, 2]
    assert [s.slot for s in server.all] == [None] * 3
    server.step()
    assert [s.slot for s in server.all] == [0, 1, 2]


def test_samples_that_join_behind_a_long_prompt_decode_before_it():
    server = Server(slots=4, token_budget=6)
    server.add(3, followers=2)
    server.add(20)
    assert server.step() == [(0, 0, 3), (3, 0, 3)]
    assert server.running == [0, 3, 1, 2]
    assert server.step() == [(0, 3, 1), (1, 3, 1), (2, 3, 1), (3, 3, 3)]


def test_the_lowest_free_slot_is_taken():
    server = Server(slots=4, token_budget=16)
    a, b, c = (server.add(2) for _ in range(3))
    server.step()
    assert [s.slot for s in (a, b, c)] == [0, 1, 2]
    server.scheduler.leave(b)
    server.scheduler.leave(a)
    d, e, f = (server.add(2) for _ in range(3))
    server.step()
    assert [s.slot for s in (c, d, e, f)] == [2, 0, 1, 3]


def test_waits_are_forgotten_with_those_who_left():
    server = Server(slots=1, token_budget=4, patience=3)
    server.add(2)
    gone = server.add(2)
    server.step()
    assert server.scheduler.waited[gone.id] == 1
    server.scheduler.leave(gone)
    assert not +server.scheduler.waited


class Watched(Scheduler):
    """Checks every plan as it is made."""

    def plan(self):
        decoding = [s for s in self.running if not s.prefilling]
        was_running, before = {s.id for s in self.running}, self.preempted
        work = super().plan()
        counts = [w.count for w in work]
        assert work and min(counts) >= 1
        if self.policy.chunked:
            assert sum(counts) <= self.policy.token_budget
        elif len(work) > 1:
            news = [w for w in work if w.sequence.computed == w.start and w.prefill]
            assert sum(counts) <= self.policy.token_budget or len(news) <= 1
        assert len({w.sequence.id for w in work}) == len(work)
        for w in work:
            assert w.start == w.sequence.computed and w.sequence.slot is not None
            assert w.start + w.count <= len(w.sequence.tokens)
        # Whoever decodes has a token in every forward, unless it was put back.
        working = {w.sequence.id for w in work}
        assert all(s.id in working for s in decoding if s.slot is not None)
        held = [s.slot for s in self.running] + [f.slot for s in self.running for f in s.followers]
        assert sorted(held + self.free_slots) == list(range(self.policy.slots))
        if self.preempted > before:  # or whoever was put back would come straight in again
            assert self.waiting and working <= was_running
        return work


@settings(max_examples=100)
@given(
    data=st.data(),
    slots=st.integers(1, 6),
    extra=st.integers(0, 30),
    chunked=st.booleans(),
    order=st.sampled_from(["arrival", "shortest", "fair"]),
    patience=st.none() | st.integers(1, 9),
    ratio=st.sampled_from([0.0, 0.5, 2.0, 99.0]),
    page_size=st.sampled_from([1, 2, 3, 5, 16]),
    spare=st.integers(0, 6),
    caching=st.booleans(),
)
def test_every_request_ends_whatever_the_policy_if_the_largest_fits(
    data, slots, extra, chunked, order, patience, ratio, page_size, spare, caching
):
    policy = Policy(slots, slots + extra, chunked, order, patience, ratio, 7)
    sizes = st.tuples(
        st.integers(1, 25), st.integers(1, 12), st.integers(1, min(3, slots)), st.integers(0, 20)
    )
    trace = [
        # Prompts begin alike, so that prefixes are found.
        Request(
            range(prompt), Params(new, samples=samples, stop=EndsAfter(1 + new // 2)),
            float(at), "ab"[at % 2],
        )
        for prompt, new, samples, at in data.draw(st.lists(sizes, min_size=1, max_size=12))
    ]  # fmt: skip
    longest = max(len(r.prompt) + r.params.max_new_tokens - 1 for r in trace)
    memory = pages(-(-longest // page_size) + spare, page_size, prefix_caching=caching)
    loop = simulator(memory, policy, scheduler=Watched)
    for c in loop.serve(trace):
        assert c.reason in ("stop", "length")
    assert_all_given_back(loop)
    assert isinstance(loop, Loop) and isinstance(loop.executor, Pretend)


@pytest.mark.parametrize(
    "bad",
    [
        dict(slots=0), dict(slots=True), dict(slots="4"), dict(slots=2.0), dict(slots=None),
        dict(token_budget=0), dict(token_budget=15), dict(token_budget=float("nan")),
        dict(patience=0), dict(patience=1.5), dict(max_waiting_steps=0),
        dict(max_waiting_steps=None), dict(order="random"), dict(order=None), dict(order=[]),
        dict(chunked="no"), dict(chunked=None), dict(waiting_served_ratio=-1),
        dict(waiting_served_ratio=float("nan")), dict(waiting_served_ratio=float("inf")),
        dict(waiting_served_ratio="1"), dict(waiting_served_ratio=True),
    ],
    ids=str,
)  # fmt: skip
def test_a_policy_that_cannot_be_is_refused(bad):
    with pytest.raises(ValueError, match=f"{next(iter(bad))}=.*|below slots"):
        Policy(**bad)
