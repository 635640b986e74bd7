"""A whole conversion: what it writes, what it leaves alone, what it refuses, and what it reads and writes through."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from m3hal.checkpoint import mxfp4
from m3hal.checkpoint.convert import GAUDI2, HOPPER, ConversionError, InexactError, Profile, convert
from m3hal.checkpoint.convert.preview import preview
from m3hal.checkpoint.convert.progress import describe, duration
from m3hal.checkpoint.synthetic import Synthetic, write
from m3hal.cli import main
from tests.checkpoint.conftest import SMALL, digest

PROFILES = pytest.mark.parametrize("profile", [GAUDI2, HOPPER], ids=lambda profile: profile.name)
EXPERT = "language_model.model.layers.1.block_sparse_moe.experts.1."


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors, read by the safetensors library."""
    return {name: tensor for shard in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(shard).items()}


@pytest.fixture
def own(source: Path, tmp_path: Path) -> Path:
    """A copy of the source to break."""
    return Path(shutil.copytree(source, tmp_path / "own"))


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object], keep_sums: bool = False) -> None:
    """Changes tensors of a checkpoint's shards in place; the index keeps saying what it said."""
    for shard in sorted(folder.glob("*.safetensors")):
        tensors = load_file(shard)
        change(tensors)
        save_file(tensors, shard, {"format": "pt"})
    if not keep_sums:
        (folder / "SHA256SUMS").unlink(missing_ok=True)


def set_in(name: str, place: tuple[int, ...], value: int) -> Callable[[dict[str, torch.Tensor]], None]:
    """A change of one element of one tensor."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        if name in tensors:
            tensors[name][place] = value

    return change


@PROFILES
def test_numbers_are_the_sources(source: Path, tmp_path: Path, profile: Profile) -> None:
    """FP8 times scale is the same weights' BF16 checkpoint in every element; the rest is byte-identical to it."""
    target = convert(source, tmp_path / "fp8", profile).target
    made, plain = tensors_of(target), tensors_of(write(tmp_path / "bf16", SMALL, layout="bf16"))
    assert {name for name in made if not name.endswith("_scale")} == set(plain)
    for name, want in plain.items():
        if re.search(r"\.experts\.\d", name):
            scale = made[name + "_scale"]
            assert (made[name].dtype, scale.dtype) == (torch.float8_e4m3fn, torch.float32)
            assert scale.shape == (want.shape[0], 1)
            assert torch.equal(torch.frexp(scale).mantissa, torch.full_like(scale, 0.5))
            assert torch.equal(made[name].double() * scale.double(), want.double())
        else:
            assert made[name].dtype == want.dtype
            assert torch.equal(made[name].flatten().view(torch.uint8), (want + 0).flatten().view(torch.uint8)), name


@PROFILES
def test_the_profiles_window(source: Path, tmp_path: Path, profile: Profile) -> None:
    """No byte beyond 240 for Gaudi 2, up to 384 for Hopper; no -0; largest elements on the top binade."""
    fp8 = [
        t
        for t in tensors_of(convert(source, tmp_path / "fp8", profile).target).values()
        if t.dtype == torch.float8_e4m3fn
    ]
    assert max(tensor.float().abs().max().item() for tensor in fp8) == {7: 192, 8: 384}[profile.top]
    assert not any((tensor.view(torch.uint8) == 0x80).any() for tensor in fp8)


@PROFILES
def test_config_and_index(source: Path, tmp_path: Path, profile: Profile) -> None:
    """compressed-tensors FP8 per channel, with the flavor for Gaudi 2 alone; the index names every tensor and byte."""
    target = convert(source, tmp_path / "fp8", profile).target
    config, old = (json.loads((folder / "config.json").read_text()) for folder in (target, source))
    found = config.pop("quantization_config")
    old.pop("quantization_config")
    assert config == old
    assert found["quant_method"] == "compressed-tensors"
    assert found["config_groups"]["group_0"]["targets"] == ["Linear"]
    assert found.get("fp8_dtype_flavor") == ("float8_e4m3fnuz" if profile is GAUDI2 else None)
    index, made = json.loads((target / "model.safetensors.index.json").read_text()), tensors_of(target)
    assert set(index["weight_map"]) == set(made)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in made.values())
    for name, shard in index["weight_map"].items():
        assert name in load_file(target / shard)


