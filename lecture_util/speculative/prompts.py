"""What the drafts are trained on and measured on: seeded prompts for a small chat model.

Training prompts are templates filled with topics; held-out prompts use other topics, so that no
held-out question was ever trained on. Grounded tasks hand the model a text whose words its answer
repeats: to copy, to rewrite, to extract from, or code to edit.
"""

from __future__ import annotations

import random

TEMPLATES = (
    "What is {}?",
    "Explain {} to a ten-year-old.",
    "Write a short paragraph about {}.",
    "Give me five facts about {}.",
    "List three advantages and three disadvantages of {}.",
    "Write a short story in which {} plays a part.",
    "Why does {} matter?",
    "Describe the history of {} in a few sentences.",
    "How would you teach {} to beginners?",
    "Write a letter to a friend about {}.",
    "What are common mistakes people make with {}?",
    "Write a short dialogue between two people who discuss {}.",
    "Compare {} with something similar.",
    "Give step-by-step instructions that have to do with {}.",
    "Write a poem about {}.",
    "Write a small Python function that has to do with {}.",
    "What questions would an expert ask about {}?",
    "Summarize what is known about {}.",
)
TOPICS = (
    "photosynthesis", "the moon", "bicycles", "bread", "volcanoes", "chess", "the printing press",
    "honey bees", "gravity", "the violin", "rain", "tea", "lighthouses", "the Roman Empire",
    "electric cars", "sleep", "whales", "maps", "glass", "friendship", "the stock market",
    "vaccines", "trees", "the human heart", "gardening", "cats", "earthquakes", "the alphabet",
    "mathematics", "fishing", "clocks", "deserts", "paper", "football", "the internet", "salt",
    "rivers", "dinosaurs", "music", "batteries", "snow", "castles", "money", "cooking", "libraries",
    "the sun", "robots", "coffee", "mountains", "swimming", "languages", "birds", "soil", "trains",
    "democracy", "painting", "sharks", "electricity", "running", "plastic", "the ocean", "bridges",
    "yoga", "wolves", "chocolate", "computers", "weather", "telescopes", "wheat", "time",
    "elephants", "ships", "memory", "rice", "airplanes", "poetry", "cheese", "the brain", "fire",
    "magnets", "insects", "recycling", "theatre", "shoes", "light", "apples", "wind power",
    "horses", "cities", "algebra", "frogs", "dreams", "sorting numbers", "prime numbers",
    "strings of text", "dates", "lists", "counting words", "temperature", "email", "fractions",
    "a shopping cart", "dictionaries", "rectangles",
)  # fmt: skip
HELD_TOPICS = (
    "rainbows", "owls", "the compass", "pasta", "glaciers", "the piano", "tides", "windmills",
    "kindness", "binary search", "spiders", "the steam engine", "tomatoes", "comets", "passports",
    "averages", "penguins", "silk", "the thermometer", "tennis",
)  # fmt: skip


def training_prompts(n: int, seed: int = 0) -> list[str]:
    """n different prompts, in a seeded order. Raises: ValueError beyond the number there are."""
    every = [template.format(topic) for template in TEMPLATES for topic in TOPICS]
    if not 1 <= n <= len(every):
        raise ValueError(f"n={n}: expected 1 to {len(every)} prompts")
    return random.Random(seed).sample(every, n)


def held_prompts(n: int = len(HELD_TOPICS)) -> list[str]:
    """n prompts on topics that no training prompt names, each by another template if it can."""
    if not 1 <= n <= len(HELD_TOPICS):
        raise ValueError(f"n={n}: expected 1 to {len(HELD_TOPICS)} prompts")
    return [TEMPLATES[i % len(TEMPLATES)].format(topic) for i, topic in enumerate(HELD_TOPICS[:n])]


NOTES = """Meeting of the garden club, 3 May.
Present: Ana, Boris, Chiara, Dev.
Ana will order twelve bags of soil before Friday.
The club bought a new hose for 38 euros.
Boris will mend the gate at the north end.
It rained, so the tour of the beds was put off.
Chiara will write to the school about the visit in June."""
LIGHTHOUSE = (
    "The lighthouse at Port Ellen was built in 1832. Its lamp burned whale oil for forty years, "
    "and the keeper climbed one hundred and twelve steps every evening to light it. In 1951 the "
    "lamp became electric, and the last keeper moved to the village."
)
BEES = (
    "The bees was busy all morning. They flies from the clover to the hive and back again. The "
    "keeper have put on a veil, and he lift the lid slowly so that the bees does not become angry. "
    "There is honey in every frame, and the children has been waiting since breakfast."
)
LETTER = (
    "Dear Ms. Okafor, thank you for your order of 14 October. The blue kettle (item K-207) was "
    "sent today and should reach 8 Harbour Lane on Friday. If the box is damaged, call 0555 0142 "
    "within ten days. Yours, Tomas Lind"
)
COUNTER = """```python
class Counter:
    def __init__(self, start):
        self.count = start

    def increase(self, step):
        self.count = self.count + step

    def decrease(self, step):
        self.count = self.count + step

    def show(self):
        print("The count is", self.count)
```"""
AREA = """```python
def area(width, height):
    \"\"\"The area of a rectangle.\"\"\"
    if width < 0 or height < 0:
        raise ValueError("a side is negative")
    return width * height


def perimeter(width, height):
    \"\"\"The length of its border.\"\"\"
    return 2 * (width + height)
```"""
GROUNDED = (
    ("copy", "Repeat the following text word for word.", LIGHTHOUSE),
    ("copy", "Repeat these notes word for word.", NOTES),
    ("rewrite", "Correct the grammar of this text.", BEES),
    ("rewrite", "Rewrite this letter so that it is more polite.", LETTER),
    ("extract", "Which sentence says when the lamp became electric? Quote it.", LIGHTHOUSE),
    ("extract", "List the tasks in these notes.", NOTES),
    ("code edit", "Fix the bug in this code and show the whole code.", COUNTER),
    ("code edit", "Write this code again and add a comment above each function.", AREA),
    ("summarize", "Summarize the following text in two sentences.", LIGHTHOUSE),
    ("summarize", "Summarize these notes in three sentences.", NOTES),
)


def grounded_prompts() -> list[tuple[str, str]]:
    """(task, prompt), two prompts to a task. The model is small, and not every answer is a good
    one: it quotes a whole text where one sentence was asked for, and overlooks the bug."""
    return [(task, f"{request}\n\n{text}") for task, request, text in GROUNDED]
