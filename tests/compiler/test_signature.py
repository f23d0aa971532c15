"""Names, indices and key paths against the signatures of forwards."""

import functools

import pytest
from torch import nn

from meshplan.compiler.signature import arguments_of
from meshplan.errors import PlanError


def module(forward):
    return type("M", (nn.Module,), {"forward": forward})()


PLAIN = module(lambda self, x, mask=None, *, scale=1.0: x)
OPEN = module(lambda self, x, *rest, **more: x)
KEYWORDS = module(lambda self, *, tokens, positions=None: tokens)


@pytest.mark.parametrize(
    ("target", "key", "expected"),
    [
        (PLAIN, "", "x"),
        (PLAIN, "0", "x"),
        (PLAIN, "1", "mask"),
        (PLAIN, "scale", "scale"),
        (PLAIN, "x.0.y", "x.0.y"),
        (PLAIN, "1.y", "mask.y"),
        (OPEN, "2", "2"),
        (OPEN, "anything", "anything"),
        (KEYWORDS, "", "tokens"),
        (module(lambda self, *args: args), "", "0"),
    ],
)
def test_a_key_means_this_argument(target, key, expected):
    assert arguments_of(target).resolve(key, where=None, module="m") == expected


@pytest.mark.parametrize(
    ("target", "key", "code"),
    [
        (PLAIN, "2", "more-layouts-than-inputs"),
        (PLAIN, "masks", "no-such-argument"),
        (KEYWORDS, "0", "more-layouts-than-inputs"),
        (module(lambda self: 1), "", "more-layouts-than-inputs"),
        (module(lambda self, **more: 1), "", "more-layouts-than-inputs"),
    ],
)
def test_a_key_that_means_no_argument_is_refused_with_the_legal_ones(target, key, code):
    with pytest.raises(PlanError) as error:
        arguments_of(target).resolve(key, where=None, module="m")
    assert error.value.code == code
    assert error.value.legal


def test_a_decorated_forward_counts_as_what_it_wraps():
    def logged(forward):
        @functools.wraps(forward)
        def wrapper(*args, **kwargs):
            return forward(*args, **kwargs)

        return wrapper

    arguments = arguments_of(module(logged(lambda self, ids, labels=None: ids)))
    assert (arguments.positional, arguments.required) == (("ids", "labels"), ("ids",))
