"""Which tensors make up a stored weight, by layout: planned and checked from headers alone, then read one at a time."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.errors import WeightsError
from outrider.weights.low_bit import INT4_PER_WORD, Float8Weight, Int4Weight, Nvfp4Weight
from outrider.weights.packed import BlockInt8Weight, DenseWeight, PackedWeight
from outrider.weights.quantization import Layout, Scheme
from outrider.weights.safetensors_file import DTYPES, check_finite

_FLOATS = ("F32", "F16", "BF16")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
# Numbers of these kinds mean nothing without scales.
_NEED_SCALES = {"I8": "int8", "U8": "uint8", "F8_E4M3": "float8", "F8_E5M2": "float8"}
# Scales of activations and caches: we keep both in full precision.
_UNUSED_SUFFIXES = (".input_scale", ".input_global_scale", ".output_scale", ".q_scale", ".k_scale", ".v_scale")
_STRAY_SUFFIXES = (
    "_packed",
    "weight_scale",
    "_proj_scale",
    "_zero_point",
    "_global_scale",
    "weight_scale_2",
    "_shape",
    "_g_idx",
)


class Header(NamedTuple):
    """What a file's header says about one tensor."""

    path: Path
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """What the tensor takes in the file."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def blank(self) -> Tensor:
        """A tensor of this dtype and shape on the meta device, without numbers."""
        return torch.empty(self.shape, dtype=DTYPES[self.dtype], device="meta")


@dataclass(frozen=True)
class Parts:
    """The tensors of a layout: the suffix of the main one with its dtypes, and those of its companions."""

    main: str
    main_dtypes: tuple[str, ...]
    companions: Mapping[str, tuple[str, tuple[str, ...]]]
    """Suffix and dtypes by role."""


_SCALES = ("_scale", _FLOATS)
_PARTS = {
    Layout.INT8: Parts("", ("I8",), {"scales": _SCALES}),
    Layout.INT4: Parts("_packed", ("I32",), {"scales": _SCALES}),
    Layout.FLOAT8: Parts("", ("F8_E4M3",), {"scales": _SCALES}),
    Layout.MODELOPT_FLOAT8: Parts("", ("F8_E4M3",), {"scales": _SCALES}),
    Layout.NVFP4: Parts(
        "_packed", ("U8",), {"scales": ("_scale", ("F8_E4M3",)), "global_scale": ("_global_scale", ("F32",))}
    ),
    Layout.MODELOPT_NVFP4: Parts(
        "", ("U8",), {"scales": ("_scale", ("F8_E4M3",)), "global_scale": ("_scale_2", ("F32",))}
    ),
}
_ZERO_POINTS, _SHAPE = ("_zero_point", ("I32",)), ("_shape", ("I64",))


@dataclass(frozen=True)
class Plan:
    """One weight: its name, and the stored tensor of each role. A plain tensor has the role "values" only."""

    name: str
    tensors: Mapping[str, str]
    scheme: Scheme | None = None


def plan_weights(headers: Mapping[str, Header], scheme: Scheme | None, *, source: Path) -> dict[str, Plan]:
    """The weights that stored tensors make up, by name. No tensor is read.

    WeightsError, naming the tensor, where dtypes, shapes, companions or the list of ignored modules contradict
    the scheme; also where nothing at all is stored as the scheme says.
    """
    plans: dict[str, Plan] = {}
    used: set[str] = set()
    for main in headers if scheme else ():
        base = _base_name(main, headers[main], scheme)
        if scheme is None or base is None:
            continue
        plans[base] = _packed_plan(main, base, headers, scheme)
        used.update(plans[base].tensors.values())
    if scheme and not plans:
        raise WeightsError(f"{source} declares {scheme.layout} weights, but has no tensor stored so.")
    plain = [name for name in headers if name not in used and not (scheme and name.endswith(_UNUSED_SUFFIXES))]
    _check_plain(plain, headers, scheme)
    _check_left_plain(plain, plans, headers, scheme)
    for name in plain:
        if name in plans:
            raise WeightsError(f"{headers[name].path}: tensor {name} is there both plain and packed.")
        plans[name] = Plan(name, {"values": name})
    return plans


def read_weight(plan: Plan, headers: Mapping[str, Header], read: Callable[[str], Tensor]) -> PackedWeight:
    """The weight of a plan; WeightsError for numbers that are not finite and scales that are not above zero.

    Tensors on the meta device have no numbers to check.
    """
    parts = {role: read(name) for role, name in plan.tensors.items()}
    for role, tensor in parts.items():
        if tensor.is_meta:
            continue
        check = _check_scales if role in ("scales", "global_scale") else check_finite
        check(plan.tensors[role], tensor, path=headers[plan.tensors[role]].path)
    scheme, main = plan.scheme, parts["values"]
    if scheme is None:
        return DenseWeight(plan.name, main)
    scales = parts["scales"]
    if scheme.layout == Layout.INT8:
        return BlockInt8Weight(plan.name, main, scales.to(torch.float32), None, scheme.group_size)
    if scheme.layout == Layout.INT4:
        weight = Int4Weight(plan.name, main, scales, parts.get("zero_points"), scheme.group_size)
        _check_stored_shape(plan, headers, parts.get("shape"), weight.shape)
        return weight
    if scheme.block is not None:
        return Float8Weight(plan.name, main, _matrix(scales), scheme.block)
    divides = scheme.layout == Layout.NVFP4
    return Nvfp4Weight(plan.name, main, scales, parts["global_scale"].reshape(()), divides=divides)


def _base_name(main: str, header: Header, scheme: Scheme | None) -> str | None:
    """The weight whose numbers the tensor `main` holds; None where it is not the main tensor of the scheme's layout."""
    if scheme is None:
        return None
    parts = _PARTS[scheme.layout]
    if parts.main:
        return main.removesuffix(parts.main) if main.endswith(parts.main) else None
    return main if header.dtype in parts.main_dtypes else None


