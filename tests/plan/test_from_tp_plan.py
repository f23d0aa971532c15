"""Tables of transformers models as rules, on tiny models of the library and on tables made for the purpose."""

import pytest
import torch
from torch import nn

from meshplan.errors import PlanError
from meshplan.plan.from_tp_plan import OF_EXPERTS, STYLES, rules_of, table_of
from meshplan.plan.placements import R, S
from meshplan.plan.plan import Plan, Rule

transformers = pytest.importorskip("transformers")


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.sinks = nn.Parameter(torch.zeros(4))
        self.q, self.o = nn.Linear(6, 8), nn.Linear(8, 6)
        self.norm = nn.RMSNorm(2)


class Tabled(nn.Module):
    """Two layers and an embedding; the table is the test's."""

    def __init__(self, table, packed_width=10):
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.layers = nn.ModuleList(Attention() for _ in range(2))
        self.gate_up = nn.Linear(6, packed_width)
        self.experts = nn.Module()
        self.experts.down = nn.Parameter(torch.zeros(2, 3, 4))
        self._tp_plan = table


def tp(**placements):
    return {name: {"tp": placement} for name, placement in placements.items()}


@pytest.mark.parametrize(
    ("path", "style", "rule"),
    [
        ("layers.*.q", "colwise", Rule("layers.*.q", tp(weight=S(0), bias=S(0)), {"tp": R}, {"tp": S(-1)})),
        ("layers.*.q", "colwise_gather_output", Rule("layers.*.q", tp(weight=S(0), bias=S(0)), {"tp": R}, {"tp": R})),
        ("layers.*.q", "colwise_rep", Rule("layers.*.q", tp(weight=S(0), bias=S(0)), {"tp": R}, {"tp": R})),
        ("layers.*.o", "rowwise", Rule("layers.*.o", tp(weight=S(1), bias=R), {"tp": S(-1)}, {"tp": R})),
        ("layers.*.o", "rowwise_split_input", Rule("layers.*.o", tp(weight=S(1), bias=R), {"tp": S(-1)}, {"tp": R})),
        ("embed", "embedding_rowwise", Rule("embed", tp(weight=S(0)), {"tp": R}, {"tp": R})),
        ("embed", "embedding_colwise", Rule("embed", tp(weight=S(1)), {"tp": R}, {"tp": R})),
        ("layers.*.norm", "sequence_parallel", Rule("layers.*.norm", tp(weight=R), {"tp": S(1)}, {"tp": S(1)})),
        ("layers.*.norm", "replicated_with_grad_allreduce", Rule("layers.*.norm", tp(weight=R))),
        ("embed", "replicate", Rule("embed", tp(weight=R))),
        ("layers.*.q", "mla_kv_a_proj", Rule("layers.*.q", tp(weight=R, bias=R), output={"tp": R})),
        ("layers.*.o", "all_reduce", Rule("layers.*.o", output={"tp": R})),
        ("layers.*.sinks", "colwise", Rule("layers.*", tp(sinks=S(0)))),
        (
            "gate_up",
            "packed_colwise",
            Rule("gate_up", tp(weight=S(0, [5, 5]), bias=S(0, [5, 5])), {"tp": R}, {"tp": S(-1, [5, 5])}),
        ),
        ("gate_up.weight", "packed_rowwise", Rule("gate_up", tp(weight=S(1, [3, 3])))),
    ],
)
def test_a_style_becomes_this_rule(path, style, rule):
    assert rules_of(Tabled({path: style})) == (rule,)


def test_the_style_of_a_bare_parameter_comes_before_that_of_its_owner():
    rules = rules_of(Tabled({"layers.*.q": "colwise", "layers.*.q.bias": "replicate", "layers.*": "local_params"}))
    assert rules == (
        Rule("layers.*.q", tp(weight=S(0)), {"tp": R}, {"tp": S(-1)}),
        Rule("layers.*.q", tp(bias=R)),
    )


def test_a_star_of_a_table_is_a_number_only():
    model = Tabled({"layers.*.q": "colwise"})
    model.layers.extra = Attention()
    assert [rule.at for rule in rules_of(model)] == ["layers.0.q", "layers.1.q"]


@pytest.mark.parametrize("style", OF_EXPERTS)
def test_styles_of_experts_are_refused_unless_a_section_owns_them(style):
    model = Tabled({"experts": style, "experts.down": "rowwise", "embed": "replicate"})
    with pytest.raises(PlanError, match="experts=") as error:
        Plan.from_tp_plan(model, mesh={"tp": 2})
    assert error.value.code == "experts-style"
    assert error.value.where.file == __file__
    plan = Plan.from_tp_plan(model, mesh={"tp": 2}, experts={"at": ["experts"], "ep": 2})
    assert [rule.at for rule in plan.rules] == ["embed"]
    assert plan.experts.ep == 2


def test_a_three_dimensional_weight_is_experts_whatever_its_style():
    with pytest.raises(PlanError) as error:
        rules_of(Tabled({"experts.down": "rowwise"}))
    assert error.value.code == "experts-style"


def test_unknown_styles_and_tables_that_miss_are_refused():
    with pytest.raises(PlanError, match="did you mean 'colwise'") as error:
        rules_of(Tabled({"embed": "colwis"}))
    assert error.value.code == "unknown-style"
    with pytest.raises(PlanError) as error:
        rules_of(Tabled({"layer.*.q": "colwise", "emb": "replicate"}))
    assert error.value.code == "no-such-module"
    with pytest.raises(PlanError) as error:
        table_of(nn.Linear(2, 2))
    assert error.value.code == "no-tp-plan"


def test_an_entry_that_misses_among_others_is_told():
    with pytest.warns(UserWarning, match=r"layers\.\*\.k"):
        assert len(rules_of(Tabled({"layers.*.q": "colwise", "layers.*.k": "colwise"}))) == 1


def test_every_style_transformers_registers_is_known():
    import transformers.distributed.expert_parallel  # noqa: F401  registers the styles of experts
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

    assert set(ALL_PARALLEL_STYLES) <= {*STYLES, *OF_EXPERTS}


def test_a_tied_llama_reads_as_the_megatron_plan():
    config = transformers.LlamaConfig(
        num_hidden_layers=2,
        hidden_size=12,
        intermediate_size=20,
        num_attention_heads=3,
        num_key_value_heads=3,
        vocab_size=31,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    rules = {rule.at: rule for rule in Plan.from_tp_plan(model, mesh={"tp": 2}).rules}
    layer = "model.layers.*"
    split = {f"{layer}.self_attn.{p}_proj" for p in "qkv"} | {f"{layer}.mlp.{p}_proj" for p in ("gate", "up")}
    joined = {f"{layer}.self_attn.o_proj", f"{layer}.mlp.down_proj"}
    assert set(rules) == split | joined | {"lm_head", "model.embed_tokens"}
    assert all(rules[at].params == tp(weight=S(0)) for at in split | {"lm_head", "model.embed_tokens"})
    assert all(rules[at].params == tp(weight=S(1)) for at in joined)
    assert all(rules[at].output == {"": {"tp": R}} for at in joined | {"lm_head"})
