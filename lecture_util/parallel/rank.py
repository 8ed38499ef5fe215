"""The life of one process among M. What it needs before torch is imported imports no torch."""

from __future__ import annotations

import ctypes
import faulthandler
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path

PR_SET_PDEATHSIG = 1  # of Linux's prctl: the signal we get when the thread that started us ends


def live(
    job: bytes,
    answer: connection.Connection,
    rank: int,
    M: int,
    backend: str,
    folder: str,
    deadline: float,
    threads: int,
) -> None:
    """Answer (succeeded, when, result or what went wrong).

    In the folder, the log is there as soon as we run, and a file `begun` as soon as the job does.
    """
    die_with_parent()
    log = open(log_of(folder, rank), "w", buffering=1)  # noqa: SIM115, as long as we live
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout.reconfigure(line_buffering=True)
    # At the deadline: say where we stand, and die, even within a collective.
    left_s = max(0.1, deadline - time.time())
    faulthandler.dump_traceback_later(left_s, exit=True, file=log)
    try:
        message = (True, time.time(), _result(job, rank, M, backend, folder, left_s, threads))
    except BaseException as error:
        what = f"{type(error).__name__}: {error}"
        message = (False, time.time(), (what, traceback.format_exc()))
    answer.send_bytes(pickle.dumps(message))  # before our connections close, and others fail of it
    answer.close()


def log_of(folder: str | Path, rank: int) -> Path:
    return Path(folder, f"{rank}.log")


def begun(folder: str | Path, rank: int) -> Path:
    return Path(folder, f"{rank}.begun")


def die_with_parent() -> None:
    """From now on this process ends when its parent does, even if that one is killed.

    By the system on Linux; elsewhere by a thread, which a computation in C may hold up.
    """
    parent = multiprocessing.parent_process()
    if sys.platform != "linux" or ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL):
        threading.Thread(target=_follow, args=(parent,), daemon=True).start()
    if os.getppid() != parent.pid:  # gone before we asked
        os._exit(1)


def _follow(parent) -> None:
    parent.join()
    os._exit(1)


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
    begun(folder, rank).touch()
    result = pickle.dumps(fn(mesh, *args))
    dist.barrier()  # no rank leaves while another may still be reading from it
    return result
