"""Run a function in M processes that form one group, and collect what they return.

Each process is a rank: it gets a DeviceMesh of all M, through which torch's collectives go. They
run on this machine only, over gloo on CPUs and NCCL on GPUs, and find each other through a file, so
no port can be taken.

None outlives `run`: it kills them on its way out, and if the caller itself is killed, so are they
(`rank.die_with_parent`). SIGKILL of the caller leaves their folder, ranks-*, among the temporary
files; SIGTERM doesn't, unless the caller has its own way with it. A process that a rank starts by
itself is its own affair, and may live on.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import connection
from pathlib import Path
from typing import Any

from .rank import begun, live, log_of

GRACE_S = 1.0  # how long we wait for the cause, once its consequences are seen
DAY_S = 86_400.0
BEFORE_ALL = float("-inf")  # when a death happened: what other ranks report may follow from it


class RankError(RuntimeError):
    """A rank failed. `rank` is the first that did."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


def run(
    fn: Callable[..., Any], M: int, *args: Any, backend: str | None = None, timeout_s: float = 120.0
) -> list[Any]:
    """Call fn(mesh, *args) in M new processes; return their M results by rank.

    fn and args are pickled, so fn must live in a module (a file), not in a notebook's cell. Threads
    of torch are divided among the ranks. What a rank prints is shown only if it fails.
    backend: "nccl", rank r on GPU r, or "gloo"; by default NCCL where there are M GPUs.
    M: at most the GPUs, or with gloo four times the cores (eight on the smallest machine).
    Cost:   each process imports torch, some 3 to 5 s of a CPU.

    Raises: RankError with the rank's own traceback; TimeoutError with where each rank stood;
            TypeError, ValueError or RuntimeError, before anything is started, if the call cannot
            work.
    """
    _check(fn, M, timeout_s)
    import torch

    backend = _backend(backend, M, torch.cuda.device_count())
    job, deadline = _packed(fn, args), time.time() + timeout_s
    threads = max(1, torch.get_num_threads() // M)
    context = multiprocessing.get_context("spawn")
    ranks: list[tuple[multiprocessing.Process, connection.Connection]] = []
    with (
        _tidy_at_sigterm(),
        tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True) as folder,
    ):
        try:
            for rank in range(M):
                ours, theirs = context.Pipe(duplex=False)
                about = (rank, M, backend, folder, deadline, threads)
                process = context.Process(target=live, args=(job, theirs, *about), daemon=True)
                process.start()
                theirs.close()  # so that the end of the process is the end of the pipe
                ranks.append((process, ours))
            return _collect(ranks, Path(folder), deadline)
        finally:
            for process, ours in ranks:
                process.kill()
                process.join()
                process.close()
                ours.close()


def _check(fn: Callable, M: int, timeout_s: float) -> None:
    if not callable(fn):
        raise TypeError(f"fn={fn!r} is not callable: expected a function of a module, as fn(mesh)")
    if type(M) is not int or M < 1:
        raise ValueError(f"M={M!r} processes: expected a whole number, at least 1")
    if not (isinstance(timeout_s, int | float) and 0 < timeout_s <= DAY_S):
        raise ValueError(
            f"timeout_s={timeout_s!r}: expected seconds, more than 0 and at most a day, {DAY_S:.0f}"
        )
    if multiprocessing.current_process().daemon:
        raise RuntimeError(
            "run() was called within a rank (or another process that must not start any): call it "
            "from outside, and let the function it runs use the mesh"
        )


def _backend(backend: str | None, M: int, gpus: int) -> str:
    """The one that was asked for, or that suits, if it has room for M."""
    backend = backend or ("nccl" if gpus >= M else "gloo")
    if backend not in ("nccl", "gloo"):
        raise ValueError(f"backend={backend!r}: expected 'gloo' (CPUs) or 'nccl' (GPUs)")
    if backend == "nccl" and gpus < M:
        raise ValueError(f"backend='nccl' needs a GPU a rank: M={M}, but torch sees {gpus}")
    cores = os.cpu_count() or 1
    if backend == "gloo" and M > (most := max(8, 4 * cores)):
        raise ValueError(
            f"M={M} processes on {cores} cores: each imports torch into memory of its own and then "
            f"waits for a core, so at most {most} here"
        )
    return backend