def _packed_plan(main: str, base: str, headers: Mapping[str, Header], scheme: Scheme) -> Plan:
    path, parts = headers[main].path, _PARTS[scheme.layout]
    if scheme.ignores(base.removesuffix(".weight")):
        raise WeightsError(f"{path}: tensor {main} is packed, but the configuration lists its module as not quantised.")
    wanted = dict(parts.companions)
    if scheme.layout == Layout.INT4:
        if base + _ZERO_POINTS[0] in headers and scheme.is_symmetric:
            raise WeightsError(f"{path}: tensor {base}{_ZERO_POINTS[0]} is there, but config.json declares none.")
        wanted |= {} if scheme.is_symmetric else {"zero_points": _ZERO_POINTS}
        wanted |= {"shape": _SHAPE} if base + _SHAPE[0] in headers else {}
    tensors = {"values": main}
    _check_dtype(main, headers, parts.main_dtypes, scheme)
    for role, (suffix, dtypes) in wanted.items():
        if base + suffix not in headers:
            kind = _NEED_SCALES.get(headers[main].dtype, "packed")
            raise WeightsError(f"{path}: tensor {main} is {kind}, but {base}{suffix} is missing.")
        tensors[role] = base + suffix
        _check_dtype(tensors[role], headers, dtypes, scheme)
    _check_shapes(tensors, headers, scheme)
    return Plan(base, tensors, scheme)


def _check_dtype(name: str, headers: Mapping[str, Header], dtypes: tuple[str, ...], scheme: Scheme) -> None:
    found = headers[name]
    if found.dtype not in dtypes:
        raise WeightsError(
            f"{found.path}: tensor {name} has dtype {found.dtype}; {scheme.layout} weights need {' or '.join(dtypes)}."
        )


def _check_shapes(tensors: Mapping[str, str], headers: Mapping[str, Header], scheme: Scheme) -> None:
    """The companions' shapes are those that the main tensor's shape and the scheme ask for."""
    main = headers[tensors["values"]]
    stacked = scheme.layout != Layout.INT8
    if len(main.shape) < 2 or (len(main.shape) > 2 and not stacked) or 0 in main.shape:
        raise WeightsError(
            f"{main.path}: tensor {tensors['values']} is {_NEED_SCALES.get(main.dtype, 'packed')} of shape "
            f"{main.shape}; expected a matrix{' or a stack of them' if stacked else ''}."
        )
    expected = _expected_shapes(main.shape, headers[tensors["scales"]].shape, scheme)
    for role, shapes in expected.items():
        if role in tensors and headers[tensors[role]].shape not in shapes:
            groups = f" in groups of {scheme.group_size}" if scheme.group_size else f" with {scheme.block} a scale"
            raise WeightsError(
                f"{headers[tensors[role]].path}: tensor {tensors[role]} has shape {headers[tensors[role]].shape}, but "
                f"{tensors['values']} of shape {main.shape}{groups} needs {shapes[0] if shapes else 'whole groups'}."
            )


