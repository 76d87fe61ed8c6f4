"""What drafts are worth to a trained model: tokens a second of five tasks with and without them, as a table.

    python3 draft_tasks.py --model DIR --device cpu -- --tp 1

A task is a chat with a greedy answer of --tokens tokens at most. Servers with and without drafts take turns, and their
answers must be the same.
"""

import argparse
import datetime
import json
import statistics
import sys
import time
import urllib.request
from pathlib import Path

from draft_figures import counted, in_turns
from serving import LOOPLANE, PORT

ROOT = Path(__file__).resolve().parents[2]
FILE = (ROOT / "worker/src/rope.rs").read_text()[:2600]
TEXT = (ROOT / "ARCHITECTURE.md").read_text()[:2600]
ORDERS = "\n".join(f"On {day} {name} from {city} ordered {count} {thing} for {price} euros." for
                   day, name, city, count, thing, price in [
    ("Monday", "Anna Berg", "Oslo", 3, "lamps", 120), ("Tuesday", "Bert Moss", "Rome", 12, "chairs", 840),
    ("Tuesday", "Cleo Hart", "Paris", 1, "table", 310), ("Friday", "Dana Wolf", "Madrid", 7, "shelves", 455),
    ("Saturday", "Emil Stone", "Vienna", 2, "mirrors", 90), ("Sunday", "Fay Brook", "Lisbon", 5, "stools", 175)])
RUNS = [f'{{"tool": "read_file", "path": "src/{name}.rs", "lines": [1, 80]}}' for name in ("main", "config", "server")]


def user(text: str) -> dict:
    return {"role": "user", "content": text}


TASKS = {
    "chat": [user("Explain to a new colleague what a cache is, and when it does harm. Three short paragraphs.")],
    "code editing": [user(f"Here is a file:\n\n```rust\n{FILE}\n```\n\nRename `theta` to `angle` in it. Answer with "
                          "the whole file and nothing else.")],
    "extraction into JSON": [user(f"{ORDERS}\n\nWrite these orders as a JSON array of objects with the keys day, name, "
                                  "city, count, thing and price. Answer with JSON and nothing else.")],
    "summary with quotes": [user(f"{TEXT}\n\nSummarise this text in five points. Under each point quote, word by word, "
                                 "the sentence that it rests on.")],
    "turns of an agent": [
        user("Tools are called by a line of JSON. Read the first 80 lines of main, config and server, one by one, then "
             "say which of them opens a socket."),
        {"role": "assistant", "content": RUNS[0]}, user("fn main() { config::read(); server::run(); }"),
        {"role": "assistant", "content": RUNS[1]}, user("pub fn read() { std::fs::read_to_string(\"config.toml\"); }"),
    ],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--looplane", type=Path, default=LOOPLANE, help="the binary to measure")
    parser.add_argument("--model", type=Path, required=True, help="a checkpoint that can chat")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=300, help="of an answer at most (default: 300)")
    parser.add_argument("--rounds", type=int, default=3, help="servers with and without drafts (default: 3)")
    parser.add_argument("options", nargs="*", help="of the server, behind --")
    args = parser.parse_args()
    print(f"{args.model.name} on {args.device}, {datetime.date.today()}\n\n| task | tokens | without, tokens/s | with "
          "| tokens a step | accepted of drafted |\n|---|---|---|---|---|---|", flush=True)
    found = {task: {"off": [], "on": []} for task in TASKS}
    options = ("--model", args.model, "--device", args.device, *args.options)
    for mode in in_turns(args.rounds, args.looplane, *options):
        for task, messages in TASKS.items():
            answer(messages, 1)  # its prompt is cached
            found[task][mode].append(answer(messages, args.tokens))
    for task, runs in found.items():
        answers = {text for mode in runs.values() for text, *_ in mode}
        if len(answers) > 1:
            sys.exit(f"drafts changed the answer of {task}")
        speed = {mode: statistics.median(tokens / seconds for _, tokens, seconds, *_ in runs[mode]) for mode in runs}
        _, tokens, _, drafted, accepted = runs["on"][-1]
        print(f"| {task} | {tokens} | {speed['off']:.1f} | {speed['on']:.1f}, {speed['on'] / speed['off']:.2f}x | "
              f"{tokens / (tokens - accepted):.2f} | {accepted} of {drafted} |", flush=True)


def answer(messages: list[dict], tokens: int) -> tuple[str, int, float, int, int]:
    """An answer, its tokens, seconds that it took, tokens that were drafted and accepted."""
    body = {"messages": messages, "max_tokens": tokens, "temperature": 0}
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}/v1/chat/completions", json.dumps(body).encode(),
                                     {"content-type": "application/json"})
    before, begun = counted(), time.perf_counter()
    found = json.load(urllib.request.urlopen(request, timeout=600))
    seconds, after = time.perf_counter() - begun, counted()
    count = found["usage"]["completion_tokens"]
    return found["choices"][0]["message"]["content"], count, seconds, after[0] - before[0], after[1] - before[1]


if __name__ == "__main__":
    main()
