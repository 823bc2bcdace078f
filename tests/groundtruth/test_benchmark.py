"""The benchmark: its promises hold for the checkpoints as they are run, and public files do not tell the answers."""

from __future__ import annotations

import json
from importlib.resources import files

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from attnc import groundtruth
from attnc.errors import FileError, InputError
from attnc.exports.directory import json_bytes
from attnc.groundtruth.disguises import DISGUISES
from attnc.groundtruth.files import ANSWERS_FORMAT, read_answers, read_index, read_task
from attnc.groundtruth.methods import METHODS, answers_of
from attnc.groundtruth.running import Subspace
from attnc.groundtruth.scoring import read_truth, score_answer
from attnc_checker import check


@pytest.fixture(scope="session")
def tasks(benchmark):
    return {name: read_task(benchmark, name) for name in read_index(benchmark)}


@pytest.fixture(scope="session")
def truths(benchmark, tasks):
    return {name: read_truth(benchmark, task) for name, task in tasks.items()}


def of_disguise(truths, disguise):
    return [name for name, truth in truths.items() if truth.data["disguise"] == disguise]


def test_every_expression_has_every_disguise(truths):
    made = {(truth.data["expression"], truth.data["disguise"]) for truth in truths.values()}
    assert len(made) == len(truths) == 2 * len(DISGUISES)


def test_models_are_within_their_bounds(tasks, truths):
    for name, task in tasks.items():
        stated = task.data["pairs"]
        for points, output in ((task.clean, stated["clean_output"]), (task.corrupted, stated["corrupted_output"])):
            error = np.abs(task.model.run(points).output - output)
            assert (error <= stated["tolerance"]).all()
            assert error.max() <= truths[name].data["bound"] == task.data["bound"]["value"]


@pytest.mark.parametrize("disguise", DISGUISES)
def test_interventions_have_their_exact_effects(benchmark, tasks, truths, disguise):
    """Patching the true direction has the stated effect, within the proven tolerance alone."""
    for name in of_disguise(truths, disguise):
        task, data = tasks[name], truths[name].data
        tensors = load_file(benchmark / "answers" / name / "truth.safetensors")
        clean, corrupted = (np.array(data["pairs"][key]) for key in ("clean", "corrupted"))
        streams = task.model.run(corrupted).streams
        rows = zip(data["channels"], data["causal_variables"], tensors["directions"], tensors["readers"], strict=True)
        for channel, stated, direction, reader in rows:
            subspace = Subspace(channel["after_layer"], direction[None], reader[None])
            output = task.model.run(clean, swap=(subspace, streams)).output
            assert (np.abs(output - stated["patched_output"]) <= stated["tolerance"]).all()


@pytest.mark.parametrize("disguise", ["plain", "combined"])
def test_transformers_computes_them_within_their_bounds(benchmark, tasks, truths, disguise):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    for name in of_disguise(truths, disguise):
        task, folder = tasks[name].data, benchmark / "models" / name
        model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        E, tokens = model.get_input_embeddings().weight, task["tokens"]
        inputs = [variable["token"] for variable in task["variables"]]
        points = torch.tensor(task["pairs"]["clean"] + task["pairs"]["corrupted"], dtype=torch.float32)
        with torch.no_grad():
            stream = torch.cat([E[tokens["prefix"]], E[tokens["query"]] + points @ E[inputs]])[None]
            hidden = model(inputs_embeds=stream).last_hidden_state[0, len(tokens["prefix"]) :]
            found = (hidden @ E[tokens["output"]]).numpy()
        wanted = np.array(task["pairs"]["clean_output"] + task["pairs"]["corrupted_output"])
        assert np.abs(found - wanted).max() <= task["bound"]["value"]
        ours = tasks[name].model.run(points.double().numpy()).output
        assert np.abs(found - ours).max() <= 2 * task["bound"]["value"]


def test_certificates_are_proved_again_and_noise_counts(benchmark, truths):
    (name,) = [each for each in of_disguise(truths, "rotated") if truths[each].data["level"] == "nested"]
    folder = benchmark / "answers" / name / "certificate"
    verdict = check(folder, processes=1)
    assert verdict.proved
    assert verdict.bound <= truths[name].data["bound"]
    claim = json.loads((folder / "certificate.json").read_text())
    assert all(stage["noise"] > 0 for stage in claim["stages"])
    for stage in claim["stages"]:
        stage["noise"] *= 100
    path = folder / "certificate.json"
    before = path.read_bytes()
    path.write_bytes(json_bytes(claim, "certificate.json"))
    assert not check(folder, processes=1).proved
    path.write_bytes(before)


