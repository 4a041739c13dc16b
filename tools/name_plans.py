"""Write tests/golden/name_plans/: names, dtypes and shapes of public checkpoints at full size, without their weights.

Targets are transformers' own classes on the meta device; their low-bit kin store each quantised Linear as its format
says. Drafters are written from published listings. Which is which stands in each plan as `evidence`. No network.

    python tools/name_plans.py                  # all plans; needs transformers
    python tools/name_plans.py --from DIR NAME  # the plan NAME, from the headers of a real checkpoint in DIR

The second form is for those who have the files: it replaces a derived plan by one that was read.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from outrider.weights.name_plan import SCHEMA, read_name_plan
from outrider.weights.safetensors_dir import check_files

FOLDER = Path(__file__).resolve().parent.parent / "tests" / "golden" / "name_plans"
Tensors = dict[str, tuple[str, tuple[int, ...]]]
Config = dict[str, Any]
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")

ROPE = {
    "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
    "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
}
TEXT = {
    "attention_bias": False,
    "bos_token_id": 2,
    "dtype": "bfloat16",
    "eos_token_id": 1,
    "final_logit_softcapping": 30.0,
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size_per_layer_input": 0,
    "max_position_embeddings": 262144,
    "num_kv_shared_layers": 0,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
    "rope_parameters": ROPE,
    "sliding_window": 1024,
    "tie_word_embeddings": True,
    "use_bidirectional_attention": "vision",
    "use_double_wide_mlp": False,
    "vocab_size": 262144,
}
SMALL_TEXT = {
    **TEXT,
    "attention_k_eq_v": False,
    "hidden_size_per_layer_input": 256,
    "max_position_embeddings": 131072,
    "num_attention_heads": 8,
    "num_global_key_value_heads": None,
    "sliding_window": 512,
    "use_bidirectional_attention": None,
    "vocab_size_per_layer_input": 262144,
}
VISION = {
    "head_dim": 72,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "standardize": True,
}
SMALL_VISION = {"use_clipped_linears": True}  # the other sizes are transformers' defaults


def layer_types(num_layers: int, *, period: int = 6) -> list[str]:
    """Every `period`th layer is full."""
    return ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(num_layers)]


def target_config(num_layers: int, text: Config, *, period: int = 6, unified: bool = False, **parts: Any) -> Config:
    """A checkpoint's config.json; `parts` are vision_config and audio_config."""
    kind = "gemma4_unified" if unified else "gemma4"
    layers = {"num_hidden_layers": num_layers, "layer_types": layer_types(num_layers, period=period)}
    return {
        "architectures": [f"Gemma4{'Unified' if unified else ''}ForConditionalGeneration"],
        "model_type": kind,
        "dtype": "bfloat16",
        "eos_token_id": [1, 106],
        "tie_word_embeddings": True,
        "text_config": {"model_type": f"{kind}_text", **text, **layers},
        **{
            name: None if part is None else {"model_type": f"{kind}_{name[:-7]}", **part}
            for name, part in parts.items()
        },
    }


SHAPES: dict[str, tuple[int, Config]] = {
    "31B": (
        31273088876,
        target_config(
            60,
            {
                **TEXT,
                "attention_k_eq_v": True,
                "hidden_size": 5376,
                "intermediate_size": 21504,
                "num_attention_heads": 32,
                "num_key_value_heads": 16,
                "num_global_key_value_heads": 4,
            },
            vision_config=VISION,
            audio_config=None,
        ),
    ),
    "26B-A4B": (
        25805936206,
        target_config(
            30,
            {
                **TEXT,
                "attention_k_eq_v": True,
                "enable_moe_block": True,
                "hidden_size": 2816,
                "intermediate_size": 2112,
                "moe_intermediate_size": 704,
                "num_attention_heads": 16,
                "num_experts": 128,
                "num_key_value_heads": 8,
                "num_global_key_value_heads": 2,
                "top_k_experts": 8,
            },
            vision_config=VISION,
            audio_config=None,
        ),
    ),
    "12B": (
        11959730224,
        target_config(
            48,
            {
                **TEXT,
                "attention_k_eq_v": True,
                "hidden_size": 3840,
                "intermediate_size": 15360,
                "num_attention_heads": 16,
                "num_key_value_heads": 8,
                "num_global_key_value_heads": 1,
            },
            unified=True,
            vision_config={},
            audio_config={},
        ),
    ),
    "E4B": (
        7996156490,
        target_config(
            42,
            {
                **SMALL_TEXT,
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "num_key_value_heads": 2,
                "num_kv_shared_layers": 18,
            },
            vision_config=SMALL_VISION,
            audio_config={},
        ),
    ),
    "E2B": (
        5123178051,
        target_config(
            35,
            {
                **SMALL_TEXT,
                "hidden_size": 1536,
                "intermediate_size": 6144,
                "num_key_value_heads": 1,
                "num_kv_shared_layers": 20,
                "use_double_wide_mlp": True,
            },
            period=5,
            vision_config=SMALL_VISION,
            audio_config={},
        ),
    ),
}
MODULES = "transformers' classes on the meta device"


