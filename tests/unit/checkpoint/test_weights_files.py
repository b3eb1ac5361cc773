"""Claims about weights of other libraries: they load with the same numbers, run no code, and take no memory."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import textwrap
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import safetensors.torch
import torch
from fitting import fingerprint
from torch import Tensor, nn
from worlds import child_environment

import cyxtrain as cx

State = dict[str, Tensor]


def model(seed: int = 0, width: int = 3) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width))


class Tied(nn.Module):
    """As language models are: the scores of words use the embedding's weights."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(5, 3)
        self.layer = nn.Linear(3, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight


def of_lightning(state: State, **hyper_parameters: object) -> dict[str, Any]:
    """Return what `Trainer.save_checkpoint` of Lightning 2 writes."""
    optimizer = torch.optim.Adam(model().parameters())
    return {
        "epoch": 1,
        "global_step": 20,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": OrderedDict(state),
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"total": {"ready": 1}}}},
        "callbacks": {"ModelCheckpoint{'monitor': None}": {"best_model_score": torch.tensor(0.5), "dirpath": "runs"}},
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [],
        "hparams_name": "kwargs",
        "hyper_parameters": {"width": 8, **hyper_parameters},
    }


def prefixed(state: State, prefix: str) -> State:
    return {f"{prefix}{name}": value for name, value in state.items()}


def put_shards(folder: Path, state: State, kind: str) -> Path:
    """Write a file for each tensor and their index, as Hugging Face's libraries do; return the index."""
    folder.mkdir(exist_ok=True)
    stem, ending = kind.split(".")
    files = {name: f"{stem}-{number:05}-of-{len(state):05}.{ending}" for number, name in enumerate(state, 1)}
    for name, file in files.items():
        if ending == "safetensors":
            safetensors.torch.save_file({name: state[name].clone()}, folder / file, {"format": "pt"})
        else:
            torch.save({name: state[name].clone()}, folder / file)
    index = folder / f"{kind}.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": files}))
    return index


SAVED: dict[str, Callable[[State], Any]] = {
    "state_dict": lambda state: state,
    "ordered": OrderedDict,
    "under state_dict": lambda state: {"epoch": 3, "state_dict": state},
    "under model_state_dict": lambda state: {"model_state_dict": state, "optimizer_state_dict": {"state": {}}},
    "Lightning": of_lightning,
    "DDP": lambda state: prefixed(state, "module."),
    "compiled": lambda state: prefixed(state, "_orig_mod."),
    "compiled in DDP": lambda state: prefixed(state, "module._orig_mod."),
    "DDP, compiled": lambda state: prefixed(state, "_orig_mod.module."),
}
KINDS = ("model.safetensors", "pytorch_model.bin")


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "before 1.6"])
@pytest.mark.parametrize("kind", SAVED)
def test_a_file_of_torch_save_is_loaded(tmp_path, kind, is_zip):
    torch.save(SAVED[kind](model().state_dict()), tmp_path / "w.pt", _use_new_zipfile_serialization=is_zip)
    other = model(seed=1)
    assert cx.load_weights(other, tmp_path / "w.pt") == ([], [])
    assert fingerprint(other) == fingerprint(model())


def test_a_model_with_a_part_named_module_keeps_its_names(tmp_path):
    holder, other = nn.ModuleDict({"module": model()}), nn.ModuleDict({"module": model(seed=1)})
    torch.save(holder.state_dict(), tmp_path / "w.pt")
    cx.load_weights(other, tmp_path / "w.pt")
    assert fingerprint(other) == fingerprint(holder)


@pytest.mark.parametrize(("prefix", "more"), [("model.", {}), ("net.body.", {"loss.weight": torch.ones(2)})])
def test_another_prefix_is_refused_with_the_line_that_loads_it(tmp_path, prefix, more):
    net, path = model(seed=1), tmp_path / "last.ckpt"
    before = fingerprint(net)
    torch.save(of_lightning({**prefixed(model().state_dict(), prefix), **more}), path)
    for strict in (True, False):
        with pytest.raises(cx.CheckpointError, match=f"All names of the model follow '{prefix[:-1]}' there") as caught:
            cx.load_weights(net, path, strict=strict)
    assert fingerprint(net) == before
    line = re.findall(r"use (load_weights\(.*\))\.$", str(caught.value))[0]
    found = eval(line, {"load_weights": cx.load_weights, "torch": torch, "model": net, "path": path})
    assert found == ([], [*more])
    assert fingerprint(net) == fingerprint(model())


