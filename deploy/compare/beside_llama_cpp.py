"""Decode speed of Looplane and of llama.cpp on this machine, measured in turns.

What is compared: the median time of one decode step on CPU, for batches of 1 and of 8 sequences, on a model of the same
dimensions and the same bytes: bf16 weights made up at random (speed does not depend on them), the same number of
threads, the same context before the first step, as many steps.

* Looplane: `looplane bench --shape SHAPE --weights bf16 --tp 1 --threads N`, which samples greedily inside the step.
* llama.cpp: `llama_decode` of one token of each sequence through llama-cpp-python, logits of every sequence asked for
  and no sampling, weights read into memory (no mmap), in a process of its own.

How: a run is one process of the one and then one of the other, in turns which comes first. Memory bandwidth of shared
machines moves within minutes, so only figures of the same run are set against each other, and there are several runs.
Nothing else should use the cores meanwhile but what `--beside N` adds: N processes that are always busy, as neighbours
on a shared machine are. `just compare-llama-cpp` builds what this needs in target/ (llama.cpp is compiled for this
machine, which takes minutes and needs a C++ compiler; the model of the 1b shape has 2.2 GB) and passes its arguments
on.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BATCHES = (1, 8)
SEED = 0


@dataclass(frozen=True)
class Shape:
    """Dimensions of a Llama, as `looplane bench --shape` has them."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int


SHAPES = {
    "tiny": Shape(256, 2, 16, 4, 16, 512, 1024),
    "1b": Shape(2048, 16, 32, 8, 64, 8192, 32_000),
}


@dataclass(frozen=True)
class StepTimes:
    """Milliseconds of a decode step."""

    median: float
    fastest: float

    def __str__(self) -> str:
        return f"{self.median:.1f} ({self.fastest:.1f})"


def main() -> None:
    args = parse()
    if args.measure_llama:
        print(json.dumps(measure_llama(args)))
        return
    model = args.dir / f"llama-{args.shape}-bf16.gguf"
    if not model.exists():
        print(f"writing {model}", flush=True)
        write_model(SHAPES[args.shape], model)
    columns = ["run", "read GB/s"]
    columns += [f"batch {b}: {what}" for b in BATCHES for what in ("looplane", "llama.cpp", "ratio")]
    print(f"shape {args.shape}, {args.threads} threads, context {args.context}, {args.steps} steps,")
    print(f"{args.beside} busy processes beside; ms a step: median (fastest)")
    print("ratio: llama.cpp's median over Looplane's\n")
    print(row(columns) + "\n" + row(["---"] * len(columns)), flush=True)
    ratios = {batch: [] for batch in BATCHES}
    for run in range(1, args.runs + 1):
        with neighbours(args.beside):
            if run % 2 == 1:
                ours, read_gb_s = run_looplane(args)
                theirs = run_llama(args, model)
            else:
                theirs = run_llama(args, model)
                ours, read_gb_s = run_looplane(args)
        cells = [str(run), f"{read_gb_s:.1f}"]
        for batch in BATCHES:
            ratio = theirs[batch].median / ours[batch].median
            ratios[batch].append(ratio)
            cells += [str(ours[batch]), str(theirs[batch]), f"{ratio:.2f}"]
        print(row(cells), flush=True)
    middle = [cell for batch in BATCHES for cell in ("", "", f"{statistics.median(ratios[batch]):.2f}")]
    print(row(["median", ""] + middle))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    number = {"type": positive, "metavar": "N"}
    parser.add_argument("--shape", choices=SHAPES, default="1b", help="dimensions of the model (default: 1b)")
    parser.add_argument("--runs", **number, default=8, help="pairs of measurements (default: 8)")
    parser.add_argument("--steps", **number, default=32, help="steps measured of each batch (default: 32)")
    parser.add_argument("--context", **number, default=16, help="tokens before the first step (default: 16)")
    parser.add_argument("--threads", **number, default=os.cpu_count(), help="threads of each (default: all cores)")
    parser.add_argument("--beside", type=count, metavar="N", default=0, help="busy processes meanwhile (default: none)")
    parser.add_argument("--looplane", type=Path, default=ROOT / "target/release/looplane", help="the binary to measure")
    parser.add_argument("--dir", type=Path, default=ROOT / "target", help="where the model is kept (default: target/)")
    parser.add_argument("--measure-llama", type=Path, metavar="GGUF", help=argparse.SUPPRESS)
    return parser.parse_args()


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError("must be at least 0")
    return value


@contextmanager
def neighbours(number: int) -> Iterator[None]:
    """So many processes that compute without end, as long as the block runs."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def run_looplane(args: argparse.Namespace) -> tuple[dict[int, StepTimes], float]:
    """Step times by batch, and the median read bandwidth of the machine in GB/s, both from one process."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "bench.json"
        command = [args.looplane, "bench", "--shape", args.shape, "--weights", "bf16", "--device", "cpu", "--tp", 1]
        command += ["--threads", args.threads, "--batch", ",".join(map(str, BATCHES)), "--context", args.context]
        command += ["--steps", args.steps, "--json", report]
        subprocess.run([str(word) for word in command], check=True, stdout=subprocess.DEVNULL)
        figures = json.loads(report.read_text())
    times = {of["batch"]: StepTimes(of["step_ms"], of["best_step_ms"]) for of in figures["batches"]}
    return times, figures["read"]["median_gb_s"]


