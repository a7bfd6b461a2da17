"""invariants(): rows, promises, exit codes, relations of one's own, the command."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import paritas
from paritas.app.cli import main
from paritas.relations.relation import forget_relation
from paritas.relations.rows import InvariantsReport
from quality.relation_models import TOKENS, VOCABULARY, Decoder, Trained, plant, tokens


def decoder_and_tokens():
    """For the command: a right model."""
    return Decoder(), tokens()


def faulty_and_tokens():
    """For the command: a model that is wrong with a cache."""
    return plant(Decoder(), "other scale with a cache", "layers.0.mixer"), tokens()


@pytest.fixture
def own():
    """Register relations that are gone after the test."""
    names = []

    def register(name, **how):
        names.append(name)
        return paritas.relation(name=name, **how)

    yield register
    for name in names:
        forget_relation(name)


def test_a_relation_that_does_not_apply_has_a_row_with_its_reason():
    report = paritas.invariants(Trained().eval(), tokens(), only=["cached-decoding"])
    row = report.row("cached-decoding")
    assert (row.promise, row.reason) == ("does not apply", "no cache in its signature")
    assert row.status is None


def test_nothing_compared_is_unverified():
    report = paritas.invariants(Trained().eval(), tokens(), only=["cached-decoding"])
    assert report.exit_code == 3
    assert not report
    assert str(report).startswith("unverified: no relation applies to this model")


def test_a_way_that_raises_is_unverified():
    class Broken(Decoder):
        def forward(self, input_ids, use_cache=False, **rest):
            if rest.get("past_key_values") is not None:
                raise RuntimeError("no more memory")
            return super().forward(input_ids, use_cache=use_cache, **rest)

    class Named(Broken):
        def forward(self, input_ids, past_key_values=None, use_cache=False):
            return super().forward(input_ids, past_key_values=past_key_values, use_cache=use_cache)

    report = paritas.invariants(Named().eval(), tokens(), only=["cached-decoding"])
    assert report.row("cached-decoding").status is paritas.Status.UNVERIFIED
    assert report.exit_code == 3
    assert "no more memory" in report.row("cached-decoding").summary


class _Continued(Decoder):
    """A decoder whose calls with a cache are changed."""

    def forward(self, input_ids, past_key_values=None, use_cache=False):
        result = super().forward(input_ids, past_key_values=past_key_values, use_cache=use_cache)
        return result if past_key_values is None else self.changed(input_ids, result)


def test_a_value_with_another_number_of_axes_is_different():
    class Squeezed(_Continued):
        def changed(self, _, result):
            return {**result, "logits": result["logits"].squeeze(1)}

    report = paritas.invariants(Squeezed().eval(), tokens(), only=["cached-decoding"])
    row = report.row("cached-decoding")
    assert row.status is paritas.Status.DIFFERENT
    assert row.verdict.failures[0].reason == (
        "a call gave logits of shape [3, 23], which has 2 axes; the plain call gives 3"
    )


@pytest.mark.usefixtures("undiagnosed")
def test_values_without_a_further_axis_are_located():
    class Valued(_Continued):
        def changed(self, _, result):
            return {**result, "logits": result["logits"] + 1e-3}

        def forward(self, input_ids, past_key_values=None, use_cache=False):
            result = super().forward(input_ids, past_key_values, use_cache)
            return {**result, "logits": result["logits"].sum(dim=-1)}

    report = paritas.invariants(Valued().eval(), tokens(), only=["cached-decoding"])
    assert "first wrong at row 0, token 1" in report.row("cached-decoding").summary


def test_what_a_model_refuses_in_words_is_not_promised_and_the_rest_is_checked():
    class Single(_Continued):
        def changed(self, input_ids, result):
            assert input_ids.shape[1] == 1, "a cache is only supported for one token"
            return result

    relations = ["cached-decoding", "chunked-prefill", "cache-reorder", "prefix-reuse"]
    report = paritas.invariants(Single().eval(), tokens(), only=relations)
    assert report.passed
    promises = {row.relation: row.promise for row in report.rows}
    assert promises == {
        "cached-decoding": "checked",
        "chunked-prefill": "checked",  # a last chunk of 1
        "cache-reorder": "checked",
        "prefix-reuse": "not promised",
    }
    assert "only supported for one token" in report.row("prefix-reuse").reason


@pytest.mark.parametrize("both", [False, True], ids=["candidate", "both"])
def test_a_candidate_that_refuses_what_the_model_does_is_not_excused(both):
    class Rows(nn.Linear):
        refuses = both

        def forward(self, x):
            if self.refuses and len(x) == 1:
                raise NotImplementedError("one row is not supported")
            return super().forward(x)

    torch.manual_seed(0)
    model = Rows(4, 6)
    candidate = Rows(4, 6)
    candidate.load_state_dict(model.state_dict())
    candidate.refuses = True
    inputs = [torch.ones(3, 4)]
    report = paritas.invariants(model, inputs, only="row-independence", candidate=candidate)
    assert report.passed == both


def test_a_model_that_draws_random_numbers_is_not_accused():
    class Noisy(nn.Module):
        def forward(self, x):
            return x + torch.randn_like(x)

    report = paritas.invariants(Noisy(), [torch.ones(2, 3)], only="row-independence")
    row = report.row("row-independence")
    assert row.promise == "does not apply"
    assert "random numbers" in row.reason


@pytest.mark.parametrize("norm", [nn.LayerNorm(6), nn.BatchNorm1d(6)])
def test_rows_of_a_model_without_tokens_are_compared(norm):
    model = nn.Sequential(nn.Linear(4, 6), norm)
    inputs = [torch.randn(3, 4, generator=torch.Generator().manual_seed(0))]
    right = isinstance(norm, nn.LayerNorm)
    report = paritas.invariants(model, inputs, only="row-independence")
    status = report.row("row-independence").status
    assert status is not None
    # In training mode, batch normalisation mixes rows; one row alone raises.
    assert status.passes() == right


def test_a_failing_finding_names_the_token_and_the_module_and_a_report_survives_json():
    model, inputs = faulty_and_tokens()
    report = paritas.invariants(model.eval(), inputs, only=["cached-decoding", "packing"])
    first = report.row("cached-decoding").verdict.failures[0]
    assert first.item.graph == "cached-decoding"
    assert first.item.option == "token by token"
    assert f"first wrong at row 0, token 1 (from 0, of {TOKENS})" in first.reason
    assert first.origin.name == "layers.0.mixer"
    again = InvariantsReport.from_json(report.to_json())
    assert again.exit_code == report.exit_code == 1
    assert str(again) == str(report)


@pytest.mark.usefixtures("undiagnosed")
def test_padded_inputs_are_checked_with_other_tokens_in_place_of_the_padding():
    model, inputs = faulty_and_tokens()
    mask = torch.ones_like(inputs["input_ids"])
    mask[0, :3] = 0
    report = paritas.invariants(
        model.eval(), {**inputs, "attention_mask": mask}, only=["cached-decoding"]
    )
    assert report.row("cached-decoding").status is paritas.Status.DIFFERENT


def test_a_relation_of_ones_own_is_checked_and_does_not_pass_unseen(own):
    def plainly(model, inputs):
        return {"y": model(*inputs.args)}

    @own("doubled", expected=plainly)
    def doubled(model, inputs):
        """Twice the input is twice the output."""
        return {"y": model(2 * inputs.args[0]) / 2}

    x = [torch.randn(3, 4)]
    right = paritas.invariants(nn.Linear(4, 2, bias=False), x, only="doubled")
    wrong = paritas.invariants(nn.Linear(4, 2), x, only="doubled")
    assert (right.exit_code, wrong.exit_code) == (0, 1)
    assert right.row("doubled").about == "Twice the input is twice the output."


def test_a_relation_of_ones_own_can_say_why_it_does_not_apply(own):
    @own("never", applies=lambda model, inputs: "it has no wings")
    def never(model, inputs):
        return {}

    row = paritas.invariants(nn.Linear(4, 2), [torch.randn(3, 4)], only="never").row("never")
    assert (row.promise, row.reason) == ("does not apply", "it has no wings")


def test_a_name_that_is_taken_is_refused():
    with pytest.raises(paritas.UsageError, match="has a relation 'padding' already"):
        paritas.relation(name="padding")


def test_an_unknown_relation_is_refused_with_a_hint():
    with pytest.raises(paritas.UsageError, match="no relation 'pading'; did you mean 'padding'"):
        paritas.invariants(Decoder(), tokens(), only="pading")


def test_numbers_stored_in_a_buffer_and_computed_again_are_not_a_fault(own):
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.rate = nn.Parameter(torch.rand(8) + 0.1)
            self.register_buffer("table", torch.exp(-self.rate.detach()))

    def stored(model, inputs):
        return {"y": inputs.args[0] * model.table * model.table}

    @own("decay", expected=stored)
    def computed(model, inputs):
        return {"y": inputs.args[0] * torch.exp(-2 * model.rate)}

    torch.manual_seed(0)
    report = paritas.invariants(Table(), [torch.randn(5, 8)], only="decay")
    assert report.passed, str(report)
    assert any("rounding of the model's buffers" in note for note in report.verdict.notes)


def test_a_difference_that_buffers_do_not_change_is_a_fault_however_small(own):
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.rand(8))

    def stored(model, inputs):
        return {"y": inputs.args[0] * model.table}

    @own("scaled", expected=stored)
    def scaled(model, inputs):
        return {"y": inputs.args[0] * model.table * (1 + 2e-7)}

    torch.manual_seed(0)
    report = paritas.invariants(Table(), [torch.randn(5, 8)], only="scaled")
    assert report.row("scaled").status is paritas.Status.DIFFERENT, str(report)


@pytest.mark.usefixtures("undiagnosed")
def test_the_command_writes_its_report_and_exits_by_it(tmp_path):
    written = tmp_path / "out.json"
    page = tmp_path / "out.html"
    done = CliRunner().invoke(
        main,
        [
            "invariants",
            f"{__name__}:faulty_and_tokens",
            *("--only", "cached-decoding", "--only", "packing"),
            *("--json", str(written), "--html", str(page), "--format", "junit"),
        ],
    )
    assert done.exit_code == 1, done.output
    assert "<testsuite" in done.stdout
    assert "different: 1 of 1 relations fails (1 different)" in done.stderr
    assert "layers.0.mixer" in page.read_text()
    assert InvariantsReport.from_json(written.read_bytes()).exit_code == 1


def test_the_command_lists_the_relations():
    done = CliRunner().invoke(main, ["invariants", "--list"])
    assert done.exit_code == 0
    assert "cached-decoding      serving   decoding with a cache" in done.stdout


def test_clipping_in_shards_is_clipping_as_a_whole():
    torch.manual_seed(0)
    assert paritas.invariants(Trained(), tokens(), only="sharded-clipping")


def test_equal_bits_in_any_batch_are_only_checked_if_named():
    class Doubled(nn.Module):
        def forward(self, input_ids):
            return {"logits": 2.0 * nn.functional.one_hot(input_ids, 30).float()}

    report = paritas.invariants(Doubled(), tokens())
    assert "batch-invariant" not in {row.relation for row in report.rows}
    assert paritas.invariants(Doubled(), tokens(), only="batch-invariant")

    class Mixed(Doubled):
        def forward(self, input_ids):
            found = super().forward(input_ids)["logits"]
            return {"logits": found * (1 + 1e-7 * (len(input_ids) > 1))}

    assert not paritas.invariants(Mixed(), tokens(), only="batch-invariant")


@pytest.mark.usefixtures("undiagnosed")
def test_relations_hold_in_bfloat16_and_a_fault_is_found_there():
    torch.manual_seed(0)
    assert paritas.invariants(Decoder().bfloat16(), tokens(), only="cached-decoding")
    faulty = plant(Decoder(), "other scale with a cache", "layers.0.mixer").bfloat16()
    assert not paritas.invariants(faulty, tokens(), only="cached-decoding")


# --- What a model promises ---


def test_a_setting_that_the_model_does_not_read_promises_nothing():
    """Before transformers 5, the configuration of every decoder says is_decoder=False."""
    model = Decoder().eval()
    model.config = SimpleNamespace(is_decoder=False, is_encoder_decoder=False)
    assert paritas.invariants(model, tokens(), only="cached-decoding").row("cached-decoding").status


class Classifier(nn.Module):
    """One value for each row: that of its last token."""

    config = SimpleNamespace(pad_token_id=0)

    def __init__(self, looks_at_the_mask):
        super().__init__()
        torch.manual_seed(0)
        self.looks_at_the_mask = looks_at_the_mask
        self.embed, self.head = nn.Embedding(50, 16), nn.Linear(16, 3)

    def forward(self, input_ids, attention_mask=None):
        x = self.head(self.embed(input_ids))
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        places = attention_mask * torch.arange(input_ids.shape[1])
        last = places.argmax(1) if self.looks_at_the_mask else -1
        return {"logits": x[torch.arange(len(x)), last]}


@pytest.mark.parametrize("looks_at_the_mask", [True, False])
def test_padding_must_not_change_a_value_for_each_row(looks_at_the_mask):
    model = Classifier(looks_at_the_mask)
    report = paritas.invariants(model, tokens(), only=["padding", "causality"])
    assert report.row("padding").status.passes() == looks_at_the_mask
    assert report.row("causality").reason == "it returns no value for each token"


class TinyForCausalLM(nn.Module):
    """A decoder with a loss that may shift its labels too often."""

    def __init__(self, shifts):
        super().__init__()
        self.shifts = shifts
        self.decoder = Decoder()

    def forward(self, input_ids, past_key_values=None, use_cache=False, labels=None):
        found = self.decoder(input_ids, past_key_values=past_key_values, use_cache=use_cache)
        if labels is not None:
            logits = found["logits"][:, : -self.shifts].flatten(0, 1)
            found["loss"] = nn.functional.cross_entropy(logits, labels[:, self.shifts :].flatten())
        return found


@pytest.mark.parametrize(("shifts", "passes"), [(1, True), (2, False)])
def test_a_loss_must_be_about_the_next_token(shifts, passes):
    report = paritas.invariants(TinyForCausalLM(shifts).eval(), tokens(), only="loss")
    assert report.row("loss").status.passes() == passes


def test_the_labels_of_a_pairs_decoder_may_be_shifted_already():
    class Config:
        def __init__(self, is_encoder_decoder=True):
            self.is_encoder_decoder = is_encoder_decoder

    model = TinyForCausalLM(2).eval()
    model.config = Config(is_encoder_decoder=False)
    assert paritas.invariants(model, tokens(), only="loss").row("loss").promise == "not promised"


class Masked(Trained):
    """Its labels are the tokens in their place, as those of masked language models are."""

    def forward(self, input_ids, labels=None, num_items_in_batch=None):
        found = super().forward(input_ids)
        if labels is not None:
            losses = nn.functional.cross_entropy(
                found["logits"].flatten(0, 1), labels.flatten(), reduction="sum"
            )
            own = (labels != -100).sum()
            found["loss"] = losses / (own if num_items_in_batch is None else num_items_in_batch)
        return found


def test_labels_that_are_not_shifted_all_count_in_accumulation():
    report = paritas.invariants(Masked().eval(), tokens(), only="accumulation")
    assert report.passed, str(report)


def test_a_candidate_that_is_not_a_module_is_not_trained():
    model = Trained().eval()

    def candidate(**kwargs):
        return model(**kwargs)

    names = ["resume", "round-trip", "accumulation"]
    report = paritas.invariants(model, tokens(), only=names, candidate=candidate)
    reason = "the candidate is not a module: it has no parameters to train"
    assert [row.reason for row in report.rows] == [reason] * 3, str(report)
    assert report.exit_code == 3


# --- Crashes, hidden promises, and one cause of several alarms ------------------------------------


class _Labelled(nn.Module):
    """A bag of tokens with a head and a loss."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(VOCABULARY, 6), nn.Linear(6, VOCABULARY)

    def forward(self, input_ids, labels=None, **kwargs):
        logits = self.head(self.table(input_ids))
        return {"logits": logits, **({} if labels is None else {"loss": self.loss(logits, labels)})}

    def loss(self, logits, labels):
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def test_a_loss_that_crashes_on_labels_is_not_taken_for_no_loss():
    class Crashing(_Labelled):
        def loss(self, logits, labels):
            return super().loss(logits[:, 3:], labels)

    row = paritas.invariants(Crashing().eval(), tokens(), only=["loss"]).row("loss")
    assert row.status is paritas.Status.UNVERIFIED
    assert "it raised ValueError" in row.summary


