"""The five stages as library calls, on the toy model that ships with the package: seconds, and no network.

python examples/quantize_in_python.py                              # the toy, in a temporary folder
python examples/quantize_in_python.py --model ./SmolLM2 --out run  # a model of yours; its artifacts stay
"""

import argparse
import tempfile
from pathlib import Path

import oasis_cli as oasis
from oasis_cli.tiny import tiny_model_folder

PROMPT = "The statement"
TOKENS = 256


def take_through_the_chain(model: str | Path, out: Path) -> None:
    """Calibrate, quantize, compile, simulate and evaluate `model`; every stage leaves its folder below `out`."""
    checkpoint = oasis.open_checkpoint(model)

    calibration = oasis.calibrate(
        checkpoint, out / "calibration", oasis.CalibrationSettings(samples=8, seqlen=TOKENS, outlier_fraction=0.005)
    )
    print(f"calibrated {calibration.sites} sites on {calibration.tokens:,} tokens of {calibration.data}")

    quantized = oasis.quantize(
        checkpoint, out / "quantized", calibration.folder, oasis.QuantizationSettings(weight_bits=4, act_bits=4)
    )
    print(
        f"quantized {quantized.layers} layers: {quantized.bytes_before / 1e6:.2f} MB at 16 bits are now "
        f"{quantized.bytes_after / 1e6:.2f} MB, {quantized.relative_error:.2%} squared error"
    )

    image = oasis.compile_model(quantized.folder, out / "image", "oasis-28nm")
    print(f"compiled {image.operations} operations, {image.file_bytes / 1e6:.2f} MB")

    report, _ = oasis.simulate_image(image.out, oasis.SimulationSettings(decode=TOKENS))
    print(f"simulated: {report.tokens_per_s:,.0f} tokens/s on {report.target}")

    text = oasis.EvaluationSettings(seqlen=TOKENS, limit=4)
    for name, place in {"original": model, "quantized": quantized.folder, "image": image.out}.items():
        (found,) = oasis.evaluate(place, text).perplexities
        print(f"perplexity of the {name}: {found.value:.3f}")


def generate(quantized: Path) -> None:
    """Continue a prompt, as with any model of transformers."""
    tokenizer = oasis.open_checkpoint(quantized).load_tokenizer()
    model = oasis.load(quantized)
    prompt = tokenizer(PROMPT, return_tensors="pt")
    tokens = model.generate(**prompt, max_new_tokens=24, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    print(f"\n{tokenizer.decode(tokens[0], skip_special_tokens=True)}")


def main() -> None:
    """Run the chain, then let the quantized model speak."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=tiny_model_folder(), help="folder, GGUF file or hub id")
    parser.add_argument("--out", type=Path, help="where the artifacts stay; without it they are thrown away")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        out = options.out or Path(temporary)
        take_through_the_chain(options.model, out)
        generate(out / "quantized")


if __name__ == "__main__":
    main()
