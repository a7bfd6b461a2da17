from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from paritas import torchair_dump
from paritas.core.errors import ParityWarning, UsageError

OFF = {"Switch": {"GraphFusion": {"ALL": "off"}, "UBFusion": {"ALL": "off"}}}


class Bag:
    """Whatever is set on it, in the order of that."""

    def __init__(self, **groups):
        self.__dict__.update(groups)


def torchair_config() -> Bag:
    """As torchair's own is built, as far as the two functions touch it."""
    return Bag(
        debug=Bag(
            graph_dump=Bag(type=None, path=None), data_dump=Bag(type=None, path=None, filter=None)
        ),
        dump_config=Bag(
            enable_dump=False,
            dump_path="./",
            dump_mode="all",
            quant_dumpable=False,
            dump_step="",
            dump_layer="",
        ),
        fusion_config=Bag(fusion_switch_file=None),
        mode="max-autotune",
    )


def flat(group, prefix="") -> dict:
    found = {}
    for name, value in vars(group).items():
        inner = (
            flat(value, f"{prefix}{name}.") if isinstance(value, Bag) else {prefix + name: value}
        )
        found.update(inner)
    return found


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def changes(before: Bag, after: Bag) -> dict:
    old, new = flat(before), flat(after)
    return {name: value for name, value in new.items() if old.get(name) != value}


def test_of_torchairs_configuration_exactly_the_fields_of_a_dump_are_set(tmp_path):
    Path("switch.json").write_text(json.dumps(OFF))
    config = torchair_config()
    returned = torchair_dump.get_ge_dump_config(
        dump_path="dump",
        dump_mode="input",
        fusion_switch_file="switch.json",
        dump_token=[1, 2, 5],
        dump_layer=["Add", "Conv_1"],
        compiler_config=config,
    )
    folder = str(tmp_path / "dump" / "msit_ge_dump")
    assert returned is config
    assert changes(torchair_config(), config) == {
        "debug.graph_dump.type": "txt",
        "debug.graph_dump.path": folder,
        "dump_config.enable_dump": True,
        "dump_config.dump_path": folder,
        "dump_config.dump_mode": "input",
        "dump_config.dump_step": "1|2|5",
        "dump_config.dump_layer": "Add Conv_1",
        "fusion_config.fusion_switch_file": str(tmp_path / "switch.json"),
    }
    assert Path(folder).is_dir()


def test_what_is_not_asked_for_is_left_as_it_is_in_torchairs_configuration(tmp_path):
    config = torchair_dump.get_ge_dump_config(compiler_config=torchair_config())
    folder = str(tmp_path / "msit_ge_dump")
    assert changes(torchair_config(), config) == {
        "debug.graph_dump.type": "txt",
        "debug.graph_dump.path": folder,
        "dump_config.enable_dump": True,
        "dump_config.dump_path": folder,
    }


def test_of_torchairs_configuration_the_dump_node_by_node_sets_type_and_path(tmp_path):
    config = torchair_dump.get_fx_dump_config("dump", compiler_config=torchair_config())
    assert changes(torchair_config(), config) == {
        "debug.data_dump.type": "npy",
        "debug.data_dump.path": str(tmp_path / "dump" / "msit_fx_dump"),
    }


def test_other_releases_of_torchair_name_the_path_otherwise_or_have_none(tmp_path):
    config = torchair_config()
    vars(config.debug)["graph_dump"] = Bag(type=None, _path=None)
    vars(config.debug)["data_dump"] = Bag(type=None)
    torchair_dump.get_ge_dump_config("a", compiler_config=config)
    torchair_dump.get_fx_dump_config("b", compiler_config=config)
    assert vars(config.debug.graph_dump)["_path"] == str(tmp_path / "a" / "msit_ge_dump")
    assert vars(config.debug.data_dump) == {"type": "npy"}


def test_an_object_without_the_fields_is_refused_by_their_names():
    with pytest.raises(
        UsageError, match=r"has no debug\.graph_dump\.type, debug\.graph_dump\.path"
    ):
        torchair_dump.get_ge_dump_config(compiler_config=Bag(dump_config=Bag()))
    with pytest.raises(UsageError, match=r"has no debug\.data_dump\.type"):
        torchair_dump.get_fx_dump_config(compiler_config=3)
    assert not list(Path().iterdir())


