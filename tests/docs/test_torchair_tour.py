"""The tour for users of torchair and msit has all of their document; `test_pages` runs it."""

from __future__ import annotations

from docs.pages import DOCS
from paritas.comparison.columns import comparison_columns
from paritas.formats.foreign.fusion_switch import PASSES

TOUR = (DOCS / "coming_from" / "torchair_msit.md").read_text(encoding="utf-8")
NAMED = """
    torch_npu torchair torchvision msit_llm.dump torchair_dump torchair.CompilerConfig()
    torchair.get_npu_backend torch.compile get_ge_dump_config get_fx_dump_config dump_path dump_mode
    fusion_switch_file dump_token dump_layer compiler_config [1,2,5] ["Add", "Conv_1"] msit_ge_dump
    msit_fx_dump dynamo_optimized_${graph_name}_rank_${rank_id}_pid_${pid}_ts_${time}.txt
    dynamo_original_${graph_name}_rank_${rank_id}_pid_${pid}_ts_${time}.txt
    worldsize${rank_size}_global_rank${rank_id}/${time}/${device_id}/${model_name}/${model_id}/${token_id}/
    ${time}/${device_id}/${model_name}/${model_id}/${token_id}/
    worldsize${rank_size}_global_rank${rank_id}/${model_name}/${token_id}/*.npy
    data_dump/${token_id+1}/gm_${time}_dump/*.npy 7.1.0 --my-path --golden-path --output
    ${dump_path}/msit_fx_dump/data_dump fusion_switch.json Switch GraphFusion UBFusion ALL off
    dump_fusion_off convert.py _min_max convert_data_to_info parse_torchair_dump_data
    time.sleep(0.5)
    .npz .swp inputs outputs
    """


def test_the_tour_leaves_nothing_of_the_document_out():
    assert [name for name in NAMED.split() if name not in TOUR] == []


def test_the_tour_has_every_column_of_msits_table_under_its_name():
    columns = [column.name for column in comparison_columns()[:24]]
    assert columns[-1] == "cmp_fail_reason"
    assert [name for name in columns if f"`{name}`" not in TOUR] == []


def test_the_tour_has_every_pass_with_what_it_means():
    rows = {
        f"| {one.section}: `{name}` | {one.does} | "
        f"{', '.join(f'`{here}`' for here in one.here) or 'nothing'} |"
        for name, one in PASSES.items()
    }
    assert rows == {row for row in rows if row in TOUR.splitlines()}
