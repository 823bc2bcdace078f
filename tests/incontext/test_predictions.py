"""Programs that answer: query tokens, causal predictions, several targets, several classes, and a chosen penalty."""

from __future__ import annotations

import numpy as np
import pytest

from attnc import incontext as ours
from attnc.incontext import OutsideDomain

theirs = pytest.importorskip("sklearn.linear_model")
kernel_ridge = pytest.importorskip("sklearn.kernel_ridge")
neighbors = pytest.importorskip("sklearn.neighbors")


def data(rows: int = 40) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(rows, 3)) * [1.0, 10.0, 0.1] + [2.0, -30.0, 1.0]
    return X, X @ [1.0, 0.2, -3.0] + rng.normal(size=rows)


MODELS = [
    ours.Ridge(),
    ours.Ridge(method="chebyshev", fit_intercept=False),
    ours.LinearRegression(max_rows=50),
    ours.Lasso(0.05),
    ours.ElasticNet(0.05, max_rows=50),
    ours.Huber(0.05, max_rows=50),
    ours.PoissonRegressor(0.1),
    ours.PoissonRegressor(0.1, method="nesterov"),
    ours.RidgeSelection(),
    ours.KernelRidge(0.1, gamma=0.01),
    ours.NadarayaWatson(max_rows=50),
    ours.NadarayaWatson(gamma=0.01, corrections=2),
    ours.KNeighborsRegressor(3, max_rows=50),
]
UNWEIGHTED = ("RidgeSelection", "KernelRidge", "NadarayaWatson", "KNeighborsRegressor")


