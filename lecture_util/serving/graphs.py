"""CUDA graphs: decode steps that are recorded once and launched whole, in batches of a few sizes.

A decode step is a few hundred kernels. Python needs longer to launch one of them than a GPU needs
to run it, if model and batch are small. A CUDA graph remembers all launches of a step, with every
address and every number that the host passed, and repeats them at one call. So what changes from
step to step must lie in a tensor that stays in its place, and all else must be alike:

    read from a buffer            tokens, positions, places, lengths and tables
    a graph for each              the bucket: how many rows are computed, 1, 2, 4, 8, ... slots
    the same for all steps        the width of a table, by which the kernel chooses its splits

A batch is filled up to the next bucket with rows of nobody: token 0 at position 0, with a length of
0, so that attention gives zeros, and with a place on the page of the pool that is never lent. On a
CPU the same rows lie in the same buffer, and a plain call computes them.

Source: PyTorch's notes on CUDA semantics, section CUDA Graphs (docs.pytorch.org/docs/stable/notes/
        cuda.html). Graphs that never run at once may share memory in any order: pytorch#166975.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from lecture_util.kernels.paged_attention import FLOATS
from lecture_util.model.shapes import TensorMismatch
from lecture_util.model.transformer import Transformer

from .executor import ModelExecutor
from .flat import FlatCache, Frame
from .paging import PagedCache
from .scheduler import Work

Step = Callable[[], Tensor]  # computes logits; after a capture always into the same memory
Capture = Callable[[Step], Step]

TOKEN, POSITION, PLACE, LENGTH, TABLE = range(5)  # columns of the buffer; a table takes the rest
WARM_UPS = 3


def buckets(slots: int) -> list[int]:
    """The batch sizes that are computed: powers of two, then `slots` itself.

    Raises: ValueError if slots is no whole number from 1 up.
    """
    if type(slots) is not int or slots < 1:
        raise ValueError(f"slots={slots!r}: expected a whole number, at least 1")
    return [2**i for i in range((slots - 1).bit_length())] + [slots]


def can_capture(model: Transformer, cache: FlatCache) -> bool:
    """Whether a decode step is nothing but kernels, so that it can be a CUDA graph.

    The Triton kernel reads lengths on the GPU. Other ways to attend read them on the host.
    """
    return isinstance(cache, PagedCache) and model.device.type == "cuda" and model.dtype in FLOATS


def cuda_capture() -> Capture:
    """A capture into CUDA graphs, all of which share one pool of memory.

    A step first runs a few times on a stream of its own, as capturing does: it compiles kernels and
    fills caches there, which a capture forbids.
    """
    pool, aside = torch.cuda.graph_pool_handle(), torch.cuda.Stream()

    def capture(step: Step) -> Step:
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(WARM_UPS):
                step()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=pool, stream=aside):
                logits_BV = step()
        except RuntimeError as error:
            raise RuntimeError(
                "a decode step of this model cannot be a CUDA graph: something in it waits for the "
                "GPU, such as .item() or a mask of booleans. Mend that, or pass graphs=False"
            ) from error

        def replay() -> Tensor:
            graph.replay()  # on the current stream, so after all that was written before
            return logits_BV

        return replay

    return capture


class DecodeGraphs(ModelExecutor):
    """A `ModelExecutor` that replays a graph whenever every sequence has just one token to compute.

    All graphs are captured here, the largest first: the smaller ones then find their memory in its.

    slots    the most sequences that run at once
    capture  takes a step and returns what repeats it, for tests; None: `cuda_capture()` on a GPU,
             and on a CPU the step itself

    Bytes:  8*slots*(4 + J) for the buffer, where a table has J pages, enough for the model's
            context or all of the pool; a graph keeps B*V logits and what one step needs.
    Raises: TypeError without a PagedCache; TensorMismatch for a dtype that the kernel has not.
    """

    def __init__(
        self, model: Transformer, cache: PagedCache, slots: int, capture: Capture | None = None
    ) -> None:
        if not isinstance(cache, PagedCache):
            raise TypeError(
                f"the cache is a {type(cache).__name__}: only a PagedCache keeps all addresses "
                "that attention needs in tables. Pass one, or graphs=False"
            )
        if model.device.type == "cuda" and not can_capture(model, cache):
            raise TensorMismatch(
                f"the model is {model.dtype}, for which there is no kernel: convert it to "
                "torch.bfloat16 or the like, or pass graphs=False"
            )
        super().__init__(model, cache)
        self.buckets, blocks = buckets(slots), cache.blocks
        self.width = min(blocks.num_pages, blocks.pages_for(model.config.max_context))
        self.nobody = [0, 0, blocks.num_pages * blocks.page_size, 0]
        self.rows = torch.zeros(slots, TABLE + self.width, dtype=torch.long, device=model.device)
        self.rows[:, :TABLE] = torch.tensor(self.nobody)  # before steps run for the first time
        if capture is None:
            capture = cuda_capture() if model.device.type == "cuda" else lambda step: step
        with torch.inference_mode():
            self.replays = {B: capture(partial(self.step, B)) for B in reversed(self.buckets)}

    def logits(self, flat: Sequence[Work], drawing: Sequence[int]) -> Tensor:
        pages = max(len(self.cache.memory.table(w.sequence)) for w in flat)
        decoding = all(w.count == 1 for w in flat) and len(flat) <= self.buckets[-1]
        if not decoding or pages > self.width:
            return super().logits(flat, drawing)
        self.cache.copy_pages()
        B = next(B for B in self.buckets if B >= len(flat))
        self.fill(flat, B, pages)
        logits_BV = self.replays[B]()[: len(flat)].clone()  # the next replay writes over them
        return logits_BV if len(drawing) == len(flat) else logits_BV[drawing]

    def fill(self, flat: Sequence[Work], B: int, J: int) -> None:
        """Write a row for each sequence, and rows of nobody up to B, in one copy.

        Pages past the first J of a table keep what an earlier step left: no length reaches them.
        """
        P, rows = self.cache.page_size, []
        for w in flat:
            p, table = w.start, self.cache.memory.table(w.sequence)
            place = table[p // P] * P + p % P
            rows.append([w.sequence.tokens[p], p, place, p + 1, *table, *[0] * (J - len(table))])
        rows += [self.nobody + [0] * J] * (B - len(flat))
        self.rows[:B, : TABLE + J].copy_(torch.tensor(rows))

    def step(self, B: int) -> Tensor:
        """One decode step of the buffer's first B rows, wherever that leads. -> logits_BV."""
        rows = self.rows[:B]
        self.cache.frame = Frame(
            positions_1T=rows[None, :, POSITION],
            places_T=rows[:, PLACE],
            tables_BJ=rows[:, TABLE:],
            lengths_B=rows[:, LENGTH],
        )
        x_1TD = self.model.features(rows[None, :, TOKEN], self.cache)
        return self.model.head(x_1TD[0])
