"""Kills workers of a group in the middle of streams, at random times, and looks at what is left.

    python3 kill_ranks.py --looplane target/release/looplane --tp 4 --rounds 8

Needs as many GPUs as ranks (or --device cpu). Each round streams a completion, kills one worker with SIGKILL and checks
that the other workers of the group end within a second, that the stream goes on with the text of a calm run, and that a
new group answers. In the end: no process and no GPU memory is left. Exits with 1 if any of that is not so.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from serving import LOOPLANE, Server, completion

END_LIMIT_S = 1.0
PROMPT = {
    "prompt": "A long story:", "max_tokens": 1500, "temperature": 1.0, "seed": 5, "ignore_eos": True, "stream": True
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--looplane", type=Path, default=LOOPLANE, help="the binary")
    parser.add_argument("--model", type=Path, help="a checkpoint (default: the demo model)")
    parser.add_argument("--tp", type=int, default=4, help="workers (default: 4)")
    parser.add_argument("--device", default="cuda", help="default: cuda")
    parser.add_argument("--rounds", type=int, default=8, help="workers to kill (default: 8)")
    parser.add_argument("--seed", type=int, default=1, help="of times and victims (default: 1)")
    args = parser.parse_args()
    dice = random.Random(args.seed)
    before = memory_used()
    options = ["--device", args.device, "--tp", args.tp, *(["--model", args.model] if args.model else [])]
    failures = []
    with Server(args.looplane, *options) as server:
        began = time.monotonic()
        calm, _ = read(completion(**PROMPT))
        calm_s = time.monotonic() - began
        print(f"calm: {len(calm)} characters in {calm_s:.2f} s")
        for number in range(args.rounds):
            failures += one_round(number, server, dice, calm, calm_s)
        workers = server.workers()
    left = [pid for pid in workers if runs(pid)]
    if left:
        failures.append(f"workers {left} outlive the server")
    time.sleep(0.5)  # the driver's own
    after = memory_used()
    print(f"GPU memory used, MiB: {before} before, {after} after")
    if after != before:
        failures.append("GPU memory is left")
    print("\n".join(failures) or "all right")
    sys.exit(bool(failures))


def one_round(number: int, server: Server, dice: random.Random, calm: str, calm_s: float) -> list[str]:
    workers = server.workers()
    victim, delay = dice.randrange(len(workers)), dice.uniform(0, 0.8 * calm_s)
    took = []
    killer = threading.Thread(target=lambda: took.append(kill_and_watch(workers, victim, delay)))
    killer.start()
    text, gap = read(completion(**PROMPT))
    killer.join()
    server.wait_ready()
    own, others = took[0].pop(victim), max(took[0].values(), default=0.0)
    print(
        f"round {number}: worker {victim} killed after {delay:.2f} s; it ended {own:.3f} s later, the last of the "
        f"others {others:.3f} s; longest gap of the stream {gap:.2f} s",
        flush=True)
    problems = []
    if own == float("inf"):
        problems.append(f"round {number}: worker {victim} was killed and has not ended")
    if others > END_LIMIT_S:
        problems.append(
            f"round {number}: workers ran on for {others:.2f} s after worker {victim} was killed, which took {own:.2f} "
            f"s to end itself; {END_LIMIT_S} s at most are allowed"
        )
    if text != calm:
        problems.append(f"round {number}: another text after worker {victim} was killed")
    return problems


def kill_and_watch(workers: list[int], victim: int, delay: float) -> dict[int, float]:
    """Seconds from the kill to the end of each worker. The victim's own say how long the system takes to end a process
    with a GPU."""
    time.sleep(delay)
    os.kill(workers[victim], signal.SIGKILL)
    killed = time.monotonic()
    ended = {}
    while len(ended) < len(workers) and time.monotonic() - killed < 10 * END_LIMIT_S:
        time.sleep(0.005)
        ended.update({
            rank: time.monotonic() - killed for rank, pid in enumerate(workers) if rank not in ended and not runs(pid)
        })
    return {rank: ended.get(rank, float("inf")) for rank in range(len(workers))}


def read(stream) -> tuple[str, float]:
    """The stream's text, and the longest time between two of its events, in seconds."""
    text, gap, last = "", 0.0, None
    for line in stream:
        if not line.startswith(b"data: {"):
            continue
        event, now = json.loads(line[6:]), time.monotonic()
        if "error" in event:
            sys.exit(f"the stream ended with {event['error']}")
        gap, last = max(gap, now - (last or now)), now
        text += event["choices"][0]["text"]
    return text, gap


def runs(pid: int) -> bool:
    """Whether a process is there and not only waits to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # gone before it was opened, or before it was read
        return False


def memory_used() -> list[int]:
    """MiB in use on each GPU; none where there is none."""
    try:
        asked = subprocess.run(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"],
                               capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return []
    return [int(line) for line in asked.stdout.split()]


if __name__ == "__main__":
    main()
