"""Writes a Llama checkpoint with random weights: the model that the HTTP figures of a GPU are taken with.

    pip install torch safetensors
    python3 random_model.py 8b /dev/shm/llama-8b
    python3 random_model.py 70b /dev/shm/llama-70b    # 141 GB

Weights are N(0, 0.02) in bf16, norms 1; made on the GPU where there is one. Tokens are words, so that any token prints
and prompts of an exact length can be written: " w7 w9 w7". Words without a space in front and others are cut into
their characters, the last tokens of the vocabulary, so that no two texts are the same to a prefix cache.

With --period N a greedy text repeats itself every N tokens, whatever came before, at the cost of any other: layers add
next to nothing to a token's embedding, and the LM head has it in the row of the token behind it. With temperature 2
and top_k 2 one of four tokens is left out, so that three of five drafted tokens hold.
"""

import argparse
import json
import math
import string
from pathlib import Path

import torch
from safetensors.torch import save_file

SHAPES = {
    "8b": {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": False
    },
    "llama-1b": {
        "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 64, "intermediate_size": 8192, "vocab_size": 128256, "tie_word_embeddings": True
    },
}
SHAPES["70b"] = SHAPES["8b"] | {
    "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "intermediate_size": 28672
}
CONTEXT = 16384
# Bytes of tensors a file has at most: that many are in memory at a time.
FILE_BYTES = 5 << 30


def tensor_shapes(c: dict) -> dict[str, tuple[int, ...]]:
    hidden, head_dim = c["hidden_size"], c["head_dim"]
    width, kv = c["num_attention_heads"] * head_dim, c["num_key_value_heads"] * head_dim
    shapes = {"model.embed_tokens.weight": (c["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    if not c["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (c["vocab_size"], hidden)
    for layer in range(c["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        shapes |= {
            at + "input_layernorm.weight": (hidden,), at + "post_attention_layernorm.weight": (hidden,),
            at + "self_attn.q_proj.weight": (width, hidden), at + "self_attn.k_proj.weight": (kv, hidden),
            at + "self_attn.v_proj.weight": (kv, hidden), at + "self_attn.o_proj.weight": (hidden, width),
            at + "mlp.gate_proj.weight": (c["intermediate_size"], hidden),
            at + "mlp.up_proj.weight": (c["intermediate_size"], hidden),
            at + "mlp.down_proj.weight": (hidden, c["intermediate_size"]),
        }
    return shapes


def files_of(shapes: dict[str, tuple[int, ...]]) -> list[list[str]]:
    """The names of the tensors of each file. Embedding and LM head, which come first, are in one."""
    files, room = [[]], FILE_BYTES
    for name, shape in shapes.items():
        size = 2 * math.prod(shape)
        if size > room and files[-1]:
            files.append([])
            room = FILE_BYTES
        files[-1].append(name)
        room -= size
    return files


def repeat(tensors: dict[str, torch.Tensor], period: int) -> None:
    """Makes `w7` follow `w6` and, a little less likely, `w5`, and the first of a period the last: a file's tensors."""
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor *= 1e-5
    if "lm_head.weight" not in tensors:
        return
    embedding, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    tokens = torch.arange(len(embedding) // period * period)
    before = tokens // period * period + (tokens - 1) % period
    # Logits are about 16 of the next token and 2.2 less of the one behind it, of all others nearly 0.
    head[tokens] = 0.2 * (embedding[before] + 0.866 * embedding[before[before]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--period", type=int, help="tokens after which greedy texts repeat themselves")
    args = parser.parse_args()
    folder, c = args.folder, SHAPES[args.shape]
    if args.period and c["tie_word_embeddings"]:
        parser.error(f"--period needs an LM head of its own, which {args.shape} has not")
    folder.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)

    def tensor(size: tuple[int, ...]) -> torch.Tensor:
        if len(size) == 1:
            return torch.ones(size, dtype=torch.bfloat16)
        return (torch.randn(size, generator=generator, device=device, dtype=torch.float32) * 0.02).bfloat16().cpu()

    shapes = tensor_shapes(c)
    files, of_tensor = files_of(shapes), {}
    for number, names in enumerate(files, 1):
        file = f"model-{number:05}-of-{len(files):05}.safetensors" if len(files) > 1 else "model.safetensors"
        tensors = {name: tensor(shapes[name]) for name in names}
        if args.period:
            repeat(tensors, args.period)
        save_file(tensors, folder / file)
        of_tensor |= dict.fromkeys(names, file)
    if len(files) > 1:
        size = sum(2 * math.prod(shape) for shape in shapes.values())
        index = {"metadata": {"total_size": size}, "weight_map": of_tensor}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = c | {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
        "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
        "hidden_act": "silu", "bos_token_id": 0, "eos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    # "\u0120" is the space in front of a word.
    characters = [mark + character for mark in ("\u0120", "") for character in string.printable[:94]]
    words = [f"\u0120w{token}" for token in range(c["vocab_size"] - len(characters))]
    vocab = {word: token for token, word in enumerate(words + characters)}
    words_with_space = {"type": "Split", "pattern": {"Regex": r" ?\S+"}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer = {
        "version": "1.0", "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [words_with_space, byte_level]},
        "post_processor": None, "decoder": byte_level,
        "model": {"type": "WordPiece", "vocab": vocab, "unk_token": "\u0120w2", "continuing_subword_prefix": "",
                  "max_input_chars_per_word": 100},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "\u0120w0", "eos_token": "\u0120w1",
        "chat_template": "{% for message in messages %}{{ message.content }} {% endfor %}",
    }))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))


if __name__ == "__main__":
    main()
