"""A course of one tiny notebook, 91, for tests of building and grading."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

SOURCE = '''\
# %% [markdown]
# # Toy

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "slide"}
from lecture_util.classroom.exercise import check, exercise

print("set up")

# %%
@exercise("91.1", title="Double", minutes=1, trains="doubling")
def double(answer, c):
    x = c.int(3, 99)
    c.equal(c.call(answer, x), 2 * x, wrong={"you squared it": x * x})


@exercise("91.2", title="Negate", minutes=1, trains="signs")
def negate(answer, c):
    x = c.int(3, 99)
    c.equal(c.call(answer, x), -x)


# %%
def twice(x):
    ### BEGIN SOLUTION
    return 2 * x
    ### END SOLUTION

# %%
check("91.1", twice)

# %% [markdown]
# Now the sign.

# %%
def minus(x):
    """Turn the sign."""
    ### BEGIN SOLUTION
    return -x
    ### END SOLUTION

# %%
check("91.2", minus)
'''


def write(root: Path, source: str = SOURCE) -> Path:
    """A course in `root`; the source's path."""
    (root / "solutions").mkdir(parents=True, exist_ok=True)
    path = root / "solutions" / "91_toy.py"
    path.write_text(source, encoding="utf-8")
    return path
