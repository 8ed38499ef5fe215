"""Known-wrong answers to notebook 00 and the message each must get."""

ATTEMPTS = [
    ("0.1", "latency instead of rate", lambda n, w, b: n * w / b, "seconds per token"),
    ("0.1", "forgot the width", lambda n, w, b: b / n, "counts a weight as one byte"),
    ("0.1", "multiplied by the width", lambda n, w, b: b * w / n, "should mean fewer tokens"),
    ("0.1", "one machine's number", lambda n, w, b: 42.0, "got 42, expected"),
]
