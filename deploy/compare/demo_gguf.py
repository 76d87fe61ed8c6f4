"""Writes the demo model as a GGUF, so that llama.cpp's OpenAI-compatible server can serve it and the load tester
measure that.

    python3 -m venv target/llama-cpp
    target/llama-cpp/bin/pip install 'llama-cpp-python[server]==0.3.36' gguf==0.19.0
    target/llama-cpp/bin/python deploy/compare/demo_gguf.py target/demo.gguf
    target/llama-cpp/bin/python -m llama_cpp.server --model target/demo.gguf --model_alias demo --n_ctx 2048 \\
        --port 8001 \\
        --interrupt_requests false
    looplane loadtest --target http://127.0.0.1:8001
"""

import json
import struct
import sys
from pathlib import Path

import gguf
import numpy as np

MODEL = Path(__file__).resolve().parents[1] / "demo" / "model"
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def main() -> None:
    config = json.loads((MODEL / "config.json").read_text())
    writer = gguf.GGUFWriter(sys.argv[1], "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    add_tokenizer(writer, config)
    for name, values in tensors():
        heads_of = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
        heads = heads_of.get(name.split(".")[-2])
        if heads:
            values = pairs_beside_each_other(values, heads)
        if values.ndim == 1:
            # Norms are float32 there.
            writer.add_tensor(name, (values.astype(np.uint32) << 16).view(np.float32))
        else:
            writer.add_tensor(name, values.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(writer: gguf.GGUFWriter, config: dict) -> None:
    tokenizer = json.loads((MODEL / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    special = {token["content"] for token in tokenizer["added_tokens"]}
    tokens = sorted(vocabulary, key=vocabulary.get)
    writer.add_tokenizer_model("gpt2")
    # Digits one by one, then GPT-2's expression: the same as this tokenizer's.
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(vocabulary["<|eot_id|>"])
    writer.add_chat_template(json.loads((MODEL / "tokenizer_config.json").read_text())["chat_template"])


def tensors():
    """Name there and [rows, columns] or [columns] uint16, the bits of bf16."""
    data = (MODEL / "model.safetensors").read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    for name, tensor in header.items():
        assert tensor["dtype"] == "BF16", name
        first, last = tensor["data_offsets"]
        values = np.frombuffer(data[8 + length + first : 8 + length + last], np.uint16).reshape(tensor["shape"])
        if name == "model.embed_tokens.weight":
            yield "token_embd.weight", values
        elif name == "model.norm.weight":
            yield "output_norm.weight", values
        else:
            _, _, layer, rest = name.split(".", 3)
            yield f"blk.{layer}.{NAMES[rest.removesuffix('.weight')]}.weight", values


def pairs_beside_each_other(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows that RoPE turns together are half a head apart in a checkpoint, and neighbours in a GGUF."""
    rows, columns = values.shape
    halves = values.reshape(heads, 2, rows // heads // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows, columns))


if __name__ == "__main__":
    main()
