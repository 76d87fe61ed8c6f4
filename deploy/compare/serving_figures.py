"""The serving figures of docs/benchmarks.md: prompts and answers of fixed lengths, closed loops, as a table.

    python3 serving_figures.py --looplane target/release/looplane
    python3 serving_figures.py --tp 4 -- --itl-target-ms 12        # a group of 4; options of the server behind --

Needs a GPU that holds the model and, to make it up, torch and safetensors. Rows name the length of a prompt, that of an
answer and the streams; each is measured for --seconds, after as many requests as there are streams. These begin in step
and drift apart, so that tokens a second swing; beside them stands what follows from mean times: in a closed loop
streams times the tokens of an answer over the time of one.
"""

import argparse
import datetime
import subprocess
import sys
from pathlib import Path

from serving import LOOPLANE, PORT, Server, report

HERE = Path(__file__).resolve().parent
# prompt, answer, streams: (must, tokens a second of vLLM 0.24 on one H200)
ROWS = {
    (128, 256, 1): (None, 205),
    (128, 256, 16): (3700, 3025),
    (128, 256, 64): (10_300, 9355),
    (128, 256, 256): (19_500, 18_704),
    (1024, 128, 16): (2100, 1982),
    (1024, 128, 64): (3600, 3503),
    (1024, 128, 256): (4200, 4159),
    (8192, 128, 1): (None, None),
    (8192, 128, 8): (None, 414),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--looplane", type=Path, default=LOOPLANE, help="the binary to measure")
    parser.add_argument("--dir", type=Path, default=Path("/dev/shm/looplane-8b"),
                        help="where the checkpoint is written (16 GB)")
    parser.add_argument("--seconds", type=float, default=15, help="a row is measured for so long (default: 15)")
    parser.add_argument("--tp", type=int, default=1, help="GPUs")
    parser.add_argument("--rows", nargs="*", help="rows to measure, as 1024:128:16 (default: all)")
    parser.add_argument("options", nargs="*", help="of the server, behind --")
    args = parser.parse_args()
    rows = [tuple(map(int, row.split(":"))) for row in args.rows] if args.rows else list(ROWS)
    if not (args.dir / "generation_config.json").exists():
        subprocess.run([sys.executable, HERE / "random_model.py", "8b", args.dir], check=True)
    name = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
                          capture_output=True, text=True).stdout.splitlines()[0]
    print(f"{args.tp} x {name}, {datetime.date.today()}\n\n| prompt -> answer, streams | tokens/s | by times | must | "
          "vLLM 0.24 | ITL mean / p99, ms | first token, median, ms |\n|---|---|---|---|---|---|---|", flush=True)
    with Server(args.looplane, "--model", args.dir, "--device", "cuda", "--tp", args.tp, *args.options):
        for prompt, answer, streams in rows:
            of = loadtest(args, prompt, answer, streams)
            must, vllm = ROWS.get((prompt, answer, streams), (None, None)) if args.tp == 1 else (None, None)
            answer_s = (of["mean_ttft_ms"] + (answer - 1) * of["mean_itl_ms"]) / 1e3
            by_times = streams * answer / answer_s
            print(f"| {prompt} -> {answer}, {streams} | {of['output_throughput']:.0f} | {by_times:.0f} | "
                  f"{must or ''} | {vllm or ''} | {of['mean_itl_ms']:.2f} / {of['p99_itl_ms']:.1f} | "
                  f"{of['median_ttft_ms']:.0f} |", flush=True)


def loadtest(args: argparse.Namespace, prompt: int, answer: int, streams: int) -> dict:
    return report(args.looplane, "loadtest", "--target", f"http://127.0.0.1:{PORT}", "--endpoint", "completions",
                  "--concurrency", streams, "--duration", f"{args.seconds}s", "--prompt-tokens", prompt,
                  "--max-tokens", answer, "--ignore-eos", "--warmup", streams,
                  # No prompt of another row: they would be cached.
                  "--seed", prompt << 20 | answer << 10 | streams)


if __name__ == "__main__":
    main()
