"""What the README says of a GPU: a block between two marks, made from results/gpu.json alone."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README, RECORD = ROOT / "README.md", ROOT / "benchmarks" / "results" / "gpu.json"
BEGIN, END = "<!-- gpu:begin -->", "<!-- gpu:end -->"
UNMEASURED = "These are not measured on a GPU yet."


def refresh(readme: Path = README, record: Path = RECORD) -> int:
    """Write the block anew, and nothing else."""
    text = readme.read_text(encoding="utf-8")
    new = replaced(text, block(load(record)))
    if new != text:
        scratch = readme.with_suffix(".part")
        scratch.write_text(new, encoding="utf-8")
        scratch.replace(readme)
    print(f"{readme.name}: the GPU's block is {'as it was' if new == text else 'written anew'}")
    return 0


def load(record: Path) -> dict | None:
    return json.loads(record.read_text(encoding="utf-8")) if record.is_file() else None


def replaced(text: str, new: str) -> str:
    """Raises: ValueError unless each mark is there once, in order."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"expected {BEGIN} and after it {END}, each of them once, in the README")
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{new}\n{END}{rest.partition(END)[2]}"


def block(record: dict | None) -> str:
    """Markdown: the card and its peaks, then a table each of kernels, steps and load."""
    if record is None or record["dry"]:
        return UNMEASURED
    sections, versions = record["sections"], record["versions"]
    used = ", ".join(
        f"{name} {versions[key]}"
        for name, key in (("torch", "torch"), ("Triton", "triton"), ("Python", "python"))
        if versions.get(key)
    )
    parts = [f"{record['card']}, {record['date']}; {used}."]
    parts += filter(None, [
        peaks(_rows(sections, "peaks")),
        tests(sections.get("tests")),
        kernels(sections),
        steps(sections),
        load_table(_rows(sections, "engine")),
        troubles(sections),
    ])  # fmt: skip
    return "\n\n".join(parts)


def peaks(rows: list[dict]) -> str:
    row = rows[-1] if rows else {}
    if "flops_per_s" not in row:
        return ""
    sheet = row.get("datasheet")
    rates = row["flops_per_s"]
    text = f"Measured in that run: a copy moves {row['bandwidth_bytes_per_s'] / 1e9:,.0f} GB/s"
    if sheet:
        text += f" ({row['bandwidth_bytes_per_s'] / sheet['bandwidth_bytes_per_s']:.0%} of the "
        text += "data sheet)"
    if "bf16" in rates:
        text += f", a bf16 matmul runs at {rates['bf16'] / 1e12:,.0f} TFLOP/s"
        if sheet and "bf16" in sheet["flops_per_s"]:
            text += f" ({rates['bf16'] / sheet['flops_per_s']['bf16']:.0%})"
    return text + "."


def tests(found: dict | None) -> str:
    if found is None or not found["rows"]:
        return ""
    count = {o: sum(r["outcome"] == o for r in found["rows"]) for o in ("passed", "failed")}
    skipped = len(found["rows"]) - sum(count.values())
    return (
        f"Of the tests marked gpu {count['passed']} passed, {count['failed']} failed and "
        f"{skipped} were skipped."
    )


def kernels(sections: dict) -> str:
    """One line each: the shapes a decode step is made of, and the largest."""
    lines = []
    for row in _rows(sections, "int4_linear"):
        if row["way"] in ("int4, Triton", "NF4, Triton") and row["layer"] == "gate_up":
            kind = row["way"].split(",")[0]
            lines.append((f"{kind} product, {row['F']} × {row['D']}, B={row['B']}", row))
    for row in _rows(sections, "paged_attention"):
        if row.get("way") == "pages, Triton":
            shape = f"B={row['B']}, S={row['S']:,}, pages of {row['P']}"
            lines.append((f"paged attention, {shape}", row))
    for row in _rows(sections, "selective_scan"):
        if row["way"] == "Triton":
            shape = f"E={row['E']}, Z={row['Z']}, B={row['B']}, T={row['T']:,}"
            lines.append((f"selective scan, {shape}", row))
    body = [
        f"| {name} | {row['median_s'] * 1e6:,.1f} | {row['bytes_per_s'] / 1e9:,.0f} | "
        f"{_percent(row['share_of_copy'])} | {_percent(row['roofline'])} |"
        for name, row in lines
    ]
    return _table("| Triton kernel | µs | GB/s | of a copy | of the roofline |", body)


def steps(sections: dict) -> str:
    body = []
    for shape in ("llama-2-13b", "llama-3-8b"):
        rows = [row for row in _rows(sections, shape) if "skipped" not in row]
        for B in sorted({row["B"] for row in rows}):
            plain, graphs = (
                next((r for r in rows if r["B"] == B and r["way"] == way), None)
                for way in ("plain launches", "CUDA graphs")
            )
            if plain is None or graphs is None:
                continue
            predicted = "" if graphs["predicted_s"] is None else _ms(graphs["predicted_s"])
            ratios = " | ".join(
                "" if graphs[key] is None else f"{graphs[key]:.2f}"
                for key in ("ratio", "datasheet_ratio")
            )
            body.append(
                f"| {shape}, B={B}, S={graphs['S']:,} | {predicted} | {_ms(plain['median_s'])} | "
                f"{_ms(graphs['median_s'])} | {ratios} |"
            )
    head = (
        "| decode step, bf16 | predicted, ms | plain, ms | CUDA graphs, ms | graphs / predicted | "
        "graphs / data sheet |"
    )
    return _table(head, body)


def load_table(rows: list[dict]) -> str:
    body = [
        f"| {row['requests']} requests, {row['slots']} slots, {row['way']} | "
        f"{row['tokens_per_s']:,.0f} | {row['ttft_p50_s']:.2f} | {row['tpot_p50_s'] * 1e3:.1f} |"
        for row in rows
    ]
    head = "| our engine, llama-3-8b's shape | tok/s | TTFT p50, s | a token p50, ms |"
    return _table(head, body)


def troubles(sections: dict) -> str:
    """What failed or was left out, with its reason: nothing is hidden."""
    lines = []
    for name, found in sections.items():
        if found["status"] != "measured":
            lines.append(f"- {name}: {found['status']}, {found['reason']}")
        lines += [
            f"- {name}, B={row['B']}, S={row['S']:,}: left out, {row['skipped']}"
            for row in found["rows"]
            if "skipped" in row
        ]
    return "\n".join(lines)


def _rows(sections: dict, name: str) -> list[dict]:
    return sections.get(name, {}).get("rows", [])


def _table(head: str, body: list[str]) -> str:
    return "\n".join([head, "|---" * (head.count("|") - 1) + "|", *body]) if body else ""


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"
