"""Checks of notebook 00: how exercises work."""

from lecture_util.classroom.exercise import exercise


@exercise(
    "0.1",
    title="A bound on tokens per second",
    minutes=3,
    trains="turning a sentence into a formula",
    hints=(
        "How many bytes does one token cost? Start with the size of all weights.",
        "Seconds per token is bytes per token over bytes per second. You want its inverse.",
        "bandwidth_bytes_per_s / (num_params * bytes_per_weight)",
    ),
)
def _(answer, c):
    cases = [
        (c.int(10**8, 10**11), bytes_per_weight, c.float(1e10, 1e13))
        for bytes_per_weight in (2, 4, 0.5)
    ]
    c.like(
        answer,
        lambda n, w, b: b / (n * w),
        cases,
        rtol=1e-9,
        wrong={
            "that is seconds per token: its inverse is tokens per second": lambda n, w, b: (
                n * w / b
            ),
            "that counts a weight as one byte: multiply by bytes_per_weight": lambda n, w, b: b / n,
            "more bytes per weight should mean fewer tokens per second": lambda n, w, b: b * w / n,
        },
    )
