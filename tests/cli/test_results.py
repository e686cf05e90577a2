"""What commands say: tables of 80 columns, JSON with the names and types promised, and nothing where none is due."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from oasis_cli.version import __version__
from tests.conftest import Chain

ResultOf = Callable[..., dict[str, Any]]
Done = Callable[..., Result]
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
EVAL = ("--seqlen", 64, "--limit", 2)

CALLS = [
    "calibrate", "quantize", "compile", "simulate image", "simulate shape", "simulate functional", "eval model",
    "eval quantized", "eval image", "run", *(f"{name} {kind}" for name in ("inspect", "verify")
    for kind in ("model", "calibration", "quantized", "image")),
]  # fmt: skip


@pytest.fixture
def call(chain: Chain, stages: dict[str, tuple[object, ...]], workspace: Path) -> Callable[[str], tuple[object, ...]]:
    """The arguments of one of CALLS."""

    def arguments(name: str) -> tuple[object, ...]:
        command, _, kind = name.partition(" ")
        if name in stages:
            return (*stages[name], "--out", "out")
        if command == "simulate":
            reference = ("--functional", "--seqlen", 32, "--reference", chain.quantized)
            what = {
                "image": (chain.image,),
                "shape": ("--shape", "llama-2-7b"),
                "functional": (chain.image, *reference),
            }
            return (command, *what[kind], "--decode", 4)
        return (command, getattr(chain, kind), *(EVAL if command == "eval" else ()))

    return arguments


@pytest.mark.parametrize("name", CALLS)
def test_every_command_says_the_same_in_three_ways(
    done: Done, call: Callable[..., Any], workspace: Path, name: str
) -> None:
    """JSON alone on standard output; tables alone; with -q tables too, and no word on standard error."""
    again = {"calibrate": ["--resume"], "quantize": ["--resume"], "compile": ["--overwrite"]}.get(name, [])
    shown = done(*call(name)).stdout
    assert shown.strip()
    assert max(map(len, shown.splitlines())) <= 80
    piped = done(*call(name), *again, "--json", "-").stdout
    quiet = done(*call(name), *again, "-q", "--json", "result.json")
    assert [line.split()[:1] for line in quiet.stdout.splitlines()] == [line.split()[:1] for line in shown.splitlines()]
    assert quiet.stderr == ""
    first, second = json.loads(piped), json.loads((workspace / "result.json").read_text())
    assert list(first)[:3] == ["command", "tool_version", "inputs"]
    assert first["command"] == name.split()[0]
    assert first["tool_version"] == __version__
    assert all(DIGEST.fullmatch(digest) for digest in first["inputs"].values())
    assert without_seconds(first) == without_seconds(second)


def without_seconds(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_seconds(item) for key, item in value.items() if key != "seconds"}
    return value


def test_json_makes_the_folders_that_its_file_lies_in(done: Done, chain: Chain, workspace: Path) -> None:
    shown = done("inspect", chain.calibration, "--json", "new/deep/result.json").stdout
    assert "nats a token" in shown
    assert json.loads((workspace / "new" / "deep" / "result.json").read_text())["kind"] == "calibration"


def test_calibrate_says_what_became_of_what_faiss_missed(done: Done, chain: Chain, workspace: Path) -> None:
    said = " ".join(done("calibrate", chain.model, "--samples", 1, "--seqlen", 32, "--out", "out").stdout.split())
    found = re.search(r"faiss missed the optimum in (\d+) of 64 clusterings(; the exact optimum was used)?", said)
    assert found is not None, said
    assert bool(found[2]) == (found[1] != "0")


def test_calibrate(result_of: ResultOf, chain: Chain, workspace: Path) -> None:
    found = result_of("calibrate", chain.model, "--samples", 3, "--seqlen", 64, "--out", "out")
    manifest = json.loads((workspace / "out" / "calibration.json").read_text())
    assert found["inputs"] == manifest["created_from"]
    assert found["inputs"].keys() == {"model", "data"}
    assert found["tokens"] == 3 * 64
    assert found["sites"] == 4 * 4  # four blocks of q+k+v, o, gate+up, down
    assert found["folder"] == "out"
    assert 0 < found["loss"] < 8
    assert found["kmeans"]["clusterings"] == 4 * found["sites"]  # 1 to 4 bits
    assert found["seconds"] > 0


def test_quantize(result_of: ResultOf, chain: Chain, workspace: Path) -> None:
    args = ("quantize", chain.model, "--calibration", chain.calibration, "--method", "oasis", "--out", "out")
    found = result_of(*args)
    assert found["layers"] == 4 * 7
    config = json.loads((chain.model / "config.json").read_text())
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    weights = 4 * (2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * ffn)
    assert found["bytes"]["before"] == 2 * weights
    assert weights / 2 < found["bytes"]["after"] < 0.6 * weights  # two indices a byte, then scales and codebooks
    assert 0.005 < found["relative_error"] < 0.012  # 16 centroids of a normal distribution: 0.0095 (Lloyd and Max)
    assert result_of(*args, "--resume") | {"seconds": 0} == found | {"seconds": 0}


def test_compile(result_of: ResultOf, chain: Chain, workspace: Path) -> None:
    found = result_of("compile", chain.quantized, "--out", "out")
    assert found["bytes"] == (workspace / "out" / "model.oimg").stat().st_size
    assert found["image"] == "out/model.oimg"
    described = json.loads((workspace / "out" / "image.json").read_text())
    assert found["sections"] == len(described["sections"])
    assert found["operations"] == len(described["program"])
    assert sum(found["section_bytes"].values()) == sum(section["length"] for section in described["sections"])


@pytest.mark.parametrize("kind", ["model", "quantized", "image"])
def test_eval(result_of: ResultOf, chain: Chain, kind: str) -> None:
    found = result_of("eval", getattr(chain, kind), *EVAL, "--ppl", "embedded")
    (entry,) = found["perplexity"]
    types = {
        "data": str,
        "digest": str,
        "value": float,
        "nll_mean": float,
        "stderr": float,
        "tokens": int,
        "windows": int,
        "seqlen": int,
        "bos": bool,
        "protocol": str,
        "window_nll": list,
        "against": type(None),
    }
    assert {name: type(value) for name, value in entry.items()} == types
    assert (entry["tokens"], entry["windows"], entry["seqlen"]) == (2 * 63, 2, 64)
    assert found["inputs"][entry["data"]] == entry["digest"]
    assert found["kind"] == {"model": "model", "quantized": "quantized model", "image": "image"}[kind]


def test_eval_of_one_window_has_no_spread(result_of: ResultOf, chain: Chain) -> None:
    assert result_of("eval", chain.model, "--seqlen", 64, "--limit", 1)["perplexity"][0]["stderr"] is None


def test_eval_against_the_original(result_of: ResultOf, chain: Chain) -> None:
    """KL, agreement and the ratio of perplexities, which two separate evaluations give too."""
    options = ("--seqlen", 64, "--limit", 3)
    found = result_of("eval", chain.quantized, "--against", chain.model, *options)
    alone = [result_of("eval", each, *options)["perplexity"][0] for each in (chain.quantized, chain.model)]
    assert alone[0]["against"] is None
    compared = found["perplexity"][0]["against"]
    assert compared["ratio"] == pytest.approx(alone[0]["value"] / alone[1]["value"])
    assert compared["perplexity"] == pytest.approx(alone[1]["value"])
    assert 0 < compared["kl_mean"] < compared["kl_max"]
    assert 0.02 < compared["top1_agreement"] < 1
    assert found["against"]["kl_mean"] == pytest.approx(compared["kl_mean"])
    assert found["inputs"]["against"] != found["inputs"]["model"]


def test_eval_of_several_texts(result_of: ResultOf, chain: Chain, workspace: Path) -> None:
    (workspace / "a.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 20)
    (workspace / "b.jsonl").write_text('{"text": "once upon a time"}\n' * 40)
    found = result_of("eval", chain.model, "--ppl", "a.txt", "--ppl", "b.jsonl", "--seqlen", 64, "--limit", 1)
    assert [entry["data"] for entry in found["perplexity"]] == ["a.txt", "b.jsonl"]
    assert found["inputs"].keys() == {"model", "a.txt", "b.jsonl"}


def check_simulation(found: dict[str, Any], blocks: int) -> None:
    for entry in found["operations"]:
        for name in ("M", "K", "N", "cycles", "main_cycles", "outlier_cycles", "repeat"):
            assert type(entry[name]) is int, name
        assert type(entry["name"]) is str
        assert entry["repeat"] == blocks
        assert entry["bytes"]
        assert all(type(count) is int for count in entry["bytes"].values())
        assert entry["energy_pj"]
        assert all(type(energy) is float for energy in entry["energy_pj"].values())
        assert entry["cycles"] >= entry["main_cycles"] > 0
    totals = found["totals"]
    assert type(totals["cycles"]) is int
    for name in ("seconds", "first_token_s"):
        assert type(totals[name]) is float
    assert totals["energy_pj"]
    assert all(type(energy) is float for energy in totals["energy_pj"].values())
    assert totals["seconds"] == pytest.approx(totals["cycles"] / (found["clock_mhz"] * 1e6))


def names(found: dict[str, Any]) -> list[str]:
    return [entry["name"].rpartition(".")[2] for entry in found["operations"]]


LLAMA = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def test_simulate_an_image(result_of: ResultOf, chain: Chain) -> None:
    found = result_of("simulate", chain.image, "--decode", 8)
    check_simulation(found, blocks=4)
    assert names(found) == LLAMA
    totals = found["totals"]
    assert totals["tokens_per_s"] == pytest.approx(8 / totals["seconds"])
    assert 0 < totals["first_token_s"] < totals["seconds"]


def test_simulate_generates_as_many_tokens_as_the_positions_leave_but_2048_at_most(
    result_of: ResultOf, chain: Chain
) -> None:
    """The toy has 512 positions, LLaMA-2-7B 4096."""
    for args, decode in (
        ((chain.image,), 512),
        ((chain.image, "--prefill", 500), 12),
        ((chain.image, "--prefill", 512), 0),
        (("--shape", "llama-2-7b"), 2048),
        (("--shape", "llama-2-7b", "--prefill", 4000), 96),
    ):
        assert result_of("simulate", *args)["decode"] == decode


def test_simulate_without_a_decode(result_of: ResultOf, chain: Chain) -> None:
    found = result_of("simulate", chain.image, "--prefill", 16, "--decode", 0)
    check_simulation(found, blocks=4)
    assert found["totals"]["tokens_per_s"] is None
    assert {entry["M"] for entry in found["operations"]} == {16}


def test_simulate_with_a_prompt_and_a_batch(result_of: ResultOf, chain: Chain) -> None:
    found = result_of("simulate", chain.image, "--prefill", 16, "--decode", 8, "--batch", 4)
    check_simulation(found, blocks=4)
    assert [(entry["phase"], entry["M"]) for entry in found["operations"]] == 7 * [("decode", 4)] + 7 * [
        ("prefill", 64)
    ]


def test_an_image_is_timed_as_the_shape_of_its_model(result_of: ResultOf, chain: Chain, workspace: Path) -> None:
    config = json.loads((chain.model / "config.json").read_text())
    sizes = {
        "name": "llama",
        "hidden": config["hidden_size"],
        "intermediate": config["intermediate_size"],
        "blocks": config["num_hidden_layers"],
        "heads": config["num_attention_heads"],
        "kv_heads": config["num_key_value_heads"],
        "head_dim": config["hidden_size"] // config["num_attention_heads"],
        "vocab": config["vocab_size"],
        "tied": config["tie_word_embeddings"],
        "max_positions": config["max_position_embeddings"],
    }
    (workspace / "toy.yaml").write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in sizes.items()))
    by_shape = result_of("simulate", "--shape", "toy.yaml", "--decode", 8)
    by_image = result_of("simulate", chain.image, "--decode", 8)
    assert by_shape["totals"] == by_image["totals"]


def shipped(folder: str) -> list[str]:
    import oasis_cli

    found = sorted(path.stem for path in (Path(oasis_cli.__file__).parent / "hardware" / folder).glob("*.yaml"))
    assert found, f"no YAML file in hardware/{folder}"
    return found


@pytest.mark.parametrize("shape", shipped("shapes"))
def test_simulate_every_shipped_shape(result_of: ResultOf, shape: str) -> None:
    import yaml

    import oasis_cli

    sizes = yaml.safe_load((Path(oasis_cli.__file__).parent / "hardware" / "shapes" / f"{shape}.yaml").read_text())
    found = result_of("simulate", "--shape", shape, "--decode", 16, "--prefill", 16)
    check_simulation(found, blocks=sizes["blocks"])
    assert found["model"] == shape
    assert len(names(found)) == 2 * len({*names(found)}) == 2 * (7 if sizes.get("glu", True) else 6)
    assert {"q_proj", "k_proj", "v_proj"} < {*names(found)}


@pytest.mark.parametrize("target", shipped("targets"))
def test_simulate_on_every_shipped_target(result_of: ResultOf, chain: Chain, target: str) -> None:
    assert result_of("simulate", chain.image, "--decode", 4, "--target", target)["target"] == target


def test_functional_simulation_agrees_with_torch_to_the_bit(result_of: ResultOf, chain: Chain) -> None:
    args = ("simulate", chain.image, "--decode", 4, "--functional", "--seqlen", 48, "--limit", 2)
    found = {
        engine: result_of(*args, "--engine", engine, "--reference", chain.quantized)["functional"]
        for engine in ("counted", "gathered")
    }
    for result in found.values():
        agreement = result["agreement"]
        assert agreement["layers"] == 2 * 28
        assert (agreement["index_flips"], agreement["outlier_flips"], agreement["layer_error"]) == (0, 0, 0)
        assert agreement["logits_error"] < 1e-5
        assert agreement["kl_mean"] < 1e-9
        assert result["perplexity"][0]["value"] == pytest.approx(agreement["perplexity"], rel=1e-6)
    assert found["counted"]["perplexity"] == found["gathered"]["perplexity"]
    alone = result_of(*args)["functional"]
    assert alone == found["counted"] | {"agreement": None}


@pytest.mark.parametrize("kind", ["model", "calibration", "quantized", "image"])
def test_inspect(result_of: ResultOf, done: Done, chain: Chain, kind: str) -> None:
    path = getattr(chain, kind)
    found = result_of("inspect", path)
    assert found["kind"] == ("quantized model" if kind == "quantized" else kind)
    telling = {"model": "config", "calibration": "sites", "quantized": "layers", "image": "sections"}
    assert found["details"][telling[kind]]
    said = done("inspect", path).stdout
    in_words = {
        "model": ["llama", "decoder blocks", "hidden size"],
        "calibration": ["centroids", "0.self_attn.q+k+v ", "loss"],
        "quantized": ["W4A4", "SNR", "down_proj"],
        "image": ["oasis-28nm", "program", "offset (B)", " 3.self_attn.q+k+v.act_codebook "],
    }
    for words in in_words[kind]:
        assert words in said


def test_inspect_what_transformers_saved_anew(
    result_of: ResultOf, done: Done, refused: Callable[..., str], chain: Chain, workspace: Path
) -> None:
    """It has no report: what config.json tells is shown, and what is missing is said."""
    import oasis_cli

    oasis_cli.load(chain.quantized).save_pretrained(workspace / "again")
    found = result_of("inspect", "again")
    layers = result_of("inspect", chain.quantized)["details"]["layers"]
    assert found["kind"] == "quantized model"
    assert found["details"]["layers"].keys() == layers.keys()
    said = " ".join(done("inspect", "again").stdout.split())
    assert "0.mlp.down_proj 128 x 344 W4A4" in said
    assert "quantization_report.json is not there (save_pretrained leaves it out)" in said
    assert "lacks quantization_report.json" in refused("verify", "again", status=1)


@pytest.mark.parametrize("kind", ["model", "calibration", "quantized", "image"])
def test_inspect_breaks_no_word(done: Done, chain: Chain, kind: str) -> None:
    """A line that begins in the middle of a name or digest has neither a first nor a last cell."""
    lines = done("inspect", getattr(chain, kind)).stdout.splitlines()
    assert max(map(len, lines)) <= 80
    table = next((n for n, line in enumerate(lines) if "───" in line), None)
    if table is not None:
        rows = lines[table + 1 : lines.index(next(line for line in lines[table + 1 :] if not line.strip()))]
        assert all(row.split()[-1][-1].isdigit() or row.split()[-1].endswith("%") for row in rows)
    assert all(len(digest) == len("sha256:") + 13 for digest in re.findall(r"sha256:\S*?…", "\n".join(lines)))
    assert not re.search(r"sha256:[0-9a-f]+(?!…|[0-9a-f])", "\n".join(lines))


@pytest.mark.parametrize(
    ("count", "said"), [(60, "60 B"), (1000, "1.0 KB"), (20_224, "20.2 KB"), (99_999, "100.0 KB"), (524_288, "0.5 MB")]
)
def test_sizes_for_people(count: int, said: str) -> None:
    from oasis_cli.cli.render import byte_size

    assert byte_size(count) == said


@pytest.mark.parametrize(
    ("picojoules", "said"), [(12, "12 pJ"), (890_302, "890.30 nJ"), (2.31e6, "2.31 uJ"), (4.94e9, "4.94 mJ")]
)
def test_energies_for_people(picojoules: float, said: str) -> None:
    from oasis_cli.cli.simulation_tables import energy

    assert energy(picojoules) == said


@pytest.mark.parametrize("kind", ["model", "calibration", "quantized", "image"])
def test_verify(result_of: ResultOf, chain: Chain, kind: str) -> None:
    found = result_of("verify", getattr(chain, kind))
    assert found["path"] == str(getattr(chain, kind))
    assert found["checked"]
    assert found["kind"] == ("quantized model" if kind == "quantized" else kind)
