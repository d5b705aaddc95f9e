"""False findings of rules on honest checkpoints: `python benchmarks/honest_checkpoints.py`.

Each checkpoint is the state_dict of a real class, made small: every architecture of transformers that can be built from
a configuration with 12 layers, with random weights and after three steps of AdamW, and what torch.nn is used for.
Prints each finding and the number of checkpoints; exits with status 1 for 1 finding in 100 checkpoints or more.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from statecli.commands.audit.run import Request, audit

RULES = ("outlier", "sibling-gap", "empty-tensor")
LAYERS = 12
SIZES = {
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers"), LAYERS),
    **dict.fromkeys(("decoder_layers", "num_decoder_layers", "depth"), LAYERS),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "emb_dim"), 32),
    **dict.fromkeys(("intermediate_size", "d_ff", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "hidden_dim"), 64),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads",), 4),
    **dict.fromkeys(("head_dim", "d_kv", "kv_lora_rank", "q_lora_rank"), 8),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 8),
    **dict.fromkeys(("n_group", "topk_group", "bos_token_id"), 1),
    **dict.fromkeys(("num_key_value_heads", "eos_token_id"), 2),
    "vocab_size": 128,
    "moe_intermediate_size": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
TYPES = """
albert apertus arcee bart bert bert-generation bigbird_pegasus biogpt bitnet blenderbot bloom camembert
codegen cohere convbert convnext cpmant ctrl dbrx deberta deberta-v2 deepseek_v2 deepseek_v3 deit distilbert
dinov2 dinov2_with_registers electra ernie esm falcon falcon_mamba flaubert fnet fsmt gemma gemma2 gemma3_text
git glm glm4 gpt2 gpt_bigcode gpt_neo gpt_neox gpt_oss gptj granite granitemoe helium hubert ibert jamba
jetmoe led llama longformer lxmert m2m_100 mamba mamba2 marian mbart megatron-bert minimax mistral mixtral
mobilebert modernbert mpnet mpt mvp nemotron nezha olmo olmo2 olmoe opt pegasus persimmon phi phi3 plbart
prophetnet qwen2 qwen2_moe qwen3 qwen3_moe recurrent_gemma rembert resnet roberta roc_bert roformer rwkv
smollm3 splinter squeezebert stablelm starcoder2 swin t5 mt5 umt5 vit vit_mae vitdet wav2vec2 wavlm whisper
xglm xlm xlm-roberta xlnet xmod yolos zamba
"""


def checkpoints() -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield names and state_dicts."""
    yield from _of_torch()
    for name in TYPES.split():
        yield from _of_transformers(name)


def _of_transformers(name: str) -> Iterator[tuple[str, dict[str, Tensor]]]:
    from transformers import AutoConfig, AutoModel

    torch.manual_seed(0)
    try:
        default = AutoConfig.for_model(name)
        known = {key: value for key, value in SIZES.items() if hasattr(default, key)}
        model = AutoModel.from_config(AutoConfig.for_model(name, **known))
    except Exception as error:  # noqa: BLE001  # a configuration whose sizes contradict each other
        print(f"  not built: {name}: {type(error).__name__}", file=sys.stderr)
        return
    yield name, model.state_dict()
    try:
        _train(model)
    except Exception as error:  # noqa: BLE001  # another kind of input
        print(f"  not trained: {name}: {type(error).__name__}", file=sys.stderr)
        return
    yield f"{name}, trained", model.state_dict()


def _train(model: nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        loss = model(input_ids=torch.randint(3, 100, (2, 8)))[0].float().pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def _of_torch() -> Iterator[tuple[str, dict[str, Tensor]]]:
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), LAYERS)
    yield "TransformerEncoder", encoder.state_dict()
    yield "TransformerEncoder in half", {key: value.half() for key, value in encoder.state_dict().items()}
    yield "LSTM", nn.LSTM(32, 32, num_layers=LAYERS).state_dict()
    convolutions = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(LAYERS)]
    net = nn.Sequential(nn.Conv2d(3, 8, 3), *convolutions, nn.Flatten(), nn.LazyLinear(4))
    net(torch.randn(4, 3, 8, 8) * 5)
    yield "convolutions after a forward in training mode", net.state_dict()
    embedding = nn.Embedding(1000, 32, padding_idx=0)
    yield "an embedding with a padding row", embedding.state_dict()
    embedding.weight.data[500:] *= 1e-6
    yield "an embedding with decayed rows", embedding.state_dict()
    layers = {f"layers.{n}.weight": torch.randn(64, 64) for n in range(LAYERS)}
    scales = {f"layers.{n}.weight_scale": torch.rand(64, 1) * 10 ** (-n / 4) for n in range(LAYERS)}
    yield "scales that shrink with the depth", layers | scales
    yield "heavy tails", {f"layers.{n}.weight": torch.distributions.StudentT(3.0).sample((256, 256)) for n in range(12)}
    gains = torch.ones(256)
    gains[17] = 40.0
    yield "a channel with a large gain", {f"layers.{n}.norm.weight": gains * (1 + n) for n in range(LAYERS)} | layers
    adapters = {f"layers.{n}.lora_A.weight": torch.randn(4, 64) for n in (2, 3, 5, 7, 9, 10)}
    yield "adapters on some layers", layers | adapters
    pruned = {key: value * (torch.rand(64, 64) > 0.95) for key, value in layers.items()}
    yield "pruned weights", pruned
    first_and_last = {f"layers.{n}.weight": torch.randn(64, 64).to(torch.bfloat16) for n in range(1, LAYERS - 1)}
    yield "first and last layer in float32", layers | first_and_last
    inv_freq = 1.0 / 10_000 ** (torch.arange(0, 128, 2) / 128)
    yield "rotary tables", {f"layers.{n}.inv_freq": inv_freq.clone() for n in range(LAYERS)} | layers


def main() -> int:
    """Audit all of them; return the exit status."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    count = findings = 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.pt"
        for name, state in checkpoints():
            torch.save(state, path)
            (target,) = audit(Request((str(path),), select=RULES, values=True, jobs=1)).targets
            count += 1
            findings += len(target.findings) + (set(target.ran) != set(RULES))
            for finding in target.findings:
                print(f"{name}: {finding.rule}: {finding.message}")
    print(f"{findings} findings on {count} honest checkpoints")
    return int(findings * 100 >= count)


if __name__ == "__main__":
    sys.exit(main())
