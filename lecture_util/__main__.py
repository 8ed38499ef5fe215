"""Command line of the course: `python -m lecture_util COMMAND`, one of those listed below."""

from __future__ import annotations

import sys
from importlib import import_module

COMMANDS = {
    "doctor": ("lecture_util.classroom.doctor", "what this machine can do, and what is missing"),
    "build": ("lecture_util.classroom.build", "notebooks from their sources"),
    "grade": ("lecture_util.classroom.grade", "a folder of submissions"),
    "present": ("lecture_util.classroom.present", "a notebook as slides, on the live kernel"),
    "rehearse": ("lecture_util.classroom.rehearse", "time a notebook and measure its slides"),
    "figures": ("lecture_util.classroom.figures", "draw the figures of images/"),
    "corrections": ("lecture_util.classroom.corrections", "CORRECTIONS.md from the notebooks"),
    "merge": ("lecture_util.merging.merge", "checkpoints, by a recipe in mergekit's YAML"),
    "model": ("lecture_util.model.weights", "fetch and convert the reference model"),
}


def main(argv: list[str] | None = None) -> int:
    """Hand the arguments to the command's own module, the only one that is imported."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: python -m lecture_util COMMAND [...]\n")
        for name, (_, about) in COMMANDS.items():
            print(f"  {name:<11} {about}")
        print("\nEach command explains itself: python -m lecture_util COMMAND --help")
        return 0 if argv else 2
    if argv[0] not in COMMANDS:
        print(f"{argv[0]!r} is not a command: expected {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    return import_module(COMMANDS[argv[0]][0]).main(argv[1:])


if __name__ == "__main__":
    sys.exit(main())