class _Terminated(BaseException):
    """SIGTERM came."""


@contextmanager
def _tidy_at_sigterm() -> Iterator[None]:
    """SIGTERM, which ends a process at once, waits until ranks and folder are gone.

    Only where nobody else handles it, and in the main thread, to which Python gives signals.
    """
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def stop(number: int, frame: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once will do
        raise _Terminated

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except _Terminated:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _packed(fn: Callable, args: tuple) -> bytes:
    """Raises: TypeError that says what cannot be sent to another process, and why."""
    name = getattr(fn, "__name__", repr(fn))
    where = getattr(fn, "__module__", None)
    if where == "__main__" and not hasattr(sys.modules["__main__"], "__file__"):
        raise TypeError(
            f"{name} was defined in a notebook or at a prompt, where a new process cannot find it: "
            "put it in a module (a .py file) and import it"
        )
    try:
        pickle.dumps(fn)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"{name} cannot be sent to another process ({error}): use a function at the top level "
            "of a module, no lambda and no function within a function"
        ) from error
    try:
        return pickle.dumps((fn, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(f"the arguments cannot be sent to another process: {error}") from error


def _collect(ranks: list, folder: Path, deadline: float) -> list[Any]:
    """Wait for every rank's answer, or for the first that fails."""
    M = len(ranks)
    results: dict[int, bytes] = {}
    failures: dict[int, tuple[float, str]] = {}  # when, and what
    until = deadline + GRACE_S
    waiting = {pipe: (rank, process) for rank, (process, pipe) in enumerate(ranks)}
    while waiting:
        ready = connection.wait(list(waiting), timeout=max(0.0, until - time.time()))
        if not ready:
            break
        for pipe in ready:
            rank, process = waiting.pop(pipe)
            try:
                good, when, body = pickle.loads(pipe.recv_bytes())
            except EOFError:
                failures[rank] = BEFORE_ALL, _obituary(rank, M, process, folder)
                continue
            if good:
                results[rank] = body
            else:
                said = f"\nIt had said:\n{said}" if (said := _log(folder, rank)) else ""
                failures[rank] = when, f"rank {rank} of {M} failed of {body[0]}\n\n{body[1]}{said}"
        if failures:
            until = min(until, time.time() + GRACE_S)
    if time.time() >= deadline:
        late = [rank for rank in range(M) if rank not in results]
        stood = [f"rank {r} stood here:\n{_log(folder, r) or 'not running yet'}" for r in late]
        advice = "none had begun, as imports take their time: allow more with timeout_s."
        if any(begun(folder, rank).exists() for rank in range(M)):
            advice = (
                "does every rank make the same calls in the same order? Or allow more with "
                "timeout_s."
            )
        if late:
            named = ", ".join(map(str, late))
            raise TimeoutError(
                "\n".join([f"no answer of rank {named} of {M} in time: {advice}", *stood])
            )
    if failures:
        first = min(failures, key=failures.get)
        raise RankError(first, failures[first][1])
    return [pickle.loads(results[rank]) for rank in range(M)]


def _obituary(rank: int, M: int, process: multiprocessing.Process, folder: Path) -> str:
    process.join(GRACE_S)
    code, said = process.exitcode, _log(folder, rank)
    how = f"exit code {code}" if code is None or code >= 0 else signal.Signals(-code).name
    hint = ""
    if how == "SIGKILL":
        hint = ": the system kills so where memory runs out; use fewer ranks or a smaller model"
    elif not log_of(folder, rank).exists():
        hint = (
            " before it could run, for the reason it printed: in a script, call run() under "
            "`if __name__ == '__main__':`"
        )
    return f"rank {rank} of {M} died without an answer ({how}){hint}\n{said}"


def _log(folder: Path, rank: int, lines: int = 100) -> str:
    path = log_of(folder, rank)
    said = path.read_text(errors="replace").splitlines() if path.exists() else []
    return "\n".join(said[-lines:])