def test_circuits_carry_the_whole_effect(tasks, truths):
    for name, task in tasks.items():
        data = truths[name].data
        edges = sorted(truths[name].edges)
        assert set(edges) <= task.possible_edges
        clean, corrupted = (np.array(data["pairs"][key]) for key in ("clean", "corrupted"))
        other = task.model.run(corrupted)
        circuit = task.model.run(clean, reading=task.model.circuit_reading(edges, other.nodes))
        assert np.abs(circuit.output - task.model.run(clean).output).max() <= 2 * data["bound"]


def test_files_have_the_fields_of_their_schemas(benchmark, tasks):
    """Required fields are there, and no others, where a schema allows no others."""
    folder = files("attnc.groundtruth") / "schemas"

    def agree(value, schema):
        if "const" in schema:
            assert value == schema["const"]
        if "enum" in schema:
            assert value in schema["enum"]
        kinds = {
            "object": dict,
            "array": list,
            "string": str,
            "number": int | float,
            "integer": int,
            "null": type(None),
        }
        names = [schema.get("type", [])] if isinstance(schema.get("type"), str) else schema.get("type", [])
        assert not names or any(isinstance(value, kinds[name]) for name in names), (value, schema)
        if isinstance(value, dict):
            known = schema.get("properties", {})
            assert set(schema.get("required", ())) <= value.keys()
            assert schema.get("additionalProperties", True) is not False or value.keys() <= known.keys()
            for key, member in value.items():
                more = schema.get("additionalProperties", {})
                agree(member, known.get(key, more if isinstance(more, dict) else {}))
        for member in value if isinstance(value, list) else ():
            agree(member, schema.get("items", {}))

    for name, task in list(tasks.items())[:4]:
        truth = json.loads((benchmark / "answers" / name / "truth.json").read_text())
        answers = answers_of("attribution patching", {name: task})
        for value, kind in ((task.data, "task"), (truth, "truth"), (answers, "answers")):
            agree(value, json.loads((folder / f"{kind}.schema.json").read_text()))


def test_decoys_cancel_and_parts_add_up(tasks, truths):
    for name in of_disguise(truths, "combined"):
        task, data = tasks[name], truths[name].data
        trace = task.model.run(task.clean)
        decoys = [trace.nodes[head["name"]] for head in data["heads"] if head["role"] == "decoy"]
        assert len(decoys) >= 2
        assert np.abs(sum(decoys)).max() <= 1e-3 * max(np.abs(decoy).max() for decoy in decoys)
        assert any(len(channel["written_by"]) == 2 for channel in data["channels"])


def test_superposed_models_have_fewer_directions_than_channels(benchmark, truths):
    for name in of_disguise(truths, "superposed"):
        basis = load_file(benchmark / "answers" / name / "truth.safetensors")["basis"]
        assert (basis == np.eye(len(basis))).all()
        plain = next(
            each
            for each in of_disguise(truths, "plain")
            if truths[each].data["expression"] == truths[name].data["expression"]
        )
        used = []
        for each in (plain, name):
            tensors = load_file(benchmark / "models" / each / "model.safetensors")
            weights = [
                tensors["model.embed_tokens.weight"],
                *(x for key, x in tensors.items() if "q_proj" in key or "k_proj" in key),
            ]
            weights += [x.T for key, x in tensors.items() if "o_proj" in key]
            used.append(int(np.any([W.any(axis=0) for W in weights], axis=0).sum()))
        assert used[1] < used[0]


@pytest.mark.parametrize("method", METHODS)
def test_methods_find_plain_circuits_and_decoys_deceive_them(benchmark, tasks, truths, method, tmp_path):
    chosen = {name: tasks[name] for each in ("plain", "decoys") for name in of_disguise(truths, each)}
    (tmp_path / "answers.json").write_text(json.dumps(answers_of(method, chosen)))
    name, found = read_answers(tmp_path / "answers.json", tasks)
    assert name == method
    assert found.keys() == chosen.keys()
    scores = {each: score_answer(tasks[each], truths[each], found[each]) for each in chosen}
    for each in of_disguise(truths, "plain"):
        assert scores[each]["edge_f1"] == 1
        assert scores[each]["faithfulness"] > 0.99
    assert min(scores[each]["head_precision"] for each in of_disguise(truths, "decoys")) < 1


def test_true_answers_score_one_and_no_answers_zero(benchmark, tasks, truths, tmp_path):
    answers = {}
    for name, truth in truths.items():
        tensors = load_file(benchmark / "answers" / name / "truth.safetensors")
        variables = {
            channel["id"]: {
                "after_layer": channel["after_layer"],
                "directions": [tensors["directions"][i].tolist()],
                "readers": [tensors["readers"][i].tolist()],
            }
            for i, channel in enumerate(truth.data["channels"])
        }
        edges = [{"from": source, "to": target, "score": 1} for source, target in truth.edges]
        answers[name] = {"edges": edges, "variables": variables}
    path = tmp_path / "answers.json"
    path.write_text(json.dumps({"format": ANSWERS_FORMAT, "answers": answers}))
    whole = groundtruth.score(benchmark, path)["summary"][0]
    assert all(
        whole[name] > 0.999
        for name in ("edge_f1", "head_f1", "average_precision", "faithfulness", "interchange", "overlap")
    )
    path.write_text(json.dumps({"format": ANSWERS_FORMAT, "answers": {}}))
    nothing = groundtruth.score(benchmark, path)["summary"][0]
    assert nothing["edge_f1"] == nothing["faithfulness"] == nothing["interchange"] == 0


