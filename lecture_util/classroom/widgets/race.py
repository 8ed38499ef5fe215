"""race: the same answer with and without a cache, side by side (notebooks 01 and 03).

Run together, the two would compete for one machine. So each runs alone, a clock noting when every
token came, and then both are replayed side by side at the speed they had.
"""

from __future__ import annotations

import html
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import ipywidgets as widgets

from lecture_util.classroom.widgets.runs import Run, Stopped, stream_naive
from lecture_util.model.tokenizer import encode

NAMES = {"naive": "Without a cache", "cached": "With a KV cache"}
FRAME_S = 0.1
SPEEDS = {"true speed": 1, "2 times the speed": 2, "4 times the speed": 4}


class Race(widgets.VBox):
    """Two lanes, a Start and a Stop button. `record` and `play` work without a front end too."""

    def __init__(self, model, tokenizer, prompt: str | Sequence[int], max_new_tokens: int) -> None:
        from lecture_util.model.generate import check_prompts

        self.model, self.tokenizer, self.max_new_tokens = model, tokenizer, max_new_tokens
        if not isinstance(prompt, Iterable):
            raise TypeError(f"prompt is {prompt!r}: pass text, or a list of tokens")
        if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={max_new_tokens}: a race needs an int of at least 1")
        self.prompt = encode(tokenizer, prompt) if isinstance(prompt, str) else list(prompt)
        check_prompts(model, [self.prompt], max_new_tokens)
        self.shown_prompt = prompt if isinstance(prompt, str) else ""
        self.runs: dict[str, Run] = {}
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self.lanes = {name: widgets.HTML(layout=widgets.Layout(width="50%")) for name in NAMES}
        self.note = widgets.HTML()
        self.speed = widgets.Dropdown(description="replay at", options=SPEEDS)
        self.buttons = [
            _button("Start", "Run each alone, then replay both side by side", self.start),
            _button("Stop", "Stop where it is", self.stop),
            _button("Run anew", "Forget the recorded runs and race again", self.again),
        ]
        bar = widgets.HBox([*self.buttons, self.speed], layout=widgets.Layout(flex_flow="row wrap"))
        lanes = widgets.HBox([*self.lanes.values()], layout=widgets.Layout(width="100%"))
        super().__init__([bar, lanes, self.note])
        self._show(0.0)
        self._say(f"{len(self.prompt)} tokens of prompt, {max_new_tokens} to come. Press Start.")

    def __repr__(self) -> str:
        tokens = f"{self.max_new_tokens} tokens"
        return f"Race of {' and '.join(NAMES)}, {tokens}: open the notebook in JupyterLab to run it"

    @property
    def running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def same(self) -> bool:
        return len({run.tokens for run in self.runs.values()}) == 1

    def start(self) -> None:
        """Record unless that was done, then replay, beside the cells: the kernel stays free."""
        if not self.running:
            self._thread = threading.Thread(target=self._race, daemon=True)
            self._stop.clear()
            self._thread.start()

    def stop(self) -> None:
        self._stop.set()

    def again(self) -> None:
        if not self.running:
            self.runs = {}
            self.start()

    def _race(self) -> None:
        try:
            if not self.runs:
                self.record()
            self.play(self.speed.value)
        except Stopped:
            self._say("Stopped. Start begins again.")
        except Exception as error:  # a thread's error would be lost
            message = html.escape(f"{type(error).__name__}: {error}")
            self._say(f'<span style="color:#B00020"><b>{message}</b></span>')

    def record(self) -> dict[str, Run]:
        """Run each way alone and note when each token came; nothing is shown meanwhile.

        Raises: Stopped, with nothing kept.
        """
        from lecture_util.model.generate import stream

        eos = [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
        runs, ways = {}, {"naive": stream_naive, "cached": stream}
        for place, (name, way) in enumerate(ways.items(), start=1):
            about = f"Recording {place} of 2: {NAMES[name].lower()}, alone"
            self._say(f"{about} …")
            make = partial(way, self.model, self.prompt, eos=eos)
            note = partial(self._noted, about, [time.perf_counter()])
            runs[name] = Run.record(make, self.max_new_tokens, self.tokenizer, note)
        self.runs = runs
        return runs

    def _noted(self, about: str, last_said: list[float], count: int) -> None:
        """After each token: stop if asked to; on a slow machine, show that something happens."""
        self._check_stop()
        if time.perf_counter() - last_said[0] > 3:
            last_said[0] = time.perf_counter()
            self._say(f"{about}: {count} of {self.max_new_tokens} tokens …")

    def play(self, speed: float = 1.0) -> None:
        """Replay the recorded runs side by side; the clocks show seconds as they were recorded."""
        how = "true speed" if speed == 1 else f"{speed:g} times their speed"
        self._say(f"Each ran alone on this machine; replayed at {how}.")
        start, end_s, now_s = (
            time.perf_counter(),
            max(run.seconds for run in self.runs.values()),
            0.0,
        )
        while now_s < end_s:
            self._show(now_s)
            self._check_stop(FRAME_S)
            now_s = speed * (time.perf_counter() - start)
        self._show(end_s)
        self._say(self.verdict(how))

    def verdict(self, how: str = "true speed") -> str:
        """Who was faster, and whether both said the same."""
        naive, cached = self.runs["naive"], self.runs["cached"]
        ratio = naive.seconds / cached.seconds
        faster = "faster" if ratio >= 1 else "slower"
        text = (
            f"<b>{'Identical' if self.same else 'Different'} texts</b>, "
            f"{len(cached.tokens)} tokens: "
            f"{naive.seconds:.2f} s without a cache, {cached.seconds:.2f} s with one, "
            f"<b>{max(ratio, 1 / ratio):.1f} times {faster}</b>."
        )
        if not self.same:
            pairs = zip(naive.tokens, cached.tokens, strict=False)
            shared = next((i for i, (a, b) in enumerate(pairs) if a != b), "the shorter")
            text += (
                f" They part after {shared} tokens: rounding differs, and two tokens nearly tied."
            )
        return f"{text} Each ran alone on this machine; replayed at {how}."

    def _check_stop(self, wait_s: float = 0.0) -> None:
        if self._stop.wait(wait_s):
            raise Stopped

    def _show(self, now_s: float) -> None:
        for name, lane in self.lanes.items():
            lane.value = self._lane(name, self.runs.get(name), now_s)

    def _lane(self, name: str, run: Run | None, now_s: float) -> str:
        """The lane so many seconds after the request; text to come already keeps its place."""
        count = bisect_right(run.times_s, now_s) if run else 0
        clock_s = min(now_s, run.seconds) if run else 0.0
        rate = count / clock_s if count else 0.0
        text = run.texts[count - 1] if count else ""
        rest = run.texts[-1][len(text) :] if run else ""
        done = bool(run) and count == len(run.tokens)
        return LANE.format(
            name=NAMES[name], state="✓ done" if done else "", seconds=f"{clock_s:.1f}", count=count,
            rate=f"{rate:.1f}", share=100 * count / self.max_new_tokens,
            lines=2 + (len(self.shown_prompt) + 5 * self.max_new_tokens) // 55,
            prompt=html.escape(self.shown_prompt), text=html.escape(text), rest=html.escape(rest),
        )  # fmt: skip

    def _say(self, text: str) -> None:
        self.note.value = (
            f'<div role="status" style="font-size:1.15em; min-height:3.2em">{text}</div>'
        )


LANE = """\
<div role="group" aria-label="{name}" style="padding:4px 12px; border:1px solid #bbb;
border-radius:6px; margin-right:8px">
<div style="display:flex; justify-content:space-between; font-weight:600; font-size:1.15em">
<span>{name}</span><span style="color:#005a8c">{state}</span></div>
<div style="font-variant-numeric:tabular-nums; font-size:1.15em">
<b style="font-size:1.7em">{seconds} s</b> &nbsp; {count} tokens &nbsp; {rate} tok/s</div>
<div style="height:8px; background:#ddd; margin:6px 0">
<div style="height:8px; width:{share:.0f}%; background:#0072B2"></div></div>
<div style="line-height:1.35; white-space:pre-wrap; overflow-wrap:anywhere;
min-height:calc({lines} * 1.35em)"><span style="color:#666">{prompt}</span>{text}<span
style="visibility:hidden">{rest}</span></div>
</div>"""


def _button(description: str, tooltip: str, does: Callable[[], None]) -> widgets.Button:
    button = widgets.Button(description=description, tooltip=tooltip)
    button.on_click(lambda _button: does())
    return button


def race(model, tokenizer, prompt: str | Sequence[int], max_new_tokens: int = 48) -> Race:
    """Generate from the prompt without and with a cache, and watch both side by side.

    prompt: text, or tokens such as `chat(tokenizer, question)`. Decoding is greedy.

    Example: `race(model, tokenizer, "The three primary colours are", max_new_tokens=48)`
    Raises:  PromptError if the model cannot continue the prompt by so many tokens.
    """
    return Race(model, tokenizer, prompt, max_new_tokens)
