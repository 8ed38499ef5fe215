"""block_table_explorer (notebook 10): the block allocator, to be played with."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import ipywidgets as widgets

from lecture_util.classroom.widgets.explore import Explorer
from lecture_util.classroom.widgets.page_story import Story
from lecture_util.classroom.widgets.page_svg import pages_svg
from lecture_util.classroom.widgets.rounds import marked
from lecture_util.classroom.widgets.stepping import Keys

MOST_PAGES, MOST_TOKENS = 16, 8
FIRST = "the cat sat on the mat"
NOBODY = "none"


class BlockTableExplorer(Explorer):
    """The explorer; `story` has the Blocks, the tables and what was said last.

    Its methods do what the buttons do, so that a cell can play too.
    """

    def __init__(self, story: Story) -> None:
        self.story = story
        self.words = widgets.Text(
            value=FIRST, description="words", placeholder="words: each is a token",
            layout=widgets.Layout(width="30em"),
        )  # fmt: skip
        self.chosen = widgets.Dropdown(
            description="sequence", options=[NOBODY], layout=widgets.Layout(width="12em")
        )
        self.picture = widgets.HTML(layout=widgets.Layout(width="100%"))
        self.picture.add_class("stepped")
        self.presses = Keys(
            "Block tables: arrow keys step; right writes a word, left takes one back"
        )
        self.presses.observe(
            lambda change: self._pressed(change["new"] - change["old"]), names="moves"
        )
        self.buttons = {name: self._button(name, *what) for name, what in self._actions().items()}
        super().__init__(
            self._draw,
            {"sequence": self.chosen},
            [widgets.HBox(list(self.buttons.values())), self.picture, self.presses],
        )
        box = self.children[0]
        first = widgets.HBox([self.words, self.chosen])
        self.chosen.layout.width = "14em"
        box.children = (first, *box.children[1:])

    def begin(self, text: str) -> None:
        """A sequence with these words; the prefix cache is asked first."""
        self._do(lambda: self.story.begin(text), choose=-1)

    def write(self, name: str, text: str) -> None:
        """Append words."""
        self._do(lambda: self.story.write(name, text))

    def fork(self, name: str) -> None:
        """Another sequence over the same pages."""
        self._do(lambda: self.story.fork(name), choose=-1)

    def free(self, name: str) -> None:
        """The sequence is over."""
        self._do(lambda: self.story.free(name))

    def evict(self) -> None:
        """Forget the idle page that was used least recently."""
        self._do(self.story.evict)

    def look_up(self, text: str) -> None:
        """Which pages of these words the prefix cache has."""
        self._do(lambda: self.story.look_up(text))

    def undo(self) -> None:
        """As before the last event."""
        self._do(self.story.undo)

    def _actions(self) -> dict[str, tuple[str, Callable[[], None]]]:
        name = lambda: self.chosen.value  # noqa: E731
        return {
            "begin": ("begin a sequence with the words", lambda: self.begin(self.words.value)),
            "write": ("append the next of the words to the sequence", self._write_next),
            "fork": ("another sequence over the same pages", lambda: self.fork(name())),
            "free": ("the sequence is over", lambda: self.free(name())),
            "look up": ("which pages begin would find", lambda: self.look_up(self.words.value)),
            "evict": ("free the page idle for longest", self.evict),
            "undo": ("take the last event back", self.undo),
        }

    def _button(self, name: str, tooltip: str, action: Callable[[], None]) -> widgets.Button:
        button = widgets.Button(
            description=name, tooltip=tooltip, layout=widgets.Layout(width="6.5em")
        )
        button.add_class("stepped")
        button.on_click(lambda _button: action())
        return button

    def _write_next(self) -> None:
        """One word: they take turns, so that pressing again and again goes on."""
        words = self.words.value.split()
        table = self.story.tables.get(self.chosen.value)
        word = words[len(table or ()) % len(words)] if words else ""
        self.write(self.chosen.value, word)

    def _pressed(self, moves: int) -> None:
        for _ in range(abs(moves)):
            self._write_next() if moves > 0 else self.undo()

    def _do(self, action: Callable[[], None], choose: int | None = None) -> None:
        error = ""
        try:
            action()
        except ValueError as raised:  # nobody to write to, no words
            error = str(raised)
        names, chosen = list(self.story.tables) or [NOBODY], self.chosen.value
        if choose is not None and not self.story.refused and not error:
            chosen = names[choose]
        with self.quiet():
            self.chosen.options = names
            self.chosen.value = chosen if chosen in names else names[-1]
        self.redraw()
        if error:
            self.say(f"<b>{marked(error, 300)}</b>")

    def _draw(self, sequence: str) -> str:
        story = self.story
        for name in ("write", "fork", "free"):
            self.buttons[name].disabled = not story.tables
        self.buttons["undo"].disabled = not story.past
        self.picture.value = pages_svg(story, sequence)
        blocks = story.blocks
        lent = blocks.num_pages - blocks.available
        counts = (
            f"{lent} of {blocks.num_pages} pages lent, {len(blocks.free)} free, "
            f"{len(blocks.idle)} idle."
        )
        mark = "✗ " if story.refused else ""
        return f"<b>{mark}{marked(story.said, 300)}.</b><br>{counts}"


def block_table_explorer(
    num_pages: int = 8,
    page_size: int = 4,
    *,
    events: Sequence[str] = (),
    prefix_caching: bool = True,
) -> BlockTableExplorer:
    """Begin, write, fork, free and evict, and see tables, counts and pages follow (notebook 10).

    A word is a token, and all that is written counts as computed. At most 16 pages of 8.

    events: what happens before a reader comes: "begin the cat sat", "fork A", "write B down",
            "free A", "evict", "look up the cat". What the pages have no room for is told, not
            raised.

    Raises: ValueError or TypeError naming what came.
    """
    for name, value, most in (
        ("num_pages", num_pages, MOST_PAGES), ("page_size", page_size, MOST_TOKENS)
    ):  # fmt: skip
        if type(value) is not int or not 1 <= value <= most:
            raise ValueError(f"{name} is {value!r}: expected a whole number, 1 to {most}")
    if isinstance(events, str) or not all(isinstance(event, str) for event in events):
        raise TypeError(f'events are {events!r}: pass a list such as ["begin the cat", "fork A"]')
    story = Story(num_pages, page_size, prefix_caching)
    for event in events:
        story.tell(event)
    explorer = BlockTableExplorer(story)
    explorer._do(lambda: None)
    return explorer