def test_other_files_are_copied_and_sources_are_not_touched(own: Path, tmp_path: Path) -> None:
    """Tokenizer, licence, folders; not hidden files, not checksums that no longer hold."""
    (own / "tokenizer.json").write_bytes(bytes(range(256)))
    (own / "empty.txt").touch()
    (own / "figures").mkdir()
    (own / "figures" / "a.png").write_bytes(b"png")
    (own / ".gitattributes").write_text("x")
    before = digest(own)
    after = digest(convert(own, tmp_path / "fp8", GAUDI2).target)
    assert digest(own) == before
    for name in ("tokenizer.json", "empty.txt", "figures/a.png", "LICENSE", "generation_config.json"):
        assert after[name] == before[name]
    assert ".gitattributes" not in after
    assert "SHA256SUMS" not in after
    assert not (tmp_path / "fp8.converting").exists()


def test_same_bytes_every_time(source: Path, tmp_path: Path) -> None:
    """One worker or three, today or tomorrow."""
    made = [digest(convert(source, tmp_path / str(workers), GAUDI2, workers=workers).target) for workers in (1, 3)]
    assert made[0] == made[1]


def test_a_scale_in_another_shard(source: Path) -> None:
    """The small checkpoint has such pairs, so every test here covers them."""
    places = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
    assert any(places[name] != places[name + "_scale"] for name in places if name + "_scale" in places)


def test_one_file_without_an_index(tmp_path: Path) -> None:
    """``model.safetensors`` alone becomes ``model.safetensors`` alone."""
    folder = write(tmp_path / "source", Synthetic(**{**vars(SMALL), "shard_bytes": 1 << 40}))
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model-00001-of-00001.safetensors").rename(folder / "model.safetensors")
    target = convert(folder, tmp_path / "fp8", HOPPER).target
    assert [path.name for path in target.glob("*.safetensors*")] == ["model.safetensors"]


def test_scales_as_float8_e8m0(own: Path, tmp_path: Path) -> None:
    """The same bytes under the dtype that newer safetensors have for them."""

    def retype(tensors: dict[str, torch.Tensor]) -> None:
        for name in tensors:
            if name.endswith("_scale"):
                tensors[name] = tensors[name].view(torch.float8_e8m0fnu)

    want = digest(convert(own, tmp_path / "u8", GAUDI2).target)
    rewrite(own, retype)
    got = digest(convert(own, tmp_path / "e8m0", GAUDI2).target)
    shards = [name for name in want if name.endswith(".safetensors")]
    assert [got[name] for name in shards] == [want[name] for name in shards]


def refuse(folder: Path, target: Path, error: type[ConversionError] = ConversionError) -> str:
    """The sentence of a failed conversion, which has left nothing under a final name."""
    with pytest.raises(error) as caught:
        convert(folder, target, GAUDI2)
    assert not target.exists()
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_a_row_too_wide_is_refused_before_any_output(own: Path, tmp_path: Path) -> None:
    """Tensor, row and both blocks are named; of that shard not even a temporary file was written."""
    rewrite(own, set_in(EXPERT + "w1.weight_scale", (7, 2), 150))
    text = refuse(own, tmp_path / "fp8", InexactError)
    assert f"{EXPERT}w1: row 7 spans" in text
    assert "in block 2" in text
    shard = json.loads((own / "model.safetensors.index.json").read_text())["weight_map"][EXPERT + "w1.weight"]
    work = tmp_path / "fp8.converting" / "checkpoint"
    assert not (work / shard).exists()
    assert not (work / (shard + ".partial")).exists()


def test_a_nan_scale_is_refused(own: Path, tmp_path: Path) -> None:
    """E8M0 byte 255, also over zeros."""
    rewrite(own, set_in(EXPERT + "w2.weight_scale", (3, 1), 255))
    assert f"{EXPERT}w2: row 3, block 1 has the scale NaN" in refuse(own, tmp_path / "fp8", InexactError)