@pytest.mark.parametrize("model", MODELS, ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_queries_get_their_predictions(model, weighted):
    X, y = data()
    if "Poisson" in type(model).__name__:
        y = np.round(np.abs(y))
    omega = np.random.default_rng(1).uniform(0.1, 2.0, size=len(X)) if weighted else None
    if weighted and type(model).__name__ in UNWEIGHTED:
        with pytest.raises(TypeError, match="sample_weight"):
            model.fit(X, y, sample_weight=omega)
        return
    model.fit(X, y, **({"sample_weight": omega} if weighted else {}))
    asked = np.vstack([X[:5], X.mean(axis=0), 3 * X[:1]])
    wanted = model.predict(asked)
    assert np.abs(model.predict_in_context(asked, at_once=3) - wanted).max() <= 1e-7 * np.abs(wanted).max()


@pytest.mark.parametrize("method", ["newton", "nesterov"])
@pytest.mark.parametrize("classes", [2, 3])
def test_classes_get_their_probabilities(method, classes):
    X, y = data()
    labels = np.digitize(y, np.quantile(y, np.arange(1, classes) / classes))
    model = ours.LogisticRegression(method=method).fit(X, labels)
    reference = theirs.LogisticRegression(tol=1e-12, max_iter=10**5).fit(X, labels)
    assert np.abs(model.coef_ - reference.coef_).max() <= 2e-4
    wanted = model.predict_proba(X[:9])
    found = model.predict_in_context(X[:9], at_once=4)
    assert np.abs(found - (wanted if classes > 2 else wanted[:, 1])).max() <= 1e-7
    assert (model.predict(X) == reference.predict(X)).all()


@pytest.mark.filterwarnings("ignore:column 0, 1 of X is constant")
@pytest.mark.parametrize("rows", [1, 4])
def test_examples_that_say_nothing(rows):
    for model in (ours.Ridge(), ours.Lasso(), ours.Huber()):
        model.fit(np.zeros((rows, 2)), np.arange(rows) + 1.0)
        assert np.abs(model.predict_in_context([[3.0, 1.0]]) - model.predict([[3.0, 1.0]])).max() <= 1e-9


def test_queries_outside_of_the_domain_are_refused():
    X, y = data()
    model = ours.Ridge().fit(X, y)
    program = model.predictor(queries=2, reach=1.0)
    tokens = np.vstack([model.prompt_, np.zeros((2, 5))])
    tokens[-1, :3] = 10.0
    with pytest.raises(OutsideDomain, match="the 2-norm of a query"):
        program.check(tokens)
    tokens[-1, 4] = 1.0
    with pytest.raises(OutsideDomain, match="a query has a flag or a target"):
        program.check(tokens)


def test_exported_predictors_run_alone(tmp_path):
    session = pytest.importorskip("onnxruntime").InferenceSession
    X, y = data()
    for model in (ours.Ridge().fit(X, y), ours.LogisticRegression().fit(X, y > np.median(y))):
        program = model.predictor(queries=2)
        program.export_onnx(tmp_path / "program.onnx")
        program.save(tmp_path / "program")
        again = ours.load(tmp_path / "program")
        assert again.domain == program.domain
        asked = np.zeros((2, model.prompt_.shape[1]))
        asked[:, :3] = model.units_.prompt(X[:2])
        if asked.shape[1] > 5:
            asked[:, 3] = model.prompt_[1, 3]  # the constant column
        tokens = np.vstack([model.prompt_, asked])[None]
        inputs = [tokens] if len(program.input_shapes) == 1 else [model.start_[None], tokens]
        ran = session(str(tmp_path / "program.onnx"))
        (found,) = ran.run(None, {port.name: given for port, given in zip(ran.get_inputs(), inputs, strict=True)})
        wanted = model.predict_in_context(X[:2])
        if len(inputs) == 2:
            wanted = (wanted - model.units_.centre) / model.units_.spread
        assert np.abs(found[0] - wanted).max() <= 1e-8
        assert np.abs(again(*inputs)[0] - found[0]).max() <= 1e-8


@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_every_example_is_predicted_from_those_before_it(alpha):
    X, y = data(12)
    model = ours.Ridge(alpha) if alpha else ours.LinearRegression()
    found = model.causal_predictions(X, y)
    norms = np.sqrt((X**2).sum(axis=0) + alpha)
    wanted = [0.0]
    for rows in range(1, 12):
        root = np.vstack([X[:rows], np.sqrt(alpha) * np.eye(3)]) / norms
        w = np.linalg.lstsq(root, np.append(y[:rows], np.zeros(3)), rcond=None)[0]
        wanted.append(float(X[rows] / norms @ w))
    assert np.abs(found - wanted).max() <= 1e-6 * np.abs(wanted).max()
    changed = y.copy()
    changed[8:] += 100.0
    assert np.abs(model.causal_predictions(X, changed)[:9] - found[:9]).max() <= 1e-6 * np.abs(wanted).max()


LOGISTIC, POISSON = {"tol": 1e-10, "max_iter": 10**5}, {"tol": 1e-12, "solver": "newton-cholesky"}
L1 = {"tol": 1e-13, "max_iter": 10**6}
CAUSAL = [
    (ours.Lasso(0.2), lambda k: theirs.Lasso(0.2, fit_intercept=False, **L1), 0),
    (ours.ElasticNet(0.2), lambda k: theirs.ElasticNet(0.2, fit_intercept=False, **L1), 0),
    (ours.Huber(0.5, threshold=3.0), lambda k: ours.Huber(0.5, threshold=3.0, fit_intercept=False), 0),
    (ours.PoissonRegressor(0.5), lambda k: theirs.PoissonRegressor(alpha=0.5, fit_intercept=False, **POISSON), 0),
    (ours.LogisticRegression(), lambda k: theirs.LogisticRegression(fit_intercept=False, **LOGISTIC), 2),
    (ours.LogisticRegression(tol=1e-7), lambda k: theirs.LogisticRegression(fit_intercept=False, **LOGISTIC), 3),
    (ours.KernelRidge(0.1), lambda k: kernel_ridge.KernelRidge(alpha=0.1, kernel="rbf", gamma=1 / 2), 0),
    (ours.NadarayaWatson(0.1), lambda k: ours.NadarayaWatson(0.1), 0),
    (ours.NadarayaWatson(0.1, corrections=2), lambda k: ours.NadarayaWatson(0.1, corrections=2), 0),
    (ours.KNeighborsRegressor(3), lambda k: neighbors.KNeighborsRegressor(min(3, k)), 0),
]


@pytest.mark.parametrize(("model", "of_prefix", "classes"), CAUSAL, ids=[str(model) for model, _, _ in CAUSAL])
def test_every_estimator_has_a_causal_form(model, of_prefix, classes):
    rng = np.random.default_rng(3)
    X = rng.normal(size=(7, 2)) * [1.0, 3.0]
    y = X @ [1.0, -0.2] + 0.1 * rng.normal(size=7)
    if "Poisson" in type(model).__name__:
        y = np.round(np.exp(y / 3))
    if classes:
        y = np.digitize(y, [0.0] if classes == 2 else [-0.5, 0.5])
    made = model.causal(X, y)
    made.program.check(made.inputs[-1])
    found = made.predictions()
    for k in range(1, 7):
        if classes and len(set(y[:k])) < classes:
            continue  # scikit-learn takes no fewer classes
        reference = of_prefix(k).fit(X[:k], y[:k])
        wanted = (reference.predict_proba if classes else reference.predict)(X[k : k + 1])[0]
        wanted = wanted[1] if classes == 2 else wanted
        assert np.abs(found[k] - wanted).max() <= 1e-5 * (1 + np.abs(wanted).max())
    changed = y.copy()
    changed[5:] = y[:2]  # no unit changes
    if not classes or (np.unique(changed) == np.unique(y)).all():
        again = type(model)(**model.get_params()).causal_predictions(X, changed)
        assert np.abs(again[:6] - found[:6]).max() <= 1e-6 * (1 + np.abs(found).max())


def test_a_causal_program_is_saved_and_exported(tmp_path):
    from attnc.exports.onnx_file import run_onnx

    pytest.importorskip("onnxruntime")
    X = np.random.default_rng(4).normal(size=(8, 3))
    made = ours.PoissonRegressor(0.5).causal(X, np.round(np.exp(X[:, 0])))
    made.program.save(tmp_path / "program")
    again = ours.load(tmp_path / "program")
    assert again.domain == made.program.domain
    made.program.export_onnx(tmp_path / "program.onnx")
    (prompt,) = made.inputs
    found = again(prompt[None])[0]
    assert np.abs(found - made.predictions()).max() <= 1e-9
    assert np.abs(run_onnx(tmp_path / "program.onnx", [prompt[None]])[0] - found).max() <= 1e-9
    with pytest.raises(OutsideDomain, match=r"with the first \d examples, the largest eigenvalue"):
        again.check(np.where(np.arange(prompt.shape[1]) < 3, 1.7 * prompt, prompt))


def test_what_has_no_causal_form():
    X, y = data()
    with pytest.raises(ValueError, match="no causal form"):
        ours.RidgeSelection().causal(X, y)
    for model in (ours.Lasso(0.0), ours.Huber(0.0), ours.PoissonRegressor(0.0)):
        with pytest.raises(ValueError, match="alpha > 0"):
            model.causal(X, np.abs(y))
    with pytest.raises(ValueError, match="Raise max_iter"):
        ours.Lasso(0.1, max_iter=3).causal(X, y)


@pytest.mark.parametrize("model", [ours.Ridge(2.0), ours.LinearRegression(), ours.Ridge(2.0, fit_intercept=False)])
def test_several_targets(model):
    X, y = data()
    Y = np.column_stack([y, 1e3 * np.sin(y), np.ones(len(y))])
    model.fit(X, Y)
    assert model.coef_.shape == (3, 3)
    for k in range(3):
        alone = type(model)(**model.get_params()).fit(X, Y[:, k])
        assert np.abs(model.coef_[k] - alone.coef_).max() <= 1e-9 * (1 + np.abs(alone.coef_).max())
    assert np.abs(model.predict_in_context(X[:4]) - model.predict(X[:4])).max() <= 1e-7 * np.abs(Y).max()
    assert model.predict_bound(X).shape == (40, 3)
    with pytest.raises(ValueError, match="3 targets take method='newton'"):
        type(model)(method="chebyshev").fit(X, Y)


def test_the_penalty_is_chosen_on_held_out_examples():
    X, y = data()
    chosen = set()
    for noise in (0.0, 1.0):
        targets = y if not noise else np.random.default_rng(14).normal(size=40)
        model = ours.RidgeSelection(alphas=(1e-3, 1e4), held_out=0.3).fit(X, targets)
        losses = []
        for alpha in model.alphas:
            reference = theirs.Ridge(alpha).fit(X[:28], targets[:28])
            losses.append(((reference.predict(X[28:]) - targets[28:]) ** 2).sum())
        best = theirs.Ridge(model.alphas[int(np.argmin(losses))]).fit(X[:28], targets[:28])
        assert np.abs(model.coef_ - best.coef_).max() <= 1e-8 * (1 + np.abs(best.coef_).max())
        assert np.allclose(model.losses_ * float(model.units_.spread) ** 2, losses, rtol=1e-6)
        chosen.add(model.alpha_)
    assert chosen == {1e-3, 1e4}


def test_weights_of_zero_leave_examples_out():
    X, y = data()
    omega = np.ones(40)
    omega[10:] = 0
    model, alone = ours.Ridge().fit(X, y, sample_weight=omega), ours.Ridge().fit(X[:10], y[:10])
    assert (model.coef_ == alone.coef_).all()
    with pytest.raises(ValueError, match="non-zero"):
        ours.Ridge().fit(X, y, sample_weight=np.zeros(40))
