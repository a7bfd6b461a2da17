"""A whole graph: every call is accounted for, results are kept, failures are reported."""

from __future__ import annotations

import csv
import dataclasses
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import pytest
import torch

from paritas.core.errors import UsageError
from paritas.sharding.graphs import verify
from paritas.sharding.graphs.checkpoints import read_checkpoint
from paritas.sharding.graphs.rows import CallOutcome, GraphReport
from paritas.sharding.graphs.verify import verify_graph
from paritas.sharding.operators.library import register, unregister
from unit.sharding.graphs.ckp_files import NORMS
from unit.sharding.graphs.small_graphs import RIGHT, WRONG, graph, idle, linear, relu

FINE = graph(linear(0), relu(1), linear(2), idle(3))
FAULTY = graph(linear(0, WRONG), relu(1), linear(2, WRONG), idle(3))


class Elsewhere(Executor):
    """Does the work at once; crashes at the given operators."""

    def __init__(self, deadly=()):
        self.deadly, self.done = set(deadly), []

    def submit(self, fn, /, *args):
        future = Future()
        node = args[0].call.name
        if node in self.deadly:
            future.set_exception(BrokenProcessPool("a worker died"))
        else:
            self.done.append(node)
            future.set_result(fn(*args))
        return future


@pytest.fixture
def checked(monkeypatch):
    """The nodes that were checked, in their order."""
    nodes = []
    check = verify.check_call

    def counted(call, settings, values=None):
        nodes.append(call.name)
        return check(call, settings, values)

    monkeypatch.setattr(verify, "check_call", counted)
    return nodes


def stop_after(count):
    def tell(progress):
        if progress.total and progress.done == count:
            raise KeyboardInterrupt

    return tell


# --- what is reported -----------------------------------------------------------------------------


def test_every_call_is_accounted_for_and_identical_ones_are_checked_once(checked):
    report = verify_graph(FINE)
    assert checked == ["linear_0", "relu_1", "item_3"]
    assert [[site.position for site in one.sites] for one in report.operators] == [[0, 2], [1], [3]]
    assert report.counts()[CallOutcome.VERIFIED] == 3
    assert report.counts()[CallOutcome.NOTHING] == 1
    assert report.calls == sum(report.counts().values()) == 4
    assert report.exit_code == 0
    assert report.passed
    assert report.settings["ranks"] == "2"
    assert report.versions["torch"] == torch.__version__


def test_a_wrong_annotation_fails_with_its_source_line_and_a_script(tmp_path, untried):
    report = verify_graph(FAULTY, tmp_path)
    failed = report.operators[0]
    assert failed.outcome is CallOutcome.FAILED
    assert [site.source for site in failed.sites] == ["model.py:10", "model.py:12"]
    assert failed.script == "repro/00_linear.py"
    text = (tmp_path / failed.script).read_text()
    assert "Node:       linear_0 at model.py:10, and 1 more like it" in text
    assert f"Annotation: {WRONG} (declared)" in text
    assert report.exit_code == 1


def test_what_is_written_reads_back(tmp_path, untried):
    report = verify_graph(FAULTY, tmp_path / "new" / "folder")
    folder = tmp_path / "new" / "folder"
    names = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    assert names == {"results.json", "results.csv", "report.html", "journal.jsonl", "repro"}
    assert GraphReport.from_json((folder / "results.json").read_bytes()) == report
    with (folder / "results.csv").open(newline="", encoding="utf-8-sig") as file:
        rows = list(csv.DictReader(file))
    told = " ".join(rows[0])
    for column in ("operator", "signature", "source", "option", "ranks", "status", "gradients"):
        assert column in told
    assert "loss_one_device" in told
    assert "loss_several_devices" in told
    assert len(rows) == sum(max(len(one.options), 1) for one in report.operators)


def test_the_page_is_left_out_on_request_and_an_earlier_one_goes(tmp_path):
    verify_graph(FINE, tmp_path)
    verify_graph(FINE, tmp_path, html=False)
    assert not (tmp_path / "report.html").exists()


def test_a_graph_without_calls_is_not_a_success():
    assert verify_graph(graph()).exit_code == 3


