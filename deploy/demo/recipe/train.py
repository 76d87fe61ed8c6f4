"""Trains the demo model from nothing: tokenizer, conversations, training on one GPU, export in Hugging Face form.

    python3 train.py --out MODEL_DIR --seconds 300 --tokens 300000000

Rows are whole conversations that start at position 0, in three lengths, and the loss counts answers only: training
sees exactly what serving sees. The learning rate follows the clock, so a run always ends after `--seconds`.
"""

import argparse
import json
import math
import multiprocessing
import os
import random
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import nn

import generate
import tokenizer as chat

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": chat.VOCAB, "hidden_size": 256,
    "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 32, "hidden_act": "silu",
    "max_position_embeddings": chat.CONTEXT, "rms_norm_eps": 1e-5, "initializer_range": 0.02, "rope_theta": 10000.0,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "attention_bias": False,
    "attention_dropout": 0.0, "mlp_bias": False,
    "pretraining_tp": 1, "tie_word_embeddings": True, "use_cache": True, "bos_token_id": chat.BEGIN,
    "eos_token_id": [chat.END, chat.EOT], "pad_token_id": None, "dtype": "bfloat16", "torch_dtype": "bfloat16",
}
GENERATION = {"bos_token_id": chat.BEGIN, "eos_token_id": [chat.END, chat.EOT], "do_sample": False, "temperature": 0.0}
ROW_SHARES = {96: 0.45, 384: 0.35, chat.CONTEXT: 0.20}  # row length in tokens: its share of the training tokens
BATCH = 65_536  # tokens a step, about
PEAK_RATE, WEIGHT_DECAY, WARM_UP = 2e-3, 0.1, 0.03


# Data.

