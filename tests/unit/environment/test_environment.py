"""What the environment says: torchrun's variables as they are, half of them an error that names the other half."""

from __future__ import annotations

import os

import pytest

import cyxtrain as cx
from cyxtrain.config import RingOptions, complete_config
from cyxtrain.environment import process_env

# What `torchrun --nnodes 2 --nproc-per-node 2` gives to the last of its processes.
TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "ROLE_RANK": "3",
    "ROLE_NAME": "default",
    "ROLE_WORLD_SIZE": "4",
    "MASTER_ADDR": "node-0",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RESTART_COUNT": "1",
    "TORCHELASTIC_MAX_RESTARTS": "3",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "OMP_NUM_THREADS": "1",
}
PAIR = {"RANK": "1", "WORLD_SIZE": "2"}


def read_config(variables):
    return complete_config(cx.DistributedConfig(), variables)


def identity(config):
    return config.rank, config.world_size, config.local_rank


def test_empty_environment_is_a_world_of_one():
    config = read_config({})
    assert identity(config) == (0, 1, 0)
    assert (config.master_addr, config.master_port) == ("127.0.0.1", 29500)
    assert config.backend is None
    assert config.timeout_ms == 30_000


def test_variables_of_torchrun_are_taken_as_they_are():
    config = read_config(TORCHRUN)
    assert identity(config) == (3, 4, 1)
    assert (config.master_addr, config.master_port) == ("node-0", 29400)


@pytest.mark.parametrize("address", ["::1", "[::1]", "[fe80::1%eth0]"])
def test_an_ipv6_address_may_have_brackets(address):
    bare = address.strip("[]")
    agent = TORCHRUN | {"MASTER_ADDR": address, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    by_environment = read_config(agent)
    by_program = complete_config(cx.DistributedConfig(rank=1, world_size=2, master_addr=address), {})
    assert by_environment.master_addr == by_program.master_addr == bare
    port = by_environment.master_port
    assert process_env.agent_store_prefix(bare, port, agent) == "/worker/attempt_1"


def test_local_rank_is_the_rank_where_nothing_says_otherwise():
    assert identity(read_config(PAIR)) == (1, 2, 1)


@pytest.mark.parametrize(
    ("variables", "there", "missing"),
    [
        ({"RANK": "0"}, "RANK", "WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE", "RANK"),
        ({"LOCAL_RANK": "0"}, "LOCAL_RANK", "RANK and WORLD_SIZE"),
        ({"MASTER_ADDR": "node-0"}, "MASTER_ADDR", "RANK and WORLD_SIZE"),
        ({"RANK": "0", "MASTER_ADDR": "node-0"}, "RANK, MASTER_ADDR", "WORLD_SIZE"),
    ],
)
def test_half_an_environment_is_an_error_that_names_what_is_missing(variables, there, missing):
    with pytest.raises(cx.ConfigError, match=f"half set: {there} is there and {missing} is missing"):
        read_config(variables)


@pytest.mark.parametrize("variable", ["MASTER_PORT", "OMP_NUM_THREADS", "DISTRIBUTED_TIMEOUT_MS"])
def test_what_a_shell_may_set_for_a_launcher_is_no_half_environment(variable):
    assert identity(read_config({variable: "29501"})) == (0, 1, 0)


@pytest.mark.parametrize("variable", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "DISTRIBUTED_TIMEOUT_MS"])
@pytest.mark.parametrize("value", ["one", "1.5", "0x1"])
def test_number_that_is_none_is_refused_with_its_variable(variable, value):
    with pytest.raises(cx.ConfigError, match=f"{variable}='{value}' in the environment is not a whole number"):
        read_config(PAIR | {variable: value})


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"RANK": "2"}, "rank 2 is outside a world of 2"),
        ({"RANK": "-1"}, "rank must be a whole number of at least 0, got -1"),
        ({"WORLD_SIZE": "0"}, "world_size must be a whole number of at least 1, got 0"),
        ({"LOCAL_RANK": "-1"}, "local_rank"),
        ({"MASTER_PORT": "70000"}, "master_port must be below 65536, got 70000"),
        ({"DISTRIBUTED_TIMEOUT_MS": "0"}, "timeout_ms"),
    ],
)
def test_number_out_of_range_is_refused(variables, words):
    with pytest.raises(cx.ConfigError, match=words):
        read_config(PAIR | variables)


@pytest.mark.parametrize("variable", ["MASTER_ADDR", "MASTER_PORT", "DISTRIBUTED_BACKEND", "DISTRIBUTED_TIMEOUT_MS"])
def test_empty_variable_is_as_good_as_none(variable):
    assert read_config(PAIR | {variable: ""}) == read_config(PAIR)


@pytest.mark.parametrize("name", ["cpu", "GLOO", "nccl"])
def test_backend_comes_from_the_environment(name):
    assert read_config({"DISTRIBUTED_BACKEND": name}).backend is cx.BackendType(name.lower())


def test_unknown_backend_is_refused_with_its_variable_and_the_nearest_one():
    with pytest.raises(cx.ConfigError, match=r"DISTRIBUTED_BACKEND.*'nclc'.*Did you mean 'nccl'"):
        read_config({"DISTRIBUTED_BACKEND": "nclc"})


def test_nccl_timeout_gets_a_warning_that_names_what_to_set():
    with pytest.warns(UserWarning, match="NCCL_TIMEOUT.*collective_timeout_ms"):
        read_config({"NCCL_TIMEOUT": "60"})


def test_timeout_comes_from_the_environment():
    assert read_config({"DISTRIBUTED_TIMEOUT_MS": "1500"}).timeout_ms == 1500


