"""What the prefix cache is worth: the first token behind a prompt that was just served, and conversations, as tables.

    python3 prefix_figures.py --looplane target/release/looplane                     # 8B on a GPU
    python3 prefix_figures.py --model DIR --device cpu --prompt 1500 --turns 4 --streams 4 --turn 100

Without --model the checkpoint of serving_figures.py is made up, which needs torch and safetensors. The prompt is sent
as text and as token ids, once cold and ten times more. In a conversation each turn sends all of it before: --turns of
--turn tokens and answers of 64, with the cache and without.
"""

import argparse
import datetime
import json
import random
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from serving import LOOPLANE, PORT, Server, completion_request, report

HERE = Path(__file__).resolve().parent
WORDS = "memory loop stream layer token page socket weight phase plan row tile bound rank step slot".split()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--looplane", type=Path, default=LOOPLANE, help="the binary to measure")
    parser.add_argument("--model", type=Path, default=Path("/dev/shm/looplane-8b"), help="a checkpoint that can chat")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--prompt", type=int, default=16_000, help="tokens of the prompt (default: 16000)")
    parser.add_argument("--turns", type=int, default=8, help="of a conversation (default: 8)")
    parser.add_argument("--turn", type=int, default=1000, help="tokens of a turn (default: 1000)")
    parser.add_argument("--streams", type=int, default=16, help="conversations at one time (default: 16)")
    parser.add_argument("--seconds", type=float, default=60,
                        help="conversations are measured for so long; they all begin at once (default: 60)")
    parser.add_argument("options", nargs="*", help="of the server, behind --")
    args = parser.parse_args()
    if not (args.model / "config.json").exists():
        subprocess.run([sys.executable, HERE / "random_model.py", "8b", args.model], check=True)
    print(f"{args.model.name} on {args.device}, {datetime.date.today()}\n", flush=True)
    options = ("--model", args.model, "--device", args.device, *args.options)
    with Server(args.looplane, *options):
        print("| prompt | tokens, cached | cold, ms | again, median of ten, ms |\n|---|---|---|---|", flush=True)
        for kind, prompt in prompts(args.prompt):
            (cold, _, _), *again = [first_token(prompt) for _ in range(11)]
            _, tokens, cached = again[-1]
            print(f"| {kind} | {tokens}, {cached} | {cold:.1f} | {statistics.median(ms for ms, *_ in again):.1f} |",
                  flush=True)
    print(f"\n| {args.streams} conversations of {args.turns} turns of {args.turn} tokens | first token, mean / p99, ms "
          "| tokens/s | cached |\n|---|---|---|---|", flush=True)
    for mode in ("off", "on"):
        with Server(args.looplane, *options, "--prefix-cache", mode):
            of = report(args.looplane, "loadtest", "--target", f"http://127.0.0.1:{PORT}", "--endpoint", "chat",
                        "--concurrency", args.streams, "--duration", f"{args.seconds}s", "--turns", args.turns,
                        "--prompt-tokens", args.turn, "--max-tokens", 64, "--ignore-eos", "--warmup", args.streams)
            print(f"| cache {mode} | {of['mean_ttft_ms']:.1f} / {of['p99_ttft_ms']:.1f} | "
                  f"{of['output_throughput']:.0f} | {100 * of['cached_input_share']:.0f} % |", flush=True)


def prompts(tokens: int) -> list[tuple[str, object]]:
    """A prompt of about so many tokens as text, and one of exactly so many ids."""
    chance = random.Random(1)
    words = [chance.choice(WORDS) for _ in range(tokens)]
    _, some, _ = first_token(" ".join(words[-200:]))
    text = " ".join(words[:tokens * 200 // some])
    return [("text", text), ("token ids", [chance.randrange(100, 1000) for _ in range(tokens)])]


def first_token(prompt) -> tuple[float, int, int]:
    """Milliseconds to an answer of one token, tokens of the prompt, and how many of them were cached."""
    request = completion_request(prompt=prompt, max_tokens=1, temperature=0)
    begun = time.perf_counter()
    usage = json.load(urllib.request.urlopen(request, timeout=120))["usage"]
    spent = (time.perf_counter() - begun) * 1e3
    return spent, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


if __name__ == "__main__":
    main()
