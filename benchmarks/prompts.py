"""Start, memory and draws of large prompt data: JSON lines, Parquet and a datasets folder.

python benchmarks/prompts.py [--rows 10000000] [--draws 10000] [--folder DIR]

The data are written first, into --folder or a temporary one: 1.3 GB of JSON lines with 10 million rows.
Each row of the table is a fresh process, which opens the data, looks at rows as a run does at its start,
and draws prompts; it fails unless each is the row that its number says. Rows are ids, so that no tokenizer
is in the times.
"""

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.correction import machine_name
from benchmarks.quiet import only_tables

PART = 1_000_000
"""Rows that are made at a time."""
KINDS = {"JSON lines": "rows.jsonl", "Parquet": "rows.parquet", "datasets folder": "saved"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--draws", type=int, default=10_000)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--open", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.open:
        print(json.dumps(measured(options.open, options.draws)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        write(folder, options.rows)
        print(
            f"{datetime.date.today()}, {options.rows} rows, pyarrow {pa.__version__}, {machine_name('cpu')}\n"
        )
        print(
            "| data | size (MB) | start (s) | draw (ms) | slowest (ms) | memory (MB) | mapped (MB) | peak "
            "(MB) |"
        )
        print("|---|---|---|---|---|---|---|---|")
        for kind, name in KINDS.items():
            command = [sys.executable, __file__, "--open", folder / name, "--draws", str(options.draws)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(done.stderr)
            found = json.loads(done.stdout.splitlines()[-1])
            print(
                f"| {kind} | {found['size']:.0f} | {found['start']:.2f} | {found['draw']:.3f} "
                f"| {found['slowest']:.0f} | {found['held']:.0f} | {found['mapped']:.0f} | "
                f"{found['peak']:.0f} |"
            )


def write(folder: Path, rows: int) -> None:
    """The same rows in each form: 16 ids and a label, which is the row's number."""
    (folder / "saved").mkdir(exist_ok=True)
    state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_indices_data_files": None}
    (folder / "saved/state.json").write_text(json.dumps(state))
    schema = pa.schema({"input_ids": pa.list_(pa.int64()), "label": pa.string()})
    stream = pa.ipc.new_stream(folder / "saved/data-00000-of-00001.arrow", schema)
    ids = np.random.RandomState(0).randint(0, 100_000, (PART, 16))
    texts = [", ".join(map(str, row)) for row in ids.tolist()]
    parquet = pq.ParquetWriter(folder / "rows.parquet", schema)
    with stream, parquet, open(folder / "rows.jsonl", "w") as lines:
        for first in range(0, rows, PART):
            count = min(PART, rows - first)
            labels = [str(row) for row in range(first, first + count)]
            lists = pa.ListArray.from_arrays(np.arange(0, 16 * count + 1, 16, np.int32), ids[:count].ravel())
            table = pa.table([lists, pa.array(labels)], schema=schema)
            parquet.write_table(table)
            stream.write_table(table, max_chunksize=1000)  # as datasets does
            lines.writelines(
                f'{{"input_ids": [{text}], "label": "{label}"}}\n'
                for text, label in zip(texts, labels, strict=False)
            )


def measured(path: Path, draws: int) -> dict[str, float]:
    """Seconds, milliseconds and megabytes of one process; memory is beyond that of its imports."""
    from megatron_rl_corr.data.prompt_files import open_prompts
    from megatron_rl_corr.data.prompt_format import PromptFormat, PromptLimits
    from megatron_rl_corr.mcore.checks.prompt_checks import check_rows

    before = memory()
    times = [time.perf_counter()]
    data = open_prompts([str(path)], PromptFormat(limits=PromptLimits(100_000, 1000)))
    check_rows(data, "--rollout-prompts")
    times.append(time.perf_counter())
    # The last of one epoch and the first of the next: two permutations are held.
    for number in range(len(data) - draws // 2, len(data) + draws // 2):
        assert data.can_be_drawn(number)
        prompt = data.at(number)
        assert prompt.label == str(prompt.index) and len(prompt.input_ids) == 16
        times.append(time.perf_counter())
    each = np.diff(times)
    found = memory()
    size = sum(file.stat().st_size for file in (path.rglob("*") if path.is_dir() else [path]))
    return {
        "size": size / 1e6,
        "start": each[0],
        "draw": float(np.median(each[1:])) * 1e3,
        "slowest": each[1:].max() * 1e3,
        "held": (found["RssAnon"] - before["RssAnon"]) / 1e3,
        "mapped": (found["RssFile"] - before["RssFile"]) / 1e3,
        "peak": (found["VmHWM"] - before["VmRSS"]) / 1e3,
    }


def memory() -> dict[str, int]:
    """This process's memory, in kB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return {
        name: int(value.split()[0])
        for name, _, value in (line.partition(":") for line in lines)
        if name in ("VmRSS", "VmHWM", "RssAnon", "RssFile")
    }


if __name__ == "__main__":
    with only_tables():
        main()