def test_what_the_config_leaves_open_comes_from_the_environment():
    config = complete_config(cx.DistributedConfig(collective_timeout_ms=5000), TORCHRUN)
    assert identity(config) == (3, 4, 1)
    assert (config.master_addr, config.master_port) == ("node-0", 29400)
    assert config.collective_timeout_ms == 5000


def test_rank_and_world_size_in_code_still_meet_where_the_environment_says():
    """PyTorch's tutorials set MASTER_ADDR and MASTER_PORT, and pass rank and world_size."""
    config = complete_config(
        cx.DistributedConfig(rank=1, world_size=2), {"MASTER_ADDR": "node-0", "MASTER_PORT": "12355"}
    )
    assert (config.master_addr, config.master_port) == ("node-0", 12355)
    assert identity(config) == (1, 2, 1)


def test_what_the_config_says_rules_over_the_environment():
    said = cx.DistributedConfig(
        rank=0, world_size=2, local_rank=5, master_addr="node-9", master_port=1234, backend="gloo", timeout_ms=77
    )
    assert complete_config(said, TORCHRUN | {"DISTRIBUTED_TIMEOUT_MS": "1", "DISTRIBUTED_BACKEND": "nccl"}) == said


def test_rank_alone_takes_its_world_from_the_environment():
    assert identity(complete_config(cx.DistributedConfig(rank=0), {"WORLD_SIZE": "3"})) == (0, 3, 0)
    with pytest.raises(cx.ConfigError, match="rank is set and world_size is not"):
        complete_config(cx.DistributedConfig(rank=0), {})


def test_completing_leaves_the_users_config_as_it_is():
    config = cx.DistributedConfig()
    complete_config(config, TORCHRUN)
    assert config == cx.DistributedConfig()


def test_from_environment_reads_this_process(monkeypatch):
    for name in (*TORCHRUN, "DISTRIBUTED_BACKEND", "DISTRIBUTED_TIMEOUT_MS"):
        monkeypatch.delenv(name, raising=False)
    assert identity(cx.DistributedConfig.from_environment()) == (0, 1, 0)
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert identity(cx.DistributedConfig.from_environment()) == (3, 4, 1)


def test_reading_changes_no_variable(monkeypatch):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    cx.DistributedConfig.from_environment()
    assert dict(os.environ) == before


def test_store_of_torchruns_agent_is_used_only_where_the_agent_is():
    config = read_config(TORCHRUN)
    assert process_env.agent_store_prefix(config.master_addr, config.master_port, TORCHRUN) == "/worker/attempt_1"
    assert process_env.agent_store_prefix(config.master_addr, config.master_port, PAIR) is None
    elsewhere = complete_config(cx.DistributedConfig(master_port=1234), TORCHRUN)
    assert process_env.agent_store_prefix(elsewhere.master_addr, elsewhere.master_port, TORCHRUN) is None


def test_ring_has_its_usual_options_where_nobody_says_otherwise():
    assert RingOptions.from_environment({}) == RingOptions(None, 30.0, False)
    empty = dict.fromkeys(("CYXTRAIN_SECRET", "CYXTRAIN_HEARTBEAT_TIMEOUT_MS", "CYXTRAIN_CHECKSUMS"), "")
    assert RingOptions.from_environment(empty) == RingOptions(None, 30.0, False)


def test_options_of_the_ring_come_from_the_environment():
    variables = {"CYXTRAIN_SECRET": "s", "CYXTRAIN_HEARTBEAT_TIMEOUT_MS": "5000", "CYXTRAIN_CHECKSUMS": "1"}
    assert RingOptions.from_environment(variables) == RingOptions("s", 5.0, True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CYXTRAIN_HEARTBEAT_TIMEOUT_MS", "soon"),
        ("CYXTRAIN_HEARTBEAT_TIMEOUT_MS", "99"),
        ("CYXTRAIN_CHECKSUMS", "yes"),
    ],
)
def test_option_that_is_none_is_refused_with_its_variable(name, value):
    with pytest.raises(cx.ConfigError, match=name):
        RingOptions.from_environment({name: value})


def test_a_secret_that_is_required_and_absent_is_refused_with_the_remedy():
    config = cx.DistributedConfig(rank=0, world_size=2, require_secret=True)
    with pytest.raises(cx.ConfigError, match=r"CYXTRAIN_SECRET is not set: .*token_hex"):
        complete_config(config, {})
    complete_config(config, {"CYXTRAIN_SECRET": "s"})


def test_a_world_of_one_needs_no_secret():
    complete_config(cx.DistributedConfig(rank=0, world_size=1, require_secret=True), {})


def test_a_secret_is_not_pretended_where_the_backend_asks_for_none():
    config = cx.DistributedConfig(rank=0, world_size=2, require_secret=True, backend="gloo")
    with pytest.raises(cx.ConfigError, match="the gloo backend lets in every process"):
        complete_config(config, {"CYXTRAIN_SECRET": "s"})


def test_what_is_set_is_shown_and_the_secret_is_not():
    variables = {"RANK": "1", "CYXTRAIN_SECRET": "s3cr3t", "MASTER_PORT": "", "HOME": "here", "OMP_NUM_THREADS": "2"}
    assert process_env.settings_found(variables) == {"RANK": "1", "CYXTRAIN_SECRET": "set", "OMP_NUM_THREADS": "2"}


def test_a_worker_takes_its_channel_out_of_the_environment(monkeypatch):
    monkeypatch.setenv(process_env.WORKER_CHANNEL, "127.0.0.1 4711")
    assert process_env.take_worker_channel() == "127.0.0.1 4711"
    with pytest.raises(cx.ConfigError, match="Only a trainer starts workers"):
        process_env.take_worker_channel()
