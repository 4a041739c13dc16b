"""vLLM's DFlash modelling code on plain torch layers: causality per layer, context K/V path, decoder layers.

The file qwen3_dflash.py is executed as it is, with everything it imports from the rest of vLLM replaced by the least
that gives the same numbers on one device in float32. What is replaced is listed in DEVIATIONS.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Qwen3Config

from drafter_originals.case import (
    ANCHOR_POSITIONS,
    ANCHOR_TOKEN_IDS,
    HIDDEN_SIZE,
    MASK_TOKEN_ID,
    NUM_ROWS,
    NUM_TARGET_LAYERS,
    QWEN3_FIELDS,
    SOFTCAP,
    TARGET_LAYER_IDS,
    Case,
    anchors,
    block_ids,
    drawn,
    fill,
    generator_of,
)

ORIGINAL = "vllm 0.33.0 (PyPI wheel), model_executor/models/qwen3_dflash.py"
MODELS = Path("vllm/model_executor/models")
AUX_LAYERS = Path("vllm/v1/worker/gpu/spec_decode/eagle/eagle3_utils.py")
NUM_SLOTS = 8
DEVIATIONS = [
    "vLLM's parallel linears, RMSNorm, SwiGLU MLP, rotary embedding, embedding and their kernels are plain torch",
    "attention is a softmax under an explicit mask over a list of keys: a row sees the last sliding_window positions, "
    "itself included, and later slots only where get_draft_attn_causal() says the layer is not causal",
    "block embeddings are multiplied by sqrt(hidden_size) and logits soft-capped outside; stock vLLM 0.33 does neither",
    "rows 1 .. B-1 of the block are taken as drafts, as the speculator's Triton kernel does",
    "taps are random numbers",
]


class _Norm(nn.Module):
    """RMS norm; with a residual, of the sum, which it returns too."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(size)), eps

    def forward(self, hidden: Tensor, residual: Tensor | None = None) -> Any:
        total = hidden if residual is None else hidden + residual
        normed = _normed(total, self.weight, self.variance_epsilon)
        return normed if residual is None else (normed, total)


class _Linear(nn.Module):
    """weight [out, in]; the output alone or with a bias that is never there, as the caller unpacks it."""

    def __init__(self, input_size: int, output_size: int, *, return_bias: bool = True, **_: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(output_size, input_size))
        self.input_size, self.return_bias, self.bias = input_size, return_bias, None
        self.quant_method = _Unquantized()

    def forward(self, inputs: Tensor) -> Any:
        outputs = functional.linear(inputs, self.weight)
        return (outputs, None) if self.return_bias else outputs


class _Unquantized:
    """Says of a linear that its weight may be read."""


class _QkvLinear(_Linear):
    """Rows of q, k and v in this order."""

    def __init__(self, hidden_size: int, head_dim: int, num_heads: int, num_kv_heads: int, **_: Any) -> None:
        super().__init__(hidden_size, (num_heads + 2 * num_kv_heads) * head_dim)


