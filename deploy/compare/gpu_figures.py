"""The figures of one GPU in docs/benchmarks.md: measures them and prints the tables.

    python3 gpu_figures.py --looplane target/release/looplane
    python3 gpu_figures.py --looplane target/release/looplane --tp 4     # HTTP through 4 GPUs; steps: tp_figures.py

Needs one H200 (any GPU that Looplane takes will do, but the bars are an H200's), 40 GB of memory and, for HTTP, torch
and safetensors. It takes some minutes. Bars are those of the issue that the kernel was built for: milliseconds that it
must reach, and the floor: bytes of weights, K and V over LIMIT_GB_S.
"""

import argparse
import datetime
import subprocess
import sys
from pathlib import Path

from serving import LOOPLANE, PORT, Server, report

HERE = Path(__file__).resolve().parent
LIMIT_GB_S = 4653
# Steps that `bench` warms up for. All rows of a run are equally long, because every batch has a run of its own.
WARM_UP = 2
KV_BYTES_PER_TOKEN = {"8b": 131072, "llama-1b": 32768}
# shape, context, {batch: (must, vLLM 0.24 at shorter context)}, tokens of a prompt that is timed in the first run
RUNS = [
    ("8b", 512, {1: (3.60, 4.88), 8: (3.75, 5.00), 32: (4.6, 5.46), 64: (5.4, 6.02), 128: (6.4, None),
                 256: (9.5, None)}, 2048),
    ("8b", 8192, {1: (None, None)}, 8192),
    ("llama-1b", 512, {1: (0.60, None), 8: (None, None), 64: (None, None)}, 2048),
]
MUST_OF_FLOOR_AT_8192 = 1.10
MUST_PROMPT_MS = {("8b", 2048): 55}
MUST_ITL = {"mean": 1.03, "p99": 1.5}
MUST_ITL_OF_GROUPS = {"mean": 1.05, "p99": 1.5}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--looplane", type=Path, default=LOOPLANE, help="the binary to measure")
    parser.add_argument("--steps", type=int, default=256, help="steps of each batch (default: 256)")
    parser.add_argument("--dir", type=Path, default=Path("/dev/shm/looplane-8b"),
                        help="where the checkpoint for HTTP is written (16 GB)")
    parser.add_argument("--tp", type=int, default=1, help="over 1: only HTTP, through a group of so many GPUs")
    parser.add_argument("--no-http", action="store_true", help="only the loop")
    args = parser.parse_args()
    name = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
                          capture_output=True, text=True).stdout.splitlines()[0]
    print(f"{name}, {datetime.date.today()}\n", flush=True)
    if args.tp > 1:
        return http(args, bench(args, "8b", 512, 1, None)["batches"][0]["step_ms"], MUST_ITL_OF_GROUPS)
    print(row(["shape", "mean context", "batch", "floor, ms", "**ms a step**", f"of {LIMIT_GB_S} GB/s",
               "of the run's read limit", "must", "vLLM 0.24"]))
    print(row(["---"] * 9), flush=True)
    step_ms, prompts = None, []
    for shape, context, bars, prompt_tokens in RUNS:
        for number, (must, vllm) in bars.items():
            measured = bench(args, shape, context, number, prompt_tokens if number == 1 else None)
            batch = measured["batches"][0]
            floor = (batch["weight_bytes"] + batch["kv_bytes"]) / LIMIT_GB_S / 1e6
            if context == 8192:
                must = MUST_OF_FLOOR_AT_8192 * floor
            tokens = batch["kv_bytes"] / batch["batch"] / KV_BYTES_PER_TOKEN[shape]
            cells = [
                shape, f"{tokens:.0f}", batch["batch"], f"{floor:.2f}", f"**{batch['step_ms']:.3g}**",
                f"{floor / batch['step_ms']:.1%}", f"{batch['share_of_best_read']:.1%}"
            ]
            print(row(cells + [f"{must:.2f}" if must else "", vllm or ""]), flush=True)
            if measured.get("prompt"):
                prompts.append((shape, measured["prompt"]))
            if step_ms is None:
                step_ms, limit = batch["step_ms"], measured["read"]
    print(f"\nread limit {limit['best_gb_s']:.0f} GB/s at best, {limit['median_gb_s']:.0f} in the median pass")
    for shape, prompt in prompts:
        must = MUST_PROMPT_MS.get((shape, prompt["tokens"]))
        print(f"prompt of {prompt['tokens']} tokens ({shape}): {prompt['ms']:.1f} ms, {prompt['tokens_per_s']:.0f} "
              f"tokens a second, {prompt['tflop_per_s']:.0f} TFLOP/s" + (f"; must {must} ms" if must else ""))
    if not args.no_http:
        http(args, step_ms, MUST_ITL)


def bench(args: argparse.Namespace, shape: str, context: int, batch: int, prompt: int | None) -> dict:
    """A run whose steps see `context` tokens in the mean."""
    first = context - WARM_UP - args.steps // 2
    command = [
        args.looplane, "bench", "--device", "cuda", "--shape", shape, "--context", first, "--batch", batch, "--steps",
        args.steps, "--tp", args.tp
    ]
    return report(*command, *(["--prompt", prompt] if prompt else []))


def http(args: argparse.Namespace, step_ms: float, must: dict[str, float]) -> None:
    """Streams of one client from a checkpoint of the 8B shape, beside the kernel's own step of the same minutes."""
    if not (args.dir / "generation_config.json").exists():
        subprocess.run([sys.executable, HERE / "random_model.py", "8b", args.dir], check=True)
    with Server(args.looplane, "--model", args.dir, "--device", "cuda", "--tp", args.tp) as server:
        print(
            f"\nHTTP, 8B checkpoint of {sum(f.stat().st_size for f in args.dir.iterdir()) / 1e9:.1f} GB: ready after "
            f"{server.ready_s:.1f} s"
        )
        for prompt_tokens in (128, 2048):
            figures = loadtest(args, prompt_tokens)
            mean, p99 = figures["mean_itl_ms"], figures["p99_itl_ms"]
            print(
                f"one stream, prompts of {prompt_tokens} tokens: first token {figures['median_ttft_ms']:.0f} ms; "
                f"between tokens {mean:.2f} ms in the mean ({mean / step_ms:.3f}x the kernel's {step_ms:.2f}, "
                f"must {must['mean']}), p99 {p99:.2f} ms ({p99 / step_ms:.2f}x, must {must['p99']})", flush=True)


def loadtest(args: argparse.Namespace, prompt_tokens: int) -> dict:
    return report(args.looplane, "loadtest", "--target", f"http://127.0.0.1:{PORT}", "--endpoint", "completions",
                  "--concurrency", 1, "--requests", 6, "--prompt-tokens", prompt_tokens, "--max-tokens", 250,
                  "--ignore-eos")


def row(cells: list) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


if __name__ == "__main__":
    main()