def test_public_files_do_not_tell_the_answer(benchmark, tasks, truths):
    for name, task in tasks.items():
        folder, data = benchmark / "models" / name, truths[name].data
        assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors", "task.json"]
        public = (folder / "config.json").read_text() + (folder / "task.json").read_text()
        secrets = (data["expression"], data["level"], data["disguise"], "seed", "attnc.stock", "decoy", "signal.")
        assert not [secret for secret in secrets if f'"{secret}' in public or f"{secret}(" in public]
        with safe_open(folder / "model.safetensors", "numpy") as file:
            assert file.metadata() == {"format": "pt"}
            assert list(file.keys()) == sorted(file.keys())
        if data["disguise"] not in ("rotated", "skewed", "combined"):
            continue
        for layer in task.model.layers:  # no zero, and no short number, shows an axis of the plain basis
            for W in (layer.W_Q, layer.W_K, layer.W_V):
                rows = W.reshape(-1, task.model.width)
                rows = rows[rows.any(axis=1)][:, task.model.query != 0]
                assert (rows != 0).all()
                assert (np.abs(rows) < 0.99 * np.linalg.norm(rows, axis=1, keepdims=True)).all()


def test_heads_that_do_not_matter_look_like_those_that_do(tasks, truths):
    """Neither the lengths of weights nor their ranks separate decoys from the circuit."""
    sizes: dict[str, list[float]] = {"circuit": [], "decoy": []}
    for name in of_disguise(truths, "combined"):
        for head in truths[name].data["heads"]:
            layer, _, number = head["name"][1:].partition("H")
            of = tasks[name].model.layers[int(layer)]
            if head["role"] in sizes:
                lengths = [np.linalg.norm(W[int(number)]) for W in (of.W_O, of.W_V)]
                sizes[head["role"]].append(float(np.prod(lengths)))
                assert np.linalg.matrix_rank(of.W_O[int(number)]) == 1
    assert min(sizes["decoy"]) < max(sizes["circuit"])
    assert max(sizes["decoy"]) > min(sizes["circuit"])


def test_the_same_seed_gives_the_same_bytes(tmp_path):
    contents = []
    for seed in (4, 4, 5):
        folder = tmp_path / f"{len(contents)}"
        groundtruth.make(1, seed, folder, disguises=["combined"])
        contents.append(
            {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        )
    assert contents[0] == contents[1] != contents[2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "x"}, "its format is"),
        ({"answers": {"m9": {}}}, "no model 'm9'"),
        ({"answers": {"NAME": {"edges": [{"from": "x0"}]}}}, "lacks the key 'to'"),
        ({"answers": {"NAME": {"edges": [{"from": "L9H9", "to": "output"}]}}}, "no edge from 'L9H9'"),
        ({"answers": {"NAME": {"edges": [{"from": "x0", "to": "L0H0"}] * 2}}}, "listed twice"),
        ({"answers": {"NAME": {"variables": {"v99": {}}}}}, "no causal variable 'v99'"),
        ({"answers": {"NAME": {"variables": {"v0": {"after_layer": 7, "directions": [[1]]}}}}}, "after_layer"),
        (
            {"answers": {"NAME": {"variables": {"v0": {"after_layer": 0, "directions": [[1]]}}}}},
            "vectors of 64 numbers",
        ),
        ({"answers": {"NAME": {"circuit": []}}}, "key 'circuit'"),
    ],
)
def test_bad_answers_are_refused(tasks, tmp_path, change, message):
    name = next(iter(tasks))
    text = json.dumps({"format": ANSWERS_FORMAT, "answers": {}} | change).replace("NAME", name)
    (tmp_path / "answers.json").write_text(text)
    with pytest.raises((FileError, InputError), match=message):
        read_answers(tmp_path / "answers.json", tasks)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"count": 0}, "count"),
        ({"seed": -1}, "seed"),
        ({"disguises": ["hat"]}, "found hat"),
        ({"disguises": []}, "found none"),
        ({"out": "."}, "exists already"),
        ({"out": "missing/benchmark"}, "does not exist"),
    ],
)
def test_bad_requests_are_refused_before_the_work(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=message):
        groundtruth.make(**{"count": 1, "seed": 0, "out": "new", **arguments})
    assert not list(tmp_path.iterdir())