def test_an_operator_that_paritas_does_not_run_is_unsupported_and_the_rest_is_checked():
    report = verify_graph(graph(relu(0, "os.system"), relu(1)))
    assert [one.outcome for one in report.operators] == [
        CallOutcome.UNSUPPORTED,
        CallOutcome.VERIFIED,
    ]
    assert "os.system" in report.operators[0].reason
    assert report.exit_code == 3


def test_a_fault_of_our_own_becomes_the_operators_result(monkeypatch):
    def broken(call, settings, values=None):
        raise RuntimeError("no such thing\nsecond line")

    monkeypatch.setattr(verify, "check_call", broken)
    [one] = verify_graph(graph(relu(0))).operators
    assert one.outcome is CallOutcome.UNSUPPORTED
    assert one.reason == "checking it raised RuntimeError: no such thing"


# --- resuming -------------------------------------------------------------------------------------


def test_a_second_run_takes_over_everything_and_checks_nothing(tmp_path, checked, untried):
    first = verify_graph(FAULTY, tmp_path)
    checked.clear()
    second = verify_graph(FAULTY, tmp_path)
    assert not checked
    assert second.resumed == len(first.operators)
    assert second.operators == first.operators


def test_an_interrupted_run_writes_what_there_is_and_the_next_goes_on(tmp_path, checked):
    with pytest.raises(KeyboardInterrupt):
        verify_graph(FINE, tmp_path, on_progress=stop_after(1))
    written = GraphReport.from_json((tmp_path / "results.json").read_bytes())
    assert not written.ended
    assert [one.operator for one in written.operators] == ["torch.nn.functional.linear"]
    assert written.exit_code == 3
    checked.clear()
    report = verify_graph(FINE, tmp_path)
    assert checked == ["relu_1", "item_3"]
    assert report.resumed == 1
    assert report.passed


def test_another_graph_in_the_same_folder_is_registered_beside_the_first(
    tmp_path, checked, untried
):
    """`relu` is in both graphs, and is verified only once."""
    verify_graph(FAULTY, tmp_path)
    del checked[:]
    more = graph(relu(0), linear(1), name="more")
    report = verify_graph(more, tmp_path)
    assert checked == ["linear_1"]
    assert (report.shared, report.resumed, report.number) == (1, 0, 2)
    assert report.passed
    [again] = [one for one in report.operators if one.operator == "torch.relu"]
    assert "not verified again: already verified for toy" in again.notes
    assert [site.node for site in again.sites] == ["relu_0"]
    [first] = report.others
    assert (first.graph, first.exit_code, len(first.operators)) == ("toy", 1, 3)


def test_the_results_of_all_graphs_of_a_folder_stay_readable(tmp_path, untried):
    verify_graph(FAULTY, tmp_path)
    verify_graph(graph(linear(0, WRONG), name="more"), tmp_path)
    read = GraphReport.from_json((tmp_path / "results.json").read_bytes())
    assert [one.graph for one in (read, *read.others)] == ["more", "toy"]
    scripts = [one.script for report in (read, *read.others) for one in report.operators]
    assert [name for name in scripts if name] == ["repro/graph2_00_linear.py", "repro/00_linear.py"]
    assert all((tmp_path / name).is_file() for name in scripts if name)
    with (tmp_path / "results.csv").open() as file:
        assert {line["graph"] for line in csv.DictReader(file)} == {"more", "toy"}
    assert (tmp_path / "report_1.html").is_file()
    assert 'href="report_1.html"' in (tmp_path / "report.html").read_text()
    # The first graph again: no page with a name of the other order is left.
    verify_graph(FAULTY, tmp_path)
    assert sorted(path.name for path in tmp_path.glob("*.html")) == ["report.html", "report_2.html"]


def test_a_graph_that_is_checked_again_after_another_takes_its_own_over(tmp_path, checked):
    verify_graph(FINE, tmp_path, html=False)
    verify_graph(graph(linear(0, width=6), name="more"), tmp_path, html=False)
    del checked[:]
    report = verify_graph(FINE, tmp_path, html=False)
    assert (checked, report.resumed, report.shared, report.number) == ([], 3, 0, 1)


def test_starting_over_deletes_all_graphs_of_a_folder(tmp_path, untried):
    verify_graph(FAULTY, tmp_path)
    verify_graph(graph(linear(0), name="more"), tmp_path)
    report = verify_graph(FINE, tmp_path, resume=False)
    assert (report.resumed, report.shared, report.others) == (0, 0, ())
    names = {path.name for path in tmp_path.iterdir() if not path.name.startswith(".")}
    assert names == {"journal.jsonl", "report.html", "results.csv", "results.json"}


