"""What each family of Ascend chips is documented to take, as data.

The numbers are those of the rules in :mod:`kvport_ascend.emulator.rules`, which name their sources; a test holds the
two against each other. None of it was observed on a chip by this project. ``doubt`` says what is not known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Soc:
    """One family.

    ``device_names``: prefixes of what ``torch.npu.get_device_name()`` answers. ``refusal``: why this backend has no
    route there ("" where it has). ``int8_page`` and ``float_page``: page sizes are multiples of it, up to
    ``max_page``. ``int8_dim`` and ``float_dim``: head dims are multiples of it, up to ``max_dim``. ``max_ratio``:
    query heads per KV head. ``packed_dims``: head dims that the packed prefill layout (TND) takes, None for all.
    ``nz_fraction``: codes in the last axis of the NZ pages that attention reads.
    """

    name: str
    products: str
    device_names: tuple[str, ...]
    refusal: str = ""
    int8_page: int = 32
    float_page: int = 16
    max_page: int = 512
    int8_dim: int = 32
    float_dim: int = 16
    max_dim: int = 512
    max_heads: int = 256
    max_ratio: int = 64
    max_row: int = 65535
    max_decode_tokens: int = 262144
    max_packed_batch: int = 4096
    packed_dims: tuple[int, ...] | None = (128, 192)
    nz_fraction: int = 32
    doubt: str = ""


A2: Final = Soc(
    "A2",
    "Atlas A2 (Ascend 910B1 .. 910B4)",
    ("Ascend910B",),
    doubt="antiquant mode 5 is documented; no public user of it was found",
)
A3: Final = Soc(
    "A3",
    "Atlas A3 (Ascend 910_93)",
    ("Ascend910_93",),
    doubt="antiquant mode 5 is documented; no public user of it was found",
)
A950: Final = Soc(
    "950",
    "Ascend 950PR and 950DT",
    ("Ascend950",),
    packed_dims=None,
    nz_fraction=16,
    doubt="the device name is a guess, and torch_npu's older operator versions are announced to be dropped there",
)
P310: Final = Soc(
    "310P",
    "Atlas inference cards (Ascend 310P)",
    ("Ascend310P",),
    refusal=(
        "npu_fused_infer_attention_score and npu_scatter_pa_kv_cache are not offered on the 310P (rules "
        "operator_on_soc, scatter_on_soc); its npu_incre_flash_attention takes int8 pages with per-channel "
        "scales, but the only documented int8 page write there is ATB's, which this backend does not call"
    ),
)

SOCS: Final = {soc.name: soc for soc in (A2, A3, A950, P310)}


def soc_of(device_name: str) -> Soc | None:
    """The family of a chip by the name that torch_npu gives it, e.g. ``"Ascend910B3"`` -> A2; None if unknown."""
    for soc in SOCS.values():
        if device_name.startswith(soc.device_names):
            return soc
    return None
