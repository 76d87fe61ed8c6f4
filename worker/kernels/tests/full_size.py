"""Llama 3.1 8B's size in torch, with the weights that `looplane bench --shape 8b` makes up: writes down prompts and the
logits after them.

    full_size.py reference.safetensors
    LOOPLANE_FULL_SIZE_REFERENCE=reference.safetensors cargo test --workspace --lib full_size

Needs a GPU with 60 GB, torch and transformers. For each of 32 prompts of 10 to 4000 tokens: `ids.N`, `fp32.N` (the
logits of its last position, computed in fp32 on the bf16 weights) and `bf16.N` (as transformers computes them in bf16).
"""
import math, sys, time

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

PROMPTS, SHORTEST, LONGEST = 32, 10, 4000
SEED, DEVIATION, QUANTILES, PER_DRAW = 1, 0.02, 1 << 14, 4  # worker/src/cuda/weights/random.rs
# LayerTensor in worker/src/model/tensors.rs
KINDS = {"q_proj": 1, "k_proj": 2, "v_proj": 3, "o_proj": 9, "gate_proj": 11, "up_proj": 12, "down_proj": 13}
CONFIG = LlamaConfig(hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
                     head_dim=128, intermediate_size=14336, vocab_size=128256, max_position_embeddings=131072,
                     rms_norm_eps=1e-5, rope_theta=500000.0,
                     rope_parameters={"rope_type": "default", "rope_theta": 500000.0}, tie_word_embeddings=False)


def signed(z):
    return (z & (1 << 64) - 1) - (z >> 63 & 1) * (1 << 64)


def mix(z):
    """Of one int or of int64 tensors, which wrap; shifts are logical."""
    def step(z, shift):
        return z ^ (z >> shift & (1 << 64 - shift) - 1)
    number = isinstance(z, int)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = step(z, shift) * signed(factor)
        z = z & (1 << 64) - 1 if number else z
    return step(z, 31)


def quantiles(deviation):
    def normal(p):
        low, high = -8.0, 8.0
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if 0.5 * math.erfc(-middle / math.sqrt(2)) < p else (low, middle)
        return (low + high) / 2
    values = [normal((i + 0.5) / QUANTILES) * deviation for i in range(QUANTILES)]
    return torch.tensor(values, dtype=torch.float64).bfloat16().float().cuda()


def fill(parameter, name, table):
    """Weight n is 14 bits of draw n / 4 of the tensor called `name`."""
    key = signed(mix(SEED ^ name * 0x9E3779B97F4A7C15 & (1 << 64) - 1))
    draws = mix(torch.arange(parameter.numel() // PER_DRAW, device="cuda") ^ key)
    places = torch.stack([draws >> 16 * i & QUANTILES - 1 for i in range(PER_DRAW)], dim=-1)
    parameter.data.copy_(table[places.view(-1)].view(parameter.shape))


def main(path):
    begun = time.time()
    with torch.device("cuda"):
        model = LlamaForCausalLM(CONFIG).eval()
    plain, damped = quantiles(DEVIATION), quantiles(DEVIATION / math.sqrt(2 * CONFIG.num_hidden_layers))
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        if "norm" in name:
            parameter.data.fill_(1)
        elif "layers" in parts:
            kind = parts[-2]
            fill(parameter, 3 + int(parts[2]) * 32 + KINDS[kind], damped if kind in ("o_proj", "down_proj") else plain)
        else:
            fill(parameter, 1 if "lm_head" in name else 0, plain)
    print(f"weights after {time.time() - begun:.1f} s")
    lengths = [round(SHORTEST * (LONGEST / SHORTEST) ** (i / (PROMPTS - 1))) for i in range(PROMPTS)]
    generator = torch.Generator().manual_seed(SEED)
    prompts = [
        torch.randint(CONFIG.vocab_size, (length,), generator=generator, dtype=torch.int32) for length in lengths
    ]
    found = {f"ids.{i}": prompt for i, prompt in enumerate(prompts)}
    frequencies = model.model.rotary_emb.inv_freq.clone()
    for kind, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        model.to(dtype)
        model.model.rotary_emb.inv_freq = frequencies  # stays fp32, as from_pretrained leaves it
        for i, prompt in enumerate(prompts):
            with torch.no_grad():
                found[f"{kind}.{i}"] = model(prompt[None].long().cuda(), logits_to_keep=1).logits[0, -1].float().cpu()
        print(f"{kind} after {time.time() - begun:.1f} s")
    save_file(found, path)


if __name__ == "__main__":
    main(sys.argv[1])
