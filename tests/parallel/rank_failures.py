"""Functions that fail in one of their processes. No imports but torch's: they start sooner."""

import os
import signal

import torch
import torch.distributed as dist


def raise_on_one(mesh, pids):
    """Rank 1 raises; the other one would never end."""
    note(pids)
    if mesh.get_local_rank() == 1:
        print("rank one was here")
        raise KeyError("a fault of rank one")
    signal.pause()


def die_on_one(mesh, pids):
    note(pids)
    if mesh.get_local_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(3))


def never_meet(mesh, pids):
    note(pids)
    if mesh.get_local_rank() == 0:
        dist.all_reduce(torch.ones(3))
    else:
        signal.pause()


def unsendable(mesh, pids):
    note(pids)
    return lambda: 1


def note(folder):
    open(os.path.join(folder, str(os.getpid())), "w").close()
