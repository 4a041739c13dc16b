"""Optimisers and the learning rate's way."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from outrider.errors import ConfigError
from outrider.training.config import OptimizeConfig

_EIGHT_BIT = ("torchao.optim", "bitsandbytes.optim")  # modules with an AdamW8bit, the first that is there


def learning_rate_factor(step: int, options: OptimizeConfig) -> float:
    """Linear warm-up, then half a cosine down to 0."""
    warmup = max(1, int(options.warmup_fraction * options.num_steps))
    return min((step + 1) / warmup, 0.5 * (1.0 + math.cos(math.pi * min(step / options.num_steps, 1.0))))


def make_optimizers(model: nn.Module, options: OptimizeConfig) -> list[torch.optim.Optimizer]:
    """AdamW for everything (its two moments in 8 bits if asked), or Muon for the matrices of layers and AdamW for the
    rest: norms, and heads, of which one matrix is a table of tokens. Muon's step is scaled to AdamW's size."""
    rate = options.learning_rate
    adamw: dict[str, Any] = {"lr": rate, "betas": (0.9, 0.98), "weight_decay": 0.0}
    match options.optimizer:
        case "adamw":
            return [torch.optim.AdamW(model.parameters(), **adamw)]
        case "adamw8bit":
            return [_eight_bit_adamw(model.parameters(), **adamw)]
        case "muon":
            by_name = dict(model.named_parameters())
            matrices = {name for name, each in by_name.items() if each.dim() == 2 and "_head." not in name}
            muon = torch.optim.Muon(
                [by_name[name] for name in by_name if name in matrices],
                lr=rate,
                weight_decay=0.0,
                adjust_lr_fn="match_rms_adamw",
            )
            return [muon, torch.optim.AdamW([by_name[name] for name in by_name if name not in matrices], **adamw)]
    raise ConfigError(f"optimizer {options.optimizer!r} is not one of adamw, adamw8bit, muon.")


def _eight_bit_adamw(parameters: Iterable[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    for name in _EIGHT_BIT:
        try:
            library = importlib.import_module(name)
        except ImportError:
            continue
        optimizer: torch.optim.Optimizer = library.AdamW8bit(parameters, **options)
        return optimizer
    raise ConfigError("optimizer 'adamw8bit' needs torchao or bitsandbytes. Run: pip install torchao")
