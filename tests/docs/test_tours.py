"""The tours name every function, option, field and test of the documents that they stand for."""

from __future__ import annotations

import re
import unittest
from pathlib import Path

import pytest

from docs.pages import DOCS

DYNAMOS = Path(__file__).parents[3] / "shared" / "seeds" / "002_d07be24ce99cc33f.txt"

NAMED = {
    "tt_forge.md": """
        verify VerifyConfig enabled verify_size verify_dtype verify_shape value_checker
        AutomaticValueChecker AllCloseValueChecker FullValueChecker pcc rtol atol
        dissimilarity_threshold forge.compile sample_inputs framework_model compiled_model
        forge/forge/verify/config.py forge/forge/verify/value_checkers.py test_add fw_out co_out
        """,
    "dynamo.md": """
        torch._dynamo.config.verify_correctness config.patch torch._dynamo.testing same
        torch._dynamo.test_case.TestCase run_tests _force_skip_lazy_graph_module Seq Conv_Bn_Relu
        toy_example transform TestVerifyCorrectness test_example_inputs compiler_fn
        optimize_assert example_inputs test_torchscript backend="ts" test_incorrect_verify_true
        test_incorrect_verify_false incorrect_compile_fn RuntimeError
        test/dynamo/test_verify_correctness.py
        """,
    "inductor_tests.md": """
        USE_DDP_WRAPPER use_ddp_wrapper Model2Conv manual_graph_break torch._dynamo.graph_break
        get_example_inputs TestLayoutOptim setUpClass init_process_group nccl init_method world_size
        rank verify_accuracy is_train wrap_mod expected_out fp64_mod fp64_inp fp64_out fp64_ref DDP
        opt_mod actual_out same expected_sum actual_sum verify_accuracy_for_infer
        verify_accuracy_for_train test_2conv_with_graph_break test_3conv_with_graph_break
        test_keep_output_layout_infer _with_freezing freezing test_training_acc test_mutate_view
        test_mutate_base tf32_off test_mutate_base_for_conv_output test_mutate_view_for_conv_output
        test_dynamic_shape_specialization dynamic=True test_nll_loss_backward MyModel HAS_CUDA
        run_tests torch.equal torch.allclose torch.no_grad opt_out
        """,
    "nnscaler.md": """
        verify_graph_operations.py --graph --outdir IRGraph graph.ckp parallelize registering
        single-GPU multi-GPU loss VerifyConfig fsig args kwargs noutputs parti_options
        import_customized_func non_grad_indices TensorInfo("shape" TensorInfo("value" IRObject
        is_constant verify_partition_options idx dim conv2d_config fullslice_config verify_config
        torch.conv1d torch.conv2d torch.conv_transpose1d torch.conv_transpose2d torch.where
        torch.nn.functional.dropout torch.Tensor.view torch.addmm wrap_batchnorm2d_func
        nnscaler.runtime.function.embedding nnscaler.runtime.function.fullslice
        wrap_instancenorm2d_func process_group momentum track_running_stats
        """,
}


@pytest.mark.parametrize("page", NAMED)
def test_a_tour_leaves_nothing_out(page):
    text = (DOCS / "coming_from" / page).read_text(encoding="utf-8")
    assert [name for name in NAMED[page].split() if name not in text] == []


def test_the_index_leads_to_every_tour():
    index = (DOCS / "side_by_side.md").read_text(encoding="utf-8")
    tours = {path.relative_to(DOCS).as_posix() for path in (DOCS / "coming_from").glob("*.md")}
    assert tours
    assert {tour for tour in tours if f"({tour})" not in index} == set()


@pytest.mark.skipif(not DYNAMOS.exists(), reason="the document is not there")
@pytest.mark.filterwarnings("ignore")  # those of TorchScript
def test_dynamos_own_test_passes_with_its_decorators_replaced():
    (source,) = re.findall(r"```python\n(.*?)```", DYNAMOS.read_text(encoding="utf-8"), re.DOTALL)
    for theirs, ours in {
        'config.patch("verify_correctness", True)': "paritas.guard_everywhere()",
        'config.patch("verify_correctness", False)': "paritas.guard_everywhere(enabled=False)",
        "import torch._dynamo.test_case": "import paritas, unittest",  # theirs needs expecttest
        "(torch._dynamo.test_case.TestCase)": "(unittest.TestCase)",
    }.items():
        assert source.count(theirs) == 1
        source = source.replace(theirs, ours)
    names = {"__name__": "replaced"}
    exec(source, names)
    tests = unittest.defaultTestLoader.loadTestsFromTestCase(names["TestVerifyCorrectness"])
    result = unittest.TestResult()
    tests.run(result)
    assert (result.testsRun, result.failures, result.errors) == (4, [], [])
