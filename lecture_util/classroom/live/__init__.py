"""The stepper: `step(fn, *args)` runs a function once and lets a class walk through it.

directives  what the comments `# @inspect`, `@clear`, `@stepover`, `@hide` ask for
snapshot    a value as a small picture that keeps nothing of it
recording   what a run leaves behind; trace and frame make it
walk        forward, back, over, into, out, to a line
arguments   fresh copies for each run, and what is typed into the boxes
widget      all of it in a notebook's cell; stepper.js draws and listens
"""

from .widget import Stepper, step

__all__ = ["Stepper", "step"]