def test_a_value_that_torchair_refuses_is_shown_with_its_reason():
    class Strict(Bag):
        def __setattr__(self, name, value):
            raise ValueError(f"{value!r} does not match")

    config = torchair_config()
    vars(config)["dump_config"] = Strict(**vars(config.dump_config))
    message = r"cannot set dump_config\.enable_dump = True: True does not match"
    with pytest.raises(UsageError, match=message):
        torchair_dump.get_ge_dump_config(compiler_config=config)


@pytest.mark.parametrize("make", [torchair_config, torchair_dump.CompilerConfig, lambda: None])
@pytest.mark.parametrize("kind", ["ge", "fx"])
def test_a_folder_that_is_not_empty_is_refused(make, kind):
    used = Path(f"dump/msit_{kind}_dump")
    used.mkdir(parents=True)
    ask = getattr(torchair_dump, f"get_{kind}_dump_config")
    ask("dump", compiler_config=make())
    (used / "worldsize1_global_rank0").mkdir()
    with pytest.raises(UsageError, match="is not empty: it contains 'worldsize1_global_rank0'"):
        ask("dump", compiler_config=make())
    ask("another", compiler_config=make())


def test_what_other_ranks_of_the_run_have_written_is_not_in_the_way(monkeypatch):
    for variable, value in (("RANK", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(variable, value)
    used = Path("msit_ge_dump")
    for name in ("worldsize2_global_rank0", "rank0"):
        (used / name).mkdir(parents=True)
    (used / "dynamo_original_graph_0_rank_0_pid_7_ts_20240125031118787351.txt").touch()
    torchair_dump.get_ge_dump_config()
    (used / "rank1").mkdir()
    with pytest.raises(UsageError, match="it contains 'rank1'"):
        torchair_dump.get_ge_dump_config()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dump_mode": "inputs"}, "dump_mode='inputs': give one of input, output, all"),
        ({"dump_token": [-1]}, r"dump_token: .*-1 is not a step"),
        ({"dump_token": []}, r"dump_token: .*selects nothing"),
        ({"dump_token": ["two"]}, r"dump_token: .*'two' is not a step or range"),
        ({"dump_layer": "Add"}, r"dump_layer='Add': give a list of names"),
        ({"dump_layer": []}, r"dump_layer=\[\]: give a list of names"),
        ({"dump_layer": ["Add", 3]}, r"dump_layer: 3 is not the name"),
        ({"dump_layer": ["Add Conv_1"]}, r"dump_layer: 'Add Conv_1' is not the name"),
        ({"dump_path": 3}, "dump_path=3: give a path"),
        ({"dump_path": "file"}, r"cannot create .*msit_ge_dump: Not a directory"),
        ({"fusion_switch_file": 3}, "fusion_switch_file=3: give the path"),
        ({"fusion_switch_file": "missing.json"}, r"missing\.json"),
        ({"fusion_switch_file": "bad.json"}, r"bad\.json"),
    ],
    ids=str,
)
@pytest.mark.parametrize("make", [torchair_config, torchair_dump.CompilerConfig])
def test_a_wrong_argument_is_shown_and_changes_nothing(given, message, make):
    Path("file").touch()
    Path("bad.json").write_text('{"Fusion": {}}')
    config = make()
    before = flat(config) if isinstance(config, Bag) else repr(config)
    with pytest.raises(UsageError, match=message):
        torchair_dump.get_ge_dump_config(**given, compiler_config=config)
    assert (flat(config) if isinstance(config, Bag) else repr(config)) == before
    assert not Path("msit_ge_dump").exists()


def test_steps_may_be_ranges():
    config = torchair_dump.get_ge_dump_config(dump_token=[0, "2-5", range(7, 9)])
    assert config.dump_config.dump_step == "0|2-5|7-8"