class _Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden_size: int, intermediate_size: int, hidden_act: str, **_: Any) -> None:
        super().__init__()
        assert hidden_act == "silu"
        self.gate_up_proj = _Linear(hidden_size, 2 * intermediate_size, return_bias=False)
        self.down_proj = _Linear(intermediate_size, hidden_size, return_bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(hidden).chunk(2, dim=-1)
        return self.down_proj(functional.silu(gate) * up)


class _Rope(nn.Module):
    """NeoX rotary embedding; cos_sin_cache [P, D] holds cos of the D/2 angles, then sin."""

    def __init__(self, head_size: int, max_position: int, is_neox_style: bool, rope_parameters: dict[str, Any]) -> None:
        super().__init__()
        inv_freq = rope_parameters["rope_theta"] ** (-torch.arange(0, head_size, 2).double() / head_size)
        angles = torch.arange(max_position).double()[:, None] * inv_freq
        self.cos_sin_cache = torch.cat([angles.cos(), angles.sin()], dim=-1).float()
        self.head_size, self.is_neox_style = head_size, is_neox_style

    def forward(self, positions: Tensor, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        for heads in (queries, keys):
            _rotate(positions, heads, None, self.head_size, self.cos_sin_cache, self.is_neox_style)
        return queries, keys


class _Attention(nn.Module):
    """Attention over the context that do_kv_cache_update wrote and the rows at hand; one request at a time."""

    def __init__(
        self, num_heads: int, head_size: int, scale: float, *, per_layer_sliding_window: int | None, **options: Any
    ) -> None:
        super().__init__()
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.num_kv_heads, self.window = options["num_kv_heads"], per_layer_sliding_window
        self.layer_name, self.kv_cache = options["prefix"], None
        self.context: tuple[Tensor, Tensor] | None = None
        self.is_causal: bool | None = None  # the engine tells it, from get_draft_attn_causal

    @property
    def impl(self) -> _Attention:
        return self

    def do_kv_cache_update(self, layer: nn.Module, keys: Tensor, values: Tensor, _cache: None, slots: Tensor) -> None:
        assert layer is self
        assert len(slots) == len(keys)
        self.context = keys, values

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        assert self.context is not None
        assert self.is_causal is not None
        shape = (len(keys), self.num_kv_heads, self.head_size)
        keys, values = (
            torch.cat([old, new.view(shape)]).repeat_interleave(self.num_heads // self.num_kv_heads, dim=1)
            for old, new in zip(self.context, (keys, values), strict=True)
        )
        scores = torch.einsum("rhd,shd->hrs", queries.view(len(queries), self.num_heads, -1), keys) * self.scale
        positions = torch.arange(len(keys))
        ages = positions[-len(queries) :, None] - positions
        visible = torch.ones_like(ages, dtype=torch.bool) if self.window is None else ages < self.window
        if self.is_causal:
            visible = visible & (ages >= 0)
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        return torch.einsum("hrs,shd->rhd", weights, values).flatten(1)


def _normed(inputs: Tensor, weight: Tensor, eps: float) -> Tensor:
    return inputs * (inputs.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def _rms_norm(out: Tensor, inputs: Tensor, weight: Tensor, eps: float) -> None:
    """vLLM's kernel: a weight [L, D] belongs to the outermost dimension of the inputs."""
    if weight.ndim == 2:
        weight = weight.view(len(weight), *[1] * (inputs.ndim - 2), -1)
    out.copy_(_normed(inputs, weight, eps))


def _rotate(positions: Tensor, heads: Tensor, _: None, head_size: int, cos_sin: Tensor, is_neox: bool) -> None:
    """vLLM's kernel, in place: heads [R, H * D]."""
    assert is_neox
    cos, sin = cos_sin[positions][:, None].chunk(2, dim=-1)
    split = heads.view(len(heads), -1, head_size)
    first, second = split.clone().chunk(2, dim=-1)
    split.copy_(torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1))


def _stand_ins(aux_layers: Any) -> dict[str, dict[str, Any]]:
    """Module name -> what qwen3_dflash.py takes from it."""
    layers, engine = "vllm.model_executor.layers", SimpleNamespace(use_v2_model_runner=True, cache_config=None)
    names_only: dict[str, tuple[str, ...]] = {
        "vllm.config": ("CacheConfig", "VllmConfig"),
        f"{layers}.logits_processor": ("LogitsProcessor",),
        f"{layers}.quantization.base_config": ("QuantizationConfig",),
        "vllm.model_executor.model_loader.weight_utils": ("make_attention_sink",),
        "vllm.multimodal.inputs": ("NestedTensors",),
        "vllm.transformers_utils.repo_utils": ("get_hf_file_bytes",),
        "vllm.model_executor.models.qwen3": ("Qwen3ForCausalLM",),
        "vllm.model_executor.models.utils": ("AutoWeightsLoader", "process_eagle_weight"),
    }
    found: dict[str, dict[str, Any]] = {
        name: {each: type(each, (nn.Module,), {}) for each in each_names} for name, each_names in names_only.items()
    }
    found["vllm.config"]["get_current_vllm_config"] = lambda: engine
    found["vllm.model_executor.models.utils"] |= {
        "WeightsMapper": lambda **_: None,
        "get_draft_quant_config": lambda _: None,
        "map_draft_quant_config": lambda *_: None,
        "maybe_prefix": lambda prefix, name: f"{prefix}.{name}" if prefix else name,
    }
    return found | {
        "regex": {"compile": re.compile},
        "vllm": {"_custom_ops": SimpleNamespace(rms_norm=_rms_norm, rotary_embedding=_rotate)},
        "vllm.compilation.decorators": {"support_torch_compile": lambda each: each},
        "vllm.distributed": {"get_tensor_model_parallel_world_size": lambda: 1},
        "vllm.logger": {"init_logger": lambda _: None},
        f"{layers}.attention": {"Attention": _Attention},
        f"{layers}.layernorm": {"RMSNorm": _Norm},
        f"{layers}.linear": {
            "QKVParallelLinear": _QkvLinear,
            "ReplicatedLinear": _Linear,
            "RowParallelLinear": _Linear,
            "UnquantizedLinearMethod": _Unquantized,
        },
        f"{layers}.rotary_embedding": {"get_rope": _Rope},
        f"{layers}.vocab_parallel_embedding": {
            "ParallelLMHead": nn.Linear,
            "VocabParallelEmbedding": lambda rows, size, **_: nn.Embedding(rows, size),
        },
        "vllm.platforms": {"current_platform": SimpleNamespace(is_rocm=lambda: False)},
        "vllm.transformers_utils.config": {"set_default_rope_theta": lambda *_, **__: None},
        "vllm.v1.attention.backend": {"AttentionType": SimpleNamespace(DECODER="decoder")},
        "vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils": {"get_eagle3_aux_layers_from_config": aux_layers},
        "vllm.model_executor.models.qwen2": {"Qwen2MLP": _Mlp},
    }


def lifted(root: Path) -> tuple[ModuleType, Any]:
    """qwen3_dflash.py as a module, and eagle3_utils.get_eagle3_aux_layers_from_config as a function."""
    tree = ast.parse((root / AUX_LAYERS).read_text())
    wanted = [node for node in tree.body if getattr(node, "name", None) == "get_eagle3_aux_layers_from_config"]
    scope: dict[str, Any] = {"SpeculativeConfig": object}
    exec(compile(ast.Module(wanted, []), str(AUX_LAYERS), "exec"), scope)
    aux_layers = scope["get_eagle3_aux_layers_from_config"]
    for name, members in _stand_ins(aux_layers).items():
        module = sys.modules[name] = ModuleType(name)
        module.__dict__.update(members, __path__=[])
    name = "vllm.model_executor.models.qwen3_dflash"
    spec = importlib.util.spec_from_file_location(name, root / MODELS / "qwen3_dflash.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module, aux_layers


def published(model: nn.Module, config: Qwen3Config) -> dict[str, Tensor]:
    """vLLM's fused weights under the names z-lab publishes; the embedding is the target's."""
    q_size, inner = config.num_attention_heads * config.head_dim, config.intermediate_size
    kv_size = config.num_key_value_heads * config.head_dim
    tensors = {}
    for name, weight in model.state_dict().items():
        if name.endswith("qkv_proj.weight"):
            parts = dict(zip("qkv", weight.split([q_size, kv_size, kv_size]), strict=True))
            tensors |= {name.replace("qkv_proj", f"{part}_proj"): rows for part, rows in parts.items()}
        elif name.endswith("gate_up_proj.weight"):
            parts = dict(zip(("gate", "up"), weight.split(inner), strict=True))
            tensors |= {name.replace("gate_up_proj", f"{part}_proj"): rows for part, rows in parts.items()}
        elif name not in ("embed_tokens.weight", "mask_embedding"):
            tensors[name] = weight
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


@torch.no_grad()
def _block_logits(model: nn.Module, taps: Tensor, *, anchor: int, position: int) -> Tensor:
    """Soft-capped logits [NUM_SLOTS - 1, V] of one block."""
    rows = torch.arange(position)
    model.precompute_and_store_context_kv(model.fc(taps[:position]), rows, context_slot_mapping=rows)
    ids = block_ids(anchor, NUM_SLOTS)[0]
    embeds = model.embed_input_ids(ids) * HIDDEN_SIZE**0.5
    hidden = model(ids, torch.arange(position, position + NUM_SLOTS), embeds)
    return SOFTCAP * torch.tanh(functional.linear(hidden[1:], model.embed_tokens.weight) / SOFTCAP)


def vllm_case(name: str, *, root: Path, seed: int) -> Case:
    """A drafter of z-lab's layout whose config leaves causality open."""
    from safetensors.torch import save_file

    config = Qwen3Config(
        **QWEN3_FIELDS,
        architectures=["DFlashDraftModel"],
        block_size=NUM_SLOTS,
        num_target_layers=NUM_TARGET_LAYERS,
        final_logit_softcapping=SOFTCAP,
        dflash_config={"mask_token_id": MASK_TOKEN_ID, "target_layer_ids": TARGET_LAYER_IDS},
    )
    source, aux_layers = lifted(root)
    speculative = SimpleNamespace(draft_model_config=SimpleNamespace(hf_config=config))
    engine = SimpleNamespace(speculative_config=speculative, model_config=SimpleNamespace(dtype=torch.float32))
    model = source.DFlashQwen3Model(vllm_config=engine).eval()
    generator = generator_of(seed)
    fill(model, generator)
    model._build_fused_kv_buffers()
    wrapper = SimpleNamespace(model=model)
    causal = source.DFlashQwen3ForCausalLM.get_draft_attn_causal(wrapper)
    for layer, is_causal in zip(model.layers, causal, strict=True):
        layer.self_attn.attn.is_causal = is_causal
    taps = drawn(generator, NUM_ROWS, len(TARGET_LAYER_IDS) * HIDDEN_SIZE, scale=2.0)
    blocks = [
        _block_logits(model, taps, anchor=anchor, position=position)
        for anchor, position in zip(ANCHOR_TOKEN_IDS, ANCHOR_POSITIONS, strict=True)
    ]

    def save(folder: Path) -> None:
        config.save_pretrained(folder)
        save_file(published(model, config), folder / "model.safetensors")

    return Case(
        name=name,
        original=ORIGINAL,
        how="DFlashQwen3Model: fc, precompute_and_store_context_kv for the context, forward for the block",
        deviations=DEVIATIONS,
        seed=seed,
        save=save,
        golden={
            **anchors(),
            "taps": taps,
            "embed_tokens": model.embed_tokens.weight.detach(),
            "base_logits": torch.stack(blocks),
        },
        facts={"layer_is_causal": causal, "aux_layers": list(aux_layers(speculative))},
    )
