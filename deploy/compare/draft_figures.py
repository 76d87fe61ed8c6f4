"""What drafts are worth: tokens a second with and without them, of texts that repeat themselves or do not, as a table.

    python3 draft_figures.py --looplane target/release/looplane                      # 8B on a GPU

Checkpoints of --shape are made up (random_model.py), which needs torch and safetensors: texts of one repeat themselves
every 50 tokens, as their prompts do already, those of the other never. Servers with and without drafts take turns;
their answers must be the same.
"""

import argparse
import datetime
import json
import re
import statistics
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from serving import LOOPLANE, PORT, Server, completion

HERE = Path(__file__).resolve().parent
OFF = json.dumps({"method": "suffix", "num_speculative_tokens": 0})
PERIODS = {"repeats itself": 50, "never repeats": 100_000}
GREEDY = {"temperature": 0}
# Three of five drafted tokens hold (random_model.py).
COIN = {"temperature": 2, "top_k": 2}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--looplane", type=Path, default=LOOPLANE, help="the binary to measure")
    parser.add_argument("--shape", default="8b", help="of the model (default: 8b)")
    parser.add_argument("--dir", type=Path, default=Path("/dev/shm"), help="where checkpoints are made up")
    parser.add_argument("--tokens", type=int, default=1000, help="of an answer (default: 1000)")
    parser.add_argument("--rounds", type=int, default=3, help="servers with and without drafts (default: 3)")
    parser.add_argument("options", nargs="*", help="of the server, behind --")
    args = parser.parse_args()
    print(f"{args.shape}, answers of {args.tokens} tokens, {datetime.date.today()}\n\n| text, streams, prompt "
          "| without, tokens/s | with | accepted of drafted |\n|---|---|---|---|", flush=True)
    for text, period in PERIODS.items():
        model = args.dir / f"{args.shape}-{period}"
        if not (model / "config.json").exists():
            subprocess.run([sys.executable, HERE / "random_model.py", args.shape, model, "--period", str(period)],
                           check=True)
        rows = [(1, 100, GREEDY), (1, 8000, GREEDY), (8, 100, GREEDY)]
        # Rows have salts of their own, so that no answer is one that was given before; but for the last.
        rows += [(1, 100, COIN), (8, 100, COIN)] if period == 50 else [(64, 100, GREEDY), (8, 100, GREEDY)]
        salts = [str(row) for row in range(len(rows))]
        answered = None if period == 50 else len(rows) - 1
        if answered:
            salts[answered] = salts[rows.index(rows[answered])]
        found = {row: {mode: [] for mode in ("off", "on")} for row in range(len(rows))}
        for mode in in_turns(args.rounds, args.looplane, "--model", model, *args.options):
            for row, (streams, prompt, sampling) in enumerate(rows):
                found[row][mode].append(measure(args.tokens, streams, prompt, period, sampling, salts[row]))
        for row, (streams, prompt, sampling) in enumerate(rows):
            speed = {mode: statistics.median(speed for speed, *_ in found[row][mode]) for mode in ("off", "on")}
            _, drafted, accepted, answers = found[row]["on"][-1]
            if any(other != answers for runs in found[row].values() for *_, other in runs):
                sys.exit("drafts changed an answer")
            kind = "was answered before" if row == answered else text if sampling is GREEDY else "holds by 60 %"
            print(f"| {kind}, {streams}, {prompt} | {speed['off']:.0f} | {speed['on']:.0f}, "
                  f"{speed['on'] / speed['off']:.2f}x | {accepted} of {drafted} |", flush=True)


def in_turns(rounds: int, looplane: Path, *options):
    """Runs servers without and with drafts, each so often: "off" or "on" while one runs."""
    for _ in range(rounds):
        for mode in ("off", "on"):
            drafts = ["--speculative-config", OFF] if mode == "off" else []
            with Server(looplane, *options, *drafts):
                yield mode


def measure(tokens: int, streams: int, prompt: int, period: int, sampling: dict,
            salt: str) -> tuple[float, int, int, list[str]]:
    """Tokens a second behind the first of each stream, tokens drafted and accepted, answers."""
    before = counted()

    def stream(number: int) -> tuple[float, str]:
        first = 1000 * (number + 1)
        ids = [(first // period * period + (first + i) % period) for i in range(prompt)]
        answer = completion(prompt=ids, max_tokens=tokens, ignore_eos=True, stream=True, seed=number,
                            cache_salt=salt, **sampling)
        events = [(time.perf_counter(), line) for line in answer if line.startswith(b"data: {")]
        text = "".join(json.loads(line[6:])["choices"][0]["text"] for _, line in events)
        return (tokens - 1) / (events[-1][0] - events[0][0]), text

    with ThreadPoolExecutor(streams) as pool:
        answers = list(pool.map(stream, range(streams)))
    after = counted()
    return sum(speed for speed, _ in answers), after[0] - before[0], after[1] - before[1], [text for _, text in answers]


def counted() -> tuple[int, int]:
    text = urllib.request.urlopen(f"http://127.0.0.1:{PORT}/metrics").read().decode()
    found = [re.search(rf"^vllm:spec_decode_num_{of}_tokens_total\S* (\d+)", text, re.M)
             for of in ("draft", "accepted")]
    return tuple(int(of.group(1)) for of in found)


if __name__ == "__main__":
    main()
