"""What a failure's hint may say about each fault.

A hint of the suite ("looks like: A, or B") names mistakes that explain what was observed. Of those printed for a fault,
one must be the fault itself, in one of the words here; a fault that is not listed must get no hint at all.
"""

from __future__ import annotations

import re
from typing import Final

_LAST_KEY: Final = ("the last key is missing",)
_NOT_WRITTEN: Final = ("never written",)
_LEFT_BEHIND: Final = ("copying or importing pages left it behind",)
_DOWN: Final = ("rounding toward minus infinity",)

HINTS: Final[dict[str, tuple[str, ...]]] = {
    # append
    "RoundsHalfAway": ("rounding half away from zero",),
    "Truncates": ("rounding toward zero",),
    "RoundsDown": _DOWN,
    "ReciprocalScale": ("inputs multiplied by the reciprocal of the scale",),
    "MultipliesByScale": ("inputs multiplied by the scale, not divided",),
    "UnscaledCodes": ("codes of the unscaled input",),
    "EmitsMinusQmaxMinusOne": ("which no encoder may emit",),
    "NarrowRange": ("is never used",),
    "ZeroNotSubtracted": ("without subtracting the zero",),
    "ZeroNegated": ("the opposite sign convention",),
    "ZeroRoundedToNearest": ("zeros rounded to nearest",),
    "CodesFromUnroundedScale": ("the scale as it was before it was rounded",),
    "ScaleFlooredAtOne": ("scales are not let below 1",),
    "StoredScaleOfOne": ("a scale of 1 in place",),
    "HighNibbleFirst": ("the high nibble comes first",),
    "Int2Reversed": ("the highest bits come first",),
    "PackedAcrossHalves": ("channel i shares a byte with channel i + dim / 2",),
    "ExcessCodes": ("excess notation",),
    "ValueScaleFromKey": ("K's scale in place of V's",),
    "KeyAndValueSwapped": ("V lies where K belongs",),
    "ScaleOverTheCall": ("one scale for all tokens of a call",),
    "ScaleOverHeads": ("one scale for all heads of a token",),
    "ScaleOfThePage": _NOT_WRITTEN,  # it keeps the filled bytes of a fresh page
    "EncodesFromHalf": ("rounded to bfloat16 before they are encoded",),
    "BitsReinterpreted": ("upper bits taken, not rounded",),
    "NegativeZeroStored": ("a zero of -0",),
    # pages
    "LastPageIgnored": _LAST_KEY,
    "TileRemainderDropped": _LAST_KEY,
    "FirstSlotOfAPageLost": _LAST_KEY,
    "LengthOneOverAPage": _LAST_KEY,
    "PageIdSixteenBits": ("rows are mixed up",),
    "EmptyLseZero": ("an LSE of 0 for rows that see nothing",),
    # scales
    "CopyWithoutScales": _LEFT_BEHIND,
    "CopyOfFirstLayer": _LEFT_BEHIND,
    "CopySpillsOver": ("rows are mixed up",),
    "ExportWithoutZeros": ("zeros of 0",),
    "ImportWithoutScales": (*_NOT_WRITTEN, *_LEFT_BEHIND),
    "FloatShadow": ("the unquantized",),
    "ValueReadWithKeyScale": ("V is read with K's scale",),
    "FirstHeadsScaleRead": ("takes the first head's scale",),
    "FirstGroupsScaleRead": ("takes the scale of its first",),
    "ScaleReadAsHalf": ("scale is read in bfloat16",),
    "ZeroDroppedOnRead": ("zero is not added back",),
    "ZeroSubtractedOnRead": ("zero is subtracted",),
    "LowestCodeClamped": ("code -128 is read as -127",),
    "BuffersHideScales": _LEFT_BEHIND,  # copies go through buffers()
    "StaticScalesReset": ("codes of the unscaled input (scale 1)",),
    "StaticValueScaleFromKey": ("codes made with K's scale",),
    "GatherSwaps": ("K and V are swapped",),
    # prefix
    "AppendsAtTheHighWaterMark": _NOT_WRITTEN,
    # transfer, tiers and robustness
    "SlotsSortedWithoutRows": ("rows are mixed up",),
    "ScalesExportedAsHalf": ("passed through bfloat16",),
    "ImportScalesRounded": ("passed through bfloat16",),
    "ExportInOrderOfIds": ("rows are mixed up",),
    "ImportToEveryLayer": ("rows are mixed up",),
    "OneScaleNotImported": (*_NOT_WRITTEN, *_LEFT_BEHIND),
    "SealsKeysOnly": _NOT_WRITTEN,
    "SealsInOrderOfIds": ("rows are mixed up",),
    "SealsAllButTheLastSlot": _NOT_WRITTEN,
    "SealsFromHalf": ("rounded to bfloat16 before they are encoded",),
    "SealsCodesOnly": _NOT_WRITTEN,
    # attention
    "LseBaseTwo": ("a logarithm to base 2",),
    "HeadsInterleaved": ("query head h reads KV head h % kv_heads",),
    "FirstKvHeadOnly": ("every query head reads KV head 0",),
    "DoesNotSeeItself": ("the key that a row stands on is not seen",),
    "NoCausalMask": ("no causal mask",),
    "CausalUpperLeft": ("as if the first of them stood at position 0",),
    "VerifyAsDecode": ("no causal mask",),
    "PlansByShape": ("as if the first of them stood at position 0",),  # the positions of another batch
    "ValueFromKey": ("V is taken from K",),
    # features
    "WindowOneTooWide": ("the window is one token too wide",),
    "WindowOneTooNarrow": ("the window is one token too narrow",),
    "WindowIgnored": ("the window is not applied",),
    "WindowInWholePages": ("the window is not applied",),  # where its pages hold the whole sequence
    "SoftcapDropped": ("the soft cap is not applied",),
    "SoftcapClamps": ("the soft cap is not applied",),  # where no score reaches it
    "SinksDropped": ("the sink logits are not applied",),
    "SinksDroppedInDecode": ("the sink logits are not applied",),
    "SinkOfTheKvHead": ("takes the sink logit of its KV head",),
    "SinkScaled": ("the sink logits are scaled like scores",),
    "LseWithoutSink": ("the LSE leaves out the sink logits",),
    "ScaleIgnored": ("scaled by 1 / sqrt(key_dim)",),
    # graph
    "StaleLengths": _LAST_KEY,
    "StalePositions": ("the key that a row stands on is not seen",),
    "StaleRows": ("every element is 0",),  # of rows that were padding
    "ReplaysTheRecordedResult": ("every element is 0",),  # all rows of the recording were padding
}


def contradiction(fault: str, message: str) -> str:
    """The hint in a message, where it names nothing that the fault is; "" where it is right, or there is none."""
    found = re.search(r"looks like: (.*)", message)
    if found is None or any(words in found[1] for words in HINTS.get(fault, ())):
        return ""
    return found[0]