class Attack:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.folder,)


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "before 1.6"])
def test_code_in_a_file_is_named_and_does_not_run(tmp_path, is_zip):
    state = {**model().state_dict(), "attack": Attack(tmp_path / "made")}
    torch.save(state, tmp_path / "w.pt", _use_new_zipfile_serialization=is_zip)
    with pytest.raises(cx.CheckpointError, match=r"w\.pt holds more than tensors and plain values: \w+\.mkdir\. PyTor"):
        cx.load_weights(model(), tmp_path / "w.pt")
    assert not (tmp_path / "made").exists()


def test_all_classes_that_pytorch_refuses_are_named_and_load_once_they_are_allowed(tmp_path):
    net, path = model(seed=1), tmp_path / "last.ckpt"
    torch.save(of_lightning(model().state_dict(), args=argparse.Namespace(lr=0.1), activation=nn.ReLU), path)
    named = r"add_safe_globals\(\[argparse\.Namespace, torch\.nn\.modules\.activation\.ReLU\]\), or save the state_dict"
    with pytest.raises(cx.CheckpointError, match=named) as caught:
        cx.load_weights(net, path)
    assert str(caught.value).isprintable()
    with torch.serialization.safe_globals([argparse.Namespace, nn.ReLU]):
        cx.load_weights(net, path)
    assert fingerprint(net) == fingerprint(model())


@pytest.mark.parametrize(
    ("saved", "says"),
    [
        (torch.ones(2), "holds a Tensor, which is not a state_dict"),
        ([torch.ones(2)], "holds a list, which is not"),
        ({0: torch.ones(2)}, r"holds a dict with the keys \[0\]"),
        ({"model": {"a": torch.ones(2)}, "epoch": 1}, r"with the keys \['model', 'epoch'\], which is not .* Load it"),
        (model(), "plain values: torch.nn.modules.batchnorm.BatchNorm1d, torch.nn.modules.container.Sequential"),
    ],
)
def test_what_is_no_state_dict_is_refused_with_what_it_is(tmp_path, saved, says):
    torch.save(saved, tmp_path / "w.pt")
    with pytest.raises(cx.CheckpointError, match=says):
        cx.load_weights(model(), tmp_path / "w.pt")


@pytest.mark.parametrize(("is_zip", "kept"), [(True, 0.9), (True, 0.5), (False, 0.9), (False, 0.1)])
def test_a_cut_file_of_torch_save_is_corrupt(tmp_path, is_zip, kept):
    path = tmp_path / "w.pt"
    torch.save(nn.Linear(50, 50).state_dict(), path, _use_new_zipfile_serialization=is_zip)
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content))])
    with pytest.raises(cx.CheckpointError, match=r"w\.pt is corrupt, or PyTorch cannot read it") as caught:
        cx.load_weights(nn.Linear(50, 50), path)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 700


def zipped_again(path: Path, compression: int) -> None:
    """Replace a file of torch.save by one with the same entries, as another program would pack them."""
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_file_that_another_program_has_packed_again_has_the_same_numbers(tmp_path, compression):
    state = {**model().state_dict(), "2.phase": torch.full((65,), 1 + 2j, dtype=torch.complex128)}
    other = model(seed=1).append(nn.Module())
    other[2].register_buffer("phase", torch.zeros(65, dtype=torch.complex128))
    torch.save(state, tmp_path / "w.pt")
    zipped_again(tmp_path / "w.pt", compression)
    cx.load_weights(other, tmp_path / "w.pt")
    assert torch.equal(other[2].phase, state["2.phase"])
    assert fingerprint(other[:2]) == fingerprint(model())


