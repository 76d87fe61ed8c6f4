"""What it costs to hold answers to a form: tokens a second with and without, as a table.

    python3 structured_figures.py --looplane target/release/looplane                 # 8B on a GPU
    python3 structured_figures.py --model DIR --device cpu --streams 1,4 --tokens 60

Without --model the checkpoint of serving_figures.py is made up, which needs torch and safetensors. All answers are
sampled at temperature 1, each with a seed of its own, without drafts. Forms: a Lark grammar, and a JSON schema of
nested lists. In the last column every other answer is free, beside one of the schema.
"""

import argparse
import concurrent.futures
import datetime
import json
import subprocess
import sys
import time
from pathlib import Path

from serving import LOOPLANE, Server, completion

HERE = Path(__file__).resolve().parent
TEXT = {"type": "string", "minLength": 4, "maxLength": 60}
FIELDS = {"name": TEXT, "size": {"type": "number"}, "tags": {"type": "array", "items": TEXT}}
ITEM = {"type": "object", "properties": FIELDS, "required": list(FIELDS), "additionalProperties": False}
SCHEMA = {"type": "array", "items": ITEM, "minItems": 500}
FORMS = {
    "free": {"ignore_eos": True},
    "grammar": {"guided_grammar": 'start: item+ "!"\nitem: NAME SIZE ","\nNAME: / ?[a-z]{1,5}/\nSIZE: /[0-9]{1,6}/'},
    "JSON schema": {"guided_json": SCHEMA},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--looplane", type=Path, default=LOOPLANE, help="the binary to measure")
    parser.add_argument("--model", type=Path, default=Path("/dev/shm/looplane-8b"), help="a checkpoint")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--streams", default="1,8,32,64", help="at one time (default: 1,8,32,64)")
    parser.add_argument("--tokens", type=int, default=256, help="of an answer (default: 256)")
    parser.add_argument("options", nargs="*", help="of the server, behind --")
    args = parser.parse_args()
    if not (args.model / "config.json").exists():
        subprocess.run([sys.executable, HERE / "random_model.py", "8b", args.model], check=True)
    print(f"{args.model.name} on {args.device}, {datetime.date.today()}, tokens/s\n", flush=True)
    kinds = [*FORMS, "half and half"]
    print(f"| streams | {' | '.join(kinds)} |\n|{'---|' * (1 + len(kinds))}", flush=True)
    drafts = ("--speculative-config", '{"method": "suffix", "num_speculative_tokens": 0}')
    with Server(args.looplane, "--model", args.model, "--device", args.device, *drafts, *args.options):
        for streams in map(int, args.streams.split(",")):
            rates = []
            for kind in kinds:
                forms = [FORMS[kind]] if kind in FORMS else [FORMS["free"], FORMS["JSON schema"]]
                rate(forms, streams, 8)
                rates.append(max(rate(forms, streams, args.tokens) for _ in range(2)))
            print(f"| {streams} | {' | '.join(f'{rate:.0f}' for rate in rates)} |", flush=True)


def rate(forms: list[dict], streams: int, tokens: int) -> float:
    """Tokens a second of so many answers at one time, whose forms take turns."""
    def answer(number: int) -> int:
        form = forms[number % len(forms)]
        with completion(prompt="loop", max_tokens=tokens, temperature=1, seed=number, **form) as body:
            return json.load(body)["usage"]["completion_tokens"]

    with concurrent.futures.ThreadPoolExecutor(streams) as pool:
        begun = time.perf_counter()
        counts = list(pool.map(answer, range(streams)))
    assert sum(counts) > 0.9 * tokens * streams, counts
    return sum(counts) / (time.perf_counter() - begun)


if __name__ == "__main__":
    main()
