"""What the explorers let you choose: an accelerator, a batch, a context."""

from __future__ import annotations

import ipywidgets as widgets

from lecture_util.roofline import ACCELERATORS, Accelerator, this_machine

THIS_MACHINE = "this machine"  # measured when first chosen, which takes some seconds
BATCHES = [2**k for k in range(11)]
CONTEXTS = [2**k for k in range(7, 18)]
SHAPE = "llama-2-13b"


def accelerator_named(name: str) -> Accelerator:
    """One of the table's, or this machine as measured."""
    return this_machine() if name == THIS_MACHINE else ACCELERATORS[name]


def accelerators(value: str) -> widgets.Dropdown:
    return menu("accelerator", [*ACCELERATORS, THIS_MACHINE], value)


def menu(description: str, options: list[str], value: str) -> widgets.Dropdown:
    if value not in options:
        raise ValueError(f"{description} is {value!r}: choose from {', '.join(options)}")
    return widgets.Dropdown(description=description, options=options, value=value)


def slider(description: str, options: list[int], value: int) -> widgets.SelectionSlider:
    labelled = [(f"{option:,}", option) for option in options]
    return widgets.SelectionSlider(description=description, options=labelled, value=value)