def make_rows(task):
    """[rows, length] int16: token ids, with the sign bit set on tokens that are learned."""
    path, seed, length, rows = task
    encoder = chat.ChatEncoder(Tokenizer.from_file(path))
    asker = generate.Asker(random.Random(seed))
    conversations = []
    for _ in range(rows):
        messages = [("system", asker.system())] if asker.rng.random() < 0.25 else []
        for turn in asker.turns(length // 32 + 2):
            messages += [("user", turn.question), ("assistant", turn.answer)]
        conversations.append(messages)
    out = np.zeros((rows, length), np.uint16)
    out[:] = chat.EOT
    for row, (ids, flags) in zip(out, encoder.encode(conversations)):
        # clients differ in whether they send the begin token
        begins = asker.rng.choices([1, 0, 2], [0.92, 0.05, 0.03])[0]
        ids = ([chat.BEGIN] * begins + ids)[:length]
        flags = ([False] * begins + flags)[:length]
        row[:len(ids)] = np.array(ids, np.uint16) | (np.array(flags, np.uint16) << 15)
    return length, out.view(np.int16)


def make_data(path, tokens, workers):
    """{length: [rows, length] int16} in all `tokens` long."""
    tasks = []
    for length, share in ROW_SHARES.items():
        rows = max(BATCH // length + 1, int(tokens * share / length))
        step = min(rows, max(8, 96_000 // length))
        tasks += [(path, f"train:{length}:{i}", length, min(step, rows - i)) for i in range(0, rows, step)]
    random.Random(0).shuffle(tasks)
    parts = {length: [] for length in ROW_SHARES}
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        for length, rows in pool.imap_unordered(make_rows, tasks):
            parts[length].append(rows)
    return {length: torch.from_numpy(np.concatenate(rows)) for length, rows in parts.items()}


# Model: a Llama whose parameters have the names of the checkpoint.

class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads, self.kv_heads, self.size = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        self.q_proj = nn.Linear(c["hidden_size"], self.heads * self.size, bias=False)
        self.k_proj = nn.Linear(c["hidden_size"], self.kv_heads * self.size, bias=False)
        self.v_proj = nn.Linear(c["hidden_size"], self.kv_heads * self.size, bias=False)
        self.o_proj = nn.Linear(self.heads * self.size, c["hidden_size"], bias=False)

    def forward(self, x, cos, sin):
        split = lambda y, heads: y.view(*x.shape[:2], heads, self.size).transpose(1, 2)
        rotate = lambda y: y * cos + torch.cat((-y[..., self.size // 2:], y[..., :self.size // 2]), -1) * sin
        q, k = rotate(split(self.q_proj(x), self.heads)), rotate(split(self.k_proj(x), self.kv_heads))
        v = split(self.v_proj(x), self.kv_heads)
        k, v = (y.repeat_interleave(self.heads // self.kv_heads, 1) for y in (k, v))
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gate_proj = nn.Linear(c["hidden_size"], c["intermediate_size"], bias=False)
        self.up_proj = nn.Linear(c["hidden_size"], c["intermediate_size"], bias=False)
        self.down_proj = nn.Linear(c["intermediate_size"], c["hidden_size"], bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Norm(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(c["hidden_size"])), c["rms_norm_eps"]

    def forward(self, x):
        return F.rms_norm(x.float(), x.shape[-1:], self.weight, self.eps).to(x.dtype)


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.input_layernorm, self.self_attn = Norm(c), Attention(c)
        self.post_attention_layernorm, self.mlp = Norm(c), Mlp(c)

    def forward(self, x, cos, sin):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.model = nn.ModuleDict({
            "embed_tokens": nn.Embedding(c["vocab_size"], c["hidden_size"]),
            "layers": nn.ModuleList(Layer(c) for _ in range(c["num_hidden_layers"])),
            "norm": Norm(c),
        })
        frequency = c["rope_theta"] ** (-torch.arange(0, c["head_dim"], 2) / c["head_dim"])
        angle = torch.outer(torch.arange(c["max_position_embeddings"]).float(), frequency).repeat(1, 2)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                deep = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(p, std=c["initializer_range"] / (math.sqrt(2 * c["num_hidden_layers"]) if deep else 1))

    def forward(self, ids):
        """Logits [rows, length, vocabulary]."""
        x = self.model["embed_tokens"](ids).to(torch.bfloat16)
        cos, sin = (t[: ids.shape[1]].to(x.dtype) for t in (self.cos, self.sin))
        for layer in self.model["layers"]:
            x = layer(x, cos, sin)
        return F.linear(self.model["norm"](x), self.model["embed_tokens"].weight)

    def loss(self, rows):
        """Mean cross-entropy of the learned tokens of int16 rows."""
        ids, learned = (rows & 0x7FFF).long(), rows < 0
        logits = self.forward(ids[:, :-1])
        each = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
        learned = learned[:, 1:].flatten().float()
        return (each * learned).sum() / learned.sum()


# Training.

@torch.no_grad()
def forced_accuracy(model, encoder, records, device):
    """{category: share of answers whose every token is the likeliest}: greedy accuracy without generating."""
    hits = {}
    for start in range(0, len(records), 130):
        part = records[start:start + 130]
        chats = [[(m["role"], m["content"]) for m in r["messages"]] + [("assistant", r["expected"])] for r in part]
        coded = [[chat.BEGIN, *ids] for ids, _ in encoder.encode(chats)]
        tails = [len(encoder.tokenizer.encode(r["expected"], add_special_tokens=False).ids) + 1 for r in part]
        longest = max(map(len, coded))
        ids = torch.tensor([c + [chat.EOT] * (longest - len(c)) for c in coded], device=device)
        with torch.autocast(device, torch.bfloat16):
            best = model(ids[:, :-1]).argmax(-1)
        for record, row, guess, code, tail in zip(part, ids, best, coded, tails):
            right = bool((guess[len(code) - tail - 1:len(code) - 1] == row[len(code) - tail:len(code)]).all())
            hits.setdefault(record["category"], []).append(right)
    return {category: sum(h) / len(h) for category, h in hits.items()}


def train(data, encoder, seconds, device):
    torch.manual_seed(0)
    model = Llama(CONFIG).to(device)
    print(f"{sum(p.numel() for p in model.parameters())} parameters", flush=True)
    decayed = [p for p in model.parameters() if p.dim() == 2]
    plain = [p for p in model.parameters() if p.dim() != 2]
    rate = torch.tensor(0.0, device=device)
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": plain, "weight_decay": 0.0}], lr=rate,
        betas=(0.9, 0.95), fused=True)
    loss_of = torch.compile(model.loss, dynamic=False) if device == "cuda" else model.loss
    data = {length: rows.to(device) for length, rows in data.items()}
    dev = generate.questions("dev", 50)
    picker = random.Random(0)
    order = {length: torch.empty(0, dtype=torch.long) for length in data}

    def batch(length):
        count = min(max(1, BATCH // length), len(data[length]))
        if len(order[length]) < count:
            order[length] = torch.randperm(len(data[length]), device=device)
        chosen, order[length] = order[length][:count], order[length][count:]
        return data[length][chosen]

    def step(length):
        with torch.autocast(device, torch.bfloat16):
            loss = loss_of(batch(length))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach(), norm

    for length in data:
        step(length)  # compiles, at a learning rate of zero
    start, steps, next_report, seen = time.time(), 0, 20, 0
    while (elapsed := time.time() - start) < seconds:
        done = elapsed / seconds
        cosine = 0.5 * (1 + math.cos(math.pi * (done - WARM_UP) / (1 - WARM_UP)))
        rate.fill_(PEAK_RATE * (done / WARM_UP if done < WARM_UP else cosine))
        length = picker.choices(list(ROW_SHARES), list(ROW_SHARES.values()))[0]
        loss, norm = step(length)
        steps, seen = steps + 1, seen + BATCH // length * length
        if steps % 20 == 0:
            loss = loss.item()  # keeps the clock honest: the GPU is at most 20 steps behind
        if elapsed > next_report:
            next_report += max(20, seconds / 8)
            table = forced_accuracy(model, encoder, dev, device)
            print(
                f"{elapsed:5.0f} s  step {steps}  {seen / 1e6:.0f} M tokens  loss {float(loss):.4f}  norm "
                f"{float(norm):.2f}  "
                + "  ".join(f"{k} {100 * v:.0f}" for k, v in table.items()), flush=True)
    print(f"{steps} steps, {seen / 1e6:.0f} M tokens, loss {float(loss):.4f}", flush=True)
    return model


def export(model, folder):
    """config.json, generation_config.json and model.safetensors (bf16), beside the tokenizer files."""
    tensors = {name: p.detach().to("cpu", torch.bfloat16).contiguous() for name, p in model.named_parameters()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(GENERATION, indent=2) + "\n")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--tokens", type=float, default=3e8, help="distinct training tokens")
    args = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    begun = time.time()
    clock = lambda what: print(f"[{time.time() - begun:5.0f} s] {what}", flush=True)

    chat.write(chat.train(), args.out)
    path = str(args.out / "tokenizer.json")
    clock("tokenizer trained")
    data = make_data(path, args.tokens, workers=max(1, multiprocessing.cpu_count() - 1))
    clock(" + ".join(f"{len(rows)} x {length}" for length, rows in data.items()) + " tokens made")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = train(data, chat.ChatEncoder(Tokenizer.from_file(path)), args.seconds, device)
    export(model, args.out)
    clock(f"written to {args.out}")


if __name__ == "__main__":
    main()
