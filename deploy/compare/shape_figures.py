"""Steps and prompts of every published shape on one GPU, as a table: the first 8 layers of each, random weights.

    python3 shape_figures.py --looplane target/release/looplane
    python3 shape_figures.py --shapes qwen3-4b mistral-nemo-12b

Shares are those of the rate that the floor gives: bytes of weights, K and V over LIMIT_GB_S. Bars: of a model of 3B and
more 400 TFLOP/s for a prompt of 2048 tokens and 75 % at 32 rows; of a smaller one at 32 rows 1.4 times its step at 8.
"""

import argparse
import datetime
import subprocess
from pathlib import Path

from serving import LOOPLANE, report

LIMIT_GB_S = 4653
LAYERS, CONTEXT, STEPS, PROMPT = 8, 256, 64, 2048
SMALL = ["smollm2-135m", "smollm2-360m", "qwen2.5-0.5b", "qwen3-0.6b", "llama-1b", "qwen2.5-1.5b", "qwen3-1.7b"]
LARGE = ["qwen2.5-3b", "3b", "qwen3-4b", "qwen2.5-7b", "mistral-7b", "8b", "qwen3-8b", "mistral-nemo-12b", "qwen3-14b",
         "qwen2.5-14b", "mistral-small-24b", "qwen2.5-32b", "qwen3-32b", "70b", "qwen2.5-72b"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--looplane", type=Path, default=LOOPLANE, help="the binary to measure")
    parser.add_argument("--shapes", nargs="+", default=SMALL + LARGE, help="which (default: all)")
    args = parser.parse_args()
    name = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
                          capture_output=True, text=True).stdout.splitlines()[0]
    print(f"{name}, {datetime.date.today()}, {LAYERS} layers of each shape, {CONTEXT} positions\n\n| shape | 1 row | 8 "
          f"| 32 | 32 beside 8 | 64 | prompt of {PROMPT}, TFLOP/s |\n|---|---|---|---|---|---|---|", flush=True)
    for shape in args.shapes:
        of_shape = bench(args.looplane, shape)
        steps = {of["batch"]: of for of in of_shape["batches"]}
        shares = [(of["weight_bytes"] + of["kv_bytes"]) / LIMIT_GB_S / 1e6 / of["step_ms"] for of in steps.values()]
        cells = [f"{share:.0%}" for share in shares]
        cells.insert(3, f"{steps[32]['step_ms'] / steps[8]['step_ms']:.2f}x")
        print(f"| {shape} | {' | '.join(cells)} | {of_shape['prompt']['tflop_per_s']:.0f} |", flush=True)


def bench(looplane: Path, shape: str) -> dict:
    return report(looplane, "bench", "--device", "cuda", "--shape", shape, "--layers", LAYERS, "--context",
                  CONTEXT - STEPS // 2, "--batch", "1,8,32,64", "--steps", STEPS, "--prompt", PROMPT)


if __name__ == "__main__":
    main()