def test_labels_of_another_form_are_no_crash():
    class Classes(_Labelled):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(6, 2)

    row = paritas.invariants(Classes().eval(), tokens(), only=["loss"]).row("loss")
    assert (row.promise, row.reason) == ("does not apply", "it has no loss of labels")


def test_a_model_that_crashes_on_its_own_inputs_does_not_count_as_one_without_tokens():
    class Crashing(Decoder):
        def forward(self, input_ids, past_key_values=None, use_cache=False):
            raise RuntimeError("shapes do not fit")

    report = paritas.invariants(
        Crashing().eval(), tokens(), only=["cached-decoding", "accumulation"]
    )
    assert {row.status for row in report.rows} == {paritas.Status.UNVERIFIED}
    assert report.exit_code == 3
    assert "shapes do not fit" in str(report)


class _FromTransformers(_Labelled):
    """Takes the arguments of a loss by `**kwargs` without an annotation, and ignores them."""

    __module__ = "transformers.models.own"


@pytest.mark.usefixtures("undiagnosed")
def test_a_count_of_tokens_that_kwargs_swallow_is_one_alarm_that_names_it():
    row = paritas.invariants(_FromTransformers().eval(), tokens(), only=["accumulation"]).rows[0]
    assert row.status is paritas.Status.DIFFERENT
    assert len(row.verdict.findings) == 1
    assert row.summary.startswith("num_items_in_batch twice as large")


def test_a_model_of_transformers_that_refuses_the_count_promises_nothing():
    class Refusing(_FromTransformers):
        __module__ = "transformers.models.own"
        accepts_loss_kwargs = False

    row = paritas.invariants(Refusing().eval(), tokens(), only=["accumulation"]).rows[0]
    assert row.promise == "not promised"


@pytest.mark.usefixtures("undiagnosed")
def test_relations_that_fail_at_one_module_are_linked_and_told_at_once():
    model, told = faulty_and_tokens()[0].eval(), []
    names = ["cached-decoding", "chunked-prefill"]
    report = paritas.invariants(model, tokens(), only=names, on_result=told.append)
    first, second = report.rows
    assert (first.linked, second.linked) == ("", "cached-decoding")
    assert second.summary.endswith("as in cached-decoding: probably one cause")
    assert "1 at a place where another fails, too" in str(report)
    assert [one.partition(": ")[2].partition(":")[0] for one in told] == names
