"""The table of notebook 12: one model, one machine, every technique in turn and together.

    python benchmarks/together.py            the whole table, on twelve questions about one text:
                                             ten minutes on two CPU cores
    python benchmarks/together.py --small    the same on three short ones, in a minute or so

Every row is predicted twice, by two peaks of this machine and by a few forwards that were timed on
questions which are not in the table, and then measured; benchmarks/results/together.json keeps all
three. With --rounds 3 the rows run in turns, and the run of median speed is kept.
"""

import argparse
import os
from pathlib import Path

import psutil
import torch
from record import RESULTS, today, versions, write

from lecture_util.model.text import english_split
from lecture_util.model.weights import REFERENCE, load, load_tokenizer
from lecture_util.roofline.hardware import processor, this_machine
from lecture_util.together.table import ROWS, make_table, markdown
from lecture_util.together.variants import Variants, calibration
from lecture_util.together.workload import SERVED, assistant

RECORD = RESULTS / "together.json"
QUESTIONS = 4
WINDOWS = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--small", action="store_true", help="three requests, a quarter as long")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each row (1)")
    parser.add_argument("--out", type=Path, help=f"where to write (by default {RECORD.name})")
    args = parser.parse_args()
    out = args.out or (None if args.small else RECORD)
    load_before = psutil.getloadavg()[0]
    tokenizer = load_tokenizer(REFERENCE)
    study_S, held_BT = english_split(tokenizer)
    variants = Variants(load(REFERENCE), calibration(study_S))
    machine = this_machine(str(variants.model.device))
    on_gpu = variants.model.device.type == "cuda"
    count, scale, windows = (3, 0.25, 8) if args.small else (SERVED, 1.0, WINDOWS)
    workload = assistant(tokenizer, count, scale=scale)
    questions = assistant(tokenizer, QUESTIONS, SERVED, scale=scale)
    rows = make_table(variants, workload, questions, held_BT[:windows], ROWS, machine, args.rounds)
    record = {
        "date": today(),
        "hardware": machine.name if on_gpu else f"{processor()}, {torch.get_num_threads()} threads",
        "device": str(variants.model.device),
        "load_per_core_before": round(load_before / (os.cpu_count() or 1), 2),
        "bandwidth_bytes_per_s": machine.bandwidth_bytes_per_s,
        "flops_per_s": dict(machine.flops_per_s),
        "versions": versions("transformers"),
        "workload": {
            "requests": len(workload),
            "prompt_tokens": [len(p) for p in workload.prompts],
            "new_tokens": list(workload.new_tokens),
            "rounds": args.rounds,
            "windows": windows,
        },
        "rows": [row.record() for row in rows],
    }
    print(markdown(record["rows"]))
    if out is not None:
        write(out, record)


if __name__ == "__main__":
    main()
