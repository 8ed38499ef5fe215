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