def _expected_shapes(
    main: tuple[int, ...], scales: tuple[int, ...], scheme: Scheme
) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Shapes that each role may have; none at all where the inputs do not make whole groups."""
    *stack, out_features, width = main
    if scheme.block is not None:
        return {"scales": _float8_scale_shapes(main, scheme.block)}
    if scheme.layout == Layout.INT4:
        # The last word of a row may be half used, so it is the scales that say how many inputs there are.
        num_groups = scales[-1] if scales else 0
        is_whole = -(-num_groups * scheme.group_size // INT4_PER_WORD) == width
        if not is_whole:
            num_groups, rest = divmod(width * INT4_PER_WORD, scheme.group_size)
            is_whole = rest == 0
        return {
            "scales": ((*stack, out_features, num_groups),) if is_whole else (),
            "zero_points": ((*stack, -(-out_features // INT4_PER_WORD), num_groups),),
            "shape": ((len(main),),),
        }
    in_features = width if scheme.layout == Layout.INT8 else 2 * width
    is_whole = in_features % scheme.group_size == 0
    grouped = (*stack, out_features, in_features // scheme.group_size)
    return {"scales": (grouped,) if is_whole else (), "global_scale": ((), (1,))}


def _float8_scale_shapes(main: tuple[int, ...], block: tuple[int, int]) -> tuple[tuple[int, ...], ...]:
    *stack, out_features, in_features = main
    rows, columns = (
        -(-extent // size) if size else 1 for extent, size in zip((out_features, in_features), block, strict=True)
    )
    if block == (0, 0) and not stack:
        return ((1,), (), (1, 1))
    return ((*stack, rows, columns),)


def _matrix(scales: Tensor) -> Tensor:
    """Scales with at least two dimensions."""
    return scales.reshape(1, 1) if scales.dim() < 2 else scales


def _check_plain(names: Sequence[str], headers: Mapping[str, Header], scheme: Scheme | None) -> None:
    """Refuse a tensor that can only be a part of a layout that nobody declared."""
    declared = f"{scheme.layout} weights" if scheme else "no quantization_config"
    for name in names:
        if headers[name].dtype in _NEED_SCALES:
            kind = _NEED_SCALES[headers[name].dtype]
            raise WeightsError(f"{headers[name].path}: tensor {name} is {kind}, but config.json declares {declared}.")
    for name in names:
        if name.endswith(_STRAY_SUFFIXES):
            raise WeightsError(
                f"{headers[name].path}: tensor {name} is part of no packed weight; config.json declares {declared}."
            )


def _check_left_plain(
    plain: Sequence[str], packed: Mapping[str, Plan], headers: Mapping[str, Header], scheme: Scheme | None
) -> None:
    """Refuse a plain weight that its like in other layers says should be packed, unless its module is ignored."""
    if scheme is None:
        return
    likes = {_NUMBER.sub("#", name): name for name in packed}
    for name in plain:
        like = likes.get(_NUMBER.sub("#", name))
        if like and name not in packed and not scheme.ignores(name.removesuffix(".weight")):
            raise WeightsError(
                f"{headers[name].path}: tensor {name} is plain, while {like} is packed and the configuration does not "
                "list its module as not quantised. Download both again."
            )


def _check_scales(name: str, scales: Tensor, *, path: Path) -> None:
    """Refuse scales that are not finite and above zero, saying how many there are of each kind and where."""
    numbers = scales.to(torch.float32).flatten()
    if numbers.numel() and numbers.min() > 0 and math.isfinite(float(numbers.max())):
        return
    wrong = {
        "zero": numbers == 0,
        "negative": (numbers < 0) & numbers.isfinite(),
        "NaN": numbers.isnan(),
        "infinite": numbers.isinf(),
    }
    counts = ", ".join(f"{int(found.sum())} {kind}" for kind, found in wrong.items() if found.any())
    places = [int(place) for place in torch.stack(list(wrong.values())).any(dim=0).nonzero().flatten()[:5]]
    raise WeightsError(
        f"{path}: tensor {name} has scales that are not finite and above zero: {counts} of {numbers.numel()}, "
        f"the first at {places}. Download it again."
    )


def _check_stored_shape(
    plan: Plan, headers: Mapping[str, Header], stored: Tensor | None, shape: tuple[int, ...]
) -> None:
    if stored is not None and not stored.is_meta and tuple(stored.tolist()) != shape:
        name = plan.tensors["shape"]
        raise WeightsError(
            f"{headers[name].path}: tensor {name} says {tuple(stored.tolist())}, but {plan.tensors['values']} and its "
            f"scales in groups of {plan.scheme.group_size if plan.scheme else 0} hold {shape}."
        )