def test_our_configuration_takes_what_it_knows_and_nothing_else():
    config = torchair_dump.CompilerConfig()
    config.dump_config.dump_mode = "input"
    config.debug.graph_dump.type = "txt"
    assert config.dump_config.dump_mode == "input"
    assert config.debug.graph_dump.type == "txt"
    assert torchair_dump.CompilerConfig().dump_config.dump_mode == "all"
    with pytest.raises(UsageError, match=r"config\.dump_config\.dump_mode = 'both': give 'all' or"):
        config.dump_config.dump_mode = "both"
    with pytest.raises(UsageError, match=r"config\.dump_config\.enable_dump = 1: give False or"):
        config.dump_config.enable_dump = 1
    with pytest.raises(UsageError, match=r"config\.dump_config\.dump_step = '5\|2': give steps"):
        config.dump_config.dump_step = "5|2"
    with pytest.raises(UsageError, match=r"dump_steps = '1': .*options are dump_step, "):
        config.dump_config.dump_steps = "1"
    with pytest.raises(UsageError, match=r"config\.modus = 'x': there is no such option"):
        config.modus = "x"
    with pytest.raises(UsageError, match=r"config\.debug is a group"):
        config.debug = None


def test_one_configuration_asks_for_one_dump():
    config = torchair_dump.get_ge_dump_config("a")
    with pytest.raises(UsageError, match="either fused or node by node"):
        torchair_dump.get_fx_dump_config("a", compiler_config=config)
    config = torchair_dump.get_fx_dump_config("a")
    with pytest.raises(UsageError, match="either fused or node by node"):
        torchair_dump.get_ge_dump_config("b", compiler_config=config)
    config.dump_config.enable_dump = True
    with pytest.raises(UsageError, match="either fused or node by node"):
        torchair_dump.get_backend(compiler_config=config)


def test_a_configuration_that_asks_for_no_dump_gives_plain_inductor():
    assert torchair_dump.get_backend() == "inductor"
    config = torchair_dump.CompilerConfig()
    assert torchair_dump.get_npu_backend(compiler_config=config) == "inductor"


@pytest.mark.parametrize(
    ("group", "option", "value", "message"),
    [
        ("debug.graph_dump", "type", "txt", "printed only with a dump of fused code"),
        ("fusion_config", "fusion_switch_file", "a.json", "only affects dumps of fused code"),
    ],
)
def test_an_option_that_would_have_no_effect_is_refused(group, option, value, message):
    config = torchair_dump.CompilerConfig()
    found = config
    for name in group.split("."):
        found = getattr(found, name)
    setattr(found, option, value)
    with pytest.raises(UsageError, match=message):
        torchair_dump.get_backend(compiler_config=config)


def test_torchairs_own_configuration_makes_no_backend_here():
    with pytest.raises(UsageError, match=r"pass torchair's own to torchair\.get_npu_backend"):
        torchair_dump.get_backend(compiler_config=torchair_config())


def test_other_settings_of_torchair_are_passed_over_with_a_note():
    config = torchair_dump.CompilerConfig()
    config.mode = "reduce-overhead"
    config.experimental_config.frozen_parameter = True
    config.experimental_config.aclgraph.static_kernel = 1
    config.debug.aclgraph.disable_reinplace_input_mutated_ops_pass = True
    config.dump_config.quant_dumpable = False  # the default
    assert config.experimental_config.frozen_parameter is True
    assert repr(config).startswith("config(debug=")
    assert copy.deepcopy(config).mode == "reduce-overhead"
    with pytest.warns(ParityWarning) as told:
        assert torchair_dump.get_backend(compiler_config=config) == "inductor"
    (warning,) = told
    assert str(warning.message) == (
        "passed over, because only Ascend's compiler has them: "
        "config.debug.aclgraph.disable_reinplace_input_mutated_ops_pass = True, "
        "config.mode = 'reduce-overhead', config.experimental_config.frozen_parameter = True, "
        "config.experimental_config.aclgraph.static_kernel = 1"
    )
    torchair_dump.get_fx_dump_config("dump", config)
    with pytest.warns(ParityWarning):
        backend = torchair_dump.get_backend(compiler_config=config)
    backend.session.close(raising=False)
    assert str(warning.message) in backend.session._header.notes
