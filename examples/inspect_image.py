"""Read a memory image: its program, and the look-up table of a layer.

The reader maps the file and checks it; arrays are views of it, so that an image of any size opens at once.

    python examples/inspect_image.py IMAGE [LAYER]
"""

import argparse
from pathlib import Path

from oasis_cli import open_image
from oasis_cli.formats.image import Image
from oasis_cli.formats.program import RULES, Opcode, Operation


def print_program(program: tuple[Operation, ...], blocks: int) -> None:
    """Operations and their registers: what lies outside of the blocks, and the first `blocks` blocks."""
    for number, op in enumerate(program):
        if op.block < blocks:
            sources = " ".join(f"r{register}" for register in op.sources)
            sizes = f"K={op.K} N={op.N}" if op.K and op.N else f"K={op.K}" if op.K else f"N={op.N}"
            print(f"{number:4} {op.opcode.name:10} {sources:>8} -> r{op.destination:<2} {sizes:16} {op.name}")


def print_lut(image: Image, layer: Operation) -> None:
    """The layer's products of centroids, a row an activation centroid; what one unit stands for is in the program."""
    roles = dict(zip(RULES[layer.opcode].sections, layer.sections, strict=True))
    lut = image.array(image.sections[roles["lut"]]).reshape(1 << layer.act_bits, 1 << layer.weight_bits)
    print(f"\n{layer.name}: LUT in units of {layer.immediate:g}, {lut.dtype}, W{layer.weight_bits}A{layer.act_bits}")
    for row in lut.tolist():
        print(" ".join(f"{entry:7g}" for entry in row))


def main() -> None:
    """Open, check, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("image", type=Path, help="a compiled folder or a model.oimg")
    parser.add_argument("layer", nargs="?", help="name of a quantized layer; the first one if not given")
    parser.add_argument("--blocks", type=int, default=1, help="decoder blocks to print")
    options = parser.parse_args()

    image = open_image(options.image, verify=True)
    program, metadata = image.program(), image.metadata()
    print(f"{metadata.architecture}, {metadata.shape.blocks} blocks, for {metadata.target.name}")
    print(f"{image.file_bytes:,} bytes in {len(image.sections)} sections, {len(program)} operations\n")
    print_program(program, options.blocks)
    layers = {op.name: op for op in program if op.opcode is Opcode.LUT_GEMM}
    name = options.layer or next(iter(layers))
    if name not in layers:
        parser.error(f"{name} is no quantized layer of this image; {next(iter(layers))} is one")
    print_lut(image, layers[name])


if __name__ == "__main__":
    main()
