"""Train the toy model that ships with the package (oasis_cli/tiny): the only way it is made.

A small LLaMA with its own byte-level BPE, trained on the calibration part of the embedded text alone; the evaluation
part stays unseen. Two threads need about five minutes. The same machine and versions give the same bytes.

    python examples/train_tiny_model.py                                  # writes oasis_cli/tiny
    python examples/train_tiny_model.py --out tiny --held-out 0.1   # how --steps was chosen

It also makes small models of another family, on texts of your own, to compare methods on:

    python examples/train_tiny_model.py --family qwen2 --hidden 192 --mlp 576 --blocks 5 --vocabulary 2048 \
        --text wiki.valid.raw --text c4_docs.jsonl --steps 800 --out small-qwen2
"""

import argparse
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional as F
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

import oasis_cli
from oasis_cli.data.embedded import embedded_text
from oasis_cli.data.source import TextSource
from oasis_cli.data.text import load_text

END = "<|endoftext|>"
NAMES = {"llama": "LLaMA", "mistral": "Mistral", "qwen2": "Qwen2"}
CONTEXT = 256
BATCH = 16
PEAK_RATE = 3e-3
# A share of the inputs is replaced at random: with so little text the model would learn it by heart.
NOISE = 0.1

README = """# A toy model

Made by `examples/train_tiny_model.py` and by nothing else: a {family} of {parameters:,} parameters ({layers} blocks,
hidden {hidden}, {heads} heads, {kv_heads} key/value heads, vocabulary {vocabulary}, float32), trained for {steps}
steps of {batch} windows of {context} tokens on {texts}, whose digest was

    {digest}

It lets every command run without network and in seconds. Its figures are a toy's: they say whether the chain works
and nothing about large language models or about a quantization method. Never quote them.
{licence}"""
EMBEDDED = """the calibration part of the embedded text (the English topics that
CPython carries in `pydoc_data.topics`)"""
LICENCE = """
The text it was trained on is the Python documentation, © Python Software Foundation, under the PSF License
Version 2.
"""


@dataclass(frozen=True)
class Sizes:
    """What is built: the family's model_type, and its sizes."""

    family: str
    hidden: int
    mlp: int
    blocks: int
    heads: int
    kv_heads: int
    vocabulary: int


def train_tokenizer(source: TextSource, vocabulary: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE of the source's documents; any text can be written with it, and nothing is added to a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(source.documents, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END,
        eos_token=END,
        pad_token=END,
        model_max_length=2 * CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def build_model(tokenizer: PreTrainedTokenizerFast, sizes: Sizes) -> PreTrainedModel:
    """An untrained model in the proportions of its large relatives."""
    config = CONFIG_MAPPING[sizes.family](
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.mlp,
        num_hidden_layers=sizes.blocks,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        max_position_embeddings=2 * CONTEXT,
        tie_word_embeddings=True,
        attention_dropout=0.1,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
        dtype="float32",
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


def batches(stream: Tensor, steps: int, vocabulary: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """Windows at random places of the stream: noisy inputs and clean targets, both int64 [BATCH, CONTEXT]."""
    for _ in range(steps):
        starts = torch.randint(len(stream) - CONTEXT, (BATCH, 1), generator=generator)
        windows = stream[starts + torch.arange(CONTEXT + 1)]
        inputs, targets = windows[:, :-1], windows[:, 1:]
        noisy = torch.rand(inputs.shape, generator=generator) < NOISE
        yield torch.where(noisy, torch.randint(vocabulary, inputs.shape, generator=generator), inputs), targets


def loss_of(model: PreTrainedModel, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of the targets."""
    return F.cross_entropy(model(inputs).logits.flatten(0, 1), targets.flatten())


def learning_rate(step: int, steps: int) -> float:
    """Up in a straight line over a twentieth of the steps, then down along a cosine to nothing."""
    warm = steps // 20
    if step < warm:
        return PEAK_RATE * (step + 1) / warm
    return PEAK_RATE * 0.5 * (1 + math.cos(math.pi * (step - warm) / (steps - warm)))


def train(model: PreTrainedModel, stream: Tensor, held_out: Tensor, steps: int, seed: int) -> None:
    """AdamW over `steps` batches; prints the loss, and that of the held-out tokens where there are any."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.3}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98))
    model.train()
    started = time.monotonic()
    drawn = batches(stream, steps, model.config.vocab_size, torch.Generator().manual_seed(seed))
    for step, (inputs, targets) in enumerate(drawn):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        loss = loss_of(model, inputs, targets)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 49 or step == steps - 1:
            note = f", held-out perplexity {held_out_perplexity(model, held_out):.2f}" if len(held_out) else ""
            seconds = time.monotonic() - started
            print(f"step {step + 1}/{steps}: loss {loss.item():.3f}{note} ({seconds:.0f} s)", flush=True)


def held_out_perplexity(model: PreTrainedModel, held_out: Tensor) -> float:
    """Perplexity on windows that lie side by side in the held-out tokens."""
    windows = held_out[: len(held_out) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    model.eval()
    with torch.no_grad():
        loss = loss_of(model, windows[:, :-1], windows[:, 1:])
    model.train()
    return loss.exp().item()


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, source: TextSource, steps: int, out: Path) -> None:
    """Write the Hugging Face folder and the page that says what it is."""
    model.eval()
    config = model.config
    config.attention_dropout = 0.0  # whoever computes gradients with it wants the model as it is
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)  # written for its owner alone, which a wheel would keep
    embedded = source.name == embedded_text("calibration").name
    page = README.format(
        family=NAMES[config.model_type],
        texts=EMBEDDED if embedded else source.name,
        licence=LICENCE if embedded else "",
        parameters=sum(p.numel() for p in model.parameters()),
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        vocabulary=config.vocab_size,
        steps=steps,
        batch=BATCH,
        context=CONTEXT,
        digest=source.digest,
    )
    (out / "README.md").write_text(page, encoding="utf-8")


def joined(texts: list[str]) -> TextSource:
    """Several texts as one, called by their files' names."""
    sources = [load_text(text, "calibration") for text in texts]
    documents = tuple(document for source in sources for document in source.documents)
    return TextSource(" and ".join(Path(text).name for text in texts), documents)


def main() -> None:
    """Train and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(oasis_cli.__file__).parent / "tiny")
    parser.add_argument("--family", choices=NAMES, default="llama")
    for name, default in (
        ("hidden", 128),
        ("mlp", 344),
        ("blocks", 4),
        ("heads", 4),
        ("kv-heads", 2),
        ("vocabulary", 1024),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--text", action="append", help="a text of your own, repeatable; default: the embedded text")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--held-out", type=float, default=0.0, help="share of the tokens kept for a look at the loss")
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(options.seed)
    source = embedded_text("calibration") if options.text is None else joined(options.text)
    tokenizer = train_tokenizer(source, options.vocabulary)
    stream = torch.tensor(tokenizer(END.join(source.documents) + END, verbose=False)["input_ids"])
    cut = round(len(stream) * (1 - options.held_out))
    sizes = (options.hidden, options.mlp, options.blocks, options.heads, options.kv_heads, options.vocabulary)
    model = build_model(tokenizer, Sizes(options.family, *sizes))
    print(f"{len(stream):,} tokens, {sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    train(model, stream[:cut], stream[cut:], options.steps, options.seed)
    save(model, tokenizer, source, options.steps, options.out)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