def meta_tensors(config: Config) -> Tensors:
    """Names and shapes of the model that transformers makes of a config; the head is the embedding, so not stored."""
    import torch
    import transformers

    made = {key: value for key, value in config.items() if key.endswith("_config")}
    kind = "Gemma4Unified" if config["model_type"] == "gemma4_unified" else "Gemma4"
    with torch.device("meta"):
        model = getattr(transformers, f"{kind}ForConditionalGeneration")(
            getattr(transformers, f"{kind}Config")(**json.loads(json.dumps(made)))
        )
    return {name: ("BF16", tuple(t.shape)) for name, t in model.state_dict().items() if name != "lm_head.weight"}


def unused_keys_values(config: Config) -> Tensors:
    """Keys and values that E2B and E4B still hold for layers that read another's (formats.md §1.1)."""
    text = config["text_config"]
    first = text["num_hidden_layers"] - text["num_kv_shared_layers"]
    found: Tensors = {}
    for index, kind in enumerate(text["layer_types"][first:], start=first):
        head_dim = text["head_dim"] if kind == "sliding_attention" else text["global_head_dim"]
        prefix, size = f"model.language_model.layers.{index}.self_attn", text["num_key_value_heads"] * head_dim
        for name in ("k_proj", "v_proj"):
            found[f"{prefix}.{name}.weight"] = ("BF16", (size, text["hidden_size"]))
        found[f"{prefix}.k_norm.weight"] = ("BF16", (head_dim,))
    return found


