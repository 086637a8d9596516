"""An engine's own test suite: `pytest` in its folder, or `pytest --oracle-report reports` for HTML reports too."""

import pytest
from faulty_engine import FAULTY_LAYER, forward

from bitnet_np import load
from bitnet_np.files import embedded

TOKENS = [1, 5, 80, 33, 17, 2, 60, 9]


@pytest.fixture(scope="module")
def model():
    with embedded.demo_path() as path:
        yield load(path)


def test_every_tensor(oracle, model):
    report = oracle.assert_engine(model, TOKENS, forward(model, TOKENS))
    assert len(report.operations) == 71


def test_logits_alone(oracle, model):
    oracle.assert_engine(model, TOKENS, forward(model, TOKENS)["result_output"])


@pytest.mark.xfail(strict=True, reason="SiLU in layer 3, where squared ReLU belongs")
def test_the_engine_with_its_bug(oracle, model):
    oracle.assert_engine(model, TOKENS, forward(model, TOKENS, FAULTY_LAYER))