@pytest.mark.parametrize("padding", range(17))
def test_numbers_at_any_place_of_a_safetensors_file_are_loaded(tmp_path, padding):
    """Readers must not expect that a header has a multiple of 8 bytes, or a number a place that suits it."""
    content = safetensors.torch.save(model().state_dict())
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length] + b" " * padding
    (tmp_path / "w.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])
    other = model(seed=1)
    cx.load_weights(other, tmp_path / "w.safetensors")
    assert fingerprint(other) == fingerprint(model())


# Names that differ, and shapes.


class Several(nn.Module):
    """A buffer whose elements share memory, which PyTorch cannot copy into, and a state that is no tensor."""

    def __init__(self, calls: int = 0) -> None:
        super().__init__()
        torch.manual_seed(calls)
        self.layer = nn.Linear(2, 2)
        self.register_buffer("mask", torch.zeros(1).expand(3))
        self.calls = calls

    def get_extra_state(self) -> int:
        return self.calls

    def set_extra_state(self, state: int) -> None:
        self.calls = state


@pytest.mark.parametrize("build", [model, Tied, Several, lambda seed: torch.compile(model(seed), backend="eager")])
def test_without_strict_the_names_are_those_of_pytorch_and_the_rest_is_loaded(tmp_path, build):
    first, ours, theirs = build(0), build(1), build(1)
    state = {name.removeprefix("_orig_mod."): value for name, value in first.state_dict().items()}
    kept = next(name for name in state if name.endswith("weight"))
    given = {kept: state[kept], "old.weight": torch.ones(2)}
    torch.save(given, tmp_path / "w.pt")
    plain = getattr(theirs, "_orig_mod", theirs)
    expected = plain.load_state_dict(given, strict=False)
    found = cx.load_weights(ours, tmp_path / "w.pt", strict=False)
    tied = {"head.weight"} if build is Tied else set()
    counter = {
        name for name in state if name.endswith("num_batches_tracked")
    }  # PyTorch calls an old BatchNorm complete
    assert found.missing_keys == sorted({*expected.missing_keys, *counter} - tied)
    assert found.unexpected_keys == expected.unexpected_keys == ["old.weight"]
    assert fingerprint(ours) == fingerprint(theirs)
    if build is Several:
        assert ours.calls == 1


def test_without_strict_differing_shapes_are_refused_all_at_once_and_nothing_is_changed(tmp_path):
    wide = nn.Sequential(*(nn.Linear(3, 4) for _ in range(12)), nn.Linear(2, 2))
    narrow = nn.Sequential(*(nn.Linear(2, 2) for _ in range(13)), nn.Linear(1, 1))
    torch.save(wide.state_dict(), tmp_path / "w.pt")
    before = fingerprint(narrow)
    with pytest.raises(cx.CheckpointError) as caught:
        cx.load_weights(narrow, tmp_path / "w.pt", strict=False)
    for number in range(12):
        assert f"{number}.weight is [4, 3] there and [2, 2] in the model" in str(caught.value)
        assert f"{number}.bias is [4] there and [2] in the model" in str(caught.value)
    assert "missing" not in str(caught.value)
    assert fingerprint(narrow) == before


def test_without_strict_a_file_of_another_model_is_refused(tmp_path):
    torch.save({"encoder.weight": torch.ones(2)}, tmp_path / "w.pt")
    with pytest.raises(cx.CheckpointError, match=r"missing \['0\.bias', .*; unexpected \['encoder\.weight'\]\. Build"):
        cx.load_weights(model(), tmp_path / "w.pt", strict=False)
    # Names that a module with its own loading code may lack are no match.
    with pytest.raises(cx.CheckpointError, match=r"unexpected \['encoder\.weight'\]"):
        cx.load_weights(nn.Sequential(nn.Linear(2, 2), Keeper(0.0)), tmp_path / "w.pt", strict=False)


# Shards and folders.


@pytest.mark.parametrize("kind", KINDS)
def test_shards_are_loaded_by_their_index_by_their_folder_and_from_the_current_one(tmp_path, monkeypatch, kind):
    index = put_shards(tmp_path / "saved", model().state_dict(), kind)
    monkeypatch.chdir(index.parent)
    for path in (index, index.parent, str(index.parent), index.name, "."):
        other = model(seed=1)
        assert cx.load_weights(other, path) == ([], [])
        assert fingerprint(other) == fingerprint(model())


@pytest.mark.parametrize("kind", KINDS)
def test_a_tied_weight_that_a_folder_leaves_out_is_not_missing(tmp_path, kind):
    state = Tied().state_dict()
    del state["head.weight"]
    put_shards(tmp_path, state, kind)
    other = Tied(seed=1)
    assert cx.load_weights(other, tmp_path, strict=False) == ([], [])
    assert fingerprint(other) == fingerprint(Tied())
    assert other.head.weight is other.embedding.weight


def test_a_folder_is_read_as_from_pretrained_reads_it(tmp_path):
    for number, kind in reversed([*enumerate(KINDS)]):
        put_shards(tmp_path, model(2 * number + 1).state_dict(), kind)
        net = model(seed=9)
        cx.load_weights(net, tmp_path)
        assert fingerprint(net) == fingerprint(model(2 * number + 1))
        save = safetensors.torch.save_file if kind.endswith("safetensors") else torch.save
        save(model(2 * number).state_dict(), tmp_path / kind)
        cx.load_weights(net, tmp_path)
        assert fingerprint(net) == fingerprint(model(2 * number))


def test_a_folder_without_weights_and_an_index_without_its_shards_are_refused_by_name(tmp_path):
    with pytest.raises(
        cx.CheckpointError, match=r"it is a folder, not a file, and has none of model\.safetensors, mod"
    ):
        cx.load_weights(model(), tmp_path)
    index = put_shards(tmp_path, model().state_dict(), "model.safetensors")
    (tmp_path / "model-00002-of-00007.safetensors").unlink()
    with pytest.raises(cx.CheckpointError, match=r"There is no weights file .*model-00002-of-00007\.safetensors"):
        cx.load_weights(model(), index)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 1}}'])
