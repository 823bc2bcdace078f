"""LSTM, GRU, RNN and their cells by attention: equal to torch's, with the same parameters, arguments and results."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence  # noqa: E402

import attnc  # noqa: E402
from converting.trace import traced  # noqa: E402

CASES = [
    (nn.LSTM, {}),
    (nn.LSTM, {"num_layers": 2, "bidirectional": True, "batch_first": True}),
    (nn.LSTM, {"proj_size": 3, "bidirectional": True}),
    (nn.LSTM, {"bias": False, "num_layers": 2, "dropout": 0.3}),
    (nn.GRU, {}),
    (nn.GRU, {"num_layers": 2, "bidirectional": True, "batch_first": True}),
    (nn.RNN, {"bidirectional": True}),
    (nn.RNN, {"nonlinearity": "relu", "num_layers": 2}),
]


def flat(value):
    if isinstance(value, PackedSequence):
        return [value.data]
    return [value] if isinstance(value, torch.Tensor) else [part for each in value for part in flat(each)]


def assert_equal(before, after) -> None:
    for a, b in zip(flat(before), flat(after), strict=True):
        assert a.shape == b.shape
        assert (a - b).abs().max() <= 1e-9


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_recurrent_modules(kind, options):
    torch.manual_seed(0)
    model = kind(4, 5, **options).double().eval()
    converted, report = attnc.convert(model, eps=1e-10)
    assert not any(isinstance(part, nn.RNNBase) for part in converted.modules())
    assert all(entry.anchors == 2 and entry.error <= 1e-10 for entry in report.replaced)
    assert list(converted.state_dict()) == list(model.state_dict())
    converted.load_state_dict(model.state_dict())
    x = torch.randn(3, 7, 4, dtype=torch.float64)
    y, trace = traced(converted, x)
    assert not trace.activations
    assert_equal(model(x), y)
    state = model(x)[1]
    assert_equal(model(x, state), converted(x, state))  # a stream goes on with its state
    assert_equal(model(x[0]), converted(x[0]))
    first = x if model.batch_first else x.transpose(0, 1)
    for is_sorted, lengths in ((True, [7, 5, 2]), (False, [3, 7, 5])):
        packed = pack_padded_sequence(
            first, torch.tensor(lengths), batch_first=model.batch_first, enforce_sorted=is_sorted
        )
        assert_equal(model(packed), converted(packed))
        assert_equal(model(packed, model(packed)[1]), converted(packed, model(packed)[1]))


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells(kind):
    model = kind(4, 5).double()
    converted, _ = attnc.convert(model)
    x = torch.randn(3, 4, dtype=torch.float64)
    y, trace = traced(converted, x)
    assert not trace.activations
    assert_equal(model(x), y)
    assert_equal(model(x, model(x)), converted(x, model(x)))


def test_gradients_and_bad_input():
    model = nn.LSTM(4, 5, 2).double()
    converted, _ = attnc.convert(model)
    converted.flatten_parameters()
    x = torch.randn(6, 2, 4, dtype=torch.float64)
    for run in (model, converted):
        run.zero_grad()
        run(x)[0].square().sum().backward()
    assert (model.weight_hh_l0.grad - converted.weight_hh_l0.grad).abs().max() <= 1e-9
    assert len(converted.all_weights) == 2
    with pytest.raises(attnc.InputError, match="4 features"):
        converted(torch.zeros(3, 5))
    with pytest.raises(attnc.InputError, match="state"):
        converted(x, (torch.zeros(2, 3, 5, dtype=torch.float64),) * 2)


def test_a_subclass_with_a_forward_of_its_own_is_named():
    class Own(nn.LSTM):
        def forward(self, x):
            return super().forward(x)[0]

    model = nn.ModuleDict({"rnn": Own(4, 4), "head": nn.ReLU()})
    _, report = attnc.convert(model)
    assert [(entry.path, entry.what) for entry in report.left] == [("rnn", "Own")]
    with pytest.raises(attnc.InputError, match="'rnn' \\(Own\\)"):
        attnc.convert(model, strict=True)
