"""Asks servers of several group sizes the same, and compares tokens and log-probabilities to the last bit.

    python3 same_bits.py --looplane target/release/looplane --tp 1,2,4

Needs as many GPUs as the largest group (or --device cpu). Requests differ in length and sampling and run side by side.
Another seed must give another answer, or this would show nothing. Exits with 1 where answers differ.
"""

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from serving import LOOPLANE, Server, completion

# What must not differ of an answer.
FIELDS = ["text", "finish_reason", "logprobs"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--looplane", type=Path, default=LOOPLANE, help="the binary")
    parser.add_argument("--model", type=Path, help="a checkpoint (default: the demo model)")
    parser.add_argument("--device", default="cuda", help="default: cuda")
    parser.add_argument("--tp", default="1,2,4", help="sizes of groups (default: 1,2,4)")
    parser.add_argument("--requests", type=int, default=48, help="requests, all at once (default: 48)")
    parser.add_argument("options", nargs="*", help="of the servers, behind --")
    args = parser.parse_args()
    first, differ = None, 0
    for size in args.tp.split(","):
        options = ["--device", args.device, "--tp", size, *(["--model", args.model] if args.model else []),
                   *args.options]
        with Server(args.looplane, *options), ThreadPoolExecutor(args.requests) as pool:
            answers = list(pool.map(ask, range(args.requests)))
            if ask(1, seed=12345)[0] == answers[1][0]:
                sys.exit("another seed gives the same answer: these requests show nothing")
        first = first or answers
        equal = sum(mine == theirs for mine, theirs in zip(answers, first))
        differ += args.requests - equal
        print(
            f"tp {size}: {equal} of {args.requests} answers, "
            f"{sum(len(answer[0]['logprobs']['tokens']) for answer in answers)} tokens, are those of the first group, "
            f"fingerprint {answers[0][1]}",
            flush=True)
    sys.exit(bool(differ))


def ask(number: int, seed: int = 7) -> tuple[dict, str]:
    """An answer and the fingerprint of what decides its bits; every third is greedy."""
    prompt = " ".join(f"w{number * 31 + i}" for i in range(1 + number * 7 % 90))
    answer = json.load(
        completion(prompt=prompt, max_tokens=40 + number * 13 % 150, temperature=0.0 if number % 3 == 0 else 0.9,
                   top_p=0.95, seed=seed + number, logprobs=5, ignore_eos=True))
    return {field: answer["choices"][0][field] for field in FIELDS}, answer["system_fingerprint"]


if __name__ == "__main__":
    main()
