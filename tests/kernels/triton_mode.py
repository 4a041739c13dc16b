"""How tests run kernels in Triton: on a GPU in bfloat16, elsewhere interpreted in float16. Import it first."""

from __future__ import annotations

import os

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16  # the interpreter cannot multiply bfloat16

if DEVICE.type == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