def int4(name: str, shape: tuple[int, ...], *, group_size: int = 32) -> Tensors:
    """compressed-tensors `pack-quantized`, symmetric; a stack of matrices has no stored shape."""
    *stack, rows, columns = shape
    found: Tensors = {
        f"{name}_packed": ("I32", (*stack, rows, columns // 8)),
        f"{name}_scale": ("BF16", (*stack, rows, columns // group_size)),
    }
    return found if stack else {**found, f"{name}_shape": ("I64", (2,))}


def nvfp4(name: str, shape: tuple[int, ...]) -> Tensors:
    """ModelOpt's NVFP4 of a Linear, with the scale of its activations."""
    rows, columns = shape
    return {
        name: ("U8", (rows, columns // 2)),
        f"{name}_scale": ("F8_E4M3", (rows, columns // 16)),
        f"{name}_scale_2": ("F32", ()),
        f"{name.removesuffix('.weight')}.input_scale": ("F32", ()),
    }


def one_expert_each(tensors: Tensors) -> Tensors:
    """Fused experts as Linears of their own: experts.<e>.{gate,up,down}_proj.weight."""
    found: Tensors = {}
    for name, (dtype, shape) in tensors.items():
        prefix, _, part = name.partition(".experts.")
        if not part:
            found[name] = dtype, shape
            continue
        num_experts, rows, columns = shape
        parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
        for expert in range(num_experts):
            for each in parts:
                found[f"{prefix}.experts.{expert}.{each}.weight"] = dtype, (rows // len(parts), columns)
    return found


def packed(tensors: Tensors, pattern: str, layout: Any) -> Tensors:
    """The tensors, those whose name matches in another layout."""
    found: Tensors = {}
    for name, (dtype, shape) in tensors.items():
        found |= layout(name, shape) if re.fullmatch(pattern, name) else {name: (dtype, shape)}
    return found


def int4_declared(*ignored: str) -> Config:
    """A quantization_config of compressed-tensors int4 in groups of 32."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": list(ignored),
    }


def nvfp4_declared(*ignored: str) -> Config:
    """A quantization_config of ModelOpt's NVFP4, caches in fp8."""
    args = {"num_bits": 4, "type": "float", "group_size": 16}
    return {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": args, "input_activations": args}},
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False},
        "ignore": list(ignored),
    }


TEXT_LAYERS = r"model\.language_model\.layers\.\d+\."
QAT_LINEARS = (
    TEXT_LAYERS + r"((self_attn|mlp)\.\w+_proj|per_layer_input_gate|per_layer_projection)\.weight"
    r"|model\.language_model\.per_layer_model_projection\.weight"
)


def write_targets() -> None:
    """The five targets and their low-bit kin."""
    for size, (num_parameters, config) in SHAPES.items():
        plain = meta_tensors(config)
        stored, sources = plain | unused_keys_values(config), [MODULES, "published number of parameters"]
        if stored != plain:
            sources.append(
                "keys and values that layers reading another's do not use are stored: without them the "
                "published number of parameters is not met"
            )
        if size == "E4B":
            sources.append("a public reader's account of the real file: 2130 tensors, as here")
        write(f"gemma-4-{size}-it", f"google/gemma-4-{size}-it", config, stored, sources, num_parameters=num_parameters)
        if size != "26B-A4B":
            write_qat(size, config, plain)
    moe, dense = SHAPES["26B-A4B"][1], SHAPES["31B"][1]
    write_quantised_26b(moe, meta_tensors(moe))
    tensors = packed(meta_tensors(dense), TEXT_LAYERS + r"mlp\.\w+_proj\.weight", nvfp4)
    declared = nvfp4_declared("lm_head", "model.embed_vision*", "model.vision_tower*", "*.self_attn*")
    sources = [
        MODULES,
        "published quantization_config: only the MLPs are NVFP4",
        "ModelOpt's names of an export",
        "a public loader's account of the real headers: 1372 text tensors of 31481767960 bytes, as here",
    ]
    write(
        "Gemma-4-31B-IT-NVFP4",
        "nvidia/Gemma-4-31B-IT-NVFP4",
        {**dense, "quantization_config": declared},
        tensors,
        sources,
    )


def write_qat(size: str, config: Config, plain: Tensors) -> None:
    """Google's int4 of one size: every Linear of the text decoder."""
    name = f"gemma-4-{size}-it-qat-w4a16-ct"
    declared = int4_declared("lm_head", "re:.*vision.*", "re:.*audio.*")
    sources = [MODULES, "published format: pack-quantized int4, symmetric, groups of 32; lm_head and towers ignored"]
    tensors = packed(plain, QAT_LINEARS, int4)
    write(name, f"google/{name}", {**config, "quantization_config": declared}, tensors, sources)


def write_quantised_26b(config: Config, plain: Tensors) -> None:
    """The 26B-A4B with fused int4 experts, and with one NVFP4 Linear for each of an expert's matrices."""
    name = "gemma-4-26B-A4B-it-AWQ-4bit"
    matrices = TEXT_LAYERS + r"((self_attn|mlp)\.\w+_proj\.weight|experts\.\w+_proj)"
    declared = int4_declared("lm_head", "re:.*vision.*", "re:.*router.*")
    sources = [MODULES, "names and shapes of fused experts as loaders of this checkpoint quote them"]
    tensors = packed(plain, matrices, int4)
    write(name, f"cyankiwi/{name}", {**config, "quantization_config": declared}, tensors, sources)
    name = "Gemma-4-26B-A4B-NVFP4"
    ignored = ("lm_head", "model.embed_vision*", "model.vision_tower*", "*.self_attn*", "*.mlp.*", "*.router*")
    tensors = packed(one_expert_each(plain), TEXT_LAYERS + r"experts\.\d+\.\w+_proj\.weight", nvfp4)
    sources = [
        MODULES,
        "published quantization_config: experts are NVFP4",
        "ModelOpt's names of an export: one Linear each",
    ]
    write(name, f"nvidia/{name}", {**config, "quantization_config": nvfp4_declared(*ignored)}, tensors, sources)


DRAFTER = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "attention_bias": False,
    "block_size": 16,
    "bos_token_id": 2,
    "dtype": "bfloat16",
    "eos_token_id": 1,
    "final_logit_softcapping": 30.0,
    "head_dim": 128,
    "hidden_act": "silu",
    "layer_types": layer_types(5, period=5),
    "mask_token_id": 4,
    "max_position_embeddings": 262144,
    "max_window_layers": 5,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": 2048,
    "use_sliding_window": True,
    "vocab_size": 262144,
}
DRAFTER_31B = {
    **DRAFTER,
    "hidden_size": 5376,
    "intermediate_size": 10752,
    "num_attention_heads": 64,
    "num_target_layers": 60,
    "target_layer_ids": [1, 12, 23, 35, 46, 57],
    "tie_word_embeddings": True,
}
DRAFTER_26B = {
    **DRAFTER,
    "hidden_size": 2816,
    "intermediate_size": 5632,
    "num_attention_heads": 32,
    "num_target_layers": 30,
    "target_layer_ids": [1, 6, 11, 17, 22, 27],
    "tie_word_embeddings": False,
}
MARKOV = {"markov_rank": 256, "markov_head_type": "vanilla"}
DSPARK_12B = {
    **TEXT,  # DeepSpec writes a whole text config; what nobody quotes of it is taken to be the target's
    "architectures": ["Gemma4DSparkModel"],
    "model_type": "gemma4_text",
    "attention_k_eq_v": True,
    "block_size": 7,
    "confidence_head_with_markov": True,
    "enable_confidence_head": True,
    "hidden_size": 3840,
    "intermediate_size": 15360,
    "layer_types": ["full_attention"] * 5,
    "mask_token_id": 4,
    "num_anchors": 512,
    "num_attention_heads": 16,
    "num_global_key_value_heads": 1,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 48,
    "target_layer_ids": [5, 17, 29, 41, 46],
    "tie_word_embeddings": False,
    **MARKOV,
}


def dflash_tensors(config: Config) -> Tensors:
    """The 58 tensors of a z-lab drafter (formats.md §2.2)."""
    size, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (size, size * len(config["target_layer_ids"])),
        "hidden_norm.weight": (size,),
        "norm.weight": (size,),
    }
    for index in range(config["num_hidden_layers"]):
        layer = {
            "input_layernorm": (size,),
            "post_attention_layernorm": (size,),
            "self_attn.q_proj": (queries, size),
            "self_attn.k_proj": (keys, size),
            "self_attn.v_proj": (keys, size),
            "self_attn.o_proj": (size, queries),
            "self_attn.q_norm": (head_dim,),
            "self_attn.k_norm": (head_dim,),
            "mlp.gate_proj": (inner, size),
            "mlp.up_proj": (inner, size),
            "mlp.down_proj": (size, inner),
        }
        shapes |= {f"layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    return {name: ("BF16", shape) for name, shape in shapes.items()}


def dspark_tensors() -> Tensors:
    """The 74 tensors of DeepSeek's drafter for the 12B (formats.md §3.5)."""
    size, inner, heads, head_dim, vocabulary, rank = 3840, 15360, 16, 512, 262144, 256
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (vocabulary, size),
        "lm_head.weight": (vocabulary, size),
        "fc.weight": (size, 5 * size),
        "hidden_norm.weight": (size,),
        "norm.weight": (size,),
        "markov_head.markov_w1.weight": (vocabulary, rank),
        "markov_head.markov_w2.weight": (vocabulary, rank),
        "confidence_head.proj.weight": (1, size + rank),
        "confidence_head.proj.bias": (1,),
    }
    norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    for index in range(5):
        layer = {f"{name}_layernorm.weight": (size,) for name in norms} | {
            "layer_scalar": (1,),
            "self_attn.q_proj.weight": (heads * head_dim, size),
            "self_attn.k_proj.weight": (head_dim, size),
            "self_attn.o_proj.weight": (size, heads * head_dim),
            "self_attn.q_norm.weight": (head_dim,),
            "self_attn.k_norm.weight": (head_dim,),
            "mlp.gate_proj.weight": (inner, size),
            "mlp.up_proj.weight": (inner, size),
            "mlp.down_proj.weight": (size, inner),
        }
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    return {name: ("BF16", shape) for name, shape in shapes.items()}


def write_drafters() -> None:
    """z-lab's two, DeepSeek's for the 12B, and the hybrid in its two variants."""
    listing = ["published listing of names and shapes", "published config.json"]
    for name, config in (("gemma-4-31B-it-DFlash", DRAFTER_31B), ("gemma-4-26B-A4B-it-DFlash", DRAFTER_26B)):
        write(name, f"z-lab/{name}", config, dflash_tensors(config), listing, evidence="read")
    name = "dspark_gemma4_12b_block7"
    config_source = "published config.json; fields not quoted of it are those of its target"
    write(name, f"deepseek-ai/{name}", DSPARK_12B, dspark_tensors(), [listing[0], config_source], evidence="read")
    markov: Tensors = {f"markov_head.markov_{part}.weight": ("BF16", (262144, 256)) for part in ("w1", "w2")}
    name = "DSpark-Gemma-4-31B-draft"
    sources = ["its card: z-lab's backbone for the 31B, retrained, with a vanilla Markov head of rank 256"]
    backbone = dflash_tensors(DRAFTER_31B)
    write(name, f"Hikari07jp/{name}", {**DRAFTER_31B, **MARKOV}, backbone | markov, sources)
    write(f"{name}-backbone-only", f"Hikari07jp/{name}/backbone-only", DRAFTER_31B, backbone, sources)


def compress(tensors: Tensors) -> dict[str, list[Any]]:
    """Names that differ in numbers only, written together: what `expand_name` undoes."""
    groups: dict[tuple[str, str, tuple[int, ...]], set[tuple[int, ...]]] = defaultdict(set)
    for name, (dtype, shape) in tensors.items():
        numbers = tuple(int(number) for number in _NUMBER.findall(name))
        groups[_NUMBER.sub("#", name), dtype, shape].add(numbers)
    found: dict[str, list[Any]] = {}
    for (template, dtype, shape), members in groups.items():
        for choices in _products(members):
            texts = template.split("#")
            listed = [_listed(choice) for choice in choices]
            name = texts[0] + "".join(number + text for number, text in zip(listed, texts[1:], strict=True))
            found[name] = [dtype, list(shape)]
    return found


def _products(members: set[tuple[int, ...]]) -> list[list[list[int]]]:
    """Tuples of numbers as products of lists: those that share what follows their first number stand together."""
    if members == {()}:
        return [[]]
    rests: dict[int, set[tuple[int, ...]]] = defaultdict(set)
    for first, *rest in members:
        rests[first].add(tuple(rest))
    alike: dict[frozenset[tuple[int, ...]], list[int]] = defaultdict(list)
    for first in sorted(rests):
        alike[frozenset(rests[first])].append(first)
    return [[firsts, *others] for rest, firsts in alike.items() for others in _products(set(rest))]


def _listed(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> "{0-2,5}"; one number stands by itself."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    listed = ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return listed if len(numbers) == 1 else f"{{{listed}}}"


def write(
    name: str,
    checkpoint: str,
    config: Config,
    tensors: Tensors,
    sources: list[str],
    *,
    evidence: str = "derived",
    num_parameters: int | None = None,
) -> None:
    """One plan, a tensor a line."""
    folder = FOLDER / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    facts = {
        "schema": SCHEMA,
        "checkpoint": checkpoint,
        "evidence": evidence,
        "sources": sources,
        "num_parameters": num_parameters,
    }
    head = "".join(f" {json.dumps(key)}: {json.dumps(value)},\n" for key, value in facts.items())
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in compress(tensors).items())
    (folder / "tensors.json").write_text(f'{{\n{head} "tensors": {{\n{lines}\n }}\n}}\n')
    found = {key: (header.dtype, header.shape) for key, header in read_name_plan(folder).headers.items()}
    assert found == tensors, f"{name} does not read back"


def write_from(source: Path, name: str) -> None:
    """The plan `name` from the files of a real checkpoint: its config, and what its headers say. No tensor is read."""
    tensors = {key: (file.dtypes[key], file.shapes[key]) for key, file in check_files(source).items()}
    config = json.loads((source / "config.json").read_text())
    known = read_name_plan(FOLDER / name) if (FOLDER / name).is_dir() else None
    found = sum(math.prod(shape) for _, shape in tensors.values() if shape)  # what is published counts no scalars
    if known and known.num_parameters not in (None, found):
        sys.exit(
            f"{source} has {found} parameters, but {known.checkpoint} was published with "
            f"{known.num_parameters}: it is another checkpoint. Give the plan another NAME."
        )
    checkpoint = known.checkpoint if known else name
    num_parameters = known.num_parameters if known else None
    sources = ["headers of the checkpoint's own files"]
    write(name, checkpoint, config, tensors, sources, evidence="read", num_parameters=num_parameters)


def main() -> None:
    """Write all plans, or one from a real checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", nargs=2, metavar=("DIR", "NAME"), dest="source")
    arguments = parser.parse_args()
    if arguments.source:
        write_from(Path(arguments.source[0]), arguments.source[1])
        return
    write_targets()
    write_drafters()


if __name__ == "__main__":
    main()
