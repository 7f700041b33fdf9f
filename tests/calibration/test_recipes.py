"""Recipes as files, and the caches that they may open."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors import safe_open

import kvport
from kvport.errors import InvalidArgument, MissingFile, ScaleError
from kvport.layout import CacheLayout, LayerSpec
from kvport.recipes import Recipe, load_recipe
from kvport.scales import LayerScales, SideScales


def layout(format: str, layers: int = 2) -> CacheLayout:
    return CacheLayout.uniform(layers=layers, kv_heads=2, head_dim=16, format=format)


def recipe(format: str = "int8:channel:asym:static", layers: int = 2) -> Recipe:
    fmt = kvport.CacheFormat.parse(format)
    made = {}
    for layer in range(layers):
        sides = []
        for number, side in enumerate((fmt.key, fmt.value)):
            shape = {"head": (2,), "channel": (2, 16)}.get(side.granularity, ())
            scale = torch.full(shape, 0.5 + layer + 8 * number)
            sides.append(SideScales(scale, None if side.symmetric else -scale * 3) if side.static else None)
        made[layer] = LayerScales(*sides)
    said = {"source": "made by a test", "text_sha256": "00ff"}
    return Recipe(made, dict.fromkeys(made, str(fmt)), said, ("layer 0 K: a note",))


@pytest.mark.parametrize(
    "format",
    [
        "int8:channel:asym:static",
        "fp8_e4m3:tensor:static",
        "int4:head:static:scale=bf16",
        "nvfp4:static",
        "k=int8:channel:static,v=int8",
    ],
)
def test_a_file_brings_everything_back(tmp_path: Path, format: str) -> None:
    made = recipe(format)
    made.save(tmp_path / "recipe.safetensors")
    read = load_recipe(tmp_path / "recipe.safetensors")
    assert (read.format, read.provenance, read.notes) == (made.format, made.provenance, made.notes)
    assert read.digest() == made.digest()
    with (
        kvport.open("cpu", layout=layout(format), tokens=16, scales=made) as a,
        kvport.open("cpu", layout=layout(format), tokens=16, scales=read) as b,
    ):
        assert a.fingerprint == b.fingerprint


def test_writing_is_atomic_and_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "recipe.safetensors"
    recipe().save(path)
    before = path.read_bytes()
    (tmp_path / "other").touch()
    assert path.stat().st_mode == (tmp_path / "other").stat().st_mode  # readable by whoever may read other files
    (tmp_path / "other").unlink()

    def fail(*args: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr("kvport.recipes.os.replace", fail)
    with pytest.raises(OSError, match="the disk is full"):
        recipe("nvfp4:static").save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_the_fingerprint_follows_the_scales() -> None:
    other = recipe()
    changed = Recipe(
        {**other, 1: LayerScales(other[0].key, other[1].value)}, other.formats, other.provenance, other.notes
    )
    with (
        kvport.open("cpu", layout=layout(other.format), tokens=16, scales=other) as a,
        kvport.open("cpu", layout=layout(other.format), tokens=16, scales=changed) as b,
    ):
        assert a.fingerprint != b.fingerprint


@pytest.mark.parametrize(
    ("made", "opened"),
    [
        ("int8:channel:static", "int8:channel:asym:static"),
        ("int8:channel:static", "int4:channel:static"),
        ("int8:channel:static", "int8:head:static"),
        ("fp8_e4m3:tensor:static", "fp8_e5m2:tensor:static"),
        ("int8:channel:static", "k=int8:channel:static,v=int8"),
        ("int8:channel:static", "int8"),
    ],
)
def test_another_format_is_refused_with_both(made: str, opened: str) -> None:
    with pytest.raises(ScaleError, match=r"layer 0 [KV]: the recipe was made for .*, the cache has "):
        kvport.open("cpu", layout=layout(opened), tokens=16, scales=recipe(made))


def test_tiers_do_not_change_what_a_scale_means() -> None:
    fmt = "int8:channel:static,sink=4,recent=128"
    kvport.open("cpu", layout=layout(fmt), tokens=16, scales=recipe("int8:channel:static")).close()


def test_another_rotation_is_refused() -> None:
    with pytest.raises(ScaleError, match="made for K with rotate=None, the cache has rotate=7"):
        kvport.open(
            "cpu", layout=layout("int8:channel:static,rotate=7"), tokens=16, scales=recipe("int8:channel:static")
        )


def test_another_scale_dtype_is_taken_where_exact() -> None:
    exact = recipe("int8:channel:static")
    kvport.open("cpu", layout=layout("int8:channel:static:scale=bf16"), tokens=16, scales=exact).close()
    third = SideScales(torch.full((2, 16), 1 / 3))
    inexact = Recipe({n: LayerScales(third, third) for n in exact}, exact.formats, {}, ())
    with pytest.raises(ScaleError, match="not exact in the bf16"):
        kvport.open("cpu", layout=layout("int8:channel:static:scale=bf16"), tokens=16, scales=inexact)


def test_missing_and_superfluous_layers_are_named() -> None:
    with pytest.raises(ScaleError, match="layer 2 K: format int8:channel:static needs static scales"):
        kvport.open("cpu", layout=layout("int8:channel:static", 3), tokens=16, scales=recipe("int8:channel:static"))
    with pytest.raises(ScaleError, match=r"scales given for layers \[1\]"):
        kvport.open("cpu", layout=layout("int8:channel:static", 1), tokens=16, scales=recipe("int8:channel:static"))


def test_formats_by_layer() -> None:
    spec = LayerSpec(2, 2, 16, 16)
    mixed = CacheLayout(
        (spec, LayerSpec(2, 2, 16, 16, format=kvport.CacheFormat.parse("fp8_e4m3:tensor:static"))),
        kvport.CacheFormat.parse("int8:channel:static"),
    )
    a, b = recipe("int8:channel:static"), recipe("fp8_e4m3:tensor:static")
    both = Recipe({0: a[0], 1: b[1]}, {0: a.format, 1: b.format}, {}, ())
    kvport.open("cpu", layout=mixed, tokens=16, scales=both).close()
    with pytest.raises(ScaleError, match="have 2 formats"):
        _ = both.format
    with pytest.raises(ScaleError, match="layer 1 K: the recipe was made for int8:channel:static"):
        kvport.open("cpu", layout=mixed, tokens=16, scales=a)


def test_a_recipe_has_a_format_for_each_layer() -> None:
    made = recipe()
    with pytest.raises(ScaleError, match="a format for each of its layers"):
        Recipe(made.layers, {0: "int8"}, {})
    with pytest.raises(ScaleError, match="a format for each of its layers"):
        Recipe({}, {}, {})


def rewrite(path: Path, change: Any) -> None:
    with safe_open(path, framework="pt") as file:
        metadata = dict(file.metadata())
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    change(tensors, metadata)
    safetensors.torch.save_file(tensors, path, metadata)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda t, m: t["0.key.scale"].mul_(2), "checksum"),
        (lambda t, m: t.pop("1.value.zero"), "checksum"),
        (lambda t, m: m.update(formats=m["formats"].replace("int8", "int4")), "checksum"),
        (lambda t, m: m.update({"kvport.recipe": "9"}), "version '9'; this kvport reads 1"),
        (lambda t, m: m.pop("kvport.recipe"), "import_scales"),
        (lambda t, m: m.pop("digest"), "damaged recipe"),
        (lambda t, m: m.update(formats="{"), "damaged recipe"),
        (lambda t, m: m.update(formats='{"0": "int3"}'), "damaged recipe"),
        (lambda t, m: t.update({"0.key.bias": torch.ones(1)}), "damaged recipe"),
        (lambda t, m: t.update({"7.key.scale": torch.ones(1)}), "damaged recipe"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, change: Any, match: str) -> None:
    path = tmp_path / "recipe.safetensors"
    recipe().save(path)
    rewrite(path, change)
    with pytest.raises(ScaleError, match=match):
        load_recipe(path)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(MissingFile, match=r"there is no recipe .*; 'kvport calibrate -o' writes one"):
        load_recipe(tmp_path / "absent.safetensors")
    path = tmp_path / "recipe.safetensors"
    recipe().save(path)
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(ScaleError, match="not an intact safetensors file"):
        load_recipe(path)


def test_a_recipe_cannot_be_changed() -> None:
    made = recipe()
    with pytest.raises(TypeError):
        made.layers[0] = made.layers[1]  # type: ignore[index]


def test_a_recipe_prints_in_one_line() -> None:
    made = recipe("int8:channel:static", layers=3)
    text = repr(made)
    assert "int8:channel:static" in text
    assert "3 layers" in text
    assert made.digest()[:12] in text
    assert len(text) < 120


@pytest.mark.parametrize("given", [None, 3, b"recipe.safetensors", ["a"]])
def test_a_recipe_is_read_from_a_path(given: object) -> None:
    with pytest.raises(InvalidArgument, match="load_recipe takes a path"):
        load_recipe(given)  # type: ignore[arg-type]
