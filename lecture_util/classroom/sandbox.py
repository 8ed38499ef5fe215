"""Run a submission's notebook in processes of its own, and leave none of them behind.

The parent starts a child in a session of its own, with a time limit on the whole run; the child
executes the notebook and appends what happens to a log, so that what was reached is known however
the run ends. A mark in the environment finds every process that the run started, also those that
left its process group or outlived their parent.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import nbformat
import psutil
from nbformat import NotebookNode

from .build import kernel_env
from .notebook import dumps, grade_id, is_check

MARK = "LECTURE_GRADE_RUN"
START = "import sys; from lecture_util.classroom.sandbox import run_one; run_one(*sys.argv[1:])"


def run(nb: NotebookNode, timeout_s: float, seed: str, root: Path) -> list[dict]:
    """Execute a notebook within `timeout_s`; the events of its run, in order.

    {"cell": name} a cell began; {"check": id, "line": text} a check cell ended; {"stop": why} the
    run ended before its time.
    """
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="grade-", ignore_cleanup_errors=True) as scratch:
        # The notebook sees the course's files beside it, and writes into the scratch folder.
        cwd = Path(scratch, "notebooks")
        cwd.mkdir()
        for entry in root.iterdir():
            if entry.name[0] != "." and entry.name != "notebooks":
                Path(scratch, entry.name).symlink_to(entry)
        book, log = Path(scratch, ".book.ipynb"), Path(scratch, ".events.jsonl")
        book.write_text(dumps(nb), encoding="utf-8")
        env = kernel_env(root, **{MARK: mark, "LECTURE_SEED": seed, "JUPYTER_RUNTIME_DIR": scratch})
        errors = Path(scratch, ".errors.txt")
        stop = child = None
        try:
            with errors.open("w", encoding="utf-8") as stderr:
                # A file, not a pipe: a stray process would hold a pipe open after the run's end.
                child = subprocess.Popen(
                    [sys.executable, "-c", START, str(book), str(log), str(cwd)],
                    env=env,
                    cwd=cwd,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=stderr,
                    start_new_session=True,
                )
            if child.wait(timeout=timeout_s):
                last = (errors.read_text(encoding="utf-8").splitlines() or ["no message"])[-1]
                stop = f"the run ended with {child.returncode} ({last})"
        except subprocess.TimeoutExpired:
            stop = f"timed out after {timeout_s:g} s"
        finally:  # also when a signal ends the grading
            _kill_marked(mark)
            if child is not None:
                child.kill()
                child.wait()
        lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
        events = [json.loads(line) for line in lines if line.endswith("}")]
        return [*events, {"stop": stop}] if stop else events


def run_one(book: str, log: str, cwd: str) -> None:
    """The child: execute a notebook, appending each cell begun and each check's line to `log`."""
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, DeadKernelError

    nb = nbformat.read(book, as_version=4)
    with open(log, "a", encoding="utf-8", buffering=1) as file:

        def say(**event: str) -> None:
            file.write(json.dumps(event) + "\n")

        def begin(cell: NotebookNode, cell_index: int) -> None:
            say(cell=f"cell {grade_id(cell) or cell_index}")

        def end(cell: NotebookNode, cell_index: int, execute_reply: dict) -> None:
            if is_check(cell):
                say(check=exercise_of(cell), line=printed(cell))

        client = NotebookClient(
            nb,
            timeout=None,
            kernel_name="python3",
            allow_errors=True,
            store_widget_state=False,
            resources={"metadata": {"path": cwd}},
            on_cell_start=begin,
            on_cell_executed=end,
        )
        try:
            client.execute()
        except (DeadKernelError, CellExecutionError) as error:
            say(stop="kernel died" if isinstance(error, DeadKernelError) else "stopped by an error")


def printed(cell: NotebookNode) -> str:
    """What a check cell printed, or the error that kept it from printing."""
    for output in cell.outputs:
        if output.output_type == "error":
            return f"{output.ename}: {output.evalue}"
    return "".join(o.text for o in cell.outputs if o.get("name") == "stdout").strip()


def exercise_of(cell: NotebookNode) -> str:
    return grade_id(cell).removeprefix("check-")


def _kill_marked(mark: str) -> None:
    """Kill every process of a submission, also those that left its group or lost their parent."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == mark and process.status() != "zombie":
                    process.suspend()  # so that it starts no child while the others are found
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        if not found:
            return
        for process in found:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(found, timeout=2)