def test_a_corrupt_index_is_refused(tmp_path, content):
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(cx.CheckpointError, match=r"index\.json is corrupt or is not an index of shards"):
        cx.load_weights(model(), tmp_path)


@pytest.mark.parametrize("shard", ["../secret.safetensors", "/secret.safetensors", "a/secret.safetensors"])
def test_an_index_names_no_file_of_another_folder(tmp_path, shard):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"0.weight": shard}}))
    with pytest.raises(cx.CheckpointError, match=f"the shard {shard} is in another folder"):
        cx.load_weights(model(), index)


def test_differences_of_all_shards_are_one_error_and_nothing_is_changed(tmp_path):
    put_shards(tmp_path, model(width=5).state_dict(), "model.safetensors")
    net = model()
    with pytest.raises(cx.CheckpointError) as caught:
        cx.load_weights(net, tmp_path)
    for text in ("0.weight is [5, 4] there and [3, 4]", "0.bias is [5] there", "1.running_var is [5] there"):
        assert text in str(caught.value)
    assert fingerprint(net) == fingerprint(model())


@pytest.mark.parametrize("kind", KINDS)
def test_shards_and_files_of_torch_save_come_from_a_store(tmp_path, kind):
    store = fsspec.filesystem("memory")
    index = put_shards(tmp_path, model().state_dict(), kind)
    torch.save(of_lightning(model().state_dict()), tmp_path / "last.ckpt")
    store.put(f"{tmp_path}/", "/store/w", recursive=True)
    for name in (index.name, "last.ckpt"):
        other = model(seed=1)
        cx.load_weights(other, f"memory://store/w/{name}")
        assert fingerprint(other) == fingerprint(model())
    with pytest.raises(cx.CheckpointError, match="memory://store/w"):
        cx.load_weights(model(), "memory://store/w")
    store.rm("/store", recursive=True)


@pytest.mark.parametrize("name", ["w.safetensors", "w.pt"])
def test_a_loaded_model_does_not_depend_on_its_file(tmp_path, name):
    path, net = tmp_path / name, model(seed=1)
    save = safetensors.torch.save_file if name.endswith("safetensors") else torch.save
    save(model().state_dict(), path)
    content = path.read_bytes()
    cx.load_weights(net, path)
    net(torch.ones(2, 4)).sum().backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    assert path.read_bytes() == content
    cx.load_weights(net, path)
    path.write_bytes(b"\xff" * len(content))
    assert fingerprint(net) == fingerprint(model())


class Keeper(nn.Module):
    """Keeps tensors of the state that it is given: by its own loading code, and as its extra state."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.memory = torch.full((4096,), number)
        self.more = {"seen": self.memory + 1}

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}memory"] = self.memory

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        self.memory = state_dict.pop(f"{prefix}memory")
        super()._load_from_state_dict(state_dict, prefix, *others)

    def get_extra_state(self) -> dict[str, Tensor]:
        return self.more

    def set_extra_state(self, state: dict[str, Tensor]) -> None:
        self.more = state


def test_a_module_that_keeps_what_it_is_given_does_not_depend_on_the_file(tmp_path):
    path, net = tmp_path / "w.pt", Keeper(0.0)
    torch.save(Keeper(3.0).state_dict(), path)
    cx.load_weights(net, path)
    path.write_bytes(b"\xff" * path.stat().st_size)
    assert torch.equal(net.memory, torch.full((4096,), 3.0))
    assert torch.equal(net.more["seen"], torch.full((4096,), 4.0))


def test_a_weight_named_as_the_format_is_loaded(tmp_path):
    net, other = nn.ParameterDict({"pt": torch.ones(2)}), nn.ParameterDict({"pt": torch.zeros(2)})
    cx.save_weights(net, tmp_path / "w.safetensors")
    assert cx.load_weights(other, tmp_path / "w.safetensors") == ([], [])
    assert torch.equal(other["pt"], torch.ones(2))


MEASURE = """
import json, sys, threading, time
import torch, cyxtrain as cx

def anonymous_bytes():
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith("RssAnon"))

net = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(12)))
found = {}
for path in 2 * sys.argv[1:]:  # the first time, modules are imported
    before, peak, done = anonymous_bytes(), 0, threading.Event()
    def watch():
        global peak
        while not done.wait(0.001):
            peak = max(peak, anonymous_bytes())
    watcher = threading.Thread(target=watch)
    watcher.start()
    cx.load_weights(net, path)
    done.set()
    watcher.join()
    found[path] = peak - before
print(json.dumps(found))
"""


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_loading_takes_no_memory_above_the_models(tmp_path):
    """Twelve layers of 4 MiB, each in its own shard."""
    state = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(12))).state_dict()
    paths = [put_shards(tmp_path / kind, state, kind) for kind in KINDS]
    torch.save(state, tmp_path / "w.pt")
    safetensors.torch.save_file(state, tmp_path / "w.safetensors")
    paths += [tmp_path / "w.pt", tmp_path / "w.safetensors"]
    command = [sys.executable, "-c", MEASURE, *map(str, paths)]
    ran = subprocess.run(command, env=child_environment(), capture_output=True, text=True, timeout=100, check=False)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert max(found.values()) < 8 << 20, found


# The libraries themselves.


def transformer(kind: str) -> nn.Module:
    import transformers
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # it leaves a thread
    if kind == "GPT-2":
        sizes = {"n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=50, **sizes))
    small = {"vocab_size": 50, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    if kind == "T5":
        return transformers.T5ForConditionalGeneration(transformers.T5Config(**small))
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=50, **sizes))


@pytest.mark.nightly
@pytest.mark.parametrize("shard_size", ["5KB", "1GB"])
@pytest.mark.parametrize("kind", ["GPT-2", "T5", "BERT"])
def test_a_folder_of_save_pretrained_is_loaded_with_its_ties(tmp_path, kind, shard_size):
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    saved, other = transformer(kind), transformer(kind)
    saved.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "5KB")
    assert cx.load_weights(other, tmp_path) == ([], [])
    assert fingerprint(other) == fingerprint(saved)
    again = type(saved).from_pretrained(tmp_path)
    assert fingerprint(other) == fingerprint(again)


@pytest.mark.nightly
def test_a_backbone_of_save_pretrained_goes_into_a_model_with_another_head(tmp_path):
    transformers = pytest.importorskip("transformers")
    saved = transformer("BERT")
    saved.save_pretrained(tmp_path)
    other = transformers.BertForSequenceClassification(saved.config)
    found = cx.load_weights(other, tmp_path, strict=False)
    expected = other.load_state_dict(saved.state_dict(), strict=False)
    assert found.missing_keys == sorted(expected.missing_keys)
    assert {name.partition(".")[0] for name in found.unexpected_keys} == {"cls"}
    assert fingerprint(other.bert.encoder) == fingerprint(saved.bert.encoder)


LIGHTNING = textwrap.dedent("""
    import sys
    import lightning, torch
    from torch.utils.data import DataLoader, TensorDataset

    class Regression(lightning.LightningModule):
        def __init__(self, width=3, lr=0.1):
            super().__init__()
            self.save_hyperparameters()
            self.model = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.BatchNorm1d(width))

        def training_step(self, batch, _):
            return self.model(batch[0]).square().mean()

        def configure_optimizers(self):
            optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    loader = DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=8)
    module = Regression()
    trainer = lightning.Trainer(accelerator="cpu", max_epochs=2, logger=False, enable_progress_bar=False,
                                default_root_dir=sys.argv[1])
    trainer.fit(module, loader)
    trainer.save_checkpoint(f"{sys.argv[1]}/last.ckpt")
    torch.save(module.model.state_dict(), f"{sys.argv[1]}/bare.pt")
""")


@pytest.mark.nightly
def test_a_checkpoint_that_lightning_has_written_is_loaded(tmp_path):
    pytest.importorskip("lightning")
    command = [sys.executable, "-c", LIGHTNING, str(tmp_path)]
    ran = subprocess.run(command, env=child_environment(), capture_output=True, text=True, timeout=100, check=False)
    assert ran.returncode == 0, ran.stderr
    first, second = model(seed=1), model(seed=2)
    cx.load_weights(first, tmp_path / "bare.pt")
    with pytest.raises(
        cx.CheckpointError, match=r'use load_weights\(torch\.nn\.ModuleDict\({"model": model}\), path\)'
    ):
        cx.load_weights(second, tmp_path / "last.ckpt")
    cx.load_weights(nn.ModuleDict({"model": second}), tmp_path / "last.ckpt")
    assert fingerprint(first) == fingerprint(second)
