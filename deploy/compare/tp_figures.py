"""The figures of several GPUs in docs/benchmarks.md: measures every shape on 1, 2, 4 and 8 of them, prints the table,
and keeps what the scaling model reads.

    python3 tp_figures.py --looplane target/release/looplane --dir figures
    target/release/looplane scaling figures/*.json --plot docs/scaling.svg

Needs a machine with H200s; what fits its number of GPUs is measured (--gpus N: only groups of N, into a folder that has
those of the others), in about two minutes on four. Runs that need fewer GPUs than there are take place side by side,
each on GPUs of its own. Bars are those of the issue that groups were built for: milliseconds that a step must take at
most; the floor is the bytes that a GPU reads over LIMIT_GB_S.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from gpu_figures import LIMIT_GB_S, RUNS as RUNS_OF_ONE
from serving import LOOPLANE

# A first step that sees so many tokens makes the mean of a run's steps somewhat less than 512 (the table says how
# much): batches grow the sequences by turns.
CONTEXT, STEPS = 400, 128
# Of (shape, GPUs, batch): what a step must take, and what vLLM 0.24 takes, in ms.
BARS = {
    **{(shape, 1, batch): bar for shape, context, bars in RUNS_OF_ONE if context == 512 for batch, bar in bars.items()},
    ("8b", 2, 1): (1.95, 3.46), ("8b", 2, 8): (None, 3.56), ("8b", 4, 1): (1.15, 2.65), ("8b", 4, 8): (1.35, 2.77),
    ("8b", 4, 32): (2.0, 3.02), ("70b", 4, 1): (8.3, 12.39), ("70b", 4, 8): (None, 12.64),
}


@dataclass
class Run:
    """One process of the bench."""

    shape: str
    ranks: int
    batches: str = "1,8"
    shards: int | None = None

    @property
    def name(self):
        slices = f"_of_{self.shards}" if self.shards else ""
        return f"{self.shape}_tp{self.ranks}{slices}_batch{self.batches.replace(',', '-')}"

    def command(self, args):
        command = [
            args.looplane.resolve(), "bench", "--device", "cuda", "--shape", self.shape, "--tp", self.ranks, "--batch",
            self.batches, "--context", CONTEXT, "--steps", STEPS
        ]
        command += ["--shard-of", self.shards] if self.shards else []
        return [str(part) for part in [*command, "--json", args.dir / f"{self.name}.json"]]


# In the order in which they begin, as GPUs become free: the largest groups, which would wait for all others, then the
# longest first. 70b takes two GPUs for its weights alone.
RUNS = [
    Run("70b", 8),
    Run("70b", 8, "32"),
    Run("8b", 8),
    Run("8b", 8, "32"),
    Run("70b", 8, shards=16),
    Run("8b", 8, shards=16),
    Run("70b", 4),
    Run("70b", 4, "16,32,64"),
    Run("70b", 2),
    Run("8b", 2),
    Run("8b", 4),
    Run("8b", 4, "32"),
    Run("llama-1b", 4),
    Run("8b", 1),
    Run("llama-1b", 1),
    Run("llama-1b", 2),
    Run("8b", 4, shards=16),
    Run("70b", 4, shards=16),
    Run("70b", 2, shards=8),
    Run("8b", 2, shards=8),
]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--looplane", type=Path, default=LOOPLANE, help="the binary to measure")
    parser.add_argument("--dir", type=Path, default=Path("tp-figures"),
                        help="where the JSON files go (default: tp-figures)")
    parser.add_argument("--only", default="", help="runs whose name begins with one of these, by commas")
    parser.add_argument("--gpus", type=int, help="runs of groups of so many GPUs alone")
    args = parser.parse_args()
    args.dir.mkdir(parents=True, exist_ok=True)
    gpus = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
                          capture_output=True, text=True, check=True).stdout.splitlines()
    names = tuple(args.only.split(","))
    wanted = [run for run in RUNS if args.gpus in (None, run.ranks) and run.name.startswith(names)]
    missing = [run.name for run in wanted if run.ranks > len(gpus)]
    wanted = [run for run in wanted if run.ranks <= len(gpus)]
    if missing:
        print(f"not measured, as there are {len(gpus)} GPUs: {', '.join(missing)}", file=sys.stderr)
    if not wanted:
        sys.exit("nothing is left to be measured")
    failed = measure(args, wanted, len(gpus))
    print(f"{len(gpus)} x {gpus[0]}, {datetime.date.today()}\n")
    print(row(["shape", "GPUs", "batch", "mean context", "floor, ms", "**ms a step**", "of the floor's rate", "must",
               "vLLM 0.24"]))
    print(row(["---"] * 9))
    for run in wanted:
        if run not in failed:
            rows_of(run, json.loads((args.dir / f"{run.name}.json").read_text()))
    sys.exit(bool(failed))


def measure(args, waiting, gpus):
    """Starts runs as GPUs become free, and returns those that failed."""
    waiting, free, under_way, failed, begun = list(waiting), set(range(gpus)), [], [], time.monotonic()
    while waiting or under_way:
        for run in list(waiting):
            if run.ranks <= len(free):
                mine = sorted(free)[: run.ranks]
                free -= set(mine)
                waiting.remove(run)
                log = open(args.dir / f"{run.name}.log", "w")
                environment = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, mine))}
                process = subprocess.Popen(run.command(args), stdout=log, stderr=log, env=environment)
                under_way.append((run, mine, process))
        time.sleep(0.05)
        for run, mine, process in [of for of in under_way if of[2].poll() is not None]:
            under_way.remove((run, mine, process))
            free |= set(mine)
            print(
                f"{time.monotonic() - begun:5.1f} s: {run.name} on GPUs {mine}: "
                f"{'failed' if process.returncode else 'done'}",
                file=sys.stderr, flush=True)
            log = args.dir / f"{run.name}.log"
            if process.returncode:
                failed.append(run)
                print(log.read_text()[-2000:], file=sys.stderr)
            else:
                log.unlink()
    return failed


def rows_of(run, report):
    """The table's rows of a run."""
    for of in report["batches"]:
        floor = (of["weight_bytes"] + of["kv_bytes"]) / LIMIT_GB_S / 1e6
        must, vllm = BARS.get((run.shape, run.ranks, of["batch"]), (None, None)) if run.shards is None else (None, None)
        shape = f"{run.shape}, stream of {run.shards} GPUs" if run.shards else run.shape
        missed = " (missed)" if must and of["step_ms"] > must else ""
        cells = [
            shape, run.ranks, of["batch"], round(of["mean_context"]), f"{floor:.2f}", f"**{of['step_ms']:.3g}**",
            f"{floor / of['step_ms']:.0%}", f"{must:.2f}{missed}" if must else "", vllm or ""
        ]
        print(row(cells))


def row(cells):
    return "| " + " | ".join(map(str, cells)) + " |"


if __name__ == "__main__":
    main()
