"""YAML files: bases, overrides, variables and dots; and what is wrong is one line that says where and what to do."""

from __future__ import annotations

import copy
import pickle

import pytest

import cyxtrain as cx
from cyxtrain.checkpoint.remote_files import write_remote


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Writes files in the folder of the test, in which it is."""
    monkeypatch.chdir(tmp_path)

    def write(**texts):
        for name, text in texts.items():
            (tmp_path / f"{name}.yaml").write_text(text, encoding="utf-8")

    write(
        base="model: {name: mlp, inputs: 64, outputs: 10}\noptimizer: adam\ntraining: {epochs: 3, seed: 1}\n",
        own="_base_: base.yaml\nmodel:\n  hidden: [32, 16]\noptimizer: {name: sgd, lr: 1e-3}\n",
    )
    return write


def test_settings_have_dots_and_brackets(files):
    config = cx.Config.from_file("own.yaml")
    assert config.model.hidden == config["model"]["hidden"] == [32, 16]
    assert list(config) == ["model", "training", "optimizer"]
    assert config.get("scheduler") is None
    assert "lr" in config.optimizer
    assert config.optimizer.lr == 0.001
    assert isinstance(config.optimizer.lr, float)


def test_a_base_is_taken_over_setting_by_setting_and_another_name_rules_whole(files):
    config = cx.Config.from_file("own.yaml")
    assert config.model.to_dict() == {"name": "mlp", "inputs": 64, "outputs": 10, "hidden": [32, 16]}
    assert config.training.to_dict() == {"epochs": 3, "seed": 1}
    files(other="_base_: own.yaml\nmodel: {name: cnn}\noptimizer: adam\n")
    other = cx.Config.from_file("other.yaml")
    assert other.model.to_dict() == {"name": "cnn"}
    assert other.optimizer.to_dict() == {"name": "adam"}  # not with the rate of SGD


def test_several_bases_rule_in_their_order_and_lie_beside_the_file_that_names_them(files, tmp_path, monkeypatch):
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "long.yaml").write_text("_base_: ../base.yaml\ntraining: {epochs: 9}\n")
    (tmp_path / "own2.yaml").write_text("_base_: [own.yaml, more/long.yaml]\ntraining: {seed: 2}\n")
    monkeypatch.chdir(tmp_path / "more")
    config = cx.Config.from_file("../own2.yaml")
    assert config.training.to_dict() == {"epochs": 9, "seed": 2}
    assert config.optimizer.name == "adam"


def test_a_file_and_its_bases_may_be_in_a_store(files, tmp_path):
    write_remote("memory://settings/base.yaml", b"training: {epochs: 3, seed: 1}")
    write_remote("memory://settings/more/own.yaml", b"_base_: ../base.yaml\ntraining: {seed: 2}")
    assert cx.Config.from_file("memory://settings/more/own.yaml").training.to_dict() == {"epochs": 3, "seed": 2}
    files(here="_base_: memory://settings/more/own.yaml\ntraining: {epochs: 5}\n")
    assert cx.Config.from_file("here.yaml").training.to_dict() == {"epochs": 5, "seed": 2}
    write_remote("memory://settings/there.yaml", f"_base_: {tmp_path}/own.yaml".encode())
    assert cx.Config.from_file("memory://settings/there.yaml").optimizer.name == "sgd"
    write_remote("memory://settings/circle.yaml", b"_base_: more/../circle.yaml")
    with pytest.raises(cx.ConfigError, match=r"_base_ is circular: circle\.yaml -> circle\.yaml"):
        cx.Config.from_file("memory://settings/circle.yaml")
    with pytest.raises(cx.ConfigError, match=r"^there is no file memory://settings/none\.yaml\. Check the URL\.$"):
        cx.Config.from_file("memory://settings/none.yaml")


def test_overrides_rule_the_later_over_the_earlier(files):
    overrides = ["training.epochs=5", "model.hidden=[8, 8]", "training.epochs=7", "scheduler=cosine", "optimizer=null"]
    config = cx.Config.from_file("own.yaml", [*overrides, "training.clip_norm=1e-3", "training.checkpoint_dir=a b"])
    assert config.training.to_dict() == {"epochs": 7, "seed": 1, "clip_norm": 0.001, "checkpoint_dir": "a b"}
    assert config.model.hidden == [8, 8]
    assert config.scheduler.name == "cosine"
    assert config.optimizer is None
    assert config.with_overrides(["training.seed=4"]).training.seed == 4
    assert config.training.seed == 1


@pytest.mark.parametrize(
    ("text", "variables", "value"),
    [
        ("${FOLDER}/rows.npz", {"FOLDER": "/data"}, "/data/rows.npz"),
        ("${FOLDER:./here}/rows.npz", {}, "./here/rows.npz"),
        ("${FOLDER:./here}/rows.npz", {"FOLDER": ""}, "./here/rows.npz"),
        ("${ENV:default}", {}, "default"),
        ("${RATE:1e-3}", {}, 0.001),
        ("${RATE:1e-3}", {"RATE": "0.5"}, 0.5),
        ("${EPOCHS:3}", {"EPOCHS": "12"}, 12),
        ("${HOST:http://a.b:80/c d}", {}, "http://a.b:80/c d"),
        ("${EMPTY:}", {}, None),
        ("${training.seed}", {}, 1),
        ("${A:1}-${B:2}", {}, "1-2"),
        ("${A}", {"A": "0123"}, "0123"),
        ("${A}", {"A": "12:30"}, "12:30"),
        ("${A}", {"A": "-1.5e3"}, -1500.0),
        ("${A}", {"A": "true"}, True),
        ("${A}", {"A": "a${b}"}, "a${b}"),
        ("x${A}", {"A": "${B:3}"}, "x${B:3}"),
        (r"\${A}/x", {"A": "no"}, "${A}/x"),
    ],
)
def test_variables_of_the_environment_and_other_settings(files, monkeypatch, text, variables, value):
    for name in ("FOLDER", "ENV", "RATE", "EPOCHS", "HOST", "EMPTY", "A", "B"):
        monkeypatch.delenv(name, raising=False)
    for name, each in variables.items():
        monkeypatch.setenv(name, each)
    files(mine=f"_base_: base.yaml\ndata: {{name: npz, path: '{text}'}}\n")
    found = cx.Config.from_file("mine.yaml").data.path
    assert (found, type(found)) == (value, type(value))


def test_overrides_rule_together_in_any_order(files):
    for overrides in (["optimizer.lr=0.5", "optimizer.name=rmsprop"], ["optimizer=rmsprop", "optimizer.lr=0.5"]):
        assert cx.Config.from_file("own.yaml", overrides).optimizer.to_dict() == {"name": "rmsprop", "lr": 0.5}
    by_name = cx.Config.from_file("own.yaml", {"model.hidden": [1, 2], "scheduler": None, "training.seed": 3})
    assert (by_name.model.hidden, by_name.scheduler, by_name.training.seed) == ([1, 2], None, 3)


def test_what_is_resolved_stays_as_it_is(files):
    files(mine=r"data: {name: npz, path: '\${USD}'}")
    config = cx.Config.from_file("mine.yaml")
    assert config.data.path == "${USD}"
    again = config.with_overrides({"training.seed": 3})
    assert (again.data.path, again.training.seed) == ("${USD}", 3)
    for text in (r"\${A}", r"\\${A}", "$${A}", "a${b}c"):
        assert cx.Config({"data": {"path": text}}).with_overrides([]).data.path == text


@pytest.mark.parametrize("text", ["cost_${HOME}", "cost_${5", r"a\${b}\\${C}", "$${A}", "${", "plain"])
def test_what_to_yaml_writes_reads_back_as_it_was(tmp_path, text):
    (tmp_path / "own.yaml").write_text(cx.Config({"data": {"name": "npz", "path": text}}).to_yaml())
    assert cx.Config.from_file(tmp_path / "own.yaml").data.path == text


def test_references_resolve_from_the_top_and_from_their_section(tmp_path):
    text = "data: {name: npz, x: &x {p: [1, 2]}, y: *x, z: '${data.y.p[1]}-${.x.p.0}', w: '${.y}'}\n"
    (tmp_path / "own.yaml").write_text(text)
    found = cx.Config.from_file(tmp_path / "own.yaml").data
    assert (found.z, found.w.to_dict()) == ("2-1", {"p": [1, 2]})


def test_a_setting_can_be_assigned_also_in_a_section(files):
    config = cx.Config.from_file("own.yaml")
    config.training.epochs = 8
    config["training"]["batch_size"] = 16
    config.optimizer = {"name": "adam", "lr": 0.1}
    assert config.to_dict()["training"] == {"epochs": 8, "seed": 1, "batch_size": 16}
    assert config.optimizer.name == "adam"
    del config["optimizer"]
    assert "optimizer" not in config
    config.parts = [cx.Config({"a": 1})]
    assert config.to_dict()["parts"] == [{"a": 1}]
    with pytest.raises(AttributeError, match=r"'keys' is a method of Config: write config\['keys'\]"):
        config.keys = 3
    with pytest.raises(cx.ConfigError, match="Config takes settings by name"):
        cx.Config([1])


def test_a_config_is_a_value(files):
    config = cx.Config.from_file("own.yaml")
    assert copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == cx.Config(config.to_dict()) == config
    copied = config.to_dict()
    copied["model"]["hidden"].append(1)
    assert config.model.hidden == [32, 16]
    files(again=config.to_yaml())
    assert cx.Config.from_file("again.yaml") == config
    assert "epochs" in dir(config.training)
    assert not hasattr(config, "__array__")


@pytest.mark.parametrize(
    ("text", "overrides", "says"),
    [
        ("trainig: {}", [], r"mine.yaml has no section 'trainig'. Did you mean 'training'\?"),
        ("_base: own.yaml", [], r"mine.yaml has no section '_base'. Did you mean '_base_'\?"),
        ("training:\n  epochs: [1\n", [], "mine.yaml, line 3: this is not valid YAML: did not find"),
        (
            "training: {epochs: 1, epochs: 2}",
            [],
            "mine.yaml, line 1: this is not valid YAML: found duplicate key epochs.$",
        ),
        ("- 1\n", [], r"mine.yaml must have sections, such as 'training:', got \[1\]"),
        ("_base_: mine.yaml", [], "mine.yaml: _base_ is circular: mine.yaml -> mine.yaml"),
        ("_base_: bose.yaml", [], r"mine.yaml: _base_: there is no file bose.yaml. Did you mean base.yaml\?"),
        ("_base_: far/base.yaml", [], "there is no file far/base.yaml: the folder far does not exist."),
        ("training: {seed: '${SEEED}'}", [], "mine.yaml: training.seed is .*, but the environment has no SEEED: set"),
        ("training: {seed: '${model.size}'}", [], "mine.yaml: Interpolation key 'model.size' not found"),
        ("42", [], "mine.yaml must have sections, such as 'training:', got '42'"),
        ("_base_:", [], "mine.yaml: _base_ must be a file, or a list of files, got None"),
        ("_base_: {a: base.yaml}", [], "mine.yaml: _base_ must be a file, or a list of files"),
        ("model:\n\tname: mlp", [], "line 2: .*: it has a tab; YAML indents with spaces"),
        ("model:\n  name: mlp\n   inputs: 3", [], "line 3: .*: check the indentation"),
        ("data: {path: ${HERE:.}/a}", [], r"line 1: .*: within { } write ..{...}. in quotes"),
        ("training: {seed: '${seed:3}'}", [], "Environment variables are in capitals, such as"),
        ("training: {seed: 1}", "training.seed=2", r"overrides are a list, such as \['training.seed=2'\]"),
        ("training: {seed: 1}", ["training.=2"], "an override is name=value"),
        ("model: {hidden: [1]}", ["model.hidden[0]=2"], "replace the whole list, such as model.hidden="),
        ("model: {hidden: [1]}", ["model.hidden.0=2"], "replace the whole list"),
        ("callbacks: [Timer]", ["callbacks.name=2"], "settings do not match the type of what they override"),
        ("_base_: base.yaml", ["epochs=3"], r"no section 'epochs'. Did you mean 'training.epochs'\?"),
        ("epochs: 3", [], r"mine.yaml has no section 'epochs'. Did you mean 'training.epochs'\?"),
        ("_base_: base.yaml", ["training.epochs"], "an override is name=value, such as training.epochs=3; got 'train"),
        ("_base_: base.yaml", ["=3"], "an override is name=value"),
        ("_base_: base.yaml", ["optimiser.lr=3"], r"no section 'optimiser'. Did you mean 'optimizer'\?"),
        ("_base_: base.yaml", ["model.hidden=[1"], r"the override model.hidden=\[1, line .*: this is not valid YAML"),
    ],
)
def test_what_is_wrong_is_one_line_that_says_where(files, text, overrides, says):
    files(mine=text)
    with pytest.raises(cx.ConfigError, match=says) as caught:
        cx.Config.from_file("mine.yaml", overrides)
    assert "\n" not in str(caught.value)


def test_files_that_are_each_others_base_are_shown(files):
    files(a="_base_: b.yaml", b="_base_: c.yaml", c="_base_: a.yaml")
    with pytest.raises(cx.ConfigError, match=r"a.yaml -> b.yaml -> c.yaml -> a.yaml"):
        cx.Config.from_file("a.yaml")


def test_a_missing_file_names_those_that_are_there(files):
    with pytest.raises(cx.ConfigError, match=r"there is no file settings.yaml. In . there are: base.yaml, own.yaml"):
        cx.Config.from_file("settings.yaml")


def test_a_missing_setting_names_the_nearest_one(files):
    config = cx.Config.from_file("own.yaml")
    with pytest.raises(AttributeError, match=r"the config has no 'epoch'. Did you mean 'epochs'\?"):
        _ = config.training.epoch
    assert getattr(config, "nothing", 3) == 3


def test_a_file_of_other_bytes_than_text_is_refused(tmp_path):
    (tmp_path / "latin.yaml").write_bytes("model: größer".encode("latin-1"))
    with pytest.raises(cx.ConfigError, match=r"cannot read .*latin\.yaml"):
        cx.Config.from_file(tmp_path / "latin.yaml")


def test_a_variable_that_is_no_yaml_is_text(tmp_path, monkeypatch):
    (tmp_path / "own.yaml").write_text("data: {name: npz, path: '${FOLDER}'}")
    monkeypatch.setenv("FOLDER", "[a")
    assert cx.Config.from_file(tmp_path / "own.yaml").data.path == "[a"


def test_a_config_shows_its_settings():
    assert repr(cx.Config({"training": {"epochs": 3}})) == "Config({'training': {'epochs': 3}})"