def run_llama(args: argparse.Namespace, model: Path) -> dict[int, StepTimes]:
    """Step times by batch, from a process that ends with its measurement and gives its memory back."""
    command = [sys.executable, __file__, "--measure-llama", model, "--steps", args.steps, "--context", args.context]
    command += ["--threads", args.threads]
    done = subprocess.run([str(word) for word in command], check=True, stdout=subprocess.PIPE, text=True)
    return {int(batch): StepTimes(*times) for batch, times in json.loads(done.stdout).items()}


def measure_llama(args: argparse.Namespace) -> dict[int, tuple[float, float]]:
    """Median and fastest milliseconds of a step, by batch."""
    import llama_cpp

    @llama_cpp.llama_log_callback
    def silent(_level, _text, _data):
        pass

    llama_cpp.llama_log_set(silent, None)
    llama_cpp.llama_backend_init()
    model_params = llama_cpp.llama_model_default_params()
    model_params.use_mmap = False
    model = llama_cpp.llama_model_load_from_file(str(args.measure_llama).encode(), model_params)
    if not model:
        sys.exit(f"llama.cpp cannot load {args.measure_llama}")
    vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    params = llama_cpp.llama_context_default_params()
    # One cache for all sequences: what llama.cpp's own batched-bench measures fastest for sequences of equal length.
    params.kv_unified = True
    params.n_seq_max = max(BATCHES)
    params.n_ctx = max(BATCHES) * (args.context + args.steps + 1)
    params.n_batch = 512
    params.n_threads = params.n_threads_batch = args.threads
    context = llama_cpp.llama_init_from_model(model, params)
    if not context:
        sys.exit("llama.cpp cannot make a context: lower --context or --steps")
    batch = llama_cpp.llama_batch_init(params.n_batch, 0, params.n_seq_max)

    def step(sequences: int, position: int) -> float:
        """Decodes one token of each sequence; milliseconds."""
        batch.n_tokens = sequences
        for i in range(sequences):
            batch.token[i] = (7 * position + 13 * i) % vocab
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = i
            batch.logits[i] = 1
        start = time.perf_counter()
        if llama_cpp.llama_decode(context, batch) != 0:
            sys.exit("llama_decode failed")
        # Waits for the result.
        llama_cpp.llama_get_logits_ith(context, 0)
        return (time.perf_counter() - start) * 1e3

    figures = {}
    for sequences in BATCHES:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        for position in range(args.context):
            step(sequences, position)
        times = [step(sequences, args.context + i) for i in range(args.steps)]
        figures[sequences] = (statistics.median(times), min(times))
    return figures


def write_model(shape: Shape, path: Path) -> None:
    """Writes a GGUF of random bf16 weights; the name is given to the whole file only."""
    import gguf
    import numpy as np

    random = np.random.default_rng(SEED)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    writer = gguf.GGUFWriter(str(unfinished), "llama")
    writer.add_context_length(131_072)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500_000.0)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_vocab_size(shape.vocab)
    writer.add_tokenizer_model("none")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)

    def matrix(name: str, rows: int, columns: int) -> None:
        """[rows, columns] bf16, rounded from float32 half up."""
        bits = (0.02 * random.standard_normal((rows, columns), dtype=np.float32)).view(np.uint32)
        data = ((bits + 0x8000) >> 16).astype(np.uint16).view(np.uint8)
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType.BF16)

    def norm(name: str) -> None:
        writer.add_tensor(name, np.ones(shape.hidden, np.float32))

    kv_width = shape.kv_heads * shape.head_dim
    q_width = shape.heads * shape.head_dim
    matrix("token_embd.weight", shape.vocab, shape.hidden)
    norm("output_norm.weight")
    matrix("output.weight", shape.vocab, shape.hidden)
    for layer in range(shape.layers):
        of = f"blk.{layer}."
        norm(of + "attn_norm.weight")
        matrix(of + "attn_q.weight", q_width, shape.hidden)
        matrix(of + "attn_k.weight", kv_width, shape.hidden)
        matrix(of + "attn_v.weight", kv_width, shape.hidden)
        matrix(of + "attn_output.weight", shape.hidden, q_width)
        norm(of + "ffn_norm.weight")
        matrix(of + "ffn_gate.weight", shape.intermediate, shape.hidden)
        matrix(of + "ffn_up.weight", shape.intermediate, shape.hidden)
        matrix(of + "ffn_down.weight", shape.hidden, shape.intermediate)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.rename(path)


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        # It has said why.
        sys.exit(f"{Path(sys.argv[0]).name}: {error.cmd[0]} ended with code {error.returncode}")