def test_a_function_of_the_same_name_in_memory_is_verified_for_each_graph(tmp_path, checked):
    def right(x):
        return x.relu()

    verify_graph(graph(relu(0, "mine.op", right)), tmp_path, html=False)
    report = verify_graph(graph(relu(0, "mine.op", right), linear(1)), tmp_path, html=False)
    assert (checked, report.shared) == (["relu_0", "relu_0", "linear_1"], 0)


def test_an_operator_is_checked_again_if_its_rule_has_changed(tmp_path, checked):
    call = dataclasses.replace(relu(0), annotation=None)
    verify_graph(graph(call), tmp_path, html=False)
    register("torch.relu", "a b^ -> a b^", overwrite=True)
    try:
        report = verify_graph(graph(call), tmp_path, html=False)
    finally:
        unregister("torch.relu")
    assert (checked, report.resumed) == (["relu_0", "relu_0"], 0)
    assert [one.split for one in report.operators[0].options] == ["split by a"]


def test_a_device_and_ranks_that_are_not_there_are_refused_before_the_work(tmp_path, checked):
    for asked, told in (
        ({"device": "abacus"}, "device='abacus' cannot be used: Expected one of cpu, cuda,"),
        ({"device": "meta"}, "device='meta' holds no values"),
        ({"confirm": "nccl"}, "NCCL needs tensors on GPUs, but the device is 'cpu'"),
        ({"confirm": "mpi"}, "confirm must be 'gloo', 'nccl' or None, got 'mpi'"),
    ):
        with pytest.raises(UsageError, match=told):
            verify_graph(FINE, tmp_path / "out", **asked)
    assert not checked
    assert not (tmp_path / "out").exists()


def test_starting_over_deletes_our_files_and_nothing_else(tmp_path, untried):
    verify_graph(FAULTY, tmp_path)
    (tmp_path / "repro" / "notes.txt").write_text("mine")
    (tmp_path / "other.csv").write_text("mine")
    verify_graph(FINE, tmp_path, resume=False)
    assert [path.name for path in (tmp_path / "repro").iterdir()] == ["notes.txt"]
    assert (tmp_path / "other.csv").exists()


def test_other_settings_in_the_same_folder_are_refused(tmp_path):
    verify_graph(FINE, tmp_path)
    with pytest.raises(UsageError, match=r"seed was 0, now it is 1"):
        verify_graph(FINE, tmp_path, seed=1)


def test_a_changed_module_needs_another_check(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    module = tmp_path / "rules_of_mine.py"
    module.write_text("A = 1\n")
    verify_graph(FINE, tmp_path / "out", imports=["rules_of_mine"])
    module.write_text("A = 2\n")
    with pytest.raises(UsageError, match="another version of the module rules_of_mine"):
        verify_graph(FINE, tmp_path / "out", imports=["rules_of_mine"])


def test_files_of_somebody_else_are_not_replaced(tmp_path):
    (tmp_path / "results.csv").write_text("mine")
    with pytest.raises(UsageError, match=r"holds results.csv, but no journal.jsonl to resume from"):
        verify_graph(FINE, tmp_path)
    assert (tmp_path / "results.csv").read_text() == "mine"


@pytest.mark.parametrize("name", ["journal.jsonl", ".journal.lock"])
def test_a_file_that_leads_out_of_the_folder_is_not_written_to(tmp_path, name):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).symlink_to(tmp_path / "precious")
    with pytest.raises(UsageError, match="it is a symbolic link; remove it"):
        verify_graph(FINE, tmp_path / "out", resume=False)
    assert (tmp_path / "precious").read_text() == "mine"


def test_an_outdir_that_is_a_file_and_a_linked_folder_of_scripts_are_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="it is a file; use a folder"):
        verify_graph(FINE, tmp_path / "file")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "repro").symlink_to(tmp_path)
    with pytest.raises(UsageError, match="it is a link or a file, not a folder; remove it"):
        verify_graph(FINE, tmp_path / "out")


# --- workers --------------------------------------------------------------------------------------


