"""The canonical page image: one sequence's codes and scales on the host, and its file.

A page image is what moves between devices and vendors. Its arrays are the planes of :func:`kvport.layout.planes`,
token-major then head, little endian, one tensor per model layer and plane of shape ``(pages, *plane.shape)``. Slots
never written are zero. Codes, scales and outliers are digested apart, so that two chips can be compared on each.

The file is safetensors; its metadata holds the version, the cache's fingerprint, the format, a checksum per layer, and
one of the metadata itself. Loading refuses, and never repairs, an image that is truncated, altered, incomplete or of
another cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvport.arguments import INT32_MAX, read_number, show
from kvport.digests import part_of
from kvport.errors import ImageError, InvalidArgument
from kvport.files import reading, write_atomically

if TYPE_CHECKING:
    from kvport.cache import PagedCache
    from kvport.sequences import Sequence

IMAGE_VERSION = 1


@dataclass(frozen=True, eq=False)
class PageImage:
    """One sequence's pages, on the host. Two images are compared by :meth:`digests`.

    ``layers``: model layer -> plane name -> tensor ``(pages, *shape)``; planes of near pages (see
    :mod:`kvport.tiers`) are prefixed ``near.``. ``passed``: by layer group, leading pages that a sliding window had
    freed and that are not in the image; ``sealed``: positions at rest. ``ids`` are the token ids where known.
    ``poisoned``: model layer -> first positions of pages in which a static integer format stored a NaN as code 0, which
    the arrays cannot show; layers without any are left out.
    """

    fingerprint: str
    format: str
    length: int
    passed: tuple[int, ...]
    sealed: tuple[int, ...]
    pin: int
    layers: Mapping[int, Mapping[str, Tensor]]
    ids: tuple[int, ...] | None = None
    poisoned: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse (:class:`ImageError`) fields of other types; whether they fit a cache is judged by its ``insert``."""
        kinds = {"fingerprint": str, "format": str, "length": int, "pin": int, "layers": Mapping, "poisoned": Mapping}
        for name, kind in kinds.items():
            if not isinstance(value := getattr(self, name), kind) or isinstance(value, bool):
                raise ImageError(f"a page image's {name} must be of type {kind.__name__}, got {show(value)}")
        for name in ("passed", "sealed", "ids"):
            value = getattr(self, name)
            if name == "ids" and value is None:
                continue
            if not isinstance(value, (tuple, list)) or not all(type(n) is int for n in value):
                raise ImageError(f"a page image's {name} must be a tuple of integers, got {show(value)}")
        for layer, positions in self.poisoned.items():
            numbers = isinstance(positions, (tuple, list)) and all(type(n) is int for n in positions)
            if type(layer) is not int or not numbers:
                raise ImageError(
                    f"a page image's poisoned maps layers to positions, got {show(layer)}: {show(positions)}"
                )
        for layer, planes in self.layers.items():
            if type(layer) is not int or not isinstance(planes, Mapping):
                raise ImageError(f"a page image's layers map numbers to planes, got {show(layer)}: {show(planes)}")
            for plane, tensor in planes.items():
                dense = isinstance(tensor, Tensor) and tensor.layout == torch.strided and tensor.device.type == "cpu"
                if not isinstance(plane, str) or not dense:
                    raise ImageError(
                        f"layer {layer} of a page image: planes are named dense tensors on the CPU, got {show(plane)}: "
                        f"{show(tensor)}"
                    )

    def __repr__(self) -> str:
        return (
            f"<PageImage {self.format}: {self.length} tokens, {len(self.layers)} layers, {self.nbytes} bytes, "
            f"fingerprint {self.fingerprint[:12]}...>"
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(t.numel() * t.itemsize for planes in self.layers.values() for t in planes.values())

    def digests(self) -> dict[int, dict[str, str]]:
        """Per model layer, sha256 of its codes, of its scales (with zeros), and, where the format keeps numbers beside
        the codes (outlier channels, sparse outliers), of those as outliers: see :mod:`kvport.digests`."""
        found = {}
        for layer, planes in self.layers.items():
            parts = {"codes": hashlib.sha256(), "scales": hashlib.sha256()}
            for name in sorted(planes):
                part = part_of(name)
                parts.setdefault(part, hashlib.sha256()).update(_little_endian(planes[name]))
            found[layer] = {part: digest.hexdigest() for part, digest in parts.items()}
        return found

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the image to a file, atomically: a reader sees the old file or the whole new one."""
        tensors = {
            f"{layer}.{name}": tensor.contiguous()
            for layer, planes in self.layers.items()
            for name, tensor in planes.items()
        }
        # Copies of what lies in one memory, such as one tensor for two layers: safetensors refuses to write it.
        held = Counter(tensor.untyped_storage().data_ptr() for tensor in tensors.values())
        for name, tensor in tensors.items():
            if held[tensor.untyped_storage().data_ptr()] > 1:
                tensors[name] = tensor.clone()
        metadata = {
            "kvport.image": str(IMAGE_VERSION),
            "fingerprint": self.fingerprint,
            "format": self.format,
            "length": str(self.length),
            "passed": json.dumps(self.passed),
            "sealed": json.dumps(self.sealed),
            "pin": str(self.pin),
            "ids": json.dumps(self.ids),
            "digests": json.dumps({str(layer): digest for layer, digest in self.digests().items()}, sort_keys=True),
        }
        if self.poisoned:  # images without are as they were before there was such an entry
            metadata["poisoned"] = json.dumps({str(n): list(at) for n, at in self.poisoned.items()}, sort_keys=True)
        metadata["checksum"] = _checksum(metadata, tensors)
        write_atomically(path, safetensors.torch.save(tensors, metadata))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> PageImage:
        """Read a file written by :meth:`save`. Raises :class:`ImageError` for anything but an intact image,
        and :class:`FileError` where there is no file that can be read."""
        if not isinstance(path, (str, os.PathLike)):
            raise InvalidArgument(f"PageImage.load takes a path, got {show(path)}")
        try:
            with (
                reading(path, "page image", "cache.export(sequence).save(path) writes one"),
                safe_open(os.fspath(path), framework="pt") as file,
            ):
                metadata = file.metadata() or {}
                # Copies: the file is mapped, and may be changed or cut by others after it was checked.
                tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - not a mapping
        except (SafetensorError, ValueError) as error:
            raise ImageError(f"{path} is not an intact safetensors file: {error}") from error
        if metadata.get("kvport.image") != str(IMAGE_VERSION):
            raise ImageError(
                f"{path} has page image version {metadata.get('kvport.image')!r}; this kvport reads {IMAGE_VERSION}"
            )
        if metadata.get("checksum") != _checksum(metadata, tensors):
            raise ImageError(f"{path}: the checksum of its metadata does not match; the file was damaged or altered")
        try:
            layers: dict[int, dict[str, Tensor]] = {}
            for name, tensor in tensors.items():
                layer, _, plane = name.partition(".")
                layers.setdefault(_number(layer), {})[plane] = tensor
            ids = json.loads(metadata["ids"])
            image = cls(
                fingerprint=metadata["fingerprint"],
                format=metadata["format"],
                length=_number(metadata["length"]),
                passed=_integers(json.loads(metadata["passed"])),
                sealed=_integers(json.loads(metadata["sealed"])),
                pin=_number(metadata["pin"]),
                layers=dict(sorted(layers.items())),
                ids=None if ids is None else _integers(ids),
                poisoned={
                    _number(layer): _integers(at)
                    for layer, at in dict(json.loads(metadata.get("poisoned", "{}"))).items()
                },
            )
            recorded = dict(json.loads(metadata["digests"]))
        except (KeyError, ValueError, TypeError, RecursionError) as error:
            raise ImageError(f"{path} has damaged page image metadata: {error!r}") from error
        found = {str(layer): digest for layer, digest in image.digests().items()}
        if found != recorded:
            wrong = sorted(k for k in {*found, *recorded} if found.get(k) != recorded.get(k))
            raise ImageError(f"{path}: the checksums of layers {wrong} do not match; the file was damaged or altered")
        return image


def export_sequence(cache: PagedCache, sequence: Sequence) -> PageImage:
    """The canonical image of a sequence's committed tokens."""
    cache._open("export from")
    cache._own(sequence)
    sequence._usable("export")
    layers: dict[int, dict[str, Tensor]] = {layer: {} for layer in cache._stored_layers}
    for lane in _lanes(cache):
        held = [page for page in sequence._pages[lane.number] if page]
        for local, layer in enumerate(cache.layout.groups[lane.group].layers):
            planes = cache.backend.export_pages(cache._stores[lane.number], local, held)
            if lane.open_page:
                planes = {name: _blank_tail(t, cache.layout.page_size, sequence.length) for name, t in planes.items()}
            layers[layer].update({lane.prefix + name: t for name, t in planes.items()})
    poisoned: dict[int, list[int]] = {}
    for number in range(len(cache._lanes)):
        for layer, position in cache._flagged(number, cache._flags(number), sequence):
            poisoned.setdefault(layer, []).append(position)
    return PageImage(
        fingerprint=cache.fingerprint,
        format=str(cache.layout.format),
        length=sequence.length,
        passed=tuple(sequence._passed),
        sealed=tuple(sequence._sealed),
        pin=sequence._pin,
        layers=dict(sorted(layers.items())),
        ids=None if sequence._ids is None else tuple(sequence._ids),
        poisoned={layer: tuple(sorted(positions)) for layer, positions in sorted(poisoned.items())},
    )


def import_sequence(cache: PagedCache, image: PageImage) -> Sequence:
    """A new sequence holding the image's pages, bit for bit.

    Raises :class:`ImageError` where the fingerprint or the geometry differs, and :class:`OutOfPages` where the pools
    cannot hold it; nothing changed then.
    """
    if not isinstance(image, PageImage):
        raise InvalidArgument(f"insert takes a PageImage (PageImage.load reads a file), got {type(image).__name__}")
    cache._open("import into")
    cache._outside_step("import a page image")
    if image.fingerprint != cache.fingerprint:
        raise ImageError(
            f"the image (format {image.format}, fingerprint {image.fingerprint[:12]}...) belongs to another kind of "
            f"cache than this one (format {cache.layout.format}, {cache.fingerprint[:12]}...): format, static scales, "
            "geometry, page size, dtype, model, adapter and RoPE must all agree"
        )
    blocks = _check_image(cache, image)
    chain = cache.prefix.digests(image.ids, image.pin) if cache.share_prefixes and image.ids is not None else []
    taken = cache._take_pages([len(held) for held in blocks], "the image")
    try:
        for lane in _lanes(cache):
            for local, layer in enumerate(cache.layout.groups[lane.group].layers):
                planes = {name: image.layers[layer][lane.prefix + name] for name in lane.planes}
                cache.backend.import_pages(cache._stores[lane.number], local, taken[lane.number], planes)
                if flagged := _flagged(cache, image, lane, layer, blocks[lane.number], taken[lane.number]):
                    cache.backend.flag_pages(cache._stores[lane.number], local, flagged)
    except BaseException:
        for pool, pages in zip(cache._pools, taken, strict=True):
            pool.release(pages)
        raise
    sequence = cache._new_sequence()
    for lane_pages, held, pages in zip(sequence._pages, blocks, taken, strict=True):
        lane_pages += [0] * (-(-image.length // cache.layout.page_size))
        for block, page in zip(held, pages, strict=True):
            lane_pages[block] = page
    sequence._passed, sequence._sealed, sequence._pin = list(image.passed), list(image.sealed), image.pin
    sequence._length = image.length
    sequence._ids = None if image.ids is None else list(image.ids)
    sequence._chain = chain
    cache._index(sequence)
    return sequence


@dataclass(frozen=True)
class _ImageLane:
    number: int
    group: int
    prefix: str  # of plane names in the image
    open_page: bool  # whether a sequence's last, partly filled page is here
    planes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    sparse: Mapping[str, int]  # sides with sparse outliers -> the numbers of a page and head
    hides_nan: bool  # whether a NaN may be stored as code 0


def _lanes(cache: PagedCache) -> list[_ImageLane]:
    found = []
    for number, lane in enumerate(cache._lanes):
        tiers = cache._tiers[lane.group]
        planes = {plane.name: (plane.shape, plane.dtype) for plane in lane.layout.planes}
        prefix = "" if number == tiers.far else "near."
        sparse = {s.name: lane.layout.page_size * s.dim for s in lane.layout.sides if s.format.sparse}
        found.append(_ImageLane(number, lane.group, prefix, number == tiers.near, planes, sparse, lane.hides_nan))
    return found


def _check_image(cache: PagedCache, image: PageImage) -> list[list[int]]:
    """The block numbers that the image holds, by lane.

    The fingerprint fixes format and geometry; this catches an image whose arrays do not keep to it.
    """
    layout, size = cache.layout, cache.layout.page_size
    if not 0 <= image.length <= INT32_MAX or not len(image.passed) == len(image.sealed) == len(layout.groups):
        raise ImageError(f"image of length {image.length} with {len(image.passed)} groups, needs {len(layout.groups)}")
    if image.ids is not None and len(image.ids) != image.length:
        raise ImageError(f"image has {len(image.ids)} token ids for {image.length} tokens")
    if image.ids and not -(2**63) <= min(image.ids) <= max(image.ids) < 2**63:
        raise ImageError("image has token ids beyond 64 bits")
    if set(image.layers) != set(cache._stored_layers):
        raise ImageError(f"image holds layers {sorted(image.layers)}, the cache stores {sorted(cache._stored_layers)}")
    if not 0 <= image.pin <= (INT32_MAX if any(tiers.tiered for tiers in cache._tiers) else 0):
        raise ImageError(f"image says pin {show(image.pin)}, which no sequence of this cache can have")
    blocks: list[list[int]] = [[] for _ in cache._lanes]
    wanted: dict[int, dict[str, tuple[tuple[int, ...], torch.dtype]]] = {layer: {} for layer in image.layers}
    for lane in _lanes(cache):
        tiers, members = cache._tiers[lane.group], layout.groups[lane.group]
        passed, sealed, window = image.passed[lane.group], image.sealed[lane.group], members.layout.window
        most = 0 if window is None else max(0, image.length - window + 1) // size
        if not 0 <= passed <= most:
            raise ImageError(
                f"image lacks {passed} leading pages of layers {list(members.layers)}; at most {most} may be"
            )
        for layer in members.layers:  # before anything is built in proportion to what the image only claims
            codes = f"{members.layout.sides[0].name}.codes"  # "key", or "latent" of a latent layer
            stored = sum(len(t) for n, t in image.layers[layer].items() if n.endswith(codes) and t.ndim)
            if stored != (claimed := -(-image.length // size) - passed):
                raise ImageError(f"layer {layer} of the image has {stored} pages, {image.length} tokens need {claimed}")
        if sealed % size or not 0 <= sealed <= (image.length if tiers.tiered else 0):
            raise ImageError(f"image says sealed {show(sealed)} for {image.length} tokens, which cannot be")
        head = tiers.head_pages(image.pin, size)
        for block in range(passed, -(-image.length // size)):
            far = head <= block < sealed // size if tiers.tiered else True
            if far == (lane.number == tiers.far):
                blocks[lane.number].append(block)
        for layer in members.layers:
            for name, (shape, dtype) in lane.planes.items():
                wanted[layer][lane.prefix + name] = ((len(blocks[lane.number]), *shape), dtype)
    for layer, planes in image.layers.items():
        got = {n: (tuple(t.shape), t.dtype) for n, t in planes.items()}
        if got != wanted[layer]:
            raise ImageError(f"layer {layer} of the image has arrays {got}, needs {wanted[layer]}")
    for lane in _lanes(cache):
        for layer in layout.groups[lane.group].layers:
            _check_sparse(layer, image.layers[layer], lane)
    _check_flags(cache, image, blocks)
    return blocks


def _check_flags(cache: PagedCache, image: PageImage, blocks: list[list[int]]) -> None:
    """Flags must be of pages that the image holds and that can hide a NaN."""
    may: dict[int, set[int]] = {layer: set() for layer in image.layers}
    for lane in _lanes(cache):
        for layer in cache.layout.groups[lane.group].layers if lane.hides_nan else ():
            may[layer].update(block * cache.layout.page_size for block in blocks[lane.number])
    for layer, positions in image.poisoned.items():
        if wrong := sorted(set(positions) - may.get(layer, set())):
            raise ImageError(
                f"image says that layer {layer} met a NaN in pages that begin at {show(wrong)}; it has no such pages "
                "of static integers"
            )


def _flagged(
    cache: PagedCache, image: PageImage, lane: _ImageLane, layer: int, blocks: list[int], pages: list[int]
) -> list[int]:
    """Of the pages that take the image's blocks, those to flag, where the backend keeps flags."""
    positions = set(image.poisoned.get(layer, ()))
    if not positions or not lane.hides_nan or "poison" not in cache._features[lane.group]:
        return []
    size = cache.layout.page_size
    return [page for block, page in zip(blocks, pages, strict=True) if block * size in positions]


def _number(text: str) -> int:
    """A decimal number as :meth:`PageImage.save` writes one."""
    if (number := read_number(text)) is None:
        raise ValueError(f"not a number below 2**32: {show(text)}")
    return number


def _check_sparse(layer: int, planes: Mapping[str, Tensor], lane: _ImageLane) -> None:
    """Indices of sparse outliers must be the page's own, ascending, and -1 behind the last; a page cannot have clipped
    more numbers than it did not keep."""
    for side, numbers in lane.sparse.items():
        index = planes[f"{lane.prefix}{side}.sparse_index"].to(torch.int64)
        used = index >= 0
        order = torch.where(used, index, numbers)  # ascending, then what lies behind the last
        after = order[..., 1:], order[..., :-1]
        if not bool(((index >= -1) & (index < numbers)).all() and ((after[0] > after[1]) | ~used[..., 1:]).all()):
            raise ImageError(
                f"layer {layer} {side}: indices of sparse outliers must ascend within 0 .. {numbers - 1}, with -1 "
                "behind the last"
            )
        overflow = planes.get(f"{lane.prefix}{side}.sparse_overflow")  # static scales alone clip anything
        if overflow is not None and bool(((overflow < 0) | (overflow > numbers - used.sum(-1))).any()):
            raise ImageError(
                f"layer {layer} {side}: a page of {numbers} numbers a head cannot have clipped what "
                f"{side}.sparse_overflow says"
            )


def _integers(values: object) -> tuple[int, ...]:
    """A parsed JSON list of integers; nothing is rounded or converted."""
    if not isinstance(values, list) or not all(type(n) is int for n in values):
        raise ValueError(f"not a list of integers: {show(values)}")
    return tuple(values)


def _checksum(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """sha256 over the metadata but itself, and the arrays' names, dtypes and shapes (digests cover their bytes)."""
    covered = {
        "metadata": {name: text for name, text in metadata.items() if name != "checksum"},
        "arrays": {name: [str(t.dtype), list(t.shape)] for name, t in tensors.items()},
    }
    return hashlib.sha256(json.dumps(covered, sort_keys=True).encode()).hexdigest()


def _blank_tail(planes: Tensor, page_size: int, length: int) -> Tensor:
    """Zero what was never written in the last page."""
    if (used := length % page_size) and len(planes):
        planes[-1, used:] = 0
    return planes


def _little_endian(tensor: Tensor) -> bytes:
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    if sys.byteorder == "big":
        raw = raw.reshape(-1, tensor.itemsize)[:, ::-1]
    return raw.tobytes()
