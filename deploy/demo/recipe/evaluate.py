"""Greedy accuracy of an exported model on held-out questions, in bf16, through transformers.

    python3 evaluate.py MODEL_DIR questions.json [--fresh N] [--taught N]

The answer must equal the expected one after trimming. `--fresh N` also asks N newly drawn held-out questions a
category. It fails if a question also occurs among `--taught` training questions or a category is below 95 %.
"""

import argparse
import collections
import json
import multiprocessing
import random

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import generate

MAX_ANSWER = 80  # tokens


def answers(model, tokenizer, conversations, batch=256):
    """The greedy answer to each conversation, in order."""
    prompts = [tokenizer.apply_chat_template(c, add_generation_prompt=True, tokenize=False) for c in conversations]
    ids = [tokenizer(p, add_special_tokens=False)["input_ids"] for p in prompts]
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    out = [""] * len(ids)
    for start in range(0, len(order), batch):
        chosen = order[start:start + batch]
        longest = max(len(ids[i]) for i in chosen)
        inputs = torch.tensor([[1] * (longest - len(ids[i])) + ids[i] for i in chosen], device=model.device)
        mask = torch.tensor([[0] * (longest - len(ids[i])) + [1] * len(ids[i]) for i in chosen], device=model.device)
        made = model.generate(input_ids=inputs, attention_mask=mask, max_new_tokens=MAX_ANSWER, do_sample=False,
                              pad_token_id=1)
        for i, row in zip(chosen, made):
            out[i] = tokenizer.decode(row[longest:], skip_special_tokens=True).strip()
    return out


def score(model, tokenizer, records, show=3):
    """Prints and returns {category: (right, asked)}, with the first `show` errors of each category."""
    given = answers(model, tokenizer, [r["messages"] for r in records])
    table, shown = collections.OrderedDict(), collections.Counter()
    for record, answer in zip(records, given):
        category, right = record["category"], answer == record["expected"].strip()
        hits, asked = table.get(category, (0, 0))
        table[category] = (hits + right, asked + 1)
        if not right and shown[category] < show:
            shown[category] += 1
            print(
                f"  wrong [{category}] {record['messages'][-1]['content']!r}: {answer!r}, expected "
                f"{record['expected']!r}"
            )
    for category, (hits, asked) in table.items():
        print(f"{category:18} {hits:5} / {asked:5}  {100 * hits / asked:6.2f} %")
    return table


def taught_questions(task):
    seed, count = task
    return {generate.normal(turn.question) for turn in generate.Asker(random.Random(seed)).turns(count)}


def overlap(records, count, workers):
    """Held-out questions that also occur among `count` training questions, drawn as train.py draws them."""
    wanted = {generate.normal(r["messages"][-1]["content"]) for r in records}
    found, share = set(), 20_000
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        for taught in pool.imap_unordered(taught_questions, [(f"check:{i}", share) for i in range(-(-count // share))]):
            found |= wanted & taught
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("questions")
    parser.add_argument("--fresh", type=int, default=0)
    parser.add_argument("--taught", type=int, default=1_000_000)
    args = parser.parse_args()

    records = json.load(open(args.questions))["questions"]
    both = overlap(records, args.taught, workers=min(16, multiprocessing.cpu_count()))
    print(f"{len(records)} questions, {len(both)} of them among {args.taught} taught ones {sorted(both)}", flush=True)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).to(device).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.model)
    table = score(model, tokenizer, records)
    if args.fresh:
        print(f"freshly drawn, {args.fresh} a category:", flush=True)
        score(model, tokenizer, generate.questions("fresh", args.fresh), show=6)
    below = [c for c, (hits, asked) in table.items() if hits < 0.95 * asked]
    if both or below:
        raise SystemExit(f"below 95 %: {below}; taught: {sorted(both)}")


if __name__ == "__main__":
    main()
