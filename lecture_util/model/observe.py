"""Look at what flows through a model while it runs: the inputs and outputs of its modules.

Calibration, quantization and pruning all ask the same question of a few windows of text: how large
is what this layer reads, or writes? `observe` answers it, forward only, without touching the model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

See = Callable[[str, Tensor, Tensor], None]  # a module's name, its first input, its output


@contextlib.contextmanager
def observe(model: nn.Module, names: Iterable[str], see: See) -> Iterator[None]:
    """While the block runs, call see(name, input, output) after each call of the named modules.

    Tensors arrive detached, as they are, not copied: reduce them, or clone what is kept. Hooks are
    taken off at the end, whatever happens.

    Raises: ValueError for a name that is no module of the model.
    """
    modules = dict(model.named_modules())
    names = [names] if isinstance(names, str) else list(dict.fromkeys(names))  # each once
    for name in names:
        if name not in modules:
            near = [known for known in modules if known.rpartition(".")[2] == name][:2]
            like = near or [known for known in modules if known][:2]
            raise ValueError(f"no module {name!r} in the model: expected names such as {like}")

    def hook(name: str):
        def seen(module, inputs, output):
            see(name, inputs[0].detach(), output.detach())

        return seen

    handles = []
    try:
        for name in names:
            handles.append(modules[name].register_forward_hook(hook(name)))
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def run(model: nn.Module, tokens_BT: Tensor, rows: int = 8) -> None:
    """Send windows of tokens through the model for what observers see; `rows` at a time.

    The head is left out where the model has `features`: it costs a fifth of a small model.
    Raises: ValueError if there is nothing to send.
    """
    if tokens_BT.ndim != 2 or tokens_BT.numel() == 0:
        raise ValueError(
            f"tokens_BT has shape {tuple(tokens_BT.shape)}: a calibration set needs at least one "
            "row of at least one token, as text.windows draws them"
        )
    forward = getattr(model, "features", model)
    for part in tokens_BT.split(rows):
        forward(part)
