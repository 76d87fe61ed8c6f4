"""Trains the byte-level BPE of the demo model and writes its tokenizer files.

Digits are always single tokens, so that arithmetic sees them one by one; letters joined by dashes are too.
"""

import json
import random
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

import generate

VOCAB = 2048
CONTEXT = 2048
SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
BEGIN, END, HEADER, HEADER_END, EOT = range(len(SPECIAL))
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
    "{{ message['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)


def train(turns=150_000, seed=1):
    """The tokenizer, trained on generated turns; it never merges line breaks, which only the chat template uses."""
    asker = generate.Asker(random.Random(seed))
    texts = [text for turn in asker.turns(turns) for text in (turn.question, turn.answer)]
    texts += [asker.system() for _ in range(2000)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=SPECIAL,
                            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{SPECIAL[BEGIN]} $A",
                                                             pair=f"{SPECIAL[BEGIN]} $A {SPECIAL[BEGIN]} $B:1",
                                                             special_tokens=[(SPECIAL[BEGIN], BEGIN)])
    if tokenizer.get_vocab_size() != VOCAB:
        raise SystemExit(f"the corpus gave {tokenizer.get_vocab_size()} tokens instead of {VOCAB}: generate more turns")
    return tokenizer


def write(tokenizer, folder):
    """tokenizer.json and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": SPECIAL[BEGIN], "eos_token": SPECIAL[EOT],
              "clean_up_tokenization_spaces": False, "model_max_length": CONTEXT, "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


class ChatEncoder:
    """Token ids of conversations as the chat template renders them, with a flag on each token of an answer."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        plain = lambda text: tokenizer.encode(text, add_special_tokens=False).ids
        self.heads = {
            role: [HEADER, *plain(role), HEADER_END, *plain("\n\n")] for role in ("system", "user", "assistant")
        }

    def encode(self, conversations):
        """For each [(role, text)]: (ids, flags), without the begin token."""
        texts = [text.strip() for messages in conversations for _, text in messages]
        encoded = iter(self.tokenizer.encode_batch(texts, add_special_tokens=False))
        for messages in conversations:
            ids, flags = [], []
            for role, _ in messages:
                head, body = self.heads[role], next(encoded).ids
                ids += [*head, *body, EOT]
                flags += [False] * len(head) + [role == "assistant"] * (len(body) + 1)
            yield ids, flags


if __name__ == "__main__":
    write(train(), Path(sys.argv[1]))
