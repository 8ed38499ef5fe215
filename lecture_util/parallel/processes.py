"""Run a function in M processes that form one group, and collect what they return.

Each process is a rank: it gets a DeviceMesh of all M, through which torch's collectives go. They
run on this machine only, over gloo on CPUs and NCCL on GPUs, and find each other through a file, so
no port can be taken. Whatever happens, none outlives `run`.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any

GRACE_S = 1.0  # how long we wait for the cause, once its consequences are seen


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
    Cost:   each process imports torch, some 3 to 5 s of a CPU.

    Raises: RankError with the rank's own traceback; TimeoutError with where each rank stood;
            TypeError or ValueError, before anything is started, if the call cannot work.
    """
    import torch

    if type(M) is not int or M < 1:
        raise ValueError(f"M={M!r} processes: expected a whole number, at least 1")
    if not timeout_s > 0:
        raise ValueError(f"timeout_s={timeout_s!r}: expected seconds, more than 0")
    gpus = torch.cuda.device_count()
    backend = backend or ("nccl" if gpus >= M else "gloo")
    if backend not in ("nccl", "gloo"):
        raise ValueError(f"backend={backend!r}: expected 'gloo' (CPUs) or 'nccl' (GPUs)")
    if backend == "nccl" and gpus < M:
        raise ValueError(f"backend='nccl' needs a GPU a rank: M={M}, but torch sees {gpus}")
    job, deadline = _packed(fn, args), time.time() + timeout_s
    threads = max(1, torch.get_num_threads() // M)
    context = multiprocessing.get_context("spawn")
    ranks: list[tuple[multiprocessing.Process, connection.Connection]] = []
    with tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True) as folder:
        try:
            for rank in range(M):
                ours, theirs = context.Pipe(duplex=False)
                about = (rank, M, backend, folder, deadline, threads)
                process = context.Process(target=_rank, args=(job, theirs, *about), daemon=True)
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


def _rank(
    job: bytes,
    answer: connection.Connection,
    rank: int,
    M: int,
    backend: str,
    folder: str,
    deadline: float,
    threads: int,
) -> None:
    """The life of one process."""
    log = open(Path(folder, f"{rank}.log"), "w", buffering=1)  # noqa: SIM115, as long as we live
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout.reconfigure(line_buffering=True)
    # At the deadline: say where we stand, and die, even within a collective, even as an orphan.
    left_s = max(0.1, deadline - time.time())
    faulthandler.dump_traceback_later(left_s, exit=True, file=log)
    try:
        message = (True, time.time(), _result(job, rank, M, backend, folder, left_s, threads))
    except BaseException as error:
        what = f"{type(error).__name__}: {error}"
        message = (False, time.time(), (what, traceback.format_exc()))
    answer.send_bytes(pickle.dumps(message))  # before our connections close, and others fail of it
    answer.close()


def _result(
    job: bytes, rank: int, M: int, backend: str, folder: str, left_s: float, threads: int
) -> bytes:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(threads)
    device = None
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    else:  # gloo would look up this machine's name to find a network
        loopback = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
        if loopback:
            os.environ["GLOO_SOCKET_IFNAME"] = loopback.pop()
    dist.init_process_group(
        backend,
        init_method=Path(folder, "store").as_uri(),
        rank=rank,
        world_size=M,
        timeout=timedelta(seconds=left_s),
        device_id=device,
    )
    mesh = init_device_mesh("cuda" if backend == "nccl" else "cpu", (M,))
    fn, args = pickle.loads(job)
    result = pickle.dumps(fn(mesh, *args))
    dist.barrier()  # no rank leaves while another may still be reading from it
    return result


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
            except EOFError:  # before all others: their failures follow from a death
                failures[rank] = 0.0, _obituary(rank, M, process, folder)
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
        stood = "\n".join(f"rank {rank} stood here:\n{_log(folder, rank)}" for rank in late)
        if late:
            raise TimeoutError(
                f"no answer of rank {', '.join(map(str, late))} of {M} in time: does every rank "
                f"make the same calls in the same order? Or allow more with timeout_s.\n{stood}"
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
    elif not said:
        hint = ": in a script, call run() under `if __name__ == '__main__':`"
    return f"rank {rank} of {M} died without an answer ({how}){hint}\n{said}"


def _log(folder: Path, rank: int, lines: int = 100) -> str:
    path = folder / f"{rank}.log"
    said = path.read_text(errors="replace").splitlines() if path.exists() else []
    return "\n".join(said[-lines:])