def test_a_worker_that_dies_costs_its_own_operator_alone():
    report = verify_graph(FINE, executor=Elsewhere(deadly=["relu_1"]), jobs=2)
    assert [one.outcome for one in report.operators] == [
        CallOutcome.VERIFIED,
        CallOutcome.UNSUPPORTED,
        CallOutcome.NOTHING,
    ]
    assert "the process that checked it died" in report.operators[1].reason
    assert "BrokenProcessPool" in report.operators[1].reason


def test_workers_get_all_calls_except_functions_made_in_memory():
    elsewhere = Elsewhere()
    own = relu(1, "own.f", lambda x: x.relu())
    report = verify_graph(graph(linear(0), own, idle(2)), executor=elsewhere, jobs=2)
    assert elsewhere.done == ["linear_0"]
    assert [one.outcome for one in report.operators[:2]] == [CallOutcome.VERIFIED] * 2


def test_threads_are_refused_because_they_share_the_random_state():
    with pytest.raises(UsageError, match=r"executor='threads'.*torch's random state"):
        verify_graph(FINE, executor="threads")
    with (
        ThreadPoolExecutor(1) as pool,
        pytest.raises(UsageError, match="torch's random state"),
    ):
        verify_graph(FINE, executor=pool)
    with pytest.raises(UsageError, match="jobs=0"):
        verify_graph(FINE, jobs=0)


def test_the_random_state_of_the_caller_is_left_as_it_was():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    verify_graph(FINE)
    assert torch.equal(before, torch.get_rng_state())


def test_an_operator_that_ended_an_earlier_process_gets_one_of_its_own(
    tmp_path, monkeypatch, checked
):
    """It may crash again without affecting the others."""
    key = verify.group_calls(FINE, verify.GraphSettings())[1].key
    begin = verify.GraphJournal.begin

    def die(self, one):
        begin(self, one)
        if one == key:
            raise SystemExit(9)

    with monkeypatch.context() as patch:
        patch.setattr(verify.GraphJournal, "begin", die)
        with pytest.raises(SystemExit):
            verify_graph(FINE, tmp_path)
    isolated = []

    def away(work):
        isolated.append(work.call.name)
        return verify.check_work(work)

    monkeypatch.setattr(verify, "_check_isolated", away)
    report = verify_graph(FINE, tmp_path)
    assert isolated == ["relu_1"]
    assert report.passed


# --- values ---------------------------------------------------------------------------------------


def test_ranks_may_be_a_single_number():
    report = verify_graph(graph(linear(0, RIGHT)), ranks=3)
    assert {option.ranks for option in report.operators[0].options} == {3}


def test_a_graph_is_not_changed_by_being_checked():
    calls = tuple(dataclasses.replace(call) for call in FINE.calls)
    verify_graph(FINE)
    assert calls == FINE.calls


# --- norms that exchange statistics between ranks, or keep them -----------------------------------


def test_a_checkpoint_with_batch_norm_and_instance_norm_is_verified(tmp_path):
    report = verify_graph(NORMS, tmp_path, html=False)
    assert report.exit_code == 0
    outcomes = {one.operator.rpartition(".")[2]: one for one in report.operators}
    norm, instance = outcomes["wrap_batchnorm2d_func"], outcomes["wrap_instancenorm2d_func"]
    assert (norm.outcome, norm.reason) == (CallOutcome.VERIFIED, "")
    assert [option.split for option in norm.options] == ["split by n", "split by c"]
    assert instance.outcome is CallOutcome.VERIFIED
    assert instance.reason == (
        "outputs and gradients are right; after the call each rank has its own "
        "args[3] (running_mean), args[4] (running_var)"
    )
    assert [note.partition(":")[0] for note in instance.notes[1:]] == [
        "args[3] (running_mean) drifts",
        "args[4] (running_var) drifts",
    ]


def test_batch_norm_that_declares_no_exchange_fails(undiagnosed):
    whole = read_checkpoint(NORMS)
    norm = next(call for call in whole.calls if "batchnorm" in call.name)
    plain = dataclasses.replace(norm, annotation=norm.annotation.partition(" ;")[0])
    [one] = verify_graph(graph(plain), html=False).operators
    assert one.outcome is CallOutcome.FAILED
    assert one.reason.startswith("split by n, 2 ranks: output: in float64")
