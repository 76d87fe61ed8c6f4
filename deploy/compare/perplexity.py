"""Perplexity of a text as a server computes it, by format of the weights: what quantising costs.

    perplexity.py --model DIR --text FILE [--looplane target/release/looplane] [--formats bf16,fp8] [--window 512]

Each format is a server of its own (`--tp 1`, CPUs unless --device says otherwise), which is asked for the
log-probabilities of the text's tokens: windows of so many tokens, one after the other, each from nothing.
"""
import argparse
import json
import math
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request


def ask(port, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.load(answer)


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def perplexity(args, quantization):
    """Of the text, and how many tokens it was taken over."""
    port, option = free_port(), [] if quantization == "bf16" else ["--quantization", quantization]
    command = [args.looplane, "serve", "--model", args.model, "--tp", "1", "--port", str(port), "--device", args.device]
    server = subprocess.Popen([*command, *option], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            time.sleep(0.5)
            if server.poll() is not None:
                sys.exit(f"the server ended with {server.returncode}: {' '.join([*command, *option])}")
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health/ready", timeout=5)
                break
            except (urllib.error.URLError, OSError):
                continue
        with open(args.text, encoding="utf-8") as file:
            tokens = ask(port, "/tokenize", {"prompt": file.read(), "add_special_tokens": False})["tokens"]
        loss = count = 0
        for first in range(0, len(tokens), args.window):
            window = tokens[first : first + args.window]
            if len(window) < 2:
                continue
            body = {"prompt": window, "max_tokens": 0, "echo": True, "logprobs": 0}
            choice = ask(port, "/v1/completions", body)["choices"][0]
            of_tokens = choice["logprobs"]["token_logprobs"][1:]  # the first has nothing before it
            loss, count = loss - sum(of_tokens), count + len(of_tokens)
        return math.exp(loss / count), count
    finally:
        server.terminate()
        server.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a directory as Hugging Face lays it out")
    parser.add_argument("--text", required=True, help="UTF-8")
    parser.add_argument("--looplane", default="target/release/looplane")
    parser.add_argument("--formats", default="bf16,fp8", help="by commas; bf16: as the checkpoint is")
    parser.add_argument("--window", type=int, default=512, help="tokens")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    first = None
    for quantization in args.formats.split(","):
        value, count = perplexity(args, quantization)
        first = first or value
        print(f"{quantization:6} {value:.4f} over {count} tokens, {100 * (value / first - 1):+.3f} %", flush=True)


if __name__ == "__main__":
    main()
