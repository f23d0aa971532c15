"""What a model hears when it asks whether it is traced."""

import pytest
import torch

from meshplan.compiler.tracing import recording, replaying

masking = pytest.importorskip("transformers.masking_utils")


def test_answers_are_recorded_in_order_and_given_again():
    with recording() as answers, torch._subclasses.FakeTensorMode():
        fake = torch.ones(2)
        said = [masking.is_tracing(fake), masking.is_tracing()]
    assert answers == said and answers[0] is True
    with replaying([True, False]):
        assert [masking.is_tracing(torch.ones(2)), masking.is_tracing(fake)] == [True, False]
        assert masking.is_tracing(torch.ones(2)) is False  # beyond what is known: the truth
    assert masking.is_tracing(torch.ones(2)) is False