@pytest.mark.parametrize("scale", [1, 254])
def test_a_scale_out_of_float32s_range_is_refused(own: Path, tmp_path: Path, scale: int) -> None:
    """A row far below or above what its doubled scale could reach."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        if EXPERT + "w3.weight_scale" in tensors:
            tensors[EXPERT + "w3.weight_scale"][5] = scale

    rewrite(own, change)
    assert f"{EXPERT}w3: row 5, block" in refuse(own, tmp_path / "fp8", InexactError)


def test_a_wide_scale_over_zeros_is_fine(own: Path, tmp_path: Path) -> None:
    """Elements decide, not scales: a block of zeros may have any scale."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        if EXPERT + "w1.weight_scale" in tensors:
            tensors[EXPERT + "w1.weight_scale"][7, 2] = 0
        if EXPERT + "w1.weight" in tensors:
            tensors[EXPERT + "w1.weight"][7, 32:48] = 0x80

    rewrite(own, change)
    made = tensors_of(convert(own, tmp_path / "fp8", GAUDI2).target)
    assert not made[EXPERT + "w1.weight"][7, 64:96].view(torch.uint8).any()


def test_shared_experts_beyond_bf16_are_refused(own: Path, tmp_path: Path) -> None:
    """2^128 is no BF16."""
    module = "language_model.model.layers.2.block_sparse_moe.shared_experts.up_proj"
    rewrite(own, set_in(module + ".weight_scale", (9, 0), 254))
    assert f"{module}: row 9, block 0 has a number outside BF16" in refuse(own, tmp_path / "fp8", InexactError)


