"""What stepping costs: a traced run against a plain one, and the time to the first picture.

    python benchmarks/stepper.py [--rounds 5]

First the course's own functions, medians of alternating rounds; then what a stepper must survive,
once each, with the memory that Python and the process took meanwhile.
"""

import argparse
import json
import statistics
import threading
import time

import psutil
import torch

from lecture_util.classroom.live import Stepper
from lecture_util.classroom.live.trace import record
from lecture_util.model.attention import attention_by_hand
from lecture_util.model.config import Config
from lecture_util.model.generate import generate
from lecture_util.model.transformer import Transformer
from lecture_util.roofline import accounting
from lecture_util.roofline.symbolic import symbols


def course() -> dict:
    """Name -> function and arguments."""
    B, T, D, F, c = symbols("B T D F c")
    torch.manual_seed(0)
    q, k, v = torch.rand(2, 4, 4, 16), torch.rand(2, 32, 2, 16), torch.rand(2, 32, 2, 16)
    tiny = Transformer.random(Config(D=48, F=80, K=2, G=3, H=8, L=3, V=97, max_context=64), seed=1)

    def limit(B, D, F):
        cost = accounting.matmul(B, D, F)  # @inspect cost
        intensity = cost.intensity  # @inspect intensity
        intensity = intensity.subs({D: c * B, F: c * B}).limit(c, "oo")  # @inspect intensity
        return intensity

    def forward(tokens):
        logits = tiny(tokens)  # @inspect logits
        return logits

    return {
        "accounting.mlp, numbers": (accounting.mlp, (8, 1, 4096, 14336)),
        "accounting.mlp, symbols": (accounting.mlp, (B, T, D, F)),
        "matmul's intensity to its limit": (limit, (B, D, F)),
        "attention_by_hand, B=2 T=4 S=32": (attention_by_hand, (q, k, v)),
        "forward of 3 layers, T=8": (forward, (torch.arange(8)[None],)),
        "generate 4 tokens, 3 layers": (generate, (tiny, [[1, 2, 3]], 4)),
    }


def hard() -> dict:
    def million():
        total = 0
        for i in range(10**6):
            total += i  # @inspect total
        return total

    def raises(n):
        x = 1  # @inspect x
        return x / n

    def recurses(n):
        return recurses(n + 1)

    def generator():
        n = 0
        while True:
            yield n  # @inspect n
            n += 1

    def mutates(xs):
        xs.append(len(xs))  # @inspect xs
        return xs

    def gigabyte():
        x = torch.zeros(250_000_000)  # @inspect x
        x += 1  # @inspect x
        return x.shape

    def spins():
        while True:
            pass

    return {
        "a loop of 10^6": (million, ()),
        "one that raises": (raises, (0,)),
        "one that recurses for ever": (recurses, (0,)),
        "a generator without end": (generator, ()),
        "one that mutates its argument": (mutates, ([1, 2],)),
        "one holding a tensor of 1 GB": (gigabyte, ()),
        "a loop that never ends": (spins, ()),
    }


def seconds(run) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


class Peak:
    """The process's highest memory above its start, read every few milliseconds."""

    def __enter__(self):
        self.process, self.running = psutil.Process(), True
        self.start = self.highest = self.process.memory_info().rss
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def watch(self):
        while self.running:
            self.highest = max(self.highest, self.process.memory_info().rss)
            time.sleep(0.005)

    def __exit__(self, *_):
        self.running = False
        self.thread.join()
        self.left = self.process.memory_info().rss - self.start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds

    print(f"{'':<34}{'plain ms':>9}{'traced ms':>10}{'ratio':>7}{'steps':>7}"
          f"{'first picture ms':>18}")  # fmt: skip
    for name, (fn, args) in course().items():
        plain, traced, first = [], [], []
        for _ in range(rounds + 1):
            plain.append(seconds(lambda fn=fn, args=args: fn(*args)))
            traced.append(seconds(lambda fn=fn, args=args: record(fn, args)))
            first.append(seconds(lambda fn=fn, args=args: Stepper(fn, args, {})))
        p, t, f = (statistics.median(times[1:]) * 1e3 for times in (plain, traced, first))
        steps = len(record(fn, args).steps)
        print(f"{name:<34}{p:>9.2f}{t:>10.2f}{t / p:>7.1f}{steps:>7,}{f:>18.1f}")

    print(f"\n{'':<34}{'s':>6}{'steps':>8}{'peak MB':>9}{'left MB':>9}{'values kB':>11}"
          f"{'picture kB':>12}")  # fmt: skip
    for name, (fn, args) in hard().items():
        with Peak() as peak:
            start = time.perf_counter()
            stepper = Stepper(fn, args, {})
            took = time.perf_counter() - start
        recording, picture = stepper.walk.recording, len(json.dumps(stepper.picture))
        highest, left = (peak.highest - peak.start) / 1e6, peak.left / 1e6
        print(f"{name:<34}{took:>6.2f}{len(recording.steps):>8,}{highest:>9,.0f}{left:>9,.0f}"
              f"{recording.snapshot_bytes / 1e3:>11,.1f}{picture / 1e3:>12.1f}")  # fmt: skip
        stepper.move("end")
        print(f"    ends: {stepper.picture['note'] or stepper.picture['said']}")


if __name__ == "__main__":
    main()