def config_with(folder: Path, change: Callable[[dict], object]) -> None:  # type: ignore[type-arg]
    """Changes config.json in place."""
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def header_with(folder: Path, values: dict[str, object], raw: bytes | None = None) -> None:
    """Puts entries into a shard's header, or other bytes in its place."""
    path = next(folder.glob("*2-of*"))
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    text = raw or json.dumps({**json.loads(whole[8 : 8 + length]), **values}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + whole[8 + length :])


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "codes of another width": (
        lambda folder: rewrite(
            folder, lambda t: t.update({n: v[:, :-16].contiguous() for n, v in t.items() if n == EXPERT + "w1.weight"})
        ),
        "w1.weight_scale has shape [64, 4]; its codes ask for [64, 3]",
    ),
    "a float scale": (
        lambda folder: rewrite(
            folder, lambda t: t.update({n: v.float() for n, v in t.items() if n == EXPERT + "w1.weight_scale"})
        ),
        "dtypes U8 and F32",
    ),
    "an expert that is not there": (
        lambda folder: config_with(folder, lambda config: config["text_config"].update(num_local_experts=4)),
        "lacks w1 of expert 3",
    ),
    "a layer that is not there": (
        lambda folder: config_with(folder, lambda config: config["text_config"]["moe_layer_freq"].append(1)),
        "layer 3 has no routed MXFP4 experts",
    ),
    "another hidden size": (
        lambda folder: config_with(folder, lambda config: config["text_config"].update(hidden_size=256)),
        "config.json asks for",
    ),
    "no quantization_config": (
        lambda folder: config_with(folder, lambda config: config.pop("quantization_config")),
        "no quantization_config",
    ),
    "another method": (
        lambda folder: config_with(folder, lambda config: config["quantization_config"].update(quant_method="gguf")),
        "quant_method 'gguf'",
    ),
    "another group size": (
        lambda folder: config_with(
            folder, lambda config: config["quantization_config"]["global_quant_config"]["weight"].update(group_size=16)
        ),
        "'group_size': 16",
    ),
    "a layer in another format": (
        lambda folder: config_with(
            folder,
            lambda config: config["quantization_config"].update(
                layer_quant_config={"*w2": {"weight": {"dtype": "fp8"}}}
            ),
        ),
        "*w2 has weights",
    ),
    "no index": (lambda folder: (folder / "model.safetensors.index.json").unlink(), "neither"),
    "an index that is no JSON": (lambda folder: (folder / "model.safetensors.index.json").write_text("{"), "not JSON"),
    "an index into another folder": (
        lambda folder: (folder / "model.safetensors.index.json").write_text(
            '{"weight_map": {"a": "../x.safetensors"}}'
        ),
        "not a file of the checkpoint",
    ),
    "a shard that is missing": (lambda folder: next(folder.glob("*2-of*")).unlink(), "is missing"),
    "a shard that is truncated": (
        lambda folder: os.truncate(next(folder.glob("*2-of*")), 40_000),
        "has 40000 bytes and its header promises",
    ),
    "an empty shard": (lambda folder: os.truncate(next(folder.glob("*2-of*")), 0), "not a whole safetensors file"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
    "a text_config of null": (
        lambda folder: config_with(folder, lambda config: config.update(text_config=None)),
        "text_config that is no object",
    ),
    "a quantization_config of one word": (
        lambda folder: config_with(folder, lambda config: config.update(quantization_config="quark")),
        "'quark', which is no object",
    ),
    "a scheme of one word": (
        lambda folder: config_with(
            folder, lambda config: config["quantization_config"]["global_quant_config"].update(weight="mxfp4")
        ),
        "global_quant_config has weights mxfp4",
    ),
    "schemes in a list": (
        lambda folder: config_with(folder, lambda c: c["quantization_config"].update(layer_quant_config=[1])),
        "layer_quant_config has weights None",
    ),
    "one number for all layers": (
        lambda folder: config_with(folder, lambda config: config["text_config"].update(moe_layer_freq=1)),
        "it should list the layers",
    ),
    "an index with a name that no file has": (
        lambda folder: (folder / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"a": "x\0.safetensors"}})
        ),
        "not a file of the checkpoint",
    ),
    "a folder in a shard's place": (
        lambda folder: ((path := next(folder.glob("*2-of*"))).unlink(), path.mkdir()),
        "Is a directory",
    ),
    "checksums that are no text": (
        lambda folder: (folder / "SHA256SUMS").write_bytes(b"\xff\xfe\x80"),
        "SHA256SUMS, which should hold checksums, can't be read",
    ),
    "metadata in a list": (lambda folder: header_with(folder, {"__metadata__": [1]}), "does not map names to text"),
    "metadata that is no text": (lambda folder: header_with(folder, {"__metadata__": {"a": "\ud800"}}), "surrogates"),
    "a header nested too deeply": (
        lambda folder: header_with(folder, {}, b"[" * 200_000 + b"]" * 200_000),
        "header is not readable",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_input_is_one_sentence(own: Path, tmp_path: Path, case: str) -> None:
    """What is wrong, with which file or tensor; nothing is written at all."""
    break_it, said = BROKEN[case]
    break_it(own)
    assert said in refuse(own, tmp_path / "fp8")
    assert not (tmp_path / "fp8.converting").exists()


def test_every_flipped_bit_of_a_header_is_refused_or_harmless(own: Path, tmp_path: Path) -> None:
    """One bit at a time, through a shard's header: an error, or the same tensors (a bit of padding or metadata)."""
    from m3hal.checkpoint.convert.quark import open_source

    shard = sorted(own.glob("*.safetensors"))[-1]
    whole = bytearray(shard.read_bytes())
    tensors = open_source(own).shards[shard.name].tensors
    refused = 0
    rng = np.random.default_rng(0)
    length = 8 + int.from_bytes(whole[:8], "little")
    for bit in rng.choice(length * 8, 300, replace=False).tolist():
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        shard.write_bytes(flipped)
        try:
            assert open_source(own).shards[shard.name].tensors == tensors
        except ConversionError:
            refused += 1
    assert refused > 250


@pytest.mark.parametrize("place", ["first", "last"])
def test_a_flipped_weight_bit_is_found_by_its_checksum(own: Path, tmp_path: Path, place: str) -> None:
    """With SHA256SUMS beside it. Without a checksum no converter could tell such a bit from a weight."""
    shard = sorted(own.glob("*.safetensors"))[0 if place == "first" else -1]
    data = bytearray(shard.read_bytes())
    data[-100] ^= 0x10
    shard.write_bytes(data)
    text = refuse(own, tmp_path / "fp8")
    assert f"{shard} is damaged" in text
    assert not (tmp_path / "fp8.converting" / "checkpoint" / shard.name).exists()


def test_checksums_of_a_hugging_face_download(own: Path, tmp_path: Path) -> None:
    """``hf download`` notes each large file's SHA-256; it is used when there is no SHA256SUMS."""
    sums = (own / "SHA256SUMS").read_text().split("\n")[0]
    (own / "SHA256SUMS").unlink()
    notes = own / ".cache" / "huggingface" / "download"
    notes.mkdir(parents=True)
    digest_, _, name = sums.partition("  ")
    (notes / f"{name}.metadata").write_text(f"{'0' * 40}\n{digest_}\n1.0\n")
    assert convert(own, tmp_path / "good", GAUDI2).checked == 1
    (notes / f"{name}.metadata").write_text(f"{'0' * 40}\n{'0' * 64}\n1.0\n")
    assert "is damaged" in refuse(own, tmp_path / "bad")


def test_checksums_of_the_hugging_face_cache(source: Path, tmp_path: Path) -> None:
    """Its snapshots are links to files that are named after their SHA-256."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    for path in source.iterdir():
        if path.name == "SHA256SUMS":
            continue
        name = hashlib.sha256(path.read_bytes()).hexdigest()
        shutil.copy(path, blobs / name)
        (snapshot / path.name).symlink_to(blobs / name)
    done = convert(snapshot, tmp_path / "fp8", GAUDI2)
    assert done.checked == done.shards
    assert digest(done.target) == digest(convert(source, tmp_path / "whole", GAUDI2).target)
    blob = (snapshot / "model-00003-of-00016.safetensors").resolve()
    data = bytearray(blob.read_bytes())
    data[-1] ^= 1
    blob.write_bytes(data)
    assert "is damaged" in refuse(snapshot, tmp_path / "bad")


def test_a_config_inside_text_config(own: Path, tmp_path: Path) -> None:
    """The quantization_config is found, and replaced, where it is."""

    def move(config: dict[str, Any]) -> None:
        config["text_config"]["quantization_config"] = config.pop("quantization_config")

    config_with(own, move)
    made = json.loads((convert(own, tmp_path / "fp8", GAUDI2).target / "config.json").read_text())
    assert "quantization_config" not in made
    assert made["text_config"]["quantization_config"]["quant_method"] == "compressed-tensors"


def test_a_worker_that_dies_is_said(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the kernel kills it for lack of memory; the others end too."""
    from m3hal.checkpoint.convert import workers

    monkeypatch.setattr(workers, "convert_shard", lambda *_, **__: os.kill(os.getpid(), 9))
    assert "ended with code -9" in refuse(source, tmp_path / "fp8")


def test_progress_is_said() -> None:
    """Share, sizes, rate and the time that is left; what an earlier run wrote is not this run's rate."""
    line = describe(total=412_000_000_000, found=100_000_000_000, done=95_000_000_000, seconds=155.0)
    assert line == "[###########-------------]  47%  195 of 412 GB  613 MB/s  5 min 54 s left"
    assert describe(100, 100, 0, 0.0) == "[########################] 100%  1e-07 of 1e-07 GB  0 MB/s"
    assert [duration(seconds) for seconds in (0.4, 61, 7384)] == ["0 s", "1 min 01 s", "2 h 03 min"]


def test_command_line(source: Path, own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """0 when done, 1 when refused, 2 for a request that means nothing; --json prints one object."""
    command = ["convert", "mxfp4-to-fp8", str(source), str(tmp_path / "fp8"), "--profile", "hopper"]
    assert main([*command, "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["routed_matrices"] == 18
    assert main([*command, "--workers", "0"]) == 2
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["shards"] == 16
    assert main(command) == 1
    assert main([*command, "--resume"]) == 0
    with pytest.raises(SystemExit) as caught:
        main([*command, "--allow-inexact"])
    assert caught.value.code == 2
    rewrite(own, set_in(EXPERT + "w1.weight_scale", (7, 2), 150))
    command[2:4] = [str(own), str(tmp_path / "other")]
    capsys.readouterr()
    for extra in ([], ["--dry-run"]):
        assert main([*command, *extra]) == 1
        assert "row 7 spans" in capsys.readouterr().err
        shutil.rmtree(tmp_path / "other.converting", ignore_errors=True)


def test_a_source_that_shrinks_while_it_is_read(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file ends inside a tensor: an error, not a crash, and no shard."""
    from m3hal.checkpoint.convert import shard as module

    shard = sorted(own.glob("*.safetensors"))[-1]
    (own / "SHA256SUMS").unlink()
    scan = module.scan

    def shrink(*args: object) -> None:
        scan(*args)  # type: ignore[arg-type]
        os.truncate(shard, shard.stat().st_size // 2)

    monkeypatch.setattr(module, "scan", shrink)
    assert re.search(r"ends inside \S+; download", refuse(own, tmp_path / "fp8"))


def test_disk_full(source: Path, tmp_path: Path) -> None:
    """A limit on file sizes, which the kernel reports as a full disk does: one sentence, exit code 1, no target."""
    script = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))\n"
        "from m3hal.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    command = ["convert", "mxfp4-to-fp8", str(source), str(tmp_path / "fp8"), "--profile", "gaudi2"]
    done = subprocess.run([sys.executable, "-c", script, *command], capture_output=True, text=True)
    assert done.returncode == 1
    assert re.fullmatch(
        r"m3hal: no room for model-\S+ \(\S+ GB\) in \S+: .*; make room, then continue with --resume\n", done.stderr
    )
    assert not (tmp_path / "fp8").exists()


def test_disk_full_in_the_middle(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ENOSPC at some write of some shard: no shard of that name, no temporary file, and --resume completes the rest."""
    import errno

    written, real = 0, os.pwrite

    def full(file: int, data: bytes, place: int) -> int:
        nonlocal written
        written += len(data)
        if written > 70_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(file, data, place)

    monkeypatch.setattr(os, "pwrite", full)
    assert "No space left on device" in refuse(source, tmp_path / "fp8")
    assert not list(tmp_path.rglob("*.partial"))
    monkeypatch.undo()
    done = convert(source, tmp_path / "fp8", GAUDI2, resume=True)
    assert digest(done.target) == digest(convert(source, tmp_path / "whole", GAUDI2).target)


def test_no_room_is_said_before_the_first_byte(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes are known beforehand."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))  # type: ignore[attr-defined]
    assert "GB free; make room" in refuse(source, tmp_path / "fp8")
    assert not list((tmp_path / "fp8.converting").rglob("*.safetensors*"))


def test_targets_that_are_refused(source: Path, tmp_path: Path) -> None:
    """Inside the source, there already, or begun by another run; an empty folder is taken."""
    with pytest.raises(ConversionError, match="only read"):
        convert(source, source / "fp8", GAUDI2)
    (tmp_path / "there").mkdir()
    convert(source, tmp_path / "there", GAUDI2)
    with pytest.raises(ConversionError, match="exists"):
        convert(source, tmp_path / "there", GAUDI2)
    (tmp_path / "begun.converting").mkdir()
    with pytest.raises(ConversionError, match="--resume"):
        convert(source, tmp_path / "begun", GAUDI2)


def test_a_dry_run_writes_nothing(source: Path, tmp_path: Path) -> None:
    """It says how much there is to write, exactly, and finds a row that would be refused."""
    before = digest(tmp_path)
    found = preview(source, tmp_path / "fp8", GAUDI2)
    assert digest(tmp_path) == before
    assert not (tmp_path / "fp8").exists()
    done = convert(source, tmp_path / "fp8", GAUDI2)
    assert found.written_bytes == done.size == sum(path.stat().st_size for path in done.target.glob("*.safetensors"))
    assert found.seconds > 0
    own = Path(shutil.copytree(source, tmp_path / "own"))
    rewrite(own, set_in(EXPERT + "w1.weight_scale", (7, 2), 150))
    with pytest.raises(InexactError, match="row 7"):
        preview(own, tmp_path / "other", GAUDI2)


def test_sources_are_opened_read_only(source: Path, tmp_path: Path) -> None:
    """Every open, rename, unlink and the like in the whole run, by the interpreter's audit events."""
    script = """
import os, sys
from pathlib import Path
source = os.path.realpath(sys.argv[1])
def audit(event, args):
    if event == "open" and isinstance(args[0], (str, bytes, os.PathLike)):
        if os.path.realpath(args[0]).startswith(source):
            assert not args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND), args
            seen.append(args[0])
    elif event in ("os.rename", "os.remove", "os.truncate", "os.mkdir", "os.chmod", "os.utime", "os.link"):
        for path in args:
            assert not isinstance(path, (str, os.PathLike)) or not os.path.realpath(path).startswith(source), args
seen = []
sys.addaudithook(audit)
from m3hal.checkpoint.convert import GAUDI2, convert
convert(Path(sys.argv[1]), Path(sys.argv[2]), GAUDI2)
assert len(seen) > 10, seen
assert "torch" not in sys.modules
"""
    command = [sys.executable, "-c", script, str(source), str(tmp_path / "fp8")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_memory_stays_small(tmp_path: Path) -> None:
    """A shard of M3's own matrices, 110 MB to write: a worker's peak is NumPy and a few MB, not the shard."""
    folder = write(tmp_path / "source", Synthetic(layers=1, dense=0, experts=1, vocab=8, heads=1, kv_heads=1))
    script = (
        "import resource, sys; from pathlib import Path; from m3hal.checkpoint.convert import GAUDI2, convert\n"
        "done = convert(Path(sys.argv[1]), Path(sys.argv[2]), GAUDI2)\n"
        "print(done.size, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)"
    )
    command = [sys.executable, "-c", script, str(folder), str(tmp_path / "fp8")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    size, peak = map(int, done.stdout.split())
    assert size > 100e6
    assert peak < 250e6


def test_rounding_a_checkpoint_to_mxfp4() -> None:
    """Nearest, ties to even, scale by OCP's rule; numbers that are MXFP4 already stay."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal((8, 64))
    codes, scales = mxfp4.quantize(values)
    rounded = mxfp4.dequantize(codes, scales)
    again = mxfp4.dequantize(*mxfp4.quantize(rounded))
    assert np.array_equal(again, rounded)
    block = np.zeros((1, 32))
    block[0, :6] = 4.0, 0.25, 0.75, 2.5, -5.0, 7.9
    assert mxfp4.dequantize(*mxfp4.quantize(block))[0, :6].tolist() == [4.0, 0.0, 1.0, 2.0, -4.0, 6.0]


@pytest.mark.parametrize("place", ["/proc/fp8", "file/fp8"])
def test_a_folder_that_can_not_be_made(source: Path, tmp_path: Path, place: str) -> None:
    """One sentence that names the folder, not a traceback."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConversionError, match=r"can't be completed: .*fp8"):
        convert(source, tmp_path / place, GAUDI2)


def test_a_source_that_can_not_be_read_a_second_time(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An I/O error in the thread that computes the checksum stops the conversion; no shard goes unchecked."""
    from m3hal.checkpoint.convert import workers

    def failing(path: Path, expected: str) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(workers, "check_sum", failing)
    with pytest.raises(ConversionError, match="can't be read: Input/output error"):
        convert(source, tmp_path / "fp8", GAUDI2)


def test_files_are_not_executable(source: Path, tmp_path: Path) -> None:
    """Weights are data."""
    target = convert(source, tmp_path / "fp8", GAUDI2).target
    assert not any(path.stat().st_mode & 0o111 for path in target.iterdir())


@pytest.mark.parametrize("as_json", [False, True])
def test_control_c(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    """One sentence and the shell's exit code; no target, and --resume completes it."""
    from m3hal.checkpoint.convert import run

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    command = ["convert", "mxfp4-to-fp8", str(source), str(tmp_path / "fp8"), "--profile", "gaudi2"]
    with monkeypatch.context() as patch:
        patch.setattr(run, "run_jobs", interrupted)
        assert main([*command, *["--json"] * as_json]) == 130
    said = capsys.readouterr()
    assert "--resume continues" in (json.loads(said.out)["error"] if as_json else said.err)
    assert not (tmp_path / "fp8").exists()
    assert main([*command, "--resume"]) == 0


def test_a_dry_run_refuses_a_target_that_the_conversion_would_refuse(source: Path, tmp_path: Path) -> None:
    """One that exists, and an unfinished one unless it is to be resumed."""
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").write_text("")
    (tmp_path / "begun.converting").mkdir()
    with pytest.raises(ConversionError, match="exists; name a new folder"):
        preview(source, tmp_path / "there", GAUDI2)
    with pytest.raises(ConversionError, match="holds an unfinished conversion"):
        preview(source, tmp_path / "begun", GAUDI2)
    assert preview(source, tmp_path / "begun", GAUDI2, resume=True).shards
